//! `gpu-migrate-operator`: see `--help`.

use clap::Parser as _;
use gpu_migrate_operator::args::{Args, LogFormat};
use tracing_subscriber::EnvFilter;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    // The only failure is that a provider is installed already.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let args = Args::parse();
    let filter = EnvFilter::try_from_env("GPU_MIGRATE_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let log = log.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()));
    match args.log_format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
    Box::pin(gpu_migrate_operator::run::run(args)).await
}
