//! What the next process is to know: which containers have which devices. The kubelet checkpoint has what was *requested*; other devices
//! than those (deviations) are in our own file alone, `nvidia_checkpoint`.

use std::collections::{BTreeMap, BTreeSet};

use gpu_migrate_model::ledger::HolderId;

use super::grants::{DeviceKey, Grant, GrantId, Resource};
use super::{Millis, NodeState};
use crate::record::{Record, RecordData, RecordRow};

/// In place of the pod and the container of a row whose devices were allocated again since.
const SUPERSEDED: &str = "?";

impl NodeState {
    /// Takes over what an earlier process wrote. Before the kubelet checkpoint is read.
    pub fn restore_record(&mut self, rows: Vec<RecordRow>) {
        if !self.checkpoint.is_lost() {
            self.observe_whole_record(&rows);
        }
        self.restored = rows;
    }

    /// An earlier process wrote a record, and it is lost or damaged.
    pub fn observe_lost_record(&mut self) {
        self.checkpoint.source_lost();
    }

    /// The whole content of `nvidia_checkpoint`.
    #[must_use]
    pub fn record(&self) -> Record {
        let rows = self.grants.iter().map(|(id, grant)| self.row(*id, grant));
        // What an earlier process wrote stays until it is known what became of it.
        let entries = rows.chain(self.restored.iter().cloned()).collect();
        Record { data: RecordData { entries }, incomplete: !self.is_ready() }
    }

    /// The rows of [`NodeState::record`] that no other source has.
    #[must_use]
    pub fn deviations(&self) -> Vec<RecordRow> {
        let deviating = self.grants.iter().filter(|(_, g)| g.deviates());
        let rows = deviating.map(|(id, grant)| self.row(*id, grant));
        rows.chain(self.restored.iter().filter(|row| row.deviates()).cloned()).collect()
    }

    fn row(&self, id: GrantId, grant: &Grant) -> RecordRow {
        // A candidate of this process would be read back as a fact; one that an earlier process knew is one.
        let known = grant.holder_or_candidate().filter(|_| grant.is_known());
        // The same devices were allocated again since: what the kubelet checkpoint says of them is not about this grant.
        let superseded = HolderId::new(SUPERSEDED, SUPERSEDED);
        let known = known.or_else(|| self.is_superseded(id).then_some(&superseded));
        let mut actual: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for key in &grant.actual {
            let numa = self.card_of(key).and_then(|c| self.ledger.card(c)?.numa).map_or(-1, i64::from);
            actual.entry(numa.to_string()).or_default().push(self.id_of(key));
        }
        let uuid = |key: &DeviceKey| Some(self.ledger.card(self.card_of(key)?)?.uuid.clone());
        let grace = known.and_then(|holder| self.pods.grace_of(&holder.pod_uid)).or(grant.grace);
        RecordRow {
            pod_uid: known.map(|h| h.pod_uid.clone()).unwrap_or_default(),
            container: known.map(|h| h.container.clone()).unwrap_or_default(),
            resource: self.resource_name(&grant.resource).to_owned(),
            actual,
            kubelet: self.ids_of(&grant.requested),
            cards: grant.actual.iter().filter_map(uuid).collect(),
            answer: String::new(),
            grace_seconds: grace.map(|milliseconds| milliseconds / 1_000),
        }
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

    /// Whether an earlier process may have given these devices to this holder: it did not always know to whom.
    pub(super) fn is_recorded(
        &self,
        resource: &Resource,
        keys: &BTreeSet<DeviceKey>,
        holder: &HolderId,
    ) -> bool {
        let same = |row: &RecordRow| {
            let ids = row.kubelet.iter().map(String::as_str);
            row.pod_uid.is_empty() && self.keys(resource, ids).as_ref() == Some(keys)
        };
        let of_pod = |row: &RecordRow| row.pod_uid == holder.pod_uid;
        let name = self.resource_name(resource);
        self.restored.iter().any(|row| row.resource == name && (of_pod(row) || same(row)))
    }

    /// A grant of these devices by an earlier process: to this holder, else to one it did not know yet. What it gave to another holder
    /// does not count: the kubelet allocates the same devices again, and then they need not deviate.
    pub(super) fn take_restored(
        &mut self,
        resource: Resource,
        keys: BTreeSet<DeviceKey>,
        holder: Option<&HolderId>,
        now: Millis,
    ) -> Grant {
        let name = self.resource_name(&resource).to_owned();
        let same = |d: &RecordRow| {
            d.resource == name
                && self.keys(&resource, d.kubelet.iter().map(String::as_str)).as_ref() == Some(&keys)
        };
        let of_holder =
            |d: &RecordRow| holder.is_some_and(|h| h.pod_uid == d.pod_uid && h.container == d.container);
        let of_unknown = |d: &RecordRow| d.deviates() && (holder.is_none() || d.pod_uid.is_empty());
        let named = self.restored.iter().position(|d| same(d) && of_holder(d));
        let position = named.or_else(|| self.restored.iter().position(|d| same(d) && of_unknown(d)));
        let row = position.map(|position| self.restored.remove(position));
        let actual = row.as_ref().and_then(|row| self.keys(&resource, row.actual_ids()));
        let actual = actual.unwrap_or_else(|| keys.clone());
        let mut grant = Grant::new(resource, keys, actual, now);
        grant.grace = row.and_then(|row| row.grace());
        grant
    }

    /// Grants of an earlier process that no source lists (yet): held like any other unclaimed grant.
    pub(super) fn hold_unclaimed(&mut self, now: Millis) {
        for row in std::mem::take(&mut self.restored) {
            let resource = self.resource(&row.resource);
            let requested = self.keys(&resource, row.kubelet.iter().map(String::as_str));
            let actual = self.keys(&resource, row.actual_ids());
            let Some(mut actual) = actual else { continue };
            // The card that the kubelet chose may be gone, and the one that the container has is here.
            let mut requested = requested
                .unwrap_or_else(|| row.kubelet.iter().filter_map(|id| self.key(&resource, id)).collect());
            if requested == actual {
                // What the kubelet's checkpoint has for another container, this one had no more.
                actual.retain(|key| !self.owner.contains_key(key));
                if actual.is_empty() {
                    continue;
                }
                requested.clone_from(&actual);
            }
            let mut grant = Grant::new(resource, requested, actual, now);
            grant.absent_since = Some(now);
            grant.grace = row.grace();
            let holder = HolderId::new(&*row.pod_uid, &*row.container);
            if row.pod_uid.is_empty() || row.pod_uid == SUPERSEDED {
                // Placeholders of two grants must not be taken for the same pod.
                grant.holder = HolderId::new(format!("?restored-{}", self.grants.len()), "?");
                grant.candidate = (row.pod_uid == SUPERSEDED).then_some(holder);
            } else {
                // The earlier process knew the holder. Nothing but the end of its pod frees what it has.
                grant = grant.of(holder);
            }
            self.record_observed(grant);
        }
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use gpu_migrate_kubelet_api::checkpoint::Checkpoint;
    use gpu_migrate_kubelet_api::deviceplugin::ContainerAllocateResponse;
    use gpu_migrate_model::card::{Card, CardState};
    use gpu_migrate_model::names;
    use gpu_migrate_model::topology::Topology;
    use gpu_migrate_model::units::CardIndex;
    use prost::Message as _;

    use super::*;
    use crate::decide::Settings;

    /// A row of the kubelet checkpoint: pod, resource, device ID and what the answer to Allocate was.
    fn row(pod: &str, resource: &str, id: &str, answer: &ContainerAllocateResponse) -> String {
        let answer = base64::engine::general_purpose::STANDARD.encode(answer.encode_to_vec());
        format!(
            r#"{{"PodUID":"{pod}","ContainerName":"c","ResourceName":"{resource}","DeviceIDs":["{id}"],"AllocResp":"{answer}"}}"#
        )
    }

    fn state_after(rows: &[String]) -> NodeState {
        let card = |n: u32| Card { uuid: format!("GPU-{n}"), minor: n, memory_mib: 4096, ..Card::default() };
        let mut state = NodeState::new(Settings::default(), (0..2).map(card).collect(), &Topology::default());
        let text = format!(r#"{{"Data":{{"PodDeviceEntries":[{}]}}}}"#, rows.join(","));
        state.ingest_checkpoint(&Checkpoint::parse(text.as_bytes()).unwrap(), 1);
        state
    }

    fn share_of(card: &str) -> ContainerAllocateResponse {
        let annotations = [(names::CARD_UUIDS.to_owned(), card.to_owned())];
        ContainerAllocateResponse { annotations: annotations.into(), ..ContainerAllocateResponse::default() }
    }

    fn states(state: &NodeState) -> [CardState; 2] {
        [0, 1].map(|card| state.ledger().state(CardIndex(card)))
    }

    /// Without our own record: it was lost, or the agent was taken off the node and put back.
    #[test]
    fn the_answer_that_the_kubelet_keeps_says_which_card_a_container_has() {
        let mut whole = ContainerAllocateResponse::default();
        whole.envs.insert(names::NVIDIA_VISIBLE_DEVICES.into(), "GPU-1".into());
        let state = state_after(&[row("p", "nvidia.com/gpu", "GPU-0", &whole)]);
        assert_eq!(states(&state), [CardState::Free, CardState::Legacy]);
        assert_eq!(state.deviations().len(), 1, "and the next process knows it again");

        let state = state_after(&[row(
            "p",
            "tencent.com/vcuda-core",
            "tencent.com/vcuda-core-7",
            &share_of("GPU-1"),
        )]);
        assert_eq!(states(&state), [CardState::Free, CardState::Shared]);

        let state =
            state_after(&[row("p", "nvidia.com/gpu", "GPU-0", &ContainerAllocateResponse::default())]);
        assert_eq!(states(&state), [CardState::Legacy, CardState::Free], "an answer may name no card");

        let memory = "tencent.com/vcuda-memory-268435456-3";
        let state = state_after(&[row("p", "tencent.com/vcuda-memory", memory, &share_of("GPU-1"))]);
        assert_eq!(
            states(&state),
            [CardState::Shared, CardState::Free],
            "the answer for cores names the cards"
        );
    }

    #[test]
    fn a_share_whose_ids_are_not_known_takes_none_that_another_row_names() {
        let core = |pod: &str, n: u32, card: &str| {
            row(pod, "tencent.com/vcuda-core", &format!("tencent.com/vcuda-core-{n}"), &share_of(card))
        };
        // `p` asked for an ID of card 0 and got card 1; `q` has the first ID of card 1.
        let state = state_after(&[core("p", 7, "GPU-1"), core("q", 100, "GPU-1")]);
        assert_eq!(state.ledger().holds(CardIndex(1)).count(), 2);
    }
}
