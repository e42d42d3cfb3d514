//! What a cluster and its node look like at one moment, to compare two: every object of every kind that the API serves, and
//! the kubelet's directories.
//!
//! Left out is what Kubernetes writes by itself (`OF_KUBERNETES`, `strip`, the kubelets' Leases); everything else counts.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::{Context, Result};
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, ListParams},
    core::discovery::verbs,
    discovery::Discovery,
};
use serde_json::{Value, json};

use crate::layout::KUBELET_ROOT;

/// Kinds that controllers create and delete with other objects: those of a restarted workload have new
/// names. What is left in them is looked for by [`Snapshot::traces`] instead.
pub const OF_KUBERNETES: [&str; 6] =
    ["Event", "Pod", "ReplicaSet", "ControllerRevision", "EndpointSlice", "Endpoints"];

/// Directories on the node that programs of ours write to, or could. `pods` is the kubelet's own.
const DIRECTORIES: [&str; 3] = [KUBELET_ROOT, "/var/run/cdi", "/etc/cdi"];

#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// By `group Kind namespace/name`, stripped.
    objects: BTreeMap<String, Value>,
    /// Objects of all kinds, as text, for [`Snapshot::traces`].
    whole: BTreeMap<String, String>,
    /// Paths of files and directories.
    paths: BTreeSet<String>,
}

impl Snapshot {
    pub async fn take(client: &Client) -> Result<Self> {
        let mut snapshot = Self::default();
        let discovery =
            Discovery::new(client.clone()).run().await.context("cannot ask for the API's kinds")?;
        for group in discovery.groups() {
            for (resource, capabilities) in group.recommended_resources() {
                if !capabilities.supports_operation(verbs::LIST) {
                    continue;
                }
                let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
                let list = match api.list(&ListParams::default()).await {
                    Ok(list) => list,
                    // Gone since it was discovered, as with a definition that is being removed.
                    Err(kube::Error::Api(status)) if status.code == 404 => continue,
                    Err(error) => {
                        return Err(error).with_context(|| format!("cannot list {}", resource.kind));
                    }
                };
                for object in list {
                    snapshot.add(&resource.group, &resource.kind, object)?;
                }
            }
        }
        for directory in DIRECTORIES {
            walk(Path::new(directory), &mut snapshot.paths)?;
        }
        Ok(snapshot)
    }

    fn add(&mut self, group: &str, kind: &str, object: DynamicObject) -> Result<()> {
        let namespace = object.namespace().unwrap_or_default();
        if kind == "Lease" && namespace == "kube-node-lease" {
            return Ok(());
        }
        let name = format!("{group} {kind} {namespace}/{}", object.name_any());
        let mut object = serde_json::to_value(object)?;
        self.whole.insert(name.clone(), object.to_string());
        if !OF_KUBERNETES.contains(&kind) {
            strip(kind, &mut object);
            self.objects.insert(name, object);
        }
        Ok(())
    }

    /// What is different now, one line each; empty if nothing is.
    #[must_use]
    pub fn differences(&self, now: &Self) -> Vec<String> {
        let mut found = Vec::new();
        for path in self.paths.symmetric_difference(&now.paths) {
            found.push(format!("{path} is {}", if now.paths.contains(path) { "new" } else { "gone" }));
        }
        let names: BTreeSet<&String> = self.objects.keys().chain(now.objects.keys()).collect();
        for name in names {
            match (self.objects.get(name), now.objects.get(name)) {
                (Some(before), Some(after)) => compare(name, before, after, &mut found),
                (None, _) => found.push(format!("{name} is new")),
                (_, None) => found.push(format!("{name} is gone")),
            }
        }
        found
    }

    /// Objects that contain one of the texts, without the history that Kubernetes keeps on purpose: Events and the revisions of
    /// workloads.
    #[must_use]
    pub fn traces(&self, texts: &[&str]) -> Vec<String> {
        const HISTORY: [&str; 3] = [" Event ", " ReplicaSet ", " ControllerRevision "];
        self.whole
            .iter()
            .filter(|(name, _)| !HISTORY.iter().any(|kind| name.contains(kind)))
            .filter_map(|(name, text)| {
                let found = texts.iter().find(|part| text.contains(**part))?;
                Some(format!("{name} contains {found:?}"))
            })
            .collect()
    }
}

/// Removes what Kubernetes writes: versions, times, what a restart leaves, and all status but a node's amounts and images.
fn strip(kind: &str, object: &mut Value) {
    let amounts = (kind == "Node").then(|| object["status"]["capacity"].clone());
    let Some(fields) = object.as_object_mut() else { return };
    fields.remove("status");
    if let Some(meta) = fields.get_mut("metadata").and_then(Value::as_object_mut) {
        for field in ["resourceVersion", "generation", "managedFields"] {
            meta.remove(field);
        }
    }
    // A Lease is renewed.
    if kind == "Lease" {
        fields.remove("spec");
    }
    for (place, key) in [
        // How often a Deployment or DaemonSet was rolled out.
        ("/metadata/annotations", "deployment.kubernetes.io/revision"),
        ("/metadata/annotations", "deprecated.daemonset.template.generation"),
        // When: `kubectl rollout restart` leaves the same, and removing it would restart the workload once more.
        ("/spec/template/metadata/annotations", "kubectl.kubernetes.io/restartedAt"),
    ] {
        if let Some(map) = object.pointer_mut(place).and_then(Value::as_object_mut) {
            map.remove(key);
        }
    }
    prune(object);
    if let Some(amounts) = amounts {
        object["capacity"] = amounts;
    }
}

/// Removes empty maps and lists: their presence carries no information.
fn prune(value: &mut Value) {
    let empty = |value: &Value| match value {
        Value::Null => true,
        Value::Object(map) => map.is_empty(),
        Value::Array(list) => list.is_empty(),
        _ => false,
    };
    match value {
        Value::Object(map) => {
            map.values_mut().for_each(prune);
            map.retain(|_, inner| !empty(inner));
        }
        Value::Array(list) => list.iter_mut().for_each(prune),
        _ => {}
    }
}

fn compare(path: &str, before: &Value, after: &Value, found: &mut Vec<String>) {
    match (before, after) {
        (Value::Object(old), Value::Object(new)) => {
            let keys: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
            for key in keys {
                let at = |map: &serde_json::Map<String, Value>| map.get(key).cloned().unwrap_or(json!(null));
                compare(&format!("{path} {key}"), &at(old), &at(new), found);
            }
        }
        _ if before == after => {}
        _ => found.push(format!("{path}: was {before}, is {after}")),
    }
}

/// All below a directory, without the kubelet's own `pods`, which change with every pod.
fn walk(directory: &Path, found: &mut BTreeSet<String>) -> Result<()> {
    let Ok(entries) = fs::read_dir(directory) else { return Ok(()) };
    for entry in entries {
        let entry = entry.with_context(|| format!("cannot read {}", directory.display()))?;
        let path = entry.path();
        if directory == Path::new(KUBELET_ROOT) && entry.file_name() == "pods" {
            continue;
        }
        let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
        found.insert(format!("{}{}", path.display(), if is_directory { "/" } else { "" }));
        if is_directory {
            walk(&path, found)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(object: Value) -> Snapshot {
        let mut snapshot = Snapshot::default();
        snapshot.add("apps", "Deployment", serde_json::from_value(object).unwrap()).unwrap();
        snapshot
    }

    fn deployment(version: &str, labels: Value, template: Value) -> Snapshot {
        snapshot(json!({"apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {"name": "d", "namespace": "n", "resourceVersion": version, "labels": labels},
            "spec": {"template": {"metadata": {"annotations": template}}}, "status": {"replicas": version}}))
    }

    #[test]
    fn only_what_kubernetes_writes_is_passed_over() {
        let before = deployment("1", json!({"a": "b"}), json!({}));
        let restarted =
            deployment("2", json!({"a": "b"}), json!({"kubectl.kubernetes.io/restartedAt": "now"}));
        assert_eq!(before.differences(&restarted), Vec::<String>::new());
        let labelled = deployment("2", json!({"a": "b", "gpu-migrate.io/x": "y"}), json!({}));
        assert_eq!(
            before.differences(&labelled),
            ["apps Deployment n/d metadata labels gpu-migrate.io/x: was null, is \"y\""]
        );
        assert_eq!(before.differences(&Snapshot::default()), ["apps Deployment n/d is gone"]);
        assert_eq!(Snapshot::default().differences(&before), ["apps Deployment n/d is new"]);
        let mut file = before.clone();
        file.paths.insert("/var/lib/kubelet/plugins/x".into());
        assert_eq!(before.differences(&file), ["/var/lib/kubelet/plugins/x is new"]);
    }

    #[test]
    fn traces_are_found_wherever_they_are() {
        let trace = deployment("1", json!({}), json!({"gpu-migrate.io/original": "{}"}));
        assert_eq!(trace.traces(&["gpu-migrate.io"]), ["apps Deployment n/d contains \"gpu-migrate.io\""]);
        assert!(trace.traces(&["tencent.com"]).is_empty());
    }
}
