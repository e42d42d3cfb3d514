//! Admission and start of containers, as the kubelet does them.

use std::collections::BTreeSet;

use gpu_migrate_kubelet_api::deviceplugin::ContainerAllocateResponse;
use gpu_migrate_model::ask::{ContainerKind, Demand};
use gpu_migrate_sim::device_manager::{Choice, Request};
use gpu_migrate_sim::nvidia::VISIBLE_DEVICES;

use super::super::agent::{Agent, Trouble, cards_of, uuid};
use super::truth::Given;
use super::{CORE, GPU, Kubelet, MEMORY, World};
use crate::decide::{ContainerView, PodPhase};

/// A failure in the middle of an admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Fault {
    None,
    /// The kubelet dies after it was answered and before it wrote its checkpoint; its successor admits again.
    KubeletDies,
    /// The kubelet loses the answer, and sees an error.
    AnswerLost,
    /// The agent dies after it decided and before it wrote its deviations; the kubelet sees an error.
    AgentDies,
    /// The agent dies at this step of writing them, counted from 0.
    AgentDiesAtWrite(u8),
    /// The agent dies after it wrote its deviations and before it answered.
    AgentDiesAfterWriting,
    /// The agent dies right after it answered. The kubelet has its answer, and asks the next process for the rest.
    AgentDiesAfterAnswering,
    /// The agent's disk fails at this step of writing.
    DiskFails(u8),
    /// The agent's disk takes longer for a write than the kubelet can wait.
    DiskStalls,
    /// NVIDIA's plugin answers with an error.
    NvidiaRefuses,
    /// NVIDIA's plugin does not answer.
    NvidiaHangs,
}

impl Fault {
    const fn trouble(self) -> Trouble {
        match self {
            Self::AgentDies => Trouble::Dies(0),
            Self::AgentDiesAtWrite(step) => Trouble::Dies(step),
            Self::DiskFails(step) => Trouble::DiskFails(step),
            Self::DiskStalls => Trouble::DiskStalls,
            Self::NvidiaRefuses => Trouble::NvidiaRefuses,
            Self::NvidiaHangs => Trouble::NvidiaHangs,
            _ => Trouble::None,
        }
    }
}

enum Outcome {
    Ok,
    Refused,
    KubeletDied,
    AgentDied,
}

impl<A: Agent> World<A> {
    /// The kubelet admits the next pod.
    pub(in super::super) fn admit(&mut self, core_first: bool, fault: Fault, at: usize, shuffle: usize) {
        let Some(uid) = self.waiting.pop_front() else { return };
        let Some(pod) = self.api.lock().pods.get(&uid).cloned() else { return };
        {
            let Kubelet { manager, ended, .. } = &mut *self.kubelet.lock();
            manager.begin(|uid| !ended.contains(uid));
        }
        let mut given = Vec::new();
        let mut step = 0;
        self.first_admitted.entry(uid.clone()).or_insert(self.given);
        for ContainerView { ask, .. } in &pod.containers {
            self.given += 1;
            let mut got = Given::nothing(uid.clone(), ask.name.clone(), ask.kind, ask.demand, self.given);
            for (resource, size) in wants(&ask.demand, core_first) {
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
            let is_init = ask.kind == ContainerKind::Init;
            self.kubelet.lock().manager.container_done(&uid, &ask.name, is_init);
            self.write_checkpoint();
            given.push(got);
        }
        self.admitted.extend(given);
        self.start(Trouble::None);
    }

    /// The kubelet tries to start what it has admitted: a pod's containers one after the other, each when the agent lets it.
    pub(in super::super) fn start(&mut self, trouble: Trouble) {
        let mut waits = BTreeSet::new();
        for given in std::mem::take(&mut self.admitted) {
            if waits.contains(&given.pod) || !self.may_start(&given, trouble) {
                waits.insert(given.pod.clone());
                self.admitted.push(given);
                continue;
            }
            let uid = given.pod.clone();
            self.running.push(given);
            let started = self.running.iter().filter(|g| g.pod == uid).count();
            let all = self.api.lock().pods.get(&uid).is_some_and(|pod| pod.containers.len() == started);
            if all {
                self.set_phase(&uid, PodPhase::Running);
            }
        }
    }

    /// The agent dies while the kubelet starts containers; none of them starts in this process if it had to write.
    pub(in super::super) fn start_and_die(&mut self, step: u8) {
        self.start(Trouble::Dies(step));
        self.restart_agent();
    }

    fn may_start(&mut self, given: &Given, trouble: Trouble) -> bool {
        wants(&given.demand, true).into_iter().all(|(resource, _)| {
            if resource == GPU {
                return true;
            }
            let ids: Option<Vec<String>> = {
                let kubelet = self.kubelet.lock();
                let row = kubelet.manager.row(&given.pod, &given.container, resource);
                row.map(|row| row.ids.keys().cloned().collect())
            };
            ids.is_some_and(|ids| self.agent.may_start(resource, ids, trouble))
        })
    }

    /// The kubelet asks NVIDIA's plugin, which answers for whatever it is asked for.
    fn allocate_past_the_agent(
        &mut self,
        got: &mut Given,
        choice: Choice,
        fault: Fault,
        shuffle: usize,
    ) -> Outcome {
        let chosen = choice.settle(Vec::new(), |rest| {
            let turn = shuffle % rest.len().max(1);
            rest.rotate_left(turn);
        });
        if fault == Fault::KubeletDies {
            return Outcome::KubeletDied;
        }
        let Some(answer) = cards_of(chosen.iter().map(String::as_str)) else { return Outcome::Refused };
        let lingering = &self.lingering;
        let ending = self.running.iter_mut().filter(|given| lingering.contains_key(&given.pod));
        ending.for_each(|given| given.is_overrun_on(&answer));
        got.bypasses(self.agent.with_state(|state, _| state.is_ready()));
        got.take(GPU, &answer, &self.hardware.lock());
        self.kubelet.lock().manager.allocated(&got.pod, &got.container, GPU, chosen, answer_with(&answer));
        Outcome::Ok
    }

    fn fail(&mut self, uid: &str) {
        self.kubelet.lock().ended.insert(uid.to_owned());
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
        self.agent.tick();
        let request = self.kubelet.lock().manager.request(&got.pod, &got.container, resource, size);
        let choice = match request {
            Ok(Request::Held(answer)) => {
                got.take(resource, &visible(&answer), &self.hardware.lock());
                return Outcome::Ok;
            }
            Ok(Request::Choose(choice)) => choice,
            Err(_) => return Outcome::Refused,
        };
        if resource == GPU && self.bypassed {
            return self.allocate_past_the_agent(got, choice, fault, shuffle);
        }
        // The API server is away now and then.
        self.api.lock().away = shuffle & 0x300 == 0;
        let mut preferred = Vec::new();
        if choice.is_open() && !shuffle.is_multiple_of(4) {
            let (offered, must) = (choice.available.iter(), choice.must_include.iter());
            preferred =
                self.agent.prefer(resource, offered.cloned().collect(), must.cloned().collect(), size);
        }
        // Which of those that are not preferred is random.
        let chosen = choice.settle(preferred, |rest| {
            let turn = shuffle % rest.len().max(1);
            rest.rotate_left(turn);
        });

        let answer = self.agent.allocate(resource, chosen.iter().cloned().collect(), fault.trouble());
        match fault {
            Fault::AgentDies | Fault::AgentDiesAtWrite(_) | Fault::AgentDiesAfterWriting => {
                return Outcome::AgentDied;
            }
            _ => {}
        }
        let Some(answer) = answer else { return Outcome::Refused };
        match fault {
            Fault::AnswerLost => return Outcome::Refused,
            Fault::KubeletDies => return Outcome::KubeletDied,
            _ => {}
        }
        got.take(resource, &answer, &self.hardware.lock());
        // Of a share, only the answer for cores names cards.
        let answer =
            if resource == MEMORY { ContainerAllocateResponse::default() } else { answer_with(&answer) };
        self.kubelet.lock().manager.allocated(&got.pod, &got.container, resource, chosen, answer);
        if shuffle & 0x1c00 == 0 {
            // A list comes in the middle of a container.
            self.deliver_list(3 + shuffle % 3);
        }
        if fault == Fault::AgentDiesAfterAnswering {
            self.restart_agent();
        }
        Outcome::Ok
    }
}

/// An answer that shows these cards.
fn answer_with(cards: &BTreeSet<usize>) -> ContainerAllocateResponse {
    let uuids: Vec<String> = cards.iter().map(|card| uuid(*card)).collect();
    let envs = [(VISIBLE_DEVICES.to_owned(), uuids.join(","))].into();
    ContainerAllocateResponse { envs, ..ContainerAllocateResponse::default() }
}

/// The cards that an answer shows.
pub(super) fn visible(answer: &ContainerAllocateResponse) -> BTreeSet<usize> {
    let uuids = answer.envs.get(VISIBLE_DEVICES).into_iter().flat_map(|uuids| uuids.split(','));
    cards_of(uuids.filter(|uuid| !uuid.is_empty())).unwrap_or_default()
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
