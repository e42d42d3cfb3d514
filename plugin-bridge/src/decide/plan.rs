//! The container that an Allocate of a vcuda resource is probably for (it does not say).

use std::collections::{BTreeSet, HashMap};

use gpu_migrate_model::ask::Demand;
use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::ledger::HolderId;
use gpu_migrate_model::units::{Blocks, CardIndex, Cores};

use super::grants::{DeviceKey, GrantId, Resource};
use super::{ContainerView, Millis, NodeState, PodPhase, PodView};

/// The kubelet requests a container's second resource milliseconds after the first; the agent may wait in between.
const PAIR_WINDOW: Millis = 3_000;

/// The container that an Allocate is probably for, and where its devices should be.
pub(super) struct Plan {
    pub(super) candidate: Option<HolderId>,
    /// The grant of the container's other vcuda resource.
    pub(super) partner: Option<GrantId>,
    /// What the container requests in all, as far as known.
    pub(super) demand: Demand,
    pub(super) partner_cards: Option<Vec<CardIndex>>,
    /// The cards that the extender chose.
    pub(super) reserved: Vec<CardIndex>,
}

impl Plan {
    /// The partner is a guess: no known container requests both.
    pub(super) fn is_partner_guessed(&self) -> bool {
        self.partner.is_some() && self.candidate.is_none()
    }

    /// On how many cards its cores lie.
    pub(super) fn width(&self) -> usize {
        self.demand.cores.whole_cards().unwrap_or(1) as usize
    }
}

/// The grants of each container: cores, memory, and what is of NVIDIA's plugin.
pub(super) struct GrantIndex<'a>(HashMap<(&'a str, &'a str), [Option<GrantId>; 3]>);

impl GrantIndex<'_> {
    pub(super) fn of(
        &self,
        pod: &PodView,
        container: &ContainerView,
        resource: SharedResource,
    ) -> Option<GrantId> {
        self.slots(pod, container)[shared_slot(resource)]
    }

    pub(super) fn is_granted_whole_cards(&self, pod: &PodView, container: &ContainerView) -> bool {
        self.slots(pod, container)[LEGACY].is_some()
    }

    fn slots(&self, pod: &PodView, container: &ContainerView) -> [Option<GrantId>; 3] {
        self.0.get(&(pod.uid.as_str(), container.ask.name.as_str())).copied().unwrap_or_default()
    }
}

const LEGACY: usize = 2;

const fn shared_slot(resource: SharedResource) -> usize {
    match resource {
        SharedResource::Cores => 0,
        SharedResource::Memory => 1,
    }
}

impl NodeState {
    /// Built once for a decision: every pending container is looked up in it.
    pub(super) fn grants_by_container(&self) -> GrantIndex<'_> {
        let mut granted = HashMap::with_capacity(self.grants.len());
        for (id, grant) in &self.grants {
            let Some(holder) = grant.holder_or_candidate() else { continue };
            let slot = match grant.resource {
                Resource::Shared(resource) => shared_slot(resource),
                Resource::Legacy(_) => LEGACY,
            };
            let slots: &mut [Option<GrantId>; 3] =
                granted.entry((holder.pod_uid.as_str(), holder.container.as_str())).or_default();
            // The first of several.
            slots[slot].get_or_insert(*id);
        }
        GrantIndex(granted)
    }

    /// Pending containers that request this much of this resource and have no grant of it, likeliest first.
    fn candidates(
        &self,
        granted: &GrantIndex<'_>,
        resource: SharedResource,
        size: usize,
    ) -> Vec<(&PodView, &ContainerView)> {
        let mut found: Vec<_> = self
            .pending_shared()
            .filter(|(_, container)| amount(resource, &container.ask.demand) as usize == size)
            .filter(|(pod, container)| granted.of(pod, container, resource).is_none())
            .collect();
        // The kubelet finishes one container before the next, and admits pods in order.
        found.sort_by_key(|(pod, container)| {
            (granted.of(pod, container, other(resource)).is_none(), pod.order, pod.name.as_str())
        });
        found
    }

    /// Containers with vcuda requests, of pods that the kubelet may be admitting.
    pub(super) fn pending_shared(&self) -> impl Iterator<Item = (&PodView, &ContainerView)> {
        self.pods
            .pods
            .values()
            .filter(|pod| pod.phase == PodPhase::Pending && !pod.deleting)
            .flat_map(|pod| pod.containers.iter().map(move |container| (pod, container)))
            .filter(|(_, container)| container.ask.demand.is_shared())
    }

    /// Whether a pending container is known that requests this much. If not, its pod may not have been seen yet.
    #[must_use]
    pub fn has_candidate(&self, resource: SharedResource, size: usize) -> bool {
        let granted = self.grants_by_container();
        match self.unpaired_grant(resource) {
            Some(first) => !self.completing(&granted, first, resource, size).is_empty(),
            None => !self.candidates(&granted, resource, size).is_empty(),
        }
    }

    /// The container that this is probably for. Devices of an init container identify the pod; else it is the second resource of
    /// the container whose first was granted just now; else of the likeliest pending one.
    pub(super) fn plan(
        &self,
        resource: SharedResource,
        size: usize,
        asked: &BTreeSet<u32>,
        on: &BTreeSet<CardIndex>,
    ) -> Plan {
        let of_pod = asked.iter().find_map(|n| {
            let grant = self.grants.get(self.owner.get(&DeviceKey::shared(resource, *n))?)?;
            let uid = &grant.holder_or_candidate()?.pod_uid;
            self.pods.get(uid).is_some_and(|p| !p.has_ended()).then(|| uid.clone())
        });
        let first = self.unpaired_grant(resource);
        let granted = &self.grants_by_container();
        if let Some(plan) = first
            .and_then(|first| self.plan_second_resource(granted, first, resource, size, of_pod.as_deref()))
        {
            return plan;
        }
        let partner = |pod: &PodView, container: &ContainerView| granted.of(pod, container, other(resource));
        let candidates = self.candidates(granted, resource, size);
        let chosen = of_pod
            .and_then(|uid| candidates.iter().find(|(pod, _)| pod.uid == uid))
            .or_else(|| candidates.iter().find(|(pod, c)| partner(pod, c).is_some()))
            .or_else(|| {
                candidates
                    .iter()
                    .find(|(_, c)| !on.is_empty() && c.reserved.iter().copied().eq(on.iter().copied()))
            })
            .or_else(|| candidates.first());
        match (chosen, first) {
            (Some((pod, container)), _) => self.plan_for(pod, container, partner(pod, container)),
            (None, Some(first)) => self.plan_with_partner(first, resource, size),
            (None, None) => self.plan_unattributed(resource, size),
        }
    }

    /// The plan for the second resource of the container whose first was granted just now, if one is known that requests both.
    fn plan_second_resource(
        &self,
        granted: &GrantIndex<'_>,
        first: GrantId,
        resource: SharedResource,
        size: usize,
        of_pod: Option<&str>,
    ) -> Option<Plan> {
        let grant = &self.grants[&first];
        let completing = self.completing(granted, first, resource, size);
        let cards = self.cards_of(&grant.actual);
        let chosen = match of_pod {
            Some(uid) => completing.iter().find(|(pod, _)| pod.uid == uid),
            None => completing
                .iter()
                .find(|(pod, c)| grant.candidate.as_ref() == Some(&HolderId::new(&pod.uid, &c.ask.name)))
                .or_else(|| completing.iter().find(|(_, c)| c.reserved.iter().eq(cards.iter())))
                .or_else(|| completing.first()),
        };
        chosen.map(|(pod, container)| self.plan_for(pod, container, Some(first)))
    }

    fn plan_for(&self, pod: &PodView, container: &ContainerView, partner: Option<GrantId>) -> Plan {
        Plan {
            candidate: Some(HolderId::new(&pod.uid, &container.ask.name)),
            partner,
            demand: container.ask.demand,
            partner_cards: partner.map(|p| self.cards_of(&self.grants[&p].actual).into_iter().collect()),
            reserved: container.reserved.clone(),
        }
    }

    /// No known pod requests this: then it probably is the second resource of what was granted just now.
    fn plan_with_partner(&self, partner: GrantId, resource: SharedResource, size: usize) -> Plan {
        let grant = &self.grants[&partner];
        let (first, second) = (self.demand_of(grant), one(resource, size));
        Plan {
            candidate: None,
            partner: Some(partner),
            demand: Demand {
                cores: first.cores + second.cores,
                blocks: first.blocks + second.blocks,
                legacy: 0,
            },
            partner_cards: Some(self.cards_of(&grant.actual).into_iter().collect()),
            reserved: Vec::new(),
        }
    }

    /// The plan where only the size is known.
    pub(super) fn plan_unattributed(&self, resource: SharedResource, size: usize) -> Plan {
        let mut demand = one(resource, size);
        let per_card = self.ledger.indexes().filter_map(|c| self.ledger.card(c)).map(|c| c.blocks().0).max();
        if let Some(per_card) = per_card.filter(|most| demand.blocks.0 > *most) {
            // More memory than a card has goes with whole cards.
            demand.cores = Cores(Cores::CARD.0 * demand.blocks.0.div_ceil(per_card.max(1)));
        }
        Plan { candidate: None, partner: None, demand, partner_cards: None, reserved: Vec::new() }
    }

    /// The latest unconfirmed grant, if it is of the other resource.
    ///
    /// The kubelet requests both resources of a container one after the other: so this is probably of the container that is
    /// being admitted now. It may also be of a container that was refused its other resource; only the choice of cards depends on
    /// it, because memory is moved to its cores once both are confirmed.
    fn unpaired_grant(&self, resource: SharedResource) -> Option<GrantId> {
        let waiting = self.grants.iter().filter(|(_, grant)| grant.answered && !grant.confirmed);
        let (id, latest) = waiting.max_by_key(|(id, grant)| (grant.since, **id))?;
        // An older one belongs to a container whose admission failed.
        let recent = self.clock.saturating_sub(latest.since) <= PAIR_WINDOW;
        (recent && latest.resource == Resource::Shared(other(resource))).then_some(*id)
    }

    /// Pending containers whose requests are this unpaired grant and this much of the other resource.
    fn completing(
        &self,
        granted: &GrantIndex<'_>,
        first: GrantId,
        resource: SharedResource,
        size: usize,
    ) -> Vec<(&PodView, &ContainerView)> {
        let first_size = self.grants[&first].requested.len();
        let mut found: Vec<_> = self
            .pending_shared()
            .filter(|(_, c)| amount(resource, &c.ask.demand) as usize == size)
            .filter(|(_, c)| amount(other(resource), &c.ask.demand) as usize == first_size)
            .filter(|(pod, c)| granted.of(pod, c, resource).is_none())
            .filter(|(pod, c)| granted.of(pod, c, other(resource)).is_none_or(|id| id == first))
            .collect();
        found.sort_by_key(|(pod, _)| (pod.order, pod.name.as_str()));
        found
    }
}

pub(super) const fn other(resource: SharedResource) -> SharedResource {
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

pub(super) const fn amount(resource: SharedResource, demand: &Demand) -> u32 {
    match resource {
        SharedResource::Cores => demand.cores.0,
        SharedResource::Memory => demand.blocks.0,
    }
}
