//! `gpu-migrate-webhook`: see `--help`.

use std::process::ExitCode;

use clap::Parser;
use gpu_migrate_webhook::args::Args;
use gpu_migrate_webhook::run::run;

fn main() -> ExitCode {
    let args = Args::parse();
    gpu_migrate_runtime::main(args.log_format, |shutdown| run(args, shutdown))
}
