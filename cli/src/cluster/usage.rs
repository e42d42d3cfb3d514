//! What containers use, asked of the node agents through the API server's proxy to pods.

use super::Snapshot;
use futures::StreamExt as _;
use gpu_migrate_model::text::and_more;
use gpu_migrate_model::usage::{self, NodeUse};
use k8s_openapi::api::core::v1::Pod;
use kube::{Client, ResourceExt as _};
use std::collections::BTreeMap;
use std::time::Duration;

/// How many agents are asked at a time.
const AT_ONCE: usize = 32;
/// For one agent. One that does not answer costs its node's line alone.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Use by node, and why there is none of some.
#[derive(Debug, Clone, Default)]
pub(crate) struct Usage {
    pub(crate) nodes: BTreeMap<String, NodeUse>,
    pub(crate) missing: Option<String>,
}

impl Usage {
    /// Asks every node agent among the pods of the snapshot.
    pub(crate) async fn of_agents(client: &Client, snapshot: &Snapshot) -> Self {
        let asked = snapshot.pods.iter().filter_map(agent).map(|(node, path)| async move {
            let request = http::Request::get(&path).body(Vec::new()).ok()?;
            let answer = tokio::time::timeout(TIMEOUT, client.request::<NodeUse>(request)).await;
            Some((node, path, answer))
        });
        let mut answers = futures::stream::iter(asked).buffer_unordered(AT_ONCE);
        let (mut usage, mut failed) = (Self::default(), BTreeMap::new());
        while let Some(answer) = answers.next().await {
            let Some((node, path, answer)) = answer else { continue };
            match answer {
                Ok(Ok(of_node)) => _ = usage.nodes.insert(node, of_node),
                Ok(Err(error)) => _ = failed.insert(node, why(&error, &path)),
                Err(_) => _ = failed.insert(node, format!("no answer within {TIMEOUT:?}")),
            }
        }
        usage.missing = failed.pop_first().map(|(node, why)| {
            format!("what is used on {node}{} is not known: {why}", and_more(failed.len()))
        });
        usage
    }
}

fn why(error: &kube::Error, path: &str) -> String {
    match error {
        kube::Error::Api(status) if status.code == 403 => {
            format!(
                "get of {path} is forbidden; it needs the verb get on pods/proxy in the node agents' namespace"
            )
        }
        error => format!("get of {path}: {error}"),
    }
}

/// Its node, and the path by which the API server reaches it.
fn agent(pod: &Pod) -> Option<(String, String)> {
    let label = |key: &str| pod.labels().get(key).map(String::as_str);
    let ours = label("app.kubernetes.io/name") == Some("gpu-migrate")
        && label("app.kubernetes.io/component") == Some("bridge");
    let running = pod.status.as_ref()?.phase.as_deref() == Some("Running");
    let spec = pod.spec.as_ref().filter(|_| ours && running)?;
    let ports = spec.containers.iter().flat_map(|container| container.ports.iter().flatten());
    let port = ports.into_iter().find(|port| port.name.as_deref() == Some("metrics"))?.container_port;
    let (namespace, name) = (pod.namespace()?, pod.name_any());
    let path = format!("/api/v1/namespaces/{namespace}/pods/{name}:{port}/proxy{}", usage::PATH);
    Some((spec.node_name.clone()?, path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(component: &str, phase: &str) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "agent-x", "namespace": "gpus", "labels": {
                "app.kubernetes.io/name": "gpu-migrate", "app.kubernetes.io/component": component}},
            "spec": {"nodeName": "gpu-01", "containers": [{"name": "bridge", "ports": [{"name": "metrics", "containerPort": 9404}]}]},
            "status": {"phase": phase},
        }))
        .unwrap()
    }

    #[test]
    fn the_agents_are_asked_at_their_port_of_metrics() {
        let path = "/api/v1/namespaces/gpus/pods/agent-x:9404/proxy/use";
        assert_eq!(agent(&pod("bridge", "Running")), Some(("gpu-01".into(), path.into())));
        assert_eq!(agent(&pod("bridge", "Pending")), None);
        assert_eq!(agent(&pod("operator", "Running")), None);
    }
}
