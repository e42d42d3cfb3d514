//! Requeues the pods that only the extender refused, when capacity is free again.
//!
//! The scheduler comes again with a refused pod when it sees a Node or an assigned pod change (FACTS 4.6). That is not enough:
//! - it sees a deletion by its own watch, and may ask us before ours has seen it; we refuse, and nothing calls it again;
//! - it sees no GPUShadow, no GPUConfig, no gang and no hold of ours at all.
//!
//! A gang that is complete now is requeued even where it still cannot go: its members' conditions say that pods of it do not exist.
//!
//! So whatever frees capacity is noted ([`Freed`]), and a moment later an annotation of the node is changed, if by then a pod
//! is still waiting that was last asked about before that and could go there. Most often the scheduler has asked again
//! by itself, and nothing is written. All of this is off the path of the scheduler's calls, and only the leader writes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Engine;
use super::gang::{Visit, all_exist};
use crate::decide::fits;
use crate::state::pod::PodFacts;
use crate::state::{Cluster, Freed, NodeInfo};

/// How long the scheduler may find free capacity by itself; a burst of changes in that time is one annotation.
pub const REQUEUE_DELAY: Duration = Duration::from_millis(250);

/// Nodes annotated at a time: one change makes the scheduler try again all pods that an extender refused, of whichever node.
const AT_A_TIME: usize = 16;

/// Waiting pods looked at in one of the cluster's locks.
const PODS_PER_LOCK: usize = 512;

/// How long a pod is remembered that the scheduler knows and our watch does not.
const UNKNOWN: Duration = Duration::from_secs(60);

/// The pods whose last filter call let them go nowhere.
///
/// Not a side effect in the sense of I7: no answer depends on it. Its lock may be taken under the cluster's, not the other way round.
#[derive(Debug, Default)]
pub(super) struct Refused(Mutex<Asked>);

#[derive(Debug, Default)]
struct Asked {
    /// By UID.
    pods: HashMap<Arc<str>, LastAsked>,
    groups: HashMap<Group, Alikes>,
}

#[derive(Clone, Debug)]
struct LastAsked {
    group: Group,
    /// [`Cluster::frees`] when filter began: capacity freed later was not seen.
    since: u64,
    at: Instant,
    /// It is in a gang of which not all members existed.
    incomplete: bool,
}

/// What pods have in common to which the same happens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Group {
    Gang(Arc<str>),
    Alike(u64),
}

/// The pods of a group.
#[derive(Debug, Default)]
struct Alikes {
    /// By [`LastAsked::since`], and their UIDs.
    earliest: BTreeSet<(u64, Arc<str>)>,
    incomplete: usize,
}

/// Pods to which the same happens.
struct Waiting {
    /// The earliest [`LastAsked::since`].
    since: u64,
    /// Of any of them.
    incomplete: bool,
    /// One of them; `None` for those that our watch does not know yet.
    pod: Option<Arc<PodFacts>>,
}

impl Asked {
    fn remove(&mut self, uid: &str) {
        let Some(asked) = self.pods.remove(uid) else { return };
        if let Some(alike) = self.groups.get_mut(&asked.group) {
            alike.earliest.remove(&(asked.since, Arc::from(uid)));
            alike.incomplete -= usize::from(asked.incomplete);
            if alike.earliest.is_empty() {
                self.groups.remove(&asked.group);
            }
        }
    }

    fn insert(&mut self, uid: &Arc<str>, asked: LastAsked) {
        self.remove(uid);
        let alike = self.groups.entry(asked.group.clone()).or_default();
        alike.earliest.insert((asked.since, Arc::clone(uid)));
        alike.incomplete += usize::from(asked.incomplete);
        self.pods.insert(Arc::clone(uid), asked);
    }
}

impl Refused {
    /// Filter begins. Called under the cluster's lock, so that whatever frees capacity from here on finds the pod noted.
    pub(super) fn note(&self, pod: &PodFacts, cluster: &Cluster, now: Instant) {
        let incomplete = pod.gang.as_ref().is_some_and(|gang| !all_exist(cluster, pod, gang));
        let group =
            pod.gang.as_ref().map_or(Group::Alike(pod.group), |gang| Group::Gang(Arc::clone(&gang.key)));
        self.0.lock().insert(&pod.uid, LastAsked { group, since: cluster.frees(), at: now, incomplete });
    }

    /// The pod was let through: from here on the scheduler itself tries it again.
    pub(super) fn clear(&self, uid: &str) {
        self.0.lock().remove(uid);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.lock().pods.is_empty()
    }

    fn groups(&self) -> Vec<Group> {
        self.0.lock().groups.keys().cloned().collect()
    }

    /// One for the pods of a group that wait still, if any do.
    fn waiting(&self, cluster: &Cluster, group: &Group) -> Option<Waiting> {
        let asked = self.0.lock();
        let alike = asked.groups.get(group)?;
        let incomplete = alike.incomplete > 0;
        alike.earliest.iter().find_map(|(since, uid)| {
            let pod = cluster.pod(uid);
            let waits = pod.is_none_or(|pod| waits(pod)) && !cluster.is_placed(uid);
            waits.then(|| Waiting { since: *since, incomplete, pod: pod.cloned() })
        })
    }
}

/// In the scheduler's queue, as far as we know.
fn waits(pod: &PodFacts) -> bool {
    pod.node.is_none() && !pod.gated && !pod.gated_by_others && !pod.leaving
}

impl Engine {
    /// Changes the state. The only way to do it, so that waiting pods are requeued for all capacity that is freed.
    pub(super) fn change<T>(&self, edit: impl FnOnce(&mut Cluster) -> T) -> T {
        let (done, freed) = self.cluster.write(|cluster| (edit(cluster), cluster.take_freed()));
        if !freed.is_empty() && !self.refused.is_empty() {
            // Without an API server there is no receiver.
            freed.into_iter().for_each(|freed| _ = self.requeue.send(freed));
        }
        done
    }

    /// A scheduler that asks us is one of those whose pods we requeue.
    pub(super) fn note_scheduler(&self, name: &Arc<str>) {
        if !self.schedulers.read().contains(name) {
            self.schedulers.write().insert(Arc::clone(name));
        }
    }

    /// A new leader does not know which pods the last one refused, nor whether it requeued them.
    pub(super) fn requeue_refused_earlier(&self) {
        let now = (self.clock)().instant;
        let ours = self.schedulers.read().clone();
        let asks = |pod: &&Arc<PodFacts>| waits(pod) && ours.contains(&pod.scheduler);
        let waiting: Vec<_> = self.read(|cluster| cluster.pods().filter(asks).cloned().collect());
        for part in waiting.chunks(PODS_PER_LOCK) {
            self.read(|cluster| part.iter().for_each(|pod| self.refused.note(pod, cluster, now)));
        }
        if !waiting.is_empty() {
            self.change(Cluster::free_somewhere);
        }
    }

    /// Forgets the refusals that are of no use any more.
    pub(super) fn prune_refusals(&self) {
        let now = (self.clock)().instant;
        let uids: Vec<(Arc<str>, Instant)> =
            self.refused.0.lock().pods.iter().map(|(uid, asked)| (Arc::clone(uid), asked.at)).collect();
        for part in uids.chunks(PODS_PER_LOCK) {
            self.read(|cluster| {
                let gone = |uid: &str, at: Instant| match cluster.pod(uid) {
                    Some(pod) => !waits(pod),
                    None => now.duration_since(at) >= UNKNOWN,
                };
                part.iter().filter(|(uid, at)| gone(uid, *at)).for_each(|(uid, _)| self.refused.clear(uid));
            });
        }
    }

    /// Annotates nodes whose freed capacity waiting pods could use. Returns what could not be written, to try again.
    pub async fn requeue(&self, freed: Vec<Freed>) -> Vec<Freed> {
        let mut again = Vec::new();
        if !self.is_ready() {
            // A replica that comes to lead begins by waking everyone.
            return again;
        }
        for (node, count) in self.worth_requeueing(freed) {
            match self.api.requeue_pods_of(&node).await {
                Ok(()) => _ = self.metrics.requeues.inc(),
                Err(problem) => {
                    tracing::warn!(%node, problem, "waiting pods were not requeued; trying again");
                    again.push(Freed { node: Some(node), count });
                }
            }
        }
        again
    }

    fn worth_requeueing(&self, freed: Vec<Freed>) -> Vec<(Arc<str>, u64)> {
        let mut latest = BTreeMap::<Option<Arc<str>>, u64>::new();
        for Freed { node, count } in freed {
            let known = latest.entry(node).or_default();
            *known = count.max(*known);
        }
        let waiting: Vec<Waiting> = self
            .refused
            .groups()
            .iter()
            .filter_map(|group| self.read(|cluster| self.refused.waiting(cluster, group)))
            .collect();
        let mut gangs = HashMap::new();
        let mut touch = Vec::new();
        for (node, count) in latest {
            let earlier = waiting.iter().filter(|waiting| waiting.since < count);
            let found =
                earlier.filter_map(|waiting| self.place_for(node.as_deref(), waiting, &mut gangs)).next();
            touch.extend(found.map(|name| (name, count)));
            if touch.len() == AT_A_TIME {
                break;
            }
        }
        touch
    }

    /// Where a pod may go: to this node, or to any. A wrong yes costs an annotation, a wrong no leaves the pod waiting.
    fn place_for(
        &self,
        node: Option<&str>,
        waiting: &Waiting,
        gangs: &mut HashMap<Arc<str>, bool>,
    ) -> Option<Arc<str>> {
        let there = |info: &&NodeInfo| info.facts.is_some();
        let first = || {
            self.read(|cluster| {
                let info = match node {
                    Some(node) => cluster.node(node).filter(there),
                    None => cluster.nodes().find(there),
                };
                info.map(|info| Arc::clone(&info.name))
            })
        };
        let Some(pod) = &waiting.pod else { return first() };
        if let Some(gang) = &pod.gang {
            let hopes = || {
                let complete_now = waiting.incomplete && self.read(|cluster| all_exist(cluster, pod, gang));
                // Its other members may be those that go to this node.
                complete_now || self.gang_refusal(pod).is_none()
            };
            return gangs.entry(Arc::clone(&gang.key)).or_insert_with(hopes).then(first).flatten();
        }
        if self.read(|cluster| cluster.quotas().concern(&pod.namespace)) {
            // What is freed here of a quota can be used on another node.
            return first();
        }
        let summary = pod.summary();
        let fits = |info: &&NodeInfo| there(info) && fits(info, pod, summary).is_ok();
        match node {
            Some(node) => self.read(|cluster| {
                let info = cluster.node(node).filter(|info| info.selected_by(pod)).filter(fits);
                info.map(|info| Arc::clone(&info.name))
            }),
            None => {
                let mut found = None;
                self.visit(pod, |_, info| {
                    found = Some(info).filter(fits).map(|info| Arc::clone(&info.name));
                    if found.is_some() { Visit::Done } else { Visit::Next }
                });
                found
            }
        }
    }
}
