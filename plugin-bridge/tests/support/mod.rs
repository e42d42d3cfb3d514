//! A kubelet and an NVIDIA plugin in this process, over real gRPC and unix sockets, that follow what was seen of the real ones.

#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used, clippy::panic)]

pub mod kubelet;
pub mod nvidia;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Parser;
use gpu_migrate_plugin_bridge::agent::{self, AgentError};
use gpu_migrate_plugin_bridge::args::Args;
use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Cards of 80 GiB in the order of their minor numbers, four on each of two NUMA nodes.
pub fn inventory(folder: &Path, cards: &[usize]) -> PathBuf {
    let cards: Vec<Value> = (0..)
        .zip(cards)
        .map(|(minor, n)| {
            let (uuid, numa) = (uuid(*n), n / 4);
            json!({"uuid": uuid, "minor": minor, "memoryMiB": 81920, "numa": numa, "model": "NVIDIA A100-SXM4-80GB"})
        })
        .collect();
    let path = folder.join("inventory.json");
    std::fs::write(&path, json!({"cards": cards, "driverVersion": "550.1"}).to_string()).unwrap();
    path
}

pub fn uuid(card: usize) -> String {
    format!("GPU-0000000{card}-1111-2222-3333-00000000000{card}")
}

/// One machine: folders, a kubelet, NVIDIA's plugin, the agent, and the pods file that stands for the API server.
pub struct Machine {
    pub folder: tempfile::TempDir,
    pub kubelet: kubelet::Kubelet,
    pub pods: Arc<parking_lot::Mutex<Vec<Value>>>,
    agent: Option<(CancellationToken, JoinHandle<Result<(), AgentError>>)>,
    inventory: PathBuf,
    flags: Vec<String>,
}

impl Machine {
    pub async fn start() -> Self {
        Self::start_with(|_| Vec::new()).await
    }

    /// With further flags of the agent, given the machine's folder.
    pub async fn start_with(flags: impl FnOnce(&Path) -> Vec<String>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("device-plugins")).unwrap();
        std::fs::create_dir_all(folder.path().join("pod-resources")).unwrap();
        let inventory = inventory(folder.path(), &[0, 1, 2, 3, 4, 5, 6, 7]);
        let kubelet = kubelet::Kubelet::start(folder.path().to_path_buf());
        let flags = flags(folder.path());
        let mut machine = Self { kubelet, pods: Arc::default(), agent: None, inventory, flags, folder };
        machine.write_pods();
        machine.start_agent();
        machine
    }

    /// What an agent that starts from now on finds.
    pub fn set_cards(&self, cards: &[usize]) {
        inventory(self.folder.path(), cards);
    }

    pub fn plugins(&self) -> PathBuf {
        self.folder.path().join("device-plugins")
    }

    pub fn start_agent(&mut self) {
        let pods = self.folder.path().join("pods.json");
        let own = [
            "gpu-migrate-bridge".as_ref(),
            "--node-name=n1".as_ref(),
            "--metrics-bind=".as_ref(),
            "--kubelet-dir".as_ref(),
            self.folder.path().as_os_str(),
            "--pods-file".as_ref(),
            pods.as_os_str(),
            "--inventory".as_ref(),
            self.inventory.as_os_str(),
        ];
        let args = Args::parse_from(own.into_iter().chain(self.flags.iter().map(AsRef::as_ref)));
        let stop = CancellationToken::new();
        let of_agent = stop.clone();
        let agent = async move { agent::run(args, &Handle::current(), of_agent).await };
        self.agent = Some((stop, tokio::spawn(agent)));
    }

    /// As by SIGKILL: nothing is tidied up.
    pub async fn kill_agent(&mut self) {
        let (_, task) = self.agent.take().unwrap();
        task.abort();
        let _ = task.await;
    }

    pub async fn stop_agent(&mut self) -> Result<(), AgentError> {
        let (stop, task) = self.agent.take().unwrap();
        stop.cancel();
        task.await.unwrap()
    }

    fn write_pods(&self) {
        let list = json!({"apiVersion": "v1", "kind": "List", "items": *self.pods.lock()});
        let path = self.folder.path().join("pods.json");
        let beside = path.with_extension("tmp");
        std::fs::write(&beside, list.to_string()).unwrap();
        std::fs::rename(&beside, &path).unwrap();
    }

    /// Binds a pod to this node: `containers` are (name, limits).
    pub fn bind(&self, name: &str, containers: &[(&str, &[(&str, u32)])], annotations: &[(&str, &str)]) {
        let containers: Vec<Value> = containers
            .iter()
            .map(|(name, limits)| {
                let limits: serde_json::Map<String, Value> =
                    limits.iter().map(|(k, v)| ((*k).to_owned(), json!(v.to_string()))).collect();
                json!({"name": name, "resources": {"limits": limits, "requests": limits}})
            })
            .collect();
        let annotations: serde_json::Map<String, Value> =
            annotations.iter().map(|(k, v)| ((*k).to_owned(), json!(v))).collect();
        self.pods.lock().push(json!({
            "metadata": {"name": name, "namespace": "default", "uid": name, "annotations": annotations},
            "spec": {"nodeName": "n1", "containers": containers},
            "status": {"phase": "Pending"},
        }));
        self.write_pods();
    }

    pub fn set_phase(&self, name: &str, phase: &str) {
        for pod in self.pods.lock().iter_mut().filter(|p| p["metadata"]["name"] == name) {
            pod["status"]["phase"] = json!(phase);
        }
        self.write_pods();
    }

    pub fn delete(&self, name: &str) {
        self.pods.lock().retain(|p| p["metadata"]["name"] != name);
        self.write_pods();
    }
}

/// Waits until `holds` does, up to 10 s: nothing here is asserted about time.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
