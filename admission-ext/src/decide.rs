//! Whether, where and on which cards: pure decisions over one node's books.

use std::borrow::Cow;

use gpu_migrate_model::ask::PodKind;
use gpu_migrate_model::ledger::{HolderId, Ledger};
use gpu_migrate_model::place::{NodeView, Placement, Refusal, place};

use crate::score::Judge;
use crate::state::Slot;
use crate::state::node::{Books, Inventory, share_of};
use crate::state::pod::{Cards, PodFacts, cards_of, compact};
use crate::state::room::Glance;

/// Whether `pod` fits on the node, by the first look where that tells.
///
/// # Errors
/// Why it does not.
pub fn fits(slot: &Slot, pod: &PodFacts, glance: Glance) -> Result<(), Refusal> {
    match slot.rooms.look(glance) {
        Some(answer) => answer,
        None => placement(&slot.inventory, &slot.books, pod).map(|_| ()),
    }
}

/// The same where the pod's own assumption, or the victims of a preemption, are thought away.
///
/// # Errors
/// Why it does not fit even so.
pub fn fits_without(slot: &Slot, pod: &PodFacts, without: impl Fn(&str) -> bool) -> Result<(), Refusal> {
    let (_, books) = slot.books_without(without);
    placement(&slot.inventory, &books, pod).map(|_| ())
}

/// The cards for `pod` on this node, by the model's evaluators.
///
/// # Errors
/// Why it does not fit.
pub fn placement(inventory: &Inventory, books: &Books, pod: &PodFacts) -> Result<Placement, Refusal> {
    let Ok(ask) = &pod.ask else { return Err(Refusal::Mixed) };
    if pod.kind == PodKind::Shared && inventory.legacy_only {
        return Err(Refusal::NoCard);
    }
    let cards = match pod.kind {
        PodKind::Shared => books.for_shares(inventory),
        _ => Cow::Borrowed(&books.cards[..]),
    };
    let view = NodeView { cards: &cards, tree: &inventory.tree, promised: books.promised };
    place(&view, ask, &pod.constraints)
}

/// Why a choice could not be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Undecided {
    /// The pod does not fit (any more).
    #[error("{0}")]
    Refused(#[from] Refusal),
    /// The books would break an invariant; placement and ledger disagree.
    #[error("the ledger refuses the placement: {0}")]
    Ledger(#[from] gpu_migrate_model::ledger::Refused),
}

/// The cards for `pod` on this node, checked against the ledger (I1, I2). What the pod itself holds there from an
/// earlier try is thought away first, so that deciding twice is deciding once.
///
/// # Errors
/// Why it does not fit.
pub fn choose(slot: &Slot, pod: &PodFacts, judge: &Judge) -> Result<Cards, Undecided> {
    let (mut ledger, books) = slot.books_without(|uid| uid == &*pod.uid);
    let narrowed = judge.card(&books, &slot.inventory, pod).and_then(|card| {
        let mut narrowed = pod.clone();
        narrowed.constraints.include = vec![books.cards.get(card.position())?.card.uuid.clone()];
        placement(&slot.inventory, &books, &narrowed).ok()
    });
    let placement = match narrowed {
        Some(placement) => placement,
        None => placement(&slot.inventory, &books, pod)?,
    };
    let cards = compact(&placement);
    hold(&mut ledger, pod, &cards)?;
    Ok(cards)
}

/// Writes `cards` into `ledger` by the ledger's own rules.
fn hold(
    ledger: &mut Ledger,
    pod: &PodFacts,
    cards: &Cards,
) -> Result<(), gpu_migrate_model::ledger::Refused> {
    for (at, container) in pod.asking().filter(|_| pod.kind == PodKind::Shared) {
        let holder = HolderId::new(&*pod.uid, &container.name);
        for card in cards_of(cards, at) {
            let demand = container.demand;
            ledger.hold(&holder, card, share_of(demand.cores, demand.blocks, container.kind.phase()))?;
        }
    }
    Ok(())
}
