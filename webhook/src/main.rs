//! `gpu-migrate-webhook`: see `--help`.

use std::process::ExitCode;

use clap::Parser;
use gpu_migrate_webhook::args::Args;
use gpu_migrate_webhook::run::run;

fn main() -> ExitCode {
    let args = Args::parse();
    gpu_migrate_runtime::main_with_workers(args.log_format, args.limits.worker_threads, |shutdown| {
        run(args, shutdown)
    })
}
