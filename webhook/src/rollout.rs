//! Which workloads a percentage covers: a function of namespace and top owner alone, so that every replica, every revision of
//! a Deployment, every run of a CronJob, a repeated review of one pod and `gpu-migrate plan` come to the same. Pure.

use gpu_migrate_model::hash::fnv1a;

use crate::view::PodView;

/// Set by the Deployment controller on pods and their ReplicaSet, whose name ends with it.
const TEMPLATE_HASH: &str = "pod-template-hash";
/// The same of Argo Rollouts.
const ROLLOUT_HASH: &str = "rollouts-pod-template-hash";

/// The highest owner of a pod that can be told from the pod itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopOwner<'a> {
    pub kind: &'a str,
    pub name: &'a str,
}

impl<'a> TopOwner<'a> {
    /// Of a pod as it is admitted. One without a controller stands for itself, by its `generateName` where it has one: the name
    /// made from that differs each time.
    #[must_use]
    pub fn of_pod(pod: &'a PodView<'_>) -> Self {
        let metadata = &pod.metadata;
        match metadata.controller() {
            Some(owner) => Self::above(&owner.kind, &owner.name, |key| metadata.label(key)),
            None if metadata.generate_name.is_empty() => Self { kind: "Pod", name: &metadata.name },
            None => Self { kind: "Pod", name: &metadata.generate_name },
        }
    }

    /// Of the pods of a controller: itself, or the Deployment, Argo Rollout or CronJob that made it. `label` looks a label of its
    /// pods up.
    #[must_use]
    pub fn above(kind: &'a str, name: &'a str, label: impl Fn(&str) -> Option<&'a str>) -> Self {
        let without = |hash: &str| name.strip_suffix(label(hash)?)?.strip_suffix('-');
        let maker = match kind {
            "ReplicaSet" => without(TEMPLATE_HASH)
                .map(|name| ("Deployment", name))
                .or_else(|| without(ROLLOUT_HASH).map(|name| ("Rollout", name))),
            "Job" => scheduled_job(name).map(|name| ("CronJob", name)),
            _ => None,
        };
        let (kind, name) = maker.unwrap_or((kind, name));
        Self { kind, name }
    }

    /// What the percentage is decided by.
    #[must_use]
    pub fn key(&self, namespace: &str) -> String {
        [namespace, "/", self.kind, "/", self.name].concat()
    }
}

/// The CronJob that made a Job: a Job is called `<CronJob>-<time>`, in minutes since 1970 (8 digits until 2160), before
/// Kubernetes 1.21 in seconds (`pkg/controller/cronjob`, getJobName).
fn scheduled_job(job: &str) -> Option<&str> {
    let (name, time) = job.rsplit_once('-')?;
    let is_time = (8..=10).contains(&time.len()) && time.bytes().all(|byte| byte.is_ascii_digit());
    (is_time && !name.is_empty()).then_some(name)
}

/// Whether `key` belongs to the first `percent` of all keys. A larger percentage only ever adds keys.
#[must_use]
pub fn in_share(key: &str, percent: u32) -> bool {
    stable_hash(key) % 100 < u64::from(percent)
}

/// FNV-1a with the finalizer of MurmurHash3. Fixed for ever: a change would move pods between legacy and shared.
fn stable_hash(key: &str) -> u64 {
    let fnv = fnv1a(key.bytes());
    let mixed = (fnv ^ (fnv >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let mixed = (mixed ^ (mixed >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    mixed ^ (mixed >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_never_changes() {
        for (key, bucket) in [
            ("2769bb5f-78e7-48ff-b2ea-3d210961c956", 20),
            ("922472ba-e17c-45bd-a161-4b5730b25876", 98),
            ("", 42),
        ] {
            assert_eq!(stable_hash(key) % 100, bucket, "{key}");
        }
    }

    #[test]
    fn a_larger_share_only_adds_and_shares_are_even() {
        let keys: Vec<String> = (0..10_000).map(|i| format!("8d3f0c1e-0000-4000-8000-{i:012}")).collect();
        for key in &keys {
            assert!(!in_share(key, 0) && in_share(key, 100));
            let first = (0..=100).find(|percent| in_share(key, *percent));
            assert!((first.unwrap()..=100).all(|percent| in_share(key, percent)));
        }
        for percent in [1, 10, 50, 90] {
            let share = keys.iter().filter(|key| in_share(key, percent)).count();
            assert!(share.abs_diff(percent as usize * 100) < 200, "{percent} %: {share} of 10000");
        }
    }

    #[test]
    fn the_top_owner_is_told_by_names_and_labels() {
        for (owner, label, expected) in [
            (("ReplicaSet", "web-5d9c"), Some((TEMPLATE_HASH, "5d9c")), ("Deployment", "web")),
            (("ReplicaSet", "web-5d9c"), Some((ROLLOUT_HASH, "5d9c")), ("Rollout", "web")),
            (("ReplicaSet", "web-5d9c"), None, ("ReplicaSet", "web-5d9c")),
            (("ReplicaSet", "web-5d9c"), Some((TEMPLATE_HASH, "77aa")), ("ReplicaSet", "web-5d9c")),
            (("ReplicaSet", "web5d9c"), Some((TEMPLATE_HASH, "5d9c")), ("ReplicaSet", "web5d9c")),
            (("Job", "nightly-29401234"), None, ("CronJob", "nightly")),
            (("Job", "nightly-1636549200"), None, ("CronJob", "nightly")),
            (("Job", "nightly-2940"), None, ("Job", "nightly-2940")),
            (("Job", "-29401234"), None, ("Job", "-29401234")),
            (("StatefulSet", "db-29401234"), None, ("StatefulSet", "db-29401234")),
        ] {
            let look_up = |key: &str| label.filter(|(name, _)| *name == key).map(|(_, value)| value);
            let found = TopOwner::above(owner.0, owner.1, look_up);
            assert_eq!((found.kind, found.name), expected, "{owner:?} {label:?}");
        }
    }
}
