//! A pod as the index keeps it: a few hundred bytes, whatever the object weighs.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::sync::Arc;

use gpu_migrate_model::annotation::{self, Choice};
use gpu_migrate_model::ask::{AskError, ContainerAsk, Demand, PodAsk, PodKind};
use gpu_migrate_model::capacity::RequestSummary;
use gpu_migrate_model::evaluate::CardOrder;
use gpu_migrate_model::names::{self, Dialect};
use gpu_migrate_model::place::{Constraints, Placement};
use gpu_migrate_model::score::HostResources;
use gpu_migrate_model::units::{Blocks, CardIndex};
use gpu_migrate_model::view::PodView;
use gpu_migrate_model::view::json::Map;

use crate::engine::is_our_refusal;

/// Which card a container has: its place in [`PodAsk::containers`], and the card. Ordered by container.
pub type Cards = Box<[(u16, CardIndex)]>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    pub dialect: Dialect,
    /// Whole cards must have the memory that is asked for. gpu-admission does not look (`pkg/algorithm/exclusive.go`).
    pub whole_card_memory: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self { dialect: Dialect::default(), whole_card_memory: true }
    }
}

/// What placement needs of a pod.
#[derive(Clone, Debug)]
pub struct PodFacts {
    pub uid: Arc<str>,
    pub namespace: Arc<str>,
    pub name: Arc<str>,
    /// What it asks for. An ask that makes no sense is kept as the text that says why.
    pub ask: Result<PodAsk, String>,
    /// Which kind of pod it is.
    pub kind: PodKind,
    /// What it requests of its node beside cards.
    pub host: HostResources,
    /// Node it is bound to.
    pub node: Option<Arc<str>>,
    /// Cards from its annotations: of the extender for shared pods, of the bridge for legacy ones.
    pub cards: Cards,
    /// What it demands of its cards beside capacity.
    pub constraints: Constraints,
    /// Gang, where it is in one.
    pub gang: Option<GangRef>,
    /// A gang's scheduling gate is on it.
    pub gated: bool,
    /// A scheduling gate of somebody else is on it.
    pub gated_by_others: bool,
    /// Name of its scheduler.
    pub scheduler: Arc<str>,
    /// The scheduler's own rules (CPU, taints, affinity, …) leave it no node: the extender was not even asked.
    pub unschedulable: bool,
    /// Of its PriorityClass; 0 where it has none.
    pub priority: i32,
    /// Node on which preemption makes room for it.
    pub nominated: Option<Arc<str>>,
    /// UID of its controller.
    pub owner: Option<Arc<str>>,
    /// The same for pods that fit on the same nodes: what they ask for, of which nodes and cards, in which namespace.
    pub group: u64,
    /// Labels that its node must have.
    pub node_selector: BTreeMap<String, String>,
    pub leaving: bool,
    /// Context of its trace (`traceparent`), where there is one.
    pub trace: Option<Arc<str>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GangRef {
    /// Namespace and name.
    pub key: Arc<str>,
    /// How many members there are; 0 while the PodGroup that says so has not been read.
    pub size: u32,
    /// Whose PodGroup says how many members there are; `None` where the pod says it.
    pub group: Option<PodGroups>,
}

/// The custom resources `podgroups` with `spec.minMember`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PodGroups {
    /// Of kubernetes-sigs/scheduler-plugins.
    SchedulerPlugins,
    Volcano,
}

impl PodGroups {
    #[must_use]
    pub fn api_version(self) -> &'static str {
        match self {
            Self::SchedulerPlugins => "scheduling.x-k8s.io/v1alpha1",
            Self::Volcano => "scheduling.volcano.sh/v1beta1",
        }
    }
}

/// How many members a gang may have.
pub const GANG_SIZES: std::ops::RangeInclusive<u32> = 1..=10_000;

impl PodFacts {
    /// Reads `pod`. Never fails: what cannot be read is said in [`PodFacts::ask`], and such a pod is never placed.
    #[must_use]
    pub fn read(pod: &PodView<'_>, rules: &Rules) -> Self {
        let gang = read_gang(pod);
        let constraints = read_constraints(pod);
        let ask = match (read_ask(pod, rules), &gang, &constraints) {
            (Ok(_), Err(problem), _) | (Ok(_), _, Err(problem)) => Err(problem.clone()),
            (ask, ..) => ask.map_err(|error| error.to_string()),
        };
        let kind = match &ask {
            Ok(ask) => ask.kind(),
            Err(_) => PodKind::Mixed,
        };
        let cards = ask.as_ref().map(|ask| read_cards(pod, ask, kind)).unwrap_or_default();
        let constraints = constraints.unwrap_or_default();
        let node_selector: BTreeMap<String, String> = pod
            .spec
            .node_selector
            .iter()
            .flat_map(Map::iter)
            .map(|(k, v)| (k.to_owned(), v.to_string()))
            .collect();
        let asked: Vec<_> =
            ask.iter().flat_map(|ask| &ask.containers).map(|it| (it.kind, it.demand)).collect();
        let group = group(&(kind, asked, &constraints, &node_selector, pod.namespace()));
        Self {
            uid: Arc::from(&*pod.metadata.uid),
            namespace: Arc::from(pod.namespace()),
            name: Arc::from(&*pod.metadata.name),
            kind,
            host: HostResources::requested(&pod.spec),
            node: pod.node().map(Arc::from),
            cards,
            constraints,
            gang: gang.ok().flatten(),
            gated: pod.is_gated(),
            gated_by_others: pod.is_gated_by_others(),
            scheduler: Arc::from(scheduler(pod)),
            unschedulable: is_unschedulable(pod),
            priority: pod.spec.priority.unwrap_or(0),
            nominated: pod
                .status
                .nominated_node_name
                .as_deref()
                .filter(|name| !name.is_empty())
                .map(Arc::from),
            owner: owner(pod),
            node_selector,
            group,
            leaving: pod.metadata.deletion_timestamp.is_some(),
            trace: pod.metadata.annotation(names::TRACEPARENT).map(Arc::from),
            ask,
        }
    }

    /// Whether any container names one of our resources, also with 0: only such pods come to an extender.
    #[must_use]
    pub fn concerns(pod: &PodView<'_>, rules: &Rules) -> bool {
        let dialect = &rules.dialect;
        let ours = [dialect.legacy.as_str(), &dialect.cores, &dialect.memory];
        pod.containers().any(|(_, container)| container.resource_names().any(|name| ours.contains(&name)))
    }

    /// The containers that ask for cards, with their place in [`PodAsk::containers`].
    pub fn asking(&self) -> impl Iterator<Item = (u16, &ContainerAsk)> {
        let all = self.ask.iter().flat_map(|ask| ask.containers.iter().enumerate());
        all.filter(|(_, container)| !container.demand.is_none())
            .filter_map(|(at, container)| Some((u16::try_from(at).ok()?, container)))
    }

    /// What the fast fit needs of it.
    #[must_use]
    pub fn summary(&self) -> RequestSummary {
        let ask = self.ask.as_ref();
        ask.map_or(RequestSummary::Complex, |ask| RequestSummary::of(ask, &self.constraints))
    }

    /// What the pod asks for as a whole.
    #[must_use]
    pub fn demand(&self) -> Demand {
        self.ask.as_ref().map(PodAsk::effective).unwrap_or_default()
    }

    /// `namespace/name`, for messages.
    #[must_use]
    pub fn shown(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

/// The cards of the container at `at`.
pub fn cards_of(cards: &Cards, at: u16) -> impl Iterator<Item = CardIndex> + '_ {
    cards.iter().filter(move |(container, _)| *container == at).map(|(_, card)| *card)
}

/// A [`Placement`] in the index's form.
#[must_use]
pub fn compact(placement: &Placement) -> Cards {
    let all = placement.containers.iter();
    let flat =
        all.flat_map(|(at, cards)| cards.iter().map(|card| (u16::try_from(*at).unwrap_or(u16::MAX), *card)));
    flat.collect()
}

/// The choice that goes into the Binding: `cards` by the names of the containers.
#[must_use]
pub fn choice(cards: &Cards, ask: &PodAsk, node: &str, time: u128) -> Choice {
    let mut by_name = BTreeMap::<String, Vec<CardIndex>>::new();
    for (at, card) in cards {
        if let Some(container) = ask.containers.get(usize::from(*at)) {
            by_name.entry(container.name.clone()).or_default().push(*card);
        }
    }
    Choice { node: node.to_owned(), time, cards: by_name }
}

fn group(of: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// `default-scheduler` where none is written.
fn scheduler<'p>(pod: &'p PodView<'_>) -> &'p str {
    pod.spec.scheduler_name.as_deref().filter(|name| !name.is_empty()).unwrap_or("default-scheduler")
}

fn owner(pod: &PodView<'_>) -> Option<Arc<str>> {
    pod.metadata.controller().map(|owner| Arc::from(&*owner.uid))
}

/// Whether its scheduler found no node for it although the extender refused none: the reasons that the scheduler writes into
/// the condition, one for each kind of node, are all its own.
fn is_unschedulable(pod: &PodView<'_>) -> bool {
    pod.status.conditions.iter().flatten().any(|condition| {
        &*condition.type_ == "PodScheduled"
            && &*condition.status == "False"
            && condition.reason.as_deref() == Some("Unschedulable")
            && condition.message.as_deref().is_some_and(|message| !is_our_refusal(message))
    })
}

/// A gang of which a member has succeeded, and the UID of that member's controller.
pub fn succeeded_member(pod: &PodView<'_>) -> Option<(Arc<str>, Option<Arc<str>>)> {
    let gang = read_gang(pod).ok().flatten().filter(|_| &*pod.status.phase == "Succeeded")?;
    Some((gang.key, owner(pod)))
}

fn read_ask(pod: &PodView<'_>, rules: &Rules) -> Result<PodAsk, AskError> {
    let mut ask = PodAsk::read(&pod.spec, &rules.dialect)?;
    if !rules.whole_card_memory {
        let whole = |container: &&mut ContainerAsk| container.demand.cores.whole_cards().is_some();
        ask.containers.iter_mut().filter(whole).for_each(|container| container.demand.blocks = Blocks::ZERO);
    }
    Ok(ask)
}

fn read_gang(pod: &PodView<'_>) -> Result<Option<GangRef>, String> {
    let annotation = |key| pod.metadata.annotation(key).filter(|name| !name.is_empty());
    let label = |key| pod.metadata.label(key).filter(|name| !name.is_empty());
    let gang = |name: &str, size, group| {
        Ok(Some(GangRef { key: format!("{}/{name}", pod.namespace()).into(), size, group }))
    };
    let own = (annotation(names::GANG_NAME), names::GANG_SIZE);
    let kueue = (label(names::KUEUE_GROUP), names::KUEUE_GROUP_SIZE);
    for (name, key) in [own, kueue] {
        match (name, annotation(key)) {
            (Some(name), Some(size)) => {
                return match size.trim().parse::<u32>() {
                    Ok(size) if GANG_SIZES.contains(&size) => gang(name, size, None),
                    _ => Err(format!(
                        "annotation {key}: {size:?}: expected a number from 1 to {}",
                        GANG_SIZES.end()
                    )),
                };
            }
            (None, Some(_)) => {
                return Err(format!("annotation {key}: expected the name of the group beside it"));
            }
            (_, None) => {}
        }
    }
    if kueue.0.is_some() {
        return Err(format!(
            "annotation {}: expected the number of the group's pods",
            names::KUEUE_GROUP_SIZE
        ));
    }
    if let Some(name) = label(names::SCHEDULER_PLUGINS_GROUP) {
        return gang(name, 0, Some(PodGroups::SchedulerPlugins));
    }
    match own.0.or_else(|| annotation(names::VOLCANO_GROUP)) {
        Some(name) => gang(name, 0, Some(PodGroups::Volcano)),
        None => Ok(None),
    }
}

fn read_cards(pod: &PodView<'_>, ask: &PodAsk, kind: PodKind) -> Cards {
    let mut cards = Vec::new();
    for (at, container) in
        ask.containers.iter().enumerate().filter(|(_, container)| !container.demand.is_none())
    {
        let key = match kind {
            PodKind::Legacy => format!("{}{}", names::LEGACY_CARDS_PREFIX, container.name),
            _ => annotation::card_key(container),
        };
        let Some(value) = pod.metadata.annotation(&key) else { continue };
        match annotation::read_cards(&key, value) {
            Ok(read) => {
                cards.extend(read.into_iter().map(|card| (u16::try_from(at).unwrap_or(u16::MAX), card)));
            }
            // The pod then counts as one whose cards are not known, which is the safe side.
            Err(error) => {
                tracing::warn!(pod = %&*pod.metadata.name, namespace = pod.namespace(), %error, "cards unknown");
            }
        }
    }
    cards.into()
}

/// Reads the constraints of `pod`, or says which annotation makes no sense.
fn read_constraints(pod: &PodView<'_>) -> Result<Constraints, String> {
    let get = |key: &str| pod.metadata.annotation(key).map(str::trim);
    let list = |key: &str| -> Vec<String> {
        let items = get(key).into_iter().flat_map(|list| list.split(',')).map(str::trim);
        items.filter(|item| !item.is_empty()).map(str::to_owned).collect()
    };
    let order = match get(names::CARD_ORDER) {
        None | Some("binpack") => CardOrder::Binpack,
        Some("spread") => CardOrder::Spread,
        Some(other) => {
            return Err(format!("annotation {}: {other:?}: expected binpack or spread", names::CARD_ORDER));
        }
    };
    let same_numa = match get(names::SAME_NUMA) {
        None | Some("false") => false,
        Some("true") => true,
        Some(other) => {
            return Err(format!("annotation {}: {other:?}: expected true or false", names::SAME_NUMA));
        }
    };
    Ok(Constraints {
        models: list(names::CARD_MODEL),
        include: list(names::CARD_INCLUDE),
        exclude: list(names::CARD_EXCLUDE),
        same_numa,
        order,
    })
}
