//! A node as the simulations know it: the model's own ledger, and what placement and scores see of it.

use gpu_migrate_model::ask::PodAsk;
use gpu_migrate_model::capacity::{NodeCapacity, RequestSummary};
use gpu_migrate_model::card::{Card, CardView};
use gpu_migrate_model::ledger::{Hold, HolderId, Ledger, Refused};
use gpu_migrate_model::place::{self, Constraints, NodeView, Placement, Refusal};
use gpu_migrate_model::score::{FreeCapacity, HostResources, ModelSet};
use gpu_migrate_model::topology::{LinkLevel, Topology, Tree};
use gpu_migrate_model::units::CardIndex;

#[derive(Clone, Debug)]
pub struct Request {
    /// Of the cards, for placement.
    pub ask: PodAsk,
    /// Which cards will do, for placement.
    pub constraints: Constraints,
    /// Of CPU and memory. In a cluster that is kube-scheduler's own filter.
    pub host: HostResources,
}

#[derive(Clone, Debug)]
pub struct ReplayNode {
    ledger: Ledger,
    cards: Vec<CardView>,
    tree: Tree,
    host: HostResources,
    used: (u64, u64),
    models: ModelSet,
    free: NodeCapacity,
    version: u64,
}

/// Why a pod could not be put where it was said to fit. Each is a bug.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    #[error("placement refuses what the score chose: {0}")]
    Placement(#[from] Refusal),
    #[error("the ledger refuses what placement chose: {0}")]
    Ledger(#[from] Refused),
}

impl ReplayNode {
    /// An empty node. Its cards are linked all alike: neither traces nor node objects tell of links.
    #[must_use]
    pub fn new(cards: Vec<Card>, host: HostResources, models: ModelSet) -> Self {
        let tree = Topology::uniform(cards.len(), LinkLevel::Pix).tree();
        let ledger = Ledger::new(cards);
        let cards = ledger.view();
        let free = capacity_of(&cards);
        Self { ledger, cards, tree, host, used: (0, 0), models, free, version: 0 }
    }

    #[must_use]
    pub fn capacity(&self) -> FreeCapacity {
        let mut capacity = FreeCapacity::of(&self.cards, 0, self.host());
        capacity.cards.iter_mut().for_each(|card| card.models = self.models);
        capacity
    }

    /// Whether a request fits, by the model's placement and by CPU and memory.
    #[must_use]
    pub fn fits(&self, request: &Request) -> bool {
        let summary = RequestSummary::of(&request.ask, &request.constraints);
        self.host().has(request.host) && self.free.fits(summary, || self.place(request)).is_ok()
    }

    /// The cards that a request would get.
    ///
    /// # Errors
    /// Why it does not fit on the cards. CPU and memory are not looked at.
    pub fn place(&self, request: &Request) -> Result<Placement, Refusal> {
        place::place(&self.view(), &request.ask, &request.constraints)
    }

    #[must_use]
    pub fn host(&self) -> HostResources {
        let less = |whole: u32, used: u64| whole.saturating_sub(u32::try_from(used).unwrap_or(u32::MAX));
        HostResources {
            cpu_milli: less(self.host.cpu_milli, self.used.0),
            memory_mib: less(self.host.memory_mib, self.used.1),
        }
    }

    /// The cards, with what is left on each.
    #[must_use]
    pub fn cards(&self) -> &[CardView] {
        &self.cards
    }

    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Changes whenever something is put on the node or taken off.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Places a pod as the extender's bind does, a share on the card that was chosen, and records it in the ledger. `pod` is unique
    /// on the node.
    ///
    /// # Errors
    /// [`BindError`] if it does not fit.
    pub fn bind(&mut self, pod: &str, request: &Request, card: Option<CardIndex>) -> Result<(), BindError> {
        let placement = match card {
            None => self.place(request)?,
            Some(card) => place::place_on(&self.view(), &request.ask, &request.constraints, card)?,
        };
        for (position, cards) in placement.containers {
            let container = &request.ask.containers[position];
            let holder = HolderId::new(pod, container.name.clone());
            for card in cards {
                self.ledger.hold(&holder, card, place::footprint(container))?;
            }
        }
        self.occupy(request.host);
        Ok(())
    }

    /// Gives a legacy pod the first free cards, as many as it has or as there are. Returns how many were missing.
    pub fn place_legacy(&mut self, pod: &str, cards: u32, host: HostResources) -> u32 {
        let holder = HolderId::new(pod, "legacy");
        let free: Vec<CardIndex> = self
            .cards
            .iter()
            .filter(|card| card.is_free())
            .map(|card| card.index)
            .take(cards as usize)
            .collect();
        let held =
            free.iter().filter(|card| self.ledger.hold(&holder, **card, Hold::whole()).is_ok()).count();
        self.occupy(host);
        cards.saturating_sub(u32::try_from(held).unwrap_or(u32::MAX))
    }

    pub fn occupy(&mut self, host: HostResources) {
        self.used.0 += u64::from(host.cpu_milli);
        self.used.1 += u64::from(host.memory_mib);
        self.changed();
    }

    pub fn release(&mut self, pod: &str, host: HostResources) {
        self.ledger.release_pod(pod);
        self.used.0 = self.used.0.saturating_sub(u64::from(host.cpu_milli));
        self.used.1 = self.used.1.saturating_sub(u64::from(host.memory_mib));
        self.changed();
    }

    fn view(&self) -> NodeView<'_> {
        NodeView { cards: &self.cards, tree: &self.tree, unattributed: 0 }
    }

    fn changed(&mut self) {
        self.cards = self.ledger.view();
        self.free = capacity_of(&self.cards);
        self.version += 1;
    }
}

/// Shares and legacy pods see the same cards here: no card is reserved, and it is known who holds which.
fn capacity_of(cards: &[CardView]) -> NodeCapacity {
    let free = cards.iter().filter(|card| card.is_free()).count();
    NodeCapacity::new(cards, u32::try_from(free).unwrap_or(u32::MAX), 0, false)
}
