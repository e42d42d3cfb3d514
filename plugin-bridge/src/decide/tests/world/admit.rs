//! Admission and start of containers, as the kubelet does them.

use std::collections::BTreeSet;

use gpu_migrate_model::ask::{ContainerKind, Demand};

use super::super::agent::{Agent, Trouble};
use super::kubelet::Row;
use super::truth::Given;
use super::{CORE, GPU, MEMORY, World};
use crate::decide::{ContainerView, PodPhase};

/// A failure in the middle of an admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Fault {
    None,
    /// The kubelet dies after it was answered and before it wrote its book; its successor admits again.
    KubeletDies,
    /// The kubelet loses the answer, and sees an error.
    AnswerLost,
    /// The agent dies after it decided and before it wrote its deviations; the kubelet sees an error.
    AgentDies,
    /// The agent dies at this step of writing them, counted from 0.
    AgentDiesAtWrite(u8),
    /// The agent dies after it wrote its deviations and before it answered.
    AgentDiesAfterWriting,
    /// The agent dies right after it answered. The kubelet has its answer, and asks the next life for the rest.
    AgentDiesAfterAnswering,
    /// The agent's disk fails at this step of writing.
    DiskFails(u8),
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
            let kubelet = &mut *self.kubelet.lock();
            kubelet.rows.retain(|r| !kubelet.ended.contains(&r.pod));
        }
        let mut given = Vec::new();
        let mut step = 0;
        for ContainerView { ask, .. } in &pod.containers {
            let mut got = Given::nothing(uid.clone(), ask.name.clone(), ask.kind, ask.demand);
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
            // The kubelet writes its book after each container.
            self.write_book();
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

    /// The agent dies while the kubelet starts containers; none of them starts in this life if it had to write.
    pub(in super::super) fn start_and_die(&mut self, step: u8) {
        self.start(Trouble::Dies(step));
        self.restart_agent();
    }

    fn may_start(&mut self, given: &Given, trouble: Trouble) -> bool {
        wants(&given.demand, true).into_iter().all(|(resource, _)| {
            if resource == GPU {
                return true;
            }
            let of_it =
                |r: &&Row| r.pod == given.pod && r.container == given.container && r.resource == resource;
            let row = self.kubelet.lock().rows.iter().find(of_it).map(|row| row.ids.clone());
            let Some(ids) = row else { return false };
            self.agent.may_start(resource, ids.into_iter().collect(), trouble)
        })
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
        // What its book already has is not asked for again.
        let same = |r: &&Row| r.pod == got.pod && r.container == got.container && r.resource == resource;
        let row = self.kubelet.lock().rows.iter().find(same).cloned();
        if let Some(row) = row {
            got.take(resource, &row.answer);
            return Outcome::Ok;
        }
        let Some((free, mut chosen)) = self.at_hand(&got.pod, resource, size) else {
            return Outcome::Refused;
        };
        // The API server is away now and then.
        self.api.lock().away = shuffle & 0x300 == 0;
        let offered: BTreeSet<String> = free.union(&chosen).cloned().collect();
        if offered.len() > size && chosen.len() < size && !shuffle.is_multiple_of(4) {
            let must = chosen.iter().cloned().collect();
            for id in self.agent.prefer(resource, offered.iter().cloned().collect(), must, size) {
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
        got.take(resource, &answer);
        let (pod, container, kind) = (got.pod.clone(), got.container.clone(), got.kind);
        self.kubelet.lock().rows.push(Row { pod, container, kind, resource, ids: chosen, answer });
        if shuffle & 0x1c00 == 0 {
            // A list comes in the middle of a container.
            self.kubelet_hears(3 + shuffle % 3);
        }
        if fault == Fault::AgentDiesAfterAnswering {
            self.restart_agent();
        }
        Outcome::Ok
    }

    /// The devices that the kubelet believes free, and those that the pod's init containers hand on; `None`: too few.
    fn at_hand(
        &self,
        pod: &str,
        resource: &str,
        size: usize,
    ) -> Option<(BTreeSet<String>, BTreeSet<String>)> {
        let kubelet = self.kubelet.lock();
        let of_it = || kubelet.rows.iter().filter(|r| r.resource == resource);
        let used: BTreeSet<&String> = of_it().flat_map(|r| &r.ids).collect();
        let seen = self.seen.get(resource)?.iter();
        let free: BTreeSet<String> =
            seen.filter(|(id, healthy)| **healthy && !used.contains(id)).map(|(id, _)| id.clone()).collect();
        let mine = |init: bool| -> BTreeSet<&String> {
            let of_pod = of_it().filter(|r| r.pod == pod);
            of_pod.filter(|r| (r.kind == ContainerKind::Init) == init).flat_map(|r| &r.ids).collect()
        };
        let reused: BTreeSet<String> =
            mine(true).difference(&mine(false)).take(size).map(|id| (*id).clone()).collect();
        (free.len() + reused.len() >= size).then_some((free, reused))
    }
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
