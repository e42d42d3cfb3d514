//! The registration of our plugins with the kubelet.

pub mod endpoint;
