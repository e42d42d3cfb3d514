//! What the kubelet is told about each device: withdrawn by health, both ways.
//!
//! A device that the kubelet has in its book stays Healthy for as long as its card is well: withdrawing is for what
//! could still be handed out. (1.33 refuses to restart an init container whose device turned Unhealthy.)

use std::collections::BTreeSet;

use gpu_migrate_model::card::CardState;
use gpu_migrate_model::device_id::SharedResource;

use super::grants::{DeviceKey, Resource};
use super::{Books, Millis};

/// One line of a ListAndWatch answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedDevice {
    /// The device's ID.
    pub id: String,
    /// Whether it may be handed out.
    pub healthy: bool,
    /// NUMA nodes it is near to; empty where unknown or not told.
    pub numa: Vec<i64>,
}

impl Books {
    /// The list of one resource, in a fixed order.
    #[must_use]
    pub fn list(&self, resource: &Resource, now: Millis) -> Vec<ListedDevice> {
        let name = self.resource_name(resource);
        let withdrawn = !self.opened || self.withdrawn.get(name).is_some_and(|until| now < *until);
        let booked: BTreeSet<&DeviceKey> =
            self.grants.values().filter(|g| g.resource == *resource).flat_map(|g| &g.kubelet).collect();
        match resource {
            Resource::Shared(shared) => self.list_shared(*shared, &booked, withdrawn),
            Resource::Legacy(name) => self.list_legacy(name, &booked, withdrawn),
        }
    }

    /// When a withdrawal ends next, after `now`.
    #[must_use]
    pub fn next_return(&self, now: Millis) -> Option<Millis> {
        self.withdrawn.values().copied().filter(|until| *until > now).min()
    }

    fn list_shared(
        &self,
        shared: SharedResource,
        booked: &BTreeSet<&DeviceKey>,
        withdrawn: bool,
    ) -> Vec<ListedDevice> {
        let mut list = Vec::new();
        for card in self.ledger.indexes() {
            let state = self.ledger.state(card);
            let open =
                self.shareable(card) && matches!(state, CardState::Free | CardState::Shared) && !withdrawn;
            let numa = self.ledger.card(card).and_then(|c| c.numa).filter(|_| self.settings.numa_hints);
            for number in self.layout.numbers(shared, card) {
                let key = DeviceKey::shared(shared, number);
                let healthy = if booked.contains(&key) {
                    state != CardState::Unhealthy
                } else {
                    open && !self.owner.contains_key(&key)
                };
                list.push(ListedDevice {
                    id: self.layout.id(shared, number),
                    healthy,
                    numa: numa.iter().map(|n| i64::from(*n)).collect(),
                });
            }
        }
        list
    }

    fn list_legacy(&self, name: &str, booked: &BTreeSet<&DeviceKey>, withdrawn: bool) -> Vec<ListedDevice> {
        let devices = self.upstream.get(name).map(Vec::as_slice).unwrap_or_default();
        let listed = devices.iter().map(|device| {
            let key = DeviceKey::Legacy(device.id.clone());
            let state = self.card_of(&key).map(|card| self.ledger.state(card));
            let healthy = match state {
                _ if !device.healthy => false,
                Some(CardState::Unhealthy) => false,
                _ if booked.contains(&key) => true,
                _ if withdrawn || self.owner.contains_key(&key) => false,
                // A card that is not in the inventory is NVIDIA's alone.
                None | Some(CardState::Free) => true,
                // Other parts of a card that is legacy already; the whole card would be in the kubelet's book.
                Some(CardState::Legacy) => device.id.contains("::") || device.id.starts_with("MIG-"),
                Some(CardState::Shared | CardState::Cordoned | CardState::Disputed) => false,
            };
            ListedDevice { id: device.id.to_string(), healthy, numa: device.numa.clone() }
        });
        listed.collect()
    }
}
