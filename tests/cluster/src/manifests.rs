//! What `deploy/` ships, applied as it is: definitions, accounts and rights for real, everything else as a dry run, since the
//! harness starts the programs itself. So every scenario runs with the rights that a cluster's owner would give.

use std::{collections::BTreeSet, fs, path::PathBuf};

use anyhow::{Context, Result};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams},
};
use serde_json::Value;

/// Kinds that make up an account and its rights.
const RIGHTS: [&str; 8] = [
    "Namespace",
    "ServiceAccount",
    "ClusterRole",
    "ClusterRoleBinding",
    "Role",
    "RoleBinding",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
];

/// All objects of the YAML files of one of `deploy/`'s folders, namespaces first; kustomizations are left out.
pub fn objects(folder: &str) -> Result<Vec<Value>> {
    let folder = crate::package_folder().join("../../deploy").join(folder);
    let mut files: Vec<PathBuf> = fs::read_dir(&folder)
        .with_context(|| format!("cannot read {}", folder.display()))?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    files.retain(|path| path.extension().is_some_and(|e| e == "yaml"));
    files.sort();
    let mut all = Vec::new();
    for path in files {
        let text = fs::read_to_string(&path)?;
        let documents: Vec<Value> =
            serde_saphyr::from_multiple(&text).with_context(|| format!("cannot read {}", path.display()))?;
        all.extend(documents.into_iter().filter(|d| !d.is_null() && d["kind"] != "Kustomization"));
    }
    all.sort_by_key(|object| object["kind"] != "Namespace");
    Ok(all)
}

/// The images that the pods of one of `deploy/`'s folders are made of.
pub fn images(folder: &str) -> Result<BTreeSet<String>> {
    // Templates are text within a ConfigMap.
    let text = objects(folder)?
        .iter()
        .map(|object| match object["data"].as_object() {
            Some(data) => data.values().filter_map(Value::as_str).collect::<Vec<_>>().join("\n"),
            None => serde_saphyr::to_string(object).unwrap_or_default(),
        })
        .collect::<Vec<_>>()
        .join("\n");
    let images = text.lines().filter_map(|line| line.trim().trim_start_matches("- ").strip_prefix("image:"));
    Ok(images.map(|image| image.trim().trim_matches('"').to_owned()).collect())
}

/// The first object of a kind in the YAML blocks of a document, named from the repository's root.
pub fn of_document(document: &str, kind: &str) -> Result<Value> {
    let path = crate::package_folder().join("../..").join(document);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let blocks = text.split("\n```yaml\n").skip(1).filter_map(|block| block.split("\n```").next());
    for block in blocks {
        for object in
            serde_saphyr::from_multiple::<Value>(block).with_context(|| format!("{document}: {block}"))?
        {
            if object["kind"] == kind {
                return Ok(object);
            }
        }
    }
    anyhow::bail!("{document} shows no {kind}")
}

/// Whether an object is an account or its rights.
pub fn is_right(object: &Value) -> bool {
    RIGHTS.iter().any(|kind| object["kind"] == *kind)
}

/// Applies an object by server-side apply; as a dry run it is only checked, strictly.
pub async fn apply(client: &Client, object: &Value, dry_run: bool) -> Result<()> {
    let mut parameters = PatchParams::apply("cluster-tests").force().validation_strict();
    parameters.dry_run = dry_run;
    apply_as(client, object, &parameters).await
}

/// The same as another field manager, or in another way.
pub async fn apply_as(client: &Client, object: &Value, parameters: &PatchParams) -> Result<()> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let version = text(&object["apiVersion"]).context("an object without apiVersion")?;
    let kind = text(&object["kind"]).context("an object without kind")?;
    let name = text(&object["metadata"]["name"]).with_context(|| format!("a {kind} without a name"))?;
    let (group, version) = version.split_once('/').unwrap_or(("", &version));
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, &kind));
    let api: Api<DynamicObject> = match text(&object["metadata"]["namespace"]) {
        Some(namespace) => Api::namespaced_with(client.clone(), &namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    };
    api.patch(&name, parameters, &Patch::Apply(object)).await.with_context(|| format!("{kind} {name}"))?;
    Ok(())
}
