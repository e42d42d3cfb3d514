//! gpu-migrate-extender.

use std::process::ExitCode;

use clap::Parser as _;
use gpu_migrate_admission_ext::run::{Args, run};

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    if rustls::crypto::aws_lc_rs::default_provider().install_default().is_err() {
        eprintln!("gpu-migrate-extender: another crypto provider is installed already");
        return ExitCode::FAILURE;
    }
    match run(args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpu-migrate-extender: {}", told_once(&error));
            ExitCode::FAILURE
        }
    }
}

/// The error with its causes, without those that it has told already.
fn told_once(error: &anyhow::Error) -> String {
    let causes = error.chain().map(ToString::to_string);
    causes.fold(String::new(), |told, cause| match told {
        told if told.contains(&cause) => told,
        told if told.is_empty() => cause,
        told => format!("{told}: {cause}"),
    })
}
