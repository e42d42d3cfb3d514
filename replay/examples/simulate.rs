//! `gpu-migrate simulate` alone, without the rest of the command line.

use clap::Parser;
use gpu_migrate_replay::command::{SimulateArgs, run};

#[derive(Parser)]
struct Program {
    #[command(flatten)]
    args: SimulateArgs,
}

fn main() -> anyhow::Result<()> {
    run(&Program::parse().args, &mut std::io::stdout())?;
    Ok(())
}
