//! Writes of the GPUConfig reconciler, by server-side apply of the operator's fields.

use super::observe::NAME;
use crate::migrations::MANAGER;
use crate::nodes::decide::{NodePlan, Sets};
use crate::nodes::{Labels, NodeView, OperatorCondition};
use gpu_migrate_model::crd::{GPUConfig, GPUConfigStatus, GPUShadow};
use gpu_migrate_model::names;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::authentication::v1::{SelfSubjectReview, UserInfo};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::Client;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

/// Types of the operator's conditions in a GPUShadow.
const OWN_CONDITIONS: [&str; 5] =
    ["ExternalComponents", "PluginConflict", "DriverMatches", "DriverInstalled", "ModeConverged"];

fn params() -> PatchParams {
    PatchParams::apply(MANAGER).force()
}

fn group_version() -> String {
    format!("{}/{}", names::GROUP, names::VERSION)
}

/// Deletes the GPUShadow of a node whose agent was removed.
pub(super) async fn delete_shadow(client: &Client, node: &NodeView) -> kube::Result<()> {
    match Api::<GPUShadow>::all(client.clone()).delete(&node.name, &DeleteParams::default()).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        answer => answer.map(drop),
    }
}

/// Applies the operator's labels and cordon to a node; what it no longer applies is removed, unless another manager owns it.
pub(super) async fn node(
    client: &Client,
    node: &NodeView,
    labels: &Labels,
    cordon: bool,
) -> kube::Result<()> {
    // With its UID: a node that was deleted meanwhile must not be created.
    let metadata = json!({"name": node.name, "uid": node.uid, "labels": labels});
    let mut body = json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata});
    if cordon {
        body["spec"] = json!({"unschedulable": true});
    }
    Api::<Node>::all(client.clone()).patch_metadata(&node.name, &params(), &Patch::Apply(&body)).await?;
    tracing::info!(node = node.name, ?labels, cordon, "node labelled");
    Ok(())
}

/// Conditions with their last transition times.
fn conditions(
    new: &[OperatorCondition],
    before: &[Condition],
    generation: Option<i64>,
    now: Timestamp,
) -> Vec<Condition> {
    let one = |new: &OperatorCondition| {
        let status = if new.status { "True" } else { "False" };
        let same = before.iter().find(|old| old.type_ == new.kind && old.status == status);
        Condition {
            type_: new.kind.to_owned(),
            status: status.to_owned(),
            reason: new.reason.to_owned(),
            // The API server's limit is 32 KiB.
            message: new.message.chars().take(1024).collect(),
            observed_generation: generation,
            last_transition_time: same.map_or(Time(now), |old| old.last_transition_time.clone()),
        }
    };
    new.iter().map(one).collect()
}

/// Writes the operator's part of a GPUShadow, and creates it for a node that has no agent yet.
pub(super) async fn shadow(
    client: &Client,
    node: &NodeView,
    shadow: Option<&GPUShadow>,
    plan: &NodePlan,
    now: Timestamp,
) -> kube::Result<()> {
    let status = shadow.and_then(|shadow| shadow.status.clone()).unwrap_or_default();
    let mut before = status.conditions;
    before.retain(|condition| OWN_CONDITIONS.contains(&condition.type_.as_str()));
    let mut after = conditions(&plan.conditions, &before, None, now);
    before.sort_by(|a, b| a.type_.cmp(&b.type_));
    after.sort_by(|a, b| a.type_.cmp(&b.type_));
    if before == after && status.driver_install == plan.install {
        return Ok(());
    }
    let api = Api::<GPUShadow>::all(client.clone());
    if shadow.is_none() {
        let owner = json!({"apiVersion": "v1", "kind": "Node", "name": node.name, "uid": node.uid});
        let body = json!({"apiVersion": group_version(), "kind": "GPUShadow",
            "metadata": {"name": node.name, "ownerReferences": [owner]}, "spec": {}});
        api.patch(&node.name, &params(), &Patch::Apply(&body)).await?;
    }
    let mut status = json!({"conditions": after});
    if let Some(install) = &plan.install {
        status["driverInstall"] = json!(install);
    }
    let body = json!({"apiVersion": group_version(), "kind": "GPUShadow", "metadata": {"name": node.name}, "status": status});
    api.patch_status(&node.name, &params(), &Patch::Apply(&body)).await.map(drop)
}

/// Our ServiceAccount: with it, as by `helm uninstall`, go the DaemonSets. `None` for other credentials.
async fn owner(client: &Client, namespace: &str) -> kube::Result<Option<Value>> {
    let who =
        match Api::all(client.clone()).create(&PostParams::default(), &SelfSubjectReview::default()).await {
            // Not allowed, or not served.
            Err(kube::Error::Api(status)) if matches!(status.code, 403 | 404 | 501) => return Ok(None),
            answer => answer?.status.and_then(|status| status.user_info).unwrap_or_default(),
        };
    Ok(account(&who, namespace))
}

fn account(who: &UserInfo, namespace: &str) -> Option<Value> {
    let name = who.username.as_deref()?.strip_prefix(&format!("system:serviceaccount:{namespace}:"))?;
    let uid = who.uid.as_deref().filter(|uid| !uid.is_empty())?;
    Some(json!({"apiVersion": "v1", "kind": "ServiceAccount", "name": name, "uid": uid}))
}

/// Applies and deletes DaemonSets; returns those that the API server rejected as invalid.
pub(super) async fn sets(client: &Client, namespace: &str, sets: &Sets) -> kube::Result<Vec<String>> {
    let api = Api::<DaemonSet>::namespaced(client.clone(), namespace);
    let mut rejected = Vec::new();
    let owner = if sets.apply.is_empty() { None } else { owner(client, namespace).await? };
    for (component, body) in &sets.apply {
        let mut body = body.clone();
        if let Some(owner) = &owner {
            body["metadata"]["ownerReferences"] = json!([owner]);
        }
        let name = body["metadata"]["name"].as_str().unwrap_or_default();
        match api.patch(name, &params().validation_strict(), &Patch::Apply(&body)).await {
            Ok(_) => {}
            // The template is invalid.
            Err(kube::Error::Api(status)) if matches!(status.code, 400 | 422) => {
                rejected.push(format!("template {component}.yaml: {}", status.message));
            }
            Err(error) => return Err(error),
        }
    }
    for name in &sets.delete {
        match api.delete(name, &DeleteParams::background()).await {
            Ok(_) => tracing::info!(name, "DaemonSet deleted: no node needs it"),
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => return Err(error),
        }
    }
    Ok(rejected)
}

/// Creates a pod of the installer unless it exists.
pub(super) async fn create_pod(client: &Client, namespace: &str, pod: &Value) -> kube::Result<()> {
    let name = pod["metadata"]["name"].as_str().unwrap_or_default();
    let pod: Pod = serde_json::from_value(pod.clone()).map_err(kube::Error::SerdeError)?;
    match Api::<Pod>::namespaced(client.clone(), namespace).create(&PostParams::default(), &pod).await {
        Ok(_) => {
            tracing::info!(name, "driver installer started");
            Ok(())
        }
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        Err(error) => Err(error),
    }
}

/// Deletes a pod of the installer.
pub(super) async fn remove_pod(client: &Client, namespace: &str, name: &str) -> kube::Result<()> {
    match Api::<Pod>::namespaced(client.clone(), namespace).delete(name, &DeleteParams::default()).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        answer => answer.map(drop),
    }
}

/// Writes the GPUConfig's status where it has changed.
pub(super) async fn status(
    client: &Client,
    config: &GPUConfig,
    (mut status, new): (GPUConfigStatus, Vec<OperatorCondition>),
    now: Timestamp,
) -> kube::Result<()> {
    let before = config.status.as_ref().map_or(&[][..], |status| &status.conditions);
    status.conditions = conditions(&new, before, status.observed_generation, now);
    if config.status.as_ref() == Some(&status) {
        return Ok(());
    }
    let body = json!({"apiVersion": group_version(), "kind": "GPUConfig", "metadata": {"name": NAME}, "status": status});
    Api::<GPUConfig>::all(client.clone()).patch_status(NAME, &params(), &Patch::Apply(&body)).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_service_account_of_our_namespace_owns_what_is_made() {
        let who = |username: &str, uid: &str| UserInfo {
            username: Some(username.into()),
            uid: Some(uid.into()),
            ..UserInfo::default()
        };
        let operator = "system:serviceaccount:sys:gpu-migrate-operator";
        let owner =
            json!({"apiVersion": "v1", "kind": "ServiceAccount", "name": "gpu-migrate-operator", "uid": "u"});
        assert_eq!(account(&who(operator, "u"), "sys"), Some(owner));
        assert_eq!(account(&who(operator, ""), "sys"), None, "a client certificate");
        assert_eq!(account(&who(operator, "u"), "other"), None, "an owner must be in the same namespace");
        assert_eq!(account(&who("kubernetes-admin", "u"), "sys"), None);
        assert_eq!(account(&UserInfo::default(), "sys"), None);
    }
}
