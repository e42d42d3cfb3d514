//! The log: one line an event on stderr, filtered by `GPU_MIGRATE_LOG` (default `info`).

use std::io::IsTerminal as _;

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;

/// Form of the log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people
    #[default]
    Text,
    /// For machines, one object a line
    Json,
}

impl LogFormat {
    /// Installs the subscriber. One that is installed already stays.
    pub(crate) fn install(self) {
        let filter = EnvFilter::try_from_env("GPU_MIGRATE_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
        let log = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .with_ansi(std::io::stderr().is_terminal());
        let _ = match self {
            Self::Text => log.try_init(),
            Self::Json => log.json().try_init(),
        };
    }
}
