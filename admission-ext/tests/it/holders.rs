//! What node agents publish, counted once and counted right.

use std::sync::Arc;

use gpu_migrate_admission_ext::engine::Engine;
use gpu_migrate_admission_ext::state::Cluster;
use gpu_migrate_model::card::CardState;
use serde_json::{Value, json};

use crate::common::*;

fn left(engine: &Engine) -> Vec<(u32, u32)> {
    let of = |card: &gpu_migrate_model::card::CardView| (card.cores_left.0, card.blocks_left.0);
    engine.read(|cluster| cluster.node("a").unwrap().occupancy.cards.iter().map(of).collect())
}

fn states(engine: &Engine) -> Vec<CardState> {
    engine.read(|cluster| cluster.node("a").unwrap().occupancy.cards.iter().map(|card| card.state).collect())
}

fn stand_in(number: u32, cores: u32, blocks: u32) -> Value {
    json!({"uid": format!("?{number}"), "container": "?", "cores": cores, "blocks": blocks})
}

/// Between Allocate and PreStartContainer the agent knows device IDs and not yet whose they are.
#[test]
fn a_stand_in_is_the_pod_that_waits_for_its_devices() {
    let of_another = json!({"uid": "?9", "container": "?", "cores": 60, "blocks": 0, "namespace": "default", "pod": "other"});
    let s = || bound(shared("s", &[(60, 4)]), "a", "0");
    let table = [
        ("both halves", vec![stand_in(3, 60, 0), stand_in(4, 0, 4)], (40, 12), CardState::Shared),
        ("the cores alone", vec![stand_in(3, 60, 0)], (40, 12), CardState::Shared),
        ("the whole", vec![stand_in(3, 60, 4)], (40, 12), CardState::Shared),
        ("another size", vec![stand_in(3, 30, 0)], (10, 12), CardState::Shared),
        ("two of one size", vec![stand_in(3, 60, 0), stand_in(5, 60, 0)], (0, 0), CardState::Disputed),
        ("another pod's", vec![of_another], (0, 0), CardState::Disputed),
    ];
    for (what, holders, expected, state) in table {
        let holders: Vec<_> = holders.into_iter().map(|holder| (0, holder)).collect();
        let engine = engine(&[node("a", 1, 16), shadow("a", 1, 16, &holders), s()]);
        assert_eq!((left(&engine)[0], states(&engine)[0]), (expected, state), "{what}");
    }
}

#[test]
fn a_stand_in_of_whole_cards_is_the_legacy_pod_whose_card_is_not_known() {
    let unknown = |number: u32| json!({"uid": format!("?{number}"), "container": "?"});
    let l = || bound(legacy("l", 1), "a", "");
    let fits = |engine: &Arc<Engine>, cards| !passing(engine, &legacy("p", cards), &["a"]).is_empty();
    let one = engine(&[node("a", 3, 16), shadow("a", 3, 16, &[(0, unknown(1))]), l()]);
    assert!(fits(&one, 2) && !fits(&one, 3));
    let two = engine(&[node("a", 3, 16), shadow("a", 3, 16, &[(0, unknown(1)), (1, unknown(2))]), l()]);
    assert!(fits(&two, 1) && !fits(&two, 2), "the second is somebody else's");
}

#[test]
fn of_a_share_whose_cores_alone_are_published_the_memory_counts_too() {
    let holder = json!({"uid": "uid-s", "container": "c0", "cores": 60, "blocks": 0});
    let items =
        [node("a", 1, 16), shadow("a", 1, 16, &[(0, holder)]), bound(shared("s", &[(60, 12)]), "a", "0")];
    let engine = engine(&items);
    assert_eq!(left(&engine), [(40, 4)]);
    assert!(passing(&engine, &shared("p", &[(10, 5)]), &["a"]).is_empty());
}

/// An agent that does not serve, a second plugin that bypasses it, or shares that cannot be limited: what is there stays, no share comes.
#[test]
fn a_node_whose_agent_is_not_in_charge_takes_no_new_shares() {
    for (type_, status, takes) in [
        ("Ready", "True", true),
        ("Ready", "False", false),
        ("PluginConflict", "False", true),
        ("PluginConflict", "True", false),
        ("IsolationReady", "True", true),
        ("IsolationReady", "False", false),
    ] {
        let mut published = shadow("a", 2, 16, &[]);
        published["status"]["conditions"] = json!([{"type": type_, "status": status, "reason": "R", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z"}]);
        let engine = engine(&[node("a", 2, 16), published]);
        assert_eq!(!passing(&engine, &shared("s", &[(10, 1)]), &["a"]).is_empty(), takes, "{type_}={status}");
        assert_eq!(passing(&engine, &legacy("l", 2), &["a"]), ["a"], "{type_}={status}");
    }
}

#[test]
fn the_shadow_of_a_node_that_was_replaced_is_not_the_new_ones() {
    let shadow_of = |uid: &str| {
        let mut published = shadow("a", 4, 16, &[]);
        published["metadata"]["ownerReferences"] =
            json!([{"apiVersion": "v1", "kind": "Node", "name": "a", "uid": uid}]);
        published
    };
    // The Node's UID is its name.
    for (owner, cards) in [("a", 4), ("former", 2)] {
        let engine = engine(&[node("a", 2, 16), shadow_of(owner)]);
        assert_eq!(left(&engine).len(), cards, "{owner}");
    }
}

#[test]
fn names_of_nodes_that_come_and_go_leave_nothing_behind() {
    let engine = engine(&[node("a", 2, 16)]);
    for at in 0..1_000 {
        let name = format!("autoscaled-{at}");
        let pod = bound(shared("s", &[(10, 1)]), &name, "0");
        engine.set_node(&name, facts_of_node(&node(&name, 2, 16)));
        engine.set_pod(facts(&pod));
        // In either order.
        if at % 2 == 0 {
            engine.remove_pod("uid-s");
            engine.remove_node(&name);
        } else {
            engine.remove_node(&name);
            engine.remove_pod("uid-s");
        }
        engine.remove_node("never-seen");
        engine.remove_shadow("never-seen");
    }
    assert!(engine.read(Cluster::node_id_count) < 4);
    assert_eq!(passing(&engine, &shared("p", &[(100, 0)]), &["a"]), ["a"]);
}
