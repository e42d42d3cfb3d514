//! The documents say what is there: links lead somewhere, the README names every room, and stays one page; translations have the
//! headings and commands of their originals.
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

/// The levels of the headings and, of each fenced block, its language and what a machine reads: comments and the texts of pictures,
/// which have no language, may be translated.
fn structure(text: &str) -> (Vec<usize>, Vec<(String, Vec<String>)>) {
    let (mut headings, mut blocks) = (Vec::new(), Vec::new());
    for (index, part) in text.split("```").enumerate() {
        if index % 2 == 0 {
            let levels = part.lines().map(|line| line.chars().take_while(|char| *char == '#').count());
            headings.extend(levels.filter(|level| *level > 0));
        } else {
            let (language, body) = part.split_once('\n').unwrap();
            let lines = body.lines().map(|line| line.split(" #").next().unwrap_or_default().trim_end());
            let lines = lines.filter(|_| !language.is_empty()).map(str::to_owned).collect();
            blocks.push((language.to_owned(), lines));
        }
    }
    (headings, blocks)
}

#[test]
fn translations_have_the_headings_and_commands_of_their_originals() {
    let mut files = Vec::new();
    documents(&root(), &mut files);
    let name = |file: &Path| file.file_name().unwrap().to_str().unwrap().to_owned();
    let translations = files.iter().filter(|file| name(file).ends_with(".zh-CN.md")).collect::<Vec<_>>();
    for expected in ["README.zh-CN.md", "deploy/RUNBOOK.zh-CN.md", "docs/first-hour.zh-CN.md"] {
        assert!(translations.contains(&&root().join(expected)), "{expected} is missing");
    }
    for file in translations {
        let original = file.with_file_name(name(file).replace(".zh-CN.md", ".md"));
        let read = |path: &Path| fs::read_to_string(path).unwrap();
        let (text, text_of_original) = (read(file), read(&original));
        assert_eq!(structure(&text), structure(&text_of_original), "{}", file.display());
        for (from, to) in [(&text, &original), (&text_of_original, file)] {
            let first = from.lines().next().unwrap_or_default();
            assert!(first.contains(&format!("({})", name(to))), "no link to {} in: {first}", to.display());
        }
    }
}
