//! gpu-manager's registration of virtual devices, generated from `proto/`.

#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod vcuda {
    tonic::include_proto!("vcuda");
}
