//! Our programs on behalf of their pods: Kubernetes makes pods from `deploy/` unchanged, and the program of each container runs
//! as a process of this machine next to its pod.
//!
//! A scenario that kills or freezes a program needs its process, so each image that the manifests name is a stand-in here that
//! only waits (`pods.rs` has the scenario with our images). The program itself
//! is a process of this machine, started when its pod runs and stopped when its pod is deleted, with the arguments and variables of
//! its container, at its pod's address and with its ServiceAccount's rights. So probes, replicas, rollouts, scaling and
//! deletion are Kubernetes' own, and the probes are answered by the programs: the pod network of these scenarios leads to
//! this machine's loopback. The differences are listed at `Cluster::process_of`.

use std::{collections::BTreeSet, net::Ipv4Addr, process::Command};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{ConfigMap, Container, EnvVar, Pod};
use kube::{Api, ResourceExt, api::ListParams};
use serde_json::{Value, json};

use crate::{
    binaries,
    cluster::Cluster,
    configs::{SECOND_NODE, on_node},
    image::WORK_IMAGE,
    process::{ProcessSpec, output},
    stage::SYSTEM_NAMESPACE,
};

/// Where NVIDIA's plugin has its DaemonSet, and the label of its pods.
pub const NVIDIA_NAMESPACE: &str = "kube-system";
/// The label of the pods of NVIDIA's plugin.
pub const NVIDIA_LABEL: &str = "name=nvidia-device-plugin-ds";

#[derive(Clone, Debug)]
pub(crate) struct PodPrograms {
    uid: String,
    components: Vec<String>,
}

/// What a container runs, by the container's name.
enum Program {
    Ours(&'static str),
    Scheduler,
    Nvidia,
}

fn program(container: &str) -> Result<Program> {
    Ok(match container {
        "webhook" => Program::Ours("gpu-migrate-webhook"),
        "extender" => Program::Ours("gpu-migrate-extender"),
        "operator" => Program::Ours("gpu-migrate-operator"),
        "bridge" => Program::Ours("gpu-migrate-bridge"),
        "scheduler" => Program::Scheduler,
        "nvidia-device-plugin-ctr" => Program::Nvidia,
        other => anyhow::bail!("no program is known for container {other}"),
    })
}

impl Cluster {
    /// Tags the work image with the names of the images in manifests, so that their pods start on every node.
    pub fn tag_work_image_as(&self, images: &BTreeSet<String>) -> Result<()> {
        let layouts = [self.setup.layout.clone(), self.setup.layout.of_node(SECOND_NODE)];
        for layout in layouts.iter().filter(|layout| layout.containerd_socket().exists()) {
            for image in images {
                output(
                    Command::new(&self.setup.binaries.ctr)
                        .arg("--address")
                        .arg(layout.containerd_socket())
                        .args(["--namespace", "k8s.io", "images", "tag", "--force", WORK_IMAGE, image]),
                )?;
            }
        }
        Ok(())
    }

    /// Starts the programs of running pods that have none yet, and stops those of deleted pods. To be called repeatedly while
    /// pods change.
    pub async fn sync_pod_programs(&mut self) -> Result<()> {
        let mut pods = Api::<Pod>::namespaced(self.client.clone(), SYSTEM_NAMESPACE)
            .list(&ListParams::default())
            .await?
            .items;
        let nvidia: Api<Pod> = Api::namespaced(self.client.clone(), NVIDIA_NAMESPACE);
        pods.extend(nvidia.list(&ListParams::default().labels(NVIDIA_LABEL)).await?.items);
        pods.retain(runs);

        let (stay, leave): (Vec<_>, Vec<_>) = std::mem::take(&mut self.pod_programs)
            .into_iter()
            .partition(|programs| pods.iter().any(|pod| pod.uid().as_ref() == Some(&programs.uid)));
        self.pod_programs = stay;
        for name in leave.iter().flat_map(|programs| &programs.components) {
            self.component(name)?.terminate()?;
        }
        for name in leave.iter().flat_map(|programs| &programs.components) {
            self.check_forbidden_of(name)?;
            self.remove(name)?;
        }
        if !self
            .pod_programs
            .iter()
            .flat_map(|programs| &programs.components)
            .any(|name| name.ends_with(".webhook"))
        {
            self.webhook_url = None;
        }
        for pod in &pods {
            let uid = pod.uid().context("a pod has a UID")?;
            if self.pod_programs.iter().any(|programs| programs.uid == uid) {
                continue;
            }
            let mut components = Vec::new();
            for container in pod.spec.iter().flat_map(|spec| &spec.containers) {
                let recipe = self.process_of(pod, container).await?;
                components.push(recipe.name.clone());
                self.add(recipe)?;
            }
            self.pod_programs.push(PodPrograms { uid, components });
        }
        Ok(())
    }

    /// Stops all programs of pods.
    pub(crate) fn stop_pod_programs(&mut self) -> Result<()> {
        for name in std::mem::take(&mut self.pod_programs).iter().flat_map(|programs| &programs.components) {
            self.remove(name)?;
        }
        Ok(())
    }

    /// The program of a container. It differs from the manifest in:
    ///
    /// - every address is the pod's: a process shares its network with all others;
    /// - a kubeconfig of the account instead of the mounted token;
    /// - the apiserver finds the webhook by address instead of by Service;
    /// - the stand-in for NVML and its faults; kube-scheduler's configuration is read from its ConfigMap;
    /// - the webhook drains for a second: the kubelet does not wait for it.
    async fn process_of(&mut self, pod: &Pod, container: &Container) -> Result<ProcessSpec> {
        let name = format!("{}.{}", pod.name_any(), container.name);
        let address = address(pod)?;
        match program(&container.name)? {
            Program::Ours(program) => {
                let bin = binaries::ours()?;
                let kubeconfig = match pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) {
                    // What it may write depends on its node.
                    Some(node) if program == "gpu-migrate-bridge" => {
                        self.kubeconfig_on_node(account(pod)?, node).await?
                    }
                    _ => self.setup.pki.kubeconfig(
                        self.setup.ports.apiserver,
                        &crate::audit::account(account(pod)?),
                        &pod.name_any(),
                    )?,
                };
                let mut recipe = variables(ProcessSpec::new(name, bin.join(program)), pod, container)
                    .flag("kubeconfig", kubeconfig)
                    .env("LD_LIBRARY_PATH", &self.setup.binaries.nvml)
                    .env("NVML_STAND_IN_STATE", self.setup.layout.nvml_faults());
                for argument in container.args.iter().flatten() {
                    recipe = if argument.starts_with("--service=") {
                        let url = self.webhook_url.get_or_insert_with(|| format!("https://{address}:9443"));
                        recipe.flag("service-url", url).flag("drain-delay", "1s").flag("drain-timeout", "3s")
                    } else {
                        recipe.arg(argument.replace("[::]", &address).replace("127.0.0.1", &address))
                    };
                }
                Ok(recipe)
            }
            Program::Scheduler => self.scheduler_for_pod(name, pod, container, &address).await,
            Program::Nvidia => {
                let plugin = variables(self.nvidia_plugin(name), pod, container);
                if pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) != Some(SECOND_NODE) {
                    return Ok(plugin);
                }
                let mounts = self.component(&on_node("mounts", SECOND_NODE))?.pid();
                let plugin = plugin.env("NODE_NAME", SECOND_NODE).env("NVML_STAND_IN_NODE", "1");
                Ok(plugin.in_mounts_of(mounts.context("the second node is there")?))
            }
        }
    }

    async fn scheduler_for_pod(
        &self,
        name: String,
        pod: &Pod,
        container: &Container,
        address: &str,
    ) -> Result<ProcessSpec> {
        let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), SYSTEM_NAMESPACE);
        let map = maps.get("gpu-migrate-scheduler").await?;
        let text =
            map.data.as_ref().and_then(|data| data.get("scheduler.yaml")).context("no scheduler.yaml")?;
        let mut config: Value = serde_saphyr::from_str(&text.replace("127.0.0.1", address))?;
        let kubeconfig = self.setup.pki.kubeconfig(
            self.setup.ports.apiserver,
            &crate::audit::account(account(pod)?),
            &pod.name_any(),
        )?;
        config["clientConnection"] = json!({"kubeconfig": kubeconfig});
        let file = self.setup.layout.write(&format!("{name}.json"), config.to_string())?;
        let mut recipe = ProcessSpec::new(name, &self.setup.binaries.scheduler)
            .flag("bind-address", address)
            .flag("authentication-kubeconfig", &kubeconfig)
            .flag("authorization-kubeconfig", &kubeconfig);
        for argument in container.args.iter().flatten() {
            recipe = if argument.starts_with("--config=") {
                recipe.flag("config", &file)
            } else {
                recipe.arg(argument)
            };
        }
        Ok(recipe)
    }
}

/// Its sandbox and all containers run, and it is not being deleted.
fn runs(pod: &Pod) -> bool {
    let status = pod.status.clone().unwrap_or_default();
    let containers = status.container_statuses.unwrap_or_default();
    let running = |c: &k8s_openapi::api::core::v1::ContainerStatus| {
        c.state.as_ref().is_some_and(|state| state.running.is_some())
    };
    pod.metadata.deletion_timestamp.is_none()
        && status.pod_ip.is_some()
        && !containers.is_empty()
        && containers.iter().all(running)
}

/// The pod's address, which must lead to this machine and nowhere else.
fn address(pod: &Pod) -> Result<String> {
    let text = pod.status.as_ref().and_then(|s| s.pod_ip.clone()).context("a pod without an address")?;
    let loopback = text.parse::<Ipv4Addr>().is_ok_and(|address| address.is_loopback());
    ensure!(loopback, "{}: {text} is not of the loopback network", pod.name_any());
    Ok(text)
}

fn account(pod: &Pod) -> Result<&str> {
    pod.spec
        .as_ref()
        .and_then(|spec| spec.service_account_name.as_deref())
        .context("a pod without an account")
}

/// The container's variables, with the fields of the pod that they ask for.
fn variables(recipe: ProcessSpec, pod: &Pod, container: &Container) -> ProcessSpec {
    let of_field =
        |variable: &EnvVar| match variable.value_from.as_ref()?.field_ref.as_ref()?.field_path.as_str() {
            "metadata.name" => Some(pod.name_any()),
            "spec.nodeName" => pod.spec.as_ref()?.node_name.clone(),
            _ => None,
        };
    container.env.iter().flatten().fold(recipe, |recipe, variable| {
        match variable.value.clone().or_else(|| of_field(variable)) {
            Some(value) => recipe.env(&variable.name, value),
            None => recipe,
        }
    })
}
