//! Pods that only we refused are woken by a touch of a Node, when there is room that the scheduler cannot see.

use std::sync::Arc;

use async_trait::async_trait;
use gpu_migrate_admission_ext::api::{Api, BindFailure, Binding, Found};
use gpu_migrate_admission_ext::engine::{Engine, Leads, Settings, machine_clock};
use gpu_migrate_admission_ext::metrics::Metrics;
use gpu_migrate_admission_ext::snapshot;
use gpu_migrate_admission_ext::state::node::ShadowFacts;
use gpu_migrate_admission_ext::state::pod::PodFacts;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::common::*;

/// Notes which nodes are touched.
#[derive(Default)]
struct Touches(parking_lot::Mutex<Vec<String>>);

#[async_trait]
impl Api for Touches {
    async fn bind(&self, _: &Binding) -> Result<(), BindFailure> {
        Err(BindFailure::Refused("nothing is bound here".into()))
    }
    async fn look_up(&self, _: &str, _: &str, _: &str) -> Result<Found, String> {
        Ok(Found::Gone)
    }
    async fn touch_node(&self, node: &str) -> Result<(), String> {
        self.0.lock().push(node.to_owned());
        Ok(())
    }
    async fn lift_gate(&self, _: &PodFacts) -> Result<(), String> {
        Ok(())
    }
    async fn warn(&self, _: &PodFacts, _: &'static str, _: String) {}
}

fn start(items: &[Value]) -> (Arc<Touches>, Arc<Engine>, UnboundedReceiver<Arc<str>>) {
    let api = Arc::new(Touches::default());
    let metrics = Metrics::register(&mut Registry::default());
    let (engine, wakes) =
        Engine::new(Arc::clone(&api) as Arc<dyn Api>, Settings::default(), machine_clock(), metrics);
    let text = list(items);
    let rules = engine.settings().rules.clone();
    engine.fill(|cluster| snapshot::fill(&text, "test", &rules, cluster).unwrap());
    engine.set_leading(Leads::Alone);
    engine.set_synced(true);
    (api, engine, wakes)
}

/// Hands what was told on to the API, as the background task does; the nodes that were touched.
async fn touched(api: &Touches, engine: &Engine, wakes: &mut UnboundedReceiver<Arc<str>>) -> Vec<String> {
    let mut nodes = Vec::new();
    while let Ok(node) = wakes.try_recv() {
        nodes.push(node);
    }
    engine.wake(nodes).await;
    std::mem::take(&mut api.0.lock())
}

fn published(holders: &[(usize, Value)]) -> ShadowFacts {
    ShadowFacts::read(&serde_json::from_value(shadow("a", 2, 16, holders)["status"].clone()).unwrap())
}

#[tokio::test]
async fn a_card_that_the_bridge_frees_wakes_who_waits() {
    let holder = (0, json!({"uid": "uid-l", "container": "main"}));
    let waiting = shared("p", &[(200, 0)]);
    let items = [node("a", 2, 16), shadow("a", 2, 16, std::slice::from_ref(&holder)), waiting.clone()];
    let (api, engine, mut wakes) = start(&items);
    assert!(passing(&engine, &waiting, &["a"]).is_empty());

    engine.set_shadow("a", published(&[]));
    engine.set_shadow("a", published(&[]));
    assert_eq!(touched(&api, &engine, &mut wakes).await, ["a"], "a burst is one touch");
    engine.set_shadow("a", published(std::slice::from_ref(&holder)));
    assert!(touched(&api, &engine, &mut wakes).await.is_empty(), "less room wakes nobody");

    engine.remove_pod("uid-p");
    engine.set_shadow("a", published(&[]));
    assert!(touched(&api, &engine, &mut wakes).await.is_empty(), "nobody waits");
}

#[tokio::test]
async fn the_last_member_of_a_gang_wakes_the_others() {
    let member = |at: u32| {
        let mut pod = shared(&format!("g{at}"), &[(50, 4)]);
        pod["metadata"]["annotations"] =
            json!({"scheduling.k8s.io/group-name": "g", "scheduling.k8s.io/group-pod-num": "3"});
        pod
    };
    let (api, engine, mut wakes) = start(&[node("a", 2, 16), member(0)]);
    engine.set_pod(facts(&member(1)));
    assert!(touched(&api, &engine, &mut wakes).await.is_empty());
    engine.set_pod(facts(&member(2)));
    assert_eq!(touched(&api, &engine, &mut wakes).await, ["a"]);
    engine.set_pod(facts(&member(2)));
    assert!(touched(&api, &engine, &mut wakes).await.is_empty(), "once");
}

#[tokio::test]
async fn a_bind_that_is_refused_for_certain_gives_its_cards_back() {
    let pod = shared("p", &[(100, 0)]);
    let (_, engine, _wakes) = start(&[node("a", 1, 16), pod.clone()]);
    assert!(bind(&engine, &pod, "a").await.contains("nothing is bound here"));
    assert_eq!(passing(&engine, &shared("q", &[(100, 0)]), &["a"]), ["a"]);
}
