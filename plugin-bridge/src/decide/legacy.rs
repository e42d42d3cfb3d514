//! NVIDIA's resources: which cards the kubelet may be offered, and what is given when it asks for another.
//!
//! The stock plugin knows nothing of shared pods, and keeps no allocation state of its own (it answers for any ID it
//! lists), so other devices may be put in place of those that the kubelet asked for.

use std::collections::BTreeSet;

use gpu_migrate_model::card::CardState;
use gpu_migrate_model::ledger::{Hold, HolderId};
use gpu_migrate_model::units::CardIndex;

use super::grants::{DeviceKey, Grant, GrantId, Resource};
use super::shared::AllocateError;
use super::{Millis, NodeState, UpstreamDevice};

/// What the kubelet was promised of one of NVIDIA's resources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LegacyGrant {
    /// The promise.
    pub grant: GrantId,
    /// The devices to ask NVIDIA's plugin for, in the kubelet's order as far as they are the kubelet's.
    pub devices: Vec<String>,
    /// They are not those that the kubelet asked for; this must be on disk before the answer.
    pub deviates: bool,
    /// This answer was given before: nothing changed.
    pub repeated: bool,
}

impl NodeState {
    /// Takes what NVIDIA's plugin lists for a resource now; `None` when the plugin is gone.
    pub fn observe_upstream(&mut self, resource: &str, devices: Option<Vec<UpstreamDevice>>) {
        match devices {
            Some(devices) => self.upstream.insert(resource.into(), devices),
            None => self.upstream.remove(resource),
        };
        self.touch();
    }

    /// The devices out of the kubelet's offer that NVIDIA's plugin may choose from.
    ///
    /// Cards that the extender has reserved for shared pods on their way are kept back as long as enough others are left.
    #[must_use]
    pub fn available_legacy(&self, offered: &[String], must: &[String], size: usize) -> Vec<String> {
        let nobody = HolderId::new("?", "?");
        let open = |id: &&String| must.contains(id) || self.may_take(&nobody, id, None);
        let open: Vec<&String> = offered.iter().filter(open).collect();
        let reserved = self.reserved_cards();
        let keep_back = |id: &&&String| match self.card_of(&DeviceKey::Legacy(id.as_str().into())) {
            Some(card) => must.contains(id) || !reserved.contains(&card),
            None => true,
        };
        let unreserved: Vec<String> = open.iter().filter(keep_back).map(|id| (*id).clone()).collect();
        if unreserved.len() >= size { unreserved } else { open.into_iter().cloned().collect() }
    }

    /// Answers an Allocate of one of NVIDIA's resources: which devices to ask its plugin for.
    ///
    /// # Errors
    /// [`AllocateError`]; the books are as they were, but the resource is withdrawn for a moment.
    pub fn allocate_legacy(
        &mut self,
        resource: &str,
        ids: &[String],
        now: Millis,
    ) -> Result<LegacyGrant, AllocateError> {
        if !self.opened {
            return Err(AllocateError::NotReady { resource: resource.to_owned() });
        }
        let kind = Resource::Legacy(resource.into());
        let keys: BTreeSet<DeviceKey> = ids.iter().map(|id| DeviceKey::Legacy(id.as_str().into())).collect();
        if let Some((id, grant)) = self.repeated_request(&kind, &keys) {
            let deviates = grant.deviates();
            let devices = if deviates { self.ids_of(&grant.actual) } else { ids.to_vec() };
            return Ok(LegacyGrant { grant: id, devices, deviates, repeated: true });
        }
        let as_asked = Grant::new(kind.clone(), keys.clone(), keys.clone(), now);
        let why = match self.allocate(as_asked.clone()) {
            Ok(grant) => {
                return Ok(LegacyGrant { grant, devices: ids.to_vec(), deviates: false, repeated: false });
            }
            Err(why) => why,
        };
        if let Some(devices) = self.substitutes(resource, ids, &as_asked) {
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

    /// NVIDIA's plugin is gone: what it listed stays known, and may not be handed out.
    pub fn upstream_lost(&mut self, resource: &str) {
        for device in self.upstream.get_mut(resource).into_iter().flatten() {
            device.healthy = false;
        }
        self.touch();
    }

    /// Withdraws a resource for a moment: whoever asks for it now would run into the same failure.
    pub fn withdraw_resource(&mut self, resource: &str, now: Millis) {
        self.withdraw(resource, now);
    }

    /// The devices that were really given where the kubelet has these in its book.
    #[must_use]
    pub fn actual_devices(&self, resource: &str, ids: &[String]) -> Vec<String> {
        let kind = Resource::Legacy(resource.into());
        let keys: BTreeSet<DeviceKey> = ids.iter().map(|id| DeviceKey::Legacy(id.as_str().into())).collect();
        let grant = self.grants.values().rfind(|g| g.resource == kind && g.requested == keys);
        grant.filter(|g| g.deviates()).map_or_else(|| ids.to_vec(), |g| self.ids_of(&g.actual))
    }

    /// The card on which a device lies, if it is one of this node's.
    #[must_use]
    pub fn card_of_device(&self, key: &DeviceKey) -> Option<CardIndex> {
        self.card_of(key)
    }

    /// Takes a promise back whose answer was never given.
    pub fn roll_back(&mut self, grant: GrantId) {
        self.release(grant);
    }

    /// The devices asked for, with others in the place of those that cannot be had.
    fn substitutes(&self, resource: &str, ids: &[String], asked: &Grant) -> Option<Vec<String>> {
        let nobody = HolderId::new("?", "?");
        let reserved = self.reserved_cards();
        let in_kubelets_book: BTreeSet<&DeviceKey> =
            self.grants.values().flat_map(|g| &g.requested).collect();
        let mut spare: Vec<(bool, bool, CardIndex, &UpstreamDevice)> = self
            .upstream
            .get(resource)?
            .iter()
            .filter(|device| device.healthy && !ids.iter().any(|id| **id == *device.id))
            .filter(|device| self.may_take(&nobody, &device.id, None))
            .filter_map(|device| {
                let key = DeviceKey::Legacy(device.id.clone());
                let card = self.card_of(&key)?;
                // One that is promised to nobody, not even in the kubelet's book, surprises the least.
                Some((reserved.contains(&card), in_kubelets_book.contains(&key), card, device))
            })
            .collect();
        spare.sort_by(|a, b| (a.0, a.1, a.2, &a.3.id).cmp(&(b.0, b.1, b.2, &b.3.id)));
        let mut spare = spare.into_iter().map(|(.., device)| device.id.to_string());
        ids.iter()
            .map(|id| if self.may_take(&nobody, id, Some(asked)) { Some(id.clone()) } else { spare.next() })
            .collect()
    }

    /// Whether a legacy container could have this device by the ledger, and by who owns the device now.
    fn may_take(&self, who: &HolderId, id: &str, asked: Option<&Grant>) -> bool {
        let key = DeviceKey::Legacy(id.into());
        let owner = self.owner.get(&key);
        match (owner, asked) {
            (Some(owner), Some(asked)) if !self.may_transfer_devices(*owner, asked, asked.since) => {
                return false;
            }
            // Somebody has it who will hand it on: the ledger cannot be asked before he has.
            (Some(_), Some(_)) => return true,
            (Some(_), None) => return false,
            (None, _) => {}
        }
        let Some(card) = self.card_of(&key) else { return true };
        self.ledger.state(card) != CardState::Disputed
            && self.ledger.may_hold(who, card, &Hold::Legacy(vec![self.slot(id, card)])).is_ok()
    }

    /// Cards that pending shared pods are about to come to.
    fn reserved_cards(&self) -> BTreeSet<CardIndex> {
        self.reserved_for_others(None).into_keys().collect()
    }

    pub(super) fn ids_of(&self, keys: &BTreeSet<DeviceKey>) -> Vec<String> {
        keys.iter().map(|key| self.id_of(key)).collect()
    }
}
