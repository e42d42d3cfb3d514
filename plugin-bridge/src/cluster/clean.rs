//! Deletes pods of this node that failed with `UnexpectedAdmissionError`, if a controller will re-create them; and at once those that
//! got the card of a share past the agent (I1).
//!
//! A Deployment replaces such a pod without back-off (90 in 10 s were seen), and does not delete the failed ones.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Preconditions};
use kube::{Api, Client};
use tokio_util::sync::CancellationToken;

use crate::decide::{NodeState, PodView};
use crate::metrics::Metrics;
use crate::node::{Node, NodeEvent};

/// How long a failed pod stays visible.
const KEPT: Duration = Duration::from_secs(30);
/// One deletion in this time.
const PACE: Duration = Duration::from_secs(1);

/// The pods that may be deleted: failed at admission over our devices, made by a controller, and not in a namespace that has nothing to do
/// with us (I4).
#[must_use]
pub fn failed(state: &NodeState) -> Vec<PodView> {
    state
        .pods()
        .filter(|pod| pod.controlled && !pod.deleting && pod.phase == crate::decide::PodPhase::Failed)
        .filter(|pod| pod.reason == "UnexpectedAdmissionError")
        .filter(|pod| pod.containers.iter().any(|c| !c.ask.demand.is_none()) && state.may_change(pod))
        .cloned()
        .collect()
}

pub async fn run(client: Client, node: Arc<Node>, stop: CancellationToken) {
    let mut since: BTreeMap<String, Instant> = BTreeMap::new();
    let mut deleted = BTreeSet::new();
    let mut changes = node.changes();
    let mut pace = tokio::time::interval(PACE);
    loop {
        let paced = tokio::select! {
            _ = pace.tick() => true,
            changed = changes.changed() => if changed.is_ok() { false } else { return },
            () = stop.cancelled() => return,
        };
        for pod in node.with(|state, _| state.intruders()) {
            if !deleted.contains(&pod.uid) && delete(&client, &node, &pod, &INTRUDER).await {
                deleted.insert(pod.uid);
            }
        }
        if !paced {
            continue;
        }
        let found = node.with(|state, _| failed(state));
        since.retain(|uid, _| found.iter().any(|pod| pod.uid == *uid));
        for pod in &found {
            since.entry(pod.uid.clone()).or_insert_with(Instant::now);
        }
        let ripe = found.iter().find(|pod| since.get(&pod.uid).is_some_and(|at| at.elapsed() >= KEPT));
        if let Some(pod) = ripe {
            delete(&client, &node, pod, &FAILED).await;
        }
    }
}

/// Why a pod is deleted.
struct Deletion {
    reason: &'static str,
    message: &'static str,
    params: fn() -> DeleteParams,
    count: fn(&Metrics),
}

const FAILED: Deletion = Deletion {
    reason: "FailedPodDeleted",
    message: "had failed with UnexpectedAdmissionError; its controller re-creates it",
    params: DeleteParams::default,
    count: Metrics::failed_pod_deleted,
};
/// Its containers get a second: longer would be longer on the card of a share.
const INTRUDER: Deletion = Deletion {
    reason: "IntruderDeleted",
    message: "had got the card of a share, as NVIDIA's plugin was registered with the kubelet itself; create it again if it has no controller",
    params: || DeleteParams::default().grace_period(1),
    count: Metrics::intruder_deleted,
};

/// Whether it is deleted now.
async fn delete(client: &Client, node: &Node, pod: &PodView, why: &Deletion) -> bool {
    let api: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace);
    let same = Preconditions { uid: Some(pod.api_uid.clone()), resource_version: None };
    match api.delete(&pod.name, &(why.params)().preconditions(same)).await {
        Ok(_) => {
            (why.count)(&node.metrics);
            node.record_event(NodeEvent::normal(
                why.reason,
                format!("{}/{} {}", pod.namespace, pod.name, why.message),
            ));
            true
        }
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => true,
        Err(error) => {
            tracing::warn!(pod = %format!("{}/{}", pod.namespace, pod.name), %error, "deleting a pod failed; retrying");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::{ContainerView, PodPhase, Settings};
    use gpu_migrate_model::ask::{ContainerAsk, ContainerKind, Demand};
    use gpu_migrate_model::topology::Topology;

    #[test]
    fn only_pods_with_a_controller_that_failed_over_devices_are_deleted() {
        let pod = |uid: &str, controlled, reason: &str, legacy| PodView {
            uid: uid.into(),
            namespace: "ours".into(),
            phase: PodPhase::Failed,
            reason: reason.into(),
            controlled,
            containers: vec![ContainerView {
                ask: ContainerAsk {
                    name: "c".into(),
                    kind: ContainerKind::App,
                    position: 0,
                    demand: Demand { legacy, ..Demand::NONE },
                },
                reserved: Vec::new(),
            }],
            ..PodView::default()
        };
        let mut state = NodeState::new(Settings::default(), Vec::new(), &Topology::default());
        let pods = vec![
            pod("yes", true, "UnexpectedAdmissionError", 1),
            PodView {
                namespace: "not-ours".into(),
                ..pod("whole cards", true, "UnexpectedAdmissionError", 1)
            },
            pod("bare", false, "UnexpectedAdmissionError", 1),
            pod("evicted", true, "Evicted", 1),
            pod("no-card", true, "UnexpectedAdmissionError", 0),
        ];
        state.observe_pods(pods, 1);
        assert_eq!(failed(&state), [], "it is not known yet which namespaces have opted in");
        state.observe_opted_in(&BTreeSet::from(["ours".to_owned()]));
        assert_eq!(failed(&state).iter().map(|p| p.uid.as_str()).collect::<Vec<_>>(), ["yes"]);
    }
}
