//! The ledger of one node: which container holds which card. The only place where a holder is added or removed.
//!
//! - **I1 exclusive**: a card is *either* free, *or* held by legacy containers, *or* shared: the type cannot hold both kinds.
//! - **I2 no overcommit**: a share is written down only if cores and memory are left for it.
//!
//! [`Ledger::hold`] decides; [`Ledger::record`] writes down what was *found* (the kubelet checkpoint at start-up) even
//! where it breaks a rule, so that the truth is shown and the card takes nothing new. [`Ledger::check`] recounts all
//! of it from the holds alone.
//!
//! Containers of one pod share what its init containers had: the kubelet hands an init container's devices on to
//! the containers after it (`devicemanager/manager.go`, reusable devices). So within a pod the larger of the two
//! phases counts, and a whole card may be held by an init container and an app container of the same pod.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::card::{Card, CardState, CardView, Health};
use crate::units::{Blocks, CardIndex, Cores};

/// A container that has a card or a share of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HolderId {
    /// UID of the pod.
    pub pod_uid: String,
    /// Name of the container; unique in its pod, init containers included.
    pub container: String,
}

impl HolderId {
    /// The container `container` of the pod with this UID.
    pub fn new(pod_uid: impl Into<String>, container: impl Into<String>) -> Self {
        Self { pod_uid: pod_uid.into(), container: container.into() }
    }
}

impl fmt::Display for HolderId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pod {} container {}", self.pod_uid, self.container)
    }
}

/// When in its pod's life a container runs.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
pub enum Phase {
    /// Before the app containers; what it holds is handed on to them.
    Init,
    /// With the app containers: these and sidecars.
    #[default]
    Run,
}

/// The part of a card that a legacy container has.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Slot {
    /// The card.
    Whole,
    /// A part that NVIDIA's own plugin made: a time-sliced or MPS replica `GPU-…::n`, or a MIG device.
    Part(String),
}

/// What a container has on one card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Hold {
    /// Through `nvidia.com/gpu`. A container may have several parts of one card.
    Legacy(Vec<Slot>),
    /// Through vcuda resources. 100 cores are the whole card.
    Share {
        /// Compute.
        cores: Cores,
        /// Memory.
        blocks: Blocks,
        /// Init or run.
        phase: Phase,
    },
}

impl Hold {
    /// A whole card for a legacy container.
    #[must_use]
    pub fn whole() -> Self {
        Self::Legacy(vec![Slot::Whole])
    }

    /// A share for an app container.
    #[must_use]
    pub fn share(cores: Cores, blocks: Blocks) -> Self {
        Self::Share { cores, blocks, phase: Phase::Run }
    }
}

/// Why a hold was refused. The ledger is as it was before.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// No such card on this node.
    #[error("{card}: the node has {count} cards")]
    NoSuchCard {
        /// The card asked for.
        card: CardIndex,
        /// Cards of the node.
        count: usize,
    },
    /// The card takes nothing new.
    #[error("{card} is {state:?} and takes nothing new")]
    Closed {
        /// The card asked for.
        card: CardIndex,
        /// Why it is closed.
        state: CardState,
    },
    /// I1: a container of the other kind, or another pod's legacy container, holds it.
    #[error("{card} is held by {holder}")]
    Held {
        /// The card asked for.
        card: CardIndex,
        /// One who holds it.
        holder: HolderId,
    },
    /// I2: not enough is left.
    #[error("{card} has {cores_left} and {blocks_left} left, {cores} and {blocks} were asked for")]
    Full {
        /// The card asked for.
        card: CardIndex,
        /// What is left.
        cores_left: Cores,
        /// What is left.
        blocks_left: Blocks,
        /// What was asked for.
        cores: Cores,
        /// What was asked for.
        blocks: Blocks,
    },
    /// The same container already holds something else on this card.
    #[error("{card}: {holder} already holds something else on it; release it first")]
    Changed {
        /// The card asked for.
        card: CardIndex,
        /// Who asked.
        holder: HolderId,
    },
}

/// A broken invariant, as [`Ledger::check`] reports it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// I1.
    #[error("I1 broken: {card} is held by {first} and by {second}")]
    NotExclusive {
        /// The card.
        card: CardIndex,
        /// One holder.
        first: HolderId,
        /// Another, of the other kind, or legacy too.
        second: HolderId,
    },
    /// I2.
    #[error("I2 broken: {card} has {cores} and {blocks} allocated, of 100 cores and {capacity}")]
    Overcommitted {
        /// The card.
        card: CardIndex,
        /// Cores allocated.
        cores: Cores,
        /// Memory allocated.
        blocks: Blocks,
        /// Memory of the card.
        capacity: Blocks,
    },
}

type Holds = BTreeMap<HolderId, Hold>;

/// Who has a card. Exactly one kind, except for what was found so.
#[derive(Clone, Debug, PartialEq, Eq)]
enum CardOccupancy {
    Free,
    Legacy(Holds),
    Shared(Holds),
    /// Found in breach of I1 or I2; nothing new is added until it resolves itself.
    Disputed(Holds),
}

#[derive(Clone, Debug)]
struct Entry {
    card: Arc<Card>,
    health: Health,
    cordoned: bool,
    occupancy: CardOccupancy,
}

/// Which container holds which card of one node.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    entries: Vec<Entry>,
    /// See [`Ledger::with_fault`].
    #[cfg(any(test, feature = "fault-injection"))]
    fault: Option<Fault>,
}

/// Test only: a rule that a ledger breaks, so that tests show that they would notice.
#[cfg(any(test, feature = "fault-injection"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A container may hold a card whatever others hold of it.
    Unchecked,
    /// What is held is not kept.
    Forgets,
}

/// An empty ledger over cards that others keep too.
impl FromIterator<Arc<Card>> for Ledger {
    fn from_iter<I: IntoIterator<Item = Arc<Card>>>(cards: I) -> Self {
        let entry =
            |card| Entry { card, health: Health::Healthy, cordoned: false, occupancy: CardOccupancy::Free };
        Self {
            entries: cards.into_iter().map(entry).collect(),
            #[cfg(any(test, feature = "fault-injection"))]
            fault: None,
        }
    }
}

impl Ledger {
    /// An empty ledger over these cards, in the order of their [`CardIndex`].
    #[must_use]
    pub fn new(cards: Vec<Card>) -> Self {
        cards.into_iter().map(Arc::new).collect()
    }

    /// Test only: a ledger that breaks a rule.
    #[cfg(any(test, feature = "fault-injection"))]
    #[must_use]
    pub const fn with_fault(mut self, fault: Fault) -> Self {
        self.fault = Some(fault);
        self
    }

    /// How many cards there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no card.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// All indexes.
    pub fn indexes(&self) -> impl Iterator<Item = CardIndex> + use<> {
        (0..self.entries.len()).map(CardIndex::from)
    }

    /// The card at this index.
    #[must_use]
    pub fn card(&self, index: CardIndex) -> Option<&Card> {
        self.entries.get(index.position()).map(|entry| entry.card.as_ref())
    }

    /// The index of the card with this UUID.
    #[must_use]
    pub fn find(&self, uuid: &str) -> Option<CardIndex> {
        self.entries.iter().position(|entry| entry.card.uuid == uuid).map(CardIndex::from)
    }

    /// Who holds a card, and what.
    pub fn holds(&self, index: CardIndex) -> impl Iterator<Item = (&HolderId, &Hold)> {
        self.entries.get(index.position()).into_iter().flat_map(|entry| entry.occupancy.holds())
    }

    /// What one container holds, card by card.
    pub fn held_by<'a>(&'a self, holder: &'a HolderId) -> impl Iterator<Item = (CardIndex, &'a Hold)> {
        self.entries.iter().enumerate().filter_map(move |(position, entry)| {
            entry.occupancy.map()?.get(holder).map(|hold| (CardIndex::from(position), hold))
        })
    }

    /// Every container that holds something, without repeats.
    #[must_use]
    pub fn holders(&self) -> std::collections::BTreeSet<&HolderId> {
        self.entries.iter().flat_map(|entry| entry.occupancy.holds()).map(|(holder, _)| holder).collect()
    }

    /// What may be put on a card next.
    #[must_use]
    pub fn state(&self, index: CardIndex) -> CardState {
        self.entries.get(index.position()).map_or(CardState::Unhealthy, Entry::state)
    }

    /// What a shared container could still get on a card, whatever its health.
    #[must_use]
    pub fn left(&self, index: CardIndex) -> (Cores, Blocks) {
        self.entries.get(index.position()).map_or((Cores::ZERO, Blocks::ZERO), Entry::left)
    }

    /// The cards as placement sees them.
    #[must_use]
    pub fn view(&self) -> Vec<CardView> {
        self.entries.iter().enumerate().map(|(position, entry)| entry.view(position.into())).collect()
    }

    /// Whether a card can be trusted with work.
    #[must_use]
    pub fn health(&self, index: CardIndex) -> Health {
        self.entries.get(index.position()).map_or(Health::Unhealthy, |entry| entry.health)
    }

    /// Sets a card's health. Holders stay: an unhealthy card is not taken from who has it.
    pub fn set_health(&mut self, index: CardIndex, health: Health) {
        if let Some(entry) = self.entries.get_mut(index.position()) {
            entry.health = health;
        }
    }

    /// Takes a card out of new allocation, or back in. Holders stay.
    pub fn set_cordoned(&mut self, index: CardIndex, cordoned: bool) {
        if let Some(entry) = self.entries.get_mut(index.position()) {
            entry.cordoned = cordoned;
        }
    }

    /// Whether this container could hold this, by I1, I2 and the card's state; changes nothing.
    ///
    /// # Errors
    /// The rule that stands against it.
    pub fn may_hold(&self, holder: &HolderId, index: CardIndex, hold: &Hold) -> Result<(), Refused> {
        let Some(entry) = self.entries.get(index.position()) else {
            return Err(Refused::NoSuchCard { card: index, count: self.entries.len() });
        };
        match entry.occupancy.map().and_then(|holds| holds.get(holder)) {
            Some(present) if present == hold => return Ok(()),
            Some(_) => return Err(Refused::Changed { card: index, holder: holder.clone() }),
            None => {}
        }
        #[cfg(any(test, feature = "fault-injection"))]
        if self.fault == Some(Fault::Unchecked) {
            return Ok(());
        }
        entry.admits(holder, index, hold)
    }

    /// Writes down that a container holds something on a card. The same again is no change.
    ///
    /// # Errors
    /// The rule that stands against it; the ledger is as it was.
    pub fn hold(&mut self, holder: &HolderId, index: CardIndex, hold: Hold) -> Result<(), Refused> {
        self.may_hold(holder, index, &hold)?;
        self.write(holder, index, hold);
        Ok(())
    }

    /// [`Ledger::hold`] on several cards: all or none.
    ///
    /// # Errors
    /// The first rule that stands against it; the ledger is as it was.
    pub fn hold_all(&mut self, holder: &HolderId, holds: &[(CardIndex, Hold)]) -> Result<(), Refused> {
        for (index, hold) in holds {
            self.may_hold(holder, *index, hold)?;
        }
        for (index, hold) in holds {
            self.write(holder, *index, hold.clone());
        }
        Ok(())
    }

    /// Writes down what was found, even against the rules, replacing what this container had on the card. A card
    /// where a rule is broken becomes [`CardState::Disputed`] until enough holders are gone.
    ///
    /// Returns whether the card is in order afterwards; `false` also for a card that is not there.
    pub fn record(&mut self, holder: &HolderId, index: CardIndex, hold: Hold) -> bool {
        #[cfg(any(test, feature = "fault-injection"))]
        if self.fault == Some(Fault::Forgets) {
            return true;
        }
        let Some(entry) = self.entries.get_mut(index.position()) else { return false };
        let mut holds = entry.occupancy.take();
        holds.insert(holder.clone(), hold);
        entry.occupancy = CardOccupancy::of(holds, &entry.card, index);
        !matches!(entry.occupancy, CardOccupancy::Disputed(_))
    }

    /// Removes a container from one card. Returns whether it was there.
    pub fn release_on(&mut self, holder: &HolderId, index: CardIndex) -> bool {
        let Some(entry) = self.entries.get_mut(index.position()) else { return false };
        if entry.occupancy.map().is_none_or(|holds| !holds.contains_key(holder)) {
            return false;
        }
        let mut holds = entry.occupancy.take();
        holds.remove(holder);
        entry.occupancy = CardOccupancy::of(holds, &entry.card, index);
        true
    }

    /// Removes a container from all cards. Returns those it was on.
    pub fn release(&mut self, holder: &HolderId) -> Vec<CardIndex> {
        self.indexes().filter(|index| self.release_on(holder, *index)).collect()
    }

    /// Removes all containers of a pod. Returns the cards they were on.
    pub fn release_pod(&mut self, pod_uid: &str) -> Vec<CardIndex> {
        let mut freed = Vec::new();
        for index in self.indexes() {
            let of_pod: Vec<HolderId> = self
                .holds(index)
                .map(|(holder, _)| holder)
                .filter(|holder| holder.pod_uid == pod_uid)
                .cloned()
                .collect();
            if !of_pod.is_empty() {
                freed.push(index);
            }
            for holder in of_pod {
                self.release_on(&holder, index);
            }
        }
        freed
    }

    /// Gives one container's holds to another: the truth about who it was came later. As with [`Ledger::record`], a rule
    /// that breaks by it shows (init and app containers of one pod overlap; taken apart they may not fit).
    pub fn rename(&mut self, from: &HolderId, to: &HolderId) {
        for (position, entry) in self.entries.iter_mut().enumerate() {
            if entry.occupancy.map().is_none_or(|holds| !holds.contains_key(from)) {
                continue;
            }
            let mut holds = entry.occupancy.take();
            if let Some(hold) = holds.remove(from) {
                holds.insert(to.clone(), hold);
            }
            entry.occupancy = CardOccupancy::of(holds, &entry.card, position.into());
        }
    }

    /// Recounts every card from its holds alone.
    ///
    /// # Errors
    /// All breaches of I1 and I2.
    pub fn check(&self) -> Result<(), Vec<Violation>> {
        let violations: Vec<Violation> = self
            .entries
            .iter()
            .enumerate()
            .filter_map(|(position, entry)| audit(entry.occupancy.map()?, &entry.card, position.into()))
            .collect();
        if violations.is_empty() { Ok(()) } else { Err(violations) }
    }

    fn write(&mut self, holder: &HolderId, index: CardIndex, hold: Hold) {
        #[cfg(any(test, feature = "fault-injection"))]
        if self.fault == Some(Fault::Forgets) {
            return;
        }
        let Some(entry) = self.entries.get_mut(index.position()) else { return };
        let mut holds = entry.occupancy.take();
        let legacy = matches!(hold, Hold::Legacy(_));
        holds.insert(holder.clone(), hold);
        entry.occupancy = if legacy { CardOccupancy::Legacy(holds) } else { CardOccupancy::Shared(holds) };
    }
}

impl CardOccupancy {
    fn map(&self) -> Option<&Holds> {
        match self {
            Self::Free => None,
            Self::Legacy(holds) | Self::Shared(holds) | Self::Disputed(holds) => Some(holds),
        }
    }

    fn holds(&self) -> impl Iterator<Item = (&HolderId, &Hold)> {
        self.map().into_iter().flatten()
    }

    fn take(&mut self) -> Holds {
        match std::mem::replace(self, Self::Free) {
            Self::Free => Holds::new(),
            Self::Legacy(holds) | Self::Shared(holds) | Self::Disputed(holds) => holds,
        }
    }

    /// The occupancy that these holds make.
    fn of(holds: Holds, card: &Card, index: CardIndex) -> Self {
        match holds.values().next() {
            None => Self::Free,
            Some(_) if audit(&holds, card, index).is_some() => Self::Disputed(holds),
            Some(Hold::Legacy(_)) => Self::Legacy(holds),
            Some(Hold::Share { .. }) => Self::Shared(holds),
        }
    }
}

impl Entry {
    fn state(&self) -> CardState {
        match (&self.occupancy, self.health, self.cordoned) {
            (CardOccupancy::Disputed(_), _, _) => CardState::Disputed,
            (_, Health::Unhealthy, _) => CardState::Unhealthy,
            (_, _, true) => CardState::Cordoned,
            (CardOccupancy::Legacy(_), ..) => CardState::Legacy,
            (CardOccupancy::Shared(_), ..) => CardState::Shared,
            (CardOccupancy::Free, ..) => CardState::Free,
        }
    }

    fn left(&self) -> (Cores, Blocks) {
        match &self.occupancy {
            CardOccupancy::Free => (Cores::CARD, self.card.blocks()),
            CardOccupancy::Legacy(_) | CardOccupancy::Disputed(_) => (Cores::ZERO, Blocks::ZERO),
            CardOccupancy::Shared(holds) => {
                let (cores, blocks) = allocated(holds);
                (Cores::CARD.saturating_sub(cores), self.card.blocks().saturating_sub(blocks))
            }
        }
    }

    fn view(&self, index: CardIndex) -> CardView {
        let (cores_left, blocks_left) = self.left();
        CardView {
            index,
            card: Arc::clone(&self.card),
            blocks: self.card.blocks(),
            cores_left,
            blocks_left,
            holders: self.occupancy.map().map_or(0, |holds| u32::try_from(holds.len()).unwrap_or(u32::MAX)),
            state: self.state(),
        }
    }

    /// I1, I2 and the card's state for a container that is not on the card yet.
    fn admits(&self, holder: &HolderId, index: CardIndex, hold: &Hold) -> Result<(), Refused> {
        let of_same_pod = |other: &HolderId| other.pod_uid == holder.pod_uid;
        match self.state() {
            state @ (CardState::Unhealthy | CardState::Cordoned)
                // What an init container had is handed on to its own pod whatever became of the card since.
                if !self.occupancy.holds().any(|(other, _)| of_same_pod(other)) =>
            {
                return Err(Refused::Closed { card: index, state });
            }
            state @ CardState::Disputed => return Err(Refused::Closed { card: index, state }),
            _ => {}
        }
        let held_by = |other: &HolderId| Refused::Held { card: index, holder: other.clone() };
        match (&self.occupancy, hold) {
            (CardOccupancy::Shared(holds), Hold::Legacy(_))
            | (CardOccupancy::Legacy(holds), Hold::Share { .. }) => {
                holds.keys().next().map_or(Ok(()), |other| Err(held_by(other)))
            }
            (CardOccupancy::Legacy(holds), Hold::Legacy(slots)) => holds
                .iter()
                .find(|(other, theirs)| !of_same_pod(other) && collide(slots, theirs))
                .map_or(Ok(()), |(other, _)| Err(held_by(other))),
            (occupancy, Hold::Share { .. }) => {
                let before = occupancy.map().cloned().unwrap_or_default();
                let mut after = before;
                after.insert(holder.clone(), hold.clone());
                let (cores, blocks) = allocated(&after);
                if cores <= Cores::CARD && blocks <= self.card.blocks() {
                    return Ok(());
                }
                let (cores_left, blocks_left) = self.left();
                let Hold::Share { cores, blocks, .. } = *hold else { return Ok(()) };
                Err(Refused::Full { card: index, cores_left, blocks_left, cores, blocks })
            }
            (CardOccupancy::Free | CardOccupancy::Disputed(_), Hold::Legacy(_)) => Ok(()),
        }
    }
}

/// Two legacy containers of different pods meet: on a whole card always, on parts where one is the same.
fn collide(slots: &[Slot], theirs: &Hold) -> bool {
    let Hold::Legacy(theirs) = theirs else { return true };
    slots.contains(&Slot::Whole)
        || theirs.contains(&Slot::Whole)
        || slots.iter().any(|slot| theirs.contains(slot))
}

/// What shares add up to: by pod, the larger of what its init and what its running containers have.
fn allocated(holds: &Holds) -> (Cores, Blocks) {
    let (mut cores, mut blocks) = (Cores::ZERO, Blocks::ZERO);
    // Holders are ordered by pod, so a pod's containers are neighbours.
    let mut rest = holds.iter().peekable();
    while let Some((first, _)) = rest.peek().copied() {
        let (mut init, mut run) = ((Cores::ZERO, Blocks::ZERO), (Cores::ZERO, Blocks::ZERO));
        while let Some((_, hold)) = rest.next_if(|(holder, _)| holder.pod_uid == first.pod_uid) {
            match hold {
                Hold::Share { cores, blocks, phase: Phase::Init } => {
                    init = (init.0.max(*cores), init.1.max(*blocks));
                }
                Hold::Share { cores, blocks, phase: Phase::Run } => run = (run.0 + *cores, run.1 + *blocks),
                Hold::Legacy(_) => {}
            }
        }
        cores += init.0.max(run.0);
        blocks += init.1.max(run.1);
    }
    (cores, blocks)
}

/// The first breach of I1 or I2 among the holds of one card.
fn audit(holds: &Holds, card: &Card, index: CardIndex) -> Option<Violation> {
    let all: Vec<(&HolderId, &Hold)> = holds.iter().collect();
    for (position, (first, hold)) in all.iter().enumerate() {
        for (second, other) in &all[position + 1..] {
            let clash = match (hold, other) {
                (Hold::Legacy(slots), Hold::Legacy(_)) => {
                    first.pod_uid != second.pod_uid && collide(slots, other)
                }
                (Hold::Share { .. }, Hold::Share { .. }) => false,
                _ => true,
            };
            if clash {
                let (first, second) = ((*first).clone(), (*second).clone());
                return Some(Violation::NotExclusive { card: index, first, second });
            }
        }
    }
    let (cores, blocks) = allocated(holds);
    let capacity = card.blocks();
    (cores > Cores::CARD || blocks > capacity).then_some(Violation::Overcommitted {
        card: index,
        cores,
        blocks,
        capacity,
    })
}
