//! The GPUConfig loop: labels nodes by pool, counts agents that report.

use crate::migrations::MANAGER;
use crate::pools::{self, Place};
use gpu_migrate_model::crd::{GPUConfig, GPUShadow};
use gpu_migrate_model::names;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, Time};
use kube::api::{Api, ListParams, Patch, PatchParams};
use kube::{Client, ResourceExt as _};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The one GPUConfig.
const NAME: &str = "cluster";
const ROUND: Duration = Duration::from_secs(10);

/// Goes round until it is dropped.
pub(crate) async fn run(client: Client) {
    loop {
        if let Err(error) = round(&client, Timestamp::now()).await {
            tracing::warn!(%error, "nodes not labelled; trying again");
        }
        tokio::time::sleep(ROUND).await;
    }
}

async fn round(client: &Client, now: Timestamp) -> kube::Result<()> {
    let configs = Api::<GPUConfig>::all(client.clone());
    let Some(config) = configs.get_opt(NAME).await? else { return Ok(()) };
    let nodes = Api::<Node>::all(client.clone());
    let params = PatchParams::apply(MANAGER).force();
    let mut places = BTreeMap::new();
    for node in nodes.list_metadata(&ListParams::default()).await?.items {
        let name = node.name_any();
        let place = pools::place(&config.spec, &name, node.labels());
        if needs_labels(&node.metadata, place.as_ref()) {
            let body = pools::labels(&name, place.as_ref());
            nodes.patch_metadata(&name, &params, &Patch::Apply(&body)).await?;
            tracing::info!(node = name, ?place, "node labelled");
        }
        places.insert(name, place);
    }
    let shadows = Api::<GPUShadow>::all(client.clone()).list(&ListParams::default()).await?.items;
    let ready = shadows
        .iter()
        .filter(|shadow| is_ready(shadow))
        .map(kube::ResourceExt::name_any)
        .collect::<BTreeSet<_>>();
    let mut status = pools::status(&config.spec, config.metadata.generation, &places, &ready);
    let old = config.status.iter().flat_map(|status| &status.conditions).find(|old| old.type_ == "Ready");
    status.conditions = vec![condition(&status, old, now)];
    if config.status.as_ref() == Some(&status) {
        return Ok(());
    }
    let body = json!({
        "apiVersion": format!("{}/{}", names::GROUP, names::VERSION), "kind": "GPUConfig",
        "metadata": {"name": NAME}, "status": status,
    });
    configs.patch_status(NAME, &params, &Patch::Apply(&body)).await.map(drop)
}

/// Whether the node's labels differ from its place. Labels that somebody else has put there are not ours to remove.
fn needs_labels(node: &ObjectMeta, place: Option<&Place>) -> bool {
    let Some(place) = place else {
        return node.managed_fields.iter().flatten().any(|field| {
            field.manager.as_deref() == Some(MANAGER)
                && field.fields_v1.as_ref().is_some_and(|fields| fields.0.to_string().contains(names::PLUGIN))
        });
    };
    let is = |key: &str| node.labels.as_ref().and_then(|labels| labels.get(key)).cloned();
    is(names::PLUGIN) != Some(format!("{:?}", place.plugin))
        || (place.pool.is_some() && is(names::POOL) != place.pool)
}

fn is_ready(shadow: &GPUShadow) -> bool {
    let conditions = shadow.status.iter().flat_map(|status| &status.conditions);
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn condition(
    status: &gpu_migrate_model::crd::GPUConfigStatus,
    old: Option<&Condition>,
    now: Timestamp,
) -> Condition {
    let waiting = status.pools.iter().map(|pool| pool.nodes - pool.ready.min(pool.nodes)).sum::<u32>();
    let state = if waiting == 0 { "True" } else { "False" };
    let message = match waiting {
        0 => "every node of every pool reports".to_owned(),
        n => format!("{n} nodes of pools do not report: Legacy nodes need no agent, others do"),
    };
    Condition {
        type_: "Ready".into(),
        status: state.into(),
        reason: if waiting == 0 { "AllReport" } else { "Waiting" }.into(),
        message,
        observed_generation: status.observed_generation,
        last_transition_time: old
            .filter(|old| old.status == state)
            .map_or_else(|| Time(now), |old| old.last_transition_time.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpu_migrate_model::crd::PluginMode;

    #[test]
    fn labels_are_written_only_where_they_differ_and_removed_only_where_they_are_ours() {
        let node = |labels: serde_json::Value, fields: serde_json::Value| -> ObjectMeta {
            serde_json::from_value(json!({"labels": labels, "managedFields": [{"manager": MANAGER, "operation": "Apply", "fieldsV1": fields}]})).unwrap()
        };
        let place = Place { pool: Some("a".into()), plugin: PluginMode::Bridged };
        let good = json!({"gpu-migrate.io/plugin": "Bridged", "gpu-migrate.io/pool": "a"});
        assert!(!needs_labels(&node(good.clone(), json!({})), Some(&place)));
        assert!(needs_labels(&node(json!({"gpu-migrate.io/plugin": "Legacy"}), json!({})), Some(&place)));
        let ours = json!({"f:metadata": {"f:labels": {"f:gpu-migrate.io/plugin": {}}}});
        assert!(needs_labels(&node(good.clone(), ours), None));
        assert!(!needs_labels(&node(good, json!({})), None), "set by hand");
    }
}
