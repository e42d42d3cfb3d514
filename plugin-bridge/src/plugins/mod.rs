//! The device plugins that the kubelet sees: two of ours, and one for each resource of NVIDIA's.

pub mod answer;
pub mod cdi;
pub mod legacy;
mod list_and_watch;
pub mod shared;

use crate::decide::AllocateError;
use crate::node::StateError;

/// The refusal as the kubelet shows it in the pod's event.
fn refused(refusal: &AllocateError) -> tonic::Status {
    match refusal {
        AllocateError::UnknownDevice { .. } => tonic::Status::invalid_argument(refusal.to_string()),
        AllocateError::NotReady { .. } => tonic::Status::unavailable(refusal.to_string()),
        AllocateError::NoFreeCapacity { .. } => tonic::Status::resource_exhausted(refusal.to_string()),
    }
}

fn not_written(error: &StateError) -> tonic::Status {
    tonic::Status::unavailable(format!(
        "the deviation could not be written down, so it is not given: {error}"
    ))
}
