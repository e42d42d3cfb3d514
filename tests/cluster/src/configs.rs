//! How each Kubernetes component is started: flags and configuration files, and why they are what they are.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::{
    audit,
    binaries::{Binaries, oldest_kubernetes},
    image::PAUSE_IMAGE,
    layout::{Layout, Ports},
    manifests,
    pki::Pki,
    process::ProcessSpec,
};

/// The node that has a kubelet; the runbook calls it so.
pub const NODE: &str = "gpu-01";

/// The node that [`crate::Cluster::add_node`] adds.
pub const SECOND_NODE: &str = "gpu-02";

/// The cgroup of [`SECOND_NODE`]'s kubelet, in every hierarchy. The node agent looks for pods below names that contain `kubelet`.
pub const SECOND_CGROUP: &str = "kubelet-gpu-02";

/// What is a kubelet's own where two run on one machine.
#[derive(Clone, Debug)]
pub struct NodeSetup {
    pub name: &'static str,
    pub layout: Layout,
    port: u16,
    /// A process with the mounts of this node: device plugins have the kubelet's root built in.
    pub mounts: Option<u32>,
    /// Below it are the cgroups of its pods, if not at the root.
    cgroup: Option<&'static str>,
}

/// The name of a node's component.
pub fn on_node(component: &str, node: &str) -> String {
    if node == NODE { component.to_owned() } else { format!("{component}.{node}") }
}

impl NodeSetup {
    fn spec(&self, component: &str, program: &Path) -> ProcessSpec {
        ProcessSpec::new(on_node(component, self.name), program)
    }

    /// Where a process runs that needs this node's mounts.
    #[must_use]
    pub fn place(&self, spec: ProcessSpec) -> ProcessSpec {
        match self.mounts {
            Some(pid) => spec.in_mounts_of(pid),
            None => spec,
        }
    }
}

/// The cluster IP of the Service `kubernetes`: the first of `service-cluster-ip-range`.
pub const API_SERVICE: &str = "10.88.0.1";

/// How long the scheduler waits for the extender. Gangs are held below it.
pub const EXTENDER_TIMEOUT: Duration = Duration::from_secs(30);

/// What the components' processes are described from.
#[derive(Debug)]
pub struct Setup {
    pub layout: Layout,
    pub ports: Ports,
    pub pki: Pki,
    pub binaries: Binaries,
    pub admin: PathBuf,
}

impl Setup {
    /// etcd without fsync: the data are thrown away anyhow.
    pub fn etcd(&self) -> ProcessSpec {
        let client = format!("http://127.0.0.1:{}", self.ports.etcd);
        let peer = format!("http://127.0.0.1:{}", self.ports.etcd_peer);
        ProcessSpec::new("etcd", &self.binaries.etcd)
            .flag("name", "it")
            .flag("data-dir", self.layout.file("etcd"))
            .flag("listen-client-urls", &client)
            .flag("advertise-client-urls", &client)
            .flag("listen-peer-urls", &peer)
            .flag("initial-advertise-peer-urls", &peer)
            .flag("initial-cluster", format!("it={peer}"))
            .flag("logger", "zap")
            .flag("log-level", "warn")
            .arg("--unsafe-no-fsync")
    }

    /// kube-apiserver on loopback. Without a reconciler it does not try to publish its address, which must not be loopback.
    pub fn apiserver(&self) -> Result<ProcessSpec> {
        let serving = self.pki.server("apiserver", &["kubernetes", "kubernetes.default.svc", API_SERVICE])?;
        // Of a pod's token it is on in 1.30; the scenarios bind tokens to the Node without a pod, which came later.
        let gates = if oldest_kubernetes()? { "ServiceAccountTokenNodeBinding=true" } else { "" };
        Ok(ProcessSpec::new("kube-apiserver", &self.binaries.apiserver)
            .flag("feature-gates", gates)
            .flag("etcd-servers", format!("http://127.0.0.1:{}", self.ports.etcd))
            .flag("bind-address", "127.0.0.1")
            .flag("advertise-address", "127.0.0.1")
            .flag("secure-port", self.ports.apiserver.to_string())
            .flag("endpoint-reconciler-type", "none")
            .flag("service-cluster-ip-range", "10.88.0.0/24")
            // Webhooks are called at a pod's address: no kube-proxy is needed for their Service.
            .flag("enable-aggregator-routing", "true")
            .flag("client-ca-file", self.pki.ca())
            .flag("tls-cert-file", serving.cert)
            .flag("tls-private-key-file", serving.key)
            .flag("service-account-issuer", "https://kubernetes.default.svc")
            .flag("service-account-key-file", self.pki.service_accounts_public_key())
            .flag("service-account-signing-key-file", self.pki.service_accounts_key())
            .flag("authorization-mode", "Node,RBAC")
            .flag("enable-admission-plugins", "NodeRestriction")
            .flag("kubelet-preferred-address-types", "Hostname")
            .flag("allow-privileged", "true")
            .flag("audit-policy-file", self.layout.write("audit-policy.json", audit::policy().to_string())?)
            .flag("audit-log-path", self.layout.logs().join(audit::LOG))
            .flag("profiling", "false"))
    }

    /// kube-controller-manager as administrator: with an account for each controller it starts several seconds later. Its
    /// client must not be the limit in a test that creates hundreds of pods.
    pub fn controller_manager(&self) -> ProcessSpec {
        ProcessSpec::new("kube-controller-manager", &self.binaries.controller_manager)
            .flag("kubeconfig", &self.admin)
            .flag("authentication-kubeconfig", &self.admin)
            .flag("authorization-kubeconfig", &self.admin)
            .flag("bind-address", "127.0.0.1")
            .flag("secure-port", self.ports.controller_manager.to_string())
            .flag("service-account-private-key-file", self.pki.service_accounts_key())
            .flag("root-ca-file", self.pki.ca())
            .flag("leader-elect", "false")
            .flag("kube-api-qps", "500")
            .flag("kube-api-burst", "1000")
            .flag("horizontal-pod-autoscaler-sync-period", "1s")
            .flag("profiling", "false")
    }

    /// kube-scheduler: the default one, or with an extender's port a second profile of ours that asks it. Extenders belong to the process, not to a profile: with
    /// `nvidia.com/gpu` among the managed resources, legacy pods of the default scheduler are placed through the extender
    /// too, so that one cache serialises both kinds (DESIGN decision 6). All else is as `deploy/` has it.
    pub fn scheduler(&self, extender: Option<u16>) -> Result<ProcessSpec> {
        let mut config = match extender {
            Some(port) => {
                let mut config = shipped_scheduler()?;
                config["extenders"][0]["urlPrefix"] = json!(format!("http://127.0.0.1:{port}/scheduler"));
                config["extenders"][0]["httpTimeout"] = json!(format!("{}s", EXTENDER_TIMEOUT.as_secs()));
                let own = config["profiles"][0].take();
                config["profiles"] = json!([{"schedulerName": "default-scheduler"}, own]);
                config
            }
            None => json!({
                "apiVersion": "kubescheduler.config.k8s.io/v1",
                "kind": "KubeSchedulerConfiguration",
                "clientConnection": {"qps": 500, "burst": 1000},
                "profiles": [{"schedulerName": "default-scheduler"}],
            }),
        };
        config["clientConnection"]["kubeconfig"] = json!(self.admin);
        config["leaderElection"] = json!({"leaderElect": false});
        let path = self.layout.write("scheduler.json", config.to_string())?;
        Ok(ProcessSpec::new("kube-scheduler", &self.binaries.scheduler)
            .flag("config", path)
            .flag("bind-address", "127.0.0.1")
            .flag("secure-port", self.ports.scheduler.to_string())
            .flag("authentication-kubeconfig", &self.admin)
            .flag("authorization-kubeconfig", &self.admin))
    }

    /// The node that every cluster has.
    pub fn first_node(&self) -> NodeSetup {
        let layout = self.layout.clone();
        NodeSetup { name: NODE, layout, port: self.ports.kubelet, mounts: None, cgroup: None }
    }

    /// Another one, with the mounts of this process.
    pub fn second_node(&self, mounts: u32) -> NodeSetup {
        NodeSetup {
            name: SECOND_NODE,
            layout: self.layout.of_node(SECOND_NODE),
            port: self.ports.second_kubelet,
            mounts: Some(mounts),
            cgroup: Some(SECOND_CGROUP),
        }
    }

    /// containerd with everything under the state folder. `restrict_oom_score_adj`: without CAP_SYS_RESOURCE runc cannot
    /// lower the score of a sandbox and fails with "can't get final child's PID from pipe". `netns_mounts_under_state_dir`: what a
    /// crashed run leaves is unmounted with the state folder.
    pub fn containerd(&self, node: &NodeSetup) -> Result<ProcessSpec> {
        let layout = &node.layout;
        let cni = layout.file("cni");
        let config = format!(
            r#"version = 3
root = {root:?}
state = {state:?}
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.nri.v1.nri", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper"]
[grpc]
  address = {socket:?}
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = {PAUSE_IMAGE:?}
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  enable_selinux = false
  disable_apparmor = true
  cdi_spec_dirs = [{cdi:?}]
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = [{bin:?}]
    conf_dir = {conf:?}
  [plugins."io.containerd.cri.v1.runtime".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      runtime_path = {shim:?}
      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
        SystemdCgroup = false
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.nvidia]
      runtime_type = "io.containerd.runc.v2"
      runtime_path = {shim:?}
      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.nvidia.options]
        BinaryName = {nvidia:?}
        SystemdCgroup = false
"#,
            root = layout.file("containerd"),
            state = layout.containerd_run(),
            socket = layout.containerd_socket(),
            cdi = layout.cdi(),
            shim = self.binaries.shim,
            bin = cni.join("bin"),
            conf = cni.join("conf"),
            nvidia = link(layout, "nvidia-container-runtime", &self.binaries.work)?,
        );
        let path = layout.write("containerd.toml", config)?;
        let network = json!({"cniVersion": "0.4.0", "name": "it", "plugins": [{"type": "gpu-migrate-cni"}]});
        layout.write("cni/conf/10-it.conflist", network.to_string())?;
        link(layout, "cni/bin/gpu-migrate-cni", &self.binaries.work)?;
        for plugin in &self.binaries.cni {
            let name = plugin.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            link(layout, &format!("cni/bin/{name}"), plugin)?;
        }
        let spec = node
            .spec("containerd", &self.binaries.containerd)
            .arg("--config")
            .arg(path)
            // For the stand-in of NVIDIA's runtime.
            .env("RUNC", &self.binaries.runc)
            .env("NVML_STAND_IN", self.binaries.nvml.join("libnvidia-ml.so.1"));
        Ok(node.place(spec))
    }

    /// The kubelet. Its root is where device plugins look for it, so it cannot be moved.
    pub fn kubelet(&self, node: &NodeSetup) -> Result<ProcessSpec> {
        let layout = &node.layout;
        let serving = self.pki.server(&on_node("kubelet", node.name), &[node.name])?;
        let mut config = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "port": node.port,
            "healthzPort": 0,
            "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": false}, "x509": {"clientCAFile": self.pki.ca()}},
            "authorization": {"mode": "AlwaysAllow"},
            "tlsCertFile": serving.cert,
            "tlsPrivateKeyFile": serving.key,
            "containerRuntimeEndpoint": format!("unix://{}", layout.containerd_socket().display()),
            "cgroupDriver": "cgroupfs",
            // This kind of machine may still have cgroup v1, which newer kubelets refuse by default.
            "failCgroupV1": false,
            "failSwapOn": false,
            "makeIPTablesUtilChains": false,
            "resolvConf": "",
            "maxPods": 250,
            // What changes in the device plugins' lists reaches allocatable with the next tick: 10 s by default.
            "nodeStatusUpdateFrequency": "2s",
            // And reported without a change too, so that a test can wait for a status newer than a restart: 5 min by default.
            "nodeStatusReportFrequency": "2s",
            "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "podLogsDir": layout.file("pod-logs"),
            "volumePluginDir": layout.file("volume-plugins"),
        });
        if let Some(cgroup) = node.cgroup {
            config["cgroupRoot"] = json!(format!("/{cgroup}"));
        }
        let path = layout.write("kubelet.json", config.to_string())?;
        let kubeconfig = self.pki.kubeconfig(
            self.ports.apiserver,
            &format!("system:node:{}", node.name),
            "system:nodes",
        )?;
        let spec = node
            .spec("kubelet", &self.binaries.kubelet)
            .flag("config", path)
            .flag("kubeconfig", kubeconfig)
            .flag("hostname-override", node.name)
            .flag("v", "2");
        Ok(node.place(spec))
    }
}

/// The configuration of the scheduler that `deploy/` installs.
fn shipped_scheduler() -> Result<Value> {
    let objects = manifests::objects("base")?;
    let text = objects.iter().find_map(|object| object["data"]["scheduler.yaml"].as_str());
    let text = text.context("deploy/base has no scheduler.yaml")?;
    serde_saphyr::from_str(text).context("scheduler.yaml of deploy/base cannot be read")
}

/// A program under another name in the state folder.
fn link(layout: &Layout, name: &str, program: &Path) -> Result<PathBuf> {
    let link = layout.write(name, "")?;
    std::fs::remove_file(&link)?;
    std::os::unix::fs::symlink(program, &link)?;
    Ok(link)
}
