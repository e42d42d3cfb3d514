//! What is really on the cards, and the judgement of it.

use std::collections::{BTreeMap, BTreeSet};

use gpu_migrate_model::ask::{ContainerKind, Demand};
use gpu_migrate_model::card::CardState;
use gpu_migrate_model::ledger::HolderId;
use gpu_migrate_sim::judge;

use super::super::agent::{Agent, uuid};
use super::admit::visible;
use super::{ALL_CARDS, CORE, Hardware, MEMORY, World};

/// What a container was really given.
#[derive(Clone, Debug)]
pub(super) struct Given {
    pub(super) pod: String,
    pub(super) container: String,
    pub(super) kind: ContainerKind,
    pub(super) demand: Demand,
    /// In the order in which containers were given anything.
    pub(super) order: u64,
    /// The kubelet gave it without asking the agent.
    bypassing: bool,
    /// The agent knew then what else was there.
    bypassing_a_ready_agent: bool,
    /// It was deleted with force, and still ended when the kubelet gave its card to the next without asking the agent.
    overrun: bool,
    /// By card. A shared container sees the cards that the answer for its cores names; there it uses its memory too, wherever that is
    /// accounted for.
    cards: BTreeMap<usize, Part>,
}

/// What a container has of a card.
#[derive(Clone, Copy, Debug)]
struct Part {
    cores: u32,
    blocks: u32,
    /// Blocks that the card had when it was given.
    of: u32,
}

impl Given {
    pub(super) const fn nothing(
        pod: String,
        container: String,
        kind: ContainerKind,
        demand: Demand,
        order: u64,
    ) -> Self {
        Self {
            pod,
            container,
            kind,
            demand,
            order,
            bypassing: false,
            bypassing_a_ready_agent: false,
            overrun: false,
            cards: BTreeMap::new(),
        }
    }

    pub(super) const fn bypasses(&mut self, ready_agent: bool) {
        (self.bypassing, self.bypassing_a_ready_agent) = (true, ready_agent);
    }

    pub(super) const fn bypassing(&self) -> bool {
        self.bypassing
    }

    /// The kubelet gives these cards past the agent, while this container still ends.
    pub(super) fn is_overrun_on(&mut self, cards: &BTreeSet<usize>) {
        self.overrun |= self.cards.keys().any(|card| cards.contains(card));
    }

    /// The same, on a share that this process of the agent knows to be older: it knew all that was there, or the record of the one
    /// before has the share.
    pub(super) fn intrudes_on_a_share<'a>(
        &self,
        on: impl IntoIterator<Item = &'a Self>,
        recorded: impl Fn(&HolderId) -> bool,
    ) -> bool {
        let card = |other: &&Self| other.cards.keys().any(|card| self.cards.contains_key(card));
        let known = |other: &&Self| {
            self.bypassing_a_ready_agent || recorded(&HolderId::new(&other.pod, &other.container))
        };
        self.intrudes(on.into_iter().filter(|other| !other.legacy()).filter(card).filter(known))
    }

    /// It came past the agent to a card that another pod had: the agent cannot prevent it, only end it.
    fn intrudes<'a>(&self, on: impl IntoIterator<Item = &'a Self>) -> bool {
        self.bypassing && on.into_iter().any(|other| other.order < self.order && other.pod != self.pod)
    }

    const fn legacy(&self) -> bool {
        self.demand.legacy > 0
    }

    /// The plugin's answer for one of its resources.
    pub(super) fn take(&mut self, resource: &str, cards: &BTreeSet<usize>, hardware: &Hardware) {
        if resource == MEMORY {
            return;
        }
        let each = |amount: u32| amount.div_ceil(cards.len().max(1) as u32);
        let part = |card: &usize| {
            let of = hardware.blocks(*card);
            let (cores, blocks) = if resource == CORE {
                (each(self.demand.cores.0), each(self.demand.blocks.0))
            } else {
                (100, of)
            };
            (*card, Part { cores, blocks, of })
        };
        self.cards = cards.iter().map(part).collect();
    }
}

impl<A: Agent> World<A> {
    /// What every container has and sees, and which pods wait or have ended: without names of ours and without times.
    pub(in super::super) fn course(&self) -> String {
        let kubelet = self.kubelet.lock();
        let mut lines: Vec<String> = Vec::new();
        for (started, given) in
            self.running.iter().map(|g| (true, g)).chain(self.admitted.iter().map(|g| (false, g)))
        {
            lines.push(format!("{} {} {started} {:?}", given.pod, given.container, given.cards));
        }
        for row in kubelet.manager.rows() {
            let ids: BTreeSet<&String> = row.ids.keys().collect();
            let (pod, container, resource) = (&row.pod, &row.container, &row.resource);
            lines.push(format!("{pod} {container} {resource} {ids:?} {:?}", visible(&row.answer)));
        }
        lines.sort_unstable();
        lines.push(format!("{:?} {:?}", self.waiting, kubelet.ended));
        lines.join("\n")
    }

    /// I1 and I2 of what is really on the cards; I3 of the ledger against it.
    pub(in super::super) fn check(&mut self) -> Result<(), String> {
        self.end_overdue();
        if let Some(pod) = self.missed.take() {
            return Err(format!("I1: {pod} has the card of a share past the agent, which does not end it"));
        }
        if let Some(pod) = self.wronged.take() {
            return Err(format!("{pod} was ended, and has cards that the agent gave it"));
        }
        self.agent.with_state(|state, _| {
            for card in 0..ALL_CARDS {
                let at = state.ledger().find(&uuid(card));
                let free = at.is_some_and(|at| state.ledger().state(at) == CardState::Free);
                self.check_card(card, state.is_ready() && free)?;
            }
            Ok::<_, String>(())
        })?;
        self.check_claims()?;
        // A container never sees more cards than it asked for; one that asked for less than a card sees one.
        for given in &self.running {
            let wanted = given.demand.cores.0.div_ceil(100).max(given.demand.legacy) as usize;
            if given.cards.len() != wanted {
                return Err(format!("{} asked for {wanted} cards and sees {:?}", given.pod, given.cards));
            }
        }
        Ok(())
    }

    /// What the agent has given on a claimed card after it heard of the claim.
    fn check_claims(&self) -> Result<(), String> {
        // A card that this process has not found is NVIDIA's plugin's alone.
        let found = self.claims.iter().filter(|(card, _)| self.found.contains(card));
        for (card, heard) in found.filter_map(|(card, heard)| Some((card, (*heard)?))) {
            // A pod that the kubelet admits again may have had it before.
            let first = |given: &Given| self.first_admitted.get(&given.pod).copied().unwrap_or(given.order);
            let later =
                |given: &&Given| first(given) >= heard && !given.bypassing && given.cards.contains_key(card);
            if let Some(given) = self.running.iter().find(later) {
                return Err(format!("I1: card {card} is claimed through DRA and was given to {}", given.pod));
            }
        }
        Ok(())
    }

    fn check_card(&self, card: usize, free: bool) -> Result<(), String> {
        // What the kubelet gave away past the agent is nothing that an agent which starts later can know. Of a pod that is being ended by force, the init containers have ended long since.
        let ended =
            |g: &Given| g.overrun || g.kind == ContainerKind::Init && self.lingering.contains_key(&g.pod);
        let here: Vec<&Given> =
            self.running.iter().filter(|g| g.cards.contains_key(&card) && !ended(g)).collect();
        let used = |g: &&Given| judge::Use {
            pod: g.pod.clone(),
            container: g.container.clone(),
            is_init: g.kind == ContainerKind::Init,
            share: (!g.legacy()).then(|| (g.cards[&card].cores as usize, g.cards[&card].blocks as usize)),
        };
        let name = card.to_string();
        let prevented: Vec<&Given> =
            here.iter().copied().filter(|given| !given.intrudes(here.iter().copied())).collect();
        // Of a card that shrank, those who were there before have what they have; whoever comes after must fit.
        let blocks =
            prevented.iter().max_by_key(|given| given.order).map_or(0, |given| given.cards[&card].of);
        let uses: Vec<judge::Use> = prevented.iter().map(used).collect();
        judge::card(&name, blocks as usize, &uses).map_err(|violation| violation.to_string())?;
        // What the kubelet has written and the agent not read yet is read before anything is decided.
        let up_to_date = self.kubelet.lock().has_lost_checkpoint() || self.agent.is_up_to_date();
        if free && up_to_date {
            let uses: Vec<judge::Use> = here.iter().map(used).collect();
            judge::free(&name, &uses).map_err(|violation| violation.to_string())?;
        }
        Ok(())
    }
}
