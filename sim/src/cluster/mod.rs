//! The embedded cluster: an API server, a scheduler loop, controllers and kubelets, in one process.
//!
//! - [`api`]: the API server, over HTTP on loopback, for kube clients and kubectl
//! - [`scheduler`]: calls the extender as kube-scheduler does
//! - [`controllers`]: Deployments, ReplicaSets, garbage
//! - [`kubelet`]: kubelets around a [device manager](crate::device_manager); containers are records

pub mod api;
pub mod cache;
pub mod controllers;
pub mod json_client;
pub mod kubelet;
pub mod scheduler;
