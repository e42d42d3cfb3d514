//! CPU and memory of nodes, as scores see them.

use std::collections::HashMap;
use std::sync::Arc;

use gpu_migrate_admission_ext::api::Memory;
use gpu_migrate_admission_ext::engine::{Engine, Settings};
use gpu_migrate_model::score::{HostResources, ScoringStrategy};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::common::*;

fn plain(name: &str, node: &str, cpu: u32, memory: u32) -> Value {
    bound(requesting(pod(name, json!([{"name": "main", "resources": {}}])), cpu, memory), node, "")
}

fn set_plain(engine: &Engine, pod: &Value) {
    engine.set_plain(&serde_json::from_str(&pod.to_string()).unwrap());
}

/// Two nodes alike, of which one has no CPU left for what usually comes: what needs little CPU goes there.
#[test]
fn by_lookahead_cpu_is_left_to_those_that_need_it() {
    let usual =
        (0..4).map(|at| bound(requesting(shared(&format!("u{at}"), &[(50, 1)]), 8_000, 0), "elsewhere", "0"));
    let nodes = [node("a", 2, 16), node("b", 2, 16)];
    let legacy_on = |node: &str, cpu| bound(requesting(legacy(&format!("l{node}"), 1), cpu, 0), node, "");
    let best = |more: &[Value]| {
        let items: Vec<Value> =
            nodes.iter().cloned().chain(usual.clone()).chain(more.iter().cloned()).collect();
        let settings =
            Settings { scoring: ScoringStrategy::Lookahead, one_node: true, ..Settings::default() };
        let engine = engine_with(Arc::new(Memory::default()), settings, &items);
        let small = requesting(shared("p", &[(50, 1)]), 1_000, 0);
        let answered = move |engine: &Engine| passing(engine, &small, &["a", "b"]);
        (answered(&engine), engine, answered)
    };
    assert_eq!(best(&[]).0, ["a"], "of equals that whose name comes first");
    assert_eq!(best(&[legacy_on("a", 8_000), legacy_on("b", 8_000)]).0, ["a"]);
    assert_eq!(best(&[legacy_on("a", 8_000), legacy_on("b", 60_000)]).0, ["b"]);
    let (answer, engine, answered) = best(&[plain("o", "b", 60_000, 0)]);
    assert_eq!(answer, ["b"]);
    engine.remove_pod("uid-o");
    assert_eq!(answered(&engine), ["a"]);
    set_plain(&engine, &plain("o", "b", 60_000, 0));
    assert_eq!(answered(&engine), ["b"]);
    set_plain(&engine, &plain("o", "b", 1_000, 0));
    assert_eq!(answered(&engine), ["a"]);
}

/// Whether CPU is enough is the scheduler's to say, who named the node: it may know of a pod that is gone already.
#[test]
fn a_node_without_cpu_by_our_count_is_answered_all_the_same() {
    for scoring in [ScoringStrategy::BestFit, ScoringStrategy::Fragmentation, ScoringStrategy::Lookahead] {
        let settings = Settings { scoring, one_node: true, ..Settings::default() };
        let on = |name: &str| [node(name, 1, 16), plain(&format!("o{name}"), name, 64_000, 0)];
        let waits = requesting(shared("u", &[(50, 1)]), 8_000, 0);
        let items: Vec<Value> = on("a").into_iter().chain(on("b")).chain([waits.clone()]).collect();
        let engine = engine_with(Arc::new(Memory::default()), settings, &items);
        assert_eq!(passing(&engine, &waits, &["a", "b"]), ["a"], "{scoring:?}");
    }
}

const NODES: [&str; 3] = ["n0", "n1", "n2"];

/// What may happen to nodes and to six pods, of which the first three have cards.
#[derive(Clone, Debug)]
enum Step {
    Node(usize, u32),
    NodeGone(usize),
    Pod(usize, usize, u32),
    PodGone(usize),
    /// All pods are listed again; of those known so many are still there, by bits.
    List(u8),
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (0..NODES.len(), 0_u32..200_000).prop_map(|(node, cpu)| Step::Node(node, cpu)),
        1 => (0..NODES.len()).prop_map(Step::NodeGone),
        5 => (0_usize..6, 0..NODES.len(), 0_u32..50_000).prop_map(|(pod, node, cpu)| Step::Pod(pod, node, cpu)),
        2 => (0_usize..6).prop_map(Step::PodGone),
        1 => any::<u8>().prop_map(Step::List),
    ]
}

/// What the API server has.
#[derive(Debug, Default)]
struct World {
    nodes: HashMap<usize, u32>,
    pods: HashMap<usize, (usize, u32)>,
}

impl World {
    fn show(engine: &Engine, pod: usize, (node, cpu): (usize, u32)) {
        let name = format!("p{pod}");
        if pod < 3 {
            let share = requesting(shared(&name, &[(10, 1)]), cpu, cpu / 2);
            engine.set_pod(facts(&bound(share, NODES[node], "0")));
        } else {
            set_plain(engine, &plain(&name, NODES[node], cpu, cpu / 2));
        }
    }

    fn take(&mut self, step: &Step, engine: &Engine) {
        match *step {
            Step::Node(at, cpu) => {
                self.nodes.insert(at, cpu);
                let mut node = node(NODES[at], 4, 16);
                node["status"]["allocatable"]["cpu"] = json!(format!("{cpu}m"));
                node["status"]["allocatable"]["memory"] = json!(format!("{cpu}Mi"));
                engine.set_node(NODES[at], facts_of_node(&node));
            }
            Step::NodeGone(at) => {
                self.nodes.remove(&at);
                engine.remove_node(NODES[at]);
            }
            Step::Pod(pod, node, cpu) => {
                self.pods.insert(pod, (node, cpu));
                Self::show(engine, pod, (node, cpu));
            }
            Step::PodGone(pod) => {
                self.pods.remove(&pod);
                engine.remove_pod(&format!("uid-p{pod}"));
            }
            Step::List(still) => {
                self.pods.retain(|pod, _| still >> pod & 1 == 1);
                engine.begin_list();
                self.pods.iter().for_each(|(pod, on)| Self::show(engine, *pod, *on));
                engine.end_list();
            }
        }
    }

    fn left(&self, at: usize) -> HostResources {
        let all = self.nodes[&at];
        let on = || self.pods.values().filter(|(node, _)| *node == at);
        let left = |of: fn(u32) -> u32| all.saturating_sub(on().map(|(_, cpu)| of(*cpu)).sum());
        HostResources { cpu_milli: left(|cpu| cpu), memory_mib: left(|cpu| cpu / 2) }.rounded_down()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// What is counted by every change is what a count of all pods says; and a node whose count has changed is another generation.
    #[test]
    fn what_is_left_is_counted_by_deltas(steps in prop::collection::vec(any_step(), 1..40), loaded in 0_usize..20) {
        let engine = engine(&[]);
        let mut world = World::default();
        let mut seen: HashMap<(usize, u64), HostResources> = HashMap::new();
        engine.load();
        for (at, step) in steps.iter().enumerate() {
            if at == loaded {
                engine.fill(|_| {});
            }
            world.take(step, &engine);
            if at < loaded {
                continue;
            }
            engine.read(|cluster| {
                for (at, name) in NODES.iter().enumerate() {
                    let known = cluster.node_with_id(name);
                    prop_assert_eq!(known.is_some(), world.nodes.contains_key(&at));
                    let Some((id, info)) = known else { continue };
                    prop_assert_eq!(info.host, world.left(at), "{}", name);
                    let same = seen.insert((id, info.generation), info.host);
                    prop_assert!(same.is_none_or(|same| same == info.host));
                }
                Ok(())
            })?;
        }
    }
}
