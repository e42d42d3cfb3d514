//! `gpu-migrate-operator`: see `--help`.

use std::process::ExitCode;

use clap::Parser;
use gpu_migrate_operator::args::Args;
use gpu_migrate_operator::run::run;

fn main() -> ExitCode {
    let args = Args::parse();
    gpu_migrate_runtime::main(args.log_format, |shutdown| run(args, shutdown))
}
