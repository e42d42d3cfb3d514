//! Cards that are not well, and a witness: what NVML tells the agent, and what becomes of it.

use std::fs;

use anyhow::Result;
use gpu_migrate_cluster_tests::{Cluster, cluster::TIMEOUT, configs::NODE, stage::CARDS, wait::Seen};
use gpu_migrate_model::{
    card::{CardState, Health},
    crd::{GPUShadow, GPUShadowStatus},
    names::Dialect,
};
use kube::Api;

/// An XID of the card, memory that waits for a reset and a card that fell off the bus each close their card, an XID of an
/// application does not; processes on a card that nobody holds are told. All is as before once the cards are well.
pub(crate) async fn an_unhealthy_card_gets_no_new_pod_until_it_is_healthy(
    cluster: &mut Cluster,
) -> Result<()> {
    let faults = cluster.setup.layout.nvml_faults();
    fs::create_dir_all(&faults)?;
    let fault = |name: &str, text: &str| fs::write(faults.join(name), text);
    // Each event is told once, and ends by itself; the others last.
    fault("xid-0", "13")?;
    fault("xid-1", "79")?;
    fault("remap-2", "")?;
    fault("lost-3", "")?;
    fault("process-4", "4242")?;
    let sick = told(cluster, "three cards to be closed", |status| unhealthy(status) == [1, 2, 3]).await;
    // Sources are compared every 15 s, and what is seen once may be on its way.
    let witness = "nobody holds it, and processes 4242 run on it";
    let seen = told(cluster, "a process to be told", |status| drift(status).contains(witness)).await;
    for name in ["xid-0", "xid-1", "remap-2", "lost-3", "process-4"] {
        fs::remove_file(faults.join(name))?;
    }
    sick.and(seen)?;
    let well = |status: &GPUShadowStatus| unhealthy(status).is_empty() && drift(status).is_empty();
    told(cluster, "all cards to be well again", well).await?;
    // NVIDIA's plugin never calls a card well again that was not: its owner starts it anew.
    cluster.restart("nvidia-device-plugin")?;
    let dialect = Dialect::default();
    cluster.wait_for_allocatable(&[(&dialect.legacy, CARDS), (&dialect.cores, CARDS * 100)]).await
}

async fn told(cluster: &mut Cluster, what: &str, is_so: impl Fn(&GPUShadowStatus) -> bool) -> Result<()> {
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

/// Cards that take nobody new because they are not well.
fn unhealthy(status: &GPUShadowStatus) -> Vec<usize> {
    let cards = status.cards.iter().enumerate();
    cards
        .filter(|(_, card)| card.health == Health::Unhealthy && card.state == CardState::Unhealthy)
        .map(|(index, _)| index)
        .collect()
}

/// Where the sources do not agree.
fn drift(status: &GPUShadowStatus) -> String {
    let told =
        status.conditions.iter().find(|condition| condition.type_ == "Drift" && condition.status == "True");
    told.map(|condition| condition.message.clone()).unwrap_or_default()
}
