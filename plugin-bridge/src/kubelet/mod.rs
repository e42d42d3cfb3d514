//! What the agent does with the kubelet: keeps its plugins registered, and lists pod-resources.

pub mod endpoint;
pub mod podresources;
