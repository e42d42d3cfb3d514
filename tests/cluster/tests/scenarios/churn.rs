//! Three hundred pods of both kinds are created and deleted while the kubelet and the node agent are killed at random.

use std::{env, time::Duration};

use anyhow::{Context, Result, ensure};
use gpu_migrate_cluster_tests::{
    Cluster,
    cluster::TIMEOUT,
    migration::shared_spec,
    observe::Observer,
    wait::{self, Seen},
    workload::{phase, phase_and_why, pod_spec},
};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams},
};
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use serde_json::Value;

/// Pods that exist at a time: more than fit, so that some always wait for a card.
const ALIVE: usize = 16;
/// One kill in so many steps, on average.
const STEPS_PER_KILL: u32 = 15;

/// I1 and I2 hold throughout, and afterwards every card is free.
pub(crate) async fn random_kills_break_no_invariant(cluster: &mut Cluster) -> Result<()> {
    let total: usize = number("GPU_MIGRATE_CHURN_PODS", 300)?;
    let seed: u64 = number("GPU_MIGRATE_CHURN_SEED", 1)?;
    let mut random = StdRng::seed_from_u64(seed);
    let namespace = cluster.namespace("churn", &[]).await?;
    let pods = cluster.pods(&namespace);
    let observer = Observer::start(cluster.client.clone());

    let (mut made, mut kills, mut refused) = (0, 0, 0);
    let mut steps = tokio::time::interval(Duration::from_millis(250));
    while made < total {
        steps.tick().await;
        let alive = pods.list(&ListParams::default()).await?.items;
        let (ended, alive): (Vec<Pod>, Vec<Pod>) = alive
            .into_iter()
            .filter(|pod| pod.metadata.deletion_timestamp.is_none())
            .partition(|pod| matches!(phase(pod), "Failed" | "Succeeded"));
        for pod in &ended {
            refused += 1;
            eprintln!("ended: {}", phase_and_why(Some(pod)));
            delete(&pods, pod).await?;
        }
        if alive.len() < ALIVE {
            cluster.create_pod(&namespace, &format!("pod-{made}"), any_spec(&mut random)).await?;
            made += 1;
        } else {
            // Mostly those that run: to delete a waiting pod frees nothing.
            let running: Vec<&Pod> = alive.iter().filter(|p| phase(p) == "Running").collect();
            if let Some(pod) = running.choose(&mut random) {
                delete(&pods, pod).await?;
            }
        }
        if random.random_ratio(1, STEPS_PER_KILL) {
            kills += 1;
            let victim = *["kubelet", "gpu-migrate-bridge"].choose(&mut random).context("two victims")?;
            cluster.kill(victim)?;
            cluster.start_component(victim)?;
        }
        cluster.check()?;
    }

    let report = observer.finish().await?;
    eprintln!(
        "churn with seed {seed}: {made} pods, {} held cards, {kills} kills, {refused} ended by themselves, {} samples, {} violations",
        report.holders.len(),
        report.samples,
        report.violations.len()
    );
    report.check(total / 3)?;
    ensure!(kills > 0 || total < 100, "nothing was killed: this proves nothing");
    everything_is_free_again(cluster, &pods).await
}

/// Deletes all pods; then the GPUShadow must list no holder: a card that is neither held nor offered is lost capacity.
async fn everything_is_free_again(cluster: &mut Cluster, pods: &Api<Pod>) -> Result<()> {
    for pod in pods.list(&ListParams::default()).await? {
        delete(pods, &pod).await?;
    }
    wait::until("all pods to be gone", TIMEOUT, || async {
        let left: Vec<String> =
            pods.list(&ListParams::default()).await?.iter().map(ResourceExt::name_any).collect();
        Ok(Seen::from_bool(left.is_empty(), || format!("{left:?}")))
    })
    .await?;
    cluster.wait_for_holders(Vec::new()).await
}

/// One of the usual sizes: whole cards of either kind, and shares.
fn any_spec(random: &mut StdRng) -> Value {
    match random.random_range(0..10) {
        0..4 => pod_spec(&[("nvidia.com/gpu", 1)]),
        4 => pod_spec(&[("nvidia.com/gpu", 2)]),
        5 => shared_spec(100, 160),
        6 => shared_spec(200, 320),
        _ => shared_spec(random.random_range(1..=9) * 10, random.random_range(1..=80)),
    }
}

async fn delete(pods: &Api<Pod>, pod: &Pod) -> Result<()> {
    let gone = DeleteParams { grace_period_seconds: Some(1), ..DeleteParams::default() };
    match pods.delete(&pod.name_any(), &gone).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        other => Ok(other.map(drop)?),
    }
}

fn number<T: std::str::FromStr<Err: std::error::Error + Send + Sync + 'static>>(
    name: &str,
    default: T,
) -> Result<T> {
    env::var(name).map_or(Ok(default), |text| {
        text.parse().with_context(|| format!("{name}={text:?} is not a whole number"))
    })
}
