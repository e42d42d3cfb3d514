//! Drift: cards about which the ledger, pod-resources, the API and NVML do not agree.

use std::collections::{BTreeMap, BTreeSet};

use gpu_migrate_model::units::CardIndex;

use super::grants::{DeviceKey, Grant};
use super::{Millis, NodeState};
use gpu_migrate_kubelet_api::lister::ContainerDevices;

/// A card about which the sources do not agree.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Drift {
    pub card: CardIndex,
    /// What does not agree, in one sentence.
    pub what: String,
}

impl NodeState {
    /// Disagreement by card. Grants younger than `min_age` are left out: sources follow one another.
    #[must_use]
    pub fn drift(&self, rows: &[ContainerDevices], min_age: Millis, now: Millis) -> Vec<Drift> {
        let mut drift = BTreeSet::new();
        let old = |g: &Grant| now.saturating_sub(g.since) >= min_age;
        let by_device = by_device(rows);
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
        let requested: BTreeSet<&DeviceKey> = self.grants.values().flat_map(|g| &g.requested).collect();
        for row in rows {
            for (name, ids) in &row.devices {
                let resource = self.resource(name);
                for key in ids.iter().filter_map(|id| self.key(&resource, id)) {
                    let Some(card) = self.card_of(&key).filter(|_| !requested.contains(&key)) else {
                        continue;
                    };
                    let what = format!(
                        "{}/{} container {} is listed by the kubelet but not in the ledger",
                        row.namespace, row.pod, row.container
                    );
                    drift.insert(Drift { card, what });
                }
            }
        }
        for (card, processes) in &self.processes {
            if self.ledger.holds(*card).next().is_none() && !processes.is_empty() {
                let pids = processes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                drift.insert(Drift {
                    card: *card,
                    what: format!("no holder, but processes {pids} run on it"),
                });
            }
        }
        drift.into_iter().collect()
    }
}

/// The container that has each device, by the kubelet's list.
fn by_device(rows: &[ContainerDevices]) -> BTreeMap<&str, &ContainerDevices> {
    rows.iter().flat_map(|row| row.devices.values().flatten().map(move |id| (id.as_str(), row))).collect()
}
