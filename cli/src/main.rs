//! gpu-migrate: from the command line to the exit status.

use clap::FromArgMatches as _;
use gpu_migrate_cli::args::{self, Cli};
use gpu_migrate_cli::exit::Exit;
use gpu_migrate_cli::style::{REMOVED, paint};
use gpu_migrate_cli::{cluster, complete, errors};
use std::io::Write as _;
use std::process::ExitCode;

fn main() -> ExitCode {
    complete::answer();
    let argv0 = std::env::args_os().next();
    let matches = args::command(argv0.as_deref()).get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    cli.color.apply();
    match gpu_migrate_cli::run(cli) {
        Ok(exit) => exit.into(),
        // `gpu-migrate plan … | head`: the reader has seen enough, which is no failure.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            let text = errors::sentence(&error, cluster::server());
            let _ = writeln!(anstream::stderr(), "{} {text}", paint(REMOVED, "error:"));
            Exit::Failed.into()
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
    })
}
