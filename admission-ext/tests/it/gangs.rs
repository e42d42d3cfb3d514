//! Gangs: all or none, no gang blocks another for ever, and a held bind blocks nobody.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use gpu_migrate_admission_ext::api::{Api, BindFailure, Binding, Found, Memory};
use gpu_migrate_admission_ext::engine::{Engine, Leads, Settings};
use gpu_migrate_admission_ext::metrics::Metrics;
use gpu_migrate_admission_ext::state::pod::PodFacts;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::common::*;

fn member(gang: &str, size: u32, name: &str, share: (u32, u32)) -> Value {
    let mut pod = shared(name, &[share]);
    pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] = json!(gang);
    pod["metadata"]["annotations"]["scheduling.k8s.io/group-pod-num"] = json!(size.to_string());
    pod
}

fn members(gang: &str, size: u32, share: (u32, u32)) -> Vec<Value> {
    (0..size).map(|at| member(gang, size, &format!("{gang}{at}"), share)).collect()
}

fn start(items: &[Value], gang_timeout: u64) -> Arc<Engine> {
    let settings = Settings { gang_timeout: Duration::from_millis(gang_timeout), ..Settings::default() };
    engine_at(runtime_clock(), Arc::new(Memory::default()) as Arc<dyn Api>, settings, items)
}

fn binding(engine: &Arc<Engine>, pod: &Value, node: &'static str) -> JoinHandle<String> {
    let (engine, pod) = (Arc::clone(engine), pod.clone());
    tokio::spawn(async move { bind(&engine, &pod, node).await })
}

fn placed(engine: &Engine) -> usize {
    engine.read(|cluster| cluster.node("a").unwrap().pods.len())
}

#[tokio::test(start_paused = true)]
async fn a_gang_of_four_on_room_for_three_binds_nobody_and_all_four_once_a_card_is_free() {
    let gang = members("g", 4, (100, 0));
    let mut items = vec![node("a", 4, 16), bound(shared("other", &[(50, 4)]), "a", "2")];
    items.extend(gang.iter().cloned());
    let engine = start(&items, 5_000);
    for pod in &gang {
        let answer = filter(&engine, pod, &["a"]);
        let reason = answer["FailedAndUnresolvableNodes"]["a"].as_str().unwrap();
        assert_eq!(reason, "gang default/g: not all of its 4 pods would fit");
        assert!(bind(&engine, pod, "a").await.contains("not all of its 4 pods would fit"));
    }
    assert_eq!(placed(&engine), 1, "only the other pod");
    engine.remove_pod("uid-other");
    let mut calls = Vec::new();
    for pod in &gang {
        assert_eq!(passing(&engine, pod, &["a"]), ["a"]);
        calls.push(binding(&engine, pod, "a"));
    }
    for call in calls {
        assert_eq!(call.await.unwrap(), "");
    }
    let mut all: Vec<u32> = (0..4).flat_map(|at| cards(&engine, &format!("g{at}"))).collect();
    all.sort_unstable();
    assert_eq!(all, [0, 1, 2, 3]);
    assert_eq!(engine.metrics().gang_bound.get(), 1);
}

#[tokio::test(start_paused = true)]
async fn nobody_goes_before_all_members_exist() {
    let gang = members("g", 3, (50, 4));
    let mut items = vec![node("a", 4, 16)];
    items.extend(gang[..2].iter().cloned());
    let engine = start(&items, 5_000);
    let answer = filter(&engine, &gang[0], &["a"]);
    let reason = answer["FailedAndUnresolvableNodes"]["a"].as_str().unwrap();
    assert_eq!(reason, "gang default/g: not all of its 3 pods exist yet");
    engine.set_pod(facts(&gang[2]));
    assert_eq!(passing(&engine, &gang[0], &["a"]), ["a"]);
}

#[tokio::test(start_paused = true)]
async fn a_group_of_kueue_is_a_gang() {
    let mut gang = vec![shared("k0", &[(50, 4)]), shared("k1", &[(50, 4)])];
    for pod in &mut gang {
        pod["metadata"]["labels"] = json!({"kueue.x-k8s.io/pod-group-name": "k"});
        pod["metadata"]["annotations"] = json!({"kueue.x-k8s.io/pod-group-total-count": "2"});
    }
    let engine = start(&[node("a", 1, 16), gang[0].clone()], 5_000);
    let answer = filter(&engine, &gang[0], &["a"]);
    let reason = answer["FailedAndUnresolvableNodes"]["a"].as_str().unwrap();
    assert_eq!(reason, "gang default/k: not all of its 2 pods exist yet");
    engine.set_pod(facts(&gang[1]));
    assert_eq!(passing(&engine, &gang[0], &["a"]), ["a"]);
}

#[tokio::test(start_paused = true)]
async fn what_does_not_come_in_time_releases_all_and_frees_their_cards() {
    let gang = members("g", 3, (100, 0));
    let mut items = vec![node("a", 3, 16), shared("single", &[(50, 4)])];
    items.extend(gang.iter().cloned());
    let engine = start(&items, 150);
    let first = binding(&engine, &gang[0], "a");
    let second = binding(&engine, &gang[1], "a");
    until(|| placed(&engine) == 2).await;
    // A held bind blocks no other pod: this one takes the last card.
    assert_eq!(bind(&engine, &shared("single", &[(50, 4)]), "a").await, "");
    for call in [first, second] {
        let error = call.await.unwrap();
        assert!(error.contains("not all members came in time"), "{error}");
    }
    assert_eq!(placed(&engine), 1);
    assert_eq!(engine.metrics().gang_released.get(), 2);
}

#[tokio::test(start_paused = true)]
async fn of_two_gangs_that_need_more_than_half_the_second_waits_for_the_first() {
    let (one, two) = (members("one", 3, (100, 0)), members("two", 3, (100, 0)));
    let mut items = vec![node("a", 4, 16)];
    items.extend(one.iter().chain(&two).cloned());
    let engine = start(&items, 5_000);
    // Both pass filter before either has started; their binds come mixed.
    for pod in one.iter().chain(&two) {
        assert_eq!(passing(&engine, pod, &["a"]), ["a"]);
    }
    let first = binding(&engine, &one[0], "a");
    until(|| placed(&engine) == 1).await;
    let error = bind(&engine, &two[0], "a").await;
    assert!(error.contains("would fit beside the gangs that began before"), "{error}");
    assert!(passing(&engine, &two[1], &["a"]).is_empty());
    let rest = [binding(&engine, &one[1], "a"), binding(&engine, &one[2], "a")];
    for call in [first].into_iter().chain(rest) {
        assert_eq!(call.await.unwrap(), "");
    }
    // The first finishes and goes; then it is the second's turn.
    assert!(passing(&engine, &two[0], &["a"]).is_empty());
    for at in 0..3 {
        engine.remove_pod(&format!("uid-one{at}"));
    }
    let calls: Vec<_> = two.iter().map(|pod| binding(&engine, pod, "a")).collect();
    for call in calls {
        assert_eq!(call.await.unwrap(), "");
    }
}

#[tokio::test(start_paused = true)]
async fn a_gang_that_gave_up_stands_back_for_another_that_waits() {
    let (one, two) = (members("one", 3, (100, 0)), members("two", 3, (100, 0)));
    let mut items = vec![node("a", 4, 16)];
    items.extend(one.iter().chain(&two).cloned());
    let engine = start(&items, 400);
    assert!(bind(&engine, &one[0], "a").await.contains("in time"));
    assert!(passing(&engine, &one[1], &["a"]).is_empty(), "others go first");
    assert_eq!(passing(&engine, &two[1], &["a"]), ["a"]);
    // A quarter of the gang's timeout.
    tokio::time::sleep(Duration::from_millis(101)).await;
    assert_eq!(passing(&engine, &one[1], &["a"]), ["a"], "not for ever");
}

#[tokio::test(start_paused = true)]
async fn a_member_that_is_deleted_while_it_is_held_takes_nobody_along() {
    let gang = members("g", 2, (100, 0));
    let mut items = vec![node("a", 2, 16)];
    items.extend(gang.iter().cloned());
    let engine = start(&items, 2_000);
    let call = binding(&engine, &gang[0], "a");
    until(|| placed(&engine) == 1).await;
    engine.remove_pod("uid-g0");
    assert!(call.await.unwrap().contains("given up"));
    assert_eq!(placed(&engine), 0);
    let again = member("g", 2, "again", (100, 0));
    engine.set_pod(facts(&again));
    let calls = [binding(&engine, &again, "a"), binding(&engine, &gang[1], "a")];
    for call in calls {
        assert_eq!(call.await.unwrap(), "");
    }
}

#[tokio::test(start_paused = true)]
async fn gates_are_lifted_together_once_all_exist_and_would_fit() {
    let gated = |at: usize| {
        let mut pod = members("g", 2, (100, 0)).swap_remove(at);
        pod["spec"]["schedulingGates"] = json!([{"name": "gpu-migrate.io/gang"}]);
        pod
    };
    let engine = start(&[node("a", 2, 16), bound(shared("x", &[(50, 4)]), "a", "0"), gated(0)], 2_000);
    let lifted = || engine.gangs_to_lift().len();
    assert_eq!(lifted(), 0, "one is missing");
    engine.set_pod(facts(&gated(1)));
    assert_eq!(lifted(), 0, "one would not fit");
    engine.remove_pod("uid-x");
    assert_eq!(lifted(), 2);
}

/// Notes whose gate was lifted and who was told of what; refuses to bind one pod.
#[derive(Default)]
struct Noting {
    refused: &'static str,
    bound: parking_lot::Mutex<Vec<String>>,
    lifted: parking_lot::Mutex<Vec<String>>,
    told: parking_lot::Mutex<Vec<(String, &'static str)>>,
}

#[async_trait]
impl Api for Noting {
    async fn bind(&self, binding: &Binding) -> Result<(), BindFailure> {
        if *binding.name == *self.refused {
            return Err(BindFailure::Refused("no".into()));
        }
        self.bound.lock().push(binding.name.to_string());
        Ok(())
    }
    async fn look_up(&self, _: &str, _: &str, _: &str) -> Result<Found, String> {
        Ok(Found::Gone)
    }
    async fn requeue_pods_of(&self, _: &str) -> Result<(), String> {
        Ok(())
    }
    async fn lift_gate(&self, pod: &PodFacts) -> Result<(), String> {
        self.lifted.lock().push(pod.name.to_string());
        Ok(())
    }
    async fn warn(&self, pod: &PodFacts, reason: &'static str, message: String) {
        assert!(message.contains("default/g"), "{message}");
        self.told.lock().push((pod.name.to_string(), reason));
    }
}

#[tokio::test(start_paused = true)]
async fn where_one_cannot_be_bound_the_others_are_released_and_each_is_told() {
    let gang = members("g", 3, (100, 0));
    let mut items = vec![node("a", 3, 16)];
    items.extend(gang.iter().cloned());
    let api = Arc::new(Noting { refused: "g0", ..Noting::default() });
    let engine = engine_with(Arc::clone(&api) as Arc<dyn Api>, Settings::default(), &items);
    let calls: Vec<_> = gang.iter().map(|pod| binding(&engine, pod, "a")).collect();
    let mut errors = Vec::new();
    for call in calls {
        errors.push(call.await.unwrap());
    }
    assert_eq!(errors[0], "refused: no");
    assert!(
        errors[1..].iter().all(|error| error.contains("another member could not be bound")),
        "{errors:?}"
    );
    assert!(api.bound.lock().is_empty() && placed(&engine) == 0, "the first went alone");
    let released = [("g1".to_owned(), "GangReleased"), ("g2".to_owned(), "GangReleased")];
    assert_eq!(*api.told.lock(), released);
    assert_eq!(engine.metrics().gang_released.get(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_timeout_is_reported_for_each_member() {
    let gang = members("g", 3, (100, 0));
    let mut items = vec![node("a", 3, 16)];
    items.extend(gang.iter().cloned());
    let api = Arc::new(Noting::default());
    let settings = Settings { gang_timeout: Duration::from_millis(100), ..Settings::default() };
    let engine = engine_at(runtime_clock(), Arc::clone(&api) as Arc<dyn Api>, settings, &items);
    let calls = [binding(&engine, &gang[0], "a"), binding(&engine, &gang[1], "a")];
    for call in calls {
        assert!(call.await.unwrap().contains("in time"));
    }
    let mut told: Vec<String> = api.told.lock().iter().map(|(name, _)| name.clone()).collect();
    told.sort_unstable();
    assert_eq!(told, ["g0", "g1"]);
}

#[tokio::test(start_paused = true)]
async fn the_leader_lifts_all_gates_of_a_gang_at_once() {
    let gated = |at: usize| {
        let mut pod = members("g", 3, (100, 0)).swap_remove(at);
        pod["spec"]["schedulingGates"] = json!([{"name": "gpu-migrate.io/gang"}]);
        pod
    };
    let api = Arc::new(Noting::default());
    let items = [node("a", 3, 16), gated(0), gated(1)];
    let engine = engine_with(Arc::clone(&api) as Arc<dyn Api>, Settings::default(), &items);
    engine.lift_gates().await;
    assert!(api.lifted.lock().is_empty(), "one does not exist yet");
    engine.set_pod(facts(&gated(2)));
    engine.set_leading(Leads::Not);
    engine.lift_gates().await;
    assert!(api.lifted.lock().is_empty(), "another replica's business");
    engine.set_leading(Leads::Alone);
    engine.lift_gates().await;
    assert_eq!(*api.lifted.lock(), ["g0", "g1", "g2"]);
}

#[tokio::test(start_paused = true)]
async fn members_of_several_containers_are_counted_by_real_placement() {
    let pods: Vec<Value> = (0..3)
        .map(|at| {
            let mut pod = shared(&format!("m{at}"), &[(60, 4), (60, 4)]);
            pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] = json!("m");
            pod["metadata"]["annotations"]["scheduling.k8s.io/group-pod-num"] = json!("3");
            pod
        })
        .collect();
    let mut items = vec![node("a", 2, 16), node("b", 3, 16)];
    items.extend(pods.iter().cloned());
    let engine = start(&items, 2_000);
    // Each container takes a card of its own: 2 cards hold one pod, 3 cards hold one, so two of three.
    assert!(passing(&engine, &pods[0], &["a", "b"]).is_empty());
    engine.fill(|cluster| {
        let more = facts_of_node(&node("b", 4, 16));
        cluster.set_node("b", more);
    });
    assert_eq!(passing(&engine, &pods[0], &["a", "b"]), ["a", "b"]);
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_goes_away_does_not_stop_its_bind() {
    let gang = members("g", 2, (50, 4));
    let mut items = vec![node("a", 2, 16)];
    items.extend(gang.iter().cloned());
    let engine = start(&items, 5_000);
    let first = binding(&engine, &gang[0], "a");
    until(|| placed(&engine) == 1).await;
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    assert_eq!(bind(&engine, &gang[1], "a").await, "");
    let bound = || engine.read(|cluster| cluster.pod("uid-g0").and_then(|pod| pod.node.clone()));
    until(|| bound().is_some()).await;
    assert_eq!(bound().as_deref(), Some("a"));
}

/// As the API shows a member that has ended.
fn ended(mut pod: Value, phase: &str) -> Value {
    pod["spec"]["nodeName"] = json!("a");
    pod["status"]["phase"] = json!(phase);
    pod
}

/// A Job's members end one by one, and one that failed is made again.
#[tokio::test(start_paused = true)]
async fn members_that_have_succeeded_count_and_those_that_failed_do_not() {
    let retried = || member("g", 4, "again", (100, 0));
    let table = [
        (["Succeeded", "Succeeded", "Succeeded", "Failed"], true),
        (["Succeeded", "Succeeded", "Failed", "Failed"], false),
        (["Succeeded", "Running", "Running", "Failed"], true),
    ];
    for (phases, goes) in table {
        let mut items = vec![node("a", 8, 16), retried()];
        let all = members("g", 4, (100, 0)).into_iter().zip(phases);
        items.extend(all.map(|(pod, phase)| ended(pod, phase)));
        let engine = start(&items, 1_000);
        assert_eq!(!passing(&engine, &retried(), &["a"]).is_empty(), goes, "{phases:?}");
        assert_eq!(bind(&engine, &retried(), "a").await.is_empty(), goes, "{phases:?}");
    }
}

/// The scheduler's verdict, by its own rules or by our answer.
fn unschedulable(mut pod: Value, message: &str) -> Value {
    pod["status"]["conditions"] =
        json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]);
    pod
}

#[tokio::test(start_paused = true)]
async fn one_member_that_the_scheduler_can_put_nowhere_keeps_the_others_from_starting() {
    let gang = members("g", 3, (100, 0));
    let stuck = |message: &str| unschedulable(gang[2].clone(), message);
    let by_cpu = "0/1 nodes are available: 1 Insufficient cpu. no new claims to deallocate.";
    let mut items = vec![node("a", 4, 16)];
    items.extend(gang.iter().cloned());
    let engine = start(&items, 1_000);
    for ours in [
        "0/1 nodes are available: 1 gang default/g: not all of its 3 pods exist yet.",
        "0/2 nodes are available: 1 0 cards are free, 1 needed, 1 Insufficient cpu.",
        "0/1 nodes are available: 1 no single card has 50 cores and 4 blocks free.",
    ] {
        engine.set_pod(facts(&stuck(ours)));
        assert_eq!(passing(&engine, &gang[0], &["a"]), ["a"], "{ours}");
    }
    // Held already, and let go as soon as it is known.
    let first = binding(&engine, &gang[0], "a");
    until(|| placed(&engine) == 1).await;
    engine.set_pod(facts(&stuck(by_cpu)));
    let error = first.await.unwrap();
    assert!(error.contains("default/g2") && !error.contains("in time"), "{error}");
    assert_eq!(placed(&engine), 0);
    let answer = filter(&engine, &gang[0], &["a"]);
    let reason = answer["FailedAndUnresolvableNodes"]["a"].as_str().unwrap();
    assert_eq!(reason, "gang default/g: the scheduler finds no node for its pod default/g2");
    // Itself it may go on: then there is a node.
    assert_eq!(passing(&engine, &stuck(by_cpu), &["a"]), ["a"]);
    let mut calls = vec![binding(&engine, &gang[2], "a")];
    until(|| placed(&engine) == 1).await;
    assert_eq!(passing(&engine, &gang[0], &["a"]), ["a"]);
    calls.extend([binding(&engine, &gang[0], "a"), binding(&engine, &gang[1], "a")]);
    for call in calls {
        assert_eq!(call.await.unwrap(), "");
    }
}

#[tokio::test(start_paused = true)]
async fn a_member_behind_another_gate_does_not_come_yet() {
    let mut gang = members("g", 2, (100, 0));
    gang[1]["spec"]["schedulingGates"] =
        json!([{"name": "kueue.x-k8s.io/admission"}, {"name": "gpu-migrate.io/gang"}]);
    gang[0]["spec"]["schedulingGates"] = json!([{"name": "gpu-migrate.io/gang"}]);
    let engine = start(&[node("a", 2, 16), gang[0].clone(), gang[1].clone()], 1_000);
    assert!(engine.gangs_to_lift().is_empty());
    gang[1]["spec"]["schedulingGates"] = json!([{"name": "gpu-migrate.io/gang"}]);
    engine.set_pod(facts(&gang[1]));
    assert_eq!(engine.gangs_to_lift().len(), 2);
}

/// What frees cards does not wait for an API server that is slow to take Events.
#[tokio::test(start_paused = true)]
async fn cards_are_free_before_events_are_written() {
    struct Slow;
    #[async_trait]
    impl Api for Slow {
        async fn bind(&self, _: &Binding) -> Result<(), BindFailure> {
            Ok(())
        }
        async fn look_up(&self, _: &str, _: &str, _: &str) -> Result<Found, String> {
            Ok(Found::Gone)
        }
        async fn requeue_pods_of(&self, _: &str) -> Result<(), String> {
            Ok(())
        }
        async fn lift_gate(&self, _: &PodFacts) -> Result<(), String> {
            Ok(())
        }
        async fn warn(&self, _: &PodFacts, _: &'static str, _: String) {
            std::future::pending::<()>().await;
        }
    }
    let gang = members("g", 4, (100, 0));
    let mut items = vec![node("a", 4, 16)];
    items.extend(gang.iter().cloned());
    let settings = Settings { gang_timeout: Duration::from_millis(100), ..Settings::default() };
    let engine = engine_at(runtime_clock(), Arc::new(Slow), settings, &items);
    let calls: Vec<_> = gang[..3].iter().map(|pod| binding(&engine, pod, "a")).collect();
    for call in calls {
        assert!(call.await.unwrap().contains("in time"));
    }
    assert_eq!(placed(&engine), 0);
}

/// Each held bind is a connection of the scheduler: some must be left for its other calls.
#[tokio::test(start_paused = true)]
async fn binds_are_held_for_as_many_pods_as_there_are_connections_to_spare() {
    let (one, two) = (members("one", 3, (10, 1)), members("two", 3, (10, 1)));
    let mut items = vec![node("a", 4, 16)];
    items.extend(one.iter().chain(&two).cloned());
    let settings =
        Settings { gang_timeout: Duration::from_millis(500), held_binds: 5, ..Settings::default() };
    let engine = engine_at(runtime_clock(), Arc::new(Memory::default()) as Arc<dyn Api>, settings, &items);
    let first = binding(&engine, &one[0], "a");
    until(|| placed(&engine) == 1).await;
    let answer = filter(&engine, &two[0], &["a"]);
    let reason = answer["FailedAndUnresolvableNodes"]["a"].as_str().unwrap();
    assert_eq!(reason, "gang default/two: 3 binds are held for other gangs, of at most 5");
    let rest = [binding(&engine, &one[1], "a"), binding(&engine, &one[2], "a")];
    for call in [first].into_iter().chain(rest) {
        assert_eq!(call.await.unwrap(), "");
    }
    assert_eq!(passing(&engine, &two[0], &["a"]), ["a"]);
    let huge = member("huge", 6, "huge", (10, 1));
    let answer = filter(&engine, &huge, &["a"]);
    let reason = answer["FailedAndUnresolvableNodes"]["a"].as_str().unwrap();
    assert_eq!(reason, "gang default/huge: it has 6 pods, and binds are held for at most 5");
}

/// Who asks about many nodes lets binds and watches in between: gangs, pods that only placement decides about, gangs that are released.
#[tokio::test(start_paused = true)]
async fn no_call_holds_the_lock_while_it_looks_at_every_node() {
    let mut registry = Registry::default();
    let metrics = Metrics::register(&mut registry);
    let nodes: Vec<String> = (0..200).map(|at| format!("n{at}")).collect();
    let mut items: Vec<Value> = nodes.iter().map(|name| node(name, 2, 16)).collect();
    let pair = |name: &str, size: usize| {
        let mut pod = shared(name, &[(60, 4), (60, 4)]);
        pod["metadata"]["annotations"] = json!({"scheduling.k8s.io/group-name": name[..1],
            "scheduling.k8s.io/group-pod-num": size.to_string()});
        pod
    };
    let too_large: Vec<Value> = (0..201).map(|at| pair(&format!("t{at}"), 201)).collect();
    let fitting: Vec<Value> = (0..100).map(|at| pair(&format!("f{at}"), 100)).collect();
    items.extend(too_large.iter().chain(&fitting).cloned());
    let settings = Settings { gang_timeout: Duration::from_millis(100), ..Settings::default() };
    let (engine, _) = Engine::new(Arc::new(Memory::default()), settings, runtime_clock(), metrics);
    fill(&engine, &items);
    let holds = || -> u64 {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let count =
            text.lines().find_map(|line| line.strip_prefix("gpu_migrate_extender_state_lock_seconds_count "));
        count.unwrap().parse().unwrap()
    };
    let names: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let before = holds();
    assert!(passing(&engine, &too_large[0], &names).is_empty());
    let gang = holds() - before;
    assert!(gang > 200 / 16, "{gang} for a gang");
    assert!(passing(&engine, &too_large[1], &names).is_empty());
    assert!(holds() - before - gang < 10, "the answer is known");
    let before = holds();
    assert_eq!(passing(&engine, &shared("single", &[(60, 4), (60, 4)]), &names).len(), 200);
    assert!(holds() - before >= 200 / 32, "{} for a pod of two containers", holds() - before);

    let calls: Vec<_> = fitting[..99].iter().map(|pod| binding(&engine, pod, "n0")).collect();
    for (at, call) in calls.into_iter().enumerate() {
        // Only the first has room on this node; the others are refused at once.
        assert_eq!(call.await.unwrap().contains("in time"), at == 0);
    }
}
