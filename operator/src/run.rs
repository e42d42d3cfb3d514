//! Leader election, health and shutdown around the loops.

use crate::args::Args;
use crate::metrics::Metrics;
use crate::term::Term;
use crate::{config, migrations::Migrations};
use anyhow::Context as _;
use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use gpu_migrate_leader::Candidate;
use kube::Client;
use kube::client::ClientBuilder;
use kube::config::{Config, KubeConfigOptions, Kubeconfig};
use prometheus_client::registry::Registry;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// The Lease, in the operator's namespace.
pub const LEASE: &str = "gpu-migrate-operator";
/// The longest wait for the API server before the process ends.
const PARTING: Duration = Duration::from_secs(3);

/// Runs until a signal comes or the Lease is lost after it was held. Then the process ends and starts anew: that is
/// what makes sure that nothing of a former leader still acts.
///
/// # Errors
/// With a text for the owner: a kubeconfig that cannot be read, a port that is taken, a Lease that was lost.
pub async fn run(args: Args) -> anyhow::Result<()> {
    // Exhaustive, so that a flag that nobody reads does not compile.
    let Args { kubeconfig, namespace, identity, metrics_bind, lease_seconds, log_format: _ } = args;
    let config = match kubeconfig {
        None => Config::infer().await.context("no way to reach a cluster")?,
        Some(path) => {
            let file =
                Kubeconfig::read_from(&path).with_context(|| format!("kubeconfig {}", path.display()))?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?
        }
    };
    let mut registry = Registry::default();
    let metrics = Metrics::register(&mut registry);
    let ready = Arc::new(AtomicBool::new(false));
    serve_health(&metrics_bind, registry, Arc::clone(&ready)).await?;

    let identity = identity.unwrap_or_else(own_name);
    let duration = Duration::from_secs(lease_seconds);
    let mut candidate = Candidate::new(Client::try_from(config.clone())?, &namespace, LEASE, &identity)
        .with_duration(duration);
    let our_term = Term::default();
    let client = ClientBuilder::try_from(config)?.with_layer(&our_term.guard()).build();
    ready.store(true, Ordering::Relaxed);
    tracing::info!(identity, namespace, "waiting for the lease");

    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let (tell, elected) = oneshot::channel();
    let outcome = tokio::select! {
        () = gpu_migrate_leader::run(
            &mut candidate,
            CancellationToken::new(),
            || {
                metrics.leading.set(1);
                // Nobody waits: we are being stopped.
                let _ = tell.send(());
            },
            |certain| our_term.renew(certain, duration),
        ) => Err(anyhow::anyhow!("the lease was lost")),
        outcome = lead(client, namespace, elected, metrics.clone()) => outcome,
        _ = term.recv() => Ok(()),
        _ = int.recv() => Ok(()),
    };
    // The loops are dropped: nothing is written any more.
    match tokio::time::timeout(PARTING, candidate.resign()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%error, "lease not given back; it runs out by itself"),
        Err(_) => tracing::warn!("lease not given back; it runs out by itself"),
    }
    outcome
}

/// Acts from when the Lease is ours.
async fn lead(
    client: Client,
    namespace: String,
    elected: oneshot::Receiver<()>,
    metrics: Metrics,
) -> anyhow::Result<()> {
    elected.await.context("the lease's keeper ended")?;
    tokio::select! {
        () = Migrations::new(client.clone(), metrics.clone()).run() => {}
        () = config::run(client, namespace, metrics) => {}
    }
    anyhow::bail!("a loop ended")
}

fn own_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}-{}", host.trim(), std::process::id())
}

async fn serve_health(bind: &str, registry: Registry, ready: Arc<AtomicBool>) -> anyhow::Result<()> {
    if bind.is_empty() {
        return Ok(());
    }
    let listener =
        tokio::net::TcpListener::bind(bind).await.with_context(|| format!("--metrics-bind {bind}"))?;
    let registry = Arc::new(registry);
    let metrics = move || {
        let mut text = String::new();
        let encoded = prometheus_client::encoding::text::encode(&mut text, &registry);
        let status = if encoded.is_ok() { StatusCode::OK } else { StatusCode::INTERNAL_SERVER_ERROR };
        std::future::ready((
            status,
            [("content-type", "application/openmetrics-text; version=1.0.0; charset=utf-8")],
            text,
        ))
    };
    let readiness = move || {
        let ready = ready.load(Ordering::Relaxed);
        std::future::ready(if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE })
    };
    let router = Router::new()
        .route("/livez", get(|| async { "ok" }))
        .route("/readyz", get(readiness))
        .route("/metrics", get(metrics));
    tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, router).await {
            tracing::error!(%error, "health port ended");
        }
    });
    Ok(())
}
