//! Colours, and when there are any.

use anstyle::{AnsiColor, Color, Style};
pub use gpu_migrate_model::text::counted;
use gpu_migrate_model::units::{Blocks, MIB_PER_BLOCK};

/// What is new.
pub const ADDED: Style = fg(AnsiColor::Green);
/// What goes away, and what is wrong.
pub const REMOVED: Style = fg(AnsiColor::Red);
/// What to look at.
pub const WARNING: Style = fg(AnsiColor::Yellow);
/// Where in a text we are.
pub const PLACE: Style = fg(AnsiColor::Cyan);
/// A headline.
pub const HEAD: Style = Style::new().bold();
/// What may be passed over.
pub const FAINT: Style = Style::new().dimmed();

const fn fg(color: AnsiColor) -> Style {
    Style::new().fg_color(Some(Color::Ansi(color)))
}

/// When to colour. `Auto`: on a terminal, unless `NO_COLOR` is set; `CLICOLOR_FORCE` colours anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum ColorWhen {
    /// On a terminal, unless `NO_COLOR` is set.
    #[default]
    Auto,
    /// Also into files and pipes.
    Always,
    /// Never.
    Never,
}

impl ColorWhen {
    /// Makes the choice hold for all that this process writes through `anstream`.
    pub fn apply(self) {
        match self {
            Self::Auto => {}
            Self::Always => anstream::ColorChoice::Always.write_global(),
            Self::Never => anstream::ColorChoice::Never.write_global(),
        }
    }
}

/// `text` between the codes of `style`.
#[must_use]
pub fn paint(style: Style, text: &str) -> String {
    format!("{style}{text}{style:#}")
}

/// `42 blocks (10.5 GiB)`.
#[must_use]
pub fn blocks(blocks: Blocks) -> String {
    let gib = (u64::from(blocks.0) * MIB_PER_BLOCK) as f64 / 1024.0;
    // Blocks are quarters of a GiB.
    let gib = format!("{gib:.2}");
    format!(
        "{} ({} GiB)",
        counted(blocks.0 as usize, "block"),
        gib.trim_end_matches('0').trim_end_matches('.')
    )
}

/// Columns of the terminal that is written to; `None` for files and pipes.
#[must_use]
pub fn window() -> Option<usize> {
    terminal_size::terminal_size().map(|(width, _)| usize::from(width.0))
}

/// Lines that are longer than the window, broken at words and indented. Colours do not count.
#[must_use]
pub fn fit(text: &str, window: Option<usize>) -> String {
    let Some(window) = window.filter(|window| *window >= 40) else { return text.to_owned() };
    text.split_inclusive('\n').map(|line| fit_line(line, window)).collect()
}

/// How many columns a text takes; colours take none.
#[must_use]
pub fn visible(text: &str) -> usize {
    anstream::adapter::strip_str(text).to_string().chars().count()
}

fn fit_line(line: &str, window: usize) -> String {
    if visible(line.trim_end()) <= window {
        return line.to_owned();
    }
    let indent = line.len() - line.trim_start_matches(' ').len() + 4;
    let (mut out, mut column) = (String::new(), 0);
    for word in line.split_inclusive(' ') {
        let needed = visible(word.trim_end());
        if column > indent && column + needed > window {
            out.truncate(out.trim_end_matches(' ').len());
            out.push('\n');
            out += &" ".repeat(indent);
            column = indent;
        }
        // The second of two spaces, where the line was broken.
        if column == indent && needed == 0 && out.contains('\n') {
            continue;
        }
        out += word;
        column += visible(word.trim_end_matches('\n'));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_broken_at_words() {
        let line = "  Pod a/b  1 whole card → 50 cores and 20 blocks (5 GiB), in wave 1 of 2\nshort\n";
        let expected =
            "  Pod a/b  1 whole card → 50 cores and\n      20 blocks (5 GiB), in wave 1 of 2\nshort\n";
        assert_eq!(fit(line, Some(40)), expected);
        assert_eq!(fit(line, None), line);
        let painted = format!("{}{}\n", paint(HEAD, "0123456789"), " 0123456789".repeat(3));
        assert_eq!(fit(&painted, Some(43)), painted, "colours have no width");
        let word = format!("{}\n", "x".repeat(100));
        assert_eq!(fit(&word, Some(40)), word, "a word is not broken");
    }

    #[test]
    fn blocks_are_shown_with_their_size() {
        let table = [(1, "1 block (0.25 GiB)"), (42, "42 blocks (10.5 GiB)"), (40, "40 blocks (10 GiB)")];
        for (count, expected) in table {
            assert_eq!(blocks(Blocks(count)), expected);
        }
    }
}
