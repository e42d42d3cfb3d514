//! Everything that is spoken with the kubelet: its socket directory, the registration of plugins, pod-resources.

pub mod directory;
pub mod endpoint;
pub mod podresources;
