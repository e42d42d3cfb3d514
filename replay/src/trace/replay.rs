//! One replay: one policy, one order of arrival.

use gpu_migrate_model::score::{
    CardRequest, Fragmentation, FreeCapacity, Mix, ScoreCache, Scorer, ScoringStrategy,
};
use gpu_migrate_model::units::{CardIndex, Cores};
use rand::RngExt;
use rand::rngs::Xoshiro256PlusPlus;
use rand::seq::SliceRandom;

use super::fleet::{Asked, Models, Requests};
use super::read::{TraceNode, TracePod};
use super::workload::{arrivals, generator};
use crate::node::{BindError, ReplayNode};

/// How a pod's node and card are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Any that fits.
    Random,
    /// Least CPU and GPU left afterwards, as in the FGD paper's artifact.
    BestFit,
    /// Least GPU left before: gpu-admission's.
    Binpack,
    /// Fragmentation gradient descent, as published.
    Fgd,
    /// Least loss of what requests like these could still use; the extender's `lookahead`.
    Lookahead,
}

/// From where a policy knows which requests usually come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum MixSource {
    /// Given, as in the paper: frequencies in the whole trace.
    #[default]
    Trace,
    /// It learns from the arrivals so far, as the extender does in a cluster.
    Observed,
}

/// Where pods go that ask for no card. In a cluster they never come to the extender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum PlainPods {
    /// Where the policy says, as in the paper.
    #[default]
    Policy,
    /// To the node with the largest part of its CPU left: the default of kube-scheduler (`LeastAllocated`).
    Spread,
}

/// The experiment, but for policy and seed.
#[derive(Clone, Debug)]
pub struct Setup {
    pub nodes: Vec<TraceNode>,
    pub pods: Vec<TracePod>,
    /// Part of the cards that is asked for in the end.
    pub ratio: f64,
    /// Which requests the policies expect.
    pub mix: MixSource,
    /// What chooses for pods without cards.
    pub plain: PlainPods,
}

/// The state of the cluster when so much had arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Point {
    /// Compute asked for so far, in percent of capacity, rounded down.
    pub arrived: u32,
    /// Compute given out, in percent of capacity.
    pub allocated: f64,
    /// Idle compute that the usual request of the trace cannot use, in percent of capacity (see [`Fragmentation`]).
    pub fragmented: f64,
}

/// What came of one replay.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Replay {
    /// One point for every percent of arrival, from 0 on.
    pub points: Vec<Point>,
    pub pods: usize,
    pub skipped: usize,
}

/// How many arrivals an observed mix is learnt from before it is first used; and computed again whenever as many have come again.
const FIRST_LOOK: usize = 250;

impl Setup {
    #[must_use]
    pub fn capacity(&self) -> Cores {
        self.nodes.iter().map(|node| Cores(node.cards * Cores::CARD.0)).sum()
    }

    /// Replays the trace. The same seed gives every policy the same arrivals and the same order of nodes.
    ///
    /// # Errors
    /// [`BindError`] if a score chose what placement or the ledger refuse: a bug.
    pub fn replay(&self, policy: Policy, seed: u64) -> Result<Replay, BindError> {
        let mut chance = generator(seed);
        let order = arrivals(&self.pods, self.capacity(), self.ratio, &mut chance);
        let mut models = Models::default();
        let requests = Requests::of(&self.pods, &mut models);
        let mut nodes: Vec<ReplayNode> = self.nodes.iter().map(|node| node.empty(&mut models)).collect();
        // Ties go to the first node, so that the order in the file must not matter.
        nodes.shuffle(&mut chance);
        let mix: Mix = requests.of_pod.iter().map(|at| requests.all[*at].shape).collect();
        let mut chooser = Chooser::new(policy, self, &nodes, &mix, chance);
        let mut watch = Watch::new(&nodes, Fragmentation::new(&mix), self.capacity());
        let mut skipped = 0;
        for pod in &order {
            let asked = &requests.all[requests.of_pod[*pod]];
            let chosen = chooser.choose(&nodes, asked);
            if let Some((node, card)) = chosen {
                // A pod may come more than once: the holder's name need only be unique on its node and card.
                let holder = format!("{}-{}", self.pods[*pod].name, nodes[node].version());
                nodes[node].bind(&holder, &asked.request, card)?;
                watch.bound(node, &nodes[node], asked);
            } else {
                skipped += 1;
            }
            watch.arrived(asked);
        }
        Ok(Replay { points: watch.finish(), pods: order.len(), skipped })
    }
}

/// Where the next pod goes.
enum Chooser {
    Random(Xoshiro256PlusPlus),
    Scored(Box<Scored>),
}

struct Scored {
    order: ScoringStrategy,
    cache: ScoreCache,
    fleet: Vec<FreeCapacity>,
    plain: PlainPods,
    observed: Option<Mix>,
    seen: usize,
    next_look: usize,
}

impl Chooser {
    fn new(
        policy: Policy,
        setup: &Setup,
        nodes: &[ReplayNode],
        mix: &Mix,
        chance: Xoshiro256PlusPlus,
    ) -> Self {
        let order = match policy {
            Policy::Random => return Self::Random(chance),
            Policy::BestFit => ScoringStrategy::BestFit,
            Policy::Binpack => ScoringStrategy::Binpack,
            Policy::Fgd => ScoringStrategy::Fragmentation,
            Policy::Lookahead => ScoringStrategy::Lookahead,
        };
        let observed = (setup.mix == MixSource::Observed).then(Mix::default);
        let fleet: Vec<FreeCapacity> = nodes.iter().map(ReplayNode::capacity).collect();
        let scorer = Scorer::new(order, observed.as_ref().unwrap_or(mix), &fleet);
        let cache = ScoreCache::new(scorer, fleet.len());
        let plain = setup.plain;
        Self::Scored(Box::new(Scored {
            order,
            cache,
            fleet,
            plain,
            observed,
            seen: 0,
            next_look: FIRST_LOOK,
        }))
    }

    fn choose(&mut self, nodes: &[ReplayNode], asked: &Asked) -> Option<(usize, Option<CardIndex>)> {
        match self {
            Self::Random(chance) => random(nodes, asked, chance),
            Self::Scored(scored) => {
                scored.learn(asked);
                if asked.shape.request == CardRequest::Nothing && scored.plain == PlainPods::Spread {
                    return emptiest(nodes, &scored.fleet, asked);
                }
                scored.best(nodes, asked)
            }
        }
    }
}

impl Scored {
    fn best(&mut self, nodes: &[ReplayNode], asked: &Asked) -> Option<(usize, Option<CardIndex>)> {
        let mut row = self.cache.row(&asked.shape);
        let mut best: Option<(usize, Option<CardIndex>, f64)> = None;
        for (at, node) in nodes.iter().enumerate() {
            let capacity = || node.fits(&asked.request).then(|| node.capacity());
            let Some(choice) = row.choose(at, node.version(), capacity) else { continue };
            if best.is_none_or(|(_, _, score)| choice.score > score) {
                best = Some((at, choice.card, choice.score));
            }
        }
        best.map(|(node, card, _)| (node, card))
    }

    fn learn(&mut self, asked: &Asked) {
        let Some(mix) = &mut self.observed else { return };
        mix.count(asked.shape);
        self.seen += 1;
        if self.seen == self.next_look {
            self.next_look *= 2;
            self.cache = ScoreCache::new(Scorer::new(self.order, mix, &self.fleet), self.fleet.len());
        }
    }
}

fn random(
    nodes: &[ReplayNode],
    asked: &Asked,
    chance: &mut Xoshiro256PlusPlus,
) -> Option<(usize, Option<CardIndex>)> {
    let fitting: Vec<usize> = (0..nodes.len()).filter(|at| nodes[*at].fits(&asked.request)).collect();
    let at = *fitting.get(chance.random_range(0..fitting.len().max(1)))?;
    let card = match asked.shape.request {
        CardRequest::Share { cores, blocks } => {
            let cards: Vec<CardIndex> = nodes[at]
                .cards()
                .iter()
                .filter(|card| card.fits(cores, blocks))
                .map(|card| card.index)
                .collect();
            cards.get(chance.random_range(0..cards.len().max(1))).copied()
        }
        CardRequest::Nothing | CardRequest::Cards { .. } => None,
    };
    Some((at, card))
}

fn emptiest(
    nodes: &[ReplayNode],
    fleet: &[FreeCapacity],
    asked: &Asked,
) -> Option<(usize, Option<CardIndex>)> {
    let part = |at: usize| f64::from(nodes[at].host().cpu_milli) / f64::from(fleet[at].host.cpu_milli.max(1));
    let fitting = (0..nodes.len()).filter(|at| nodes[*at].fits(&asked.request));
    fitting.reduce(|best, other| if part(other) > part(best) { other } else { best }).map(|at| (at, None))
}

/// Counts. Fragmentation is measured again for the node that changed, not for all.
struct Watch {
    measure: Fragmentation,
    of_node: Vec<f64>,
    capacity: f64,
    asked: u64,
    given: u64,
    points: Vec<Point>,
}

impl Watch {
    fn new(nodes: &[ReplayNode], measure: Fragmentation, capacity: Cores) -> Self {
        let of_node = nodes.iter().map(|node| measure.of(&node.capacity())).collect();
        Self {
            measure,
            of_node,
            capacity: f64::from(capacity.0.max(1)),
            asked: 0,
            given: 0,
            points: Vec::new(),
        }
    }

    fn bound(&mut self, at: usize, node: &ReplayNode, asked: &Asked) {
        self.given += u64::from(asked.shape.request.cores());
        self.of_node[at] = self.measure.of(&node.capacity());
    }

    fn arrived(&mut self, asked: &Asked) {
        self.asked += u64::from(asked.shape.request.cores());
        self.note();
    }

    /// The last state at or below each percent of arrival counts, as in the paper's analysis.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)] // percents
    fn note(&mut self) {
        let now = self.now();
        // A point is for all that arrived up to its percent, not beyond.
        let percent = (self.asked as f64 / self.capacity * 100.0).ceil() as u32;
        while self.points.len() <= percent as usize {
            let arrived = self.points.len() as u32;
            let last = self.points.last().copied().unwrap_or_default();
            self.points.push(Point { arrived, ..last });
        }
        self.points[percent as usize] = Point { arrived: percent, ..now };
    }

    #[allow(clippy::cast_precision_loss)] // far below 2^52 cores
    fn now(&self) -> Point {
        let fragmented: f64 = self.of_node.iter().sum();
        Point {
            arrived: 0,
            allocated: self.given as f64 / self.capacity * 100.0,
            fragmented: fragmented / self.capacity * 100.0,
        }
    }

    fn finish(self) -> Vec<Point> {
        self.points
    }
}
