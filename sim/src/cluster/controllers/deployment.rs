//! Deployments: one ReplicaSet per pod template, and the way from the old to the new one within `maxSurge` and `maxUnavailable`.

use kube::Client;
use serde_json::{Value, json};

use super::{owner_reference, path_of};
use crate::cluster::api::object::meta;
use crate::cluster::json_client;

const HASH: &str = "pod-template-hash";
/// Counts the templates that a Deployment has had, on each ReplicaSet and on the Deployment: what `kubectl rollout history` and `undo`
/// read.
const REVISION: &str = "deployment.kubernetes.io/revision";

/// One step of a rollout, as far as it may go now.
pub(super) async fn reconcile(client: &Client, deployment: &Value, sets: &[&Value]) -> kube::Result<()> {
    let hash = hash(&deployment["spec"]["template"]);
    let (news, olds): (Vec<&Value>, Vec<&Value>) =
        sets.iter().partition(|set| set["metadata"]["labels"][HASH] == hash.as_str());
    let new = news.first().copied();
    if deployment["spec"]["paused"] == true {
        return stand_still(client, deployment, new, &olds).await;
    }
    let next = olds.iter().map(|old| revision(old)).max().unwrap_or(0) + 1;
    let Some(new) = new else {
        let path = format!("/apis/apps/v1/namespaces/{}/replicasets", meta(deployment, "namespace"));
        json_client::create(client, &path, &new_set(deployment, &hash, next)).await?;
        return Ok(());
    };
    let current = revision(new).max(next);
    for (plural, object) in [("replicasets", new), ("deployments", deployment)] {
        if revision(object) != current {
            let annotations = json!({REVISION: current.to_string()});
            let path = path_of("/apis/apps/v1", plural, object);
            json_client::merge(client, &path, &json!({"metadata": {"annotations": annotations}})).await?;
        }
    }
    let step = step(&Rollout::of(deployment, new, &olds));
    if step.new != count(&new["spec"], "replicas") {
        scale(client, new, step.new).await?;
    }
    let mut too_many = step.remove_old;
    for old in &olds {
        let has = count(&old["spec"], "replicas");
        let fewer = has.saturating_sub(too_many);
        too_many -= has - fewer;
        if fewer != has {
            scale(client, old, fewer).await?;
        }
    }
    report(client, deployment, Some(new), &olds).await
}

/// A paused Deployment rolls nothing out. Where one ReplicaSet has all pods, their number is still followed.
async fn stand_still(
    client: &Client,
    deployment: &Value,
    new: Option<&Value>,
    olds: &[&Value],
) -> kube::Result<()> {
    let wanted = count(&deployment["spec"], "replicas");
    let mut used = new.iter().chain(olds).filter(|set| count(&set["spec"], "replicas") > 0);
    if let (Some(only), None) = (used.next(), used.next())
        && count(&only["spec"], "replicas") != wanted
    {
        scale(client, only, wanted).await?;
    }
    report(client, deployment, new, olds).await
}

/// 0 where it has none yet.
fn revision(object: &Value) -> u64 {
    object["metadata"]["annotations"][REVISION].as_str().and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// The numbers that a step depends on.
#[derive(Clone, Copy, Debug)]
struct Rollout {
    wanted: u64,
    surge: u64,
    unavailable: u64,
    new: u64,
    new_ready: u64,
    old: u64,
    old_ready: u64,
    /// Of both, as far as they exist.
    pods: u64,
    recreate: bool,
}

impl Rollout {
    fn of(deployment: &Value, new: &Value, olds: &[&Value]) -> Self {
        let strategy = &deployment["spec"]["strategy"];
        let wanted = count(&deployment["spec"], "replicas");
        let surge = share(&strategy["rollingUpdate"]["maxSurge"], wanted, true);
        let unavailable = share(&strategy["rollingUpdate"]["maxUnavailable"], wanted, false);
        let sum = |of: &dyn Fn(&Value) -> u64| olds.iter().map(|old| of(old)).sum::<u64>();
        Self {
            wanted,
            surge,
            // Both zero would never move; the API server refuses that, controllers take one.
            unavailable: if surge == 0 { unavailable.max(1) } else { unavailable },
            new: count(&new["spec"], "replicas"),
            new_ready: count(&new["status"], "readyReplicas"),
            old: sum(&|old| count(&old["spec"], "replicas")),
            old_ready: sum(&|old| count(&old["status"], "readyReplicas")),
            pods: count(&new["status"], "replicas") + sum(&|old| count(&old["status"], "replicas")),
            recreate: strategy["type"] == "Recreate",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    new: u64,
    remove_old: u64,
}

fn step(now: &Rollout) -> Step {
    if now.recreate {
        let new = if now.old == 0 && now.pods <= now.new { now.wanted } else { now.new };
        return Step { new, remove_old: now.old };
    }
    let room = (now.wanted + now.surge).saturating_sub(now.new + now.old);
    let new = if now.new > now.wanted { now.wanted } else { (now.new + room).min(now.wanted) };
    let least = now.wanted.saturating_sub(now.unavailable);
    // Old pods that do not serve anybody can go first; of the others, as many as are not needed.
    let useless = now.old.saturating_sub(now.old_ready);
    let spare = (now.new_ready + now.old_ready).saturating_sub(least);
    Step { new, remove_old: (useless + spare).min(now.old) }
}

fn count(object: &Value, key: &str) -> u64 {
    object[key].as_u64().unwrap_or(0)
}

/// `25%` of all, rounded up for a surge and down for what may be missing; or a number.
fn share(value: &Value, of: u64, up: bool) -> u64 {
    match value {
        Value::String(text) => {
            let percent: u64 = text.trim_end_matches('%').parse().unwrap_or(25);
            if up { (of * percent).div_ceil(100) } else { of * percent / 100 }
        }
        other => other.as_u64().unwrap_or(0),
    }
}

/// Changes with the template and with nothing else: a quantity is the same as a number and as a text.
fn hash(template: &Value) -> String {
    let text = template.to_string();
    let hash = text
        .bytes()
        .filter(|byte| *byte != b'"')
        .fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    format!("{:010x}", hash >> 24)
}

fn new_set(deployment: &Value, hash: &str, revision: u64) -> Value {
    let mut template = deployment["spec"]["template"].clone();
    template["metadata"]["labels"][HASH] = hash.into();
    let mut selector = deployment["spec"]["selector"].clone();
    selector["matchLabels"][HASH] = hash.into();
    json!({
        "apiVersion": "apps/v1", "kind": "ReplicaSet",
        "metadata": {
            "name": format!("{}-{hash}", meta(deployment, "name")), "labels": template["metadata"]["labels"],
            "annotations": {REVISION: revision.to_string()},
            "ownerReferences": [owner_reference(deployment, "apps/v1", "Deployment")],
        },
        "spec": {"replicas": 0, "selector": selector, "template": template},
    })
}

async fn scale(client: &Client, set: &Value, replicas: u64) -> kube::Result<()> {
    let path = path_of("/apis/apps/v1", "replicasets", set);
    json_client::merge(client, &path, &json!({"spec": {"replicas": replicas}})).await.map(|_| ())
}

async fn report(
    client: &Client,
    deployment: &Value,
    new: Option<&Value>,
    olds: &[&Value],
) -> kube::Result<()> {
    let wanted = count(&deployment["spec"], "replicas");
    let of_status = |key: &str| new.iter().chain(olds).map(|set| count(&set["status"], key)).sum::<u64>();
    let ready = of_status("readyReplicas");
    let available = if ready >= wanted { "True" } else { "False" };
    let status = json!({
        "replicas": of_status("replicas"), "updatedReplicas": new.map_or(0, |new| count(&new["status"], "replicas")), "readyReplicas": ready,
        "availableReplicas": ready, "unavailableReplicas": wanted.saturating_sub(ready),
        "observedGeneration": deployment["metadata"]["generation"],
        "conditions": [{"type": "Available", "status": available}],
    });
    if deployment["status"] != status {
        let path = format!("{}/status", path_of("/apis/apps/v1", "deployments", deployment));
        json_client::merge(client, &path, &json!({"status": status})).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(new: (u64, u64), old: (u64, u64)) -> Rollout {
        Rollout {
            wanted: 4,
            surge: 0,
            unavailable: 1,
            new: new.0,
            new_ready: new.1,
            old: old.0,
            old_ready: old.1,
            pods: new.0 + old.0,
            recreate: false,
        }
    }

    #[test]
    fn a_rollout_goes_no_faster_than_it_may() {
        for (now, expected) in [
            (at((0, 0), (4, 4)), Step { new: 0, remove_old: 1 }),
            (at((0, 0), (3, 3)), Step { new: 1, remove_old: 0 }),
            (at((1, 0), (3, 3)), Step { new: 1, remove_old: 0 }),
            (at((1, 1), (3, 3)), Step { new: 1, remove_old: 1 }),
            (at((1, 0), (3, 2)), Step { new: 1, remove_old: 1 }),
            (at((4, 4), (0, 0)), Step { new: 4, remove_old: 0 }),
            (at((6, 6), (0, 0)), Step { new: 4, remove_old: 0 }),
            (Rollout { surge: 1, unavailable: 0, ..at((0, 0), (4, 4)) }, Step { new: 1, remove_old: 0 }),
            (Rollout { surge: 1, unavailable: 0, ..at((1, 1), (4, 4)) }, Step { new: 1, remove_old: 1 }),
            (Rollout { recreate: true, ..at((0, 0), (4, 4)) }, Step { new: 0, remove_old: 4 }),
            (Rollout { recreate: true, pods: 2, ..at((0, 0), (0, 0)) }, Step { new: 0, remove_old: 0 }),
            (Rollout { recreate: true, ..at((0, 0), (0, 0)) }, Step { new: 4, remove_old: 0 }),
        ] {
            assert_eq!(step(&now), expected, "{now:?}");
        }
    }

    #[test]
    fn percentages_round_as_kubernetes_rounds() {
        assert_eq!(share(&json!("25%"), 5, true), 2);
        assert_eq!(share(&json!("25%"), 5, false), 1);
        assert_eq!(share(&json!(3), 5, true), 3);
    }
}
