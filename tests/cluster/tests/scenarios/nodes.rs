//! A node under a GPUConfig, from joining to removal: its driver, its plugins, its objects.
//!
//! The nodes have no kubelet. Kubernetes creates the pods and binds them; the scenario writes their status, as a kubelet would.
//! The operator is a process with its account's RBAC and is restarted before each wait: what it does next must follow from the
//! objects and not from its memory, and the scenario need not wait for its next interval.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use anyhow::{Context, Result, ensure};
use gpu_migrate_cluster_tests::{
    Cluster,
    cluster::TIMEOUT,
    image::WORK_IMAGE,
    manifests,
    migration::shared_spec,
    nodes::DRIVER,
    stage::{OPERATORS, SYSTEM_NAMESPACE},
    wait::Seen,
    workload::phase_and_why,
};
use gpu_migrate_model::{
    crd::{DriverInstall, GPUConfig, GPUShadow, GPUShadowStatus, InstallPhase},
    names::{self, COMPONENT, NO_NEW_SHARES, RUN_AGENT, RUN_NVIDIA},
};
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{ConfigMap, Node, Pod},
    node::v1::RuntimeClass,
};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::json;

/// The label of the pool's nodes.
const OF_POOL: (&str, &str) = ("gpu-migrate.test/pool", "cards");
/// A node without a driver.
const RAW: &str = "node-raw";
/// One that joins with the wanted driver.
const READY: &str = "node-ready";
/// What runs on a bridged node: DaemonSet, and the component that its pods are labelled with.
const SETS: [(&str, &str); 2] =
    [("gpu-migrate-bridge", "node-agent"), ("gpu-migrate-nvidia-plugin-bridged", "nvidia-plugin-bridged")];
/// The owner's objects.
const CONFIG: &str = "cluster";
const TEMPLATES: &str = "gpu-migrate-templates";
const RUNTIME_CLASS: &str = "nvidia";

/// A node has no plugin before its driver: the installer fails and reports why, is retried when its pod is deleted, succeeds and
/// is deleted. The DaemonSets are created for the first node and stay for the second. A node that leaves its pool keeps its agent
/// until the last share has ended; then its labels and GPUShadow are removed. With the last node everything is removed.
pub(crate) async fn plugins_are_installed_after_the_driver_and_removed_with_the_last_node(
    cluster: &mut Cluster,
) -> Result<()> {
    let outcome = join_to_removal(cluster).await;
    outcome.and(as_it_was(cluster).await)
}

async fn join_to_removal(cluster: &mut Cluster) -> Result<()> {
    owners_objects(cluster).await?;
    cluster.add_operators(1, &[])?;
    let _raw = cluster.new_node(RAW, &[OF_POOL]).await?;
    installed_at_the_second_try(cluster).await?;
    after_restart(cluster, "the first node's plugins", |world| {
        world.serves(&[RAW]) && world.installers().is_empty()
    })
    .await?;
    cluster.report_as_agent(RAW).await?;
    let _ready = cluster.new_node(READY, &[OF_POOL, (names::DRIVER_VERSION, DRIVER)]).await?;
    let world = after_restart(cluster, "the second node's plugins, and the status of both", |world| {
        world.serves(&[RAW, READY]) && world.nodes_and_ready == (2, 1)
    })
    .await?;
    ensure!(
        world.install(READY).message == "already installed" && world.installers().is_empty(),
        "{world:?}"
    );
    ensure!(world.condition(RAW, "DriverMatches", "True").contains(DRIVER), "{world:?}");
    leaves_the_pool(cluster).await?;
    is_removed(cluster).await?;
    cluster.check_forbidden_of(OPERATORS[0])
}

/// The templates of `deploy/` with an installer, and a pool that wants a driver.
async fn owners_objects(cluster: &Cluster) -> Result<()> {
    let shipped = manifests::objects("base")?;
    let mut templates =
        shipped.into_iter().find(|o| o["metadata"]["name"] == TEMPLATES).context("no templates")?;
    let container = json!({"name": "install", "image": WORK_IMAGE});
    let installer = json!({"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [container]}});
    templates["data"]["driver.yaml"] = json!(serde_saphyr::to_string(&installer)?);
    let class = json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass",
        "metadata": {"name": RUNTIME_CLASS}, "handler": "runc"});
    let pool = json!({"name": "cards", "selector": {"matchLabels": {OF_POOL.0: OF_POOL.1}}, "plugin": "Bridged",
        "driver": {"version": "550", "installer": "driver.yaml"}});
    let config = json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUConfig",
        "metadata": {"name": CONFIG}, "spec": {"nodePools": [pool]}});
    for object in [class, templates, config] {
        manifests::apply(&cluster.client, &object, false).await?;
    }
    Ok(())
}

/// The installer runs on the node, and nothing else does before it has succeeded.
async fn installed_at_the_second_try(cluster: &mut Cluster) -> Result<()> {
    let world = after_restart(cluster, "the installer", |world| world.installers().len() == 1).await?;
    let first = world.installers()[0].clone();
    let spec = first.spec.as_ref().context("a pod without a spec")?;
    let variables = json!(spec.containers[0].env);
    ensure!(spec.node_name.as_deref() == Some(RAW), "the installer is on {:?}", spec.node_name);
    ensure!(
        variables
            == json!([{"name": "GPU_MIGRATE_DRIVER_VERSION", "value": "550"}, {"name": "GPU_MIGRATE_NODE", "value": RAW}]),
        "{variables}"
    );
    ensure!(world.install(RAW).phase == InstallPhase::Installing && world.is_untouched(RAW), "{world:?}");

    ends(cluster, &first, "Failed", 1, "no kernel headers").await?;
    let world = after_restart(cluster, "its failure to be reported", |world| {
        world.install(RAW).phase == InstallPhase::Failed
    })
    .await?;
    let message = world.condition(RAW, "DriverInstalled", "False");
    ensure!(message.contains("install: Error, exit code 1: no kernel headers"), "{message}");
    let kept = world.installers().iter().any(|pod| pod.uid() == first.uid());
    ensure!(kept && world.is_untouched(RAW), "{world:?}");

    delete_outright(&cluster.client, &first).await?;
    let world = after_restart(cluster, "the installer's second try", |world| {
        world.installers().iter().any(|pod| pod.uid() != first.uid())
    })
    .await?;
    ensure!(world.is_untouched(RAW), "{world:?}");
    ends(cluster, world.installers()[0], "Succeeded", 0, "").await
}

/// Nothing is evicted: the agent stays for a share, and the GPUShadow as long as the agent.
async fn leaves_the_pool(cluster: &mut Cluster) -> Result<()> {
    let namespace = cluster.namespace("stays", &[]).await?;
    let mut spec = shared_spec(50, 20);
    spec["nodeName"] = json!(RAW);
    let share = cluster.create_pod(&namespace, "share", spec).await?;
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let label = json!({"metadata": {"labels": {OF_POOL.0: null}}});
    nodes.patch(RAW, &PatchParams::default(), &Patch::Merge(label)).await?;

    let world = after_restart(cluster, "the node to be closed", |world| {
        world.labels(RAW).get(NO_NEW_SHARES).is_some_and(|value| value == "true")
            && world.condition(RAW, "ModeConverged", "False").contains("1 shares are still held")
    })
    .await?;
    ensure!(world.labels(RAW).contains_key(RUN_AGENT), "the agent is removed before the share: {world:?}");
    let now = cluster.pods(&namespace).get("share").await?;
    ensure!(now.uid() == share.uid() && now.metadata.deletion_timestamp.is_none(), "the share is evicted");

    delete_outright(&cluster.client, &share).await?;
    let world = after_restart(cluster, "the agent to be sent away", |world| {
        world.labels(RAW) == BTreeMap::from([(NO_NEW_SHARES, "true".to_owned())])
    })
    .await?;
    // Its pods have not ended yet.
    ensure!(world.pods_on(RAW).len() == SETS.len() && world.has_cards(RAW), "{world:?}");
    for pod in world.pods_on(RAW) {
        delete_outright(&cluster.client, pod).await?;
    }
    after_restart(cluster, "the node to be forgotten", |world| {
        world.is_clean(RAW) && !world.shadows.contains_key(RAW) && world.serves(&[READY])
    })
    .await
    .map(drop)
}

/// The last node's object is deleted: the DaemonSets go by the operator, the GPUShadow by its owner's end.
async fn is_removed(cluster: &mut Cluster) -> Result<()> {
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    nodes.delete(READY, &DeleteParams::default()).await?;
    after_restart(cluster, "everything to go with the last node", |world| {
        world.sets.is_empty() && !world.shadows.contains_key(READY) && world.nodes_and_ready == (0, 0)
    })
    .await
    .map(drop)
}

/// Stops the operator and removes what it or its owner may have left: nothing of the operator's, where all went well.
async fn as_it_was(cluster: &mut Cluster) -> Result<()> {
    cluster.remove(OPERATORS[0])?;
    let client = cluster.client.clone();
    let here = || Api::<DaemonSet>::namespaced(client.clone(), SYSTEM_NAMESPACE);
    here().delete_collection(&DeleteParams::background(), &ListParams::default()).await?;
    for pod in Api::<Pod>::namespaced(client.clone(), SYSTEM_NAMESPACE).list(&ListParams::default()).await? {
        delete_outright(&client, &pod).await?;
    }
    let now = DeleteParams::default();
    Api::<GPUConfig>::all(client.clone()).delete(CONFIG, &now).await?;
    Api::<RuntimeClass>::all(client.clone()).delete(RUNTIME_CLASS, &now).await?;
    Api::<ConfigMap>::namespaced(client, SYSTEM_NAMESPACE).delete(TEMPLATES, &now).await?;
    Ok(())
}

/// Restarts the operator, waits for the wanted state, and returns it.
async fn after_restart(cluster: &mut Cluster, what: &str, wanted: impl Fn(&World) -> bool) -> Result<World> {
    cluster.restart(OPERATORS[0])?;
    let client = cluster.client.clone();
    cluster
        .until(what, TIMEOUT, || async {
            let world = World::read(&client).await?;
            Ok(if wanted(&world) { Seen::Done(world) } else { Seen::NotYet(format!("{world:?}")) })
        })
        .await
}

/// Writes the status of a pod whose container has ended, as its kubelet would.
async fn ends(cluster: &Cluster, pod: &Pod, phase: &str, code: i32, message: &str) -> Result<()> {
    let ended = json!({"exitCode": code, "reason": if code == 0 { "Completed" } else { "Error" }, "message": message});
    let container = json!({"name": "install", "image": WORK_IMAGE, "imageID": "", "ready": false,
        "restartCount": 0, "state": {"terminated": ended}});
    let status = json!({"status": {"phase": phase, "containerStatuses": [container]}});
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), SYSTEM_NAMESPACE);
    pods.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Merge(status)).await?;
    Ok(())
}

/// Deletes a pod without grace, as its kubelet would once it has ended.
async fn delete_outright(client: &Client, pod: &Pod) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
    let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    match pods.delete(&pod.name_any(), &now).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        answer => Ok(answer.map(drop)?),
    }
}

/// The operator's objects at one moment.
struct World {
    nodes: BTreeMap<String, BTreeMap<String, String>>,
    shadows: BTreeMap<String, GPUShadowStatus>,
    sets: BTreeSet<String>,
    pods: Vec<Pod>,
    /// By the GPUConfig's status.
    nodes_and_ready: (u32, u32),
}

impl World {
    async fn read(client: &Client) -> Result<Self> {
        let all = ListParams::default();
        let nodes = Api::<Node>::all(client.clone()).list(&all).await?.items;
        let shadows = Api::<GPUShadow>::all(client.clone()).list(&all).await?.items;
        let sets = Api::<DaemonSet>::namespaced(client.clone(), SYSTEM_NAMESPACE).list(&all).await?.items;
        let config = Api::<GPUConfig>::all(client.clone()).get(CONFIG).await?;
        let pools = config.status.map(|status| status.pools).unwrap_or_default();
        Ok(Self {
            nodes: nodes.iter().map(|node| (node.name_any(), node.labels().clone())).collect(),
            shadows: shadows.into_iter().map(|s| (s.name_any(), s.status.unwrap_or_default())).collect(),
            sets: sets.iter().map(ResourceExt::name_any).collect(),
            pods: Api::<Pod>::namespaced(client.clone(), SYSTEM_NAMESPACE).list(&all).await?.items,
            nodes_and_ready: pools.first().map_or((0, 0), |pool| (pool.nodes, pool.ready)),
        })
    }

    /// The operator's labels on a node.
    fn labels(&self, node: &str) -> BTreeMap<&'static str, String> {
        let ours = [names::PLUGIN, names::POOL, RUN_AGENT, RUN_NVIDIA, names::RUN_DCGM, NO_NEW_SHARES];
        let labels = self.nodes.get(node).cloned().unwrap_or_default();
        ours.into_iter().filter_map(|key| Some((key, labels.get(key)?.clone()))).collect()
    }

    /// It has no label of ours, and there is no DaemonSet.
    fn is_untouched(&self, node: &str) -> bool {
        self.is_clean(node) && self.sets.is_empty()
    }

    fn is_clean(&self, node: &str) -> bool {
        self.labels(node).is_empty()
    }

    /// Exactly these nodes are labelled for both DaemonSets, and have their pods.
    fn serves(&self, nodes: &[&str]) -> bool {
        let full = [
            (names::PLUGIN, "Bridged"),
            (names::POOL, "cards"),
            (RUN_AGENT, "none"),
            (RUN_NVIDIA, "Bridged"),
        ];
        let full: BTreeMap<_, _> = full.into_iter().map(|(key, value)| (key, value.to_owned())).collect();
        let expected: BTreeSet<(&str, &str)> = SETS
            .iter()
            .flat_map(|(_, component)| nodes.iter().map(move |node| (*component, *node)))
            .collect();
        let stay = self.pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none());
        let bound: BTreeSet<(&str, &str)> = stay
            .filter(|pod| SETS.iter().any(|(_, component)| component_of(pod) == *component))
            .filter_map(|pod| Some((component_of(pod), node_of(pod)?)))
            .collect();
        nodes.iter().all(|node| self.labels(node) == full)
            && self.sets.iter().eq(SETS.iter().map(|(name, _)| name))
            && bound == expected
    }

    fn installers(&self) -> Vec<&Pod> {
        self.pods.iter().filter(|pod| component_of(pod) == "driver-installer").collect()
    }

    fn pods_on(&self, node: &str) -> Vec<&Pod> {
        self.pods.iter().filter(|pod| node_of(pod) == Some(node)).collect()
    }

    fn has_cards(&self, node: &str) -> bool {
        self.shadows.get(node).is_some_and(|shadow| !shadow.cards.is_empty())
    }

    /// The state of a node's driver installation; the default if there is none.
    fn install(&self, node: &str) -> DriverInstall {
        self.shadows.get(node).and_then(|shadow| shadow.driver_install.clone()).unwrap_or_default()
    }

    /// The message of a condition of a node's GPUShadow with this status; else all its conditions.
    fn condition(&self, node: &str, kind: &str, status: &str) -> String {
        let conditions =
            self.shadows.get(node).map(|shadow| shadow.conditions.as_slice()).unwrap_or_default();
        let found = conditions.iter().find(|c| c.type_ == kind && c.status == status);
        found.map_or_else(
            || format!("(not {kind}={status}: {:?})", json!(conditions).to_string()),
            |c| c.message.clone(),
        )
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for node in [RAW, READY] {
            let shadow = self
                .shadows
                .get(node)
                .map(|s| (s.cards.len(), &s.driver_install, json!(s.conditions).to_string()));
            writeln!(f, "{node}: {:?}, shadow {shadow:?}", self.labels(node))?;
        }
        for pod in &self.pods {
            let deleting = pod.metadata.deletion_timestamp.is_some();
            writeln!(f, "on {:?}, being deleted {deleting}: {}", node_of(pod), phase_and_why(Some(pod)))?;
        }
        write!(f, "DaemonSets {:?}, nodes and ready {:?}", self.sets, self.nodes_and_ready)
    }
}

fn component_of(pod: &Pod) -> &str {
    pod.labels().get(COMPONENT).map_or("", String::as_str)
}

fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}
