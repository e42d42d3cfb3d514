//! The observed cluster, as far as the commands need it.

use crate::errors::is_absent;
use crate::manifest::Manifest;
use crate::progress::Progress;
use anyhow::Context as _;
use futures::StreamExt as _;
use gpu_migrate_model::crd::{GPUMigration, GPUShadow};
use gpu_migrate_model::names::{self, Dialect, NVIDIA_DRA_DRIVER};
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node, Pod, ResourceQuota};
use kube::api::{Api, ListParams};
use kube::core::DeserializeGuard;
use kube::{Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    pub nodes: Vec<Node>,
    pub pods: Vec<Pod>,
    pub shadows: Vec<GPUShadow>,
    pub migrations: Vec<GPUMigration>,
    pub namespaces: Vec<Namespace>,
    pub quotas: Vec<ResourceQuota>,
    /// DaemonSets: device plugins are among them.
    pub daemon_sets: Vec<DaemonSet>,
    pub mutating: Vec<MutatingWebhookConfiguration>,
    /// The configuration of kubelets and API server was requested, which only a live cluster can answer.
    pub settings_requested: bool,
    /// Configuration of the kubelets of nodes with cards, as far as it could be read.
    pub kubelets: BTreeMap<String, Value>,
    /// Feature gates of the API server, as far as they could be read.
    pub gates: BTreeMap<String, bool>,
    /// Dynamic Resource Allocation, as far as it could be read.
    pub dra: Option<Dra>,
    /// Configurations of kube-schedulers, by where they were found.
    pub schedulers: BTreeMap<String, Value>,
    /// Objects of our own kinds that cannot be read, and why.
    pub unreadable: Vec<String>,
}

const AT_ONCE: usize = 16;

/// Who else is asked for cards, through Dynamic Resource Allocation (`resource.k8s.io/v1`, Kubernetes 1.34 and newer).
#[derive(Debug, Clone, Default)]
pub struct Dra {
    /// The resource that pods request instead of a ResourceClaim (`spec.extendedResourceName`), by the DeviceClass that has one.
    pub extended_resources: BTreeMap<String, String>,
    /// Nodes whose cards NVIDIA's driver publishes.
    pub nodes: BTreeSet<String>,
}

impl Dra {
    async fn of_cluster(client: &Client) -> Option<Self> {
        let list = async |what: String| -> Option<Vec<Value>> {
            let text = get(client, &format!("/apis/resource.k8s.io/v1/{what}")).await?;
            let mut list: Value = serde_json::from_str(&text).ok()?;
            serde_json::from_value(list["items"].take()).ok()
        };
        let mut dra = Self::default();
        list("deviceclasses".into()).await?.iter().for_each(|class| dra.add_class(class));
        let slices = list(format!("resourceslices?fieldSelector=spec.driver%3D{NVIDIA_DRA_DRIVER}")).await?;
        slices.iter().for_each(|slice| dra.add_slice(slice));
        Some(dra)
    }

    fn add_class(&mut self, class: &Value) {
        let name = class["metadata"]["name"].as_str().unwrap_or_default();
        if let Some(resource) = class["spec"]["extendedResourceName"].as_str() {
            self.extended_resources.insert(name.to_owned(), resource.to_owned());
        }
    }

    fn add_slice(&mut self, slice: &Value) {
        let spec = &slice["spec"];
        if spec["driver"] == NVIDIA_DRA_DRIVER {
            self.nodes.extend(spec["nodeName"].as_str().map(str::to_owned));
        }
    }
}

impl Snapshot {
    /// Lists a cluster. Where the CustomResourceDefinitions are not installed, their objects count as none.
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
        snapshot.shadows = readable(client, &mut snapshot.unreadable).await?;
        step("policies");
        snapshot.migrations = readable(client, &mut snapshot.unreadable).await?;
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

    /// Only GPUShadows and pods.
    pub(crate) async fn of_cards(client: &Client) -> anyhow::Result<Self> {
        let mut unreadable = Vec::new();
        let shadows = readable(client, &mut unreadable).await?;
        Ok(Self { shadows, pods: all(client).await?, unreadable, ..Self::default() })
    }

    /// Only policies, and whom they are for: namespaces and pods.
    pub(crate) async fn of_policies(client: &Client) -> anyhow::Result<Self> {
        let mut unreadable = Vec::new();
        let migrations = readable(client, &mut unreadable).await?;
        Ok(Self {
            migrations,
            unreadable,
            namespaces: all(client).await?,
            pods: all(client).await?,
            ..Self::default()
        })
    }

    /// Only GPUShadows and policies.
    pub(crate) async fn of_status(client: &Client) -> anyhow::Result<Self> {
        let mut snapshot = Self::default();
        snapshot.shadows = readable(client, &mut snapshot.unreadable).await?;
        snapshot.migrations = readable(client, &mut snapshot.unreadable).await?;
        Ok(snapshot)
    }

    /// What allocations depend on: GPUShadows, pods and DaemonSets.
    pub(crate) async fn of_allocations(client: &Client) -> anyhow::Result<Self> {
        Ok(Self { daemon_sets: all(client).await?, ..Self::of_cards(client).await? })
    }

    /// What tells whether an installation works.
    pub(crate) async fn of_installation(client: &Client) -> anyhow::Result<Self> {
        let mut unreadable = Vec::new();
        let shadows = readable(client, &mut unreadable).await?;
        Ok(Self {
            nodes: all(client).await?,
            mutating: all(client).await?,
            shadows,
            unreadable,
            ..Self::default()
        })
    }

    /// Reads the configuration of kubelets and API server. What cannot be read is left out: it needs rights that few have.
    pub(crate) async fn add_settings(&mut self, client: &Client) {
        let nodes =
            self.nodes.iter().filter(|node| has_cards(node)).filter_map(|node| node.metadata.name.clone());
        let nodes = nodes.collect::<Vec<_>>();
        self.settings_requested = true;
        let progress = Progress::new(nodes.len() as u64 + 2);
        progress.step("reading the schedulers' configuration");
        if let Ok(maps) = Api::<ConfigMap>::all(client.clone()).list(&ListParams::default()).await {
            self.schedulers = maps.items.iter().flat_map(schedulers).collect();
        }
        progress.step("reading the API server's feature gates");
        self.gates = get(client, "/metrics").await.map(|text| gates(&text)).unwrap_or_default();
        self.dra = Dra::of_cluster(client).await;
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

    /// From objects of files; other kinds are skipped.
    ///
    /// # Errors
    /// The first object that does not match its kind.
    pub fn of_objects(objects: Vec<Manifest>) -> anyhow::Result<Self> {
        let mut snapshot = Self::default();
        for object in objects {
            match object.kind.as_str() {
                "Node" => snapshot.nodes.push(read(object)?),
                "Pod" => snapshot.pods.push(read(object)?),
                "GPUShadow" => snapshot.shadows.extend(own(object, &mut snapshot.unreadable)),
                "GPUMigration" => snapshot.migrations.extend(own(object, &mut snapshot.unreadable)),
                "Namespace" => snapshot.namespaces.push(read(object)?),
                "ResourceQuota" => snapshot.quotas.push(read(object)?),
                "DaemonSet" => snapshot.daemon_sets.push(read(object)?),
                "ConfigMap" => snapshot.schedulers.extend(schedulers(&read(object)?)),
                "KubeSchedulerConfiguration" => {
                    snapshot.schedulers.insert(object.origin.to_string(), object.value);
                }
                "DeviceClass" => snapshot.dra.get_or_insert_default().add_class(&object.value),
                "ResourceSlice" => snapshot.dra.get_or_insert_default().add_slice(&object.value),
                "MutatingWebhookConfiguration" => snapshot.mutating.push(read(object)?),
                _ => {}
            }
        }
        Ok(snapshot)
    }
}

/// An object of a kind of ours. One that cannot be read does not hide the others.
fn own<K: DeserializeOwned>(object: Manifest, unreadable: &mut Vec<String>) -> Option<K> {
    read(object).map_err(|error| unreadable.push(format!("{error:#}"))).ok()
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
        // The CustomResourceDefinitions are not installed.
        Err(error) if is_absent(&error) => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("list {}", K::plural(&()))),
    }
}

/// All objects of a kind of ours, without those that cannot be read.
async fn readable<K>(client: &Client, unreadable: &mut Vec<String>) -> anyhow::Result<Vec<K>>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let mut read = Vec::new();
    for object in all::<DeserializeGuard<K>>(client).await? {
        match object.0 {
            Ok(object) => read.push(object),
            Err(invalid) => {
                let name = invalid.metadata.name.as_deref().unwrap_or_default();
                unreadable.push(format!("{} {name}: {}", K::kind(&()), invalid.error));
            }
        }
    }
    Ok(read)
}

/// The response body of a path; `None` if it is forbidden or fails.
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

/// Whether the node has cards, or is labelled as if it had.
pub(crate) fn has_cards(node: &Node) -> bool {
    let dialect = Dialect::default();
    let capacity = node.status.as_ref().and_then(|status| status.capacity.as_ref());
    let some = |name: &str| capacity.and_then(|c| c.get(name)).is_some_and(|amount| amount.0 != "0");
    some(&dialect.legacy) || some(&dialect.cores) || node.labels().contains_key(names::PLUGIN)
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
