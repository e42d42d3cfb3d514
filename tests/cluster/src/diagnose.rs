//! What to print when a scenario fails: the pods, the events, the ends of the logs.

use std::fmt::Write as _;

use k8s_openapi::api::core::v1::{Event, Node, Pod};
use kube::{Api, ResourceExt, api::ListParams};

use crate::{cluster::Cluster, observe, workload::phase_and_why};

const LOG_LINES: usize = 25;
const EVENTS: usize = 40;

/// Pods, Events, running containers and the ends of all logs. Never fails: what cannot be read is replaced by the error.
pub async fn dump(cluster: &Cluster) -> String {
    let mut text = String::new();
    for part in [nodes(cluster).await, pods(cluster).await, events(cluster).await] {
        text.push_str(&part.unwrap_or_else(|error| format!("(cannot ask the API: {error})\n")));
    }
    let _ = writeln!(text, "---- containers that run");
    for container in observe::containers().unwrap_or_default() {
        let _ = writeln!(
            text,
            "{} {} pid {} sees {:?}",
            container.pod_uid,
            container.name,
            container.pid,
            container.cards()
        );
    }
    for component in cluster.components() {
        let state = component.pid().map_or_else(|| "not running".into(), |pid| format!("pid {pid}"));
        let _ = writeln!(text, "---- {} ({state})\n{}", component.name(), component.log_tail(LOG_LINES));
    }
    text
}

async fn nodes(cluster: &Cluster) -> kube::Result<String> {
    let mut text = String::from("---- nodes\n");
    for node in Api::<Node>::all(cluster.client.clone()).list(&ListParams::default()).await? {
        let status = node.status.clone().unwrap_or_default();
        let _ = writeln!(
            text,
            "{} allocatable {:?} annotations {:?}",
            node.name_any(),
            status.allocatable,
            node.annotations()
        );
    }
    Ok(text)
}

async fn pods(cluster: &Cluster) -> kube::Result<String> {
    let mut text = String::from("---- pods\n");
    for pod in Api::<Pod>::all(cluster.client.clone()).list(&ListParams::default()).await? {
        let limits: Vec<_> = pod
            .spec
            .iter()
            .flat_map(|s| &s.containers)
            .map(|c| c.resources.as_ref().and_then(|r| r.limits.clone()))
            .collect();
        let node = pod.spec.as_ref().and_then(|s| s.node_name.clone());
        let _ = writeln!(
            text,
            "{}/{} on {node:?} limits {limits:?} annotations {:?}\n    {}",
            pod.namespace().unwrap_or_default(),
            pod.uid().unwrap_or_default(),
            pod.annotations(),
            phase_and_why(Some(&pod)),
        );
    }
    Ok(text)
}

async fn events(cluster: &Cluster) -> kube::Result<String> {
    let mut text = String::from("---- events\n");
    let events = Api::<Event>::all(cluster.client.clone()).list(&ListParams::default()).await?.items;
    for event in &events[events.len().saturating_sub(EVENTS)..] {
        let about = event.involved_object.name.as_deref().unwrap_or_default();
        let (reason, message) =
            (event.reason.as_deref().unwrap_or_default(), event.message.as_deref().unwrap_or_default());
        let _ = writeln!(text, "{about} {reason}: {message}");
    }
    Ok(text)
}
