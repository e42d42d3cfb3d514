//! What stands on the stage: the embedded cluster, and on it the real webhook (TLS), extender (HTTP), operator and node agents (gRPC on
//! unix sockets), each started as its own `main` starts it.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser;
use gpu_migrate_model::names;
use gpu_migrate_plugin_bridge::nvidia::SOCKET;
use gpu_migrate_runtime::trace::TraceArgs;
use kube::Client;
use serde_json::json;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::observer::Observer;
use super::process::Process;
use super::script::NodeScript;
use gpu_migrate_sim::cluster::api::ApiServer;
use gpu_migrate_sim::cluster::controllers;
use gpu_migrate_sim::cluster::kubelet::{Kubelet, NodeSpec, Pace};
use gpu_migrate_sim::cluster::scheduler::{ExtenderConfig, Scheduler, SchedulerConfig};
use gpu_migrate_sim::nvidia::{NvidiaPlugin, Trouble};

/// Namespace of our own parts.
const OWN: &str = "gpu-migrate-system";
/// What of the cluster a part needs before the next can start.
const PATIENCE: Duration = Duration::from_secs(60);

/// A part of the demo that is broken on purpose, so that tests can show that the observer would notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Fault {
    /// NVIDIA's plugin answers for its first card, whichever it is asked for.
    LyingPlugin,
}

/// Everything that runs.
pub(super) struct Stage {
    pub(super) client: Client,
    pub(super) scheduler: std::sync::Arc<Scheduler>,
    pub(super) observer: Observer,
    pub(super) nodes: BTreeMap<String, StageNode>,
    pub(super) kubeconfig: PathBuf,
    /// Its address.
    pub(super) status_page: String,
    parts: Vec<Process>,
    stop: CancellationToken,
}

/// A node.
pub(super) struct StageNode {
    pub(super) script: NodeScript,
    pub(super) cards: Vec<String>,
    pub(super) kubelet: Kubelet,
    agent: Option<Process>,
    arguments: Vec<String>,
    kept_checkpoint: Option<Vec<u8>>,
}

impl Stage {
    /// Builds it all below `folder`, and returns when it is ready for the first pod. The ports are the API server's and the status
    /// page's; 0 is any free one.
    pub(super) async fn build(
        folder: &Path,
        [port, status_port]: [u16; 2],
        nodes: &[NodeScript],
        trace: &TraceArgs,
        fault: Option<Fault>,
    ) -> anyhow::Result<Self> {
        let stop = CancellationToken::new();
        let api = ApiServer::default().serve(port, stop.clone()).await?;
        let client = api.client()?;
        let kubeconfig = folder.join("kubeconfig");
        std::fs::write(&kubeconfig, api.kubeconfig())?;
        prepare(&client).await?;

        let extender = free_port()?;
        let mut parts = vec![start_extender(&kubeconfig, extender, trace)?];
        parts.push(start_webhook(&kubeconfig, folder, trace)?);
        let status_port = if status_port == 0 { free_port()? } else { status_port };
        parts.push(start_operator(&kubeconfig, status_port)?);
        let status_page = format!("http://127.0.0.1:{status_port}");

        let (sender, happenings) = mpsc::unbounded_channel();
        let mut memory = BTreeMap::new();
        let mut stage_nodes = BTreeMap::new();
        for (number, script) in nodes.iter().enumerate() {
            let cards: Vec<String> = (0..script.cards).map(|card| uuid(number, card)).collect();
            memory.extend(cards.iter().map(|uuid| (uuid.clone(), script.memory_mib)));
            let node =
                start_node(folder, script, cards, &kubeconfig, &client, sender.clone(), trace, fault, &stop)
                    .await?;
            stage_nodes.insert(script.name.clone(), node);
        }
        let observer = Observer::start(&memory, happenings);
        controllers::start(&api, client.clone(), stop.clone());
        let dialect = names::Dialect::default();
        let config = SchedulerConfig {
            names: vec!["default-scheduler".into(), names::SCHEDULER.into()],
            extender: Some(ExtenderConfig {
                url: format!("http://127.0.0.1:{extender}/scheduler"),
                managed: vec![dialect.legacy, dialect.cores, dialect.memory],
                timeout: Duration::from_secs(30),
            }),
        };
        let scheduler = Scheduler::start(config, client.clone(), stop.clone());
        let stage =
            Self { client, scheduler, observer, nodes: stage_nodes, kubeconfig, status_page, parts, stop };
        stage.until_ready().await?;
        Ok(stage)
    }

    /// Fails as soon as a part has ended by itself.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        let agents = self.nodes.values().filter_map(|node| node.agent.as_ref());
        match self.parts.iter().chain(agents).find_map(Process::ended) {
            None => Ok(()),
            Some(how) => anyhow::bail!("a part of the demo ended: {how}"),
        }
    }

    /// All nodes offer all their cards both ways, and the webhook is registered.
    async fn until_ready(&self) -> anyhow::Result<()> {
        let path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations";
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            self.check()?;
            let hooks = gpu_migrate_sim::cluster::json_client::list(&self.client, path).await?;
            let hooked = hooks.iter().any(|hook| hook["webhooks"][0]["clientConfig"]["caBundle"].is_string());
            let nodes = gpu_migrate_sim::cluster::json_client::list(&self.client, "/api/v1/nodes").await?;
            let offered = |node: &serde_json::Value| {
                let dialect = names::Dialect::default();
                let has = |resource: &str| {
                    node["status"]["allocatable"][resource].as_str().is_some_and(|n| n != "0")
                };
                has(&dialect.legacy) && has(&dialect.cores) && has(&dialect.memory)
            };
            let shadows = gpu_migrate_sim::cluster::json_client::list(
                &self.client,
                "/apis/gpu-migrate.io/v1alpha1/gpushadows",
            )
            .await?;
            let told = shadows.iter().filter(|shadow| shadow["status"]["cards"].is_array()).count();
            if hooked
                && nodes.len() == self.nodes.len()
                && nodes.iter().all(offered)
                && told == self.nodes.len()
            {
                return Ok(());
            }
            anyhow::ensure!(
                tokio::time::Instant::now() < deadline,
                "the cluster is not ready after {PATIENCE:?}: webhook registered: {hooked}, nodes that offer cards: {} of {}, \
                 GPUShadows: {told}",
                nodes.iter().filter(|node| offered(node)).count(),
                self.nodes.len()
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl StageNode {
    /// Kills the agent and restarts it.
    pub(super) async fn crash_agent(&mut self, away: Duration) -> anyhow::Result<()> {
        self.agent = None;
        tokio::time::sleep(away).await;
        self.agent = Some(start_agent(&self.script.name, &self.arguments)?);
        Ok(())
    }

    /// Keeps a copy of the kubelet checkpoint.
    pub(super) fn copy_checkpoint(&mut self) -> anyhow::Result<()> {
        let checkpoint = self.checkpoint();
        self.kept_checkpoint =
            Some(std::fs::read(&checkpoint).with_context(|| checkpoint.display().to_string())?);
        Ok(())
    }

    /// Kills the agent, puts the kept copy in place of the kubelet checkpoint, and starts the agent.
    pub(super) async fn stale_checkpoint(&mut self, away: Duration) -> anyhow::Result<()> {
        let old = self
            .kept_checkpoint
            .clone()
            .context("staleCheckpoint: no copyCheckpoint of this node came before")?;
        self.agent = None;
        tokio::time::sleep(away).await;
        std::fs::write(self.checkpoint(), old)?;
        self.agent = Some(start_agent(&self.script.name, &self.arguments)?);
        Ok(())
    }

    fn checkpoint(&self) -> PathBuf {
        self.kubelet.root().join("device-plugins/kubelet_internal_checkpoint")
    }
}

async fn prepare(client: &Client) -> anyhow::Result<()> {
    for definition in gpu_migrate_model::crd::definitions() {
        super::objects::apply(client, &serde_json::to_value(definition)?).await?;
    }
    let own = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": OWN}});
    super::objects::apply(client, &own).await
}

/// The flags by which a part is told where traces go.
fn flags(trace: &TraceArgs) -> Option<String> {
    trace.otlp_endpoint.as_ref().map(|endpoint| format!("--otlp-endpoint={endpoint}"))
}

/// A port that is free now. Whoever takes it before us makes the part fail, and the demo says so.
fn free_port() -> std::io::Result<u16> {
    Ok(std::net::TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?.local_addr()?.port())
}

fn start_extender(kubeconfig: &Path, port: u16, trace: &TraceArgs) -> anyhow::Result<Process> {
    let bind = format!("127.0.0.1:{port}");
    let kubeconfig = kubeconfig.display().to_string();
    let arguments = ["extender", "--kubeconfig", &kubeconfig, "--bind", &bind, "--metrics-bind", ""];
    let arguments = arguments.map(str::to_owned).into_iter().chain(flags(trace));
    let arguments = gpu_migrate_admission_ext::run::Args::try_parse_from(arguments)?;
    Ok(Process::start("extender", gpu_migrate_admission_ext::run::run(arguments, CancellationToken::new()))?)
}

fn start_webhook(kubeconfig: &Path, folder: &Path, trace: &TraceArgs) -> anyhow::Result<Process> {
    let bind = format!("127.0.0.1:{}", free_port()?);
    let (kubeconfig, url) = (kubeconfig.display().to_string(), format!("https://{bind}"));
    let tls = folder.join("webhook-tls");
    std::fs::create_dir_all(&tls)?;
    let tls = tls.display().to_string();
    let arguments = [
        "webhook",
        "--kubeconfig",
        &kubeconfig,
        "--bind",
        &bind,
        "--metrics-bind",
        "",
        "--namespace",
        OWN,
        "--tls-dir",
        &tls,
        "--register",
        "--service-url",
        &url,
    ];
    let arguments = arguments.map(str::to_owned).into_iter().chain(flags(trace));
    let arguments = gpu_migrate_webhook::args::Args::try_parse_from(arguments)?;
    Ok(Process::start("webhook", gpu_migrate_webhook::run::run(arguments, CancellationToken::new()))?)
}

fn start_operator(kubeconfig: &Path, status_port: u16) -> anyhow::Result<Process> {
    let kubeconfig = kubeconfig.display().to_string();
    let status_bind = format!("127.0.0.1:{status_port}");
    let arguments = [
        "operator",
        "--kubeconfig",
        &kubeconfig,
        "--metrics-bind",
        "",
        "--namespace",
        OWN,
        "--identity",
        "demo",
        "--status-bind",
        &status_bind,
        "--status-without-token",
        // Nobody watches a wave of seconds for minutes.
        "--interval-milliseconds",
        "200",
    ];
    let arguments = gpu_migrate_operator::args::Args::try_parse_from(arguments)?;
    Ok(Process::start("operator", gpu_migrate_operator::run::run(arguments, CancellationToken::new()))?)
}

fn start_agent(node: &str, arguments: &[String]) -> anyhow::Result<Process> {
    let arguments = gpu_migrate_plugin_bridge::args::Args::try_parse_from(arguments)?;
    let main = async move {
        let others = tokio::runtime::Handle::current();
        Ok(gpu_migrate_plugin_bridge::agent::run(arguments, &others, CancellationToken::new()).await?)
    };
    Ok(Process::start(&format!("agent {node}"), main)?)
}

#[allow(clippy::too_many_arguments)]
async fn start_node(
    folder: &Path,
    script: &NodeScript,
    cards: Vec<String>,
    kubeconfig: &Path,
    client: &Client,
    observer: mpsc::UnboundedSender<gpu_migrate_sim::cluster::kubelet::Happening>,
    trace: &TraceArgs,
    fault: Option<Fault>,
    stop: &CancellationToken,
) -> anyhow::Result<StageNode> {
    let root = folder.join(&script.name);
    let inventory = root.join("inventory.yaml");
    std::fs::create_dir_all(&root)?;
    std::fs::write(&inventory, inventory_of(script, &cards).to_string())?;
    let spec = NodeSpec {
        name: script.name.clone(),
        labels: BTreeMap::from([(names::GPU_PRODUCT.to_owned(), script.model.clone())]),
        cpu: 64,
        memory_gib: 512,
    };
    let kubelet =
        Kubelet::start(spec, Pace::default(), &root, client.clone(), observer, stop.clone()).await?;
    let text = |path: &Path| path.display().to_string();
    let arguments = [
        "bridge",
        "--node-name",
        &script.name,
        "--kubelet-dir",
        &text(&root),
        "--inventory",
        &text(&inventory),
        "--kubeconfig",
        &text(kubeconfig),
        "--metrics-bind",
        "",
    ];
    let arguments: Vec<String> = arguments.map(str::to_owned).into_iter().chain(flags(trace)).collect();
    let plugin = NvidiaPlugin::new(cards.clone());
    if fault == Some(Fault::LyingPlugin) {
        plugin.set_trouble(Trouble::Lies);
    }
    tokio::spawn(plugin.run(root.join("device-plugins"), SOCKET.into(), stop.clone()));
    let agent = Some(start_agent(&script.name, &arguments)?);
    Ok(StageNode { script: script.clone(), cards, kubelet, agent, arguments, kept_checkpoint: None })
}

fn inventory_of(script: &NodeScript, cards: &[String]) -> serde_json::Value {
    let card = |(minor, uuid): (usize, &String)| json!({"uuid": uuid, "minor": minor, "memoryMiB": script.memory_mib, "model": script.model, "numa": minor * 2 / cards.len()});
    // JSON is YAML.
    json!({"cards": cards.iter().enumerate().map(card).collect::<Vec<_>>(), "driverVersion": "simulated", "cudaVersion": "simulated"})
}

fn uuid(node: usize, card: usize) -> String {
    format!("GPU-{node:08x}-0000-4000-8000-{card:012x}")
}
