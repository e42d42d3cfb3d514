//! How far long work is: on a terminal alone, on standard error, and gone when the work is done.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::time::Duration;

/// Shorter work shows nothing.
const SHOWN_AFTER: Duration = Duration::from_millis(300);

#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// Work of `steps` steps; hidden where standard error is no terminal.
    pub(crate) fn new(steps: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
        // The template is ours and valid; else the default one is good enough.
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {wide_bar} {pos}/{len}") {
            bar.set_style(style);
        }
        Self { bar }
    }

    pub(crate) fn spinner(message: String) -> Self {
        let bar = ProgressBar::new_spinner();
        bar.set_message(message);
        bar.enable_steady_tick(SHOWN_AFTER);
        Self { bar }
    }

    /// The next step, and what it is.
    pub(crate) fn step(&self, message: impl Into<String>) {
        self.bar.set_message(message.into());
        self.bar.inc(1);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_drawn_where_there_is_no_terminal() {
        let progress = Progress { bar: ProgressBar::with_draw_target(Some(2), ProgressDrawTarget::hidden()) };
        progress.step("one");
        assert_eq!((progress.bar.position(), progress.bar.message().as_str()), (1, "one"));
        let bar = progress.bar.clone();
        drop(progress);
        assert!(bar.is_finished());
    }
}
