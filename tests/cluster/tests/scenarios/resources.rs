//! The custom resources at a real apiserver: schemas, defaults, validation rules.

use anyhow::{Context, Result, bail, ensure};
use gpu_migrate_cluster_tests::{Cluster, manifests};
use gpu_migrate_model::crd::{CommandAction, GPUMigration, MigrationMode};
use gpu_migrate_model::names::{GROUP, VERSION};
use kube::{
    Api,
    api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

fn api(cluster: &Cluster, kind: &str) -> Api<DynamicObject> {
    // Not kube's guess at the plural, which would be right, but by luck.
    let gvk = GroupVersionKind::gvk(GROUP, VERSION, kind);
    Api::all_with(
        cluster.client.clone(),
        &ApiResource::from_gvk_with_plural(&gvk, &format!("{}s", kind.to_lowercase())),
    )
}

async fn create(cluster: &Cluster, kind: &str, name: &str, spec: Value) -> kube::Result<DynamicObject> {
    let object = json!({"apiVersion": format!("{GROUP}/{VERSION}"), "kind": kind, "metadata": {"name": name}, "spec": spec});
    let object = serde_json::from_value(object).map_err(kube::Error::SerdeError)?;
    let strict = PostParams { dry_run: true, ..PostParams::default() };
    api(cluster, kind).create(&strict, &object).await
}

/// Valid objects are accepted; invalid ones are rejected with a message that names the field.
pub(crate) async fn valid_objects_are_accepted_and_invalid_ones_rejected(
    cluster: &mut Cluster,
) -> Result<()> {
    cluster.apply_crds().await?;
    let full = json!({
        "project": "danlu",
        "mode": "Enforce",
        "convert": {"coresPerCard": 100, "blocksPerCard": 42, "overrides": [
            {"gpuProduct": "NVIDIA-A100-SXM4-80GB", "blocksPerCard": 316},
            {"container": "sidecar-infer", "coresPerCard": 50, "blocksPerCard": 21},
        ]},
        "scheduling": {
            "schedulerName": "gpu-migrate-scheduler",
            "nodeSelector": {"remove": ["gpu-type"], "set": {"pool": "shared"}},
            "tolerations": {"removeKeys": ["nvidia.com/gpu"], "add": [{"key": "pool", "operator": "Equal", "value": "shared", "effect": "NoSchedule"}]},
        },
        "rollout": {"percent": 100, "unit": "Workload"},
        "onUnconvertible": "Admit",
    });
    create(cluster, "GPUMigration", "danlu", full).await?;
    create(cluster, "GPUMigration", "small", json!({"project": "danlu"})).await?;
    create(cluster, "GPUConfig", "cluster", json!({"nodePools": [{"name": "a100", "selector": {"matchLabels": {"pool": "a100"}}, "plugin": "Bridged"}]})).await?;

    let invalid = [
        (json!({}), "spec.project"),
        (json!({"project": "p", "mode": "Sometimes"}), "spec.mode"),
        (json!({"project": "p", "convert": {"coresPerCard": 150}}), "coresPerCard must be from 1 to 100"),
        (json!({"project": "p", "convert": {"coresPerCard": "half"}}), "spec.convert.coresPerCard"),
        (
            json!({"project": "p", "convert": {"overrides": [{"blocksPerCard": 1}]}}),
            "an override needs gpuProduct or container",
        ),
        (json!({"project": "p", "rollout": {"percent": 101}}), "percent must be from 0 to 100"),
        (json!({"project": "p", "rollout": {"unit": "Namespace"}}), "spec.rollout.unit"),
    ];
    for (spec, expected) in invalid {
        match create(cluster, "GPUMigration", "invalid", spec.clone()).await {
            Err(kube::Error::Api(status)) => ensure!(
                status.code == 422 && status.message.contains(expected),
                "{spec} is rejected without {expected:?}: {} {}",
                status.code,
                status.message
            ),
            other => bail!("{spec} is not rejected: {other:?}"),
        }
    }
    // Nothing was stored: everything above was a dry run.
    let left = api(cluster, "GPUMigration").delete("danlu", &DeleteParams::default()).await;
    ensure!(
        matches!(&left, Err(kube::Error::Api(status)) if status.code == 404),
        "a dry run stored something: {left:?}"
    );
    Ok(())
}

/// What `gpu-migrate rollout` writes is in a subresource: neither an apply nor a replacement of the policy from Git changes it, and an
/// edit of what it replaces ends it.
pub(crate) async fn a_command_survives_whoever_applies_the_policy_again(cluster: &mut Cluster) -> Result<()> {
    cluster.apply_crds().await?;
    let policies = Api::<GPUMigration>::all(cluster.client.clone());
    let in_git = json!({"apiVersion": format!("{GROUP}/{VERSION}"), "kind": "GPUMigration", "metadata": {"name": "in-git"},
        "spec": {"project": "in-git", "mode": "Audit", "rollout": {"waves": [{"percent": 100}]}}});
    let argocd = PatchParams::apply("argocd-controller").force();
    let policy = policies.patch("in-git", &argocd, &Patch::Apply(&in_git)).await?;
    let command = CommandAction::Start.command(&policy, "2026-01-01T00:00:00Z".to_owned());
    let patch = Patch::Merge(json!({"status": {"command": command}}));
    policies.patch_status("in-git", &PatchParams::default(), &patch).await?;
    policies.patch("in-git", &argocd, &Patch::Apply(&in_git)).await?;
    let mut replacement: GPUMigration = serde_json::from_value(in_git)?;
    replacement.metadata.resource_version = policies.get("in-git").await?.metadata.resource_version;
    let replaced = policies.replace("in-git", &PostParams::default(), &replacement).await?;
    ensure!(replaced.settings().mode == MigrationMode::Enforce, "replaced: {:?}", replaced.status);
    let edit = Patch::Merge(json!({"spec": {"rollout": {"paused": true}}}));
    let edited = policies.patch("in-git", &PatchParams::default(), &edit).await?.settings();
    ensure!(edited.paused && edited.mode == MigrationMode::Audit, "edited: {edited:?}");
    policies.delete("in-git", &DeleteParams::default()).await?;
    Ok(())
}

/// Every manifest of `deploy/` is accepted under strict validation, with unknown fields as errors.
pub(crate) async fn shipped_manifests_are_accepted(cluster: &mut Cluster) -> Result<()> {
    let mut count = 0;
    for folder in ["crds", "base", "backstop"] {
        let shipped = manifests::objects(folder)?;
        // The operator's templates are in a ConfigMap, whose content the apiserver does not validate.
        let maps = shipped.iter().filter(|object| object["metadata"]["name"] == "gpu-migrate-templates");
        let texts =
            maps.filter_map(|map| map["data"].as_object()).flatten().filter_map(|(_, text)| text.as_str());
        let inside = texts.map(serde_saphyr::from_str).collect::<Result<Vec<Value>, _>>()?;
        for object in shipped.into_iter().chain(inside) {
            manifests::apply(&cluster.client, &object, true)
                .await
                .with_context(|| format!("deploy/{folder}"))?;
            count += 1;
        }
    }
    ensure!(count > 20, "only {count} objects were found");
    Ok(())
}
