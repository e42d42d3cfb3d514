//! A real Kubernetes cluster on loopback, and the scenarios that run on it.
//!
//! [`Cluster::start`] brings up etcd, kube-apiserver, kube-controller-manager, kube-scheduler, containerd and a kubelet, and
//! [`Cluster::enter`] puts a [`Stage`] on top: plain Kubernetes with NVIDIA's device plugin, or gpu-migrate with that same
//! plugin behind the node agent. Nothing is mocked but the card: NVIDIA's plugin and ours load [a stand-in for
//! NVML](../nvml/nvml.c) with eight cards.
//!
//! # Adding a scenario
//!
//! Write an `async fn(&mut Cluster) -> anyhow::Result<()>` in `tests/scenarios/`, list it in `main.rs` with the stage it
//! runs on, and use:
//!
//! - [`workload`] for manifests, [`Cluster::namespace`] for a namespace that is gone again afterwards;
//! - [`wait::until`] for every wait: it polls up to a deadline and reports the last observation (there are no fixed sleeps);
//! - [`observe`] to learn what a container *really* got: it reads `/proc`, not the API and not our ledger;
//! - [`Cluster::kill`], [`Cluster::start_component`], [`Cluster::restart`] for failures.
//!
//! [`Cluster::add_node`] adds a second kubelet with a containerd of its own: with mounts of its own, since the kubelet's root is
//! fixed, and below a cgroup of its own.
//!
//! A scenario of the stage `Bare` installs gpu-migrate itself, as its owner would: [`runbook`] runs the commands of the
//! documents, and [`pod_programs`] runs each program next to its pod, so that a scenario can kill or freeze it; one scenario runs
//! them in their pods, from our images, on a [`pod_network`]. [`snapshot`] compares two moments, and [`audit`] lists the
//! requests to the apiserver; the last scenario compares them with the RBAC of `deploy/`.
//!
//! When a scenario fails, [`diagnose`] prints the pods, the events and the ends of all logs.
//!
//! # What it needs
//!
//! Root, and Debian's `runc`, `containernetworking-plugins` and `etcd-server`. Kubernetes, Helm and NVIDIA's plugin come from `KUBEBUILDER_ASSETS`
//! or the `PATH`, else they are built with Go from the modules pinned in `go.mod`, `helm/go.mod` and `nvidia/go.mod`, and containerd always
//! from `containerd/go.mod`; see [`binaries`], and `prepare` (`src/bin/prepare.rs`), which builds them ahead of a run, and promtool for the tests of the alerts.
//! It runs with `GPU_MIGRATE_CLUSTER=1` only: it takes `/var/lib/kubelet` for itself and leaves nothing there.
//!
//! | variable | means |
//! |---|---|
//! | `GPU_MIGRATE_CLUSTER=1` | run the scenarios, and fail where something they need is missing |
//! | `GPU_MIGRATE_CLUSTER_DIR` | state and logs (default: `gpu-migrate-cluster` in the temporary folder; the logs stay) |
//! | `GPU_MIGRATE_CACHE` | what was built from Go modules (default: `~/.cache/gpu-migrate`) |
//! | `GPU_MIGRATE_BIN_DIR` | our own binaries, instead of having cargo build them |
//! | `KUBEBUILDER_ASSETS` | a folder with Kubernetes' binaries, instead of building them |
//! | `GPU_MIGRATE_KUBERNETES=1.30` | on the oldest minor that the chart accepts, from `kubernetes-1.30/go.mod` |
//! | `GPU_MIGRATE_CHURN=1` | run the churn as well, as CI does: it takes minutes |
//! | `GPU_MIGRATE_LEADERS_SEED` | when leaders are killed or frozen (1) |
//! | `GPU_MIGRATE_CHURN_PODS`, `GPU_MIGRATE_CHURN_SEED` | length and course of the churn (300, 1) |
//!
//! `benches/throughput.rs` measures pods bound per second with our extender against without it, on a control plane without a
//! node.
//!
//! # Versions
//!
//! Kubernetes 1.37 is the newest minor that kube 5 supports. It runs with containerd 2.2, with Debian 12's runc 1.1 and etcd
//! 3.4, and on cgroup v1 (`failCgroupV1: false`). NVIDIA's plugin is v0.19.0, because neither
//! v0.20.0 nor a dependency of v0.19.1 could be had as Go modules; nor could NVIDIA's mock NVML, so `nvml/nvml.c` stands in.

pub mod audit;
pub mod binaries;
pub mod cleanup;
pub mod cluster;
pub mod configs;
pub mod device_nodes;
pub mod diagnose;
pub mod http;
pub mod image;
pub mod layout;
pub mod manifests;
pub mod metrics;
pub mod migration;
pub mod nodes;
pub mod observe;
pub mod pki;
pub mod pod_network;
pub mod pod_programs;
pub mod process;
pub mod proxy;
pub mod runbook;
pub mod snapshot;
pub mod stage;
pub mod wait;
pub mod workload;

pub use cluster::Cluster;
pub use stage::Stage;

/// This package's folder in the checkout whose tests run. Read at run time: a target folder that several checkouts share
/// may serve a test that was compiled in another one.
#[must_use]
pub fn package_folder() -> std::path::PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), Into::into)
}
