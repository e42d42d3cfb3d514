//! vcuda resources: which devices are preferred, and what is granted when the kubelet requests others.
//!
//! `Allocate` does not say which container it is for. The kubelet admits one container after the other, and requests a container's
//! two resources one right after the other, in either order. So the pending container whose size fits is the candidate, and the
//! cards of the first resource decide those of the second ([`plan`](super::plan)). The holder is confirmed later, by device ID;
//! accounting never depends on the candidate, and a container starts only when its memory and cores are colocated
//! ([`colocation`](super::colocation)).

use std::collections::BTreeSet;

use gpu_migrate_model::ask::Demand;
use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::ledger::HolderId;
use gpu_migrate_model::units::{Blocks, CardIndex, Cores};

use super::grants::{DeviceKey, Grant, GrantId, Resource};
use super::plan::Plan;
use super::{Millis, NodeState};

/// The answer to an Allocate of a vcuda resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedGrant {
    pub grant: GrantId,
    /// The cards that the container gets, whatever the kubelet requested.
    pub cards: Vec<CardIndex>,
    /// What the container gets of them in all, as far as known.
    pub demand: Demand,
    /// The container that it is probably for.
    pub candidate: Option<HolderId>,
    /// This grant, or the container's other one now, deviates: it must be on disk before the answer is sent.
    pub deviates: bool,
    /// The same request was answered before: nothing changed.
    pub repeated: bool,
}

/// Why an Allocate cannot be answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    #[error("{resource}: device {id:?} is not listed by this node")]
    UnknownDevice { resource: String, id: String },
    /// What was allocated before this process started is not known yet.
    #[error("{resource}: the kubelet checkpoint could not be read yet, so nothing is allocated")]
    NotReady { resource: String },
    /// The resource is withdrawn for a moment, so that no other pod fails in the same way.
    #[error("{resource}: no card of this node has {asked} free ({why})")]
    NoFreeCapacity {
        resource: String,
        /// What the container requests in all, where known: either resource may be requested first, and it may be the other that no
        /// card has free.
        asked: String,
        /// Why the requested devices cannot be granted.
        why: String,
    },
}

impl NodeState {
    /// Which of the available devices the kubelet should allocate. It fills up an answer with too few.
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
    /// [`AllocateError`]; nothing has changed, but the resource is withdrawn for a moment.
    pub fn allocate_shared(
        &mut self,
        resource: SharedResource,
        ids: &[String],
        now: Millis,
    ) -> Result<SharedGrant, AllocateError> {
        self.clock = now;
        let name = self.resource_name(&Resource::Shared(resource)).to_owned();
        if !self.is_ready() {
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
            // Then it is for another container.
            let alone = self.plan_unattributed(resource, keys.len());
            outcome = self.attempt(resource, &alone, &keys, now);
            demand = alone.demand;
        }
        outcome.map_err(|why| {
            self.withdraw(&name, now);
            AllocateError::NoFreeCapacity { resource: name, asked: demand.to_string(), why }
        })
    }

    /// Grants devices of the card that the extender chose, else the requested ones, else devices of another card.
    ///
    /// The kubelet requests devices of other cards than the extender's where it does not know yet that those are free. Granting
    /// them would be safe here, but the extender may have chosen their card for another pending pod.
    fn attempt(
        &mut self,
        resource: SharedResource,
        plan: &Plan,
        keys: &BTreeSet<DeviceKey>,
        now: Millis,
    ) -> Result<SharedGrant, String> {
        let transferable = keys.iter().any(|key| self.owner.contains_key(key));
        if plan.partner_cards.is_none() && !transferable && !self.cards_of(keys).iter().eq(&plan.reserved) {
            let choices = self.choices(resource, plan, &BTreeSet::new(), None);
            let reserved = choices.first().filter(|choice| **choice == plan.reserved);
            if let Some(granted) =
                reserved.and_then(|cards| self.substitute(resource, plan, keys, cards, now))
            {
                return Ok(granted);
            }
        }
        let as_requested = self.fits_as_requested(resource, plan, keys);
        let why = match as_requested.and_then(|()| self.grant(resource, plan, keys, keys.clone(), now)) {
            Ok(granted) => return Ok(granted),
            Err(why) => why,
        };
        let choices = self.choices(resource, plan, &BTreeSet::new(), None);
        choices.iter().find_map(|cards| self.substitute(resource, plan, keys, cards, now)).ok_or(why)
    }

    /// Grants devices of these cards in place of the requested ones.
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
        self.grant(resource, plan, keys, actual, now).ok()
    }

    /// The same request gets the same answer, as long as the container's two resources stay colocated.
    fn repeat_answer(
        &mut self,
        resource: SharedResource,
        plan: &Plan,
        keys: &BTreeSet<DeviceKey>,
        now: Millis,
    ) -> Option<SharedGrant> {
        let (id, _) = self.repeated_request(&Resource::Shared(resource), keys)?;
        if plan.partner.is_some_and(|partner| !self.colocate_pair(resource, id, partner)) {
            return None;
        }
        // Requested again, its container's other resource will be requested again too: so it is unpaired, even if an earlier
        // process made the grant.
        let grant = self.grants.get_mut(&id)?;
        (grant.answered, grant.partner, grant.since) = (true, plan.partner, now);
        Some(self.answer(id, &self.grants[&id], true))
    }

    /// The grant of an earlier Allocate for the same devices that no container is known to have claimed.
    pub(super) fn repeated_request(
        &self,
        resource: &Resource,
        keys: &BTreeSet<DeviceKey>,
    ) -> Option<(GrantId, &Grant)> {
        if self.checkpoint.unreadable {
            // A container may have claimed it, and this request be for another.
            return None;
        }
        let mut same = self
            .grants
            .iter()
            .filter(|(_, g)| !g.is_known() && g.resource == *resource && g.requested == *keys);
        let claimed = |g: &Grant| {
            g.actual.iter().any(|key| self.card_of(key).is_some_and(|card| self.is_claimed(card)))
        };
        // Its devices may have another owner since.
        same.rfind(|(id, g)| {
            !self.predates_checkpoint_loss(g)
                && !claimed(g)
                && g.actual.iter().all(|key| self.owner.get(key) == Some(*id))
        })
        .map(|(id, grant)| (*id, grant))
    }

    fn grant(
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
        if plan.partner.is_some_and(|partner| !self.colocate_pair(resource, id, partner)) {
            self.release(id);
            return Err("the container's other vcuda resource does not fit on the same cards".to_owned());
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
}
