//! Preemption, retried members of a gang and a change of leaders: the extender behind a real kube-scheduler.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use gpu_migrate_cluster_tests::{
    Cluster,
    cluster::TIMEOUT,
    configs::NODE,
    http,
    migration::shared_spec,
    nodes::FAKE,
    wait::{self, Seen},
    workload::{phase_and_why, pod_spec},
};
use gpu_migrate_model::names::{GANG_NAME, GANG_SIZE, SCHEDULER};
use k8s_openapi::api::{batch::v1::Job, core::v1::Pod, scheduling::v1::PriorityClass};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use crate::placement::{bound, check_fake_nodes, chosen, delete_now, node_of, on};

/// Creates a pod of this priority. It keeps it, so that its class is there only meanwhile.
async fn create_with_priority(
    cluster: &Cluster,
    namespace: &str,
    name: &str,
    priority: i32,
    mut spec: Value,
) -> Result<()> {
    let classes: Api<PriorityClass> = Api::all(cluster.client.clone());
    let class: PriorityClass =
        serde_json::from_value(json!({"metadata": {"generateName": "scheduling-"}, "value": priority}))?;
    let class = classes.create(&PostParams::default(), &class).await?.name_any();
    spec["priorityClassName"] = json!(class);
    // Admission may know of the class a moment later.
    wait::until(&format!("{name} to be accepted"), TIMEOUT, || async {
        let created = cluster.create_pod(namespace, name, spec.clone()).await;
        Ok(created.map_or_else(|error| Seen::NotYet(format!("{error:#}")), |_| Seen::Done(())))
    })
    .await?;
    classes.delete(&class, &DeleteParams::default()).await?;
    Ok(())
}

async fn pods(cluster: &Cluster, namespace: &str) -> Result<Vec<Pod>> {
    Ok(cluster.pods(namespace).list(&ListParams::default()).await?.items)
}

fn leaving(pods: &[Pod]) -> BTreeSet<String> {
    let leaving = pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_some());
    leaving.map(ResourceExt::name_any).collect()
}

async fn end(cluster: &Cluster, namespace: &str, names: &BTreeSet<String>) -> Result<()> {
    let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    for name in names {
        cluster.pods(namespace).delete(name, &now).await?;
    }
    Ok(())
}

/// On a node with its agent a pod lacks CPU, while every card has room for it. The scheduler evicts a pod with a share and one without;
/// the one with the share is not spared although its card is not needed.
pub(crate) async fn preemption_for_cpu_spares_no_victim(cluster: &mut Cluster) -> Result<()> {
    let namespace = cluster.namespace("for-cpu", &[]).await?;
    let milli = 1000 * cluster.allocatable("cpu").await?;
    let asking = |mut spec: Value, percent: u64| {
        let cpu = format!("{}m", milli * percent / 100);
        spec["containers"][0]["resources"]["requests"] = json!({"cpu": cpu});
        spec["nodeSelector"] = json!({"kubernetes.io/hostname": NODE});
        spec["terminationGracePeriodSeconds"] = json!(1);
        spec["schedulerName"] = json!(SCHEDULER);
        spec
    };
    cluster.create_pod(&namespace, "share", asking(shared_spec(30, 20), 40)).await?;
    cluster.create_pod(&namespace, "plain", asking(pod_spec(&[]), 40)).await?;
    cluster.create_pod(&namespace, "other", asking(shared_spec(30, 20), 0)).await?;
    for name in ["share", "plain", "other"] {
        cluster.running(&namespace, name).await?;
    }
    create_with_priority(cluster, &namespace, "urgent", 1000, asking(shared_spec(20, 20), 80)).await?;
    cluster.running(&namespace, "urgent").await?;
    let all = cluster.pods(&namespace);
    cluster
        .until("other and urgent to be left", TIMEOUT, || async {
            let list = all.list(&ListParams::default()).await?;
            let left: BTreeSet<String> = list.iter().map(ResourceExt::name_any).collect();
            ensure!(left.contains("other"), "other was evicted too");
            Ok(Seen::from_bool(left.len() == 2, || format!("{left:?}")))
        })
        .await
}

/// The two pods that the scheduler evicts are on different cards, and free none. The extender adds one that frees a card together with
/// one of them.
pub(crate) async fn victims_on_different_cards_are_completed(cluster: &mut Cluster) -> Result<()> {
    let nodes = cluster.fake_nodes(1).await?;
    let node = nodes.names()[0].clone();
    let namespace = cluster.namespace("two-cards", &[]).await?;
    let mut cards = Vec::new();
    for index in 0..16 {
        let (name, half) = (format!("half-{index}"), on(&node, shared_spec(50, 50)));
        // One on the first card and one on the second are the first to go.
        let priority = if index == 0 || index == 2 { -10 } else { 0 };
        create_with_priority(cluster, &namespace, &name, priority, half).await?;
        cards.push(chosen(&bound(cluster, &namespace, &name).await?)?.cards);
    }
    ensure!(cards[0] == cards[1] && cards[2] == cards[3] && cards[0] != cards[2], "{cards:?}");
    create_with_priority(cluster, &namespace, "urgent", 1000, on(&node, shared_spec(100, 100))).await?;
    let client = &*cluster;
    let victims = wait::until("victims that free a card", TIMEOUT, || async {
        let victims = leaving(&pods(client, &namespace).await?);
        Ok(if victims.len() < 3 { Seen::NotYet(format!("{victims:?}")) } else { Seen::Done(victims) })
    })
    .await?;
    end(cluster, &namespace, &victims).await?;
    let urgent = bound(cluster, &namespace, "urgent").await?;
    let low = ["half-0", "half-2"].map(str::to_owned);
    let with = |partner: &str| BTreeSet::from([low[0].clone(), low[1].clone(), partner.to_owned()]);
    let expected = if chosen(&urgent)?.cards == cards[0] { with("half-1") } else { with("half-3") };
    ensure!(victims == expected, "{victims:?} went, and it has {:?}", chosen(&urgent)?.cards);
    check_fake_nodes(&pods(cluster, &namespace).await?).map(drop)
}

/// The card that preemption frees is kept for the pod that it was freed for, though the node's sums have room for another that waits.
pub(crate) async fn a_freed_card_is_kept_for_the_pod_that_is_nominated(cluster: &mut Cluster) -> Result<()> {
    let nodes = cluster.fake_nodes(1).await?;
    let node = nodes.names()[0].clone();
    let namespace = cluster.namespace("nominated", &[]).await?;
    create_with_priority(cluster, &namespace, "victim", -10, on(&node, shared_spec(100, 100))).await?;
    let card = chosen(&bound(cluster, &namespace, "victim").await?)?.cards;
    for index in 0..7 {
        let name = format!("other-{index}");
        cluster.create_pod(&namespace, &name, on(&node, shared_spec(95, 95))).await?;
        bound(cluster, &namespace, &name).await?;
    }
    create_with_priority(cluster, &namespace, "urgent", 1000, on(&node, shared_spec(100, 100))).await?;
    let all = cluster.pods(&namespace);
    wait::until("urgent to be nominated and its victim to leave", TIMEOUT, || async {
        let urgent = all.get("urgent").await?;
        let nominated = urgent.status.as_ref().and_then(|status| status.nominated_node_name.clone());
        let victim = all.get("victim").await?.metadata.deletion_timestamp;
        Ok(Seen::from_bool(nominated.is_some() && victim.is_some(), || format!("{nominated:?} {victim:?}")))
    })
    .await?;
    // Each card but the victim's has 5 cores left, all together 35.
    cluster.create_pod(&namespace, "small", on(&node, shared_spec(30, 5))).await?;
    cluster.pending(&namespace, "small", Duration::from_secs(1)).await?;
    end(cluster, &namespace, &BTreeSet::from(["victim".to_owned()])).await?;
    let urgent = bound(cluster, &namespace, "urgent").await?;
    ensure!(chosen(&urgent)?.cards == card, "it has {:?}, and {card:?} was freed", chosen(&urgent)?.cards);
    cluster.pending(&namespace, "small", Duration::from_secs(1)).await?;
    check_fake_nodes(&pods(cluster, &namespace).await?).map(drop)
}

/// A Job whose pods are a gang: three succeed and one fails. The pod that the Job makes in its place goes, though three members of its gang
/// are not there any more to be placed.
pub(crate) async fn a_retried_pod_of_a_job_joins_its_gang(cluster: &mut Cluster) -> Result<()> {
    let nodes = cluster.fake_nodes(1).await?;
    let namespace = cluster.namespace("job", &[]).await?;
    let mut spec = on(&nodes.names()[0], shared_spec(100, 100));
    spec["restartPolicy"] = json!("Never");
    let job: Job = serde_json::from_value(json!({
        "metadata": {"name": "job"},
        "spec": {"completions": 4, "parallelism": 4, "template": {
            "metadata": {"annotations": {GANG_NAME: "job", GANG_SIZE: "4"}}, "spec": spec,
        }},
    }))?;
    let jobs: Api<Job> = Api::namespaced(cluster.client.clone(), &namespace);
    jobs.create(&PostParams::default(), &job).await?;
    let all = cluster.pods(&namespace);
    let is_bound = |pod: &&Pod| node_of(pod).is_some();
    let first: Vec<String> = cluster
        .until("the Job's four pods to be bound", TIMEOUT, || async {
            let list = all.list(&ListParams::default()).await?.items;
            let names: Vec<String> = list.iter().filter(is_bound).map(ResourceExt::name_any).collect();
            Ok(if names.len() == 4 {
                Seen::Done(names)
            } else {
                Seen::NotYet(list.iter().map(|pod| phase_and_why(Some(pod))).collect::<Vec<_>>().join("; "))
            })
        })
        .await?;
    // As a kubelet would.
    for (index, name) in first.iter().enumerate() {
        let phase = if index == 0 { "Failed" } else { "Succeeded" };
        let status = json!({"status": {"phase": phase}});
        all.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await?;
    }
    cluster
        .until("the fifth pod to be bound", TIMEOUT, || async {
            let list = all.list(&ListParams::default()).await?.items;
            let fifth = list.iter().find(|pod| !first.contains(&pod.name_any()));
            Ok(Seen::from_bool(fifth.is_some_and(|pod| node_of(pod).is_some()), || phase_and_why(fifth)))
        })
        .await
}

/// Each scheduler with an extender beside it. The first extender is frozen while it binds; the scheduler that comes after calls the
/// second, which waits until the first certainly binds no more. When the first goes on, no card is given out twice.
pub(crate) async fn a_frozen_extender_names_no_card_after_its_successor(cluster: &mut Cluster) -> Result<()> {
    const PODS: usize = 60;
    let _nodes = cluster.fake_nodes(4).await?;
    let namespace = cluster.namespace("frozen", &[]).await?;
    let names = cluster.extenders_beside_schedulers()?;
    let ports = [cluster.setup.ports.extender[0], cluster.setup.ports.second_extender[0]];
    cluster.restart_scheduler(Some(ports[0]))?;
    let mut spec = shared_spec(50, 50);
    let fake = json!({"matchExpressions": [{"key": FAKE, "operator": "Exists"}]});
    let required = json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [fake]}});
    spec["affinity"] = json!({"nodeAffinity": required});
    for index in 0..PODS {
        cluster.create_pod(&namespace, &format!("pod-{index}"), spec.clone()).await?;
    }
    let all = cluster.pods(&namespace);
    let count = || async { check_fake_nodes(&all.list(&ListParams::default()).await?.items) };
    let before = cluster
        .until("the first pods to be bound", TIMEOUT, || async {
            let bound = count().await?;
            Ok(Seen::from_option((bound > 0).then_some(bound), || "none is bound".into()))
        })
        .await?;
    cluster.component(names[0])?.pause()?;
    cluster.restart_scheduler(Some(ports[1]))?;
    cluster
        .until("the second extender to bind the others", 2 * TIMEOUT, || async {
            let bound = count().await?;
            Ok(Seen::from_bool(bound == PODS, || format!("{bound} of {PODS} are bound")))
        })
        .await?;
    eprintln!("{before} of {PODS} were bound by the first extender");
    cluster.component(names[0])?.resume()?;
    // What it had in hand it sends now, or not at all.
    wait::throughout("the cards", Duration::from_secs(3), || async { count().await.map(drop) }).await?;
    cluster.one_extender(&[]).context("cannot return to one extender")
}

/// Creates pods of this metadata and spec, `<prefix>-0…`, many at a time.
async fn create_many(
    cluster: &Cluster,
    namespace: &str,
    prefix: &str,
    count: usize,
    pod: &Value,
) -> Result<()> {
    let api = cluster.pods(namespace);
    let create = |index: usize| {
        let (api, mut pod) = (api.clone(), pod.clone());
        pod["metadata"]["name"] = json!(format!("{prefix}-{index}"));
        async move {
            let pod: Pod = serde_json::from_value(pod)?;
            api.create(&PostParams::default(), &pod).await.map(drop).map_err(anyhow::Error::from)
        }
    };
    stream::iter((0..count).map(create)).buffer_unordered(32).try_collect().await
}

/// Deletes the namespace's pods outright, in one request.
async fn delete_all(cluster: &Cluster, namespace: &str) -> Result<()> {
    let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    cluster.pods(namespace).delete_collection(&now, &ListParams::default()).await?;
    Ok(())
}

/// More binds are held than there were ever connections by default, and the scheduler's other calls are answered meanwhile.
pub(crate) async fn a_gang_of_1100_is_bound(cluster: &mut Cluster) -> Result<()> {
    const SIZE: usize = 1_100;
    let nodes = cluster.fake_nodes(14).await?;
    let namespace = cluster.namespace("large-gang", &[]).await?;
    // As long as the scheduler waits for a bind, less what two calls of the API server may take.
    cluster.one_extender(&[("gang-timeout", "25"), ("api-timeout", "2")])?;
    let mut spec = shared_spec(10, 10);
    let names = json!({"key": FAKE, "operator": "In", "values": nodes.names()});
    let required = json!({"nodeSelectorTerms": [{"matchExpressions": [names]}]});
    spec["affinity"] = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}});
    let annotations = json!({GANG_NAME: "large", GANG_SIZE: SIZE.to_string()});
    let member = json!({"metadata": {"annotations": annotations}, "spec": spec});
    create_many(cluster, &namespace, "large", SIZE, &member).await?;
    let all = cluster.pods(&namespace);
    let unbound = ListParams::default().fields("spec.nodeName=").limit(1);
    cluster
        .until("all members to be bound", 2 * TIMEOUT, || async {
            let left = all.list(&unbound).await?.items;
            Ok(Seen::from_bool(left.is_empty(), || phase_and_why(left.first())))
        })
        .await?;
    let bound = check_fake_nodes(&all.list(&ListParams::default()).await?.items)?;
    ensure!(bound == SIZE, "{bound} of {SIZE} are bound");
    delete_all(cluster, &namespace).await?;
    cluster.one_extender(&[])
}

/// Capacity that is freed makes the extender write nothing for pods that another controller's gate keeps out of the queue.
pub(crate) async fn gated_pods_in_thousands_cause_no_write(cluster: &mut Cluster) -> Result<()> {
    const PODS: usize = 5_000;
    let nodes = cluster.fake_nodes(1).await?;
    let namespace = cluster.namespace("gated", &[]).await?;
    let spec = on(&nodes.names()[0], shared_spec(100, 100));
    for index in 0..8 {
        cluster.create_pod(&namespace, &format!("holder-{index}"), spec.clone()).await?;
        bound(cluster, &namespace, &format!("holder-{index}")).await?;
    }
    let mut gated = json!({"metadata": {}, "spec": spec});
    gated["spec"]["schedulingGates"] = json!([{"name": "kueue.x-k8s.io/admission"}]);
    create_many(cluster, &namespace, "gated", PODS, &gated).await?;
    let port = cluster.setup.ports.extender[1];
    let value = |name: &'static str| async move {
        let text = http::get(port, "/metrics").await?;
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.and_then(|value| value.trim().parse::<usize>().ok()).with_context(|| format!("no {name}"))
    };
    cluster
        .until("the extender to know all pods", TIMEOUT, || async {
            let known = value("gpu_migrate_extender_pods").await?;
            Ok(Seen::from_bool(known >= PODS + 8, || format!("{known}")))
        })
        .await?;
    let before = value("gpu_migrate_extender_requeues_total").await?;
    for index in 0..8 {
        delete_now(cluster, &namespace, &format!("holder-{index}")).await?;
    }
    cluster
        .until("the extender to see the holders gone", TIMEOUT, || async {
            let known = value("gpu_migrate_extender_pods").await?;
            Ok(Seen::from_bool(known <= PODS, || format!("{known}")))
        })
        .await?;
    wait::throughout("the number of written annotations", Duration::from_secs(2), || async {
        let now = value("gpu_migrate_extender_requeues_total").await?;
        ensure!(now == before, "{} nodes were annotated", now - before);
        Ok(())
    })
    .await?;
    delete_all(cluster, &namespace).await
}
