//! Who holds a card when a source that says so is lost, or is ahead of what runs on the node.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use gpu_migrate_cluster_tests::{
    Cluster,
    cluster::TIMEOUT,
    migration::{GPU, shared_spec, uid},
    observe::{Observer, containers},
    stage::CARDS,
    wait::Seen,
    workload::{deployment, only_card, pod_spec},
};
use k8s_openapi::api::apps::v1::StatefulSet;
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, PostParams},
};
use serde_json::{Value, json};

use crate::kubernetes::CHECKPOINT;

/// How long a container of these scenarios ignores SIGTERM: longer than a kubelet takes to see that its pod was deleted.
const LINGERS: u64 = 20;

/// The kubelet's checkpoint is deleted while pods of both kinds run; kubelet, node agent and NVIDIA's plugin start anew. No running
/// container loses its card to another one, new pods start on the other cards, and the cards are used again once their holders end.
pub(crate) async fn a_lost_checkpoint_frees_no_card(cluster: &mut Cluster) -> Result<()> {
    let observer = Observer::start(cluster.client.clone());
    let namespace = cluster.namespace("lost", &[]).await?;
    let mut held = BTreeSet::new();
    for (name, spec) in [
        ("legacy-0", pod_spec(GPU)),
        ("share-0", shared_spec(60, 40)),
        ("legacy-1", pod_spec(GPU)),
        ("whole", shared_spec(100, 160)),
    ] {
        cluster.create_pod(&namespace, name, spec).await?;
        held.insert(only_card(&cluster.running(&namespace, name).await?.1)?);
    }
    let programs = ["nvidia-device-plugin", "gpu-migrate-bridge", "kubelet"];
    for program in programs {
        cluster.kill(program)?;
    }
    std::fs::remove_file(CHECKPOINT)?;
    for program in programs.into_iter().rev() {
        cluster.start_component(program)?;
    }
    cluster.wait_until_serving().await?;

    // One whole card is left over for a share: the card of `share-0` is not to be trusted, as its range was not recorded.
    let left = u32::try_from(CARDS)? - u32::try_from(held.len())?;
    cluster.create_deployment(&namespace, deployment("after", left - 1, GPU)).await?;
    for (pod, container) in cluster.all_running(&namespace, "after", left as usize - 1).await? {
        let card = only_card(&container)?;
        ensure!(!held.contains(&card), "{} got {card}, which a running container holds", pod.name_any());
    }
    cluster.create_pod(&namespace, "share-1", shared_spec(60, 40)).await?;
    let (_, share) = cluster.running(&namespace, "share-1").await?;
    ensure!(!held.contains(&only_card(&share)?), "share-1 got {}", only_card(&share)?);

    // Gone with evidence: each of these cards can be had again.
    for name in ["legacy-0", "share-0", "legacy-1", "whole"] {
        cluster.delete_pod(&namespace, name).await?;
    }
    cluster.create_deployment(&namespace, deployment("again", u32::try_from(held.len())?, GPU)).await?;
    let mut again = BTreeSet::new();
    for (_, container) in cluster.all_running(&namespace, "again", held.len()).await? {
        again.insert(only_card(&container)?);
    }
    ensure!(again == held, "the cards {held:?} were freed, and {again:?} used again");
    observer.finish().await?.check(4 + CARDS as usize)
}

/// Pods of two StatefulSets are deleted with force while the kubelet does nothing, so that the next pods of the same names are there
/// while the containers of the former run, which ignore SIGTERM. The cards stay those of the former until their processes
/// have ended; then the next have them, and the former are no holders any more.
pub(crate) async fn a_card_is_its_processes_until_they_end_whoever_deletes_their_pod(
    cluster: &mut Cluster,
) -> Result<()> {
    let observer = Observer::start(cluster.client.clone());
    let namespace = cluster.namespace("force", &[]).await?;
    // All other cards are taken, so that the next pods can have these only.
    cluster.create_deployment(&namespace, deployment("others", u32::try_from(CARDS - 2)?, GPU)).await?;
    let others = cluster.all_running(&namespace, "others", CARDS as usize - 2).await?;
    let sets: Api<StatefulSet> = Api::namespaced(cluster.client.clone(), &namespace);
    for (name, spec) in [("legacy", pod_spec(GPU)), ("share", shared_spec(60, 40))] {
        sets.create(&PostParams::default(), &serde_json::from_value(lingering(name, spec))?).await?;
    }
    let names = ["legacy-0", "share-0"];
    let mut former = Vec::new();
    for name in names {
        let (pod, container) = cluster.running(&namespace, name).await?;
        former.push((name, uid(&pod), only_card(&container)?));
    }

    cluster.component("kubelet")?.pause()?;
    let outcome = replaced(cluster, &namespace, &former).await;
    cluster.component("kubelet")?.resume()?;
    outcome?;
    let begin = std::time::Instant::now();
    let (mut expected, mut now) = (Vec::new(), BTreeSet::new());
    for (name, old, _) in &former {
        let old = old.clone();
        cluster
            .until(&format!("the container of the former {name} to end"), TIMEOUT, || async {
                let runs = containers()?.into_iter().any(|c| c.pod_uid == old);
                Ok(Seen::from_bool(!runs, || "it runs".into()))
            })
            .await?;
        eprintln!("    the former {name} ended after {:.1?}", begin.elapsed());
        let (pod, container) = cluster.running(&namespace, name).await?;
        now.insert(only_card(&container)?);
        expected.push((only_card(&container)?, uid(&pod)));
    }
    let were: BTreeSet<String> = former.into_iter().map(|(.., card)| card).collect();
    ensure!(now == were, "the next are on {now:?}, the former were on {were:?}");
    for (pod, container) in &others {
        expected.push((only_card(container)?, uid(pod)));
    }
    cluster.wait_for_holders(expected).await?;
    observer.finish().await?.check(CARDS as usize + 2)
}

/// Deletes pods with force and waits for the next ones of their StatefulSets, with the containers of the former still running.
async fn replaced(cluster: &mut Cluster, namespace: &str, former: &[(&str, String, String)]) -> Result<()> {
    let pods = cluster.pods(namespace);
    for (name, ..) in former {
        pods.delete(name, &DeleteParams::default().grace_period(0)).await?;
    }
    for (name, old, _) in former {
        cluster
            .until(&format!("the next {name}"), TIMEOUT, || async {
                let next = pods.get_opt(name).await?.is_some_and(|pod| uid(&pod) != *old);
                Ok(Seen::from_bool(next, || "there is none".into()))
            })
            .await?;
    }
    let running: BTreeSet<String> = containers()?.into_iter().map(|c| c.pod_uid).collect();
    for (name, old, _) in former {
        ensure!(running.contains(old), "the container of {name} ended without a kubelet");
    }
    Ok(())
}

/// A StatefulSet of one such pod, which ignores SIGTERM.
fn lingering(name: &str, mut spec: Value) -> Value {
    spec["containers"][0]["args"] = json!(["linger"]);
    spec["terminationGracePeriodSeconds"] = json!(LINGERS);
    json!({
        "metadata": {"name": name},
        "spec": {
            "replicas": 1,
            "serviceName": name,
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": spec},
        },
    })
}
