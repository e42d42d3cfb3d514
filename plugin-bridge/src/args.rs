//! The command line; every flag can also be set by environment.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Parser;
use clap::builder::NonEmptyStringValueParser;
use gpu_migrate_runtime::LogFormat;
use gpu_migrate_runtime::trace::TraceArgs;

use crate::isolation::{self, Folders, Isolation, Kind, NodeFacts};
use crate::plugins::answer::{AnswerStyle, IdStrategy, ListStrategy};

/// Node agent of gpu-migrate: keeps the ledger of this node's cards and serves shared and whole-card GPU resources to the kubelet.
///
/// It registers tencent.com/vcuda-core and tencent.com/vcuda-memory with the kubelet, and sits between the kubelet and the
/// unmodified NVIDIA device plugin: set KUBELET_SOCKET in that plugin's DaemonSet to
/// /var/lib/kubelet/device-plugins/gpu-migrate@kubelet.sock.
#[derive(Clone, Debug, Parser)]
#[command(name = "gpu-migrate-bridge", version, about, long_about)]
pub struct Args {
    /// Name of this node in the cluster.
    #[arg(long, env = "NODE_NAME", value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    pub node_name: String,
    /// The kubelet's root directory.
    #[arg(long, env = "GPU_MIGRATE_KUBELET_DIR", default_value = "/var/lib/kubelet", value_name = "DIR")]
    pub kubelet_dir: PathBuf,
    /// Directory of the agent's own state [default: device-plugins/gpu-migrate below the kubelet's].
    #[arg(long, env = "GPU_MIGRATE_STATE_DIR", value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Where the host's cgroups are mounted: a card is released when its container's cgroup has no process. A container sees only its own
    /// cgroups in /sys/fs/cgroup, so mount the host's folder.
    #[arg(long, env = "GPU_MIGRATE_CGROUP_DIR", default_value = "/sys/fs/cgroup", value_name = "DIR")]
    pub cgroup_dir: PathBuf,
    /// The cards: "nvml", or a YAML or JSON file that lists them.
    #[arg(long, env = "GPU_MIGRATE_INVENTORY", default_value = "nvml", value_name = "nvml|FILE")]
    pub inventory: String,
    /// Another NVML library than the driver's libnvidia-ml.so.1.
    #[arg(long, env = "GPU_MIGRATE_NVML", value_name = "FILE")]
    pub nvml_library: Option<PathBuf>,
    /// Run without an API server: read the node's pods from this file (a List of Pods) whenever it changes.
    #[arg(long, env = "GPU_MIGRATE_PODS_FILE", value_name = "FILE", conflicts_with = "kubeconfig")]
    pub pods_file: Option<PathBuf>,
    /// Kubeconfig of the API server [default: KUBECONFIG, else the pod's service account].
    #[arg(long, env = "GPU_MIGRATE_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// How shared containers are shown their cards.
    #[arg(long, env = "GPU_MIGRATE_DEVICE_LIST_STRATEGY", value_delimiter = ',', default_value = "envvar")]
    pub device_list_strategy: Vec<ListStrategy>,
    /// How a card is named to the container runtime.
    #[arg(long, env = "GPU_MIGRATE_DEVICE_ID_STRATEGY", default_value = "uuid")]
    pub device_id_strategy: IdStrategy,
    /// Also name the device nodes of the cards in the answer.
    #[arg(long, env = "GPU_MIGRATE_PASS_DEVICE_SPECS")]
    pub pass_device_specs: bool,
    /// Write one CDI specification per container to this directory (for instance /var/run/cdi) and refer the runtime to it.
    /// Without it the CDI strategies refer to NVIDIA's devices, nvidia.com/gpu=UUID.
    #[arg(long, env = "GPU_MIGRATE_CDI_SPEC_DIR", value_name = "DIR")]
    pub cdi_spec_dir: Option<PathBuf>,
    /// How containers are limited to their share of a card.
    #[arg(long, env = "GPU_MIGRATE_ISOLATION", default_value = "none")]
    pub isolation: Kind,
    /// Directory of the isolation's libraries, one folder per version.
    #[arg(
        long,
        env = "GPU_MIGRATE_LIBRARY_DIR",
        default_value = "/usr/local/gpu-migrate/lib",
        value_name = "DIR"
    )]
    pub library_dir: PathBuf,
    /// Root of the MPS control daemon's pipe and shm.
    #[arg(long, env = "GPU_MIGRATE_MPS_DIR", default_value = "/run/nvidia/mps", value_name = "DIR")]
    pub mps_dir: PathBuf,
    /// What is made for each container: vm below it for vcuda (gpu-manager's root), hami for hami-core.
    #[arg(long, env = "GPU_MIGRATE_MANAGER_DIR", default_value = "/etc/gpu-manager", value_name = "DIR")]
    pub manager_dir: PathBuf,
    /// Report the NUMA node of each vcuda device to the kubelet (a topology manager may then narrow the extender's choice).
    #[arg(long, env = "GPU_MIGRATE_NUMA_HINTS")]
    pub numa_hints: bool,
    /// Use a plugin of NVIDIA's that registers with the kubelet itself, by registering over it. Without this flag only while shares are
    /// here; cards of such a plugin take no first share.
    #[arg(long, env = "GPU_MIGRATE_REGISTER_OVER_NVIDIA_PLUGIN")]
    pub register_over_nvidia_plugin: bool,
    /// Where /livez, /readyz, /metrics and /cards are served; empty: nowhere.
    #[arg(long, env = "GPU_MIGRATE_METRICS_BIND", default_value = "[::]:9404", value_name = "ADDR")]
    pub metrics_bind: String,
    /// Traces.
    #[command(flatten)]
    pub trace: TraceArgs,
    /// Form of the log lines; GPU_MIGRATE_LOG sets what is logged (default "info").
    #[arg(long, env = "GPU_MIGRATE_LOG_FORMAT", value_enum, default_value_t)]
    pub log_format: LogFormat,
}

impl Args {
    /// How shares are kept apart, on a node that has this.
    #[must_use]
    pub fn isolation(&self, node: NodeFacts) -> Arc<dyn Isolation> {
        let folders = Folders {
            libraries: self.library_dir.clone(),
            manager: self.manager_dir.clone(),
            mps: self.mps_dir.clone(),
        };
        isolation::strategy(self.isolation, &folders, node)
    }

    /// How answers are made.
    #[must_use]
    pub fn style(&self) -> AnswerStyle {
        AnswerStyle {
            lists: self.device_list_strategy.clone(),
            ids: self.device_id_strategy,
            device_specs: self.pass_device_specs,
            ..AnswerStyle::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    /// A field reference that is not resolved, an unset variable in a unit file.
    #[test]
    fn a_node_has_a_name() {
        let parse = |name: &str| Args::try_parse_from(["gpu-migrate-bridge", "--node-name", name]);
        assert!(parse("gpu-01").is_ok());
        assert_eq!(parse("").unwrap_err().exit_code(), 2);
    }
}
