//! Node agent: one ledger, two device plugins, between the kubelet and the NVIDIA plugin.
//!
//! [`decide`] is the pure core, the other modules are I/O around it. [`agent::run`] starts all of them.

pub mod agent;
pub mod args;
pub mod cgroups;
pub mod cluster;
pub mod compare;
pub mod decide;
pub mod inventory;
pub mod isolation;
pub mod kubelet;
pub mod leftovers;
pub mod metrics;
pub mod node;
pub mod nvidia;
pub mod platform;
pub mod plugins;
pub mod proto;
pub mod record;
pub mod uninstall;
pub mod usage;
