//! NVIDIA's plugin, in this process: its service over a pipe in place of its socket.

use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

use futures::{Stream, StreamExt};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};

use super::{Trouble, uuid};
use crate::decide::Millis;
use crate::nvidia::HealthSource;
use crate::platform::Sockets;
use gpu_migrate_kubelet_api::deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use gpu_migrate_kubelet_api::deviceplugin::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, ContainerPreferredAllocationResponse,
    Device, DevicePluginOptions, Empty, HEALTHY, ListAndWatchResponse, PreStartContainerRequest,
    PreStartContainerResponse, PreferredAllocationRequest, PreferredAllocationResponse, UNHEALTHY,
};
use gpu_migrate_model::units::CardIndex;

/// One life of the plugin, and the cards below it.
#[derive(Clone, Debug)]
pub(super) struct Nvidia {
    /// What it lists; ends with its life.
    pub(super) lists: Arc<watch::Sender<Vec<bool>>>,
    pub(super) trouble: Arc<Mutex<Trouble>>,
}

impl Nvidia {
    pub(super) fn new(well: Vec<bool>) -> Self {
        Self { lists: Arc::new(watch::Sender::new(well)), trouble: Arc::new(Mutex::new(Trouble::None)) }
    }
}

/// The plugin's socket: nobody there, or the life that serves it.
#[derive(Clone, Debug, Default)]
pub(super) struct Socket(pub(super) Arc<Mutex<Option<Nvidia>>>);

#[tonic::async_trait]
impl Sockets for Socket {
    async fn dial(&self, _: &Path) -> Result<Channel, tonic::transport::Error> {
        let served = self.0.lock().as_ref().map(|nvidia| Service {
            lists: Mutex::new(Some(nvidia.lists.subscribe())),
            trouble: nvidia.trouble.clone(),
        });
        let mut pipe = served.map(|service| {
            let (client, server) = tokio::io::duplex(1 << 16);
            let incoming = tokio_stream::once(Ok::<_, std::io::Error>(server));
            tokio::spawn(
                Server::builder().add_service(DevicePluginServer::new(service)).serve_with_incoming(incoming),
            );
            client
        });
        let connect = tower::service_fn(move |_| {
            let client = pipe.take().map(TokioIo::new);
            async move { client.ok_or(std::io::ErrorKind::ConnectionRefused).map_err(std::io::Error::from) }
        });
        Endpoint::from_static("http://localhost").connect_with_connector(connect).await
    }
}

struct Service {
    /// Handed to the one stream, so that it ends with the plugin's life.
    lists: Mutex<Option<watch::Receiver<Vec<bool>>>>,
    trouble: Arc<Mutex<Trouble>>,
}

#[tonic::async_trait]
impl DevicePlugin for Service {
    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

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
        let lists = self.lists.lock().take().ok_or_else(|| Status::internal("a second stream"))?;
        let device = |(card, well): (usize, &bool)| Device {
            id: uuid(card),
            health: if *well { HEALTHY } else { UNHEALTHY }.into(),
            topology: None,
        };
        let lists =
            WatchStream::new(lists).map(move |well| Ok(well.iter().enumerate().map(device).collect()));
        Ok(Response::new(Box::pin(lists)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let choose = |ask: gpu_migrate_kubelet_api::deviceplugin::ContainerPreferredAllocationRequest| {
            let mut device_ids = ask.must_include_device_ids;
            let size = usize::try_from(ask.allocation_size).unwrap();
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
        let trouble = *self.trouble.lock();
        match trouble {
            Trouble::NvidiaRefuses => return Err(Status::unknown("invalid allocation request")),
            Trouble::NvidiaHangs => std::future::pending().await,
            _ => {}
        }
        let answer = |ids: Vec<String>| {
            let mut answer = ContainerAllocateResponse::default();
            answer.envs.insert("NVIDIA_VISIBLE_DEVICES".into(), ids.join(","));
            answer
        };
        let asks = request.into_inner().container_requests.into_iter();
        let container_responses = asks.map(|ask| answer(ask.devices_ids)).collect();
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

/// The inventory: it sees a card well as soon as it is.
#[derive(Debug)]
pub(super) struct Inventory(pub(super) Arc<Mutex<Vec<bool>>>, pub(super) super::services::LifeClock);

impl HealthSource for Inventory {
    fn last_healthy_at(&self, card: CardIndex) -> Option<Millis> {
        self.0.lock()[card.position()].then(|| crate::platform::Clock::now(&self.1) + 1)
    }
}
