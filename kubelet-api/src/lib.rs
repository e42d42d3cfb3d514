//! The kubelet's interfaces on a node: the device-plugin and pod-resources APIs, the device checkpoint, and its sockets.

pub mod checkpoint;
pub mod checkpoint_file;
pub mod directory;
mod list;
pub mod lister;
pub mod socket;

/// The device plugin API, v1beta1: the kubelet's `Registration` and a plugin's `DevicePlugin`.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod deviceplugin {
    pub use super::list::{ListAndWatchResponse, ListWriter};

    tonic::include_proto!("v1beta1");

    /// The version string every plugin of this API registers with.
    pub const VERSION: &str = "v1beta1";
    /// Health of a device that may be allocated.
    pub const HEALTHY: &str = "Healthy";
    /// Health of a device that may not be allocated; a container that holds it keeps it.
    pub const UNHEALTHY: &str = "Unhealthy";
    /// The kubelet's registration socket, inside the device plugin directory.
    pub const KUBELET_SOCKET: &str = "kubelet.sock";
}

/// The pod-resources API, v1: which container has which devices now.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod podresources {
    tonic::include_proto!("v1");
}
