//! Observations: the API's pods, the kubelet checkpoint, pod-resources. They say who a grant is for and what was missed.

use std::collections::BTreeSet;

use gpu_migrate_model::ask::ContainerKind;
use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::ledger::HolderId;
use gpu_migrate_model::units::CardIndex;

use super::grants::{DeviceKey, Grant, GrantId, Resource};
use super::{Millis, NodeState, PodView};
use crate::inventory::evidence;
use gpu_migrate_kubelet_api::checkpoint::{Checkpoint, Entry};
use gpu_migrate_kubelet_api::lister::ContainerDevices;

impl NodeState {
    /// The complete set of the node's pods, from the API.
    pub fn observe_pods(&mut self, pods: Vec<PodView>, now: Millis) {
        self.pods.replace(pods, now);
        self.reconcile(now);
        self.mark_changed();
    }

    /// One pod's new state in the API.
    pub fn observe_pod(&mut self, pod: PodView, now: Millis) {
        self.pods.upsert(pod);
        self.reconcile(now);
        self.mark_changed();
    }

    pub fn observe_pod_gone(&mut self, uid: &str, now: Millis) {
        self.pods.remove(uid, now);
        self.reconcile(now);
        self.mark_changed();
    }

    /// The kubelet restarted. What it never wrote to its checkpoint it has forgotten; without a readable checkpoint, all of it.
    pub fn observe_kubelet_start(&mut self, checkpoint_readable: bool, at: Millis) {
        self.checkpoint.kubelet_started(checkpoint_readable, at);
        self.registration.forget_kubelet();
    }

    /// The pods that had processes at `at`, by their cgroups: their UIDs, as the kubelet knows them.
    pub fn observe_cgroups(&mut self, populated: BTreeSet<String>, at: Millis, now: Millis) {
        self.pods.observe_cgroups(populated, at);
        self.reconcile(now);
    }

    /// The kubelet checkpoint, in a version that was not read before.
    pub fn ingest_checkpoint(&mut self, checkpoint: &Checkpoint<'_>, now: Millis) {
        self.checkpoint.last_grant = self.latest();
        self.ingest(checkpoint, true, now);
    }

    /// The same version once more. It says nothing about grants that were made since it was first read.
    pub fn ingest_unchanged_checkpoint(&mut self, checkpoint: &Checkpoint<'_>, now: Millis) {
        self.ingest(checkpoint, false, now);
    }

    fn ingest(&mut self, checkpoint: &Checkpoint<'_>, first_time: bool, now: Millis) {
        let mut seen = BTreeSet::new();
        let mut named = BTreeSet::new();
        // Shares of which only the cards are known. All others come first: theirs are the IDs that they name.
        let mut without_ids = Vec::new();
        let mut new_legacy = BTreeSet::new();
        if first_time {
            self.observe_kubelet_lists(checkpoint);
        }
        self.elsewhere = self.holders_elsewhere(checkpoint);
        for (resource, keys, holder, answer) in self.rows_of_interest(checkpoint) {
            if let Some(id) = self.match_row(&resource, &keys, &holder, &seen) {
                seen.insert(id);
                if self.grants[&id].confirmed {
                    continue;
                }
                // Rows of terminated pods stay, and the kubelet may have allocated the same devices again since.
                if self.row_may_mean(&self.grants[&id], &holder, now) {
                    named.insert(holder.clone());
                    self.confirm(id, holder);
                }
            } else if first_time && !self.row_is_stale(&holder, &keys, now) {
                named.insert(holder.clone());
                if matches!(resource, Resource::Legacy(_)) && !self.is_recorded(&resource, &keys, &holder) {
                    new_legacy.insert(holder.clone());
                }
                let mut grant = self.take_restored(resource, keys, Some(&holder), now).of(holder);
                match self.correct_by_answer(&mut grant, answer) {
                    Some(cards) => without_ids.push((grant, cards)),
                    None => drop(seen.insert(self.record_observed(grant))),
                }
            }
        }
        for (id, grant) in &mut self.grants {
            if seen.contains(id) {
                grant.absent_since = None;
            } else if *id <= self.checkpoint.last_grant || self.checkpoint.predates_restart(grant.since) {
                // A kubelet that restarted from this checkpoint knows of nothing else, whenever it was allocated.
                grant.absent_since = grant.absent_since.or(Some(now));
            }
        }
        self.hold_unclaimed(now);
        for (grant, cards) in without_ids {
            self.record_on(&cards, grant);
        }
        self.observe_intruders(new_legacy);
        self.colocate_memory(&named);
        if self.checkpoint.found_readable(now, self.knows_all_cgroups()) {
            self.mark_changed();
        }
        if let Some(restarted) = self.checkpoint.take_restart() {
            self.release_unrecorded(restarted);
        }
        self.reconcile(now);
    }

    /// The checkpoint on disk is truncated or malformed. It frees nothing.
    pub fn observe_unreadable_checkpoint(&mut self, now: Millis) {
        self.checkpoint.found_unreadable(now);
    }

    /// There is no checkpoint: a new node, or the file was deleted.
    pub fn observe_missing_checkpoint(&mut self, now: Millis) {
        self.checkpoint.found_missing(now);
    }

    /// The pod-resources list that was requested at `asked`.
    pub fn observe_pod_resources(&mut self, rows: &[ContainerDevices], asked: Millis, now: Millis) {
        self.pods.listed(rows, asked);
        self.observe_claims(rows);
        let mut named = BTreeSet::new();
        for row in rows {
            let pod = self.pods.pods.values().find(|p| p.namespace == row.namespace && p.name == row.pod);
            let Some(holder) = pod.map(|p| HolderId::new(&p.uid, &row.container)) else { continue };
            for (resource, keys) in self.keys_of_row(row) {
                let matches = |(_, g): &(&GrantId, &Grant)| {
                    let named = g.confirmed && g.holder == holder;
                    let unnamed = !g.confirmed && g.since <= asked && !g.belongs_to_another(&holder);
                    g.resource == resource && g.requested == keys && (named || unnamed)
                };
                // Of several the latest; if that one is confirmed, those before it are for other containers.
                let latest = self.grants.iter().rfind(matches);
                if let Some(id) = latest.filter(|(_, g)| !g.confirmed).map(|(id, _)| *id) {
                    self.confirm(id, holder.clone());
                    named.insert(holder.clone());
                }
            }
        }
        self.colocate_memory(&named);
        if !self.checkpoint.is_ready() {
            self.hold_listed(rows, now);
            if self.checkpoint.source_read(asked, self.knows_all_cgroups()) {
                self.hold_unclaimed(now);
                self.mark_changed();
            }
        }
        self.reconcile(now);
    }

    /// No checkpoint could be read so far: what the kubelet lists is held until the checkpoint names the holders.
    fn hold_listed(&mut self, rows: &[ContainerDevices], now: Millis) {
        for row in rows {
            for (resource, keys) in self.keys_of_row(row) {
                if self.grants.values().any(|g| g.resource == resource && g.requested == keys) {
                    continue;
                }
                let mut grant = self.take_restored(resource, keys, None, now);
                grant.holder =
                    HolderId::new(format!("?listed-{}/{}", row.namespace, row.pod), &row.container);
                self.record_observed(grant);
            }
        }
    }

    fn keys_of_row(&self, row: &ContainerDevices) -> Vec<(Resource, BTreeSet<DeviceKey>)> {
        let of_resource = |(name, ids): (&String, &Vec<String>)| {
            let resource = self.resource(name);
            let keys = self.keys(&resource, ids.iter().map(String::as_str))?;
            Some((resource, keys))
        };
        row.devices.iter().filter_map(of_resource).collect()
    }

    /// Rows about our resources or our cards, init containers first (their devices go to the containers after them).
    fn rows_of_interest<'a>(
        &self,
        checkpoint: &'a Checkpoint<'_>,
    ) -> Vec<(Resource, BTreeSet<DeviceKey>, HolderId, &'a str)> {
        let of_entry = |entry: &'a Entry<'_>| {
            let (resource, keys) = self.keys_of_entry(entry)?;
            Some((resource, keys, HolderId::new(&*entry.pod_uid, &*entry.container), &*entry.answer))
        };
        let mut rows: Vec<_> = checkpoint.entries.iter().filter_map(of_entry).collect();
        rows.sort_by_key(|(_, _, holder, _)| self.container_kind(holder) != Some(ContainerKind::Init));
        rows
    }

    /// The keys of a row, if it is about a card of this node: by its IDs, or by its answer where it was given another card than one that
    /// is not there any more.
    fn keys_of_entry(&self, entry: &Entry<'_>) -> Option<(Resource, BTreeSet<DeviceKey>)> {
        let resource = self.resource(&entry.resource);
        let ids = || entry.ids.iter().map(|id| &**id);
        let keys = self.keys(&resource, ids()).or_else(|| {
            let is_here = |uuid: &String| self.ledger.find(uuid).is_some();
            let is_legacy = matches!(resource, Resource::Legacy(_));
            let given_here = is_legacy && evidence::cards_of_answer(&entry.answer).iter().any(is_here);
            given_here.then(|| ids().filter_map(|id| self.key(&resource, id)).collect())
        })?;
        Some((resource, keys))
    }

    /// Containers that have whole cards which this node does not have.
    fn holders_elsewhere(&self, checkpoint: &Checkpoint<'_>) -> BTreeSet<HolderId> {
        let is_elsewhere = |entry: &&Entry<'_>| {
            *entry.resource == *self.settings.dialect.legacy && self.keys_of_entry(entry).is_none()
        };
        let entries = checkpoint.entries.iter().filter(is_elsewhere);
        entries.map(|entry| HolderId::new(&*entry.pod_uid, &*entry.container)).collect()
    }

    /// The answer to Allocate, which the kubelet keeps, names the cards that the container was given, whatever it had requested and
    /// whether or not our own record is there. Returns the cards of cores that are on others than those of their IDs. Memory follows the
    /// cores of its container, and may have been moved since it was answered for.
    fn correct_by_answer(&self, grant: &mut Grant, answer: &str) -> Option<Vec<CardIndex>> {
        if grant.resource == Resource::Shared(SharedResource::Memory) {
            return None;
        }
        let named: Option<BTreeSet<DeviceKey>> = evidence::cards_of_answer(answer)
            .iter()
            .map(|uuid| {
                Some(DeviceKey::Legacy(uuid.as_str().into())).filter(|key| self.card_of(key).is_some())
            })
            .collect();
        let named = named.filter(|named| !named.is_empty())?;
        let cards = self.cards_of(&named);
        if cards == self.cards_of(&grant.actual) {
            return None;
        }
        match grant.resource {
            Resource::Legacy(_) => {
                grant.actual = named;
                None
            }
            Resource::Shared(_) => Some(cards.into_iter().collect()),
        }
    }

    /// Records a share on these cards, with IDs that nothing else has.
    fn record_on(&mut self, cards: &[CardIndex], mut grant: Grant) {
        if let Resource::Shared(resource) = grant.resource {
            let free = |n: &u32| !self.owner.contains_key(&DeviceKey::shared(resource, *n));
            let numbers = self.spread_over(resource, cards, grant.requested.len(), free);
            grant.actual = numbers.into_iter().map(|n| DeviceKey::shared(resource, n)).collect();
        }
        self.record_observed(grant);
    }

    /// The keys of these IDs, if any of them is on a card of this node.
    pub(super) fn keys<'a>(
        &self,
        resource: &Resource,
        ids: impl Iterator<Item = &'a str>,
    ) -> Option<BTreeSet<DeviceKey>> {
        let keys: BTreeSet<DeviceKey> = ids.filter_map(|id| self.key(resource, id)).collect();
        keys.iter().any(|key| self.card_of(key).is_some()).then_some(keys)
    }

    /// The grant that a row of the checkpoint is about.
    fn match_row(
        &self,
        resource: &Resource,
        keys: &BTreeSet<DeviceKey>,
        holder: &HolderId,
        seen: &BTreeSet<GrantId>,
    ) -> Option<GrantId> {
        let same = || {
            self.grants
                .iter()
                .filter(|(id, g)| g.resource == *resource && g.requested == *keys && !seen.contains(id))
        };
        let confirmed = same().find(|(_, g)| g.confirmed && g.holder == *holder);
        let unnamed = || {
            same().filter(|(id, g)| {
                !g.confirmed && **id <= self.checkpoint.last_grant && !g.belongs_to_another(holder)
            })
        };
        // Of several the latest: the kubelet allocates the same devices again when it does not know of those before.
        confirmed.or_else(|| unnamed().next_back()).map(|(id, _)| *id)
    }

    /// Whether a row of the checkpoint that names `holder` can be about this grant, and not about one before it.
    fn row_may_mean(&self, grant: &Grant, holder: &HolderId, now: Millis) -> bool {
        match self.pods.get(&holder.pod_uid) {
            Some(pod) => !pod.has_ended(),
            // Deleted with force, it may still be terminating; else the row is a leftover.
            None if self.pods.has_departed(&holder.pod_uid) => !self.has_left(&holder.pod_uid, now),
            // Never seen: the watch lags, or it left before this process started.
            None => !grant.answered || grant.candidate.is_none(),
        }
    }

    /// Whether a row is of a pod that two sources call gone: rows of finished pods stay for a while.
    fn row_is_stale(&self, holder: &HolderId, keys: &BTreeSet<DeviceKey>, now: Millis) -> bool {
        let ids = self.ids_of(keys);
        self.has_left(&holder.pod_uid, now)
            && self.pods.listed_by_kubelet(&holder.pod_uid, ids.iter().map(String::as_str), 0) == Some(false)
    }
}
