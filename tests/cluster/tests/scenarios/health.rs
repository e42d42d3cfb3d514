//! Unhealthy cards and processes on them: what NVML reports to the node agent, and what the GPUShadow then has.

use std::fs;

use anyhow::{Result, ensure};
use gpu_migrate_cluster_tests::{
    Cluster,
    cluster::TIMEOUT,
    configs::NODE,
    migration::{GPU, shared_spec, uuid},
    observe::Observer,
    stage::CARDS,
    wait::{self, Seen},
    workload::{deployment, only_card, pod_spec},
};
use gpu_migrate_model::{
    card::{CardState, Health},
    crd::{GPUShadow, GPUShadowStatus},
    names::Dialect,
};
use kube::Api;

const AGENT: &str = "gpu-migrate-bridge";

/// An XID of the card, memory that waits for a reset and a card that fell off the bus each close their card, an XID of an
/// application does not; processes on a card without a holder are reported. All is as before once the cards are healthy.
pub(crate) async fn an_unhealthy_card_gets_no_new_pod_until_it_is_healthy(
    cluster: &mut Cluster,
) -> Result<()> {
    let faults = cluster.setup.layout.nvml_faults();
    fs::create_dir_all(&faults)?;
    let fault = |name: &str, text: &str| fs::write(faults.join(name), text);
    // Each XID event is reported once; the other faults last.
    fault("xid-0", "13")?;
    fault("xid-1", "79")?;
    fault("remap-2", "")?;
    fault("lost-3", "")?;
    fault("process-4", "4242")?;
    let closed = shadow(cluster, "three cards to be closed", |status| unhealthy(status) == [1, 2, 3]).await;
    // Sources are compared every 15 s, and a difference counts when it is seen twice.
    let process = "no holder, but processes 4242 run on it";
    let reported =
        shadow(cluster, "the process to be reported", |status| drift(status).contains(process)).await;
    for name in ["xid-0", "xid-1", "remap-2", "lost-3", "process-4"] {
        fs::remove_file(faults.join(name))?;
    }
    closed.and(reported)?;
    let healthy = |status: &GPUShadowStatus| unhealthy(status).is_empty() && drift(status).is_empty();
    shadow(cluster, "all cards to be healthy again", healthy).await?;
    // NVIDIA's plugin never reports an unhealthy card as healthy again: its owner restarts it.
    cluster.restart("nvidia-device-plugin")?;
    let dialect = Dialect::default();
    cluster.wait_for_allocatable(&[(&dialect.legacy, CARDS), (&dialect.cores, CARDS * 100)]).await
}

/// NVML does not return from any call for one card, and later another one is split by MIG: all others go on serving, and both are used
/// again once they are as before.
pub(crate) async fn a_card_that_hangs_or_is_split_costs_no_other_card(cluster: &mut Cluster) -> Result<()> {
    let observer = Observer::start(cluster.client.clone());
    let namespace = cluster.namespace("hang", &[]).await?;
    let faults = cluster.setup.layout.nvml_faults();
    fs::create_dir_all(&faults)?;
    let (hang, split) = (faults.join("hang-0"), faults.join("mig-1"));

    fs::write(&hang, "")?;
    // NVML's process is given up after 20 s without a word.
    let hangs = shadow(cluster, "the card that hangs to be closed", |status| unhealthy(status) == [0]).await;
    let outcome = match hangs {
        Ok(()) => served(cluster, &namespace, "while-hanging", 0).await,
        failed => failed,
    };
    fs::remove_file(&hang)?;
    outcome?;
    // It asks for that card again after 10 minutes, or at its start.
    cluster.restart(AGENT)?;
    shadow(cluster, "the card to be healthy again", |status| unhealthy(status).is_empty()).await?;
    cluster.wait_until_serving().await?;

    fs::write(&split, "")?;
    let outcome = while_split(cluster, &namespace).await;
    fs::remove_file(&split)?;
    cluster.restart(AGENT)?;
    outcome?;
    shadow(cluster, "no card to be split", |status| !status.cards.iter().any(|card| card.card.mig)).await?;
    cluster.create_deployment(&namespace, deployment("rest", 4, GPU)).await?;
    cluster.all_running(&namespace, "rest", 4).await?;
    observer.finish().await?.check(8)
}

async fn while_split(cluster: &mut Cluster, namespace: &str) -> Result<()> {
    let agent = cluster.component(AGENT)?;
    wait::until("the node agent to end, to start anew with the cards that it finds", TIMEOUT, || {
        let ended = agent.ended();
        async move { Ok(Seen::from_option(ended?, || "it runs".into())) }
    })
    .await?;
    cluster.start_component(AGENT)?;
    let is_split = |status: &GPUShadowStatus| status.cards.get(1).is_some_and(|card| card.card.mig);
    shadow(cluster, "the split card to be reported", is_split).await?;
    cluster.wait_until_serving().await?;
    served(cluster, namespace, "while-split", 1).await
}

/// Both kinds of pods start, and none is on this card.
async fn served(cluster: &mut Cluster, namespace: &str, name: &str, closed: u64) -> Result<()> {
    for (kind, spec) in [("share", shared_spec(60, 40)), ("legacy", pod_spec(GPU))] {
        let name = format!("{kind}-{name}");
        cluster.create_pod(namespace, &name, spec).await?;
        let card = only_card(&cluster.running(namespace, &name).await?.1)?;
        ensure!(card != uuid(closed), "{name} is on {card}, which is closed");
    }
    Ok(())
}

async fn shadow(cluster: &mut Cluster, what: &str, is_so: impl Fn(&GPUShadowStatus) -> bool) -> Result<()> {
    let shadows: Api<GPUShadow> = Api::all(cluster.client.clone());
    cluster
        .until(what, TIMEOUT, || async {
            let status = shadows.get(NODE).await?.status.unwrap_or_default();
            Ok(Seen::from_bool(is_so(&status), || {
                format!("unhealthy {:?}, drift {:?}", unhealthy(&status), drift(&status))
            }))
        })
        .await
}

/// Cards that take no new holder because they are unhealthy.
fn unhealthy(status: &GPUShadowStatus) -> Vec<usize> {
    let cards = status.cards.iter().enumerate();
    cards
        .filter(|(_, card)| card.health == Health::Unhealthy && card.state == CardState::Unhealthy)
        .map(|(index, _)| index)
        .collect()
}

/// The message of the condition Drift.
fn drift(status: &GPUShadowStatus) -> String {
    let drift =
        status.conditions.iter().find(|condition| condition.type_ == "Drift" && condition.status == "True");
    drift.map(|condition| condition.message.clone()).unwrap_or_default()
}
