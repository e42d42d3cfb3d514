//! Deviations: grants of other devices than the kubelet requested. Only our own file (`nvidia_checkpoint`) tells them to the next
//! process; the kubelet checkpoint has what was requested.

use std::collections::{BTreeMap, BTreeSet};

use gpu_migrate_model::ledger::HolderId;

use super::grants::{DeviceKey, Grant, GrantId, Resource};
use super::{Millis, NodeState};
use crate::deviations::{Deviation, DeviationData, DeviationFile};

impl NodeState {
    /// Takes over the deviations that an earlier process wrote. Before the kubelet checkpoint is read.
    pub fn restore_deviations(&mut self, deviations: Vec<Deviation>) {
        self.restored_deviations = deviations;
    }

    /// The whole content of `nvidia_checkpoint`.
    #[must_use]
    pub fn deviations(&self) -> DeviationFile {
        let entries = self.grants.iter().filter(|(_, g)| g.deviates()).map(|(id, grant)| {
            // A candidate of this process would be read back as a fact; one that an earlier process knew is one.
            let known = grant.holder_or_candidate().filter(|_| grant.is_known());
            // The same devices were allocated again since: what the kubelet checkpoint says of them is not about this grant.
            let superseded = HolderId::new("?", "?");
            let known = known.or_else(|| self.is_superseded(*id).then_some(&superseded));
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

    /// Whether this grant is of the same request as an earlier, deviating one without a known holder, from which
    /// [`NodeState::deviations`] must distinguish it.
    #[must_use]
    pub fn supersedes(&self, id: GrantId) -> bool {
        let Some(grant) = self.grants.get(&id) else { return false };
        let mut before = self.grants.range(..id);
        before.any(|(_, g)| g.deviates() && !g.is_known() && g.is_same_request(grant))
    }

    fn is_superseded(&self, id: GrantId) -> bool {
        let Some(grant) = self.grants.get(&id) else { return false };
        self.grants.range(id..).skip(1).any(|(_, g)| g.is_same_request(grant))
    }

    /// What the kubelet checkpoint has for each legacy holder that was given other devices.
    #[must_use]
    pub fn legacy_deviations(&self) -> BTreeMap<HolderId, Vec<String>> {
        let mut deviating: BTreeMap<HolderId, Vec<String>> = BTreeMap::new();
        let legacy = self.grants.values().filter(|g| matches!(g.resource, Resource::Legacy(_)));
        for grant in legacy.filter(|g| g.deviates()) {
            deviating.entry(grant.holder.clone()).or_default().extend(self.ids_of(&grant.requested));
        }
        deviating
    }

    /// What an earlier process gave in place of these devices: to this holder, else to one it did not know yet. What it gave
    /// to another holder does not count: the kubelet allocates the same devices again, and then they need not deviate.
    pub(super) fn take_restored_deviation(
        &mut self,
        resource: &Resource,
        keys: &BTreeSet<DeviceKey>,
        holder: Option<&HolderId>,
    ) -> Option<BTreeSet<DeviceKey>> {
        let name = self.resource_name(resource).to_owned();
        let same = |d: &Deviation| {
            d.resource == name
                && self.keys(resource, d.kubelet.iter().map(String::as_str)).as_ref() == Some(keys)
        };
        let of_holder =
            |d: &Deviation| holder.is_some_and(|h| h.pod_uid == d.pod_uid && h.container == d.container);
        let of_unknown = |d: &Deviation| holder.is_none() || d.pod_uid.is_empty();
        let restored = &self.restored_deviations;
        let named = restored.iter().position(|d| same(d) && of_holder(d));
        let position = named.or_else(|| restored.iter().position(|d| same(d) && of_unknown(d)))?;
        let deviation = self.restored_deviations.swap_remove(position);
        self.keys(resource, deviation.actual_ids())
    }

    /// Deviations of an earlier process that no source lists (yet): held like any other unclaimed grant.
    pub(super) fn hold_unclaimed_deviations(&mut self, now: Millis) {
        for deviation in std::mem::take(&mut self.restored_deviations) {
            let resource = self.resource(&deviation.resource);
            let requested = self.keys(&resource, deviation.kubelet.iter().map(String::as_str));
            let actual = self.keys(&resource, deviation.actual_ids());
            if let (Some(requested), Some(actual)) = (requested, actual) {
                let mut grant = Grant::new(resource, requested, actual, now);
                grant.absent_since = Some(now);
                if !deviation.pod_uid.is_empty() {
                    // The earlier process knew the holder; the next one has to know it too.
                    grant.candidate = Some(HolderId::new(&*deviation.pod_uid, &*deviation.container));
                }
                // Placeholders of two grants must not be taken for the same pod.
                grant.holder = HolderId::new(format!("?journal-{}", self.grants.len()), "?");
                self.record_observed(grant);
            }
        }
    }
}
