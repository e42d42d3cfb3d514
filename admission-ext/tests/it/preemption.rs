//! Preemption: victims that really make room, and the room kept for whom it was made.

use serde_json::{Value, json};

use crate::common::*;

fn of_priority(mut pod: Value, priority: i32) -> Value {
    pod["spec"]["priority"] = json!(priority);
    pod
}

/// `pod` as the scheduler leaves it while its victims end.
fn nominated(mut pod: Value, node: &str) -> Value {
    pod["status"]["nominatedNodeName"] = json!(node);
    pod
}

fn victims(node: &str, names: &[&str]) -> Value {
    let pods: Vec<Value> = names.iter().map(|name| json!({"UID": format!("uid-{name}")})).collect();
    json!({node: {"Pods": pods, "NumPDBViolations": 1}})
}

fn kept(answer: &Value, node: &str) -> Vec<String> {
    let pods = answer[node]["Pods"].as_array().cloned().unwrap_or_default();
    pods.iter().map(|pod| pod["UID"].as_str().unwrap().trim_start_matches("uid-").to_owned()).collect()
}

/// The scheduler's victims are as few as its own rules allow: who is not needed for a card is needed for CPU, memory or a port.
#[test]
fn no_victim_of_the_scheduler_is_spared() {
    let holder = json!({"uid": "uid-l", "container": "main"});
    let items = [
        node("a", 2, 16),
        shadow("a", 2, 16, &[(0, holder)]),
        node("b", 1, 16),
        bound(legacy("l", 1), "a", ""),
        bound(shared("s60", &[(60, 4)]), "a", "1"),
        bound(shared("s30", &[(30, 4)]), "a", "1"),
        bound(shared("t", &[(100, 0)]), "b", "0"),
    ];
    let engine = engine(&items);
    let urgent = |pod| of_priority(pod, 10);
    let all = victims("a", &["l", "s60", "s30"]);
    // `plain` holds no card and is not known here.
    let table = [
        (urgent(shared("p", &[(35, 4)])), all.clone()),
        (urgent(legacy("p", 1)), all.clone()),
        (urgent(shared("p", &[(200, 0)])), all.clone()),
        (urgent(shared("p", &[(5, 4)])), victims("a", &["l", "plain"])),
        (urgent(shared("p", &[(5, 4)])), victims("a", &["plain"])),
    ];
    for (pod, proposed) in table {
        assert_eq!(preempt(&engine, &pod, proposed.clone()), proposed, "{pod}");
    }
    assert_eq!(preempt(&engine, &urgent(shared("p", &[(300, 0)])), all), json!({}), "no departure helps");
    let mut two = victims("a", &["l"]);
    two["b"] = victims("b", &["t"])["b"].clone();
    assert_eq!(preempt(&engine, &urgent(shared("p", &[(100, 0)])), two.clone()), two);
}

#[test]
fn victims_on_different_cards_are_completed_to_a_set_that_frees_one() {
    let on =
        |name: &str, card: &str, priority| bound(of_priority(shared(name, &[(50, 4)]), priority), "a", card);
    let items = [node("a", 2, 16), on("a0", "0", 1), on("b0", "0", 2), on("a1", "1", 1), on("b1", "1", 20)];
    let engine = engine(&items);
    let whole = of_priority(shared("p", &[(100, 0)]), 10);
    let answer = preempt(&engine, &whole, victims("a", &["a0", "a1"]));
    assert_eq!(kept(&answer, "a"), ["a0", "a1", "b0"], "b1 is more important than the pod");
    assert_eq!(answer["a"]["NumPDBViolations"], 2, "a node where the proposal suffices is preferred");

    let small = of_priority(shared("p", &[(60, 4)]), 2);
    assert_eq!(preempt(&engine, &small, victims("a", &["a1"])), json!({}), "b0 is as important");
    // Of two that would do the less important goes.
    let pair = [
        node("a", 2, 16),
        on("x", "0", 1),
        bound(of_priority(shared("y", &[(50, 4)]), 3), "a", "0"),
        bound(of_priority(shared("z", &[(100, 0)]), 2), "a", "1"),
    ];
    let engine = crate::common::engine(&pair);
    let answer = preempt(&engine, &whole, victims("a", &["x"]));
    assert_eq!(kept(&answer, "a"), ["x", "z"]);
    // Of those as important as each other, one beside a victim and not two on another card.
    let half = |name: &str, card: &str| on(name, card, 0);
    let four = [node("a", 2, 16), on("x", "0", -1), half("p0", "0"), half("q0", "1"), half("q1", "1")];
    let answer = preempt(&crate::common::engine(&four), &whole, victims("a", &["x"]));
    assert_eq!(kept(&answer, "a"), ["x", "p0"]);
}

#[tokio::test]
async fn a_card_that_preemption_freed_is_kept_for_the_pod_it_was_freed_for() {
    let urgent = nominated(of_priority(shared("urgent", &[(100, 0)]), 10), "a");
    let low = shared("low", &[(50, 4)]);
    let items = [node("a", 1, 16), node("b", 1, 16), urgent.clone(), low.clone()];
    let engine = engine(&items);
    assert_eq!(passing(&engine, &low, &["a", "b"]), ["b"]);
    assert!(bind(&engine, &low, "a").await.contains("no single card has"));
    assert_eq!(passing(&engine, &urgent, &["a", "b"]), ["a", "b"]);
    assert_eq!(passing(&engine, &of_priority(shared("more", &[(50, 4)]), 11), &["a"]), ["a"]);
    assert_eq!(passing(&engine, &of_priority(shared("equal", &[(50, 4)]), 10), &["a"]), Vec::<String>::new());
    // Nominated elsewhere, then nowhere.
    engine.set_pod(facts(&nominated(urgent.clone(), "b")));
    assert_eq!(passing(&engine, &low, &["a", "b"]), ["a"]);
    engine.remove_pod("uid-urgent");
    assert_eq!(passing(&engine, &low, &["a", "b"]), ["a", "b"]);
}

#[tokio::test]
async fn while_one_victim_ends_the_others_card_is_not_given_away() {
    let mut ending = bound(shared("v", &[(50, 4)]), "a", "0");
    ending["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    let urgent = nominated(of_priority(shared("urgent", &[(100, 0)]), 10), "a");
    let low = shared("low", &[(50, 4)]);
    let engine = engine(&[node("a", 1, 16), ending, urgent.clone(), low.clone()]);
    assert!(passing(&engine, &low, &["a"]).is_empty());
    assert!(!bind(&engine, &low, "a").await.is_empty());
    engine.remove_pod("uid-v");
    assert!(passing(&engine, &low, &["a"]).is_empty());
    assert_eq!(passing(&engine, &urgent, &["a"]), ["a"]);
    assert_eq!(bind(&engine, &urgent, "a").await, "");
}

#[tokio::test]
async fn a_share_beside_a_nominated_pod_goes_on_another_card() {
    let urgent = nominated(of_priority(shared("urgent", &[(60, 4)]), 10), "a");
    let pods = [shared("l0", &[(50, 4)]), shared("l1", &[(60, 4)])];
    let items = [node("a", 2, 16), urgent.clone(), pods[0].clone(), pods[1].clone()];
    let engine = engine(&items);
    assert_eq!(bind(&engine, &pods[0], "a").await, "");
    assert!(!bind(&engine, &pods[1], "a").await.is_empty());
    assert_eq!(bind(&engine, &urgent, "a").await, "");
}
