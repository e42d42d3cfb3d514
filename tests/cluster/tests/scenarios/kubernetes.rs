//! Behaviour of Kubernetes and NVIDIA's plugin that we rely on, each asserted once, without any part of ours.

use anyhow::{Context, Result, ensure};
use gpu_migrate_cluster_tests::{
    Cluster,
    cluster::TIMEOUT,
    configs::NODE,
    migration::GPU,
    observe::{Observer, Violation},
    stage::CARDS,
    wait::Seen,
    workload::{deployment, only_card, pod_spec},
};
use gpu_migrate_model::names::NVIDIA_VISIBLE_DEVICES;
use k8s_openapi::api::events::v1::Event;
use kube::{
    Api, Resource, ResourceExt,
    api::ListParams,
    core::Request,
    runtime::events::{self, EventType, Recorder},
};
use serde_json::{Value, json};

/// The kubelet's checkpoint of allocated devices.
pub(crate) const CHECKPOINT: &str = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint";

/// Without gpu-migrate: each pod of a whole card gets a card of its own.
pub(crate) async fn a_legacy_pod_gets_a_card_of_nvidias_plugin(cluster: &mut Cluster) -> Result<()> {
    let namespace = cluster.namespace("legacy", &[]).await?;
    let observer = Observer::start(cluster.client.clone());
    cluster.create_deployment(&namespace, deployment("train", 8, GPU)).await?;
    let pods = cluster.all_running(&namespace, "train", 8).await?;
    let mut cards: Vec<String> =
        pods.iter().map(|(_, container)| only_card(container)).collect::<Result<_>>()?;
    cards.sort();
    cards.dedup();
    ensure!(cards.len() as u64 == CARDS, "eight pods share the cards {cards:?}");
    observer.finish().await?.check(8)
}

/// The observer can fail: a pod that sees a legacy pod's card because its image sets the variable itself is reported, from the
/// environment of the two processes.
pub(crate) async fn the_observer_reports_a_pod_that_sets_its_own_cards(cluster: &mut Cluster) -> Result<()> {
    let namespace = cluster.namespace("intruder", &[]).await?;
    let observer = Observer::start(cluster.client.clone());
    cluster.create_pod(&namespace, "owner", pod_spec(GPU)).await?;
    let card = only_card(&cluster.running(&namespace, "owner").await?.1)?;
    let mut spec = pod_spec(&[]);
    spec["containers"][0]["env"] = json!([{"name": NVIDIA_VISIBLE_DEVICES, "value": card}]);
    cluster.create_pod(&namespace, "intruder", spec).await?;
    cluster.running(&namespace, "intruder").await?;

    let report = observer.finish().await?;
    let [owner, intruder] = ["owner", "intruder"].map(|pod| format!("{namespace}/{pod}/main"));
    let shared = Violation::NotExclusive { card: card.clone(), holders: vec![intruder.clone(), owner] };
    let unentitled = Violation::WrongCards { container: intruder, entitled: 0, sees: vec![card] };
    let seen: Vec<&Violation> = report.violations.keys().collect();
    ensure!(seen == [&shared, &unentitled], "reported: {seen:?}");
    ensure!(report.check(0).is_err(), "the report passes all the same");
    Ok(())
}

/// Events of `events.k8s.io` are selected by the component that reports them, and by their type: the status page follows ours so.
pub(crate) async fn events_are_selected_by_who_reports_them(cluster: &mut Cluster) -> Result<()> {
    let namespace = cluster.namespace("events", &[]).await?;
    let pod = cluster.create_pod(&namespace, "pod", pod_spec(&[])).await?;
    let events: Api<Event> = Api::namespaced(cluster.client.clone(), &namespace);
    let mut found = Vec::new();
    for (reporter, type_) in
        [("first", EventType::Warning), ("first", EventType::Normal), ("second", EventType::Warning)]
    {
        let note = Some("tried".to_owned());
        let event =
            events::Event { type_, reason: "Tried".into(), note, action: "Trying".into(), secondary: None };
        let recorder = Recorder::new(cluster.client.clone(), reporter.to_owned().into());
        recorder.publish(&event, &pod.object_ref(&())).await?;
    }
    for selector in
        ["reportingController=first", "reportingController=first,type=Warning", "reportingController=second"]
    {
        found.push(events.list(&ListParams::default().fields(selector)).await?.items.len());
    }
    ensure!(found == [2, 1, 1], "{found:?}");
    Ok(())
}

/// The annotations of a Binding reach the pod in the write that sets its node.
pub(crate) async fn a_binding_carries_annotations_into_the_pod(cluster: &mut Cluster) -> Result<()> {
    let namespace = cluster.namespace("binding", &[]).await?;
    let mut spec = pod_spec(&[]);
    spec["schedulerName"] = json!("no-scheduler");
    let pod = cluster.create_pod(&namespace, "pod", spec).await?;
    let bind = |uid: &str, value: &str| -> Result<_> {
        let body = json!({
            "apiVersion": "v1", "kind": "Binding",
            "metadata": {"name": "pod", "uid": uid, "annotations": {"test/card": value}},
            "target": {"kind": "Node", "name": NODE},
        });
        let request = Request::new(format!("/api/v1/namespaces/{namespace}/pods"));
        request
            .create_subresource(
                "binding",
                "pod",
                &kube::api::PostParams::default(),
                body.to_string().into_bytes(),
            )
            .context("no request")
    };

    let wrong = cluster.client.request::<Value>(bind("00000000-0000-4000-8000-000000000000", "9")?).await;
    ensure!(conflict(&wrong), "a Binding with another pod's UID: {wrong:?}");
    let before = cluster.pods(&namespace).get("pod").await?;
    ensure!(before.annotations().is_empty(), "the refused Binding left {:?}", before.annotations());

    let uid = pod.uid().context("a pod has a UID")?;
    cluster.client.request::<Value>(bind(&uid, "3")?).await?;
    let bound = cluster.pods(&namespace).get("pod").await?;
    ensure!(
        bound.spec.as_ref().and_then(|s| s.node_name.as_deref()) == Some(NODE),
        "not bound: {:?}",
        bound.spec
    );
    ensure!(
        bound.annotations().get("test/card").map(String::as_str) == Some("3"),
        "{:?}",
        bound.annotations()
    );

    let second = cluster.client.request::<Value>(bind(&uid, "4")?).await;
    ensure!(conflict(&second), "a second Binding: {second:?}");
    let after = cluster.pods(&namespace).get("pod").await?;
    ensure!(
        after.annotations().get("test/card").map(String::as_str) == Some("3"),
        "{:?}",
        after.annotations()
    );
    cluster.running(&namespace, "pod").await.map(drop)
}

fn conflict(answer: &kube::Result<Value>) -> bool {
    matches!(answer, Err(kube::Error::Api(status)) if status.code == 409)
}

/// A card is neither free because the kubelet's checkpoint lacks it nor held because the checkpoint has it.
pub(crate) async fn the_checkpoint_keeps_entries_of_deleted_pods(cluster: &mut Cluster) -> Result<()> {
    let namespace = cluster.namespace("checkpoint", &[]).await?;
    let first = cluster.create_pod(&namespace, "first", pod_spec(GPU)).await?.uid().unwrap_or_default();
    cluster.running(&namespace, "first").await?;
    ensure!(in_checkpoint(&first)?, "the checkpoint lacks the running pod {first}");

    cluster.delete_pod(&namespace, "first").await?;
    cluster.create_pod(&namespace, "cpu", pod_spec(&[])).await?;
    cluster.running(&namespace, "cpu").await?;
    ensure!(in_checkpoint(&first)?, "the entry of {first} went before the next allocation");

    cluster.create_pod(&namespace, "second", pod_spec(GPU)).await?;
    cluster.running(&namespace, "second").await?;
    cluster
        .until("the next allocation to drop the old entry", TIMEOUT, || async {
            Ok(Seen::from_bool(!in_checkpoint(&first)?, || format!("{first} is still there")))
        })
        .await
}

/// Whether the kubelet's file still lists devices of a pod.
pub(crate) fn in_checkpoint(uid: &str) -> Result<bool> {
    let text = std::fs::read_to_string(CHECKPOINT).with_context(|| format!("cannot read {CHECKPOINT}"))?;
    let file: Value = serde_json::from_str(&text)?;
    let entries = file["Data"]["PodDeviceEntries"].as_array().cloned().unwrap_or_default();
    Ok(entries.iter().any(|entry| entry["PodUID"] == uid))
}
