//! `ListAndWatch`: devices are withdrawn from allocation by listing them as Unhealthy.
//!
//! A device that the kubelet has in its checkpoint stays Healthy for as long as its card is: only what could still be allocated
//! is withdrawn. (1.33 refuses to restart an init container whose device turned Unhealthy.)

use std::collections::BTreeSet;

use gpu_migrate_model::card::CardState;
use gpu_migrate_model::device_id::SharedResource;

use super::grants::{DeviceKey, Grant, Resource};
use super::{Millis, NodeState};

/// One line of a ListAndWatch answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedDevice {
    pub id: String,
    /// Whether it may be allocated, or keep its container.
    pub healthy: bool,
    /// NUMA nodes near it; empty where unknown or not reported.
    pub numa: Vec<i64>,
}

/// What can change in a list. Compared after every change of the state, so that it has to be cheap: a list of shares is thousands
/// of IDs, which stay the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listing {
    /// Whether each number of a shared resource is healthy.
    Shared(SharedResource, Vec<bool>),
    /// A list of NVIDIA's plugin, which is short.
    Legacy(Vec<ListedDevice>),
}

impl NodeState {
    #[must_use]
    pub fn listing(&self, resource: &Resource, now: Millis) -> Listing {
        let name = self.resource_name(resource);
        let withdrawn = !self.is_ready() || self.is_withdrawn(name, now);
        match resource {
            Resource::Shared(shared) => Listing::Shared(*shared, self.list_shared(*shared, withdrawn)),
            Resource::Legacy(name) => Listing::Legacy(self.list_legacy(name, withdrawn)),
        }
    }

    /// Calls `each` for every device of the list, in a fixed order.
    pub fn for_each_device(&self, listing: &Listing, mut each: impl FnMut(&ListedDevice)) {
        let (shared, healths) = match listing {
            Listing::Shared(shared, healths) => (*shared, healths),
            Listing::Legacy(list) => return list.iter().for_each(each),
        };
        // Reused: allocating thousands of strings would delay an answer to the kubelet meanwhile.
        let mut device = ListedDevice { id: String::new(), healthy: false, numa: Vec::new() };
        for card in self.ledger.indexes() {
            let numa = self.ledger.card(card).and_then(|c| c.numa).filter(|_| self.settings.numa_hints);
            device.numa = numa.iter().map(|n| i64::from(*n)).collect();
            for number in self.layout.numbers(shared, card) {
                self.layout.write_id(shared, number, &mut device.id);
                device.healthy = healths.get(number as usize).copied().unwrap_or(false);
                each(&device);
            }
        }
    }

    fn list_shared(&self, shared: SharedResource, withdrawn: bool) -> Vec<bool> {
        #[derive(Clone, Copy)]
        enum Owner {
            None,
            /// A grant has it in place of a requested device.
            Substitute,
            /// It is in the kubelet checkpoint.
            Kubelet,
        }
        let mut all = vec![Owner::None; self.layout.all(shared).len()];
        let mut mark = |key: &DeviceKey, of| {
            if let Some(slot) = key.number(shared).and_then(|number| all.get_mut(number as usize)) {
                *slot = of;
            }
        };
        self.owner.keys().for_each(|key| mark(key, Owner::Substitute));
        let requested = self.grants.values().filter(|g| g.resource == Resource::Shared(shared));
        requested.flat_map(|g| &g.requested).for_each(|key| mark(key, Owner::Kubelet));
        let withdrawn = withdrawn || self.isolation_obstacle().is_some();
        let mut healths = vec![false; all.len()];
        for card in self.ledger.indexes() {
            let state = self.ledger.state(card);
            let open =
                self.shareable(card) && matches!(state, CardState::Free | CardState::Shared) && !withdrawn;
            for number in self.layout.numbers(shared, card) {
                healths[number as usize] = match all[number as usize] {
                    Owner::Kubelet => state != CardState::Unhealthy,
                    Owner::Substitute => false,
                    Owner::None => open,
                };
            }
        }
        healths
    }

    fn list_legacy(&self, name: &str, withdrawn: bool) -> Vec<ListedDevice> {
        let of_resource = |g: &&Grant| matches!(&g.resource, Resource::Legacy(of) if **of == *name);
        let requested: BTreeSet<&DeviceKey> =
            self.grants.values().filter(of_resource).flat_map(|g| &g.requested).collect();
        let devices = self.upstream.get(name).map(Vec::as_slice).unwrap_or_default();
        let listed = devices.iter().map(|device| {
            let key = DeviceKey::Legacy(device.id.clone());
            let state = self.card_of(&key).map(|card| self.ledger.state(card));
            let healthy = match state {
                _ if !device.healthy => false,
                Some(CardState::Unhealthy) => false,
                _ if requested.contains(&key) => true,
                _ if withdrawn || self.owner.contains_key(&key) => false,
                // A card that is not in the inventory is left to NVIDIA's plugin.
                None | Some(CardState::Free) => true,
                // Other parts of a card that is legacy already; the whole card would be in the kubelet checkpoint.
                Some(CardState::Legacy) => device.id.contains("::") || device.id.starts_with("MIG-"),
                Some(CardState::Shared | CardState::Cordoned | CardState::Disputed) => false,
            };
            ListedDevice { id: device.id.to_string(), healthy, numa: device.numa.clone() }
        });
        listed.collect()
    }
}
