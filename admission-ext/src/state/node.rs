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
use gpu_migrate_model::score::{HostResources, Resources};
use gpu_migrate_model::topology::{LinkLevel, Topology, Tree};
use gpu_migrate_model::units::{CardIndex, Cores};
use gpu_migrate_model::view::json::Map;

use super::pod::{Cards, PodFacts, cards_of};
use crate::wire::node::NodeView;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// Of the Node object; empty where it is not known.
    pub uid: String,
    pub labels: BTreeMap<Arc<str>, Arc<str>>,
    /// Cards or UUIDs that an owner took out of allocation.
    pub cordoned: Vec<String>,
    /// vcuda cores, blocks and legacy cards that the node has.
    pub capacity: Amounts,
    pub allocatable: Amounts,
    /// CPU and memory that its pods can get.
    pub host: HostResources,
}

/// Amounts of the three resources.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amounts {
    pub cores: u32,
    pub blocks: u32,
    pub legacy: u32,
}

impl Amounts {
    fn read(map: &Resources<'_>, dialect: &Dialect) -> Self {
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
            uid: node.metadata.uid.to_string(),
            labels: node
                .metadata
                .labels
                .iter()
                .flat_map(Map::iter)
                .map(|(key, value)| (key.into(), Arc::from(&**value)))
                .collect(),
            cordoned: cordoned
                .iter()
                .flat_map(|list| list.split(','))
                .map(|card| card.trim().to_owned())
                .filter(|card| !card.is_empty())
                .collect(),
            capacity: Amounts::read(&node.status.capacity, dialect),
            allocatable: Amounts::read(&node.status.allocatable, dialect),
            host: HostResources::read(&node.status.allocatable, HostResources::UNLIMITED),
        }
    }

    /// The cards of a node that publishes no GPUShadow, such as an autoscaler's template: as many as its capacity
    /// says, all alike, memory divided evenly as gpu-admission does (`pkg/device/node.go`).
    #[must_use]
    pub fn inventory(&self, node: &str) -> Inventory {
        let count = self.capacity.cards();
        let blocks = self.capacity.blocks.checked_div(count).unwrap_or(0);
        let model = self.labels.get(names::GPU_PRODUCT).map(ToString::to_string).unwrap_or_default();
        let card = |minor| {
            Arc::new(Card {
                uuid: format!("{node}-{minor}"),
                minor,
                model: model.clone(),
                memory_mib: u64::from(blocks) * names::Dialect::default().mib_per_block,
                ..Card::default()
            })
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
            closed: false,
            published: false,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Inventory {
    /// In the order of [`CardIndex`].
    pub cards: Arc<[Arc<Card>]>,
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
    /// Its node agent is not in charge of its cards: no share is added.
    pub closed: bool,
    pub published: bool,
}

impl Default for Inventory {
    fn default() -> Self {
        Self {
            cards: Arc::default(),
            unhealthy: Vec::new(),
            cordoned: Vec::new(),
            reserved: Vec::new(),
            tree: Arc::new(Topology::uniform(0, LinkLevel::Sys).tree()),
            withheld: 0,
            legacy_only: true,
            closed: false,
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
    /// Of a stand-in, namespace and name of the pod that it is taken for; else empty.
    pub pod: String,
}

impl PublishedHold {
    /// Devices that were allocated and whose container the agent does not know for certain yet.
    fn is_stand_in(&self) -> bool {
        self.holder.pod_uid.starts_with(UNNAMED)
    }

    /// Whether this may be what `placed` has of a card: the whole of its part of the card, or its cores or memory alone, as the
    /// kubelet asks for one resource after the other.
    fn may_be(&self, placed: &Placed, of: &Hold) -> bool {
        if !self.pod.is_empty() && self.pod != placed.pod.shown() {
            return false;
        }
        match (&self.hold, of) {
            (Hold::Legacy(_), Hold::Legacy(_)) => true,
            (Hold::Share { cores, blocks, .. }, Hold::Share { cores: all, blocks: memory, .. }) => {
                let none = cores.0 == 0 && blocks.0 == 0;
                !none && (cores == all || cores.0 == 0) && (blocks == memory || blocks.0 == 0)
            }
            _ => false,
        }
    }
}

/// What the UID of a holder begins with that stands for a pod that is not known yet.
pub const UNNAMED: char = '?';

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ShadowFacts {
    pub inventory: Inventory,
    pub published: Arc<[PublishedHold]>,
    /// UID of the Node that it is about, where it says so.
    pub node_uid: Option<String>,
}

impl ShadowFacts {
    /// Reads what a node's bridge published.
    #[must_use]
    pub fn read(status: &GPUShadowStatus) -> Self {
        let mut facts = Self::default();
        let mut published = Vec::new();
        for (index, card) in status.cards.iter().enumerate() {
            let index = CardIndex::from(index);
            if card.health == Health::Unhealthy || card.card.mig {
                facts.inventory.unhealthy.push(index);
            }
            // What the bridge takes out of allocation for its own reasons counts for us too.
            if card.state == CardState::Cordoned {
                facts.inventory.cordoned.push(index);
            }
            published.extend(card.holders.iter().map(|status| {
                let (holder, hold) = status.hold();
                let mut hold = PublishedHold { holder, card: index, hold, pod: String::new() };
                if hold.is_stand_in() && !status.pod.is_empty() {
                    hold.pod = format!("{}/{}", status.namespace, status.pod);
                }
                hold
            }));
        }
        facts.published = published.into();
        // Placement reads no PCI address.
        let card = |card: &Card| Arc::new(Card { bus_id: String::new(), ..card.clone() });
        facts.inventory.cards = status.cards.iter().map(|it| card(&it.card)).collect();
        facts.inventory.tree = Arc::new(status.tree());
        facts.inventory.legacy_only = false;
        facts.inventory.published = true;
        facts.inventory.closed = status.conditions.iter().any(|condition| {
            matches!(
                (&*condition.type_, &*condition.status),
                ("Ready" | "IsolationReady", "False") | ("PluginConflict", "True")
            )
        });
        facts
    }

    /// Of the Node with this UID.
    #[must_use]
    pub fn of_node(self, uid: Option<String>) -> Self {
        Self { node_uid: uid, ..self }
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
    /// Where NVIDIA's plugin divides cards (time slices, MPS, MIG): how many parts legacy pods can still get.
    pub parts: Option<u32>,
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

    /// What legacy pods can get: free cards, or parts of cards.
    #[must_use]
    pub fn free_for_legacy(&self) -> u32 {
        self.parts.unwrap_or_else(|| self.free_cards())
    }

    /// Cards found in breach of an invariant.
    #[must_use]
    pub fn disputed(&self) -> usize {
        self.cards.iter().filter(|card| card.state == CardState::Disputed).count()
    }
}

/// The occupancy that follows from what is known of a node, but for the pods that `without` names by UID.
///
/// The truth about a container is, in this order: the node's own agent (GPUShadow), its annotations, and else only
/// how much it has. A hold that the agent still publishes counts although its pod is gone (I3). A stand-in for a pod that the
/// agent cannot name yet is the pod that waits for such devices, where there is one.
#[must_use]
pub fn occupancy<'a>(
    inventory: &Inventory,
    facts: &NodeFacts,
    published: &[PublishedHold],
    placed: impl Iterator<Item = &'a Placed>,
    without: impl Fn(&str) -> bool,
) -> (Ledger, NodeOccupancy) {
    let mut ledger: Ledger = inventory.cards.iter().cloned().collect();
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
    let published: Vec<&PublishedHold> =
        published.iter().filter(|hold| !without(&hold.holder.pod_uid)).collect();
    for hold in published.iter().filter(|hold| !hold.is_stand_in()) {
        ledger.record(&hold.holder, hold.card, hold.hold.clone());
    }
    let legacy = published.iter().filter(|hold| matches!(hold.hold, Hold::Legacy(_)));
    let mut found = Found {
        seen: published.iter().map(|hold| &hold.holder).collect(),
        legacy: legacy.map(|hold| hold.card).collect(),
        stand_ins: published.iter().copied().filter(|hold| hold.is_stand_in()).collect(),
    };
    let (mut unknown, mut parts_held) = (0u32, 0u32);
    let mut gone: HashSet<&str> = published.iter().map(|hold| &*hold.holder.pod_uid).collect();
    for placed in placed.filter(|placed| !without(&placed.pod.uid)) {
        unknown = unknown.saturating_add(found.record(&mut ledger, placed));
        parts_held = parts_held.saturating_add(placed.pod.demand().legacy);
        gone.remove(&*placed.pod.uid);
    }
    gone.retain(|uid| !uid.starts_with(UNNAMED));
    let of_gone = published.iter().filter(|hold| gone.contains(&*hold.holder.pod_uid));
    for hold in of_gone.chain(&found.stand_ins) {
        parts_held = parts_held.saturating_add(legacy_parts(&hold.hold));
    }
    for hold in found.stand_ins {
        ledger.record(&hold.holder, hold.card, hold.hold.clone());
    }
    let cards = ledger.view();
    // Withheld cards are mostly those of legacy pods, whether their card is known or not.
    let legacy = cards.iter().filter(|card| card.state == CardState::Legacy).count();
    let withheld = inventory.withheld.saturating_sub(u32::try_from(legacy).unwrap_or(u32::MAX));
    let parts = parts_left(inventory, facts, &cards, parts_held);
    (ledger, NodeOccupancy { cards, unattributed: unknown.max(withheld), parts })
}

fn legacy_parts(hold: &Hold) -> u32 {
    match hold {
        Hold::Legacy(parts) => u32::try_from(parts.len()).unwrap_or(u32::MAX),
        Hold::Share { .. } => 0,
    }
}

/// The parts that legacy pods can get where there are more of them than cards. The agent withdraws those of a card that shares are on;
/// until it has, they go to nobody either.
fn parts_left(inventory: &Inventory, facts: &NodeFacts, cards: &[CardView], held: u32) -> Option<u32> {
    let (all, count) = (facts.capacity.legacy, u32::try_from(cards.len()).unwrap_or(u32::MAX));
    if !inventory.published || count == 0 || all <= count {
        return None;
    }
    let shared = cards.iter().filter(|card| card.state == CardState::Shared).count();
    let withdrawn = all.div_ceil(count).saturating_mul(u32::try_from(shared).unwrap_or(u32::MAX));
    Some(all.saturating_sub(withdrawn).min(facts.allocatable.legacy).saturating_sub(held))
}

/// What the node's agent has found.
struct Found<'a> {
    /// Who is named.
    seen: HashSet<&'a HolderId>,
    /// Cards that legacy containers hold.
    legacy: HashSet<CardIndex>,
    /// Holds that no pod was found for yet.
    stand_ins: Vec<&'a PublishedHold>,
}

impl Found<'_> {
    /// Writes one pod into the occupancy; returns for how many of its cards it is not known which they are. A share that we chose
    /// one of the legacy cards for came too late: its node will give it another, unknown yet which.
    fn record(&mut self, ledger: &mut Ledger, placed: &Placed) -> u32 {
        let mut unknown = (0u32, 0u32);
        for (at, container) in placed.pod.asking() {
            let is_legacy = placed.pod.kind == PodKind::Legacy;
            let wanted = match placed.pod.kind {
                PodKind::Legacy => container.demand.legacy,
                _ => container.demand.cores.whole_cards().unwrap_or(1),
            };
            let holder = HolderId::new(&*placed.pod.uid, &container.name);
            let whole = footprint(container);
            // The agent records a container's cards all at once.
            let mut known = if self.seen.contains(&holder) { wanted } else { 0 };
            for card in cards_of(&placed.cards, at) {
                let lost = !is_legacy && self.legacy.contains(&card);
                if card.position() >= ledger.len() || lost {
                    continue;
                }
                if known < wanted {
                    self.name_stand_in(placed, &whole, Some(card));
                    ledger.record(&holder, card, whole.clone());
                    known += 1;
                } else if let Some(half) = held_of(ledger, &holder, card) {
                    // Published while the kubelet was still to ask for the other resource.
                    ledger.record(&holder, card, larger(half, &whole));
                }
            }
            while is_legacy
                && known < wanted
                && let Some(hold) = self.name_stand_in(placed, &whole, None)
            {
                ledger.record(&hold.holder, hold.card, hold.hold.clone());
                known += 1;
            }
            let missing = wanted.saturating_sub(known);
            match container.kind.phase() {
                Phase::Init => unknown.0 = unknown.0.max(missing),
                Phase::Run => unknown.1 = unknown.1.saturating_add(missing),
            }
        }
        unknown.0.max(unknown.1)
    }
}

impl<'a> Found<'a> {
    /// Takes out the stand-ins for what `placed` has of a card, of its cores and of its memory, each at most once. Returns one.
    fn name_stand_in(
        &mut self,
        placed: &Placed,
        of: &Hold,
        card: Option<CardIndex>,
    ) -> Option<&'a PublishedHold> {
        let mut taken: Option<&'a PublishedHold> = None;
        for _ in 0..2 {
            let fits = |hold: &&PublishedHold| {
                card.is_none_or(|card| hold.card == card)
                    && hold.may_be(placed, of)
                    && taken.is_none_or(|other| is_other_half(&other.hold, &hold.hold))
            };
            let Some(at) = self.stand_ins.iter().position(fits) else { break };
            taken = Some(self.stand_ins.remove(at));
        }
        taken
    }
}

/// Whether one has the cores alone and the other the memory alone.
fn is_other_half(one: &Hold, other: &Hold) -> bool {
    match (one, other) {
        (Hold::Share { cores, blocks, .. }, Hold::Share { cores: more, blocks: memory, .. }) => {
            (cores.0 == 0 || more.0 == 0) && (blocks.0 == 0 || memory.0 == 0)
        }
        _ => false,
    }
}

/// What `holder` has of a card so far.
fn held_of(ledger: &Ledger, holder: &HolderId, card: CardIndex) -> Option<Hold> {
    ledger.holds(card).find(|(other, _)| *other == holder).map(|(_, hold)| hold.clone())
}

/// The larger of both resources.
fn larger(one: Hold, other: &Hold) -> Hold {
    match (one, other) {
        (Hold::Share { cores, blocks, phase }, Hold::Share { cores: more, blocks: memory, .. }) => {
            Hold::Share { cores: cores.max(*more), blocks: blocks.max(*memory), phase }
        }
        (one, _) => one,
    }
}
