//! Which cards of one node a whole pod gets. The same code answers the scheduler's filter and bind, the node agent when
//! it must choose by itself, and the simulation.
//!
//! **Init containers.** The kubelet hands the devices of an init container on to the containers after it, and insists on
//! it (`devicesToAllocate`, reusable devices first; FACTS 2.6). So an init container and the first app container are
//! placed as one: on the same cards, by the larger of the two.

use crate::ask::{ContainerAsk, ContainerKind, Demand, PodAsk, PodKind};
use crate::card::{CardView, same_model};
use crate::evaluate::{self, CardOrder};
use crate::ledger::Hold;
use crate::topology::Tree;
use crate::units::{Blocks, CardIndex, Cores};

/// What a pod demands of its cards beside capacity.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Constraints {
    /// Models that will do, by [`same_model`]; empty: any.
    pub models: Vec<String>,
    /// Only these UUIDs; empty: any.
    pub include: Vec<String>,
    /// None of these UUIDs.
    pub exclude: Vec<String>,
    /// All cards on one NUMA node.
    pub same_numa: bool,
    /// Which card a share goes to.
    pub order: CardOrder,
}

/// One node as placement sees it.
#[derive(Clone, Copy, Debug)]
pub struct NodeView<'a> {
    /// Its cards, in order.
    pub cards: &'a [CardView],
    /// Their tree.
    pub tree: &'a Tree,
    /// Free cards that are unattributed: legacy pods were bound here whose cards are not known yet (DESIGN decision 6).
    pub unattributed: u32,
}

/// The cards of each container that asks for some.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// By the container's position in [`PodAsk::containers`].
    pub containers: Vec<(usize, Vec<CardIndex>)>,
}

/// Why a pod does not fit on a node. Texts are few and stable: the scheduler counts them by text (FACTS 4.7).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It asks for both kinds.
    #[error("pod asks for whole cards and for shares: remove one of the two")]
    Mixed,
    /// The node has no card, or none that the constraints allow.
    #[error("no card meets the pod's constraints")]
    NoCard,
    /// It asks for more than the empty node has.
    #[error("pod asks for more than the node's cards have")]
    TooBig,
    /// Whole cards are asked for and too few are free.
    #[error("{free} cards are free, {asked} needed")]
    FewCards {
        /// Free cards, without those unattributed to others.
        free: u32,
        /// Whole cards asked for.
        asked: u32,
    },
    /// A share is asked for that fits on no card.
    #[error(
        "no single card has {asked_cores} and {asked_blocks} free (largest free share: {cores} and {blocks}); {open} of {total} cards take shares"
    )]
    NoShare {
        /// Cards that take shares: no legacy container holds them, and they are healthy and not cordoned.
        open: u32,
        /// Cards of the node.
        total: u32,
        /// Cores left on the card with most cores left.
        cores: Cores,
        /// Blocks left on that card.
        blocks: Blocks,
        /// Cores asked for.
        asked_cores: Cores,
        /// Blocks asked for.
        asked_blocks: Blocks,
    },
}

impl Refusal {
    /// Whether the pod could fit here if others went: preemption is worth a try.
    #[must_use]
    pub const fn resolvable(&self) -> bool {
        matches!(self, Self::FewCards { .. } | Self::NoShare { .. })
    }
}

impl Constraints {
    /// Whether a card will do.
    #[must_use]
    pub fn allow(&self, card: &CardView) -> bool {
        (self.models.is_empty() || self.models.iter().any(|model| same_model(model, &card.card.model)))
            && (self.include.is_empty() || self.include.contains(&card.card.uuid))
            && !self.exclude.contains(&card.card.uuid)
    }

    fn is_unconstrained(&self) -> bool {
        self.models.is_empty() && self.include.is_empty() && self.exclude.is_empty() && !self.same_numa
    }
}

/// What a container holds of each of its cards: its share; or all cores of the card and its part of the blocks that the container
/// asks for, which is what the node agent gives: as many memory devices as the kubelet asks it for.
#[must_use]
pub fn footprint(container: &ContainerAsk) -> Hold {
    let Demand { legacy, cores, .. } = container.demand;
    if legacy > 0 {
        return Hold::whole();
    }
    let phase = container.kind.phase();
    Hold::Share { cores: cores.min(Cores::CARD), blocks: blocks_each(container.demand), phase }
}

/// The cards for a pod, or why it does not fit. A legacy pod gets no choice of cards (the NVIDIA plugin's business), only
/// the answer whether enough are free.
///
/// # Errors
/// [`Refusal`].
pub fn place(node: &NodeView<'_>, ask: &PodAsk, constraints: &Constraints) -> Result<Placement, Refusal> {
    match ask.kind() {
        PodKind::Plain => Ok(Placement::default()),
        PodKind::Mixed => Err(Refusal::Mixed),
        PodKind::Legacy => place_legacy(node, ask.effective().legacy).map(|()| Placement::default()),
        PodKind::Shared if constraints.is_unconstrained() => {
            place_shared(node.cards, node, ask, constraints.order)
        }
        PodKind::Shared => place_constrained(node, ask, constraints),
    }
}

/// As [`place`], with every container of a shared pod on this one card: the card that a score has chosen for a share.
///
/// # Errors
/// [`Refusal`] where the card does not do.
pub fn place_on(
    node: &NodeView<'_>,
    ask: &PodAsk,
    constraints: &Constraints,
    card: CardIndex,
) -> Result<Placement, Refusal> {
    let allowed = |view: &&CardView| view.index == card && constraints.allow(view);
    let only: Vec<CardView> = node.cards.iter().filter(allowed).cloned().collect();
    place_shared(&only, node, ask, constraints.order)
}

fn place_legacy(node: &NodeView<'_>, asked: u32) -> Result<(), Refusal> {
    let usable = node.cards.len();
    if usable < asked as usize {
        return Err(if usable == 0 { Refusal::NoCard } else { Refusal::TooBig });
    }
    let free = free_cards(node.cards).saturating_sub(node.unattributed);
    if free < asked { Err(Refusal::FewCards { free, asked }) } else { Ok(()) }
}

/// Narrows the cards first; with `same_numa`, tries one NUMA node after the other, the fullest that fits first.
fn place_constrained(
    node: &NodeView<'_>,
    ask: &PodAsk,
    constraints: &Constraints,
) -> Result<Placement, Refusal> {
    let allowed: Vec<CardView> = node.cards.iter().filter(|card| constraints.allow(card)).cloned().collect();
    if allowed.is_empty() {
        return Err(Refusal::NoCard);
    }
    if !constraints.same_numa {
        return place_shared(&allowed, node, ask, constraints.order);
    }
    let mut groups: Vec<Vec<CardView>> = Vec::new();
    for card in allowed {
        match groups.iter_mut().find(|group| group[0].card.numa == card.card.numa) {
            Some(group) => group.push(card),
            None => groups.push(vec![card]),
        }
    }
    groups.sort_by_key(|group| group.iter().map(|card| card.cores_left).sum::<Cores>());
    let mut refusal = Refusal::NoCard;
    for group in &groups {
        match place_shared(group, node, ask, constraints.order) {
            Ok(placement) => return Ok(placement),
            Err(why) => refusal = why,
        }
    }
    Err(refusal)
}

fn free_cards(cards: &[CardView]) -> u32 {
    u32::try_from(cards.iter().filter(|card| card.is_free()).count()).unwrap_or(u32::MAX)
}

/// The work in progress: copies of the cards on which containers are put one after the other.
struct Attempt<'a> {
    cards: Vec<CardView>,
    tree: &'a Tree,
    unattributed: u32,
    order: CardOrder,
}

fn place_shared(
    cards: &[CardView],
    node: &NodeView<'_>,
    ask: &PodAsk,
    order: CardOrder,
) -> Result<Placement, Refusal> {
    let mut attempt =
        Attempt { cards: cards.to_vec(), tree: node.tree, unattributed: node.unattributed, order };
    let mut placement = Placement::default();
    // What init containers need is added to the first app container's ask; they then get a part of its cards.
    let init = init_peak(ask);
    let init_floor =
        init_containers(ask).map(|(_, container)| blocks_each(container.demand)).max().unwrap_or_default();
    let mut lead: Option<Vec<CardIndex>> = None;
    for (position, container) in ask.containers.iter().enumerate() {
        if container.demand.is_none() || container.kind == ContainerKind::Init {
            continue;
        }
        let leads = container.kind == ContainerKind::App && lead.is_none();
        let (demand, floor) = if leads {
            (larger(container.demand, init), blocks_each(container.demand).max(init_floor))
        } else {
            (container.demand, Blocks::ZERO)
        };
        let got = attempt.put(demand, floor)?;
        let own = take_first(&got, container.demand);
        if leads {
            lead = Some(got);
        }
        placement.containers.push((position, own));
    }
    let lead = match lead {
        Some(cards) => cards,
        None if init.is_none() => Vec::new(),
        None => attempt.put(init, init_floor)?,
    };
    for (position, container) in init_containers(ask) {
        placement.containers.push((position, take_first(&lead, container.demand)));
    }
    placement.containers.sort_unstable_by_key(|(position, _)| *position);
    Ok(placement)
}

fn init_containers(ask: &PodAsk) -> impl Iterator<Item = (usize, &ContainerAsk)> {
    let all = ask.containers.iter().enumerate();
    all.filter(|(_, container)| container.kind == ContainerKind::Init && !container.demand.is_none())
}

fn init_peak(ask: &PodAsk) -> Demand {
    init_containers(ask).fold(Demand::NONE, |peak, (_, container)| larger(peak, container.demand))
}

/// The larger of each; more than one card means whole cards.
fn larger(one: Demand, other: Demand) -> Demand {
    let cores = one.cores.max(other.cores);
    Demand { legacy: 0, cores, blocks: one.blocks.max(other.blocks) }
}

/// What a container needs on each of its cards.
fn blocks_each(demand: Demand) -> Blocks {
    Blocks(demand.blocks.0.div_ceil(demand.cores.whole_cards().unwrap_or(1)))
}

fn take_first(cards: &[CardIndex], demand: Demand) -> Vec<CardIndex> {
    let count = demand.cores.whole_cards().unwrap_or(1) as usize;
    cards.iter().copied().take(count).collect()
}

impl Attempt<'_> {
    /// Finds cards for one container and takes them off the attempt. Each card has at least `floor` of memory.
    fn put(&mut self, demand: Demand, floor: Blocks) -> Result<Vec<CardIndex>, Refusal> {
        let Demand { cores, blocks, .. } = demand;
        let Some(count) = cores.whole_cards() else { return self.put_share(cores, blocks) };
        // A whole card's memory is its own; a request beyond it cannot be met by any placement.
        let each = blocks_each(demand).max(floor);
        let large_enough = self.cards.iter().filter(|card| card.blocks >= each).count();
        if large_enough < count as usize {
            return Err(if self.cards.is_empty() { Refusal::NoCard } else { Refusal::TooBig });
        }
        let free = free_cards(&self.cards).saturating_sub(self.unattributed);
        let refusal = Refusal::FewCards { free, asked: count };
        if free < count {
            return Err(refusal);
        }
        let mut tree = self.tree.clone();
        tree.set_free(
            self.cards.iter().filter(|card| card.is_free() && card.blocks >= each).map(|card| card.index),
        );
        let chosen = evaluate::whole(&tree, count as usize).ok_or(refusal)?;
        for card in &chosen {
            self.take(*card, Cores::CARD, None);
        }
        Ok(chosen)
    }

    fn put_share(&mut self, cores: Cores, blocks: Blocks) -> Result<Vec<CardIndex>, Refusal> {
        // A share on a card that is shared already takes no free card from those unattributed.
        let spare = free_cards(&self.cards) > self.unattributed;
        let chosen = if spare {
            evaluate::share(&self.cards, cores, blocks, self.order)
        } else {
            let started: Vec<CardView> = self.cards.iter().filter(|card| !card.is_free()).cloned().collect();
            evaluate::share(&started, cores, blocks, self.order)
        };
        let Some(card) = chosen else { return Err(self.no_share(cores, blocks)) };
        self.take(card, cores, Some(blocks));
        Ok(vec![card])
    }

    fn no_share(&self, asked_cores: Cores, asked_blocks: Blocks) -> Refusal {
        if !self.cards.iter().any(|card| card.blocks >= asked_blocks) {
            return if self.cards.is_empty() { Refusal::NoCard } else { Refusal::TooBig };
        }
        let open = || self.cards.iter().filter(|card| card.takes_shares());
        let largest = open().max_by_key(|card| (card.cores_left, card.blocks_left));
        Refusal::NoShare {
            open: u32::try_from(open().count()).unwrap_or(u32::MAX),
            total: u32::try_from(self.cards.len()).unwrap_or(u32::MAX),
            cores: largest.map_or(Cores::ZERO, |card| card.cores_left),
            blocks: largest.map_or(Blocks::ZERO, |card| card.blocks_left),
            asked_cores,
            asked_blocks,
        }
    }

    fn take(&mut self, index: CardIndex, cores: Cores, blocks: Option<Blocks>) {
        if let Some(card) = self.cards.iter_mut().find(|card| card.index == index) {
            card.cores_left = card.cores_left.saturating_sub(cores);
            card.blocks_left = blocks.map_or(Blocks::ZERO, |blocks| card.blocks_left.saturating_sub(blocks));
            card.holders += 1;
            card.state = crate::card::CardState::Shared;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capacity::{NodeCapacity, RequestSummary};
    use crate::card::Card;
    use crate::ledger::{Hold, HolderId, Ledger};
    use crate::names::Dialect;
    use crate::topology::{LinkLevel, Topology};
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn ledger(cards: u32) -> Ledger {
        let card = |minor: u32| Card {
            uuid: format!("GPU-{minor}"),
            minor,
            memory_mib: 10 * 256,
            numa: Some(minor / 4),
            ..Card::default()
        };
        Ledger::new((0..cards).map(card).collect())
    }

    fn shares(cores: u32, blocks: u32) -> Value {
        json!({"limits": {"tencent.com/vcuda-core": cores.to_string(), "tencent.com/vcuda-memory": blocks.to_string()}})
    }

    fn pod(init: &[Value], app: &[Value]) -> PodAsk {
        let named = |prefix: &str, all: &[Value]| -> Vec<Value> {
            let name = |(n, resources): (usize, &Value)| json!({"name": format!("{prefix}{n}"), "resources": resources});
            all.iter().enumerate().map(name).collect()
        };
        let spec = json!({"initContainers": named("init", init), "containers": named("app", app)});
        PodAsk::of_spec(&serde_json::from_value(spec).unwrap(), &Dialect::default()).unwrap()
    }

    fn on(
        ledger: &Ledger,
        unattributed: u32,
        ask: &PodAsk,
        constraints: &Constraints,
    ) -> Result<Vec<Vec<u32>>, String> {
        let tree = Topology::uniform(ledger.len(), LinkLevel::Pix).tree();
        let cards = ledger.view();
        place(&NodeView { cards: &cards, tree: &tree, unattributed }, ask, constraints)
            .map(|placement| {
                placement
                    .containers
                    .into_iter()
                    .map(|(_, cards)| cards.into_iter().map(|card| card.0).collect())
                    .collect()
            })
            .map_err(|refusal| refusal.to_string())
    }

    fn held(mut ledger: Ledger, card: u32, hold: Hold) -> Ledger {
        ledger.hold(&HolderId::new(format!("other-{card}"), "c"), CardIndex(card), hold).unwrap();
        ledger
    }

    #[test]
    fn containers_of_a_pod_share_the_room() {
        let ask = pod(&[], &[shares(60, 5), shares(60, 5), shares(40, 5), shares(100, 0)]);
        assert_eq!(
            on(&ledger(4), 0, &ask, &Constraints::default()),
            Ok(vec![vec![0], vec![1], vec![0], vec![2]])
        );
    }

    #[test]
    fn an_init_container_is_on_the_cards_of_the_first_app_container() {
        let open = Constraints::default();
        let ask = pod(&[shares(80, 2)], &[shares(50, 5), shares(50, 5)]);
        assert_eq!(on(&ledger(2), 0, &ask, &open), Ok(vec![vec![0], vec![0], vec![1]]));
        let ask = pod(&[shares(200, 0)], &[shares(30, 1)]);
        assert_eq!(on(&ledger(2), 0, &ask, &open), Ok(vec![vec![0, 1], vec![0]]));
        let ask = pod(&[shares(30, 1)], &[]);
        assert_eq!(on(&ledger(1), 0, &ask, &open), Ok(vec![vec![0]]));
    }

    /// Two cards of an init container have the memory together, but the app container gets one of them.
    #[test]
    fn each_container_has_its_memory_on_the_cards_that_it_gets() {
        let ask = pod(&[shares(200, 1)], &[shares(100, 11)]);
        let refused = on(&ledger(4), 0, &ask, &Constraints::default());
        assert_eq!(refused, Err(Refusal::TooBig.to_string()));
    }

    #[test]
    fn a_legacy_card_takes_no_share() {
        let ledger = held(ledger(1), 0, Hold::whole());
        let why = on(&ledger, 0, &pod(&[], &[shares(50, 5)]), &Constraints::default());
        assert_eq!(
            why.unwrap_err(),
            "no single card has 50 cores and 5 blocks free (largest free share: 0 cores and 0 blocks); 0 of 1 cards take shares"
        );
    }

    #[test]
    fn refusals_tell_what_is_there() {
        let open = Constraints::default();
        let share_held = held(ledger(2), 0, Hold::share(Cores(60), Blocks(3)));
        let full = held(share_held, 1, Hold::whole());
        let table = [
            (
                on(&full, 0, &pod(&[], &[shares(50, 5)]), &open),
                "no single card has 50 cores and 5 blocks free (largest free share: 40 cores and 7 blocks); 1 of 2 cards take shares",
            ),
            (on(&full, 0, &pod(&[], &[shares(100, 0)]), &open), "0 cards are free, 1 needed"),
            (
                on(&full, 0, &pod(&[], &[shares(300, 0)]), &open),
                "pod asks for more than the node's cards have",
            ),
            (
                on(&full, 0, &pod(&[], &[shares(50, 11)]), &open),
                "pod asks for more than the node's cards have",
            ),
            (on(&ledger(0), 0, &pod(&[], &[shares(50, 1)]), &open), "no card meets the pod's constraints"),
            (
                on(&full, 0, &pod(&[], &[json!({"limits": {"nvidia.com/gpu": "1"}})]), &open),
                "0 cards are free, 1 needed",
            ),
        ];
        for (got, expected) in table {
            assert_eq!(got.unwrap_err(), expected);
        }
    }

    #[test]
    fn a_whole_card_takes_the_memory_that_is_asked_for() {
        let ask = pod(&[], &[shares(200, 7), shares(50, 5), json!({"limits": {"nvidia.com/gpu": "1"}})]);
        let held = |at: usize| footprint(&ask.containers[at]);
        assert_eq!(
            [held(0), held(1)],
            [Hold::share(Cores::CARD, Blocks(4)), Hold::share(Cores(50), Blocks(5))]
        );
        assert_eq!(held(2), Hold::whole());
    }

    #[test]
    fn unattributed_cards_are_left_free() {
        let open = Constraints::default();
        let started = held(ledger(2), 0, Hold::share(Cores(60), Blocks(3)));
        assert_eq!(on(&started, 1, &pod(&[], &[shares(40, 1)]), &open), Ok(vec![vec![0]]));
        assert!(on(&started, 1, &pod(&[], &[shares(50, 1)]), &open).is_err());
        assert!(on(&started, 1, &pod(&[], &[shares(100, 0)]), &open).is_err());
        assert!(on(&started, 1, &pod(&[], &[json!({"limits": {"nvidia.com/gpu": "1"}})]), &open).is_err());
    }

    #[test]
    fn constraints_narrow_the_cards() {
        let ask = pod(&[], &[shares(50, 5)]);
        let only_three = Constraints { include: vec!["GPU-3".into()], ..Constraints::default() };
        assert_eq!(on(&ledger(8), 0, &ask, &only_three), Ok(vec![vec![3]]));
        let not_zero = Constraints { exclude: vec!["GPU-0".into()], ..Constraints::default() };
        assert_eq!(on(&ledger(8), 0, &ask, &not_zero), Ok(vec![vec![1]]));
        let other_model = Constraints { models: vec!["B200".into()], ..Constraints::default() };
        assert!(on(&ledger(8), 0, &ask, &other_model).is_err());
        let one_numa = Constraints { same_numa: true, ..Constraints::default() };
        let three_held = held(ledger(8), 0, Hold::whole());
        assert_eq!(
            on(&three_held, 0, &pod(&[], &[shares(200, 0), shares(200, 0)]), &one_numa),
            Ok(vec![vec![4, 5], vec![6, 7]])
        );
    }

    proptest! {
        /// Whatever is placed can be written into the ledger: placement and ledger agree on I1 and I2.
        #[test]
        fn a_placement_fits_the_ledger(
            pods in prop::collection::vec((prop::option::of(1_u32..=300), prop::collection::vec((1_u32..=300, 1_u32..=12), 1..3)), 1..30),
        ) {
            let mut ledger = ledger(8);
            let tree = Topology::uniform(8, LinkLevel::Pix).tree();
            for (number, (init, app)) in pods.into_iter().enumerate() {
                let round = |cores: u32| if cores > 100 { cores / 100 * 100 } else { cores };
                let init: Vec<Value> = init.into_iter().map(|cores| shares(round(cores), 1)).collect();
                let app: Vec<Value> = app.into_iter().map(|(cores, blocks)| shares(round(cores), blocks)).collect();
                let ask = pod(&init, &app);
                let cards = ledger.view();
                let node = NodeView { cards: &cards, tree: &tree, unattributed: 0 };
                let placed = place(&node, &ask, &Constraints::default());
                let free = free_cards(&cards);
                let summary = RequestSummary::of(&ask, &Constraints::default());
                if let Some(fast) = NodeCapacity::new(&cards, free, 0, false).fast_fit(summary) {
                    prop_assert_eq!(fast, placed.clone().map(drop));
                }
                let Ok(placement) = placed else { continue };
                for (position, cards) in placement.containers {
                    let container = &ask.containers[position];
                    let holder = HolderId::new(format!("pod-{number}"), container.name.clone());
                    for card in cards {
                        prop_assert_eq!(ledger.hold(&holder, card, footprint(container)), Ok(()));
                    }
                }
                prop_assert_eq!(ledger.check(), Ok(()));
            }
        }
    }
}
