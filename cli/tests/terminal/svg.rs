//! What a terminal showed, as an animated SVG that needs nothing else: good on light and on dark ground, still where motion is not
//! wanted (then it shows the end). Blocks and lines of tables are drawn, as fonts have them in different widths.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use vt100::{Color, Screen};

/// Size of a character cell.
const WIDE: usize = 8;
const HIGH: usize = 17;
/// From the top of a cell to the line that letters stand on.
const BASE: usize = 13;
const MARGIN: usize = 14;
const TITLE: usize = 30;

// Colours are written out twice: not everything that shows pictures knows variables.
const STYLE: &str = "\
text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre}
path{fill:none}.b{font-weight:600}
text,rect{fill:#1f2328}path{stroke:#818b98}.bg{fill:#fff;stroke:#d0d7de}.e{stroke:#d0d7de}.d{fill:#818b98}.c1{fill:#cf222e}\
.c2{fill:#1a7f37}.c3{fill:#9a6700}.c4{fill:#0969da}.c5{fill:#8250df}.c6{fill:#1b7c83}
@media(prefers-color-scheme:dark){text,rect{fill:#e6edf3}path{stroke:#6e7681}.bg{fill:#0d1117;stroke:#30363d}.e{stroke:#30363d}\
.d{fill:#6e7681}.c1{fill:#ff7b72}.c2{fill:#3fb950}.c3{fill:#d29922}.c4{fill:#58a6ff}.c5{fill:#bc8cff}.c6{fill:#39c5cf}}
";

/// A screen, and how long it was so.
pub(crate) struct Frame {
    pub(crate) screen: Screen,
    pub(crate) lasts: Duration,
}

/// The frames, one after the other, again and again.
pub(crate) fn animation(title: &str, frames: &[Frame]) -> String {
    let (rows, columns) = frames.first().map_or((1, 1), |frame| frame.screen.size_in_cells());
    let (inner_wide, inner_high) = (columns * WIDE, rows * HIGH);
    let (wide, high) = (inner_wide + 2 * MARGIN, inner_high + TITLE + 2 * MARGIN);
    // A line that is on several screens is written once.
    let mut lines = BTreeMap::new();
    let mut strip = String::new();
    for (number, frame) in frames.iter().enumerate() {
        let _ = write!(strip, "<g transform=\"translate(0,{})\">", number * inner_high);
        for row in 0..rows {
            let line = line(&frame.screen, row, columns);
            if !line.is_empty() {
                let next = lines.len();
                let id = *lines.entry(line).or_insert(next);
                let _ = write!(strip, "<use href=\"#l{id}\" y=\"{}\"/>", row * HIGH);
            }
        }
        strip += "</g>\n";
    }
    let definitions: String =
        lines.iter().map(|(line, id)| format!("<g id=\"l{id}\">{line}</g>\n")).collect();
    let (keys, seconds) = keyframes(frames, inner_high);
    let last = frames.len().saturating_sub(1) * inner_high;
    let title = escaped(title);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{wide}\" height=\"{high}\" viewBox=\"0 0 {wide} {high}\" role=\"img\">\n\
         <title>{title}</title>\n<style>\n{STYLE}@keyframes p{{{keys}}}\n.p{{animation:p {seconds:.1}s step-end infinite}}\n\
         @media(prefers-reduced-motion:reduce){{.p{{animation:none}}}}\n</style>\n<defs>\n{definitions}</defs>\n\
         <rect x=\".5\" y=\".5\" width=\"{}\" height=\"{}\" rx=\"8\" class=\"bg\"/>\n\
         <path d=\"M1 {TITLE}.5h{}\" class=\"e\"/>\n\
         <text x=\"{MARGIN}\" y=\"20\" class=\"d\">$ {title}</text>\n\
         <svg x=\"{MARGIN}\" y=\"{}\" width=\"{inner_wide}\" height=\"{inner_high}\">\n\
         <g class=\"p\" transform=\"translate(0,-{last})\">\n{strip}</g>\n</svg>\n</svg>\n",
        wide - 1,
        high - 1,
        wide - 2,
        TITLE + MARGIN,
    )
}

/// When which screen is shown, and how long all of it takes, in seconds.
fn keyframes(frames: &[Frame], high: usize) -> (String, f64) {
    let all: f64 = frames.iter().map(|frame| frame.lasts.as_secs_f64()).sum();
    let mut keys = String::new();
    let mut at = 0.0;
    for (number, frame) in frames.iter().enumerate() {
        let percent = if all > 0.0 { at / all * 100.0 } else { 0.0 };
        let _ = write!(keys, "{percent:.2}%{{transform:translateY(-{}px)}}", number * high);
        at += frame.lasts.as_secs_f64();
    }
    (keys, all)
}

trait InCells {
    /// Rows and columns.
    fn size_in_cells(&self) -> (usize, usize);
    fn at(&self, row: usize, column: usize) -> Sign;
}

impl InCells for Screen {
    fn size_in_cells(&self) -> (usize, usize) {
        let (rows, columns) = self.size();
        (rows.get().into(), columns.get().into())
    }

    fn at(&self, row: usize, column: usize) -> Sign {
        let position = (u16::try_from(row).unwrap_or(u16::MAX), u16::try_from(column).unwrap_or(u16::MAX));
        let Some(cell) = self.cell(position.0, position.1) else { return Sign::default() };
        let colour = match cell.fgcolor() {
            Color::Idx(index @ 1..=6) => Some(index),
            Color::Idx(index @ 9..=14) => Some(index - 8),
            _ => None,
        };
        let text = if cell.has_contents() { cell.contents().to_owned() } else { " ".to_owned() };
        Sign { text, look: Look { colour, bold: cell.bold(), dim: cell.dim() } }
    }
}

/// A cell of the screen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Sign {
    text: String,
    look: Look,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Look {
    colour: Option<u8>,
    bold: bool,
    dim: bool,
}

impl Look {
    /// ` class="…"`, or nothing.
    fn class(self) -> String {
        let colour = self.colour.map(|colour| format!("c{colour}"));
        let dim = (self.dim && colour.is_none()).then(|| "d".to_owned());
        let bold = self.bold.then(|| "b".to_owned());
        let classes: Vec<String> = [colour, dim, bold].into_iter().flatten().collect();
        if classes.is_empty() { String::new() } else { format!(" class=\"{}\"", classes.join(" ")) }
    }
}

/// How a sign is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Space,
    Letters,
    /// A filled cell, so many hundredths of it.
    Block(u8),
    /// A part of a table's border.
    Border,
}

impl Kind {
    fn of(sign: &str) -> Self {
        match sign {
            " " => Self::Space,
            "█" => Self::Block(100),
            "▓" => Self::Block(80),
            "▒" => Self::Block(45),
            sign if arms(sign).is_some() => Self::Border,
            _ => Self::Letters,
        }
    }
}

/// Whether a sign of a border goes up, right, down, left.
fn arms(sign: &str) -> Option<[bool; 4]> {
    Some(match sign {
        "─" | "═" | "╌" => [false, true, false, true],
        "│" | "┆" => [true, false, true, false],
        "┌" | "╭" => [false, true, true, false],
        "┐" | "╮" => [false, false, true, true],
        "└" | "╰" => [true, true, false, false],
        "┘" | "╯" => [true, false, false, true],
        "├" | "╞" => [true, true, true, false],
        "┤" | "╡" => [true, false, true, true],
        "┬" => [false, true, true, true],
        "┴" => [true, true, false, true],
        "┼" | "╪" => [true, true, true, true],
        _ => return None,
    })
}

/// A row of the screen; empty where it is.
fn line(screen: &Screen, row: usize, columns: usize) -> String {
    let signs: Vec<Sign> = (0..columns).map(|column| screen.at(row, column)).collect();
    let mut out = String::new();
    let mut from = 0;
    while from < signs.len() {
        let kind = Kind::of(&signs[from].text);
        let mut to = from + 1;
        while to < signs.len() && goes_on(&signs, from, to, kind) {
            to += 1;
        }
        let (run, x) = (&signs[from..to], from * WIDE);
        match kind {
            Kind::Space => {}
            Kind::Letters => out += &letters(run, x),
            Kind::Block(part) => {
                let opacity = if part == 100 { String::new() } else { format!(" opacity=\".{part}\"") };
                let (class, wide) = (run[0].look.class(), run.len() * WIDE);
                let _ = write!(
                    out,
                    "<rect x=\"{x}\" y=\"2\" width=\"{wide}\" height=\"{}\"{class}{opacity}/>",
                    HIGH - 4
                );
            }
            Kind::Border => out += &border(run, x),
        }
        from = to;
    }
    out
}

/// Whether the sign at `to` is drawn together with those before it.
fn goes_on(signs: &[Sign], from: usize, to: usize, kind: Kind) -> bool {
    let next = Kind::of(&signs[to].text);
    match kind {
        // A single space between words is a letter.
        Kind::Letters if next == Kind::Space => signs
            .get(to + 1)
            .is_some_and(|after| Kind::of(&after.text) == Kind::Letters && after.look == signs[from].look),
        Kind::Letters => next == Kind::Letters && signs[to].look == signs[from].look,
        Kind::Border | Kind::Space => next == kind,
        Kind::Block(_) => next == kind && signs[to].look == signs[from].look,
    }
}

fn letters(run: &[Sign], x: usize) -> String {
    let text: String = run.iter().map(|sign| sign.text.as_str()).collect();
    let (class, length) = (run[0].look.class(), run.len() * WIDE);
    // Whatever the width of the font, columns stay columns.
    let fitted = if run.len() > 1 { format!(" textLength=\"{length}\"") } else { String::new() };
    format!("<text x=\"{x}\" y=\"{BASE}\"{class}{fitted}>{}</text>", escaped(&text))
}

fn border(run: &[Sign], x: usize) -> String {
    let mut path = String::new();
    let mut flat: Option<(usize, usize)> = None;
    let middle = HIGH / 2;
    for (position, sign) in run.iter().enumerate() {
        let [up, right, down, left] = arms(&sign.text).unwrap_or_default();
        let at = x + position * WIDE;
        let centre = at + WIDE / 2;
        if left || right {
            let begin = if left { at } else { centre };
            let end = if right { at + WIDE } else { centre };
            flat = match flat {
                Some((start, stop)) if stop == begin => Some((start, end)),
                other => {
                    path += &flat_part(other, middle);
                    Some((begin, end))
                }
            };
        }
        if up || down {
            let (begin, end) = (if up { 0 } else { middle }, if down { HIGH } else { middle });
            let _ = write!(path, "M{centre}.5 {begin}v{}", end - begin);
        }
    }
    path += &flat_part(flat, middle);
    format!("<path d=\"{path}\"/>")
}

fn flat_part(part: Option<(usize, usize)>, middle: usize) -> String {
    part.map_or_else(String::new, |(from, to)| format!("M{from} {middle}.5h{}", to - from))
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
