//! Cards that may be in use by a container which no grant accounts for. They take nothing new until that is settled (I1).
//!
//! So it is where the kubelet has lost its checkpoint and this agent its record, or where something else uses a card.

use std::collections::{BTreeMap, BTreeSet};

use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::ledger::HolderId;
use gpu_migrate_model::names;
use gpu_migrate_model::units::CardIndex;

use super::grants::Resource;
use super::plan::GrantIndex;
use super::{ContainerView, NodeState, PodView};

impl NodeState {
    /// Closes the cards that containers without a grant may be using, or that the kubelet may allocate without this agent, and opens
    /// them again when that is over.
    pub(super) fn close_unaccounted(&mut self) {
        let found = self.unaccounted_cards();
        if found != self.unaccounted {
            self.unaccounted = found;
            self.apply_cordons();
        }
    }

    fn unaccounted_cards(&self) -> BTreeMap<CardIndex, String> {
        let mut closed = self.claimed.clone();
        for (card, processes) in &self.processes {
            if !processes.is_empty() && self.ledger.holds(*card).next().is_none() {
                closed.entry(*card).or_insert_with(|| {
                    format!("{} processes run on it and no container holds it", processes.len())
                });
            }
        }
        for (card, resource) in self.bypassed_cards() {
            closed.entry(card).or_insert_with(|| {
                format!(
                    "the kubelet may allocate it for {resource} without this agent: NVIDIA's plugin has registered with the kubelet itself; set KUBELET_SOCKET in its DaemonSet"
                )
            });
        }
        let granted = self.grants_by_container();
        let started = self.pods.pods.values().filter(|pod| pod.started && !pod.has_ended());
        for pod in started {
            for container in &pod.containers {
                if self.is_accounted_for(&granted, pod, container) {
                    continue;
                }
                let why = format!(
                    "container {} of pod {}/{} runs and is neither in the kubelet checkpoint nor in the agent's record",
                    container.ask.name, pod.namespace, pod.name
                );
                for card in self.annotated_cards(pod, container) {
                    closed.entry(card).or_insert_with(|| why.clone());
                }
            }
        }
        closed
    }

    /// Each resource that the container asks for has a grant: its own, or one whose holder is not known yet.
    fn is_accounted_for(&self, granted: &GrantIndex<'_>, pod: &PodView, container: &ContainerView) -> bool {
        let is_legacy = |resource: &Resource| matches!(resource, Resource::Legacy(_));
        let unnamed = |legacy: bool| {
            let mut unnamed = self.grants.values().filter(|grant| grant.holder_or_candidate().is_none());
            unnamed.any(|grant| is_legacy(&grant.resource) == legacy)
        };
        let has_share = || {
            [SharedResource::Cores, SharedResource::Memory]
                .iter()
                .any(|resource| granted.of(pod, container, *resource).is_some())
        };
        let is_elsewhere = || self.elsewhere.contains(&HolderId::new(&pod.uid, &container.ask.name));
        let demand = container.ask.demand;
        (demand.legacy == 0
            || granted.is_granted_whole_cards(pod, container)
            || is_elsewhere()
            || unnamed(true))
            && (demand.cores.0 == 0 || has_share() || unnamed(false))
    }

    /// The cards that an earlier process wrote to the pod; all cards where it wrote none.
    fn annotated_cards(&self, pod: &PodView, container: &ContainerView) -> BTreeSet<CardIndex> {
        let key = format!("{}{}", names::CARD_UUIDS_PREFIX, container.ask.name);
        let uuids = pod.annotations.get(&key).into_iter().flat_map(|uuids| uuids.split(','));
        let cards: Option<BTreeSet<CardIndex>> = uuids.map(|uuid| self.ledger.find(uuid)).collect();
        cards.filter(|cards| !cards.is_empty()).unwrap_or_else(|| self.ledger.indexes().collect())
    }

    /// Whether every pod with processes is one that some source names; `None` where cgroups were not read. After a loss the API's pods
    /// have to be known: what runs and has no grant closes cards. Of no interest once this process is ready.
    pub(super) fn knows_all_cgroups(&self) -> Option<bool> {
        if self.is_ready() {
            return None;
        }
        if self.checkpoint.is_lost() && !self.pods.is_listed() {
            return Some(false);
        }
        let holds = |uid: &str| self.grants.values().any(|grant| grant.holder.pod_uid == uid);
        self.pods.cgroups_at()?;
        Some(self.pods.is_listed() && self.pods.unknown_cgroup(holds).is_none())
    }
}

#[cfg(test)]
mod tests {
    use gpu_migrate_kubelet_api::checkpoint::Checkpoint;
    use gpu_migrate_model::ask::{ContainerAsk, ContainerKind, Demand};
    use gpu_migrate_model::card::Card;
    use gpu_migrate_model::topology::Topology;

    use super::*;
    use crate::decide::{PodPhase, Settings};

    fn of_two_cards(checkpoint: &str) -> NodeState {
        let card = |n: u32| Card { uuid: format!("GPU-{n}"), minor: n, memory_mib: 4096, ..Card::default() };
        let mut state = NodeState::new(Settings::default(), (0..2).map(card).collect(), &Topology::default());
        state.ingest_checkpoint(&Checkpoint::parse(checkpoint.as_bytes()).unwrap(), 1);
        state
    }

    fn running(annotations: &[(&str, &str)]) -> PodView {
        let demand = Demand { legacy: 1, ..Demand::NONE };
        let ask = ContainerAsk { name: "c".into(), kind: ContainerKind::App, position: 0, demand };
        PodView {
            uid: "p".into(),
            phase: PodPhase::Running,
            started: true,
            running: true,
            containers: vec![ContainerView { ask, reserved: Vec::new() }],
            annotations: annotations.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            ..PodView::default()
        }
    }

    fn closed(state: &NodeState) -> Vec<usize> {
        let closed = state.unaccounted.keys().map(|card| card.position());
        assert!(closed.clone().all(|card| state.closed_because(card.into()).is_some()));
        closed.collect()
    }

    #[test]
    fn a_container_that_no_source_names_closes_the_cards_that_it_may_use() {
        let mut state = of_two_cards(r#"{"Data":{"PodDeviceEntries":null}}"#);
        state.observe_pods(vec![PodView { started: false, running: false, ..running(&[]) }], 2);
        assert!(closed(&state).is_empty(), "it is not admitted yet");
        state.observe_pod(running(&[]), 3);
        assert_eq!(closed(&state), [0, 1]);
        state.observe_pod(running(&[("gpu-migrate.io/card-uuids-c", "GPU-1")]), 4);
        assert_eq!(closed(&state), [1], "an earlier process wrote which it has");
        state.observe_pods(Vec::new(), 5);
        assert!(closed(&state).is_empty());
    }

    #[test]
    fn a_container_whose_card_is_not_here_any_more_closes_nothing() {
        let row = |uuid| {
            format!(
                r#"{{"Data":{{"PodDeviceEntries":[{{"PodUID":"p","ContainerName":"c","ResourceName":"nvidia.com/gpu","DeviceIDs":["{uuid}"],"AllocResp":""}}]}}}}"#
            )
        };
        for uuid in ["GPU-0", "GPU-7"] {
            let mut state = of_two_cards(&row(uuid));
            state.observe_pods(vec![running(&[])], 2);
            assert!(closed(&state).is_empty(), "{uuid}");
        }
    }

    #[test]
    fn a_process_without_a_holder_closes_its_card() {
        let mut state = of_two_cards(r#"{"Data":{"PodDeviceEntries":null}}"#);
        state.observe_processes(CardIndex(1), [7]);
        state.reconcile(2);
        assert_eq!(closed(&state), [1]);
        state.observe_processes(CardIndex(1), []);
        state.reconcile(3);
        assert!(closed(&state).is_empty());
    }

    /// NVML is asked every few seconds: what it listed while the card was held has nothing to do with who is left.
    #[test]
    fn a_process_that_was_listed_before_the_release_does_not_close_the_card() {
        let released = |cgroups: Option<&[&str]>| {
            let mut state = of_two_cards(
                r#"{"Data":{"PodDeviceEntries":[{"PodUID":"p","ContainerName":"c","ResourceName":"nvidia.com/gpu","DeviceIDs":["GPU-1"],"AllocResp":""}]}}"#,
            );
            if let Some(populated) = cgroups {
                state.observe_cgroups(populated.iter().map(ToString::to_string).collect(), 2, 2);
            }
            state.observe_processes(CardIndex(1), [7]);
            let (id, _) = state.grants().next().unwrap();
            state.release(id);
            state.reconcile(2);
            state
        };
        for unknown in [None, Some(&["p"][..])] {
            assert_eq!(closed(&released(unknown)), [1], "it may be the holder's, and run on");
        }
        let mut state = released(Some(&[]));
        assert!(closed(&state).is_empty());
        state.observe_processes(CardIndex(1), [7]);
        state.reconcile(3);
        assert_eq!(closed(&state), [1], "it is still there");
    }
}
