//! Which pool a node belongs to, and what that makes of it. Pure.

use gpu_migrate_model::crd::{
    Driver, Exporter, GPUConfigSpec, GPUConfigStatus, Isolation, PluginMode, PoolStatus,
};
use kube::core::{Selector, SelectorExt as _};
use std::collections::{BTreeMap, BTreeSet};

/// What a node is to be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Its pool; `None` for a node that is named on its own.
    pub pool: Option<String>,
    /// Which plugin serves it.
    pub plugin: PluginMode,
    /// How shares are kept apart.
    pub isolation: Isolation,
    /// Which exporter runs on it.
    pub exporter: Exporter,
    /// The driver that is wanted.
    pub driver: Option<Driver>,
}

/// Where a node belongs: single nodes come before pools, and the first pool that matches counts.
///
/// A pool without any condition matches no node: an empty selector is far more often a mistake than a wish.
#[must_use]
pub fn place(spec: &GPUConfigSpec, node: &str, labels: &BTreeMap<String, String>) -> Option<Place> {
    let orphan = spec.orphan_nodes.iter().find(|orphans| orphans.nodes.iter().any(|name| name == node));
    if let Some(orphans) = orphan {
        let (isolation, exporter) = (orphans.isolation, orphans.exporter);
        return Some(Place { pool: None, plugin: orphans.plugin, isolation, exporter, driver: None });
    }
    let pool = spec.node_pools.iter().find(|pool| {
        Selector::try_from(pool.selector.clone())
            .is_ok_and(|selector| !selector.selects_all() && selector.matches(labels))
    })?;
    Some(Place {
        pool: Some(pool.name.clone()),
        plugin: pool.plugin,
        isolation: pool.isolation,
        exporter: pool.exporter,
        driver: pool.driver.clone(),
    })
}

/// Counts for the status. `ready` are the nodes whose agent reports; a Legacy node needs none.
#[must_use]
pub fn status(
    spec: &GPUConfigSpec,
    generation: Option<i64>,
    places: &BTreeMap<String, Option<Place>>,
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
        place(&spec(), node, &labels).map(|place| (place.pool, place.plugin))
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
        let a100 =
            || Some(Place { pool: Some("a100".into()), plugin: PluginMode::Bridged, ..Place::default() });
        let places =
            BTreeMap::from([("a".to_owned(), a100()), ("b".to_owned(), a100()), ("c".to_owned(), None)]);
        let status = status(&spec(), Some(2), &places, &BTreeSet::from(["a".to_owned(), "c".to_owned()]));
        assert_eq!((status.nodes, status.pools[1].nodes, status.pools[1].ready), (2, 2, 1));
    }
}
