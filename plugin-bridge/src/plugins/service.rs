//! The device plugin gRPC service that both kinds of plugins share: one request after the other, measured.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_migrate_kubelet_api::deviceplugin::device_plugin_server::DevicePlugin;
use gpu_migrate_kubelet_api::deviceplugin::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, ContainerPreferredAllocationRequest,
    ContainerPreferredAllocationResponse, DevicePluginOptions, Empty, PreStartContainerRequest,
    PreStartContainerResponse, PreferredAllocationRequest, PreferredAllocationResponse,
};
use tonic::{Request, Response, Status};

use super::list_and_watch::{ListStream, Streams, watch_list};
use super::refused;
use crate::decide::{AllocateError, Resource};
use crate::node::Node;

/// How long pod-resources may take before an Allocate is refused: every pod of the node waits for it.
pub(super) const POD_RESOURCES: Duration = Duration::from_millis(300);

#[tonic::async_trait]
pub trait Plugin: Send + Sync + 'static {
    /// Label `kind` of the metrics.
    const KIND: &'static str;

    fn node(&self) -> &Arc<Node>;

    fn resource(&self) -> Resource;

    fn options(&self) -> DevicePluginOptions;

    /// Which devices the kubelet should allocate; it fills up an answer with too few.
    async fn prefer(&self, request: ContainerPreferredAllocationRequest) -> Vec<String>;

    async fn allocate(&self, ids: &[String]) -> Result<ContainerAllocateResponse, Status>;

    async fn pre_start(&self, ids: Vec<String>) -> Result<PreStartContainerResponse, Status>;
}

/// A plugin, for one registration with the kubelet.
pub struct Service<P> {
    pub(super) plugin: P,
    pub(super) streams: Streams,
}

/// Decides with what is known, and where that is refused once more after pod-resources has been listed: a holder may be gone
/// without the API having reported it.
pub(super) async fn decide_twice<G>(
    node: &Node,
    decide: impl Fn() -> Result<G, AllocateError>,
) -> Result<G, Status> {
    let mut outcome = decide();
    if matches!(outcome, Err(AllocateError::NoFreeCapacity { .. })) {
        let list = tokio::time::timeout(POD_RESOURCES, node.list_pod_resources()).await;
        tracing::debug!(
            listed = matches!(list, Ok(Ok(_))),
            "listed pod-resources before refusing an Allocate"
        );
        node.read_checkpoint();
        outcome = decide();
    }
    outcome.map_err(|error| {
        tracing::warn!(%error, "Allocate refused");
        refused(&error)
    })
}

#[tonic::async_trait]
impl<P: Plugin> DevicePlugin for Service<P> {
    type ListAndWatchStream = ListStream;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(self.plugin.options()))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let (node, resource) = (self.plugin.node().clone(), self.plugin.resource());
        Ok(Response::new(watch_list(node, resource, self.streams.clone())))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        self.plugin.node().read_checkpoint();
        let mut container_responses = Vec::new();
        for request in request.into_inner().container_requests {
            let device_ids = self.plugin.prefer(request).await;
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
        for request in request.into_inner().container_requests {
            self.plugin.node().read_checkpoint();
            let answer = self.plugin.allocate(&request.devices_ids).await;
            self.plugin.node().metrics.allocated(P::KIND, answer.is_ok(), began.elapsed());
            container_responses.push(answer?);
        }
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        self.plugin.pre_start(request.into_inner().devices_ids).await.map(Response::new)
    }
}
