//! The verbs as tables: what fits where, why not, and on which cards.

use std::sync::Arc;

use gpu_migrate_admission_ext::api::Memory;
use gpu_migrate_admission_ext::engine::{Engine, Leads, Settings, machine_clock};
use gpu_migrate_admission_ext::metrics::Metrics;
use gpu_migrate_admission_ext::state::node::ShadowFacts;
use gpu_migrate_model::score::ScoringStrategy;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};

use crate::common::*;

#[tokio::test]
async fn shared_pods_fill_a_card_before_they_open_the_next() {
    let pods: Vec<_> = (0..4).map(|at| shared(&format!("p{at}"), &[(40, 4)])).collect();
    let mut items = vec![node("a", 2, 16)];
    items.extend(pods.iter().cloned());
    let engine = engine(&items);
    for pod in &pods {
        assert_eq!(passing(&engine, pod, &["a"]), ["a"]);
        assert_eq!(bind(&engine, pod, "a").await, "");
    }
    let placed: Vec<_> = (0..4).map(|at| cards(&engine, &format!("p{at}"))).collect();
    assert_eq!(placed, [[0], [0], [1], [1]]);
    let fifth = shared("p5", &[(40, 4)]);
    let answer = filter(&engine, &fifth, &["a"]);
    assert_eq!(
        answer["FailedNodes"]["a"],
        "no single card has 40 cores and 4 blocks free (largest free share: 20 cores and 8 blocks); 2 of 2 cards take shares"
    );
}

#[tokio::test]
async fn a_share_never_goes_on_a_card_that_a_legacy_pod_holds() {
    let holder = |uid: &str| json!({"uid": uid, "container": "main"});
    let pods: Vec<_> = (0..3).map(|at| shared(&format!("p{at}"), &[(100, 0)])).collect();
    let mut items = vec![
        node("a", 4, 16),
        shadow("a", 4, 16, &[(0, holder("uid-l")), (2, holder("uid-l"))]),
        bound(legacy("l", 2), "a", ""),
    ];
    items.extend(pods.iter().cloned());
    let engine = engine(&items);
    assert_eq!(bind(&engine, &pods[0], "a").await, "");
    assert_eq!(bind(&engine, &pods[1], "a").await, "");
    let mut both = [cards(&engine, "p0"), cards(&engine, "p1")].concat();
    both.sort_unstable();
    assert_eq!(both, [1, 3]);
    let answer = filter(&engine, &pods[2], &["a"]);
    assert_eq!(answer["FailedNodes"]["a"], "0 cards are free, 1 needed");
    assert!(bind(&engine, &pods[2], "a").await.contains("0 cards are free"));
}

#[test]
fn a_legacy_pod_whose_card_is_not_known_counts_against_the_free_cards() {
    // Two of four cards are somebody's; nobody knows which.
    let engine = engine(&[
        node("a", 4, 16),
        shadow("a", 4, 16, &[]),
        bound(legacy("l", 2), "a", ""),
        bound(shared("s", &[(30, 2)]), "a", "3"),
    ]);
    let fits = |pod: &serde_json::Value| !passing(&engine, pod, &["a"]).is_empty();
    assert!(fits(&shared("one", &[(100, 0)])), "one card of the three is spare");
    assert!(!fits(&shared("two", &[(200, 0)])));
    assert!(fits(&legacy("l2", 1)));
    assert!(!fits(&legacy("l3", 2)));
    assert!(fits(&shared("share", &[(60, 2)])), "the card that is shared already is not in question");
    assert!(!fits(&shared("both", &[(80, 2), (80, 2)])), "only one further card may be opened");
}

#[test]
fn what_no_departure_can_help_is_unresolvable() {
    let engine = engine(&[node("a", 2, 16), node("none", 0, 0), bound(shared("s", &[(100, 0)]), "a", "0")]);
    let nodes = ["a", "none", "elsewhere"];
    let table = [
        (shared("s1", &[(200, 0)]), "FailedNodes", "a"),
        (shared("s2", &[(300, 0)]), "FailedAndUnresolvableNodes", "a"),
        (shared("s3", &[(50, 17)]), "FailedAndUnresolvableNodes", "a"),
        (shared("s4", &[(50, 4)]), "FailedAndUnresolvableNodes", "none"),
        (legacy("l1", 2), "FailedNodes", "a"),
        (legacy("l2", 3), "FailedAndUnresolvableNodes", "a"),
        (legacy("l3", 1), "FailedAndUnresolvableNodes", "none"),
        (shared("s5", &[(50, 4)]), "FailedNodes", "elsewhere"),
        (shared("half", &[(50, 0)]), "FailedAndUnresolvableNodes", "a"),
    ];
    for (pod, list, on) in table {
        let answer = filter(&engine, &pod, &nodes);
        assert!(answer[list].get(on).is_some(), "{}: {answer}", pod["metadata"]["name"]);
    }
}

#[test]
fn a_pod_that_makes_no_sense_is_told_why() {
    let engine = engine(&[node("a", 2, 16)]);
    let mut gang = shared("g", &[(50, 4)]);
    gang["metadata"]["annotations"]["scheduling.k8s.io/group-pod-num"] = json!("2");
    let mut many = shared("m", &[(50, 4)]);
    many["metadata"]["annotations"] =
        json!({"scheduling.k8s.io/group-name": "g", "scheduling.k8s.io/group-pod-num": "10001"});
    let mut kueue = shared("k", &[(50, 4)]);
    kueue["metadata"]["labels"] = json!({"kueue.x-k8s.io/pod-group-name": "g"});
    let mut order = shared("o", &[(50, 4)]);
    order["metadata"]["annotations"]["gpu-migrate.io/card-order"] = json!("tight");
    let table = [
        (gang, "group-pod-num: expected the name of the group beside it"),
        (many, "\"10001\": expected a number from 1 to 10000"),
        (kueue, "pod-group-total-count: expected the number of the group's pods"),
        (order, "\"tight\": expected binpack or spread"),
        (shared("x", &[(150, 4)]), "multiple of 100"),
    ];
    for (pod, expected) in table {
        let answer = filter(&engine, &pod, &["a"]);
        let reason = answer["FailedAndUnresolvableNodes"]["a"].as_str().unwrap();
        assert!(reason.contains(expected), "{reason}");
    }
}

#[test]
fn the_fullest_node_that_fits_scores_best_and_spread_is_the_reverse() {
    let items = [
        node("empty", 2, 16),
        node("half", 2, 16),
        node("busy", 2, 16),
        bound(shared("h", &[(100, 0)]), "half", "0"),
        bound(shared("b", &[(100, 0)]), "busy", "0"),
        bound(shared("c", &[(40, 2)]), "busy", "1"),
    ];
    let pod = shared("p", &[(20, 2)]);
    let scores = |engine| prioritize(engine, &pod, &["empty", "half", "busy"]);
    let settings = Settings { scoring: ScoringStrategy::Binpack, ..Default::default() };
    let binpack = engine_with(Arc::new(Memory::default()), settings, &items);
    let expected =
        json!([{"Host": "empty", "Score": 0}, {"Host": "half", "Score": 6}, {"Host": "busy", "Score": 10}]);
    assert_eq!(scores(&binpack), expected);
    let settings = Settings { scoring: ScoringStrategy::Spread, ..Default::default() };
    let spread = engine_with(Arc::new(Memory::default()), settings, &items);
    assert_eq!(scores(&spread)[0], json!({"Host": "empty", "Score": 10}));
}

#[test]
fn constraints_choose_among_cards() {
    let mut shadow = shadow("a", 3, 16, &[]);
    shadow["status"]["cards"][1]["model"] = json!("NVIDIA T4");
    shadow["status"]["cards"][2]["health"] = json!("Unhealthy");
    let engine = engine(&[node("a", 3, 16), shadow]);
    let fits = |key: &str, value: &str, cores: u32| {
        let mut pod = shared("p", &[(cores, 2)]);
        pod["metadata"]["annotations"][key] = json!(value);
        !passing(&engine, &pod, &["a"]).is_empty()
    };
    assert!(fits("gpu-migrate.io/card-model", "NVIDIA T4", 100));
    assert!(fits("gpu-migrate.io/card-model", "H100,NVIDIA-T4", 100), "as the node's label writes it");
    assert!(!fits("gpu-migrate.io/card-model", "NVIDIA T4", 200));
    assert!(!fits("gpu-migrate.io/card-model", "H100", 50));
    assert!(!fits("gpu-migrate.io/card-include", "GPU-a-2", 50), "unhealthy");
    assert!(fits("gpu-migrate.io/card-exclude", "GPU-a-0", 50));
    assert!(!fits("gpu-migrate.io/card-exclude", "GPU-a-0,GPU-a-1", 50));
    assert!(fits("gpu-migrate.io/card-include", "GPU-a-1, GPU-a-2", 100));
    assert!(!fits("gpu-migrate.io/card-include", "GPU-a-1, GPU-a-2", 200));
}

#[tokio::test]
async fn constraints_hold_for_the_cards_that_bind_chooses() {
    let mut published = shadow("a", 4, 16, &[]);
    for card in 0..4 {
        published["status"]["cards"][card]["numa"] = json!(card / 2);
    }
    let with = |name: &str, cores: u32, key: &str, value: &str| {
        let mut pod = shared(name, &[(cores, 2)]);
        pod["metadata"]["annotations"][key] = json!(value);
        pod
    };
    let pods = [
        (with("included", 30, "gpu-migrate.io/card-include", "GPU-a-1"), vec![1]),
        // Card 0 is free, and on the same NUMA node as one that is not.
        (with("together", 200, "gpu-migrate.io/same-numa", "true"), vec![2, 3]),
        (with("excluded", 10, "gpu-migrate.io/card-exclude", "GPU-a-1"), vec![0]),
        (with("spread", 10, "gpu-migrate.io/card-order", "spread"), vec![0]),
        (with("binpack", 10, "gpu-migrate.io/card-order", "binpack"), vec![1]),
    ];
    let mut items = vec![node("a", 4, 16), published];
    items.extend(pods.iter().map(|(pod, _)| pod.clone()));
    let engine = engine(&items);
    for (pod, expected) in &pods {
        assert_eq!(bind(&engine, pod, "a").await, "");
        assert_eq!(cards(&engine, pod["metadata"]["name"].as_str().unwrap()), *expected, "{pod}");
    }
    let apart = with("apart", 200, "gpu-migrate.io/same-numa", "true");
    let answer = filter(&engine, &apart, &["a"]);
    assert!(answer["FailedNodes"].get("a").is_some(), "{answer}");
}

#[test]
fn a_cold_cache_is_an_error_and_never_no_nodes() {
    let engine = engine(&[node("a", 2, 16)]);
    engine.set_synced(false);
    let answer = filter(&engine, &shared("p", &[(50, 4)]), &["a"]);
    assert!(answer["Error"].as_str().unwrap().contains("not seen the whole cluster"), "{answer}");
    assert_eq!(answer["NodeNames"], json!(null));
    engine.set_synced(true);
    engine.set_leading(Leads::Not);
    let answer = filter(&engine, &shared("p", &[(50, 4)]), &["a"]);
    assert!(answer["Error"].as_str().unwrap().contains("not the leader"), "{answer}");
}

/// Beside a scheduler that does not lead nothing is wrong, although it answers nothing.
#[test]
fn a_standby_beside_its_scheduler_is_well_until_it_is_called() {
    for beside_scheduler in [true, false] {
        let settings = Settings { beside_scheduler, ..Settings::default() };
        let engine = engine_with(Arc::new(Memory::default()), settings, &[node("a", 2, 16)]);
        engine.set_synced(false);
        engine.set_leading(Leads::Not);
        assert_eq!(engine.unwell().is_none(), beside_scheduler);
        assert_eq!(engine.metrics().ready.get(), i64::from(beside_scheduler));
        assert!(filter(&engine, &shared("p", &[(50, 4)]), &["a"])["Error"] != "");
        engine.set_leading(Leads::Alone);
        assert!(engine.unwell().is_some(), "it has yet to list the cluster");
    }
}

#[test]
fn a_template_node_that_does_not_exist_is_judged_by_its_capacity() {
    let engine = engine(&[]);
    let whole = |pod| {
        let body = json!({"Pod": pod, "Nodes": {"metadata": {}, "items": [node("template-0", 2, 16)]}, "NodeNames": null});
        let reply = engine.filter("filter-dryrun", &serde_json::to_vec(&body).unwrap());
        serde_json::from_slice::<serde_json::Value>(&reply.body).unwrap()
    };
    let answer = whole(shared("p", &[(200, 32)]));
    assert_eq!(answer["Nodes"]["items"][0], node("template-0", 2, 16), "handed back as it came");
    let answer = whole(shared("p", &[(300, 0)]));
    assert!(answer["FailedAndUnresolvableNodes"].get("template-0").is_some(), "{answer}");
}

#[tokio::test]
async fn binding_twice_is_binding_once_and_elsewhere_is_refused() {
    let pod = shared("p", &[(50, 4)]);
    let engine = engine(&[node("a", 2, 16), node("b", 2, 16), pod.clone()]);
    assert_eq!(bind(&engine, &pod, "a").await, "");
    assert_eq!(bind(&engine, &pod, "a").await, "");
    assert!(bind(&engine, &pod, "b").await.contains("already bound to node a"));
    let stranger = shared("stranger", &[(50, 4)]);
    assert!(bind(&engine, &stranger, "a").await.contains("does not exist any more"));
    assert!(bind(&engine, &shared("x", &[(1, 1)]), "").await.contains("does not exist"));
}

/// The node gave a legacy pod the card that a share had just been assigned: the share will get another card, which is kept for it.
#[tokio::test]
async fn a_share_that_lost_its_card_to_a_legacy_pod_keeps_one_card_closed() {
    let (moved, late) = (shared("moved", &[(70, 4)]), shared("late", &[(80, 4)]));
    let engine = engine(&[node("a", 2, 16), shadow("a", 2, 16, &[]), moved.clone(), late.clone()]);
    assert_eq!(bind(&engine, &moved, "a").await, "");
    let (lost, other) = (cards(&engine, "moved")[0] as usize, 1 - cards(&engine, "moved")[0] as usize);
    let told = |holders: &[(usize, serde_json::Value)]| {
        let status = shadow("a", 2, 16, holders)["status"].clone();
        engine.set_shadow("a", ShadowFacts::read(&serde_json::from_value(status).unwrap()));
    };
    let legacy = (lost, json!({"uid": "uid-l", "container": "main"}));
    told(std::slice::from_ref(&legacy));
    assert!(passing(&engine, &late, &["a"]).is_empty(), "the last free card is the other's");

    let found = (other, json!({"uid": "uid-moved", "container": "main", "cores": 70, "blocks": 4}));
    told(&[legacy, found]);
    assert!(passing(&engine, &late, &["a"]).is_empty());
    assert_eq!(passing(&engine, &shared("small", &[(30, 4)]), &["a"]), ["a"], "beside it is room");
}

fn in_pool(mut node: serde_json::Value, pool: &str, product: &str) -> serde_json::Value {
    node["metadata"]["labels"] = json!({"gpu-migrate.io/pool": pool, "nvidia.com/gpu.product": product});
    node
}

fn quotas(quotas: serde_json::Value) -> serde_json::Value {
    json!({"kind": "GPUConfig", "apiVersion": "gpu-migrate.io/v1alpha1", "metadata": {"name": "cluster"}, "spec": {"quotas": quotas}})
}

#[tokio::test]
async fn a_quota_limits_a_namespace_in_a_pool_or_on_a_model() {
    let pods: Vec<_> = (0..4).map(|at| shared(&format!("p{at}"), &[(50, 4)])).collect();
    let mut items = vec![
        quotas(json!([{"namespace": "default", "pool": "x", "cores": 100},
                      {"namespace": "default", "model": "Tesla T4", "blocks": 6}, {"namespace": "other", "cores": 1}])),
        in_pool(node("x1", 4, 16), "x", "A100"),
        in_pool(node("x2", 4, 16), "x", "A100"),
        in_pool(node("t", 4, 16), "y", "Tesla-T4"),
        in_pool(node("y", 4, 16), "y", "A100"),
        bound(shared("old", &[(30, 1)]), "x1", "0"),
        bound(legacy("l", 2), "x1", ""),
    ];
    items.extend(pods.iter().cloned());
    let engine = engine(&items);
    let nodes = ["x1", "x2", "t", "y"];
    assert_eq!(passing(&engine, &pods[0], &nodes), nodes);
    assert_eq!(bind(&engine, &pods[0], "x2").await, "");
    let answer = filter(&engine, &pods[1], &nodes);
    assert_eq!(answer["NodeNames"], json!(["t", "y"]));
    let reason = "quota of namespace default in pool x: 80 of 100 cores used, 50 asked";
    assert_eq!(answer["FailedNodes"], json!({"x1": reason, "x2": reason}));
    assert_eq!(bind(&engine, &pods[1], "x1").await, reason);
    assert_eq!(bind(&engine, &pods[1], "t").await, "");
    let answer = filter(&engine, &pods[2], &["t", "y"]);
    assert_eq!(
        answer["FailedNodes"]["t"],
        "quota of namespace default on Tesla T4: 4 of 6 blocks used, 4 asked"
    );
    // A victim of the same namespace gives its part back, one of another does not.
    let victims = json!({"x1": {"Pods": [{"UID": "uid-old"}], "NumPDBViolations": 0}});
    assert_eq!(preempt(&engine, &pods[3], victims.clone())["x1"], victims["x1"]);
    let none = json!({"x1": {"Pods": [{"UID": "uid-l"}], "NumPDBViolations": 0}});
    assert_eq!(preempt(&engine, &pods[3], none), json!({}));
    // What goes is given back, by deltas.
    engine.remove_pod("uid-old");
    assert_eq!(passing(&engine, &pods[3], &["x1"]), ["x1"]);
    engine.set_config(Default::default());
    assert_eq!(passing(&engine, &pods[2], &nodes), nodes);
}

/// A whole card has all of its memory, whether the pod asks for it or not.
#[tokio::test]
async fn a_quota_of_memory_counts_whole_cards() {
    let pods: Vec<_> = (0..2).map(|at| shared(&format!("p{at}"), &[(100, 0)])).collect();
    let mut items = vec![quotas(json!([{"namespace": "default", "blocks": 20}])), node("a", 4, 16)];
    items.extend(pods.iter().cloned());
    let engine = engine(&items);
    let two = filter(&engine, &shared("two", &[(200, 0)]), &["a"]);
    assert_eq!(two["FailedNodes"]["a"], "quota of namespace default: 0 of 20 blocks used, 32 asked");
    assert_eq!(bind(&engine, &pods[0], "a").await, "");
    let reason = "quota of namespace default: 16 of 20 blocks used, 16 asked";
    assert_eq!(filter(&engine, &pods[1], &["a"])["FailedNodes"]["a"], reason);
    assert_eq!(bind(&engine, &pods[1], "a").await, reason);
    assert_eq!(passing(&engine, &shared("share", &[(50, 4)]), &["a"]), ["a"]);
}

#[test]
fn reserved_cards_are_for_legacy_pods_alone() {
    let config = json!({"kind": "GPUConfig", "metadata": {"name": "cluster"},
                        "spec": {"nodePools": [{"name": "x", "reservedCards": [0, 2]}]}});
    let engine = engine(&[config, in_pool(node("a", 3, 16), "x", "A100")]);
    let fits = |pod| !passing(&engine, &pod, &["a"]).is_empty();
    assert!(fits(shared("s", &[(100, 0)])));
    assert!(!fits(shared("s", &[(200, 0)])));
    assert!(!fits(shared("s", &[(60, 2), (60, 2)])), "placed for real, as it has two containers");
    assert!(fits(legacy("l", 3)));
    assert!(!fits(legacy("l", 4)));
}

#[test]
fn a_node_on_its_way_to_whole_cards_takes_no_more_shares() {
    let mut leaving = node("a", 3, 16);
    leaving["metadata"]["labels"]["gpu-migrate.io/no-new-shares"] = json!("true");
    let engine = engine(&[leaving, node("b", 3, 16)]);
    assert_eq!(passing(&engine, &shared("s", &[(10, 1)]), &["a", "b"]), ["b"]);
    assert_eq!(passing(&engine, &legacy("l", 1), &["a", "b"]), ["a", "b"]);
}

#[test]
fn a_shadow_that_only_the_operator_wrote_hides_no_card() {
    let shadow = json!({"kind": "GPUShadow", "metadata": {"name": "a"}, "status": {"conditions": []}});
    let engine = engine(&[node("a", 3, 16), shadow]);
    assert_eq!(passing(&engine, &legacy("l", 3), &["a"]), ["a"]);
}

/// gpu-admission's published vector (`pkg/predicate/gpu_predicate_test.go`).
#[tokio::test]
async fn predicates_choose_as_gpu_admission_does() {
    let nodes: Vec<_> = (0..3).map(|at| node(&format!("node{at}"), 2, 4)).collect();
    let vector: [(&[(u32, u32)], &str); 4] = [
        (&[(10, 1), (10, 1)], "node0"),
        (&[(100, 3), (80, 3)], "node1"),
        (&[(200, 10)], "node2"),
        (&[(10, 2)], "node0"),
    ];
    let pods: Vec<_> =
        vector.iter().enumerate().map(|(at, (ask, _))| shared(&format!("p{at}"), ask)).collect();
    for compatible in [true, false] {
        let mut settings = Settings::default();
        settings.rules.whole_card_memory = !compatible;
        let items: Vec<_> = nodes.iter().chain(&pods).cloned().collect();
        let engine = engine_with(Arc::new(Memory::default()), settings, &items);
        for (pod, (ask, expected)) in pods.iter().zip(vector) {
            let body = json!({"Pod": pod, "Nodes": {"metadata": {}, "items": nodes}, "NodeNames": null});
            let reply = engine.predicates(&serde_json::to_vec(&body).unwrap());
            let answer: serde_json::Value = serde_json::from_slice(&reply.body).unwrap();
            let passed = answer["Nodes"]["items"].as_array().unwrap();
            if !compatible && ask == [(200, 10)] {
                assert!(passed.is_empty(), "10 blocks on two cards of 4: checked by default");
                continue;
            }
            assert_eq!(passed.len(), 1, "{ask:?}: {answer}");
            assert_eq!(passed[0]["metadata"]["name"], expected, "{ask:?}");
            assert_eq!(bind(&engine, pod, expected).await, "");
        }
    }
}

#[tokio::test]
async fn by_fragmentation_a_card_that_the_usual_share_still_fits_on_is_spared() {
    // The usual request is 50 cores. Card 0 has 60 left, card 1 has 50: ten more fill card 1 up by binpack, which leaves 40 that
    // nobody asks for; taken off card 0 they leave 50.
    let mut items = vec![
        node("a", 2, 64),
        bound(shared("x", &[(40, 1)]), "a", "0"),
        bound(shared("y", &[(50, 1)]), "a", "1"),
        node("elsewhere", 8, 64),
        shared("p", &[(10, 1)]),
    ];
    items.extend(
        (0..16).map(|at| bound(shared(&format!("u{at}"), &[(50, 1)]), "elsewhere", &(at / 2).to_string())),
    );
    for (order, expected) in [(ScoringStrategy::Binpack, 1), (ScoringStrategy::Fragmentation, 0)] {
        let settings = Settings { scoring: order, ..Settings::default() };
        let engine = engine_with(Arc::new(Memory::default()), settings, &items);
        let pod = shared("p", &[(10, 1)]);
        prioritize(&engine, &pod, &["a", "elsewhere"]);
        assert_eq!(bind(&engine, &pod, "a").await, "");
        assert_eq!(cards(&engine, "p"), [expected], "{order:?}");
    }
}

/// A pod that any card serves leaves the cards of a model that others name, as far as those are going to come.
#[test]
fn by_lookahead_the_cards_that_pods_name_are_left_to_them() {
    let of = |name: &str, model: &str| {
        let mut published = shadow(name, 2, 64, &[]);
        for card in 0..2 {
            published["status"]["cards"][card]["model"] = json!(model);
        }
        [node(name, 2, 64), published]
    };
    let mut items: Vec<_> = of("a", "V100").into_iter().chain(of("b", "T4")).chain(of("c", "T4")).collect();
    items.extend((0..4).map(|at| {
        let mut pod = bound(shared(&format!("u{at}"), &[(50, 1)]), "elsewhere", "0");
        if at == 0 {
            pod["metadata"]["annotations"]["gpu-migrate.io/card-model"] = json!("V100");
        }
        pod
    }));
    let settings = Settings { scoring: ScoringStrategy::Lookahead, ..Settings::default() };
    let metrics = Metrics::register(&mut Registry::default());
    let (engine, _) = Engine::new(Arc::new(Memory::default()), settings, machine_clock(), metrics);
    // Its task runs before the caches are filled, too.
    engine.refresh_scorer();
    fill(&engine, &items);
    let best = |pod| {
        let scores = prioritize(&engine, &pod, &["a", "b", "c"]);
        scores.as_array().unwrap().iter().find(|node| node["Score"] == 10).unwrap()["Host"].clone()
    };
    assert_eq!(best(shared("p", &[(50, 1)])), "b", "of nodes alike the first would be a");
}

/// The scheduler then neither asks for scores nor has scores of its own that count.
#[test]
fn of_the_nodes_that_fit_the_best_alone_is_answered_where_the_pod_prefers_none() {
    let settings = Settings { scoring: ScoringStrategy::Binpack, one_node: true, ..Settings::default() };
    let items = [node("a", 1, 16), node("b", 2, 16), node("c", 1, 16), node("d", 2, 16)];
    let engine = engine_with(Arc::new(Memory::default()), settings, &items);
    engine.set_pod(facts(&bound(shared("s", &[(60, 4)]), "d", "0")));
    let all = ["d", "c", "b", "a"];
    let pod = shared("p", &[(30, 4)]);
    // Of equals that whose name comes first, and the one that prioritize has at the top.
    assert_eq!(passing(&engine, &pod, &all), ["a"]);
    let scores = prioritize(&engine, &pod, &all);
    let top = scores.as_array().unwrap().iter().max_by_key(|it| it["Score"].as_u64()).unwrap();
    assert_eq!(top["Host"], "a");
    // Those that were passed over did not fail.
    let answer = filter(&engine, &pod, &all);
    assert_eq!((&answer["FailedNodes"], &answer["FailedAndUnresolvableNodes"]), (&json!({}), &json!({})));
    for (field, value) in
        [("affinity", json!({"nodeAffinity": {}})), ("topologySpreadConstraints", json!([{"maxSkew": 1}]))]
    {
        let mut choosy = pod.clone();
        choosy["spec"][field] = value;
        assert_eq!(passing(&engine, &choosy, &all), all, "{field}");
    }
    assert_eq!(passing(&engine, &shared("none", &[(300, 0)]), &all), [""; 0]);
}

/// Where NVIDIA's plugin divides cards, a legacy pod asks for parts of them.
#[test]
fn a_card_in_parts_takes_as_many_legacy_pods_as_it_has_parts() {
    let part = |at: u32| {
        let (uid, part) = (format!("uid-l{at}"), format!("GPU-a-0::{at}"));
        (
            0,
            json!({"uid": uid, "container": "main", "namespace": "default", "pod": format!("l{at}"), "parts": [part]}),
        )
    };
    let mut sliced = node("a", 2, 16);
    for amounts in ["capacity", "allocatable"] {
        sliced["status"][amounts]["nvidia.com/gpu"] = json!("8");
    }
    let held: Vec<Value> = (0..4).map(|at| bound(legacy(&format!("l{at}"), 1), "a", "")).collect();
    let published = shadow("a", 2, 16, &[part(0), part(1), part(2), part(3)]);
    let fits = |engine: &Engine, parts: u32| passing(engine, &legacy("p", parts), &["a"]) == ["a"];

    let engine_of = |shadow: &Value| engine(&[&[sliced.clone(), shadow.clone()], &held[..]].concat());
    let engine = engine_of(&published);
    assert!(fits(&engine, 4) && !fits(&engine, 5));
    // Its own holder is gone from the API, but not from the node.
    engine.remove_pod("uid-l0");
    assert!(fits(&engine, 4) && !fits(&engine, 5));
    // A share on the other card leaves none, before the node has withdrawn them.
    assert_eq!(passing(&engine, &shared("s", &[(50, 4)]), &["a"]), ["a"]);
    engine.set_pod(facts(&bound(shared("s", &[(50, 4)]), "a", "1")));
    assert!(!fits(&engine, 1));

    // MIG: to shares the cards are closed, to NVIDIA's plugin they are not.
    let mut mig = published.clone();
    mig["status"]["cards"].as_array_mut().unwrap().iter_mut().for_each(|card| card["mig"] = json!(true));
    let engine = engine_of(&mig);
    assert!(fits(&engine, 4) && !fits(&engine, 5));
    assert_eq!(passing(&engine, &shared("s", &[(50, 4)]), &["a"]), [""; 0]);
}
