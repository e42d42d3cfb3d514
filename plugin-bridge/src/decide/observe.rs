//! What was seen, and what follows from it: who a promise was for, what was missed, and (rule I3) what is free again.

use std::collections::{BTreeMap, BTreeSet};

use gpu_migrate_model::ask::ContainerKind;
use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::ledger::HolderId;

use super::grants::{DeviceKey, Grant, GrantId, Resource};
use super::{Millis, NodeState, PodView};
use crate::deviations::Deviation;
use gpu_migrate_kubelet_api::checkpoint::{Checkpoint, Entry};
use gpu_migrate_kubelet_api::lister::ContainerDevices;

impl NodeState {
    /// The complete set of the node's pods, as the API has them.
    pub fn observe_pods(&mut self, pods: Vec<PodView>, now: Millis) {
        self.pods.replace(pods, now);
        self.reconcile(now);
        self.touch();
    }

    /// One pod's new state in the API.
    pub fn observe_pod(&mut self, pod: PodView, now: Millis) {
        self.pods.upsert(pod);
        self.reconcile(now);
        self.touch();
    }

    /// A pod left the API.
    pub fn observe_pod_gone(&mut self, uid: &str, now: Millis) {
        self.pods.remove(uid, now);
        self.reconcile(now);
        self.touch();
    }

    /// The kubelet started anew. What it never wrote down, it does not know any more; without a whole book it knows nothing.
    pub fn observe_kubelet_start(&mut self, checkpoint_readable: bool, now: Millis) {
        if checkpoint_readable {
            self.restarted = Some(now);
        } else {
            self.checkpoint_lost_at = Some(now);
        }
    }

    /// The kubelet's book, read whole at `now`, as it was not read before.
    pub fn ingest_checkpoint(&mut self, book: &Checkpoint<'_>, now: Millis) {
        self.checkpoint_mark = self.latest();
        self.take_book(book, true, now);
    }

    /// The same file once more. It says nothing about promises that were made since it was first read.
    pub fn ingest_unchanged_checkpoint(&mut self, book: &Checkpoint<'_>, now: Millis) {
        self.take_book(book, false, now);
    }

    fn take_book(&mut self, book: &Checkpoint<'_>, first_time: bool, now: Millis) {
        let mark = GrantId(self.checkpoint_mark);
        let mut seen = BTreeSet::new();
        let mut named = BTreeSet::new();
        for (resource, keys, holder) in self.rows_of_interest(book) {
            if let Some(id) = self.match_row(&resource, &keys, &holder, &seen, mark) {
                seen.insert(id);
                if self.grants[&id].confirmed {
                    continue;
                }
                // Rows of ended pods stay, and the kubelet may have given the same devices out again since.
                if self.may_be(&self.grants[&id], &holder, now) {
                    named.insert(holder.clone());
                    self.confirm(id, holder);
                }
            } else if first_time && !self.is_gone(&holder, &keys, now) {
                let given = self.remembered(&resource, &keys, Some(&holder));
                let actual = given.unwrap_or_else(|| keys.clone());
                named.insert(holder.clone());
                seen.insert(self.record_observed(Grant::new(resource, keys, actual, now).of(holder)));
            }
        }
        for (id, grant) in &mut self.grants {
            // A kubelet that started from this book knows of nothing else, whenever it was promised.
            if *id <= mark || self.restarted.is_some_and(|at| grant.since < at) {
                grant.absent_since = grant.absent_since.or(Some(now));
            }
        }
        for id in &seen {
            if let Some(grant) = self.grants.get_mut(id) {
                grant.absent_since = None;
            }
        }
        self.hold_unclaimed_deviations(now);
        self.colocate_memory(&named);
        self.checkpoint_read_at = Some(now);
        self.checkpoint_unreadable = false;
        if !self.started_without_checkpoint || self.startup_grace_elapsed(now) {
            self.open();
        }
        if let Some(restarted) = self.restarted.take() {
            self.release_unrecorded(restarted);
        }
        self.reconcile(now);
    }

    /// The book on disk is cut short or otherwise not whole. It frees nothing.
    pub fn observe_unreadable_checkpoint(&mut self, now: Millis) {
        self.checkpoint_unreadable = true;
        self.started_without_checkpoint |= !self.opened;
        // What it said about promises up to now may never be learnt.
        self.checkpoint_lost_at = Some(now);
    }

    /// There is no book: a new node, or one whose book was lost.
    pub fn observe_missing_checkpoint(&mut self) {
        self.checkpoint_missing = true;
    }

    fn open(&mut self) {
        if !self.opened {
            self.opened = true;
            self.touch();
        }
    }

    /// What pod-resources lists; it was asked at `asked`.
    pub fn observe_pod_resources(&mut self, rows: &[ContainerDevices], asked: Millis, now: Millis) {
        self.pods.listed(rows, asked);
        let mut named = BTreeSet::new();
        for row in rows {
            let pod = self.pods.pods.values().find(|p| p.namespace == row.namespace && p.name == row.pod);
            let Some(holder) = pod.map(|p| HolderId::new(&p.uid, &row.container)) else { continue };
            for (name, ids) in &row.devices {
                let resource = self.resource(name);
                let Some(keys) = self.keys(&resource, ids.iter().map(String::as_str)) else { continue };
                let about_it = |(_, g): &(&GrantId, &Grant)| {
                    let named = g.confirmed && g.holder == holder;
                    let nameless = !g.confirmed && g.since <= asked && !g.belongs_to_another(&holder);
                    g.resource == resource && g.requested == keys && (named || nameless)
                };
                // Of several the latest; if that one is named already, those before it are about somebody else.
                let latest = self.grants.iter().rfind(about_it);
                if let Some(id) = latest.filter(|(_, g)| !g.confirmed).map(|(id, _)| *id) {
                    self.confirm(id, holder.clone());
                    named.insert(holder.clone());
                }
            }
        }
        self.colocate_memory(&named);
        if !self.opened {
            self.hold_listed(rows, now);
            if self.startup_grace_elapsed(asked) {
                self.hold_unclaimed_deviations(now);
                self.open();
            }
        }
        self.reconcile(now);
    }

    /// Whether what this life could not learn of is over. A pod that was deleted with force is neither listed nor in the book,
    /// and its containers may still run: those of before the first look end in time, and what was there then is held.
    fn startup_grace_elapsed(&mut self, at: Millis) -> bool {
        let first = *self.first_observation.get_or_insert(at);
        at.saturating_sub(first) >= self.settings.force_grace
    }

    /// The book could not be read so far: what the kubelet lists is held until the book says whose it is.
    fn hold_listed(&mut self, rows: &[ContainerDevices], now: Millis) {
        for row in rows {
            for (name, ids) in &row.devices {
                let resource = self.resource(name);
                let Some(keys) = self.keys(&resource, ids.iter().map(String::as_str)) else { continue };
                if self.grants.values().any(|g| g.resource == resource && g.requested == keys) {
                    continue;
                }
                let actual = self.remembered(&resource, &keys, None).unwrap_or_else(|| keys.clone());
                let mut grant = Grant::new(resource, keys, actual, now);
                grant.holder =
                    HolderId::new(format!("?listed-{}/{}", row.namespace, row.pod), &row.container);
                self.record_observed(grant);
            }
        }
    }

    /// Whether asking pod-resources now could free something.
    #[must_use]
    pub fn needs_pod_resources(&self) -> bool {
        // Somebody has taken it up, and the book could not say who.
        let nameless = |g: &Grant| {
            let age = self.clock.saturating_sub(g.since);
            g.answered && !g.confirmed && (300..10_000).contains(&age)
        };
        if self.grants.values().any(nameless) {
            return true;
        }
        self.grants
            .values()
            .any(|g| g.gone_since.is_some_and(|since| self.pods.listed_at().is_none_or(|at| at <= since)))
    }

    /// Time has passed: releases what two sources call gone.
    pub fn reconcile(&mut self, now: Millis) {
        self.clock = now;
        let ids: Vec<GrantId> = self.grants.keys().copied().collect();
        for id in ids {
            let Some(grant) = self.grants.get(&id) else { continue };
            let uid = grant.holder.pod_uid.clone();
            let gone = if grant.confirmed {
                self.holder_is_gone(id, now)
            } else {
                self.was_never_claimed(grant, now)
            };
            if gone {
                self.pods.record_gone(&uid, now);
                self.release(id);
            }
        }
        if !self.opened
            && self.started_without_checkpoint
            && self.checkpoint_read_at.is_some()
            && self.startup_grace_elapsed(now)
        {
            self.open();
        }
        if !self.opened && self.checkpoint_missing && now >= self.settings.grace {
            self.hold_unclaimed_deviations(now);
            // Neither a book nor anyone to ask: a kubelet that never gave anything out.
            self.open();
        }
        if self.withdrawn.values().any(|until| *until <= now) {
            self.withdrawn.retain(|_, until| *until > now);
            self.touch();
        }
    }

    /// I3 for a known holder: the API says gone, and so does the kubelet; or the kubelet cannot be asked, and it has
    /// stayed gone for the grace period.
    fn holder_is_gone(&mut self, id: GrantId, now: Millis) -> bool {
        let Some(grant) = self.grants.get(&id) else { return false };
        let uid = &grant.holder.pod_uid;
        if self.pods.gone_in_api(uid, grant.since, now, self.settings.grace) != Some(true) {
            if let Some(grant) = self.grants.get_mut(&id) {
                grant.gone_since = None;
            }
            return false;
        }
        let gone_since = grant.gone_since.unwrap_or(now);
        let force_grace = self.settings.force_grace;
        let seen_to_go = self.pods.has_departed(uid);
        // Of a pod that was never seen, it is not known whether it ended or was deleted with force.
        let in_time = if seen_to_go {
            self.pods.force_delete_grace_elapsed(uid, now, force_grace)
        } else {
            now.saturating_sub(gone_since) >= force_grace
        };
        let ids = self.ids_of(&grant.requested);
        let listed = self.pods.listed_by_kubelet(uid, ids.iter().map(String::as_str), gone_since);
        let absent = grant.absent_since.is_some();
        if let Some(grant) = self.grants.get_mut(&id) {
            grant.gone_since = Some(gone_since);
        }
        in_time
            && match listed {
                Some(listed) => !listed,
                // The book lags behind (rows of finished pods stay), so a row that is missing there says as much as a list.
                // Where it stays, time stands in for the kubelet's word only if the pod was seen to go.
                None => absent || seen_to_go && now.saturating_sub(gone_since) >= self.settings.grace,
            }
    }

    /// A promise that neither the kubelet's book nor its API has ever shown, and that no living pod can have taken up.
    fn was_never_claimed(&self, grant: &Grant, now: Millis) -> bool {
        let Some(absent) = grant.absent_since else { return false };
        let listed = self.pods.listed_by_kubelet(
            "",
            self.ids_of(&grant.requested).iter().map(String::as_str),
            grant.since,
        );
        let lost = self.checkpoint_lost_at.filter(|_| self.predates_checkpoint_loss(grant));
        let known = lost.is_none_or(|at| {
            self.pods.relisted_since(at) || now.saturating_sub(at) >= 10 * self.settings.grace
        });
        known
            && now.saturating_sub(absent) >= self.settings.unclaimed
            && listed != Some(true)
            && !self.may_be_claimed(grant)
    }

    /// Whether a living pod asks for just this and is not known to have it.
    fn may_be_claimed(&self, grant: &Grant) -> bool {
        let living = self.pods.pods.values().filter(|pod| !pod.phase.terminal());
        let mut containers = living.flat_map(|pod| pod.containers.iter().map(move |c| (pod, c)));
        containers.any(|(pod, container)| {
            let demand = &container.ask.demand;
            let asked = match grant.resource {
                Resource::Shared(SharedResource::Cores) => demand.cores.0,
                Resource::Shared(SharedResource::Memory) => demand.blocks.0,
                Resource::Legacy(_) => demand.legacy,
            };
            let has = |g: &Grant| {
                g.confirmed
                    && g.resource == grant.resource
                    && g.holder.pod_uid == pod.uid
                    && g.holder.container == container.ask.name
            };
            asked as usize == grant.requested.len() && !self.grants.values().any(has)
        })
    }

    /// Whether a row of the book is of a pod that two sources call gone: rows of finished pods stay for a while.
    fn is_gone(&self, holder: &HolderId, keys: &BTreeSet<DeviceKey>, now: Millis) -> bool {
        let ids = self.ids_of(keys);
        self.pods.has_departed(&holder.pod_uid)
            && self.pods.force_delete_grace_elapsed(&holder.pod_uid, now, self.settings.force_grace)
            && self.pods.listed_by_kubelet(&holder.pod_uid, ids.iter().map(String::as_str), 0) == Some(false)
    }

    /// Rows about our resources or our cards, init containers first (what they hand on belongs to those after them).
    fn rows_of_interest(&self, book: &Checkpoint<'_>) -> Vec<(Resource, BTreeSet<DeviceKey>, HolderId)> {
        let mut rows: Vec<_> = book
            .entries
            .iter()
            .filter_map(|Entry { pod_uid, container, resource, ids, .. }| {
                let resource = self.resource(resource);
                let keys = self.keys(&resource, ids.iter().map(|id| &**id))?;
                Some((resource, keys, HolderId::new(&**pod_uid, &**container)))
            })
            .collect();
        rows.sort_by_key(|(.., holder)| {
            let kind = self
                .pods
                .get(&holder.pod_uid)
                .and_then(|p| p.container(&holder.container))
                .map(|c| c.ask.kind);
            kind != Some(ContainerKind::Init)
        });
        rows
    }

    /// The keys of these IDs, if there is one that we keep books of.
    fn keys<'a>(
        &self,
        resource: &Resource,
        ids: impl Iterator<Item = &'a str>,
    ) -> Option<BTreeSet<DeviceKey>> {
        let keys: BTreeSet<DeviceKey> = ids.filter_map(|id| self.key(resource, id)).collect();
        let ours = keys.iter().any(|key| self.card_of(key).is_some());
        ours.then_some(keys)
    }

    /// The promise that a row of the book is about.
    fn match_row(
        &self,
        resource: &Resource,
        keys: &BTreeSet<DeviceKey>,
        holder: &HolderId,
        seen: &BTreeSet<GrantId>,
        mark: GrantId,
    ) -> Option<GrantId> {
        let same = || {
            self.grants
                .iter()
                .filter(|(id, g)| g.resource == *resource && g.requested == *keys && !seen.contains(id))
        };
        let confirmed = same().find(|(_, g)| g.confirmed && g.holder == *holder);
        let nameless =
            || same().filter(|(id, g)| !g.confirmed && **id <= mark && !g.belongs_to_another(holder));
        // Of several the latest: the kubelet gives the same devices out again when it does not know of those before.
        confirmed.or_else(|| nameless().next_back()).map(|(id, _)| *id)
    }

    /// Whether a row of the book that names `holder` can be about this promise, and not about one before it.
    fn may_be(&self, grant: &Grant, holder: &HolderId, now: Millis) -> bool {
        match self.pods.get(&holder.pod_uid) {
            Some(pod) => !pod.phase.terminal(),
            // It may still be ending, if it was deleted with force; else the row is a leftover.
            None if self.pods.has_departed(&holder.pod_uid) => {
                !self.pods.force_delete_grace_elapsed(&holder.pod_uid, now, self.settings.force_grace)
            }
            // Never seen: the watch lags, or it left before this life began.
            None => !grant.answered || grant.candidate.is_none(),
        }
    }

    /// What an earlier life gave in place of these devices: to this holder, else to one it did not know yet. What it gave
    /// to another holder says nothing: the kubelet gives the same devices out again, and then they need not deviate.
    fn remembered(
        &mut self,
        resource: &Resource,
        keys: &BTreeSet<DeviceKey>,
        holder: Option<&HolderId>,
    ) -> Option<BTreeSet<DeviceKey>> {
        let name = self.resource_name(resource).to_owned();
        let is = |d: &Deviation| {
            d.resource == name
                && self.keys(resource, d.kubelet.iter().map(String::as_str)).as_ref() == Some(keys)
        };
        let names =
            |d: &Deviation| holder.is_some_and(|h| h.pod_uid == d.pod_uid && h.container == d.container);
        let may_be = |d: &Deviation| holder.is_none() || d.pod_uid.is_empty();
        let named = self.journal.iter().position(|d| is(d) && names(d));
        let position = named.or_else(|| self.journal.iter().position(|d| is(d) && may_be(d)))?;
        let deviation = self.journal.swap_remove(position);
        self.keys(resource, deviation.actual_ids())
    }

    /// Deviations of an earlier life that the book does not show (yet): held like any other promise not yet taken up.
    fn hold_unclaimed_deviations(&mut self, now: Millis) {
        for deviation in std::mem::take(&mut self.journal) {
            let resource = self.resource(&deviation.resource);
            let kubelet = self.keys(&resource, deviation.kubelet.iter().map(String::as_str));
            let actual = self.keys(&resource, deviation.actual_ids());
            if let (Some(kubelet), Some(actual)) = (kubelet, actual) {
                let mut grant = Grant::new(resource, kubelet, actual, now);
                grant.absent_since = Some(now);
                if !deviation.pod_uid.is_empty() {
                    // Whose it was is known, and is not forgotten with this life.
                    grant.candidate = Some(HolderId::new(&*deviation.pod_uid, &*deviation.container));
                }
                // Two stand-ins must not be taken for the same pod's.
                grant.holder = HolderId::new(format!("?journal-{}", self.grants.len()), "?");
                self.record_observed(grant);
            }
        }
    }

    /// The kubelet that was promised these is gone, its successor read a book without them: no container ever had them.
    fn release_unrecorded(&mut self, restarted: Millis) {
        let unwritten: Vec<GrantId> = self
            .grants
            .iter()
            .filter(|(_, g)| !g.confirmed && g.since < restarted && g.absent_since.is_some())
            .filter(|(_, g)| !self.predates_checkpoint_loss(g))
            .map(|(id, _)| *id)
            .collect();
        for id in unwritten {
            self.release(id);
        }
    }

    /// Who holds each device by the kubelet's own list, for comparing.
    #[must_use]
    pub fn by_device(rows: &[ContainerDevices]) -> BTreeMap<&str, &ContainerDevices> {
        rows.iter().flat_map(|row| row.devices.values().flatten().map(move |id| (id.as_str(), row))).collect()
    }
}
