//! Lists what the GPUConfig reconciler decides from.

use crate::migrations::MANAGER;
use crate::nodes::daemonsets::{Role, roles};
use crate::nodes::driver::{Run, uses_cards_unrequested};
use crate::nodes::templates::{CONFIG_MAP, Component, INSTALLER, REVISION, Templates};
use crate::nodes::{LABELS, NodePods, NodeView};
use gpu_migrate_model::ask::{PodAsk, PodKind};
use gpu_migrate_model::crd::{GPUConfig, GPUShadow};
use gpu_migrate_model::lifecycle::is_terminal;
use gpu_migrate_model::names::{self, Dialect};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt as _};
use std::collections::BTreeMap;

pub(crate) const NAME: &str = "cluster";
/// So long a node counts as new.
const NEW: SignedDuration = SignedDuration::from_mins(5);
/// Nodes and shadows are read page by page.
const PAGE: u32 = 500;

#[derive(Debug, Default)]
pub(crate) struct ClusterState {
    pub(crate) config: Option<GPUConfig>,
    pub(crate) nodes: Vec<NodeView>,
    pub(crate) shadows: BTreeMap<String, GPUShadow>,
    pub(crate) sets: Vec<DaemonSet>,
    pub(crate) templates: Templates,
    /// Pods of the driver installer by node.
    pub(crate) runs: BTreeMap<String, Vec<Run>>,
}

impl ClusterState {
    /// The operator's own DaemonSets, by name, with their component.
    pub(crate) fn our_sets(&self, namespace: &str) -> BTreeMap<String, String> {
        let here = self.sets.iter().filter(|set| set.metadata.namespace.as_deref() == Some(namespace));
        here.filter_map(|set| Some((set.name_any(), set.labels().get(names::COMPONENT)?.clone()))).collect()
    }
}

/// Lists the cluster. Where the CustomResourceDefinitions are not installed, their objects count as none.
pub(crate) async fn cluster_state(
    client: &Client,
    namespace: &str,
    now: Timestamp,
) -> kube::Result<ClusterState> {
    let config = not_found_is_none(Api::<GPUConfig>::all(client.clone()).get_opt(NAME).await)?.flatten();
    let maps = Api::<ConfigMap>::namespaced(client.clone(), namespace);
    let templates = maps.get_opt(CONFIG_MAP).await?.and_then(|map| map.data).unwrap_or_default();
    let shadows = not_found_is_none(all::<GPUShadow>(client).await)?.unwrap_or_default();
    let installers = ListParams::default().labels(&format!("{}={INSTALLER}", names::COMPONENT));
    let mut runs = BTreeMap::<String, Vec<Run>>::new();
    for pod in Api::<Pod>::namespaced(client.clone(), namespace).list(&installers).await?.items {
        let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()) else { continue };
        let revision = pod.labels().get(REVISION).cloned().unwrap_or_default();
        runs.entry(node).or_default().push(Run::of(&pod, revision));
    }
    Ok(ClusterState {
        config,
        nodes: all::<Node>(client).await?.iter().map(|node| view(node, now)).collect(),
        shadows: shadows.into_iter().map(|shadow| (shadow.name_any(), shadow)).collect(),
        sets: all::<DaemonSet>(client).await?,
        templates,
        runs,
    })
}

fn not_found_is_none<T>(answer: kube::Result<T>) -> kube::Result<Option<T>> {
    match answer {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        answer => answer.map(Some),
    }
}

async fn all<K>(client: &Client) -> kube::Result<Vec<K>>
where
    K: kube::Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let api = Api::<K>::all(client.clone());
    let mut params = ListParams::default().limit(PAGE);
    let mut items = Vec::new();
    loop {
        let page = api.list(&params).await?;
        items.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(items),
        }
    }
}

/// What the decisions need from a Node.
pub(crate) fn view(node: &Node, now: Timestamp) -> NodeView {
    let managed = node.metadata.managed_fields.iter().flatten();
    let own = managed.filter(|field| field.manager.as_deref() == Some(MANAGER));
    let fields = own.filter_map(|field| field.fields_v1.as_ref());
    let own_cordon = fields.clone().any(|fields| fields.0.pointer("/f:spec/f:unschedulable").is_some());
    let created = node.metadata.creation_timestamp.as_ref();
    let written = fields
        .filter_map(|fields| fields.0.pointer("/f:metadata/f:labels")?.as_object())
        .flat_map(|labels| labels.keys().filter_map(|key| key.strip_prefix("f:")).map(str::to_owned))
        .filter(|key| LABELS.contains(&key.as_str()))
        .collect();
    let capacity = node.status.as_ref().and_then(|status| status.capacity.as_ref());
    let has =
        |resource: &str| capacity.and_then(|all| all.get(resource)).is_some_and(|amount| amount.0 != "0");
    let dialect = Dialect::default();
    NodeView {
        name: node.name_any(),
        uid: node.uid().unwrap_or_default(),
        labels: node.labels().clone(),
        own_labels: written,
        taints: node.spec.as_ref().and_then(|spec| spec.taints.clone()).unwrap_or_default(),
        own_cordon,
        is_new: created.is_some_and(|created| now.duration_since(created.0) < NEW),
        has_whole_cards: has(&dialect.legacy),
        has_shares: has(&dialect.cores),
    }
}

/// Counts the pods of one node.
pub(crate) async fn pods_of(client: &Client, node: &str) -> kube::Result<NodePods> {
    let params = ListParams::default().fields(&format!("spec.nodeName={node}"));
    let pods = Api::<Pod>::all(client.clone()).list(&params).await?.items;
    Ok(count(&pods))
}

/// Counts pods. One that cannot be parsed counts as both kinds, which blocks every step.
pub(crate) fn count(pods: &[Pod]) -> NodePods {
    let mut counted = NodePods::default();
    let dialect = Dialect::default();
    for pod in pods.iter().filter(|pod| !is_terminal(pod)) {
        let kind = PodAsk::of(pod, &dialect).map_or(PodKind::Mixed, |ask| ask.kind());
        counted.legacy += u32::from(matches!(kind, PodKind::Legacy | PodKind::Mixed));
        counted.shared += u32::from(matches!(kind, PodKind::Shared | PodKind::Mixed));
        let spec = pod.spec.as_ref();
        counted.agents += u32::from(spec.is_some_and(|spec| roles(spec).contains(&Role::NodeAgent)));
        let of = pod.labels().get(names::COMPONENT).map(String::as_str);
        counted.unrequested +=
            u32::from(of.is_none() && kind == PodKind::Plain && uses_cards_unrequested(pod));
        counted.direct_plugins += u32::from(of == Some(Component::NvidiaDirect.name()));
    }
    counted
}

/// Whether the node agent is ready.
pub(crate) fn is_ready(shadow: &GPUShadow) -> bool {
    let conditions = shadow.status.iter().flat_map(|status| &status.conditions);
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}
