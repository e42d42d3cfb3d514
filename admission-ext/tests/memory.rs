//! How much the extender keeps in memory, counted by the allocator: in a program of its own, and one test after the other.

#![allow(clippy::unwrap_used)] // a test may fail

use std::io::BufWriter;
use std::sync::{Arc, Mutex};

use gpu_migrate_admission_ext::api::Memory;
use gpu_migrate_admission_ext::engine::{Engine, Leads, Settings, machine_clock};
use gpu_migrate_admission_ext::metrics::Metrics;
use gpu_migrate_admission_ext::snapshot;
use gpu_migrate_admission_ext::state::node::{NodeFacts, ShadowFacts};
use gpu_migrate_admission_ext::state::pod::PodFacts;
use peak_alloc::PeakAlloc;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};

#[path = "../examples/generate_snapshot/cluster.rs"]
mod generate;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn engine() -> Arc<Engine> {
    let metrics = Metrics::register(&mut Registry::default());
    let (engine, _) = Engine::new(Arc::new(Memory::default()), Settings::default(), machine_clock(), metrics);
    engine
}

/// A generated cluster in which each node has the labels that feature discovery gives it.
fn filled(nodes: u32) -> Arc<Engine> {
    let shape = generate::Shape {
        nodes,
        pods_per_node: 12,
        plain_per_node: 24,
        waiting: 2 * nodes,
        gangs: nodes / 75,
        cards: 8,
        seed: 1,
    };
    let mut text = BufWriter::new(Vec::new());
    generate::write(shape, &mut text).unwrap();
    let mut list: Value = serde_json::from_slice(&text.into_inner().unwrap()).unwrap();
    for node in list["items"].as_array_mut().unwrap().iter_mut().filter(|item| item["kind"] == "Node") {
        for at in 0..60 {
            node["metadata"]["labels"][format!("feature.node.kubernetes.io/cpu-cpuid.FEATURE-{at}")] =
                json!("true");
        }
    }
    let (text, engine) = (list.to_string(), engine());
    drop(list);
    let rules = engine.settings().rules.clone();
    engine.fill(|cluster| snapshot::fill(text.as_bytes(), "test", &rules, cluster).unwrap());
    engine.set_leading(Leads::Alone);
    engine.set_synced(true);
    engine
}

/// 5,000 nodes and 60,000 pods are to take 150 MiB, the program and what its requests need included.
#[test]
fn a_node_with_its_pods_takes_less_than_24_kib() {
    let _alone = ONE_AT_A_TIME.lock();
    let before = HEAP.current_usage();
    let nodes = 300;
    let engine = filled(nodes);
    let of_each = (HEAP.current_usage() - before) / nodes as usize;
    println!("{of_each} bytes a node");
    assert!(of_each < 24 << 10, "{of_each} bytes a node");
    drop(engine);
}

/// Nodes that an autoscaler adds and removes under ever new names, with their pods and GPUShadows; and names that the scheduler asks
/// about which no watch has shown.
#[test]
fn a_hundred_thousand_names_of_nodes_leave_nothing_behind() {
    let _alone = ONE_AT_A_TIME.lock();
    let engine = filled(10);
    let rules = engine.settings().rules.clone();
    let cards =
        json!({"nvidia.com/gpu": "2", "tencent.com/vcuda-core": "200", "tencent.com/vcuda-memory": "64"});
    let node = json!({
        "metadata": {"name": "n", "uid": "n"}, "status": {"capacity": cards, "allocatable": cards},
    })
    .to_string();
    let limits = json!({"tencent.com/vcuda-core": "10", "tencent.com/vcuda-memory": "4"});
    let waits = json!({
        "metadata": {"name": "w", "namespace": "team", "uid": "w", "annotations": {}},
        "spec": {"containers": [{"name": "main", "resources": {"limits": limits, "requests": limits}}]},
        "status": {"phase": "Pending"},
    });
    let shadow = json!({"cards": [{"uuid": "GPU-0", "minor": 0, "model": "A100", "memoryMiB": 8192}]});
    let node = NodeFacts::read(&serde_json::from_str(&node).unwrap(), &rules.dialect);
    let shadow = ShadowFacts::read(&serde_json::from_value(shadow).unwrap());
    let pod = PodFacts::read(&serde_json::from_str(&waits.to_string()).unwrap(), &rules);
    let plain_on = |node: &str| {
        let spec = json!({"nodeName": node, "containers": [{"name": "main", "resources": {"requests": {"cpu": "1"}}}]});
        json!({"metadata": {"name": "plain", "uid": format!("plain-{node}")}, "spec": spec}).to_string()
    };
    let round = |at: u32| {
        let name: Arc<str> = format!("autoscaled-{at}").into();
        let labels = [("kubernetes.io/hostname".into(), Arc::clone(&name))].into();
        engine.set_node(&name, NodeFacts { labels, ..node.clone() });
        engine.set_shadow(&name, shadow.clone().of_node(Some(name.to_string())));
        let (uid, namespace, node) = (Arc::clone(&name), Arc::clone(&name), Some(Arc::clone(&name)));
        engine.set_pod(PodFacts { uid, namespace, node, ..pod.clone() });
        engine.set_plain(&serde_json::from_str(&plain_on(&name)).unwrap());
        if at.is_multiple_of(10) {
            let request =
                json!({"Pod": waits, "NodeNames": [&*name, &*format!("never-seen-{at}")]}).to_string();
            engine.filter("filter", request.as_bytes());
            engine.prioritize(request.as_bytes());
        }
        engine.remove_pod(&name);
        engine.remove_pod(&format!("plain-{name}"));
        engine.remove_shadow(&name);
        engine.remove_node(&name);
    };
    (0..10_000).for_each(round);
    let before = HEAP.current_usage();
    (10_000..110_000).for_each(round);
    let grown = HEAP.current_usage().saturating_sub(before);
    assert!(grown < 256 << 10, "{grown} bytes more");
}
