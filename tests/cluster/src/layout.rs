//! Where the cluster keeps its files and on which ports it listens.

use std::{
    fs,
    net::{Ipv4Addr, TcpListener},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

/// The kubelet's root: fixed, because device plugins have the path built in.
pub const KUBELET_ROOT: &str = "/var/lib/kubelet";

/// The name of containerd's socket.
pub const SOCKET: &str = "containerd.sock";

/// Services have lower ports, if they have one.
const FIRST_PORT: u16 = 20_000;

/// One folder for everything but [`KUBELET_ROOT`].
#[derive(Clone, Debug)]
pub struct Layout {
    root: PathBuf,
    state: PathBuf,
}

impl Layout {
    /// `GPU_MIGRATE_CLUSTER_DIR`, else a fixed folder under the system's temporary one: fixed, so that the next run finds
    /// what a crashed one left. Short, because unix socket paths end at 107 bytes.
    pub fn from_env() -> Self {
        let root = std::env::var_os("GPU_MIGRATE_CLUSTER_DIR")
            .map_or_else(|| std::env::temp_dir().join("gpu-migrate-cluster"), PathBuf::from);
        Self { state: root.join("state"), root }
    }

    /// The same with a folder of its own for the state of another node.
    pub fn of_node(&self, node: &str) -> Self {
        Self { root: self.root.clone(), state: self.state.join(node) }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// One log file a component. They outlive the cluster, so that CI can show them.
    pub fn logs(&self) -> PathBuf {
        self.root.join("logs")
    }

    /// Everything that is thrown away at the next start.
    pub fn state(&self) -> PathBuf {
        self.state.clone()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.state().join(name)
    }

    /// containerd's socket. Shims carry it in their command line, which distinguishes leftovers from other containers.
    pub fn containerd_socket(&self) -> PathBuf {
        self.file(SOCKET)
    }

    /// What containerd keeps until the node reboots.
    pub fn containerd_run(&self) -> PathBuf {
        self.file("containerd-run")
    }

    /// CDI specifications. The kubelet of a machine would have them in `/var/run/cdi`, which does not outlive a reboot.
    pub fn cdi(&self) -> PathBuf {
        self.file("cdi")
    }

    /// Faults of the NVML stand-in, see `nvml/nvml.c`.
    pub fn nvml_faults(&self) -> PathBuf {
        self.file("nvml-faults")
    }

    /// Writes a file of the state folder and returns its path. A program that reads it meanwhile reads the
    /// old content or the new.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> Result<PathBuf> {
        let path = self.file(name);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        }
        let mut draft = path.clone().into_os_string();
        draft.push(".new");
        let written = fs::write(&draft, content).and_then(|()| fs::rename(&draft, &path));
        written.with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }
}

/// Loopback ports, all free at the moment of choosing.
#[derive(Clone, Copy, Debug)]
pub struct Ports {
    pub etcd: u16,
    pub etcd_peer: u16,
    pub apiserver: u16,
    pub controller_manager: u16,
    pub scheduler: u16,
    pub kubelet: u16,
    pub second_kubelet: u16,
    /// Our webhook, and its metrics.
    pub webhook: [u16; 2],
    /// The same of its other replica, where there are two.
    pub second_webhook: [u16; 2],
    /// Our extender, and its metrics.
    pub extender: [u16; 2],
    /// The same of its other replica, where there are two.
    pub second_extender: [u16; 2],
    pub bridge_metrics: u16,
    pub operators: [u16; 2],
    pub collector: u16,
    pub prometheus: u16,
}

impl Ports {
    /// Free ports that no connection gets as its own: one that is given to the etcd that restarts later would keep it from starting.
    pub fn choose() -> Result<Self> {
        let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
        let range: Vec<u16> = range.split_whitespace().filter_map(|port| port.parse().ok()).collect();
        let ephemeral = |port: &u16| matches!(range[..], [low, high] if (low..=high).contains(port));
        let mut ports = (FIRST_PORT..u16::MAX)
            .filter(|port| !ephemeral(port))
            .filter(|port| TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port)).is_ok());
        let mut next = || -> Result<u16> { ports.next().context("too few free ports") };
        Ok(Self {
            etcd: next()?,
            etcd_peer: next()?,
            apiserver: next()?,
            controller_manager: next()?,
            scheduler: next()?,
            kubelet: next()?,
            second_kubelet: next()?,
            webhook: [next()?, next()?],
            second_webhook: [next()?, next()?],
            extender: [next()?, next()?],
            second_extender: [next()?, next()?],
            bridge_metrics: next()?,
            operators: [next()?, next()?],
            collector: next()?,
            prometheus: next()?,
        })
    }
}
