//! Makes the README's picture: runs `gpu-migrate demo` in a terminal and writes what it showed, as an animated SVG.
//!
//! `cargo run --release -p gpu-migrate-cli --features demo --example recording -- docs/demo.svg [PROGRAM]`: the program is built first
//! where none is given.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // it shares code with tests, which may fail loudly

#[allow(dead_code)] // tests use the other parts
#[path = "../tests/terminal/mod.rs"]
mod terminal;

#[path = "../tests/terminal/svg.rs"]
mod svg;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use svg::Frame;
use terminal::Terminal;

const WINDOW: (u16, u16) = (100, 30);
const SAMPLE: Duration = Duration::from_millis(400);
/// No screen is shown longer, however long it was, but the last.
const LONGEST: Duration = Duration::from_millis(2400);
const END: Duration = Duration::from_secs(8);
/// A page with a larger picture is slow to load.
const LARGEST: usize = 150_000;

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let file = arguments.next().context("usage: recording FILE [PROGRAM]")?;
    let program = arguments.next().map_or_else(built, Ok)?;
    let frames = record(&program);
    ensure!(
        frames.last().is_some_and(|frame| frame.screen.contents().contains("violations of I1")),
        "the demo did not come to its end: {}",
        frames.last().map(|frame| frame.screen.contents()).unwrap_or_default()
    );
    let picture = svg::animation("gpu-migrate demo", &frames);
    ensure!(picture.len() <= LARGEST, "{} bytes are more than {LARGEST}", picture.len());
    std::fs::write(&file, &picture).with_context(|| file.display().to_string())?;
    println!("{}: {} screens, {} bytes", file.display(), frames.len(), picture.len());
    Ok(())
}

/// The program with its demo, as this example is built.
fn built() -> anyhow::Result<PathBuf> {
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "-p", "gpu-migrate-cli", "--features", "demo", "--bin", "gpu-migrate"]);
    if !cfg!(debug_assertions) {
        build.arg("--release");
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    ensure!(build.current_dir(root).status()?.success(), "gpu-migrate could not be built");
    let own = std::env::current_exe()?;
    let folder = own.parent().and_then(Path::parent).context("an example is in a folder of its own")?;
    Ok(folder.join("gpu-migrate"))
}

/// The screens that differ, each with its time.
fn record(program: &Path) -> Vec<Frame> {
    let mut terminal = Terminal::start(program, WINDOW, &["demo"], &[]);
    let mut frames: Vec<Frame> = Vec::new();
    loop {
        let goes_on = terminal.look_on(SAMPLE);
        let screen = terminal.screen().clone();
        let same = |frame: &&mut Frame| frame.screen.contents_formatted() == screen.contents_formatted();
        match frames.last_mut().filter(same) {
            Some(frame) => frame.lasts = (frame.lasts + SAMPLE).min(LONGEST),
            None if screen.contents().trim().is_empty() => {}
            None => frames.push(Frame { screen, lasts: SAMPLE }),
        }
        if !goes_on {
            break;
        }
    }
    if let Some(last) = frames.last_mut() {
        last.lasts = END;
    }
    frames
}
