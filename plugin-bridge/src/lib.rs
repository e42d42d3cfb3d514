//! Node agent: one ledger, two device plugins, between the kubelet and the NVIDIA plugin.

pub mod checkpoint;
pub mod decide;
pub mod kubelet;
pub mod proto;
