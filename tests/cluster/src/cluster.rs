//! One cluster: started, changed, stopped.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, ServiceAccount};
use kube::{
    Api, Client, Config, ResourceExt,
    api::{DeleteParams, ListParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::json;

use crate::{
    binaries::Binaries,
    cleanup,
    configs::{NODE, NodeSetup, SECOND_NODE, Setup, on_node},
    device_nodes::DeviceNodes,
    image::{self, PAUSE_IMAGE, WORK_IMAGE},
    layout::{KUBELET_ROOT, Layout, Ports},
    observe,
    pki::Pki,
    pod_programs::PodPrograms,
    process::{Component, ProcessSpec, has_logged, output},
    stage::Stage,
    wait::{self, Seen},
};

/// How long to wait for anything that works, on two busy cores.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// How the apiserver reports that RBAC, or a restriction of `deploy/`, forbids a request, in lower case; it differs from what a
/// terminating namespace gives.
const REFUSED: [&str; 2] = ["is forbidden: user", "validatingadmissionpolicy 'gpu-migrate-"];

/// A running cluster. Dropping it stops everything and removes everything but the logs.
pub struct Cluster {
    /// For the API, as administrator.
    pub client: Client,
    /// What its components are started from.
    pub setup: Setup,
    /// In the order of their start.
    components: Vec<Component>,
    pub(crate) stage: Option<Stage>,
    namespaces: Vec<String>,
    pub(crate) policies: Vec<String>,
    /// Programs that run on behalf of pods, see [`crate::pod_programs`].
    pub(crate) pod_programs: Vec<PodPrograms>,
    /// Where the apiserver reaches the webhook that runs on behalf of a pod.
    pub(crate) webhook_url: Option<String>,
    /// Of the scenarios that use CDI.
    pub(crate) device_nodes: Option<DeviceNodes>,
    /// Whether a stage was ever entered; a new cluster has none.
    pub(crate) used: bool,
    /// Its state is unknown after a failure: the next scenario gets a new one.
    pub(crate) needs_recreation: bool,
    stopped: bool,
}

impl Cluster {
    /// Brings up Kubernetes and waits until a pod could be made: about ten seconds with all programs at hand.
    pub async fn start() -> Result<Self> {
        let mut cluster = Self::start_without_node().await?;
        cluster.start_node().await?;
        Ok(cluster)
    }

    /// The logs of the one before stay: those of a failure, and the audit of what its programs asked for.
    async fn start_again() -> Result<Self> {
        let mut cluster = Self::control_plane().await?;
        cluster.start_node().await?;
        Ok(cluster)
    }

    /// The control plane alone: no pod ever starts.
    pub async fn start_without_node() -> Result<Self> {
        crate::process::empty(&Layout::from_env().logs())?;
        Self::control_plane().await
    }

    async fn control_plane() -> Result<Self> {
        // A second provider in the graph would make rustls refuse to choose; an error here means one is set already.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let binaries = Binaries::prepare()?;
        let layout = Layout::from_env();
        cleanup::clear(&layout)?;
        std::fs::create_dir_all(layout.logs())?;
        let (ports, pki) = (Ports::choose()?, Pki::new(&layout)?);
        let admin = pki.kubeconfig(ports.apiserver, "admin", "system:masters")?;
        let client = client(&admin).await?;
        let setup = Setup { layout, ports, pki, binaries, admin };
        let mut cluster = Self {
            client,
            setup,
            components: Vec::new(),
            stage: None,
            namespaces: Vec::new(),
            policies: Vec::new(),
            pod_programs: Vec::new(),
            webhook_url: None,
            device_nodes: None,
            used: false,
            needs_recreation: false,
            stopped: false,
        };
        let begin = Instant::now();
        cluster.start_control_plane().await?;
        eprintln!(
            "control plane ready after {:.1?}; logs in {}",
            begin.elapsed(),
            cluster.setup.layout.logs().display()
        );
        Ok(cluster)
    }

    async fn start_control_plane(&mut self) -> Result<()> {
        self.add(self.setup.etcd())?;
        self.add(self.setup.apiserver()?)?;
        let client = self.client.clone();
        self.until("kube-apiserver to be ready", TIMEOUT, || async {
            let request = http_get("/readyz")?;
            Ok(Seen::Done(client.request_text(request).await.map(drop)?))
        })
        .await?;
        self.add(self.setup.controller_manager())?;
        self.add(self.setup.scheduler(None)?)?;
        Ok(())
    }

    async fn start_node(&mut self) -> Result<()> {
        self.start_kubelet(&self.setup.first_node()).await?;
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), "default");
        self.until("the default service account", TIMEOUT, || async {
            Ok(Seen::Done(accounts.get("default").await.map(drop)?))
        })
        .await
    }

    /// Adds [`SECOND_NODE`]: a kubelet and a containerd of its own on this machine, with mounts of their own.
    /// [`Cluster::clean_up`] removes it.
    pub async fn add_node(&mut self) -> Result<NodeSetup> {
        let name = on_node("mounts", SECOND_NODE);
        let root = self.setup.layout.of_node(SECOND_NODE).file("kubelet");
        self.add(
            ProcessSpec::new(&name, "unshare")
                .arg("--mount")
                .arg("--propagation=private")
                .args(["sh", "-c", r#"mkdir -p "$0" && mount --bind "$0" "$1" && exec sleep infinity"#])
                .arg(&root)
                .arg(KUBELET_ROOT),
        )?;
        let pid = self.component(&name)?.pid().context("it was started")?;
        self.until("the second node's mounts", TIMEOUT, || async {
            let mounts = std::fs::read_to_string(format!("/proc/{pid}/mountinfo"))?;
            // The last is on top of the others.
            let last = mounts.lines().rfind(|line| line.split(' ').nth(4) == Some(KUBELET_ROOT));
            let is_ours = last.is_some_and(|line| line.contains(&format!("/{SECOND_NODE}/kubelet ")));
            Ok(Seen::from_bool(is_ours, || format!("{last:?}")))
        })
        .await?;
        cleanup::make_second_cgroup()?;
        let node = self.setup.second_node(pid);
        self.start_kubelet(&node).await?;
        Ok(node)
    }

    /// Removes [`SECOND_NODE`], if there is one. No pod may be on it.
    async fn drop_second_node(&mut self) -> Result<()> {
        let name = |component| on_node(component, SECOND_NODE);
        if !self.components.iter().any(|component| component.name() == name("mounts")) {
            return Ok(());
        }
        for component in ["nvidia-device-plugin", "kubelet"] {
            self.remove(&name(component))?;
        }
        cleanup::end_containers(&self.setup.layout.of_node(SECOND_NODE))?;
        for component in ["containerd", "mounts"] {
            self.remove(&name(component))?;
        }
        // Not there if its kubelet never began.
        let _ = Api::<Node>::all(self.client.clone()).delete(SECOND_NODE, &DeleteParams::default()).await;
        Ok(())
    }

    async fn start_kubelet(&mut self, node: &NodeSetup) -> Result<()> {
        self.add(self.setup.containerd(node)?)?;
        self.containerd_serves(&on_node("containerd", node.name)).await?;
        for (name, verb) in [(WORK_IMAGE, "serve"), (PAUSE_IMAGE, "pause")] {
            self.import_image_to(&node.layout, &image::tarball(&self.setup.binaries.work, name, verb)?)?;
        }
        self.add(self.setup.kubelet(node)?)?;
        let nodes: Api<Node> = Api::all(self.client.clone());
        self.until(&format!("{} to be Ready", node.name), TIMEOUT, || async {
            let node = nodes.get(node.name).await?;
            let conditions = node.status.unwrap_or_default().conditions.unwrap_or_default();
            let ready = conditions.iter().any(|c| c.type_ == "Ready" && c.status == "True");
            Ok(Seen::from_bool(ready, || format!("{conditions:?}")))
        })
        .await
    }

    /// Waits until containerd has all its plugins: it answers before, and a kubelet that finds no CRI there ends.
    pub(crate) async fn containerd_serves(&mut self, component: &str) -> Result<()> {
        let component = self.component(component)?;
        let (what, log) = (format!("{} to serve", component.name()), component.log().to_owned());
        self.until(&what, TIMEOUT, || async {
            Ok(Seen::from_bool(has_logged(&log, "containerd successfully booted")?, || {
                format!("{} does not say so", log.display())
            }))
        })
        .await
    }

    /// Gives the node an image, from the tar of its OCI layout.
    pub fn import_image(&self, tar: &[u8]) -> Result<()> {
        self.import_image_to(&self.setup.layout, tar)
    }

    fn import_image_to(&self, layout: &Layout, tar: &[u8]) -> Result<()> {
        let tar = layout.write("image.tar", tar)?;
        output(
            Command::new(&self.setup.binaries.ctr)
                .arg("--address")
                .arg(layout.containerd_socket())
                .args(["--namespace", "k8s.io", "images", "import"])
                .arg(tar),
        )
        .map(drop)
    }

    /// Starts a component and keeps it; [`Cluster::remove`] takes it out again.
    pub fn add(&mut self, recipe: ProcessSpec) -> Result<()> {
        let mut component = Component::new(recipe, &self.setup.layout.logs());
        component.start()?;
        self.components.push(component);
        Ok(())
    }

    /// Stops a component for good; none of that name is fine.
    pub fn remove(&mut self, name: &str) -> Result<()> {
        if let Some(index) = self.components.iter().position(|c| c.name() == name) {
            self.components.remove(index).stop()?;
        }
        Ok(())
    }

    pub fn component(&mut self, name: &str) -> Result<&mut Component> {
        self.components
            .iter_mut()
            .find(|c| c.name() == name)
            .with_context(|| format!("there is no component {name}"))
    }

    pub fn components(&self) -> &[Component] {
        &self.components
    }

    pub fn kill(&mut self, name: &str) -> Result<()> {
        self.component(name)?.kill()
    }

    /// Starts a component that was killed.
    pub fn start_component(&mut self, name: &str) -> Result<()> {
        self.component(name)?.start()
    }

    /// An orderly stop, then a start.
    pub fn restart(&mut self, name: &str) -> Result<()> {
        let component = self.component(name)?;
        component.stop()?;
        component.start()
    }

    /// Fails if any component has ended by itself.
    pub fn check(&mut self) -> Result<()> {
        self.components.iter_mut().try_for_each(Component::check)
    }

    /// Fails if the apiserver forbade one of our programs a request: `deploy/` grants too little, or the program asks for too
    /// much.
    pub fn check_forbidden(&self) -> Result<()> {
        let ours = self.components.iter().filter(|c| c.name().starts_with("gpu-migrate-"));
        ours.map(Component::name).try_for_each(|name| self.check_forbidden_of(name))
    }

    pub fn check_forbidden_of(&self, name: &str) -> Result<()> {
        let component = self.components.iter().find(|c| c.name() == name);
        let mut refused = Vec::new();
        for text in REFUSED {
            refused.extend(component.map(|c| c.log_lines(text)).transpose()?.unwrap_or_default());
        }
        ensure!(refused.is_empty(), "{name} was forbidden requests:\n{}", refused.join("\n"));
        Ok(())
    }

    /// [`wait::until`], which also fails as soon as a component exits.
    pub async fn until<T, F, Fut>(&mut self, what: &str, within: Duration, mut poll: F) -> Result<T>
    where
        F: FnMut() -> Fut,
        Fut: Future<Output = Result<Seen<T>>>,
    {
        let (sender, mut dead) = tokio::sync::oneshot::channel::<anyhow::Error>();
        let mut sender = Some(sender);
        let components = &mut self.components;
        let found = wait::until(what, within, || {
            if let Err(error) = components.iter_mut().try_for_each(Component::check)
                && let Some(sender) = sender.take()
            {
                let _ = sender.send(error);
            }
            poll()
        });
        tokio::select! {
            biased;
            Ok(error) = &mut dead => Err(error.context(format!("while waiting for {what}"))),
            found = found => found,
        }
    }

    /// A namespace of its own for a scenario, with labels; [`Cluster::clean_up`] removes it.
    pub async fn namespace(&mut self, name: &str, labels: &[(&str, &str)]) -> Result<String> {
        let labels: serde_json::Map<String, serde_json::Value> =
            labels.iter().map(|(k, v)| ((*k).to_owned(), json!(v))).collect();
        let body: Namespace = serde_json::from_value(
            json!({"metadata": {"generateName": format!("{name}-"), "labels": labels}}),
        )?;
        let made = Api::<Namespace>::all(self.client.clone()).create(&PostParams::default(), &body).await?;
        let name = made.name_any();
        self.namespaces.push(name.clone());
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), &name);
        wait::until("the namespace's service account", TIMEOUT, || async {
            Ok(Seen::Done(accounts.get("default").await.map(drop)?))
        })
        .await?;
        Ok(name)
    }

    /// Removes what a scenario created, and waits until its pods are gone from the API and its containers from the node. It does
    /// not wait for the namespaces, which take the controller some seconds more: their names are never used again.
    pub async fn clean_up(&mut self) -> Result<()> {
        if std::mem::take(&mut self.needs_recreation) {
            return self.recreate().await;
        }
        self.drop_policies().await;
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        for name in std::mem::take(&mut self.namespaces) {
            // First, so that no controller makes new pods.
            let _ = namespaces.delete(&name, &DeleteParams::default()).await;
        }
        let pods: Api<Pod> = Api::all(self.client.clone());
        let client = self.client.clone();
        self.until("all pods and containers of the scenario to be gone", TIMEOUT, || async {
            let left = pods.list(&ListParams::default()).await?.items;
            for pod in &left {
                end(&client, pod).await;
            }
            let running = observe::containers()?;
            Ok(Seen::from_bool(left.is_empty() && running.is_empty(), || {
                format!(
                    "pods {:?}, containers {running:?}",
                    left.iter().map(ResourceExt::name_any).collect::<Vec<_>>()
                )
            }))
        })
        .await?;
        self.drop_second_node().await?;
        self.drop_fake_nodes().await
    }

    /// The node's allocatable amount of a resource; 0 if it has none.
    pub async fn allocatable(&self, resource: &str) -> Result<u64> {
        let node = Api::<Node>::all(self.client.clone()).get(NODE).await?;
        let all = node.status.and_then(|s| s.allocatable).unwrap_or_default();
        all.get(resource)
            .map_or(Ok(0), |q| whole_number(&q.0))
            .with_context(|| format!("allocatable {resource}"))
    }

    /// Whether it did not survive the scenario before.
    pub(crate) fn is_lost(&self) -> bool {
        self.stopped || self.needs_recreation
    }

    /// Replaces the cluster by a new one.
    pub(crate) async fn recreate(&mut self) -> Result<()> {
        self.stop()?;
        *self = Self::start_again().await?;
        Ok(())
    }

    /// Stops everything in reverse order and removes what it made.
    pub fn stop(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.stopped, true) {
            return Ok(());
        }
        while let Some(mut component) = self.components.pop() {
            component.stop()?;
        }
        cleanup::remove(&self.setup.layout)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            eprintln!("the cluster did not stop cleanly: {error:#}");
        }
    }
}

/// Deletes a pod: with the shortest grace where a kubelet ends it, and outright where there is none.
async fn end(client: &Client, pod: &Pod) {
    let node = pod.spec.as_ref().and_then(|s| s.node_name.as_deref());
    let here = node.is_some_and(|node| [NODE, SECOND_NODE].contains(&node));
    if here && pod.metadata.deletion_timestamp.is_some() {
        return;
    }
    let grace = DeleteParams { grace_period_seconds: Some(u32::from(here)), ..DeleteParams::default() };
    let pods: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
    // It may be gone already; one that stays is seen by the caller.
    let _ = pods.delete(&pod.name_any(), &grace).await;
}

/// A client for a kubeconfig file.
pub async fn client(kubeconfig: &std::path::Path) -> Result<Client> {
    let file = Kubeconfig::read_from(kubeconfig)?;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

fn http_get(path: &str) -> Result<::http::Request<Vec<u8>>> {
    Ok(::http::Request::get(path).body(Vec::new())?)
}

/// Counts of devices: canonical quantities are plain digits, but for round thousands (`8k`).
fn whole_number(quantity: &str) -> Result<u64> {
    let (digits, factor) = quantity.strip_suffix('k').map_or((quantity, 1), |digits| (digits, 1000));
    let number: u64 = digits.parse().with_context(|| format!("{quantity:?} is not a whole number"))?;
    ensure!(number <= u64::MAX / factor, "{quantity:?} is too big");
    Ok(number * factor)
}
