//! The device plugins that the kubelet sees: two of ours, and one for each resource of NVIDIA's.

pub mod answer;
pub mod cdi;
pub mod legacy;
pub mod list_and_watch;
mod service;
pub mod shared;

use crate::decide::AllocateError;
use crate::node::StateError;

/// The error as the kubelet shows it in the pod's event.
fn refused(error: &AllocateError) -> tonic::Status {
    match error {
        AllocateError::UnknownDevice { .. } => tonic::Status::invalid_argument(error.to_string()),
        AllocateError::NotReady { .. } => tonic::Status::unavailable(error.to_string()),
        AllocateError::NoFreeCapacity { .. } => tonic::Status::resource_exhausted(error.to_string()),
    }
}

fn not_written(error: &StateError) -> tonic::Status {
    tonic::Status::unavailable(format!("writing nvidia_checkpoint failed, so nothing is allocated: {error}"))
}
