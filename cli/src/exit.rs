//! What the exit status says; the same for every command.

use std::process::ExitCode;

/// The end of a command. A wrong command line ends with 2, which is clap's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Exit {
    /// 0: done, and nothing stands in the way.
    Done,
    /// 3: done, and the answer is no: something cannot be converted, a check failed.
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
  0  done, and nothing stands in the way
  1  not done: some input or the cluster could not be read (what could be read is still shown)
  2  the command line is wrong
  3  done, and the answer is no: something cannot be converted, or a check failed";
