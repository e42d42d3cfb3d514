//! The migration, pod by pod: taken off, rewritten, placed again.

use std::collections::BTreeMap;

use gpu_migrate_model::ask::{AskError, PodAsk, PodKind};
use gpu_migrate_model::names::{self, Dialect};
use gpu_migrate_model::place::Constraints;
use gpu_migrate_model::score::{Choice, Mix, ScoreCache, Scorer, ScoringStrategy, Shape};
use gpu_migrate_webhook::obstacles::ClusterFacts;
use gpu_migrate_webhook::plan::{Subject, rewrite_template};
use k8s_openapi::api::core::v1::{Pod, PodSpec};
use serde_json::Value;

use super::cluster::{ClusterState, Usage};
use super::node_fit::{Mismatch, node_accepts};
use super::plan::Plan;
use super::read::{Snapshot, SnapshotPod};
use crate::node::{BindError, Request};

#[derive(Clone, Debug, serde::Serialize)]
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

/// A pod as it would be after its rewrite.
struct Rewritten {
    request: Request,
    shape: Option<Shape>,
    spec: PodSpec,
}

/// Runs a plan on a snapshot.
///
/// # Errors
/// [`BindError`] if a score chose what placement or the ledger refuse: a bug.
pub fn migrate(
    snapshot: &Snapshot,
    plan: &Plan,
    order: ScoringStrategy,
    dialect: &Dialect,
) -> Result<Gain, BindError> {
    let (cluster, mut notes) = ClusterState::of(snapshot, dialect);
    let legacy: Vec<(&SnapshotPod, Result<Rewritten, String>)> = snapshot
        .pods
        .iter()
        .filter(|pod| PodAsk::of(&pod.pod, dialect).is_ok_and(|ask| ask.kind() == PodKind::Legacy))
        .map(|pod| (pod, rewrite(pod, snapshot, plan, dialect)))
        .collect();
    let (now, then) = mixes(snapshot, &legacy, dialect);
    let before = cluster.usage(&now);
    let cache =
        ScoreCache::new(Scorer::new(order, &then, &ClusterState::fleet(snapshot)), snapshot.nodes.len());
    let mut mover = Mover { snapshot, cluster, cache };
    let mut workloads: BTreeMap<(&str, &str), Workload> = BTreeMap::new();
    for (pod, rewritten) in legacy.iter().filter(|(pod, _)| pod.node.is_some()) {
        let Some(home) = mover.cluster.home(pod) else {
            notes.push(format!("pod {}: its node is not among those with cards", pod.key));
            continue;
        };
        let entry = workloads.entry((pod.namespace.as_str(), pod.workload.as_str())).or_default();
        entry.pods += 1;
        entry.cards += PodAsk::of(&pod.pod, dialect).map_or(0, |ask| ask.effective().legacy);
        let moved = match rewritten {
            Ok(rewritten) => mover.move_pod(pod, home, rewritten, dialect)?.map(|()| rewritten),
            Err(why) => Err(why.clone()),
        };
        match moved {
            Ok(rewritten) => {
                entry.moved += 1;
                entry.becomes = Some(rewritten.request.ask.effective().to_string());
            }
            Err(why) => *entry.stays.entry(why).or_default() += 1,
        }
    }
    // What waits now starts last, so that what moving gives and what is made of it can be told apart.
    let after = mover.cluster.usage(&then);
    let waiting = mover.start_waiting(&legacy, dialect)?;
    let named = workloads.into_iter().map(|((namespace, name), workload)| Workload {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        ..workload
    });
    Ok(Gain { plan: plan.label.clone(), before, after, waiting, workloads: named.collect(), notes })
}

/// The requests of all pods that ask for cards, as they are and as they would be: what fragmentation is measured by.
fn mixes(
    snapshot: &Snapshot,
    legacy: &[(&SnapshotPod, Result<Rewritten, String>)],
    dialect: &Dialect,
) -> (Mix, Mix) {
    let shape_of = |pod: &SnapshotPod| {
        let ask = PodAsk::of(&pod.pod, dialect).ok().filter(|ask| ask.kind() != PodKind::Plain)?;
        Shape::of(&ask).map(|shape| Shape { host: pod.host, ..shape })
    };
    let now: Mix = snapshot.pods.iter().filter_map(shape_of).collect();
    let shared = snapshot.pods.iter().filter(|pod| legacy.iter().all(|(other, _)| other.key != pod.key));
    let moved = legacy.iter().filter_map(|(pod, rewritten)| match rewritten {
        Ok(rewritten) => rewritten.shape,
        Err(_) => shape_of(pod),
    });
    (now, shared.filter_map(shape_of).chain(moved).collect())
}

/// What the webhook makes of a pod when it is created again.
fn rewrite(
    pod: &SnapshotPod,
    snapshot: &Snapshot,
    plan: &Plan,
    dialect: &Dialect,
) -> Result<Rewritten, String> {
    let mut value = as_created(&pod.value, plan.everywhere.is_some());
    // One ratio for all gives a part of the card that the pod has now, although it may run on another product later.
    let mut asked = value.clone();
    if plan.everywhere.is_some()
        && let Some(node) = snapshot.nodes.iter().find(|node| pod.node.as_ref() == Some(&node.name))
        && asked
            .pointer("/spec/nodeSelector")
            .is_none_or(|selector| selector.get(names::GPU_PRODUCT).is_none())
        && !node.product.is_empty()
    {
        asked["spec"]["nodeSelector"][names::GPU_PRODUCT] = node.product.as_str().into();
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
    let ask = PodAsk::of(&rewritten, dialect).map_err(|why: AskError| why.to_string())?;
    if ask.kind() != PodKind::Shared {
        return Err(rewrite.outcome.to_string());
    }
    let shape = Shape::of(&ask).map(|shape| Shape { host: pod.host, ..shape });
    let request = Request { ask, constraints: Constraints::default(), host: pod.host };
    Ok(Rewritten { request, shape, spec: rewritten.spec.unwrap_or_default() })
}

/// The pod as its controller would create it: on no node yet. Where one ratio is tried for all, its own project is not
/// looked at.
fn as_created(value: &Value, everywhere: bool) -> Value {
    let mut pod = value.clone();
    if let Some(spec) = pod.get_mut("spec").and_then(Value::as_object_mut) {
        spec.remove("nodeName");
    }
    if let Some(labels) = pod.pointer_mut("/metadata/labels").and_then(Value::as_object_mut)
        && everywhere
    {
        labels.remove(names::PROJECT);
    }
    pod
}

/// The cluster while the migration goes on.
struct Mover<'s> {
    snapshot: &'s Snapshot,
    cluster: ClusterState,
    cache: ScoreCache,
}

impl Mover<'_> {
    /// Moves one pod, or leaves it where it is and says why.
    fn move_pod(
        &mut self,
        pod: &SnapshotPod,
        home: usize,
        rewritten: &Rewritten,
        dialect: &Dialect,
    ) -> Result<Result<(), String>, BindError> {
        self.cluster.nodes[home].release(&pod.key, pod.host);
        let placed = self.place(pod, rewritten)?;
        if placed.is_err() {
            self.cluster.place_running(home, pod, dialect);
        }
        Ok(placed)
    }

    /// Pods without a node: how many there are, and how many find a place.
    fn start_waiting(
        &mut self,
        legacy: &[(&SnapshotPod, Result<Rewritten, String>)],
        dialect: &Dialect,
    ) -> Result<(u32, u32), BindError> {
        let (mut waiting, mut started) = (0, 0);
        for (pod, rewritten) in legacy.iter().filter(|(pod, _)| pod.node.is_none()) {
            waiting += 1;
            started += u32::from(match rewritten {
                Ok(rewritten) => self.place(pod, rewritten)?.is_ok(),
                // It stays a legacy pod: what was freed starts it all the same.
                Err(_) => self.place_whole(pod, dialect),
            });
        }
        Ok((waiting, started))
    }

    /// Places a legacy pod on whole free cards, on the node that keeps the fewest of them.
    fn place_whole(&mut self, pod: &SnapshotPod, dialect: &Dialect) -> bool {
        let (Ok(ask), Some(spec)) = (PodAsk::of(&pod.pod, dialect), &pod.pod.spec) else { return false };
        let cards = ask.effective().legacy;
        let free = |at: usize| {
            let node = &self.cluster.nodes[at];
            let free = node.cards().iter().filter(|card| card.is_free()).count();
            (node.host().has(pod.host) && free >= cards as usize).then_some(free)
        };
        let known =
            self.snapshot.nodes.iter().enumerate().filter(|(_, node)| node_accepts(node, spec).is_ok());
        let best = known.filter_map(|(at, _)| Some((free(at)?, at))).min();
        best.is_some_and(|(_, at)| self.cluster.nodes[at].place_legacy(&pod.key, cards, pod.host) == 0)
    }

    /// Places a shared pod on the best node, as filter, prioritize and bind do.
    fn place(&mut self, pod: &SnapshotPod, rewritten: &Rewritten) -> Result<Result<(), String>, BindError> {
        let mut best: Option<(usize, Choice)> = None;
        let mut refused: BTreeMap<String, u32> = BTreeMap::new();
        for (at, known) in self.snapshot.nodes.iter().enumerate() {
            match self.look(at, node_accepts(known, &rewritten.spec), rewritten) {
                Ok(choice) if best.is_none_or(|(_, other)| choice.score > other.score) => {
                    best = Some((at, choice));
                }
                Ok(_) => {}
                Err(why) => *refused.entry(why).or_default() += 1,
            }
        }
        let Some((at, choice)) = best else { return Ok(Err(reasons(self.snapshot.nodes.len(), &refused))) };
        self.cluster.nodes[at].bind(&pod.key, &rewritten.request, choice.card)?;
        Ok(Ok(()))
    }

    fn look(&mut self, at: usize, admitted: Result<(), Mismatch>, pod: &Rewritten) -> Result<Choice, String> {
        admitted.map_err(|barred| match barred {
            Mismatch::Selector => "not selected by node selector or affinity".to_owned(),
            Mismatch::Taint => "taint not tolerated".to_owned(),
        })?;
        let node = &self.cluster.nodes[at];
        let choice = match &pod.shape {
            Some(shape) => {
                let capacity = || node.fits(&pod.request).then(|| node.capacity());
                self.cache.row(shape).choose(at, node.version(), capacity)
            }
            // Several containers: by how full the node is, for want of one shape.
            None => node
                .fits(&pod.request)
                .then(|| Choice { card: None, score: -f64::from(node.capacity().cores()) }),
        };
        choice.ok_or_else(|| match node.place(&pod.request) {
            Err(refusal) => refusal.to_string(),
            Ok(_) => "too little CPU or memory".to_owned(),
        })
    }
}

/// As kube-scheduler says it: counted by reason, most frequent first.
fn reasons(nodes: usize, refused: &BTreeMap<String, u32>) -> String {
    let mut counted: Vec<(&String, &u32)> = refused.iter().collect();
    counted.sort_by_key(|(why, count)| (std::cmp::Reverse(**count), (*why).clone()));
    let parts: Vec<String> = counted.into_iter().map(|(why, count)| format!("{count} × {why}")).collect();
    format!("fits on none of {nodes} nodes as a shared pod: {}", parts.join("; "))
}
