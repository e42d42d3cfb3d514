//! Free capacity for a share: whether the requested devices fit, and which cards to try if not.

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
    /// Whether the requested devices are on cards that fit the whole container.
    pub(super) fn fits_as_requested(
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
            return Err(format!("the requested devices are on {} cards", cards.len()));
        }
        if let Some(partner) = &plan.partner_cards {
            let same = match resource {
                SharedResource::Cores => cards.iter().eq(partner),
                SharedResource::Memory => cards.iter().all(|card| partner.contains(card)),
            };
            return if same { Ok(()) } else { Err("its other vcuda resource is on another card".into()) };
        }
        let whole = plan.demand.cores.whole_cards();
        if let Some(card) = cards.iter().find(|card| !self.shareable(**card)) {
            return Err(format!("{card} is in MIG mode"));
        }
        let views = self.views(plan.candidate.as_ref(), Reservations::Ignore);
        for view in cards.iter().filter_map(|card| views.get(card.position())) {
            // `views` counts the devices of the pod's own init containers as free; the ledger decides about this resource, so only
            // the *other* resource is compared here.
            let transferable = keys.iter().any(|k| self.owner.contains_key(k));
            let (cores, blocks) = (plan.demand.cores, plan.demand.blocks);
            let fits = match (resource, whole) {
                _ if transferable => true,
                (_, Some(_)) => view.cores_left == Cores::CARD,
                (SharedResource::Cores, None) => view.blocks_left >= blocks,
                (SharedResource::Memory, None) => view.cores_left >= cores,
            };
            if !fits {
                return Err(format!("{} has {} and {} free", view.index, view.cores_left, view.blocks_left));
            }
        }
        Ok(())
    }

    /// Sets of cards to try, best first. Memory goes to the cards of its cores; cores may go to others, and their memory follows.
    pub(super) fn choices(
        &self,
        resource: SharedResource,
        plan: &Plan,
        must: &BTreeSet<CardIndex>,
        offered: Option<&BTreeSet<u32>>,
    ) -> Vec<Vec<CardIndex>> {
        let mut choices = Vec::new();
        match &plan.partner_cards {
            Some(cards) if resource == SharedResource::Memory => return vec![cards.clone()],
            // Not the cards of a partner whose container was refused.
            Some(cards) if cards.len() == plan.width() => choices.push(cards.clone()),
            _ => {}
        }
        if !must.is_empty() {
            choices.push(must.iter().copied().collect());
            return choices;
        }
        let Demand { cores, blocks, .. } = plan.demand;
        let limit_to_offered = |views: &mut Vec<CardView>| {
            let Some(offered) = offered else { return };
            for view in views {
                let count = offered.range(self.layout.numbers(resource, view.index)).count();
                match resource {
                    SharedResource::Cores => view.cores_left = view.cores_left.min(Cores(count as u32)),
                    SharedResource::Memory => view.blocks_left = view.blocks_left.min(Blocks(count as u32)),
                }
                if view.cores_left < Cores::CARD && view.state == CardState::Free {
                    view.state = CardState::Shared;
                }
            }
        };
        let mut views = self.views(plan.candidate.as_ref(), Reservations::Ignore);
        limit_to_offered(&mut views);
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
            limit_to_offered(&mut views);
            let tree = evaluate::with_free(&self.tree, &views);
            choices.extend(evaluate::cards_for(&views, &tree, cores, blocks, CardOrder::Binpack));
        }
        choices.dedup();
        choices
    }

    /// The cards as one container sees them: devices of its own pod's init containers count as free; what the extender has
    /// reserved for others does not, where reservations are respected.
    fn views(&self, container: Option<&HolderId>, reservations: Reservations) -> Vec<CardView> {
        let mut views = self.ledger.view();
        for view in &mut views {
            if !self.shareable(view.index) {
                view.state = CardState::Cordoned;
            }
        }
        if let Some(pod) = container.and_then(|h| self.pods.get(&h.pod_uid)) {
            self.add_transferable(&mut views, pod);
        }
        if reservations == Reservations::Respect {
            for (card, (cores, blocks)) in self.reserved_for_others(container) {
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

    /// What the extender has reserved of each card for pending pods.
    pub(super) fn reserved_for_others(
        &self,
        except: Option<&HolderId>,
    ) -> BTreeMap<CardIndex, (Cores, Blocks)> {
        let mut reserved: BTreeMap<CardIndex, (Cores, Blocks)> = BTreeMap::new();
        let granted = self.grants_by_container();
        for (pod, container) in self.pending_shared() {
            if except.is_some_and(|h| h.pod_uid == pod.uid) {
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
        // Where a card has less than its part, the others give more.
        picked.extend(columns.into_iter().flatten().take(count - picked.len()).collect::<Vec<_>>());
        picked
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Reservations {
    Respect,
    Ignore,
}
