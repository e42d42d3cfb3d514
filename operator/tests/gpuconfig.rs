//! The GPUConfig loop on the embedded API server, with the templates that `deploy/` ships: what comes with the first node, what
//! goes with the last, what a bad template leaves standing, and a driver installed before the plugins.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use gpu_migrate_model::crd::{GPUConfig, GPUShadow, InstallPhase, definitions};
use gpu_migrate_operator::config::reconcile;
use gpu_migrate_sim::cluster::api::{ApiServer, Running};
use gpu_migrate_sim::cluster::json_client;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use tokio_util::sync::CancellationToken;

const NAMESPACE: &str = "gpu-migrate-system";

struct Stage {
    client: Client,
    _running: Running,
}

impl Stage {
    /// A cluster with everything installed and not one node.
    async fn start(config: Value) -> Self {
        gpu_migrate_runtime::install_crypto_provider();
        let running = ApiServer::default().serve(0, CancellationToken::new()).await.unwrap();
        let client = running.client().unwrap();
        for definition in definitions() {
            let path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
            json_client::create(&client, path, &serde_json::to_value(definition).unwrap()).await.unwrap();
        }
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}});
        json_client::create(&client, "/api/v1/namespaces", &namespace).await.unwrap();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/base/templates.yaml");
        let templates: Value = serde_saphyr::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let maps = format!("/api/v1/namespaces/{NAMESPACE}/configmaps");
        json_client::create(&client, &maps, &templates).await.unwrap();
        let config = json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUConfig", "metadata": {"name": "cluster"}, "spec": config});
        json_client::create(&client, "/apis/gpu-migrate.io/v1alpha1/gpuconfigs", &config).await.unwrap();
        Self { client, _running: running }
    }

    async fn reconcile(&self) -> BTreeSet<String> {
        reconcile(&self.client, NAMESPACE, jiff::Timestamp::now()).await.unwrap()
    }

    async fn add_node(&self, name: &str) {
        let node =
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"pool": "a"}}});
        json_client::create(&self.client, "/api/v1/nodes", &node).await.unwrap();
    }

    async fn labels(&self, node: &str) -> BTreeMap<String, String> {
        let node = Api::<Node>::all(self.client.clone()).get(node).await.unwrap();
        let mine = node.labels().iter().filter_map(|(k, v)| Some((k.strip_prefix("gpu-migrate.io/")?, v)));
        mine.map(|(k, v)| (k.to_owned(), v.clone())).collect()
    }

    async fn is_cordoned(&self, node: &str) -> bool {
        let node = Api::<Node>::all(self.client.clone()).get(node).await.unwrap();
        node.spec.and_then(|spec| spec.unschedulable) == Some(true)
    }

    async fn sets(&self) -> Vec<String> {
        let api = Api::<DaemonSet>::namespaced(self.client.clone(), NAMESPACE);
        api.list(&ListParams::default()).await.unwrap().iter().map(ResourceExt::name_any).collect()
    }

    async fn template(&self, key: &str, text: &str) {
        let patch = json!({"data": {key: text}});
        let api = Api::<ConfigMap>::namespaced(self.client.clone(), NAMESPACE);
        api.patch("gpu-migrate-templates", &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    }

    async fn condition(&self, kind: &str) -> (String, String) {
        let config = Api::<GPUConfig>::all(self.client.clone()).get("cluster").await.unwrap();
        let conditions = config.status.unwrap().conditions;
        let found = conditions.into_iter().find(|condition| condition.type_ == kind).unwrap();
        (found.status, found.message)
    }

    async fn shadow(&self, node: &str) -> GPUShadow {
        Api::<GPUShadow>::all(self.client.clone()).get(node).await.unwrap()
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    async fn pod(&self) -> Pod {
        let mut all = self.pods().list(&ListParams::default()).await.unwrap().items;
        assert_eq!(all.len(), 1);
        all.remove(0)
    }

    async fn ends(&self, pod: &str, status: Value) {
        let patch = json!({"status": status});
        self.pods().patch_status(pod, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    }
}

fn pool(plugin: &str, more: Value) -> Value {
    let mut pool = json!({"name": "a", "selector": {"matchLabels": {"pool": "a"}}, "plugin": plugin});
    pool.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({"nodePools": [pool]})
}

#[tokio::test]
async fn daemon_sets_come_with_the_first_node_and_go_with_the_last() {
    let stage = Stage::start(pool("Bridged", json!({"exporter": "Dcgm"}))).await;
    assert!(stage.reconcile().await.is_empty());
    assert!(stage.sets().await.is_empty(), "no node, no DaemonSet");
    assert_eq!(stage.condition("Ready").await.0, "True");

    stage.add_node("n1").await;
    stage.add_node("n2").await;
    assert!(stage.reconcile().await.is_empty());
    let labels = stage.labels("n1").await;
    assert_eq!((labels["plugin"].as_str(), labels["run-node-agent"].as_str()), ("Bridged", "none"));
    let expected = ["gpu-migrate-bridge", "gpu-migrate-dcgm-exporter", "gpu-migrate-nvidia-plugin-bridged"];
    assert_eq!(stage.sets().await, expected);
    assert_eq!(
        stage.condition("Ready").await,
        ("False".into(), "2 nodes have no ready node agent: n1; n2".into())
    );

    // Rounds that find nothing to do write nothing.
    let version =
        || async { Api::<Node>::all(stage.client.clone()).get("n1").await.unwrap().resource_version() };
    let before = version().await;
    stage.reconcile().await;
    assert_eq!(version().await, before);

    let nodes = Api::<Node>::all(stage.client.clone());
    nodes.delete("n1", &DeleteParams::default()).await.unwrap();
    stage.reconcile().await;
    assert_eq!(stage.sets().await.len(), 3);
    nodes.delete("n2", &DeleteParams::default()).await.unwrap();
    stage.reconcile().await;
    assert!(stage.sets().await.is_empty());
}

/// From shares to whole cards with a share running: nothing is evicted, and what the agent said goes with it.
#[tokio::test]
async fn a_mode_changes_when_the_last_share_has_left() {
    let stage = Stage::start(pool("Bridged", json!({}))).await;
    stage.add_node("n1").await;
    stage.reconcile().await;
    let shadows = Api::<GPUShadow>::all(stage.client.clone());
    let shadow = json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUShadow", "metadata": {"name": "n1"}, "spec": {}});
    json_client::create(&stage.client, "/apis/gpu-migrate.io/v1alpha1/gpushadows", &shadow).await.unwrap();
    let share = json!({"uid": "u", "container": "c", "cores": 30, "blocks": 2});
    let held =
        json!({"status": {"cards": [{"uuid": "GPU-a", "minor": 0, "memoryMiB": 4096, "holders": [share]}]}});
    shadows.patch_status("n1", &PatchParams::default(), &Patch::Merge(&held)).await.unwrap();
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "shared"}, "spec": {"nodeName": "n1", "containers": [
        {"name": "c", "image": "i", "resources": {"limits": {"tencent.com/vcuda-core": "30", "tencent.com/vcuda-memory": "2"}}}]}});
    json_client::create(&stage.client, "/api/v1/namespaces/default/pods", &pod).await.unwrap();
    let configs = Api::<GPUConfig>::all(stage.client.clone());
    let patch = json!({"spec": pool("Legacy", json!({}))});
    configs.patch("cluster", &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();

    stage.reconcile().await;
    stage.reconcile().await;
    let labels = stage.labels("n1").await;
    assert_eq!((labels["plugin"].as_str(), labels["no-new-shares"].as_str()), ("Bridged", "true"));
    assert!(labels.contains_key("run-node-agent"), "{labels:?}");
    let conditions = stage.shadow("n1").await.status.unwrap().conditions;
    let waits = conditions.iter().find(|condition| condition.type_ == "ModeConverged").unwrap();
    assert_eq!(waits.message, "1 shares are still held; no new share is placed, no pod is evicted");

    let pods = Api::<Pod>::namespaced(stage.client.clone(), "default");
    pods.delete("shared", &DeleteParams::default().grace_period(0)).await.unwrap();
    stage.reconcile().await;
    assert!(stage.labels("n1").await.contains_key("run-node-agent"), "the agent still reports the share");
    let freed = json!({"status": {"cards": [{"uuid": "GPU-a", "minor": 0, "memoryMiB": 4096}]}});
    shadows.patch_status("n1", &PatchParams::default(), &Patch::Merge(&freed)).await.unwrap();
    stage.reconcile().await;
    assert!(!stage.labels("n1").await.contains_key("run-node-agent"));
    stage.reconcile().await;
    stage.reconcile().await;
    let labels = stage.labels("n1").await;
    assert_eq!((labels["plugin"].as_str(), labels["run-nvidia-plugin"].as_str()), ("Legacy", "Legacy"));
    assert!(!labels.contains_key("no-new-shares"), "{labels:?}");
    assert_eq!(stage.sets().await, ["gpu-migrate-nvidia-plugin"]);
    assert!(
        shadows.get_opt("n1").await.unwrap().is_none_or(|shadow| shadow.status.unwrap().cards.is_empty())
    );
}

#[tokio::test]
async fn a_bad_template_is_said_and_the_last_good_one_stays() {
    let stage = Stage::start(pool("Shared", json!({}))).await;
    stage.add_node("n1").await;
    stage.reconcile().await;
    let image = || async {
        let api = Api::<DaemonSet>::namespaced(stage.client.clone(), NAMESPACE);
        let set = api.get("gpu-migrate-bridge").await.unwrap();
        set.spec.unwrap().template.spec.unwrap().containers[0].image.clone().unwrap()
    };
    let good = image().await;
    stage.template("node-agent.yaml", "kind: Deployment").await;
    assert_eq!(stage.reconcile().await.len(), 1);
    let (status, message) = stage.condition("TemplatesValid").await;
    assert_eq!(status, "False");
    assert!(message.contains("key node-agent.yaml: apiVersion is null; expected apps/v1"), "{message}");
    assert_eq!(image().await, good);
    // An owner's own template is taken as it is.
    let own = "apiVersion: apps/v1\nkind: DaemonSet\nmetadata: {name: gpu-migrate-bridge}\nspec:\n  selector: {matchLabels: {a: b}}\n  template:\n    metadata: {labels: {a: b}}\n    spec: {containers: [{name: bridge, image: my/own}]}\n";
    stage.template("node-agent.yaml", own).await;
    assert!(stage.reconcile().await.is_empty());
    assert_eq!(
        (image().await.as_str(), stage.condition("TemplatesValid").await.0.as_str()),
        ("my/own", "True")
    );
}

#[tokio::test]
async fn an_owners_daemon_set_is_respected_and_said() {
    let stage = Stage::start(pool("Bridged", json!({}))).await;
    let set = json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "whatever", "namespace": "kube-system"},
        "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": {"metadata": {"labels": {"a": "b"}}, "spec": {
            "containers": [{"name": "c", "image": "mirror/k8s-device-plugin"}],
            "volumes": [{"name": "d", "hostPath": {"path": "/var/lib/kubelet/device-plugins"}}]}}}});
    json_client::create(&stage.client, "/apis/apps/v1/namespaces/kube-system/daemonsets", &set)
        .await
        .unwrap();
    stage.add_node("n1").await;
    stage.reconcile().await;
    assert_eq!(stage.sets().await, ["gpu-migrate-bridge"]);
    assert_eq!(stage.labels("n1").await["no-new-shares"], "true");
    let conditions = stage.shadow("n1").await.status.unwrap().conditions;
    let found = conditions.iter().map(|c| (c.type_.as_str(), c.status.as_str())).collect::<BTreeSet<_>>();
    assert_eq!(found, [("ExternalComponents", "True"), ("PluginConflict", "True")].into());
    assert_eq!(stage.condition("PluginConflict").await.0, "True");
}

#[tokio::test]
async fn the_driver_comes_before_the_plugins_and_its_failure_is_told() {
    let driver = json!({"driver": {"version": "550", "installer": "driver.yaml"}});
    let stage = Stage::start(pool("Bridged", driver)).await;
    stage
        .template(
            "driver.yaml",
            "apiVersion: v1\nkind: Pod\nspec:\n  containers: [{name: install, image: drivers}]\n",
        )
        .await;
    stage.add_node("n1").await;
    stage.reconcile().await;
    assert!(stage.labels("n1").await.is_empty() && stage.sets().await.is_empty());
    let pod = stage.pod().await;
    assert_eq!(pod.spec.as_ref().unwrap().node_name.as_deref(), Some("n1"));
    assert!(stage.is_cordoned("n1").await);
    // One node of the pool at a time.
    stage.add_node("n2").await;
    stage.reconcile().await;
    assert!(!stage.is_cordoned("n2").await);
    let second = stage.shadow("n2").await.status.unwrap().driver_install.unwrap();
    assert!(second.message.contains("other nodes of the pool come first"), "{}", second.message);
    Api::<Node>::all(stage.client.clone()).delete("n2", &DeleteParams::default()).await.unwrap();

    let failed = json!({"phase": "Failed", "containerStatuses": [{"name": "install", "image": "", "imageID": "", "ready": false, "restartCount": 0,
        "state": {"terminated": {"exitCode": 7, "reason": "Error", "message": "no kernel headers"}}}]});
    stage.ends(&pod.name_any(), failed).await;
    stage.reconcile().await;
    let install = stage.shadow("n1").await.status.unwrap().driver_install.unwrap();
    assert_eq!(install.phase, InstallPhase::Failed);
    assert_eq!(install.message, "install: Error, exit code 7: no kernel headers");
    assert!(stage.labels("n1").await.is_empty(), "no plugins on a node without a driver");

    // Deleting the pod tries again.
    stage.pods().delete(&pod.name_any(), &DeleteParams::default().grace_period(0)).await.unwrap();
    stage.reconcile().await;
    let again = stage.pod().await;
    stage.ends(&again.name_any(), json!({"phase": "Succeeded"})).await;
    stage.reconcile().await;
    assert_eq!(stage.labels("n1").await["plugin"], "Bridged");
    assert!(!stage.is_cordoned("n1").await);
    assert_eq!(
        stage.shadow("n1").await.status.unwrap().driver_install.unwrap().phase,
        InstallPhase::Installed
    );
    stage.reconcile().await;
    assert!(
        stage
            .pods()
            .list(&ListParams::default())
            .await
            .unwrap()
            .items
            .iter()
            .all(|pod| pod.metadata.deletion_timestamp.is_some())
    );
    assert_eq!(stage.labels("n1").await["plugin"], "Bridged", "its success is written down");
}
