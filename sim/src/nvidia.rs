//! NVIDIA's device plugin as v0.20 behaves: it keeps no allocations, answers for the devices it is asked for, reads health events from one
//! channel, and reports a card Unhealthy until it registers again. Served on a unix socket or over any stream.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::Stream;
use gpu_migrate_kubelet_api::deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use gpu_migrate_kubelet_api::deviceplugin::registration_client::RegistrationClient;
use gpu_migrate_kubelet_api::deviceplugin::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, ContainerPreferredAllocationRequest,
    ContainerPreferredAllocationResponse, Device, DevicePluginOptions, Empty, HEALTHY, ListAndWatchResponse,
    PreStartContainerRequest, PreStartContainerResponse, PreferredAllocationRequest,
    PreferredAllocationResponse, RegisterRequest, UNHEALTHY, VERSION,
};
use gpu_migrate_kubelet_api::directory::Stamp;
use gpu_migrate_kubelet_api::socket::{bind, dial, serve};
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

/// File name of the plugin's socket.
pub const SOCKET: &str = "nvidia-gpu.sock";
/// The resource.
pub const RESOURCE: &str = "nvidia.com/gpu";
/// The variable of its answer that lists the cards.
pub const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
/// How often it looks whether its registrar's socket is another one.
const POLL: Duration = Duration::from_millis(50);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Trouble {
    #[default]
    None,
    Refuses,
    /// It does not answer.
    Hangs,
    /// It answers for its first cards, whichever it is asked for.
    Lies,
}

/// The plugin of one node. Its streams end when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct NvidiaPlugin {
    /// Cards and their health from now on; all of them.
    events: mpsc::UnboundedSender<Vec<bool>>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    cards: Vec<String>,
    numa: Option<i64>,
    at_start: Vec<bool>,
    /// One for all streams: a stream that was abandoned takes the next event with it.
    events: tokio::sync::Mutex<mpsc::UnboundedReceiver<Vec<bool>>>,
    trouble: Mutex<Trouble>,
    allocated: Mutex<Vec<Vec<String>>>,
    streams: AtomicU64,
}

impl NvidiaPlugin {
    /// A plugin for these cards, all healthy.
    #[must_use]
    pub fn new(cards: Vec<String>) -> Self {
        let healthy = vec![true; cards.len()];
        Self::with_health(cards, healthy, None)
    }

    /// A plugin that starts with this health of its cards, on this NUMA node.
    #[must_use]
    pub fn with_health(cards: Vec<String>, at_start: Vec<bool>, numa: Option<i64>) -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        let shared = Shared {
            cards,
            numa,
            at_start,
            events: receiver.into(),
            trouble: Mutex::default(),
            allocated: Mutex::default(),
            streams: AtomicU64::new(0),
        };
        Self { events: sender, shared: Arc::new(shared) }
    }

    /// A health event. The real one never reports a card healthy again on the same registration; a test may.
    pub fn report(&self, healthy: Vec<bool>) {
        // Only fails after the last stream has ended.
        let _ = self.events.send(healthy);
    }

    /// From now on Allocate fails so.
    pub fn set_trouble(&self, trouble: Trouble) {
        *self.shared.trouble.lock() = trouble;
    }

    /// The devices of each Allocate so far.
    #[must_use]
    pub fn allocated(&self) -> Vec<Vec<String>> {
        self.shared.allocated.lock().clone()
    }

    #[must_use]
    pub fn streams(&self) -> u64 {
        self.shared.streams.load(Ordering::SeqCst)
    }

    /// Its service, whose streams end with `life`.
    #[must_use]
    pub fn routes(&self, life: CancellationToken) -> Routes {
        Routes::new(DevicePluginServer::new(Service { shared: self.shared.clone(), life }))
    }

    /// Runs until `stop` in the kubelet's folder: registers with the socket `registrar` (the kubelet's, or what `KUBELET_SOCKET` names),
    /// and from the beginning whenever that socket or its own is another one.
    pub async fn run(self, folder: PathBuf, registrar: String, stop: CancellationToken) {
        let (registrar, own) = (folder.join(registrar), folder.join(SOCKET));
        while !stop.is_cancelled() {
            let stamp = Stamp::of(&registrar);
            let life = stop.child_token();
            if stamp.is_some()
                && let Err(error) = self.register(&own, &registrar, life.clone()).await
            {
                tracing::debug!(error, "NVIDIA's plugin did not register; retrying");
                life.cancel();
                stop.run_until_cancelled(tokio::time::sleep(POLL)).await;
                continue;
            }
            let served = Stamp::of(&own);
            while !stop.is_cancelled()
                && Stamp::of(&registrar) == stamp
                && (stamp.is_none() || Stamp::of(&own) == served)
            {
                stop.run_until_cancelled(tokio::time::sleep(POLL)).await;
            }
            life.cancel();
        }
    }

    async fn register(&self, own: &Path, registrar: &Path, life: CancellationToken) -> Result<(), String> {
        let listener = bind(own).map_err(|error| error.to_string())?;
        tokio::spawn(serve(listener, self.routes(life.clone()), life));
        let channel = dial(registrar).await.map_err(|error| error.to_string())?;
        let registration = RegistrationClient::new(channel).register(registration(SOCKET)).await;
        registration.map(drop).map_err(|status| status.to_string())
    }
}

/// What the plugin registers with, served at this socket.
#[must_use]
pub fn registration(socket: &str) -> RegisterRequest {
    RegisterRequest {
        version: VERSION.into(),
        endpoint: socket.into(),
        resource_name: RESOURCE.into(),
        options: Some(options()),
    }
}

const fn options() -> DevicePluginOptions {
    DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true }
}

impl Shared {
    fn list(&self, healthy: &[bool]) -> ListAndWatchResponse {
        let topology = self.numa.map(|id| gpu_migrate_kubelet_api::deviceplugin::TopologyInfo {
            nodes: vec![gpu_migrate_kubelet_api::deviceplugin::NumaNode { id }],
        });
        let device = |(id, healthy): (&String, &bool)| Device {
            id: id.clone(),
            health: if *healthy { HEALTHY } else { UNHEALTHY }.into(),
            topology: topology.clone(),
        };
        self.cards.iter().zip(healthy).map(device).collect()
    }
}

struct Service {
    shared: Arc<Shared>,
    life: CancellationToken,
}

#[tonic::async_trait]
impl DevicePlugin for Service {
    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(options()))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        self.shared.streams.fetch_add(1, Ordering::SeqCst);
        let (sender, lists) = mpsc::channel(1);
        let (shared, life) = (self.shared.clone(), self.life.clone());
        tokio::spawn(async move {
            let mut healthy = shared.at_start.clone();
            while sender.send(Ok(shared.list(&healthy))).await.is_ok() {
                let event = async { shared.events.lock().await.recv().await };
                match life.run_until_cancelled(event).await.flatten() {
                    Some(event) => healthy = event,
                    None => return,
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(lists))))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let choose = |ask: ContainerPreferredAllocationRequest| {
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
        let trouble = *self.shared.trouble.lock();
        match trouble {
            Trouble::None | Trouble::Lies => {}
            Trouble::Refuses => return Err(Status::unknown("invalid allocation request")),
            Trouble::Hangs => std::future::pending().await,
        }
        let mut container_responses = Vec::new();
        for ask in request.into_inner().container_requests {
            if let Some(unknown) = ask.devices_ids.iter().find(|id| !self.shared.cards.contains(id)) {
                return Err(Status::unknown(format!(
                    "invalid allocation request for {RESOURCE:?}: unknown device: {unknown}"
                )));
            }
            let shown = if trouble == Trouble::Lies { &self.shared.cards } else { &ask.devices_ids };
            let shown: Vec<&str> = shown.iter().take(ask.devices_ids.len()).map(String::as_str).collect();
            let envs = BTreeMap::from([(VISIBLE_DEVICES.to_owned(), shown.join(","))]);
            container_responses
                .push(ContainerAllocateResponse { envs, ..ContainerAllocateResponse::default() });
            self.shared.allocated.lock().push(ask.devices_ids);
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
