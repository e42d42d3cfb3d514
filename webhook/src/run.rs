//! Puts the program together and runs it until a signal.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, bail};
use gpu_migrate_certs::inject::{Injector, Kind};
use gpu_migrate_certs::{CertRotator, Certs, ClientAuth, Lifetimes, Options, SecretPlace, Source};
use gpu_migrate_runtime::leader::{self, Candidate};
use gpu_migrate_runtime::serve::{Limits, serve};
use gpu_migrate_runtime::trace::Tracer;
use gpu_migrate_runtime::{Tasks, admin, client, default_identity};
use hyper_util::service::TowerToHyperService;
use kube::Client;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::args::{Args, LimitArgs, RegistrationArgs, TlsArgs};
use crate::configuration::{Address, NAME, WebhookConfiguration};
use crate::http::{self, Context};
use crate::metrics::{Metrics, PREFIX};
use crate::policy::Settings;
use crate::reconciler::ConfigurationReconciler;
use crate::source::Store;
use crate::source::cluster::{ClusterSource, Listed};
use crate::source::file::FileSource;

/// Lease under which one replica writes.
const LEASE: &str = "gpu-migrate-webhook";
/// How long tasks may take to end beside the drain of connections.
const TASKS_END: Duration = Duration::from_secs(1);

/// Runs the webhook until `shutdown`.
///
/// # Errors
/// What keeps it from starting, or a background task that ended.
pub async fn run(args: Args, shutdown: CancellationToken) -> anyhow::Result<()> {
    let Args {
        policy_file,
        bind,
        metrics_bind,
        kubeconfig,
        namespace,
        identity,
        tls,
        registration,
        limits,
        trace,
        log_format: _,
    } = args;
    let client = match (&policy_file, needs_cluster(&tls, &registration)) {
        (Some(_), false) => None,
        _ => Some(
            client::connect(kubeconfig.as_deref(), None)
                .await
                .context("a cluster is needed without --policy-file and --tls-dir")?,
        ),
    };
    let mut settings = Settings { mark_reviewed: registration.mark_reviewed, ..Settings::default() };
    settings.excluded_namespaces.insert(namespace.clone());
    let mut registry = Registry::default();
    let metrics = Metrics::new(registry.sub_registry_with_prefix(PREFIX));
    let store = Store::new(settings.clone(), metrics.clone());
    // Not the shutdown itself: connections are accepted for a while after it.
    let mut tasks = Tasks::new(CancellationToken::new());
    let tracer = Tracer::start(&trace, "gpu-migrate-webhook", None, metrics.spans.clone(), &mut tasks)?;

    let address = address(&registration, &namespace);
    let identity = identity.unwrap_or_else(default_identity);
    let leading = elect(&mut tasks, client.clone(), &namespace, &identity);
    let listed = follow_policies(&mut tasks, policy_file, client.clone(), &store, leading.clone())?;
    let (certs, rotator) = certificates(&tls, client.clone(), &namespace, identity, &address, bind).await?;
    certs.register_metrics(registry.sub_registry_with_prefix(PREFIX));
    tasks.spawn("certificate rotation", rotator.run(tasks.stop()));
    let wanted = WebhookConfiguration { settings, ..WebhookConfiguration::new(address, &namespace) };
    let registered = register(&mut tasks, &registration, client, wanted, &certs, &store, leading);

    if let Some(registered) = registered.clone() {
        tasks.spawn("registration metric", count_registered(registered, metrics.registered.clone()));
    }

    let LimitArgs { max_body_memory, max_connections, worker_threads: _, drain_delay, drain_timeout } =
        limits;
    let bounds = Limits {
        connections: max_connections.into(),
        per_peer: usize::from(max_connections) / 2,
        drain: drain_timeout,
        metrics: metrics.connections.clone(),
        ..Limits::default()
    };
    let context = Context::new(store.snapshot(), metrics, usize::from(max_body_memory) << 20);
    let context = Context { tracer, ..context };
    let readiness = readiness(context.clone(), certs.clone(), listed, registered);
    admin::spawn(&mut tasks, &metrics_bind, admin::router(Arc::new(registry), readiness)).await?;
    let clients = tls.client_ca_file.map(|ca_file| ClientAuth { ca_file, names: tls.client_names });
    let config = certs.server_config(clients.as_ref())?;
    let service = TowerToHyperService::new(http::webhook(context.clone()));
    let listener = TcpListener::bind(bind).await.with_context(|| format!("--bind {bind}"))?;
    tracing::info!(address = %listener.local_addr()?, "serving the API server");
    tasks.spawn("webhook server", serve(listener, Some(config), service, bounds, tasks.stop()));

    let ended = tasks.supervise(shutdown.cancelled()).await;
    // In order: not ready any more, still accepting while endpoints propagate, then finishing what is in flight.
    context.leaving.store(true, Ordering::Relaxed);
    if ended.is_ok() {
        tracing::info!(?drain_delay, "not ready any more, still accepting connections");
        tokio::time::sleep(drain_delay).await;
    }
    tasks.shut_down(drain_timeout + TASKS_END).await;
    Ok(ended?)
}

/// Takes part in the election of the replica that writes: the webhook configuration and the conditions of policies.
fn elect(
    tasks: &mut Tasks,
    client: Option<Client>,
    namespace: &str,
    identity: &str,
) -> watch::Receiver<bool> {
    let (leading, seen) = watch::channel(false);
    if let Some(client) = client {
        let candidate = Candidate::new(client, namespace, LEASE, identity);
        tasks.spawn("leader election", leader::hold(candidate, tasks.stop(), leading));
    }
    seen
}

/// Starts to follow the policies; says, where they are watched, when all are listed.
fn follow_policies(
    tasks: &mut Tasks,
    file: Option<PathBuf>,
    client: Option<Client>,
    store: &Store,
    leading: watch::Receiver<bool>,
) -> anyhow::Result<Option<Listed>> {
    let stop = tasks.stop();
    match (file, client) {
        (Some(path), _) => {
            tasks.spawn("policy file", FileSource::open(&path, store.clone())?.run(stop));
            Ok(None)
        }
        (None, Some(client)) => {
            let source = ClusterSource::new(client, store.clone(), leading);
            let listed = source.listed();
            tasks.spawn("watches", source.run(stop));
            Ok(Some(listed))
        }
        (None, None) => bail!("--policy-file or a cluster is needed"),
    }
}

/// Starts to keep the webhook configuration, or only its caBundle, where that was asked for.
fn register(
    tasks: &mut Tasks,
    args: &RegistrationArgs,
    client: Option<Client>,
    wanted: WebhookConfiguration,
    certs: &Certs,
    store: &Store,
    leading: watch::Receiver<bool>,
) -> Option<watch::Receiver<bool>> {
    let client = client?;
    let stop = tasks.stop();
    if args.register {
        let wanted = WebhookConfiguration { timeout_seconds: args.timeout_seconds, ..wanted };
        let (snapshot, changes) = (store.snapshot(), store.changes());
        let reconciler =
            ConfigurationReconciler::new(client, wanted, certs.clone(), snapshot, changes, leading);
        let registered = reconciler.registered();
        tasks.spawn("registration", reconciler.run(stop));
        return Some(registered);
    }
    if args.inject_ca {
        let injector = Injector::new(client, Kind::Mutating, NAME, certs.clone());
        let registered = injector.registered();
        tasks.spawn("caBundle", injector.run(stop));
        return Some(registered);
    }
    None
}

async fn count_registered(mut registered: watch::Receiver<bool>, gauge: Gauge) {
    loop {
        gauge.set(i64::from(*registered.borrow_and_update()));
        if registered.changed().await.is_err() {
            return;
        }
    }
}

fn needs_cluster(tls: &TlsArgs, registration: &RegistrationArgs) -> bool {
    tls.tls_dir.is_none() || registration.register || registration.inject_ca
}

fn address(registration: &RegistrationArgs, namespace: &str) -> Address {
    match (&registration.service, &registration.service_url) {
        (Some(service), _) => service.clone(),
        (None, Some(url)) => Address::Url(url.clone()),
        (None, None) => {
            Address::Service { namespace: namespace.into(), name: "gpu-migrate-webhook".into(), port: 443 }
        }
    }
}

/// Names that clients use: the Service's or the URL's, loopback, and the address we listen on.
fn names(address: &Address, bind: SocketAddr, more: &[String]) -> Vec<String> {
    let mut names = match address {
        Address::Service { namespace, name, .. } => {
            vec![format!("{name}.{namespace}.svc"), format!("{name}.{namespace}.svc.cluster.local")]
        }
        Address::Url(url) => {
            let host = url.parse::<::http::Uri>().ok();
            host.and_then(|uri| uri.host().map(|h| h.trim_matches(['[', ']']).to_owned()))
                .into_iter()
                .collect()
        }
    };
    names.extend(["localhost", "127.0.0.1", "::1"].map(str::to_owned));
    if !bind.ip().is_unspecified() {
        names.push(bind.ip().to_string());
    }
    names.extend_from_slice(more);
    let mut seen = std::collections::HashSet::new();
    names.retain(|name| seen.insert(name.clone()));
    names
}

async fn certificates(
    tls: &TlsArgs,
    client: Option<Client>,
    namespace: &str,
    identity: String,
    address: &Address,
    bind: SocketAddr,
) -> anyhow::Result<(Certs, CertRotator)> {
    let source = match (&tls.tls_dir, client) {
        (Some(folder), _) => Source::folder(folder),
        (None, Some(client)) => {
            let (namespace, name) = (namespace.to_owned(), tls.tls_secret.clone());
            Source::Secret(SecretPlace { client, namespace, name, identity })
        }
        (None, None) => bail!("--tls-dir is needed without a cluster"),
    };
    let options = Options {
        owner: "gpu-migrate-webhook".into(),
        names: names(address, bind, &tls.tls_names),
        lifetimes: Lifetimes { ca: tls.ca_lifetime, leaf: tls.certificate_lifetime },
    };
    Ok(Certs::start(source, options, gpu_migrate_certs::wall_clock()).await?)
}

/// Ready is who has a certificate, has listed the policies, is registered with the CAs in use and is not leaving.
fn readiness(
    context: Context,
    certs: Certs,
    listed: Option<Listed>,
    registered: Option<watch::Receiver<bool>>,
) -> impl Fn() -> Result<(), String> + Clone + Send + Sync + 'static {
    move || {
        let known = registered.as_ref().is_none_or(|registered| *registered.borrow());
        if context.leaving.load(Ordering::Relaxed) {
            return Err("leaving".into());
        }
        certs.check()?;
        if let Some(listed) = &listed {
            listed.check()?;
        }
        if known { Ok(()) } else { Err("the webhook configuration does not carry our CA yet".into()) }
    }
}
