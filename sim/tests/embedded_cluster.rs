//! The embedded cluster as a whole: scheduler, controllers, kubelet and device manager, with what was seen of real ones as the measure.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::routing::post;
use axum::{Json, Router};
use gpu_migrate_kubelet_api::checkpoint::Checkpoint;
use gpu_migrate_kubelet_api::lister;
use gpu_migrate_sim::cluster::api::{ApiServer, Running};
use gpu_migrate_sim::cluster::kubelet::{Given, Happening, Kubelet, NodeSpec, Pace};
use gpu_migrate_sim::cluster::scheduler::{ExtenderConfig, Scheduler, SchedulerConfig};
use gpu_migrate_sim::cluster::{controllers, json_client};
use gpu_migrate_sim::nvidia::NvidiaPlugin;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, PostParams};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

struct Cluster {
    client: Client,
    running: Running,
    kubelet: Kubelet,
    happenings: mpsc::UnboundedReceiver<Happening>,
    folder: tempfile::TempDir,
    stop: tokio_util::sync::DropGuard,
}

/// One node with two cards, and NVIDIA's plugin registered with the kubelet itself.
async fn start(extender: Option<ExtenderConfig>) -> Cluster {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let stop = CancellationToken::new();
    let running = ApiServer::default().serve(0, stop.clone()).await.unwrap();
    let client = running.client().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (sender, happenings) = mpsc::unbounded_channel();
    let spec = NodeSpec { name: "n1".into(), labels: BTreeMap::new(), cpu: 8, memory_gib: 32 };
    let quick = Duration::from_millis(20);
    let pace = Pace { report: quick, start: quick, stop: quick, back_off: quick };
    let kubelet =
        Kubelet::start(spec, pace, folder.path(), client.clone(), sender, stop.clone()).await.unwrap();
    let plugin = NvidiaPlugin::new(vec!["GPU-a".into(), "GPU-b".into()]);
    tokio::spawn(plugin.run(folder.path().join("device-plugins"), "kubelet.sock".into(), stop.clone()));
    let _scheduler = Scheduler::start(
        SchedulerConfig { names: vec!["default-scheduler".into()], extender },
        client.clone(),
        stop.clone(),
    );
    controllers::start(&running, client.clone(), stop.clone());
    let cluster = Cluster { client, running, kubelet, happenings, folder, stop: stop.drop_guard() };
    cluster.until("two cards to be offered", || async { cluster.allocatable().await == "2" }).await;
    cluster
}

impl Cluster {
    fn pods(&self) -> Api<Pod> {
        Api::default_namespaced(self.client.clone())
    }

    async fn allocatable(&self) -> String {
        let nodes = json_client::list(&self.client, "/api/v1/nodes").await.unwrap();
        let found = nodes.first().map(|node| node["status"]["allocatable"]["nvidia.com/gpu"].clone());
        found.and_then(|n| n.as_str().map(str::to_owned)).unwrap_or_default()
    }

    async fn until<F: Future<Output = bool>>(&self, what: &str, mut holds: impl FnMut() -> F) {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
        while !holds().await {
            assert!(tokio::time::Instant::now() < deadline, "waited in vain for {what}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn phase(&self, name: &str) -> String {
        let pod = self.pods().get_opt(name).await.unwrap();
        pod.map_or_else(|| "gone".into(), |pod| pod.status.and_then(|s| s.phase).unwrap_or_default())
    }

    async fn create(&self, name: &str, spec: Value) -> Pod {
        let pod = serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap();
        self.pods().create(&PostParams::default(), &pod).await.unwrap()
    }

    async fn until_phase(&self, name: &str, phase: &str) {
        self.until(&format!("{name} to be {phase}"), || async { self.phase(name).await == phase }).await;
    }

    async fn next_start(&mut self) -> Given {
        let started = async {
            loop {
                if let Happening::Started(given) = self.happenings.recv().await.unwrap() {
                    return *given;
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(20), started)
            .await
            .expect("waited in vain for a container to start")
    }

    fn rows(&self) -> Vec<(String, usize)> {
        let text =
            std::fs::read(self.folder.path().join("device-plugins/kubelet_internal_checkpoint")).unwrap();
        let checkpoint = Checkpoint::parse(&text).unwrap();
        checkpoint.entries.iter().map(|entry| (entry.pod_uid.to_string(), entry.ids.len())).collect()
    }

    async fn listed(&self) -> usize {
        lister::list(&self.folder.path().join("pod-resources/kubelet.sock")).await.unwrap().len()
    }
}

fn gpu(command: Value) -> Value {
    json!({
        "restartPolicy": "Never", "terminationGracePeriodSeconds": 1,
        "containers": [{"name": "c", "image": "i", "command": command, "resources": {"limits": {"nvidia.com/gpu": 1}}}],
    })
}

#[tokio::test]
async fn rows_of_finished_pods_stay_in_the_checkpoint_until_the_next_allocate() {
    let mut cluster = start(None).await;
    let first = cluster.create("first", gpu(json!(["sleep", "0.05"]))).await.uid().unwrap();
    let given = cluster.next_start().await;
    assert_eq!(given.env["NVIDIA_VISIBLE_DEVICES"], given.devices["nvidia.com/gpu"][0]);
    cluster.until_phase("first", "Succeeded").await;
    assert_eq!(cluster.rows(), [(first, 1)], "still in the checkpoint");
    cluster.until("pod-resources to drop it", || async { cluster.listed().await == 0 }).await;

    cluster.create("plain", json!({"containers": [{"name": "c", "image": "i"}]})).await;
    cluster.until_phase("plain", "Running").await;
    assert_eq!(cluster.rows().len(), 1, "a pod without devices clears nothing");
    let second = cluster.create("second", gpu(json!(["run"]))).await.uid().unwrap();
    cluster.until_phase("second", "Running").await;
    assert_eq!(cluster.rows(), [(second, 1)]);
}

#[tokio::test]
async fn a_restarted_kubelet_has_lost_its_plugins_and_kept_its_containers() {
    let mut cluster = start(None).await;
    cluster.create("p", gpu(json!(["run"]))).await;
    let given = cluster.next_start().await;
    cluster.kubelet.restart(Duration::from_millis(20)).await.unwrap();
    assert_eq!(cluster.kubelet.devices().counts().get("nvidia.com/gpu"), None);
    // The node's status may still tell of the time before the restart: the kubelet itself is asked.
    let back = || async { cluster.kubelet.devices().counts().get("nvidia.com/gpu") == Some(&(2, 2)) };
    cluster.until("the plugin to be back", back).await;
    cluster.until("the node to say so", || async { cluster.allocatable().await == "2" }).await;
    assert_eq!(cluster.rows(), [(given.uid.clone(), 1)], "the checkpoint was kept");
    assert_eq!(cluster.phase("p").await, "Running");
    cluster.create("q", gpu(json!(["run"]))).await;
    let other = cluster.next_start().await;
    assert_ne!(given.env, other.env, "the card of the running pod is not given again");
}

#[tokio::test]
async fn main_containers_reuse_the_devices_of_init_containers() {
    let mut cluster = start(None).await;
    let mut spec = gpu(json!(["run"]));
    let init = json!({"name": "warm", "image": "i", "command": ["sleep", "0"], "resources": {"limits": {"nvidia.com/gpu": 1}}});
    spec["initContainers"] = json!([init]);
    cluster.create("p", spec).await;
    let (warm, main) = (cluster.next_start().await, cluster.next_start().await);
    assert_eq!((warm.container.as_str(), main.container.as_str()), ("warm", "c"));
    assert_eq!(warm.devices, main.devices);
    assert_eq!(cluster.rows().len(), 2, "both are in the checkpoint");
}

#[tokio::test]
async fn a_full_node_keeps_a_pod_waiting_until_one_goes() {
    let cluster = start(None).await;
    for name in ["a", "b", "c"] {
        cluster.create(name, gpu(json!(["run"]))).await;
    }
    cluster.until_phase("b", "Running").await;
    let told = || async {
        let pod = serde_json::to_value(cluster.pods().get("c").await.unwrap()).unwrap();
        pod["status"]["conditions"]
            .to_string()
            .contains("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
    };
    cluster.until("c to be told why it waits", told).await;
    cluster.pods().delete("a", &DeleteParams::default()).await.unwrap();
    cluster.until_phase("a", "gone").await;
    cluster.until_phase("c", "Running").await;
}

#[tokio::test]
async fn a_deployment_rolls_over_within_its_bounds_and_takes_its_pods_along() {
    let cluster = start(None).await;
    let apps = "/apis/apps/v1/namespaces/default/deployments";
    let mut deployment = json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"},
        "spec": {
            "replicas": 2, "selector": {"matchLabels": {"app": "web"}}, "strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "template": {"metadata": {"labels": {"app": "web"}}, "spec": {"terminationGracePeriodSeconds": 1, "containers": [
                {"name": "c", "image": "one", "resources": {"limits": {"nvidia.com/gpu": 1}}},
            ]}},
        },
    });
    json_client::create(&cluster.client, apps, &deployment).await.unwrap();
    let ready = |image: &'static str| {
        let client = cluster.client.clone();
        async move {
            let pods = json_client::list(&client, "/api/v1/pods").await.unwrap();
            let of_image = pods.iter().filter(|pod| pod["spec"]["containers"][0]["image"] == image);
            let ready = of_image.filter(|pod| pod["status"]["containerStatuses"][0]["ready"] == true).count();
            ready == 2 && pods.len() == 2
        }
    };
    cluster.until("two pods", || ready("one")).await;
    deployment["spec"]["template"]["spec"]["containers"][0]["image"] = json!("two");
    json_client::merge(&cluster.client, &format!("{apps}/web"), &deployment).await.unwrap();
    cluster.until("two new pods", || ready("two")).await;
    json_client::delete(&cluster.client, &format!("{apps}/web")).await.unwrap();
    let empty = || async { json_client::list(&cluster.client, "/api/v1/pods").await.unwrap().is_empty() };
    cluster.until("the garbage to be collected", empty).await;
}

#[tokio::test]
async fn an_extender_is_called_as_kube_scheduler_calls_it() {
    let binds = Arc::new(AtomicUsize::new(0));
    let bound = binds.clone();
    let calls = Arc::new(parking_lot::Mutex::new(Vec::<Value>::new()));
    let filtered = calls.clone();
    let client = Arc::new(tokio::sync::OnceCell::<Client>::new());
    let of_bind = client.clone();
    let filter = move |Json(body): Json<Value>| {
        filtered.lock().push(body.clone());
        async move { Json(json!({"NodeNames": body["NodeNames"], "FailedNodes": {}, "Error": ""})) }
    };
    let bind = move |Json(body): Json<Value>| {
        let (first, client) = (bound.fetch_add(1, Ordering::SeqCst) == 0, of_bind.clone());
        async move {
            if first {
                return Json(json!({"Error": "not today"}));
            }
            let text = |key: &str| body[key].as_str().unwrap().to_owned();
            let path =
                format!("/api/v1/namespaces/{}/pods/{}/binding", text("PodNamespace"), text("PodName"));
            let binding = json!({"metadata": {"name": text("PodName"), "uid": text("PodUID")}, "target": {"name": text("Node")}});
            json_client::create(client.get().unwrap(), &path, &binding).await.unwrap();
            Json(json!({"Error": ""}))
        }
    };
    let router = Router::new().route("/s/filter", post(filter)).route("/s/bind", post(bind));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/s", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await });
    let managed = vec!["nvidia.com/gpu".to_owned()];
    let cluster = start(Some(ExtenderConfig { url, managed, timeout: Duration::from_secs(5) })).await;
    client.set(cluster.running.client().unwrap()).ok().unwrap();

    cluster.create("plain", json!({"containers": [{"name": "c", "image": "i"}]})).await;
    cluster.until_phase("plain", "Running").await;
    assert!(calls.lock().is_empty(), "a pod without a managed resource is none of its business");
    cluster.create("p", gpu(json!(["run"]))).await;
    cluster.until_phase("p", "Running").await;
    assert_eq!(binds.load(Ordering::SeqCst), 2, "bound at the second attempt");
    let calls = calls.lock();
    assert_eq!((calls.len(), &calls[0]["Nodes"], &calls[0]["NodeNames"]), (2, &Value::Null, &json!(["n1"])));
    drop(cluster.stop);
}
