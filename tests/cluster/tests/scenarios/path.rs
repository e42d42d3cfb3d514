//! The whole path, from the manifest to the cards that the container sees.
//!
//! Each asserts on the API and on the containers' environment in `/proc`; the observer runs throughout.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result, ensure};
use gpu_migrate_cluster_tests::{
    Cluster,
    migration::{GPU, all_uuids, limit, shared_spec, uid, uuid},
    observe::{Container, Observer, containers},
    stage::CARDS,
    workload::{annotation, container, deployment, only_card, pod_spec},
};
use gpu_migrate_model::names::{Dialect, ORIGINAL, POLICY, PREDICATE_GPU_INDEX_PREFIX, PROJECT, SCHEDULER};
use k8s_openapi::api::{
    admissionregistration::v1::MutatingWebhookConfiguration, apps::v1::Deployment, core::v1::Pod,
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, PostParams},
    core::Request,
};
use serde_json::{Value, json, value::RawValue};

use crate::kubernetes::{CHECKPOINT, in_checkpoint};

/// A placed pod and what its container got.
type Placed = (Pod, Container);

/// Scenario 1: outside of opted-in namespaces, what is stored is byte for byte what would be stored without us.
pub(crate) async fn a_namespace_that_is_not_opted_in_is_untouched(cluster: &mut Cluster) -> Result<()> {
    cluster.project("danlu", json!({})).await?;
    // The project's label alone must not do: the policy is there, the namespace's consent is not.
    let namespace = cluster.namespace("untouched", &[(PROJECT, "danlu")]).await?;
    let manifests: Vec<Value> = untouched_specs();

    let mut with = Vec::new();
    for spec in &manifests {
        with.push(stored_spec(cluster, &namespace, spec).await?);
    }
    let mut without = Vec::new();
    cluster
        .without_webhook(async |cluster| {
            for spec in &manifests {
                without.push(stored_spec(cluster, &namespace, spec).await?);
            }
            Ok(())
        })
        .await?;
    ensure!(with == without, "with the webhook: {with:#?}\nwithout: {without:#?}");

    // And such a pod runs as ever, on a card of NVIDIA's plugin.
    let created = cluster.create_pod(&namespace, "legacy", manifests[0].clone()).await?;
    ensure!(created.annotations().is_empty(), "annotated: {:?}", created.annotations());
    let (pod, container) = cluster.running(&namespace, "legacy").await?;
    ensure!(
        pod.spec.as_ref().and_then(|s| s.scheduler_name.as_deref()) == Some("default-scheduler"),
        "{:?}",
        pod.spec
    );
    only_card(&container).map(drop)
}

/// Pods that a conversion would have to touch in every place that it knows.
fn untouched_specs() -> Vec<Value> {
    let mut plain = pod_spec(GPU);
    plain["automountServiceAccountToken"] = json!(false);
    let mut rich = plain.clone();
    rich["nodeSelector"] = json!({"gpu-type": "a100"});
    rich["tolerations"] = json!([{"key": "nvidia.com/gpu", "operator": "Exists"}]);
    rich["containers"][0]["env"] = json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]);
    let mut sidecar = container("sidecar", GPU);
    sidecar["restartPolicy"] = json!("Always");
    rich["initContainers"] = json!([container("init", GPU), sidecar]);
    vec![plain, rich]
}

/// The bytes of the spec as the apiserver would store it.
async fn stored_spec(cluster: &Cluster, namespace: &str, spec: &Value) -> Result<String> {
    #[derive(serde::Deserialize)]
    struct Stored {
        spec: Box<RawValue>,
    }
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "same"}, "spec": spec});
    let parameters = PostParams { dry_run: true, ..PostParams::default() };
    let request = Request::new(format!("/api/v1/namespaces/{namespace}/pods"))
        .create(&parameters, pod.to_string().into_bytes())?;
    let answer = cluster.client.request_text(request).await?;
    Ok(serde_json::from_str::<Stored>(&answer)?.spec.get().to_owned())
}

/// Scenario 2: an unmodified Deployment of one whole card ends as a shared pod on the very card that the extender chose.
pub(crate) async fn a_deployment_becomes_shared_pods_on_the_chosen_cards(
    cluster: &mut Cluster,
) -> Result<()> {
    let observer = Observer::start(cluster.client.clone());
    let outside = cluster.namespace("legacy", &[]).await?;
    cluster.create_deployment(&outside, deployment("old", 2, GPU)).await?;
    let old = cluster.all_running(&outside, "old", 2).await?;
    // Before, the extender does not know which cards they have; the agent would give others than it chooses.
    cluster.wait_for_holders(held(&old)).await?;

    let namespace = cluster.project("danlu", json!({})).await?;
    cluster.create_deployment(&namespace, deployment("train", 2, GPU)).await?;
    let new = cluster.all_running(&namespace, "train", 2).await?;
    for placed in &new {
        is_converted(placed)?;
        on_chosen_card(placed)?;
    }
    let template = Api::<Deployment>::namespaced(cluster.client.clone(), &namespace).get("train").await?;
    let asked = template.spec.context("no spec")?.template.spec.context("no pod spec")?;
    ensure!(
        json!(asked)["containers"][0]["resources"]["limits"] == json!({"nvidia.com/gpu": "1"}),
        "{asked:?}"
    );

    cluster.wait_for_holders(held(old.iter().chain(&new))).await?;
    observer.finish().await?.check(4)
}

fn is_converted((pod, _): &Placed) -> Result<()> {
    let dialect = Dialect::default();
    let asks = [&dialect.legacy, &dialect.cores, &dialect.memory].map(|name| limit(pod, name));
    ensure!(asks == [0, 100, 42], "legacy cards, cores and blocks are {asks:?}");
    ensure!(pod.spec.as_ref().and_then(|s| s.scheduler_name.as_deref()) == Some(SCHEDULER), "{:?}", pod.spec);
    annotation(pod, POLICY)?;
    let original: Value = serde_json::from_str(annotation(pod, ORIGINAL)?)?;
    ensure!(original.to_string().contains(&dialect.legacy), "{original}");
    Ok(())
}

/// The container's card is the one in its annotation.
fn on_chosen_card((pod, container): &Placed) -> Result<()> {
    let index: u64 = annotation(pod, &format!("{PREDICATE_GPU_INDEX_PREFIX}0"))?.parse()?;
    let card = only_card(container)?;
    ensure!(card == uuid(index), "the extender chose card {index}, the container sees {card}");
    Ok(())
}

/// Card and pod UID of each.
fn held<'a>(placed: impl IntoIterator<Item = &'a Placed>) -> Vec<(String, String)> {
    placed.into_iter().flat_map(|(pod, c)| c.cards().into_iter().map(|card| (card, uid(pod)))).collect()
}

fn cards<'a>(placed: impl IntoIterator<Item = &'a Placed>) -> Vec<String> {
    let mut all: Vec<String> = placed.into_iter().flat_map(|(_, c)| c.cards()).collect();
    all.sort();
    all
}

fn other_than(cards: &[String]) -> Vec<String> {
    all_uuids().into_iter().filter(|card| !cards.contains(card)).collect()
}

/// Scenario 3: legacy pods hold five of eight cards. Shares go to the other three only; one that fits nowhere waits with a
/// reason, and starts by itself when a legacy pod is deleted.
pub(crate) async fn shared_pods_avoid_legacy_cards_and_start_when_one_is_freed(
    cluster: &mut Cluster,
) -> Result<()> {
    let observer = Observer::start(cluster.client.clone());
    let namespace = cluster.namespace("mixed", &[]).await?;
    for index in 0..5 {
        cluster.create_pod(&namespace, &format!("legacy-{index}"), pod_spec(GPU)).await?;
    }
    let mut legacy = Vec::new();
    for index in 0..5 {
        legacy.push(cluster.running(&namespace, &format!("legacy-{index}")).await?);
    }
    // Before, the extender does not know which cards they have; the agent would give others than it chooses.
    cluster.wait_for_holders(held(&legacy)).await?;
    let mut shared = Vec::new();
    for index in 0..3 {
        let name = format!("share-{index}");
        cluster.create_pod(&namespace, &name, shared_spec(60, 40)).await?;
        shared.push(cluster.running(&namespace, &name).await?);
    }
    ensure!(
        cards(&shared) == other_than(&cards(&legacy)),
        "legacy {:?}, shared {:?}",
        cards(&legacy),
        cards(&shared)
    );
    shared.iter().try_for_each(on_chosen_card)?;

    // 120 cores are left, so the scheduler's own sum fits; but no card has 60, so the extender refuses.
    cluster.create_pod(&namespace, "waits", shared_spec(60, 40)).await?;
    let message = cluster.pending(&namespace, "waits", Duration::from_secs(5)).await?;
    ensure!(message.contains("card"), "the message does not mention cards: {message}");

    let freed = only_card(&legacy[0].1)?;
    cluster.delete_pod(&namespace, "legacy-0").await?;
    let began = std::time::Instant::now();
    let started = cluster.running(&namespace, "waits").await?;
    eprintln!(
        "the waiting pod ran {:.1?} after the legacy pod was gone; its message was: {message}",
        began.elapsed()
    );
    ensure!(only_card(&started.1)? == freed, "it got {:?}, freed was {freed}", started.1.cards());
    observer.finish().await?.check(9)
}

/// Scenario 4: shares are on three cards. Legacy pods only ever get the other five, although NVIDIA's plugin, unmodified,
/// believes that all eight are free.
pub(crate) async fn legacy_pods_avoid_shared_cards(cluster: &mut Cluster) -> Result<()> {
    let observer = Observer::start(cluster.client.clone());
    let namespace = cluster.namespace("mixed", &[]).await?;
    let mut shared = Vec::new();
    for index in 0..3 {
        let name = format!("share-{index}");
        cluster.create_pod(&namespace, &name, shared_spec(60, 40)).await?;
        shared.push(cluster.running(&namespace, &name).await?);
    }
    cluster.create_deployment(&namespace, deployment("legacy", 5, GPU)).await?;
    let legacy = cluster.all_running(&namespace, "legacy", 5).await?;
    ensure!(
        cards(&legacy) == other_than(&cards(&shared)),
        "legacy {:?}, shared {:?}",
        cards(&legacy),
        cards(&shared)
    );

    cluster.create_pod(&namespace, "one-too-many", pod_spec(GPU)).await?;
    cluster.pending(&namespace, "one-too-many", Duration::from_secs(5)).await?;
    cluster.wait_for_holders(held(shared.iter().chain(&legacy))).await?;
    observer.finish().await?.check(8)
}

/// Scenario 5: a deleted legacy pod's card is shared next, although the kubelet's checkpoint still lists it.
///
/// Whether it still does depends on the kubelet: it drops old entries at the next allocation, and also at each request to its
/// pod-resources service for a list, as the bridge may. So that the file is stale for certain, the test puts its former
/// content back.
pub(crate) async fn the_card_of_a_deleted_legacy_pod_is_reused_for_a_share(
    cluster: &mut Cluster,
) -> Result<()> {
    let observer = Observer::start(cluster.client.clone());
    let namespace = cluster.namespace("reuse", &[]).await?;
    let mut legacy = Vec::new();
    for index in 0..CARDS {
        let name = format!("legacy-{index}");
        cluster.create_pod(&namespace, &name, pod_spec(GPU)).await?;
        legacy.push(cluster.running(&namespace, &name).await?);
    }
    ensure!(cards(&legacy) == all_uuids(), "{:?}", cards(&legacy));

    let (gone, container) = legacy.swap_remove(3);
    let freed = only_card(&container)?;
    let stale = std::fs::read(CHECKPOINT)?;
    cluster.delete_pod(&namespace, &gone.name_any()).await?;
    if !in_checkpoint(&uid(&gone))? {
        let draft = format!("{CHECKPOINT}.test");
        std::fs::write(&draft, stale)?;
        std::fs::rename(draft, CHECKPOINT)?;
    }
    ensure!(in_checkpoint(&uid(&gone))?, "the stale checkpoint is gone already");

    cluster.create_pod(&namespace, "share", shared_spec(50, 20)).await?;
    let shared = cluster.running(&namespace, "share").await?;
    on_chosen_card(&shared)?;
    ensure!(only_card(&shared.1)? == freed, "freed was {freed}, the share is on {:?}", shared.1.cards());
    cluster.wait_for_holders(held(legacy.iter().chain([&shared]))).await?;
    observer.finish().await?.check(9)
}

/// Scenario 6: the kubelet restarts, then the node agent is killed. No card changes its holder, and both kinds still start.
pub(crate) async fn restarts_change_no_holder(cluster: &mut Cluster) -> Result<()> {
    let observer = Observer::start(cluster.client.clone());
    let namespace = cluster.namespace("restarts", &[]).await?;
    let mut placed = vec![
        start(cluster, &namespace, "legacy-0", pod_spec(GPU)).await?,
        start(cluster, &namespace, "legacy-1", pod_spec(&[("nvidia.com/gpu", 2)])).await?,
        start(cluster, &namespace, "share-0", shared_spec(60, 40)).await?,
        start(cluster, &namespace, "share-1", shared_spec(40, 40)).await?,
        start(cluster, &namespace, "whole", shared_spec(100, 160)).await?,
    ];

    cluster.restart("kubelet")?;
    holders_unchanged(cluster, &placed).await?;
    placed.push(start(cluster, &namespace, "legacy-2", pod_spec(GPU)).await?);
    placed.push(start(cluster, &namespace, "share-2", shared_spec(30, 10)).await?);
    holders_unchanged(cluster, &placed).await?;

    cluster.kill("gpu-migrate-bridge")?;
    cluster.start_component("gpu-migrate-bridge")?;
    holders_unchanged(cluster, &placed).await?;
    placed.push(start(cluster, &namespace, "legacy-3", pod_spec(GPU)).await?);
    placed.push(start(cluster, &namespace, "share-3", shared_spec(30, 10)).await?);
    holders_unchanged(cluster, &placed).await?;
    observer.finish().await?.check(9)
}

async fn start(cluster: &mut Cluster, namespace: &str, name: &str, spec: Value) -> Result<Placed> {
    cluster.create_pod(namespace, name, spec).await?;
    cluster.running(namespace, name).await
}

/// Waits until both plugins serve again, then: the same processes with the same environment, and the same holders in the GPUShadow.
async fn holders_unchanged(cluster: &mut Cluster, placed: &[Placed]) -> Result<()> {
    cluster.wait_until_serving().await?;
    cluster.wait_for_holders(held(placed)).await?;
    let now: BTreeMap<String, Container> =
        containers()?.into_iter().map(|c| (c.pod_uid.clone(), c)).collect();
    for (pod, container) in placed {
        ensure!(
            now.get(&uid(pod)) == Some(container),
            "{}: was {container:?}, is {:?}",
            pod.name_any(),
            now.get(&uid(pod))
        );
    }
    Ok(())
}

/// Runs something without the webhook and its registration.
trait WithoutWebhook {
    async fn without_webhook(&mut self, run: impl AsyncFnOnce(&mut Cluster) -> Result<()>) -> Result<()>;
}

impl WithoutWebhook for Cluster {
    async fn without_webhook(&mut self, run: impl AsyncFnOnce(&mut Cluster) -> Result<()>) -> Result<()> {
        self.component("gpu-migrate-webhook")?.stop()?;
        let hooks: Api<MutatingWebhookConfiguration> = Api::all(self.client.clone());
        hooks.delete(gpu_migrate_cluster_tests::stage::WEBHOOK, &DeleteParams::default()).await?;
        let outcome = run(self).await;
        self.start_component("gpu-migrate-webhook")?;
        self.wait_for_webhook().await?;
        outcome
    }
}
