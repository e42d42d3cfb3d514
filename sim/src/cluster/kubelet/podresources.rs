//! The pod-resources API: who has which devices now. One element per device, as in 1.33; pods that are over are not listed, though
//! the checkpoint still has them.

use std::path::Path;
use std::sync::Arc;

use gpu_migrate_kubelet_api::podresources::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use gpu_migrate_kubelet_api::podresources::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, ContainerDevices, ContainerResources,
    ListPodResourcesRequest, ListPodResourcesResponse, PodResources,
};
use gpu_migrate_kubelet_api::socket::bind;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::Inner;

/// Serves it below the kubelet's root until `life` ends.
///
/// # Errors
/// Where the socket cannot be made.
pub(super) fn serve(kubelet: Arc<Inner>, root: &Path, life: CancellationToken) -> std::io::Result<()> {
    let folder = root.join("pod-resources");
    std::fs::create_dir_all(&folder)?;
    let listener = bind(&folder.join("kubelet.sock")).map_err(std::io::Error::other)?;
    let service = PodResourcesListerServer::new(Lister { kubelet });
    let server = tonic::transport::Server::builder()
        .add_service(service)
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), life.cancelled_owned());
    tokio::spawn(server);
    Ok(())
}

struct Lister {
    kubelet: Arc<Inner>,
}

#[tonic::async_trait]
impl PodResourcesLister for Lister {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        let entries = self.kubelet.devices.entries();
        let devices = |uid: &str, container: &str| {
            let of = entries.iter().filter(|entry| entry.pod_uid == uid && entry.container == container);
            of.flat_map(|entry| {
                entry.ids.iter().map(|id| ContainerDevices {
                    resource_name: entry.resource.clone(),
                    device_ids: vec![id.clone()],
                    topology: None,
                })
            })
            .collect()
        };
        let pods = self.kubelet.active_pods().into_iter().map(|pod| PodResources {
            containers: pod
                .containers
                .iter()
                .map(|name| ContainerResources { name: name.clone(), devices: devices(&pod.uid, name) })
                .collect(),
            name: pod.name,
            namespace: pod.namespace,
        });
        Ok(Response::new(ListPodResourcesResponse { pod_resources: pods.collect() }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        Err(Status::unimplemented("GetAllocatableResources is not served by the simulated kubelet"))
    }
}
