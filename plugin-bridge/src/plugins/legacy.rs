//! The plugin that the kubelet sees for each of NVIDIA's resources: NVIDIA's answers, for devices that the ledger allows.

use std::sync::Arc;
use std::time::Duration;

use gpu_migrate_kubelet_api::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, DevicePluginOptions, PreStartContainerRequest,
    PreStartContainerResponse, PreferredAllocationRequest,
};
use tonic::Status;

use super::list_and_watch::Streams;
use super::not_written;
use super::service::{Plugin, Service, decide_twice};
use crate::decide::{LegacyGrant, Resource};
use crate::node::{Node, NodeEvent};
use crate::nvidia::{UpstreamError, Upstreams};

/// Seen: 4 to 7 ms.
const PREFER: Duration = Duration::from_millis(500);
/// Seen: 0.3 ms. Every pod of the node waits for it.
const ALLOCATE: Duration = Duration::from_secs(3);
const PRE_START: Duration = Duration::from_secs(25);

pub type LegacyPlugin = Service<Legacy>;

pub struct Legacy {
    node: Arc<Node>,
    upstreams: Arc<Upstreams>,
    resource: String,
}

impl LegacyPlugin {
    /// Serves `resource` until `streams` is cancelled.
    #[must_use]
    pub fn new(node: Arc<Node>, upstreams: Arc<Upstreams>, resource: String, streams: Streams) -> Self {
        Self { plugin: Legacy { node, upstreams, resource }, streams }
    }

    /// What the kubelet may call: always GetPreferredAllocation, to withhold devices; the rest as NVIDIA's plugin registered.
    #[must_use]
    pub fn options(upstreams: &Upstreams, resource: &str) -> DevicePluginOptions {
        DevicePluginOptions { get_preferred_allocation_available: true, ..upstreams.options(resource) }
    }
}

impl Legacy {
    async fn nvidias_choice(
        &self,
        available: &[String],
        request: &ContainerPreferredAllocationRequest,
    ) -> Result<Vec<String>, UpstreamError> {
        let mut upstream = self.upstreams.get(&self.resource).await?;
        if !upstream.options.get_preferred_allocation_available {
            return Ok(Vec::new());
        }
        let request = ContainerPreferredAllocationRequest {
            available_device_ids: available.to_vec(),
            ..request.clone()
        };
        let request = PreferredAllocationRequest { container_requests: vec![request] };
        let answer = upstream.client.get_preferred_allocation(request).await.map_err(|s| self.failed(s))?;
        Ok(answer.into_inner().container_responses.into_iter().flat_map(|c| c.device_ids).collect())
    }

    /// Writes a deviation to disk, then calls NVIDIA's plugin for the devices that the container gets.
    async fn call_nvidia(&self, granted: &LegacyGrant) -> Result<ContainerAllocateResponse, Status> {
        if granted.deviates {
            tracing::warn!(
                resource = %self.resource, given = ?granted.devices, "allocating other cards than the kubelet requested"
            );
            self.node.metrics.substituted();
            self.node.record_event(NodeEvent::normal(
                "CardsSubstituted",
                format!(
                    "{}: allocated {} instead of the devices that the kubelet requested",
                    self.resource,
                    granted.devices.join(", ")
                ),
            ));
        }
        // Also where this grant does not deviate: a row of an ended one would be read back as this one's. Mostly unchanged.
        self.node.write_deviations().await.map_err(|e| not_written(&e))?;
        let mut upstream = self.upstreams.get(&self.resource).await.map_err(|error| {
            // The next Allocate would wait as long, and fail as well.
            self.withdraw();
            Status::unavailable(error.to_string())
        })?;
        let request = ContainerAllocateRequest { devices_ids: granted.devices.clone() };
        let call = upstream.client.allocate(AllocateRequest { container_requests: vec![request] });
        let answer = tokio::time::timeout(ALLOCATE, call).await.map_err(|_| {
            self.upstreams.request_reregistration();
            self.withdraw();
            Status::deadline_exceeded(format!(
                "NVIDIA's plugin did not answer Allocate for {} within {ALLOCATE:?}",
                self.resource
            ))
        })?;
        let answer = answer.map_err(|status| Status::new(status.code(), self.failed(status).to_string()))?;
        answer.into_inner().container_responses.into_iter().next().ok_or_else(|| {
            Status::internal(format!(
                "NVIDIA's plugin answered Allocate for {} without a container response",
                self.resource
            ))
        })
    }

    fn withdraw(&self) {
        self.node.with(|state, now| state.withdraw_resource(&self.resource, now));
    }

    fn failed(&self, status: Status) -> UpstreamError {
        UpstreamError::Failed { resource: self.resource.clone(), status: Box::new(status) }
    }
}

#[tonic::async_trait]
impl Plugin for Legacy {
    const KIND: &'static str = "legacy";

    fn node(&self) -> &Arc<Node> {
        &self.node
    }

    fn resource(&self) -> Resource {
        Resource::Legacy(self.resource.as_str().into())
    }

    fn options(&self) -> DevicePluginOptions {
        LegacyPlugin::options(&self.upstreams, &self.resource)
    }

    async fn prefer(&self, request: ContainerPreferredAllocationRequest) -> Vec<String> {
        let size = usize::try_from(request.allocation_size).unwrap_or(0);
        let available = self.node.with(|state, _| {
            state.available_legacy(&request.available_device_ids, &request.must_include_device_ids, size)
        });
        match tokio::time::timeout(PREFER, self.nvidias_choice(&available, &request)).await {
            Ok(Ok(chosen)) if chosen.len() == size && chosen.iter().all(|id| available.contains(id)) => {
                chosen
            }
            _ => {
                let mut chosen = request.must_include_device_ids;
                for id in available {
                    if chosen.len() < size && !chosen.contains(&id) {
                        chosen.push(id);
                    }
                }
                chosen
            }
        }
    }

    async fn allocate(&self, ids: &[String]) -> Result<ContainerAllocateResponse, Status> {
        let decide = || self.node.with(|state, now| state.allocate_legacy(&self.resource, ids, now));
        let granted = decide_twice(&self.node, decide).await?;
        let answer = self.call_nvidia(&granted).await;
        if answer.is_ok() {
            tracing::info!(resource = %self.resource, requested = ?ids, given = ?granted.devices, "allocated");
        } else if !granted.repeated {
            self.node.with(|state, _| state.roll_back(granted.grant));
            // Best effort: an extra row is dropped when no container claims it.
            let _ = self.node.write_deviations().await;
        }
        answer
    }

    async fn pre_start(&self, ids: Vec<String>) -> Result<PreStartContainerResponse, Status> {
        let devices_ids = self.node.with(|state, _| state.actual_devices(&self.resource, &ids));
        let mut upstream =
            self.upstreams.get(&self.resource).await.map_err(|e| Status::unavailable(e.to_string()))?;
        let call = upstream.client.pre_start_container(PreStartContainerRequest { devices_ids });
        let answer = tokio::time::timeout(PRE_START, call).await.map_err(|_| {
            Status::deadline_exceeded(format!(
                "NVIDIA's plugin did not answer PreStartContainer for {} within {PRE_START:?}",
                self.resource
            ))
        })?;
        answer.map(tonic::Response::into_inner)
    }
}
