//! `gpu-migrate-bridge`: see `--help`.

use std::process::ExitCode;

use clap::Parser;
use gpu_migrate_plugin_bridge::agent;
use gpu_migrate_plugin_bridge::args::Args;

fn main() -> ExitCode {
    let args = Args::parse();
    // What the kubelet waits for has the main thread to itself.
    gpu_migrate_runtime::main_with_background(args.log_format, async |shutdown, background| {
        Ok(agent::run(args, &background, shutdown).await?)
    })
}
