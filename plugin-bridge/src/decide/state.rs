//! The state of the node agent, and the few operations by which everything else changes it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use gpu_migrate_model::ask::ContainerKind;
use gpu_migrate_model::card::{Card, Health};
use gpu_migrate_model::device_id::{Layout, SharedResource};
use gpu_migrate_model::ledger::{Hold, HolderId, Ledger, Phase, Refused, Slot};
use gpu_migrate_model::names::Dialect;
use gpu_migrate_model::topology::{Topology, Tree};
use gpu_migrate_model::units::{Blocks, CardIndex, Cores};

use super::checkpoint_state::CheckpointState;
use super::grants::{DeviceKey, Grant, GrantId, Resource};
use super::pods::PodTable;
use super::registration::Registration;
use super::withdrawals::Withdrawal;
use super::{ContainerView, Millis, PodView};
use crate::record::RecordRow;

#[derive(Clone, Debug)]
pub struct Settings {
    /// Resource names and units.
    pub dialect: Dialect,
    /// How long a holder must be absent when only one source can be asked (I3), and the grace period of pods whose own is not known:
    /// the API server's default.
    pub grace: Millis,
    /// How long a grant may stay out of the kubelet checkpoint before it counts as never claimed by a container.
    pub unclaimed: Millis,
    /// How long a resource stays withdrawn at least after an Allocate had to be refused.
    pub withdraw: Millis,
    /// How long it does where the Node is not seen to carry it.
    pub withdraw_unseen: Millis,
    /// Report the NUMA node of vcuda devices. Off, because a topology manager would narrow the choice that the extender made.
    pub numa_hints: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            dialect: Dialect::default(),
            grace: 30_000,
            unclaimed: 60_000,
            withdraw: 5_000,
            withdraw_unseen: 30_000,
            numa_hints: false,
        }
    }
}

/// One device that NVIDIA's plugin lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpstreamDevice {
    pub id: Arc<str>,
    /// NVIDIA's plugin lists it as healthy, and an earlier report of it as unhealthy has been refuted.
    pub healthy: bool,
    /// NUMA nodes near it, passed on unchanged.
    pub numa: Vec<i64>,
}

/// See the [module](super).
#[derive(Clone, Debug)]
pub struct NodeState {
    pub(super) settings: Settings,
    pub(super) layout: Layout,
    pub(super) ledger: Ledger,
    pub(super) tree: Tree,
    pub(super) grants: BTreeMap<GrantId, Grant>,
    pub(super) owner: HashMap<DeviceKey, GrantId>,
    pub(super) pods: PodTable,
    pub(super) upstream: BTreeMap<Arc<str>, Vec<UpstreamDevice>>,
    /// MIG devices, whose IDs do not contain their card's UUID.
    mig_devices: BTreeMap<String, CardIndex>,
    /// PIDs that NVML last listed on each card, in the host's namespace. For drift only: they free and hold nothing.
    pub(super) processes: BTreeMap<CardIndex, BTreeSet<u32>>,
    /// Cards that containers have through DRA, and which.
    pub(super) claimed: BTreeMap<CardIndex, String>,
    /// Cards whose holders are not known for sure, and why: nothing new is allocated on them while this process runs.
    closed: BTreeMap<CardIndex, String>,
    /// The same while something else may use or allocate them: see `close_unaccounted`.
    pub(super) unaccounted: BTreeMap<CardIndex, String>,
    /// Containers whose devices of NVIDIA's plugin are on no card of this node (any more).
    pub(super) elsewhere: BTreeSet<HolderId>,
    pub(super) registration: Registration,
    /// Why shares cannot be limited on this node: none is added meanwhile.
    isolation_obstacle: Option<String>,
    /// Namespaces whose whole-card pods may be annotated and deleted.
    opted_in: BTreeSet<String>,
    /// Cards that the Node's annotation takes out of new allocation.
    cordoned: BTreeSet<CardIndex>,
    /// Deviations that an earlier process wrote, until the kubelet checkpoint has been read.
    pub(super) restored: Vec<RecordRow>,
    pub(super) withdrawn: BTreeMap<String, Withdrawal>,
    pub(super) checkpoint: CheckpointState,
    /// The latest time that was passed in.
    pub(super) clock: Millis,
    next: u64,
    version: u64,
    freed: u64,
}

impl NodeState {
    /// No grants, over the cards of this node.
    #[must_use]
    pub fn new(settings: Settings, cards: Vec<Card>, topology: &Topology) -> Self {
        let layout = Layout::new(&settings.dialect, cards.iter().map(Card::blocks));
        let grace = settings.grace;
        Self {
            settings,
            layout,
            ledger: Ledger::new(cards),
            tree: topology.tree(),
            grants: BTreeMap::new(),
            owner: HashMap::new(),
            pods: PodTable::default(),
            upstream: BTreeMap::new(),
            mig_devices: BTreeMap::new(),
            processes: BTreeMap::new(),
            claimed: BTreeMap::new(),
            closed: BTreeMap::new(),
            elsewhere: BTreeSet::new(),
            unaccounted: BTreeMap::new(),
            registration: Registration::default(),
            isolation_obstacle: None,
            opted_in: BTreeSet::new(),
            cordoned: BTreeSet::new(),
            restored: Vec::new(),
            withdrawn: BTreeMap::new(),
            checkpoint: CheckpointState::new(grace),
            clock: 0,
            next: 0,
            version: 0,
            freed: 0,
        }
    }

    /// The namespaces that have opted in, as the API server has them.
    pub fn observe_opted_in(&mut self, namespaces: &BTreeSet<String>) {
        if self.opted_in != *namespaces {
            self.opted_in.clone_from(namespaces);
            self.mark_changed();
        }
    }

    /// Whether the agent may change this pod: it asks for shares, or its namespace has opted in.
    #[must_use]
    pub fn may_change(&self, pod: &PodView) -> bool {
        self.opted_in.contains(&pod.namespace) || pod.containers.iter().any(|c| c.ask.demand.is_shared())
    }

    /// Which card each MIG device is on.
    pub fn set_mig_devices(&mut self, devices: BTreeMap<String, CardIndex>) {
        self.mig_devices = devices;
    }

    /// Uses this numbering of device IDs instead of one by card. Before anything is observed.
    pub fn set_layout(&mut self, layout: Layout) {
        self.layout = layout;
    }

    /// Takes these cards out of new allocation for as long as this process runs, each with a reason for the GPUShadow.
    pub fn close_cards(&mut self, closed: BTreeMap<CardIndex, String>) {
        self.closed = closed;
        self.apply_cordons();
    }

    /// Why a card is closed, if it is.
    #[must_use]
    pub fn closed_because(&self, card: CardIndex) -> Option<&str> {
        self.closed.get(&card).or_else(|| self.unaccounted.get(&card)).map(String::as_str)
    }

    pub fn observe_processes(&mut self, card: CardIndex, processes: impl IntoIterator<Item = u32>) {
        self.processes.insert(card, processes.into_iter().collect());
    }

    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Whether it is known what was allocated before this process started; until then nothing is allocated.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.checkpoint.is_ready()
    }

    /// Whether the record is to be written: it is known what was allocated, or the next process must be told that it is not.
    #[must_use]
    pub fn has_record(&self) -> bool {
        self.is_ready() || self.checkpoint.is_to_be_told()
    }

    pub fn grants(&self) -> impl Iterator<Item = (GrantId, &Grant)> {
        self.grants.iter().map(|(id, grant)| (*id, grant))
    }

    #[must_use]
    pub fn pod(&self, uid: &str) -> Option<&PodView> {
        self.pods.get(uid)
    }

    /// The pod was on this node, and is gone from the API.
    #[must_use]
    pub fn has_departed(&self, uid: &str) -> bool {
        self.pods.has_departed(uid)
    }

    pub fn pods(&self) -> impl Iterator<Item = &PodView> {
        self.pods.pods.values()
    }

    /// A holder's container, while its pod is known.
    pub(super) fn container(&self, holder: &HolderId) -> Option<&ContainerView> {
        self.pods.get(&holder.pod_uid)?.container(&holder.container)
    }

    pub(super) fn container_kind(&self, holder: &HolderId) -> Option<ContainerKind> {
        self.container(holder).map(|container| container.ask.kind)
    }

    /// Grows with every change that is listed, published or compared.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Grows whenever a card gets free capacity.
    #[must_use]
    pub fn freed(&self) -> u64 {
        self.freed
    }

    pub(super) fn mark_changed(&mut self) {
        self.version += 1;
    }

    /// Why shares cannot be limited on this node, if so. Whether that has changed.
    pub fn set_isolation_obstacle(&mut self, obstacle: Option<String>) -> bool {
        if self.isolation_obstacle == obstacle {
            return false;
        }
        self.freed += u64::from(obstacle.is_none());
        self.isolation_obstacle = obstacle;
        self.mark_changed();
        true
    }

    #[must_use]
    pub fn isolation_obstacle(&self) -> Option<&str> {
        self.isolation_obstacle.as_deref()
    }

    /// A card's health by our own inventory.
    pub fn set_health(&mut self, card: CardIndex, health: Health) {
        self.ledger.set_health(card, health);
        self.mark_changed();
        if health == Health::Healthy {
            self.freed += 1;
        }
    }

    /// Takes exactly these cards out of new allocation.
    pub fn set_cordoned(&mut self, cards: &BTreeSet<CardIndex>) {
        self.cordoned.clone_from(cards);
        self.apply_cordons();
    }

    pub(super) fn apply_cordons(&mut self) {
        for card in self.ledger.indexes() {
            let takes_nothing = self.cordoned.contains(&card) || self.closed_because(card).is_some();
            self.ledger.set_cordoned(card, takes_nothing);
        }
        self.mark_changed();
        self.freed += 1;
    }

    /// Test only: with a ledger that breaks a rule, to show that tests would notice.
    #[cfg(test)]
    #[must_use]
    pub(super) fn with_ledger_fault(mut self, fault: gpu_migrate_model::ledger::Fault) -> Self {
        self.ledger = self.ledger.with_fault(fault);
        self
    }

    /// The card on which a device lies.
    #[must_use]
    pub fn card_of(&self, key: &DeviceKey) -> Option<CardIndex> {
        match key {
            DeviceKey::Core(n) => self.layout.card_of(SharedResource::Cores, *n),
            DeviceKey::Block(n) => self.layout.card_of(SharedResource::Memory, *n),
            DeviceKey::Legacy(id) => {
                let card = id.split_once("::").map_or(&**id, |(card, _)| card);
                self.ledger.find(card).or_else(|| self.mig_devices.get(card).copied())
            }
        }
    }

    pub(super) fn cards_of<'a>(&self, keys: impl IntoIterator<Item = &'a DeviceKey>) -> BTreeSet<CardIndex> {
        keys.into_iter().filter_map(|key| self.card_of(key)).collect()
    }

    /// The resource of this name: one of the shared two, else one of NVIDIA's.
    #[must_use]
    pub fn resource(&self, name: &str) -> Resource {
        if name == self.settings.dialect.cores {
            Resource::Shared(SharedResource::Cores)
        } else if name == self.settings.dialect.memory {
            Resource::Shared(SharedResource::Memory)
        } else {
            Resource::Legacy(name.into())
        }
    }

    #[must_use]
    pub fn resource_name<'a>(&'a self, resource: &'a Resource) -> &'a str {
        match resource {
            Resource::Shared(SharedResource::Cores) => &self.settings.dialect.cores,
            Resource::Shared(SharedResource::Memory) => &self.settings.dialect.memory,
            Resource::Legacy(name) => name,
        }
    }

    /// The key of an ID; `None` for one that was never listed.
    pub(super) fn key(&self, resource: &Resource, id: &str) -> Option<DeviceKey> {
        match resource {
            Resource::Shared(shared) => {
                self.layout.number(*shared, id).map(|n| DeviceKey::shared(*shared, n))
            }
            Resource::Legacy(_) => Some(DeviceKey::Legacy(id.into())),
        }
    }

    #[must_use]
    pub fn id_of(&self, key: &DeviceKey) -> String {
        match key {
            DeviceKey::Core(n) => self.layout.id(SharedResource::Cores, *n),
            DeviceKey::Block(n) => self.layout.id(SharedResource::Memory, *n),
            DeviceKey::Legacy(id) => id.to_string(),
        }
    }

    /// Records a new grant, if the ledger's rules allow it. Devices of terminated containers, and those that init containers pass
    /// on to later ones, change owner.
    pub(super) fn allocate(&mut self, mut grant: Grant) -> Result<GrantId, GrantError> {
        for key in &grant.actual {
            if let Some(owner) = self.owner.get(key)
                && !self.may_transfer_devices(*owner, &grant, grant.since)
            {
                return Err(GrantError::Owned { owner: self.grants[owner].holder.clone() });
            }
        }
        let id = self.next_id();
        if !grant.confirmed {
            // A placeholder of its own: unconfirmed grants must not count as one pod's.
            grant.holder = HolderId::new(format!("?{}", id.0), "?");
        }
        grant.answered = true;
        let holder = grant.holder.clone();
        let mut before = Vec::new();
        for key in &grant.actual {
            before.push((key.clone(), self.owner.insert(key.clone(), id)));
        }
        let others: BTreeSet<HolderId> = before
            .iter()
            .filter_map(|(_, owner)| Some(self.grants[owner.as_ref()?].holder.clone()))
            .collect();
        self.grants.insert(id, grant);
        self.record_holds(&others);
        if let Err(refused) = self.update_holds(&holder, Rules::Checked) {
            self.grants.remove(&id);
            for (key, owner) in before {
                match owner {
                    Some(owner) => self.owner.insert(key, owner),
                    None => self.owner.remove(&key),
                };
            }
            self.record_holds(others.iter().chain([&holder]));
            return Err(GrantError::Refused(refused));
        }
        self.mark_changed();
        Ok(id)
    }

    /// Records what the kubelet was observed to have allocated, even against the rules.
    pub(super) fn record_observed(&mut self, grant: Grant) -> GrantId {
        let id = self.next_id();
        let mut concerned = BTreeSet::from([grant.holder.clone()]);
        for key in &grant.actual {
            if let Some(owner) = self.owner.insert(key.clone(), id) {
                concerned.insert(self.grants[&owner].holder.clone());
            }
        }
        self.grants.insert(id, grant);
        self.record_holds(&concerned);
        self.mark_changed();
        id
    }

    /// Ends a grant: its devices are free, but for those that another grant has too (I3).
    pub(super) fn release(&mut self, id: GrantId) {
        let Some(grant) = self.grants.remove(&id) else { return };
        let mut concerned = self.release_devices(id, &grant.actual);
        concerned.insert(grant.holder);
        self.record_holds(&concerned);
        self.mark_changed();
        self.freed += 1;
    }

    /// Replaces the devices of a grant. Init containers of its pod keep those that it takes over from them; one that is of an
    /// init container takes none from the others.
    pub(super) fn reassign(&mut self, id: GrantId, actual: BTreeSet<DeviceKey>) {
        let Some(grant) = self.grants.get_mut(&id) else { return };
        let before = std::mem::replace(&mut grant.actual, actual.clone());
        let mut concerned = BTreeSet::from([grant.holder.clone()]);
        let left: BTreeSet<DeviceKey> = before.difference(&actual).cloned().collect();
        concerned.extend(self.release_devices(id, &left));
        let init = self.is_init(&self.grants[&id].holder);
        for key in actual {
            if let Some(owner) = self.owner.get(&key) {
                if init {
                    continue;
                }
                concerned.insert(self.grants[owner].holder.clone());
            }
            self.owner.insert(key, id);
        }
        self.record_holds(&concerned);
        self.mark_changed();
        self.freed += 1;
    }

    /// A grant gives these devices up. Those that other grants have too get a new owner; returns the new owners' holders.
    fn release_devices(&mut self, id: GrantId, keys: &BTreeSet<DeviceKey>) -> BTreeSet<HolderId> {
        let mut holders = BTreeSet::new();
        for key in keys {
            if self.owner.get(key) != Some(&id) {
                continue;
            }
            // Of several a confirmed one, and of those the latest.
            let others = self.grants.iter().filter(|(_, other)| other.actual.contains(key));
            if let Some((next, other)) = others.max_by_key(|(other, grant)| (grant.confirmed, **other)) {
                holders.insert(other.holder.clone());
                self.owner.insert(key.clone(), *next);
            } else {
                self.owner.remove(key);
            }
        }
        holders
    }

    /// The kubelet has named the holder of a grant.
    pub(super) fn confirm(&mut self, id: GrantId, holder: HolderId) {
        let Some(grant) = self.grants.get_mut(&id) else { return };
        grant.confirmed = true;
        grant.absent_since = None;
        let before = std::mem::replace(&mut grant.holder, holder.clone());
        if before != holder {
            self.record_holds([&before, &holder]);
        }
        self.mark_changed();
    }

    /// Whether `owner`'s devices may go to the new grant: its container terminated, or is an init container of the same pod.
    pub(super) fn may_transfer_devices(&self, owner: GrantId, new: &Grant, now: Millis) -> bool {
        let Some(old) = self.grants.get(&owner) else { return true };
        if new.confirmed && new.holder.pod_uid == old.holder.pod_uid {
            return true;
        }
        if !old.confirmed {
            // The kubelet allocates them again without ever having written them to its checkpoint: no container claimed them.
            // That does not hold for a grant of devices that the kubelet did *not* request.
            return !old.requested.is_disjoint(&new.requested)
                && !self.predates_checkpoint_loss(old)
                && !self.checkpoint.unreadable;
        }
        let uid = &old.holder.pod_uid;
        match self.pods.get(uid) {
            // Of a pod that was never seen, nothing is known yet.
            None => self.has_left(uid, now),
            Some(pod) if pod.has_ended() => true,
            // A kubelet that has lost its checkpoint does not pass devices on: it allocates again what it has forgotten.
            Some(_) => {
                self.is_init(&old.holder)
                    && !old.requested.is_disjoint(&new.requested)
                    && !self.predates_checkpoint_loss(old)
            }
        }
    }

    /// A pod that was on this node, is gone from the API or terminal there, and whose containers have ended.
    pub(super) fn has_left(&self, uid: &str, now: Millis) -> bool {
        self.pods.has_departed(uid) && self.pods.containers_ended(uid, now, self.settings.grace, now)
    }

    pub(super) fn is_init(&self, holder: &HolderId) -> bool {
        self.container_kind(holder) == Some(ContainerKind::Init)
    }

    /// Records these holders' holds in the ledger as facts.
    fn record_holds<'a>(&mut self, holders: impl IntoIterator<Item = &'a HolderId>) {
        for holder in holders {
            // Facts are not refused.
            let _ = self.update_holds(holder, Rules::Observed);
        }
    }

    /// Brings the ledger's holds of one holder in line with the devices that it owns.
    fn update_holds(&mut self, holder: &HolderId, rules: Rules) -> Result<(), Refused> {
        let had: BTreeMap<CardIndex, Hold> =
            self.ledger.held_by(holder).map(|(card, h)| (card, h.clone())).collect();
        let wanted = self.holds_of(holder);
        self.ledger.release(holder);
        for (card, hold) in &wanted {
            match self.ledger.hold(holder, *card, hold.clone()) {
                // Growing on a card that has been closed since is no new allocation.
                Err(Refused::Closed { .. }) if had.contains_key(card) => {}
                Err(refused) if rules == Rules::Checked => {
                    self.ledger.release(holder);
                    for (card, hold) in had {
                        self.ledger.record(holder, card, hold);
                    }
                    return Err(refused);
                }
                Err(_) => {}
                Ok(()) => continue,
            }
            self.ledger.record(holder, *card, hold.clone());
        }
        // NVML was asked while the holder was there: who is left on the card now, the next round says. Without a cgroup that says that the
        // holder's processes are gone, what NVML saw keeps the card closed until then.
        if self.pods.has_empty_cgroup(&holder.pod_uid) {
            for card in had.into_keys().filter(|card| self.ledger.holds(*card).next().is_none()) {
                self.processes.remove(&card);
            }
        }
        Ok(())
    }

    /// What a holder has, card by card, counted from the devices that it owns.
    fn holds_of(&self, holder: &HolderId) -> Vec<(CardIndex, Hold)> {
        let mut shares: BTreeMap<CardIndex, (u32, u32)> = BTreeMap::new();
        let mut slots: BTreeMap<CardIndex, Vec<Slot>> = BTreeMap::new();
        for (id, grant) in self.grants.iter().filter(|(_, grant)| grant.holder == *holder) {
            for key in grant.actual.iter().filter(|key| self.owner.get(key) == Some(id)) {
                let Some(card) = self.card_of(key) else { continue };
                match key {
                    DeviceKey::Core(_) => shares.entry(card).or_default().0 += 1,
                    DeviceKey::Block(_) => shares.entry(card).or_default().1 += 1,
                    DeviceKey::Legacy(id) => slots.entry(card).or_default().push(self.slot(id, card)),
                }
            }
        }
        let shares = shares.into_iter().map(|(card, (cores, blocks))| {
            (card, Hold::Share { cores: Cores(cores), blocks: Blocks(blocks), phase: Phase::Run })
        });
        shares.chain(slots.into_iter().map(|(card, slots)| (card, Hold::Legacy(slots)))).collect()
    }

    pub(super) fn slot(&self, id: &str, card: CardIndex) -> Slot {
        match self.ledger.card(card) {
            Some(card) if card.uuid == id => Slot::Whole,
            _ => Slot::Part(id.to_owned()),
        }
    }

    pub(super) const fn latest(&self) -> GrantId {
        GrantId(self.next)
    }

    fn next_id(&mut self) -> GrantId {
        self.next += 1;
        GrantId(self.next)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Rules {
    /// A new grant: the invariants decide.
    Checked,
    /// A fact: it is recorded, and the card is shown as disputed where it breaks a rule.
    Observed,
}

/// Why a grant was not made. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum GrantError {
    #[error("one of its devices is still held by {owner}")]
    Owned { owner: HolderId },
    #[error(transparent)]
    Refused(Refused),
}
