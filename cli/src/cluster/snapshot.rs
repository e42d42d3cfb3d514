//! What a cluster looked like at one time, as far as these commands care.

use crate::manifest::Manifest;
use anyhow::Context as _;
use gpu_migrate_model::crd::{GPUMigration, GPUShadow};
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, ResourceQuota};
use kube::api::{Api, ListParams};
use kube::{Client, Resource};
use serde::de::DeserializeOwned;
use std::fmt::Debug;

/// Everything that was listed.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// Nodes.
    pub nodes: Vec<Node>,
    /// Pods, finished ones too.
    pub pods: Vec<Pod>,
    /// What the node agents report.
    pub shadows: Vec<GPUShadow>,
    /// Policies.
    pub migrations: Vec<GPUMigration>,
    /// Namespaces.
    pub namespaces: Vec<Namespace>,
    /// Quotas.
    pub quotas: Vec<ResourceQuota>,
    /// DaemonSets: device plugins are among them.
    pub daemon_sets: Vec<DaemonSet>,
    /// Who changes pods.
    pub mutating: Vec<MutatingWebhookConfiguration>,
}

impl Snapshot {
    /// From a cluster. Custom resources that are not installed are none.
    ///
    /// # Errors
    /// What could not be listed.
    pub async fn of_cluster(client: &Client) -> anyhow::Result<Self> {
        Ok(Self {
            nodes: all(client).await?,
            pods: all(client).await?,
            shadows: all(client).await?,
            migrations: all(client).await?,
            namespaces: all(client).await?,
            quotas: all(client).await?,
            daemon_sets: all(client).await?,
            mutating: all(client).await?,
        })
    }

    /// From objects that were read from files; kinds of no interest are passed over.
    ///
    /// # Errors
    /// The first object that does not read as what it says it is.
    pub fn of_objects(objects: Vec<Manifest>) -> anyhow::Result<Self> {
        let mut snapshot = Self::default();
        for object in objects {
            match object.kind.as_str() {
                "Node" => snapshot.nodes.push(read(object)?),
                "Pod" => snapshot.pods.push(read(object)?),
                "GPUShadow" => snapshot.shadows.push(read(object)?),
                "GPUMigration" => snapshot.migrations.push(read(object)?),
                "Namespace" => snapshot.namespaces.push(read(object)?),
                "ResourceQuota" => snapshot.quotas.push(read(object)?),
                "DaemonSet" => snapshot.daemon_sets.push(read(object)?),
                "MutatingWebhookConfiguration" => snapshot.mutating.push(read(object)?),
                _ => {}
            }
        }
        Ok(snapshot)
    }
}

fn read<K: DeserializeOwned>(object: Manifest) -> anyhow::Result<K> {
    let place = format!("{}: {object}", object.origin);
    serde_json::from_value(object.value).context(place)
}

async fn all<K>(client: &Client) -> anyhow::Result<Vec<K>>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    match Api::<K>::all(client.clone()).list(&ListParams::default()).await {
        Ok(list) => Ok(list.items),
        // The API server does not know the kind: the definitions are not installed.
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("list {}", K::plural(&()))),
    }
}

/// A pod that no longer runs.
pub(crate) fn is_finished(pod: &Pod) -> bool {
    matches!(pod.status.as_ref().and_then(|status| status.phase.as_deref()), Some("Succeeded" | "Failed"))
}
