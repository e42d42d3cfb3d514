//! The state of the node agent, and the few moves by which everything else changes it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use gpu_migrate_model::ask::ContainerKind;
use gpu_migrate_model::card::{Card, Health};
use gpu_migrate_model::device_id::{Layout, SharedResource};
use gpu_migrate_model::ledger::{Hold, HolderId, Ledger, Phase, Refused, Slot};
use gpu_migrate_model::names::Dialect;
use gpu_migrate_model::topology::{Topology, Tree};
use gpu_migrate_model::units::{Blocks, CardIndex, Cores};

use super::grants::{DeviceKey, Grant, GrantId, Resource};
use super::pods::PodTable;
use super::{Millis, PodView};
use crate::deviations::Deviation;

/// What can be set about deciding.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Resource names and units.
    pub dialect: Dialect,
    /// How long a holder must be absent when only one source can be asked (I3).
    pub grace: Millis,
    /// How long a promise may stay out of the kubelet's book before it counts as never taken up.
    pub unclaimed: Millis,
    /// How long the containers of a pod that was deleted with force get to end.
    pub force_grace: Millis,
    /// How long a resource stays withdrawn after an Allocate had to be refused.
    pub withdraw: Millis,
    /// Report the NUMA node of vcuda devices. Off, because a topology manager would narrow the choice that the extender made.
    pub numa_hints: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            dialect: Dialect::default(),
            grace: 30_000,
            unclaimed: 60_000,
            force_grace: 10_000,
            withdraw: 5_000,
            numa_hints: false,
        }
    }
}

/// One device of NVIDIA's plugin, as it lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpstreamDevice {
    /// Its ID.
    pub id: Arc<str>,
    /// Whether the plugin calls it healthy, and our own memory does not contradict.
    pub healthy: bool,
    /// NUMA nodes it is near to, passed on as they came.
    pub numa: Vec<i64>,
}

/// The node's books. See the [module](super).
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
    /// Parts of cards (MIG devices) that do not carry their card's UUID.
    pub(super) parts: BTreeMap<String, CardIndex>,
    /// Processes that were last seen on each card, in the host's numbering. A witness only: nothing is freed or held by it.
    pub(super) processes: BTreeMap<CardIndex, BTreeSet<u32>>,
    /// Cards of which it is not known for sure who has them, and why: they take nothing new while this process runs.
    closed: BTreeMap<CardIndex, String>,
    /// Cards that an owner took out of new allocation.
    cordoned: BTreeSet<CardIndex>,
    /// Deviations of an earlier life, until the kubelet's book has been read.
    pub(super) journal: Vec<Deviation>,
    pub(super) withdrawn: BTreeMap<String, Millis>,
    /// When the kubelet's book was last read whole.
    pub(super) checkpoint_read_at: Option<Millis>,
    /// When the kubelet was last seen to start anew, until its book has been read after that.
    pub(super) restarted: Option<Millis>,
    /// Promises up to this one can be named by the version of the kubelet's book that was read last.
    pub(super) checkpoint_mark: u64,
    /// The book on disk is not whole: what it does not say means nothing.
    pub(super) checkpoint_unreadable: bool,
    /// When the kubelet last started anew without its book, or the book was last found cut short: their silence says nothing
    /// about what was given before.
    pub(super) checkpoint_lost_at: Option<Millis>,
    /// Whether it is known what was given out before: until then nothing is.
    pub(super) opened: bool,
    /// This life began with a book that could not be read.
    pub(super) started_without_checkpoint: bool,
    /// When such a life first learnt from any source what was given out before.
    pub(super) first_observation: Option<Millis>,
    /// The kubelet's book was looked for and is not there.
    pub(super) checkpoint_missing: bool,
    /// The latest moment heard of.
    pub(super) clock: Millis,
    next: u64,
    version: u64,
    freed: u64,
}

impl NodeState {
    /// Empty books over the cards of this node.
    #[must_use]
    pub fn new(settings: Settings, cards: Vec<Card>, topology: &Topology) -> Self {
        let layout = Layout::new(&settings.dialect, cards.iter().map(Card::blocks));
        Self {
            settings,
            layout,
            ledger: Ledger::new(cards),
            tree: topology.tree(),
            grants: BTreeMap::new(),
            owner: HashMap::new(),
            pods: PodTable::default(),
            upstream: BTreeMap::new(),
            parts: BTreeMap::new(),
            processes: BTreeMap::new(),
            closed: BTreeMap::new(),
            cordoned: BTreeSet::new(),
            journal: Vec::new(),
            withdrawn: BTreeMap::new(),
            checkpoint_read_at: None,
            restarted: None,
            checkpoint_lost_at: None,
            checkpoint_mark: 0,
            checkpoint_unreadable: false,
            opened: false,
            started_without_checkpoint: false,
            first_observation: None,
            checkpoint_missing: false,
            clock: 0,
            next: 0,
            version: 0,
            freed: 0,
        }
    }

    /// Takes over the deviations that an earlier life of this agent wrote down. Before the kubelet's book is read.
    pub fn restore_deviations(&mut self, deviations: Vec<Deviation>) {
        self.journal = deviations;
    }

    /// Numbers device IDs like this, not card by card. Before anything is observed.
    pub fn set_layout(&mut self, layout: Layout) {
        self.layout = layout;
    }

    /// Takes these cards out of new allocation for as long as this process runs, each for a reason that an owner can read.
    pub fn close_cards(&mut self, closed: BTreeMap<CardIndex, String>) {
        self.closed = closed;
        self.apply_cordons();
    }

    /// Why a card is closed, if it is.
    #[must_use]
    pub fn closed_because(&self, card: CardIndex) -> Option<&str> {
        self.closed.get(&card).map(String::as_str)
    }

    /// Which card each part (MIG device) is on, where its ID does not say.
    pub fn set_mig_devices(&mut self, parts: BTreeMap<String, CardIndex>) {
        self.parts = parts;
    }

    /// Takes the processes that run on a card now.
    pub fn observe_processes(&mut self, card: CardIndex, processes: impl IntoIterator<Item = u32>) {
        self.processes.insert(card, processes.into_iter().collect());
    }

    /// The ledger, to look at.
    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The numbering of vcuda devices.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// What this was set up with.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Whether it is known what was given out before this process started; until then nothing is given out.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.opened
    }

    /// All promises.
    pub fn grants(&self) -> impl Iterator<Item = (GrantId, &Grant)> {
        self.grants.iter().map(|(id, grant)| (*id, grant))
    }

    /// The pod with this UID, if it is known.
    #[must_use]
    pub fn pod(&self, uid: &str) -> Option<&PodView> {
        self.pods.get(uid)
    }

    /// All pods that are known.
    pub fn pods(&self) -> impl Iterator<Item = &PodView> {
        self.pods.pods.values()
    }

    /// Grows with every change that anyone outside might want to know of.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Grows whenever a card gets room.
    #[must_use]
    pub fn freed(&self) -> u64 {
        self.freed
    }

    pub(super) fn touch(&mut self) {
        self.version += 1;
    }

    /// Sets a card's health as our own inventory sees it.
    pub fn set_health(&mut self, card: CardIndex, health: Health) {
        self.ledger.set_health(card, health);
        self.touch();
        if health == Health::Healthy {
            self.freed += 1;
        }
    }

    /// Takes exactly these cards out of new allocation.
    pub fn set_cordoned(&mut self, cards: &BTreeSet<CardIndex>) {
        self.cordoned.clone_from(cards);
        self.apply_cordons();
    }

    fn apply_cordons(&mut self) {
        for card in self.ledger.indexes() {
            let takes_nothing = self.cordoned.contains(&card) || self.closed.contains_key(&card);
            self.ledger.set_cordoned(card, takes_nothing);
        }
        self.touch();
        self.freed += 1;
    }

    /// Test only: a ledger that no longer looks who holds a card, to show that tests would notice.
    #[cfg(test)]
    #[must_use]
    pub(super) fn with_broken_ledger(mut self) -> Self {
        self.ledger = self.ledger.broken();
        self
    }

    /// The card on which a device lies.
    pub(super) fn card_of(&self, key: &DeviceKey) -> Option<CardIndex> {
        match key {
            DeviceKey::Core(n) => self.layout.card_of(SharedResource::Cores, *n),
            DeviceKey::Block(n) => self.layout.card_of(SharedResource::Memory, *n),
            DeviceKey::Legacy(id) => {
                let card = id.split_once("::").map_or(&**id, |(card, _)| card);
                self.ledger.find(card).or_else(|| self.parts.get(card).copied())
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

    /// The name of a resource.
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

    /// The ID of a key.
    #[must_use]
    pub fn id_of(&self, key: &DeviceKey) -> String {
        match key {
            DeviceKey::Core(n) => self.layout.id(SharedResource::Cores, *n),
            DeviceKey::Block(n) => self.layout.id(SharedResource::Memory, *n),
            DeviceKey::Legacy(id) => id.to_string(),
        }
    }

    /// Writes a new promise down, by the ledger's rules. Devices of containers that ended, or hand theirs on, change owner.
    ///
    /// `confirmed` names the container where the kubelet's book has said it.
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
            // A stand-in of its own: until confirmed nothing may be taken for the same pod's.
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
        for other in &others {
            self.settle(other, Rules::Observed).ok();
        }
        if let Err(refused) = self.settle(&holder, Rules::Checked) {
            self.grants.remove(&id);
            for (key, owner) in before {
                match owner {
                    Some(owner) => self.owner.insert(key, owner),
                    None => self.owner.remove(&key),
                };
            }
            for other in others.iter().chain([&holder]) {
                self.settle(other, Rules::Observed).ok();
            }
            return Err(GrantError::Refused(refused));
        }
        self.touch();
        Ok(id)
    }

    /// Writes down what was found in the kubelet's book, even against the rules.
    pub(super) fn record_observed(&mut self, grant: Grant) -> GrantId {
        let id = self.next_id();
        let holder = grant.holder.clone();
        let mut others = BTreeSet::new();
        for key in &grant.actual {
            if let Some(owner) = self.owner.insert(key.clone(), id) {
                others.insert(self.grants[&owner].holder.clone());
            }
        }
        self.grants.insert(id, grant);
        for other in others.iter().chain([&holder]) {
            self.settle(other, Rules::Observed).ok();
        }
        self.touch();
        id
    }

    /// Ends a promise: its devices are nobody's, but for those that another promise has too (I3).
    pub(super) fn release(&mut self, id: GrantId) {
        let Some(grant) = self.grants.remove(&id) else { return };
        let mut heirs = BTreeSet::from([grant.holder]);
        heirs.extend(self.release_devices(id, &grant.actual));
        for holder in &heirs {
            self.settle(holder, Rules::Observed).ok();
        }
        self.touch();
        self.freed += 1;
    }

    /// Gives a promise other devices in the place of those that it has. It leaves to init containers of its pod what they
    /// have, and takes from them what they hand on.
    pub(super) fn move_to(&mut self, id: GrantId, actual: BTreeSet<DeviceKey>) {
        let Some(grant) = self.grants.get_mut(&id) else { return };
        let before = std::mem::replace(&mut grant.actual, actual.clone());
        let mut concerned = BTreeSet::from([grant.holder.clone()]);
        let left: BTreeSet<DeviceKey> = before.difference(&actual).cloned().collect();
        concerned.extend(self.release_devices(id, &left));
        let init = self.is_init(&self.grants[&id].holder);
        for key in actual {
            match self.owner.get(&key) {
                Some(_) if init => {}
                Some(owner) => {
                    concerned.insert(self.grants[owner].holder.clone());
                    self.owner.insert(key, id);
                }
                None => {
                    self.owner.insert(key, id);
                }
            }
        }
        for holder in &concerned {
            self.settle(holder, Rules::Observed).ok();
        }
        self.touch();
        self.freed += 1;
    }

    /// A promise does not have these devices any more: they go to others that have them too, who are returned.
    fn release_devices(&mut self, id: GrantId, keys: &BTreeSet<DeviceKey>) -> BTreeSet<HolderId> {
        let mut heirs = BTreeSet::new();
        for key in keys {
            if self.owner.get(key) != Some(&id) {
                continue;
            }
            // Of several the one named by the kubelet's book, and of those the latest.
            let others = self.grants.iter().filter(|(_, other)| other.actual.contains(key));
            if let Some((heir, other)) = others.max_by_key(|(other, grant)| (grant.confirmed, **other)) {
                heirs.insert(other.holder.clone());
                self.owner.insert(key.clone(), *heir);
            } else {
                self.owner.remove(key);
            }
        }
        heirs
    }

    /// The kubelet's book has said whose it is.
    pub(super) fn confirm(&mut self, id: GrantId, holder: HolderId) {
        let Some(grant) = self.grants.get_mut(&id) else { return };
        grant.confirmed = true;
        grant.absent_since = None;
        let before = std::mem::replace(&mut grant.holder, holder.clone());
        if before != holder {
            self.settle(&before, Rules::Observed).ok();
            self.settle(&holder, Rules::Observed).ok();
        }
        self.touch();
    }

    /// Whether `owner`'s devices may go to the new promise: its container ended, or hands its devices on by design.
    pub(super) fn may_transfer_devices(&self, owner: GrantId, new: &Grant, now: Millis) -> bool {
        let Some(old) = self.grants.get(&owner) else { return true };
        if new.confirmed && new.holder.pod_uid == old.holder.pod_uid {
            return true;
        }
        if !old.confirmed {
            // The kubelet gives it out again without ever having written it down: it was never taken up. A promise
            // for devices that the kubelet did *not* ask for is not called back by that.
            return !old.requested.is_disjoint(&new.requested)
                && !self.predates_checkpoint_loss(old)
                && !self.checkpoint_unreadable;
        }
        let Some(pod) = self.pods.get(&old.holder.pod_uid) else {
            // Seen to leave the API, and had time to end. Of a pod that was never seen, nothing is known yet.
            let uid = &old.holder.pod_uid;
            return self.pods.has_departed(uid)
                && self.pods.force_delete_grace_elapsed(uid, now, self.settings.force_grace);
        };
        if pod.phase.terminal() {
            return true;
        }
        // A kubelet that has lost its book does not hand on: it gives out anew what it has forgotten.
        let kind = pod.container(&old.holder.container).map(|c| c.ask.kind);
        kind == Some(ContainerKind::Init)
            && !old.requested.is_disjoint(&new.requested)
            && !self.predates_checkpoint_loss(old)
    }

    /// The kubelet may have written it down and lost it since.
    pub(super) fn predates_checkpoint_loss(&self, grant: &Grant) -> bool {
        self.checkpoint_lost_at.is_some_and(|at| grant.since <= at)
    }

    /// Brings the ledger's holds of one holder in line with the devices it owns.
    fn settle(&mut self, holder: &HolderId, rules: Rules) -> Result<(), Refused> {
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
        Ok(())
    }

    /// What a holder has, card by card, counted from the devices it owns.
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

    /// The promise made last.
    pub(super) const fn latest(&self) -> u64 {
        self.next
    }

    fn next_id(&mut self) -> GrantId {
        self.next += 1;
        GrantId(self.next)
    }
}

/// How strictly the ledger is asked.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rules {
    /// A new promise: the invariants decide.
    Checked,
    /// A fact: it is written down, and shown as disputed where it breaks a rule.
    Observed,
}

/// Why a promise was not made. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum GrantError {
    /// A device of it is still somebody's.
    #[error("a device of it is still held by {owner}")]
    Owned {
        /// Whose.
        owner: HolderId,
    },
    /// The ledger stands against it.
    #[error(transparent)]
    Refused(Refused),
}
