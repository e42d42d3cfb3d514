//! A cluster for tests: objects as JSON, an engine over them, calls as the scheduler makes them.

use std::sync::Arc;
use std::time::Duration;

use gpu_migrate_admission_ext::api::{Api, Memory};
use gpu_migrate_admission_ext::engine::{Clock, Engine, Leads, Now, Settings, machine_clock};
use gpu_migrate_admission_ext::metrics::Metrics;
use gpu_migrate_admission_ext::snapshot;
use gpu_migrate_admission_ext::state::node::NodeFacts;
use gpu_migrate_admission_ext::state::pod::{PodFacts, Rules};
use gpu_migrate_model::names::Dialect;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};

/// A node with `cards` cards of `blocks` blocks, known by its capacity alone.
pub(crate) fn node(name: &str, cards: u32, blocks: u32) -> Value {
    let amounts = json!({
        "nvidia.com/gpu": cards.to_string(),
        "tencent.com/vcuda-core": (cards * 100).to_string(),
        "tencent.com/vcuda-memory": (cards * blocks).to_string(),
        "cpu": "64",
    });
    json!({"kind": "Node", "apiVersion": "v1", "metadata": {"name": name, "uid": name},
           "status": {"capacity": amounts, "allocatable": amounts}})
}

/// A pod with one container of each pair (cores, blocks).
pub(crate) fn shared(name: &str, containers: &[(u32, u32)]) -> Value {
    let containers: Vec<Value> = containers
        .iter()
        .enumerate()
        .map(|(at, (cores, blocks))| {
            let mut limits = json!({"tencent.com/vcuda-core": cores.to_string()});
            if *blocks > 0 {
                limits["tencent.com/vcuda-memory"] = json!(blocks.to_string());
            }
            json!({"name": format!("c{at}"), "resources": {"limits": limits, "requests": limits}})
        })
        .collect();
    pod(name, json!(containers))
}

/// A pod that asks for whole cards through `nvidia.com/gpu`.
pub(crate) fn legacy(name: &str, cards: u32) -> Value {
    let limits = json!({"nvidia.com/gpu": cards.to_string()});
    pod(name, json!([{"name": "main", "resources": {"limits": limits, "requests": limits}}]))
}

pub(crate) fn pod(name: &str, containers: Value) -> Value {
    json!({"kind": "Pod", "apiVersion": "v1",
           "metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}"), "annotations": {}},
           "spec": {"containers": containers}, "status": {"phase": "Pending"}})
}

/// `pod` with so much CPU, in thousandths, and memory, in MiB, for its first container.
pub(crate) fn requesting(mut pod: Value, cpu: u32, memory: u32) -> Value {
    let requests = &mut pod["spec"]["containers"][0]["resources"]["requests"];
    requests["cpu"] = json!(format!("{cpu}m"));
    requests["memory"] = json!(format!("{memory}Mi"));
    pod
}

/// `pod` bound to `node`, with the extender's choice of `cards` for its first container.
pub(crate) fn bound(mut pod: Value, node: &str, cards: &str) -> Value {
    pod["spec"]["nodeName"] = json!(node);
    if !cards.is_empty() {
        pod["metadata"]["annotations"]["tencent.com/predicate-gpu-idx-0"] = json!(cards);
    }
    pod
}

/// A shadow of `cards` cards of `blocks` blocks; `holders[i]` are the holders of card i, as the bridge writes them.
pub(crate) fn shadow(name: &str, cards: usize, blocks: u64, holders: &[(usize, Value)]) -> Value {
    let cards: Vec<Value> = (0..cards)
        .map(|at| {
            let on: Vec<&Value> = holders.iter().filter(|(card, _)| *card == at).map(|(_, holder)| holder).collect();
            json!({"uuid": format!("GPU-{name}-{at}"), "minor": at, "model": "A100", "memoryMiB": blocks * 256, "holders": on})
        })
        .collect();
    json!({"kind": "GPUShadow", "apiVersion": "gpu-migrate.io/v1alpha1", "metadata": {"name": name},
           "spec": {}, "status": {"cards": cards}})
}

pub(crate) fn list(items: &[Value]) -> Vec<u8> {
    serde_json::to_vec(&json!({"kind": "List", "apiVersion": "v1", "items": items})).unwrap()
}

/// An engine over `items` that is synced and leads.
pub(crate) fn engine_with(api: Arc<dyn Api>, settings: Settings, items: &[Value]) -> Arc<Engine> {
    engine_at(machine_clock(), api, settings, items)
}

/// The clock of the runtime: paused with it.
pub(crate) fn runtime_clock() -> Clock {
    Arc::new(|| Now { instant: tokio::time::Instant::now().into_std(), unix_nanos: 1 })
}

/// Waits until it is so.
pub(crate) async fn until(mut condition: impl FnMut() -> bool) {
    let met = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), met).await.unwrap();
}

pub(crate) fn engine_at(clock: Clock, api: Arc<dyn Api>, settings: Settings, items: &[Value]) -> Arc<Engine> {
    let metrics = Metrics::register(&mut Registry::default());
    let (engine, _) = Engine::new(api, settings, clock, metrics);
    fill(&engine, items);
    engine
}

/// Fills an engine that is not synced yet, which then is and leads.
pub(crate) fn fill(engine: &Engine, items: &[Value]) {
    let (text, rules) = (list(items), engine.settings().rules.clone());
    engine.fill(|cluster| snapshot::fill(&text, "test", &rules, cluster).unwrap());
    engine.set_leading(Leads::Alone);
    engine.set_synced(true);
}

pub(crate) fn engine(items: &[Value]) -> Arc<Engine> {
    engine_with(Arc::new(Memory::default()), Settings::default(), items)
}

fn body(pod: &Value, nodes: &[&str]) -> Vec<u8> {
    serde_json::to_vec(&json!({"Pod": pod, "Nodes": null, "NodeNames": nodes})).unwrap()
}

fn read(body: &[u8]) -> Value {
    serde_json::from_slice(body).unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(body)))
}

pub(crate) fn filter(engine: &Engine, pod: &Value, nodes: &[&str]) -> Value {
    read(&engine.filter("filter", &body(pod, nodes)).body)
}

pub(crate) fn passing(engine: &Engine, pod: &Value, nodes: &[&str]) -> Vec<String> {
    serde_json::from_value(filter(engine, pod, nodes)["NodeNames"].clone()).unwrap()
}

pub(crate) fn prioritize(engine: &Engine, pod: &Value, nodes: &[&str]) -> Value {
    read(&engine.prioritize(&body(pod, nodes)).body)
}

pub(crate) fn preempt(engine: &Engine, pod: &Value, victims: Value) -> Value {
    let body = json!({"Pod": pod, "NodeNameToVictims": null, "NodeNameToMetaVictims": victims});
    read(&engine.preempt(&serde_json::to_vec(&body).unwrap()).body)["NodeNameToMetaVictims"].clone()
}

/// The error of bind, empty where it is bound.
pub(crate) async fn bind(engine: &Arc<Engine>, pod: &Value, node: &str) -> String {
    let meta = &pod["metadata"];
    let body = json!({"PodName": meta["name"], "PodNamespace": meta["namespace"], "PodUID": meta["uid"], "Node": node});
    let reply = engine.bind(&serde_json::to_vec(&body).unwrap()).await;
    read(&reply.body)["Error"].as_str().unwrap().to_owned()
}

/// Cards of each container that a pod has by now.
pub(crate) fn cards(engine: &Engine, name: &str) -> Vec<u32> {
    engine.read(|cluster| {
        let pod = cluster.pod(&format!("uid-{name}")).unwrap();
        pod.cards.iter().map(|(_, card)| card.0).collect()
    })
}

/// A pod as the index reads it.
pub(crate) fn facts(pod: &Value) -> PodFacts {
    let text = pod.to_string();
    PodFacts::read(&serde_json::from_str(&text).unwrap(), &Rules::default())
}

/// A node as the index reads it.
pub(crate) fn facts_of_node(node: &Value) -> NodeFacts {
    let text = node.to_string();
    NodeFacts::read(&serde_json::from_str(&text).unwrap(), &Dialect::default())
}
