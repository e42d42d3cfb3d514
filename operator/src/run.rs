//! Leader election, health and shutdown around the loops.

use crate::args::Args;
use crate::metrics::Metrics;
use crate::query::Prometheus;
use crate::status::{self, access::Access};
use crate::term::Term;
use crate::{config, migrations::Migrations};
use gpu_migrate_runtime::leader::{self, Candidate};
use gpu_migrate_runtime::tasks::until;
use gpu_migrate_runtime::{Tasks, admin, client, default_identity};
use kube::Client;
use kube::client::ClientBuilder;
use prometheus_client::registry::Registry;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// The Lease, in the operator's namespace.
pub const LEASE: &str = "gpu-migrate-operator";
/// The longest wait for the API server before the process ends.
const SHUTDOWN: Duration = Duration::from_secs(3);

/// Runs until `shutdown`, or until the Lease is lost after it was held. Then the process ends and is restarted: that is what
/// makes sure that nothing of a former leader still acts.
///
/// # Errors
/// With a text for the owner: a kubeconfig that cannot be read, a port that is taken, a Lease that was lost.
pub async fn run(args: Args, shutdown: CancellationToken) -> anyhow::Result<()> {
    // Exhaustive, so that a flag that nobody reads does not compile.
    let Args {
        kubeconfig,
        namespace,
        identity,
        metrics_bind,
        status_bind,
        status_without_token,
        lease_seconds,
        prometheus_ca_file,
        prometheus_token_file,
        interval_milliseconds,
        log_format: _,
    } = args;
    let config = client::config(kubeconfig.as_deref(), None).await?;
    let mut registry = Registry::default();
    let metrics = Metrics::register(&mut registry);
    let identity = identity.unwrap_or_else(default_identity);
    let duration = Duration::from_secs(lease_seconds);
    let mut candidate = Candidate::new(Client::try_from(config.clone())?, &namespace, LEASE, &identity)
        .with_duration(duration);
    let our_term = Term::default();
    let client = ClientBuilder::try_from(config.clone())?.with_layer(&our_term.guard()).build();

    let mut tasks = Tasks::new(CancellationToken::new());
    admin::spawn(&mut tasks, &metrics_bind, admin::router(Arc::new(registry), || Ok(()))).await?;
    // Reviews of tokens are no writes of the leader's.
    let reads = Client::try_from(config.clone())?;
    let access = if status_without_token { Access::Everybody } else { Access::by_token(reads.clone()) };
    status::spawn(&mut tasks, &status_bind, access, &reads, &metrics.skipped_objects).await?;
    tracing::info!(identity, namespace, "waiting for the Lease");
    let (elected, stop) = (CancellationToken::new(), tasks.stop());
    let migrations = Migrations::new(client.clone(), metrics.clone())
        .with_interval(Duration::from_millis(interval_milliseconds))
        .with_prometheus(Prometheus {
            ca_file: prometheus_ca_file,
            token_file: prometheus_token_file,
            ..Prometheus::default()
        })
        .run();
    tasks.spawn("GPUMigration loop", until(stop.clone(), once(elected.clone(), migrations)));
    let config = config::run(client, namespace.clone(), metrics.clone(), config::INTERVAL);
    tasks.spawn("GPUConfig loop", until(stop, once(elected.clone(), config)));

    let election = leader::run(
        &mut candidate,
        CancellationToken::new(),
        || {
            metrics.leading.set(1);
            elected.cancel();
        },
        |certain| our_term.renew(certain, duration),
    );
    let outcome = tokio::select! {
        () = election => Err(anyhow::anyhow!("the Lease {namespace}/{LEASE} was lost")),
        ended = tasks.supervise(shutdown.cancelled()) => ended.map_err(Into::into),
    };
    // Nothing is written any more once the loops have ended; only then may another replica lead.
    tasks.shut_down(SHUTDOWN).await;
    match tokio::time::timeout(SHUTDOWN, candidate.release()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%error, "Lease not released; it expires by itself"),
        Err(_) => tracing::warn!("Lease not released; it expires by itself"),
    }
    outcome
}

/// Runs a control loop from when the Lease is ours. At a shutdown it stops where it is: it starts from what is in the cluster.
async fn once(elected: CancellationToken, control_loop: impl Future<Output = ()>) {
    elected.cancelled().await;
    control_loop.await;
}
