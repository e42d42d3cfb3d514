//! What containers use of their cards: real processes, in the cgroups that kubelet and runtime made for them.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};
use gpu_migrate_cluster_tests::{
    Cluster,
    cluster::TIMEOUT,
    http,
    migration::{GPU, all_uuids, shared_spec},
    wait::Seen,
    workload::{only_card, pod_spec},
};
use gpu_migrate_model::usage::{self, ContainerUse, NodeUse, UseKind};

/// NVML lists a process of a shared and one of a legacy container: each is counted where it is, beside what was requested, until it has
/// ended; and nothing is left of a container that is gone.
pub(crate) async fn what_a_process_uses_is_its_containers(cluster: &mut Cluster) -> Result<()> {
    let namespace = cluster.namespace("usage", &[]).await?;
    cluster.create_pod(&namespace, "share", shared_spec(30, 8)).await?;
    cluster.create_pod(&namespace, "whole", pod_spec(GPU)).await?;
    let mut files = Vec::new();
    let outcome = follow(cluster, &namespace, &mut files).await;
    for file in files.iter().filter(|file| file.exists()) {
        fs::remove_file(file)?;
    }
    outcome
}

async fn follow(cluster: &mut Cluster, namespace: &str, files: &mut Vec<PathBuf>) -> Result<()> {
    let processes = cluster.setup.layout.nvml_faults();
    fs::create_dir_all(&processes)?;
    for (pod, line) in [("share", "512 30"), ("whole", "1024 60")] {
        let (_, container) = cluster.running(namespace, pod).await?;
        let card = only_card(&container)?;
        let index = all_uuids().iter().position(|uuid| *uuid == card).context("a card of the stand-in")?;
        files.push(processes.join(format!("process-{index}")));
        fs::write(&files[files.len() - 1], format!("{} {line}\n", container.pid))?;
    }
    let row = |pod: &str, kind, used: Option<(u32, u64)>, cores: u32, mib: u64| ContainerUse {
        namespace: namespace.to_owned(),
        pod: pod.to_owned(),
        container: "main".to_owned(),
        kind,
        processes: Some(u32::from(used.is_some())),
        utilization_percent: Some(used.map_or(0, |(percent, _)| percent)),
        memory_used_bytes: Some(used.map_or(0, |(_, mib)| mib << 20)),
        cores_requested: Some(cores),
        memory_requested_bytes: Some(mib << 20),
    };
    let both = |share, whole| {
        vec![
            row("share", UseKind::Shared, share, 30, 8 * 256),
            row("whole", UseKind::Legacy, whole, 100, 40 * 1024),
        ]
    };
    shown(cluster, namespace, both(Some((30, 512)), Some((60, 1024)))).await?;
    for file in &*files {
        fs::remove_file(file)?;
    }
    shown(cluster, namespace, both(None, None)).await?;
    for pod in ["share", "whole"] {
        cluster.delete_pod(namespace, pod).await?;
    }
    shown(cluster, namespace, Vec::new()).await
}

/// Waits until these are the rows of a namespace.
async fn shown(cluster: &mut Cluster, namespace: &str, expected: Vec<ContainerUse>) -> Result<()> {
    let port = cluster.setup.ports.bridge_metrics;
    cluster
        .until("what containers use to be shown", TIMEOUT, || async {
            let of_node: NodeUse = serde_json::from_str(&http::get(port, usage::PATH).await?)?;
            let all = of_node.cards.into_iter().flat_map(|card| card.containers);
            let mut rows: Vec<ContainerUse> = all.filter(|row| row.namespace == namespace).collect();
            rows.sort_by(|a, b| a.pod.cmp(&b.pod));
            Ok(Seen::from_bool(rows == expected, || format!("{rows:#?}")))
        })
        .await
}
