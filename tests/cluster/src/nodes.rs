//! More nodes than there are kubelets: Node objects with a renewed Lease stay Ready, and the scheduler uses them. Pods bound
//! there never start, so what is asserted about them is where the extender put them.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use gpu_migrate_model::{
    crd::{CardStatus, GPUShadow, GPUShadowStatus},
    names::{Dialect, GROUP, VERSION},
};
use k8s_openapi::{
    api::{coordination::v1::Lease, core::v1::Node},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio::task::JoinHandle;

use crate::{
    cluster::{Cluster, TIMEOUT},
    migration::uuid,
    stage::CARDS,
    wait::Seen,
};

/// Label of all such nodes; its value is the node's name.
pub const FAKE: &str = "gpu-migrate.test/fake";
/// Memory blocks of each of their cards.
pub const BLOCKS_PER_CARD: u64 = 160;
/// The driver of all such nodes.
pub const DRIVER: &str = "550.54.15";
/// A cordon. The operator may cordon a node that has just joined before its taint of not being ready is gone.
const CORDON: &str = "node.kubernetes.io/unschedulable";
/// A Lease is good for 40 s.
const RENEW: Duration = Duration::from_secs(10);

/// Nodes without a kubelet, kept Ready until this is dropped.
#[derive(Debug)]
pub struct FakeNodes {
    names: Vec<String>,
    renewal: JoinHandle<()>,
}

impl FakeNodes {
    pub fn names(&self) -> &[String] {
        &self.names
    }
}

impl Drop for FakeNodes {
    fn drop(&mut self) {
        self.renewal.abort();
    }
}

impl Cluster {
    /// Adds `count` nodes of eight free cards each, with their GPUShadows, and waits until they are Ready.
    pub async fn fake_nodes(&mut self, count: usize) -> Result<FakeNodes> {
        let names: Vec<String> = (0..count).map(|index| format!("fake-{index}")).collect();
        let making = names.iter().map(|name| make_with_cards(&self.client, name));
        stream::iter(making).buffer_unordered(16).try_collect::<()>().await?;
        self.keep_ready(names).await
    }

    /// Adds a node with labels, without allocatable cards and without a GPUShadow, as one is that has just joined.
    pub async fn new_node(&mut self, name: &str, labels: &[(&str, &str)]) -> Result<FakeNodes> {
        make(&self.client, name, labels, BTreeMap::new()).await?;
        self.keep_ready(vec![name.to_owned()]).await
    }

    /// Writes the GPUShadow of such a node as its agent would: eight free cards, and [`DRIVER`].
    pub async fn report_as_agent(&self, node: &str) -> Result<()> {
        publish(&self.client, node).await
    }

    async fn keep_ready(&mut self, names: Vec<String>) -> Result<FakeNodes> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let (client, own) = (self.client.clone(), names.clone());
        let renewal = tokio::spawn(async move {
            loop {
                tokio::time::sleep(RENEW).await;
                for name in &own {
                    // If renewals fail, the node stops being Ready.
                    let _ = renew(&client, name).await;
                }
            }
        });
        let fake = FakeNodes { names, renewal };
        self.until("the fake nodes to have no taint but a cordon", TIMEOUT, || async {
            let list = nodes.list(&ListParams::default().labels(FAKE)).await?;
            let tainted = |node: &Node| {
                node.spec.iter().flat_map(|s| s.taints.iter().flatten()).any(|taint| taint.key != CORDON)
            };
            let ready =
                list.iter().filter(|n| !tainted(n)).map(ResourceExt::name_any).collect::<BTreeSet<String>>();
            Ok(Seen::from_bool(fake.names.iter().all(|name| ready.contains(name)), || {
                format!("only {ready:?} have none")
            }))
        })
        .await?;
        Ok(fake)
    }

    /// Removes all such nodes. No pod may be on them.
    pub(crate) async fn drop_fake_nodes(&self) -> Result<()> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        for node in nodes.list(&ListParams::default().labels(FAKE)).await? {
            nodes.delete(&node.name_any(), &DeleteParams::default()).await?;
            let _ = Api::<GPUShadow>::all(self.client.clone())
                .delete(&node.name_any(), &DeleteParams::default())
                .await;
        }
        Ok(())
    }
}

async fn make_with_cards(client: &Client, name: &str) -> Result<()> {
    let dialect = Dialect::default();
    let cards = BTreeMap::from([
        (dialect.legacy, CARDS.to_string()),
        (dialect.cores, (CARDS * 100).to_string()),
        (dialect.memory, (CARDS * BLOCKS_PER_CARD).to_string()),
    ]);
    make(client, name, &[], cards).await?;
    publish(client, name).await.with_context(|| format!("the GPUShadow of {name}"))
}

async fn make(
    client: &Client,
    name: &str,
    labels: &[(&str, &str)],
    cards: BTreeMap<String, String>,
) -> Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    let labels: BTreeMap<&str, &str> = labels.iter().copied().chain([(FAKE, name)]).collect();
    let node: Node = serde_json::from_value(json!({"metadata": {"name": name, "labels": labels}}))?;
    nodes.create(&PostParams::default(), &node).await?;
    renew(client, name).await?;
    let status = json!({"status": status(cards)});
    nodes.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await?;
    Ok(())
}

fn status(cards: BTreeMap<String, String>) -> serde_json::Value {
    let mut capacity = cards;
    capacity.extend(
        [("cpu", "64"), ("memory", "256Gi"), ("pods", "250")].map(|(key, value)| (key.into(), value.into())),
    );
    let now = Timestamp::now();
    let condition = |kind: &str, status: &str| json!({"type": kind, "status": status, "reason": "Fake", "message": "no kubelet", "lastHeartbeatTime": now, "lastTransitionTime": now});
    json!({
        "capacity": capacity,
        "allocatable": capacity,
        "conditions": [condition("Ready", "True"), condition("MemoryPressure", "False"), condition("DiskPressure", "False"), condition("PIDPressure", "False")],
    })
}

async fn renew(client: &Client, name: &str) -> Result<()> {
    let lease = json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": name, "namespace": "kube-node-lease"},
        "spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": MicroTime(Timestamp::now())},
    });
    let leases: Api<Lease> = Api::namespaced(client.clone(), "kube-node-lease");
    leases.patch(name, &PatchParams::apply("cluster-tests").force(), &Patch::Apply(lease)).await?;
    Ok(())
}

/// Eight free cards, as the node agent of an idle node reports them.
async fn publish(client: &Client, name: &str) -> Result<()> {
    let cards: Vec<serde_json::Value> = (0..CARDS)
        .map(|index| {
            json!({
                "uuid": format!("{}-{name}", uuid(index)), "minor": index,
                "model": "NVIDIA A100-SXM4-40GB", "memoryMiB": 40960,
                "state": "Free", "coresLeft": 100, "blocksLeft": BLOCKS_PER_CARD,
            })
        })
        .collect();
    let cards: Vec<CardStatus> =
        serde_json::from_value(json!(cards)).context("not the form of a GPUShadow's cards")?;
    let mut status = json!(GPUShadowStatus {
        total: u32::try_from(cards.len())?,
        cards,
        driver_version: DRIVER.to_owned(),
        ..GPUShadowStatus::default()
    });
    status["conditions"] = json!([{"type": "Ready", "status": "True", "reason": "Serving", "message": "", "lastTransitionTime": Timestamp::now()}]);
    // By server-side apply, as the node agent does: the operator may have created the object, and has conditions of its own in it.
    let (version, metadata) = (format!("{GROUP}/{VERSION}"), json!({"name": name}));
    let object = json!({"apiVersion": version, "kind": "GPUShadow", "metadata": metadata, "spec": {}});
    let report = json!({"apiVersion": version, "kind": "GPUShadow", "metadata": metadata, "status": status});
    let (api, bridge) =
        (Api::<GPUShadow>::all(client.clone()), PatchParams::apply("gpu-migrate-bridge").force());
    api.patch(name, &bridge, &Patch::Apply(object)).await?;
    api.patch_status(name, &bridge, &Patch::Apply(report)).await?;
    Ok(())
}
