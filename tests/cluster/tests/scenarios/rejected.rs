//! Pods that the node agent has to reject: they fit into the kubelet's sum over all cards, and on no card. That happens to pods
//! that bypass the scheduler.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use gpu_migrate_cluster_tests::{
    Cluster, audit,
    cluster::TIMEOUT,
    configs::NODE,
    manifests,
    migration::{share, uid},
    observe::Observer,
    stage::CARDS,
    wait::Seen,
    workload::{only_card, phase, phase_and_why, pod_spec},
};
use gpu_migrate_model::names::Dialect;
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use kube::{Api, ResourceExt, api::ListParams};
use serde_json::{Value, json};

/// The reason that the kubelet gives.
const REJECTED: &str = "UnexpectedAdmissionError";

/// A share with a node name, which bypasses the scheduler.
fn bypassing_the_scheduler(cores: u64, blocks: u64) -> Value {
    let mut spec = pod_spec(&share(cores, blocks));
    spec["nodeName"] = json!(NODE);
    spec["restartPolicy"] = json!("Never");
    spec
}

/// Every card has 40 cores left, 320 in all, and a pod asks for 50: it is rejected with the reason, and no holder changes.
/// What is left of the resource that the kubelet asked for first, cores or memory, is withdrawn for a moment, so that nothing else
/// runs into the same. A Job's pod that was rejected is
/// re-created and runs once a card has enough free cores, and the failed one is deleted. One without a controller stays.
pub(crate) async fn a_pod_that_fits_on_no_card_is_rejected_and_deleted(cluster: &mut Cluster) -> Result<()> {
    let observer = Observer::start(cluster.client.clone());
    let namespace = cluster.namespace("rejected", &[]).await?;
    let mut placed = Vec::new();
    for index in 0..CARDS {
        let name = format!("share-{index}");
        cluster.create_pod(&namespace, &name, bypassing_the_scheduler(60, 20)).await?;
        placed.push(cluster.running(&namespace, &name).await?);
    }
    let on_cards: BTreeSet<String> = placed.iter().flat_map(|(_, container)| container.cards()).collect();
    ensure!(on_cards.len() as u64 == CARDS, "they share cards: {on_cards:?}");
    let mut held: Vec<(String, String)> =
        placed.iter().map(|(pod, container)| Ok((only_card(container)?, uid(pod)))).collect::<Result<_>>()?;

    let before = allocatable(cluster).await?;
    cluster.create_pod(&namespace, "bare", bypassing_the_scheduler(50, 20)).await?;
    let bare = rejected(cluster, &namespace, "bare").await?;
    let resource = reason_is_reported(cluster, &namespace, &bare).await?;
    let whole = before.get(&resource).copied();
    ensure!(whole.is_some_and(|whole| whole > CARDS), "of {resource} there is {whole:?}");
    offered(cluster, &resource, "withdrawn", |left| left < whole).await?;
    offered(cluster, &resource, "offered again", |left| left == whole).await?;
    cluster.wait_for_holders(held.clone()).await?;

    let begin = audit::read(&cluster.setup.layout.logs())?.len();
    let template = json!({"metadata": {"labels": {"app": "job"}}, "spec": bypassing_the_scheduler(50, 20)});
    let job = json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job", "namespace": namespace},
        "spec": {"backoffLimit": 3, "template": template}});
    manifests::apply(&cluster.client, &job, false).await?;
    let first = rejected(cluster, &namespace, "job").await?;
    cluster.delete_pod(&namespace, "share-0").await?;
    let (freed, _) = held.swap_remove(0);
    let again = cluster.all_running(&namespace, "job", 1).await?.swap_remove(0);
    ensure!(again.0.uid() != first.uid(), "the rejected pod runs");
    ensure!(only_card(&again.1)? == freed, "freed was {freed}, it is on {:?}", again.1.cards());
    held.push((freed, uid(&again.0)));

    let pods = cluster.pods(&namespace);
    let failed = || async {
        let list = pods.list(&ListParams::default()).await?.items;
        anyhow::Ok(
            list.iter().filter(|pod| phase(pod) == "Failed").map(ResourceExt::name_any).collect::<Vec<_>>(),
        )
    };
    cluster
        .until("the Job's failed pods to be deleted", TIMEOUT, || async {
            let left = failed().await?;
            Ok(Seen::from_bool(left.iter().all(|name| name == "bare"), || format!("{left:?}")))
        })
        .await?;
    // It failed before they did, and has no controller that would re-create it.
    ensure!(failed().await? == ["bare"], "the pod without a controller is gone");
    deleted_by_the_agent(cluster, begin, &namespace, &first).await?;
    cluster.wait_for_holders(held).await?;
    observer.finish().await?.check(CARDS as usize + 1)
}

/// Waits until a pod of this label is rejected, and returns it.
async fn rejected(cluster: &mut Cluster, namespace: &str, app: &str) -> Result<Pod> {
    let (pods, labelled) = (cluster.pods(namespace), ListParams::default().labels(&format!("app={app}")));
    cluster
        .until(&format!("a pod of {app} to be rejected"), TIMEOUT, || async {
            let list = pods.list(&labelled).await?.items;
            let seen = list.iter().map(|pod| phase_and_why(Some(pod))).collect::<Vec<_>>().join("; ");
            let reason = |pod: &Pod| pod.status.as_ref().and_then(|status| status.reason.clone());
            let rejected = list.into_iter().find(|pod| reason(pod).as_deref() == Some(REJECTED));
            Ok(Seen::from_option(rejected.filter(|pod| phase(pod) == "Failed"), || seen))
        })
        .await
}

/// Status and Event have the request, and that no card can meet it. Returns the resource that was rejected.
async fn reason_is_reported(cluster: &mut Cluster, namespace: &str, pod: &Pod) -> Result<String> {
    let status = phase_and_why(Some(pod));
    let Dialect { cores, memory, .. } = Dialect::default();
    let why = |resource: &str| format!("{resource}: no card of this node has 50 cores and 20 blocks free");
    let resource = [cores, memory].into_iter().find(|resource| status.contains(&why(resource)));
    let resource = resource.with_context(|| format!("the status is {status:?}"))?;
    let why = why(&resource);
    let events: Api<Event> = Api::namespaced(cluster.client.clone(), namespace);
    cluster
        .until("an Event about the rejected pod", TIMEOUT, || async {
            let list = events.list(&ListParams::default()).await?.items;
            let about = |event: &&Event| event.involved_object.uid == pod.uid();
            let messages: Vec<String> =
                list.iter().filter(about).map(|e| format!("{:?}: {:?}", e.reason, e.message)).collect();
            let found = messages.iter().any(|text| text.contains(REJECTED) && text.contains(&why));
            Ok(Seen::from_bool(found, || format!("{messages:?}")))
        })
        .await?;
    Ok(resource)
}

/// How much of each countable resource the node offers.
async fn allocatable(cluster: &Cluster) -> Result<BTreeMap<String, u64>> {
    let node = Api::<Node>::all(cluster.client.clone()).get(NODE).await?;
    let all = node.status.and_then(|status| status.allocatable).unwrap_or_default();
    Ok(all.into_iter().filter_map(|(name, amount)| Some((name, amount.0.parse().ok()?))).collect())
}

async fn offered(
    cluster: &mut Cluster,
    resource: &str,
    what: &str,
    wanted: impl Fn(Option<u64>) -> bool,
) -> Result<()> {
    let nodes = Api::<Node>::all(cluster.client.clone());
    cluster
        .until(&format!("{resource} to be {what}"), TIMEOUT, || async {
            let offered =
                nodes.get(NODE).await?.status.and_then(|s| s.allocatable?.get(resource)?.0.parse().ok());
            Ok(Seen::from_bool(offered.is_some() && wanted(offered), || format!("{offered:?}")))
        })
        .await
}

/// By the audit: what the agent deleted here was the Job's, the first rejected pod with it; and an Event on the node names that.
async fn deleted_by_the_agent(
    cluster: &mut Cluster,
    begin: usize,
    namespace: &str,
    first: &Pod,
) -> Result<()> {
    let first = format!("{namespace}/{}", first.name_any());
    let log = audit::read(&cluster.setup.layout.logs())?.split_off(begin);
    let deleted: BTreeSet<String> = log
        .iter()
        .filter(|entry| entry.is_of("gpu-migrate-bridge") && entry.verb == "delete" && entry.done())
        .filter_map(audit::Entry::object)
        .collect();
    let of_job = |name: &String| name.starts_with(&format!("{namespace}/job-"));
    ensure!(
        deleted.contains(&first) && deleted.iter().all(of_job),
        "the agent deleted {deleted:?}, first {first}"
    );
    // Events about nodes are in the default namespace.
    let events: Api<Event> = Api::namespaced(cluster.client.clone(), "default");
    cluster
        .until("an Event about the deletion", TIMEOUT, || async {
            let list = events.list(&ListParams::default()).await?.items;
            let messages: Vec<String> = list
                .into_iter()
                .filter(|event| event.reason.as_deref() == Some("FailedPodDeleted"))
                .filter_map(|event| event.message)
                .collect();
            Ok(Seen::from_bool(messages.iter().any(|text| text.contains(&first)), || format!("{messages:?}")))
        })
        .await
}
