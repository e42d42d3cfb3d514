//! What others are told: the file of deviations, annotations on pods, holders for the GPUShadow, and disagreement of sources.

use std::collections::{BTreeMap, BTreeSet};

use gpu_migrate_model::annotation::{card_key, write_cards};
use gpu_migrate_model::ask::Demand;
use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::ledger::{Hold, HolderId};
use gpu_migrate_model::names;
use gpu_migrate_model::units::CardIndex;

use super::grants::{DeviceKey, Grant, GrantId, Resource};
use super::{Millis, NodeState};
use crate::deviations::{Deviation, DeviationData, DeviationFile};
use gpu_migrate_kubelet_api::lister::ContainerDevices;

/// Annotations that a pod should have and does not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodAnnotations {
    /// Namespace of the pod.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID in the API, so that a successor of the same name is not annotated.
    pub uid: String,
    /// What to set.
    pub annotations: BTreeMap<String, String>,
}

/// A card about which the sources do not agree.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Drift {
    /// The card.
    pub card: CardIndex,
    /// What does not agree, in one sentence.
    pub what: String,
}

impl NodeState {
    /// The whole content of `nvidia_checkpoint`.
    #[must_use]
    pub fn deviations(&self) -> DeviationFile {
        let entries = self.grants.iter().filter(|(_, g)| g.deviates()).map(|(id, grant)| {
            // A guess would be read back as a fact; what an earlier life knew is none.
            let known = grant.holder_or_candidate().filter(|_| grant.is_known());
            // The same devices were given out again since: what the kubelet's book says of them is not about this one.
            let nobody = HolderId::new("?", "?");
            let known = known.or_else(|| self.is_superseded(*id).then_some(&nobody));
            let mut actual: BTreeMap<String, Vec<String>> = BTreeMap::new();
            for key in &grant.actual {
                let numa = self.card_of(key).and_then(|c| self.ledger.card(c)?.numa).map_or(-1, i64::from);
                actual.entry(numa.to_string()).or_default().push(self.id_of(key));
            }
            Deviation {
                pod_uid: known.map(|h| h.pod_uid.clone()).unwrap_or_default(),
                container: known.map(|h| h.container.clone()).unwrap_or_default(),
                resource: self.resource_name(&grant.resource).to_owned(),
                actual,
                kubelet: self.ids_of(&grant.requested),
                answer: String::new(),
            }
        });
        DeviationFile { data: DeviationData { entries: entries.collect() } }
    }

    /// Whether this promise takes the place of one that nobody is known to have taken up and that [`NodeState::deviations`] must
    /// tell from it.
    #[must_use]
    pub fn supersedes(&self, id: GrantId) -> bool {
        let Some(grant) = self.grants.get(&id) else { return false };
        let mut before = self.grants.range(..id);
        before.any(|(_, g)| {
            g.deviates() && !g.is_known() && g.resource == grant.resource && g.requested == grant.requested
        })
    }

    fn is_superseded(&self, id: GrantId) -> bool {
        let Some(grant) = self.grants.get(&id) else { return false };
        self.grants
            .range(id..)
            .skip(1)
            .any(|(_, g)| g.resource == grant.resource && g.requested == grant.requested)
    }

    /// What the pods' annotations lack of the truth.
    #[must_use]
    pub fn notes(&self) -> Vec<PodAnnotations> {
        let mut wanted: BTreeMap<&str, BTreeMap<String, String>> = BTreeMap::new();
        for grant in self.grants.values().filter(|g| g.confirmed) {
            let Some(pod) = self.pods.get(&grant.holder.pod_uid).filter(|p| !p.phase.terminal()) else {
                continue;
            };
            let cards: Vec<CardIndex> = self.cards_of(&grant.actual).into_iter().collect();
            let notes = wanted.entry(&pod.uid).or_default();
            match grant.resource {
                Resource::Legacy(_) => {
                    notes.insert(
                        format!("{}{}", names::LEGACY_CARDS_PREFIX, grant.holder.container),
                        write_cards(&cards),
                    );
                }
                Resource::Shared(SharedResource::Cores) => {
                    if let Some(container) = pod.container(&grant.holder.container) {
                        notes.insert(card_key(&container.ask), write_cards(&cards));
                        notes.insert(names::GPU_ASSIGNED.to_owned(), "true".to_owned());
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

    /// What the kubelet's own book names for each legacy holder that was given other devices.
    #[must_use]
    pub fn legacy_deviations(&self) -> BTreeMap<HolderId, Vec<String>> {
        let mut deviating: BTreeMap<HolderId, Vec<String>> = BTreeMap::new();
        let legacy = self.grants.values().filter(|g| matches!(g.resource, Resource::Legacy(_)));
        for grant in legacy.filter(|g| g.deviates()) {
            deviating.entry(grant.holder.clone()).or_default().extend(self.ids_of(&grant.requested));
        }
        deviating
    }

    /// Namespace and name of the pod behind a holder's UID in the ledger, as far as known.
    #[must_use]
    pub fn pod_name(&self, uid: &str) -> Option<(String, String)> {
        let probably = || self.grants.values().find(|g| g.holder.pod_uid == uid)?.candidate.as_ref();
        let uid = if uid.starts_with('?') { &probably()?.pod_uid } else { uid };
        self.pods.name_of(uid).map(|(namespace, name)| (namespace.to_owned(), name.to_owned()))
    }

    /// What a container has of the shared resources in all.
    #[must_use]
    pub fn demand_of_holder(&self, holder: &HolderId) -> Demand {
        let asked = self.pods.get(&holder.pod_uid).and_then(|pod| pod.container(&holder.container));
        asked.map(|container| container.ask.demand).unwrap_or_else(|| {
            let mut demand = Demand::NONE;
            for (_, hold) in self.ledger.held_by(holder) {
                if let Hold::Share { cores, blocks, .. } = hold {
                    demand.cores += *cores;
                    demand.blocks += *blocks;
                }
            }
            demand
        })
    }

    /// Where the ledger, pod-resources and the pods do not agree, by card. Promises younger than `settled` are left out.
    #[must_use]
    pub fn drift(&self, rows: &[ContainerDevices], settled: Millis, now: Millis) -> Vec<Drift> {
        let mut drift = BTreeSet::new();
        let old = |g: &Grant| now.saturating_sub(g.since) >= settled;
        let by_device = Self::by_device(rows);
        for grant in self.grants.values().filter(|g| g.confirmed && old(g)) {
            let listed = grant.requested.iter().any(|key| by_device.contains_key(self.id_of(key).as_str()));
            let gone = self.pods.has_departed(&grant.holder.pod_uid);
            let what = match (listed, gone) {
                (true, true) => "is gone from the API but the kubelet still lists it",
                (false, false) => "is in the ledger but the kubelet does not list it",
                _ => continue,
            };
            for card in self.cards_of(&grant.actual) {
                drift.insert(Drift { card, what: format!("{} {what}", grant.holder) });
            }
        }
        let booked: BTreeSet<&DeviceKey> = self.grants.values().flat_map(|g| &g.requested).collect();
        for row in rows {
            for (name, ids) in &row.devices {
                let resource = self.resource(name);
                for key in ids.iter().filter_map(|id| self.key(&resource, id)) {
                    let Some(card) = self.card_of(&key).filter(|_| !booked.contains(&key)) else { continue };
                    let what = format!(
                        "{}/{} container {} is listed by the kubelet but not in the ledger",
                        row.namespace, row.pod, row.container
                    );
                    drift.insert(Drift { card, what });
                }
            }
        }
        for (card, processes) in &self.processes {
            let nobody = self.ledger.holds(*card).next().is_none();
            if nobody && !processes.is_empty() {
                let numbers = processes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                drift.insert(Drift {
                    card: *card,
                    what: format!("nobody holds it, and processes {numbers} run on it"),
                });
            }
        }
        drift.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use gpu_migrate_model::card::Card;
    use gpu_migrate_model::topology::{LinkLevel, Topology};

    use super::*;
    use crate::decide::{Settings, UpstreamDevice};
    use gpu_migrate_kubelet_api::checkpoint::Checkpoint;

    /// NodeState that know that nothing was given out before.
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
    fn a_legacy_holder_on_another_card_than_the_kubelets_is_told() {
        const GPU: &str = "nvidia.com/gpu";
        let mut state = of_two_cards();
        let device =
            |n: u32| UpstreamDevice { id: format!("GPU-{n}").into(), healthy: true, numa: Vec::new() };
        state.observe_upstream(GPU, Some((0..2).map(device).collect()));
        state.allocate_shared(SharedResource::Cores, &["tencent.com/vcuda-core-0".to_owned()], 2).unwrap();
        let granted = state.allocate_legacy(GPU, &["GPU-0".to_owned()], 3).unwrap();
        assert_eq!((granted.devices, granted.deviates), (vec!["GPU-1".to_owned()], true));
        let told: Vec<_> = state.legacy_deviations().into_values().collect();
        assert_eq!(told, [["GPU-0"]]);
    }

    #[test]
    fn processes_on_a_card_that_nobody_holds_are_drift() {
        let mut state = of_two_cards();
        state.allocate_shared(SharedResource::Cores, &["tencent.com/vcuda-core-0".to_owned()], 2).unwrap();
        state.observe_processes(CardIndex(0), [7]);
        assert!(state.drift(&[], 10_000, 3).is_empty(), "it is held");
        state.observe_processes(CardIndex(1), [9, 8]);
        let what = "nobody holds it, and processes 8, 9 run on it".to_owned();
        assert_eq!(state.drift(&[], 10_000, 3), [Drift { card: CardIndex(1), what }]);
        state.observe_processes(CardIndex(1), []);
        assert!(state.drift(&[], 10_000, 3).is_empty());
    }
}
