//! What makes pods in a cluster now, as manifests: what `plan` reads when it is given no files.

use super::server;
use crate::errors::{is_absent, of_server};
use crate::manifest::{Manifest, Origin, Source, as_written, has_ended};
use crate::progress::Progress;
use anyhow::Context as _;
use gpu_migrate_model::names::{GROUP, VERSION};
use kube::Client;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, ListParams};
use serde_json::Value;

/// Group, version, kind, and whether it lives in a namespace.
const KINDS: [(&str, &str, &str, bool); 11] = [
    ("", "v1", "Namespace", false),
    (GROUP, VERSION, "GPUMigration", false),
    ("apps", "v1", "Deployment", true),
    ("apps", "v1", "StatefulSet", true),
    ("apps", "v1", "DaemonSet", true),
    ("batch", "v1", "CronJob", true),
    ("batch", "v1", "Job", true),
    ("apps", "v1", "ReplicaSet", true),
    ("", "v1", "ReplicationController", true),
    ("", "v1", "PodTemplate", true),
    ("", "v1", "Pod", true),
];

/// What was found, and what could not be read.
pub(crate) type Found = (Vec<Manifest>, Vec<String>);

/// Everything that makes pods, the namespaces and the policies; of one namespace or of all. A kind that we may not list does
/// not hide the others.
///
/// # Errors
/// When the API server cannot be reached.
pub(crate) async fn manifests(client: &Client, namespace: Option<&str>) -> anyhow::Result<Found> {
    let progress = Progress::new(KINDS.len() as u64);
    let (mut all, mut unread) = (Vec::new(), Vec::new());
    for (group, version, kind, namespaced) in KINDS {
        progress.step(format!("reading {kind}s"));
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        let api: Api<DynamicObject> = match namespace.filter(|_| namespaced) {
            Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
            None => Api::all_with(client.clone(), &resource),
        };
        let list = match api.list(&ListParams::default()).await {
            Ok(list) => list,
            // A kind that this cluster does not serve: the definitions are not installed.
            Err(error) if is_absent(&error) => continue,
            Err(error @ kube::Error::Api(_)) => {
                unread.push(format!(
                    "{} could not be listed: {}",
                    resource.plural,
                    of_server(&error, server())
                ));
                continue;
            }
            Err(error) => return Err(error).with_context(|| format!("list {}", resource.plural)),
        };
        let plain = list.items.into_iter().map(|object| serde_json::to_value(object).unwrap_or_default());
        all.extend(plain.filter(|object| is_wanted(kind, object)).map(|object| manifest(&resource, object)));
    }
    Ok((all, unread))
}

/// What a controller made is planned with its controller, where that is read too; what has ended makes nothing.
fn is_wanted(kind: &str, object: &Value) -> bool {
    let owners = object.pointer("/metadata/ownerReferences").and_then(Value::as_array);
    let known = |owner: &Value| {
        let group = owner["apiVersion"].as_str().and_then(|version| version.rsplit_once('/'));
        let group = group.map_or("", |(group, _)| group);
        owner["controller"] == true && KINDS.iter().any(|known| known.0 == group && owner["kind"] == known.2)
    };
    let controlled = owners.into_iter().flatten().any(known);
    !controlled && !has_ended(kind, object)
}

/// The object as written: without what the cluster added.
fn manifest(resource: &ApiResource, mut object: Value) -> Manifest {
    let of = |object: &Value, key: &str| object.pointer(key).and_then(Value::as_str).map(str::to_owned);
    let (name, namespace) = (of(&object, "/metadata/name"), of(&object, "/metadata/namespace"));
    if let Some(top) = object.as_object_mut() {
        top.insert("apiVersion".into(), resource.api_version.clone().into());
        top.insert("kind".into(), resource.kind.clone().into());
    }
    as_written(&resource.kind, &mut object);
    Manifest {
        origin: Origin { source: Source::Cluster, document: 1, line: 1, items: Vec::new() },
        api_version: resource.api_version.clone(),
        kind: resource.kind.clone(),
        namespace,
        name: name.unwrap_or_default(),
        value: object,
        more: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_a_controller_made_and_what_has_ended_is_left_out() {
        assert!(is_wanted("Pod", &json!({"status": {"phase": "Running"}})));
        assert!(!is_wanted("Pod", &json!({"status": {"phase": "Failed"}})));
        assert!(!is_wanted(
            "ReplicaSet",
            &json!({"metadata": {"ownerReferences": [{"apiVersion": "apps/v1", "kind": "Deployment", "controller": true}]}})
        ));
        let others = json!({"metadata": {"ownerReferences": [{"apiVersion": "argoproj.io/v1alpha1", "kind": "Rollout", "controller": true}]}});
        assert!(is_wanted("ReplicaSet", &others), "its controller is not read");
        assert!(is_wanted("Job", &json!({"metadata": {"ownerReferences": [{"kind": "X"}]}, "status": {}})));
        assert!(!is_wanted("Job", &json!({"status": {"completionTime": "2026-11-21T12:00:00Z"}})));
    }

    #[test]
    fn an_object_is_planned_as_its_owner_wrote_it() {
        let pod = ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Pod"));
        let live = json!({"metadata": {"name": "p", "namespace": "n", "managedFields": [{}], "annotations": {
            "kubectl.kubernetes.io/last-applied-configuration": "{}", "tencent.com/predicate-node": "x", "mine": "y"}},
            "spec": {"nodeName": "x", "containers": []}, "status": {"phase": "Running"}});
        let manifest = manifest(&pod, live);
        assert_eq!((manifest.namespace.as_deref(), manifest.name.as_str()), (Some("n"), "p"));
        let expected = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "n", "annotations": {"mine": "y"}}, "spec": {"containers": []}});
        assert_eq!(manifest.value, expected);
    }
}
