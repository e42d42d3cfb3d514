//! What is counted and timed. Labels are closed sets: a verb, an outcome, a class of refusal.

use std::time::Duration;

use gpu_migrate_runtime::serve::ConnectionMetrics;
use gpu_migrate_runtime::trace::SpanMetrics;
use gpu_migrate_runtime::watch::SkippedObjects;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)] // the names are the documentation
pub enum Verb {
    Filter,
    FilterDryrun,
    Prioritize,
    Preempt,
    Bind,
    Predicates,
}

impl Verb {
    /// The last part of its path.
    #[must_use]
    pub const fn path(self) -> &'static str {
        match self {
            Verb::Filter => "filter",
            Verb::FilterDryrun => "filter-dryrun",
            Verb::Prioritize => "prioritize",
            Verb::Preempt => "preempt",
            Verb::Bind => "bind",
            Verb::Predicates => "predicates",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum Outcome {
    /// An answer that lets the pod go on.
    Ok,
    /// No node, no victims or no card: the pod waits.
    Refused,
    /// We could not decide or not carry it out.
    Error,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VerbLabel {
    verb: Verb,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabel {
    verb: Verb,
    outcome: Outcome,
}

#[derive(Clone, Debug)]
pub struct Metrics {
    seconds: Family<VerbLabel, Histogram, fn() -> Histogram>,
    calls: Family<CallLabel, Counter>,
    /// Choices made by us that the watch has not confirmed yet.
    pub assumptions: Gauge,
    pub nodes: Gauge,
    /// Pods known that ask for cards.
    pub pods: Gauge,
    /// Cards on which both kinds, or too much, were found.
    pub disputed_cards: Gauge,
    /// Binds whose outcome had to be looked up.
    pub looked_up: Counter,
    /// Assumptions given up because the pod was not bound after all.
    pub expired: Counter,
    /// Gang members whose held bind was given up.
    pub gang_released: Counter,
    pub gang_bound: Counter,
    /// Nodes annotated to requeue pods that only the extender refused.
    pub requeues: Counter,
    /// 1 while this replica may answer, or waits beside a scheduler that does not lead.
    pub ready: Gauge,
    /// Calls without a valid certificate or token.
    pub unauthorized: Counter,
    /// Objects of the watches that could not be read.
    pub skipped_objects: SkippedObjects,
    pub connections: ConnectionMetrics,
    pub spans: SpanMetrics,
    /// How long the lock of the cluster's state is held.
    pub state_lock: Histogram,
}

/// From 100 µs to 25 s, as a bind may be held for a gang.
const BUCKETS: [f64; 15] =
    [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 15.0, 30.0];

fn histogram() -> Histogram {
    Histogram::new(BUCKETS)
}

impl Metrics {
    /// Makes all metrics known to `registry`, under `gpu_migrate_extender_`.
    pub fn register(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("gpu_migrate_extender");
        let metrics = Self {
            seconds: Family::new_with_constructor(histogram),
            calls: Family::default(),
            assumptions: Gauge::default(),
            nodes: Gauge::default(),
            pods: Gauge::default(),
            disputed_cards: Gauge::default(),
            looked_up: Counter::default(),
            expired: Counter::default(),
            gang_released: Counter::default(),
            gang_bound: Counter::default(),
            requeues: Counter::default(),
            ready: Gauge::default(),
            unauthorized: Counter::default(),
            skipped_objects: SkippedObjects::default(),
            connections: ConnectionMetrics::default(),
            spans: SpanMetrics::default(),
            state_lock: Histogram::new([0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1, 1.0]),
        };
        let m = &metrics;
        m.skipped_objects.register(registry);
        m.connections.register(registry);
        m.spans.register(registry);
        let version = vec![("version", env!("CARGO_PKG_VERSION"))];
        registry.register("build", "Version of the program", Info::new(version));
        registry.register_with_unit("verb", "Time to answer", Unit::Seconds, m.seconds.clone());
        registry.register_with_unit(
            "state_lock",
            "How long the lock of the cluster's state is held at a time; other calls wait meanwhile",
            Unit::Seconds,
            m.state_lock.clone(),
        );
        registry.register("calls", "Calls by verb and outcome", m.calls.clone());
        registry.register(
            "assumed_pods",
            "Pods bound by this replica and not confirmed by the watch yet",
            m.assumptions.clone(),
        );
        registry.register("nodes", "Nodes known", m.nodes.clone());
        registry.register("pods", "Pods known that ask for cards", m.pods.clone());
        registry.register(
            "disputed_cards",
            "Cards found with both kinds or too much on them",
            m.disputed_cards.clone(),
        );
        registry.register("binds_looked_up", "Binds whose outcome was looked up", m.looked_up.clone());
        registry.register(
            "assumed_pods_expired",
            "Assumed pods that were not bound after all; their cards are free again",
            m.expired.clone(),
        );
        registry.register("gang_members_released", "Held binds given up", m.gang_released.clone());
        registry.register("gangs_bound", "Gangs bound whole", m.gang_bound.clone());
        registry.register(
            "requeues",
            "Node annotations written so that the scheduler requeues waiting pods",
            m.requeues.clone(),
        );
        registry.register(
            "ready",
            "1 while this replica may answer, or waits beside a scheduler that does not lead",
            m.ready.clone(),
        );
        registry.register(
            "unauthorized",
            "Calls without a valid certificate or token",
            m.unauthorized.clone(),
        );
        metrics
    }

    pub fn observe(&self, verb: Verb, outcome: Outcome, took: Duration) {
        self.seconds.get_or_create(&VerbLabel { verb }).observe(took.as_secs_f64());
        self.calls.get_or_create(&CallLabel { verb, outcome }).inc();
    }
}
