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

/// What a shell offers for a line, where that shell is here.
fn offered(shell: &str, flags: &[&str], commands: &str) -> Option<String> {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("_gpu-migrate");
    std::fs::write(&script, stdout(&["completion", shell])).unwrap();
    let mut process = std::process::Command::new(shell);
    match process
        .args(flags)
        .args(["-c", commands])
        .env("SCRIPT", &script)
        .env("HOME", folder.path())
        .output()
    {
        Ok(output) => Some(
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr),
        ),
        Err(error) => {
            gpu_migrate_tests::skipped(&format!("{shell}: {error}"));
            None
        }
    }
}

#[test]
fn completion_goes_on_behind_the_subcommand() {
    let bash = |words: &str| {
        let commands = format!(
            "source \"$SCRIPT\"; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _gpu__migrate gpu-migrate \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD-1]}}\"; echo \"${{COMPREPLY[@]}}\""
        );
        offered("bash", &["--norc"], &commands)
    };
    for (words, expected) in [
        ("gpu-migrate ro", "rollout"),
        ("gpu-migrate rollout ''", "undo"),
        ("gpu-migrate rollout --n", "--now"),
        ("gpu-migrate quota translate --ap", "--apply"),
        ("gpu-migrate cordon-card --un", "--undo"),
        ("gpu-migrate completion ''", "fish"),
    ] {
        if let Some(offered) = bash(words) {
            assert!(offered.split_whitespace().any(|word| word == expected), "{words}: {offered}");
        }
    }
    if let Some(offered) =
        offered("fish", &["--no-config"], "source $SCRIPT; complete -C 'gpu-migrate rollout --n'")
    {
        assert!(offered.contains("--now"), "{offered}");
    }
    if let Some(errors) = offered("zsh", &["-f", "-n"], "source $SCRIPT") {
        assert_eq!(errors, "");
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
