//! The openb trace through the real kube-scheduler with our extender, beside the simulation of the same arrivals.
//!
//! `GPU_MIGRATE_CLUSTER=1 GPU_MIGRATE_TRACE_DIR=DIR cargo bench -p gpu-migrate-cluster-tests --bench openb` (root, like the scenarios)
//! starts etcd, kube-apiserver and kube-scheduler, no kubelet, and makes the nodes of the trace. Its pods are created in the order in
//! which they arrive in the simulation while no scheduler runs; then the scheduler is started, which queues them in that order. Pods
//! without cards are the default scheduler's. Once each is bound or refused, it prints how much of the cards was given out when so
//! much had arrived. Target: at 130 % less than a point below the simulation. `-- SEED` is of the order; 42 by default.

use std::{collections::BTreeSet, path::PathBuf, pin::pin, time::Duration};

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use gpu_migrate_cluster_tests::{Cluster, binaries};
use gpu_migrate_model::names::{CARD_MODEL, Dialect, GPU_PRODUCT, SCHEDULER};
use gpu_migrate_replay::trace::{
    read::{self, TraceNode, TracePod},
    replay::{MixSource, PlainPods, Policy, Setup},
    workload::{arrivals, generator},
};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, ResourceExt,
    api::{ListParams, Patch, PatchParams, PostParams},
    runtime::{
        WatchStreamExt,
        watcher::{Config, Event, watcher},
    },
};
use serde_json::json;
use tokio::runtime::Runtime;

/// The trace says nothing about the memory of cards: of each share one block, of which no card runs out.
const BLOCKS_PER_CARD: u32 = 160;
/// For all pods.
const LIMIT: Duration = Duration::from_secs(900);

fn main() -> Result<()> {
    if !binaries::asked_for()? {
        println!("skipped: needs root and a machine to itself: set GPU_MIGRATE_CLUSTER=1");
        return Ok(());
    }
    let Some(folder) = std::env::var_os("GPU_MIGRATE_TRACE_DIR").map(PathBuf::from) else {
        println!(
            "skipped: set GPU_MIGRATE_TRACE_DIR to a folder with openb_node_list_gpu_node.csv and openb_pod_list_default.csv"
        );
        return Ok(());
    };
    let setup = Setup {
        nodes: read::nodes(&folder.join("openb_node_list_gpu_node.csv"))?,
        pods: read::pods(&folder.join("openb_pod_list_default.csv"))?,
        ratio: 1.3,
        mix: MixSource::Observed,
        plain: PlainPods::Spread,
    };
    // cargo adds `--bench`.
    let seed = std::env::args().skip(1).find_map(|arg| arg.parse().ok()).unwrap_or(42);
    // On the main thread, which components must be started from.
    Runtime::new().context("cannot start tokio")?.block_on(run(&setup, seed))
}

async fn run(setup: &Setup, seed: u64) -> Result<()> {
    let simulated = setup.replay(Policy::Lookahead, seed)?.points;
    let order = arrivals(&setup.pods, setup.capacity(), setup.ratio, &mut generator(seed));
    let mut cluster = Cluster::start_without_node().await?;
    cluster.apply_crds().await?;
    let namespace = cluster.namespace("openb", &[]).await?;
    cluster.component("kube-scheduler")?.stop()?;
    // It would taint the nodes, which nobody renews.
    cluster.remove("kube-controller-manager")?;
    let nodes = Api::all(cluster.client.clone());
    let making = setup.nodes.iter().map(|node| create_node(&nodes, node));
    stream::iter(making).buffer_unordered(16).try_collect::<()>().await?;
    let pods = cluster.pods(&namespace);
    let making = order.iter().enumerate().map(|(at, pod)| create_pod(&pods, at, &setup.pods[*pod]));
    stream::iter(making).buffer_unordered(16).try_collect::<()>().await?;
    println!("{} nodes, {} pods, seed {seed}", setup.nodes.len(), order.len());
    cluster.add_extender().await?;
    let port = cluster.setup.ports.extender[0];
    cluster.restart_scheduler(Some(port))?;
    all_decided(pods.clone(), order.len()).await?;
    cluster.check()?;
    let bound: BTreeSet<String> = pods
        .list(&ListParams::default())
        .await?
        .into_iter()
        .filter(|pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()))
        .map(|pod| pod.name_any())
        .collect();

    println!("| arrived | simulation | kube-scheduler and extender |");
    println!("|---|---|---|");
    let capacity = f64::from(setup.capacity().0);
    let cores = |at: usize| setup.pods[order[at]].cores.0;
    for percent in [70, 80, 90, 100, 110, 120, 130] {
        let (mut arrived, mut given) = (0, 0);
        for at in 0..order.len() {
            if f64::from(arrived) >= capacity * f64::from(percent) / 100.0 {
                break;
            }
            arrived += cores(at);
            given += if bound.contains(&name(at)) { cores(at) } else { 0 };
        }
        let (given, expected) = (f64::from(given) / capacity * 100.0, simulated[percent as usize].allocated);
        println!("| {percent} % | {expected:.2} | {given:.2} |");
    }
    Ok(())
}

/// So that the API lists them in the order in which they arrive.
fn name(at: usize) -> String {
    format!("pod-{at:05}")
}

async fn create_node(nodes: &Api<Node>, of: &TraceNode) -> Result<()> {
    let dialect = Dialect::default();
    let amounts = json!({
        "cpu": format!("{}m", of.host.cpu_milli), "memory": format!("{}Mi", of.host.memory_mib), "pods": "1000",
        dialect.legacy: of.cards.to_string(), dialect.cores: (of.cards * 100).to_string(),
        dialect.memory: (of.cards * BLOCKS_PER_CARD).to_string(),
    });
    let labels = json!({GPU_PRODUCT: of.model, "kubernetes.io/hostname": of.name});
    let node = serde_json::from_value(json!({"metadata": {"name": of.name, "labels": labels}}))?;
    nodes.create(&PostParams::default(), &node).await?;
    let status = json!({"status": {
        "capacity": amounts, "allocatable": amounts, "conditions": [{"type": "Ready", "status": "True"}],
    }});
    nodes.patch_status(&of.name, &PatchParams::default(), &Patch::Merge(status)).await?;
    // The one of not being ready, which each new node has.
    let untainted = json!({"spec": {"taints": null}});
    nodes.patch(&of.name, &PatchParams::default(), &Patch::Merge(untainted)).await?;
    Ok(())
}

async fn create_pod(pods: &Api<Pod>, at: usize, of: &TracePod) -> Result<()> {
    let dialect = Dialect::default();
    let mut limits =
        json!({"cpu": format!("{}m", of.host.cpu_milli), "memory": format!("{}Mi", of.host.memory_mib)});
    if of.cores.0 > 0 {
        limits[&dialect.cores] = json!(of.cores.0.to_string());
    }
    if (1..100).contains(&of.cores.0) {
        limits[&dialect.memory] = json!("1");
    }
    let scheduler = if of.cores.0 > 0 { SCHEDULER } else { "default-scheduler" };
    let annotations = if of.models.is_empty() { json!({}) } else { json!({CARD_MODEL: of.models.join(",")}) };
    let pod = serde_json::from_value(json!({
        "metadata": {"name": name(at), "annotations": annotations},
        "spec": {"schedulerName": scheduler, "containers": [{"name": "main", "image": "none", "resources": {"limits": limits}}]},
    }))?;
    pods.create(&PostParams::default(), &pod).await.with_context(|| format!("cannot create {}", name(at)))?;
    Ok(())
}

/// Waits until each pod is bound, or the scheduler has found no node for it.
async fn all_decided(pods: Api<Pod>, count: usize) -> Result<()> {
    let mut events = pin!(watcher(pods, Config::default()).default_backoff());
    let mut decided = BTreeSet::new();
    let deadline = tokio::time::Instant::now() + LIMIT;
    while decided.len() < count {
        let event = tokio::time::timeout_at(deadline, events.next())
            .await
            .with_context(|| {
                format!("{} of {count} pods were bound or refused within {LIMIT:?}", decided.len())
            })?
            .context("the watch ended")?;
        // The watcher restarts one that ends.
        let Ok(Event::Apply(pod) | Event::InitApply(pod)) = event else { continue };
        let refused = |pod: &Pod| {
            let mut conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
            // Not a bind that failed, which is tried again.
            conditions.any(|it| it.type_ == "PodScheduled" && it.reason.as_deref() == Some("Unschedulable"))
        };
        if pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()) || refused(&pod) {
            decided.insert(pod.name_any());
        }
    }
    Ok(())
}
