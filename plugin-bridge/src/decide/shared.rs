//! vcuda resources: to which card the kubelet is steered, and what is done when it goes elsewhere.
//!
//! `Allocate` does not say for whom it is. The kubelet admits one container after the other, and asks for a container's two
//! resources one right after the other, in either order. So the pending container whose size fits is the candidate, and what the
//! first resource decided binds the second ([`plan`](super::plan)). Whose it was is confirmed later, by device ID; accounting
//! never depends on the guess, and a container starts only when its own memory and cores are together
//! ([`together`](super::colocation)).

use std::collections::BTreeSet;

use gpu_migrate_model::ask::Demand;
use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::ledger::HolderId;
use gpu_migrate_model::units::{Blocks, CardIndex, Cores};

use super::grants::{DeviceKey, Grant, GrantId, Resource};
use super::plan::Plan;
use super::{Millis, NodeState};

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
    /// The answer, or where the container's other resource is now, differs from the question, and must be on disk first.
    pub deviates: bool,
    /// This answer was given before: nothing changed.
    pub repeated: bool,
}

/// Why an Allocate cannot be answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
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
    NotReady {
        /// The resource.
        resource: String,
    },
    /// No card can take it. The resource is withdrawn for a moment, so that nothing else runs into the same.
    #[error("{resource}: no card of this node has room for {asked} ({why})")]
    NoFreeCapacity {
        /// The resource.
        resource: String,
        /// What the container asks for in all, where it is known: either resource may be asked for first, and it may be the other that
        /// no card has.
        asked: String,
        /// Why the card of the devices asked for cannot take it.
        why: String,
    },
}

impl NodeState {
    /// Which of the offered devices the kubelet should take.
    ///
    /// The answer is a hint: less than asked for is filled up by the kubelet.
    #[must_use]
    pub fn preferred_shared(
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
    /// [`AllocateError`]; the books are as they were, but the resource is withdrawn for a moment.
    pub fn allocate_shared(
        &mut self,
        resource: SharedResource,
        ids: &[String],
        now: Millis,
    ) -> Result<SharedGrant, AllocateError> {
        self.clock = now;
        let name = self.resource_name(&Resource::Shared(resource)).to_owned();
        if !self.opened {
            return Err(AllocateError::NotReady { resource: name });
        }
        let mut asked = BTreeSet::new();
        for id in ids {
            let number = self.layout.number(resource, id);
            let number = number
                .ok_or_else(|| AllocateError::UnknownDevice { resource: name.clone(), id: id.clone() })?;
            asked.insert(number);
        }
        let keys: BTreeSet<DeviceKey> = asked.iter().map(|n| DeviceKey::shared(resource, *n)).collect();
        let cards = self.cards_of_numbers(resource, &asked);
        let plan = self.plan(resource, asked.len(), &asked, &cards);
        if let Some(answer) = self.repeat_answer(resource, &plan, &keys, now) {
            return Ok(answer);
        }
        let mut outcome = self.attempt(resource, &plan, &keys, now);
        let mut demand = plan.demand;
        if outcome.is_err() && plan.is_partner_guessed() {
            // Then it is of another container after all.
            let alone = self.plan_unattributed(resource, keys.len());
            outcome = self.attempt(resource, &alone, &keys, now);
            demand = alone.demand;
        }
        outcome.map_err(|why| {
            self.withdraw(&name, now);
            AllocateError::NoFreeCapacity { resource: name, asked: demand.to_string(), why }
        })
    }

    /// What the plan's container gets: devices of the card that the extender chose for it, else what was asked for, else
    /// devices of another card.
    ///
    /// The kubelet asks for others than the extender's where it has not heard yet that those are free. Granting them would be
    /// safe here, but the extender may have promised that card to a pod that is on its way.
    fn attempt(
        &mut self,
        resource: SharedResource,
        plan: &Plan,
        keys: &BTreeSet<DeviceKey>,
        now: Millis,
    ) -> Result<SharedGrant, String> {
        let transferable = keys.iter().any(|key| self.owner.contains_key(key));
        if plan.bound.is_none() && !transferable && !self.cards_of(keys).iter().eq(&plan.reserved) {
            let choices = self.choices(resource, plan, &BTreeSet::new(), None);
            let reserved = choices.first().filter(|choice| **choice == plan.reserved);
            if let Some(granted) =
                reserved.and_then(|cards| self.substitute(resource, plan, keys, cards, now))
            {
                return Ok(granted);
            }
        }
        let as_asked = self.fits_as_asked(resource, plan, keys);
        let why = match as_asked.and_then(|()| self.make(resource, plan, keys, keys.clone(), now)) {
            Ok(granted) => return Ok(granted),
            Err(why) => why,
        };
        let choices = self.choices(resource, plan, &BTreeSet::new(), None);
        choices.iter().find_map(|cards| self.substitute(resource, plan, keys, cards, now)).ok_or(why)
    }

    /// Devices of these cards in place of those asked for.
    fn substitute(
        &mut self,
        resource: SharedResource,
        plan: &Plan,
        keys: &BTreeSet<DeviceKey>,
        cards: &[CardIndex],
        now: Millis,
    ) -> Option<SharedGrant> {
        let asked = Grant::new(Resource::Shared(resource), keys.clone(), BTreeSet::new(), now);
        let free = |n: &u32| {
            let owner = self.owner.get(&DeviceKey::shared(resource, *n));
            owner.is_none_or(|owner| self.may_transfer_devices(*owner, &asked, now))
        };
        let picked = self.spread_over(resource, cards, keys.len(), free);
        if picked.len() < keys.len() {
            return None;
        }
        let actual = picked.into_iter().map(|n| DeviceKey::shared(resource, n)).collect();
        self.make(resource, plan, keys, actual, now).ok()
    }

    /// The same question gets the same answer, as long as it keeps the container together.
    fn repeat_answer(
        &mut self,
        resource: SharedResource,
        plan: &Plan,
        keys: &BTreeSet<DeviceKey>,
        now: Millis,
    ) -> Option<SharedGrant> {
        let (id, _) = self.repeated_request(&Resource::Shared(resource), keys)?;
        if plan.partner.is_some_and(|partner| !self.join(resource, id, partner)) {
            return None;
        }
        // Asked anew, its container's other resource will be asked for again too: a half, even if an earlier life of this
        // agent made the promise.
        let grant = self.grants.get_mut(&id)?;
        (grant.answered, grant.partner, grant.since) = (true, plan.partner, now);
        Some(self.answer(id, &self.grants[&id], true))
    }

    /// The answer that was already given to the same question, where nobody is known to have taken it up.
    pub(super) fn repeated_request(
        &self,
        resource: &Resource,
        keys: &BTreeSet<DeviceKey>,
    ) -> Option<(GrantId, &Grant)> {
        if self.checkpoint_unreadable {
            // It may have been taken up, and the question be another one.
            return None;
        }
        let mut same = self
            .grants
            .iter()
            .filter(|(_, g)| !g.is_known() && g.resource == *resource && g.requested == *keys);
        // What it was given may have gone to somebody else since.
        same.rfind(|(id, g)| {
            !self.predates_checkpoint_loss(g) && g.actual.iter().all(|key| self.owner.get(key) == Some(*id))
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
        let id = self.allocate(grant).map_err(|e| e.to_string())?;
        if plan.partner.is_some_and(|partner| !self.join(resource, id, partner)) {
            self.release(id);
            return Err("its other resource does not fit beside it".to_owned());
        }
        if let Some(partner) = plan.partner.and_then(|p| self.grants.get_mut(&p)) {
            partner.partner = Some(id);
            if !partner.confirmed && plan.candidate.is_some() {
                partner.candidate.clone_from(&plan.candidate);
            }
        }
        Ok(self.answer(id, &self.grants[&id], false))
    }

    fn answer(&self, id: GrantId, grant: &Grant, repeated: bool) -> SharedGrant {
        let mut demand = self.demand_of(grant);
        let partner = grant.partner.and_then(|p| self.grants.get(&p));
        if let Some(partner) = partner {
            let other = self.demand_of(partner);
            demand.cores = demand.cores.max(other.cores);
            demand.blocks = demand.blocks.max(other.blocks);
        }
        if let Some(container) =
            grant.holder_or_candidate().and_then(|h| self.pods.get(&h.pod_uid)?.container(&h.container))
        {
            demand = container.ask.demand;
        }
        SharedGrant {
            grant: id,
            cards: self.cards_of(&grant.actual).into_iter().collect(),
            demand,
            candidate: grant.holder_or_candidate().cloned(),
            deviates: grant.deviates() || partner.is_some_and(Grant::deviates) || self.supersedes(id),
            repeated,
        }
    }

    pub(super) fn demand_of(&self, grant: &Grant) -> Demand {
        let size = u32::try_from(grant.actual.len()).unwrap_or(u32::MAX);
        match grant.resource {
            Resource::Shared(SharedResource::Cores) => Demand { cores: Cores(size), ..Demand::NONE },
            Resource::Shared(SharedResource::Memory) => Demand { blocks: Blocks(size), ..Demand::NONE },
            Resource::Legacy(_) => Demand { legacy: size, ..Demand::NONE },
        }
    }

    pub(super) fn withdraw(&mut self, resource: &str, now: Millis) {
        self.withdrawn.insert(resource.to_owned(), now + self.settings.withdraw);
        self.touch();
    }
}
