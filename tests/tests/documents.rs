//! The documents say what is there: links lead somewhere, the README names every room, and stays one page.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_path_buf).unwrap_or_default()
}

/// All Markdown files that belong to the project.
fn documents(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        let name = entry.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if entry.is_dir() {
            if !name.starts_with('.') && name != "target" {
                documents(&entry, found);
            }
        } else if Path::new(name).extension().is_some_and(|extension| extension == "md") {
            found.push(entry);
        }
    }
}

/// The targets of `[text](target)` and `![text](target)`, outside fenced blocks.
fn links(text: &str) -> Vec<String> {
    let prose = text.split("```").step_by(2);
    prose
        .flat_map(|part| part.split("](").skip(1))
        .filter_map(|rest| rest.split_once(')').map(|(target, _)| target.to_owned()))
        .collect()
}

#[test]
fn every_link_leads_somewhere() {
    let mut files = Vec::new();
    documents(&root(), &mut files);
    assert!(files.iter().any(|file| file.ends_with("README.md")));
    let mut dead = Vec::new();
    for file in &files {
        for link in links(&fs::read_to_string(file).unwrap()) {
            let target = link.split('#').next().unwrap_or_default();
            if !target.is_empty() && !target.contains("://") && !file.with_file_name(target).exists() {
                dead.push(format!("{}: {link}", file.display()));
            }
        }
    }
    assert_eq!(dead, Vec::<String>::new());
}

#[test]
fn the_readme_names_every_room_and_both_commands() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let members = manifest.split_once("members = [").and_then(|(_, rest)| rest.split_once(']')).unwrap().0;
    for member in
        members.split(',').map(|member| member.trim().trim_matches('"')).filter(|member| *member != "tests")
    {
        assert!(readme.contains(&format!("`{member}/`")), "README.md does not name {member}/");
        assert!(root().join(member).join("Cargo.toml").exists(), "{member}/Cargo.toml is missing");
    }
    assert!(readme.contains("cargo run --release -- plan -f examples/"));
    assert!(readme.contains("cargo test --workspace"));
    assert!(readme.lines().count() <= 80, "README.md is longer than a page");
    let ci = fs::read_to_string(root().join(".ci/run")).unwrap();
    assert!(ci.contains("cargo test --workspace"), ".ci/run does not call the README's test command");
}
