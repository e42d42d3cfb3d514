//! Pods without cards: of each nothing but its node, and how much of its CPU and memory it has.

use std::collections::HashMap;

use ahash::RandomState;
use gpu_migrate_model::score::HostResources;

use super::NodeId;

/// The pods without cards that are bound. Of a UID only a hash is kept: one that is taken for another costs a worse place once in
/// billions.
#[derive(Debug, Default)]
pub(super) struct PlainPods {
    hash: RandomState,
    pods: HashMap<u64, PlainPod, RandomState>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PlainPod {
    pub(super) node: u32,
    /// As in [`super::Known::list`].
    pub(super) list: u32,
    pub(super) host: HostResources,
}

impl PlainPod {
    pub(super) fn node(&self) -> NodeId {
        self.node as NodeId
    }
}

impl PlainPods {
    /// Returns what was known of it.
    pub(super) fn insert(&mut self, uid: &str, pod: PlainPod) -> Option<PlainPod> {
        self.pods.insert(self.hash.hash_one(uid), pod)
    }

    pub(super) fn remove(&mut self, uid: &str) -> Option<PlainPod> {
        self.pods.remove(&self.hash.hash_one(uid))
    }

    /// Takes out those that were not shown since this list began.
    pub(super) fn take_unlisted(&mut self, list: u32) -> Vec<PlainPod> {
        self.pods.extract_if(|_, pod| pod.list != list).map(|(_, pod)| pod).collect()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &PlainPod> {
        self.pods.values()
    }
}

/// What the pods without cards on a node have of it, all together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct HeldByPlain {
    pub(super) pods: u32,
    cpu_milli: u64,
    memory_mib: u64,
}

impl HeldByPlain {
    pub(super) fn add(&mut self, host: HostResources) {
        self.pods += 1;
        self.cpu_milli += u64::from(host.cpu_milli);
        self.memory_mib += u64::from(host.memory_mib);
    }

    pub(super) fn take_back(&mut self, host: HostResources) {
        self.pods -= 1;
        self.cpu_milli -= u64::from(host.cpu_milli);
        self.memory_mib -= u64::from(host.memory_mib);
    }

    pub(super) fn all(&self) -> HostResources {
        let most = |sum: u64| u32::try_from(sum).unwrap_or(u32::MAX);
        HostResources { cpu_milli: most(self.cpu_milli), memory_mib: most(self.memory_mib) }
    }
}
