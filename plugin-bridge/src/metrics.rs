//! Metrics `gpu_migrate_node_agent_…`, and gpu-manager's four gauges, in the OpenMetrics text form.

use std::sync::Arc;
use std::time::Duration;

use gpu_migrate_model::card::CardState;
use gpu_migrate_runtime::trace::SpanMetrics;
use gpu_migrate_runtime::watch::SkippedObjects;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use crate::usage::Usage;

/// Seconds: 100 µs to 3 s.
const BUCKETS: [f64; 13] =
    [0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.3, 1.0, 3.0];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Kind {
    kind: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Outcome {
    kind: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ReadResult {
    result: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct State {
    state: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct IsolationLabel {
    isolation: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CardLabel {
    gpu: String,
}

/// All metrics of the agent. Clones share the same counters.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<Registry>,
    allocations: Family<Outcome, Counter>,
    allocate_seconds: Family<Kind, Histogram>,
    substitutions: Counter,
    registrations: Counter,
    upstream_registrations: Counter,
    taken_back: Counter,
    intruders_deleted: Counter,
    checkpoint_reads: Family<ReadResult, Counter>,
    cards: Family<State, Gauge>,
    drift: Family<CardLabel, Gauge>,
    isolation_ready: Family<IsolationLabel, Gauge>,
    failed_pods_deleted: Counter,
    publish_failures: Counter,
    /// What containers use of the cards.
    pub usage: Arc<Usage>,
    /// Objects of the watches that could not be read.
    pub skipped_objects: SkippedObjects,
    pub spans: SpanMetrics,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut metrics = Self {
            registry: Arc::default(),
            allocations: Family::default(),
            allocate_seconds: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
            substitutions: Counter::default(),
            registrations: Counter::default(),
            upstream_registrations: Counter::default(),
            taken_back: Counter::default(),
            intruders_deleted: Counter::default(),
            checkpoint_reads: Family::default(),
            cards: Family::default(),
            drift: Family::default(),
            isolation_ready: Family::default(),
            failed_pods_deleted: Counter::default(),
            publish_failures: Counter::default(),
            usage: Arc::default(),
            skipped_objects: SkippedObjects::default(),
            spans: SpanMetrics::default(),
        };
        let mut registry = Registry::default();
        metrics.register(registry.sub_registry_with_prefix("gpu_migrate_node_agent"));
        metrics.usage.register_gpu_manager(&mut registry);
        metrics.registry = Arc::new(registry);
        metrics
    }
}

impl Metrics {
    fn register(&self, r: &mut Registry) {
        r.register("allocations", "Answers to Allocate", self.allocations.clone());
        r.register("allocate_seconds", "Time to answer an Allocate", self.allocate_seconds.clone());
        r.register(
            "substitutions",
            "Allocates answered with other cards than the kubelet requested",
            self.substitutions.clone(),
        );
        r.register("registrations", "Registrations with the kubelet", self.registrations.clone());
        r.register(
            "nvidia_plugin_registrations",
            "Registrations of NVIDIA's plugin with the node agent",
            self.upstream_registrations.clone(),
        );
        r.register(
            "registrations_taken_back",
            "Registrations with the kubelet over NVIDIA's plugin, which had registered there itself",
            self.taken_back.clone(),
        );
        r.register(
            "intruders_deleted",
            "Deleted pods that had got the card of a share while NVIDIA's plugin was registered with the kubelet itself",
            self.intruders_deleted.clone(),
        );
        r.register(
            "checkpoint_reads",
            "Reads of a changed kubelet checkpoint, by result",
            self.checkpoint_reads.clone(),
        );
        r.register("cards", "Cards by state", self.cards.clone());
        r.register("drift", "Differences between ledger, kubelet, API and NVML, by card", self.drift.clone());
        r.register(
            "isolation_ready",
            "1 where the isolation can limit shares on this node, 0 where it cannot",
            self.isolation_ready.clone(),
        );
        r.register(
            "failed_pods_deleted",
            "Deleted pods that had failed with UnexpectedAdmissionError",
            self.failed_pods_deleted.clone(),
        );
        r.register("publish_failures", "Failed writes to the API server", self.publish_failures.clone());
        self.skipped_objects.register(r);
        self.spans.register(r);
        self.usage.register(r);
        r.register("build", "Version of this program", Info::new([("version", env!("CARGO_PKG_VERSION"))]));
    }

    /// An Allocate was answered. `kind` is `shared` or `legacy`.
    pub fn allocated(&self, kind: &'static str, ok: bool, took: Duration) {
        let outcome = if ok { "ok" } else { "refused" };
        self.allocations.get_or_create(&Outcome { kind, outcome }).inc();
        self.allocate_seconds.get_or_create(&Kind { kind }).observe(took.as_secs_f64());
    }

    pub fn substituted(&self) {
        self.substitutions.inc();
    }

    pub fn registered(&self) {
        self.registrations.inc();
    }

    pub fn upstream_registered(&self) {
        self.upstream_registrations.inc();
    }

    pub fn registration_taken_back(&self) {
        self.taken_back.inc();
    }

    pub fn intruder_deleted(&self) {
        self.intruders_deleted.inc();
    }

    pub fn checkpoint_read(&self, readable: bool) {
        let result = if readable { "ok" } else { "unreadable" };
        self.checkpoint_reads.get_or_create(&ReadResult { result }).inc();
    }

    pub fn card_states(&self, states: impl Iterator<Item = CardState>) {
        let mut counts = [
            CardState::Free,
            CardState::Legacy,
            CardState::Shared,
            CardState::Unhealthy,
            CardState::Cordoned,
            CardState::Disputed,
        ]
        .map(|state| (state, 0));
        for state in states {
            for (known, count) in &mut counts {
                *count += i64::from(*known == state);
            }
        }
        for (state, count) in counts {
            self.cards.get_or_create(&State { state: format!("{state:?}") }).set(count);
        }
    }

    pub fn drift(&self, card: &str, count: i64) {
        self.drift.get_or_create(&CardLabel { gpu: card.to_owned() }).set(count);
    }

    pub fn isolation_ready(&self, isolation: &'static str, ready: bool) {
        self.isolation_ready.get_or_create(&IsolationLabel { isolation }).set(i64::from(ready));
    }

    pub fn failed_pod_deleted(&self) {
        self.failed_pods_deleted.inc();
    }

    pub fn publish_failed(&self) {
        self.publish_failures.inc();
    }

    /// All of them, to be served.
    #[must_use]
    pub fn registry(&self) -> Arc<Registry> {
        Arc::clone(&self.registry)
    }
}
