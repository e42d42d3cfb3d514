//! The kubelet's pod-resources API: which pod has which devices *now*, without the pods that are finished.
//!
//! 1.33 lists one element per device, 1.20 one per resource; both become the same rows here.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::podresources::ClaimResource;
use crate::podresources::DynamicResource;
use crate::podresources::ListPodResourcesRequest;
use crate::podresources::ListPodResourcesResponse;
use crate::podresources::pod_resources_lister_client::PodResourcesListerClient;
use crate::socket::dial;

const TIMEOUT: Duration = Duration::from_secs(5);
/// 8 cards' worth of IDs in one-device elements stay below 1 MiB; a node of 64 cards below this.
const MESSAGE_LIMIT: usize = 64 << 20;

/// The devices of one container, by resource.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ContainerDevices {
    pub namespace: String,
    /// Name of the pod. (There is no UID in this API.)
    pub pod: String,
    pub container: String,
    /// Device IDs by resource name, in no particular order.
    pub devices: BTreeMap<String, Vec<String>>,
    /// Devices that it has through Dynamic Resource Allocation (DRA).
    pub claimed: Vec<ClaimedDevice>,
}

/// A device of a ResourceClaim.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ClaimedDevice {
    /// `namespace/name` of the ResourceClaim.
    pub claim: String,
    /// `gpu.nvidia.com`
    pub driver: String,
    /// Its name in the driver's ResourceSlice: `gpu-0`.
    pub device: String,
}

/// Why there is no list this time.
#[derive(Debug, thiserror::Error)]
pub enum PodResourcesError {
    #[error("cannot reach pod-resources on {path}: {source}")]
    Dial { path: PathBuf, source: tonic::transport::Error },
    /// The kubelet answered with an error.
    #[error("pod-resources List on {path} failed: {status}")]
    List { path: PathBuf, status: Box<tonic::Status> },
}

/// Asks once. A fresh connection each time: the kubelet may have been restarted since.
///
/// # Errors
/// [`PodResourcesError`]; nothing may be concluded from it.
pub async fn list(socket: &Path) -> Result<Vec<ContainerDevices>, PodResourcesError> {
    let channel = dial(socket)
        .await
        .map_err(|source| PodResourcesError::Dial { path: socket.to_path_buf(), source })?;
    let mut client = PodResourcesListerClient::new(channel).max_decoding_message_size(MESSAGE_LIMIT);
    let mut request = tonic::Request::new(ListPodResourcesRequest {});
    request.set_timeout(TIMEOUT);
    let answer = client
        .list(request)
        .await
        .map_err(|status| PodResourcesError::List { path: socket.to_path_buf(), status: Box::new(status) })?;
    Ok(rows(answer.into_inner()))
}

/// One row for each container that has a device.
#[must_use]
pub fn rows(answer: ListPodResourcesResponse) -> Vec<ContainerDevices> {
    let mut rows = Vec::new();
    for pod in answer.pod_resources {
        for container in pod.containers {
            let mut devices: BTreeMap<String, Vec<String>> = BTreeMap::new();
            for element in container.devices {
                devices.entry(element.resource_name).or_default().extend(element.device_ids);
            }
            let claimed: Vec<ClaimedDevice> =
                container.dynamic_resources.into_iter().flat_map(claimed).collect();
            if !devices.is_empty() || !claimed.is_empty() {
                rows.push(ContainerDevices {
                    namespace: pod.namespace.clone(),
                    pod: pod.name.clone(),
                    container: container.name,
                    devices,
                    claimed,
                });
            }
        }
    }
    rows
}

fn claimed(resource: DynamicResource) -> Vec<ClaimedDevice> {
    let claim = format!("{}/{}", resource.claim_namespace, resource.claim_name);
    let device = |device: ClaimResource| ClaimedDevice {
        claim: claim.clone(),
        driver: device.driver_name,
        device: device.device_name,
    };
    resource.claim_resources.into_iter().map(device).collect()
}
