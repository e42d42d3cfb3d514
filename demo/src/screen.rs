//! Output of the demo: a terminal whose lower part is the map and is redrawn, or plain lines.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use super::map::{self, MapNode};
use super::observer::Observer;

const REDRAW: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub(super) struct Screen {
    terminal: bool,
    began: Instant,
    drawn: usize,
    last: Option<Instant>,
    last_line: String,
    nodes: Vec<MapNode>,
    observer: Observer,
}

impl Screen {
    pub(super) fn new(nodes: Vec<MapNode>, observer: Observer) -> Self {
        let terminal = std::io::stdout().is_terminal();
        Self {
            terminal,
            began: Instant::now(),
            drawn: 0,
            last: None,
            last_line: String::new(),
            nodes,
            observer,
        }
    }

    /// Says something, above the map.
    pub(super) fn say(&mut self, text: &str) {
        self.erase();
        let seconds = self.began.elapsed().as_secs_f32();
        // A reader that has gone away is no reason to stop the story: its end state is what counts.
        let mut line = format!("[{seconds:5.1} s] {text}");
        if self.terminal {
            line = wrapped(&line, width(), "          ");
        }
        let _ = writeln!(anstream::stdout(), "{line}");
        self.last = None;
        self.show();
    }

    /// Shows how the cards are, if it is time to, or (in plain lines) if they are otherwise.
    pub(super) fn show(&mut self) {
        if self.last.is_some_and(|last| last.elapsed() < REDRAW) {
            return;
        }
        self.last = Some(Instant::now());
        let cards = self.observer.cards();
        let mut out = anstream::stdout().lock();
        if self.terminal {
            let text = map::painted(&(map::render(&self.nodes, &cards) + map::LEGEND + "\n"), width());
            let up = if self.drawn > 0 { format!("\x1b[{}A\x1b[J", self.drawn) } else { String::new() };
            self.drawn = text.lines().count() + 1;
            let _ = write!(out, "{up}\n{text}");
            let _ = out.flush();
        } else {
            let line = map::line(&self.nodes, &cards);
            if line != self.last_line {
                if self.last_line.is_empty() {
                    let _ = writeln!(out, "            {}", map::LINE_LEGEND);
                }
                let _ = writeln!(out, "[{:5.1} s]   {line}", self.began.elapsed().as_secs_f32());
                self.last_line = line;
            }
        }
    }

    fn erase(&mut self) {
        if self.drawn > 0 {
            let _ = write!(anstream::stdout(), "\x1b[{}A\x1b[J", self.drawn);
            self.drawn = 0;
        }
    }
}

/// Columns of the terminal.
fn width() -> usize {
    terminal_size::terminal_size().map_or(80, |(width, _)| usize::from(width.0))
}

/// The text in lines of at most so many columns, broken between words, all but the first indented.
fn wrapped(text: &str, width: usize, indent: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split_inclusive(' ') {
        let used = lines.last().map_or(0, |line| line.chars().count());
        let needed = word.trim_end().chars().count();
        if used + needed > width && used > indent.len() {
            lines.push(indent.to_owned());
        }
        if let Some(line) = lines.last_mut() {
            line.push_str(word);
        }
    }
    lines.iter().map(|line| line.trim_end()).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_break_between_words() {
        for (text, expected) in [
            ("[  0.1 s] short", "[  0.1 s] short"),
            ("[  0.1 s] two words here", "[  0.1 s] two words\n          here"),
            ("[  0.1 s]   indented as it was", "[  0.1 s]   indented\n          as it was"),
            ("[  0.1 s] averyveryverylongword a", "[  0.1 s] averyveryverylongword\n          a"),
        ] {
            assert_eq!(wrapped(text, 20, "          "), expected);
        }
    }
}
