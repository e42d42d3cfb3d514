//! Flags, and the parts put together: standalone from a snapshot, or beside a real API server.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Parser;
use gpu_migrate_certs::{Certs, ClientAuth, Lifetimes, Options, Source, wall_clock};
use gpu_migrate_model::names;
use gpu_migrate_runtime::leader::{self, Candidate};
use gpu_migrate_runtime::serve::{Limits, serve};
use gpu_migrate_runtime::trace::{TraceArgs, Tracer};
use gpu_migrate_runtime::{LogFormat, Tasks, admin, client, default_identity};
use hyper_util::service::TowerToHyperService;
use kube::Client;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio_util::sync::CancellationToken;

use crate::api::{Api, Memory};
use crate::engine::{Engine, Leads, Settings, machine_clock, requeue};
use crate::kube_api::Kube;
use crate::metrics::Metrics;
use crate::serve::{auth::Callers, verbs};
use crate::state::pod::Rules;
use crate::state::{Cluster, Freed};
use crate::{snapshot, watch};
use gpu_migrate_model::score::ScoringStrategy;

/// Places shared pods beside legacy pods, card by card: an extender for kube-scheduler.
#[derive(Debug, Parser)]
#[command(name = "gpu-migrate-extender", version, about, long_about = None)]
pub struct Args {
    /// Serve from this Kubernetes List (JSON) of Nodes, Pods and GPUShadows; binds apply in memory
    #[arg(long, env = "GPU_MIGRATE_SNAPSHOT", value_name = "FILE")]
    snapshot: Option<PathBuf>,
    /// Kubeconfig of the cluster [default: KUBECONFIG, in-cluster]
    #[arg(long, env = "GPU_MIGRATE_KUBECONFIG", value_name = "FILE", conflicts_with = "snapshot")]
    kubeconfig: Option<PathBuf>,
    /// Where the scheduler's calls are served
    #[arg(long, env = "GPU_MIGRATE_BIND", value_name = "ADDR", default_value = "127.0.0.1:3456")]
    bind: SocketAddr,
    /// Where /livez, /readyz and /metrics are served in the clear; empty: nowhere
    #[arg(long, env = "GPU_MIGRATE_METRICS_BIND", value_name = "ADDR", default_value = "[::]:9403")]
    metrics_bind: String,
    /// Serve TLS with tls.crt and tls.key of this folder, or with a CA of our own kept there
    #[arg(long, env = "GPU_MIGRATE_TLS_DIR", value_name = "DIR")]
    tls_dir: Option<PathBuf>,
    /// DNS names and addresses in a certificate of our own
    #[arg(
        long,
        env = "GPU_MIGRATE_TLS_NAMES",
        value_name = "NAME,…",
        value_delimiter = ',',
        default_value = "localhost,127.0.0.1,gpu-migrate-extender,gpu-migrate-extender.gpu-migrate-system.svc"
    )]
    tls_names: Vec<String>,
    /// Demand a client certificate that one of these CAs has signed
    #[arg(long, env = "GPU_MIGRATE_CLIENT_CA_FILE", value_name = "FILE", requires = "tls_dir")]
    client_ca_file: Option<PathBuf>,
    /// Common or DNS names of the clients that may call [default: whoever the CA has signed]
    #[arg(
        long,
        env = "GPU_MIGRATE_CLIENT_NAMES",
        value_name = "NAME,…",
        value_delimiter = ',',
        requires = "client_ca_file"
    )]
    client_names: Vec<String>,
    /// Demand the token in this file, as bearer token or as basic password (urlPrefix: https://x:TOKEN@host/scheduler)
    #[arg(long, env = "GPU_MIGRATE_TOKEN_FILE", value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Which of the nodes and cards that fit is best
    #[arg(long, env = "GPU_MIGRATE_SCORING", value_enum, default_value_t)]
    scoring: ScoringStrategy,
    /// Filter answers all nodes that fit, and not the best alone: for a scheduler whose own scores are to count, or another extender's
    #[arg(long, env = "GPU_MIGRATE_ANSWER_ALL_NODES")]
    answer_all_nodes: bool,
    /// Names of the schedulers that call this extender: for waiting pods of theirs it requeues capacity that is freed
    #[arg(
        long = "scheduler-name",
        env = "GPU_MIGRATE_SCHEDULER_NAME",
        value_name = "NAME,…",
        value_delimiter = ',',
        default_value = names::SCHEDULER
    )]
    schedulers: Vec<String>,
    /// Longest wait for one answer of the API server, in seconds; twice this and --gang-timeout are below the scheduler's
    /// httpTimeout
    #[arg(long, env = "GPU_MIGRATE_API_TIMEOUT", value_name = "SECONDS", default_value_t = Settings::API_TIMEOUT.as_secs())]
    api_timeout: u64,
    /// The API server's --request-timeout, in seconds: so long a bind that it did not answer keeps its cards
    #[arg(
        long,
        env = "GPU_MIGRATE_REQUEST_TIMEOUT",
        value_name = "SECONDS",
        default_value_t = Settings::REQUEST_TIMEOUT.as_secs()
    )]
    request_timeout: u64,
    /// How long the first member of a gang waits for the last, in seconds
    #[arg(long, env = "GPU_MIGRATE_GANG_TIMEOUT", value_name = "SECONDS", default_value_t = Settings::GANG_TIMEOUT.as_secs())]
    gang_timeout: u64,
    /// Do not check the memory of whole cards, as gpu-admission does not
    #[arg(long, env = "GPU_MIGRATE_GPU_ADMISSION_COMPAT")]
    gpu_admission_compat: bool,
    /// Be one of several replicas: the one that holds the Lease is ready and binds
    #[arg(long, env = "GPU_MIGRATE_LEADER_ELECT")]
    leader_elect: bool,
    /// Be beside one of several schedulers that elect a leader: lead from its first call on, and never while the extender beside
    /// another may still bind
    #[arg(long, env = "GPU_MIGRATE_BESIDE_SCHEDULER", conflicts_with = "leader_elect")]
    beside_scheduler: bool,
    /// Namespace of the Lease
    #[arg(long, env = "GPU_MIGRATE_NAMESPACE", default_value = "gpu-migrate-system")]
    namespace: String,
    /// Name of this replica in the Lease [default: HOST-PID]
    #[arg(long, env = "GPU_MIGRATE_IDENTITY")]
    identity: Option<String>,
    #[command(flatten)]
    trace: TraceArgs,
    /// Form of the log
    #[arg(long, env = "GPU_MIGRATE_LOG_FORMAT", value_enum, default_value_t)]
    pub log_format: LogFormat,
}

/// Which Lease, who we are, and when we may have it.
#[derive(Clone)]
struct Election {
    namespace: String,
    identity: String,
    /// As soon as the scheduler calls, whoever has it; else when nobody has it.
    when_called: bool,
}

impl Election {
    fn candidate(&self, client: Client) -> Candidate {
        let lease = format!("{}-extender", names::SCHEDULER);
        Candidate::new(client, &self.namespace, &lease, &self.identity)
    }
}

/// For a request about the Lease.
const LEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// How often the token file is read.
const TOKEN_PERIOD: Duration = Duration::from_secs(10);

/// File descriptors beside those of the scheduler's connections: watches, metrics, log, standard streams.
const OTHER_FILES: u64 = 128;

/// How many connections may be open: one for each bind that is held for a gang, and as many for all other calls.
///
/// Raises the soft limit of open files as far as it must, as Go programs do: containerd leaves it at 1,024 since 2.0.
fn connections() -> usize {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let wanted = 2 * Settings::HELD_BINDS as u64 + OTHER_FILES;
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return Settings::HELD_BINDS };
    let raised = wanted.min(hard);
    let files = if soft >= wanted || setrlimit(Resource::RLIMIT_NOFILE, raised, hard).is_err() {
        soft
    } else {
        raised
    };
    usize::try_from(files.min(wanted).saturating_sub(OTHER_FILES).max(2)).unwrap_or(Settings::HELD_BINDS)
}

/// How long the server and the other tasks may take to end.
const SHUTDOWN: Duration = Duration::from_secs(16);

/// Runs with `args` until `shutdown`. Parses nothing, reads nothing from the environment.
///
/// # Errors
/// With a text for the owner: a flag that cannot be followed, a port that is taken, a snapshot that cannot be read.
pub async fn run(args: Args, shutdown: CancellationToken) -> anyhow::Result<()> {
    // Exhaustive, so that a flag that nobody reads does not compile.
    let Args {
        snapshot,
        kubeconfig,
        bind,
        metrics_bind,
        tls_dir,
        tls_names,
        client_ca_file,
        client_names,
        token_file,
        scoring,
        answer_all_nodes,
        schedulers,
        api_timeout,
        request_timeout,
        gang_timeout,
        gpu_admission_compat,
        leader_elect,
        beside_scheduler,
        namespace,
        identity,
        trace,
        log_format: _,
    } = args;
    let mut tasks = Tasks::new(shutdown);

    let open = client_ca_file.is_none() && token_file.is_none();
    anyhow::ensure!(
        bind.ip().is_loopback() || (tls_dir.is_some() && !open),
        "--bind {bind}: bind moves pods, so beyond loopback --tls-dir and one of --client-ca-file, --token-file are needed"
    );
    let callers = match &token_file {
        Some(path) => Callers::anyone().with_token_file(path)?,
        None => Callers::anyone(),
    };
    if let Some(path) = token_file {
        let (callers, stop) = (callers.clone(), tasks.stop());
        let reload = async move {
            let mut every = tokio::time::interval(TOKEN_PERIOD);
            loop {
                every.tick().await;
                if let Err(error) = callers.reload(&path) {
                    tracing::warn!(%error, "the token stays as it was");
                }
            }
        };
        tasks.spawn("token file", async move {
            stop.run_until_cancelled(reload).await;
        });
    }
    let connections = connections();
    let mut registry = Registry::default();
    let metrics = Metrics::register(&mut registry);
    let tracer = Tracer::start(&trace, "gpu-migrate-extender", None, metrics.spans.clone(), &mut tasks)?;
    let settings = Settings {
        rules: Rules { whole_card_memory: !gpu_admission_compat, ..Rules::default() },
        scoring,
        one_node: !answer_all_nodes,
        api_timeout: Duration::from_secs(api_timeout),
        unconfirmed_timeout: Duration::from_secs(request_timeout),
        gang_timeout: Duration::from_secs(gang_timeout),
        schedulers,
        held_binds: connections / 2,
        beside_scheduler,
        tracer,
    };

    let tls = match &tls_dir {
        None => None,
        Some(folder) => {
            let options = Options {
                owner: "gpu-migrate-extender".to_owned(),
                names: tls_names,
                // The scheduler reads the CA once, when it starts.
                lifetimes: Lifetimes::default(),
            };
            let (certs, rotator) = Certs::start(Source::folder(folder), options, wall_clock()).await?;
            certs.register_metrics(&mut registry);
            tasks.spawn("certificate rotation", rotator.run(tasks.stop()));
            let clients = client_ca_file.map(|ca_file| ClientAuth { ca_file, names: client_names });
            Some(certs.server_config(clients.as_ref())?)
        }
    };

    let mut lease = None;
    let (engine, requeues) = match snapshot {
        Some(path) => standalone(&path, settings, metrics)?,
        None => {
            let identity = identity.unwrap_or_else(default_identity);
            let election = (leader_elect || beside_scheduler).then_some(Election {
                namespace,
                identity,
                when_called: beside_scheduler,
            });
            let client = client::connect(kubeconfig.as_deref(), None)
                .await
                .context("a cluster is needed without --snapshot")?;
            lease = election.as_ref().map(|election| election.candidate(client.clone()));
            cluster(&mut tasks, client, election, settings, metrics)
        }
    };
    background(&mut tasks, &engine, requeues);

    let ready = {
        let engine = Arc::clone(&engine);
        move || engine.unwell().map_or(Ok(()), |why| Err(why.to_owned()))
    };
    admin::spawn(&mut tasks, &metrics_bind, admin::router(Arc::new(registry), ready)).await?;
    let listener = TcpListener::bind(bind).await.with_context(|| format!("--bind {bind}"))?;
    tracing::info!(address = %listener.local_addr()?, tls = tls.is_some(), "serving the scheduler");
    let open = engine.metrics().connections.clone();
    let service = TowerToHyperService::new(verbs(Arc::clone(&engine), callers));
    // All are of one client, the scheduler.
    let limits = Limits { connections, per_peer: connections, metrics: open, ..Limits::default() };
    tasks.spawn("scheduler server", serve(listener, tls, service, limits, tasks.stop()));
    let outcome = tasks.run(SHUTDOWN).await;
    // Only where every bind has its answer: else the next leader waits until the Lease expires.
    if let Some(lease) = lease.filter(|_| engine.read(Cluster::assumption_count) == 0) {
        match tokio::time::timeout(LEASE_TIMEOUT, lease.release()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "Lease not released; it expires by itself"),
            Err(_) => tracing::warn!("Lease not released; it expires by itself"),
        }
    }
    Ok(outcome?)
}

type Parts = (Arc<Engine>, UnboundedReceiver<Freed>);

fn standalone(path: &std::path::Path, settings: Settings, metrics: Metrics) -> anyhow::Result<Parts> {
    let start = std::time::Instant::now();
    let rules = settings.rules.clone();
    let (engine, requeues) = Engine::new(Arc::new(Memory::default()), settings, machine_clock(), metrics);
    let mut loaded = Ok(());
    engine.fill(|cluster| loaded = snapshot::load(path, &rules, cluster));
    loaded?;
    engine.set_leading(Leads::Alone);
    engine.set_synced(true);
    let (nodes, pods) = engine.read(|cluster| (cluster.node_count(), cluster.pod_count()));
    tracing::info!(nodes, pods, milliseconds = start.elapsed().as_millis(), "snapshot loaded");
    Ok((engine, requeues))
}

fn cluster(
    tasks: &mut Tasks,
    client: Client,
    election: Option<Election>,
    settings: Settings,
    metrics: Metrics,
) -> Parts {
    let rules = settings.rules.clone();
    let api: Arc<dyn Api> = Arc::new(Kube::new(client.clone(), rules, settings.api_timeout));
    let (engine, requeues) = Engine::new(api, settings, machine_clock(), metrics);
    let elected = CancellationToken::new();
    match election {
        None => {
            engine.set_leading(Leads::Alone);
            elected.cancel();
        }
        Some(election) => {
            let candidate = election.candidate(client.clone());
            let elect =
                elect(candidate, election.when_called, Arc::clone(&engine), elected.clone(), tasks.stop());
            tasks.spawn("leader election", elect);
        }
    }
    let (watching, stop) = (Arc::clone(&engine), tasks.stop());
    tasks.spawn("watches", async move {
        let watches = async {
            // Listed only now: after everything that the old leader can have bound.
            elected.cancelled().await;
            watch::run(watching, client).await;
        };
        stop.run_until_cancelled(watches).await;
    });
    (engine, requeues)
}

/// Runs for the Lease. Returns, and so ends the process, when it was ours and is lost.
async fn elect(
    mut candidate: Candidate,
    when_called: bool,
    engine: Arc<Engine>,
    elected: CancellationToken,
    stop: CancellationToken,
) {
    let mut alone = Instant::now();
    if when_called {
        match stop.run_until_cancelled(take_over_when_called(&engine, &mut candidate)).await {
            Some(from) => alone = from,
            None => return,
        }
    }
    // What the former leader has sent by then has arrived.
    let begin = || {
        _ = tokio::spawn(async move {
            tokio::time::sleep_until(alone.into()).await;
            elected.cancel();
        });
    };
    let until = |until| engine.set_leading(Leads::Until(until));
    leader::run(&mut candidate, stop, begin, until).await;
    engine.set_leading(Leads::Not);
}

/// Waits for the scheduler's call, and takes the Lease from the extender beside the scheduler that led before. Returns from when on
/// that one certainly binds no more.
async fn take_over_when_called(engine: &Engine, candidate: &mut Candidate) -> Instant {
    loop {
        engine.called().await;
        match tokio::time::timeout(LEASE_TIMEOUT, candidate.take_over()).await {
            Ok(Ok(Some(alone))) => return alone,
            // Another was faster; if it is still this one's turn, the scheduler calls again.
            Ok(Ok(None)) => {}
            Ok(Err(error)) => {
                tracing::warn!(%error, "Lease not taken; trying again at the scheduler's next call");
            }
            Err(_) => tracing::warn!("Lease not taken: no answer; trying again at the scheduler's next call"),
        }
    }
}

/// Looks up binds with unknown outcome, and requeues the pods that wait for capacity which the scheduler cannot see.
fn background(tasks: &mut Tasks, engine: &Arc<Engine>, mut requeues: UnboundedReceiver<Freed>) {
    let (unconfirmed, stop) = (Arc::clone(engine), tasks.stop());
    let look_up = async move {
        let mut every = tokio::time::interval(Duration::from_secs(1));
        loop {
            every.tick().await;
            unconfirmed.resolve_unconfirmed().await;
            unconfirmed.read_pod_groups().await;
            unconfirmed.lift_gates().await;
        }
    };
    tasks.spawn("look-up of unconfirmed binds", async move {
        stop.run_until_cancelled(look_up).await;
    });
    let (scoring, stop) = (Arc::clone(engine), tasks.stop());
    let refresh = async move {
        let mut every = tokio::time::interval(Duration::from_secs(1));
        loop {
            every.tick().await;
            let engine = Arc::clone(&scoring);
            // Much to compute, beside the calls of the scheduler.
            _ = tokio::task::spawn_blocking(move || engine.refresh_scorer()).await;
        }
    };
    tasks.spawn("scoring", async move {
        stop.run_until_cancelled(refresh).await;
    });
    let (requeuer, stop) = (Arc::clone(engine), tasks.stop());
    let requeue = async move {
        let mut freed = Vec::new();
        // What could not be written is told again: there is always something to wait for.
        while !freed.is_empty() || requeues.recv_many(&mut freed, usize::MAX).await > 0 {
            tokio::time::sleep(requeue::REQUEUE_DELAY).await;
            while let Ok(more) = requeues.try_recv() {
                freed.push(more);
            }
            freed = requeuer.requeue(freed).await;
        }
    };
    tasks.spawn("requeue of waiting pods", async move {
        stop.run_until_cancelled(requeue).await;
    });
}
