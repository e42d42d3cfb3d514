//! Where a share finds room: whether the devices asked for will do, and which cards to try if not.

use std::collections::{BTreeMap, BTreeSet};

use gpu_migrate_model::ask::{ContainerKind, Demand};
use gpu_migrate_model::card::{CardState, CardView};
use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::evaluate::{self, CardOrder};
use gpu_migrate_model::ledger::HolderId;
use gpu_migrate_model::units::{Blocks, CardIndex, Cores};

use super::grants::DeviceKey;
use super::plan::Plan;
use super::{NodeState, PodView};

impl NodeState {
    /// Whether the devices asked for are on cards that can take the whole container.
    pub(super) fn fits_as_asked(
        &self,
        resource: SharedResource,
        plan: &Plan,
        keys: &BTreeSet<DeviceKey>,
    ) -> Result<(), String> {
        let cards = &self.cards_of(keys);
        let spread = match resource {
            SharedResource::Cores => cards.len() != plan.width(),
            SharedResource::Memory => cards.len() > plan.width(),
        };
        if spread {
            return Err(format!("the devices asked for are spread over {} cards", cards.len()));
        }
        if let Some(bound) = &plan.bound {
            let same = match resource {
                SharedResource::Cores => cards.iter().eq(bound),
                SharedResource::Memory => cards.iter().all(|card| bound.contains(card)),
            };
            return if same { Ok(()) } else { Err("its other resource is on another card".into()) };
        }
        let whole = plan.demand.cores.whole_cards();
        if let Some(card) = cards.iter().find(|card| !self.shareable(**card)) {
            return Err(format!("{card} is in MIG mode"));
        }
        let views = self.views(plan.candidate.as_ref(), Reservations::Ignore);
        for view in cards.iter().filter_map(|card| views.get(card.position())) {
            // What the init containers of the same pod hand on is counted as free by `views`; the ledger has the last word
            // about this resource, so only the *other* resource's room is looked at here.
            let transferable = keys.iter().any(|k| self.owner.contains_key(k));
            let (cores, blocks) = (plan.demand.cores, plan.demand.blocks);
            let fits = match (resource, whole) {
                _ if transferable => true,
                (_, Some(_)) => view.cores_left == Cores::CARD,
                (SharedResource::Cores, None) => view.blocks_left >= blocks,
                (SharedResource::Memory, None) => view.cores_left >= cores,
            };
            if !fits {
                return Err(format!("{} has {} and {} left", view.index, view.cores_left, view.blocks_left));
            }
        }
        Ok(())
    }

    /// Sets of cards to try, best first. Memory goes where its cores are; cores may go elsewhere, and their memory follows.
    pub(super) fn choices(
        &self,
        resource: SharedResource,
        plan: &Plan,
        must: &BTreeSet<CardIndex>,
        offered: Option<&BTreeSet<u32>>,
    ) -> Vec<Vec<CardIndex>> {
        let mut choices = Vec::new();
        match &plan.bound {
            Some(bound) if resource == SharedResource::Memory => return vec![bound.clone()],
            // Not the cards of a half that somebody else has left behind.
            Some(bound) if bound.len() == plan.width() => choices.push(bound.clone()),
            _ => {}
        }
        if !must.is_empty() {
            choices.push(must.iter().copied().collect());
            return choices;
        }
        let Demand { cores, blocks, .. } = plan.demand;
        let offers = |views: &mut Vec<CardView>| {
            let Some(offered) = offered else { return };
            for view in views {
                let there = offered.range(self.layout.numbers(resource, view.index)).count();
                match resource {
                    SharedResource::Cores => view.cores_left = view.cores_left.min(Cores(there as u32)),
                    SharedResource::Memory => view.blocks_left = view.blocks_left.min(Blocks(there as u32)),
                }
                if view.cores_left < Cores::CARD && view.state == CardState::Free {
                    view.state = CardState::Shared;
                }
            }
        };
        let mut views = self.views(plan.candidate.as_ref(), Reservations::Ignore);
        offers(&mut views);
        let fits = |card: &CardIndex| {
            views.get(card.position()).is_some_and(|v| match cores.whole_cards() {
                Some(_) => v.is_free(),
                None => v.fits(cores, blocks),
            })
        };
        if !plan.reserved.is_empty() && plan.reserved.iter().all(fits) {
            choices.push(plan.reserved.clone());
        }
        for reservations in [Reservations::Respect, Reservations::Ignore] {
            let mut views = self.views(plan.candidate.as_ref(), reservations);
            offers(&mut views);
            let tree = evaluate::with_free(&self.tree, &views);
            choices.extend(evaluate::cards_for(&views, &tree, cores, blocks, CardOrder::Binpack));
        }
        choices.dedup();
        choices
    }

    /// The cards as one container sees them: what init containers of its own pod hand on counts as room; what the
    /// extender has reserved for others does not, where reservations are respected.
    fn views(&self, for_whom: Option<&HolderId>, reservations: Reservations) -> Vec<CardView> {
        let mut views = self.ledger.view();
        for view in &mut views {
            if !self.shareable(view.index) {
                view.state = CardState::Cordoned;
            }
        }
        if let Some(pod) = for_whom.and_then(|h| self.pods.get(&h.pod_uid)) {
            self.add_transferable(&mut views, pod);
        }
        if reservations == Reservations::Respect {
            for (card, (cores, blocks)) in self.reserved_for_others(for_whom) {
                if let Some(view) = views.get_mut(card.position()) {
                    view.cores_left = view.cores_left.saturating_sub(cores);
                    view.blocks_left = view.blocks_left.saturating_sub(blocks);
                    if view.state == CardState::Free {
                        view.state = CardState::Shared;
                    }
                }
            }
        }
        views
    }

    fn add_transferable(&self, views: &mut [CardView], pod: &PodView) {
        let inits = pod.containers.iter().filter(|c| c.ask.kind == ContainerKind::Init);
        for holder in inits.map(|c| HolderId::new(&pod.uid, &c.ask.name)) {
            let mine = self.grants.iter().filter(|(_, g)| g.holder_or_candidate() == Some(&holder));
            for key in mine.flat_map(|(id, g)| g.actual.iter().filter(|k| self.owner.get(k) == Some(id))) {
                let Some(view) = self.card_of(key).and_then(|card| views.get_mut(card.position())) else {
                    continue;
                };
                match key {
                    DeviceKey::Core(_) => view.cores_left += Cores(1),
                    DeviceKey::Block(_) => view.blocks_left += Blocks(1),
                    DeviceKey::Legacy(_) => {}
                }
                if view.state == CardState::Shared
                    && view.cores_left == Cores::CARD
                    && view.blocks_left == view.blocks
                {
                    view.state = CardState::Free;
                }
            }
        }
    }

    /// What pending pods are about to take of each card, by the extender's choice.
    pub(super) fn reserved_for_others(&self, but: Option<&HolderId>) -> BTreeMap<CardIndex, (Cores, Blocks)> {
        let mut reserved: BTreeMap<CardIndex, (Cores, Blocks)> = BTreeMap::new();
        let granted = self.grants_by_container();
        for (pod, container) in self.pending_shared() {
            if but.is_some_and(|h| h.pod_uid == pod.uid) {
                continue;
            }
            let count = u32::try_from(container.reserved.len().max(1)).unwrap_or(1);
            let share = &container.ask.demand;
            for card in &container.reserved {
                let slot = reserved.entry(*card).or_default();
                if granted.of(pod, container, SharedResource::Cores).is_none() {
                    slot.0 += Cores(share.cores.0 / count);
                }
                if granted.of(pod, container, SharedResource::Memory).is_none() {
                    slot.1 += Blocks(share.blocks.0.div_ceil(count));
                }
            }
        }
        reserved.retain(|_, (cores, blocks)| *cores > Cores::ZERO || *blocks > Blocks::ZERO);
        reserved
    }

    pub(super) fn shareable(&self, card: CardIndex) -> bool {
        self.ledger.card(card).is_some_and(|c| !c.mig)
    }

    pub(super) fn cards_of_numbers(
        &self,
        resource: SharedResource,
        numbers: &BTreeSet<u32>,
    ) -> BTreeSet<CardIndex> {
        numbers.iter().filter_map(|n| self.layout.card_of(resource, *n)).collect()
    }

    /// `count` numbers out of these cards, the same amount of each as far as that goes.
    pub(super) fn spread_over(
        &self,
        resource: SharedResource,
        cards: &[CardIndex],
        count: usize,
        free: impl Fn(&u32) -> bool,
    ) -> Vec<u32> {
        let mut columns: Vec<Vec<u32>> =
            cards.iter().map(|card| self.layout.numbers(resource, *card).filter(&free).collect()).collect();
        let mut picked = Vec::with_capacity(count);
        let each = count.div_ceil(cards.len().max(1));
        for column in &mut columns {
            let take = each.min(column.len()).min(count - picked.len());
            picked.extend(column.drain(..take));
        }
        // Cards that had less than their part are made up for by the others.
        picked.extend(columns.into_iter().flatten().take(count - picked.len()).collect::<Vec<_>>());
        picked
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Reservations {
    Respect,
    Ignore,
}
