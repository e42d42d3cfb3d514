//! Pods bound per second by the real scheduler with our extender, against without it, in one run.
//!
//! `GPU_MIGRATE_CLUSTER=1 cargo bench -p gpu-migrate-cluster-tests --bench throughput` (root, like the scenarios) starts etcd,
//! kube-apiserver, kube-controller-manager and kube-scheduler, no kubelet, and makes 500 Node objects of eight cards with their
//! GPUShadows. Then, in turns: pods of both kinds are created while no scheduler runs, the scheduler is started, and the time
//! from the first to the last pod that is bound is taken. It prints both rates and their ratio for each turn, and the median.
//!
//! Without the extender the scheduler adds up amounts; with it every pod gets cards, which is checked at the end of a turn.

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::pin,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use gpu_migrate_cluster_tests::{
    Cluster, binaries,
    cluster::TIMEOUT,
    migration::share,
    stage::CARDS,
    wait::{self, Seen},
    workload::pod_spec,
};
use gpu_migrate_model::names::PREDICATE_GPU_INDEX_PREFIX;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams},
    core::PartialObjectMeta,
    runtime::{
        WatchStreamExt,
        watcher::{Config, Event, watcher},
    },
};
use tokio::runtime::Runtime;

const NODES: usize = 500;
const PODS: usize = 1_500;
const TURNS: usize = 3;
/// For all pods of one turn.
const LIMIT: Duration = Duration::from_secs(300);
const EXTENDER: &str = "gpu-migrate-extender";

fn main() -> Result<()> {
    if !binaries::asked_for()? {
        println!("skipped: needs root and a machine to itself: set GPU_MIGRATE_CLUSTER=1");
        return Ok(());
    }
    // On the main thread, which components must be started from.
    Runtime::new().context("cannot start tokio")?.block_on(run())
}

async fn run() -> Result<()> {
    let mut cluster = Cluster::start_without_node().await?;
    cluster.apply_crds().await?;
    let _nodes = cluster.fake_nodes(NODES).await?;
    println!("{NODES} nodes of {CARDS} cards, {PODS} pods a turn, a third of them legacy");
    println!("| turn | without | with the extender | ratio |");
    println!("|---|---|---|---|");
    let mut ratios = Vec::new();
    for turn in 0..TURNS {
        let without = rate(&mut cluster, &format!("without-{turn}"), None).await?;
        cluster.add_extender().await?;
        let port = cluster.setup.ports.extender[0];
        let with = rate(&mut cluster, &format!("with-{turn}"), Some(port)).await?;
        cluster.remove(EXTENDER)?;
        println!("| {turn} | {without:.0}/s | {with:.0}/s | {:.2} |", with / without);
        ratios.push(with / without);
    }
    ratios.sort_by(f64::total_cmp);
    println!("median ratio {:.2}", ratios[TURNS / 2]);
    Ok(())
}

/// Pods bound per second.
async fn rate(cluster: &mut Cluster, name: &str, extender: Option<u16>) -> Result<f64> {
    let namespace = cluster.namespace(name, &[]).await?;
    cluster.component("kube-scheduler")?.stop()?;
    let making = (0..PODS).map(|index| {
        let spec = match index % 3 {
            0 => pod_spec(&[("nvidia.com/gpu", 1)]),
            _ => pod_spec(&share(25, 40)),
        };
        let (cluster, namespace) = (&*cluster, &namespace);
        async move { cluster.create_pod(namespace, &format!("pod-{index}"), spec).await.map(drop) }
    });
    stream::iter(making).buffer_unordered(16).try_collect::<()>().await?;
    let pods = cluster.pods(&namespace);
    let bound = tokio::spawn(all_bound(Api::namespaced(cluster.client.clone(), &namespace)));
    cluster.restart_scheduler(extender)?;
    let took = bound.await??;
    cluster.check()?;
    if extender.is_some() {
        check(&pods.list(&ListParams::default()).await?.items)?;
    }
    let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    pods.delete_collection(&now, &ListParams::default()).await?;
    wait::until("the pods of this turn to be gone", TIMEOUT, || async {
        let left = pods.list_metadata(&ListParams::default()).await?.items.len();
        Ok(Seen::from_bool(left == 0, || format!("{left} are left")))
    })
    .await?;
    #[allow(clippy::cast_precision_loss)] // 1,500
    Ok(PODS as f64 / took.as_secs_f64())
}

/// From the first pod that is bound to the last.
async fn all_bound(pods: Api<PartialObjectMeta<Pod>>) -> Result<Duration> {
    // A pod enters this selection when it is bound. Of its metadata alone, so that watching costs little.
    let bound = Config::default().fields("spec.nodeName!=");
    let mut events = pin!(watcher(pods, bound).default_backoff());
    let (mut seen, mut first) = (BTreeSet::new(), None);
    let deadline = tokio::time::Instant::now() + LIMIT;
    while let Some(event) = tokio::time::timeout_at(deadline, events.next())
        .await
        .with_context(|| format!("{} of {PODS} pods were bound within {LIMIT:?}", seen.len()))?
    {
        // The watcher restarts one that ends.
        let Ok(Event::Apply(pod) | Event::InitApply(pod)) = event else { continue };
        seen.insert(pod.metadata.uid);
        let first = *first.get_or_insert_with(Instant::now);
        if seen.len() == PODS {
            return Ok(first.elapsed());
        }
    }
    anyhow::bail!("the watch ended")
}

/// Every shared pod has a card, and no node has more on its cards than they hold.
fn check(pods: &[Pod]) -> Result<()> {
    let mut nodes = BTreeMap::<&str, (BTreeMap<&str, u32>, u64)>::new();
    for pod in pods {
        let node = pod.spec.as_ref().and_then(|s| s.node_name.as_deref()).context("a pod is not bound")?;
        let (shares, legacy) = nodes.entry(node).or_default();
        match pod.annotations().get(&format!("{PREDICATE_GPU_INDEX_PREFIX}0")) {
            Some(card) => *shares.entry(card).or_default() += 25,
            None => *legacy += 1,
        }
    }
    let legacy: u64 = nodes.values().map(|(_, legacy)| legacy).sum();
    ensure!(legacy as usize == PODS.div_ceil(3), "{legacy} pods have no card chosen");
    for (node, (shares, legacy)) in nodes {
        ensure!(shares.values().all(|cores| *cores <= 100), "{node} is overdrawn: {shares:?}");
        ensure!(
            shares.len() as u64 + legacy <= CARDS,
            "{node}: {legacy} legacy pods and shares on {shares:?}"
        );
    }
    Ok(())
}
