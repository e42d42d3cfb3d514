//! A screen of its own that is drawn again and again, and the keys that are pressed meanwhile: `top`, `status --watch`.

use crate::exit::Exit;
use crate::style::{FAINT, WARNING, paint, visible};
use crossterm::event::{Event, EventStream, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use futures::StreamExt as _;
use gpu_migrate_model::text::and_more;
use std::future::pending;
use std::io::{IsTerminal as _, Write};
use std::time::Duration;

/// Cursor home and clear below: lines are overwritten without flicker.
const HOME: &str = "\x1b[H\x1b[J";

/// Columns and rows.
pub(crate) type Size = (usize, usize);

/// What is drawn of `T`, and what keys change about it. Pure.
pub(crate) trait View<T> {
    /// The line above: what keys do.
    fn title(&self) -> String;
    /// What fits the window.
    fn draw(&mut self, of: &T, window: Size) -> String;
    /// A key other than those that quit.
    fn press(&mut self, key: KeyCode, window: Size);
    /// Keys are a text: none of them quits but Ctrl-C.
    fn is_typing(&self) -> bool {
        false
    }
}

/// How far a list is scrolled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Scroll(pub(crate) usize);

impl Scroll {
    pub(crate) fn press(&mut self, key: KeyCode, page: usize) {
        self.0 = match key {
            KeyCode::Up | KeyCode::Char('k') => self.0.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => self.0.saturating_add(1),
            KeyCode::PageUp => self.0.saturating_sub(page),
            KeyCode::PageDown | KeyCode::Char(' ') => self.0.saturating_add(page),
            KeyCode::Home | KeyCode::Char('g') => 0,
            KeyCode::End | KeyCode::Char('G') => usize::MAX,
            _ => self.0,
        };
    }

    /// The first of `all` lines or rows, where so many of them are shown: never so far that the window is half empty.
    pub(crate) fn first(&mut self, all: usize, shown: usize) -> usize {
        self.0 = self.0.min(all.saturating_sub(shown));
        self.0
    }
}

/// A text that fits a window: lines cut at its width, from this line on, and the last ones left out.
pub(crate) fn fitted(text: &str, (width, height): Size, scroll: &mut Scroll) -> String {
    let lines = text.lines().collect::<Vec<_>>();
    let room = if lines.len() > height { height.saturating_sub(1) } else { height };
    let first = scroll.first(lines.len(), room);
    let shown = lines.iter().skip(first).take(room).map(|line| cut(line, width)).collect::<Vec<_>>();
    let below = and_more(lines.len() - first - shown.len());
    let mut out = shown.join("\n");
    if room < lines.len() {
        out +=
            &format!("\n{}", paint(FAINT, &format!("lines {} to {}{below}", first + 1, first + shown.len())));
    }
    out
}

/// A line of at most `width` signs, with its colours.
fn cut(line: &str, width: usize) -> String {
    if visible(line) <= width {
        return line.to_owned();
    }
    let (mut out, mut signs, mut escape) = (String::new(), 0, false);
    for sign in line.chars() {
        escape = escape || sign == '\x1b';
        if escape || signs + 1 < width {
            out.push(sign);
            signs += usize::from(!escape);
        }
        escape = escape && sign != 'm';
    }
    out + "…"
}

/// Reads and draws until q, Escape or Ctrl-C.
pub(crate) async fn run<T>(
    interval: Duration,
    read: impl AsyncFn() -> anyhow::Result<T>,
    view: &mut impl View<T>,
    out: &mut dyn Write,
) -> anyhow::Result<Exit> {
    let mut keys = Keys::start()?;
    let (mut seen, mut failed) = (None, None);
    let mut reading = Box::pin(read());
    let mut due = tokio::time::Instant::now();
    loop {
        tokio::select! {
            answer = async { tokio::time::sleep_until(due).await; reading.as_mut().await } => {
                match answer {
                    Ok(now) => (seen, failed) = (Some(now), None),
                    // One failed refresh is tolerated, two in a row are not.
                    Err(error) if failed.is_none() && seen.is_some() => failed = Some(format!("{error:#}; retrying")),
                    Err(error) => return Err(error),
                }
                reading.set(read());
                due = tokio::time::Instant::now() + interval;
            }
            event = keys.next() => match event {
                Event::Key(key) if quits(key, view.is_typing()) => break,
                Event::Key(key) => view.press(key.code, window()),
                _ => {}
            },
            _ = tokio::signal::ctrl_c() => break,
        }
        if let Some(seen) = &seen {
            let (width, height) = window();
            let title = match &failed {
                Some(why) => paint(WARNING, &cut(why, width)),
                None => paint(FAINT, &cut(&view.title(), width)),
            };
            let text = format!("{title}\n\n{}", view.draw(seen, (width, height.saturating_sub(2))));
            write!(out, "{HOME}{}", text.replace('\n', "\r\n"))?;
            out.flush()?;
        }
    }
    drop(keys);
    writeln!(out)?;
    Ok(Exit::Done)
}

fn window() -> Size {
    terminal_size::terminal_size().map_or((80, 24), |(width, height)| (width.0.into(), height.0.into()))
}

/// Ctrl-C is no signal while keys are read one by one.
fn quits(key: KeyEvent, typing: bool) -> bool {
    match key.code {
        KeyCode::Char('c' | 'd') if key.modifiers.contains(KeyModifiers::CONTROL) => true,
        KeyCode::Char('q') | KeyCode::Esc => !typing,
        _ => false,
    }
}

/// Keys as they are pressed, and changes of the window; none where standard input is no terminal.
struct Keys(Option<EventStream>);

impl Keys {
    fn start() -> std::io::Result<Self> {
        if !std::io::stdin().is_terminal() {
            return Ok(Self(None));
        }
        crossterm::terminal::enable_raw_mode()?;
        Ok(Self(Some(EventStream::new())))
    }

    async fn next(&mut self) -> Event {
        loop {
            match &mut self.0 {
                None => pending().await,
                Some(events) => match events.next().await {
                    Some(Ok(Event::Key(key))) if key.kind == KeyEventKind::Release => {}
                    Some(Ok(event)) => return event,
                    // The terminal is gone.
                    Some(Err(_)) | None => self.0 = None,
                },
            }
        }
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        // Where it was not set this does nothing.
        let _ = crossterm::terminal::disable_raw_mode();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_counted_and_colours_end() {
        let text = format!("{}\nb\nc\nd", paint(WARNING, "a-line-that-is-long"));
        let plain = |text: &str| anstream::adapter::strip_str(text).to_string();
        let mut scroll = Scroll::default();
        let out = fitted(&text, (24, 3), &mut scroll);
        assert_eq!(plain(&out), "a-line-that-is-long\nb\nlines 1 to 2 and 2 more");
        let out = fitted(&text, (8, 4), &mut scroll);
        assert_eq!(plain(&out), "a-line-…\nb\nc\nd");
        assert!(out.lines().next().unwrap().contains("\x1b[0m"), "{out:?}");
    }

    /// Down to the end and no further, whatever is pressed; and when the list gets shorter.
    #[test]
    fn a_list_is_scrolled_to_its_end_and_no_further() {
        let text = (1..=9).map(|line| line.to_string()).collect::<Vec<_>>().join("\n");
        let mut scroll = Scroll::default();
        for (key, expected) in [
            (KeyCode::Down, "2\n3\nlines 2 to 3 and 6 more"),
            (KeyCode::PageDown, "4\n5\nlines 4 to 5 and 4 more"),
            (KeyCode::Up, "3\n4\nlines 3 to 4 and 5 more"),
            (KeyCode::End, "8\n9\nlines 8 to 9"),
            (KeyCode::Down, "8\n9\nlines 8 to 9"),
            (KeyCode::Char('x'), "8\n9\nlines 8 to 9"),
            (KeyCode::Home, "1\n2\nlines 1 to 2 and 7 more"),
        ] {
            scroll.press(key, 2);
            let out = fitted(&text, (80, 3), &mut scroll);
            assert_eq!(anstream::adapter::strip_str(&out).to_string(), expected, "{key:?}");
        }
        scroll.press(KeyCode::End, 2);
        assert_eq!(fitted("1\n2", (80, 3), &mut scroll), "1\n2");
    }

    #[test]
    fn q_is_a_letter_of_a_text_and_ctrl_c_never_is() {
        let key = |code, modifiers| KeyEvent::new(code, modifiers);
        let q = key(KeyCode::Char('q'), KeyModifiers::NONE);
        let ctrl_c = key(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert!(quits(q, false) && !quits(q, true) && quits(ctrl_c, true));
        assert!(!quits(key(KeyCode::Char('c'), KeyModifiers::NONE), false));
    }
}
