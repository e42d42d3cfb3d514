//! Exit statuses; the same for every command.

use std::process::ExitCode;

/// Exit status of a command. A wrong command line exits with 2, which is clap's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Exit {
    /// 0: done, no obstacle found.
    Done,
    /// 3: done; something cannot be converted, or a check failed.
    No,
    /// 1: not done: input or cluster could not be read.
    Failed,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(match exit {
            Exit::Done => 0,
            Exit::Failed => 1,
            Exit::No => 3,
        })
    }
}

/// For the help of every command.
pub const HELP: &str = "Exit status:
  0  done, no obstacle found
  1  not done: some input or the cluster could not be read (what could be read is still shown)
  2  the command line is wrong
  3  done: something cannot be converted, or a check failed";
