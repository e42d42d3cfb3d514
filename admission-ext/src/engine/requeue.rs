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

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Engine;
use super::gang::all_exist;
use crate::decide::fits;
use crate::state::pod::PodFacts;
use crate::state::{Cluster, Freed, NodeInfo};

/// How long the scheduler may find free capacity by itself; a burst of changes in that time is one annotation.
pub const REQUEUE_DELAY: Duration = Duration::from_millis(250);

/// Nodes annotated at a time: one change makes the scheduler try again all pods that an extender refused, of whichever node.
const AT_A_TIME: usize = 16;

/// How long a pod is remembered that the scheduler knows and our watch does not.
const UNKNOWN: Duration = Duration::from_secs(60);

/// The pods whose last filter call let them go nowhere, by UID.
///
/// Not a side effect in the sense of I7: no answer depends on it.
#[derive(Debug, Default)]
pub(super) struct Refused(Mutex<HashMap<Arc<str>, Asked>>);

#[derive(Clone, Copy, Debug)]
struct Asked {
    /// [`Cluster::frees`] when filter began: capacity freed later was not seen.
    since: u64,
    at: Instant,
    /// It is in a gang of which not all members existed.
    incomplete: bool,
}

/// Pods to which the same happens.
struct Waiting {
    /// The earliest [`Asked::since`].
    since: u64,
    /// Of any of them.
    incomplete: bool,
    /// One of them; `None` for those that our watch does not know yet.
    pod: Option<Arc<PodFacts>>,
}

impl Refused {
    /// Filter begins. Called under the cluster's lock, so that whatever frees capacity from here on finds the pod noted.
    pub(super) fn note(&self, pod: &PodFacts, cluster: &Cluster, now: Instant) {
        let incomplete = pod.gang.as_ref().is_some_and(|gang| !all_exist(cluster, pod, gang));
        self.0.lock().insert(Arc::clone(&pod.uid), Asked { since: cluster.frees(), at: now, incomplete });
    }

    /// The pod was let through: from here on the scheduler itself tries it again.
    pub(super) fn clear(&self, uid: &str) {
        self.0.lock().remove(uid);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }

    /// Forgets those that wait no more.
    fn prune(&self, cluster: &Cluster, now: Instant) {
        self.0.lock().retain(|uid, asked| match cluster.pod(uid) {
            Some(pod) => waits(pod),
            None => now.duration_since(asked.at) < UNKNOWN,
        });
    }

    /// Those that wait still: one entry for each gang and one for all pods that fit on the same nodes.
    fn waiting(&self, cluster: &Cluster) -> Vec<Waiting> {
        let mut groups: HashMap<Option<Group>, Waiting> = HashMap::new();
        for (uid, asked) in &*self.0.lock() {
            let pod = cluster.pod(uid);
            if !pod.is_none_or(|pod| waits(pod)) || cluster.is_placed(uid) {
                continue;
            }
            let group = pod.map(|pod| match &pod.gang {
                Some(gang) => Group::Gang(Arc::clone(&gang.key)),
                None => Group::Alike(pod.group),
            });
            let new = || Waiting { since: asked.since, incomplete: false, pod: pod.cloned() };
            let waiting = groups.entry(group).or_insert_with(new);
            waiting.since = asked.since.min(waiting.since);
            waiting.incomplete |= asked.incomplete;
        }
        groups.into_values().collect()
    }
}

/// What pods have in common to which the same happens.
#[derive(PartialEq, Eq, Hash)]
enum Group {
    Gang(Arc<str>),
    Alike(u64),
}

/// In the scheduler's queue, as far as we know.
fn waits(pod: &PodFacts) -> bool {
    pod.node.is_none() && !pod.gated && !pod.gated_by_others && !pod.leaving
}

impl Engine {
    /// Changes the state. The only way to do it, so that waiting pods are requeued for all capacity that is freed.
    pub(super) fn change<T>(&self, edit: impl FnOnce(&mut Cluster) -> T) -> T {
        let mut cluster = self.cluster.write();
        let done = edit(&mut cluster);
        let freed = cluster.take_freed();
        drop(cluster);
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
        self.change(|cluster| {
            let asks = |pod: &&Arc<PodFacts>| waits(pod) && ours.contains(&pod.scheduler);
            let waiting: Vec<_> = cluster.pods().filter(asks).cloned().collect();
            waiting.iter().for_each(|pod| self.refused.note(pod, cluster, now));
            if !waiting.is_empty() {
                cluster.free_somewhere();
            }
        });
    }

    /// Forgets the refusals that are of no use any more.
    pub(super) fn prune_refusals(&self) {
        self.refused.prune(&self.cluster.read(), (self.clock)().instant);
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
        let waiting = self.read(|cluster| self.refused.waiting(cluster));
        let mut gangs = HashMap::new();
        let mut touch = Vec::new();
        for (node, count) in latest {
            // A lock for each that waits: binds wait too.
            let found = waiting.iter().filter(|waiting| waiting.since < count).find_map(|waiting| {
                self.read(|cluster| self.place_for(cluster, node.as_deref(), waiting, &mut gangs))
            });
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
        cluster: &Cluster,
        node: Option<&str>,
        waiting: &Waiting,
        gangs: &mut HashMap<Arc<str>, bool>,
    ) -> Option<Arc<str>> {
        let there = |info: &&NodeInfo| info.facts.is_some() && node.is_none_or(|node| *info.name == *node);
        let first = || match node {
            Some(node) => cluster.node(node).filter(there),
            None => cluster.nodes().find(there),
        };
        let found = match &waiting.pod {
            None => first(),
            Some(pod) => match &pod.gang {
                Some(gang) => {
                    let hopes = || {
                        let complete_now = waiting.incomplete && all_exist(cluster, pod, gang);
                        // Its other members may be those that go to this node.
                        complete_now || self.gang_refusal(cluster, pod).is_none()
                    };
                    gangs.entry(Arc::clone(&gang.key)).or_insert_with(hopes).then(first).flatten()
                }
                // What is freed here of a quota can be used on another node.
                None if cluster.quotas().concern(&pod.namespace) => first(),
                None => {
                    let summary = pod.summary();
                    let fits = |info: &&NodeInfo| {
                        there(info) && info.selected_by(pod) && fits(info, pod, summary).is_ok()
                    };
                    match node {
                        Some(node) => cluster.node(node).filter(fits),
                        None => cluster.with_room_for(pod).map(|(_, info)| info).find(fits),
                    }
                }
            },
        };
        found.map(|info| Arc::clone(&info.name))
    }
}
