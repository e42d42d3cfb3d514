//! What the documents tell people to type is really run by some test, and what they tell people to write is valid.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, too, may fail loudly

use clap::Parser as _;
use gpu_migrate_cli::args::Cli;
use gpu_migrate_model::crd::{GPUConfig, GPUMigration, read_strict};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn documents() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    ["README.md", "deploy/README.md", "deploy/RUNBOOK.md", "deploy/nvidia/README.md", "docs/first-hour.md"]
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

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Who runs it, and the command.
fn ledger() -> Vec<(String, String)> {
    let text = std::fs::read_to_string(root().join("tests/cluster/commands.tsv")).unwrap();
    text.lines()
        .map(|line| line.split_once('\t').expect("who runs it, a tab, the command"))
        .map(|(who, command)| (who.to_owned(), command.to_owned()))
        .collect()
}

/// The lines of the `sh` blocks, without comments.
fn commands() -> BTreeSet<String> {
    let text = documents().into_iter().map(|path| std::fs::read_to_string(path).unwrap());
    let lines = text.flat_map(|text| blocks(&text, "sh")).flat_map(|block| {
        block
            .lines()
            .map(|line| line.split(" #").next().unwrap_or_default().trim().to_owned())
            .collect::<Vec<_>>()
    });
    lines.filter(|line| !line.is_empty()).collect()
}

/// `tests/cluster/commands.tsv` names every command of the documents and no other. Whoever stands there beside it runs it: a
/// scenario on the real cluster, which fails if it leaves one out; `.ci/run`; or the test below.
#[test]
fn every_command_in_the_documents_is_run_by_a_test() {
    let listed: BTreeSet<String> = ledger().into_iter().map(|(_, command)| command).collect();
    assert_eq!(
        commands().difference(&listed).collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "no test runs these"
    );
    assert_eq!(
        listed.difference(&commands()).collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "no document has these"
    );
    for (who, command) in ledger() {
        match who.split_once("::") {
            Some((module, scenario)) => {
                let file = root().join(format!("tests/cluster/tests/scenarios/{module}.rs"));
                let text = std::fs::read_to_string(&file).unwrap();
                assert!(text.contains(&format!("fn {scenario}(")), "{who} is no scenario");
                assert!(
                    text.contains(&format!("Runbook::open(cluster, \"{who}\")")),
                    "{who} opens no runbook"
                );
            }
            None if who == ".ci/run" => {
                let ci = std::fs::read_to_string(root().join(".ci/run")).unwrap();
                assert!(ci.contains(&command), ".ci/run does not run {command}");
            }
            None => assert_eq!(who, "documents", "{command}"),
        }
    }
}

/// Those that need no cluster, with this very program in place of `cargo run --release`.
#[test]
fn commands_without_a_cluster_end_well() {
    let mut count = 0;
    for (_, command) in ledger().into_iter().filter(|(who, _)| who == "documents") {
        let arguments = command.strip_prefix("cargo run --release -- ").expect("a command of this program");
        let mut program = assert_cmd::Command::cargo_bin("gpu-migrate").unwrap();
        program.current_dir(root()).args(arguments.split_whitespace()).assert().success();
        count += 1;
    }
    assert!(count > 0);
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
