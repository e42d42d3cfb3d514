//! Objects of any kind, applied, deleted and counted.

use anyhow::Context as _;
use gpu_migrate_model::crd::GPUMigration;
use gpu_migrate_model::lifecycle::is_terminal;
use gpu_migrate_model::names;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::Value;

fn api(client: &Client, object: &Value) -> anyhow::Result<(Api<DynamicObject>, String)> {
    let text = |key: &str| object[key].as_str().with_context(|| format!("{key} is missing in {object}"));
    let (version, kind) = (text("apiVersion")?, text("kind")?);
    let (group, version) = version.split_once('/').unwrap_or(("", version));
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
    let name = object["metadata"]["name"]
        .as_str()
        .with_context(|| format!("metadata.name is missing in {object}"))?;
    let api = match object["metadata"]["namespace"].as_str() {
        None => Api::all_with(client.clone(), &resource),
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
    };
    Ok((api, name.to_owned()))
}

/// Applies an object, server-side, as the teller of the story.
pub(super) async fn apply(client: &Client, object: &Value) -> anyhow::Result<()> {
    let (api, name) = api(client, object)?;
    let parameters = PatchParams::apply("gpu-migrate-demo").force();
    api.patch(&name, &parameters, &Patch::Apply(object)).await.with_context(|| format!("applying {name}"))?;
    Ok(())
}

pub(super) async fn delete(client: &Client, object: &Value) -> anyhow::Result<()> {
    let (api, name) = api(client, object)?;
    api.delete(&name, &DeleteParams::default()).await.with_context(|| format!("deleting {name}"))?;
    Ok(())
}

/// The pods of a namespace, as a story counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Pods {
    /// Ready, and not going.
    pub(super) ready: usize,
    pub(super) converted: usize,
    pub(super) unsettled: usize,
}

pub(super) async fn pods(client: &Client, namespace: &str) -> anyhow::Result<Pods> {
    let list = Api::<Pod>::namespaced(client.clone(), namespace).list(&ListParams::default()).await?;
    let mut pods = Pods::default();
    for pod in list.items.into_iter().filter(|pod| !is_terminal(pod)) {
        let status = pod.status.clone().unwrap_or_default();
        let ready =
            status.conditions.unwrap_or_default().iter().any(|c| c.type_ == "Ready" && c.status == "True");
        if !ready || pod.metadata.deletion_timestamp.is_some() {
            pods.unsettled += 1;
            continue;
        }
        pods.ready += 1;
        pods.converted += usize::from(pod.annotations().contains_key(names::POLICY));
    }
    Ok(pods)
}

/// A migration, if it is there.
pub(super) async fn migration(client: &Client, name: &str) -> anyhow::Result<Option<GPUMigration>> {
    Ok(Api::<GPUMigration>::all(client.clone()).get_opt(name).await?)
}
