//! One node as the index keeps it: what it has, what was found on it, who was bound to it, and the occupancy that follows.
//!
//! The occupancy is a pure function of the other three ([`occupancy`]), computed again whenever one of them changes. That costs
//! microseconds for the dozen pods of a node, and leaves no state that could drift.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use gpu_migrate_model::ask::PodKind;
use gpu_migrate_model::card::{Card, CardState, CardView, Health};
use gpu_migrate_model::crd::GPUShadowStatus;
use gpu_migrate_model::ledger::{Hold, HolderId, Ledger, Phase};
use gpu_migrate_model::names::{self, Dialect};
use gpu_migrate_model::place::footprint;
use gpu_migrate_model::quantity::Quantity;
use gpu_migrate_model::topology::{LinkLevel, Topology, Tree};
use gpu_migrate_model::units::{CardIndex, Cores};
use gpu_migrate_model::view::ExtendedResources;
use gpu_migrate_model::view::json::{Amount, Map};

use super::pod::{Cards, PodFacts, cards_of};
use crate::wire::node::NodeView;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeFacts {
    pub labels: BTreeMap<String, String>,
    /// Cards or UUIDs that an owner took out of allocation.
    pub cordoned: Vec<String>,
    /// vcuda cores, blocks and legacy cards that the node has.
    pub capacity: Amounts,
    pub allocatable: Amounts,
}

/// Amounts of the three resources.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amounts {
    pub cores: u32,
    pub blocks: u32,
    pub legacy: u32,
}

impl Amounts {
    fn read(map: &Map<'_, Amount<'_>, ExtendedResources>, dialect: &Dialect) -> Self {
        let amount = |resource: &str| {
            let whole = map
                .get(resource)
                .and_then(|amount| amount.as_str().parse::<Quantity>().ok())
                .and_then(Quantity::whole);
            whole.and_then(|value| u32::try_from(value).ok()).unwrap_or(0)
        };
        Self {
            cores: amount(&dialect.cores),
            blocks: amount(&dialect.memory),
            legacy: amount(&dialect.legacy),
        }
    }

    /// How many cards these amounts speak of.
    fn cards(self) -> u32 {
        (self.cores / Cores::CARD.0).max(self.legacy)
    }
}

impl NodeFacts {
    /// Reads `node`.
    #[must_use]
    pub fn read(node: &NodeView<'_>, dialect: &Dialect) -> Self {
        let cordoned = node.metadata.annotation(names::CORDONED_CARDS);
        Self {
            labels: node
                .metadata
                .labels
                .iter()
                .flat_map(Map::iter)
                .map(|(key, value)| (key.to_owned(), value.to_string()))
                .collect(),
            cordoned: cordoned
                .iter()
                .flat_map(|list| list.split(','))
                .map(|card| card.trim().to_owned())
                .filter(|card| !card.is_empty())
                .collect(),
            capacity: Amounts::read(&node.status.capacity, dialect),
            allocatable: Amounts::read(&node.status.allocatable, dialect),
        }
    }

    /// The cards of a node that publishes no GPUShadow, such as an autoscaler's template: as many as its capacity
    /// says, all alike, memory divided evenly as gpu-admission does (`pkg/device/node.go`).
    #[must_use]
    pub fn inventory(&self, node: &str) -> Inventory {
        let count = self.capacity.cards();
        let blocks = self.capacity.blocks.checked_div(count).unwrap_or(0);
        let model = self.labels.get(names::GPU_PRODUCT).cloned().unwrap_or_default();
        let card = |minor| Card {
            uuid: format!("{node}-{minor}"),
            minor,
            model: model.clone(),
            memory_mib: u64::from(blocks) * names::Dialect::default().mib_per_block,
            ..Card::default()
        };
        Inventory {
            cards: (0..count).map(card).collect(),
            unhealthy: Vec::new(),
            cordoned: Vec::new(),
            reserved: Vec::new(),
            tree: Arc::new(Topology::uniform(count as usize, LinkLevel::Sys).tree()),
            // What the plugin withholds is on some card, unknown which.
            withheld: count.saturating_sub(self.allocatable.cards()),
            // A legacy-only node: nothing there takes shares.
            legacy_only: self.capacity.cores == 0,
            published: false,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Inventory {
    /// In the order of [`CardIndex`].
    pub cards: Vec<Card>,
    /// Those that take nothing new.
    pub unhealthy: Vec<CardIndex>,
    /// Those that an owner took out of allocation.
    pub cordoned: Vec<CardIndex>,
    /// Those that shares never use, by the owner's GPUConfig.
    pub reserved: Vec<u32>,
    pub tree: Arc<Tree>,
    /// Cards that are not offered although it is not known which.
    pub withheld: u32,
    /// The node offers no vcuda resources.
    pub legacy_only: bool,
    pub published: bool,
}

impl Default for Inventory {
    fn default() -> Self {
        Self {
            cards: Vec::new(),
            unhealthy: Vec::new(),
            cordoned: Vec::new(),
            reserved: Vec::new(),
            tree: Arc::new(Topology::uniform(0, LinkLevel::Sys).tree()),
            withheld: 0,
            legacy_only: true,
            published: false,
        }
    }
}

/// A hold that the node's bridge published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedHold {
    pub holder: HolderId,
    pub card: CardIndex,
    pub hold: Hold,
}

#[derive(Clone, Debug, Default)]
pub struct ShadowFacts {
    pub inventory: Inventory,
    pub published: Vec<PublishedHold>,
}

impl ShadowFacts {
    /// Reads what a node's bridge published.
    #[must_use]
    pub fn read(status: &GPUShadowStatus) -> Self {
        let mut facts = Self::default();
        for (index, card) in status.cards.iter().enumerate() {
            let index = CardIndex::from(index);
            if card.health == Health::Unhealthy || card.card.mig {
                facts.inventory.unhealthy.push(index);
            }
            // What the bridge takes out of allocation for its own reasons counts for us too.
            if card.state == CardState::Cordoned {
                facts.inventory.cordoned.push(index);
            }
            facts.published.extend(card.holders.iter().map(|holder| {
                let (holder, hold) = holder.hold();
                PublishedHold { holder, card: index, hold }
            }));
        }
        facts.inventory.cards = status.cards.iter().map(|card| card.card.clone()).collect();
        facts.inventory.tree = Arc::new(status.tree());
        facts.inventory.legacy_only = false;
        facts.inventory.published = true;
        facts
    }
}

/// A pod on a node: bound there, or assumed to be.
#[derive(Clone, Debug)]
pub struct Placed {
    pub pod: Arc<PodFacts>,
    pub cards: Cards,
}

/// What of a node's cards is held, and what is left.
#[derive(Clone, Debug, Default)]
pub struct NodeOccupancy {
    /// Its cards and what is left on them.
    pub cards: Vec<CardView>,
    /// Free cards that are held although it is not known by which pod (DESIGN decision 6): so many must stay free.
    pub unattributed: u32,
}

impl NodeOccupancy {
    /// The cards as shares see them: those reserved for legacy pods are closed.
    #[must_use]
    pub fn for_shares(&self, inventory: &Inventory) -> Cow<'_, [CardView]> {
        if inventory.reserved.is_empty() {
            return Cow::Borrowed(&self.cards);
        }
        let mut cards = self.cards.clone();
        for card in cards.iter_mut().filter(|card| inventory.reserved.contains(&card.index.0)) {
            card.state = CardState::Cordoned;
        }
        Cow::Owned(cards)
    }

    /// Free cards, less those unattributed.
    #[must_use]
    pub fn free_cards(&self) -> u32 {
        let free = self.cards.iter().filter(|card| card.is_free()).count();
        u32::try_from(free).unwrap_or(u32::MAX).saturating_sub(self.unattributed)
    }

    /// Cards found in breach of an invariant.
    #[must_use]
    pub fn disputed(&self) -> usize {
        self.cards.iter().filter(|card| card.state == CardState::Disputed).count()
    }
}

/// The occupancy that follows from what is known of a node, but for the pods that `without` names by UID.
///
/// The truth about a container is, in this order: the node's own bridge (GPUShadow), its annotations, and else only
/// how much it has. A hold that the bridge still publishes counts although its pod is gone (I3).
#[must_use]
pub fn occupancy<'a>(
    inventory: &Inventory,
    facts: &NodeFacts,
    published: &[PublishedHold],
    placed: impl Iterator<Item = &'a Placed>,
    without: impl Fn(&str) -> bool,
) -> (Ledger, NodeOccupancy) {
    let mut ledger = Ledger::new(inventory.cards.clone());
    for card in &inventory.unhealthy {
        ledger.set_health(*card, Health::Unhealthy);
    }
    for card in &inventory.cordoned {
        ledger.set_cordoned(*card, true);
    }
    for (index, card) in inventory.cards.iter().enumerate() {
        if facts.cordoned.iter().any(|named| *named == card.uuid || named.parse() == Ok(index)) {
            ledger.set_cordoned(index.into(), true);
        }
    }
    let mut seen: HashSet<&HolderId> = HashSet::new();
    for hold in published.iter().filter(|hold| !without(&hold.holder.pod_uid)) {
        ledger.record(&hold.holder, hold.card, hold.hold.clone());
        seen.insert(&hold.holder);
    }
    let legacy: HashSet<CardIndex> = published
        .iter()
        .filter(|hold| !without(&hold.holder.pod_uid) && !matches!(hold.hold, Hold::Share { .. }))
        .map(|hold| hold.card)
        .collect();
    let mut unknown = 0u32;
    for placed in placed.filter(|placed| !without(&placed.pod.uid)) {
        unknown = unknown.saturating_add(record(&mut ledger, placed, &seen, &legacy));
    }
    let cards = ledger.view();
    // Withheld cards are mostly those of legacy pods, whether their card is known or not.
    let legacy = cards.iter().filter(|card| card.state == CardState::Legacy).count();
    let withheld = inventory.withheld.saturating_sub(u32::try_from(legacy).unwrap_or(u32::MAX));
    (ledger, NodeOccupancy { cards, unattributed: unknown.max(withheld) })
}

/// Writes one pod into the occupancy; returns for how many of its cards it is not known which they are. A share that we chose one of
/// the `legacy` cards for came too late: its node will give it another, unknown yet which.
fn record(
    ledger: &mut Ledger,
    placed: &Placed,
    seen: &HashSet<&HolderId>,
    legacy: &HashSet<CardIndex>,
) -> u32 {
    let mut unknown = (0u32, 0u32);
    for (at, container) in placed.pod.asking() {
        let wanted = match placed.pod.kind {
            PodKind::Legacy => container.demand.legacy,
            _ => container.demand.cores.whole_cards().unwrap_or(1),
        };
        let holder = HolderId::new(&*placed.pod.uid, &container.name);
        // The bridge writes a container's cards down all at once.
        let published = seen.contains(&holder);
        let mut known = if published { wanted } else { 0 };
        if !published {
            for card in cards_of(&placed.cards, at) {
                let lost = placed.pod.kind != PodKind::Legacy && legacy.contains(&card);
                if card.position() < ledger.len() && !lost {
                    ledger.record(&holder, card, footprint(container));
                    known += 1;
                }
            }
        }
        let missing = wanted.saturating_sub(known);
        match container.kind.phase() {
            Phase::Init => unknown.0 = unknown.0.max(missing),
            Phase::Run => unknown.1 = unknown.1.saturating_add(missing),
        }
    }
    unknown.0.max(unknown.1)
}
