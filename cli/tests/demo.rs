//! The commands of this program on the cluster of `demo --keep`, and its end by Ctrl-C.

#![cfg(feature = "demo")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, too, may fail loudly

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};

const STORY: &str = include_str!("story.yaml");

struct Demo {
    process: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    _folder: tempfile::TempDir,
}

impl Demo {
    fn start(story: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("story.yaml");
        std::fs::write(&script, story).unwrap();
        let mut process = Command::new(assert_cmd::cargo::cargo_bin("gpu-migrate"))
            .args(["demo", "--fast", "--keep", "--script"])
            .arg(&script)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        Self { process, lines, _folder: folder }
    }

    /// Reads on until a line that contains this.
    fn until(&mut self, part: &str) -> String {
        let mut seen = Vec::new();
        for line in self.lines.by_ref() {
            let line = line.unwrap();
            if line.contains(part) {
                return line;
            }
            seen.push(line);
        }
        panic!("{part} was never said: {seen:#?}")
    }

    /// Ctrl-C. How it ended, and what it said on stderr.
    fn interrupt(mut self) -> (Option<i32>, String) {
        let sent = Command::new("kill").args(["-INT", &self.process.id().to_string()]).status().unwrap();
        assert!(sent.success());
        self.until("Stopped. Nothing of it is left on this machine.");
        let mut errors = String::new();
        self.process.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        (self.process.wait().unwrap().code(), errors)
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn every_command_works_on_the_cluster_of_the_demo() {
    let mut demo = Demo::start(STORY);
    let kubeconfig = demo.until("export KUBECONFIG=").split_once('=').unwrap().1.to_owned();
    demo.until("stays up until Ctrl-C");
    let run = |arguments: &str| {
        let output = Command::new(assert_cmd::cargo::cargo_bin("gpu-migrate"))
            .args(arguments.split(' '))
            .env("KUBECONFIG", &kubeconfig)
            .output()
            .unwrap();
        let text =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        (output.status.code().unwrap(), text)
    };
    for (arguments, code, part) in [
        ("status", 0, "Complete"),
        ("status node-a --holders", 0, "team/web"),
        ("top --once", 0, "team/web"),
        // The node agent may still hold the card of the pod that was replaced.
        ("verify", 0, "checked 1 node, 2 cards"),
        ("preflight", 0, "webhook: registered"),
        ("plan -o summary", 0, "Deployment team/web"),
        ("quota translate", 0, "no ResourceQuota in an opted-in namespace"),
        ("rollout undo team --dry-run", 0, "1 shared pod requested 1 whole card before; free: "),
        (
            "cordon-card node-a 1 --dry-run",
            0,
            "cordoned cards: 1; running containers stay (dry run: nothing was changed)",
        ),
        ("cordon-card node-a 0 --dry-run -o name", 0, "node/node-a\n"),
        ("cordon-card node-a 0 --dry-run", 0, "cordoned cards: 0; "),
        ("uninstall --dry-run", 3, "1 shared pod left"),
        ("uninstall --dry-run --force", 0, "(dry run)"),
    ] {
        let (ended, text) = run(arguments);
        assert!(
            ended == code && text.contains(part),
            "{arguments}: {ended}, expected {code} and {part:?}\n{text}"
        );
        assert!(!text.contains("ApiError") && !text.contains("Status {"), "{arguments}: {text}");
    }
    // Names for the shell, as the script of `completion bash` asks for them.
    for (line, name) in [
        ("rollout undo t", "team"),
        ("status n", "node-a"),
        ("cordon-card n", "node-a"),
        ("quota translate -n te", "team"),
    ] {
        let words = ["--", "gpu-migrate"].into_iter().chain(line.split(' ')).collect::<Vec<_>>();
        let output = Command::new(assert_cmd::cargo::cargo_bin("gpu-migrate"))
            .args(&words)
            .env("KUBECONFIG", &kubeconfig)
            .env("GPU_MIGRATE_COMPLETE", "bash")
            .env("_CLAP_COMPLETE_INDEX", (words.len() - 2).to_string())
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), name, "{line}");
    }
    let folder = tempfile::tempdir().unwrap();
    let recording = folder.path().join("use.jsonl");
    let (ended, text) = run(&format!("top --once --record {}", recording.display()));
    assert!(ended == 0 && text.contains("team/web") && recording.exists(), "{ended}: {text}");
    let (ended, text) = run("rollout undo nobody");
    assert_eq!(ended, 1);
    assert!(text.starts_with("error: GPUMigration nobody: ") && text.contains("(API server http"), "{text}");
    assert_eq!(demo.interrupt(), (Some(0), String::new()));
}

/// What an owner tries first with kubectl.
#[test]
fn kubectl_works_on_the_cluster_of_the_demo() {
    if Command::new("kubectl").args(["version", "--client"]).output().is_err() {
        gpu_migrate_tests::skipped("there is no kubectl on the PATH");
        return;
    }
    let mut demo = Demo::start(STORY);
    let kubeconfig = demo.until("export KUBECONFIG=").split_once('=').unwrap().1.to_owned();
    demo.until("stays up until Ctrl-C");
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("policy.yaml");
    std::fs::write(
        &policy,
        "apiVersion: gpu-migrate.io/v1alpha1\nkind: GPUMigration\nmetadata: {name: other}\nspec: {project: other, mode: Sometimes}\n",
    )
    .unwrap();
    let refused = format!("apply -f {}", policy.display());
    // Arguments, success, what is said.
    for (arguments, good, part) in [
        ("get pods,deploy,rs,nodes,gpushadows,gpumigrations -A", true, "gpushadow.gpu-migrate.io/node-a"),
        ("get events -A", true, "gpumigration/team"),
        ("events -A", true, "GPUMigration/team"),
        ("describe gpumigration team", true, "gpu-migrate-operator"),
        ("describe node node-a", true, "tencent.com/vcuda-memory"),
        ("describe pod -n team", true, "gpu-migrate.io/policy: team@1"),
        ("describe deployment web -n team", true, "1 desired | 1 updated | 1 total | 1 available"),
        ("describe namespace team", true, "gpu-migrate.io/opt-in=true"),
        (
            &refused,
            false,
            "spec.mode: Unsupported value: \"Sometimes\": supported values: \"Off\", \"Audit\", \"Enforce\"",
        ),
        ("create namespace ops", true, "namespace/ops created"),
        ("scale deployment web -n team --replicas=2", true, "deployment.apps/web scaled"),
        ("rollout status deployment web -n team --timeout=60s", true, "successfully rolled out"),
        (
            "wait --for=jsonpath={.status.readyReplicas}=2 deployment/web -n team --timeout=60s",
            true,
            "condition met",
        ),
        ("scale deployment web -n team --replicas=1", true, "deployment.apps/web scaled"),
        (
            "wait --for=jsonpath={.status.replicas}=1 deployment/web -n team --timeout=60s",
            true,
            "condition met",
        ),
        ("rollout restart deployment web -n team", true, "deployment.apps/web restarted"),
        ("rollout status deployment web -n team --timeout=60s", true, "successfully rolled out"),
        ("rollout history deployment web -n team", true, "\n3 "),
        ("rollout undo deployment web -n team", true, "deployment.apps/web rolled back"),
        ("rollout status deployment web -n team --timeout=60s", true, "successfully rolled out"),
        // The template of before is the one of before, and the second revision has become the fourth.
        (
            "rollout history deployment web -n team",
            true,
            "\n1         <none>\n3         <none>\n4         <none>",
        ),
        ("rollout pause deployment web -n team", true, "deployment.apps/web paused"),
        ("rollout resume deployment web -n team", true, "deployment.apps/web resumed"),
        ("wait --for=condition=Available deployment/web -n team --timeout=60s", true, "condition met"),
        ("logs deployment/web -n team", false, "simulated containers print nothing"),
        ("drain node-a --force", false, "does not read the kind DeleteOptions in protobuf"),
    ] {
        let output = Command::new("kubectl")
            .args(["--cache-dir", folder.path().to_str().unwrap()])
            .args(arguments.split(' '))
            .env("KUBECONFIG", &kubeconfig)
            .output()
            .unwrap();
        let text =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() == good && text.contains(part),
            "kubectl {arguments}: expected {part:?}\n{text}"
        );
    }
    assert_eq!(demo.interrupt(), (Some(0), String::new()));
}

#[test]
fn ctrl_c_in_the_middle_is_no_error() {
    let mut demo =
        Demo::start(&(STORY.to_owned() + "  - say: now\n  - phase: {migration: team, is: Failed}\n"));
    demo.until("now");
    assert_eq!(demo.interrupt(), (Some(0), String::new()));
}
