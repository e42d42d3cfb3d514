//! Rule I3: which grants have ended, by the evidence of two sources or after the pod's grace period.

use gpu_migrate_model::device_id::SharedResource;

use super::grants::{Grant, GrantId, Resource};
use super::{Millis, NodeState};

impl NodeState {
    /// Whether a pod-resources list now could free something.
    #[must_use]
    pub fn needs_pod_resources(&self) -> bool {
        // Allocated, and the checkpoint could not say for which container.
        let unnamed = |g: &Grant| {
            let age = self.clock.saturating_sub(g.since);
            g.answered && !g.confirmed && (300..10_000).contains(&age)
        };
        let gone_since_list =
            |g: &Grant| g.gone_since.is_some_and(|since| self.pods.listed_at().is_none_or(|at| at <= since));
        self.grants.values().any(unnamed) || self.grants.values().any(gone_since_list)
    }

    /// Whether cgroups that are read now could free something.
    #[must_use]
    pub fn needs_cgroups(&self) -> bool {
        !self.is_ready() || self.grants.values().any(|grant| grant.gone_since.is_some())
    }

    /// Time has passed: releases what two sources call gone.
    pub fn reconcile(&mut self, now: Millis) {
        self.clock = now;
        let ids: Vec<GrantId> = self.grants.keys().copied().collect();
        for id in ids {
            let Some(grant) = self.grants.get(&id) else { continue };
            let uid = grant.holder.pod_uid.clone();
            let gone = if grant.confirmed {
                self.holder_is_gone(id, &uid, now)
            } else {
                self.was_never_claimed(grant, now)
            };
            if gone {
                self.pods.record_gone(&uid, now);
                self.release(id);
            }
        }
        if self.checkpoint.tick(now, self.knows_all_cgroups()) {
            self.hold_unclaimed(now);
            self.mark_changed();
        }
        self.close_unaccounted();
        self.end_withdrawals(now);
    }

    /// The API says gone and the kubelet too; or the kubelet cannot be asked, and it has stayed gone for the grace period.
    fn holder_is_gone(&mut self, id: GrantId, uid: &str, now: Millis) -> bool {
        let Some(grant) = self.grants.get(&id) else { return false };
        if self.pods.gone_in_api(uid, grant.since, now, self.settings.grace) != Some(true) {
            if let Some(grant) = self.grants.get_mut(&id) {
                grant.gone_since = None;
            }
            return false;
        }
        let gone_since = grant.gone_since.unwrap_or(now);
        let seen_to_go = self.pods.has_departed(uid);
        // Of a pod that was never seen, it is not known whether it terminated or was deleted with force.
        let ended =
            self.pods.containers_ended(uid, gone_since, grant.grace.unwrap_or(self.settings.grace), now);
        let ids = self.ids_of(&grant.requested);
        let listed = self.pods.listed_by_kubelet(uid, ids.iter().map(String::as_str), gone_since);
        let absent = grant.absent_since.is_some();
        if let Some(grant) = self.grants.get_mut(&id) {
            grant.gone_since = Some(gone_since);
        }
        ended
            && match listed {
                Some(listed) => !listed,
                // The checkpoint lags behind (rows of finished pods stay), so a row that is missing there is as good as a list.
                // Where it stays, the grace period replaces the kubelet's answer only if the pod was seen to go.
                None => absent || seen_to_go && now.saturating_sub(gone_since) >= self.settings.grace,
            }
    }

    /// A grant that neither the checkpoint nor pod-resources has ever shown, and that no running pod can have.
    fn was_never_claimed(&self, grant: &Grant, now: Millis) -> bool {
        let Some(absent) = grant.absent_since else { return false };
        let ids = self.ids_of(&grant.requested);
        let listed = self.pods.listed_by_kubelet("", ids.iter().map(String::as_str), grant.since);
        let lost = self.checkpoint.lost_at.filter(|_| self.predates_checkpoint_loss(grant));
        let known = lost.is_none_or(|at| {
            self.pods.relisted_since(at) || now.saturating_sub(at) >= 10 * self.settings.grace
        });
        known
            && now.saturating_sub(absent) >= self.settings.unclaimed
            && listed != Some(true)
            && !self.may_be_claimed(grant)
    }

    /// Whether an unfinished pod requests just this and is not known to have it.
    fn may_be_claimed(&self, grant: &Grant) -> bool {
        let unfinished = self.pods.pods.values().filter(|pod| !pod.has_ended());
        let mut containers = unfinished.flat_map(|pod| pod.containers.iter().map(move |c| (pod, c)));
        containers.any(|(pod, container)| {
            let demand = &container.ask.demand;
            let requested = match grant.resource {
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
            requested as usize == grant.requested.len() && !self.grants.values().any(has)
        })
    }

    /// The kubelet that these were allocated to has restarted from a checkpoint without them: no container ever had them.
    pub(super) fn release_unrecorded(&mut self, restarted: Millis) {
        let unrecorded: Vec<GrantId> = self
            .grants
            .iter()
            .filter(|(_, g)| !g.confirmed && g.since < restarted && g.absent_since.is_some())
            .filter(|(_, g)| !self.predates_checkpoint_loss(g))
            .map(|(id, _)| *id)
            .collect();
        for id in unrecorded {
            self.release(id);
        }
    }

    /// The kubelet may have written it to its checkpoint and lost that since.
    pub(super) fn predates_checkpoint_loss(&self, grant: &Grant) -> bool {
        self.checkpoint.lost_at.is_some_and(|at| grant.since <= at)
    }
}
