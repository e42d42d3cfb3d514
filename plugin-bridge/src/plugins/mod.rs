//! The device plugins that the kubelet sees: two of ours, and one for each resource of NVIDIA's.

pub mod answer;
pub mod cdi;
pub mod legacy;
pub mod shared;
mod watching;

use crate::decide::Refusal;
use crate::node::StateError;

/// The refusal as the kubelet shows it in the pod's event.
fn refused(refusal: &Refusal) -> tonic::Status {
    match refusal {
        Refusal::UnknownDevice { .. } => tonic::Status::invalid_argument(refusal.to_string()),
        Refusal::NotOpen { .. } => tonic::Status::unavailable(refusal.to_string()),
        Refusal::NoRoom { .. } => tonic::Status::resource_exhausted(refusal.to_string()),
    }
}

fn not_written(error: &StateError) -> tonic::Status {
    tonic::Status::unavailable(format!(
        "the deviation could not be written down, so it is not given: {error}"
    ))
}
