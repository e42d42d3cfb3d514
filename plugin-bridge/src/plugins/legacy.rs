//! The plugin that the kubelet sees for each of NVIDIA's resources: NVIDIA's answers, over devices that the ledger allows.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::list_and_watch::{ListStream, watch_list};
use super::{not_written, refused};
use crate::decide::{AllocateError, LegacyGrant, Resource};
use crate::node::{Node, NodeEvent};
use crate::nvidia::{UpstreamError, Upstreams};
use gpu_migrate_kubelet_api::deviceplugin::device_plugin_server::DevicePlugin;
use gpu_migrate_kubelet_api::deviceplugin::{
    AllocateRequest, AllocateResponse, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, ContainerPreferredAllocationResponse, DevicePluginOptions, Empty,
    PreStartContainerRequest, PreStartContainerResponse, PreferredAllocationRequest,
    PreferredAllocationResponse,
};

/// Seen: 4 to 7 ms.
const PREFER: Duration = Duration::from_millis(500);
/// Seen: 0.3 ms. The whole node waits for it.
const ALLOCATE: Duration = Duration::from_secs(3);
const PRE_START: Duration = Duration::from_secs(25);
const SECOND_LOOK: Duration = Duration::from_millis(300);

/// One of NVIDIA's resources, for one registration with the kubelet.
pub struct LegacyPlugin {
    node: Arc<Node>,
    upstreams: Arc<Upstreams>,
    resource: String,
    streams: CancellationToken,
}

impl LegacyPlugin {
    /// Serves `resource` until `streams` is cancelled.
    #[must_use]
    pub fn new(
        node: Arc<Node>,
        upstreams: Arc<Upstreams>,
        resource: String,
        streams: CancellationToken,
    ) -> Self {
        Self { node, upstreams, resource, streams }
    }

    /// What the kubelet may call: always for a preference (we steer), the rest as NVIDIA's plugin wants it.
    #[must_use]
    pub fn options(upstreams: &Upstreams, resource: &str) -> DevicePluginOptions {
        DevicePluginOptions { get_preferred_allocation_available: true, ..upstreams.options(resource) }
    }

    async fn prefer_one(&self, ask: ContainerPreferredAllocationRequest) -> Vec<String> {
        let size = usize::try_from(ask.allocation_size).unwrap_or(0);
        let offer = self.node.with(|state, _| {
            state.available_legacy(&ask.available_device_ids, &ask.must_include_device_ids, size)
        });
        let of_nvidia = tokio::time::timeout(PREFER, self.nvidias_choice(&offer, &ask)).await;
        match of_nvidia {
            Ok(Ok(chosen)) if chosen.iter().all(|id| offer.contains(id)) && chosen.len() == size => chosen,
            _ => {
                let mut chosen = ask.must_include_device_ids;
                for id in offer {
                    if chosen.len() < size && !chosen.contains(&id) {
                        chosen.push(id);
                    }
                }
                chosen
            }
        }
    }

    async fn nvidias_choice(
        &self,
        offer: &[String],
        ask: &ContainerPreferredAllocationRequest,
    ) -> Result<Vec<String>, UpstreamError> {
        let mut upstream = self.upstreams.get(&self.resource).await?;
        if !upstream.options.get_preferred_allocation_available {
            return Ok(Vec::new());
        }
        let ask = ContainerPreferredAllocationRequest { available_device_ids: offer.to_vec(), ..ask.clone() };
        let request = PreferredAllocationRequest { container_requests: vec![ask] };
        let answer = upstream.client.get_preferred_allocation(request).await.map_err(|s| self.failed(s))?;
        Ok(answer.into_inner().container_responses.into_iter().flat_map(|c| c.device_ids).collect())
    }

    async fn allocate_one(&self, ids: &[String]) -> Result<ContainerAllocateResponse, Status> {
        self.node.read_checkpoint();
        let mut outcome = self.decide(ids);
        if matches!(outcome, Err(AllocateError::NoFreeCapacity { .. })) {
            let _ = tokio::time::timeout(SECOND_LOOK, self.node.list_pod_resources()).await;
            self.node.read_checkpoint();
            outcome = self.decide(ids);
        }
        let granted = outcome.map_err(|refusal| {
            tracing::warn!(%refusal, "Allocate refused");
            refused(&refusal)
        })?;
        match self.give(&granted).await {
            Ok(answer) => {
                tracing::info!(resource = %self.resource, asked = ?ids, given = ?granted.devices, "allocated");
                Ok(answer)
            }
            Err(status) => {
                if !granted.repeated {
                    self.node.with(|state, _| state.roll_back(granted.grant));
                    // Best effort: a row too many is dropped when it is not taken up.
                    let _ = self.node.write_deviations();
                }
                Err(status)
            }
        }
    }

    fn decide(&self, ids: &[String]) -> Result<LegacyGrant, AllocateError> {
        self.node.with(|state, now| state.allocate_legacy(&self.resource, ids, now))
    }

    /// Writes a deviation down, then asks NVIDIA's plugin for the devices that the container really gets.
    async fn give(&self, granted: &LegacyGrant) -> Result<ContainerAllocateResponse, Status> {
        if granted.deviates {
            tracing::warn!(resource = %self.resource, given = ?granted.devices, "other cards are given than the kubelet asked for");
            self.node.metrics.substituted();
            self.node.record_event(NodeEvent::normal(
                "CardsSubstituted",
                format!(
                    "{} is answered with {} instead of what the kubelet asked for",
                    self.resource,
                    granted.devices.join(", ")
                ),
            ));
        }
        // Also where this one does not deviate: a row of one that ended would be read back as this one's. Most often nothing
        // has changed.
        self.node.write_deviations().map_err(|e| not_written(&e))?;
        let mut upstream = self.upstreams.get(&self.resource).await.map_err(|away| {
            // The next one would wait as long, and fail as well.
            self.node.with(|state, now| state.withdraw_resource(&self.resource, now));
            Status::unavailable(away.to_string())
        })?;
        let ask = ContainerAllocateRequest { devices_ids: granted.devices.clone() };
        let call = upstream.client.allocate(AllocateRequest { container_requests: vec![ask] });
        let answer = match tokio::time::timeout(ALLOCATE, call).await {
            Ok(answer) => {
                answer.map_err(|status| Status::new(status.code(), self.failed(status).to_string()))?
            }
            Err(_) => {
                self.upstreams.request_reregistration();
                self.node.with(|state, now| state.withdraw_resource(&self.resource, now));
                return Err(Status::deadline_exceeded(format!(
                    "NVIDIA's plugin did not answer Allocate for {} within {ALLOCATE:?}",
                    self.resource
                )));
            }
        };
        answer.into_inner().container_responses.into_iter().next().ok_or_else(|| {
            Status::internal(format!("NVIDIA's plugin answered Allocate for {} with nothing", self.resource))
        })
    }

    fn failed(&self, status: Status) -> UpstreamError {
        UpstreamError::Failed { resource: self.resource.clone(), status: Box::new(status) }
    }
}

#[tonic::async_trait]
impl DevicePlugin for LegacyPlugin {
    type ListAndWatchStream = ListStream;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(Self::options(&self.upstreams, &self.resource)))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let resource = Resource::Legacy(self.resource.as_str().into());
        Ok(Response::new(watch_list(self.node.clone(), resource, self.streams.clone())))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        self.node.read_checkpoint();
        let mut container_responses = Vec::new();
        for ask in request.into_inner().container_requests {
            let device_ids = self.prefer_one(ask).await;
            container_responses.push(ContainerPreferredAllocationResponse { device_ids });
        }
        Ok(Response::new(PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let began = Instant::now();
        let mut container_responses = Vec::new();
        for ask in request.into_inner().container_requests {
            let answer = self.allocate_one(&ask.devices_ids).await;
            self.node.metrics.allocated("legacy", answer.is_ok(), began.elapsed());
            container_responses.push(answer?);
        }
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        let ids = request.into_inner().devices_ids;
        let devices_ids = self.node.with(|state, _| state.actual_devices(&self.resource, &ids));
        let mut upstream =
            self.upstreams.get(&self.resource).await.map_err(|e| Status::unavailable(e.to_string()))?;
        let call = upstream.client.pre_start_container(PreStartContainerRequest { devices_ids });
        tokio::time::timeout(PRE_START, call).await.map_err(|_| {
            Status::deadline_exceeded("NVIDIA's plugin did not answer PreStartContainer in time")
        })?
    }
}
