//! Cards that containers have through Dynamic Resource Allocation (DRA). The kubelet asks a driver for those and no device plugin: only
//! pod-resources names them.

use std::collections::BTreeMap;

use gpu_migrate_kubelet_api::lister::ContainerDevices;
use gpu_migrate_model::names::NVIDIA_DRA_DRIVER;
use gpu_migrate_model::units::CardIndex;

use super::NodeState;

impl NodeState {
    /// Notes which cards are claimed now. They take nothing new until the claims are gone.
    pub(super) fn observe_claims(&mut self, rows: &[ContainerDevices]) {
        let mut claimed: BTreeMap<CardIndex, String> = BTreeMap::new();
        for row in rows {
            for device in row.claimed.iter().filter(|device| device.driver == NVIDIA_DRA_DRIVER) {
                let why = format!(
                    "container {} of pod {}/{} has {} of it through DRA (ResourceClaim {})",
                    row.container, row.namespace, row.pod, device.device, device.claim
                );
                for card in self.cards_of_claimed(&device.device) {
                    claimed.entry(card).or_insert_with(|| why.clone());
                }
            }
        }
        if claimed != self.claimed {
            self.claimed = claimed;
            self.mark_changed();
        }
    }

    pub(super) fn is_claimed(&self, card: CardIndex) -> bool {
        self.claimed.contains_key(&card)
    }

    /// The driver names a card `gpu-<minor>` and a MIG device `gpu-<minor>-mig-...` (dra-driver-nvidia-gpu v0.5.0, deviceinfo.go and mig.go).
    /// All cards, where the name says nothing.
    fn cards_of_claimed(&self, device: &str) -> Vec<CardIndex> {
        let minor: Option<u32> = device
            .strip_prefix("gpu-")
            .and_then(|rest| rest.split('-').next())
            .and_then(|minor| minor.parse().ok());
        let has_minor = |card: &CardIndex| self.ledger.card(*card).map(|card| card.minor) == minor;
        let named: Vec<CardIndex> = self.ledger.indexes().filter(has_minor).collect();
        if named.is_empty() { self.ledger.indexes().collect() } else { named }
    }
}

#[cfg(test)]
mod tests {
    use gpu_migrate_kubelet_api::lister::ClaimedDevice;
    use gpu_migrate_model::card::Card;
    use gpu_migrate_model::topology::Topology;

    use super::*;
    use crate::decide::Settings;

    fn row(driver: &str, device: &str) -> ContainerDevices {
        let claimed = ClaimedDevice { claim: "n/c".into(), driver: driver.into(), device: device.into() };
        ContainerDevices {
            namespace: "n".into(),
            pod: "p".into(),
            container: "main".into(),
            claimed: vec![claimed],
            ..Default::default()
        }
    }

    #[test]
    fn a_claimed_card_takes_nothing_new_until_the_claim_is_gone() {
        // The cards are not in the order of their minor numbers.
        let card =
            |minor: u32| Card { uuid: format!("GPU-{minor}"), minor, memory_mib: 4096, ..Card::default() };
        let mut state = NodeState::new(Settings::default(), vec![card(1), card(0)], &Topology::default());
        let closed_by = |state: &mut NodeState, rows: &[ContainerDevices], now| {
            state.observe_pod_resources(rows, now, now);
            let indexes = state.ledger().indexes();
            indexes
                .filter(|card| state.closed_because(*card).is_some())
                .map(CardIndex::position)
                .collect::<Vec<_>>()
        };
        assert_eq!(closed_by(&mut state, &[row(NVIDIA_DRA_DRIVER, "gpu-1")], 1), [0]);
        let why = "container main of pod n/p has gpu-1 of it through DRA (ResourceClaim n/c)";
        assert_eq!(state.closed_because(CardIndex(0)), Some(why));
        assert_eq!(closed_by(&mut state, &[row(NVIDIA_DRA_DRIVER, "gpu-0-mig-1g.10gb-19-0")], 2), [1]);
        assert_eq!(
            closed_by(&mut state, &[row(NVIDIA_DRA_DRIVER, "gpu-vfio-0")], 3),
            [0, 1],
            "of a name that says nothing, all"
        );
        assert!(closed_by(&mut state, &[row("net.example", "gpu-0")], 4).is_empty());
        assert!(closed_by(&mut state, &[], 5).is_empty());
    }
}
