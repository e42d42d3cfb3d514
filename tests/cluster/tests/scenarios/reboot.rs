//! A node that starts again with other hardware than before.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use anyhow::{Context, Result, ensure};
use gpu_migrate_cluster_tests::{
    Cluster,
    cluster::TIMEOUT,
    migration::{GPU, share, shared_spec, uid, uuid},
    observe::{Observer, containers},
    stage::CARDS,
    wait::Seen,
    workload::{deployment, only_card},
};
use gpu_migrate_model::names::SCHEDULER;
use k8s_openapi::api::apps::v1::Deployment;
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::json;

/// Deployments of one pod each.
const APPS: [(&str, &[(&str, u64)]); 3] =
    [("legacy", GPU), ("share", &share(60, 40)), ("whole", &share(100, 160))];

/// By the Deployment's name: the pod's UID and its card.
type Placed = BTreeMap<&'static str, (String, String)>;

/// All processes of the node end, what is only in memory is lost, and the first card is missing when it starts again, so that the
/// others have other numbers than before. Containers get the cards that they had; nobody gets the missing one, nor a card that somebody
/// has. Back at the next start, it is used again. Shares have their device nodes by CDI.
pub(crate) async fn a_reboot_without_a_card_leaves_the_others_as_they_were(
    cluster: &mut Cluster,
) -> Result<()> {
    cluster.use_cdi("envvar,cdi-cri").await?;
    let observer = Observer::start(cluster.client.clone());
    let namespace = cluster.namespace("reboot", &[]).await?;
    // A share's card is chosen by us: on an empty node the first one.
    cluster.create_pod(&namespace, "first", shared_spec(100, 160)).await?;
    let missing = only_card(&cluster.running(&namespace, "first").await?.1)?;
    for (name, limits) in APPS {
        let mut manifest = deployment(name, 1, limits);
        if limits != GPU {
            manifest["spec"]["template"]["spec"]["schedulerName"] = json!(SCHEDULER);
        }
        cluster.create_deployment(&namespace, manifest).await?;
    }
    let before = placed(cluster, &namespace).await?;
    cluster.delete_pod(&namespace, "first").await?;
    ensure!(
        before.values().any(|(_, card)| *card > missing),
        "without {missing} no card of {before:?} has another number"
    );

    let index = (0..CARDS).find(|index| uuid(*index) == missing).context("a card of the stand-in")?;
    let faults = cluster.setup.layout.nvml_faults();
    fs::create_dir_all(&faults)?;
    let absent = faults.join(format!("absent-{index}"));
    fs::write(&absent, "")?;
    let outcome = without_a_card(cluster, &namespace, &missing, &before).await;
    fs::remove_file(absent)?;
    cluster.reboot_node().await?;
    let others = outcome?;

    as_before(&others, &placed(cluster, &namespace).await?)?;
    // All others are taken.
    scale(cluster, &namespace, CARDS as usize - APPS.len()).await?;
    let more = cards_of_more(cluster, &namespace, CARDS as usize - APPS.len()).await?;
    ensure!(more.contains(&missing), "{missing} is back, and {more:?} are used");
    observer.finish().await?.check(1 + CARDS as usize)?;
    cluster.use_environment().await
}

async fn without_a_card(
    cluster: &mut Cluster,
    namespace: &str,
    missing: &str,
    before: &Placed,
) -> Result<Placed> {
    cluster.reboot_node().await?;
    let after = placed(cluster, namespace).await?;
    as_before(before, &after)?;
    let left = CARDS as usize - 1 - APPS.len();
    cluster.create_deployment(namespace, deployment("more", u32::try_from(left)?, GPU)).await?;
    let more = cards_of_more(cluster, namespace, left).await?;
    ensure!(!more.contains(missing), "{missing} is missing, and used: {more:?}");
    Ok(after)
}

/// A pod that is the same has the same card. The kubelet may have refused one at the start; its successor may be anywhere.
fn as_before(before: &Placed, after: &Placed) -> Result<()> {
    let mut same = 0;
    for (name, (uid, card)) in before {
        let (now, on) = &after[name];
        ensure!(uid != now || card == on, "{name} had {card}, and has {on} after the reboot");
        same += usize::from(uid == now);
    }
    eprintln!("    {same} of {} pods outlived the reboot", before.len());
    Ok(())
}

/// Waits until each of the Deployments has a pod that really runs.
async fn placed(cluster: &mut Cluster, namespace: &str) -> Result<Placed> {
    let pods = cluster.pods(namespace);
    cluster
        .until("a container of each Deployment", TIMEOUT, || async {
            let running = containers()?;
            let list = pods.list(&ListParams::default()).await?.items;
            let mut found = Placed::new();
            for (name, _) in APPS {
                let of_app = |pod: &&k8s_openapi::api::core::v1::Pod| {
                    pod.metadata
                        .labels
                        .as_ref()
                        .is_some_and(|labels| labels.get("app").is_some_and(|app| app == name))
                };
                let uids: BTreeSet<String> = list.iter().filter(of_app).map(uid).collect();
                if let Some(container) = running.iter().find(|c| uids.contains(&c.pod_uid)) {
                    // NVIDIA's plugin has no CDI specifications here.
                    let by_cdi = name != "legacy";
                    ensure!(
                        container.nodes.is_empty() != by_cdi,
                        "{name} has the nodes {:?}",
                        container.nodes
                    );
                    found.insert(name, (container.pod_uid.clone(), only_card(container)?));
                }
            }
            Ok(Seen::from_option((found.len() == APPS.len()).then(|| found.clone()), || format!("{found:?}")))
        })
        .await
}

async fn scale(cluster: &Cluster, namespace: &str, replicas: usize) -> Result<()> {
    let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
    Api::<Deployment>::namespaced(cluster.client.clone(), namespace)
        .patch("more", &PatchParams::default(), &patch)
        .await?;
    Ok(())
}

async fn cards_of_more(cluster: &mut Cluster, namespace: &str, count: usize) -> Result<BTreeSet<String>> {
    cluster
        .all_running(namespace, "more", count)
        .await?
        .iter()
        .map(|(_, container)| only_card(container))
        .collect()
}
