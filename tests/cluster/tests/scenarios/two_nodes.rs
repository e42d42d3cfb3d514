//! Two kubelets, each with a containerd and NVIDIA's plugin of its own: what is done to one node concerns that node alone.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use futures::StreamExt;
use gpu_migrate_cluster_tests::{
    Cluster,
    cluster::TIMEOUT,
    configs::{NODE, SECOND_NODE, on_node},
    migration::{GPU, shared_spec},
    observe::Observer,
    stage::CARDS,
    wait::Seen,
    workload::{only_card, pod_spec},
};
use gpu_migrate_model::names::Dialect;
use k8s_openapi::{
    api::core::v1::{Node, Pod},
    jiff::Timestamp,
};
use kube::{
    Api, Client, ResourceExt,
    runtime::{WatchStreamExt, watcher},
};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

/// One node gets an agent, a share and more whole cards, and loses the agent again, while pods with whole cards run on both.
pub(crate) async fn one_node_is_bridged_and_taken_back_and_the_other_never_changes(
    cluster: &mut Cluster,
) -> Result<()> {
    let dialect = Dialect::default();
    let second = cluster.add_node().await?;
    cluster.start_nvidia_plugin_on(&second)?;
    cluster.wait_for_allocatable_on(SECOND_NODE, &[(&dialect.legacy, CARDS)]).await?;
    let watched = Allocatable::watch(cluster.client.clone(), SECOND_NODE);
    watched.has_seen(cluster, Timestamp::UNIX_EPOCH).await?;
    let observer = Observer::start(cluster.client.clone());

    let namespace = cluster.namespace("two-nodes", &[]).await?;
    let mut uids = BTreeMap::new();
    for (name, node) in [("before-1", NODE), ("before-2", SECOND_NODE)] {
        uids.insert(name, run(cluster, &namespace, name, node).await?);
    }

    cluster.bridge_over_plugin().await?;
    // Both kinds on one node; the card of the pod that runs takes no share.
    let amounts = [(dialect.legacy.as_str(), CARDS), (dialect.cores.as_str(), (CARDS - 1) * 100)];
    cluster.wait_for_allocatable(&amounts).await?;
    cluster.create_pod(&namespace, "share", shared_spec(50, 40)).await?;
    let (share, _) = cluster.running(&namespace, "share").await?;
    ensure!(node_of(&share) == Some(NODE), "a share on a node without an agent: {:?}", share.spec);
    cluster.wait_for_allocatable(&[(&dialect.legacy, CARDS - 1)]).await?;
    for (name, node) in [("during-1", NODE), ("during-2", SECOND_NODE)] {
        uids.insert(name, run(cluster, &namespace, name, node).await?);
    }

    cluster.delete_pod(&namespace, "share").await?;
    cluster.wait_for_allocatable(&[(&dialect.legacy, CARDS)]).await?;
    cluster.remove("gpu-migrate-bridge")?;
    cluster.run_nvidia_plugin(None)?;
    cluster.wait_for_allocatable(&[(&dialect.legacy, CARDS), (&dialect.cores, 0)]).await?;
    for (name, node) in [("after-1", NODE), ("after-2", SECOND_NODE)] {
        uids.insert(name, run(cluster, &namespace, name, node).await?);
    }
    for (name, uid) in uids {
        let (pod, _) = cluster.running(&namespace, name).await?;
        let restarts = pod.status.iter().flat_map(|s| s.container_statuses.iter().flatten());
        ensure!(pod.uid() == Some(uid), "{name} was replaced");
        ensure!(restarts.map(|c| c.restart_count).sum::<i32>() == 0, "{name} was restarted");
    }
    observer.finish().await?.check(7)?;

    // The kubelet's time is in seconds.
    watched.has_seen(cluster, Timestamp::now() + Duration::from_secs(1)).await?;
    let seen = watched.values();
    ensure!(seen.len() == 1, "allocatable of {SECOND_NODE} changed: {seen:?}");
    // It would have been seen.
    cluster.remove(&on_node("nvidia-device-plugin", SECOND_NODE))?;
    cluster
        .until("the watch to see that the plugin has gone", TIMEOUT, || async {
            let seen = watched.values();
            Ok(Seen::from_bool(seen.len() == 2, || format!("{seen:?}")))
        })
        .await
}

/// A pod with a whole card on a node; its UID once it runs.
pub(crate) async fn run(cluster: &mut Cluster, namespace: &str, name: &str, node: &str) -> Result<String> {
    let mut spec: Value = pod_spec(GPU);
    spec["nodeSelector"] = json!({"kubernetes.io/hostname": node});
    cluster.create_pod(namespace, name, spec).await?;
    let (pod, container) = cluster.running(namespace, name).await?;
    only_card(&container)?;
    pod.uid().context("a pod has a UID")
}

fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

/// All that a node's extended resources ever were.
pub(crate) struct Allocatable {
    seen: Arc<Mutex<Watched>>,
    task: JoinHandle<()>,
}

#[derive(Default)]
struct Watched {
    /// Different from one to the next.
    values: Vec<BTreeMap<String, String>>,
    /// When the kubelet wrote the last one.
    at: Option<Timestamp>,
}

impl Allocatable {
    pub(crate) fn watch(client: Client, node: &str) -> Self {
        let seen = Arc::<Mutex<Watched>>::default();
        let config = watcher::Config::default().fields(&format!("metadata.name={node}"));
        let changes = watcher(Api::<Node>::all(client), config).default_backoff().applied_objects();
        let into = seen.clone();
        let task = tokio::spawn(async move {
            let mut changes = std::pin::pin!(changes);
            while let Some(change) = changes.next().await {
                // It begins again by itself.
                let Ok(node) = change else { continue };
                let status = node.status.unwrap_or_default();
                let extended =
                    status.allocatable.into_iter().flatten().filter(|(name, _)| name.contains('/'));
                let value = extended.map(|(name, amount)| (name, amount.0)).collect();
                let ready = status.conditions.into_iter().flatten().find(|c| c.type_ == "Ready");
                let mut seen = into.lock().unwrap_or_else(PoisonError::into_inner);
                seen.at = ready.and_then(|ready| ready.last_heartbeat_time).map(|time| time.0);
                if seen.values.last() != Some(&value) {
                    seen.values.push(value);
                }
            }
        });
        Self { seen, task }
    }

    pub(crate) fn values(&self) -> Vec<BTreeMap<String, String>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).values.clone()
    }

    /// Waits until it has seen what the kubelet wrote at that time or later.
    pub(crate) async fn has_seen(&self, cluster: &mut Cluster, time: Timestamp) -> Result<()> {
        cluster
            .until("the watch to see the node's status", TIMEOUT, || async {
                let at = self.seen.lock().unwrap_or_else(PoisonError::into_inner).at;
                Ok(Seen::from_bool(at.is_some_and(|at| at >= time), || format!("{at:?}, not {time}")))
            })
            .await
    }
}

impl Drop for Allocatable {
    fn drop(&mut self) {
        self.task.abort();
    }
}
