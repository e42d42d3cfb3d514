//! Quotas per namespace by node pool or card model (gpu-admission's `quotaFilter`), from GPUConfig.
//!
//! Shared pods count, bound and assumed. Legacy pods are the business of ResourceQuota (`requests.nvidia.com/gpu`), which
//! goes on working, for the vcuda resources too.

use std::collections::HashMap;
use std::sync::Arc;

use gpu_migrate_model::ask::{Demand, PodKind};
use gpu_migrate_model::card::same_model;
use gpu_migrate_model::crd::Quota;
use gpu_migrate_model::names;

use super::NodeInfo;
use super::pod::PodFacts;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Place {
    /// The node's pool, by its label.
    pool: Option<Arc<str>>,
    model: Arc<str>,
}

/// Cores and blocks in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    pub cores: u64,
    pub blocks: u64,
}

impl Used {
    /// What a pod that is on `info` uses of it.
    pub fn on(info: &NodeInfo, pod: &PodFacts) -> Self {
        Asked::by(std::iter::once(pod)).with(blocks_of_card(info))
    }

    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self { cores: self.cores + other.cores, blocks: self.blocks + other.blocks }
    }

    fn minus(self, other: Self) -> Self {
        Self {
            cores: self.cores.saturating_sub(other.cores),
            blocks: self.blocks.saturating_sub(other.blocks),
        }
    }
}

/// What pods ask for. Whole cards that are asked for without memory have all that the card has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    used: Used,
    /// Whole cards without a request for memory.
    cards: u64,
}

impl Asked {
    /// The sum of what these pods ask for.
    pub fn by<'a>(pods: impl Iterator<Item = &'a PodFacts>) -> Self {
        pods.filter(|pod| pod.kind == PodKind::Shared).fold(Self::default(), |sum, pod| {
            let Demand { cores, blocks, .. } = pod.demand();
            let cards = cores.whole_cards().filter(|_| blocks.0 == 0).unwrap_or(0);
            let used = Used { cores: u64::from(cores.0), blocks: u64::from(blocks.0) };
            Self { used: sum.used.plus(used), cards: sum.cards + u64::from(cards) }
        })
    }

    /// On cards of so many blocks.
    fn with(self, blocks: u64) -> Used {
        Used { blocks: self.used.blocks + self.cards * blocks, ..self.used }
    }
}

/// Blocks of the node's largest card.
fn blocks_of_card(info: &NodeInfo) -> u64 {
    info.capacity.cards.iter().map(|card| u64::from(card.of_blocks)).max().unwrap_or(0)
}

/// The quotas that one pod would break, node by node.
pub struct QuotaCheck<'a> {
    quotas: &'a Quotas,
    namespace: Arc<str>,
    more: Asked,
    less: Used,
    /// By blocks of a card, where that matters.
    exceeded: Vec<(u64, Vec<Exceeded>)>,
}

impl<'a> QuotaCheck<'a> {
    pub fn new(quotas: &'a Quotas, namespace: &Arc<str>, more: Asked) -> Self {
        Self { quotas, namespace: Arc::clone(namespace), more, less: Used::default(), exceeded: Vec::new() }
    }

    /// With this much thought away.
    #[must_use]
    pub fn without(self, less: Used) -> Self {
        Self { less, ..self }
    }

    /// Why the pod may not go on this node.
    pub fn refusal(&mut self, info: &NodeInfo) -> Option<&str> {
        if self.more == Asked::default() {
            return None;
        }
        let blocks = if self.more.cards == 0 { 0 } else { blocks_of_card(info) };
        let at = self.exceeded.iter().position(|(known, _)| *known == blocks).unwrap_or_else(|| {
            let exceeded = self.quotas.exceeded(&self.namespace, self.more.with(blocks), self.less);
            self.exceeded.push((blocks, exceeded));
            self.exceeded.len() - 1
        });
        let broken = self.exceeded[at].1.iter().find(|quota| quota.applies_to(info));
        broken.map(|quota| quota.reason.as_str())
    }
}

/// What one node contributes to the sums: taken back as a whole when it changes.
#[derive(Debug, Default)]
pub(super) struct Contribution {
    place: Place,
    by_namespace: Vec<(Arc<str>, Used)>,
}

/// The limits, and the sums that they are held against; the sums are kept only while there are limits.
#[derive(Debug, Default)]
pub struct Quotas {
    limits: Vec<Quota>,
    used: HashMap<Arc<str>, HashMap<Place, Used>>,
}

/// A quota that a pod would break wherever it applies.
#[derive(Debug)]
struct Exceeded {
    pool: Option<String>,
    model: Option<String>,
    reason: String,
}

impl Quotas {
    /// Whether there is anything to count for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.limits.is_empty()
    }

    /// Whether any limit is on `namespace`.
    #[must_use]
    pub fn concern(&self, namespace: &str) -> bool {
        self.limits.iter().any(|quota| quota.namespace == namespace)
    }

    /// New limits. The sums start from nothing: every info has to contribute again.
    pub(super) fn set(&mut self, limits: Vec<Quota>) {
        self.limits = limits;
        self.used.clear();
    }

    pub(super) fn add(&mut self, contribution: &Contribution) {
        for (namespace, used) in &contribution.by_namespace {
            let sum = self
                .used
                .entry(Arc::clone(namespace))
                .or_default()
                .entry(contribution.place.clone())
                .or_default();
            *sum = sum.plus(*used);
        }
    }

    pub(super) fn take_back(&mut self, contribution: &Contribution) {
        for (namespace, used) in &contribution.by_namespace {
            if let Some(sum) =
                self.used.get_mut(namespace).and_then(|places| places.get_mut(&contribution.place))
            {
                *sum = sum.minus(*used);
            }
        }
    }

    /// The quotas of `namespace` that would be broken by `more`, with `less` thought away.
    fn exceeded(&self, namespace: &str, more: Used, less: Used) -> Vec<Exceeded> {
        let own = self.limits.iter().filter(|quota| quota.namespace == namespace);
        own.filter_map(|quota| {
            let (pool, model) = (quota.pool.clone(), quota.model.clone());
            let places = self.used.get(namespace).into_iter().flatten();
            let counted = places.filter(|(place, _)| applies(&pool, &model, place)).map(|(_, used)| *used);
            let used = counted.fold(Used::default(), Used::plus).minus(less);
            let broken = |limit: Option<u64>, used: u64, more: u64, unit: &str| {
                let limit = limit.filter(|limit| more > 0 && used + more > *limit)?;
                Some(format!("{used} of {limit} {unit} used, {more} asked"))
            };
            let cores = broken(quota.cores.map(|cores| u64::from(cores.0)), used.cores, more.cores, "cores");
            let blocks = || broken(quota.blocks.map(|b| u64::from(b.0)), used.blocks, more.blocks, "blocks");
            let what = cores.or_else(blocks)?;
            let on = match (&pool, &model) {
                (None, None) => String::new(),
                (Some(pool), None) => format!(" in pool {pool}"),
                (None, Some(model)) => format!(" on {model}"),
                (Some(pool), Some(model)) => format!(" on {model} in pool {pool}"),
            };
            let reason = format!("quota of namespace {namespace}{on}: {what}");
            Some(Exceeded { pool, model, reason })
        })
        .collect()
    }
}

fn applies(pool: &Option<String>, model: &Option<String>, place: &Place) -> bool {
    pool.as_ref().is_none_or(|pool| Some(&**pool) == place.pool.as_deref())
        && model.as_ref().is_none_or(|model| same_model(model, &place.model))
}

impl Exceeded {
    fn applies_to(&self, info: &NodeInfo) -> bool {
        applies(&self.pool, &self.model, &place(info))
    }
}

fn place(info: &NodeInfo) -> Place {
    let pool = info.facts.as_ref().and_then(|facts| facts.labels.get(names::POOL));
    let model = info.inventory.cards.first().map(|card| card.model.as_str());
    Place { pool: pool.cloned(), model: Arc::from(model.unwrap_or("")) }
}

/// What `info` contributes.
pub(super) fn contribution(info: &NodeInfo) -> Contribution {
    let mut by_namespace: Vec<(Arc<str>, Used)> = Vec::new();
    for placed in info.pods.values() {
        let used = Used::on(info, &placed.pod);
        match by_namespace.iter_mut().find(|(namespace, _)| *namespace == placed.pod.namespace) {
            Some((_, sum)) => *sum = sum.plus(used),
            None => by_namespace.push((Arc::clone(&placed.pod.namespace), used)),
        }
    }
    Contribution { place: place(info), by_namespace }
}
