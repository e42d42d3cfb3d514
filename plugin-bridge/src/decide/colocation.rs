//! A container's memory lies on the cards of its cores, or the container does not start.
//!
//! Which cards a container sees is said once, in the answer for its cores. The answer for its memory names no card, so where
//! its memory is accounted for can be corrected at any time, as a deviation from the kubelet's own book. Guesses during
//! admission only make that rare: what counts is done when the kubelet's book has named both halves of a container, and
//! looked at a last time before the container starts. So whoever was killed in between, no container runs with memory that
//! the books have on another card.

use std::collections::{BTreeMap, BTreeSet};

use gpu_migrate_model::ask::ContainerKind;
use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::ledger::HolderId;
use gpu_migrate_model::units::CardIndex;

use super::NodeState;
use super::grants::{DeviceKey, GrantId, Resource};
use super::plan::{amount, other};

/// Why a container may not start yet. The kubelet tries again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartRefusal {
    /// Neither the kubelet's book nor its API has said so far whose devices these are.
    #[error(
        "the kubelet has not said yet which container has these devices, or what else that container has"
    )]
    Unknown,
    /// Its memory is on another card than its cores, where there is no room for it.
    #[error("{holder}: its cores are on {cards:?}, and there is no room for its memory beside them yet")]
    NotColocated {
        /// The container.
        holder: HolderId,
        /// The cards that it would see.
        cards: Vec<CardIndex>,
    },
}

impl NodeState {
    /// Whether the container with these devices may start, and who it is. Brings its memory to its cores where it must; what
    /// [`NodeState::deviations`] says then must be on disk before the container starts.
    ///
    /// # Errors
    /// [`StartRefusal`]; what may change is tried again by the kubelet.
    pub fn may_start(&mut self, resource: SharedResource, ids: &[String]) -> Result<HolderId, StartRefusal> {
        let kind = Resource::Shared(resource);
        let keys: BTreeSet<DeviceKey> = ids.iter().filter_map(|id| self.key(&kind, id)).collect();
        let same = self.grants.values().filter(|g| g.confirmed && g.resource == kind && g.requested == keys);
        let named: Vec<HolderId> = same.map(|g| g.holder.clone()).collect();
        let latest = named.last().ok_or(StartRefusal::Unknown)?.clone();
        // An init container hands its devices on, so that they do not tell which of the pod's containers starts.
        for holder in named.iter().filter(|holder| holder.pod_uid == latest.pod_uid) {
            self.check_colocated(holder, resource)?;
        }
        Ok(latest)
    }

    /// Whether both halves of a container are known, and on the same cards now.
    fn check_colocated(&mut self, holder: &HolderId, resource: SharedResource) -> Result<(), StartRefusal> {
        let halves =
            self.core_memory_pairs(&BTreeSet::from([holder.clone()])).remove(holder).unwrap_or_default();
        if let CoreMemoryPair { cores: Some(cores), memory: Some(memory) } = halves {
            if self.colocate(cores, memory) {
                return Ok(());
            }
            let cards = self.cards_of(&self.grants[&cores].actual).into_iter().collect();
            return Err(StartRefusal::NotColocated { holder: holder.clone(), cards });
        }
        let container = self.pods.get(&holder.pod_uid).and_then(|pod| pod.container(&holder.container));
        match container {
            Some(c) if amount(other(resource), &c.ask.demand) > 0 => Err(StartRefusal::Unknown),
            _ => Ok(()),
        }
    }

    /// Brings the memory of these containers to their cores, as far as both are known and there is room.
    pub(super) fn colocate_memory(&mut self, holders: &BTreeSet<HolderId>) {
        for halves in self.core_memory_pairs(holders).into_values() {
            if let CoreMemoryPair { cores: Some(cores), memory: Some(memory) } = halves {
                self.colocate(cores, memory);
            }
        }
    }

    /// Two promises for one container, `id` of this resource and `partner` of the other: whether they are on the same cards now.
    pub(super) fn join(&mut self, resource: SharedResource, id: GrantId, partner: GrantId) -> bool {
        match resource {
            SharedResource::Cores => self.colocate(id, partner),
            SharedResource::Memory => self.colocate(partner, id),
        }
    }

    fn core_memory_pairs(&self, holders: &BTreeSet<HolderId>) -> BTreeMap<HolderId, CoreMemoryPair> {
        let mut halves: BTreeMap<HolderId, CoreMemoryPair> = BTreeMap::new();
        for (id, grant) in self.grants.iter().filter(|(_, g)| g.confirmed && holders.contains(&g.holder)) {
            let slot = halves.entry(grant.holder.clone()).or_default();
            match grant.resource {
                Resource::Shared(SharedResource::Cores) => slot.cores = Some(*id),
                Resource::Shared(SharedResource::Memory) => slot.memory = Some(*id),
                Resource::Legacy(_) => {}
            }
        }
        halves
    }

    /// Moves memory to the cards of its cores. Whether it is there now.
    fn colocate(&mut self, cores: GrantId, memory: GrantId) -> bool {
        let (Some(seen), Some(grant)) = (self.grants.get(&cores), self.grants.get(&memory)) else {
            return false;
        };
        let cards = self.cards_of(&seen.actual);
        if self.cards_of(&grant.actual).is_subset(&cards) {
            return true;
        }
        let as_asked = self.cards_of(&grant.requested).is_subset(&cards)
            && grant.requested.iter().all(|key| self.is_available_to(memory, key));
        let actual: BTreeSet<DeviceKey> = if as_asked {
            grant.requested.clone()
        } else {
            let cards: Vec<CardIndex> = cards.into_iter().collect();
            let open = |n: &u32| self.is_available_to(memory, &DeviceKey::Block(*n));
            let picked = self.spread_over(SharedResource::Memory, &cards, grant.actual.len(), open);
            if picked.len() < grant.actual.len() {
                return false;
            }
            picked.into_iter().map(DeviceKey::Block).collect()
        };
        self.move_to(memory, actual);
        true
    }

    /// Whether a promise may have this device: nobody has it, or a container of the same pod that is not there at the same time.
    fn is_available_to(&self, id: GrantId, key: &DeviceKey) -> bool {
        match self.owner.get(key) {
            None => true,
            Some(owner) => *owner == id || self.run_in_sequence(*owner, id),
        }
    }

    /// One is an init container of the other's pod.
    fn run_in_sequence(&self, one: GrantId, another: GrantId) -> bool {
        let named = |id: &GrantId| self.grants.get(id).filter(|g| g.confirmed).map(|g| &g.holder);
        let (Some(one), Some(another)) = (named(&one), named(&another)) else { return false };
        one.pod_uid == another.pod_uid && one != another && (self.is_init(one) || self.is_init(another))
    }

    pub(super) fn is_init(&self, holder: &HolderId) -> bool {
        let container = self.pods.get(&holder.pod_uid).and_then(|pod| pod.container(&holder.container));
        container.is_some_and(|c| c.ask.kind == ContainerKind::Init)
    }
}

/// The promises of one container.
#[derive(Clone, Copy, Debug, Default)]
struct CoreMemoryPair {
    cores: Option<GrantId>,
    memory: Option<GrantId>,
}
