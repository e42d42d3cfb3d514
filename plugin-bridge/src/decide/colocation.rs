//! A container's memory is accounted for on the cards of its cores, or the container does not start.
//!
//! The Allocate answer for cores decides which cards a container sees. The answer for memory names no card, so memory can be
//! accounted for on another card later, as a deviation from the kubelet checkpoint. Candidates found during admission only make
//! that rare: memory is moved when the kubelet has named the holder of both grants, and checked a last time before the container
//! starts. So whichever process was killed in between, no container runs with memory that the ledger has on another card.

use std::collections::{BTreeMap, BTreeSet};

use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::ledger::HolderId;
use gpu_migrate_model::units::CardIndex;

use super::NodeState;
use super::grants::{DeviceKey, GrantId, Resource};
use super::plan::{amount, other};

/// Why a container may not start yet. The kubelet retries.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartRefusal {
    /// Neither the kubelet checkpoint nor pod-resources names the container of these devices so far.
    #[error(
        "neither the kubelet checkpoint nor pod-resources names the container of these devices yet, or its other vcuda resource"
    )]
    NotIdentified,
    /// A card has other block numbers than when the container got its own: the map of them was lost, or the card is gone.
    #[error(
        "{0} of these devices are of no card that is here now: the container cannot start, delete its pod"
    )]
    OfNoCard(usize),
    /// Its memory is on another card than its cores, and their cards have too little free memory.
    #[error("{holder}: its cores are on {cards:?}, which have too little free memory for it yet")]
    NotColocated { holder: HolderId, cards: Vec<CardIndex> },
}

impl NodeState {
    /// Whether the container with these devices may start, and which one it is. Moves its memory to the cards of its cores where
    /// necessary; [`NodeState::deviations`] must then be on disk before the container starts.
    ///
    /// # Errors
    /// [`StartRefusal`]; the kubelet retries.
    pub fn may_start(&mut self, resource: SharedResource, ids: &[String]) -> Result<HolderId, StartRefusal> {
        let kind = Resource::Shared(resource);
        let keys: BTreeSet<DeviceKey> = ids.iter().filter_map(|id| self.key(&kind, id)).collect();
        if keys.len() < ids.len() {
            // Only a part of what it asked for would be accounted for.
            return Err(StartRefusal::OfNoCard(ids.len() - keys.len()));
        }
        let same = self.grants.values().filter(|g| g.confirmed && g.resource == kind && g.requested == keys);
        let named: Vec<HolderId> = same.map(|g| g.holder.clone()).collect();
        let latest = named.last().ok_or(StartRefusal::NotIdentified)?.clone();
        // Later containers get an init container's devices, so that IDs do not identify which of the pod's containers starts.
        for holder in named.iter().filter(|holder| holder.pod_uid == latest.pod_uid) {
            self.check_colocated(holder, resource)?;
        }
        Ok(latest)
    }

    /// Whether both grants of a container are known, and on the same cards now.
    fn check_colocated(&mut self, holder: &HolderId, resource: SharedResource) -> Result<(), StartRefusal> {
        let pair =
            self.core_memory_pairs(&BTreeSet::from([holder.clone()])).remove(holder).unwrap_or_default();
        if let CoreMemoryPair { cores: Some(cores), memory: Some(memory) } = pair {
            if self.colocate(cores, memory) {
                return Ok(());
            }
            let cards = self.cards_of(&self.grants[&cores].actual).into_iter().collect();
            return Err(StartRefusal::NotColocated { holder: holder.clone(), cards });
        }
        match self.container(holder) {
            Some(c) if amount(other(resource), &c.ask.demand) > 0 => Err(StartRefusal::NotIdentified),
            _ => Ok(()),
        }
    }

    /// Moves the memory of these containers to the cards of their cores, where both are known and the cards have it free.
    pub(super) fn colocate_memory(&mut self, holders: &BTreeSet<HolderId>) {
        for pair in self.core_memory_pairs(holders).into_values() {
            if let CoreMemoryPair { cores: Some(cores), memory: Some(memory) } = pair {
                self.colocate(cores, memory);
            }
        }
    }

    /// Two grants of one container, `id` of this resource and `partner` of the other: whether they are on the same cards now.
    pub(super) fn colocate_pair(&mut self, resource: SharedResource, id: GrantId, partner: GrantId) -> bool {
        match resource {
            SharedResource::Cores => self.colocate(id, partner),
            SharedResource::Memory => self.colocate(partner, id),
        }
    }

    fn core_memory_pairs(&self, holders: &BTreeSet<HolderId>) -> BTreeMap<HolderId, CoreMemoryPair> {
        let mut pairs: BTreeMap<HolderId, CoreMemoryPair> = BTreeMap::new();
        for (id, grant) in self.grants.iter().filter(|(_, g)| g.confirmed && holders.contains(&g.holder)) {
            let pair = pairs.entry(grant.holder.clone()).or_default();
            match grant.resource {
                Resource::Shared(SharedResource::Cores) => pair.cores = Some(*id),
                Resource::Shared(SharedResource::Memory) => pair.memory = Some(*id),
                Resource::Legacy(_) => {}
            }
        }
        pairs
    }

    /// Moves memory to the cards of its cores. Whether it is there now.
    fn colocate(&mut self, cores: GrantId, memory: GrantId) -> bool {
        let (Some(of_cores), Some(of_memory)) = (self.grants.get(&cores), self.grants.get(&memory)) else {
            return false;
        };
        let cards = self.cards_of(&of_cores.actual);
        if self.cards_of(&of_memory.actual).is_subset(&cards) {
            return true;
        }
        let as_requested = self.cards_of(&of_memory.requested).is_subset(&cards)
            && of_memory.requested.iter().all(|key| self.is_available_to(memory, key));
        let actual: BTreeSet<DeviceKey> = if as_requested {
            of_memory.requested.clone()
        } else {
            let cards: Vec<CardIndex> = cards.into_iter().collect();
            let available = |n: &u32| self.is_available_to(memory, &DeviceKey::Block(*n));
            let picked = self.spread_over(SharedResource::Memory, &cards, of_memory.actual.len(), available);
            if picked.len() < of_memory.actual.len() {
                return false;
            }
            picked.into_iter().map(DeviceKey::Block).collect()
        };
        self.reassign(memory, actual);
        true
    }

    /// Whether a grant may have this device: it has no owner, or one whose container never runs at the same time.
    fn is_available_to(&self, id: GrantId, key: &DeviceKey) -> bool {
        match self.owner.get(key) {
            None => true,
            Some(owner) => *owner == id || self.run_in_sequence(*owner, id),
        }
    }

    /// They are containers of one pod, and one of them is an init container.
    fn run_in_sequence(&self, one: GrantId, another: GrantId) -> bool {
        let named = |id: &GrantId| self.grants.get(id).filter(|g| g.confirmed).map(|g| &g.holder);
        let (Some(one), Some(another)) = (named(&one), named(&another)) else { return false };
        one.pod_uid == another.pod_uid && one != another && (self.is_init(one) || self.is_init(another))
    }
}

/// The vcuda grants of one container.
#[derive(Clone, Copy, Debug, Default)]
struct CoreMemoryPair {
    cores: Option<GrantId>,
    memory: Option<GrantId>,
}
