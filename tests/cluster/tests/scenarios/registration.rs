//! NVIDIA's plugin at the kubelet itself, as without our variable: the node agent registers over it.

use std::{
    borrow::Cow, collections::BTreeSet, fs, sync::Arc, sync::atomic::AtomicBool, sync::atomic::Ordering,
    time::Duration, time::Instant,
};

use anyhow::{Context, Result, ensure};
use gpu_migrate_cluster_tests::{
    Cluster, http,
    migration::{GPU, shared_spec},
    observe::Observer,
    stage::CARDS,
    wait::Seen,
    workload::{only_card, pod_spec},
};
use gpu_migrate_kubelet_api::checkpoint::Checkpoint;
use gpu_migrate_model::names::Dialect;
use k8s_openapi::api::core::v1::Event;
use kube::{Api, api::ListParams};

use crate::kubernetes::CHECKPOINT;

const PLUGIN: &str = "nvidia-device-plugin";
const METRIC: &str = "gpu_migrate_node_agent_nvidia_plugin_registrations_total";

/// The variable is dropped from the plugin's DaemonSet while shares run; then the plugin, the node agent and the kubelet start anew.
/// Whole cards are allocated through the agent again each time, and how long they were not is printed.
pub(crate) async fn a_plugin_at_the_kubelet_is_registered_over(cluster: &mut Cluster) -> Result<()> {
    let observer = Observer::start(cluster.client.clone());
    let namespace = cluster.namespace("registration", &[]).await?;
    cluster.create_pod(&namespace, "share-0", shared_spec(60, 40)).await?;
    let (_, share) = cluster.running(&namespace, "share-0").await?;
    let card = only_card(&share)?.to_owned();
    cluster.create_pod(&namespace, "legacy-0", pod_spec(GPU)).await?;
    cluster.running(&namespace, "legacy-0").await?;

    let (watch, before) = (Exposure::watch(&card), count(cluster).await?);
    cluster.run_nvidia_plugin(None)?;
    counted(cluster, before + 1).await.context("the variable was dropped")?;
    taken_back(cluster, &card).await.context("the variable was dropped")?;
    eprintln!(
        "    variable dropped: the share's card was healthy at the kubelet for {:.1?}",
        watch.finish()?
    );
    for component in [PLUGIN, "gpu-migrate-bridge", "kubelet", PLUGIN] {
        let (watch, count) = (Exposure::watch(&card), count(cluster).await?);
        cluster.kill(component)?;
        cluster.start_component(component)?;
        // NVIDIA's plugin registers with the kubelet each time one of the two starts; the agent's count begins anew with it.
        counted(cluster, if component == "gpu-migrate-bridge" { 1 } else { count + 1 }).await?;
        taken_back(cluster, &card).await.with_context(|| format!("{component} was killed"))?;
        eprintln!(
            "    {component} killed: the share's card was healthy at the kubelet for {:.1?}",
            watch.finish()?
        );
    }

    // As before: the rest of the cards is whole, and shares still fit beside the first.
    for name in ["legacy-1", "legacy-2", "legacy-3", "legacy-4", "legacy-5", "legacy-6"] {
        cluster.create_pod(&namespace, name, pod_spec(GPU)).await?;
        let (_, container) = cluster.running(&namespace, name).await?;
        ensure!(only_card(&container)? != card, "{name} is on the card of a share");
    }
    cluster.create_pod(&namespace, "share-1", shared_spec(40, 40)).await?;
    let (_, container) = cluster.running(&namespace, "share-1").await?;
    ensure!(only_card(&container)? == card, "the only card with room for a share is {card}");
    let events: Api<Event> = Api::all(cluster.client.clone());
    let told = events.list(&ListParams::default().fields("reason=RegistrationTakenBack")).await?.items;
    ensure!(!told.is_empty(), "no Event says what happened");

    cluster.run_nvidia_plugin(Some(gpu_migrate_cluster_tests::stage::BRIDGE_SOCKET))?;
    taken_back(cluster, &card).await.context("the variable is set again")?;
    observer.finish().await?.check(9)
}

/// How often the agent that runs has begun to use NVIDIA's plugin.
async fn count(cluster: &Cluster) -> Result<u64> {
    let page = http::get(cluster.setup.ports.bridge_metrics, "/metrics").await?;
    let line = page.lines().find_map(|line| line.strip_prefix(METRIC)).context("no such metric")?;
    Ok(line.trim().parse()?)
}

/// Waits until it has done so this often.
async fn counted(cluster: &mut Cluster, times: u64) -> Result<()> {
    let port = cluster.setup.ports.bridge_metrics;
    cluster
        .until("the node agent to use NVIDIA's plugin again", Duration::from_secs(60), || async {
            let page = http::get(port, "/metrics").await.unwrap_or_default();
            let count = page.lines().find_map(|line| line.strip_prefix(METRIC)).unwrap_or_default().trim();
            Ok(Seen::from_bool(count.parse::<u64>().is_ok_and(|count| count >= times), || count.to_owned()))
        })
        .await
}

/// Waits until the kubelet would allocate every card to whole-card pods but that of the share.
async fn taken_back(cluster: &mut Cluster, card: &str) -> Result<()> {
    let deadline = Duration::from_secs(60);
    cluster
        .until("the kubelet to have the node agent's list", deadline, || async {
            let healthy = healthy()?;
            let is_ours = healthy.len() as u64 == CARDS - 1 && !healthy.contains(card);
            Ok(Seen::from_bool(is_ours, || format!("{healthy:?}")))
        })
        .await
}

/// The cards that the kubelet may allocate, by its checkpoint.
fn healthy() -> Result<BTreeSet<String>> {
    let text = fs::read(CHECKPOINT).with_context(|| format!("cannot read {CHECKPOINT}"))?;
    let parsed = Checkpoint::parse(&text)?;
    Ok(parsed.healthy(&Dialect::default().legacy).into_iter().map(Cow::into_owned).collect())
}

/// How long a card is healthy at the kubelet, from reading its checkpoint again and again.
struct Exposure {
    over: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Duration>,
}

impl Exposure {
    fn watch(card: &str) -> Self {
        let (over, card) = (Arc::new(AtomicBool::new(false)), card.to_owned());
        let until = over.clone();
        let thread = std::thread::spawn(move || {
            let (mut total, mut since) = (Duration::ZERO, None::<Instant>);
            while !until.load(Ordering::Relaxed) {
                // While it is being replaced it is as it was.
                if let Ok(healthy) = healthy() {
                    let is_exposed = healthy.contains(&card);
                    match since {
                        Some(from) if !is_exposed => {
                            total += from.elapsed();
                            since = None;
                        }
                        None if is_exposed => since = Some(Instant::now()),
                        _ => {}
                    }
                }
                std::thread::sleep(Duration::from_micros(200));
            }
            total + since.map(|from| from.elapsed()).unwrap_or_default()
        });
        Self { over, thread }
    }

    fn finish(self) -> Result<Duration> {
        self.over.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow::anyhow!("the watch of the checkpoint ended"))
    }
}
