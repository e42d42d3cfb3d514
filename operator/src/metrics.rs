//! What is counted.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// The operator's metrics. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Metrics {
    /// 1 while this replica acts.
    pub(crate) leading: Gauge,
    /// Rounds through all policies.
    pub(crate) rounds: Counter,
    /// Rounds that failed.
    pub(crate) failures: Counter,
    /// Templates that could not be used in the last round over the nodes.
    pub(crate) bad_templates: Gauge,
    /// Workloads sent over and taken back.
    pub(crate) actions: Family<ActionLabels, Counter>,
}

/// `action`: `send` or `take_back`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ActionLabels {
    pub(crate) action: &'static str,
}

impl Metrics {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let registry = registry.sub_registry_with_prefix("gpu_migrate_operator");
        registry.register("leading", "1 while this replica acts", metrics.leading.clone());
        registry.register("rounds", "Rounds through all policies", metrics.rounds.clone());
        registry.register(
            "failures",
            "Rounds in which something could not be read or written",
            metrics.failures.clone(),
        );
        registry.register(
            "bad_templates",
            "Templates of node components that cannot be used",
            metrics.bad_templates.clone(),
        );
        registry.register("actions", "Workloads sent over to shares and taken back", metrics.actions.clone());
        metrics
    }
}
