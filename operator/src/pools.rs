//! The pool of a node and its settings. Pure.

use gpu_migrate_model::crd::{
    Driver, Exporter, GPUConfigSpec, GPUConfigStatus, Isolation, PluginMode, PoolStatus,
};
use gpu_migrate_model::selector;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeSettings {
    /// Its pool; `None` for an orphan node.
    pub pool: Option<String>,
    pub plugin: PluginMode,
    pub isolation: Isolation,
    pub exporter: Exporter,
    pub driver: Option<Driver>,
}

/// Settings of a node: orphan nodes come before pools, and the first pool that matches wins.
///
/// An empty selector matches no node: it is more often a mistake than an intent.
#[must_use]
pub fn settings(spec: &GPUConfigSpec, node: &str, labels: &BTreeMap<String, String>) -> Option<NodeSettings> {
    let orphan = spec.orphan_nodes.iter().find(|orphans| orphans.nodes.iter().any(|name| name == node));
    if let Some(orphans) = orphan {
        let (isolation, exporter) = (orphans.isolation, orphans.exporter);
        return Some(NodeSettings { pool: None, plugin: orphans.plugin, isolation, exporter, driver: None });
    }
    let pool = spec.node_pools.iter().find(|pool| {
        let label = |key: &str| labels.get(key).map(String::as_str);
        !selector::is_empty(&pool.selector) && selector::matches(&pool.selector, label)
    })?;
    Some(NodeSettings {
        pool: Some(pool.name.clone()),
        plugin: pool.plugin,
        isolation: pool.isolation,
        exporter: pool.exporter,
        driver: pool.driver.clone(),
    })
}

/// Counts for the status. `ready` are the nodes whose agent is ready; a Legacy node needs none.
#[must_use]
pub fn status(
    spec: &GPUConfigSpec,
    generation: Option<i64>,
    places: &BTreeMap<String, Option<NodeSettings>>,
    ready: &BTreeSet<String>,
) -> GPUConfigStatus {
    let placed = places.values().flatten().count();
    let pools = spec.node_pools.iter().map(|pool| {
        let nodes = places
            .iter()
            .filter(|(_, place)| place.as_ref().is_some_and(|place| place.pool.as_ref() == Some(&pool.name)));
        PoolStatus {
            name: pool.name.clone(),
            nodes: count(nodes.clone().count()),
            ready: count(
                nodes.filter(|(name, _)| pool.plugin == PluginMode::Legacy || ready.contains(*name)).count(),
            ),
        }
    });
    GPUConfigStatus {
        observed_generation: generation,
        nodes: count(placed),
        pools: pools.collect(),
        ..GPUConfigStatus::default()
    }
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn spec() -> GPUConfigSpec {
        serde_json::from_value(json!({
            "nodePools": [
                {"name": "empty", "selector": {}, "plugin": "Shared"},
                {"name": "a100", "selector": {"matchLabels": {"pool": "a100"}}, "plugin": "Bridged"},
                {"name": "rest", "selector": {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}},
            ],
            "orphanNodes": [{"nodes": ["gpu-07"], "plugin": "Legacy"}],
        }))
        .unwrap()
    }

    fn at(node: &str, labels: &[(&str, &str)]) -> Option<(Option<String>, PluginMode)> {
        let labels = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        settings(&spec(), node, &labels).map(|place| (place.pool, place.plugin))
    }

    #[test]
    fn a_name_comes_first_then_the_first_pool() {
        let pool = |name: &str, plugin| Some((Some(name.to_owned()), plugin));
        assert_eq!(at("gpu-07", &[("pool", "a100")]), Some((None, PluginMode::Legacy)));
        assert_eq!(at("n", &[("pool", "a100"), ("gpu", "")]), pool("a100", PluginMode::Bridged));
        assert_eq!(at("n", &[("gpu", "")]), pool("rest", PluginMode::Legacy));
        assert_eq!(at("n", &[]), None, "an empty selector takes no node");
    }

    #[test]
    fn the_status_counts_pools_and_reporting_agents() {
        let a100 = || {
            Some(NodeSettings {
                pool: Some("a100".into()),
                plugin: PluginMode::Bridged,
                ..NodeSettings::default()
            })
        };
        let places =
            BTreeMap::from([("a".to_owned(), a100()), ("b".to_owned(), a100()), ("c".to_owned(), None)]);
        let status = status(&spec(), Some(2), &places, &BTreeSet::from(["a".to_owned(), "c".to_owned()]));
        assert_eq!((status.nodes, status.pools[1].nodes, status.pools[1].ready), (2, 2, 1));
    }
}
