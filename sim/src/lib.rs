//! Stand-ins for what surrounds the components, for tests and the demo. They know none of our components.
//!
//! - [`device_manager`]: the kubelet's device manager, as values and over sockets
//! - [`nvidia`]: NVIDIA's device plugin
//! - [`judge`]: the invariants, from what containers really got
//! - [`cluster`]: an API server, a scheduler loop, controllers and kubelets, in one process

pub mod cluster;
pub mod device_manager;
pub mod judge;
pub mod nvidia;
