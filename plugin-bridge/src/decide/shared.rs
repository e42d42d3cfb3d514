//! vcuda resources: to which card the kubelet is steered, and what is done when it goes elsewhere.
//!
//! `Allocate` does not say for whom it is. The kubelet admits one container after the other, and asks for a container's two
//! resources one right after the other, in either order. So the pending container whose size fits is the candidate, and what the
//! first resource decided binds the second. Whose it was is confirmed later, by device ID; accounting never depends on the guess.

use std::collections::{BTreeMap, BTreeSet};

use gpu_migrate_model::ask::{ContainerKind, Demand};
use gpu_migrate_model::card::{CardState, CardView};
use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::evaluate::{self, CardOrder};
use gpu_migrate_model::ledger::HolderId;
use gpu_migrate_model::units::{Blocks, CardIndex, Cores};

use super::grants::{DeviceKey, Grant, GrantId, Resource};
use super::{Books, ContainerView, Millis, PodPhase, PodView};

/// What the kubelet was promised of a vcuda resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedGrant {
    /// The promise.
    pub grant: GrantId,
    /// The cards that the container gets, whatever the kubelet asked for.
    pub cards: Vec<CardIndex>,
    /// What the container gets of them in all, as far as known.
    pub demand: Demand,
    /// Whom it is probably for.
    pub candidate: Option<HolderId>,
    /// The answer differs from the question, and must be on disk before it is given.
    pub deviates: bool,
    /// This answer was given before: nothing changed.
    pub again: bool,
}

/// Why an Allocate cannot be answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The kubelet asks for an ID that this node does not list.
    #[error("{resource}: device {id:?} is not one of this node's")]
    UnknownDevice {
        /// The resource.
        resource: String,
        /// The ID.
        id: String,
    },
    /// What was given out before this process started is not known yet.
    #[error("{resource}: the kubelet's checkpoint could not be read yet, so nothing is given out")]
    NotOpen {
        /// The resource.
        resource: String,
    },
    /// No card can take it. The resource is withdrawn for a moment, so that nothing else runs into the same.
    #[error("{resource}: no card of this node has room for {size} ({why})")]
    NoRoom {
        /// The resource.
        resource: String,
        /// How many devices were asked for.
        size: usize,
        /// Why the card of the devices asked for cannot take it.
        why: String,
    },
}

/// The kubelet asks for a container's second resource milliseconds after the first; we may wait in between.
const HALF_OPEN: Millis = 3_000;

/// For whom an allocation probably is, and where it should go.
struct Plan {
    candidate: Option<HolderId>,
    partner: Option<GrantId>,
    demand: Demand,
    /// The other resource has bound it already.
    bound: Option<Vec<CardIndex>>,
    reserved: Vec<CardIndex>,
}

impl Books {
    /// Which of the offered devices the kubelet should take.
    ///
    /// The answer is a hint: less than asked for is filled up by the kubelet.
    #[must_use]
    pub fn prefer_shared(
        &self,
        resource: SharedResource,
        offered: &[String],
        must: &[String],
        size: usize,
    ) -> Vec<String> {
        let numbers = |ids: &[String]| -> BTreeSet<u32> {
            ids.iter().filter_map(|id| self.layout.number(resource, id)).collect()
        };
        let (offered, must) = (numbers(offered), numbers(must));
        let must_cards = self.cards_of_numbers(resource, &must);
        let plan = self.plan(resource, size, &must, &must_cards);
        let choices = self.choices(resource, &plan, &must_cards, Some(&offered));
        let cards = choices.into_iter().next().unwrap_or_default();
        let free = |n: &u32| offered.contains(n) && !must.contains(n);
        let mut picked: Vec<u32> = must.iter().copied().take(size).collect();
        picked.extend(self.spread_over(resource, &cards, size - picked.len(), free));
        picked.into_iter().map(|n| self.layout.id(resource, n)).collect()
    }

    /// Answers an Allocate of a vcuda resource.
    ///
    /// # Errors
    /// [`Refusal`]; the books are as they were, but the resource is withdrawn for a moment.
    pub fn allocate_shared(
        &mut self,
        resource: SharedResource,
        ids: &[String],
        now: Millis,
    ) -> Result<SharedGrant, Refusal> {
        self.clock = now;
        let name = self.resource_name(&Resource::Shared(resource)).to_owned();
        if !self.opened {
            return Err(Refusal::NotOpen { resource: name });
        }
        let mut asked = BTreeSet::new();
        for id in ids {
            let number = self.layout.number(resource, id);
            let number =
                number.ok_or_else(|| Refusal::UnknownDevice { resource: name.clone(), id: id.clone() })?;
            asked.insert(number);
        }
        let keys: BTreeSet<DeviceKey> = asked.iter().map(|n| DeviceKey::shared(resource, *n)).collect();
        let cards = self.cards_of_numbers(resource, &asked);
        let plan = self.plan(resource, asked.len(), &asked, &cards);
        if let Some((id, grant)) = self.same_question(&Resource::Shared(resource), &keys)
            && plan.bound.as_ref().is_none_or(|bound| self.cards_of(&grant.actual).iter().eq(bound))
        {
            let answer = self.answer(id, grant, true);
            // Asked anew, its container's other resource will be asked for again too: a half, even if an earlier life of this
            // agent made the promise.
            if let Some(grant) = self.grants.get_mut(&id) {
                (grant.answered, grant.partner, grant.since) = (true, None, now);
            }
            return Ok(answer);
        }
        let why = match self.fits_as_asked(resource, &plan, &cards, &keys) {
            Ok(()) => match self.make(resource, &plan, &keys, keys.clone(), now) {
                Ok(granted) => return Ok(granted),
                Err(why) => why,
            },
            Err(why) => why,
        };
        for choice in self.choices(resource, &plan, &BTreeSet::new(), None) {
            let free = |n: &u32| {
                let key = DeviceKey::shared(resource, *n);
                !self.owner.contains_key(&key)
            };
            let picked = self.spread_over(resource, &choice, asked.len(), free);
            if picked.len() < asked.len() {
                continue;
            }
            let actual = picked.into_iter().map(|n| DeviceKey::shared(resource, n)).collect();
            if let Ok(granted) = self.make(resource, &plan, &keys, actual, now) {
                return Ok(granted);
            }
        }
        self.withdraw(&name, now);
        Err(Refusal::NoRoom { resource: name, size: asked.len(), why })
    }

    /// The answer that was already given to the same question, where nobody is known to have taken it up.
    pub(super) fn same_question(
        &self,
        resource: &Resource,
        keys: &BTreeSet<DeviceKey>,
    ) -> Option<(GrantId, &Grant)> {
        if self.book_refused {
            // It may have been taken up, and the question be another one.
            return None;
        }
        let mut same =
            self.grants.iter().filter(|(_, g)| !g.confirmed && g.resource == *resource && g.kubelet == *keys);
        // What it was given may have gone to somebody else since.
        same.rfind(|(id, g)| {
            !self.predates_amnesia(g) && g.actual.iter().all(|key| self.owner.get(key) == Some(*id))
        })
        .map(|(id, grant)| (*id, grant))
    }

    fn make(
        &mut self,
        resource: SharedResource,
        plan: &Plan,
        asked: &BTreeSet<DeviceKey>,
        actual: BTreeSet<DeviceKey>,
        now: Millis,
    ) -> Result<SharedGrant, String> {
        let mut grant = Grant::new(Resource::Shared(resource), asked.clone(), actual, now);
        grant.candidate.clone_from(&plan.candidate);
        grant.partner = plan.partner;
        let id = self.promise(grant).map_err(|e| e.to_string())?;
        if let Some(partner) = plan.partner.and_then(|p| self.grants.get_mut(&p)) {
            partner.partner = Some(id);
            if !partner.confirmed && plan.candidate.is_some() {
                partner.candidate.clone_from(&plan.candidate);
            }
        }
        Ok(self.answer(id, &self.grants[&id], false))
    }

    fn answer(&self, id: GrantId, grant: &Grant, again: bool) -> SharedGrant {
        let mut demand = self.demand_of(grant);
        if let Some(partner) = grant.partner.and_then(|p| self.grants.get(&p)) {
            let other = self.demand_of(partner);
            demand.cores = demand.cores.max(other.cores);
            demand.blocks = demand.blocks.max(other.blocks);
        }
        if let Some(container) =
            grant.whose().and_then(|h| self.pods.get(&h.pod_uid)?.container(&h.container))
        {
            demand = container.ask.demand;
        }
        SharedGrant {
            grant: id,
            cards: self.cards_of(&grant.actual).into_iter().collect(),
            demand,
            candidate: grant.whose().cloned(),
            deviates: grant.deviates(),
            again,
        }
    }

    fn demand_of(&self, grant: &Grant) -> Demand {
        let size = u32::try_from(grant.actual.len()).unwrap_or(u32::MAX);
        match grant.resource {
            Resource::Shared(SharedResource::Cores) => Demand { cores: Cores(size), ..Demand::NONE },
            Resource::Shared(SharedResource::Memory) => Demand { blocks: Blocks(size), ..Demand::NONE },
            Resource::Legacy(_) => Demand { legacy: size, ..Demand::NONE },
        }
    }

    /// Pending containers that still want this much of this resource, likeliest first.
    fn candidates(&self, resource: SharedResource, size: usize) -> Vec<(&PodView, &ContainerView)> {
        let mut found: Vec<_> = self
            .pending_shared()
            .filter(|(_, container)| amount(resource, &container.ask.demand) as usize == size)
            .filter(|(pod, container)| self.grant_of(pod, container, resource).is_none())
            .collect();
        // The kubelet finishes a container before it begins another, and pods in the order in which they came.
        found.sort_by_key(|(pod, container)| {
            (self.grant_of(pod, container, other(resource)).is_none(), pod.order, pod.name.clone())
        });
        found
    }

    /// Containers of pods that the kubelet may be admitting, and that ask for vcuda resources.
    pub(super) fn pending_shared(&self) -> impl Iterator<Item = (&PodView, &ContainerView)> {
        self.pods
            .pods
            .values()
            .filter(|pod| pod.phase == PodPhase::Pending && !pod.deleting)
            .flat_map(|pod| pod.containers.iter().map(move |container| (pod, container)))
            .filter(|(_, container)| container.ask.demand.is_shared())
    }

    pub(super) fn grant_of(
        &self,
        pod: &PodView,
        container: &ContainerView,
        resource: SharedResource,
    ) -> Option<GrantId> {
        let is = |h: &HolderId| h.pod_uid == pod.uid && h.container == container.ask.name;
        let resource = Resource::Shared(resource);
        self.grants
            .iter()
            .find(|(_, g)| g.resource == resource && g.whose().is_some_and(is))
            .map(|(id, _)| *id)
    }

    /// Whether a pending container is known that wants this much. If not, the pod may not have been seen yet.
    #[must_use]
    pub fn has_candidate(&self, resource: SharedResource, size: usize) -> bool {
        match self.open_half(resource) {
            Some(open) => !self.completing(open, resource, size).is_empty(),
            None => !self.candidates(resource, size).is_empty(),
        }
    }

    fn plan(
        &self,
        resource: SharedResource,
        size: usize,
        asked: &BTreeSet<u32>,
        on: &BTreeSet<CardIndex>,
    ) -> Plan {
        if let Some(plan) = self.plan_second_half(resource, size) {
            return plan;
        }
        // Devices that an init container hands on name the pod.
        let of_pod = asked.iter().find_map(|n| {
            let grant = self.grants.get(self.owner.get(&DeviceKey::shared(resource, *n))?)?;
            grant
                .whose()
                .map(|h| h.pod_uid.clone())
                .filter(|uid| self.pods.get(uid).is_some_and(|p| !p.phase.terminal()))
        });
        let candidates = self.candidates(resource, size);
        let chosen = of_pod
            .and_then(|uid| candidates.iter().find(|(pod, _)| pod.uid == uid))
            .or_else(|| candidates.iter().find(|(pod, c)| self.grant_of(pod, c, other(resource)).is_some()))
            .or_else(|| {
                candidates
                    .iter()
                    .find(|(_, c)| !on.is_empty() && c.reserved.iter().copied().eq(on.iter().copied()))
            })
            .or_else(|| candidates.first());
        match chosen {
            Some((pod, container)) => {
                self.plan_for(pod, container, self.grant_of(pod, container, other(resource)))
            }
            None => Plan {
                candidate: None,
                partner: None,
                demand: one(resource, size),
                bound: None,
                reserved: Vec::new(),
            },
        }
    }

    /// The plan for the second resource of the container whose first was just answered: it follows the first, whoever it is for.
    fn plan_second_half(&self, resource: SharedResource, size: usize) -> Option<Plan> {
        let open = self.open_half(resource)?;
        let grant = &self.grants[&open];
        let completing = self.completing(open, resource, size);
        let cards = self.cards_of(&grant.actual);
        let chosen = completing
            .iter()
            .find(|(pod, c)| grant.candidate.as_ref() == Some(&HolderId::new(&pod.uid, &c.ask.name)))
            .or_else(|| completing.iter().find(|(_, c)| c.reserved.iter().eq(cards.iter())))
            .or_else(|| completing.first());
        if let Some((pod, container)) = chosen {
            return Some(self.plan_for(pod, container, Some(open)));
        }
        // No known pod wants both. Still it is one container, unless the kubelet gave the first up: then the worst that can
        // happen is another card than the extender's. Two cards for one container would be worse.
        let (first, second) = (self.demand_of(grant), one(resource, size));
        let demand =
            Demand { cores: first.cores + second.cores, blocks: first.blocks + second.blocks, legacy: 0 };
        let bound = Some(cards.into_iter().collect());
        Some(Plan { candidate: None, partner: Some(open), demand, bound, reserved: Vec::new() })
    }

    fn plan_for(&self, pod: &PodView, container: &ContainerView, partner: Option<GrantId>) -> Plan {
        Plan {
            candidate: Some(HolderId::new(&pod.uid, &container.ask.name)),
            partner,
            demand: container.ask.demand,
            bound: partner.map(|p| self.cards_of(&self.grants[&p].actual).into_iter().collect()),
            reserved: container.reserved.clone(),
        }
    }

    /// The latest promise not taken up yet, if it is of the other resource.
    ///
    /// The kubelet asks for both resources of a container in a row, and writes its book before the next container: so a
    /// half that the book does not know belongs to the container that is being admitted now. That it has a counterpart
    /// does not close it: the counterpart may be what a container left behind that was refused its other resource. While the
    /// book cannot be read, a container that follows another at once is thus put on the same card, or refused.
    fn open_half(&self, resource: SharedResource) -> Option<GrantId> {
        let waiting = self.grants.iter().filter(|(_, grant)| grant.answered && !grant.confirmed);
        let (id, latest) = waiting.max_by_key(|(id, grant)| (grant.since, **id))?;
        // A half that was given up is not waited for.
        let recent = self.clock.saturating_sub(latest.since) <= HALF_OPEN;
        (recent && latest.resource == Resource::Shared(other(resource))).then_some(*id)
    }

    /// Answered just now, and its container's other resource was not asked for yet.
    pub(super) fn is_half(&self, grant: &Grant, now: Millis) -> bool {
        let recent = now.saturating_sub(grant.since) <= HALF_OPEN;
        recent && grant.answered && grant.partner.is_none() && matches!(grant.resource, Resource::Shared(_))
    }

    /// Pending containers that the open half and this much of the other resource make complete.
    fn completing(
        &self,
        open: GrantId,
        resource: SharedResource,
        size: usize,
    ) -> Vec<(&PodView, &ContainerView)> {
        let first = self.grants[&open].kubelet.len();
        let mut found: Vec<_> = self
            .pending_shared()
            .filter(|(_, c)| amount(resource, &c.ask.demand) as usize == size)
            .filter(|(_, c)| amount(other(resource), &c.ask.demand) as usize == first)
            .filter(|(pod, c)| self.grant_of(pod, c, resource).is_none())
            .filter(|(pod, c)| self.grant_of(pod, c, other(resource)).is_none_or(|id| id == open))
            .collect();
        found.sort_by_key(|(pod, _)| (pod.order, pod.name.clone()));
        found
    }

    /// Whether the devices asked for are on cards that can take the whole container.
    fn fits_as_asked(
        &self,
        resource: SharedResource,
        plan: &Plan,
        cards: &BTreeSet<CardIndex>,
        keys: &BTreeSet<DeviceKey>,
    ) -> Result<(), String> {
        if let Some(bound) = &plan.bound {
            let same = cards.iter().all(|card| bound.contains(card));
            return if same { Ok(()) } else { Err("its other resource is on another card".into()) };
        }
        let whole = plan.demand.cores.whole_cards();
        if resource == SharedResource::Cores && cards.len() != whole.unwrap_or(1) as usize {
            return Err(format!("the devices asked for are spread over {} cards", cards.len()));
        }
        if resource == SharedResource::Memory && cards.len() > whole.unwrap_or(1) as usize {
            return Err(format!("the devices asked for are spread over {} cards", cards.len()));
        }
        if let Some(card) = cards.iter().find(|card| !self.shareable(**card)) {
            return Err(format!("{card} is in MIG mode"));
        }
        let views = self.views(plan.candidate.as_ref(), Reservations::Ignore);
        for view in cards.iter().filter_map(|card| views.get(card.position())) {
            // What the init containers of the same pod hand on is counted as free by `views`; the ledger has the last word
            // about this resource, so only the *other* resource's room is looked at here.
            let handed_on = keys.iter().any(|k| self.owner.contains_key(k));
            let (cores, blocks) = (plan.demand.cores, plan.demand.blocks);
            let fits = match (resource, whole) {
                _ if handed_on => true,
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

    /// Sets of cards to try, best first.
    fn choices(
        &self,
        resource: SharedResource,
        plan: &Plan,
        must: &BTreeSet<CardIndex>,
        offered: Option<&BTreeSet<u32>>,
    ) -> Vec<Vec<CardIndex>> {
        if let Some(bound) = &plan.bound {
            return vec![bound.clone()];
        }
        if !must.is_empty() {
            return vec![must.iter().copied().collect()];
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
        let mut choices = Vec::new();
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
            self.add_handed_on(&mut views, pod);
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

    fn add_handed_on(&self, views: &mut [CardView], pod: &PodView) {
        let inits = pod.containers.iter().filter(|c| c.ask.kind == ContainerKind::Init);
        for holder in inits.map(|c| HolderId::new(&pod.uid, &c.ask.name)) {
            let mine = self.grants.iter().filter(|(_, g)| g.whose() == Some(&holder));
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
        for (pod, container) in self.pending_shared() {
            if but.is_some_and(|h| h.pod_uid == pod.uid) {
                continue;
            }
            let count = u32::try_from(container.reserved.len().max(1)).unwrap_or(1);
            let share = &container.ask.demand;
            for card in &container.reserved {
                let slot = reserved.entry(*card).or_default();
                if self.grant_of(pod, container, SharedResource::Cores).is_none() {
                    slot.0 += Cores(share.cores.0 / count);
                }
                if self.grant_of(pod, container, SharedResource::Memory).is_none() {
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

    fn cards_of_numbers(&self, resource: SharedResource, numbers: &BTreeSet<u32>) -> BTreeSet<CardIndex> {
        numbers.iter().filter_map(|n| self.layout.card_of(resource, *n)).collect()
    }

    /// `count` numbers out of these cards, the same amount of each as far as that goes.
    fn spread_over(
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

    pub(super) fn withdraw(&mut self, resource: &str, now: Millis) {
        self.withdrawn.insert(resource.to_owned(), now + self.settings.withdraw);
        self.touch();
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Reservations {
    Respect,
    Ignore,
}

const fn other(resource: SharedResource) -> SharedResource {
    match resource {
        SharedResource::Cores => SharedResource::Memory,
        SharedResource::Memory => SharedResource::Cores,
    }
}

fn one(resource: SharedResource, size: usize) -> Demand {
    let size = u32::try_from(size).unwrap_or(u32::MAX);
    match resource {
        SharedResource::Cores => Demand { cores: Cores(size), ..Demand::NONE },
        SharedResource::Memory => Demand { blocks: Blocks(size), ..Demand::NONE },
    }
}

const fn amount(resource: SharedResource, demand: &Demand) -> u32 {
    match resource {
        SharedResource::Cores => demand.cores.0,
        SharedResource::Memory => demand.blocks.0,
    }
}
