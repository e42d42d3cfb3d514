//! What a cluster looked like at one time, as far as these commands care.

use super::preflight::has_cards;
use crate::manifest::Manifest;
use crate::progress::Progress;
use anyhow::Context as _;
use futures::StreamExt as _;
use gpu_migrate_model::crd::{GPUMigration, GPUShadow};
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node, Pod, ResourceQuota};
use kube::api::{Api, ListParams};
use kube::{Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Debug;

#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    pub nodes: Vec<Node>,
    /// Pods, finished ones too.
    pub pods: Vec<Pod>,
    pub shadows: Vec<GPUShadow>,
    pub migrations: Vec<GPUMigration>,
    pub namespaces: Vec<Namespace>,
    pub quotas: Vec<ResourceQuota>,
    /// DaemonSets: device plugins are among them.
    pub daemon_sets: Vec<DaemonSet>,
    pub mutating: Vec<MutatingWebhookConfiguration>,
    /// Kubelets and API server were asked how they are set: they were there to be asked.
    pub asked_settings: bool,
    /// Configuration of the kubelets of nodes with cards, as far as it could be read.
    pub kubelets: BTreeMap<String, Value>,
    /// Feature gates of the API server, as far as they could be read.
    pub gates: BTreeMap<String, bool>,
    /// Configurations of kube-schedulers, by where they were found.
    pub schedulers: BTreeMap<String, Value>,
}

const AT_ONCE: usize = 16;

impl Snapshot {
    /// From a cluster. Custom resources that are not installed are none.
    ///
    /// # Errors
    /// What could not be listed.
    pub async fn of_cluster(client: &Client) -> anyhow::Result<Self> {
        let progress = Progress::new(8);
        let step = |what: &str| progress.step(format!("reading {what}"));
        let mut snapshot = Self::default();
        step("nodes");
        snapshot.nodes = all(client).await?;
        step("pods");
        snapshot.pods = all(client).await?;
        step("GPUShadows");
        snapshot.shadows = all(client).await?;
        step("policies");
        snapshot.migrations = all(client).await?;
        step("namespaces");
        snapshot.namespaces = all(client).await?;
        step("quotas");
        snapshot.quotas = all(client).await?;
        step("DaemonSets");
        snapshot.daemon_sets = all(client).await?;
        step("webhooks");
        snapshot.mutating = all(client).await?;
        Ok(snapshot)
    }

    /// Only who holds what and who waits.
    pub(crate) async fn of_cards(client: &Client) -> anyhow::Result<Self> {
        Ok(Self { shadows: all(client).await?, pods: all(client).await?, ..Self::default() })
    }

    /// Asks kubelets and API server how they are set. What cannot be read is left out: it takes rights that few have.
    pub(crate) async fn add_settings(&mut self, client: &Client) {
        let nodes =
            self.nodes.iter().filter(|node| has_cards(node)).filter_map(|node| node.metadata.name.clone());
        let nodes = nodes.collect::<Vec<_>>();
        self.asked_settings = true;
        let progress = Progress::new(nodes.len() as u64 + 2);
        progress.step("reading the schedulers' configuration");
        if let Ok(maps) = Api::<ConfigMap>::all(client.clone()).list(&ListParams::default()).await {
            self.schedulers = maps.items.iter().flat_map(schedulers).collect();
        }
        progress.step("reading the API server's feature gates");
        self.gates = get(client, "/metrics").await.map(|text| gates(&text)).unwrap_or_default();
        let asked = nodes.into_iter().map(|node| async move {
            let text = get(client, &format!("/api/v1/nodes/{node}/proxy/configz")).await?;
            let mut answer: Value = serde_json::from_str(&text).ok()?;
            Some((node, answer["kubeletconfig"].take()))
        });
        let mut answers = futures::stream::iter(asked).buffer_unordered(AT_ONCE);
        while let Some(answer) = answers.next().await {
            progress.step("reading the kubelets' configuration");
            self.kubelets.extend(answer);
        }
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
                "ConfigMap" => snapshot.schedulers.extend(schedulers(&read(object)?)),
                "KubeSchedulerConfiguration" => {
                    snapshot.schedulers.insert(object.origin.to_string(), object.value);
                }
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

/// The scheduler configurations in a ConfigMap.
fn schedulers(map: &ConfigMap) -> Vec<(String, Value)> {
    let of = format!("ConfigMap {}/{}", map.namespace().unwrap_or_default(), map.name_any());
    let texts = map.data.iter().flatten().filter(|(_, text)| text.contains("KubeSchedulerConfiguration"));
    let read =
        texts.filter_map(|(key, text)| Some((format!("{of}, {key}"), serde_saphyr::from_str(text).ok()?)));
    read.collect()
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

/// A path's text; `None` where we may not or cannot.
async fn get(client: &Client, path: &str) -> Option<String> {
    let request = http::Request::get(path).body(Vec::new()).ok()?;
    client.request_text(request).await.ok()
}

/// `kubernetes_feature_enabled{name="X",stage="BETA"} 1` → X is on.
fn gates(metrics: &str) -> BTreeMap<String, bool> {
    let lines = metrics.lines().filter_map(|line| line.strip_prefix("kubernetes_feature_enabled{"));
    let gate = |line: &str| {
        let name = line.split("name=\"").nth(1)?.split('"').next()?;
        Some((name.to_owned(), line.rsplit(' ').next()? == "1"))
    };
    lines.filter_map(gate).collect()
}

/// A pod that no longer runs.
pub(crate) fn is_finished(pod: &Pod) -> bool {
    gpu_migrate_model::view::is_finished(pod.status.as_ref().and_then(|status| status.phase.as_deref()))
}

#[cfg(test)]
mod tests {
    #[test]
    fn gates_are_read_from_the_metrics() {
        let text = "# TYPE kubernetes_feature_enabled gauge\nkubernetes_feature_enabled{name=\"A\",stage=\"\"} 1\nkubernetes_feature_enabled{name=\"B\",stage=\"ALPHA\"} 0\nother 1\n";
        let gates = super::gates(text);
        assert_eq!(gates.into_iter().collect::<Vec<_>>(), [("A".to_owned(), true), ("B".to_owned(), false)]);
    }
}
