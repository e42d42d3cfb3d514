//! The world around the books: what is really on the cards, and everyone's possibly outdated idea of it.
//!
//! Narrower than reality, on purpose: the agent reads every version of the kubelet's book before the next one replaces it or
//! something spoils it ([`World::write_book`]), and it is not killed while containers run that the kubelet has forgotten
//! ([`World::restart_agent`]).

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use gpu_migrate_model::ask::{ContainerAsk, ContainerKind, Demand};
use gpu_migrate_model::card::{Card, CardState, Health};
use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::topology::{LinkLevel, Topology};
use gpu_migrate_model::units::{Blocks, CardIndex, Cores};

use super::super::{Books, ContainerView, PodPhase, PodView, Resource, Settings, UpstreamDevice};
use crate::checkpoint::{Checkpoint, DeviationFile};
use crate::kubelet::podresources::ContainerDevices;

pub(super) const CARDS: usize = 3;
pub(super) const BLOCKS: u32 = 4;
const GPU: &str = "nvidia.com/gpu";
const CORE: &str = "tencent.com/vcuda-core";
const MEMORY: &str = "tencent.com/vcuda-memory";

/// A failure in the middle of an admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    /// The kubelet dies after it was answered and before it wrote its book; its successor admits again.
    KubeletDies,
    /// The agent dies after it decided and before it wrote its deviations; the kubelet sees an error.
    AgentDies,
    /// The agent dies after it wrote its deviations and before it answered.
    AgentDiesAfterWriting,
    /// The agent dies right after it answered. The kubelet has its answer, and asks the next life for the rest.
    AgentDiesAfterAnswering,
}

/// One container's devices in the kubelet's book.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Row {
    pod: String,
    container: String,
    kind: ContainerKind,
    resource: &'static str,
    ids: BTreeSet<String>,
    /// The plugin's answer: cores and blocks by card.
    answer: BTreeMap<usize, (u32, u32)>,
}

/// What a container was really given.
#[derive(Clone, Debug)]
struct Given {
    pod: String,
    container: String,
    kind: ContainerKind,
    demand: Demand,
    /// Cores and blocks by card. A shared container sees the cards that the answer for its cores names; there it uses its
    /// memory too, wherever that is accounted for.
    cards: BTreeMap<usize, (u32, u32)>,
}

impl Given {
    const fn legacy(&self) -> bool {
        self.demand.legacy > 0
    }

    fn take(&mut self, resource: &str, answer: &BTreeMap<usize, (u32, u32)>) {
        if resource == MEMORY {
            return;
        }
        self.cards.clone_from(answer);
        if resource == CORE {
            let each = self.demand.blocks.0.div_ceil(answer.len().max(1) as u32);
            self.cards.values_mut().for_each(|(_, blocks)| *blocks = each);
        }
    }
}

#[derive(Clone, Debug)]
enum News {
    Pod(Box<PodView>),
    Gone(String),
}

pub(super) struct World {
    broken: bool,
    pub(super) books: Books,
    now: u64,
    next: u32,
    // The API server, and what of it the agent has not heard yet.
    api: BTreeMap<String, PodView>,
    news: VecDeque<News>,
    // The kubelet.
    waiting: VecDeque<String>,
    rows: Vec<Row>,
    written: Vec<Row>,
    /// Grows with every write of its book.
    version: u64,
    ended: BTreeSet<String>,
    seen: BTreeMap<&'static str, BTreeMap<String, bool>>,
    /// Its book on disk is spoilt until it is written again.
    spoilt: bool,
    /// Pods that run and that it does not know of any more.
    forgotten: BTreeSet<String>,
    /// When it started anew, until the agent notices.
    unnoticed: Option<u64>,
    // The agent's memory beside its books, and its disk.
    read: Option<u64>,
    deviations: DeviationFile,
    upstream: Vec<bool>,
    // The truth.
    /// Admitted, and not started yet.
    admitted: Vec<Given>,
    running: Vec<Given>,
    /// Deleted with force: in the API no more, on the card until then.
    lingering: BTreeMap<String, u64>,
}

impl World {
    pub(super) fn new(broken: bool) -> Self {
        let mut world = Self {
            broken,
            books: fresh(broken),
            now: 1,
            next: 0,
            api: BTreeMap::new(),
            news: VecDeque::new(),
            waiting: VecDeque::new(),
            rows: Vec::new(),
            written: Vec::new(),
            version: 0,
            ended: BTreeSet::new(),
            seen: BTreeMap::new(),
            spoilt: false,
            forgotten: BTreeSet::new(),
            unnoticed: None,
            read: None,
            deviations: DeviationFile::default(),
            upstream: vec![true; CARDS],
            admitted: Vec::new(),
            running: Vec::new(),
            lingering: BTreeMap::new(),
        };
        world.books.observe_pods(Vec::new(), 0);
        world.read_book();
        world.tell_upstream();
        world.kubelet_hears_all();
        world
    }

    // ---- what owners of pods do ----

    /// Binds a pod with these containers; a shared one as the extender would, on a card that its view says fits.
    pub(super) fn bind(&mut self, containers: &[(ContainerKind, Demand)], reserved: Option<usize>) {
        self.next += 1;
        let uid = format!("pod-{}", self.next);
        let mut pod = PodView {
            uid: uid.clone(),
            api_uid: uid.clone(),
            namespace: "n".into(),
            name: uid.clone(),
            order: u64::from(self.next),
            ..PodView::default()
        };
        for (position, (kind, demand)) in containers.iter().enumerate() {
            let ask = ContainerAsk { name: format!("c{position}"), kind: *kind, position, demand: *demand };
            let reserved = reserved.map(|card| vec![CardIndex::from(card)]).unwrap_or_default();
            pod.containers.push(ContainerView { ask, reserved });
        }
        self.publish(pod);
        self.waiting.push_back(uid);
    }

    /// The containers of a running pod end by themselves.
    pub(super) fn end(&mut self, which: usize) {
        let Some(uid) = self.pick_running(which) else { return };
        self.stop(&uid);
        self.set_phase(&uid, PodPhase::Succeeded);
    }

    /// A pod is deleted, and ends before it leaves the API.
    pub(super) fn delete(&mut self, which: usize) {
        let Some(uid) = self.pick_running(which) else { return };
        self.stop(&uid);
        self.set_phase(&uid, PodPhase::Failed);
        self.api.remove(&uid);
        self.news.push_back(News::Gone(uid));
    }

    /// A pod is deleted with force: the kubelet forgets it at once, its containers take some seconds.
    pub(super) fn delete_with_force(&mut self, which: usize) {
        let Some(uid) = self.pick_running(which) else { return };
        self.ended.insert(uid.clone());
        self.admitted.retain(|g| g.pod != uid);
        self.api.remove(&uid);
        self.news.push_back(News::Gone(uid.clone()));
        self.lingering.insert(uid, self.now + 5_000);
    }

    fn pick_running(&self, which: usize) -> Option<String> {
        let given = self.running.iter().chain(&self.admitted).map(|g| &g.pod);
        let pods: BTreeSet<&String> = given.filter(|uid| !self.lingering.contains_key(*uid)).collect();
        let turn = which % pods.len().max(1);
        pods.into_iter().nth(turn).cloned()
    }

    fn stop(&mut self, uid: &str) {
        self.running.retain(|g| g.pod != uid);
        self.admitted.retain(|g| g.pod != uid);
        self.ended.insert(uid.to_owned());
    }

    fn publish(&mut self, pod: PodView) {
        self.news.push_back(News::Pod(Box::new(pod.clone())));
        self.api.insert(pod.uid.clone(), pod);
    }

    fn set_phase(&mut self, uid: &str, phase: PodPhase) {
        if let Some(mut pod) = self.api.get(uid).cloned() {
            pod.phase = phase;
            self.publish(pod);
        }
    }

    // ---- what the agent hears ----

    /// The next few pieces of news from the API server arrive.
    pub(super) fn hear(&mut self, count: usize) {
        for _ in 0..count {
            match self.news.pop_front() {
                Some(News::Pod(pod)) => self.books.observe_pod(*pod, self.now),
                Some(News::Gone(uid)) => self.books.observe_pod_gone(&uid, self.now),
                None => return,
            }
        }
    }

    /// The watch begins anew.
    pub(super) fn relist(&mut self) {
        self.notice();
        self.news.clear();
        self.books.observe_pods(self.api.values().cloned().collect(), self.now);
    }

    /// The agent reads the kubelet's book as it is on disk, unless it has read just that before.
    pub(super) fn read_book(&mut self) {
        if self.read != Some(self.version) {
            self.take_book();
        }
    }

    fn take_book(&mut self) {
        let text = self.book_text();
        let whole = if self.spoilt { &text[..text.len() / 2] } else { &text[..] };
        match Checkpoint::parse(whole) {
            Ok(_) if self.spoilt => panic!("half a book was read as a whole one"),
            Ok(book) if self.read == Some(self.version) => self.books.observe_same_book(&book, self.now),
            Ok(book) => {
                self.books.observe_book(&book, self.now);
                self.read = Some(self.version);
            }
            Err(_) => self.books.observe_refused_book(self.now),
        }
    }

    /// The kubelet writes its book. The agent has read the version before: a watch tells it of each.
    fn write_book(&mut self) {
        self.read_book();
        self.written = self.rows.clone();
        self.version += 1;
        self.spoilt = false;
    }

    fn book_text(&self) -> Vec<u8> {
        let rows: Vec<_> = self
            .written
            .iter()
            .map(|r| {
                serde_json::json!({"PodUID": r.pod, "ContainerName": r.container, "ResourceName": r.resource,
                "DeviceIDs": {"-1": r.ids}, "AllocResp": ""})
            })
            .collect();
        serde_json::json!({"Data": {"PodDeviceEntries": rows, "RegisteredDevices": {}}, "Checksum": 0})
            .to_string()
            .into_bytes()
    }

    /// Something cuts the book on disk short; not within the milliseconds before the agent has read it.
    pub(super) fn spoil_book(&mut self) {
        self.read_book();
        self.spoilt = true;
        self.version += 1;
        self.read_book();
    }

    /// The agent asks pod-resources.
    pub(super) fn ask(&mut self) {
        self.now += 1;
        let asked = self.now;
        let mut rows: BTreeMap<(&str, &str), ContainerDevices> = BTreeMap::new();
        for row in self.rows.iter().filter(|r| !self.ended.contains(&r.pod)) {
            let entry = rows.entry((&row.pod, &row.container)).or_insert_with(|| ContainerDevices {
                namespace: "n".into(),
                pod: row.pod.clone(),
                container: row.container.clone(),
                devices: BTreeMap::new(),
            });
            entry.devices.insert(row.resource.to_owned(), row.ids.iter().cloned().collect());
        }
        let rows: Vec<_> = rows.into_values().collect();
        self.now += 1;
        self.books.observe_list(&rows, asked, self.now);
    }

    /// Time passes. The API server is not silent for minutes without the watch beginning anew.
    pub(super) fn pass_time(&mut self, milliseconds: u64) {
        self.notice();
        if milliseconds >= 100_000 {
            self.hear(usize::MAX);
        }
        self.now += milliseconds;
        let over: Vec<String> =
            self.lingering.iter().filter(|(_, at)| **at <= self.now).map(|(u, _)| u.clone()).collect();
        for uid in over {
            self.lingering.remove(&uid);
            self.running.retain(|g| g.pod != uid);
        }
        self.books.reconcile(self.now);
    }

    pub(super) fn set_health(&mut self, card: usize, healthy: bool) {
        self.upstream[card % CARDS] = healthy;
        let health = if healthy { Health::Healthy } else { Health::Unhealthy };
        self.books.set_health(CardIndex::from(card % CARDS), health);
        self.tell_upstream();
    }

    pub(super) fn cordon(&mut self, mask: usize) {
        let cards = (0..CARDS).filter(|card| mask & (1 << card) != 0).map(CardIndex::from).collect();
        self.books.set_cordoned(&cards);
    }

    pub(super) fn lose_upstream(&mut self) {
        self.books.upstream_lost(GPU);
    }

    pub(super) fn tell_upstream(&mut self) {
        let devices = (0..CARDS)
            .map(|n| UpstreamDevice { id: uuid(n).into(), healthy: self.upstream[n], numa: Vec::new() })
            .collect();
        self.books.observe_upstream(GPU, Some(devices));
    }

    // ---- lives and deaths ----

    /// The agent is killed and starts anew from the disk.
    ///
    /// Not while containers run that the kubelet has forgotten (after its book was lost, or for the seconds that a pod deleted
    /// with force takes to end): no source then tells a new life of them, and the kubelet itself gives their devices away.
    pub(super) fn restart_agent(&mut self) {
        if !self.lingering.is_empty() || self.running.iter().any(|g| self.forgotten.contains(&g.pod)) {
            return;
        }
        self.books = fresh(self.broken);
        self.read = None;
        self.unnoticed = None;
        self.books.remember(self.deviations.data.entries.clone());
        self.news.clear();
        self.now += 1;
        for (card, healthy) in self.upstream.clone().into_iter().enumerate() {
            if !healthy {
                self.books.set_health(CardIndex::from(card), Health::Unhealthy);
            }
        }
        self.read_book();
        self.tell_upstream();
        // The kubelet loses its streams, and gets the first lists of the new life.
        self.kubelet_hears_all();
    }

    /// The kubelet is killed and starts anew from its book. The agent may notice only after it was asked by the new one.
    ///
    /// Not from half a book while the agent knows nothing either: see [`World::restart_agent`].
    pub(super) fn restart_kubelet(&mut self, noticed_late: bool) {
        if self.spoilt && !self.books.is_open() {
            return;
        }
        self.now += 1;
        if self.spoilt {
            self.forgotten = self.running.iter().map(|g| g.pod.clone()).collect();
            let forgotten: BTreeSet<String> = self.admitted.drain(..).map(|g| g.pod).collect();
            self.waiting.extend(forgotten);
        }
        self.rows = if self.spoilt { Vec::new() } else { self.written.clone() };
        self.seen.clear();
        self.unnoticed = Some(self.now);
        if !noticed_late {
            self.notice();
        }
        self.now += 1;
        self.read_book();
        self.kubelet_hears_all();
    }

    /// The agent sees that the kubelet's socket is another one.
    pub(super) fn notice(&mut self) {
        if let Some(at) = self.unnoticed.take() {
            self.books.observe_kubelet_start(!self.spoilt, at);
            self.take_book();
        }
    }

    /// A list reaches the kubelet.
    pub(super) fn kubelet_hears(&mut self, which: usize) {
        let resource = [GPU, CORE, MEMORY][which % 3];
        if which >= 3 {
            // It writes its book for every list, whatever it is in the middle of.
            self.write_book();
        }
        let kind = self.books.resource(resource);
        let list = self.books.list(&kind, self.now).into_iter().map(|d| (d.id, d.healthy)).collect();
        self.seen.insert(resource, list);
    }

    fn kubelet_hears_all(&mut self) {
        (0..3).for_each(|which| self.kubelet_hears(which));
    }

    // ---- admission ----

    /// The kubelet admits the next pod.
    pub(super) fn admit(&mut self, core_first: bool, fault: Fault, at: usize, shuffle: usize) {
        let Some(uid) = self.waiting.pop_front() else { return };
        let Some(pod) = self.api.get(&uid).cloned() else { return };
        let ended = self.ended.clone();
        self.rows.retain(|r| !ended.contains(&r.pod));
        let mut given = Vec::new();
        let mut step = 0;
        for container in &pod.containers {
            let mut got = Given {
                pod: uid.clone(),
                container: container.ask.name.clone(),
                kind: container.ask.kind,
                demand: container.ask.demand,
                cards: BTreeMap::new(),
            };
            for (resource, size) in wants(&container.ask.demand, core_first) {
                let fault = if step == at { fault } else { Fault::None };
                step += 1;
                match self.allocate(&mut got, resource, size, fault, shuffle) {
                    Outcome::Ok => {}
                    Outcome::Refused => return self.fail(&uid),
                    Outcome::KubeletDied => {
                        self.waiting.push_front(uid);
                        return self.restart_kubelet(shuffle & 0x200 != 0);
                    }
                    Outcome::AgentDied => {
                        self.restart_agent();
                        return self.fail(&uid);
                    }
                }
            }
            // The kubelet writes its book after each container.
            self.write_book();
            given.push(got);
        }
        self.admitted.extend(given);
        self.start();
    }

    /// The kubelet tries to start what it has admitted: a pod's containers one after the other, each when the agent lets it.
    pub(super) fn start(&mut self) {
        let mut waits = BTreeSet::new();
        for given in std::mem::take(&mut self.admitted) {
            if waits.contains(&given.pod) || !self.may_start(&given) {
                waits.insert(given.pod.clone());
                self.admitted.push(given);
                continue;
            }
            let uid = given.pod.clone();
            self.running.push(given);
            let started = |uid: &str| self.running.iter().filter(|g| g.pod == uid).count();
            if self.api.get(&uid).is_some_and(|pod| pod.containers.len() == started(&uid)) {
                self.set_phase(&uid, PodPhase::Running);
            }
        }
    }

    fn may_start(&mut self, given: &Given) -> bool {
        for (resource, _) in wants(&given.demand, true) {
            let Resource::Shared(shared) = self.books.resource(resource) else { continue };
            let of_it =
                |r: &&Row| r.pod == given.pod && r.container == given.container && r.resource == resource;
            let Some(row) = self.rows.iter().find(of_it) else { return false };
            let ids: Vec<String> = row.ids.iter().cloned().collect();
            self.read_book();
            if self.books.may_start(shared, &ids).is_err() {
                self.ask();
                if self.books.may_start(shared, &ids).is_err() {
                    return false;
                }
            }
            self.deviations = self.books.deviations();
        }
        true
    }

    fn fail(&mut self, uid: &str) {
        self.ended.insert(uid.to_owned());
        self.set_phase(uid, PodPhase::Failed);
    }

    fn allocate(
        &mut self,
        got: &mut Given,
        resource: &'static str,
        size: usize,
        fault: Fault,
        shuffle: usize,
    ) -> Outcome {
        self.now += 1;
        // What its book already has is not asked for again.
        let same = |r: &&Row| r.pod == got.pod && r.container == got.container && r.resource == resource;
        if let Some(row) = self.rows.iter().find(same) {
            got.take(resource, &row.answer);
            return Outcome::Ok;
        }
        let used: BTreeSet<&String> =
            self.rows.iter().filter(|r| r.resource == resource).flat_map(|r| &r.ids).collect();
        let Some(seen) = self.seen.get(resource) else { return Outcome::Refused };
        let free: BTreeSet<String> = seen
            .iter()
            .filter(|(id, healthy)| **healthy && !used.contains(id))
            .map(|(id, _)| id.clone())
            .collect();
        let uid = got.pod.clone();
        let mine = |init: bool| -> BTreeSet<String> {
            let of_pod = self.rows.iter().filter(|r| r.pod == uid && r.resource == resource);
            of_pod.filter(|r| (r.kind == ContainerKind::Init) == init).flat_map(|r| r.ids.clone()).collect()
        };
        let mut chosen: BTreeSet<String> = mine(true).difference(&mine(false)).take(size).cloned().collect();
        if free.len() + chosen.len() < size {
            return Outcome::Refused;
        }
        if let Resource::Shared(shared) = self.books.resource(resource)
            && !self.books.has_candidate(shared, size)
            && shuffle & 0x300 != 0
        {
            // It looks, unless the API server is away.
            self.hear(usize::MAX);
        }
        let offered: BTreeSet<String> = free.union(&chosen).cloned().collect();
        if offered.len() > size && chosen.len() < size && !shuffle.is_multiple_of(4) {
            self.read_book();
            for id in self.prefer(resource, &offered, &chosen, size) {
                if chosen.len() < size && offered.contains(&id) {
                    chosen.insert(id);
                }
            }
        }
        // What is not preferred is picked at random.
        let mut rest: Vec<&String> = offered.iter().filter(|id| !chosen.contains(*id)).collect();
        let turn = shuffle % rest.len().max(1);
        rest.rotate_left(turn);
        let fill: Vec<String> = rest.into_iter().take(size - chosen.len()).cloned().collect();
        chosen.extend(fill);

        self.read_book();
        let ids: Vec<String> = chosen.iter().cloned().collect();
        let Some(really) = self.decide(resource, &ids) else { return Outcome::Refused };
        if fault == Fault::AgentDies {
            return Outcome::AgentDied;
        }
        self.deviations = self.books.deviations();
        match fault {
            Fault::AgentDiesAfterWriting => return Outcome::AgentDied,
            Fault::KubeletDies => return Outcome::KubeletDied,
            Fault::None | Fault::AgentDies | Fault::AgentDiesAfterAnswering => {}
        }
        got.take(resource, &really);
        let (pod, container, kind) = (got.pod.clone(), got.container.clone(), got.kind);
        self.rows.push(Row { pod, container, kind, resource, ids: chosen, answer: really });
        if shuffle & 0x1c00 == 0 {
            // A list comes in the middle of a container.
            self.kubelet_hears(3 + shuffle % 3);
        }
        if fault == Fault::AgentDiesAfterAnswering {
            self.restart_agent();
        }
        Outcome::Ok
    }

    fn prefer(
        &self,
        resource: &str,
        offered: &BTreeSet<String>,
        must: &BTreeSet<String>,
        size: usize,
    ) -> Vec<String> {
        let (offered, must): (Vec<_>, Vec<_>) =
            (offered.iter().cloned().collect(), must.iter().cloned().collect());
        match self.books.resource(resource) {
            Resource::Shared(shared) => self.books.prefer_shared(shared, &offered, &must, size),
            Resource::Legacy(_) => self.books.offer_legacy(&offered, &must, size),
        }
    }

    /// The agent's answer: what is really given, by card.
    fn decide(&mut self, resource: &str, ids: &[String]) -> Option<BTreeMap<usize, (u32, u32)>> {
        let mut really: BTreeMap<usize, (u32, u32)> = BTreeMap::new();
        match self.books.resource(resource) {
            Resource::Shared(shared) => {
                let granted = self.books.allocate_shared(shared, ids, self.now).ok()?;
                let grant = self.books.grants().find(|(id, _)| *id == granted.grant)?.1;
                for key in &grant.actual {
                    let slot = really.entry(self.books.card_of_device(key)?.position()).or_default();
                    match shared {
                        SharedResource::Cores => slot.0 += 1,
                        SharedResource::Memory => slot.1 += 1,
                    }
                }
            }
            Resource::Legacy(_) => {
                let granted = self.books.allocate_legacy(resource, ids, self.now).ok()?;
                for device in granted.devices {
                    really.insert((0..CARDS).find(|n| uuid(*n) == device)?, (100, BLOCKS));
                }
            }
        }
        Some(really)
    }

    // ---- the invariants ----

    /// I1 and I2 of what is really on the cards; I3 of the books against it.
    pub(super) fn check(&self) -> Result<(), String> {
        for card in 0..CARDS {
            // Of a pod that is being ended by force, the init containers have ended long since.
            let ended = |g: &Given| g.kind == ContainerKind::Init && self.lingering.contains_key(&g.pod);
            let here: Vec<&Given> =
                self.running.iter().filter(|g| g.cards.contains_key(&card) && !ended(g)).collect();
            let legacy: BTreeSet<&String> = here.iter().filter(|g| g.legacy()).map(|g| &g.pod).collect();
            let shared: BTreeSet<&String> = here.iter().filter(|g| !g.legacy()).map(|g| &g.pod).collect();
            if legacy.len() > 1 || (!legacy.is_empty() && !shared.is_empty()) {
                return Err(format!("I1: card {card} is used by legacy {legacy:?} and shared {shared:?}"));
            }
            let (cores, blocks) = shared
                .iter()
                .map(|pod| footprint(&here, pod, card))
                .fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
            if cores > 100 || blocks > BLOCKS {
                return Err(format!(
                    "I2: card {card} has {cores} cores and {blocks} blocks in use by {shared:?}"
                ));
            }
            let free = self.books.ledger().state(CardIndex::from(card)) == CardState::Free;
            let settled = here.iter().any(|g| !self.lingering.contains_key(&g.pod));
            // What the kubelet has written and the agent not read yet is read before anything is decided.
            let up_to_date = self.spoilt || self.read == Some(self.version);
            if self.books.is_open() && free && settled && up_to_date {
                return Err(format!(
                    "I3: card {card} is free in the books but used by {legacy:?} {shared:?}"
                ));
            }
        }
        // A container never sees more cards than it asked for; one that asked for less than a card sees one.
        for given in &self.running {
            let wanted = given.demand.cores.0.div_ceil(100).max(given.demand.legacy) as usize;
            if given.cards.len() != wanted {
                return Err(format!("{} asked for {wanted} cards and sees {:?}", given.pod, given.cards));
            }
        }
        Ok(())
    }
}

enum Outcome {
    Ok,
    Refused,
    KubeletDied,
    AgentDied,
}

/// What a pod takes of a card: the larger of its init containers' and its running containers' part.
fn footprint(here: &[&Given], pod: &str, card: usize) -> (u32, u32) {
    let (mut init, mut run) = ((0, 0), (0, 0));
    for given in here.iter().filter(|g| g.pod == pod) {
        let (cores, blocks) = given.cards[&card];
        if given.kind == ContainerKind::Init {
            init = (cores.max(init.0), blocks.max(init.1));
        } else {
            run = (run.0 + cores, run.1 + blocks);
        }
    }
    (init.0.max(run.0), init.1.max(run.1))
}

fn wants(demand: &Demand, core_first: bool) -> Vec<(&'static str, usize)> {
    let mut wants = vec![
        (CORE, demand.cores.0 as usize),
        (MEMORY, demand.blocks.0 as usize),
        (GPU, demand.legacy as usize),
    ];
    if !core_first {
        wants.swap(0, 1);
    }
    wants.retain(|(_, size)| *size > 0);
    wants
}

fn fresh(broken: bool) -> Books {
    let card = |n: usize| Card {
        uuid: uuid(n),
        minor: n as u32,
        memory_mib: u64::from(BLOCKS) * 256,
        ..Card::default()
    };
    let cards: Vec<Card> = (0..CARDS).map(card).collect();
    let books = Books::new(Settings::default(), cards, &Topology::uniform(CARDS, LinkLevel::Pix));
    if broken { books.with_broken_ledger() } else { books }
}

fn uuid(card: usize) -> String {
    format!("GPU-{card}")
}

/// A share of one card.
pub(super) const fn share(cores: u32, blocks: u32) -> Demand {
    Demand { cores: Cores(cores), blocks: Blocks(blocks), legacy: 0 }
}
