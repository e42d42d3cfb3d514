//! The frame of a server as a process: exit status, signals, a task that panics. The test starts itself again as that process.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, ChildStderr, Command, ExitCode, Stdio};
use std::time::Duration;

use gpu_migrate_runtime::{LogFormat, Tasks, main, main_with_background};
use tokio_util::sync::CancellationToken;

const ROLE: &str = "GPU_MIGRATE_TEST_ROLE";

/// Serves until `shutdown` and takes as long as `role` says to end.
async fn program(role: String, mut tasks: Tasks) -> anyhow::Result<()> {
    let stop = tasks.stop();
    let server = stop.clone();
    let hangs = role == "hangs";
    tasks.spawn("server", async move {
        server.cancelled().await;
        eprintln!("draining");
        if hangs {
            std::future::pending::<()>().await;
        }
    });
    if role == "panics" {
        tasks.spawn_background("watch of Pods", async { panic!("index out of bounds") });
    }
    eprintln!("started");
    Ok(tasks.run(Duration::from_secs(60)).await?)
}

/// Not a test: what the others start.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let with_stop = |stop: CancellationToken| program(role.clone(), Tasks::new(stop));
    let code = if role == "background panics" {
        main_with_background(LogFormat::Text, async |stop, background| {
            program("panics".into(), Tasks::with_background(stop, background)).await
        })
    } else {
        main(LogFormat::Text, with_stop)
    };
    std::process::exit(i32::from(code != ExitCode::SUCCESS));
}

fn start(role: &str) -> (Child, BufReader<ChildStderr>) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture"]).env(ROLE, role);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let log = BufReader::new(child.stderr.take().unwrap());
    (child, log)
}

fn read_until(log: &mut BufReader<ChildStderr>, text: &str) {
    let mut line = String::new();
    while !line.contains(text) {
        line.clear();
        assert!(log.read_line(&mut line).unwrap() > 0, "ended before {text:?}");
    }
}

fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
}

#[test]
fn a_task_that_panics_ends_the_process_with_an_error_that_names_it() {
    for role in ["panics", "background panics"] {
        let (mut child, mut log) = start(role);
        let mut text = String::new();
        log.read_to_string(&mut text).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(1), "{text}");
        let error = "error: background task panicked: watch of Pods: index out of bounds\n";
        assert_eq!(text.matches(error).count(), 1, "{text}");
    }
}

#[test]
fn the_first_signal_drains() {
    for name in ["-TERM", "-INT", "-HUP"] {
        let (mut child, mut log) = start("serves");
        read_until(&mut log, "started");
        signal(&child, name);
        read_until(&mut log, "draining");
        assert_eq!(child.wait().unwrap().code(), Some(0), "{name}");
    }
}

#[test]
fn the_second_signal_aborts() {
    let (mut child, mut log) = start("hangs");
    read_until(&mut log, "started");
    signal(&child, "-TERM");
    read_until(&mut log, "draining");
    signal(&child, "-TERM");
    assert_eq!(child.wait().unwrap().code(), Some(130));
}
