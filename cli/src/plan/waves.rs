//! Which wave of a rollout moves a workload, by the operator's own assignment, as for a rollout that has not begun.

use super::decide::Namespaces;
use crate::manifest::Manifest;
use gpu_migrate_model::crd::{GPUMigration, GPUMigrationStatus};
use gpu_migrate_model::names;
use gpu_migrate_operator::project::{Listed, Workload};
use gpu_migrate_operator::waves::{Management, assign};
use k8s_openapi::api::core::v1::Namespace;
use kube::ResourceExt as _;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// When a workload of a project that moves in waves is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// In this wave, from 1, of so many.
    Wave(usize, usize),
    /// No wave reaches it.
    None,
    /// The operator does not restart it: `OnDelete`, a partition, a pause.
    ByHand,
}

/// The turns of all workloads, by `Kind/namespace/name`. Objects that waves never move (bare pods, Jobs) are not in it.
pub(super) fn turns(
    migrations: &[GPUMigration],
    manifests: &[Manifest],
    namespaces: &Namespaces,
    default_namespace: &str,
) -> BTreeMap<String, Turn> {
    if migrations.iter().all(|migration| migration.spec.rollout.waves.is_empty()) {
        return BTreeMap::new();
    }
    let listed = listed(manifests, namespaces, default_namespace);
    let mut turns = BTreeMap::new();
    for migration in migrations {
        let waves = &migration.spec.rollout.waves;
        if waves.is_empty() {
            continue;
        }
        let (seen, _) = listed.of_policy(&migration.name_any(), &migration.spec);
        let assigned = assign(waves, &seen, &GPUMigrationStatus::default());
        for one in seen {
            let turn = match (one.management, assigned.get(&one.key)) {
                (Management::Unmanaged, _) => Turn::ByHand,
                (Management::Restart, Some(wave)) => Turn::Wave(*wave as usize + 1, waves.len()),
                (Management::Restart, None) => Turn::None,
            };
            turns.insert(one.key.to_string(), turn);
        }
    }
    turns
}

/// What the operator would list of these objects. A namespace whose labels nobody gave counts as opted in, as for the webhook.
fn listed(manifests: &[Manifest], namespaces: &Namespaces, default_namespace: &str) -> Listed {
    let mut listed = Listed::default();
    let mut used = BTreeSet::new();
    for manifest in manifests {
        let namespace = manifest.namespace.as_deref().unwrap_or(default_namespace);
        let mut object = manifest.value.clone();
        object["metadata"]["namespace"] = json!(namespace);
        let workload = match manifest.kind.as_str() {
            "Deployment" => read(object).and_then(|object| Workload::of_deployment(&object)),
            "StatefulSet" => read(object).and_then(|object| Workload::of_stateful_set(&object)),
            "DaemonSet" => read(object).and_then(|object| Workload::of_daemon_set(&object)),
            "CronJob" => read(object).and_then(|object| Workload::of_cron_job(&object)),
            _ => None,
        };
        if let Some(workload) = workload {
            listed.workloads.push(workload);
            used.insert(namespace.to_owned());
        }
    }
    let unknown = || BTreeMap::from([(names::OPT_IN.to_owned(), "true".to_owned())]);
    listed.namespaces.extend(used.into_iter().map(|name| {
        let mut namespace = Namespace::default();
        namespace.metadata.labels = Some(namespaces.get(&name).cloned().unwrap_or_else(unknown));
        namespace.metadata.name = Some(name);
        namespace
    }));
    listed
}

/// An object that is none is said where it is converted.
fn read<T: serde::de::DeserializeOwned>(object: Value) -> Option<T> {
    serde_json::from_value(object).ok()
}
