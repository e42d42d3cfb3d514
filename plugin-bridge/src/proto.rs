//! gpu-manager's registration of virtual devices, generated from `proto/`.

/// The messages and the service.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod vcuda {
    tonic::include_proto!("vcuda");
}
