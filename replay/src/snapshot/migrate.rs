//! The migration, pod by pod: taken off, rewritten, placed again.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet};
use std::rc::Rc;

use gpu_migrate_model::ask::{ContainerAsk, ContainerKind, Demand, PodKind};
use gpu_migrate_model::names;
use gpu_migrate_model::place::Constraints;
use gpu_migrate_model::score::{Choice, Mix, ScoreCache, Scorer, ScoringStrategy, Shape};
use gpu_migrate_model::units::{Blocks, Cores};
use gpu_migrate_webhook::obstacles::ClusterFacts;
use gpu_migrate_webhook::plan::{Subject, rewrite_template};
use k8s_openapi::api::core::v1::{Pod, PodSpec};
use serde_json::{Value, json};

use super::cluster::{ClusterState, Usage};
use super::node_fit::{Mismatch, node_accepts};
use super::plan::Plan;
use super::read::{Snapshot, SnapshotPod};
use crate::node::{BindError, ReplayNode, Request};

#[derive(Clone, Debug, Default, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Gain {
    pub plan: String,
    pub before: Usage,
    /// When every workload has moved that can.
    pub after: Usage,
    /// Pods that wait for a card now, and those of them that find one afterwards.
    pub waiting: (u32, u32),
    /// Every workload that holds or wants legacy cards.
    pub workloads: Vec<Workload>,
    /// The same by project, in order of their names.
    pub projects: Vec<Project>,
    pub map: Map,
    /// What does not add up in the snapshot.
    pub notes: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Workload {
    pub namespace: String,
    /// `Deployment/name`.
    pub name: String,
    /// Its running pods that hold legacy cards.
    pub pods: u32,
    pub cards: u32,
    pub moved: u32,
    /// What one pod asks for when moved.
    pub becomes: Option<String>,
    /// Why the others stay, and how many.
    pub stays: BTreeMap<String, u32>,
}

/// The pods of a project that hold or want legacy cards; of a namespace, where neither it nor they name a project.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Project {
    /// `danlu`, or `namespace team`.
    pub name: String,
    /// Those that run.
    pub pods: u32,
    pub moved: u32,
    /// That they hold now.
    pub cards: u32,
    /// What they request afterwards, in cards.
    pub cards_after: f64,
    /// Pods that wait for a card now, and those of them that find one afterwards.
    pub waiting: (u32, u32),
}

/// The cards of each node, one sign a card: `·` free, `L` legacy, `1` to `9` tenths that shares hold, `#` all.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Map {
    pub before: Vec<String>,
    /// When every workload has moved that can.
    pub after: Vec<String>,
}

/// A pod as it would be after its rewrite.
struct Rewritten {
    request: Request,
    shape: Option<Shape>,
    /// Which nodes may take it.
    nodes: Rc<Accepting>,
    /// Equal ones are placed alike.
    kind: PlaceKey,
}

/// The nodes that pods of one selector, affinity and set of tolerations may run on.
struct Accepting {
    number: usize,
    by_node: Vec<Result<(), Mismatch>>,
}

/// Which nodes; and the shape, or where there is none the template.
type PlaceKey = (usize, Result<Shape, (usize, usize)>);

type Legacy<'s> = (&'s SnapshotPod, Rc<Result<Rewritten, String>>);

/// Runs a plan on a snapshot.
///
/// # Errors
/// [`BindError`] if a score chose what placement or the ledger refuse: a bug.
pub fn migrate(snapshot: &Snapshot, plan: &Plan, order: ScoringStrategy) -> Result<Gain, BindError> {
    let (cluster, mut notes) = ClusterState::of(snapshot);
    let mut rewriter = Rewriter::new(snapshot, plan);
    let legacy = snapshot.pods.iter().filter(|pod| pod.kind() == Some(PodKind::Legacy));
    let legacy: Vec<Legacy<'_>> = legacy.map(|pod| (pod, rewriter.rewrite(pod))).collect();
    let (now, then) = mixes(snapshot, &legacy);
    let before = cluster.usage(&now);
    let cache =
        ScoreCache::new(Scorer::new(order, &then, &ClusterState::fleet(snapshot)), snapshot.nodes.len());
    let (places, refused) = (HashMap::new(), HashMap::new());
    let mut mover = Mover { snapshot, cluster, cache, places, refused, changes: Vec::new() };
    let mut workloads: BTreeMap<(&str, &str), Workload> = BTreeMap::new();
    let mut projects: BTreeMap<String, Project> = BTreeMap::new();
    let map_before = mover.cluster.map();
    for (pod, rewritten) in legacy.iter().filter(|(pod, _)| pod.node.is_some()) {
        let Some(home) = mover.cluster.home(pod) else {
            notes.push(format!("pod {}: its node is not among those with cards", pod.key));
            continue;
        };
        let entry = workloads.entry((pod.namespace.as_str(), pod.workload.as_str())).or_default();
        let cards = pod.template.ask.effective().legacy;
        entry.pods += 1;
        entry.cards += cards;
        let project = projects.entry(owner(pod, snapshot, plan)).or_default();
        project.pods += 1;
        project.cards += cards;
        let moved = match rewritten.as_ref() {
            Ok(rewritten) => mover.move_pod(pod, home, rewritten)?.map(|()| rewritten),
            Err(why) => Err(why.clone()),
        };
        match moved {
            Ok(rewritten) => {
                let becomes = rewritten.request.ask.effective();
                entry.moved += 1;
                entry.becomes = Some(becomes.to_string());
                project.moved += 1;
                project.cards_after += f64::from(becomes.cores.0) / f64::from(Cores::CARD.0);
            }
            Err(why) => {
                *entry.stays.entry(why).or_default() += 1;
                project.cards_after += f64::from(cards);
            }
        }
    }
    // What waits now starts last, so that what moving gives and what is made of it can be told apart.
    let after = mover.cluster.usage(&then);
    let map = Map { before: map_before, after: mover.cluster.map() };
    let mut waiting = (0, 0);
    for (pod, starts) in mover.start_waiting(&legacy)? {
        let project = projects.entry(owner(pod, snapshot, plan)).or_default();
        for count in [&mut waiting, &mut project.waiting] {
            *count = (count.0 + 1, count.1 + u32::from(starts));
        }
    }
    let named = workloads.into_iter().map(|((namespace, name), workload)| Workload {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        ..workload
    });
    let workloads = named.collect();
    let projects = projects.into_iter().map(|(name, project)| Project { name, ..project }).collect();
    Ok(Gain { plan: plan.label.clone(), before, after, waiting, workloads, projects, map, notes })
}

/// Whose a pod is: its project, as the webhook sees it, or else its namespace.
fn owner(pod: &SnapshotPod, snapshot: &Snapshot, plan: &Plan) -> String {
    let own =
        pod.template.value.pointer("/metadata/labels").and_then(|labels| labels[names::PROJECT].as_str());
    let labels = plan.namespaces.get(&pod.namespace).or_else(|| snapshot.namespaces.get(&pod.namespace));
    let label = |key: &str| labels.and_then(|labels| labels.get(key)).map(String::as_str);
    let project = names::project_of(own, label(names::PROJECT), label(names::FIXED_PROJECT));
    project.map_or_else(|| format!("namespace {}", pod.namespace), str::to_owned)
}

/// The requests of all pods that ask for cards, as they are and as they would be: what fragmentation is measured by.
fn mixes(snapshot: &Snapshot, legacy: &[Legacy<'_>]) -> (Mix, Mix) {
    let shape_of = |pod: &SnapshotPod| {
        let ask = Some(&pod.template.ask).filter(|ask| ask.kind() != PodKind::Plain)?;
        Shape::of(ask).map(|shape| Shape { host: pod.host(), ..shape })
    };
    let now: Mix = snapshot.pods.iter().filter_map(shape_of).collect();
    let shared = snapshot.pods.iter().filter(|pod| pod.kind() != Some(PodKind::Legacy));
    let moved = legacy.iter().filter_map(|(pod, rewritten)| match rewritten.as_ref() {
        Ok(rewritten) => rewritten.shape,
        Err(_) => shape_of(pod),
    });
    (now, shared.filter_map(shape_of).chain(moved).collect())
}

/// What the webhook makes of pods when they are created again: worked out once for those that are equal.
struct Rewriter<'s> {
    snapshot: &'s Snapshot,
    plan: &'s Plan,
    products: HashMap<&'s str, &'s str>,
    /// By template and product.
    known: HashMap<(usize, &'s str), Rc<Result<Rewritten, String>>>,
    accepting: HashMap<String, Rc<Accepting>>,
}

impl<'s> Rewriter<'s> {
    fn new(snapshot: &'s Snapshot, plan: &'s Plan) -> Self {
        let products = snapshot.nodes.iter().map(|node| (node.name.as_str(), node.product.as_str()));
        let (products, known) = (products.collect(), HashMap::new());
        Self { snapshot, plan, products, known, accepting: HashMap::new() }
    }

    fn rewrite(&mut self, pod: &SnapshotPod) -> Rc<Result<Rewritten, String>> {
        // One ratio for all gives a part of the card that the pod has now, although it may run on another product later.
        let node = pod.node.as_deref().filter(|_| self.plan.everywhere.is_some());
        let product = node.and_then(|node| self.products.get(node)).copied().unwrap_or_default();
        if let Some(known) = self.known.get(&(pod.template.number, product)) {
            return Rc::clone(known);
        }
        let made = Rc::new(self.make(pod, product));
        self.known.insert((pod.template.number, product), Rc::clone(&made));
        made
    }

    fn make(&mut self, pod: &SnapshotPod, product: &str) -> Result<Rewritten, String> {
        let plan = self.plan;
        let mut value = pod.template.value.clone();
        // Where one ratio is tried for all, the pod's own project is not looked at.
        if plan.everywhere.is_some()
            && let Some(labels) = value.pointer_mut("/metadata/labels").and_then(Value::as_object_mut)
        {
            labels.remove(names::PROJECT);
        }
        let mut asked = value.clone();
        if !product.is_empty()
            && asked
                .pointer("/spec/nodeSelector")
                .is_none_or(|selector| selector.get(names::GPU_PRODUCT).is_none())
        {
            asked["spec"]["nodeSelector"][names::GPU_PRODUCT] = product.into();
        }
        let subject = Subject {
            namespace: &pod.namespace,
            namespace_labels: plan.everywhere.as_ref().or_else(|| plan.namespaces.get(&pod.namespace)),
            controller: None,
            cluster: &ClusterFacts::default(),
        };
        let rewrite = rewrite_template(&asked, &subject, &plan.policies).map_err(|why| why.to_string())?;
        if rewrite.changes.is_empty() || rewrite.patch.is_empty() {
            return Err(rewrite.outcome.to_string());
        }
        json_patch::patch(&mut value, &rewrite.patch).map_err(|why| why.to_string())?;
        let rewritten: Pod = serde_json::from_value(value).map_err(|why| why.to_string())?;
        let spec = rewritten.spec.unwrap_or_default();
        let mut ask = pod.template.ask.clone();
        for change in &rewrite.changes {
            let of_change = |one: &&mut ContainerAsk| {
                one.name == change.container && (one.kind != ContainerKind::App) == change.init
            };
            // In cores and blocks, whichever system's words are in the pod.
            if let Some(one) = ask.containers.iter_mut().find(of_change) {
                one.demand = Demand { legacy: 0, cores: Cores(change.cores), blocks: Blocks(change.blocks) };
            }
        }
        if ask.kind() != PodKind::Shared {
            return Err(rewrite.outcome.to_string());
        }
        let shape = Shape::of(&ask).map(|shape| Shape { host: pod.host(), ..shape });
        let nodes = self.accepting(&spec);
        let kind = (nodes.number, shape.ok_or((pod.template.number, self.known.len())));
        let request = Request { ask, constraints: Constraints::default(), host: pod.host() };
        Ok(Rewritten { request, shape, nodes, kind })
    }

    fn accepting(&mut self, spec: &PodSpec) -> Rc<Accepting> {
        let key = json!([spec.node_selector, spec.affinity, spec.tolerations]).to_string();
        let number = self.accepting.len();
        let nodes = &self.snapshot.nodes;
        let made = self.accepting.entry(key).or_insert_with(|| {
            let by_node = nodes.iter().map(|node| node_accepts(node, spec)).collect();
            Rc::new(Accepting { number, by_node })
        });
        Rc::clone(made)
    }
}

/// A place for pods of one kind.
#[derive(Clone, Copy, Debug)]
struct Place {
    choice: Choice,
    at: usize,
    /// Of the node, when it was looked at.
    version: u64,
}

/// By score; of equal ones the first node.
impl Ord for Place {
    fn cmp(&self, other: &Self) -> Ordering {
        self.choice.score.total_cmp(&other.choice.score).then(other.at.cmp(&self.at))
    }
}

impl PartialOrd for Place {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Place {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Place {}

/// The places for pods of one kind, best first; those of nodes that have changed since are among them until they are seen.
#[derive(Default)]
struct Places {
    best_first: BinaryHeap<Place>,
    /// Version at which each node was looked at.
    versions: Vec<Option<u64>>,
    /// How many of the changes were looked at.
    seen: usize,
}

/// Of so many kinds places are kept.
const PLACES: usize = 256;

/// The cluster while the migration goes on.
struct Mover<'s> {
    snapshot: &'s Snapshot,
    cluster: ClusterState,
    cache: ScoreCache,
    places: HashMap<PlaceKey, Places>,
    /// Why no node took the first pod of a kind that none took.
    refused: HashMap<PlaceKey, String>,
    /// Nodes that something was put on or taken off, in order.
    changes: Vec<usize>,
}

impl Mover<'_> {
    /// Moves one pod, or leaves it where it is and says why.
    fn move_pod(
        &mut self,
        pod: &SnapshotPod,
        home: usize,
        rewritten: &Rewritten,
    ) -> Result<Result<(), String>, BindError> {
        self.cluster.nodes[home].release(&pod.key, pod.host());
        self.changes.push(home);
        let placed = self.place(pod, rewritten)?;
        if placed.is_err() {
            self.cluster.place_running(home, pod);
            self.changes.push(home);
        }
        Ok(placed)
    }

    /// Pods without a node, and whether they find a place.
    fn start_waiting<'p>(
        &mut self,
        legacy: &[Legacy<'p>],
    ) -> Result<Vec<(&'p SnapshotPod, bool)>, BindError> {
        let mut waiting = Vec::new();
        // Nothing is freed any more: what found no place finds none later.
        let mut none = HashSet::new();
        for (pod, rewritten) in legacy.iter().filter(|(pod, _)| pod.node.is_none()) {
            let starts = match rewritten.as_ref() {
                Ok(rewritten) => self.place(pod, rewritten)?.is_ok(),
                // It stays a legacy pod: what was freed starts it all the same.
                Err(_) => !none.contains(&pod.template.number) && self.place_whole(pod),
            };
            if !starts {
                none.insert(pod.template.number);
            }
            waiting.push((*pod, starts));
        }
        Ok(waiting)
    }

    /// Places a legacy pod on whole free cards, on the node that keeps the fewest of them.
    fn place_whole(&mut self, pod: &SnapshotPod) -> bool {
        let cards = pod.template.ask.effective().legacy;
        let free = |at: usize| {
            let node = &self.cluster.nodes[at];
            let free = node.cards().iter().filter(|card| card.is_free()).count();
            (node.host().has(pod.host()) && free >= cards as usize).then_some(free)
        };
        let known = self.snapshot.nodes.iter().enumerate();
        let known = known.filter(|(_, node)| node_accepts(node, &pod.template.spec).is_ok());
        let best = known.filter_map(|(at, _)| Some((free(at)?, at))).min();
        best.is_some_and(|(_, at)| {
            self.changes.push(at);
            self.cluster.nodes[at].place_legacy(&pod.key, cards, pod.host()) == 0
        })
    }

    /// Places a shared pod on the best node, as filter, prioritize and bind do.
    fn place(&mut self, pod: &SnapshotPod, rewritten: &Rewritten) -> Result<Result<(), String>, BindError> {
        let Some((at, choice)) = self.best(rewritten) else {
            let why = self.refused.get(&rewritten.kind).cloned().unwrap_or_else(|| self.why_none(rewritten));
            self.refused.insert(rewritten.kind, why.clone());
            return Ok(Err(why));
        };
        self.cluster.nodes[at].bind(&pod.key, &rewritten.request, choice.card)?;
        self.changes.push(at);
        Ok(Ok(()))
    }

    fn best(&mut self, pod: &Rewritten) -> Option<(usize, Choice)> {
        let nodes = &self.cluster.nodes;
        if self.places.len() >= PLACES && !self.places.contains_key(&pod.kind) {
            self.places.clear();
        }
        let is_new = !self.places.contains_key(&pod.kind);
        let places = self.places.entry(pod.kind).or_default();
        if is_new {
            places.versions = vec![None; nodes.len()];
            places.seen = self.changes.len();
        }
        let all = if is_new { 0..nodes.len() } else { 0..0 };
        let changed = self.changes.get(places.seen..).unwrap_or_default().iter().copied();
        places.seen = self.changes.len();
        for at in all.chain(changed) {
            let version = Some(nodes[at].version());
            if pod.nodes.by_node[at].is_err() || places.versions[at] == version {
                continue;
            }
            places.versions[at] = version;
            let choice = look(&mut self.cache, at, &nodes[at], pod);
            places.best_first.extend(choice.map(|choice| Place { choice, at, version: nodes[at].version() }));
        }
        while let Some(place) = places.best_first.peek() {
            if place.version == nodes[place.at].version() {
                return Some((place.at, place.choice));
            }
            places.best_first.pop();
        }
        None
    }

    /// Why no node takes a pod.
    fn why_none(&self, pod: &Rewritten) -> String {
        let mut refused: BTreeMap<String, u32> = BTreeMap::new();
        for (node, accepts) in self.cluster.nodes.iter().zip(&pod.nodes.by_node) {
            let why = match accepts {
                Err(Mismatch::Selector) => "not selected by node selector or affinity".to_owned(),
                Err(Mismatch::Taint) => "taint not tolerated".to_owned(),
                Ok(()) => match node.place(&pod.request) {
                    Err(refusal) => refusal.to_string(),
                    Ok(_) => "too little CPU or memory".to_owned(),
                },
            };
            *refused.entry(why).or_default() += 1;
        }
        reasons(self.snapshot.nodes.len(), &refused)
    }
}

/// The place for a pod on a node.
fn look(cache: &mut ScoreCache, at: usize, node: &ReplayNode, pod: &Rewritten) -> Option<Choice> {
    match &pod.shape {
        Some(shape) => {
            let capacity = || node.fits(&pod.request).then(|| node.capacity());
            cache.row(shape).choose(at, node.version(), capacity)
        }
        // Several containers: by how full the node is, for want of one shape.
        None => {
            node.fits(&pod.request).then(|| Choice { card: None, score: -f64::from(node.capacity().cores()) })
        }
    }
}

/// As kube-scheduler says it: counted by reason, most frequent first.
fn reasons(nodes: usize, refused: &BTreeMap<String, u32>) -> String {
    let mut counted: Vec<(&String, &u32)> = refused.iter().collect();
    counted.sort_by_key(|(why, count)| (std::cmp::Reverse(**count), (*why).clone()));
    let parts: Vec<String> = counted.into_iter().map(|(why, count)| format!("{count} × {why}")).collect();
    format!("fits on none of {nodes} nodes as a shared pod: {}", parts.join("; "))
}
