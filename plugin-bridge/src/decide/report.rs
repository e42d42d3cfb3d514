//! What the cluster is told of the grants: annotations on pods, names and demands of holders for the GPUShadow.

use std::collections::BTreeMap;

use gpu_migrate_model::annotation::{card_key, write_cards};
use gpu_migrate_model::ask::Demand;
use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::ledger::{Hold, HolderId};
use gpu_migrate_model::names;
use gpu_migrate_model::units::CardIndex;

use super::NodeState;
use super::grants::Resource;

/// Annotations that a pod should have and does not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodAnnotations {
    pub namespace: String,
    pub name: String,
    /// The UID in the API, so that a successor of the same name is not annotated.
    pub uid: String,
    pub annotations: BTreeMap<String, String>,
}

impl NodeState {
    /// The annotations that pods lack, or have with another value. Of whole-card pods only where their namespace has opted in (I4); the
    /// GPUShadow names the cards of the others.
    #[must_use]
    pub fn missing_annotations(&self) -> Vec<PodAnnotations> {
        let mut wanted: BTreeMap<&str, BTreeMap<String, String>> = BTreeMap::new();
        for grant in self.grants.values().filter(|g| g.confirmed) {
            let Some(pod) =
                self.pods.get(&grant.holder.pod_uid).filter(|p| !p.has_ended() && self.may_change(p))
            else {
                continue;
            };
            let cards: Vec<CardIndex> = self.cards_of(&grant.actual).into_iter().collect();
            let annotations = wanted.entry(&pod.uid).or_default();
            let uuids: Vec<&str> =
                cards.iter().filter_map(|card| Some(self.ledger.card(*card)?.uuid.as_str())).collect();
            match grant.resource {
                Resource::Legacy(_) => {
                    annotations.insert(
                        format!("{}{}", names::LEGACY_CARDS_PREFIX, grant.holder.container),
                        write_cards(&cards),
                    );
                    annotations.insert(
                        format!("{}{}", names::CARD_UUIDS_PREFIX, grant.holder.container),
                        uuids.join(","),
                    );
                }
                Resource::Shared(SharedResource::Cores) => {
                    if let Some(container) = pod.container(&grant.holder.container) {
                        annotations.insert(card_key(&container.ask), write_cards(&cards));
                        annotations.insert(
                            format!("{}{}", names::CARD_UUIDS_PREFIX, grant.holder.container),
                            uuids.join(","),
                        );
                        annotations.insert(names::GPU_ASSIGNED.to_owned(), "true".to_owned());
                    }
                }
                Resource::Shared(SharedResource::Memory) => {}
            }
        }
        wanted
            .into_iter()
            .filter_map(|(uid, mut annotations)| {
                let pod = self.pods.get(uid)?;
                annotations.retain(|key, value| pod.annotations.get(key) != Some(value));
                (!annotations.is_empty()).then(|| PodAnnotations {
                    namespace: pod.namespace.clone(),
                    name: pod.name.clone(),
                    uid: pod.api_uid.clone(),
                    annotations,
                })
            })
            .collect()
    }

    /// Namespace and name of the pod behind a holder's UID in the ledger, as far as known.
    #[must_use]
    pub fn pod_name(&self, uid: &str) -> Option<(String, String)> {
        let candidate = || self.grants.values().find(|g| g.holder.pod_uid == uid)?.candidate.as_ref();
        let uid = if uid.starts_with('?') { &candidate()?.pod_uid } else { uid };
        self.pods.name_of(uid).map(|(namespace, name)| (namespace.to_owned(), name.to_owned()))
    }

    /// What a container has of the shared resources in all.
    #[must_use]
    pub fn demand_of_holder(&self, holder: &HolderId) -> Demand {
        if let Some(container) = self.container(holder) {
            return container.ask.demand;
        }
        let mut demand = Demand::NONE;
        for (_, hold) in self.ledger.held_by(holder) {
            if let Hold::Share { cores, blocks, .. } = hold {
                demand.cores += *cores;
                demand.blocks += *blocks;
            }
        }
        demand
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use gpu_migrate_model::ask::{ContainerAsk, ContainerKind};
    use gpu_migrate_model::card::Card;
    use gpu_migrate_model::topology::{LinkLevel, Topology};

    use super::*;
    use crate::decide::{ContainerView, Drift, PodView, Settings, UpstreamDevice};
    use gpu_migrate_kubelet_api::checkpoint::Checkpoint;

    fn of_two_cards() -> NodeState {
        let card = |n: u32| Card { uuid: format!("GPU-{n}"), minor: n, memory_mib: 4096, ..Card::default() };
        let mut state = NodeState::new(
            Settings::default(),
            (0..2).map(card).collect(),
            &Topology::uniform(2, LinkLevel::Pix),
        );
        state.ingest_checkpoint(&Checkpoint::parse(br#"{"Data":{"PodDeviceEntries":null}}"#).unwrap(), 1);
        state
    }

    #[test]
    fn a_legacy_holder_with_other_devices_than_the_kubelet_has_is_reported() {
        const GPU: &str = "nvidia.com/gpu";
        let mut state = of_two_cards();
        let device =
            |n: u32| UpstreamDevice { id: format!("GPU-{n}").into(), healthy: true, numa: Vec::new() };
        state.observe_upstream(GPU, Some((0..2).map(device).collect()));
        state.allocate_shared(SharedResource::Cores, &["tencent.com/vcuda-core-0".to_owned()], 2).unwrap();
        let granted = state.allocate_legacy(GPU, &["GPU-0".to_owned()], 3).unwrap();
        assert_eq!((granted.devices, granted.deviates), (vec!["GPU-1".to_owned()], true));
        let reported: Vec<_> = state.legacy_deviations().into_values().collect();
        assert_eq!(reported, [["GPU-0"]]);
    }

    #[test]
    fn whole_card_pods_are_annotated_in_namespaces_that_have_opted_in_alone() {
        const GPU: &str = "nvidia.com/gpu";
        let mut state = of_two_cards();
        let device =
            |n: u32| UpstreamDevice { id: format!("GPU-{n}").into(), healthy: true, numa: Vec::new() };
        state.observe_upstream(GPU, Some((0..2).map(device).collect()));
        let demand = Demand { legacy: 1, ..Demand::NONE };
        let ask = ContainerAsk { name: "c".into(), kind: ContainerKind::App, position: 0, demand };
        let containers = vec![ContainerView { ask, reserved: Vec::new() }];
        let pod = PodView { uid: "u".into(), namespace: "n".into(), containers, ..PodView::default() };
        state.observe_pods(vec![pod], 2);
        state.allocate_legacy(GPU, &["GPU-1".to_owned()], 3).unwrap();
        let checkpoint = br#"{"Data":{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c","ResourceName":"nvidia.com/gpu",
            "DeviceIDs":{"-1":["GPU-1"]},"AllocResp":""}],"RegisteredDevices":{}},"Checksum":0}"#;
        state.ingest_checkpoint(&Checkpoint::parse(checkpoint).unwrap(), 4);
        assert_eq!(state.missing_annotations(), []);
        state.observe_opted_in(&BTreeSet::from(["n".to_owned()]));
        let missing = state.missing_annotations().remove(0).annotations;
        assert_eq!(missing["gpu-migrate.io/card-uuids-c"], "GPU-1");
    }

    #[test]
    fn processes_on_a_card_without_a_holder_are_drift() {
        let mut state = of_two_cards();
        state.allocate_shared(SharedResource::Cores, &["tencent.com/vcuda-core-0".to_owned()], 2).unwrap();
        state.observe_processes(CardIndex(0), [7]);
        assert!(state.drift(&[], 10_000, 3).is_empty(), "it is held");
        state.observe_processes(CardIndex(1), [9, 8]);
        let what = "no holder, but processes 8, 9 run on it".to_owned();
        assert_eq!(state.drift(&[], 10_000, 3), [Drift { card: CardIndex(1), what }]);
        state.observe_processes(CardIndex(1), []);
        assert!(state.drift(&[], 10_000, 3).is_empty());
    }
}
