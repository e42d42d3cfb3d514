//! A real Kubernetes cluster on loopback, and the scenarios that run on it.
//!
//! [`Cluster::start`] brings up etcd, kube-apiserver, kube-controller-manager, kube-scheduler, containerd and a kubelet, and
//! [`Cluster::enter`] puts a [`Stage`] on top: plain Kubernetes with NVIDIA's device plugin, or gpu-migrate with that same
//! plugin behind the bridge. Nothing is mocked but the card: NVIDIA's plugin and ours load [a stand-in for
//! NVML](../nvml/nvml.c) with eight cards.
//!
//! # Adding a scenario
//!
//! Write an `async fn(&mut Cluster) -> anyhow::Result<()>` in `tests/scenarios/`, list it in `main.rs` with the stage it
//! runs on, and use:
//!
//! - [`workload`] for manifests, [`Cluster::namespace`] for a namespace that is gone again afterwards;
//! - [`wait::until`] for every wait: it polls up to a deadline and says what it saw last (there are no fixed sleeps);
//! - [`observe`] to learn what a container *really* got: it reads `/proc`, not the API and not our ledger;
//! - [`Cluster::kill`], [`Cluster::start_component`], [`Cluster::restart`] for accidents.
//!
//! When a scenario fails, [`diagnose`] prints the pods, the events and the ends of all logs.
//!
//! # What it needs
//!
//! Root, and Debian's `containerd`, `runc` and `etcd-server`. Kubernetes and NVIDIA's plugin come from `KUBEBUILDER_ASSETS`
//! or the `PATH`, else they are built with Go from the modules pinned in `go.mod` and `nvidia/go.mod`; see [`binaries`].
//! It runs with `GPU_MIGRATE_CLUSTER=1` only: it takes `/var/lib/kubelet` for itself and leaves it empty.

pub mod binaries;
pub mod cluster;
pub mod configs;
pub mod diagnose;
pub mod http;
pub mod image;
pub mod layout;
pub mod leftovers;
pub mod metrics;
pub mod migration;
pub mod nodes;
pub mod observe;
pub mod pki;
pub mod process;
pub mod proxy;
pub mod stage;
pub mod wait;
pub mod workload;

pub use cluster::Cluster;
pub use stage::Stage;
