//! For whom an allocation of a vcuda resource probably is.

use std::collections::{BTreeSet, HashMap};

use gpu_migrate_model::ask::Demand;
use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::ledger::HolderId;
use gpu_migrate_model::units::{Blocks, CardIndex, Cores};

use super::grants::{DeviceKey, GrantId, Resource};
use super::{ContainerView, Millis, NodeState, PodPhase, PodView};

/// The kubelet asks for a container's second resource milliseconds after the first; we may wait in between.
const PAIR_WINDOW: Millis = 3_000;

/// For whom an allocation probably is, and where it should go.
pub(super) struct Plan {
    /// The container.
    pub(super) candidate: Option<HolderId>,
    /// What was promised of the container's other resource.
    pub(super) partner: Option<GrantId>,
    /// What the container wants in all, as far as known.
    pub(super) demand: Demand,
    /// The partner's cards.
    pub(super) bound: Option<Vec<CardIndex>>,
    /// The extender's choice.
    pub(super) reserved: Vec<CardIndex>,
}

impl Plan {
    /// A partner that only seems to be one: nobody is known who wants both.
    pub(super) fn is_partner_guessed(&self) -> bool {
        self.partner.is_some() && self.candidate.is_none()
    }

    /// On how many cards its cores lie.
    pub(super) fn width(&self) -> usize {
        self.demand.cores.whole_cards().unwrap_or(1) as usize
    }
}

/// What each container was promised so far: its cores, its memory.
pub(super) struct GrantIndex<'a>(HashMap<(&'a str, &'a str), [Option<GrantId>; 2]>);

impl GrantIndex<'_> {
    pub(super) fn of(
        &self,
        pod: &PodView,
        container: &ContainerView,
        resource: SharedResource,
    ) -> Option<GrantId> {
        self.0.get(&(pod.uid.as_str(), container.ask.name.as_str()))?[place(resource)]
    }
}

const fn place(resource: SharedResource) -> usize {
    match resource {
        SharedResource::Cores => 0,
        SharedResource::Memory => 1,
    }
}

impl NodeState {
    /// Looked up once for a decision: every waiting container is compared with it.
    pub(super) fn grants_by_container(&self) -> GrantIndex<'_> {
        let mut granted = HashMap::with_capacity(self.grants.len());
        for (id, grant) in &self.grants {
            if let (Resource::Shared(resource), Some(holder)) = (&grant.resource, grant.holder_or_candidate())
            {
                let slots: &mut [Option<GrantId>; 2] =
                    granted.entry((holder.pod_uid.as_str(), holder.container.as_str())).or_default();
                // The first of several.
                slots[place(*resource)].get_or_insert(*id);
            }
        }
        GrantIndex(granted)
    }

    /// Pending containers that still want this much of this resource, likeliest first.
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
        // The kubelet finishes a container before it begins another, and pods in the order in which they came.
        found.sort_by_key(|(pod, container)| {
            (granted.of(pod, container, other(resource)).is_none(), pod.order, pod.name.as_str())
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

    /// Whether a pending container is known that wants this much. If not, the pod may not have been seen yet.
    #[must_use]
    pub fn has_candidate(&self, resource: SharedResource, size: usize) -> bool {
        let granted = self.grants_by_container();
        match self.unpaired_grant(resource) {
            Some(open) => !self.completing(&granted, open, resource, size).is_empty(),
            None => !self.candidates(&granted, resource, size).is_empty(),
        }
    }

    /// For whom this probably is. Devices that an init container hands on name the pod; else the container whose first
    /// resource was answered just now gets its second; else it is the likeliest of those that wait.
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
            self.pods.get(uid).is_some_and(|p| !p.phase.terminal()).then(|| uid.clone())
        });
        let open = self.unpaired_grant(resource);
        let granted = &self.grants_by_container();
        if let Some(plan) =
            open.and_then(|open| self.plan_second_resource(granted, open, resource, size, of_pod.as_deref()))
        {
            return plan;
        }
        let half = |pod: &PodView, container: &ContainerView| granted.of(pod, container, other(resource));
        let candidates = self.candidates(granted, resource, size);
        let chosen = of_pod
            .and_then(|uid| candidates.iter().find(|(pod, _)| pod.uid == uid))
            .or_else(|| candidates.iter().find(|(pod, c)| half(pod, c).is_some()))
            .or_else(|| {
                candidates
                    .iter()
                    .find(|(_, c)| !on.is_empty() && c.reserved.iter().copied().eq(on.iter().copied()))
            })
            .or_else(|| candidates.first());
        match (chosen, open) {
            (Some((pod, container)), _) => self.plan_for(pod, container, half(pod, container)),
            (None, Some(open)) => self.plan_with_partner(open, resource, size),
            (None, None) => self.plan_unattributed(resource, size),
        }
    }

    /// The plan for the second resource of the container whose first was just answered, if one is known that wants both.
    fn plan_second_resource(
        &self,
        granted: &GrantIndex<'_>,
        open: GrantId,
        resource: SharedResource,
        size: usize,
        of_pod: Option<&str>,
    ) -> Option<Plan> {
        let grant = &self.grants[&open];
        let completing = self.completing(granted, open, resource, size);
        let cards = self.cards_of(&grant.actual);
        let chosen = match of_pod {
            Some(uid) => completing.iter().find(|(pod, _)| pod.uid == uid),
            None => completing
                .iter()
                .find(|(pod, c)| grant.candidate.as_ref() == Some(&HolderId::new(&pod.uid, &c.ask.name)))
                .or_else(|| completing.iter().find(|(_, c)| c.reserved.iter().eq(cards.iter())))
                .or_else(|| completing.first()),
        };
        chosen.map(|(pod, container)| self.plan_for(pod, container, Some(open)))
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

    /// No known pod wants this at all: then it is likely the other half of what was answered just now.
    fn plan_with_partner(&self, open: GrantId, resource: SharedResource, size: usize) -> Plan {
        let grant = &self.grants[&open];
        let (first, second) = (self.demand_of(grant), one(resource, size));
        Plan {
            candidate: None,
            partner: Some(open),
            demand: Demand {
                cores: first.cores + second.cores,
                blocks: first.blocks + second.blocks,
                legacy: 0,
            },
            bound: Some(self.cards_of(&grant.actual).into_iter().collect()),
            reserved: Vec::new(),
        }
    }

    /// The plan for something of which only the size is known.
    pub(super) fn plan_unattributed(&self, resource: SharedResource, size: usize) -> Plan {
        let mut demand = one(resource, size);
        let per_card = self.ledger.indexes().filter_map(|c| self.ledger.card(c)).map(|c| c.blocks().0).max();
        if let Some(per_card) = per_card.filter(|most| demand.blocks.0 > *most) {
            // More memory than a card has goes with whole cards.
            demand.cores = Cores(Cores::CARD.0 * demand.blocks.0.div_ceil(per_card.max(1)));
        }
        Plan { candidate: None, partner: None, demand, bound: None, reserved: Vec::new() }
    }

    /// The latest promise not taken up yet, if it is of the other resource.
    ///
    /// The kubelet asks for both resources of a container in a row: so this is probably a half of the container that is being
    /// admitted now. It may also be what a container left behind that was refused its other resource; nothing but places
    /// depends on it, because memory follows its cores once both are named.
    fn unpaired_grant(&self, resource: SharedResource) -> Option<GrantId> {
        let waiting = self.grants.iter().filter(|(_, grant)| grant.answered && !grant.confirmed);
        let (id, latest) = waiting.max_by_key(|(id, grant)| (grant.since, **id))?;
        // A half that was given up is not waited for.
        let recent = self.clock.saturating_sub(latest.since) <= PAIR_WINDOW;
        (recent && latest.resource == Resource::Shared(other(resource))).then_some(*id)
    }

    /// Pending containers that the open half and this much of the other resource make complete.
    fn completing(
        &self,
        granted: &GrantIndex<'_>,
        open: GrantId,
        resource: SharedResource,
        size: usize,
    ) -> Vec<(&PodView, &ContainerView)> {
        let first = self.grants[&open].requested.len();
        let mut found: Vec<_> = self
            .pending_shared()
            .filter(|(_, c)| amount(resource, &c.ask.demand) as usize == size)
            .filter(|(_, c)| amount(other(resource), &c.ask.demand) as usize == first)
            .filter(|(pod, c)| granted.of(pod, c, resource).is_none())
            .filter(|(pod, c)| granted.of(pod, c, other(resource)).is_none_or(|id| id == open))
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
