//! NVIDIA's device plugin, as v0.20.0 behaves: no allocation state, one channel of health events, terminal Unhealthy.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::Stream;
use gpu_migrate_kubelet_api::deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use gpu_migrate_kubelet_api::deviceplugin::registration_client::RegistrationClient;
use gpu_migrate_kubelet_api::deviceplugin::*;
use gpu_migrate_kubelet_api::socket::dial;
use gpu_migrate_plugin_bridge::nvidia::SOCKET;
use parking_lot::Mutex;
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::uuid;

/// One run of the plugin: ends with the token.
pub struct FakeNvidia {
    pub stop: CancellationToken,
    pub events: mpsc::UnboundedSender<String>,
    pub streams: Arc<AtomicU64>,
    pub allocated: Arc<Mutex<Vec<Vec<String>>>>,
    pub hang: Arc<std::sync::atomic::AtomicBool>,
}

impl FakeNvidia {
    /// Serves and registers with the agent, as the real one does at its start.
    pub async fn start(folder: PathBuf, cards: usize) -> Self {
        let stop = CancellationToken::new();
        let (events, received) = mpsc::unbounded_channel();
        let streams = Arc::new(AtomicU64::new(0));
        let allocated: Arc<Mutex<Vec<Vec<String>>>> = Arc::default();
        let hang = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let service = Service {
            cards,
            events: Arc::new(tokio::sync::Mutex::new(received)),
            streams: streams.clone(),
            allocated: allocated.clone(),
            hang: hang.clone(),
            stop: stop.clone(),
        };
        let socket = folder.join("nvidia-gpu.sock");
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).unwrap();
        tokio::spawn(
            Server::builder().add_service(DevicePluginServer::new(service)).serve_with_incoming_shutdown(
                UnixListenerStream::new(listener),
                stop.clone().cancelled_owned(),
            ),
        );
        let desk = folder.join(SOCKET);
        // The agent makes its socket anew when a plugin did not come back: like the real one, this one tries again then.
        let mut registered = false;
        for _ in 0..50 {
            super::until("the agent lets NVIDIA's plugin register", || desk.exists()).await;
            registered = register(&desk, "nvidia.com/gpu", "nvidia-gpu.sock").await.is_ok();
            if registered {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
        assert!(registered, "the agent refuses NVIDIA's plugin");
        Self { stop, events, streams, allocated, hang }
    }
}

pub async fn register(desk: &std::path::Path, resource: &str, endpoint: &str) -> Result<(), Status> {
    let channel = dial(desk).await.map_err(|e| Status::unavailable(e.to_string()))?;
    let request = RegisterRequest {
        version: "v1beta1".into(),
        endpoint: endpoint.into(),
        resource_name: resource.into(),
        options: Some(DevicePluginOptions { get_preferred_allocation_available: true, ..Default::default() }),
    };
    RegistrationClient::new(channel).register(request).await.map(drop)
}

struct Service {
    cards: usize,
    events: Arc<tokio::sync::Mutex<mpsc::UnboundedReceiver<String>>>,
    streams: Arc<AtomicU64>,
    allocated: Arc<Mutex<Vec<Vec<String>>>>,
    hang: Arc<std::sync::atomic::AtomicBool>,
    stop: CancellationToken,
}

#[tonic::async_trait]
impl DevicePlugin for Service {
    type ListAndWatchStream =
        std::pin::Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions {
            get_preferred_allocation_available: true,
            ..Default::default()
        }))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        self.streams.fetch_add(1, Ordering::SeqCst);
        let (sender, receiver) = mpsc::channel(1);
        let (events, stop, cards) = (self.events.clone(), self.stop.clone(), self.cards);
        tokio::spawn(async move {
            let mut health: BTreeMap<String, bool> = (0..cards).map(|n| (uuid(n), true)).collect();
            loop {
                let list: ListAndWatchResponse = health
                    .iter()
                    .map(|(id, healthy)| Device {
                        id: id.clone(),
                        health: if *healthy { HEALTHY } else { UNHEALTHY }.into(),
                        topology: Some(TopologyInfo { nodes: vec![NumaNode { id: 0 }] }),
                    })
                    .collect();
                // A dead handler takes one event with it, as the real one does: sending is only tried afterwards.
                if sender.send(Ok(list)).await.is_err() {
                    return;
                }
                let mut events = events.lock().await;
                tokio::select! {
                    event = events.recv() => match event {
                        Some(id) => { health.insert(id, false); }
                        None => return,
                    },
                    () = stop.cancelled() => return,
                }
            }
        });
        Ok(Response::new(Box::pin(tokio_stream::wrappers::ReceiverStream::new(receiver))))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let container_responses = request
            .into_inner()
            .container_requests
            .into_iter()
            .map(|ask| {
                let size = usize::try_from(ask.allocation_size).unwrap();
                let mut device_ids = ask.must_include_device_ids.clone();
                for id in ask.available_device_ids {
                    if device_ids.len() < size && !device_ids.contains(&id) {
                        device_ids.push(id);
                    }
                }
                ContainerPreferredAllocationResponse { device_ids }
            })
            .collect();
        Ok(Response::new(PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        if self.hang.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        let mut container_responses = Vec::new();
        for ask in request.into_inner().container_requests {
            if let Some(unknown) = ask.devices_ids.iter().find(|id| !(0..self.cards).any(|n| uuid(n) == **id))
            {
                return Err(Status::unknown(format!(
                    "invalid allocation request for nvidia.com/gpu: unknown device: {unknown}"
                )));
            }
            self.allocated.lock().push(ask.devices_ids.clone());
            let envs = BTreeMap::from([("NVIDIA_VISIBLE_DEVICES".to_owned(), ask.devices_ids.join(","))]);
            container_responses.push(ContainerAllocateResponse { envs, ..Default::default() });
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
