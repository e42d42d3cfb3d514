//! What runs on top of Kubernetes: NVIDIA's plugin alone, or gpu-migrate with that plugin behind the node agent.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result};
use gpu_migrate_model::names::Dialect;
use k8s_openapi::{
    api::{
        admissionregistration::v1::MutatingWebhookConfiguration,
        authentication::v1::TokenRequest,
        core::v1::{Node, Secret, ServiceAccount},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    jiff::Timestamp,
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, PostParams},
};
use serde_json::{Value, json};

use crate::{
    audit, binaries, cleanup,
    cluster::{Cluster, TIMEOUT},
    configs::{NODE, NodeSetup, on_node},
    device_nodes::DeviceNodes,
    http,
    layout::KUBELET_ROOT,
    manifests,
    process::ProcessSpec,
    proxy::ServiceProxy,
    wait::Seen,
};

/// Cards of the NVML stand-in.
pub const CARDS: u64 = 8;
/// The name of the webhook's registration.
pub const WEBHOOK: &str = "gpu-migrate";
/// Where NVIDIA's plugin registers with the node agent: the `@` in the name makes a stock tonic server accept a Go client.
pub const BRIDGE_SOCKET: &str = "/var/lib/kubelet/device-plugins/gpu-migrate@kubelet.sock";

/// The webhook's other replica, where there are two.
pub const SECOND_WEBHOOK: &str = "gpu-migrate-webhook-2";
/// The extender's other replica, where there are two.
const SECOND_EXTENDER: &str = "gpu-migrate-extender-2";
/// The stand-in for NVIDIA's DRA driver.
const DRA_DRIVER: &str = "nvidia-dra-driver";
const COLLECTOR: &str = "otel-collector";
const PROMETHEUS: &str = "prometheus";
/// Two operators, of which one leads.
pub const OPERATORS: [&str; 2] = ["gpu-migrate-operator-a", "gpu-migrate-operator-b"];

/// The namespace of our own objects.
pub const SYSTEM_NAMESPACE: &str = "gpu-migrate-system";

/// A set of components on top of Kubernetes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Nothing on a new cluster: for scenarios that install by the documents.
    Bare,
    /// NVIDIA's device plugin at the kubelet, the stock scheduler: a cluster before the migration.
    Legacy,
    /// Webhook, extender and node agent, with NVIDIA's plugin behind the node agent.
    Bridged,
}

impl Cluster {
    /// Brings the cluster to a stage; does nothing if it is there. A bare one is a new one each time.
    pub async fn enter(&mut self, stage: Stage) -> Result<()> {
        if self.stage == Some(stage) && stage != Stage::Bare {
            return Ok(());
        }
        if self.is_lost() {
            self.recreate().await?;
        }
        self.leave().await?;
        if stage == Stage::Bare && self.used {
            self.recreate().await?;
        }
        self.used = true;
        match stage {
            Stage::Bare => Ok(()),
            Stage::Legacy => self.enter_legacy().await,
            Stage::Bridged => self.enter_bridged().await,
        }
        .with_context(|| format!("cannot enter the stage {stage:?}"))?;
        self.stage = Some(stage);
        Ok(())
    }

    /// After a failure the state of the components is unknown: the next [`Cluster::enter`] restarts them.
    pub fn mark_unknown(&mut self) {
        self.needs_recreation = true;
        self.stage = None;
    }

    async fn leave(&mut self) -> Result<()> {
        self.stage = None;
        self.device_nodes = None;
        self.stop_pod_programs()?;
        for name in [
            "gpu-migrate-webhook",
            SECOND_WEBHOOK,
            DRA_DRIVER,
            COLLECTOR,
            PROMETHEUS,
            "nvidia-device-plugin",
            "gpu-migrate-bridge",
            "gpu-migrate-extender",
            SECOND_EXTENDER,
            OPERATORS[0],
            OPERATORS[1],
        ] {
            self.remove(name)?;
        }
        let hooks: Api<MutatingWebhookConfiguration> = Api::all(self.client.clone());
        if hooks.get_opt(WEBHOOK).await?.is_some() {
            hooks.delete(WEBHOOK, &DeleteParams::default()).await?;
        }
        Ok(())
    }

    async fn enter_legacy(&mut self) -> Result<()> {
        self.restart_scheduler(None)?;
        let kubelet = format!("{KUBELET_ROOT}/device-plugins/kubelet.sock");
        self.add(self.nvidia_plugin("nvidia-device-plugin").env("KUBELET_SOCKET", kubelet))?;
        self.wait_for_allocatable(&[(&Dialect::default().legacy, CARDS)]).await
    }

    async fn enter_bridged(&mut self) -> Result<()> {
        let bin = binaries::ours()?;
        self.apply_crds().await?;
        self.apply_rights().await?;
        self.add(self.extender(&bin)?)?;
        self.restart_scheduler(Some(self.setup.ports.extender[0]))?;
        self.add(self.bridge(&bin).await?)?;
        self.start_nvidia_plugin_behind_agent().await?;
        self.add(self.webhook(&bin)?)?;
        self.wait_for_webhook().await?;
        self.wait_for_both_kinds().await
    }

    /// From the stage Legacy: the extender, and on [`NODE`] alone the node agent, over NVIDIA's plugin as it runs.
    pub async fn bridge_over_plugin(&mut self) -> Result<()> {
        // It is none of the stages any more.
        self.stage = None;
        let bin = binaries::ours()?;
        self.apply_crds().await?;
        self.apply_rights().await?;
        self.add(self.extender(&bin)?)?;
        self.restart_scheduler(Some(self.setup.ports.extender[0]))?;
        self.add(self.bridge(&bin).await?.arg("--register-over-nvidia-plugin"))
    }

    /// Starts NVIDIA's plugin at the kubelet of another node.
    pub fn start_nvidia_plugin_on(&mut self, node: &NodeSetup) -> Result<()> {
        let plugin = self.nvidia_plugin(on_node("nvidia-device-plugin", node.name));
        self.add(node.place(plugin.env("NODE_NAME", node.name).env("NVML_STAND_IN_NODE", "1")))
    }

    /// Starts NVIDIA's plugin as soon as the node agent takes its registration.
    pub async fn start_nvidia_plugin_behind_agent(&mut self) -> Result<()> {
        self.agent_takes_registrations().await?;
        self.add(self.nvidia_plugin("nvidia-device-plugin").env("KUBELET_SOCKET", BRIDGE_SOCKET))
    }

    async fn agent_takes_registrations(&mut self) -> Result<()> {
        self.until("the node agent's registration socket", TIMEOUT, || async {
            Ok(Seen::from_bool(Path::new(BRIDGE_SOCKET).exists(), || format!("no {BRIDGE_SOCKET}")))
        })
        .await
    }

    /// From here on the node has its cards' device nodes, and the node agent answers in these ways (`--device-list-strategy`) with CDI
    /// specifications of its own. [`Cluster::use_environment`] is the way back.
    ///
    /// # Errors
    /// The nodes cannot be made, or the node does not serve afterwards.
    pub async fn use_cdi(&mut self, strategies: &str) -> Result<()> {
        self.device_nodes = Some(DeviceNodes::make(&self.setup.layout)?);
        let specifications = self.setup.layout.cdi();
        let flags =
            [("device-list-strategy", Path::new(strategies)), ("cdi-spec-dir", specifications.as_path())];
        self.restart_agent_with(&flags, &[]).await
    }

    /// The node agent as in the stage again.
    ///
    /// # Errors
    /// The node does not serve afterwards.
    pub async fn use_environment(&mut self) -> Result<()> {
        self.restart_agent_with(&[], &[]).await?;
        self.device_nodes = None;
        Ok(())
    }

    /// Starts OpenTelemetry's collector, which sends on what it receives, as JSON, to this port; where it receives by gRPC.
    ///
    /// # Errors
    /// It cannot be started, or does not listen.
    pub async fn start_collector(&mut self, to: u16) -> Result<String> {
        let port = self.setup.ports.collector;
        let config = json!({
            "receivers": {"otlp": {"protocols": {"grpc": {"endpoint": format!("127.0.0.1:{port}")}}}},
            "exporters": {"otlp_http": {"endpoint": format!("http://127.0.0.1:{to}"), "encoding": "json", "compression": "none"}},
            "service": {
                "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["otlp_http"]}},
                "telemetry": {"metrics": {"level": "none"}},
            },
        });
        let file = self.setup.layout.write("collector.yaml", config.to_string())?;
        let collector = ProcessSpec::new(COLLECTOR, &self.setup.binaries.collector);
        self.add(collector.flag("config", format!("file:{}", file.display())))?;
        self.until("the collector to listen", TIMEOUT, || async {
            let connected = tokio::net::TcpStream::connect(("127.0.0.1", port)).await;
            Ok(Seen::Done(connected.map(drop)?))
        })
        .await?;
        Ok(format!("http://127.0.0.1:{port}"))
    }

    /// # Errors
    /// It does not end.
    pub fn stop_collector(&mut self) -> Result<()> {
        self.remove(COLLECTOR)
    }

    /// Starts a Prometheus that reads all our components and the apiserver every three seconds and evaluates the chart's alerts; its address.
    ///
    /// # Errors
    /// It cannot be started, or is not ready.
    pub async fn start_prometheus(&mut self) -> Result<String> {
        let (setup, ports) = (&self.setup, self.setup.ports);
        let certificate = setup.pki.client("prometheus", "system:masters")?;
        let ours = [ports.webhook[1], ports.extender[1], ports.bridge_metrics, ports.operators[0]];
        let target = |port: u16| format!("127.0.0.1:{port}");
        let rules = crate::package_folder().join("../../deploy/chart/gpu-migrate/files/alerts.yaml");
        let config = json!({
            "global": {"scrape_interval": "3s", "evaluation_interval": "3s"},
            "rule_files": [rules.canonicalize()?],
            "scrape_configs": [
                {"job_name": "gpu-migrate", "honor_labels": true, "static_configs": [{"targets": ours.map(target)}]},
                {"job_name": "apiserver", "scheme": "https",
                    "tls_config": {"ca_file": setup.pki.ca(), "cert_file": certificate.cert, "key_file": certificate.key},
                    "static_configs": [{"targets": [target(ports.apiserver)]}]},
            ],
        });
        let file = setup.layout.write("prometheus.yaml", config.to_string())?;
        let address = target(ports.prometheus);
        self.add(
            ProcessSpec::new(PROMETHEUS, &setup.binaries.prometheus)
                .flag("config.file", file)
                .flag("storage.tsdb.path", setup.layout.file("prometheus"))
                .flag("web.listen-address", &address),
        )?;
        self.until("Prometheus to be ready", TIMEOUT, || async {
            Ok(Seen::Done(http::get(ports.prometheus, "/-/ready").await.map(drop)?))
        })
        .await?;
        Ok(format!("http://{address}"))
    }

    /// # Errors
    /// It does not end.
    pub fn stop_prometheus(&mut self) -> Result<()> {
        self.remove(PROMETHEUS)
    }

    /// Starts the stand-in for NVIDIA's DRA driver: [`CARDS`] devices `gpu-<minor>` on [`NODE`].
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start_dra_driver(&mut self) -> Result<()> {
        let driver = ProcessSpec::new(DRA_DRIVER, &self.setup.binaries.dra_driver);
        self.add(
            driver
                .flag("kubeconfig", &self.setup.admin)
                .flag("node", NODE)
                .flag("cards", CARDS.to_string())
                .flag("cdi", self.setup.layout.cdi()),
        )
    }

    /// Stops it. No claim may be in use.
    ///
    /// # Errors
    /// It does not end.
    pub fn stop_dra_driver(&mut self) -> Result<()> {
        self.remove(DRA_DRIVER)
    }

    /// Ends everything on the node as a reboot does, containers included, and starts it again.
    ///
    /// # Errors
    /// Something does not end, or does not serve afterwards.
    pub async fn reboot_node(&mut self) -> Result<()> {
        for program in ["kubelet", "containerd", "nvidia-device-plugin", "gpu-migrate-bridge"] {
            self.kill(program)?;
        }
        let layout = self.setup.layout.clone();
        cleanup::forget_containers(&layout)?;
        if let Some(nodes) = &mut self.device_nodes {
            nodes.renew(&layout)?;
        }
        // NVIDIA's plugin would find the former one and end; the kubelet would restart its container until the agent serves.
        std::fs::remove_file(BRIDGE_SOCKET).with_context(|| format!("cannot remove {BRIDGE_SOCKET}"))?;
        self.start_component("containerd")?;
        self.containerd_serves("containerd").await?;
        self.start_component("gpu-migrate-bridge")?;
        self.start_component("kubelet")?;
        self.agent_takes_registrations().await?;
        self.start_component("nvidia-device-plugin")?;
        self.wait_until_serving().await
    }

    /// Waits until the node offers all its cards, whole and in shares.
    pub async fn wait_for_both_kinds(&mut self) -> Result<()> {
        let dialect = Dialect::default();
        self.wait_for_allocatable(&[(&dialect.legacy, CARDS), (&dialect.cores, CARDS * 100)]).await
    }

    /// Runs NVIDIA's plugin anew, with this `KUBELET_SOCKET` or without the variable.
    ///
    /// # Errors
    /// It does not end, or does not start.
    pub fn run_nvidia_plugin(&mut self, registrar: Option<&str>) -> Result<()> {
        const NAME: &str = "nvidia-device-plugin";
        self.remove(NAME)?;
        let plugin = self.nvidia_plugin(NAME);
        self.add(match registrar {
            Some(socket) => plugin.env("KUBELET_SOCKET", socket),
            None => plugin,
        })
    }

    /// The namespace, the accounts and their rights as `deploy/` has them.
    async fn apply_rights(&self) -> Result<()> {
        for object in manifests::objects("base")?.iter().filter(|object| manifests::is_right(object)) {
            manifests::apply(&self.client, object, false).await?;
        }
        Ok(())
    }

    /// Waits until the node has these amounts allocatable: plugins are registered and the kubelet has reported it.
    pub async fn wait_for_allocatable(&mut self, amounts: &[(&str, u64)]) -> Result<()> {
        self.wait_for_allocatable_on(NODE, amounts).await
    }

    /// The same of any node.
    pub async fn wait_for_allocatable_on(&mut self, node: &str, amounts: &[(&str, u64)]) -> Result<()> {
        for (resource, amount) in amounts {
            let nodes: Api<Node> = Api::all(self.client.clone());
            self.until(&format!("{amount} {resource} on {node}"), TIMEOUT, || async {
                let node = nodes.get(node).await?;
                let all = node.status.and_then(|s| s.allocatable).unwrap_or_default();
                Ok(Seen::from_bool(all.get(*resource).is_some_and(|q| q.0 == amount.to_string()), || {
                    format!("{all:?}")
                }))
            })
            .await?;
        }
        Ok(())
    }

    /// Waits until the apiserver would call the webhook and trust it.
    pub async fn wait_for_webhook(&mut self) -> Result<()> {
        let hooks: Api<MutatingWebhookConfiguration> = Api::all(self.client.clone());
        self.until("the webhook to be registered with its CA", TIMEOUT, || async {
            let hook = hooks.get(WEBHOOK).await?;
            let trusted = hook.webhooks.iter().flatten().all(|w| w.client_config.ca_bundle.is_some());
            Ok(Seen::from_bool(trusted && hook.webhooks.is_some(), || format!("{:?}", hook.webhooks)))
        })
        .await
    }

    /// Waits, after a kill or restart, until both plugins serve and the kubelet has reported it.
    pub async fn wait_until_serving(&mut self) -> Result<()> {
        let port = self.setup.ports.bridge_metrics;
        self.until("the node agent to be ready", TIMEOUT, || async {
            Ok(Seen::Done(http::get(port, "/readyz").await.map(drop)?))
        })
        .await?;
        // The node's status may still be of before the restart: only a newer one counts. Its time is in seconds.
        let since = Timestamp::now() + Duration::from_secs(1);
        let nodes: Api<Node> = Api::all(self.client.clone());
        let dialect = Dialect::default();
        self.until("both kinds of devices to be offered again", TIMEOUT, || async {
            let status = nodes.get(NODE).await?.status.unwrap_or_default();
            let heartbeat = status
                .conditions
                .iter()
                .flatten()
                .find(|c| c.type_ == "Ready")
                .and_then(|c| c.last_heartbeat_time.clone());
            let offered = status.allocatable.unwrap_or_default();
            let some = |name: &str| offered.get(name).is_some_and(|q| q.0 != "0");
            let fresh = heartbeat.as_ref().is_some_and(|time| time.0 >= since);
            Ok(Seen::from_bool(fresh && some(&dialect.legacy) && some(&dialect.cores), || {
                format!("{offered:?} at {heartbeat:?}")
            }))
        })
        .await
    }

    /// Restarts the scheduler, with or without an extender at some port.
    pub fn restart_scheduler(&mut self, extender: Option<u16>) -> Result<()> {
        let recipe = self.setup.scheduler(extender)?;
        let scheduler = self.component("kube-scheduler")?;
        scheduler.stop()?;
        scheduler.set_spec(recipe);
        scheduler.start()
    }

    pub(crate) fn nvidia_plugin(&self, name: impl Into<String>) -> ProcessSpec {
        ProcessSpec::new(name, &self.setup.binaries.nvidia_plugin)
            .env("NODE_NAME", NODE)
            .env("LD_LIBRARY_PATH", &self.setup.binaries.nvml)
            .env("NVML_STAND_IN_STATE", self.setup.layout.nvml_faults())
            .flag("device-discovery-strategy", "nvml")
    }

    async fn bridge(&self, bin: &Path) -> Result<ProcessSpec> {
        let kubeconfig = self.kubeconfig_on_node("gpu-migrate-bridge", NODE).await?;
        Ok(self
            .ours_with(
                "gpu-migrate-bridge",
                "gpu-migrate-bridge",
                bin,
                self.setup.ports.bridge_metrics,
                &kubeconfig,
            )
            .flag("node-name", NODE)
            .flag("kubelet-dir", KUBELET_ROOT)
            .flag("inventory", "nvml")
            .env("LD_LIBRARY_PATH", &self.setup.binaries.nvml)
            .env("NVML_STAND_IN_STATE", self.setup.layout.nvml_faults()))
    }

    /// Restarts the node agent with these flags and variables besides its own, and waits until it serves.
    ///
    /// # Errors
    /// It does not end, or does not serve.
    pub async fn restart_agent_with(
        &mut self,
        flags: &[(&str, &Path)],
        variables: &[(&str, &str)],
    ) -> Result<()> {
        let mut recipe = self.bridge(&binaries::ours()?).await?;
        recipe = flags.iter().fold(recipe, |recipe, (name, value)| recipe.flag(name, value));
        recipe = variables.iter().fold(recipe, |recipe, (name, value)| recipe.env(*name, value));
        let agent = self.component("gpu-migrate-bridge")?;
        agent.stop()?;
        agent.set_spec(recipe);
        self.start_component("gpu-migrate-bridge")?;
        self.wait_until_serving().await
    }

    fn extender(&self, bin: &Path) -> Result<ProcessSpec> {
        self.extender_at(bin, self.setup.ports.extender)
    }

    fn extender_at(&self, bin: &Path, [port, metrics]: [u16; 2]) -> Result<ProcessSpec> {
        Ok(self.ours("gpu-migrate-extender", bin, metrics)?.flag("bind", format!("127.0.0.1:{port}")))
    }

    /// The extender alone, for a control plane without a node; [`Cluster::restart_scheduler`] has the scheduler ask it.
    pub async fn add_extender(&mut self) -> Result<()> {
        self.apply_rights().await?;
        // For measurements: without a log line for each call.
        self.add(self.extender(&binaries::ours()?)?.env("GPU_MIGRATE_LOG", "info"))?;
        let health = self.setup.ports.extender[1];
        self.until("the extender to be ready", TIMEOUT, || async {
            Ok(Seen::Done(http::get(health, "/readyz").await.map(drop)?))
        })
        .await
    }

    /// Replaces the extender by two replicas of which one leads, behind a Service, and has the scheduler ask that. The
    /// replicas' names, in the order of their ports.
    pub async fn two_extenders(&mut self) -> Result<(ServiceProxy, [&'static str; 2])> {
        let names = self.two_extenders_with("--leader-elect")?;
        let ports = [self.setup.ports.extender, self.setup.ports.second_extender];
        let service = ServiceProxy::start(ports.to_vec()).await?;
        self.restart_scheduler(Some(service.port()))?;
        Ok((service, names))
    }

    /// Replaces the extender by two, each to be called by a scheduler of its own. Their names, in the order of their ports.
    pub fn extenders_beside_schedulers(&mut self) -> Result<[&'static str; 2]> {
        self.two_extenders_with("--beside-scheduler")
    }

    fn two_extenders_with(&mut self, election: &str) -> Result<[&'static str; 2]> {
        let bin = binaries::ours()?;
        let names = ["gpu-migrate-extender", SECOND_EXTENDER];
        self.remove(names[0])?;
        let ports = [self.setup.ports.extender, self.setup.ports.second_extender];
        for (name, ports) in names.into_iter().zip(ports) {
            let mut recipe = self.extender_at(&bin, ports)?;
            recipe.name = name.into();
            self.add(recipe.arg(election).flag("namespace", SYSTEM_NAMESPACE).flag("identity", name))?;
        }
        Ok(names)
    }

    /// Returns to one extender, with further flags.
    pub fn one_extender(&mut self, flags: &[(&str, &str)]) -> Result<()> {
        self.remove(SECOND_EXTENDER)?;
        self.remove("gpu-migrate-extender")?;
        let recipe = self.extender(&binaries::ours()?)?;
        self.add(flags.iter().fold(recipe, |recipe, (name, value)| recipe.flag(name, value)))?;
        self.restart_scheduler(Some(self.setup.ports.extender[0]))
    }

    /// Restarts the webhook with further flags and a new CA, and waits until it is ready.
    pub async fn restart_webhook(&mut self, flags: &[(&str, &str)]) -> Result<()> {
        let recipe = self.webhook(&binaries::ours()?)?;
        self.restart_webhook_as(flags.iter().fold(recipe, |recipe, (name, value)| recipe.flag(name, value)))
            .await
    }

    /// The same in a cgroup, or in none, and without a log line for each call.
    pub async fn restart_webhook_in(&mut self, cgroup: Option<&Path>) -> Result<()> {
        let recipe = self.webhook(&binaries::ours()?)?.env("GPU_MIGRATE_LOG", "info");
        self.restart_webhook_as(match cgroup {
            Some(folder) => recipe.in_cgroup(folder),
            None => recipe,
        })
        .await
    }

    async fn restart_webhook_as(&mut self, recipe: ProcessSpec) -> Result<()> {
        let webhook = self.component("gpu-migrate-webhook")?;
        webhook.stop()?;
        webhook.set_spec(recipe);
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), SYSTEM_NAMESPACE);
        secrets.delete_collection(&DeleteParams::default(), &ListParams::default()).await?;
        self.start_component("gpu-migrate-webhook")?;
        self.wait_for_ready_webhook(self.setup.ports.webhook).await
    }

    /// Starts another replica with flags of its own, as an upgrade does, and waits until it is ready.
    pub async fn add_second_webhook(&mut self, flags: &[(&str, &str)]) -> Result<()> {
        let ports = self.setup.ports.second_webhook;
        let recipe = self.webhook_at(SECOND_WEBHOOK, &binaries::ours()?, ports)?;
        self.add(flags.iter().fold(recipe, |recipe, (name, value)| recipe.flag(name, value)))?;
        self.wait_for_ready_webhook(ports).await
    }

    async fn wait_for_ready_webhook(&mut self, [_, port]: [u16; 2]) -> Result<()> {
        self.until("the webhook to be ready", TIMEOUT, || async {
            Ok(Seen::Done(http::get(port, "/readyz").await.map(drop)?))
        })
        .await
    }

    /// Starts so many of [`OPERATORS`], with the shortest Lease, so that another takes over within seconds, and further flags.
    pub fn add_operators(&mut self, count: usize, flags: &[(&str, &str)]) -> Result<()> {
        let bin = binaries::ours()?;
        for (name, port) in OPERATORS.iter().zip(self.setup.ports.operators).take(count) {
            let recipe = self
                .ours_as("gpu-migrate-operator", name, &bin, port)?
                .flag("namespace", SYSTEM_NAMESPACE)
                .flag("identity", name)
                .flag("lease-seconds", "5");
            self.add(flags.iter().fold(recipe, |recipe, (name, value)| recipe.flag(name, value)))?;
        }
        Ok(())
    }

    fn webhook(&self, bin: &Path) -> Result<ProcessSpec> {
        self.webhook_at("gpu-migrate-webhook", bin, self.setup.ports.webhook)
    }

    fn webhook_at(&self, name: &str, bin: &Path, [port, metrics]: [u16; 2]) -> Result<ProcessSpec> {
        Ok(self
            .ours_as("gpu-migrate-webhook", name, bin, metrics)?
            .flag("bind", format!("127.0.0.1:{port}"))
            .flag("namespace", SYSTEM_NAMESPACE)
            .arg("--register")
            .flag("service-url", format!("https://127.0.0.1:{port}"))
            .flag("drain-delay", "1s")
            .flag("drain-timeout", "3s"))
    }

    /// One of our programs, under its own account.
    fn ours(&self, name: &'static str, bin: &Path, metrics: u16) -> Result<ProcessSpec> {
        self.ours_as(name, name, bin, metrics)
    }

    /// One of several replicas, distinguished by its name in the logs and in the audit.
    fn ours_as(&self, program: &str, name: &str, bin: &Path, metrics: u16) -> Result<ProcessSpec> {
        let kubeconfig =
            self.setup.pki.kubeconfig(self.setup.ports.apiserver, &audit::account(program), name)?;
        Ok(self.ours_with(program, name, bin, metrics, &kubeconfig))
    }

    fn ours_with(
        &self,
        program: &str,
        name: &str,
        bin: &Path,
        metrics: u16,
        kubeconfig: &Path,
    ) -> ProcessSpec {
        ProcessSpec::new(name, bin.join(program))
            .flag("kubeconfig", kubeconfig)
            .flag("metrics-bind", format!("127.0.0.1:{metrics}"))
            .env("GPU_MIGRATE_LOG", "debug,hyper=info,h2=info,tower=info,rustls=info,kube_client=info")
    }

    /// A kubeconfig with a token of a program's account that names a node, as the kubelet gives it to pods there. It is bound to the
    /// Node instead of a pod, so that it outlives pods.
    ///
    /// # Errors
    /// The API server issues none.
    pub async fn kubeconfig_on_node(&self, program: &str, node: &str) -> Result<PathBuf> {
        let uid = Api::<Node>::all(self.client.clone()).get_metadata(node).await?.uid();
        let bound = json!({"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid});
        self.kubeconfig_of_token(&format!("{program}.{node}"), program, &bound).await
    }

    /// The same without a node.
    ///
    /// # Errors
    /// The API server issues no token.
    pub async fn kubeconfig_without_node(&self, program: &str) -> Result<PathBuf> {
        self.kubeconfig_of_token(&format!("{program}.unbound"), program, &json!(null)).await
    }

    async fn kubeconfig_of_token(&self, file: &str, program: &str, bound: &Value) -> Result<PathBuf> {
        let request: TokenRequest = serde_json::from_value(
            json!({"metadata": {}, "spec": {"audiences": [], "boundObjectRef": bound, "expirationSeconds": 24 * 3600}}),
        )?;
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), SYSTEM_NAMESPACE);
        let issued = accounts.create_token_request(program, &PostParams::default(), &request).await?;
        let token = issued.status.context("a token was asked for")?.token;
        self.setup.pki.kubeconfig_for_token(self.setup.ports.apiserver, file, &token)
    }

    /// Applies the CRDs that we ship, and waits until the API serves them.
    pub async fn apply_crds(&mut self) -> Result<()> {
        let api: Api<CustomResourceDefinition> = Api::all(self.client.clone());
        for crd in manifests::objects("crds")? {
            manifests::apply(&self.client, &crd, false).await?;
            let name = crd["metadata"]["name"].as_str().context("a CRD has a name")?.to_owned();
            self.until(&format!("{name} to be established"), Duration::from_secs(30), || async {
                let crd = api.get(&name).await?;
                let conditions = crd.status.as_ref().and_then(|s| s.conditions.clone()).unwrap_or_default();
                let established = conditions.iter().any(|c| c.type_ == "Established" && c.status == "True");
                Ok(Seen::from_bool(established, || format!("{} {conditions:?}", crd.name_any())))
            })
            .await?;
        }
        Ok(())
    }
}
