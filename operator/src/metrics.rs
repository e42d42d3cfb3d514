//! Prometheus metrics.

use gpu_migrate_runtime::watch::SkippedObjects;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// The operator's metrics. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Metrics {
    pub(crate) leading: Gauge,
    pub(crate) reconciles: Counter,
    pub(crate) failures: Counter,
    /// Templates that could not be used in the last reconciliation of the nodes.
    pub(crate) invalid_templates: Gauge,
    pub(crate) actions: Family<ActionLabels, Counter>,
    /// Policies that wait for a person.
    pub(crate) stalled: Family<PolicyLabels, Gauge>,
    /// Objects that could not be read.
    pub(crate) skipped_objects: SkippedObjects,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct PolicyLabels {
    pub(crate) policy: String,
}

/// `action`: `convert`, `roll_back` or `delete_pod`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ActionLabels {
    pub(crate) action: &'static str,
}

impl Metrics {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let registry = registry.sub_registry_with_prefix("gpu_migrate_operator");
        metrics.skipped_objects.register(registry);
        registry.register("leading", "1 while this replica acts", metrics.leading.clone());
        registry.register("reconciles", "Reconciliations of all policies", metrics.reconciles.clone());
        registry.register(
            "reconcile_failures",
            "Reconciliations that failed and are retried",
            metrics.failures.clone(),
        );
        registry.register(
            "invalid_templates",
            "Templates of node components that cannot be used",
            metrics.invalid_templates.clone(),
        );
        // An alert asks for its increase, which needs a first value.
        for action in ["convert", "roll_back", "delete_pod"] {
            let _ = metrics.actions.get_or_create(&ActionLabels { action });
        }
        registry.register(
            "actions",
            "Workloads restarted to be converted or rolled back",
            metrics.actions.clone(),
        );
        registry.register(
            "policy_stalled",
            "1 while the rollout of a policy waits for a person: condition Stalled",
            metrics.stalled.clone(),
        );
        metrics
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_action_is_counted_from_zero() {
        let mut registry = Registry::default();
        Metrics::register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for action in ["convert", "roll_back", "delete_pod"] {
            let series = format!("gpu_migrate_operator_actions_total{{action=\"{action}\"}} 0\n");
            assert!(text.contains(&series), "{series}: {text}");
        }
    }
}
