//! Pods that only we refused are woken by a touch of a Node, when there is room that the scheduler cannot see.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use gpu_migrate_admission_ext::api::{Api, BindFailure, Binding, Found};
use gpu_migrate_admission_ext::engine::{Engine, Leads, Settings, machine_clock};
use gpu_migrate_admission_ext::metrics::Metrics;
use gpu_migrate_admission_ext::snapshot;
use gpu_migrate_admission_ext::state::Freed;
use gpu_migrate_admission_ext::state::node::ShadowFacts;
use gpu_migrate_admission_ext::state::pod::{PodFacts, PodGroups};
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::common::*;

/// Notes which nodes are touched.
#[derive(Default)]
struct Touches {
    nodes: parking_lot::Mutex<Vec<String>>,
    fail: AtomicBool,
    /// `minMember` of the PodGroups.
    groups: parking_lot::Mutex<HashMap<(String, PodGroups), u32>>,
    groups_read: AtomicUsize,
}

#[async_trait]
impl Api for Touches {
    async fn bind(&self, _: &Binding) -> Result<(), BindFailure> {
        Err(BindFailure::Refused("nothing is bound here".into()))
    }
    async fn look_up(&self, _: &str, _: &str, _: &str) -> Result<Found, String> {
        Ok(Found::Gone)
    }
    async fn requeue_pods_of(&self, node: &str) -> Result<(), String> {
        if self.fail.load(Ordering::Relaxed) {
            return Err("no answer".into());
        }
        self.nodes.lock().push(node.to_owned());
        Ok(())
    }
    async fn lift_gate(&self, _: &PodFacts) -> Result<(), String> {
        Ok(())
    }
    async fn min_member(&self, namespace: &str, name: &str, group: PodGroups) -> Result<Option<u32>, String> {
        self.groups_read.fetch_add(1, Ordering::Relaxed);
        Ok(self.groups.lock().get(&(format!("{namespace}/{name}"), group)).copied())
    }
    async fn warn(&self, _: &PodFacts, _: &'static str, _: String) {}
}

struct Waker {
    api: Arc<Touches>,
    engine: Arc<Engine>,
    requeues: UnboundedReceiver<Freed>,
    again: Vec<Freed>,
}

fn start(items: &[Value]) -> Waker {
    let api = Arc::new(Touches::default());
    let metrics = Metrics::register(&mut Registry::default());
    let settings = Settings { gang_timeout: Duration::from_millis(100), ..Settings::default() };
    let (engine, requeues) =
        Engine::new(Arc::clone(&api) as Arc<dyn Api>, settings, machine_clock(), metrics);
    let text = list(items);
    let rules = engine.settings().rules.clone();
    engine.set_leading(Leads::Alone);
    // First synced, so that nobody is taken for one whom an earlier leader refused.
    engine.set_synced(true);
    engine.fill(|cluster| snapshot::fill(&text, "test", &rules, cluster).unwrap());
    Waker { api, engine, requeues, again: Vec::new() }
}

impl Waker {
    /// Hands what was freed on to the API, as the background task does; the nodes that were touched.
    async fn touched(&mut self) -> Vec<String> {
        let mut freed = std::mem::take(&mut self.again);
        while let Ok(more) = self.requeues.try_recv() {
            freed.push(more);
        }
        self.again = self.engine.requeue(freed).await;
        std::mem::take(&mut self.api.nodes.lock())
    }
}

fn published(holders: &[(usize, Value)]) -> ShadowFacts {
    ShadowFacts::read(&serde_json::from_value(shadow("a", 2, 16, holders)["status"].clone()).unwrap())
}

#[tokio::test]
async fn a_card_that_the_bridge_frees_wakes_who_waits() {
    let holder = (0, json!({"uid": "uid-l", "container": "main"}));
    let waiting = shared("p", &[(200, 0)]);
    let mut t =
        start(&[node("a", 2, 16), shadow("a", 2, 16, std::slice::from_ref(&holder)), waiting.clone()]);
    assert!(passing(&t.engine, &waiting, &["a"]).is_empty());

    t.engine.set_shadow("a", published(&[]));
    t.engine.set_shadow("a", published(&[]));
    assert_eq!(t.touched().await, ["a"], "a burst is one touch");
    t.engine.set_shadow("a", published(std::slice::from_ref(&holder)));
    assert!(t.touched().await.is_empty(), "less room requeues nobody");

    t.engine.remove_pod("uid-p");
    t.engine.set_shadow("a", published(&[]));
    t.engine.resolve_unconfirmed().await;
    assert!(t.touched().await.is_empty(), "nobody waits");
}

#[tokio::test]
async fn the_last_member_of_a_gang_wakes_the_others() {
    let member = member_of_three;
    let mut t = start(&[node("a", 2, 16), member(0)]);
    assert!(passing(&t.engine, &member(0), &["a"]).is_empty());
    t.engine.set_pod(facts(&member(1)));
    assert!(t.touched().await.is_empty());
    t.engine.set_pod(facts(&member(2)));
    assert_eq!(t.touched().await, ["a"]);
    t.engine.set_pod(facts(&member(2)));
    assert!(t.touched().await.is_empty(), "once");
}

/// The members of a complete gang do not go on saying that pods of it do not exist.
#[tokio::test]
async fn the_last_member_of_a_gang_requeues_the_others_although_one_finds_no_node() {
    let mut t = start(&[node("a", 2, 16), member_of_three(0)]);
    assert!(passing(&t.engine, &member_of_three(0), &["a"]).is_empty());
    let mut stuck = member_of_three(1);
    stuck["status"]["conditions"] = json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/1 nodes are available: 1 Insufficient cpu."}]);
    t.engine.set_pod(facts(&stuck));
    assert!(t.touched().await.is_empty());
    t.engine.set_pod(facts(&member_of_three(2)));
    assert_eq!(t.touched().await, ["a"]);
    let answer = filter(&t.engine, &member_of_three(0), &["a"]);
    let reason = answer["FailedAndUnresolvableNodes"]["a"].as_str().unwrap();
    assert!(reason.contains("finds no node for its pod default/g1"), "{reason}");
    t.engine.set_pod(facts(&member_of_three(2)));
    assert!(t.touched().await.is_empty(), "once");
}

fn member_of_three(at: u32) -> Value {
    let mut pod = shared(&format!("g{at}"), &[(50, 4)]);
    pod["metadata"]["annotations"] =
        json!({"scheduling.k8s.io/group-name": "g", "scheduling.k8s.io/group-pod-num": "3"});
    pod
}

#[tokio::test]
async fn a_bind_that_is_refused_for_certain_gives_its_cards_back() {
    let pod = shared("p", &[(100, 0)]);
    let t = start(&[node("a", 1, 16), pod.clone()]);
    assert!(bind(&t.engine, &pod, "a").await.contains("nothing is bound here"));
    assert_eq!(passing(&t.engine, &shared("q", &[(100, 0)]), &["a"]), ["a"]);
}

#[tokio::test]
async fn a_deletion_that_our_watch_sees_after_the_scheduler_asked_wakes_who_was_refused() {
    let (old, waiting) = (shared("old", &[(100, 0)]), shared("p", &[(100, 0)]));
    let items = [node("a", 1, 16), bound(old, "a", "0"), waiting.clone()];
    let mut t = start(&items);
    assert!(passing(&t.engine, &waiting, &["a"]).is_empty());
    t.engine.remove_pod("uid-old");
    assert_eq!(t.touched().await, ["a"]);
    // The scheduler comes because of the touch; it is told yes, and the rest is its own business.
    assert_eq!(passing(&t.engine, &waiting, &["a"]), ["a"]);
    t.engine.set_node("a", facts_of_node(&node("a", 2, 16)));
    assert!(t.touched().await.is_empty(), "nobody waits for us");
}

#[tokio::test]
async fn who_was_asked_about_again_in_time_is_not_woken() {
    let waiting = shared("p", &[(200, 0)]);
    let on = |name: &str| bound(shared(name, &[(100, 0)]), "a", if name == "x" { "0" } else { "1" });
    let mut t = start(&[node("a", 2, 16), on("x"), on("y"), waiting.clone()]);
    assert!(passing(&t.engine, &waiting, &["a"]).is_empty());
    t.engine.remove_pod("uid-x");
    assert!(t.touched().await.is_empty(), "one card is free, two are asked for");
    t.engine.remove_pod("uid-y");
    assert_eq!(passing(&t.engine, &waiting, &["a"]), ["a"]);
    assert!(t.touched().await.is_empty(), "the scheduler came by itself");
}

#[tokio::test]
async fn a_dry_run_waits_for_nothing() {
    let mut t = start(&[node("a", 1, 16), bound(shared("old", &[(100, 0)]), "a", "0")]);
    let body =
        serde_json::to_vec(&json!({"Pod": shared("p", &[(100, 0)]), "Nodes": null, "NodeNames": ["a"]}))
            .unwrap();
    t.engine.filter("filter-dryrun", &body);
    t.engine.remove_pod("uid-old");
    assert!(t.touched().await.is_empty());
    // The same for real, of a pod that our watch has not seen yet.
    t.engine.set_pod(facts(&bound(shared("old", &[(100, 0)]), "a", "0")));
    t.engine.filter("filter", &body);
    t.engine.remove_pod("uid-old");
    assert_eq!(t.touched().await, ["a"]);
}

#[tokio::test]
async fn only_the_leader_wakes_and_a_new_one_begins_with_it() {
    let waiting = shared("p", &[(100, 0)]);
    let mut t = start(&[node("a", 1, 16), bound(shared("old", &[(100, 0)]), "a", "0"), waiting.clone()]);
    assert!(passing(&t.engine, &waiting, &["a"]).is_empty());
    t.engine.set_leading(Leads::Not);
    t.engine.remove_pod("uid-old");
    assert!(t.touched().await.is_empty());
    // It lists the cluster, and cannot know whom the last leader refused and did not live to wake.
    t.engine.set_synced(false);
    t.engine.set_leading(Leads::Alone);
    t.engine.set_synced(true);
    assert_eq!(t.touched().await, ["a"]);
}

#[tokio::test]
async fn a_touch_that_fails_is_tried_again() {
    let waiting = shared("p", &[(100, 0)]);
    let mut t = start(&[node("a", 1, 16), bound(shared("old", &[(100, 0)]), "a", "0"), waiting.clone()]);
    passing(&t.engine, &waiting, &["a"]);
    t.api.fail.store(true, Ordering::Relaxed);
    t.engine.remove_pod("uid-old");
    assert!(t.touched().await.is_empty());
    t.api.fail.store(false, Ordering::Relaxed);
    assert_eq!(t.touched().await, ["a"]);
}

#[tokio::test]
async fn a_gang_that_gives_up_wakes_who_was_refused_beside_it() {
    let gang = |name: &str| {
        let mut pod = shared(name, &[(100, 0)]);
        pod["metadata"]["annotations"] =
            json!({"scheduling.k8s.io/group-name": "g", "scheduling.k8s.io/group-pod-num": "2"});
        pod
    };
    let waiting = shared("p", &[(200, 0)]);
    let mut t = start(&[node("a", 2, 16), gang("g0"), gang("g1"), waiting.clone()]);
    // One member comes, the other does not.
    let first = gang("g0");
    let held = bind(&t.engine, &first, "a");
    let refused = async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        passing(&t.engine, &waiting, &["a"])
    };
    let (error, fits) = tokio::join!(held, refused);
    assert!(error.contains("in time") && fits.is_empty(), "{error} {fits:?}");
    assert_eq!(t.touched().await, ["a"]);
}

#[tokio::test]
async fn what_a_quota_limits_may_be_freed_on_one_node_and_used_on_another() {
    let (old, waiting) = (shared("old", &[(100, 0)]), shared("p", &[(100, 4)]));
    let items = [node("a", 1, 2), node("b", 1, 16), bound(old, "a", "0"), waiting.clone()];
    let mut t = start(&items);
    let spec = json!({"quotas": [{"namespace": "default", "cores": 100}]});
    t.engine.set_config(serde_json::from_value(spec).unwrap());
    t.touched().await;
    assert!(passing(&t.engine, &waiting, &["a", "b"]).is_empty());
    t.engine.remove_pod("uid-old");
    assert_eq!(t.touched().await, ["a"]);
}

/// A new leader does not wake whom it could not help: pods behind a gate, and those of schedulers that do not ask us.
#[tokio::test]
async fn gated_pods_and_those_of_other_schedulers_are_not_woken() {
    let mut kueue = shared("kueue", &[(50, 4)]);
    kueue["spec"]["schedulingGates"] = json!([{"name": "kueue.x-k8s.io/admission"}]);
    let mut volcano = shared("volcano", &[(50, 4)]);
    volcano["spec"]["schedulerName"] = json!("volcano");
    let mut t = start(&[node("a", 2, 16), kueue.clone(), volcano.clone()]);
    let lead_again = |t: &Waker| {
        t.engine.set_synced(false);
        t.engine.set_synced(true);
    };
    lead_again(&t);
    assert!(t.touched().await.is_empty());
    kueue["spec"]["schedulingGates"] = json!([]);
    kueue["spec"]["schedulerName"] = json!("gpu-migrate-scheduler");
    t.engine.set_pod(facts(&kueue));
    lead_again(&t);
    assert_eq!(t.touched().await, ["a"], "one of ours waits");
    t.engine.remove_pod("uid-kueue");
    // Once it has asked us it is one of ours.
    passing(&t.engine, &volcano, &["a"]);
    lead_again(&t);
    assert_eq!(t.touched().await, ["a"]);
}

#[tokio::test]
async fn a_pod_that_is_nominated_no_more_wakes_who_was_refused_beside_it() {
    let mut urgent = shared("urgent", &[(100, 0)]);
    urgent["spec"]["priority"] = json!(10);
    urgent["status"]["nominatedNodeName"] = json!("a");
    let waiting = shared("p", &[(100, 0)]);
    let mut t = start(&[node("a", 1, 16), urgent.clone(), waiting.clone()]);
    assert!(passing(&t.engine, &waiting, &["a"]).is_empty());
    t.engine.set_pod(facts(&urgent));
    assert!(t.touched().await.is_empty());
    urgent["status"]["nominatedNodeName"] = json!("");
    t.engine.set_pod(facts(&urgent));
    assert_eq!(t.touched().await, ["a"]);
}

/// PodGroups of frameworks come before or after their pods.
#[tokio::test]
async fn a_gang_goes_once_its_pod_group_says_how_many_pods_it_has() {
    let table = [
        (json!({"labels": {"scheduling.x-k8s.io/pod-group": "g"}}), PodGroups::SchedulerPlugins),
        (json!({"annotations": {"scheduling.volcano.sh/group-name": "g"}}), PodGroups::Volcano),
        (json!({"annotations": {"scheduling.k8s.io/group-name": "g"}}), PodGroups::Volcano),
    ];
    for (metadata, group) in table {
        let member = |name: &str| {
            let mut pod = shared(name, &[(50, 4)]);
            for (key, value) in metadata.as_object().unwrap() {
                pod["metadata"][key] = value.clone();
            }
            pod
        };
        let gang = [member("g0"), member("g1")];
        // Of another scheduler: none of our business.
        let mut other = member("o");
        other["spec"]["schedulerName"] = json!("volcano");
        other["metadata"]["namespace"] = json!("others");
        let mut t = start(&[node("a", 1, 16), gang[0].clone(), other]);
        let answer = filter(&t.engine, &gang[0], &["a"]);
        let reason = answer["FailedAndUnresolvableNodes"]["a"].as_str().unwrap();
        let expected = format!(
            "gang default/g: there is no PodGroup of {} that says how many pods it has",
            group.api_version()
        );
        assert_eq!(reason, expected);
        assert!(bind(&t.engine, &gang[0], "a").await.contains(&expected));

        t.engine.read_pod_groups().await;
        assert_eq!((t.touched().await.len(), t.api.groups_read.load(Ordering::Relaxed)), (0, 1));
        t.api.groups.lock().insert(("default/g".to_owned(), group), 2);
        t.engine.read_pod_groups().await;
        // Read once.
        t.engine.read_pod_groups().await;
        assert_eq!(t.api.groups_read.load(Ordering::Relaxed), 2);
        let reason = filter(&t.engine, &gang[0], &["a"])["FailedAndUnresolvableNodes"]["a"].take();
        assert_eq!(reason, "gang default/g: not all of its 2 pods exist yet");
        // The size is known to a member that comes later, too.
        t.touched().await;
        t.engine.set_pod(facts(&gang[1]));
        assert_eq!(t.touched().await, ["a"]);
        assert_eq!(passing(&t.engine, &gang[1], &["a"]), ["a"]);
    }
}

#[tokio::test]
async fn a_gang_that_is_complete_is_requeued_when_its_pod_group_comes() {
    let member = |name: &str| {
        let mut pod = shared(name, &[(50, 4)]);
        pod["metadata"]["labels"] = json!({"scheduling.x-k8s.io/pod-group": "g"});
        pod
    };
    let gang = [member("g0"), member("g1")];
    let mut t = start(&[node("a", 1, 16), gang[0].clone(), gang[1].clone()]);
    assert!(passing(&t.engine, &gang[0], &["a"]).is_empty());
    t.api.groups.lock().insert(("default/g".to_owned(), PodGroups::SchedulerPlugins), 2);
    t.engine.read_pod_groups().await;
    assert_eq!(t.touched().await, ["a"]);
    assert_eq!(passing(&t.engine, &gang[0], &["a"]), ["a"]);
}
