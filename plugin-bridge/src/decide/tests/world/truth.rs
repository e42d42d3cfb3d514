//! What is really on the cards, and what must be true of it.

use std::collections::{BTreeMap, BTreeSet};

use gpu_migrate_model::ask::{ContainerKind, Demand};
use gpu_migrate_model::card::CardState;
use gpu_migrate_model::units::CardIndex;

use super::super::agent::Agent;
use super::{BLOCKS, CARDS, CORE, MEMORY, World};

/// What a container was really given.
#[derive(Clone, Debug)]
pub(super) struct Given {
    pub(super) pod: String,
    pub(super) container: String,
    pub(super) kind: ContainerKind,
    pub(super) demand: Demand,
    /// Cores and blocks by card. A shared container sees the cards that the answer for its cores names; there it uses its
    /// memory too, wherever that is accounted for.
    cards: BTreeMap<usize, (u32, u32)>,
}

impl Given {
    pub(super) const fn nothing(pod: String, container: String, kind: ContainerKind, demand: Demand) -> Self {
        Self { pod, container, kind, demand, cards: BTreeMap::new() }
    }

    const fn legacy(&self) -> bool {
        self.demand.legacy > 0
    }

    /// The plugin's answer for one of its resources.
    pub(super) fn take(&mut self, resource: &str, cards: &BTreeSet<usize>) {
        let each = |amount: u32| amount.div_ceil(cards.len().max(1) as u32);
        let part = match resource {
            MEMORY => return,
            CORE => (each(self.demand.cores.0), each(self.demand.blocks.0)),
            _ => (100, BLOCKS),
        };
        self.cards = cards.iter().map(|card| (*card, part)).collect();
    }
}

impl<A: Agent> World<A> {
    /// I1 and I2 of what is really on the cards; I3 of the books against it.
    pub(in super::super) fn check(&mut self) -> Result<(), String> {
        self.let_end();
        self.agent.tell(|books, _| {
            for card in 0..CARDS {
                let free = books.ledger().state(CardIndex::from(card)) == CardState::Free;
                self.check_card(card, books.is_ready() && free)?;
            }
            Ok::<_, String>(())
        })?;
        // A container never sees more cards than it asked for; one that asked for less than a card sees one.
        for given in &self.running {
            let wanted = given.demand.cores.0.div_ceil(100).max(given.demand.legacy) as usize;
            if given.cards.len() != wanted {
                return Err(format!("{} asked for {wanted} cards and sees {:?}", given.pod, given.cards));
            }
        }
        Ok(())
    }

    fn check_card(&self, card: usize, free: bool) -> Result<(), String> {
        // Of a pod that is being ended by force, the init containers have ended long since.
        let ended = |g: &Given| g.kind == ContainerKind::Init && self.lingering.contains_key(&g.pod);
        let here: Vec<&Given> =
            self.running.iter().filter(|g| g.cards.contains_key(&card) && !ended(g)).collect();
        let legacy: BTreeSet<&String> = here.iter().filter(|g| g.legacy()).map(|g| &g.pod).collect();
        let shared: BTreeSet<&String> = here.iter().filter(|g| !g.legacy()).map(|g| &g.pod).collect();
        if legacy.len() > 1 || (!legacy.is_empty() && !shared.is_empty()) {
            return Err(format!("I1: card {card} is used by legacy {legacy:?} and shared {shared:?}"));
        }
        let (cores, blocks) =
            shared.iter().map(|pod| footprint(&here, pod, card)).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
        if cores > 100 || blocks > BLOCKS {
            return Err(format!(
                "I2: card {card} has {cores} cores and {blocks} blocks in use by {shared:?}"
            ));
        }
        let settled = here.iter().any(|g| !self.lingering.contains_key(&g.pod));
        // What the kubelet has written and the agent not read yet is read before anything is decided.
        let up_to_date = self.kubelet.lock().spoilt || self.agent.is_up_to_date();
        if free && settled && up_to_date {
            return Err(format!("I3: card {card} is free in the books but used by {legacy:?} {shared:?}"));
        }
        Ok(())
    }
}

/// What a pod takes of a card: the larger of its init containers' and its running containers' part.
fn footprint(here: &[&Given], pod: &str, card: usize) -> (u32, u32) {
    let (mut init, mut run) = ((0, 0), (0, 0));
    for given in here.iter().filter(|g| g.pod == pod) {
        let (cores, blocks) = given.cards[&card];
        if given.kind == ContainerKind::Init {
            init = (cores.max(init.0), blocks.max(init.1));
        } else {
            run = (run.0 + cores, run.1 + blocks);
        }
    }
    (init.0.max(run.0), init.1.max(run.1))
}
