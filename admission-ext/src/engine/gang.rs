//! Gangs: all members or none (`scheduling.k8s.io/group-name`, `group-pod-num`; DESIGN decision 8).
//!
//! - **filter** lets no member pass while the cluster could not hold all members that are still missing, beside what
//!   is held and still missing of the gangs that have started before.
//! - **bind** assumes each member's cards and holds the call; the last member's call binds all. If a binding fails or
//!   time runs out, all that are not bound yet are released: their cards first, then the calls, Events last.
//!
//! Members that have succeeded count as there, those that failed do not: they are made again. A member that the scheduler's own
//! rules leave no node (CPU, taints, affinity: it says so in the pod's condition) or that somebody else's gate keeps back holds
//! up the gang before any card is held, and not after.
//!
//! A gang that has started counts as if it were whole. So of two gangs that need more than half of the cluster each, the
//! second does not begin before the first has finished or given up; and one that has given up backs off for a while.
//!
//! Whether all fit is found out in many short locks, as other pods are placed meanwhile: all or none is kept by the held binds
//! alone. Only gangs must not overlook each other, so a bind counts for the gangs that had started when its question was put.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use futures::StreamExt as _;
use tokio::sync::oneshot;

use super::Engine;
use super::bind::BindError;
use crate::decide::placement;
use crate::state::node::Placed;
use crate::state::pod::{Cards, GANG_SIZES, GangRef, PodFacts, compact};
use crate::state::{Cluster, NodeId, NodeInfo};
use gpu_migrate_model::capacity::{NodeCapacity, RequestSummary};

/// How many bindings of one gang are on their way at a time.
const AT_A_TIME: usize = 16;
/// Looks at nodes in one lock, by the capacity that is at hand and by placement.
const LOOKS_PER_LOCK: usize = 1_024;
const PLACEMENTS_PER_LOCK: usize = 16;
/// Members released in one lock: each changes a node.
const RELEASED_PER_LOCK: usize = 32;

/// What to do after a look at a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Visit {
    Again,
    Next,
    Done,
}

/// Members that wait for the others.
#[derive(Debug, Default)]
pub(super) struct Gangs {
    started: HashMap<Arc<str>, Started>,
    /// Gangs that gave up, and until when they back off.
    backing_off: HashMap<Arc<str>, Instant>,
    /// Gangs that did not fit, and what was asked: less room does not change that.
    too_large: HashMap<Arc<str>, Asked>,
    /// How often one has started.
    starts: u64,
}

/// Whether a gang fits is asked for these groups, and so many pods of each, at this [`Cluster::growth`].
#[derive(Debug, PartialEq, Eq)]
struct Asked {
    growth: u64,
    groups: Vec<(u64, usize)>,
}

/// Whether the members that a gang still misses would fit beside those of the gangs that have started.
struct Question {
    gang: Arc<str>,
    size: u32,
    groups: Vec<Group>,
    asked: Asked,
    beside_others: bool,
    /// [`Gangs::starts`] when it was put.
    starts: u64,
}

impl Question {
    fn refusal(&self) -> String {
        let beside = if self.beside_others { " beside the gangs that began before" } else { "" };
        format!("gang {}: not all of its {} pods would fit{beside}", self.gang, self.size)
    }
}

#[derive(Debug)]
struct Started {
    size: u32,
    deadline: Instant,
    /// By UID, in a stable order.
    held: BTreeMap<Arc<str>, Held>,
}

#[derive(Debug)]
struct Held {
    pod: Arc<PodFacts>,
    node: Arc<str>,
    cards: Cards,
    reply: oneshot::Sender<Result<(), BindError>>,
}

/// What becomes of a bind call of a gang member.
enum Turn {
    /// It waits; the answer comes here.
    Wait(oneshot::Receiver<Result<(), BindError>>, Instant),
    /// It was the last: bind these.
    All(Vec<Held>, oneshot::Receiver<Result<(), BindError>>),
}

impl Engine {
    /// Why no member of the pod's gang may be placed now; `None` if it may, or is in no gang. Not to be called under the cluster's
    /// lock.
    pub(super) fn gang_refusal(&self, pod: &PodFacts) -> Option<String> {
        self.gang_may_start(pod).err()
    }

    /// Whether members of the pod's gang may be placed now, as of so many starts of gangs.
    ///
    /// # Errors
    /// Why not.
    pub(super) fn gang_may_start(&self, pod: &PodFacts) -> Result<u64, String> {
        let Some(gang) = &pod.gang else { return Ok(0) };
        let now = (self.clock)().instant;
        let question = self
            .read(|cluster| self.gangs.lock().question(cluster, pod, gang, now, self.settings.held_binds))?;
        if self.all_fit(&question.groups) {
            return Ok(question.starts);
        }
        let refusal = question.refusal();
        self.gangs.lock().too_large.insert(question.gang, question.asked);
        Err(refusal)
    }

    /// Whether no gang has started since.
    pub(super) fn no_gang_started_since(&self, starts: u64) -> bool {
        self.gangs.lock().starts == starts
    }

    /// Whether all would fit at once, by placing them one after the other on the fullest nodes that have room.
    ///
    /// A greedy packing may miss one that a search would find; then the gang waits a little longer than it must.
    fn all_fit(&self, groups: &[Group]) -> bool {
        let complex = groups.iter().any(|group| group.pod.summary() == RequestSummary::Complex);
        let mut trial = if complex { Trial::Placed(HashMap::new()) } else { Trial::Fast(HashMap::new()) };
        groups.iter().all(|Group { pod, count }| {
            let mut left = *count;
            self.visit(pod, |id, info| {
                if !trial.put(id, info, pod, left) {
                    return Visit::Next;
                }
                left -= 1;
                if left > 0 { Visit::Again } else { Visit::Done }
            });
            left == 0
        })
    }

    /// Looks at the nodes that may have room for the pod and have its labels, those with least left first, until it is done; in short
    /// locks.
    pub(super) fn visit(&self, pod: &PodFacts, mut look: impl FnMut(NodeId, &NodeInfo) -> Visit) {
        let looks =
            if pod.summary() == RequestSummary::Complex { PLACEMENTS_PER_LOCK } else { LOOKS_PER_LOCK };
        let mut nodes = self.read(|cluster| cluster.with_room_for(pod)).into_iter().peekable();
        let mut done = false;
        while !done && nodes.peek().is_some() {
            self.read(|cluster| {
                for _ in 0..looks {
                    let Some(id) = nodes.peek() else { return };
                    let info = cluster.node_at(*id).filter(|info| info.selected_by(pod));
                    match info.map_or(Visit::Next, |info| look(*id, info)) {
                        Visit::Again => {}
                        Visit::Next => _ = nodes.next(),
                        Visit::Done => {
                            done = true;
                            return;
                        }
                    }
                }
            });
        }
    }

    /// Holds the bind of a member until all are there, or binds all.
    pub(super) async fn bind_member(
        self: &Arc<Self>,
        pod: &Arc<PodFacts>,
        gang: &GangRef,
        node: &str,
        cards: Cards,
    ) -> Result<(), BindError> {
        match self.take_turn(pod, gang, node, cards) {
            Turn::All(members, answer) => {
                self.bind_all(gang, members).await;
                answer.await.unwrap_or_else(|_| Err(released(&gang.key, "the gang was given up")))
            }
            Turn::Wait(mut answer, deadline) => {
                let left = deadline.saturating_duration_since((self.clock)().instant);
                match tokio::time::timeout(left, &mut answer).await {
                    Ok(answer) => {
                        answer.unwrap_or_else(|_| Err(released(&gang.key, "the gang was given up")))
                    }
                    Err(_) => {
                        self.give_up(&gang.key, deadline, "not all members came in time");
                        // The call that gave the gang up, or is binding it now, answers all.
                        answer.await.unwrap_or_else(|_| Err(released(&gang.key, "the gang was given up")))
                    }
                }
            }
        }
    }

    /// Notes that a gang has started, under the lock under which its first member was assumed.
    pub(super) fn start_gang(&self, gang: &GangRef) {
        let deadline = (self.clock)().instant + self.settings.gang_timeout;
        self.gangs.lock().begin(gang, deadline);
    }

    fn take_turn(&self, pod: &Arc<PodFacts>, gang: &GangRef, node: &str, cards: Cards) -> Turn {
        let (reply, answer) = oneshot::channel();
        let now = (self.clock)().instant;
        self.read(|cluster| {
            let mut gangs = self.gangs.lock();
            let started = gangs.begin(gang, now + self.settings.gang_timeout);
            let held = Held { pod: Arc::clone(pod), node: Arc::from(node), cards, reply };
            started.held.insert(Arc::clone(&pod.uid), held);
            let done = cluster.bound(&gang.key) + cluster.succeeded(&gang.key, pod.owner.as_ref());
            if done + started.held.len() < gang.size as usize {
                return Turn::Wait(answer, started.deadline);
            }
            let all = gangs.started.remove(&gang.key).map(|started| started.held).unwrap_or_default();
            Turn::All(all.into_values().collect(), answer)
        })
    }

    /// Binds all members. The first goes alone: most of what can go wrong goes wrong there, and then no member is bound.
    async fn bind_all(self: &Arc<Self>, gang: &GangRef, members: Vec<Held>) {
        let mut waiting = members.into_iter();
        let mut failed = false;
        if let Some(first) = waiting.next() {
            failed = !self.bind_held(first).await;
        }
        while !failed && waiting.len() > 0 {
            let part: Vec<Held> = waiting.by_ref().take(AT_A_TIME).collect();
            let outcomes = futures::stream::iter(part.into_iter().map(|held| self.bind_held(held)));
            failed = outcomes.buffer_unordered(AT_A_TIME).any(|bound| async move { !bound }).await;
        }
        if failed {
            self.release(&gang.key, gang.size, waiting.collect(), "another member could not be bound");
        } else {
            self.metrics.gang_bound.inc();
            // Gangs for which no more binds could be held.
            self.change(Cluster::free_somewhere);
        }
    }

    async fn bind_held(&self, held: Held) -> bool {
        let result = self.commit(&held.pod, &held.node, held.cards).await;
        let bound = result.is_ok();
        // A caller that went away is no reason to undo anything.
        let _ = held.reply.send(result);
        bound
    }

    /// Gives a gang up that has begun, because there is no node for this member.
    pub(super) fn give_up_without(&self, gang: &GangRef, uid: &str, name: &str) {
        let deadline = {
            let gangs = self.gangs.lock();
            gangs
                .started
                .get(&gang.key)
                .filter(|started| !started.held.contains_key(uid))
                .map(|it| it.deadline)
        };
        // A member that is assumed had a node; its condition is from before.
        if let Some(deadline) = deadline.filter(|_| self.read(|cluster| !cluster.is_placed(uid))) {
            self.give_up(&gang.key, deadline, &no_node_for(name));
        }
    }

    /// Releases every member that is held since the gang began with this deadline.
    fn give_up(&self, gang: &Arc<str>, deadline: Instant, why: &str) {
        let until = (self.clock)().instant + self.settings.gang_timeout / 4;
        let started = {
            let mut gangs = self.gangs.lock();
            match gangs.started.get(gang) {
                Some(started) if started.deadline == deadline => {}
                // Another member did it, or the gang is being bound, or has started again.
                _ => return,
            }
            gangs.backing_off.insert(Arc::clone(gang), until);
            gangs.started.remove(gang)
        };
        if let Some(Started { size, held, .. }) = started {
            self.release(gang, size, held.into_values().collect(), why);
        }
    }

    fn release(&self, gang: &Arc<str>, size: u32, members: Vec<Held>, why: &str) {
        for part in members.chunks(RELEASED_PER_LOCK) {
            self.change(|cluster| part.iter().for_each(|held| cluster.forget(&held.pod.uid)));
        }
        let bound = self.read(|cluster| cluster.bound(gang));
        let error = released(gang, &format!("{why}; bound {bound} of {size}, the rest released"));
        self.metrics.gang_released.inc_by(members.len() as u64);
        let (api, text) = (Arc::clone(&self.api), error.to_string());
        let told: Vec<Arc<PodFacts>> = members.iter().map(|held| Arc::clone(&held.pod)).collect();
        // Held calls are only ever answered in a runtime.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                let warn = |pod: Arc<PodFacts>| {
                    let (api, text) = (&api, text.clone());
                    async move { api.warn(&pod, "GangReleased", text).await }
                };
                futures::stream::iter(told).for_each_concurrent(AT_A_TIME, warn).await;
            });
        }
        for held in members {
            let _ = held.reply.send(Err(error.clone()));
        }
    }

    /// A member is gone: its bind is over, the others go on waiting for the pod that takes its place.
    pub(super) fn drop_member(&self, uid: &str) {
        let mut gangs = self.gangs.lock();
        for started in gangs.started.values_mut() {
            // Its call hears that the gang was given up, as the sender goes.
            started.held.remove(uid);
        }
        gangs.started.retain(|_, started| !started.held.is_empty());
    }

    /// Requeues the gangs whose back-off is over: nothing else would.
    pub(super) fn end_back_off(&self) {
        let now = (self.clock)().instant;
        let ended = self.read(|cluster| {
            let mut gangs = self.gangs.lock();
            gangs.too_large.retain(|gang, _| cluster.coming(gang) > 0);
            let before = gangs.backing_off.len();
            gangs.backing_off.retain(|_, until| *until > now);
            gangs.backing_off.len() < before
        });
        if ended {
            self.change(Cluster::free_somewhere);
        }
    }

    /// The gated members of the gangs that are complete and would fit, to be let into the queue together.
    #[must_use]
    pub fn gangs_to_lift(&self) -> Vec<Arc<PodFacts>> {
        let keys: Vec<Arc<str>> = self.read(|cluster| cluster.gated_gangs().cloned().collect());
        // A lock for each: there may be hundreds, and binds wait.
        let gated = |key: Arc<str>| {
            let gated: Vec<_> =
                self.read(|cluster| cluster.members(&key).filter(|member| member.gated).cloned().collect());
            let refusal = gated.first().and_then(|first| self.gang_refusal(first));
            if refusal.is_none() { gated } else { Vec::new() }
        };
        keys.into_iter().flat_map(gated).collect()
    }

    /// Reads the PodGroups that say how large the gangs of our schedulers are and were not there yet.
    pub async fn read_pod_groups(&self) {
        if !self.is_ready() {
            return;
        }
        let ours = self.schedulers.read().clone();
        let gangs: Vec<GangRef> = self.read(|cluster| {
            let pods = cluster.of_unsized_gangs().filter(|pod| ours.contains(&pod.scheduler));
            pods.filter_map(|pod| pod.gang.clone()).collect()
        });
        for GangRef { key, group, .. } in gangs {
            let (Some((namespace, name)), Some(group)) = (key.split_once('/'), group) else { continue };
            match self.api.min_member(namespace, name, group).await {
                Ok(Some(size)) if GANG_SIZES.contains(&size) => self.change(|cluster| {
                    if cluster.set_size(&key, size) {
                        cluster.free_somewhere();
                    }
                }),
                Ok(Some(size)) => {
                    tracing::warn!(gang = %key, size, "minMember of its PodGroup: expected 1 to {}", GANG_SIZES.end());
                }
                Ok(None) => {}
                Err(problem) => tracing::warn!(gang = %key, problem, "PodGroup not read; trying again"),
            }
        }
    }

    /// Lifts the gates of complete gangs.
    pub async fn lift_gates(&self) {
        if !self.is_ready() {
            return;
        }
        for pod in self.gangs_to_lift() {
            if let Err(problem) = self.api.lift_gate(&pod).await {
                tracing::warn!(pod = %pod.shown(), problem, "gang gate not lifted; trying again");
            }
        }
    }
}

fn released(gang: &str, why: &str) -> BindError {
    BindError::Gang { gang: gang.to_owned(), why: why.to_owned() }
}

fn no_node_for(pod: &str) -> String {
    format!("the scheduler finds no node for its pod {pod}")
}

impl Gangs {
    fn begin(&mut self, gang: &GangRef, deadline: Instant) -> &mut Started {
        self.started.entry(Arc::clone(&gang.key)).or_insert_with(|| {
            self.starts += 1;
            Started { size: gang.size, deadline, held: BTreeMap::new() }
        })
    }

    /// What decides whether the missing members of the gang of `pod` may be placed now.
    ///
    /// # Errors
    /// Why they may not, whatever fits.
    fn question(
        &mut self,
        cluster: &Cluster,
        pod: &PodFacts,
        gang: &GangRef,
        now: Instant,
        held_binds: usize,
    ) -> Result<Question, String> {
        let (key, size) = (&gang.key, gang.size as usize);
        if let (0, Some(group)) = (size, gang.group) {
            return Err(format!(
                "gang {key}: there is no PodGroup of {} that says how many pods it has",
                group.api_version()
            ));
        }
        if size > held_binds {
            return Err(format!(
                "gang {key}: it has {size} pods, and binds are held for at most {held_binds}"
            ));
        }
        if !all_exist(cluster, pod, gang) {
            // Without the count: the text stays the same while members come.
            return Err(format!("gang {key}: not all of its {size} pods exist yet"));
        }
        if let Some(member) = cluster.stuck_member(key, &pod.uid) {
            return Err(format!("gang {key}: {}", no_node_for(&member.shown())));
        }
        let others = self.started.iter().filter(|(other, _)| *other != key);
        let held: usize = others.map(|(_, started)| started.size as usize).sum();
        if held > 0 && held + size > held_binds {
            return Err(format!(
                "gang {key}: {held} binds are held for other gangs, of at most {held_binds}"
            ));
        }
        if self.backing_off.get(key).is_some_and(|until| *until > now) && cluster.another_gang_waits(key) {
            return Err(format!("gang {key}: gave up a moment ago, others go first"));
        }
        let mut missing = Vec::new();
        for (key, started) in self.started.iter().filter(|(other, _)| *other != key) {
            missing.extend(still_missing(
                cluster,
                &GangRef { key: Arc::clone(key), size: started.size, group: None },
                None,
            ));
        }
        let beside_others = !missing.is_empty();
        missing.extend(still_missing(cluster, gang, Some(pod)));
        let groups = groups(cluster, &missing);
        let asked = Asked {
            growth: cluster.growth(),
            groups: groups.iter().map(|group| (group.pod.group, group.count)).collect(),
        };
        let known = self.too_large.get(key) == Some(&asked);
        let question = Question {
            gang: Arc::clone(key),
            size: gang.size,
            groups,
            asked,
            beside_others,
            starts: self.starts,
        };
        // Each member asks, and each second those that are gated.
        if known { Err(question.refusal()) } else { Ok(question) }
    }
}

/// Whether the gang of `pod` has all its members: `pod` itself, which the index may not know yet, and those that have succeeded count.
pub(super) fn all_exist(cluster: &Cluster, pod: &PodFacts, gang: &GangRef) -> bool {
    let known = cluster.pod(&pod.uid).is_some_and(|known| {
        !known.leaving && !known.gated_by_others && known.gang.as_ref().is_some_and(|of| of.key == gang.key)
    });
    let others = cluster.coming(&gang.key) - usize::from(known);
    gang.size > 0 && 1 + others + cluster.succeeded(&gang.key, pod.owner.as_ref()) >= gang.size as usize
}

/// The members of a gang that hold nothing yet; `pod`, where given, is one of them even if the index lags.
pub(super) fn still_missing<'a>(
    cluster: &'a Cluster,
    gang: &GangRef,
    pod: Option<&'a PodFacts>,
) -> Vec<&'a PodFacts> {
    let placed = cluster.members(&gang.key).filter(|member| cluster.is_placed(&member.uid)).count();
    let done = placed + cluster.succeeded(&gang.key, pod.and_then(|pod| pod.owner.as_ref()));
    let count = (gang.size as usize).saturating_sub(done);
    let own = pod.filter(|pod| !cluster.is_placed(&pod.uid));
    let others = cluster
        .members(&gang.key)
        .map(|member| &**member)
        .filter(|member| !cluster.is_placed(&member.uid) && own.is_none_or(|own| own.uid != member.uid));
    own.into_iter().chain(others).take(count).collect()
}

/// Members that fit on the same nodes: most gangs are one group.
struct Group {
    /// One of them.
    pod: Arc<PodFacts>,
    count: usize,
}

/// The pods by group, the largest first.
fn groups(cluster: &Cluster, pods: &[&PodFacts]) -> Vec<Group> {
    let mut counts: HashMap<u64, (&PodFacts, usize)> = HashMap::new();
    for pod in pods {
        counts.entry(pod.group).or_insert((pod, 0)).1 += 1;
    }
    let group = |(pod, count): (&PodFacts, usize)| {
        let known = cluster.pod(&pod.uid).map(Arc::clone);
        Group { pod: known.unwrap_or_else(|| Arc::new(pod.clone())), count }
    };
    let mut groups: Vec<_> = counts.into_values().map(group).collect();
    groups.sort_by_key(|group| {
        let demand = group.pod.demand();
        (std::cmp::Reverse((demand.cores.0.max(demand.legacy * 100), demand.blocks)), group.pod.group)
    });
    groups
}

/// What the pods that were put somewhere leave of the nodes.
enum Trial {
    /// Copies of the nodes' capacities.
    Fast(HashMap<NodeId, NodeCapacity>),
    /// By real placement, for pods of several containers or with constraints: what was put on the nodes.
    Placed(HashMap<NodeId, Vec<Placed>>),
}

impl Trial {
    /// Puts one of the pod's group, the `number`-th, on the node if it fits.
    fn put(&mut self, id: NodeId, info: &NodeInfo, pod: &PodFacts, number: usize) -> bool {
        match self {
            Self::Fast(left) => {
                let summary = pod.summary();
                let fits =
                    |capacity: &NodeCapacity| capacity.fast_fit(summary).is_some_and(|look| look.is_ok());
                let fitting = fits(left.get(&id).unwrap_or(&info.capacity));
                if fitting {
                    left.entry(id).or_insert_with(|| info.capacity.clone()).take(summary);
                }
                fitting
            }
            Self::Placed(put) => {
                let here = put.get(&id).map(Vec::as_slice).unwrap_or_default();
                let placed = if here.is_empty() {
                    placement(&info.inventory, &info.occupancy, pod, None)
                } else {
                    placement(&info.inventory, &info.occupancy_with(here, |_| false).1, pod, None)
                };
                let Ok(placed) = placed else { return false };
                // Members of one group are told apart by their UIDs alone.
                let uid = format!("{}/{number}", pod.uid);
                let pod = Arc::new(PodFacts { uid: uid.into(), ..pod.clone() });
                put.entry(id).or_default().push(Placed { pod, cards: compact(&placed) });
                true
            }
        }
    }
}
