//! `gpu-migrate-bridge`: see `--help`.

use std::process::ExitCode;

use clap::Parser;
use gpu_migrate_plugin_bridge::agent;
use gpu_migrate_plugin_bridge::args::Args;
use gpu_migrate_plugin_bridge::inventory::nvml_process;

fn main() -> ExitCode {
    if let Some(code) = nvml_process::run(std::env::args_os()) {
        return code;
    }
    let args = Args::parse();
    // What the kubelet waits for has the main thread to itself.
    gpu_migrate_runtime::main_with_background(args.log_format, async |shutdown, background| {
        Ok(agent::run(args, &background, shutdown).await?)
    })
}
