//! The Dockerfile is not built by tests; what it names must be there all the same.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, too, may fail loudly

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const DOCKERFILE: &str = "deploy/docker/Dockerfile";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn text(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The instructions of a Dockerfile, continued lines joined, each with its first word.
fn instructions(file: &str) -> Vec<(String, String)> {
    let joined =
        text(file).lines().filter(|line| !line.trim_start().starts_with('#')).collect::<Vec<_>>().join("\n");
    let lines = joined.replace("\\\n", " ");
    let known = ["FROM", "ARG", "RUN", "COPY", "WORKDIR", "USER", "ENTRYPOINT"];
    let instruction = |line: &str| {
        let (word, rest) = line.split_once(' ').unwrap_or_else(|| panic!("{file}: {line}"));
        assert!(known.contains(&word), "{file}: {word} is no instruction that this test knows");
        (word.to_owned(), rest.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    lines.lines().filter(|line| !line.trim().is_empty()).map(instruction).collect()
}

fn programs() -> BTreeSet<String> {
    let manifest: Vec<String> = ["webhook", "admission-ext", "plugin-bridge", "operator", "cli"]
        .iter()
        .map(|folder| text(&format!("{folder}/Cargo.toml")))
        .collect();
    let bins = manifest.iter().flat_map(|text| text.split("[[bin]]").skip(1));
    bins.map(|bin| bin.split('"').nth(1).unwrap().to_owned()).collect()
}

/// Images that the chart names, without registry and tag.
fn images() -> BTreeSet<String> {
    let rendered = ["webhook", "extender", "operator", "templates"]
        .map(|part| text(&format!("deploy/base/{part}.yaml")))
        .join("\n");
    let lines = rendered.lines().filter_map(|line| line.trim().strip_prefix("image: "));
    let ours = lines.filter_map(|image| image.strip_prefix("ghcr.io/gpu-migrate/"));
    // And that of the hooks, which are no part of the base.
    ours.chain(["gpu-migrate"]).map(|image| image.split(':').next().unwrap().to_owned()).collect()
}

#[test]
fn every_image_of_the_chart_has_a_program_that_the_dockerfile_builds() {
    let dockerfile = text(DOCKERFILE);
    assert!(dockerfile.contains("--bin \"${PROGRAM}\""), "it builds by program");
    let built = images();
    assert_eq!(built.len(), 5, "{built:?}");
    for image in &built {
        assert!(programs().contains(image), "{image}: no such program");
        assert!(
            dockerfile.contains(&format!("-t ghcr.io/gpu-migrate/{image}:")),
            "{image}: no command is named for it"
        );
    }
}

#[test]
fn stages_files_and_tools_are_there() {
    let file = DOCKERFILE;
    let instructions = instructions(file);
    let stages = instructions.iter().filter(|(word, _)| word == "FROM");
    let names = stages.clone().filter_map(|(_, rest)| rest.split(" AS ").nth(1)).collect::<Vec<_>>();
    assert!(
        stages.clone().all(|(_, rest)| rest.split(' ').next().unwrap().contains([':', '/'])),
        "{file}: an image without a tag"
    );
    let mut made = Vec::new();
    for (word, rest) in &instructions {
        match word.as_str() {
            "RUN" if rest.contains("cargo build") => {
                let words = rest.split_whitespace().collect::<Vec<_>>();
                let after = |flag: &str| {
                    words.iter().position(|w| *w == flag).map(|at| words[at + 1].trim_matches('"'))
                };
                let profile = after("--profile").unwrap();
                assert!(text("Cargo.toml").contains(&format!("[profile.{profile}]")), "{file}: {profile}");
                let bin = after("--bin").unwrap();
                let known = bin == "${PROGRAM}" || programs().contains(bin);
                assert!(known, "{file}: {bin}");
                let copied = rest.split("&& cp ").nth(1).unwrap().split_whitespace().collect::<Vec<_>>();
                assert_eq!(copied[0].trim_matches('"'), format!("target/{profile}/{bin}"), "{file}");
                made.push(copied[1]);
            }
            "COPY" if rest.starts_with("--from=") => {
                let words = rest.split(' ').collect::<Vec<_>>();
                assert!(names.contains(&words[0].trim_start_matches("--from=")), "{file}: {rest}");
                assert!(made.contains(&words[1]), "{file}: {} is not made", words[1]);
            }
            "COPY" => assert_eq!(rest, ". .", "{file}: the context is the repository"),
            "ENTRYPOINT" => assert_eq!(rest, "[\"/program\"]", "{file}"),
            _ => {}
        }
    }
    let ignored = text(&format!("{file}.dockerignore"));
    assert!(["target", ".git"].iter().all(|folder| ignored.lines().any(|line| line == *folder)), "{file}");
    // The compiler is new enough.
    let rust = instructions
        .iter()
        .find_map(|(_, rest)| rest.split("rust:1.").nth(1)?.split('-').next()?.parse::<u32>().ok());
    let wanted = text("Cargo.toml")
        .split("rust-version = \"1.")
        .nth(1)
        .and_then(|rest| rest.split('"').next()?.parse::<u32>().ok());
    assert!(
        rust.unwrap() >= wanted.unwrap(),
        "{file}: Rust 1.{} and the workspace wants 1.{}",
        rust.unwrap(),
        wanted.unwrap()
    );
}
