//! The first hour of a new user, typed into terminals of two sizes, with the program as it is built. The screens are compared with those in
//! `snapshots/`; what differs from run to run (ports, times) is replaced before.

#![cfg(feature = "demo")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, too, may fail loudly

use std::path::PathBuf;
use std::time::Instant;

use terminal::{PATIENCE, Window};

#[allow(dead_code)] // its `main` writes to stdout
#[path = "../../replay/examples/dump.rs"]
mod made;

#[allow(dead_code)] // the recording of the demo uses the other parts
mod terminal;

/// The program as it is built, in a terminal.
fn start(window: Window, arguments: &[&str], settings: &[(&str, &str)]) -> terminal::Terminal {
    terminal::Terminal::start(&assert_cmd::cargo::cargo_bin("gpu-migrate"), window, arguments, settings)
}

/// Compares a screen with the one of the last time.
fn compare(name: &str, (columns, rows): Window, screen: &str) {
    assert!(screen.lines().count() <= usize::from(rows));
    insta::with_settings!({filters => vec![
        (r"127\.0\.0\.1:\d+", "127.0.0.1:PORT"),
        (r"/tmp/[^ ]+", "/tmp/FOLDER"),
        (r"-[0-9a-f]{5,10}-[0-9a-z]{5}\b", "-POD"),
    ], omit_expression => true, prepend_module_to_snapshot => false}, {
        insta::assert_snapshot!(format!("first_hour__{columns}x{rows}__{name}"), screen);
    });
}

fn run(window: Window, arguments: &[&str], settings: &[(&str, &str)]) -> (String, i32) {
    start(window, arguments, settings).end()
}

/// Looks at the status again and again until it is so.
fn until_status(cluster: &[(&str, &str)], is_so: impl Fn(&str) -> bool) {
    let until = Instant::now() + PATIENCE;
    loop {
        let (screen, _) = run((200, 50), &["status"], cluster);
        if is_so(&screen) {
            return;
        }
        assert!(Instant::now() < until, "{screen}");
    }
}

fn first_hour(window: Window) {
    let folder = tempfile::tempdir().unwrap();

    // Without a cluster.
    let (screen, code) = run(window, &["plan", "-f", "examples/"], &[]);
    assert_eq!(code, 0, "{screen}");
    compare("plan", window, &screen);
    let (screen, code) = run(window, &["plan", "-f", "cli/tests/other-systems", "-o", "summary"], &[]);
    assert_eq!(code, 3, "{screen}");
    compare("plan_of_other_systems", window, &screen);
    let dump = folder.path().join("cluster.json");
    made::write(40, 400, &mut std::fs::File::create(&dump).unwrap()).unwrap();
    let dump = dump.to_str().unwrap();
    let (screen, code) = run(window, &["simulate", "--snapshot", dump, "--cores", "50,25"], &[]);
    assert_eq!(code, 0, "{screen}");
    compare("simulate", window, &screen);

    // On the cluster of the demo.
    let story = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/story.yaml");
    let story = ["demo", "--fast", "--keep", "--script", story.to_str().unwrap()];
    let mut demo = start(window, &story, &[]);
    demo.until("stays up until Ctrl-C");
    demo.until("goes back to whole cards");
    let screen = demo.text();
    for part in ["violations of I1 (a card for one kind)", "export KUBECONFIG=", "gpu-migrate rollout undo"] {
        assert!(screen.contains(part), "{part}: {screen}");
    }
    let line = screen.lines().find_map(|line| line.split_once("export KUBECONFIG=")).unwrap();
    let cluster = [("KUBECONFIG", line.1)];
    let (screen, code) = run(window, &["preflight"], &cluster);
    assert!([0, 3].contains(&code), "{screen}");
    assert!(screen.ends_with("\ngo") || screen.ends_with("\nno-go"), "{screen}");
    // The node agent holds the card of the pod that was replaced for as long as it is not sure of its end.
    until_status(&cluster, |screen| screen.contains("node-a  1/2   ·  50"));
    let (screen, code) = run(window, &["status"], &cluster);
    assert_eq!(code, 0, "{screen}");
    compare("status", window, &screen);

    // The screens that are drawn again: what keys do, and the end by q.
    let mut top = start(window, &["top"], &cluster);
    top.until("team/web-");
    top.write("p");
    top.until("PROJECT");
    top.write("p/zz\r");
    top.until("/ filter (zz)");
    assert!(!top.text().contains("team/web-"), "{}", top.text());
    top.write("/\x1b");
    top.until("team/web-");
    top.write("q");
    let (screen, code) = top.end();
    assert_eq!(code, 0, "{screen}");
    let mut watch = start(window, &["status", "--watch"], &cluster);
    watch.until("all waves are complete");
    assert!(watch.text().starts_with("every 2s: q quit"), "{}", watch.text());
    watch.write("\x1b[B");
    watch.write("q");
    let (screen, code) = watch.end();
    assert_eq!(code, 0, "{screen}");

    // The way back: asked first, then done.
    let mut undo = start(window, &["rollout", "undo", "team"], &cluster);
    undo.until("[y/N]");
    undo.write("n\r");
    let (screen, code) = undo.end();
    assert_eq!(code, 3, "{screen}");
    assert!(screen.ends_with("nothing was changed"), "{screen}");
    let mut undo = start(window, &["rollout", "undo", "team"], &cluster);
    undo.until("[y/N]");
    undo.write("y\r");
    let (screen, code) = undo.end();
    assert_eq!(code, 0, "{screen}");
    compare("undo", window, &screen);
    until_status(&cluster, |screen| {
        let node = screen.lines().find(|line| line.starts_with("node-a")).unwrap_or_default();
        let mut cards = node.split_whitespace().skip(2).collect::<Vec<_>>();
        cards.sort_unstable();
        cards == ["L", "·"] && screen.contains("every workload uses whole cards again")
    });
    let (screen, _) = run(window, &["status", "node-a", "--holders"], &cluster);
    assert!(screen.contains("the card") && screen.contains("team/web-"), "{screen}");
    let mut uninstall = start(window, &["uninstall"], &cluster);
    uninstall.until("[y/N]");
    uninstall.write("n\r");
    let (screen, code) = uninstall.end();
    assert_eq!(code, 3, "{screen}");
    compare("uninstall", window, &screen);
    let (screen, code) = run(window, &["uninstall", "--yes"], &cluster);
    assert_eq!(code, 0, "{screen}");
    demo.write("\x03");
    demo.until("Nothing of it is left on this machine.");
    let (screen, code) = demo.end();
    assert_eq!(code, 0, "{screen}");
}

#[test]
fn in_a_terminal_of_80_by_24() {
    first_hour((80, 24));
}

#[test]
fn in_a_terminal_of_200_by_50() {
    first_hour((200, 50));
}
