//! Puts the program together and runs it until a signal.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, bail};
use gpu_migrate_certs::inject::{Injector, Kind};
use gpu_migrate_certs::{Certs, ClientAuth, Keeper, Lifetimes, Limits, Options, SecretPlace, Source, serve};
use hyper_util::service::TowerToHyperService;
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::args::{Args, LimitArgs, RegistrationArgs, TlsArgs};
use crate::http::{self, Context, Readiness};
use crate::metrics::{Metrics, PREFIX};
use crate::register::{Address, NAME, Registration};
use crate::registrar::Registrar;
use crate::source::Store;
use crate::source::cluster::{ClusterSource, Listed};
use crate::source::file::FileSource;

/// Runs the webhook until SIGTERM or SIGINT.
///
/// # Errors
/// What keeps it from starting, or a background task that ended.
pub async fn run(args: Args) -> anyhow::Result<()> {
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
        names,
        log_format: _,
    } = args;
    let client = match (&policy_file, needs_cluster(&tls, &registration)) {
        (Some(_), false) => None,
        _ => Some(connect(kubeconfig.as_deref()).await?),
    };
    let settings = names.settings(&namespace);
    let mut registry = Registry::default();
    let metrics = Metrics::new(registry.sub_registry_with_prefix(PREFIX));
    let store = Store::new(settings.clone(), metrics.clone());
    let stop = CancellationToken::new();
    let mut tasks = Tasks::new(stop.clone());

    let listed = match (policy_file, &client) {
        (Some(path), _) => {
            let source = FileSource::open(&path, store.clone())?;
            tasks.spawn("policy file", source.run(stop.clone()));
            None
        }
        (None, Some(client)) => {
            let source = ClusterSource::new(client.clone(), store.clone());
            let listed = source.listed();
            tasks.spawn("watches", source.run(stop.clone()));
            Some(listed)
        }
        (None, None) => bail!("--policy-file or a cluster is needed"),
    };

    let address = address(&registration, &namespace);
    let identity = identity.unwrap_or_else(own_name);
    let (certs, keeper) = certificates(&tls, client.clone(), &namespace, identity, &address, bind).await?;
    certs.register_metrics(registry.sub_registry_with_prefix(PREFIX));
    tasks.spawn("certificates", keeper.run(stop.clone()));

    let registered = match client {
        Some(client) if registration.register => {
            let wanted = Registration { settings, ..Registration::new(address, &namespace) };
            let wanted = Registration { timeout_seconds: registration.timeout_seconds, ..wanted };
            let registrar =
                Registrar::new(client, wanted, certs.clone(), store.snapshot(), store.changes());
            let registered = registrar.registered();
            tasks.spawn("registration", registrar.run(stop.clone()));
            Some(registered)
        }
        Some(client) if registration.inject_ca => {
            let injector = Injector::new(client, Kind::Mutating, NAME, certs.clone());
            let registered = injector.registered();
            tasks.spawn("caBundle", injector.run(stop.clone()));
            Some(registered)
        }
        _ => None,
    };

    let context = Context::new(store.snapshot(), metrics.clone(), limits.max_in_flight);
    let readiness = readiness(context.clone(), certs.clone(), listed, registered);
    let status_stop = CancellationToken::new();
    if !metrics_bind.is_empty() {
        let at: SocketAddr = metrics_bind
            .parse()
            .with_context(|| format!("--metrics-bind {metrics_bind:?}: expected ADDRESS:PORT or nothing"))?;
        let listener = listen(at).await?;
        let router = http::status(readiness, Arc::new(registry));
        let service = TowerToHyperService::new(router);
        let bounds = Limits { drain: Duration::from_secs(1), connections: 64, ..Limits::default() };
        tasks.spawn("status", serve::serve(listener, None, service, bounds, status_stop.clone()));
    }
    let clients = tls.client_ca_file.map(|ca_file| ClientAuth { ca_file, names: tls.client_names });
    let config = certs.server_config(clients.as_ref())?;
    let listener = listen(bind).await?;
    let service = TowerToHyperService::new(http::webhook(context.clone()));
    let LimitArgs { max_in_flight: _, max_connections, drain_delay, drain_timeout } = limits;
    let bounds = Limits { connections: max_connections, drain: drain_timeout, ..Limits::default() };
    let server = tokio::spawn(serve::serve(listener, Some(config), service, bounds, stop.clone()));

    let ended = tasks.until_signal().await;
    context.leaving.store(true, Ordering::Relaxed);
    if ended.is_ok() {
        tracing::info!(?drain_delay, "leaving: not ready any more, still accepting");
        tokio::select! {
            () = tokio::time::sleep(drain_delay) => {}
            () = signalled() => bail!("aborted by a second signal"),
        }
    }
    stop.cancel();
    tokio::select! {
        _ = server => {}
        () = signalled() => bail!("aborted by a second signal"),
    }
    status_stop.cancel();
    ended
}

fn needs_cluster(tls: &TlsArgs, registration: &RegistrationArgs) -> bool {
    tls.tls_dir.is_none() || registration.register || registration.inject_ca
}

async fn connect(kubeconfig: Option<&std::path::Path>) -> anyhow::Result<Client> {
    let Some(path) = kubeconfig else {
        return Client::try_default().await.context("no cluster: set --kubeconfig, or --policy-file and --tls-dir");
    };
    let read = Kubeconfig::read_from(path).with_context(|| format!("--kubeconfig {}", path.display()))?;
    let config = kube::Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

async fn listen(at: SocketAddr) -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind(at).await.with_context(|| format!("cannot listen on {at}"))?;
    tracing::info!(address = %listener.local_addr()?, "listening");
    Ok(listener)
}

fn own_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}-{}", host.trim(), std::process::id())
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
            host.and_then(|uri| uri.host().map(|h| h.trim_matches(['[', ']']).to_owned())).into_iter().collect()
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
) -> anyhow::Result<(Certs, Keeper)> {
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
) -> Readiness {
    Arc::new(move || {
        let known = registered.as_ref().is_none_or(|registered| *registered.borrow());
        context.metrics.registered.set(i64::from(registered.is_some() && known));
        if context.leaving.load(Ordering::Relaxed) {
            return Err("leaving".into());
        }
        if !certs.ready() {
            return Err("no certificate yet".into());
        }
        if let Some(listed) = &listed {
            listed.check()?;
        }
        if known { Ok(()) } else { Err("the webhook configuration does not carry our CA yet".into()) }
    })
}

/// Background tasks that must not end before the program does.
struct Tasks {
    set: JoinSet<&'static str>,
    stop: CancellationToken,
}

impl Tasks {
    fn new(stop: CancellationToken) -> Self {
        Self { set: JoinSet::new(), stop }
    }

    fn spawn(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.set.spawn(async move {
            task.await;
            name
        });
    }

    /// Returns at the first signal, or with an error when a task ends.
    async fn until_signal(&mut self) -> anyhow::Result<()> {
        tokio::select! {
            () = signalled() => Ok(()),
            Some(ended) = self.set.join_next(), if !self.stop.is_cancelled() => match ended {
                Ok(name) => bail!("background task ended: {name}"),
                Err(error) => bail!("background task failed: {error}"),
            },
        }
    }
}

/// The next SIGTERM or SIGINT.
async fn signalled() {
    let (Ok(mut term), Ok(mut int)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
}
