//! The verbs over the cluster's state. Filter, prioritize and preempt only look (I7); bind alone commits.

mod bind;
mod filter;
mod gang;
mod locked;
mod preempt;
mod reasons;
pub mod requeue;

pub use reasons::is_our_refusal;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use gpu_migrate_model::ask::PodKind;
use gpu_migrate_model::crd::GPUConfigSpec;
use gpu_migrate_model::names;
use gpu_migrate_model::score::{HostResources, ScoringStrategy};
use gpu_migrate_model::view::PodView;
use gpu_migrate_runtime::trace::Tracer;
use parking_lot::{Mutex, RwLock};

use self::locked::Locked;
use crate::api::Api;
use crate::metrics::{Metrics, Outcome};
use crate::score::NodeScorer;
use crate::state::node::{NodeFacts, ShadowFacts};
use crate::state::pod::{PodFacts, Rules, succeeded_member};
use crate::state::quota::{Asked, QuotaCheck};
use crate::state::{Cluster, Freed};

#[derive(Clone, Copy, Debug)]
pub struct Now {
    pub instant: Instant,
    /// For `predicate-time`: nanoseconds since 1970.
    pub unix_nanos: u128,
}

pub type Clock = Arc<dyn Fn() -> Now + Send + Sync>;

#[must_use]
pub fn machine_clock() -> Clock {
    Arc::new(|| Now {
        instant: Instant::now(),
        unix_nanos: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos(),
    })
}

#[derive(Clone, Debug)]
pub struct Settings {
    pub rules: Rules,
    /// How nodes and cards are compared.
    pub scoring: ScoringStrategy,
    /// Filter answers the best node alone, so that the scheduler neither asks for scores nor has scores of its own that count; but for
    /// pods with affinity or topology spread constraints, for which the scheduler's own scores are to count.
    pub one_node: bool,
    /// Names of the schedulers that ask this extender; others become known when they do.
    pub schedulers: Vec<String>,
    /// How long a choice whose binding may or may not have been made keeps its cards before the pod is looked up and,
    /// if it is not bound, its cards are given back: as long as the API server may still apply a request (its
    /// `--request-timeout`).
    pub unconfirmed_timeout: Duration,
    /// Limit of one request to the API server. A held bind may take [`Settings::gang_timeout`] and two of these, which is to be
    /// below the scheduler's `httpTimeout`.
    pub api_timeout: Duration,
    /// How long the first member of a gang waits for the last.
    pub gang_timeout: Duration,
    /// For how many pods of gangs binds are held at a time. Each is a connection of the scheduler, which needs some for its
    /// other calls.
    pub held_binds: usize,
    /// Its scheduler is one of several: until that one calls there is nothing to do.
    pub beside_scheduler: bool,
    /// Of pods whose review was traced.
    pub tracer: Tracer,
}

impl Settings {
    /// The default of [`Settings::gang_timeout`].
    pub const GANG_TIMEOUT: Duration = Duration::from_secs(18);
    /// The default of [`Settings::api_timeout`]. With that of gangs, below the 30 s of `httpTimeout` that we deploy.
    pub const API_TIMEOUT: Duration = Duration::from_secs(5);
    /// The default of [`Settings::unconfirmed_timeout`]: the API server's own default.
    pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
    /// The default of [`Settings::held_binds`]: half of the connections that are served.
    pub const HELD_BINDS: usize = 2_048;
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            rules: Rules::default(),
            scoring: ScoringStrategy::default(),
            one_node: false,
            schedulers: vec![names::SCHEDULER.to_owned()],
            unconfirmed_timeout: Self::REQUEST_TIMEOUT,
            api_timeout: Self::API_TIMEOUT,
            gang_timeout: Self::GANG_TIMEOUT,
            held_binds: Self::HELD_BINDS,
            beside_scheduler: false,
            tracer: Tracer::default(),
        }
    }
}

/// Whether a replica is the one that binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leads {
    Not,
    Alone,
    Until(Instant),
}

/// An answer: the body and what to count it as.
#[derive(Debug)]
pub struct Reply {
    pub body: Vec<u8>,
    pub outcome: Outcome,
}

pub struct Engine {
    cluster: Locked,
    api: Arc<dyn Api>,
    clock: Clock,
    settings: Settings,
    scorer: NodeScorer,
    /// UIDs of the pods that are being bound right now.
    binding: Mutex<HashSet<Arc<str>>>,
    gangs: Mutex<gang::Gangs>,
    synced: AtomicBool,
    /// Until when this replica is certainly the one that binds.
    leads: Mutex<Leads>,
    /// The scheduler has called although we may not answer.
    called: tokio::sync::Notify,
    /// Names of the schedulers that ask us.
    schedulers: RwLock<HashSet<Arc<str>>>,
    refused: requeue::Refused,
    /// What was freed while refused pods wait.
    requeue: tokio::sync::mpsc::UnboundedSender<Freed>,
    metrics: Metrics,
}

impl Engine {
    /// An engine over an empty cluster: not synced, not leading. The second value reports what was freed, for
    /// [`Engine::requeue`].
    pub fn new(
        api: Arc<dyn Api>,
        settings: Settings,
        clock: Clock,
        metrics: Metrics,
    ) -> (Arc<Self>, tokio::sync::mpsc::UnboundedReceiver<Freed>) {
        metrics.ready.set(i64::from(settings.beside_scheduler));
        let scorer = NodeScorer::new(settings.scoring);
        let schedulers = settings.schedulers.iter().map(|name| Arc::from(name.as_str())).collect();
        let (requeue, requeues) = tokio::sync::mpsc::unbounded_channel();
        let engine = Self {
            cluster: Locked::new(Arc::clone(&clock), metrics.state_lock.clone()),
            api,
            clock,
            settings,
            scorer,
            binding: Mutex::default(),
            gangs: Mutex::default(),
            synced: AtomicBool::new(false),
            leads: Mutex::new(Leads::Not),
            called: tokio::sync::Notify::new(),
            schedulers: RwLock::new(schedulers),
            refused: requeue::Refused::default(),
            requeue,
            metrics,
        };
        (Arc::new(engine), requeues)
    }

    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Works out again what nodes are compared by, where enough has changed: takes a while, and no lock for long. Not before caches are
    /// filled, as what is there first is the mix.
    pub fn refresh_scorer(&self) {
        if self.synced.load(Ordering::Acquire) {
            self.work_out_scorer();
        }
    }

    fn work_out_scorer(&self) {
        self.scorer.refresh(|look: &mut dyn FnMut(&Cluster)| self.read(look));
    }

    /// Caches are filled, or not any more.
    pub fn set_synced(&self, synced: bool) {
        if synced {
            self.work_out_scorer();
        }
        if !self.synced.swap(synced, Ordering::AcqRel) && synced {
            self.requeue_refused_earlier();
        }
        self.metrics.ready.set(i64::from(self.unwell().is_none()));
    }

    /// This replica binds, or not any more.
    pub fn set_leading(&self, leads: Leads) {
        *self.leads.lock() = leads;
        self.metrics.ready.set(i64::from(self.unwell().is_none()));
    }

    /// Waits until the scheduler calls although this replica is not ready.
    pub async fn called(&self) {
        self.called.notified().await;
    }

    /// Why something is wrong with this replica: it may not answer, and does not just wait for its scheduler's first call.
    #[must_use]
    pub fn unwell(&self) -> Option<&'static str> {
        let standby = self.settings.beside_scheduler && matches!(*self.leads.lock(), Leads::Not);
        if standby { None } else { self.not_ready() }
    }

    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.not_ready().is_none()
    }

    /// Why it may not answer. An Error makes the scheduler come again; "no nodes" would start a preemption.
    #[must_use]
    pub fn not_ready(&self) -> Option<&'static str> {
        if !self.synced.load(Ordering::Acquire) {
            Some("gpu-migrate-extender has not seen the whole cluster yet; the pod is tried again")
        } else if !self.leads_for(Duration::ZERO) {
            Some("this replica of gpu-migrate-extender is not the leader; the pod is tried again")
        } else {
            None
        }
    }

    /// Whether this replica will still lead in so much time, whatever happens.
    fn leads_for(&self, time: Duration) -> bool {
        match *self.leads.lock() {
            Leads::Not => false,
            Leads::Alone => true,
            Leads::Until(until) => (self.clock)().instant + time < until,
        }
    }

    pub fn read<T>(&self, look: impl FnOnce(&Cluster) -> T) -> T {
        self.cluster.read(look)
    }

    /// Puts off what can be computed at the end, until [`Engine::fill`].
    pub fn load(&self) {
        self.cluster.write(Cluster::load);
    }

    /// Fills the state with many objects at once.
    pub fn fill(&self, fill: impl FnOnce(&mut Cluster)) {
        self.cluster.write(|cluster| {
            cluster.load();
            fill(cluster);
            cluster.settle();
        });
        self.gauge();
    }

    /// All pods of the API are going to be listed: what it has not shown until [`Engine::end_list`] is gone.
    pub fn begin_list(&self) {
        self.cluster.write(Cluster::begin_list);
    }

    /// A pod was added or changed in the API.
    pub fn set_pod(&self, pod: PodFacts) {
        let (uid, gang) = (Arc::clone(&pod.uid), pod.gang.clone());
        let stuck = (pod.unschedulable && pod.node.is_none()).then(|| pod.shown());
        self.change(|cluster| {
            let Some(gang) = &gang else { return cluster.set_pod(pod) };
            let hinders = |cluster: &Cluster| cluster.pod(&uid).is_some_and(|pod| pod.unschedulable);
            let (before, hindered) = (cluster.coming(&gang.key), hinders(cluster));
            cluster.set_pod(pod);
            let size =
                cluster.pod(&uid).and_then(|pod| pod.gang.as_ref()).map_or(0, |gang| gang.size as usize);
            let complete = before < size && cluster.coming(&gang.key) >= size;
            if complete || hindered && !hinders(cluster) {
                // The scheduler cannot see that the others may go now.
                cluster.free_somewhere();
            }
        });
        if let (Some(gang), Some(name)) = (gang, stuck) {
            self.give_up_without(&gang, &uid, &name);
        }
    }

    /// A pod without cards was added or changed in the API.
    pub fn set_plain(&self, pod: &PodView<'_>) {
        let Some(node) = pod.node() else { return };
        let host = HostResources::requested(&pod.spec);
        if self.cluster.write(|cluster| cluster.set_plain(&pod.metadata.uid, node, host)) {
            self.scorer.count_plain(host);
        }
    }

    /// The pods of the API have been listed, since [`Engine::begin_list`].
    pub fn end_list(&self) {
        let gone = self.read(Cluster::unlisted);
        gone.iter().for_each(|uid| self.remove_pod(uid));
        self.cluster.write(Cluster::remove_unlisted_plain);
    }

    /// A pod has finished: it holds nothing any more. A member of a gang that has succeeded still counts as one.
    pub fn finish_pod(&self, pod: &PodView<'_>) {
        let uid = &*pod.metadata.uid;
        self.remove_pod(uid);
        if let Some((gang, owner)) = succeeded_member(pod) {
            self.change(|cluster| cluster.note_success(uid, gang, owner));
        }
    }

    /// A pod is gone.
    pub fn remove_pod(&self, uid: &str) {
        self.refused.clear(uid);
        self.change(|cluster| cluster.remove_pod(uid));
        self.drop_member(uid);
    }

    /// A Node was added or changed.
    pub fn set_node(&self, name: &str, facts: NodeFacts) {
        self.change(|cluster| cluster.set_node(name, facts));
    }

    pub fn remove_node(&self, name: &str) {
        self.change(|cluster| cluster.remove_node(name));
    }

    /// A GPUShadow was added or changed.
    pub fn set_shadow(&self, name: &str, shadow: ShadowFacts) {
        self.change(|cluster| cluster.set_shadow(name, shadow));
    }

    pub fn remove_shadow(&self, name: &str) {
        self.change(|cluster| cluster.remove_shadow(name));
    }

    pub fn set_config(&self, config: GPUConfigSpec) {
        self.change(|cluster| {
            if cluster.set_config(config) {
                cluster.free_somewhere();
            }
        });
    }

    /// The quotas that `pod` would break: with what its gang still misses, without what it holds itself.
    fn quota_check<'c>(&self, cluster: &'c Cluster, pod: &PodFacts) -> QuotaCheck<'c> {
        let more = match &pod.gang {
            _ if cluster.quotas().is_empty()
                || pod.kind != PodKind::Shared
                || cluster.is_placed(&pod.uid) =>
            {
                Asked::default()
            }
            Some(gang) => Asked::by(gang::still_missing(cluster, gang, Some(pod)).into_iter()),
            None => Asked::by(std::iter::once(pod)),
        };
        QuotaCheck::new(cluster.quotas(), &pod.namespace, more)
    }

    /// Looks up the pods whose binding may or may not have been made, and gives cards back where it was not.
    pub async fn resolve_unconfirmed(&self) {
        self.end_back_off();
        self.prune_refusals();
        let expired = self.read(|cluster| cluster.expired((self.clock)().instant));
        for pod in expired {
            self.resolve(&pod).await;
        }
        self.gauge();
    }

    /// Sets the gauges of the state's size.
    pub fn gauge(&self) {
        let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.read(|cluster| {
            self.metrics.nodes.set(count(cluster.node_count()));
            self.metrics.pods.set(count(cluster.pod_count()));
            self.metrics.assumptions.set(count(cluster.assumption_count()));
            self.metrics.disputed_cards.set(count(cluster.disputed_cards()));
        });
    }
}
