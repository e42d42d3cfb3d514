//! The node's pods, as far as devices are concerned, and whether they are gone.

use std::collections::{BTreeMap, BTreeSet};

use gpu_migrate_model::ask::ContainerAsk;
use gpu_migrate_model::units::CardIndex;

use super::Millis;
use gpu_migrate_kubelet_api::lister::ContainerDevices;

/// `status.phase`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PodPhase {
    /// Bound, and not all containers have started yet.
    #[default]
    Pending,
    Running,
    Succeeded,
    /// All containers terminated, or the kubelet rejected the pod.
    Failed,
}

impl PodPhase {
    #[must_use]
    pub const fn terminal(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }
}

/// One container's part of a [`PodView`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerView {
    /// Name, kind, place in its list, and what it asks for.
    pub ask: ContainerAsk,
    /// The cards that the extender chose; empty where it chose none.
    pub reserved: Vec<CardIndex>,
}

/// What is known of one pod bound to this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodView {
    /// The UID by which the kubelet knows it.
    pub uid: String,
    /// The UID in the API (another one only for static pods).
    pub api_uid: String,
    pub namespace: String,
    pub name: String,
    pub phase: PodPhase,
    /// `status.reason`, for example `UnexpectedAdmissionError`.
    pub reason: String,
    /// Has a `deletionTimestamp`.
    pub deleting: bool,
    /// Has a controller, which will re-create it.
    pub controlled: bool,
    /// A container of it has started: the kubelet has admitted it, and has written its devices to the checkpoint.
    pub started: bool,
    /// `status.containerStatuses` says that a container runs. So it does where PodGC, and not the kubelet, has written a terminal phase.
    pub running: bool,
    /// `spec.terminationGracePeriodSeconds`, in milliseconds.
    pub grace: Millis,
    /// The order in which the kubelet admits pods: `predicate-time` (nanoseconds), else creation.
    pub order: u64,
    /// Init containers and sidecars in order, then app containers.
    pub containers: Vec<ContainerView>,
    /// Names of its containers by the runtime's IDs, as far as the kubelet has reported them.
    pub container_ids: BTreeMap<String, String>,
    /// Annotations of ours and gpu-manager's.
    pub annotations: BTreeMap<String, String>,
}

impl PodView {
    /// Its containers have ended, and hold nothing any more.
    #[must_use]
    pub const fn has_ended(&self) -> bool {
        self.phase.terminal() && !self.running
    }

    #[must_use]
    pub fn container(&self, name: &str) -> Option<&ContainerView> {
        self.containers.iter().find(|c| c.ask.name == name)
    }
}

/// The API's pods, and the kubelet's latest pod-resources list.
#[derive(Clone, Debug, Default)]
pub(super) struct PodTable {
    /// By the kubelet's UID.
    pub(super) pods: BTreeMap<String, PodView>,
    /// When all pods of the node were last listed at once.
    replaced: Option<Millis>,
    departed: BTreeMap<String, Departed>,
    listed: Option<Listed>,
    cgroups: Option<Cgroups>,
}

/// The pods of this node that have processes, by their cgroups.
#[derive(Clone, Debug)]
struct Cgroups {
    at: Millis,
    populated: BTreeSet<String>,
}

#[derive(Clone, Debug)]
struct Departed {
    namespace: String,
    name: String,
    /// Seen to terminate before it left.
    terminated: bool,
    at: Millis,
    /// How long its containers may take to end.
    grace: Millis,
}

/// A pod-resources list, indexed for "does the kubelet still list it".
#[derive(Clone, Debug, Default)]
struct Listed {
    at: Millis,
    by_pod: BTreeSet<(String, String)>,
    device_owner: BTreeMap<String, (String, String)>,
}

/// How long after a pod has left the API its cgroup says whether its containers have ended.
const CGROUP_DELAY: Millis = 2_000;

/// How many departed pods are kept.
const DEPARTED_KEPT: usize = 1024;

impl PodTable {
    pub(super) fn replace(&mut self, pods: Vec<PodView>, now: Millis) {
        let fresh: BTreeMap<String, PodView> = pods.into_iter().map(|p| (p.uid.clone(), p)).collect();
        for (uid, old) in std::mem::take(&mut self.pods) {
            if !fresh.contains_key(&uid) {
                self.record_departure(uid, &old, now);
            }
        }
        self.pods = fresh;
        self.replaced = Some(now);
    }

    pub(super) fn upsert(&mut self, pod: PodView) {
        self.pods.insert(pod.uid.clone(), pod);
    }

    pub(super) fn remove(&mut self, uid: &str, now: Millis) {
        if let Some(old) = self.pods.remove(uid) {
            self.record_departure(uid.to_owned(), &old, now);
        }
    }

    fn record_departure(&mut self, uid: String, old: &PodView, now: Millis) {
        if self.departed.len() >= DEPARTED_KEPT {
            let oldest = self.departed.iter().min_by_key(|(_, d)| d.at).map(|(uid, _)| uid.clone());
            oldest.map(|uid| self.departed.remove(&uid));
        }
        let departed = Departed {
            namespace: old.namespace.clone(),
            name: old.name.clone(),
            terminated: old.has_ended(),
            at: now,
            grace: old.grace,
        };
        self.departed.insert(uid, departed);
    }

    /// The pods that had processes at `at`, by their cgroups.
    pub(super) fn observe_cgroups(&mut self, populated: BTreeSet<String>, at: Millis) {
        self.cgroups = Some(Cgroups { at, populated });
    }

    /// A pod-resources list that was requested at `at`.
    pub(super) fn listed(&mut self, rows: &[ContainerDevices], at: Millis) {
        let mut listed = Listed { at, ..Listed::default() };
        for row in rows {
            let pod = (row.namespace.clone(), row.pod.clone());
            for id in row.devices.values().flatten() {
                listed.device_owner.insert(id.clone(), pod.clone());
            }
            listed.by_pod.insert(pod);
        }
        self.listed = Some(listed);
    }

    pub(super) fn listed_at(&self) -> Option<Millis> {
        self.listed.as_ref().map(|l| l.at)
    }

    pub(super) fn get(&self, uid: &str) -> Option<&PodView> {
        self.pods.get(uid)
    }

    /// Namespace and name of a pod, also of a departed one.
    pub(super) fn name_of(&self, uid: &str) -> Option<(&str, &str)> {
        match self.pods.get(uid) {
            Some(p) => Some((&p.namespace, &p.name)),
            None => {
                let departed = self.departed.get(uid).filter(|d| !d.name.is_empty())?;
                Some((&departed.namespace, &departed.name))
            }
        }
    }

    /// The grace period of a pod, also of a departed one.
    pub(super) fn grace_of(&self, uid: &str) -> Option<Millis> {
        let departed = || self.departed.get(uid).filter(|d| !d.name.is_empty()).map(|d| d.grace);
        self.pods.get(uid).map(|pod| pod.grace).or_else(departed)
    }

    /// Whether the API says that a pod with a grant of `since` is absent or terminal. `None` while that is not known.
    ///
    /// The kubelet may be ahead of our watch: a pod that was never seen is absent only if all pods were seen since, or if
    /// it stays unseen for the grace period.
    pub(super) fn gone_in_api(&self, uid: &str, since: Millis, now: Millis, grace: Millis) -> Option<bool> {
        if let Some(pod) = self.pods.get(uid) {
            return Some(pod.phase.terminal());
        }
        if self.departed.contains_key(uid) {
            return Some(true);
        }
        let replaced = self.replaced?;
        (replaced > since || now.saturating_sub(since) >= grace).then_some(true)
    }

    /// All pods were listed at once after `since`.
    pub(super) fn relisted_since(&self, since: Millis) -> bool {
        self.replaced.is_some_and(|at| at > since)
    }

    /// It was on this node, and is terminal or gone from the API.
    pub(super) fn has_departed(&self, uid: &str) -> bool {
        match self.pods.get(uid) {
            Some(pod) => pod.phase.terminal(),
            None => self.departed.contains_key(uid),
        }
    }

    /// A pod that was never seen was found to be gone: checkpoint rows about it are stale.
    pub(super) fn record_gone(&mut self, uid: &str, now: Millis) {
        if !self.pods.contains_key(uid) && !self.departed.contains_key(uid) {
            self.record_departure(
                uid.to_owned(),
                &PodView { phase: PodPhase::Succeeded, ..PodView::default() },
                now,
            );
        }
    }

    /// Whether pod-resources lists these devices for this pod. `None` where it was not requested after `since`, or where another pod has
    /// the name of this one, which has left: the list has names, no UIDs.
    pub(super) fn listed_by_kubelet<'a>(
        &self,
        uid: &str,
        mut ids: impl Iterator<Item = &'a str>,
        since: Millis,
    ) -> Option<bool> {
        let listed = self.listed.as_ref().filter(|l| l.at > since)?;
        let has_successor = |name| {
            !self.pods.contains_key(uid) && self.pods.values().any(|p| (&*p.namespace, &*p.name) == name)
        };
        if self.name_of(uid).is_some_and(has_successor) {
            return None;
        }
        Some(match self.name_of(uid) {
            Some((namespace, name)) => {
                let pod = (namespace.to_owned(), name.to_owned());
                listed.by_pod.contains(&pod) && ids.any(|id| listed.device_owner.get(id) == Some(&pod))
            }
            // The name of this pod is not known: any pod with its devices may be it.
            None => ids.any(|id| listed.device_owner.contains_key(id)),
        })
    }

    /// Whether the containers of a pod that is gone from the API, or terminal there, have ended. By the kubelet's last report of it, else
    /// by its cgroup; where cgroups cannot be read, when its own grace period is over.
    ///
    /// `gone_since` and `grace` are for a pod that was not seen to leave.
    pub(super) fn containers_ended(&self, uid: &str, gone_since: Millis, grace: Millis, now: Millis) -> bool {
        let (at, grace) = match (self.pods.get(uid), self.departed.get(uid)) {
            (Some(pod), _) if pod.has_ended() => return true,
            (Some(pod), _) => (gone_since, pod.grace),
            (None, Some(departed)) if departed.terminated => return true,
            (None, Some(departed)) => (departed.at, departed.grace),
            (None, None) => (gone_since, grace),
        };
        match &self.cgroups {
            // A pod that the kubelet is still admitting has no cgroup yet.
            Some(cgroups) => cgroups.at >= at + CGROUP_DELAY && !cgroups.populated.contains(uid),
            None => now.saturating_sub(at) >= grace,
        }
    }

    /// Cgroups were read, and the pod has no processes by them.
    pub(super) fn has_empty_cgroup(&self, uid: &str) -> bool {
        self.cgroups.as_ref().is_some_and(|cgroups| !cgroups.populated.contains(uid))
    }

    pub(super) fn cgroups_at(&self) -> Option<Millis> {
        self.cgroups.as_ref().map(|cgroups| cgroups.at)
    }

    /// All pods of the node were listed at once.
    pub(super) const fn is_listed(&self) -> bool {
        self.replaced.is_some()
    }

    /// A pod that has processes and that neither the API's list nor `known` accounts for.
    pub(super) fn unknown_cgroup(&self, known: impl Fn(&str) -> bool) -> Option<&str> {
        let populated = self.cgroups.iter().flat_map(|cgroups| &cgroups.populated);
        populated.map(String::as_str).find(|uid| !self.pods.contains_key(*uid) && !known(uid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pod of a StatefulSet that was deleted with force, and the next one of its name.
    #[test]
    fn a_list_of_a_pods_successor_says_nothing_about_the_pod() {
        let pod = |uid: &str| PodView { uid: uid.into(), name: "web-0".into(), ..PodView::default() };
        let row = ContainerDevices {
            pod: "web-0".into(),
            devices: [("nvidia.com/gpu".to_owned(), vec!["GPU-1".to_owned()])].into(),
            ..ContainerDevices::default()
        };
        let mut table = PodTable::default();
        table.replace(vec![pod("old")], 1);
        table.listed(std::slice::from_ref(&row), 2);
        assert_eq!(table.listed_by_kubelet("old", ["GPU-1"].into_iter(), 1), Some(true));
        table.remove("old", 3);
        table.listed(&[row], 4);
        assert_eq!(
            table.listed_by_kubelet("old", ["GPU-1"].into_iter(), 3),
            Some(true),
            "it is the only one"
        );
        table.upsert(pod("new"));
        assert_eq!(table.listed_by_kubelet("old", ["GPU-1"].into_iter(), 3), None);
        assert_eq!(table.listed_by_kubelet("new", ["GPU-1"].into_iter(), 3), Some(true));
    }
}
