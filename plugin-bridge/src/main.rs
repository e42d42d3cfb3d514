//! `gpu-migrate-bridge`: arguments, logging, signals; everything else is the library.

use anyhow::Context;
use clap::Parser;
use gpu_migrate_plugin_bridge::agent;
use gpu_migrate_plugin_bridge::args::{Args, LogFormat};
use tokio::runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let filter = EnvFilter::try_from_env("GPU_MIGRATE_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let log = log.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()));
    match args.log_format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
    // An error here means that one is installed, which is as well.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    // What the kubelet waits for has this thread to itself: a call is answered without waking another one.
    let kubelets = runtime::Builder::new_current_thread().enable_all().build();
    let kubelets = kubelets.context("the runtime cannot be started")?;
    let others = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let others = others.context("the second runtime cannot be started")?;
    let outcome = kubelets.block_on(async {
        let stop = CancellationToken::new();
        stop_on_signal(stop.clone()).context("signals cannot be handled")?;
        agent::run(args, others.handle(), stop).await.context("gpu-migrate-bridge")
    });
    // Not waiting for a name that is still being looked up.
    others.shutdown_background();
    outcome
}

/// The first signal ends in order, the second at once.
fn stop_on_signal(stop: CancellationToken) -> std::io::Result<()> {
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tokio::spawn(async move {
        for round in 0.. {
            tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
            if round > 0 {
                std::process::exit(130);
            }
            stop.cancel();
        }
    });
    Ok(())
}
