//! What is counted. Labels are words from fixed lists, so that the number of series is bounded.

use gpu_migrate_runtime::serve::ConnectionMetrics;
use gpu_migrate_runtime::trace::SpanMetrics;
use gpu_migrate_runtime::watch::SkippedObjects;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

/// Prefix of every metric of this component.
pub const PREFIX: &str = "gpu_migrate_webhook";

/// Bounds of the latency buckets, seconds: a review takes tens of microseconds.
const BUCKETS: [f64; 14] =
    [0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct OutcomeLabel {
    /// A word of [`crate::decide::Outcome::as_str`], or one of the reviews that concern no pod.
    pub outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReasonLabel {
    /// Why a request was not answered with a review.
    pub reason: &'static str,
}

#[derive(Clone, Debug)]
pub struct Metrics {
    /// Answered reviews, dry runs left out.
    pub reviews: Family<OutcomeLabel, Counter>,
    pub dry_runs: Counter,
    /// From the last byte of the request to the answer.
    pub duration: Histogram,
    /// Requests without an answer of 200.
    pub rejected: Family<ReasonLabel, Counter>,
    pub in_flight: Gauge,
    pub policies: Gauge,
    /// Policies that are invalid in their newest form.
    pub invalid_policies: Gauge,
    /// Failed attempts to read the policies.
    pub policy_errors: Counter,
    /// 1 while the webhook configuration carries the CAs in use.
    pub registered: Gauge,
    /// Objects of the watches that could not be read.
    pub skipped_objects: SkippedObjects,
    pub connections: ConnectionMetrics,
    pub spans: SpanMetrics,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            reviews: Family::default(),
            dry_runs: Counter::default(),
            duration: Histogram::new(BUCKETS),
            rejected: Family::default(),
            in_flight: Gauge::default(),
            policies: Gauge::default(),
            invalid_policies: Gauge::default(),
            policy_errors: Counter::default(),
            registered: Gauge::default(),
            skipped_objects: SkippedObjects::default(),
            connections: ConnectionMetrics::default(),
            spans: SpanMetrics::default(),
        }
    }
}

impl Metrics {
    /// Makes the metrics and puts them into a registry.
    #[must_use]
    pub fn new(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let Self {
            reviews,
            dry_runs,
            duration,
            rejected,
            in_flight,
            policies,
            invalid_policies,
            policy_errors,
            registered,
            skipped_objects,
            connections,
            spans,
        } = metrics.clone();
        // Alerts ask for their increase, which needs a first value.
        for outcome in ["conflict", "unknown_project"] {
            let _ = reviews.get_or_create(&OutcomeLabel { outcome });
        }
        for reason in ["aborted", "content_type", "deadline", "malformed", "overload", "panic", "too_large"] {
            let _ = rejected.get_or_create(&ReasonLabel { reason });
        }
        registry.register("reviews", "Answered reviews by outcome, without dry runs", reviews);
        registry.register("dry_runs", "Answered dry-run reviews", dry_runs);
        registry.register_with_unit(
            "review_duration",
            "From the last byte of a review to its answer",
            Unit::Seconds,
            duration,
        );
        registry.register("rejected", "Requests answered with an HTTP error, by reason", rejected);
        registry.register("in_flight", "Requests being worked on", in_flight);
        registry.register("policies", "Policies in force", policies);
        registry.register("invalid_policies", "Policies whose newest form is invalid", invalid_policies);
        registry.register("policy_errors", "Failed attempts to read the policies", policy_errors);
        registry.register("registered", "1 while the registered caBundle matches the CAs in use", registered);
        skipped_objects.register(registry);
        connections.register(registry);
        spans.register(registry);
        let build = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "Version of this program", build);
        metrics
    }

    pub(crate) fn reject(&self, reason: &'static str) {
        self.rejected.get_or_create(&ReasonLabel { reason }).inc();
    }
}
