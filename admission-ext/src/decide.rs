//! Whether, where and on which cards: pure decisions over one node's occupancy.

use std::borrow::Cow;
use std::sync::Arc;

use gpu_migrate_model::ask::PodKind;
use gpu_migrate_model::capacity::RequestSummary;
use gpu_migrate_model::ledger::{HolderId, Ledger};
use gpu_migrate_model::place::{NodeView, Placement, Refusal, footprint, place, place_on};
use gpu_migrate_model::units::CardIndex;

use crate::score::NodeScorer;
use crate::state::NodeInfo;
use crate::state::node::{Inventory, NodeOccupancy, Placed, UNNAMED};
use crate::state::pod::{Cards, PodFacts, cards_of, compact};

/// Whether `pod` fits on the node, by the fast fit where that decides.
///
/// # Errors
/// Why it does not.
pub fn fits(info: &NodeInfo, pod: &PodFacts, summary: RequestSummary) -> Result<(), Refusal> {
    info.capacity.fits(summary, || placement(&info.inventory, &info.occupancy, pod, None))
}

/// The same where the pod's own assumption, or the victims of a preemption, are left out, beside the pods that are nominated
/// to the node.
///
/// # Errors
/// Why it does not fit even so.
pub fn fits_without(info: &NodeInfo, pod: &PodFacts, without: impl Fn(&str) -> bool) -> Result<(), Refusal> {
    let (_, occupancy) = info.occupancy_with(&kept_for_nominated(info, pod), without);
    placement(&info.inventory, &occupancy, pod, None).map(drop)
}

/// The nominated pods that go before `pod`, as the scheduler has it (those of equal or higher priority), on the cards that they
/// get once the pods that are leaving are gone.
fn kept_for_nominated(info: &NodeInfo, pod: &PodFacts) -> Vec<Placed> {
    let mut ahead: Vec<&Arc<PodFacts>> = info
        .nominated
        .iter()
        .filter(|other| other.uid != pod.uid && other.priority >= pod.priority)
        .collect();
    ahead.sort_by(|one, other| (other.priority, &one.uid).cmp(&(one.priority, &other.uid)));
    let mut kept: Vec<Placed> = Vec::new();
    // A holder that the node reports and the API has no more is leaving too, but for one that is not named yet.
    let leaves =
        |uid: &str| info.pods.get(uid).map_or(!uid.starts_with(UNNAMED), |placed| placed.pod.leaving);
    for other in ahead {
        let goes = |uid: &str| uid == &*pod.uid || leaves(uid) && kept.iter().all(|one| *one.pod.uid != *uid);
        let (_, occupancy) = info.occupancy_with(&kept, goes);
        if let Ok(cards) = placement(&info.inventory, &occupancy, other, None) {
            kept.push(Placed { pod: Arc::clone(other), cards: compact(&cards) });
        }
    }
    kept
}

/// The cards for `pod` on this node, by the model's evaluators; on one card alone where `card` is given.
///
/// # Errors
/// Why it does not fit.
pub fn placement(
    inventory: &Inventory,
    occupancy: &NodeOccupancy,
    pod: &PodFacts,
    card: Option<CardIndex>,
) -> Result<Placement, Refusal> {
    let Ok(ask) = &pod.ask else { return Err(Refusal::Mixed) };
    if pod.kind == PodKind::Shared && inventory.legacy_only {
        return Err(Refusal::NoCard);
    }
    if let (PodKind::Legacy, Some(free)) = (pod.kind, occupancy.parts) {
        let asked = pod.demand().legacy;
        return if free < asked { Err(Refusal::FewCards { free, asked }) } else { Ok(Placement::default()) };
    }
    let cards = match pod.kind {
        PodKind::Shared => occupancy.for_shares(inventory),
        _ => Cow::Borrowed(&occupancy.cards[..]),
    };
    let view = NodeView { cards: &cards, tree: &inventory.tree, unattributed: occupancy.unattributed };
    match card {
        Some(card) => place_on(&view, ask, &pod.constraints, card),
        None => place(&view, ask, &pod.constraints),
    }
}

/// Why a choice could not be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Undecided {
    #[error("{0}")]
    Refused(#[from] Refusal),
    /// The ledger would break an invariant; placement and ledger disagree.
    #[error("the ledger refuses the placement: {0}")]
    Ledger(#[from] gpu_migrate_model::ledger::Refused),
}

/// The cards for `pod` on this node, checked against the ledger (I1, I2). What the pod itself holds there from an
/// earlier try is left out first, so that deciding twice is deciding once.
///
/// # Errors
/// Why it does not fit.
pub fn choose(info: &NodeInfo, pod: &PodFacts, scorer: &NodeScorer) -> Result<Cards, Undecided> {
    let (mut ledger, occupancy) = info.occupancy_with(&kept_for_nominated(info, pod), |uid| uid == &*pod.uid);
    let on = |card| placement(&info.inventory, &occupancy, pod, card);
    let best = scorer.card(&occupancy, info, pod).and_then(|card| on(Some(card)).ok());
    let placement = best.map_or_else(|| on(None), Ok)?;
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
            ledger.hold(&holder, card, footprint(container))?;
        }
    }
    Ok(())
}
