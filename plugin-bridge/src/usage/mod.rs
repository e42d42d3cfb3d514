//! What each container uses of the cards: NVML's processes, found in their cgroups, beside what the ledger says was requested.
//!
//! The process that calls NVML samples the cards in each of its rounds, and reads [whose](owner) each process is while it knows that
//! the process is there. `attribute` adds that up by container, when a metric or the page is asked for: a container that is gone from
//! the ledger and has no process left has no series any more.

mod attribute;
mod export;
pub mod owner;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, Weak};

use gpu_migrate_model::usage::NodeUse;
use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use serde::{Deserialize, Serialize};

use self::owner::Owner;
use crate::decide::Millis;
use crate::node::Node;

/// After this a sample is not reported any more: longer than a process that does not answer is waited for, and the next round.
const KEPT: Millis = 30_000;

/// What NVML said of one card in one round.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardSample {
    pub utilization_percent: Option<u32>,
    pub memory_used_bytes: Option<u64>,
    pub power_milliwatts: Option<u32>,
    pub temperature_celsius: Option<u32>,
    /// `None` where NVML does not list them, or lists those of the agent's own PID namespace alone.
    pub processes: Option<Vec<ProcessSample>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessSample {
    pub pid: u32,
    /// `None` for one that is in no pod, or whose cgroup could not be read.
    pub owner: Option<Owner>,
    pub memory_bytes: Option<u64>,
    /// Of the card's multiprocessors, since the round before.
    pub utilization_percent: Option<u32>,
}

/// The latest sample of each card, and what was counted since the start.
#[derive(Debug, Default)]
pub struct Usage {
    node: OnceLock<Weak<Node>>,
    /// Of the Node, for gpu-manager's gauges.
    name: OnceLock<String>,
    samples: Mutex<BTreeMap<String, (Millis, CardSample)>>,
    /// By UUID, empty where NVML named no card, and number.
    xids: Mutex<BTreeMap<(String, u64), u64>>,
}

impl Usage {
    /// Our own metrics; the registry's prefix names the component.
    pub fn register(self: &Arc<Self>, registry: &mut Registry) {
        registry.register_collector(Box::new(export::Export(self.clone())));
    }

    /// gpu-manager's gauges, which have no prefix.
    pub fn register_gpu_manager(self: &Arc<Self>, registry: &mut Registry) {
        registry.register_collector(Box::new(export::GpuManager(self.clone())));
    }

    /// The name of the Node. Once.
    pub fn set_name(&self, name: &str) {
        let _ = self.name.set(name.to_owned());
    }

    /// The node whose ledger says what was requested. Once.
    pub fn set_node(&self, node: &Arc<Node>) {
        let _ = self.node.set(Arc::downgrade(node));
    }

    pub fn observe(&self, uuid: &str, sample: CardSample, now: Millis) {
        self.samples.lock().insert(uuid.to_owned(), (now, sample));
    }

    pub fn count_xid(&self, uuid: Option<&str>, xid: u64) {
        *self.xids.lock().entry((uuid.unwrap_or_default().to_owned(), xid)).or_default() += 1;
    }

    /// As it is now.
    #[must_use]
    pub fn report(&self) -> NodeUse {
        let Some(node) = self.node.get().and_then(Weak::upgrade) else { return NodeUse::default() };
        let samples = self.fresh(node.now());
        node.with(|state, _| attribute::node_use(state, |uuid| samples.get(uuid)))
    }

    /// A card that does not answer any more has no sample.
    fn fresh(&self, now: Millis) -> BTreeMap<String, CardSample> {
        let mut samples = self.samples.lock();
        samples.retain(|_, (at, _)| now.saturating_sub(*at) <= KEPT);
        samples.iter().map(|(uuid, (_, sample))| (uuid.clone(), sample.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use gpu_migrate_model::topology::{LinkLevel, Topology};

    use super::attribute::tests::{node, process};
    use super::*;
    use crate::metrics::Metrics;
    use crate::node::{EarlierRecord, Paths};

    fn series(node: &Node) -> Vec<String> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &node.metrics.registry()).unwrap();
        let ours = ["gpu_migrate_node_agent_card_", "gpu_migrate_node_agent_container_", "container_"];
        let lines = text.lines().filter_map(|line| {
            let is_ours = ours.iter().any(|name| line.starts_with(name));
            is_ours.then(|| line.trim_start_matches("gpu_migrate_node_agent_").to_owned())
        });
        lines.collect()
    }

    #[test]
    fn a_sample_is_reported_until_it_is_old() {
        let usage = Usage::default();
        usage.observe("GPU-0", CardSample::default(), 5);
        assert_eq!(usage.fresh(5 + KEPT).len(), 1);
        assert!(usage.fresh(6 + KEPT).is_empty());
    }

    #[test]
    fn every_series_has_its_labels_and_goes_with_what_it_is_of() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let paths = Paths { kubelet: path("kubelet"), state: path("state"), cgroups: path("cgroups") };
        let topology = Topology::uniform(2, LinkLevel::Pix);
        let node = Node::start(paths, EarlierRecord::default(), node(), topology, Metrics::default());
        let usage = &node.metrics.usage;
        let sample = CardSample {
            utilization_percent: Some(40),
            memory_used_bytes: Some(3 << 20),
            power_milliwatts: Some(62_500),
            temperature_celsius: Some(31),
            processes: Some(vec![process(7, "a", "id-a", 1 << 20, 30), process(8, "", "", 2 << 20, 10)]),
        };
        usage.observe("GPU-0", sample, node.now());
        usage.count_xid(Some("GPU-0"), 79);
        usage.set_name("n");
        let a = r#"UUID="GPU-0",gpu="0",namespace="team",pod="a-pod",container="main",kind="shared""#;
        let b = r#"UUID="GPU-1",gpu="1",namespace="team",pod="b-pod",container="main",kind="legacy""#;
        let nobody = r#"UUID="GPU-0",gpu="0",namespace="",pod="",container="",kind="none""#;
        let [card_0, card_1] = [0, 1].map(|n| format!(r#"UUID="GPU-{n}",gpu="{n}",modelName="A100""#));
        let expected = [
            format!("card_memory_bytes{{{card_0}}} 4294967296.0"),
            format!("card_memory_bytes{{{card_1}}} 4294967296.0"),
            format!("card_memory_used_bytes{{{card_0}}} 3145728.0"),
            format!("card_utilization_ratio{{{card_0}}} 0.4"),
            format!("card_power_watts{{{card_0}}} 62.5"),
            format!("card_temperature_celsius{{{card_0}}} 31.0"),
            format!("container_processes{{{nobody}}} 1.0"),
            format!("container_processes{{{a}}} 1.0"),
            format!("container_utilization_ratio{{{nobody}}} 0.1"),
            format!("container_utilization_ratio{{{a}}} 0.3"),
            format!("container_memory_used_bytes{{{nobody}}} 2097152.0"),
            format!("container_memory_used_bytes{{{a}}} 1048576.0"),
            format!("container_requested_ratio{{{a}}} 0.25"),
            format!("container_requested_ratio{{{b}}} 1.0"),
            format!("container_memory_requested_bytes{{{a}}} 1073741824.0"),
            format!("container_memory_requested_bytes{{{b}}} 4294967296.0"),
            r#"card_xid_errors_total{UUID="GPU-0",xid="79"} 1"#.to_owned(),
        ];
        let of = |pod: &str| format!(r#"pod_name="{pod}",namespace="team",node="n",container_name="main""#);
        let (a_of, b_of) = (of("a-pod"), of("b-pod"));
        let of_gpu_manager = [
            format!(r#"container_gpu_utilization{{{a_of},gpu="gpu0"}} 30.0"#),
            format!(r#"container_gpu_utilization{{{a_of},gpu="total"}} 30.0"#),
            format!(r#"container_gpu_memory_total{{{a_of},gpu_memory="gpu0"}} 1.0"#),
            format!(r#"container_gpu_memory_total{{{a_of},gpu_memory="total"}} 1.0"#),
            format!(r#"container_request_gpu_utilization{{{a_of},req_of_gpu="total"}} 0.25"#),
            format!(r#"container_request_gpu_utilization{{{b_of},req_of_gpu="total"}} 1.0"#),
            format!(r#"container_request_gpu_memory{{{a_of},req_of_gpu_memory="total"}} 1024.0"#),
            format!(r#"container_request_gpu_memory{{{b_of},req_of_gpu_memory="total"}} 4096.0"#),
        ];
        let (mut shown, mut all) = (series(&node), [expected.as_slice(), &of_gpu_manager].concat());
        shown.sort();
        all.sort();
        assert_eq!(shown, all);

        let without = CardSample { processes: Some(vec![]), ..CardSample::default() };
        usage.observe("GPU-0", without, node.now());
        let left = series(&node);
        assert!(!left.iter().any(|line| line.contains(nobody)), "its process has ended: {left:#?}");
        assert!(left.contains(&format!("container_memory_used_bytes{{{a}}} 0.0")), "{left:#?}");
    }
}
