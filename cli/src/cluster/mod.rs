//! Commands that read a cluster, or a dump of one.
//!
//! Each reads a [`Snapshot`] and decides purely; with `--from` the snapshot is the output of `kubectl get … -o yaml`, so that every
//! decision can be made and tested without a cluster.

mod change;
mod connect;
pub mod install;
pub(crate) mod live;
pub mod preflight;
pub mod quota;
mod screen;
pub mod snapshot;
pub mod status;
pub(crate) mod top;
mod uninstall;
mod usage;
pub mod verify;

pub(crate) use change::{cordon_card, rollout};
pub(crate) use connect::runtime;
pub use connect::{ClusterArgs, ReachArgs, server};
pub use snapshot::Snapshot;
pub(crate) use uninstall::uninstall;
pub(crate) use usage::Usage;

use crate::exit::Exit;
use crate::style::{WARNING, fit, paint, visible, window};
use serde_json::Value;
use std::io::{self, Write};

/// Output formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Output {
    /// A table.
    #[default]
    Table,
    /// JSON.
    Json,
    /// YAML.
    Yaml,
}

/// Output formats where the answer is about objects of the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum ObjectOutput {
    /// A table, or a sentence.
    #[default]
    Table,
    /// JSON.
    Json,
    /// YAML.
    Yaml,
    /// Names of the objects, for `kubectl get`.
    Name,
}

impl From<ObjectOutput> for Output {
    fn from(output: ObjectOutput) -> Self {
        match output {
            ObjectOutput::Table | ObjectOutput::Name => Self::Table,
            ObjectOutput::Json => Self::Json,
            ObjectOutput::Yaml => Self::Yaml,
        }
    }
}

/// Prints the result of a command that changes an object.
pub(crate) fn report(
    output: ObjectOutput,
    out: &mut dyn Write,
    (name, text): (&str, &str),
    value: Value,
) -> io::Result<Exit> {
    let text = if output == ObjectOutput::Name { name } else { text };
    Answer { text: format!("{text}\n"), value, exit: Exit::Done }.write(output.into(), out)
}

/// The result of a command that only reads.
pub(crate) struct Answer {
    /// The table.
    pub(crate) text: String,
    /// The same for programs.
    pub(crate) value: Value,
    /// How it ends.
    pub(crate) exit: Exit,
}

impl Answer {
    /// Writes it in this format.
    pub(crate) fn write(&self, output: Output, out: &mut dyn Write) -> io::Result<Exit> {
        match output {
            Output::Table => out.write_all(fit(&self.text, window()).as_bytes())?,
            Output::Json => writeln!(out, "{:#}", self.value)?,
            Output::Yaml => out.write_all(crate::plan::diff::to_yaml(&self.value).as_bytes())?,
        }
        Ok(self.exit)
    }
}

/// Aligned columns; the last one is not padded.
pub(crate) fn columns(rows: &[Vec<String>]) -> String {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths = (0..count)
        .map(|column| {
            rows.iter().filter_map(|row| row.get(column)).map(|cell| visible(cell)).max().unwrap_or(0)
        })
        .collect::<Vec<_>>();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line += cell;
            line += &" ".repeat(width - visible(cell) + 2);
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

pub(crate) fn warn(err: &mut dyn Write, text: &str) -> io::Result<()> {
    writeln!(err, "{} {text}", paint(WARNING, "warning:"))
}
