//! What a migration gives on clusters small enough to be worked out by hand.

#![allow(clippy::unwrap_used)] // a test may fail

use gpu_migrate_model::names::Dialect;
use gpu_migrate_model::score::ScoringStrategy;
use gpu_migrate_model::units::{Blocks, Cores};
use gpu_migrate_replay::snapshot::migrate::{Gain, migrate};
use gpu_migrate_replay::snapshot::plan::Plan;
use gpu_migrate_replay::snapshot::read::{Snapshot, SnapshotError};
use gpu_migrate_replay::snapshot::report;
use gpu_migrate_webhook::policy_file::PolicyFile;
use serde_json::{Value, json};

/// A node with two cards of 40 blocks.
fn node(name: &str) -> Value {
    let amounts = json!({"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": "2"});
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "labels": {"nvidia.com/gpu.memory": "10240", "nvidia.com/gpu.product": "T4", "disk": name}},
        "status": {"capacity": amounts, "allocatable": amounts},
    })
}

fn pod(name: &str, owner: &str, node: Option<&str>, cards: u32) -> Value {
    let limits = json!({"nvidia.com/gpu": cards.to_string(), "cpu": "1"});
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name, "namespace": "team", "uid": name,
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": owner, "uid": owner, "controller": true}],
        },
        "spec": {"nodeName": node, "containers": [{"name": "main", "image": "i", "resources": {"limits": limits}}]},
        "status": {"phase": if node.is_some() { "Running" } else { "Pending" }},
    })
}

fn snapshot(items: Vec<Value>) -> Snapshot {
    let list = json!({"kind": "List", "items": items}).to_string();
    Snapshot::read(list.as_bytes(), &Dialect::default()).unwrap()
}

/// Four pods with a card each fill two nodes with two cards each.
fn full() -> Vec<Value> {
    vec![
        node("n1"),
        node("n2"),
        pod("web-a", "web", Some("n1"), 1),
        pod("web-b", "web", Some("n1"), 1),
        pod("web-c", "web", Some("n2"), 1),
        pod("train-0", "train", Some("n2"), 1),
    ]
}

fn gain(items: Vec<Value>, cores: u32, order: ScoringStrategy) -> Gain {
    let snapshot = snapshot(items);
    let plan = Plan::of_ratio(Cores(cores), None, &snapshot).unwrap();
    migrate(&snapshot, &plan, order).unwrap()
}

fn held(gain: &Gain) -> (u32, u32) {
    (gain.before.held, gain.after.held)
}

#[test]
fn half_cards_free_half_of_the_cards() {
    // By hand: train-0 must stay on n2 and leaves half a card; web-a fills it; web-b stays on n1, whose other card is then free;
    // web-c joins web-b. One card on each node is held by two halves.
    let gain = gain(full(), 50, ScoringStrategy::Lookahead);
    assert_eq!(held(&gain), (4, 2));
    assert!((gain.before.idle, gain.after.idle) == (0.0, 2.0), "{gain:?}");
    assert!(gain.after.fragmented.abs() < 1e-9, "{gain:?}");
    let web = &gain.workloads[1];
    assert_eq!((web.name.as_str(), web.pods, web.cards, web.moved), ("StatefulSet/web", 3, 3, 3));
    assert_eq!(web.becomes.as_deref(), Some("50 cores and 20 blocks"));
}

/// As above; of four cards that legacy pods hold, two are full of halves, one on each node. Of five that wait, four start on the other two.
#[test]
fn every_card_and_every_project_is_shown_before_and_after() {
    let mut items = full();
    for item in items.iter_mut().filter(|item| item["metadata"]["name"].as_str().unwrap().starts_with("web"))
    {
        item["metadata"]["labels"] = json!({"gpu-migrate.io/project": "vision"});
    }
    items.extend((0..5).map(|n| pod(&format!("wait-{n}"), "wait", None, 1)));
    let snapshot = snapshot(items);
    let plan = Plan::of_ratio(Cores(50), None, &snapshot).unwrap();
    let gain = migrate(&snapshot, &plan, ScoringStrategy::Lookahead).unwrap();
    assert_eq!(gain.map.before, ["LL", "LL"]);
    assert!(gain.map.after.iter().all(|node| ["#·", "·#"].contains(&node.as_str())), "{gain:?}");
    let rows = gain
        .projects
        .iter()
        .map(|one| (one.name.as_str(), one.pods, one.moved, one.cards, one.cards_after, one.waiting));
    let expected = [("namespace team", 1, 1, 1, 0.5, (5, 4)), ("vision", 3, 3, 3, 1.5, (0, 0))];
    assert_eq!(rows.collect::<Vec<_>>(), expected);
    let text = report::table(&snapshot, &[gain]);
    let row = |begin: &str| {
        let line = text.lines().find(|line| line.trim_start().starts_with(begin)).unwrap_or_default();
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(row("namespace team"), "namespace team 1 1 5 0.5 cards, 4 start", "{text}");
    assert_eq!(row("vision"), "vision 3 3 0 1.5 cards", "{text}");
    assert_eq!(row("held by legacy pods"), "held by legacy pods 4 0", "{text}");
    assert_eq!(row("shared in full"), "shared in full 0 2", "{text}");
    assert!(row("n1").starts_with("n1 LL ") && row("n1").contains('#'), "{text}");
}

/// Of many nodes the text has sums alone; the page has each card.
#[test]
fn many_nodes_are_summed_in_the_text_and_drawn_in_the_page() {
    let mut items = (0..41).map(|n| node(&format!("n{n}"))).collect::<Vec<_>>();
    items.push(pod("web-a", "web", Some("n0"), 1));
    let snapshot = snapshot(items);
    let plan = Plan::of_ratio(Cores(50), None, &snapshot).unwrap();
    let gains = [migrate(&snapshot, &plan, ScoringStrategy::Lookahead).unwrap()];
    let text = report::table(&snapshot, &gains);
    assert!(!text.contains("NODE ") && text.contains("held by legacy pods"), "{text}");
    let page = gpu_migrate_replay::snapshot::html::html(&snapshot, &gains);
    assert_eq!(page.matches("<title>n40: ··</title>").count(), 2, "now and afterwards: {page}");
    assert!(page.contains("<title>n0: L·</title>") && page.contains("<td>namespace team</td>"), "{page}");
}

#[test]
fn binpack_by_nodes_can_cost_a_card() {
    // As above up to web-c: n2 has 100 cores left and n1 150, so that binpack prefers n2 and breaks its free card.
    assert_eq!(held(&gain(full(), 50, ScoringStrategy::Binpack)), (4, 3));
}

#[test]
fn whole_cards_free_nothing() {
    for order in [ScoringStrategy::Binpack, ScoringStrategy::Lookahead] {
        let gain = gain(full(), 100, order);
        assert_eq!(held(&gain), (4, 4));
        assert!(gain.workloads.iter().all(|one| one.moved == one.pods));
    }
}

#[test]
fn what_is_left_over_is_fragmented() {
    // Sixty of each card: no two fit together, four cards stay held, and 40 of each is of use to nobody.
    let gain = gain(full(), 60, ScoringStrategy::Lookahead);
    assert_eq!(held(&gain), (4, 4));
    assert!((gain.after.idle - 1.6).abs() < 1e-9 && (gain.after.fragmented - 1.6).abs() < 1e-9, "{gain:?}");
}

#[test]
fn a_pod_of_several_cards_keeps_whole_cards() {
    let items =
        vec![node("n1"), node("n2"), pod("big-0", "big", Some("n1"), 2), pod("one-0", "one", Some("n2"), 1)];
    let gain = gain(items, 50, ScoringStrategy::Lookahead);
    assert_eq!(held(&gain), (3, 3));
    assert_eq!(gain.workloads[0].becomes.as_deref(), Some("200 cores and 80 blocks"));
}

#[test]
fn a_waiting_pod_starts_on_what_was_freed() {
    let mut items = full();
    items.extend((0..5).map(|n| pod(&format!("wait-{n}"), "wait", None, 1)));
    let half = gain(items.clone(), 50, ScoringStrategy::Lookahead);
    assert_eq!(half.waiting, (5, 4));
    assert_eq!(gain(items, 100, ScoringStrategy::Lookahead).waiting, (5, 0));
}

/// By hand: web moves into halves of two cards and train, of another project, stays; three of the four cards of n1 and n2 were held
/// by web, one and a half are then, so that one is free: a waiting legacy pod of one card starts there, and one of two cards does not.
#[test]
fn a_waiting_legacy_pod_starts_on_whole_cards_that_were_freed() {
    let policies = "\
apiVersion: gpu-migrate.io/v1alpha1
kind: GPUMigration
metadata: {name: p}
spec: {project: p, convert: {coresPerCard: 50, blocksPerCard: 20}}
---
apiVersion: v1
kind: Namespace
metadata: {name: team, labels: {gpu-migrate.io/opt-in: \"true\", gpu-migrate.io/project: p}}
";
    let other = |mut pod: Value| {
        pod["metadata"]["labels"] = json!({"gpu-migrate.io/project": "other"});
        pod
    };
    let waiting = |cards: u32| {
        let mut items = full();
        let train = items.pop().unwrap();
        items.extend([other(train), other(pod("wait-0", "wait", None, cards))]);
        let snapshot = snapshot(items);
        let plan = Plan::of_file(PolicyFile::parse(policies).unwrap(), &snapshot).unwrap();
        let gain = migrate(&snapshot, &plan, ScoringStrategy::Lookahead).unwrap();
        assert_eq!(held(&gain), (4, 3));
        gain.waiting
    };
    assert_eq!(waiting(1), (1, 1));
    assert_eq!(waiting(2), (1, 0));
}

#[test]
fn one_ratio_for_all_gives_a_part_of_the_card_that_a_pod_has() {
    let mut large = node("n2");
    large["metadata"]["labels"]["nvidia.com/gpu.product"] = json!("A100");
    large["metadata"]["labels"]["nvidia.com/gpu.memory"] = json!("81920");
    let items = vec![node("n1"), large, pod("a-0", "a", Some("n1"), 1), pod("b-0", "b", Some("n2"), 1)];
    let gain = gain(items, 50, ScoringStrategy::Lookahead);
    let becomes = gain.workloads.iter().map(|one| one.becomes.as_deref().unwrap()).collect::<Vec<_>>();
    assert_eq!(becomes, ["50 cores and 20 blocks", "50 cores and 160 blocks"]);
}

#[test]
fn what_stays_says_why() {
    let policies = "\
apiVersion: gpu-migrate.io/v1alpha1
kind: GPUMigration
metadata: {name: p}
spec:
  project: p
  convert: {coresPerCard: 50, blocksPerCard: 41}
  rollout: {percent: 0}
---
apiVersion: v1
kind: Namespace
metadata: {name: team, labels: {gpu-migrate.io/opt-in: \"true\", gpu-migrate.io/project: p}}
";
    let mut items = full();
    let mut aside = pod("aside-0", "aside", None, 1);
    aside["metadata"]["labels"] = json!({"gpu-migrate.io/opt-out": "true"});
    aside["spec"]["nodeName"] = json!("n3");
    items.extend([node("n3"), aside]);
    let snapshot = snapshot(items);
    let plan = Plan::of_file(PolicyFile::parse(policies).unwrap(), &snapshot).unwrap();
    let gain = migrate(&snapshot, &plan, ScoringStrategy::Binpack).unwrap();
    // 41 blocks are more than a card has: nobody moves, nothing changes.
    assert_eq!(held(&gain), (5, 5));
    let stays: Vec<&String> = gain.workloads.iter().flat_map(|one| one.stays.keys()).collect();
    assert_eq!(stays[0], "left alone: it is opted out");
    assert_eq!(
        stays[1],
        "fits on none of 3 nodes as a shared pod: 3 × pod asks for more than the node's cards have"
    );
    let text = report::table(&snapshot, &[gain]);
    assert!(text.contains("team StatefulSet/web: fits on none of 3 nodes"), "{text}");
}

#[test]
fn selectors_hold_for_moved_pods() {
    let mut items = full();
    for item in items.iter_mut().filter(|item| item["metadata"]["name"] == "web-a") {
        item["spec"]["nodeSelector"] = json!({"disk": "n1"});
    }
    // web-a may not fill the half card on n2, and stays; web-b fills it, and web-c joins web-a.
    assert_eq!(held(&gain(items, 50, ScoringStrategy::Lookahead)), (4, 2));
}

#[test]
fn shares_that_run_already_count() {
    let mut items = vec![node("n1")];
    let mut share = pod("share-0", "share", Some("n1"), 0);
    share["spec"]["containers"][0]["resources"]["limits"] =
        json!({"tencent.com/vcuda-core": "50", "tencent.com/vcuda-memory": "20"});
    share["metadata"]["annotations"] = json!({"tencent.com/predicate-gpu-idx-0": "1"});
    items.extend([share, pod("web-a", "web", Some("n1"), 1)]);
    assert_eq!(held(&gain(items, 50, ScoringStrategy::Lookahead)), (2, 1));
}

#[test]
fn faults_name_the_object() {
    let parse = |value: Value| Snapshot::read(value.to_string().as_bytes(), &Dialect::default());
    let error = |value| parse(value).map(drop).unwrap_err();
    assert!(matches!(error(json!({"kind": "Pod"})), SnapshotError::Json(_)));
    let mut broken = pod("bad", "o", None, 1);
    broken["spec"]["containers"] = json!("none");
    let text = error(json!({"items": [broken]})).to_string();
    assert!(text.starts_with("Pod bad: ") && text.contains("none"), "{text}");
    let text = error(json!({"items": [{"kind": "Node", "metadata": {"name": "n"}}]})).to_string();
    assert!(text.contains("no node has cards: 1 nodes"), "{text}");
}

#[test]
fn blocks_can_be_given() {
    let snapshot = snapshot(full());
    let plan = Plan::of_ratio(Cores(50), Some(Blocks(10)), &snapshot).unwrap();
    let gain = migrate(&snapshot, &plan, ScoringStrategy::Lookahead).unwrap();
    assert_eq!(gain.workloads[0].becomes.as_deref(), Some("50 cores and 10 blocks"));
}

/// A pod with shares of another system.
fn foreign(name: &str, node: Option<&str>, limits: Value) -> Value {
    let mut pod = pod(name, name, node, 0);
    pod["spec"]["containers"][0]["resources"]["limits"] = limits;
    pod
}

/// By hand: two pods of HAMi with half a card each are on one card of n1; web holds the other, and half of it afterwards, on the same
/// card as nothing else. They are no legacy pods: they neither hold two cards nor move nor wait for one.
#[test]
fn pods_with_shares_of_another_system_hold_shares_and_do_not_move() {
    let half = || json!({"nvidia.com/gpu": "1", "nvidia.com/gpumem": "5120", "nvidia.com/gpucores": "50"});
    let items = vec![
        node("n1"),
        foreign("hami-a", Some("n1"), half()),
        foreign("hami-b", Some("n1"), half()),
        foreign("hami-c", None, half()),
        foreign("volcano", None, json!({"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "1024"})),
        pod("web-a", "web", Some("n1"), 1),
    ];
    let gain = gain(items, 50, ScoringStrategy::Lookahead);
    assert_eq!((held(&gain), gain.waiting), ((2, 2), (0, 0)));
    assert!((gain.before.idle, gain.after.idle) == (0.0, 0.5), "{gain:?}");
    let names = gain.workloads.iter().map(|one| one.name.as_str()).collect::<Vec<_>>();
    assert_eq!(names, ["StatefulSet/web"]);
    assert!(
        gain.notes.iter().any(|note| note.starts_with("2 pods have shares of HAMi: ")),
        "{:?}",
        gain.notes
    );
}

/// A policy that converts to another system's form frees cards as one to ours does.
#[test]
fn a_plan_for_another_system_moves_pods_too() {
    let policies = |target: &str| {
        format!(
            "\
apiVersion: gpu-migrate.io/v1alpha1
kind: GPUMigration
metadata: {{name: p}}
spec: {{project: p, convert: {{coresPerCard: 50, blocksPerCard: 20, target: {target}}}}}
---
apiVersion: v1
kind: Namespace
metadata: {{name: team, labels: {{gpu-migrate.io/opt-in: \"true\", gpu-migrate.io/project: p}}}}
"
        )
    };
    for target in ["gpu-manager", "hami", "vgpu-manager", "volcano", "koordinator", "kai", "qgpu"] {
        let snapshot = snapshot(full());
        let plan = Plan::of_file(PolicyFile::parse(&policies(target)).unwrap(), &snapshot).unwrap();
        let gain = migrate(&snapshot, &plan, ScoringStrategy::Lookahead).unwrap();
        assert_eq!(held(&gain), (4, 2), "{target}");
        assert_eq!(gain.workloads[0].becomes.as_deref(), Some("50 cores and 20 blocks"), "{target}");
    }
}

/// Equal pods are read once, whatever their names, nodes and cards.
#[test]
fn the_pods_of_a_workload_are_kept_once() {
    let mut items = vec![node("n1"), node("n2")];
    items.extend((0..1000).map(|n| {
        let mut pod = pod(&format!("web-{n}"), "web", Some("n1"), 1);
        pod["metadata"]["managedFields"] = json!([{"manager": n.to_string()}]);
        pod["spec"]["volumes"] = json!([{"name": format!("kube-api-access-{n}")}]);
        pod["metadata"]["annotations"] = json!({"gpu-migrate.io/gpu-idx-main": n.to_string()});
        pod
    }));
    let snapshot = snapshot(items);
    let templates =
        snapshot.pods.iter().map(|pod| pod.template.number).collect::<std::collections::BTreeSet<_>>();
    assert_eq!((snapshot.pods.len(), templates.len()), (1000, 1));
}
