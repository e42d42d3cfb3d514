//! The README's picture, and how a terminal becomes one.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "terminal/svg.rs"]
mod svg;

use std::num::NonZero;
use std::time::Duration;

use svg::{Frame, animation};

fn frame(written: &str) -> Frame {
    let [rows, columns] = [2, 20].map(|size| NonZero::new(size).unwrap());
    let mut parser = vt100::Parser::new(rows, columns, 0);
    parser.process(written.as_bytes());
    Frame { screen: parser.screen().clone(), lasts: Duration::from_secs(1) }
}

#[test]
fn screens_become_a_picture() {
    let first = frame("a <b>  \x1b[36m██\x1b[32m▓▓▒\x1b[0m");
    let second = frame("a <b>  \x1b[36m██\x1b[32m▓▓▒\x1b[0m\r\n┌──┐\x1b[1;31mno");
    let picture = animation("demo", &[first, second]);
    for part in [
        "<text x=\"0\" y=\"13\" textLength=\"40\">a &lt;b&gt;</text>",
        "<rect x=\"56\" y=\"2\" width=\"16\" height=\"13\" class=\"c6\"/>",
        "<rect x=\"72\" y=\"2\" width=\"16\" height=\"13\" class=\"c2\" opacity=\".80\"/>",
        "<rect x=\"88\" y=\"2\" width=\"8\" height=\"13\" class=\"c2\" opacity=\".45\"/>",
        "class=\"c1 b\" textLength=\"16\">no</text>",
        "0.00%{transform:translateY(-0px)}50.00%{transform:translateY(-34px)}",
        // Without motion: the end.
        "<g class=\"p\" transform=\"translate(0,-34)\">",
        "$ demo</text>",
    ] {
        assert!(picture.contains(part), "{part}\n{picture}");
    }
    assert_eq!(picture.matches("a &lt;b&gt;").count(), 1, "a line of several screens is written once");
    assert_eq!(picture.matches("<use ").count(), 3);
}

#[test]
fn the_picture_of_the_readme_is_small_and_shows_no_path() {
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/demo.svg");
    let picture = std::fs::read_to_string(file).unwrap();
    assert!(picture.len() <= 150_000, "{} bytes", picture.len());
    assert!(picture.contains("violations of I1"));
    for path in ["/tmp", "/root", "/home", "/Users", "/work"] {
        assert!(!picture.contains(path), "{path} is in the picture");
    }
}
