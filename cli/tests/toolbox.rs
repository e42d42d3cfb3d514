//! What the program says about itself: help, completion, man pages, definitions.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, too, may fail loudly

use assert_cmd::Command;
use std::path::Path;

fn stdout(args: &[&str]) -> String {
    let output = Command::cargo_bin("gpu-migrate").unwrap().args(args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn every_shell_gets_a_script_that_knows_the_commands() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = stdout(&["completion", shell]);
        assert!(script.contains("plan") && script.contains("gpu-migrate"), "{shell}");
    }
}

#[test]
fn the_bash_script_is_one() {
    let script = stdout(&["completion", "bash"]);
    match std::process::Command::new("bash").args(["-n", "-c", &script]).output() {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => eprintln!("skipped: no bash here: {error}"),
    }
}

#[test]
fn there_is_a_man_page_for_every_command() {
    let folder = tempfile::tempdir().unwrap();
    stdout(&["man", folder.path().join("man1").to_str().unwrap()]);
    let page = |name: &str| std::fs::read_to_string(folder.path().join("man1").join(name)).unwrap();
    assert!(page("gpu-migrate.1").contains("Exit status"));
    assert!(page("gpu-migrate-plan.1").contains("kubectl kustomize"));
    for name in ["gpu-migrate-crds.1", "gpu-migrate-completion.1", "gpu-migrate-man.1"] {
        assert!(!page(name).is_empty());
    }
}

#[test]
fn the_definitions_are_three_and_parse() {
    let text = stdout(&["crds"]);
    let all: Vec<serde_json::Value> = serde_saphyr::from_multiple(&text).unwrap();
    let names = all.iter().map(|crd| crd["metadata"]["name"].as_str().unwrap()).collect::<Vec<_>>();
    assert_eq!(
        names,
        ["gpuconfigs.gpu-migrate.io", "gpumigrations.gpu-migrate.io", "gpushadows.gpu-migrate.io"]
    );
}

/// Linked as `kubectl-gpu_migrate`, it is a kubectl plugin and speaks of itself so.
#[cfg(unix)]
#[test]
fn as_a_kubectl_plugin_the_help_says_kubectl() {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("kubectl-gpu_migrate");
    std::os::unix::fs::symlink(assert_cmd::cargo::cargo_bin("gpu-migrate"), &link).unwrap();
    let help = |program: &Path| {
        let output = std::process::Command::new(program).args(["plan", "--help"]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(help(&link).contains("Usage: kubectl gpu-migrate plan"), "{}", help(&link));
    assert!(help(&assert_cmd::cargo::cargo_bin("gpu-migrate")).contains("Usage: gpu-migrate plan"));
}
