//! A terminal for programs: what they show in it, and keys for them.

use std::io::{Read as _, Write as _};
use std::num::NonZero;
use std::path::Path;
use std::process::Child;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use pty_process::Size;
use pty_process::blocking::{Command, Pty, open};

/// For whatever is waited for; a test that comes to it fails and shows the screen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(240);
/// A program that writes nothing for so long has drawn what it is drawing.
const QUIET: Duration = Duration::from_millis(25);

/// Columns and rows.
pub(crate) type Window = (u16, u16);

/// A program in a terminal.
pub(crate) struct Terminal {
    child: Child,
    input: Arc<Pty>,
    output: Receiver<Vec<u8>>,
    screen: vt100::Parser,
}

impl Terminal {
    /// Starts a program in the root of the repository.
    pub(crate) fn start(
        program: &Path,
        (columns, rows): Window,
        arguments: &[&str],
        settings: &[(&str, &str)],
    ) -> Self {
        let [shown, wide] = [rows, columns].map(|size| NonZero::new(size).unwrap());
        let screen = vt100::Parser::new(shown, wide, 0);
        let (pty, pts) = open().unwrap();
        pty.resize(Size::new(rows, columns)).unwrap();
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let child = Command::new(program)
            .args(arguments)
            .current_dir(root)
            .env("TERM", "xterm-256color")
            .env_remove("NO_COLOR")
            .env_remove("GPU_MIGRATE_POLICY")
            .envs(settings.iter().copied())
            .spawn(pts)
            .unwrap();
        let (send, output) = channel();
        let input = Arc::new(pty);
        let reader = Arc::clone(&input);
        std::thread::spawn(move || {
            let mut buffer = [0; 1 << 14];
            // On Linux the end of the program is an error of the terminal.
            while let Ok(count @ 1..) = (&*reader).read(&mut buffer) {
                if send.send(buffer[..count].to_vec()).is_err() {
                    break;
                }
            }
        });
        Self { child, input, output, screen }
    }

    pub(crate) fn screen(&self) -> &vt100::Screen {
        self.screen.screen()
    }

    pub(crate) fn text(&self) -> String {
        let (_, columns) = self.screen().size();
        let rows = self.screen().rows(0, columns.get()).map(|row| row.trim_end().to_owned());
        rows.collect::<Vec<_>>().join("\n").trim_end().to_owned()
    }

    /// Shows more of what the program writes; false at its end.
    fn more(&mut self, until: Instant) -> bool {
        match self.output.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(bytes) => {
                self.screen.process(&bytes);
                true
            }
            Err(RecvTimeoutError::Disconnected) => false,
            Err(RecvTimeoutError::Timeout) => panic!("nothing more came:\n{}", self.text()),
        }
    }

    /// Shows what the program writes in this time, and a little longer where it is in the middle of it; false at its end.
    pub(crate) fn look_on(&mut self, time: Duration) -> bool {
        let until = Instant::now() + time;
        loop {
            match self.output.recv_timeout(QUIET) {
                Ok(bytes) => self.screen.process(&bytes),
                Err(RecvTimeoutError::Disconnected) => return false,
                Err(RecvTimeoutError::Timeout) if Instant::now() >= until => return true,
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Waits until this is on the screen.
    pub(crate) fn until(&mut self, part: &str) {
        let until = Instant::now() + PATIENCE;
        while !self.text().contains(part) {
            assert!(self.more(until), "it ended without {part:?}:\n{}", self.text());
        }
    }

    pub(crate) fn write(&self, keys: &str) {
        (&*self.input).write_all(keys.as_bytes()).unwrap();
    }

    /// Waits for the end: the last screen and the exit status.
    pub(crate) fn end(mut self) -> (String, i32) {
        let until = Instant::now() + PATIENCE;
        while self.more(until) {}
        let status = self.child.wait().unwrap();
        (self.text(), status.code().unwrap_or(-1))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
