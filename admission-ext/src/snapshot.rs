//! A cluster out of a file: a Kubernetes `List` of Nodes, Pods and GPUShadows, as `kubectl get … -o json` writes it.

use std::path::Path;

use gpu_migrate_model::crd::{GPUConfigSpec, GPUShadowStatus};
use gpu_migrate_model::score::HostResources;
use gpu_migrate_model::view::PodView;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::state::Cluster;
use crate::state::node::{NodeFacts, ShadowFacts};
use crate::state::pod::{PodFacts, Rules, succeeded_member};
use crate::wire::node::NodeView;

/// Why a snapshot cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error("snapshot {path}: {source}")]
    Read { path: String, source: std::io::Error },
    #[error("snapshot {path}: {source}; expected a JSON List of Nodes, Pods and GPUShadows")]
    Form { path: String, source: serde_json::Error },
    #[error("snapshot {path}: items[{at}]: {source}")]
    Item { path: String, at: usize, source: serde_json::Error },
    /// An object of a kind that does not belong here.
    #[error("snapshot {path}: items[{at}]: kind {kind:?}; expected Node, Pod, GPUShadow or GPUConfig")]
    Kind { path: String, at: usize, kind: String },
}

#[derive(Deserialize)]
struct List<'a> {
    #[serde(borrow)]
    items: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
struct Kind<'a> {
    #[serde(default)]
    kind: &'a str,
}

#[derive(Deserialize)]
struct Shadow<'a> {
    #[serde(borrow)]
    metadata: ShadowMeta<'a>,
    #[serde(default)]
    status: Option<GPUShadowStatus>,
}

#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    spec: GPUConfigSpec,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ShadowMeta<'a> {
    name: &'a str,
    #[serde(default)]
    owner_references: Vec<OwnerReference>,
}

/// Reads the snapshot in `path` into `cluster`.
///
/// # Errors
/// Where the file is not such a list; the message names the item.
pub fn load(path: &Path, rules: &Rules, cluster: &mut Cluster) -> Result<(), SnapshotError> {
    let shown = path.display().to_string();
    let text = std::fs::read(path).map_err(|source| SnapshotError::Read { path: shown.clone(), source })?;
    fill(&text, &shown, rules, cluster)
}

/// Reads the snapshot `text` into `cluster`; `path` is for messages.
///
/// # Errors
/// Where the text is not such a list; the message names the item.
pub fn fill(text: &[u8], path: &str, rules: &Rules, cluster: &mut Cluster) -> Result<(), SnapshotError> {
    let form = |source| SnapshotError::Form { path: path.to_owned(), source };
    let list: List<'_> = serde_json::from_slice(text).map_err(form)?;
    for (at, raw) in list.items.into_iter().enumerate() {
        let bad = |source| SnapshotError::Item { path: path.to_owned(), at, source };
        let kind: Kind<'_> = serde_json::from_str(raw.get()).map_err(bad)?;
        match kind.kind {
            "Pod" => add_pod(&serde_json::from_str(raw.get()).map_err(bad)?, rules, cluster),
            "Node" => {
                let node: NodeView<'_> = serde_json::from_str(raw.get()).map_err(bad)?;
                cluster.set_node(&node.metadata.name, NodeFacts::read(&node, &rules.dialect));
            }
            "GPUShadow" => {
                let shadow: Shadow<'_> = serde_json::from_str(raw.get()).map_err(bad)?;
                let status = shadow.status.unwrap_or_default();
                let mut owners = shadow.metadata.owner_references.into_iter();
                let node = owners.find(|owner| owner.kind == "Node").map(|owner| owner.uid);
                cluster.set_shadow(shadow.metadata.name, ShadowFacts::read(&status).of_node(node));
            }
            "GPUConfig" => {
                let config: Config = serde_json::from_str(raw.get()).map_err(bad)?;
                cluster.set_config(config.spec);
            }
            other => return Err(SnapshotError::Kind { path: path.to_owned(), at, kind: other.to_owned() }),
        }
    }
    Ok(())
}

fn add_pod(pod: &PodView<'_>, rules: &Rules, cluster: &mut Cluster) {
    if pod.is_finished() {
        if let Some((gang, owner)) = succeeded_member(pod) {
            cluster.note_success(&pod.metadata.uid, gang, owner);
        }
    } else if PodFacts::concerns(pod, rules) {
        cluster.set_pod(PodFacts::read(pod, rules));
    } else if let Some(node) = pod.node() {
        cluster.set_plain(&pod.metadata.uid, node, HostResources::requested(&pod.spec));
    }
}
