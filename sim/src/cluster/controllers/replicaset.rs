//! ReplicaSets: as many pods as wanted. A failed pod is replaced at once, without a pause, as was seen.

use kube::Client;
use serde_json::{Value, json};

use super::{owner_reference, path_of};
use crate::cluster::api::object::{items, meta};
use crate::cluster::json_client;

pub(super) fn is_ready(pod: &Value) -> bool {
    items(&pod["status"], "conditions").any(|c| c["type"] == "Ready" && c["status"] == "True")
        && !is_going(pod)
}

fn is_going(pod: &Value) -> bool {
    !meta(pod, "deletionTimestamp").is_empty()
}

fn is_over(pod: &Value) -> bool {
    pod["status"]["phase"] == "Failed" || pod["status"]["phase"] == "Succeeded"
}

/// Creates what is missing, deletes what is too much, reports.
pub(super) async fn reconcile(client: &Client, set: &Value, pods: &[&Value]) -> kube::Result<()> {
    let mut alive: Vec<&Value> = pods.iter().copied().filter(|pod| !is_going(pod) && !is_over(pod)).collect();
    let wanted = usize::try_from(set["spec"]["replicas"].as_u64().unwrap_or(1)).unwrap_or(0);
    for _ in alive.len()..wanted {
        let path = format!("/api/v1/namespaces/{}/pods", meta(set, "namespace"));
        json_client::create(client, &path, &new_pod(set)).await?;
    }
    if alive.len() > wanted {
        // Those go first that are the least use: not bound, then not ready, then the youngest.
        alive.sort_by_key(|pod| {
            let bound = pod["spec"]["nodeName"].as_str().is_some_and(|node| !node.is_empty());
            (bound, is_ready(pod), std::cmp::Reverse(meta(pod, "creationTimestamp").to_owned()))
        });
        for pod in &alive[..alive.len() - wanted] {
            json_client::delete(client, &path_of("/api/v1", "pods", pod)).await?;
        }
    }
    let ready = pods.iter().filter(|pod| is_ready(pod)).count();
    let status = json!({
        "replicas": alive.len(), "readyReplicas": ready, "availableReplicas": ready, "fullyLabeledReplicas": alive.len(),
        "observedGeneration": set["metadata"]["generation"],
    });
    if set["status"] != status {
        let path = format!("{}/status", path_of("/apis/apps/v1", "replicasets", set));
        json_client::merge(client, &path, &json!({"status": status})).await?;
    }
    Ok(())
}

fn new_pod(set: &Value) -> Value {
    let template = &set["spec"]["template"];
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"]});
    pod["metadata"]["generateName"] = format!("{}-", meta(set, "name")).into();
    pod["metadata"]["ownerReferences"] = json!([owner_reference(set, "apps/v1", "ReplicaSet")]);
    pod
}
