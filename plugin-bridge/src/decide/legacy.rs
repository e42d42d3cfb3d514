//! NVIDIA's resources: which devices are available, and what is granted when the kubelet requests others.
//!
//! The stock plugin has no information about shared pods, and keeps no allocation state (it answers for any ID it lists), so
//! it can be called for other devices than the kubelet requested.

use std::collections::BTreeSet;

use gpu_migrate_model::card::CardState;
use gpu_migrate_model::ledger::{Hold, HolderId};
use gpu_migrate_model::units::CardIndex;

use super::grants::{DeviceKey, Grant, GrantId, Resource};
use super::shared::AllocateError;
use super::{Millis, NodeState, UpstreamDevice};

/// The answer to an Allocate of one of NVIDIA's resources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LegacyGrant {
    pub grant: GrantId,
    /// The devices to call NVIDIA's plugin with; requested ones keep their place.
    pub devices: Vec<String>,
    /// They are not those that the kubelet requested; this must be on disk before the answer is sent.
    pub deviates: bool,
    /// The same request was answered before: nothing changed.
    pub repeated: bool,
}

impl NodeState {
    /// What NVIDIA's plugin lists for a resource now; `None` when the plugin is gone.
    pub fn observe_upstream(&mut self, resource: &str, devices: Option<Vec<UpstreamDevice>>) {
        match devices {
            Some(devices) => self.upstream.insert(resource.into(), devices),
            None => self.upstream.remove(resource),
        };
        self.mark_changed();
    }

    /// The devices, of those available to the kubelet, that NVIDIA's plugin may choose from. Cards that the extender has reserved
    /// for pending shared pods are left out as long as enough others remain.
    #[must_use]
    pub fn available_legacy(&self, offered: &[String], must: &[String], size: usize) -> Vec<String> {
        let open = |id: &&String| must.contains(id) || self.is_available(id, None);
        let open: Vec<&String> = offered.iter().filter(open).collect();
        let reserved = self.reserved_cards();
        let keep_back = |id: &&&String| match self.card_of(&DeviceKey::Legacy(id.as_str().into())) {
            Some(card) => must.contains(id) || !reserved.contains(&card),
            None => true,
        };
        let unreserved: Vec<String> = open.iter().filter(keep_back).map(|id| (*id).clone()).collect();
        if unreserved.len() >= size { unreserved } else { open.into_iter().cloned().collect() }
    }

    /// Answers an Allocate of one of NVIDIA's resources: which devices to call its plugin with.
    ///
    /// # Errors
    /// [`AllocateError`]; nothing has changed, but the resource is withdrawn for a moment.
    pub fn allocate_legacy(
        &mut self,
        resource: &str,
        ids: &[String],
        now: Millis,
    ) -> Result<LegacyGrant, AllocateError> {
        if !self.is_ready() {
            return Err(AllocateError::NotReady { resource: resource.to_owned() });
        }
        let kind = Resource::Legacy(resource.into());
        let keys: BTreeSet<DeviceKey> = ids.iter().map(|id| DeviceKey::Legacy(id.as_str().into())).collect();
        if let Some((id, grant)) = self.repeated_request(&kind, &keys) {
            let deviates = grant.deviates();
            let devices = if deviates { self.ids_of(&grant.actual) } else { ids.to_vec() };
            return Ok(LegacyGrant { grant: id, devices, deviates, repeated: true });
        }
        let as_requested = Grant::new(kind.clone(), keys.clone(), keys.clone(), now);
        let why = match self.allocate(as_requested.clone()) {
            Ok(grant) => {
                return Ok(LegacyGrant { grant, devices: ids.to_vec(), deviates: false, repeated: false });
            }
            Err(why) => why,
        };
        if let Some(devices) = self.substitutes(resource, ids, &as_requested) {
            let actual = devices.iter().map(|id| DeviceKey::Legacy(id.as_str().into())).collect();
            if let Ok(grant) = self.allocate(Grant::new(kind, keys, actual, now)) {
                return Ok(LegacyGrant { grant, devices, deviates: true, repeated: false });
            }
        }
        self.withdraw(resource, now);
        Err(AllocateError::NoFreeCapacity {
            resource: resource.to_owned(),
            asked: ids.len().to_string(),
            why: why.to_string(),
        })
    }

    /// NVIDIA's plugin is gone: what it listed stays listed, as unhealthy.
    pub fn upstream_lost(&mut self, resource: &str) {
        for device in self.upstream.get_mut(resource).into_iter().flatten() {
            device.healthy = false;
        }
        self.mark_changed();
    }

    /// Withdraws a resource for a moment: another Allocate would fail in the same way.
    pub fn withdraw_resource(&mut self, resource: &str, now: Millis) {
        self.withdraw(resource, now);
    }

    /// The devices that were granted where the kubelet has these in its checkpoint.
    #[must_use]
    pub fn actual_devices(&self, resource: &str, ids: &[String]) -> Vec<String> {
        let kind = Resource::Legacy(resource.into());
        let keys: BTreeSet<DeviceKey> = ids.iter().map(|id| DeviceKey::Legacy(id.as_str().into())).collect();
        let grant = self.grants.values().rfind(|g| g.resource == kind && g.requested == keys);
        grant.filter(|g| g.deviates()).map_or_else(|| ids.to_vec(), |g| self.ids_of(&g.actual))
    }

    /// Rolls back a grant whose answer was never sent.
    pub fn roll_back(&mut self, grant: GrantId) {
        self.release(grant);
    }

    /// The requested devices, with others in the place of those that are not available.
    fn substitutes(&self, resource: &str, ids: &[String], requested: &Grant) -> Option<Vec<String>> {
        let reserved = self.reserved_cards();
        let in_checkpoint: BTreeSet<&DeviceKey> = self.grants.values().flat_map(|g| &g.requested).collect();
        let listed = self.upstream.get(resource)?;
        let is_requested = |device: &&UpstreamDevice| ids.iter().any(|id| **id == *device.id);
        // With a topology manager the kubelet has chosen a NUMA node, and given the container's CPUs there.
        let near: BTreeSet<i64> =
            listed.iter().filter(is_requested).flat_map(|d| d.numa.iter().copied()).collect();
        let mut spare: Vec<(bool, bool, bool, CardIndex, &UpstreamDevice)> = listed
            .iter()
            .filter(|device| device.healthy && !is_requested(device))
            .filter(|device| self.is_available(&device.id, None))
            .filter_map(|device| {
                let key = DeviceKey::Legacy(device.id.clone());
                let card = self.card_of(&key)?;
                let is_far = !near.is_empty() && !device.numa.iter().any(|node| near.contains(node));
                // Near ones first, then unreserved ones, and those that no other grant has in the kubelet checkpoint.
                Some((is_far, reserved.contains(&card), in_checkpoint.contains(&key), card, device))
            })
            .collect();
        spare.sort_by(|a, b| (a.0, a.1, a.2, a.3, &a.4.id).cmp(&(b.0, b.1, b.2, b.3, &b.4.id)));
        let mut spare = spare.into_iter().map(|(.., device)| device.id.to_string());
        ids.iter()
            .map(|id| if self.is_available(id, Some(requested)) { Some(id.clone()) } else { spare.next() })
            .collect()
    }

    /// Whether a new legacy container could have this device, by the ledger and by the device's owner.
    fn is_available(&self, id: &str, requested: Option<&Grant>) -> bool {
        let key = DeviceKey::Legacy(id.into());
        let owner = self.owner.get(&key);
        match (owner, requested) {
            (Some(owner), Some(new)) if !self.may_transfer_devices(*owner, new, new.since) => {
                return false;
            }
            // Its owner will change: the ledger has no answer before that.
            (Some(_), Some(_)) => return true,
            (Some(_), None) => return false,
            (None, _) => {}
        }
        let Some(card) = self.card_of(&key) else { return true };
        self.ledger.state(card) != CardState::Disputed
            && self
                .ledger
                .may_hold(&HolderId::new("?", "?"), card, &Hold::Legacy(vec![self.slot(id, card)]))
                .is_ok()
    }

    /// Cards that are reserved for pending shared pods.
    fn reserved_cards(&self) -> BTreeSet<CardIndex> {
        self.reserved_for_others(None).into_keys().collect()
    }

    pub(super) fn ids_of(&self, keys: &BTreeSet<DeviceKey>) -> Vec<String> {
        keys.iter().map(|key| self.id_of(key)).collect()
    }
}

#[cfg(test)]
mod tests {
    use gpu_migrate_kubelet_api::checkpoint::Checkpoint;
    use gpu_migrate_model::card::Card;
    use gpu_migrate_model::topology::Topology;

    use super::*;
    use crate::decide::Settings;

    #[test]
    fn other_cards_than_requested_are_on_the_same_numa_node_where_they_can_be() {
        let card = |n: u32| Card { uuid: format!("GPU-{n}"), minor: n, memory_mib: 4096, ..Card::default() };
        let mut state = NodeState::new(Settings::default(), (0..4).map(card).collect(), &Topology::default());
        state.ingest_checkpoint(&Checkpoint::parse(br#"{"Data":{"PodDeviceEntries":null}}"#).unwrap(), 1);
        // Cards 0 and 3 are on node 1, the others on node 0.
        let device =
            |(n, numa)| UpstreamDevice { id: format!("GPU-{n}").into(), healthy: true, numa: vec![numa] };
        state.observe_upstream("g", Some([(0, 1), (1, 0), (2, 0), (3, 1)].map(device).into()));
        state.set_cordoned(&BTreeSet::from([CardIndex(0)]));
        let granted = state.allocate_legacy("g", &["GPU-0".to_owned()], 2).unwrap();
        assert_eq!(granted.devices, ["GPU-3"]);
        let granted = state.allocate_legacy("g", &["GPU-0".to_owned(), "GPU-3".to_owned()], 3).unwrap();
        assert_eq!(granted.devices.len(), 2, "another node rather than none");
    }
}
