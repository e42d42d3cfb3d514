//! The verbs over the cluster's state. Filter, prioritize and preempt only look (I7); bind alone commits.

mod bind;
mod filter;
mod gang;
mod preempt;
mod reasons;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use gpu_migrate_model::ask::PodKind;
use gpu_migrate_model::crd::GPUConfigSpec;
use parking_lot::{Mutex, RwLock};

use crate::api::Api;
use crate::metrics::{Metrics, Outcome};
use crate::score::{Judge, Order};
use crate::state::node::{NodeFacts, ShadowFacts};
use crate::state::pod::{PodFacts, Rules};
use crate::state::quota::{Exceeded, Used};
use crate::state::{Change, Cluster};

/// Now, by both clocks.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// For deadlines.
    pub instant: Instant,
    /// For `predicate-time`: nanoseconds since 1970.
    pub unix_nanos: u128,
}

/// Where the time comes from.
pub type Clock = Arc<dyn Fn() -> Now + Send + Sync>;

/// The machine's clocks.
#[must_use]
pub fn machine_clock() -> Clock {
    Arc::new(|| Now {
        instant: Instant::now(),
        unix_nanos: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos(),
    })
}

/// What is configured.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How pods are read.
    pub rules: Rules,
    /// How nodes and cards are compared.
    pub order: Order,
    /// How long a choice whose binding may or may not have been made keeps its cards before the pod is looked up and,
    /// if it is not bound, its cards are given back.
    pub doubt: Duration,
    /// Limit of one request to the API server; below the scheduler's `httpTimeout`.
    pub api_timeout: Duration,
    /// How long the first member of a gang waits for the last; below the scheduler's `httpTimeout`.
    pub gang_timeout: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            rules: Rules::default(),
            order: Order::default(),
            doubt: Duration::from_secs(15),
            api_timeout: Duration::from_secs(10),
            gang_timeout: Self::GANG_TIMEOUT,
        }
    }
}

/// Whether a replica is the one that binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leads {
    /// Another one is.
    Not,
    /// There is no other.
    Alone,
    /// It is, certainly until then.
    Until(Instant),
}

/// An answer: the body and what to count it as.
#[derive(Debug)]
pub struct Reply {
    /// JSON.
    pub body: Vec<u8>,
    /// For the metrics.
    pub outcome: Outcome,
}

/// The extender without its sockets.
pub struct Engine {
    cluster: RwLock<Cluster>,
    api: Arc<dyn Api>,
    clock: Clock,
    settings: Settings,
    judge: Judge,
    /// UIDs of the pods that are being bound right now.
    binding: Mutex<std::collections::HashSet<Arc<str>>>,
    gangs: Mutex<gang::Gangs>,
    /// Caches are filled.
    synced: AtomicBool,
    /// Until when this replica is certainly the one that binds.
    leads: Mutex<Leads>,
    /// Nodes with more room than the scheduler can see.
    woken: tokio::sync::mpsc::UnboundedSender<Arc<str>>,
    metrics: Metrics,
}

impl Engine {
    /// An engine over an empty cluster: not synced, not leading. The second value tells of nodes with new room.
    pub fn new(
        api: Arc<dyn Api>,
        settings: Settings,
        clock: Clock,
        metrics: Metrics,
    ) -> (Arc<Self>, tokio::sync::mpsc::UnboundedReceiver<Arc<str>>) {
        let judge = Judge::new(settings.order);
        let (woken, wakes) = tokio::sync::mpsc::unbounded_channel();
        let engine = Self {
            cluster: RwLock::new(Cluster::new()),
            api,
            clock,
            settings,
            judge,
            binding: Mutex::default(),
            gangs: Mutex::default(),
            synced: AtomicBool::new(false),
            leads: Mutex::new(Leads::Not),
            woken,
            metrics,
        };
        (Arc::new(engine), wakes)
    }

    /// What is configured.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What is counted.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Caches are filled, or not any more.
    pub fn set_synced(&self, synced: bool) {
        self.synced.store(synced, Ordering::Release);
        self.metrics.ready.set(i64::from(self.is_ready()));
    }

    /// This replica binds, or not any more.
    pub fn set_leading(&self, leads: Leads) {
        *self.leads.lock() = leads;
        self.metrics.ready.set(i64::from(self.is_ready()));
    }

    /// Whether it may answer.
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

    /// Looks at the state.
    pub fn read<T>(&self, look: impl FnOnce(&Cluster) -> T) -> T {
        look(&self.cluster.read())
    }

    /// Fills the state with many objects at once.
    pub fn fill(&self, fill: impl FnOnce(&mut Cluster)) {
        let mut cluster = self.cluster.write();
        cluster.load();
        fill(&mut cluster);
        cluster.settle();
        drop(cluster);
        self.gauge();
    }

    /// A pod was added or changed in the API.
    pub fn set_pod(&self, pod: PodFacts) {
        // More room by a pod's own change is seen by the scheduler itself; a gang that is complete now is not.
        let gang = pod.gang.clone();
        let mut cluster = self.cluster.write();
        let members = |cluster: &Cluster| gang.as_ref().map_or(0, |gang| cluster.members(&gang.key).count());
        let before = members(&cluster);
        cluster.set_pod(pod);
        let complete = gang
            .as_ref()
            .is_some_and(|gang| before < gang.size as usize && members(&cluster) >= gang.size as usize);
        drop(cluster);
        if complete {
            self.wake_any();
        }
    }

    /// A pod is gone or has finished.
    pub fn remove_pod(&self, uid: &str) {
        self.cluster.write().remove_pod(uid);
        self.drop_member(uid);
    }

    /// A Node was added or changed.
    pub fn set_node(&self, name: &str, facts: NodeFacts) {
        self.cluster.write().set_node(name, facts);
    }

    /// A Node is gone.
    pub fn remove_node(&self, name: &str) {
        self.cluster.write().remove_node(name);
    }

    /// A GPUShadow was added or changed: what the scheduler does not watch.
    pub fn set_shadow(&self, name: &str, shadow: ShadowFacts) {
        let change = self.cluster.write().set_shadow(name, shadow);
        self.wake_if(change, name);
    }

    /// A GPUShadow is gone.
    pub fn remove_shadow(&self, name: &str) {
        self.cluster.write().remove_shadow(name);
    }

    /// The owner's GPUConfig.
    pub fn set_config(&self, config: GPUConfigSpec) {
        self.cluster.write().set_config(config);
        self.wake_any();
    }

    /// The quotas that `pod` would break: with what its gang still misses, without what it holds itself.
    fn exceeded(&self, cluster: &Cluster, pod: &PodFacts) -> Vec<Exceeded> {
        if cluster.quotas().is_empty() || pod.kind != PodKind::Shared || cluster.is_placed(&pod.uid) {
            return Vec::new();
        }
        let more = match &pod.gang {
            Some(gang) => Used::by(gang::still_missing(cluster, &gang.key, gang.size, Some(pod)).into_iter()),
            None => Used::by(std::iter::once(pod)),
        };
        cluster.quotas().exceeded(&pod.namespace, more, Used::default())
    }

    fn wake_if(&self, change: Change, node: &str) {
        if change == Change::MoreRoom {
            // Nobody listens in a snapshot.
            let _ = self.woken.send(Arc::from(node));
        }
    }

    /// Wakes all waiting pods, by whichever node.
    fn wake_any(&self) {
        let node =
            self.cluster.read().slots().find(|slot| slot.facts.is_some()).map(|slot| Arc::clone(&slot.name));
        if let Some(node) = node {
            let _ = self.woken.send(node);
        }
    }

    /// Touches nodes that got room which the scheduler cannot see, if anyone is waiting for room.
    pub async fn wake(&self, mut nodes: Vec<Arc<str>>) {
        nodes.sort_unstable();
        nodes.dedup();
        let waiting = self.cluster.read().pods().any(|pod| pod.node.is_none() && !pod.gated);
        for node in nodes.iter().filter(|_| waiting && self.is_ready()) {
            match self.api.touch_node(node).await {
                Ok(()) => _ = self.metrics.wakes.inc(),
                Err(problem) => tracing::warn!(%node, problem, "waiting pods were not woken"),
            }
        }
    }

    /// Looks up the pods whose binding may or may not have been made, and gives cards back where it was not.
    pub async fn resolve_doubts(&self) {
        self.end_standing_back();
        let overdue = self.cluster.read().overdue((self.clock)().instant);
        for pod in overdue {
            self.resolve(&pod).await;
        }
        self.gauge();
    }

    /// Sets the gauges of the state's size.
    pub fn gauge(&self) {
        let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        let cluster = self.cluster.read();
        self.metrics.nodes.set(count(cluster.node_count()));
        self.metrics.pods.set(count(cluster.pod_count()));
        self.metrics.assumptions.set(count(cluster.assumption_count()));
        self.metrics.disputed_cards.set(count(cluster.slots().map(|slot| slot.books.disputed()).sum()));
    }
}
