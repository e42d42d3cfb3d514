//! A stand-in for NVIDIA's device plugin, over gRPC: registers where `KUBELET_SOCKET` would say, serves `nvidia-gpu.sock`, registers
//! again when its registrar's socket is made anew, answers with the cards it was asked for, whatever the kubelet believes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use gpu_migrate_kubelet_api::deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use gpu_migrate_kubelet_api::deviceplugin::registration_client::RegistrationClient;
use gpu_migrate_kubelet_api::deviceplugin::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, ContainerPreferredAllocationResponse,
    Device, DevicePluginOptions, Empty, HEALTHY, ListAndWatchResponse, PreStartContainerRequest,
    PreStartContainerResponse, PreferredAllocationRequest, PreferredAllocationResponse, RegisterRequest,
    VERSION,
};
use gpu_migrate_kubelet_api::directory::Stamp;
use gpu_migrate_kubelet_api::socket::{bind, dial};
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

const SOCKET: &str = "nvidia-gpu.sock";
const RESOURCE: &str = "nvidia.com/gpu";
const LOOK: Duration = Duration::from_millis(50);

/// The plugin of one node.
#[derive(Clone, Debug)]
pub struct NvidiaPlugin {
    /// Directory of the kubelet's plugins.
    pub folder: PathBuf,
    /// File name of the socket to register with: the node agent's, or `kubelet.sock`.
    pub registrar: String,
    /// UUIDs of the cards.
    pub cards: Vec<String>,
}

impl NvidiaPlugin {
    /// Runs until `stop`: whenever the registrar's socket is another one, everything is built anew.
    pub async fn run(self, stop: CancellationToken) {
        let registrar = self.folder.join(&self.registrar);
        while !stop.is_cancelled() {
            let stamp = Stamp::of(&registrar);
            let life = stop.child_token();
            let served = if stamp.is_some() { self.live(&registrar, life.clone()).await } else { Ok(()) };
            if let Err(error) = served {
                tracing::debug!(error, "NVIDIA's plugin did not register; it tries again");
                life.cancel();
                tokio::select! { () = tokio::time::sleep(LOOK) => {}, () = stop.cancelled() => {} }
                continue;
            }
            let own = Stamp::of(&self.folder.join(SOCKET));
            while !stop.is_cancelled()
                && Stamp::of(&registrar) == stamp
                && (stamp.is_none() || Stamp::of(&self.folder.join(SOCKET)) == own)
            {
                tokio::select! { () = tokio::time::sleep(LOOK) => {}, () = stop.cancelled() => {} }
            }
            life.cancel();
        }
    }

    async fn live(&self, registrar: &Path, life: CancellationToken) -> Result<(), String> {
        let listener = bind(&self.folder.join(SOCKET)).map_err(|error| error.to_string())?;
        let service = DevicePluginServer::new(Service { cards: self.cards.clone(), life: life.clone() });
        let server = Server::builder()
            .add_service(service)
            .serve_with_incoming_shutdown(UnixListenerStream::new(listener), life.cancelled_owned());
        tokio::spawn(server);
        let channel = dial(registrar).await.map_err(|error| error.to_string())?;
        let request = RegisterRequest {
            version: VERSION.into(),
            endpoint: SOCKET.into(),
            resource_name: RESOURCE.into(),
            options: Some(options()),
        };
        RegistrationClient::new(channel)
            .register(request)
            .await
            .map(|_| ())
            .map_err(|status| status.to_string())
    }
}

fn options() -> DevicePluginOptions {
    DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true }
}

struct Service {
    cards: Vec<String>,
    life: CancellationToken,
}

#[tonic::async_trait]
impl DevicePlugin for Service {
    type ListAndWatchStream = ReceiverStream<Result<ListAndWatchResponse, Status>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(options()))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let (sender, stream) = mpsc::channel(1);
        let device = |id: &String| Device { id: id.clone(), health: HEALTHY.into(), topology: None };
        let list: ListAndWatchResponse = self.cards.iter().map(device).collect();
        let life = self.life.clone();
        tokio::spawn(async move {
            // One list, and then only the end: these cards do not break.
            if sender.send(Ok(list)).await.is_ok() {
                tokio::select! { () = life.cancelled() => {}, () = sender.closed() => {} }
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let choose = |ask: gpu_migrate_kubelet_api::deviceplugin::ContainerPreferredAllocationRequest| {
            let size = usize::try_from(ask.allocation_size).unwrap_or(0);
            let mut device_ids = ask.must_include_device_ids;
            for id in ask.available_device_ids {
                if device_ids.len() < size && !device_ids.contains(&id) {
                    device_ids.push(id);
                }
            }
            ContainerPreferredAllocationResponse { device_ids }
        };
        let container_responses = request.into_inner().container_requests.into_iter().map(choose).collect();
        Ok(Response::new(PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let mut container_responses = Vec::new();
        for ask in request.into_inner().container_requests {
            if let Some(unknown) = ask.devices_ids.iter().find(|id| !self.cards.contains(id)) {
                return Err(Status::unknown(format!(
                    "invalid allocation request for {RESOURCE:?}: unknown device: {unknown}"
                )));
            }
            let mut answer = ContainerAllocateResponse::default();
            answer.envs.insert("NVIDIA_VISIBLE_DEVICES".into(), ask.devices_ids.join(","));
            container_responses.push(answer);
        }
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Ok(Response::new(PreStartContainerResponse {}))
    }
}
