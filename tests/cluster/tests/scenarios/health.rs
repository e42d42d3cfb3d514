//! Unhealthy cards and processes on them: what NVML reports to the node agent, and what the GPUShadow then has.

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
