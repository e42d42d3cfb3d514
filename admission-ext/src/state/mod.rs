//! The cluster as the extender knows it: an index kept up to date by deltas, never a walk over all pods.
//!
//! ```text
//! Pods, Nodes, GPUShadows ── watch or snapshot ──► Cluster ◄── assume, confirm, forget ── bind
//!                                                    │
//!                                                    └── nodes: one per node, occupancy ready made ──► filter, prioritize
//! ```

mod headroom;
pub mod node;
mod plain;
pub mod pod;
pub mod quota;
mod strings;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use gpu_migrate_model::ask::PodKind;

use gpu_migrate_model::crd::GPUConfigSpec;
use gpu_migrate_model::ledger::Ledger;
use gpu_migrate_model::names;
use gpu_migrate_model::score::HostResources;
use gpu_migrate_model::topology::Tree;

use self::headroom::Headroom;
use self::node::{Inventory, NodeFacts, NodeOccupancy, Placed, PublishedHold, ShadowFacts, occupancy};
use self::plain::{HeldByPlain, PlainPod, PlainPods};
use self::pod::{Cards, PodFacts};
use self::quota::{Contribution, Quotas};
use self::strings::Strings;
use gpu_migrate_model::capacity::NodeCapacity;

/// So many trees of cards are compared with that of a new GPUShadow; others have copies of their own.
const TREES: usize = 32;

/// Where a node is in [`Cluster::nodes`]. The place of one that is gone is given to another.
pub type NodeId = usize;

/// One node. Filter looks at thousands for each pod: what it looks at comes first and lies together.
#[derive(Debug, Default)]
#[repr(C)]
pub struct NodeInfo {
    /// The node or its shadow was seen, and not only pods on it.
    known: bool,
    /// Counts up whenever the occupancy changes.
    pub generation: u64,
    /// The occupancy in a few bytes per card, for the fast fit.
    pub capacity: NodeCapacity,
    pub name: Arc<str>,
    /// What the Node object says; `None` while only its shadow or its pods are known.
    pub facts: Option<NodeFacts>,
    pub inventory: Inventory,
    /// What its bridge found on it.
    pub published: Arc<[PublishedHold]>,
    /// Pods bound to it or assumed on it, by UID.
    pub pods: HashMap<Arc<str>, Placed>,
    /// Pods that wait for it while preemption makes room for them.
    pub nominated: Vec<Arc<PodFacts>>,
    pub occupancy: NodeOccupancy,
    /// CPU and memory that are left, rounded down; for scores, as whether they are enough is the scheduler's to say.
    pub host: HostResources,
    plain: HeldByPlain,
    shadow: Option<ShadowFacts>,
    contribution: Contribution,
    /// Cards that shares never use.
    reserved: Vec<u32>,
    stale: bool,
}

impl NodeInfo {
    /// The occupancy without these pods, for a pod that is already assumed here.
    #[must_use]
    pub fn occupancy_without(&self, without: impl Fn(&str) -> bool) -> (Ledger, NodeOccupancy) {
        self.occupancy_with(&[], without)
    }

    /// The occupancy with further pods and without others, for trying out what would be.
    #[must_use]
    pub fn occupancy_with(
        &self,
        further: &[Placed],
        without: impl Fn(&str) -> bool,
    ) -> (Ledger, NodeOccupancy) {
        let none = NodeFacts::default();
        let facts = self.facts.as_ref().unwrap_or(&none);
        occupancy(&self.inventory, facts, &self.published, self.pods.values().chain(further), without)
    }

    /// Whether the node has the labels that the pod wants.
    #[must_use]
    pub fn selected_by(&self, pod: &PodFacts) -> bool {
        let labels = self.facts.as_ref().map(|facts| &facts.labels);
        let label = |key: &str| labels.and_then(|labels| labels.get(key)).map(|value| &**value);
        pod.node_selector.iter().all(|(key, value)| label(key) == Some(value))
    }

    fn settle(&mut self) {
        let replaced = |shadow: &ShadowFacts| {
            let uid = self.facts.as_ref().map_or("", |facts| &facts.uid);
            !uid.is_empty() && shadow.node_uid.as_deref().is_some_and(|owner| owner != uid)
        };
        (self.inventory, self.published) = match self.shadow.as_ref().filter(|shadow| !replaced(shadow)) {
            Some(shadow) => (shadow.inventory.clone(), shadow.published.clone()),
            None => {
                let capacity = self.facts.as_ref().map(|facts| facts.inventory(&self.name));
                (capacity.unwrap_or_default(), Arc::default())
            }
        };
        // On its way to whole cards alone: what is there stays, no card takes another share.
        let labels = self.facts.as_ref().map(|facts| &facts.labels);
        let closed = self.inventory.closed
            || labels.and_then(|labels| labels.get(names::NO_NEW_SHARES)).is_some_and(|on| &**on == "true");
        self.inventory.reserved = if closed {
            (0..u32::try_from(self.inventory.cards.len()).unwrap_or(u32::MAX)).collect()
        } else {
            self.reserved.clone()
        };
        self.occupancy = self.occupancy_without(|_| false).1;
        let (occupancy, inventory) = (&self.occupancy, &self.inventory);
        self.capacity = NodeCapacity::new(
            &occupancy.for_shares(inventory),
            occupancy.free_for_legacy(),
            occupancy.unattributed,
            inventory.legacy_only,
        );
        if occupancy.parts.is_some() {
            self.capacity.divide();
        }
        self.host = self.host_left();
        self.generation += 1;
        self.stale = false;
    }

    fn host_left(&self) -> HostResources {
        let all = self.facts.as_ref().map_or(HostResources::UNLIMITED, |facts| facts.host);
        let left =
            self.pods.values().fold(all.less(self.plain.all()), |left, placed| left.less(placed.pod.host));
        left.rounded_down()
    }
}

/// A choice of ours that the watch has not confirmed yet.
#[derive(Clone, Debug)]
pub struct Assumption {
    pub node: Arc<str>,
    pub cards: Cards,
    /// When its outcome is looked up if nothing was heard until then.
    pub until: Instant,
}

/// A pod that the index knows.
#[derive(Debug)]
struct Known {
    pod: Arc<PodFacts>,
    /// Where it is on the occupancy.
    info: Option<NodeId>,
    /// [`Cluster::lists`] when the API last showed it.
    list: u64,
}

/// The members of a gang, and how many of them are what [`Standing`] says.
#[derive(Debug, Default)]
struct Gang {
    uids: BTreeSet<Arc<str>>,
    /// As its PodGroup says; 0: there is none, or it was not read yet.
    size: u32,
    coming: usize,
    bound: usize,
    gated: usize,
    waiting: usize,
    stuck: usize,
}

impl Gang {
    fn tallies(&mut self) -> [&mut usize; 5] {
        [&mut self.coming, &mut self.bound, &mut self.gated, &mut self.waiting, &mut self.stuck]
    }
}

/// What a pod is in its gang.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Standing {
    gang: Arc<str>,
    /// Placed, or kept out of the scheduler's queue by nothing but the gang itself.
    coming: bool,
    /// The API says where it is.
    bound: bool,
    /// By our gate.
    gated: bool,
    /// In the scheduler's queue.
    waiting: bool,
    /// Its scheduler finds no node for it.
    stuck: bool,
}

impl Standing {
    fn tallies(&self) -> [bool; 5] {
        [self.coming, self.bound, self.gated, self.waiting, self.stuck]
    }
}

/// A gang, and the UID of the controller of a member that has succeeded.
type Success = (Arc<str>, Option<Arc<str>>);

/// Something that a waiting pod may use, for requeueing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Freed {
    /// The node with more free capacity than before; `None`: not a matter of one node.
    pub node: Option<Arc<str>>,
    /// [`Cluster::frees`] with this one.
    pub count: u64,
}

#[derive(Debug, Default)]
pub struct Cluster {
    nodes: Vec<NodeInfo>,
    by_name: HashMap<Arc<str>, NodeId, ahash::RandomState>,
    pods: HashMap<Arc<str>, Known>,
    plain: PlainPods,
    assumed: HashMap<Arc<str>, Assumption>,
    gangs: HashMap<Arc<str>, Gang>,
    /// Gangs of which a member waits to be scheduled.
    waiting: BTreeSet<Arc<str>>,
    /// Members of gangs that have succeeded and are still in the API, by UID: the gang and the member's controller, and as in
    /// [`Known::list`].
    succeeded: HashMap<Arc<str>, (Success, u64)>,
    /// How many of those there are.
    successes: HashMap<Success, usize>,
    /// Where pods are nominated to, by UID.
    nominated: HashMap<Arc<str>, NodeId>,
    /// Places in `nodes` that are free.
    vacant: Vec<NodeId>,
    /// The nodes that are known, by what is left on them.
    headroom: Headroom,
    /// How often something changed by which a pod may fit that did not.
    growth: u64,
    /// Of all nodes.
    disputed_cards: usize,
    /// Nodes that the API has.
    node_count: usize,
    config: GPUConfigSpec,
    quotas: Quotas,
    /// Cards of each pool that shares never use.
    reserved: HashMap<String, Vec<u32>>,
    /// How often the pods of the API were listed.
    lists: u64,
    /// How often something was freed, and what of it was not fetched yet.
    frees: u64,
    freed: Vec<Freed>,
    strings: Strings,
    /// The trees of cards that nodes have: a few in most clusters.
    trees: Vec<Arc<Tree>>,
    /// Slots are settled one by one as they change, but for the first filling.
    loading: bool,
}

impl Cluster {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts off computing the occupancy until [`Cluster::settle`]: for filling with thousands of objects at once.
    pub fn load(&mut self) {
        self.loading = true;
    }

    /// Computes the occupancy of all nodes that changed since [`Cluster::load`].
    pub fn settle(&mut self) {
        self.loading = false;
        self.growth += 1;
        for id in 0..self.nodes.len() {
            if self.nodes[id].stale {
                self.rebuild_node(id);
            }
        }
    }

    /// How often something was freed since the beginning.
    #[must_use]
    pub fn frees(&self) -> u64 {
        self.frees
    }

    /// What was freed since this was last called.
    #[must_use]
    pub fn take_freed(&mut self) -> Vec<Freed> {
        std::mem::take(&mut self.freed)
    }

    /// Waiting pods may have become placeable for a reason that is not one node's.
    pub fn free_somewhere(&mut self) {
        self.free(None);
    }

    fn free(&mut self, node: Option<Arc<str>>) {
        self.frees += 1;
        self.freed.push(Freed { node, count: self.frees });
    }

    /// The quotas, and what is used of them.
    #[must_use]
    pub fn quotas(&self) -> &Quotas {
        &self.quotas
    }

    /// What the owner's GPUConfig says. Everything is counted once, and by deltas from then on. Whether it says something new.
    pub fn set_config(&mut self, config: GPUConfigSpec) -> bool {
        if config == self.config {
            return false;
        }
        self.config = config.clone();
        let reserved = config.node_pools.into_iter().filter(|pool| !pool.reserved_cards.is_empty());
        let reserved: HashMap<_, _> = reserved.map(|pool| (pool.name, pool.reserved_cards)).collect();
        if reserved != self.reserved {
            self.reserved = reserved;
            self.growth += 1;
            (0..self.nodes.len()).for_each(|id| self.rebuild_node(id));
        }
        self.quotas.set(config.quotas);
        for info in &mut self.nodes {
            info.contribution =
                if self.quotas.is_empty() { Contribution::default() } else { quota::contribution(info) };
            self.quotas.add(&info.contribution);
        }
        true
    }

    #[must_use]
    pub fn node_count(&self) -> usize {
        self.node_count
    }

    /// Cards found in breach of an invariant.
    #[must_use]
    pub fn disputed_cards(&self) -> usize {
        self.disputed_cards
    }

    #[must_use]
    pub fn pod_count(&self) -> usize {
        self.pods.len()
    }

    /// How many choices are not confirmed.
    #[must_use]
    pub fn assumption_count(&self) -> usize {
        self.assumed.len()
    }

    /// The node of this name, if a Node object or a GPUShadow was seen.
    #[must_use]
    pub fn node(&self, name: &str) -> Option<&NodeInfo> {
        self.node_with_id(name).map(|(_, info)| info)
    }

    #[must_use]
    pub fn node_with_id(&self, name: &str) -> Option<(NodeId, &NodeInfo)> {
        let id = *self.by_name.get(name)?;
        let info = &self.nodes[id];
        info.known.then_some((id, info))
    }

    /// The node with this number, if there is one now.
    #[must_use]
    pub fn node_at(&self, id: NodeId) -> Option<&NodeInfo> {
        self.nodes.get(id).filter(|info| info.known)
    }

    /// How many numbers of nodes are in use.
    #[must_use]
    pub fn node_id_count(&self) -> usize {
        self.nodes.len()
    }

    pub fn nodes(&self) -> impl Iterator<Item = &NodeInfo> {
        self.nodes.iter().filter(|info| info.known)
    }

    /// The numbers of the nodes that may have room for the pod: those with least left first. A node that is not among them has none.
    #[must_use]
    pub fn with_room_for(&self, pod: &PodFacts) -> Vec<NodeId> {
        self.headroom.for_request(pod.summary(), pod.demand()).collect()
    }

    /// Stays the same while no pod fits anywhere that did not fit before.
    #[must_use]
    pub fn growth(&self) -> u64 {
        self.growth
    }

    #[must_use]
    pub fn pod(&self, uid: &str) -> Option<&Arc<PodFacts>> {
        self.pods.get(uid).map(|known| &known.pod)
    }

    pub fn pods(&self) -> impl Iterator<Item = &Arc<PodFacts>> {
        self.pods.values().map(|known| &known.pod)
    }

    /// Whether the pod is counted on some node: bound, or assumed.
    #[must_use]
    pub fn is_placed(&self, uid: &str) -> bool {
        self.node_of(uid).is_some()
    }

    /// The number of the node that the pod is counted on.
    #[must_use]
    pub fn node_of(&self, uid: &str) -> Option<NodeId> {
        self.pods.get(uid)?.info
    }

    /// The gangs that have members behind our gate.
    pub fn gated_gangs(&self) -> impl Iterator<Item = &Arc<str>> {
        self.gangs.iter().filter(|(_, gang)| gang.gated > 0).map(|(key, _)| key)
    }

    /// The members of a gang, but for those that are leaving.
    pub fn members(&self, gang: &str) -> impl Iterator<Item = &Arc<PodFacts>> {
        let uids = self.gangs.get(gang).into_iter().flat_map(|gang| &gang.uids);
        uids.filter_map(|uid| self.pod(uid)).filter(|pod| !pod.leaving)
    }

    /// How many members of a gang are placed, or are kept out of the scheduler's queue by nothing but the gang itself.
    #[must_use]
    pub fn coming(&self, gang: &str) -> usize {
        self.gangs.get(gang).map_or(0, |gang| gang.coming)
    }

    /// How many members of a gang the API says to be bound.
    #[must_use]
    pub fn bound(&self, gang: &str) -> usize {
        self.gangs.get(gang).map_or(0, |gang| gang.bound)
    }

    /// Whether a member of another gang waits to be scheduled.
    #[must_use]
    pub fn another_gang_waits(&self, gang: &Arc<str>) -> bool {
        self.waiting.iter().any(|other| other != gang)
    }

    /// A member of the gang, other than `uid`, for which its scheduler finds no node.
    #[must_use]
    pub fn stuck_member(&self, gang: &str, uid: &str) -> Option<&Arc<PodFacts>> {
        let any = self.gangs.get(gang).is_some_and(|gang| gang.stuck > 0);
        let stuck = |member: &&Arc<PodFacts>| {
            *member.uid != *uid && self.standing(&member.uid).is_some_and(|it| it.stuck)
        };
        any.then(|| self.members(gang).find(stuck)).flatten()
    }

    /// How many members of a gang have succeeded, of those with this controller: a Job that runs again under the same name is
    /// another gang.
    #[must_use]
    pub fn succeeded(&self, gang: &Arc<str>, owner: Option<&Arc<str>>) -> usize {
        if self.successes.is_empty() {
            return 0;
        }
        self.successes.get(&(Arc::clone(gang), owner.cloned())).copied().unwrap_or(0)
    }

    /// Tells a pod the size of its gang, where its PodGroup says it and was read.
    pub fn size(&self, pod: &mut PodFacts) {
        if let Some(gang) = &mut pod.gang
            && gang.group.is_some()
        {
            gang.size = self.gangs.get(&gang.key).map_or(0, |gang| gang.size);
        }
    }

    /// A member of each gang whose PodGroup was not read yet.
    pub fn of_unsized_gangs(&self) -> impl Iterator<Item = &Arc<PodFacts>> {
        let unsized_gangs = self.gangs.values().filter(|gang| gang.size == 0);
        let firsts = unsized_gangs.filter_map(|gang| self.pod(gang.uids.first()?));
        firsts.filter(|pod| pod.gang.as_ref().is_some_and(|gang| gang.size == 0))
    }

    /// The PodGroup of a gang says how many members it has. Whether that is news.
    pub fn set_size(&mut self, gang: &Arc<str>, size: u32) -> bool {
        let Some(of) = self.gangs.get_mut(gang) else { return false };
        let before = std::mem::replace(&mut of.size, size);
        for uid in &of.uids {
            if let Some(known) = self.pods.get_mut(uid)
                && let Some(gang) = &mut Arc::make_mut(&mut known.pod).gang
                && gang.group.is_some()
            {
                gang.size = size;
            }
        }
        before != size
    }

    /// All pods of the API are going to be listed.
    pub fn begin_list(&mut self) {
        self.lists += 1;
    }

    /// UIDs of the pods that the API has not shown since the last list began, of those that have succeeded too.
    #[must_use]
    pub fn unlisted(&self) -> Vec<Arc<str>> {
        let pods = self.pods.iter().map(|(uid, known)| (uid, known.list));
        let succeeded = self.succeeded.iter().map(|(uid, (_, list))| (uid, *list));
        pods.chain(succeeded).filter(|(_, list)| *list < self.lists).map(|(uid, _)| Arc::clone(uid)).collect()
    }

    /// A member of a gang has succeeded.
    pub fn note_success(&mut self, uid: &str, gang: Arc<str>, owner: Option<Arc<str>>) {
        let uid = Arc::from(uid);
        if self.succeeded.insert(uid, ((Arc::clone(&gang), owner.clone()), self.lists)).is_none() {
            *self.successes.entry((gang, owner)).or_default() += 1;
        }
    }

    fn forget_success(&mut self, uid: &str) {
        let Some((of, _)) = self.succeeded.remove(uid) else { return };
        if let Some(count) = self.successes.get_mut(&of) {
            *count -= 1;
            if *count == 0 {
                self.successes.remove(&of);
            }
        }
    }

    /// The choice made for this pod, while it is not confirmed.
    #[must_use]
    pub fn assumption(&self, uid: &str) -> Option<&Assumption> {
        self.assumed.get(uid)
    }

    /// A Node was added or changed.
    pub fn set_node(&mut self, name: &str, mut facts: NodeFacts) {
        let shared = |(mut key, mut value): (Arc<str>, Arc<str>)| {
            self.strings.share(&mut key);
            self.strings.share(&mut value);
            (key, value)
        };
        facts.labels = std::mem::take(&mut facts.labels).into_iter().map(shared).collect();
        let id = self.node_id(name);
        if self.nodes[id].facts.as_ref() != Some(&facts) {
            self.growth += 1;
            self.change(id, |info| info.facts = Some(facts));
        }
    }

    pub fn remove_node(&mut self, name: &str) {
        if let Some(id) = self.by_name.get(name) {
            self.change(*id, |info| info.facts = None);
        }
    }

    /// A GPUShadow was added or changed.
    pub fn set_shadow(&mut self, name: &str, shadow: ShadowFacts) {
        // Without cards it is the operator's word on a node without an agent: the node's capacity counts.
        let mut shadow = (!shadow.inventory.cards.is_empty()).then_some(shadow);
        if let Some(shadow) = &mut shadow {
            self.share_tree(&mut shadow.inventory.tree);
        }
        let id = self.node_id(name);
        let before = self.nodes[id].shadow.as_ref();
        if before != shadow.as_ref() {
            let same =
                before.map(|shadow| &shadow.inventory) == shadow.as_ref().map(|shadow| &shadow.inventory);
            self.growth += u64::from(!same);
            self.change(id, |info| info.shadow = shadow);
        }
    }

    fn share_tree(&mut self, tree: &mut Arc<Tree>) {
        match self.trees.iter().find(|known| *known == tree) {
            Some(known) => *tree = Arc::clone(known),
            None => {
                self.trees.retain(|known| Arc::strong_count(known) > 1);
                if self.trees.len() < TREES {
                    self.trees.push(Arc::clone(tree));
                }
            }
        }
    }

    pub fn remove_shadow(&mut self, name: &str) {
        if let Some(id) = self.by_name.get(name) {
            self.growth += 1;
            self.change(*id, |info| info.shadow = None);
        }
    }

    /// A pod was added or changed. Finished pods are to be removed instead.
    pub fn set_pod(&mut self, mut pod: PodFacts) {
        self.size(&mut pod);
        self.share_strings(&mut pod);
        self.count_again(&Arc::clone(&pod.uid), |cluster| cluster.insert_pod(Arc::new(pod)));
    }

    fn share_strings(&mut self, pod: &mut PodFacts) {
        let PodFacts { namespace, scheduler, node, nominated, owner, gang, .. } = pod;
        let gang = gang.as_mut().map(|gang| &mut gang.key);
        let optional = [node.as_mut(), nominated.as_mut(), owner.as_mut(), gang];
        let all = [namespace, scheduler].into_iter().chain(optional.into_iter().flatten());
        all.for_each(|text| self.strings.share(text));
    }

    fn insert_pod(&mut self, pod: Arc<PodFacts>) {
        let uid = Arc::clone(&pod.uid);
        let Some(node) = pod.node.clone() else {
            // An older event than our own binding: the assumption stands.
            let info = self.pods.get(&uid).and_then(|known| known.info);
            self.pods.insert(Arc::clone(&uid), Known { pod, info, list: self.lists });
            self.nominate(&uid);
            return;
        };
        // Confirmed, or bound by someone else: either way the API says where it is.
        self.assumed.remove(&uid);
        let cards = pod.cards.clone();
        self.place(&node, pod, cards);
        if let Some(known) = self.pods.get_mut(&uid) {
            known.list = self.lists;
        }
    }

    /// A pod without cards is on a node. Whether that is news, and the node one with cards.
    pub fn set_plain(&mut self, uid: &str, node: &str, host: HostResources) -> bool {
        let id = self.node_id(node);
        let pod = PlainPod { node: u32::try_from(id).unwrap_or(u32::MAX), list: self.plain_list(), host };
        let before = self.plain.insert(uid, pod);
        if before.is_none_or(|before| (before.node, before.host) != (pod.node, host)) {
            self.change_host(id, |plain| plain.add(host));
            before.into_iter().for_each(|before| self.take_back_plain(before));
        }
        before.is_none() && !self.nodes[id].inventory.cards.is_empty()
    }

    /// What the pods without cards request that are on nodes with cards.
    pub fn plain_on_cards(&self) -> impl Iterator<Item = HostResources> {
        let has_cards = |pod: &&PlainPod| !self.nodes[pod.node()].inventory.cards.is_empty();
        self.plain.iter().filter(has_cards).map(|pod| pod.host)
    }

    /// Pods without cards that the API has not shown since the last list began are gone.
    pub fn remove_unlisted_plain(&mut self) {
        let list = self.plain_list();
        let gone = self.plain.take_unlisted(list);
        gone.into_iter().for_each(|pod| self.take_back_plain(pod));
    }

    #[allow(clippy::cast_possible_truncation)] // lists that follow one another differ
    fn plain_list(&self) -> u32 {
        self.lists as u32
    }

    fn take_back_plain(&mut self, pod: PlainPod) {
        self.change_host(pod.node(), |plain| plain.take_back(pod.host));
        self.vacate(pod.node());
    }

    fn change_host(&mut self, id: NodeId, edit: impl FnOnce(&mut HeldByPlain)) {
        let info = &mut self.nodes[id];
        edit(&mut info.plain);
        if self.loading {
            info.stale = true;
            return;
        }
        let left = info.host_left();
        info.generation += u64::from(info.host != left);
        info.host = left;
    }

    /// A pod is gone or has finished.
    pub fn remove_pod(&mut self, uid: &str) {
        self.forget_success(uid);
        self.remove_plain(uid);
        self.count_again(uid, |cluster| {
            cluster.assumed.remove(uid);
            let known = cluster.pods.remove(uid);
            cluster.nominate(uid);
            if let Some(id) = known.and_then(|known| known.info) {
                cluster.change(id, |info| {
                    info.pods.remove(uid);
                });
            }
        });
    }

    /// Counts our own choice before the watch confirms it.
    pub fn assume(&mut self, pod: &Arc<PodFacts>, node: &str, cards: Cards, until: Instant) {
        let assumption = Assumption { node: Arc::from(node), cards: cards.clone(), until };
        self.count_again(&pod.uid, |cluster| {
            cluster.assumed.insert(Arc::clone(&pod.uid), assumption);
            cluster.place(node, Arc::clone(pod), cards);
        });
    }

    /// Puts off the look-up of a choice that is tried again.
    pub fn renew(&mut self, uid: &str, until: Instant) {
        if let Some(assumption) = self.assumed.get_mut(uid) {
            assumption.until = until;
        }
    }

    fn remove_plain(&mut self, uid: &str) {
        if let Some(pod) = self.plain.remove(uid) {
            self.take_back_plain(pod);
        }
    }

    /// Takes a choice back that will certainly not come true.
    pub fn forget(&mut self, uid: &str) {
        if self.assumed.remove(uid).is_none() {
            return;
        }
        self.remove_plain(uid);
        self.count_again(uid, |cluster| {
            if let Some(id) = cluster.pods.get_mut(uid).and_then(|known| known.info.take()) {
                cluster.change(id, |info| {
                    info.pods.remove(uid);
                });
            }
            cluster.nominate(uid);
        });
    }

    fn standing(&self, uid: &str) -> Option<Standing> {
        let Known { pod, info, .. } = self.pods.get(uid)?;
        let gang = Arc::clone(&pod.gang.as_ref()?.key);
        let coming = !pod.leaving && !pod.gated_by_others;
        Some(Standing {
            gang,
            coming,
            bound: !pod.leaving && pod.node.is_some(),
            gated: !pod.leaving && pod.gated,
            waiting: !pod.leaving && !pod.gated && info.is_none(),
            stuck: coming && pod.unschedulable && info.is_none(),
        })
    }

    /// Edits what is known of a pod, and counts it again in its gang.
    fn count_again(&mut self, uid: &str, edit: impl FnOnce(&mut Self)) {
        let before = self.standing(uid);
        edit(self);
        let now = self.standing(uid);
        if before == now {
            return;
        }
        if let Some(now) = &now {
            let gang = self.gangs.entry(Arc::clone(&now.gang)).or_default();
            gang.uids.insert(Arc::from(uid));
            gang.tallies().into_iter().zip(now.tallies()).for_each(|(sum, one)| *sum += usize::from(one));
        }
        if let Some(before) = &before
            && let Some(gang) = self.gangs.get_mut(&before.gang)
        {
            gang.tallies().into_iter().zip(before.tallies()).for_each(|(sum, one)| *sum -= usize::from(one));
            if now.as_ref().is_none_or(|now| now.gang != before.gang) {
                gang.uids.remove(uid);
            }
        }
        for Standing { gang: key, .. } in before.into_iter().chain(now) {
            let gang = self.gangs.get(&key);
            if gang.is_some_and(|gang| gang.waiting > 0) {
                self.waiting.insert(Arc::clone(&key));
            } else {
                self.waiting.remove(&key);
            }
            if gang.is_some_and(|gang| gang.uids.is_empty()) {
                self.gangs.remove(&key);
            }
        }
    }

    /// Notes where a pod is nominated to: nowhere once it is placed or gone.
    fn nominate(&mut self, uid: &str) {
        let waiting = self.pods.get(uid).filter(|known| known.info.is_none() && !known.pod.leaving);
        let pod = waiting.map(|known| Arc::clone(&known.pod)).filter(|pod| pod.nominated.is_some());
        let node = pod.as_ref().and_then(|pod| pod.nominated.clone());
        let to = node.map(|node| self.node_id(&node));
        let from = self.nominated.remove(uid);
        if let Some(id) = from {
            self.nodes[id].nominated.retain(|other| *other.uid != *uid);
        }
        if let (Some(id), Some(pod)) = (to, pod) {
            self.nominated.insert(Arc::clone(&pod.uid), id);
            self.nodes[id].nominated.push(pod);
        }
        if let Some(id) = from.filter(|_| from != to) {
            self.free(Some(Arc::clone(&self.nodes[id].name)));
            self.vacate(id);
        }
    }

    /// The choices whose outcome should be looked up by now.
    #[must_use]
    pub fn expired(&self, now: Instant) -> Vec<Arc<PodFacts>> {
        let late = self.assumed.iter().filter(|(_, assumption)| assumption.until <= now);
        late.filter_map(|(uid, _)| self.pods.get(uid).map(|known| Arc::clone(&known.pod))).collect()
    }

    fn node_id(&mut self, name: &str) -> NodeId {
        if let Some(id) = self.by_name.get(name) {
            return *id;
        }
        let mut name: Arc<str> = Arc::from(name);
        self.strings.share(&mut name);
        let new = |generation| NodeInfo { name: Arc::clone(&name), generation, ..NodeInfo::default() };
        let id = match self.vacant.pop() {
            // What was known of the place's last node must not be taken for this one's.
            Some(id) => {
                self.nodes[id] = new(self.nodes[id].generation + 1);
                id
            }
            None => {
                self.nodes.push(new(0));
                self.nodes.len() - 1
            }
        };
        self.by_name.insert(name, id);
        id
    }

    /// Gives the place of a node back of which nothing is known any more.
    fn vacate(&mut self, id: NodeId) {
        let info = &mut self.nodes[id];
        let empty = !info.known && info.pods.is_empty() && info.nominated.is_empty() && info.plain.pods == 0;
        if empty && self.by_name.get(&info.name) == Some(&id) {
            self.quotas.take_back(&std::mem::take(&mut info.contribution));
            self.by_name.remove(&info.name);
            self.vacant.push(id);
        }
    }

    fn place(&mut self, node: &str, pod: Arc<PodFacts>, cards: Cards) {
        let id = self.node_id(node);
        let uid = Arc::clone(&pod.uid);
        let list = self.pods.get(&uid).map_or(self.lists, |known| known.list);
        let known = Known { pod: Arc::clone(&pod), info: Some(id), list };
        let before = self.pods.insert(Arc::clone(&uid), known);
        self.nominate(&uid);
        if let Some(old) = before.and_then(|known| known.info).filter(|old| *old != id) {
            self.change(old, |info| {
                info.pods.remove(&uid);
            });
        }
        if pod.kind == PodKind::Plain {
            self.set_plain(&uid, node, pod.host);
            return;
        }
        let same = self.nodes[id].pods.get(&uid);
        let same = same.is_some_and(|there| there.cards == cards && there.pod.host == pod.host);
        if same {
            // Most updates of a running pod: nothing that the occupancy depends on.
            self.nodes[id].pods.insert(uid, Placed { pod, cards });
            return;
        }
        self.change(id, |info| {
            info.pods.insert(uid, Placed { pod, cards });
        });
    }

    fn rebuild_node(&mut self, id: NodeId) {
        let info = &mut self.nodes[id];
        let pool = info.facts.as_ref().and_then(|facts| facts.labels.get(names::POOL));
        info.reserved = pool.and_then(|pool| self.reserved.get(&**pool)).cloned().unwrap_or_default();
        self.disputed_cards -= info.occupancy.disputed();
        info.settle();
        self.disputed_cards += info.occupancy.disputed();
        self.headroom.set(id, info.known.then_some(&info.capacity));
        if !self.quotas.is_empty() {
            self.quotas.take_back(&info.contribution);
            info.contribution = quota::contribution(info);
            self.quotas.add(&info.contribution);
        }
    }

    /// Changes a node and computes its occupancy again.
    fn change(&mut self, id: NodeId, edit: impl FnOnce(&mut NodeInfo)) {
        let info = &mut self.nodes[id];
        self.node_count -= usize::from(info.facts.is_some());
        edit(info);
        self.node_count += usize::from(info.facts.is_some());
        info.known = info.facts.is_some() || info.shadow.is_some();
        if self.loading {
            info.stale = true;
            return;
        }
        let before = info.capacity.clone();
        self.rebuild_node(id);
        let info = &self.nodes[id];
        if info.capacity.more_than(&before) {
            self.growth += 1;
            let name = Arc::clone(&info.name);
            self.free(Some(name));
        }
        self.vacate(id);
    }
}
