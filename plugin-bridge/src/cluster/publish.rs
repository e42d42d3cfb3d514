//! Writes the GPUShadow, annotations on pods, and an annotation on the Node when a card gets free capacity.
//!
//! All by server-side apply or a merge patch of our own keys: nothing that was read is written back.

use std::sync::Arc;
use std::time::Duration;

use gpu_migrate_model::crd::{GPUShadow, GPUShadowStatus};
use gpu_migrate_model::ledger::HolderId;
use gpu_migrate_model::names;
use k8s_openapi::api::core::v1::{Node as ApiNode, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::decide::PodAnnotations;
use crate::node::{Node, NodeEvent};
use crate::nvidia::Upstreams;

/// Our name as a field manager.
pub const MANAGER: &str = "gpu-migrate-bridge";
/// At most one GPUShadow in this time.
const PACE: Duration = Duration::from_secs(1);
/// How long the first change waits for others.
const GATHER: Duration = Duration::from_millis(20);

/// What stays the same in every status.
#[derive(Clone, Debug)]
pub struct StaticStatus {
    /// Also the GPUShadow's name.
    pub node_name: String,
    pub isolation: String,
    pub driver_version: String,
    pub cuda_version: String,
}

/// The status as it is now, without transition times.
#[must_use]
pub fn status(
    node: &Node,
    upstreams: &Upstreams,
    static_status: &StaticStatus,
    drift: &[String],
) -> GPUShadowStatus {
    let (mut status, deviations, is_ready, obstacle) = node.with(|state, _| {
        let mut status = GPUShadowStatus::of(state.ledger(), &node.topology, |uid| state.pod_name(uid));
        for (index, card) in status.cards.iter_mut().enumerate() {
            card.closed_because = state.closed_because(index.into()).unwrap_or_default().to_owned();
        }
        let obstacle = state.isolation_obstacle().map(str::to_owned);
        (status, state.legacy_deviations(), state.is_ready(), obstacle)
    });
    for holder in status.cards.iter_mut().flat_map(|card| &mut card.holders) {
        let id = HolderId::new(&holder.uid, &holder.container);
        holder.kubelet_devices = deviations.get(&id).cloned().unwrap_or_default();
    }
    status.isolation.clone_from(&static_status.isolation);
    status.driver_version.clone_from(&static_status.driver_version);
    status.cuda_version.clone_from(&static_status.cuda_version);
    let resources = upstreams.registered_resources();
    let registered: Vec<&str> =
        resources.iter().filter(|(_, registered)| **registered).map(|(name, _)| name.as_str()).collect();
    status.conditions = vec![
        condition(
            "Ready",
            is_ready,
            if is_ready { "Serving" } else { "Starting" },
            if is_ready {
                "the node agent serves this node"
            } else {
                "what was allocated before the node agent started is not known yet, so nothing is allocated"
            },
        ),
        condition(
            names::NVIDIA_PLUGIN_REGISTERED,
            !registered.is_empty(),
            if registered.is_empty() { "NotRegistered" } else { "Registered" },
            &if registered.is_empty() {
                "NVIDIA's plugin has not registered with the node agent".to_owned()
            } else {
                format!("NVIDIA's plugin is registered for {}", registered.join(", "))
            },
        ),
        condition(
            "Drift",
            !drift.is_empty(),
            if drift.is_empty() { "SourcesAgree" } else { "SourcesDisagree" },
            &if drift.is_empty() {
                "ledger, kubelet, API and NVML agree".to_owned()
            } else {
                drift.join("; ")
            },
        ),
        isolation_condition(&static_status.isolation, obstacle.as_deref()),
    ];
    status
}

fn isolation_condition(isolation: &str, obstacle: Option<&str>) -> Condition {
    match obstacle {
        Some(why) => condition(
            "IsolationReady",
            false,
            "NotReady",
            &format!("isolation {isolation}: {why}; this node takes no share meanwhile"),
        ),
        None if isolation == "none" => condition(
            "IsolationReady",
            true,
            "None",
            "isolation none: a container can use more than its share of a card",
        ),
        None => {
            condition("IsolationReady", true, "Ready", &format!("isolation {isolation} can limit containers"))
        }
    }
}

fn condition(type_: &str, holds: bool, reason: &str, message: &str) -> Condition {
    Condition {
        type_: type_.to_owned(),
        status: if holds { "True" } else { "False" }.to_owned(),
        reason: reason.to_owned(),
        // The API server's limit is 32 KiB; 1 KiB is what a person reads.
        message: message.chars().take(1024).collect(),
        last_transition_time: Time(Timestamp::UNIX_EPOCH),
        observed_generation: None,
    }
}

/// Publishes changes until `stop`.
pub async fn run(
    client: Client,
    node: Arc<Node>,
    upstreams: Arc<Upstreams>,
    static_status: StaticStatus,
    drift: tokio::sync::watch::Receiver<Vec<String>>,
    stop: CancellationToken,
) {
    let mut publisher = Publisher {
        client,
        node,
        upstreams,
        static_status,
        drift,
        last: None,
        is_published: false,
        freed: 0,
        started: Timestamp::now().as_millisecond(),
        owner: None,
    };
    let mut changes = publisher.node.deferred_changes();
    loop {
        changes.borrow_and_update();
        publisher.drift.borrow_and_update();
        let began = tokio::time::Instant::now();
        tokio::time::sleep(GATHER).await;
        if let Err(error) = publisher.publish().await {
            publisher.node.metrics.publish_failed();
            tracing::warn!(%error, "publishing GPUShadow failed; retrying");
        } else {
            tokio::select! {
                changed = changes.changed() => if changed.is_err() { return },
                changed = publisher.drift.changed() => if changed.is_err() { return },
                // Another client may have deleted or edited it.
                () = tokio::time::sleep(Duration::from_secs(60)) => publisher.is_published = false,
                () = stop.cancelled() => return,
            }
        }
        tokio::select! {
            () = tokio::time::sleep_until(began + PACE) => {}
            () = stop.cancelled() => return,
        }
    }
}

struct Publisher {
    client: Client,
    node: Arc<Node>,
    upstreams: Arc<Upstreams>,
    static_status: StaticStatus,
    drift: tokio::sync::watch::Receiver<Vec<String>>,
    last: Option<GPUShadowStatus>,
    /// `last` is in the cluster, as far as known.
    is_published: bool,
    freed: u64,
    /// Distinguishes the values of two processes (in a container each has the PID 1).
    started: i64,
    owner: Option<serde_json::Value>,
}

impl Publisher {
    async fn publish(&mut self) -> kube::Result<()> {
        let freed = self.node.with(|state, _| state.freed());
        self.publish_shadow().await?;
        // After the GPUShadow: a pod that is requeued finds the card free in it.
        if freed != self.freed {
            self.requeue_pods(freed).await?;
            self.freed = freed;
        }
        for missing in self.node.with(|state, _| state.missing_annotations()) {
            if let Err(error) = self.annotate(&missing).await {
                tracing::warn!(pod = %format!("{}/{}", missing.namespace, missing.name), %error, "annotating the pod failed; retrying with the next change");
            }
        }
        Ok(())
    }

    async fn publish_shadow(&mut self) -> kube::Result<()> {
        let drift = self.drift.borrow().clone();
        let mut status = status(&self.node, &self.upstreams, &self.static_status, &drift);
        self.node.metrics.card_states(status.cards.iter().map(|card| card.state));
        keep_transition_times(
            &mut status.conditions,
            self.last.as_ref().map(|s| s.conditions.as_slice()).unwrap_or_default(),
        );
        if self.is_published && self.last.as_ref() == Some(&status) {
            return Ok(());
        }
        let api: Api<GPUShadow> = Api::all(self.client.clone());
        let params = PatchParams::apply(MANAGER).force();
        let name = self.static_status.node_name.clone();
        if !self.is_published {
            let owners: Vec<serde_json::Value> = self.owner().await?.into_iter().collect();
            let object = json!({
                "apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUShadow",
                "metadata": {"name": name, "ownerReferences": owners}, "spec": {},
            });
            api.patch(&name, &params, &Patch::Apply(&object)).await?;
        }
        let object = json!({
            "apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUShadow", "metadata": {"name": name}, "status": status,
        });
        api.patch_status(&name, &params, &Patch::Apply(&object)).await?;
        let before = self.last.replace(status);
        self.is_published = true;
        self.report_closed(before.as_ref());
        Ok(())
    }

    /// An Event for each card that was closed since.
    fn report_closed(&self, before: Option<&GPUShadowStatus>) {
        let cards = self.last.iter().flat_map(|status| &status.cards);
        for (index, card) in cards.enumerate().filter(|(_, card)| !card.closed_because.is_empty()) {
            let known = before.and_then(|before| before.cards.get(index));
            if known.is_none_or(|known| known.closed_because != card.closed_because) {
                self.node.record_event(NodeEvent::warning(
                    "CardClosed",
                    format!("card {index} ({}) takes nothing new: {}", card.card.uuid, card.closed_because),
                ));
            }
        }
    }

    /// The Node owns its shadow: when it goes, the shadow goes.
    async fn owner(&mut self) -> kube::Result<Option<serde_json::Value>> {
        if self.owner.is_none() {
            let nodes: Api<ApiNode> = Api::all(self.client.clone());
            let found = nodes.get_metadata_opt(&self.static_status.node_name).await?;
            self.owner = found.map(|node| {
                json!({"apiVersion": "v1", "kind": "Node", "name": node.name_any(), "uid": node.uid().unwrap_or_default()})
            });
        }
        Ok(self.owner.clone())
    }

    /// The scheduler retries waiting pods when a Node changes, not when a GPUShadow does.
    async fn requeue_pods(&self, freed: u64) -> kube::Result<()> {
        let nodes: Api<ApiNode> = Api::all(self.client.clone());
        let value = format!("{}-{freed}", self.started);
        let patch = json!({"metadata": {"annotations": {names::CARDS_GENERATION: value}}});
        nodes
            .patch_metadata(&self.static_status.node_name, &PatchParams::default(), &Patch::Merge(&patch))
            .await
            .map(drop)
    }

    async fn annotate(&self, missing: &PodAnnotations) -> kube::Result<()> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &missing.namespace);
        let patch = json!({"metadata": {"uid": missing.uid, "annotations": missing.annotations}});
        match pods.patch_metadata(&missing.name, &PatchParams::default(), &Patch::Merge(&patch)).await {
            // Deleted meanwhile, or another pod of the same name.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409 | 422) => Ok(()),
            outcome => outcome.map(drop),
        }
    }
}

/// A condition keeps its time for as long as its status stays.
fn keep_transition_times(conditions: &mut [Condition], before: &[Condition]) {
    for condition in conditions {
        let same = before.iter().find(|b| b.type_ == condition.type_ && b.status == condition.status);
        condition.last_transition_time =
            same.map_or_else(|| Time(Timestamp::now()), |b| b.last_transition_time.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_keeps_its_transition_time_while_its_status_stays() {
        let at = |second| Time(Timestamp::from_second(second).unwrap());
        let before = [Condition { last_transition_time: at(7), ..condition("Ready", true, "Serving", "") }];
        let mut now =
            vec![condition("Ready", true, "Serving", "other words"), condition("Drift", true, "x", "")];
        keep_transition_times(&mut now, &before);
        assert_eq!(now[0].last_transition_time, at(7));
        assert_ne!(now[1].last_transition_time, at(0), "a new one has the time of now");
        let mut changed = vec![condition("Ready", false, "Starting", "")];
        keep_transition_times(&mut changed, &before);
        assert_ne!(changed[0].last_transition_time, at(7));
    }
}
