//! The Node object and its Lease: made, and kept up to date.

use std::sync::Arc;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use super::Inner;

const LEASE_EVERY: std::time::Duration = std::time::Duration::from_secs(10);

/// Reports the node until dropped.
pub(super) async fn report(kubelet: Arc<Inner>) {
    let nodes: Api<Node> = Api::all(kubelet.client.clone());
    let leases: Api<Lease> = Api::namespaced(kubelet.client.clone(), "kube-node-lease");
    let mut changes = kubelet.devices.changes();
    let mut next_lease = Instant::now();
    let mut told = Value::Null;
    loop {
        changes.borrow_and_update();
        let status = status(&kubelet);
        if status != told {
            match tell(&kubelet, &nodes, &status).await {
                Ok(()) => told = status,
                Err(error) => {
                    tracing::debug!(%error, node = kubelet.spec.name, "the node could not be reported");
                }
            }
        }
        if Instant::now() >= next_lease {
            next_lease = Instant::now() + LEASE_EVERY;
            if let Err(error) = renew(&kubelet, &leases).await {
                tracing::debug!(%error, node = kubelet.spec.name, "the lease could not be renewed");
            }
        }
        tokio::time::sleep(kubelet.pace.report).await;
    }
}

async fn tell(kubelet: &Inner, nodes: &Api<Node>, status: &Value) -> kube::Result<()> {
    let name = &kubelet.spec.name;
    let mut labels =
        json!({"kubernetes.io/hostname": name, "kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux"});
    for (key, value) in &kubelet.spec.labels {
        labels[key] = value.clone().into();
    }
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}});
    let parameters = PatchParams::apply("kubelet").force();
    nodes.patch(name, &parameters, &Patch::Apply(&node)).await?;
    let patch = json!({"status": status});
    nodes.patch_status(name, &PatchParams::default(), &Patch::Merge(&patch)).await?;
    Ok(())
}

fn status(kubelet: &Inner) -> Value {
    let mut capacity = Map::new();
    for (name, quantity) in [
        ("cpu", kubelet.spec.cpu.to_string()),
        ("memory", format!("{}Gi", kubelet.spec.memory_gib)),
        ("pods", "250".into()),
    ] {
        capacity.insert(name.into(), quantity.into());
    }
    let mut allocatable = capacity.clone();
    for (resource, (all, healthy)) in kubelet.devices.counts() {
        capacity.insert(resource.clone(), all.to_string().into());
        allocatable.insert(resource, healthy.to_string().into());
    }
    let ready = json!({"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "simulated"});
    json!({
        "capacity": capacity, "allocatable": allocatable, "conditions": [ready],
        "addresses": [{"type": "Hostname", "address": kubelet.spec.name}],
        "nodeInfo": {
            "kubeletVersion": "v1.33.0-simulated", "osImage": "simulated", "architecture": "amd64", "operatingSystem": "linux",
            "containerRuntimeVersion": "simulated://0", "kernelVersion": "", "machineID": "", "systemUUID": "", "bootID": "",
            "kubeProxyVersion": "",
        },
    })
}

async fn renew(kubelet: &Inner, leases: &Api<Lease>) -> kube::Result<()> {
    let name = &kubelet.spec.name;
    let now = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string();
    let lease = json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name},
        "spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now},
    });
    leases.patch(name, &PatchParams::apply("kubelet").force(), &Patch::Apply(&lease)).await?;
    Ok(())
}
