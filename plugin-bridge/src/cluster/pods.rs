//! The node's pods: from a watch of this node's pods, or from a file.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use gpu_migrate_model::annotation::Choice;
use gpu_migrate_model::ask::PodAsk;
use gpu_migrate_model::names::Dialect;
use gpu_migrate_model::view::json::Map;
use gpu_migrate_model::view::{self, WatchedPod};
use gpu_migrate_runtime::watch::{Update, watch_guarded};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use kube::core::DeserializeGuard;
use kube::runtime::watcher::{Config, Event};
use kube::{Api, Client};
use tokio_util::sync::CancellationToken;

use crate::decide::{ContainerView, PodPhase, PodView};
use crate::node::{Node, PodLookup};
use gpu_migrate_kubelet_api::directory::Stamp;

/// The annotation by which a mirror pod names the UID that the kubelet uses for a static pod.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// `spec.terminationGracePeriodSeconds` where a pod has none: the API server's default.
const DEFAULT_GRACE: i64 = 30;

/// What decisions need of a pod.
#[must_use]
pub fn view(pod: &view::PodView<'_>, dialect: &Dialect) -> PodView {
    let meta = &pod.metadata;
    let ours = |key: &str| key.starts_with("gpu-migrate.io/") || key.starts_with("tencent.com/");
    let annotations = meta.annotations.iter().flat_map(Map::iter).filter(|(key, _)| ours(key));
    let annotations = annotations.map(|(key, value)| (key.to_owned(), value.to_string())).collect();
    let ask = PodAsk::read_unchecked(&pod.spec, dialect);
    let choice = Choice::read(&annotations, &ask).ok().flatten().unwrap_or_default();
    let phase = match pod.status.phase.as_str() {
        "Running" => PodPhase::Running,
        "Succeeded" => PodPhase::Succeeded,
        "Failed" => PodPhase::Failed,
        _ => PodPhase::Pending,
    };
    let status = || pod.status.all_containers().map(|container| container.state);
    let grace = pod.spec.termination_grace_period_seconds.unwrap_or(DEFAULT_GRACE);
    let created = meta.creation_timestamp.as_ref().and_then(|text| text.parse::<Timestamp>().ok());
    let created = created.map_or(0, Timestamp::as_nanosecond);
    let order = if choice.time > 0 { choice.time } else { u128::try_from(created).unwrap_or(0) };
    PodView {
        uid: meta.annotation(MIRROR).unwrap_or(&meta.uid).to_owned(),
        api_uid: meta.uid.to_string(),
        namespace: meta.namespace.to_string(),
        name: meta.name.to_string(),
        phase,
        reason: pod.status.reason.to_string(),
        deleting: meta.deletion_timestamp.is_some(),
        controlled: meta.controller().is_some(),
        started: phase == PodPhase::Running
            || status().any(|state| state.running.or(state.terminated).is_some()),
        running: status().any(|state| state.running.is_some()),
        // The kubelet takes a negative one as 1.
        grace: u64::try_from(grace).map_or(1_000, |seconds| seconds.saturating_mul(1_000)),
        order: u64::try_from(order).unwrap_or(u64::MAX),
        containers: ask
            .containers
            .into_iter()
            .map(|ask| ContainerView {
                reserved: choice.cards.get(&ask.name).cloned().unwrap_or_default(),
                ask,
            })
            .collect(),
        container_ids: pod
            .status
            .all_containers()
            .filter_map(|status| Some((status.container_id.split_once("://")?.1, &status.name)))
            .map(|(id, name)| (id.to_owned(), name.to_string()))
            .collect(),
        annotations,
    }
}

/// Asks the API server for this node's pods out of turn.
#[derive(Debug)]
pub struct ApiLookup {
    api: Api<DeserializeGuard<WatchedPod>>,
    selector: String,
    dialect: Dialect,
}

impl ApiLookup {
    #[must_use]
    pub fn new(client: Client, node_name: &str, dialect: Dialect) -> Self {
        Self { api: Api::all(client), selector: format!("spec.nodeName={node_name}"), dialect }
    }
}

#[tonic::async_trait]
impl PodLookup for ApiLookup {
    async fn refresh(&self, node: &Node) {
        let pending = ListParams::default().fields(&format!("{},status.phase=Pending", self.selector));
        match self.api.list(&pending).await {
            Ok(list) => {
                let pods = list.items.into_iter().filter_map(|guard| guard.0.ok());
                take_pending(node, pods.map(|pod| view(&pod.view, &self.dialect)));
            }
            Err(error) => tracing::warn!(%error, "pods could not be looked up"),
        }
    }
}

/// Takes pods of a list out of turn: only those not known yet, since the watch may be ahead of it.
pub(crate) fn take_pending(node: &Node, pods: impl IntoIterator<Item = PodView>) {
    node.with(|state, now| {
        for pod in pods {
            if state.pod(&pod.uid).is_none() && !state.has_departed(&pod.uid) {
                state.observe_pod(pod, now);
            }
        }
    });
}

/// Reads the pods file out of turn.
#[derive(Debug)]
pub struct FileLookup(pub std::path::PathBuf);

#[tonic::async_trait]
impl PodLookup for FileLookup {
    async fn refresh(&self, node: &Node) {
        let dialect = node.with(|state, _| state.settings().dialect.clone());
        if let Ok(pods) = read_file(&self.0, &dialect) {
            node.with(|state, now| state.observe_pods(pods, now));
        }
    }
}

/// Follows the API server's pods of this node until `stop`. While the API server is away decisions go on from what is known.
pub async fn follow(client: Client, node_name: String, node: Arc<Node>, stop: CancellationToken) {
    let dialect = node.with(|state, _| state.settings().dialect.clone());
    let config = Config::default().fields(&format!("spec.nodeName={node_name}"));
    let mut updates = watch_guarded(Api::all(client), config, node.metrics.skipped_objects.clone());
    let mut first: Vec<PodView> = Vec::new();
    while let Some(Some(update)) = stop.run_until_cancelled(updates.next()).await {
        if let Update::Event(event) = update {
            take(event, &mut first, &dialect, &node);
        }
    }
}

fn take(
    event: Event<DeserializeGuard<WatchedPod>>,
    first: &mut Vec<PodView>,
    dialect: &Dialect,
    node: &Node,
) {
    let seen = |pod: DeserializeGuard<WatchedPod>| pod.0.ok().map(|pod| view(&pod.view, dialect));
    match event {
        Event::Init => first.clear(),
        Event::InitApply(pod) => first.extend(seen(pod)),
        Event::InitDone => {
            let pods = std::mem::take(first);
            tracing::info!(pods = pods.len(), "pods of this node are known");
            node.with(|state, now| state.observe_pods(pods, now));
        }
        Event::Apply(pod) => {
            if let Some(pod) = seen(pod) {
                node.with(|state, now| state.observe_pod(pod, now));
            }
        }
        Event::Delete(pod) => {
            if let Some(pod) = seen(pod) {
                let uid = pod.uid.clone();
                node.with(|state, now| {
                    // The last state comes with the deletion: it says whether the containers had ended.
                    state.observe_pod(pod, now);
                    state.observe_pod_gone(&uid, now);
                });
            }
        }
    }
}

/// Reads pods from a file whenever it changes: a Kubernetes `List` of Pods, YAML or JSON. A file that cannot be read changes nothing.
pub async fn follow_file(path: std::path::PathBuf, node: Arc<Node>, stop: CancellationToken) {
    let dialect = node.with(|state, _| state.settings().dialect.clone());
    let mut last = None;
    loop {
        let stamp = Stamp::of(&path);
        if stamp != last {
            match read_file(&path, &dialect) {
                Ok(pods) => {
                    last = stamp;
                    node.with(|state, now| state.observe_pods(pods, now));
                }
                Err(error) => {
                    tracing::warn!(path = %path.display(), error, "pods file is not used; what was known stays");
                }
            }
        }
        tokio::select! {
            () = tokio::time::sleep(Duration::from_millis(500)) => {}
            () = stop.cancelled() => return,
        }
    }
}

fn read_file(path: &Path, dialect: &Dialect) -> Result<Vec<PodView>, String> {
    #[derive(serde::Deserialize)]
    struct List {
        items: Vec<Pod>,
    }
    let text = std::fs::read_to_string(path).map_err(|e| e.to_string())?;
    let list: List = serde_saphyr::from_str(&text).map_err(|e| format!("expected a List of Pods: {e}"))?;
    // By way of JSON: YAML that is right for a Pod may hold bare numbers where the view expects text.
    let read = |pod: &Pod| serde_json::from_value::<WatchedPod>(serde_json::to_value(pod)?);
    let pods = list.items.iter().map(|pod| read(pod).map(|pod| view(&pod.view, dialect)));
    pods.collect::<Result<_, _>>().map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpu_migrate_model::units::{CardIndex, Cores};

    fn seen(pod: &serde_json::Value) -> PodView {
        view(&serde_json::from_str(&pod.to_string()).unwrap(), &Dialect::default())
    }

    #[test]
    fn a_pod_is_seen_with_its_reservation() {
        let seen = seen(&serde_json::json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u", "annotations": {
                "tencent.com/predicate-gpu-idx-0": "3", "tencent.com/predicate-time": "17", "other": "x"},
                "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true}]},
            "spec": {"containers": [{"name": "c", "resources": {"limits": {
                "tencent.com/vcuda-core": "50", "tencent.com/vcuda-memory": "30"}}}]},
            "status": {"phase": "Pending"}
        }));
        assert_eq!(seen.containers[0].reserved, [CardIndex(3)]);
        assert_eq!(seen.containers[0].ask.demand.cores, Cores(50));
        assert_eq!((seen.order, seen.controlled, seen.annotations.len()), (17, true, 2));
    }

    #[test]
    fn a_static_pod_is_known_by_the_kubelets_uid() {
        let seen = seen(&serde_json::json!({
            "metadata": {"name": "p", "uid": "api", "annotations": {"kubernetes.io/config.mirror": "hash"}},
            "spec": {"containers": []}
        }));
        assert_eq!((seen.uid.as_str(), seen.api_uid.as_str()), ("hash", "api"));
    }
}
