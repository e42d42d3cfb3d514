//! The protocols spoken on the node, as generated from `proto/`; one message is ours.

mod list;

/// The device plugin API, v1beta1: the kubelet's `Registration` and a plugin's `DevicePlugin`.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod deviceplugin {
    pub use super::list::{ListAndWatchResponse, ListWriter};

    tonic::include_proto!("v1beta1");

    /// The version string every plugin of this API registers with.
    pub const VERSION: &str = "v1beta1";
    /// Health of a device that may be handed out.
    pub const HEALTHY: &str = "Healthy";
    /// Health of a device that may not be handed out; who has it keeps it.
    pub const UNHEALTHY: &str = "Unhealthy";
}

/// The pod-resources API, v1: which container has which devices, as the kubelet sees it now.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod podresources {
    tonic::include_proto!("v1");
}

/// gpu-manager's registration of virtual devices.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod vcuda {
    tonic::include_proto!("vcuda");
}
