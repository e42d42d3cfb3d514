//! gpu-migrate-extender.

use clap::Parser as _;
use gpu_migrate_admission_ext::run::{Args, run};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let provider = rustls::crypto::aws_lc_rs::default_provider().install_default();
    anyhow::ensure!(provider.is_ok(), "another crypto provider is installed already");
    run(Args::parse()).await
}
