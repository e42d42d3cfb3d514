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
fn every_shell_gets_a_script_that_asks_this_program() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = stdout(&["completion", shell]);
        assert!(script.contains("GPU_MIGRATE_COMPLETE") && script.contains("gpu-migrate"), "{shell}");
    }
}

/// What a shell says to `commands`, with the script in `$SCRIPT`; `None` where the shell is not here.
fn in_shell(shell: &str, flags: &[&str], commands: &str, kubeconfig: &str) -> Option<String> {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("_gpu-migrate");
    let name = if shell == "pwsh" { "powershell" } else { shell };
    std::fs::write(&script, stdout(&["completion", name])).unwrap();
    let config = folder.path().join("config");
    std::fs::write(&config, kubeconfig).unwrap();
    let program = assert_cmd::cargo::cargo_bin("gpu-migrate");
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let paths = std::iter::once(program.parent().unwrap().to_owned()).chain(std::env::split_paths(&paths));
    let mut process = Command::new(shell);
    process.timeout(std::time::Duration::from_secs(60)).env("TERM", "xterm");
    process.args(flags).args(["-c", commands]).env("PATH", std::env::join_paths(paths).unwrap());
    process.env("SCRIPT", &script).env("HOME", folder.path()).env("KUBECONFIG", &config);
    match process.env_remove("GPU_MIGRATE_KUBECONFIG").output() {
        Ok(output) => Some(
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr),
        ),
        Err(error) => {
            gpu_migrate_tests::skipped(&format!("{shell}: {error}"));
            None
        }
    }
}

/// What a shell offers for a line that ends where the cursor is.
fn offered(shell: &str, line: &str, kubeconfig: &str) -> Option<Vec<String>> {
    let (flags, commands): (&[&str], _) = match shell {
        "bash" => {
            let words = if line.ends_with(' ') { format!("{line}''") } else { line.to_owned() };
            let commands = format!(
                "source \"$SCRIPT\"; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
                 _clap_complete_gpu_migrate gpu-migrate \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD-1]}}\"; printf '%s\\n' \"${{COMPREPLY[@]}}\""
            );
            (&["--norc"], commands)
        }
        "fish" => (&["--no-config"], format!("source $SCRIPT; complete -C '{line}'")),
        "pwsh" => (
            &["-NoProfile", "-NonInteractive"],
            format!(
                "Get-Content -Raw $env:SCRIPT | Invoke-Expression; (TabExpansion2 -inputScript '{line}' -cursorColumn {}).CompletionMatches.CompletionText",
                line.len()
            ),
        ),
        // Its completion needs a line editor: a second zsh, that is typed to. Behind a list the cursor goes up again; a bell is no list.
        "zsh" => (
            &["-f"],
            format!(
                "zmodload zsh/zpty; zpty z zsh -f -i; zpty -w z 'autoload -Uz compinit; compinit -u; source $SCRIPT; LISTMAX=1000; bindkey \"^I\" list-choices; PS1=; echo rea\"\"dy'; \
                 zpty -r -m z text '*ready*'; zpty -n -w z $'{line}\\t'; zpty -r -m z text $'*(\\x1b\\\\[(|[0-9]|[0-9][0-9])A|\\x07)*'; print -r -- $text"
            ),
        ),
        other => panic!("{other}"),
    };
    let said = in_shell(shell, flags, &commands, kubeconfig)?;
    // fish and zsh add what a word means, and zsh moves the cursor.
    let said = anstream::adapter::strip_str(&said).to_string();
    Some(said.split_whitespace().map(str::to_owned).collect())
}

const TWO_CONTEXTS: &str = "{apiVersion: v1, kind: Config, contexts: [{name: lab, context: {cluster: c, user: u}}, {name: production, context: {cluster: c, user: u}}]}";

#[test]
fn completion_goes_on_behind_the_subcommand() {
    for shell in ["bash", "zsh", "fish", "pwsh"] {
        for (line, expected) in [
            ("gpu-migrate ro", "rollout"),
            ("gpu-migrate rollout ", "undo"),
            ("gpu-migrate rollout --n", "--now"),
            ("gpu-migrate quota translate --ap", "--apply"),
            ("gpu-migrate cordon-card --un", "--undo"),
            ("gpu-migrate completion ", "fish"),
            ("gpu-migrate status --context ", "production"),
        ] {
            let Some(offered) = offered(shell, line, TWO_CONTEXTS) else { break };
            assert!(offered.iter().any(|word| word == expected), "{shell}: {line}: {offered:?}");
        }
    }
}

/// A server that takes connections and says nothing: the shell is not kept waiting, and nothing is offered.
#[test]
fn a_cluster_that_does_not_answer_offers_no_names() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let config = format!(
        "{{apiVersion: v1, kind: Config, current-context: c, contexts: [{{name: c, context: {{cluster: c, user: u}}}}], \
         clusters: [{{name: c, cluster: {{server: 'http://{}'}}}}], users: [{{name: u, user: {{}}}}]}}",
        silent.local_addr().unwrap()
    );
    let offered = offered("bash", "gpu-migrate cordon-card nod", &config);
    assert!(offered.is_none_or(|words| words.is_empty()));
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
