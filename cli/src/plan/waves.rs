//! The wave of each workload by the operator's own assignment, for a rollout that has not started.

use super::Namespaces;
use crate::manifest::Manifest;
use gpu_migrate_model::crd::{GPUMigration, GPUMigrationStatus};
use gpu_migrate_model::names;
use gpu_migrate_operator::kinds::Described;
use gpu_migrate_operator::project::{Listed, Workload};
use gpu_migrate_operator::waves::{Management, assign};
use k8s_openapi::api::core::v1::Namespace;
use kube::ResourceExt as _;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The wave of a workload whose policy has waves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WaveOf {
    /// In this wave, from 1, of so many.
    Wave(usize, usize),
    None,
    /// The operator does not restart it: `OnDelete`, a partition, a pause.
    ByHand,
}

/// The waves of all workloads, by `Kind/namespace/name`. Bare pods and Jobs are not in it.
pub(super) fn waves<'m>(
    migrations: &[GPUMigration],
    manifests: impl Iterator<Item = &'m Manifest>,
    namespaces: &Namespaces,
    kinds: &[Arc<Described>],
    default_namespace: &str,
) -> BTreeMap<String, WaveOf> {
    if migrations.iter().all(|migration| migration.spec.rollout.waves.is_empty()) {
        return BTreeMap::new();
    }
    let mut listed = listed(manifests, namespaces, kinds, default_namespace);
    listed.policies = migrations.iter().map(|one| (one.name_any(), one.clone().in_force().spec)).collect();
    let mut found = BTreeMap::new();
    for migration in migrations {
        let waves = &migration.spec.rollout.waves;
        if waves.is_empty() {
            continue;
        }
        let seen = listed.of_policy(&migration.name_any()).workloads;
        let assigned = assign(&migration.spec.rollout, &seen, &GPUMigrationStatus::default());
        for one in seen {
            let wave = match (one.management, assigned.get(&one.key)) {
                (Management::Unmanaged | Management::Manual, _) => WaveOf::ByHand,
                (Management::Restart, Some(wave)) => WaveOf::Wave(*wave as usize, waves.len()),
                (Management::Restart, None) => WaveOf::None,
            };
            found.insert(one.key.to_string(), wave);
        }
    }
    found
}

/// What the operator would list. A namespace whose labels are not given counts as opted in, as for the webhook.
fn listed<'m>(
    manifests: impl Iterator<Item = &'m Manifest>,
    namespaces: &Namespaces,
    kinds: &[Arc<Described>],
    default_namespace: &str,
) -> Listed {
    let mut listed = Listed::default();
    let mut used = BTreeSet::new();
    for manifest in manifests {
        let namespace = manifest.namespace.as_deref().unwrap_or(default_namespace);
        let mut object = manifest.value.clone();
        object["metadata"]["namespace"] = json!(namespace);
        let foreign = described(manifest, kinds);
        let workload = match manifest.kind.as_str() {
            _ if foreign.is_some() => foreign.and_then(|kind| Workload::of_foreign(kind, &object)),
            "Deployment" => read(object).and_then(|object| Workload::of_deployment(&object)),
            "StatefulSet" => read(object).and_then(|object| Workload::of_stateful_set(&object)),
            "DaemonSet" => read(object).and_then(|object| Workload::of_daemon_set(&object)),
            "CronJob" => read(object).and_then(|object| Workload::of_cron_job(&object)),
            _ => None,
        };
        if let Some(workload) = workload {
            listed.workloads.push(Arc::new(workload));
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

/// The description of a foreign kind, where the GPUConfig switches it on.
pub(super) fn described<'k>(manifest: &Manifest, kinds: &'k [Arc<Described>]) -> Option<&'k Arc<Described>> {
    let group = manifest.api_version.split_once('/').map_or("", |(group, _)| group);
    kinds.iter().find(|kind| kind.kind == manifest.kind && kind.group == group)
}

/// An invalid object is reported where it is converted.
fn read<T: serde::de::DeserializeOwned>(object: Value) -> Option<T> {
    serde_json::from_value(object).ok()
}
