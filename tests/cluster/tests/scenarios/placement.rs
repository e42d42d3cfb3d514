//! The extender behind a real kube-scheduler, on more nodes than have kubelets.
//!
//! Asserted is the card in the annotations of the Bindings; legacy pods on nodes without a kubelet have no card yet, and count
//! by their number. Where there is a kubelet, the node agent decides and corrects the annotations one by one: there the cards
//! that containers see count.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use gpu_migrate_cluster_tests::{
    Cluster,
    cluster::TIMEOUT,
    configs::{EXTENDER_TIMEOUT, NODE},
    migration::{limit, shared_spec},
    nodes::{BLOCKS_PER_CARD, FAKE},
    observe::{Entitlement, Holding, Kind, Observer, check_invariants},
    proxy::SlowProxy,
    stage::CARDS,
    wait::{self, Seen},
    workload::{annotation, phase, phase_and_why, pod_spec},
};
use gpu_migrate_model::names::{
    Dialect, GANG_GATE, GANG_NAME, GANG_SIZE, PREDICATE_GPU_INDEX_PREFIX, SCHEDULER_PLUGINS_GROUP,
    VOLCANO_GROUP,
};
use k8s_openapi::api::{core::v1::Pod, events::v1::Event, scheduling::v1::PriorityClass};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, ResourceExt,
    api::{ApiResource, DeleteParams, DynamicObject, ListParams, PostParams},
};
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use serde_json::{Value, json};

/// 500 pods of both kinds over six nodes: at no moment is a card overcommitted, by annotations or by running containers.
pub(crate) async fn random_pods_overcommit_no_card(cluster: &mut Cluster) -> Result<()> {
    const PODS: usize = 500;
    const ALIVE: usize = 90;
    let _nodes = cluster.fake_nodes(5).await?;
    let observer = Observer::start(cluster.client.clone());
    let namespace = cluster.namespace("random", &[]).await?;
    let pods = cluster.pods(&namespace);
    let mut random = StdRng::seed_from_u64(1);
    let (mut made, mut most) = (0, 0);
    while made < PODS {
        for _ in 0..10 {
            let spec = match random.random_range(0..10) {
                0..3 => pod_spec(&[("nvidia.com/gpu", 1)]),
                3 => pod_spec(&[("nvidia.com/gpu", 4)]),
                4 => shared_spec(200, 320),
                _ => shared_spec(random.random_range(1..=10) * 10, random.random_range(1..=160)),
            };
            cluster.create_pod(&namespace, &format!("pod-{made}"), spec).await?;
            made += 1;
        }
        let alive = pods.list(&ListParams::default()).await?.items;
        most = most.max(check_fake_nodes(&alive)?);
        let bound: Vec<&Pod> = alive
            .iter()
            .filter(|p| node_of(p).is_some() && p.metadata.deletion_timestamp.is_none())
            .collect();
        for pod in bound.sample(&mut random, alive.len().saturating_sub(ALIVE)) {
            let grace = u32::from(!node_of(pod).is_some_and(|n| n.starts_with("fake-")));
            pods.delete(
                &pod.name_any(),
                &DeleteParams { grace_period_seconds: Some(grace), ..DeleteParams::default() },
            )
            .await?;
        }
        cluster.check()?;
    }
    eprintln!("{made} pods; at most {most} were bound at a time");
    ensure!(most >= 40, "only {most} pods were bound at a time: this proves little");
    observer.finish().await?.check(10)
}

/// Fails if the cards of a node without a kubelet carry too much; returns how many pods are bound on any.
pub(crate) fn check_fake_nodes(pods: &[Pod]) -> Result<usize> {
    let dialect = Dialect::default();
    let mut nodes: BTreeMap<&str, Vec<&Pod>> = BTreeMap::new();
    // The containers of one that has ended hold nothing, though it is still in the API for a moment.
    for pod in pods.iter().filter(|pod| !matches!(phase(pod), "Succeeded" | "Failed")) {
        if let Some(node) = node_of(pod) {
            nodes.entry(node).or_default().push(pod);
        }
    }
    for (node, pods) in nodes.iter().filter(|(node, _)| **node != NODE) {
        let legacy: u64 = pods.iter().map(|pod| limit(pod, &dialect.legacy)).sum();
        let shares: Vec<Holding> = pods
            .iter()
            .filter(|pod| limit(pod, &dialect.cores) > 0)
            .map(|pod| chosen(pod))
            .collect::<Result<_>>()?;
        let violations = check_invariants(&shares, BLOCKS_PER_CARD);
        ensure!(
            violations.is_empty(),
            "on {node}: {}",
            violations.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
        );
        let mut cards: Vec<&String> = shares.iter().flat_map(|s| &s.cards).collect();
        cards.sort();
        cards.dedup();
        ensure!(
            cards.len() as u64 + legacy <= CARDS,
            "{node} has {legacy} cards for legacy pods and shares on {cards:?}"
        );
    }
    Ok(nodes.values().map(Vec::len).sum())
}

/// A shared pod with the cards that its annotation names.
pub(crate) fn chosen(pod: &Pod) -> Result<Holding> {
    let dialect = Dialect::default();
    let cards =
        annotation(pod, &format!("{PREDICATE_GPU_INDEX_PREFIX}0"))?.split(',').map(str::to_owned).collect();
    let kind = Kind::Shared { cores: limit(pod, &dialect.cores), blocks: limit(pod, &dialect.memory) };
    Ok(Holding { entitlement: Entitlement { container: pod.name_any(), kind }, cards })
}

pub(crate) fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

/// A spec that selects one fake node.
pub(crate) fn on(node: &str, mut spec: Value) -> Value {
    spec["nodeSelector"] = json!({FAKE: node});
    spec
}

/// Waits until a pod is bound and returns it.
pub(crate) async fn bound(cluster: &mut Cluster, namespace: &str, name: &str) -> Result<Pod> {
    let pods = cluster.pods(namespace);
    cluster
        .until(&format!("{namespace}/{name} to be bound"), TIMEOUT, || async {
            let pod = pods.get(name).await?;
            Ok(if node_of(&pod).is_some() {
                Seen::Done(pod)
            } else {
                Seen::NotYet(phase_and_why(Some(&pod)))
            })
        })
        .await
}

/// Deletes a pod without grace. No node agent reports free capacity on these nodes: a pod that the extender refused because its
/// watch was behind the scheduler's must be requeued by the extender.
pub(crate) async fn delete_now(cluster: &Cluster, namespace: &str, name: &str) -> Result<()> {
    let pods = cluster.pods(namespace);
    pods.delete(name, &DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() }).await?;
    wait::until(&format!("{name} to be gone"), TIMEOUT, || async {
        Ok(Seen::from_bool(pods.get_opt(name).await?.is_none(), || "it is still there".into()))
    })
    .await
}

/// A pod of a higher priority class gets a card by preempting the pods on it, and no other.
pub(crate) async fn preemption_evicts_the_pods_of_one_card_only(cluster: &mut Cluster) -> Result<()> {
    let nodes = cluster.fake_nodes(1).await?;
    let node = nodes.names()[0].clone();
    let namespace = cluster.namespace("preempt", &[]).await?;
    let classes: Api<PriorityClass> = Api::all(cluster.client.clone());
    let class: PriorityClass =
        serde_json::from_value(json!({"metadata": {"generateName": "urgent-"}, "value": 1000}))?;
    let urgent = classes.create(&PostParams::default(), &class).await?.name_any();

    // Seven cards with one whole-card pod each, the eighth with two halves.
    for index in 0..7 {
        cluster.create_pod(&namespace, &format!("whole-{index}"), on(&node, shared_spec(100, 100))).await?;
        bound(cluster, &namespace, &format!("whole-{index}")).await?;
    }
    let mut halves = Vec::new();
    for index in 0..2 {
        cluster.create_pod(&namespace, &format!("half-{index}"), on(&node, shared_spec(50, 50))).await?;
        halves.push(bound(cluster, &namespace, &format!("half-{index}")).await?);
    }
    let before = cluster.pods(&namespace).list(&ListParams::default()).await?.items;
    let cards: BTreeMap<String, Vec<String>> =
        before.iter().map(|pod| Ok((pod.name_any(), chosen(pod)?.cards))).collect::<Result<_>>()?;

    let mut spec = on(&node, shared_spec(100, 100));
    spec["priorityClassName"] = json!(urgent);
    cluster.create_pod(&namespace, "urgent", spec).await?;
    // No kubelet ends the victims here, so the test does, as the scheduler deletes one after the other.
    let pods = cluster.pods(&namespace);
    let victims = tokio::sync::Mutex::new(BTreeSet::new());
    let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    let urgent_pod = cluster
        .until("urgent to be bound in place of its victims", TIMEOUT, || async {
            let list = pods.list(&ListParams::default()).await?.items;
            for victim in list.iter().filter(|p| p.metadata.deletion_timestamp.is_some()) {
                victims.lock().await.insert(victim.name_any());
                pods.delete(&victim.name_any(), &now).await?;
            }
            let urgent = list.into_iter().find(|p| p.name_any() == "urgent");
            Ok(match urgent {
                Some(pod) if node_of(&pod).is_some() => Seen::Done(pod),
                other => Seen::NotYet(phase_and_why(other.as_ref())),
            })
        })
        .await?;
    classes.delete(&urgent, &DeleteParams::default()).await?;

    let freed = &chosen(&urgent_pod)?.cards;
    let mut expected: Vec<&String> =
        cards.iter().filter(|(_, c)| *c == freed).map(|(name, _)| name).collect();
    let victims = victims.into_inner();
    let victims: Vec<&String> = victims.iter().collect();
    expected.sort();
    ensure!(victims == expected, "it got card {freed:?} of {expected:?}, but {victims:?} were preempted");
    Ok(())
}

/// Of a gang of four with capacity for three no member is bound; with a fourth card all four are.
pub(crate) async fn all_members_of_a_gang_are_bound_or_none(cluster: &mut Cluster) -> Result<()> {
    let nodes = cluster.fake_nodes(1).await?;
    let node = nodes.names()[0].clone();
    let namespace = cluster.namespace("gang", &[]).await?;
    for index in 0..5 {
        cluster.create_pod(&namespace, &format!("other-{index}"), on(&node, shared_spec(100, 100))).await?;
        bound(cluster, &namespace, &format!("other-{index}")).await?;
    }
    gang(cluster, &namespace, "four", 4, &node).await?;
    wait::throughout("no member bound", Duration::from_secs(8), || async {
        let members = members(cluster, &namespace, "four").await?;
        ensure!(
            members.iter().all(|pod| node_of(pod).is_none()),
            "{:?}",
            members.iter().map(|p| phase_and_why(Some(p))).collect::<Vec<_>>()
        );
        Ok(())
    })
    .await?;
    delete_now(cluster, &namespace, "other-0").await?;
    for index in 0..4 {
        bound(cluster, &namespace, &format!("four-{index}")).await?;
    }
    check_fake_nodes(&cluster.pods(&namespace).list(&ListParams::default()).await?.items).map(drop)
}

/// A gang of which one member does not come: the others are held, released when time runs out, and held again, as often as the
/// scheduler asks. Each gets one Event with a count, not one Event each time. Once the last can be placed, all are bound.
pub(crate) async fn a_gang_timeout_is_reported_in_one_event(cluster: &mut Cluster) -> Result<()> {
    cluster.one_extender(&[("gang-timeout", "3")])?;
    let nodes = cluster.fake_nodes(1).await?;
    let node = nodes.names()[0].clone();
    let namespace = cluster.namespace("late-gang", &[]).await?;
    for index in 0..3 {
        member(cluster, &namespace, ("four", 4, index), on(&node, shared_spec(100, 100))).await?;
    }
    // Nobody schedules it, and nobody says so.
    let mut strange = on(&node, shared_spec(100, 100));
    strange["schedulerName"] = json!("no-scheduler");
    member(cluster, &namespace, ("four", 4, 3), strange).await?;

    let events: Api<Event> = Api::namespaced(cluster.client.clone(), &namespace);
    cluster
        .until("one Event with a count for each of the three", TIMEOUT, || async {
            let counts = releases(events.list(&ListParams::default()).await?.items);
            let repeated = counts.values().all(|counts| matches!(counts[..], [count] if count > 1));
            Ok(Seen::from_bool(counts.len() == 3 && repeated, || format!("{counts:?}")))
        })
        .await?;
    let now = members(cluster, &namespace, "four").await?;
    ensure!(now.iter().all(|pod| node_of(pod).is_none()), "a part of the gang is bound");

    delete_now(cluster, &namespace, "four-3").await?;
    member(cluster, &namespace, ("four", 4, 3), on(&node, shared_spec(100, 100))).await?;
    for index in 0..4 {
        bound(cluster, &namespace, &format!("four-{index}")).await?;
    }
    cluster.one_extender(&[])
}

/// A member whose CPU no node has keeps the others from holding cards, which the scheduler tells of it; without it they go on.
pub(crate) async fn a_member_without_a_node_keeps_the_others_from_holding_cards(
    cluster: &mut Cluster,
) -> Result<()> {
    let nodes = cluster.fake_nodes(1).await?;
    let node = nodes.names()[0].clone();
    let namespace = cluster.namespace("impossible-gang", &[]).await?;
    let mut big = on(&node, shared_spec(100, 100));
    big["containers"][0]["resources"]["limits"]["cpu"] = json!("1000");
    member(cluster, &namespace, ("four", 4, 3), big).await?;
    for index in 0..3 {
        member(cluster, &namespace, ("four", 4, index), on(&node, shared_spec(100, 100))).await?;
    }
    for index in 0..3 {
        let name = format!("four-{index}");
        let pods = cluster.pods(&namespace);
        let told = |pod: Pod| {
            let conditions = pod.status.and_then(|status| status.conditions).unwrap_or_default();
            conditions.into_iter().filter_map(|condition| condition.message).collect::<Vec<_>>().join("; ")
        };
        cluster
            .until(&format!("{name} to be refused for four-3"), TIMEOUT, || async {
                let told = told(pods.get(&name).await?);
                Ok(Seen::from_bool(told.contains("finds no node for its pod"), || told))
            })
            .await?;
    }
    // All cards of the node are free meanwhile.
    for index in 0..8 {
        cluster.create_pod(&namespace, &format!("other-{index}"), on(&node, shared_spec(100, 100))).await?;
        bound(cluster, &namespace, &format!("other-{index}")).await?;
        delete_now(cluster, &namespace, &format!("other-{index}")).await?;
    }
    delete_now(cluster, &namespace, "four-3").await?;
    member(cluster, &namespace, ("four", 4, 3), on(&node, shared_spec(100, 100))).await?;
    for index in 0..4 {
        bound(cluster, &namespace, &format!("four-{index}")).await?;
    }
    Ok(())
}

/// By pod, the counts of its Events about the timeout of its gang.
fn releases(events: Vec<Event>) -> BTreeMap<String, Vec<i32>> {
    let mut counts: BTreeMap<String, Vec<i32>> = BTreeMap::new();
    for event in events.into_iter().filter(|event| event.reason.as_deref() == Some("GangReleased")) {
        let in_time = event.note.is_some_and(|note| note.contains("not all members came in time"));
        let pod = event.regarding.and_then(|pod| pod.name).filter(|_| in_time).unwrap_or_default();
        counts.entry(pod).or_default().push(event.series.map_or(1, |series| series.count));
    }
    counts
}

/// Two gangs that each need more than half of the cards are bound one after the other.
pub(crate) async fn competing_gangs_are_bound_one_after_the_other(cluster: &mut Cluster) -> Result<()> {
    let nodes = cluster.fake_nodes(1).await?;
    let node = nodes.names()[0].clone();
    let namespace = cluster.namespace("competing", &[]).await?;
    gang(cluster, &namespace, "red", 5, &node).await?;
    gang(cluster, &namespace, "blue", 5, &node).await?;
    let winner = whole_gang(cluster, &namespace, &["red", "blue"]).await?;
    let loser = if winner == "red" { "blue" } else { "red" };
    let waiting = members(cluster, &namespace, loser).await?;
    ensure!(
        waiting.iter().all(|pod| node_of(pod).is_none()),
        "{loser} is bound in part while {winner} holds five of eight cards"
    );
    for index in 0..5 {
        delete_now(cluster, &namespace, &format!("{winner}-{index}")).await?;
    }
    whole_gang(cluster, &namespace, &[loser]).await.map(drop)
}

/// Waits until one of the gangs is bound wholly, and returns its name.
async fn whole_gang<'a>(cluster: &mut Cluster, namespace: &str, gangs: &[&'a str]) -> Result<&'a str> {
    let pods = cluster.pods(namespace);
    // A gang that could not be completed is released after at most the extender's timeout, and tried again later.
    cluster
        .until(&format!("one of the gangs {gangs:?} to be bound"), EXTENDER_TIMEOUT + TIMEOUT, || async {
            let mut seen = String::new();
            for gang in gangs {
                let members = pods.list(&ListParams::default().labels(&format!("gang={gang}"))).await?.items;
                let bound = members.iter().filter(|pod| node_of(pod).is_some()).count();
                if bound == members.len() && bound > 0 {
                    return Ok(Seen::Done(*gang));
                }
                seen.push_str(&format!("{gang}: {bound} of {} bound; ", members.len()));
            }
            Ok(Seen::NotYet(seen))
        })
        .await
}

async fn members(cluster: &Cluster, namespace: &str, gang: &str) -> Result<Vec<Pod>> {
    Ok(cluster.pods(namespace).list(&ListParams::default().labels(&format!("gang={gang}"))).await?.items)
}

/// Creates the pods `<gang>-0…` of a whole card each.
async fn gang(cluster: &Cluster, namespace: &str, gang: &str, size: usize, node: &str) -> Result<()> {
    for index in 0..size {
        member(cluster, namespace, (gang, size, index), on(node, shared_spec(100, 100))).await?;
    }
    Ok(())
}

async fn member(
    cluster: &Cluster,
    namespace: &str,
    (gang, size, index): (&str, usize, usize),
    spec: Value,
) -> Result<()> {
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {
            "name": format!("{gang}-{index}"),
            "labels": {"gang": gang},
            "annotations": {GANG_NAME: gang, GANG_SIZE: size.to_string()},
        },
        "spec": spec,
    }))?;
    let created = cluster.pods(namespace).create(&PostParams::default(), &pod).await;
    created.map(drop).with_context(|| format!("cannot create {gang}-{index}"))
}

/// A gang whose pods name a PodGroup, of scheduler-plugins or of Volcano, waits until that is there, and then has the size that it says.
pub(crate) async fn a_gang_has_the_size_of_its_pod_group(cluster: &mut Cluster) -> Result<()> {
    let nodes = cluster.fake_nodes(1).await?;
    let namespace = cluster.namespace("pod-group", &[]).await?;
    let definitions: Api<CustomResourceDefinition> = Api::all(cluster.client.clone());
    for (group, version, metadata) in [
        ("scheduling.x-k8s.io", "v1alpha1", json!({"labels": {SCHEDULER_PLUGINS_GROUP: "plugins"}})),
        ("scheduling.volcano.sh", "v1beta1", json!({"annotations": {VOLCANO_GROUP: "volcano"}})),
    ] {
        let name = if version == "v1alpha1" { "plugins" } else { "volcano" };
        for index in 0..2 {
            let mut metadata = metadata.clone();
            metadata["name"] = json!(format!("{name}-{index}"));
            let spec = on(&nodes.names()[0], shared_spec(100, 100));
            let pod: Pod = serde_json::from_value(json!({"metadata": metadata, "spec": spec}))?;
            cluster.pods(&namespace).create(&PostParams::default(), &pod).await?;
        }
        let message = cluster.pending(&namespace, &format!("{name}-1"), Duration::from_secs(3)).await?;
        ensure!(message.contains("there is no PodGroup of"), "{message}");

        let schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
        let definition: CustomResourceDefinition = serde_json::from_value(json!({
            "metadata": {"name": format!("podgroups.{group}"), "annotations": {"api-approved.kubernetes.io": "unapproved, a test"}},
            "spec": {
                "group": group, "scope": "Namespaced",
                "names": {"kind": "PodGroup", "plural": "podgroups", "singular": "podgroup", "listKind": "PodGroupList"},
                "versions": [{"name": version, "served": true, "storage": true, "schema": {"openAPIV3Schema": schema}}],
            },
        }))?;
        definitions.create(&PostParams::default(), &definition).await?;
        let kind = ApiResource {
            group: group.into(),
            version: version.into(),
            api_version: format!("{group}/{version}"),
            kind: "PodGroup".into(),
            plural: "podgroups".into(),
        };
        let groups: Api<DynamicObject> = Api::namespaced_with(cluster.client.clone(), &namespace, &kind);
        let object = DynamicObject::new(name, &kind).data(json!({"spec": {"minMember": 2}}));
        cluster
            .until("the PodGroup to be accepted", TIMEOUT, || async {
                let created = groups.create(&PostParams::default(), &object).await;
                Ok(Seen::from_bool(created.is_ok(), || {
                    created.err().map(|e| e.to_string()).unwrap_or_default()
                }))
            })
            .await?;
        for index in 0..2 {
            bound(cluster, &namespace, &format!("{name}-{index}")).await?;
        }
        definitions.delete(&format!("podgroups.{group}"), &DeleteParams::default()).await?;
    }
    check_fake_nodes(&cluster.pods(&namespace).list(&ListParams::default()).await?.items).map(drop)
}

/// Members with a gate stay out of the queue until the last exists; then all gates are removed and all are bound.
pub(crate) async fn scheduling_gates_of_a_gang_are_removed_together(cluster: &mut Cluster) -> Result<()> {
    let nodes = cluster.fake_nodes(1).await?;
    let namespace = cluster.namespace("gates", &[]).await?;
    let mut spec = on(&nodes.names()[0], shared_spec(100, 100));
    spec["schedulingGates"] = json!([{"name": GANG_GATE}]);
    for index in 0..2 {
        member(cluster, &namespace, ("gated", 3, index), spec.clone()).await?;
    }
    let gates = |pod: &Pod| pod.spec.iter().flat_map(|s| s.scheduling_gates.iter().flatten()).count();
    wait::throughout("the gates of an incomplete gang", Duration::from_secs(3), || async {
        let members = members(cluster, &namespace, "gated").await?;
        ensure!(members.iter().all(|pod| gates(pod) == 1), "a gate was removed");
        Ok(())
    })
    .await?;
    member(cluster, &namespace, ("gated", 3, 2), spec).await?;
    for index in 0..3 {
        let pod = bound(cluster, &namespace, &format!("gated-{index}")).await?;
        ensure!(gates(&pod) == 0, "{} is bound with its gate", pod.name_any());
    }
    Ok(())
}

/// Binds whose responses arrive after the scheduler timed out: every pod is bound once, and no card twice.
pub(crate) async fn a_bind_that_the_scheduler_gave_up_on_is_done_once(cluster: &mut Cluster) -> Result<()> {
    let nodes = cluster.fake_nodes(1).await?;
    let node = nodes.names()[0].clone();
    let namespace = cluster.namespace("late", &[]).await?;
    let extender = cluster.setup.ports.extender[0];
    let proxy = SlowProxy::start(extender, EXTENDER_TIMEOUT + Duration::from_secs(2)).await?;
    cluster.restart_scheduler(Some(proxy.port()))?;
    for index in 0..8 {
        cluster.create_pod(&namespace, &format!("late-{index}"), on(&node, shared_spec(60, 60))).await?;
    }
    for index in 0..8 {
        bound(cluster, &namespace, &format!("late-{index}")).await?;
    }
    // Until the scheduler's timeouts have passed and it has retried the binds that it takes for failed.
    cluster.create_pod(&namespace, "too-many", on(&node, shared_spec(60, 60))).await?;
    cluster.pending(&namespace, "too-many", EXTENDER_TIMEOUT + Duration::from_secs(5)).await?;
    check_fake_nodes(&cluster.pods(&namespace).list(&ListParams::default()).await?.items)?;
    ensure!(proxy.held() >= 8, "only {} answers were late", proxy.held());
    delete_now(cluster, &namespace, "late-0").await?;
    bound(cluster, &namespace, "too-many").await?;
    cluster.restart_scheduler(Some(extender))
}

/// Of two extenders the leader is killed while 200 pods are bound: the other takes over, every pod is bound, no card is
/// overcommitted.
pub(crate) async fn a_killed_leader_loses_no_pod(cluster: &mut Cluster) -> Result<()> {
    const PODS: usize = 200;
    // Capacity for 224, so that a share that is lost or counted twice is noticed.
    let _nodes = cluster.fake_nodes(7).await?;
    let namespace = cluster.namespace("leader", &[]).await?;
    let (service, names) = cluster.two_extenders().await?;
    // So that all are in the queue before the first is bound.
    cluster.component("kube-scheduler")?.stop()?;
    let first = cluster
        .until("one of the extenders to lead", TIMEOUT, || async {
            Ok(Seen::from_option(service.ready(), || "neither is ready".into()))
        })
        .await?;
    let mut spec = shared_spec(25, 40);
    let fake = json!({"matchExpressions": [{"key": FAKE, "operator": "Exists"}]});
    let required = json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [fake]}});
    spec["affinity"] = json!({"nodeAffinity": required});
    for index in 0..PODS / 2 {
        cluster.create_pod(&namespace, &format!("pod-{index}"), spec.clone()).await?;
    }
    cluster.start_component("kube-scheduler")?;
    let pods = cluster.pods(&namespace);
    let count = || async {
        let list = pods.list(&ListParams::default()).await?.items;
        anyhow::Ok((check_fake_nodes(&list)?, list.len()))
    };
    let before = cluster
        .until("a part of the pods to be bound", TIMEOUT, || async {
            let (bound, all) = count().await?;
            Ok(Seen::from_option((bound >= PODS / 4).then_some(bound), || {
                format!("{bound} of {all} are bound")
            }))
        })
        .await?;
    let leader = if first == cluster.setup.ports.extender[0] { names[0] } else { names[1] };
    cluster.kill(leader)?;
    // However many of the first half are bound by now, these are not.
    for index in PODS / 2..PODS {
        cluster.create_pod(&namespace, &format!("pod-{index}"), spec.clone()).await?;
    }
    // The Lease has to expire, and then the scheduler has to retry the binds that failed.
    cluster
        .until("the others to be bound by the other extender", 2 * TIMEOUT, || async {
            let (bound, all) = count().await?;
            ensure!(all == PODS, "{all} pods are left of {PODS}");
            Ok(Seen::from_bool(bound == PODS, || format!("{bound} of {PODS} are bound")))
        })
        .await?;
    ensure!(service.ready().is_some_and(|now| now != first), "the killed extender still answers");
    eprintln!("{before} of {PODS} were bound by the first leader");
    cluster.one_extender(&[])
}
