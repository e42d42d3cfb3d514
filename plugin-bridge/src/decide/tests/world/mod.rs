//! The world around the agent: what is really on the cards, and everyone's possibly outdated idea of it.

mod admit;
mod hardware;
mod kubelet;
mod truth;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use gpu_migrate_model::ask::{ContainerAsk, ContainerKind, Demand};
use gpu_migrate_model::card::Health;
use gpu_migrate_model::units::{Blocks, CardIndex, Cores};
use gpu_migrate_sim::device_manager::Device;
use parking_lot::Mutex;

pub(super) use self::admit::Fault;
pub(super) use self::hardware::{ALL_CARDS, Change, Hardware};
pub(super) use self::kubelet::Kubelet;
use self::truth::Given;
use super::agent::{Agent, Mutant, uuid};
use crate::decide::{ContainerView, PodPhase, PodView};
use crate::inventory::card_map::LOOKED_AT_AGAIN;

pub(super) const CARDS: usize = 3;
pub(super) const BLOCKS: u32 = 4;
/// Grace periods of pods, in milliseconds.
const GRACES: [u64; 4] = [30_000, 0, 60_000, 600_000];
pub(super) const GPU: &str = "nvidia.com/gpu";
pub(super) const CORE: &str = "tencent.com/vcuda-core";
pub(super) const MEMORY: &str = "tencent.com/vcuda-memory";

#[derive(Clone, Debug)]
enum WatchEvent {
    Pod(Box<PodView>),
    Gone(String),
}

#[derive(Debug, Default)]
pub(super) struct Api {
    pub(super) pods: BTreeMap<String, PodView>,
    /// It does not answer.
    pub(super) away: bool,
}

/// Whom the agent can ask.
#[derive(Clone, Debug)]
pub(super) struct Surroundings {
    pub(super) kubelet: Arc<Mutex<Kubelet>>,
    pub(super) api: Arc<Mutex<Api>>,
    /// The pods that have processes, where cgroups can be read.
    pub(super) cgroups: Arc<Mutex<Option<BTreeSet<String>>>>,
    pub(super) hardware: Arc<Mutex<Hardware>>,
}

pub(super) struct World<A> {
    agent: A,
    mutant: Option<Mutant>,
    next: u32,
    api: Arc<Mutex<Api>>,
    /// What of it the agent has not heard yet.
    events: VecDeque<WatchEvent>,
    // The kubelet.
    kubelet: Arc<Mutex<Kubelet>>,
    waiting: VecDeque<String>,
    /// NVIDIA's plugin has registered with it last, past the agent.
    bypassed: bool,
    /// When it restarted, until the agent notices.
    unnoticed: Option<u64>,
    // The truth.
    /// Cards that a container has through DRA, and how many had been given something when the agent heard of it.
    claims: BTreeMap<usize, Option<u64>>,
    /// How many containers were given something, or asked for it.
    given: u64,
    /// The same when each pod was admitted first: it may have been given something then.
    first_admitted: BTreeMap<String, u64>,
    /// So many when the agent started.
    given_before: u64,
    /// A pod that the agent should have ended.
    missed: Option<String>,
    /// A pod that it ended although it had given it its cards itself.
    wronged: Option<String>,
    /// Admitted, and not started yet.
    admitted: Vec<Given>,
    running: Vec<Given>,
    /// Deleted with force: in the API no more, on the card until then.
    lingering: BTreeMap<String, u64>,
    cgroups: Arc<Mutex<Option<BTreeSet<String>>>>,
    hardware: Arc<Mutex<Hardware>>,
    /// The cards that this process of the agent has found.
    found: BTreeSet<usize>,
}

impl<A: Agent> World<A> {
    /// With cgroups that can be read, or without.
    pub(super) fn new(mutant: Option<Mutant>, cgroups: bool) -> Self {
        let kubelet = Arc::new(Mutex::new(Kubelet::new()));
        let api = Arc::new(Mutex::new(Api::default()));
        let cgroups = Arc::new(Mutex::new(cgroups.then(BTreeSet::new)));
        let hardware = Arc::new(Mutex::new(Hardware::new()));
        let surroundings = Surroundings {
            kubelet: kubelet.clone(),
            api: api.clone(),
            cgroups: cgroups.clone(),
            hardware: hardware.clone(),
        };
        let mut world = Self {
            agent: A::start(surroundings, mutant),
            mutant,
            next: 0,
            api,
            events: VecDeque::new(),
            kubelet,
            waiting: VecDeque::new(),
            bypassed: false,
            unnoticed: None,
            claims: BTreeMap::new(),
            given: 0,
            first_admitted: BTreeMap::new(),
            given_before: 0,
            missed: None,
            wronged: None,
            admitted: Vec::new(),
            running: Vec::new(),
            lingering: BTreeMap::new(),
            cgroups,
            hardware,
            found: (0..CARDS).collect(),
        };
        world.agent.with_state(|state, now| state.observe_pods(Vec::new(), now));
        world.agent.read_checkpoint();
        world.deliver_lists();
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
            grace: GRACES[self.next as usize % GRACES.len()],
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
        self.api.lock().pods.remove(&uid);
        self.events.push_back(WatchEvent::Gone(uid));
    }

    /// A pod is deleted with force: the kubelet forgets it at once, its containers take their grace period or a part of it. Some
    /// cannot be killed, and take longer than that; only cgroups show it.
    pub(super) fn delete_with_force(&mut self, which: usize) {
        let Some(uid) = self.pick_running(which) else { return };
        if self.cgroups.lock().is_none() {
            // The grace period of a pod that was never seen is not known; then its cgroup alone says when it has ended.
            self.deliver_events(usize::MAX);
        }
        // Not within the milliseconds that the agent needs to read and write what the kubelet has written.
        self.agent.read_checkpoint();
        self.agent.tick();
        self.kubelet.lock().ended.insert(uid.clone());
        self.admitted.retain(|g| g.pod != uid);
        let grace = self.api.lock().pods.remove(&uid).map_or(0, |pod| pod.grace);
        self.events.push_back(WatchEvent::Gone(uid.clone()));
        let hangs = self.cgroups.lock().is_some() && which.is_multiple_of(3);
        let lingers = if hangs { 600_000 } else { grace * (which as u64 % 3) / 2 };
        self.lingering.insert(uid, self.agent.now() + lingers);
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
        self.kubelet.lock().ended.insert(uid.to_owned());
    }

    fn publish(&mut self, pod: PodView) {
        self.events.push_back(WatchEvent::Pod(Box::new(pod.clone())));
        self.api.lock().pods.insert(pod.uid.clone(), pod);
    }

    fn set_phase(&mut self, uid: &str, phase: PodPhase) {
        let pod = self.api.lock().pods.get(uid).cloned();
        if let Some(mut pod) = pod {
            pod.phase = phase;
            pod.started |= phase == PodPhase::Running;
            pod.running = phase == PodPhase::Running;
            self.publish(pod);
        }
    }

    // ---- what reaches the agent ----

    /// The next few pieces of events from the API server arrive.
    pub(super) fn deliver_events(&mut self, count: usize) {
        for _ in 0..count {
            let Some(events) = self.events.pop_front() else { return };
            self.agent.with_state(|state, now| match events {
                WatchEvent::Pod(pod) => state.observe_pod(*pod, now),
                WatchEvent::Gone(uid) => state.observe_pod_gone(&uid, now),
            });
        }
    }

    pub(super) fn relist(&mut self) {
        self.notice();
        self.events.clear();
        let pods = self.api.lock().pods.values().cloned().collect();
        self.agent.with_state(|state, now| state.observe_pods(pods, now));
    }

    /// The agent reads the kubelet checkpoint.
    pub(super) fn read_checkpoint(&mut self) {
        self.agent.read_checkpoint();
    }

    /// The kubelet writes its checkpoint. The agent has read the version before: a watch reports each.
    fn write_checkpoint(&mut self) {
        self.agent.read_checkpoint();
        self.kubelet.lock().write();
    }

    /// Something cuts the checkpoint on disk short; not within the milliseconds before the agent has read it and written its own record.
    pub(super) fn truncate_checkpoint(&mut self) {
        self.agent.read_checkpoint();
        self.agent.tick();
        self.kubelet.lock().truncate();
        self.agent.read_checkpoint();
    }

    /// The kubelet's checkpoint is deleted; not within the milliseconds before the agent has read it and written its own record.
    pub(super) fn remove_checkpoint(&mut self) {
        self.agent.read_checkpoint();
        self.agent.tick();
        self.kubelet.lock().remove();
        self.agent.read_checkpoint();
    }

    /// The agent's record is removed. Without cgroups nothing then says that a pod runs which is neither in the API nor known to the
    /// kubelet.
    pub(super) fn lose_record(&mut self) {
        if self.cgroups.lock().is_some() || self.lingering.is_empty() {
            self.agent.lose_record();
        }
    }

    pub(super) fn list_pod_resources(&mut self) {
        self.agent.list_pod_resources();
        for heard in self.claims.values_mut() {
            heard.get_or_insert(self.given);
        }
    }

    /// NVIDIA's DRA driver gives this card to a container, whatever else is on it.
    pub(super) fn claim(&mut self, card: usize) {
        self.claims.entry(card).or_default();
        self.name_claims();
    }

    /// All claims are given back.
    pub(super) fn end_claims(&mut self) {
        self.claims.clear();
        self.name_claims();
    }

    fn name_claims(&mut self) {
        let hardware = self.hardware.lock();
        if matches!(self.mutant, Some(Mutant::IgnoresClaims)) {
            return;
        }
        let names = self.claims.keys().map(|card| format!("gpu-{}", hardware.minor(*card)));
        self.kubelet.lock().claimed = names.collect();
    }

    /// Time passes. The API server is not silent for minutes without a relist of the watch.
    pub(super) fn pass_time(&mut self, milliseconds: u64) {
        self.notice();
        if milliseconds >= 100_000 {
            self.deliver_events(usize::MAX);
        }
        self.end_overdue();
        self.agent.pass(milliseconds);
        // As often as a kubelet does.
        if milliseconds >= 10_000 {
            let kubelet = self.kubelet.lock();
            let healthy =
                |resource: &String| (resource.clone(), kubelet.manager.healthy(resource).len() as u64);
            let amounts = kubelet.manager.devices().keys().map(healthy).collect();
            self.agent.with_state(|state, now| state.observe_allocatable(&amounts, now));
        }
        self.end_overdue();
    }

    /// Whose time is over ends.
    fn end_overdue(&mut self) {
        let now = self.agent.now();
        let (running, lingering) = (&mut self.running, &mut self.lingering);
        lingering.retain(|uid, at| {
            let over = *at <= now;
            if over {
                running.retain(|g| g.pod != *uid);
            }
            !over
        });
        if let Some(populated) = &mut *self.cgroups.lock() {
            *populated = self.running.iter().map(|g| g.pod.clone()).collect();
        }
    }

    pub(super) fn set_health(&mut self, card: usize, healthy: bool) {
        self.hardware.lock().set_healthy(card, healthy);
        self.health_is_seen(card);
    }

    /// Something happens to the cards themselves.
    pub(super) fn change_hardware(&mut self, change: Change) {
        self.hardware.lock().change(change);
        if let Change::Vanish(card) | Change::Return(card) = change {
            self.health_is_seen(card);
        }
    }

    /// The agent and NVIDIA's plugin see a card's health, each if it has found the card.
    fn health_is_seen(&mut self, card: usize) {
        let healthy = self.hardware.lock().is_healthy(card);
        let health = if healthy { Health::Healthy } else { Health::Unhealthy };
        if self.found.contains(&card) {
            self.agent.with_state(|state, _| {
                if let Some(card) = state.ledger().find(&uuid(card)) {
                    state.set_health(card, health);
                }
            });
        }
        self.agent.nvidia_returns();
    }

    pub(super) fn cordon(&mut self, mask: usize) {
        let cards = (0..CARDS).filter(|card| mask & (1 << card) != 0).map(CardIndex::from).collect();
        self.agent.with_state(|state, _| state.set_cordoned(&cards));
    }

    pub(super) fn lose_upstream(&mut self) {
        self.agent.nvidia_goes();
    }

    pub(super) fn return_upstream(&mut self) {
        self.agent.nvidia_returns();
    }

    // ---- NVIDIA's plugin past the agent ----

    /// NVIDIA's plugin registers with the kubelet itself: without its variable, or in a version that ignores it.
    pub(super) fn bypass(&mut self) {
        self.bypassed = true;
        self.agent.end_stream(GPU);
        self.agent.nvidia_returns();
        let list = self.hardware.lock().plugin_list();
        let device = |(card, healthy)| (uuid(card), Device { healthy, ..Device::default() });
        self.kubelet.lock().manager.set_devices(GPU, list.into_iter().map(device).collect());
        self.write_checkpoint();
    }

    /// The agent registers over it, if it has noticed it and has a reason to, and ends the pods that it wants to end.
    pub(super) fn take_back(&mut self) {
        self.agent.read_checkpoint();
        let given_before = self.given_before;
        let (noticed, mut intruders, missed) = self.agent.with_state(|state, _| {
            let keeps = matches!(self.mutant, Some(Mutant::KeepsIntruders));
            let intruders = state.intruders().into_iter().filter(|_| !keeps).map(|pod| pod.uid);
            let intruders: BTreeSet<String> = intruders.collect();
            let known = |given: &&Given| state.pod(&given.pod).is_some_and(|pod| !pod.has_ended());
            // What came first is not known of what an earlier process saw.
            let here = self.running.iter().filter(|given| given.order > given_before);
            let missed = here
                .filter(|given| {
                    given.intrudes_on_a_share(&self.running, |holder| state.is_recorded_share(holder))
                })
                .filter(known)
                .find(|given| state.is_ready() && !intruders.contains(&given.pod));
            (
                state.has_shares() && state.bypassed().contains(GPU),
                intruders,
                missed.map(|given| given.pod.clone()),
            )
        });
        self.missed = missed;
        if matches!(self.mutant, Some(Mutant::EndsOthersToo)) && !intruders.is_empty() {
            intruders.extend(self.running.iter().map(|given| given.pod.clone()));
        }
        let wronged = |given: &&Given| intruders.contains(&given.pod) && !given.bypassing();
        self.wronged = self.running.iter().find(wronged).map(|given| given.pod.clone());
        if noticed && self.bypassed {
            self.register_over();
        }
        for uid in intruders {
            self.stop(&uid);
            self.set_phase(&uid, PodPhase::Failed);
            self.api.lock().pods.remove(&uid);
            self.events.push_back(WatchEvent::Gone(uid));
        }
    }

    fn register_over(&mut self) {
        self.bypassed = false;
        self.deliver_list(3);
    }

    // ---- recovery ----

    /// Ends all pods and repairs everything; then a pod of each kind must be admitted and start.
    pub(super) fn admits_after_recovery(&mut self) -> Result<(), String> {
        self.api.lock().away = false;
        self.waiting.clear();
        self.notice();
        while !self.running.is_empty() || !self.admitted.is_empty() {
            self.pass_time(10_000);
            self.delete(0);
        }
        let pods: Vec<String> = self.api.lock().pods.keys().cloned().collect();
        for uid in pods {
            self.kubelet.lock().ended.insert(uid.clone());
            self.api.lock().pods.remove(&uid);
        }
        self.hardware.lock().repair();
        (0..ALL_CARDS).for_each(|card| self.health_is_seen(card));
        self.lose_upstream();
        self.return_upstream();
        if self.bypassed {
            self.register_over();
        }
        self.relist();
        {
            let Kubelet { manager, ended, .. } = &mut *self.kubelet.lock();
            manager.begin(|uid| !ended.contains(uid));
        }
        self.write_checkpoint();
        self.read_checkpoint();
        self.cordon(0);
        self.end_claims();
        for _ in 0..3 {
            self.list_pod_resources();
            self.pass_time(700_000);
        }
        for _ in 0..2 {
            // As the reasons say; and a card that comes is found by an agent that starts.
            if self.is_closed_until_a_start() || self.found.len() < ALL_CARDS {
                self.restart_agent_later();
                self.relist();
                self.list_pod_resources();
                self.pass_time(700_000);
            }
        }
        self.deliver_lists();
        for demand in [share(25, 1), Demand { legacy: 1, ..Demand::NONE }] {
            self.bind(&[(ContainerKind::App, demand)], None);
            self.deliver_events(usize::MAX);
            // With a preference, and with an API server that answers.
            self.admit(true, Fault::None, 0, 0x501);
            let uid = format!("pod-{}", self.next);
            if !self.running.iter().any(|given| given.pod == uid) {
                return Err(format!("a pod that asks for {demand:?} of an empty node is not admitted"));
            }
            self.deliver_lists();
        }
        Ok(())
    }

    fn is_closed_until_a_start(&self) -> bool {
        self.agent.with_state(|state, _| {
            let mut reasons = state.ledger().indexes().filter_map(|card| state.closed_because(card));
            reasons.any(|why| why.ends_with(LOOKED_AT_AGAIN))
        })
    }

    // ---- processes ----

    /// The agent is gone for as long as a card needs to come back with another size: not in the middle of an admission.
    pub(super) fn restart_agent_later(&mut self) {
        self.hardware.lock().agent_starts();
        self.name_claims();
        self.restart_agent();
    }

    /// The agent is killed and restarts from the disk.
    pub(super) fn restart_agent(&mut self) {
        self.end_overdue();
        self.unnoticed = None;
        self.events.clear();
        self.agent.restart();
        self.given_before = self.given;
        self.claims.values_mut().for_each(|heard| *heard = None);
        self.found = self.hardware.lock().present().collect();
        // The kubelet loses its streams, and gets the first lists of the new process.
        self.deliver_lists();
    }

    /// The kubelet is killed and restarts from its checkpoint. The agent may notice only after it was asked by the new one.
    pub(super) fn restart_kubelet(&mut self, noticed_late: bool) {
        let lost = self.kubelet.lock().has_lost_checkpoint();
        self.agent.tick();
        if lost {
            let forgotten: BTreeSet<String> = self.admitted.drain(..).map(|g| g.pod).collect();
            self.first_admitted.retain(|pod, _| !forgotten.contains(pod));
            self.waiting.extend(forgotten);
        }
        self.kubelet.lock().restart(self.agent.now());
        self.agent.end_streams();
        self.unnoticed = Some(self.agent.now());
        if !noticed_late {
            self.notice();
        }
        self.agent.tick();
        self.agent.read_checkpoint();
        self.deliver_lists();
    }

    /// The agent sees that the kubelet's socket is another one.
    pub(super) fn notice(&mut self) {
        if let Some(at) = self.unnoticed.take() {
            self.agent.notice_kubelet(at);
        }
    }

    pub(super) fn deliver_list(&mut self, which: usize) {
        let resource = [GPU, CORE, MEMORY][which % 3];
        if which >= 3 {
            // It writes its checkpoint for every list, whatever it is in the middle of.
            self.write_checkpoint();
        }
        if resource == GPU && self.bypassed {
            return;
        }
        if let Some(list) = self.agent.list(resource) {
            let device = |(id, healthy)| (id, Device { healthy, ..Device::default() });
            self.kubelet.lock().manager.set_devices(resource, list.into_iter().map(device).collect());
        }
    }

    fn deliver_lists(&mut self) {
        (0..3).for_each(|which| self.deliver_list(which));
    }
}

pub(super) const fn share(cores: u32, blocks: u32) -> Demand {
    Demand { cores: Cores(cores), blocks: Blocks(blocks), legacy: 0 }
}
