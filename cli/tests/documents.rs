//! What the documents tell people to type is what the program takes, and what they tell people to write is valid.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, too, may fail loudly

use clap::Parser as _;
use gpu_migrate_cli::args::Cli;
use gpu_migrate_model::crd::{GPUConfig, GPUMigration, read_strict};
use std::path::{Path, PathBuf};

fn documents() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    ["README.md", "deploy/README.md", "deploy/RUNBOOK.md", "deploy/nvidia/README.md"]
        .iter()
        .map(|name| root.join(name))
        .filter(|path| path.exists())
        .collect()
}

/// The fenced blocks of a language.
fn blocks(text: &str, language: &str) -> Vec<String> {
    let mut parts = text.split("\n```");
    parts.next();
    parts
        .step_by(2)
        .filter_map(|block| block.strip_prefix(&format!("{language}\n")))
        .map(str::to_owned)
        .collect()
}

#[test]
fn every_command_in_the_documents_is_one() {
    let mut count = 0;
    for path in documents() {
        let text = std::fs::read_to_string(&path).unwrap();
        for line in blocks(&text, "sh").iter().flat_map(|block| block.lines()) {
            for part in line.split('|').map(str::trim) {
                let part = part.split(" #").next().unwrap_or_default();
                let part = part.split(" > ").next().unwrap_or_default();
                let Some(arguments) = part
                    .strip_prefix("gpu-migrate ")
                    .or_else(|| part.strip_prefix("cargo run --release -- "))
                else {
                    continue;
                };
                let words = std::iter::once("gpu-migrate").chain(arguments.split_whitespace());
                if let Err(error) = Cli::try_parse_from(words) {
                    panic!("{}: {line}\n{error}", path.display());
                }
                count += 1;
            }
        }
    }
    assert!(count >= 12, "only {count} commands found: are the fences still there?");
}

#[test]
fn every_file_the_commands_name_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for path in documents() {
        let text = std::fs::read_to_string(&path).unwrap();
        for word in blocks(&text, "sh").iter().flat_map(|block| block.split_whitespace()) {
            if ["deploy/", "examples/"].iter().any(|folder| word.starts_with(folder)) {
                assert!(root.join(word).exists(), "{}: {word} is not there", path.display());
            }
        }
    }
}

#[test]
fn every_policy_in_the_documents_is_valid() {
    let mut count = 0;
    for path in documents() {
        let text = std::fs::read_to_string(&path).unwrap();
        for block in blocks(&text, "yaml") {
            for object in serde_saphyr::from_multiple::<serde_json::Value>(&block).unwrap() {
                let read = match object["kind"].as_str() {
                    Some("GPUMigration") => read_strict::<GPUMigration>(&object).map(drop),
                    Some("GPUConfig") => read_strict::<GPUConfig>(&object).map(drop),
                    _ => continue,
                };
                read.unwrap_or_else(|error| panic!("{}: {error}\n{block}", path.display()));
                count += 1;
            }
        }
    }
    assert!(count >= 2, "only {count} policies found");
}
