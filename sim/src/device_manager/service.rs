//! The device manager over sockets: plugins register on `kubelet.sock` and are called on theirs; pod-resources is served beside it.
//!
//! `Register` dials back for the options before it returns, and opens ListAndWatch afterwards. One plugin a resource is asked, the last
//! that registered. When *any* stream of a resource ends, also that of a plugin that another has replaced, kubelets up to 1.36
//! disconnect the plugin that is asked now and mark all devices unhealthy.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use gpu_migrate_kubelet_api::checkpoint::FILE_NAME;
use gpu_migrate_kubelet_api::deviceplugin::device_plugin_client::DevicePluginClient;
use gpu_migrate_kubelet_api::deviceplugin::registration_server::{Registration, RegistrationServer};
use gpu_migrate_kubelet_api::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, DevicePluginOptions, Empty, HEALTHY, KUBELET_SOCKET,
    ListAndWatchResponse, PreStartContainerRequest, PreferredAllocationRequest, RegisterRequest, VERSION,
};
use gpu_migrate_kubelet_api::podresources::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use gpu_migrate_kubelet_api::podresources::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, ListPodResourcesRequest,
    ListPodResourcesResponse,
};
use gpu_migrate_kubelet_api::socket::{bind, dial, serve};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use super::{Choice, Device, DeviceManager, Request};

/// The kubelet waits this long for a plugin to serve what it registered.
const DIAL: Duration = Duration::from_secs(10);
/// The lists of a large node are more than a default message.
const MESSAGE_LIMIT: usize = 16 << 20;

/// Why a container did not get its devices, or may not start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ServiceError {
    #[error(transparent)]
    Device(#[from] super::DeviceError),
    #[error("rpc error: code = {code:?} desc = {message}")]
    Plugin { code: Code, message: String },
}

impl From<Status> for ServiceError {
    fn from(status: Status) -> Self {
        Self::Plugin { code: status.code(), message: status.message().to_owned() }
    }
}

/// Arranges the devices that no preference chose; the first ones are taken. The real kubelet's order is random.
pub type Arrange = fn(&mut Vec<String>);

/// Namespace and name of an active pod, by its UID.
pub type PodName = Arc<dyn Fn(&str) -> Option<(String, String)> + Send + Sync>;

/// The device manager of one kubelet, over all its processes.
#[derive(Debug)]
pub struct DeviceService {
    root: PathBuf,
    arrange: Arrange,
    state: Mutex<State>,
    changed: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    manager: DeviceManager,
    plugins: BTreeMap<String, Plugin>,
    registrations: u64,
    overlaps: u64,
    /// Sockets that were registered since names are remembered.
    sockets: Option<BTreeSet<String>>,
}

#[derive(Clone, Debug)]
struct Plugin {
    registration: u64,
    options: DevicePluginOptions,
    client: DevicePluginClient<Channel>,
    disconnected: CancellationToken,
}

impl DeviceService {
    /// One with its files below `root`, as a kubelet's are below `/var/lib/kubelet`.
    #[must_use]
    pub fn new(root: &Path, arrange: Arrange) -> Arc<Self> {
        let (state, changed) = (Mutex::default(), watch::Sender::new(0));
        Arc::new(Self { root: root.to_path_buf(), arrange, state, changed })
    }

    /// Starts a kubelet process that serves until `life` ends: deletes every socket, goes on from the checkpoint.
    ///
    /// # Errors
    /// The folders cannot be used.
    pub fn start(self: &Arc<Self>, pods: PodName, life: &CancellationToken) -> std::io::Result<()> {
        let plugins = self.root.join("device-plugins");
        let lister = self.root.join("pod-resources");
        std::fs::create_dir_all(&plugins)?;
        std::fs::create_dir_all(&lister)?;
        for file in std::fs::read_dir(&plugins)? {
            let file = file?;
            if std::os::unix::fs::FileTypeExt::is_socket(&file.file_type()?) {
                std::fs::remove_file(file.path())?;
            }
        }
        {
            let mut state = self.state.lock();
            state.plugins.clear();
            state.manager =
                DeviceManager::restore(&std::fs::read(plugins.join(FILE_NAME)).unwrap_or_default());
        }
        self.note_change();
        let bound = |path: &Path| bind(path).map_err(std::io::Error::other);
        let registry = RegistrationServer::new(Registry { service: self.clone(), life: life.clone() });
        tokio::spawn(serve(bound(&plugins.join(KUBELET_SOCKET))?, Routes::new(registry), life.clone()));
        let server = PodResourcesListerServer::new(Lister { service: self.clone(), pods });
        tokio::spawn(serve(bound(&lister.join(KUBELET_SOCKET))?, Routes::new(server), life.clone()));
        Ok(())
    }

    /// Reports when capacity or health has changed.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    pub fn with<R>(&self, look: impl FnOnce(&DeviceManager) -> R) -> R {
        look(&self.state.lock().manager)
    }

    /// Capacity and allocatable of each resource.
    pub fn counts(&self) -> BTreeMap<String, (usize, usize)> {
        let count = |all: &BTreeMap<String, Device>| (all.len(), all.values().filter(|d| d.healthy).count());
        self.with(|manager| manager.devices().iter().map(|(name, all)| (name.clone(), count(all))).collect())
    }

    /// From now on a socket that was registered once is refused, as kubelet 1.37 does for as long as it has not noticed that the former
    /// connection has ended.
    pub fn remember_sockets(&self) {
        self.state.lock().sockets.get_or_insert_default();
    }

    /// How many registrations were accepted.
    #[must_use]
    pub fn registrations(&self) -> u64 {
        self.state.lock().registrations
    }

    /// How often a stream ended after a newer registration of its resource.
    #[must_use]
    pub fn overlaps(&self) -> u64 {
        self.state.lock().overlaps
    }

    /// See [`DeviceManager::begin`].
    pub fn begin(&self, is_active: impl Fn(&str) -> bool) {
        self.state.lock().manager.begin(is_active);
    }

    /// See [`DeviceManager::container_done`].
    pub fn container_done(&self, pod: &str, container: &str, is_init: bool) {
        self.state.lock().manager.container_done(pod, container, is_init);
        self.write_checkpoint();
    }

    fn note_change(&self) {
        self.write_checkpoint();
        self.changed.send_modify(|count| *count += 1);
    }

    fn write_checkpoint(&self) {
        let folder = self.root.join("device-plugins");
        let beside = folder.join(".checkpoint");
        // One writer at a time.
        let state = self.state.lock();
        let written = std::fs::write(&beside, state.manager.checkpoint())
            .and_then(|()| std::fs::rename(&beside, folder.join(FILE_NAME)));
        if let Err(error) = written {
            tracing::warn!(%error, "writing the kubelet checkpoint failed");
        }
    }

    fn plugin(&self, resource: &str) -> Result<Plugin, ServiceError> {
        let plugin = self.state.lock().plugins.get(resource).cloned();
        plugin.ok_or_else(|| Status::unavailable(format!("unknown Device Plugin {resource}")).into())
    }

    /// Allocates `count` devices of one resource to a container of the pod that is being admitted.
    ///
    /// # Errors
    /// [`ServiceError`]; nothing was allocated.
    pub async fn allocate(
        &self,
        pod: &str,
        container: &str,
        resource: &str,
        count: usize,
    ) -> Result<ContainerAllocateResponse, ServiceError> {
        let request = self.state.lock().manager.request(pod, container, resource, count)?;
        let choice = match request {
            Request::Held(answer) => return Ok(answer),
            Request::Choose(choice) => choice,
        };
        let mut plugin = self.plugin(resource)?;
        let preferred = plugin.preference(&choice).await?;
        let ids = choice.settle(preferred, self.arrange);
        let container_requests =
            vec![ContainerAllocateRequest { devices_ids: ids.iter().cloned().collect() }];
        let answer = plugin.client.allocate(AllocateRequest { container_requests }).await?.into_inner();
        let answer = answer.container_responses.into_iter().next().ok_or_else(|| {
            Status::unknown(format!("no containers return in allocation response of {resource}"))
        })?;
        self.state.lock().manager.allocated(pod, container, resource, ids, answer.clone());
        Ok(answer)
    }

    /// Calls PreStartContainer of each plugin that wants it, before each start of a container.
    ///
    /// # Errors
    /// The plugin's refusal: the container does not start.
    pub async fn pre_start(&self, pod: &str, container: &str) -> Result<(), ServiceError> {
        let calls: Vec<_> = {
            let state = self.state.lock();
            let rows = state.manager.rows().iter().filter(|r| r.pod == pod && r.container == container);
            let call = |row: &super::Row| {
                let plugin = state.plugins.get(&row.resource).filter(|p| p.options.pre_start_required)?;
                Some((plugin.client.clone(), row.ids.keys().cloned().collect()))
            };
            rows.filter_map(call).collect()
        };
        for (mut client, devices_ids) in calls {
            client.pre_start_container(PreStartContainerRequest { devices_ids }).await?;
        }
        Ok(())
    }

    async fn register(
        self: &Arc<Self>,
        request: RegisterRequest,
        life: CancellationToken,
    ) -> Result<(), Status> {
        let RegisterRequest { version, endpoint, resource_name: resource, .. } = request;
        if version != VERSION {
            return Err(Status::invalid_argument(format!("version {version} is not {VERSION}")));
        }
        let socket = self.root.join("device-plugins").join(&endpoint);
        let connected = tokio::time::timeout(DIAL, async {
            let channel = dial(&socket).await.map_err(|error| Status::unavailable(error.to_string()))?;
            let mut client = DevicePluginClient::new(channel).max_decoding_message_size(MESSAGE_LIMIT);
            let options = client.get_device_plugin_options(Empty {}).await?.into_inner();
            Ok::<_, Status>((client, options))
        });
        let no_answer = |_| Status::deadline_exceeded(format!("no answer on {}", socket.display()));
        let (client, options) = connected.await.map_err(no_answer)??;
        let plugin = {
            let mut state = self.state.lock();
            if state.sockets.as_mut().is_some_and(|sockets| !sockets.insert(endpoint)) {
                return Err(Status::unknown("device plugin already connected"));
            }
            state.registrations += 1;
            let registration = state.registrations;
            let plugin = Plugin { registration, options, client, disconnected: life.child_token() };
            state.plugins.insert(resource.clone(), plugin.clone());
            plugin
        };
        let service = self.clone();
        tokio::spawn(async move {
            let registration = plugin.registration;
            let disconnected = plugin.disconnected.clone();
            disconnected.run_until_cancelled(service.follow(&resource, plugin.client)).await;
            // A kubelet that stops learns nothing from the end of its streams.
            if !life.is_cancelled() {
                service.stream_ended(&resource, registration);
            }
        });
        Ok(())
    }

    async fn follow(&self, resource: &str, mut client: DevicePluginClient<Channel>) {
        let Ok(stream) = client.list_and_watch(Empty {}).await else { return };
        let mut stream = stream.into_inner();
        while let Ok(Some(list)) = stream.message().await {
            let Ok(devices) = devices(&list) else { return };
            self.state.lock().manager.set_devices(resource, devices);
            self.note_change();
        }
    }

    fn stream_ended(&self, resource: &str, registration: u64) {
        {
            let mut state = self.state.lock();
            // The plugin is looked up by resource: a newer one is disconnected in place of the one whose stream ended.
            let Some(plugin) = state.plugins.remove(resource) else { return };
            plugin.disconnected.cancel();
            state.overlaps += u64::from(plugin.registration != registration);
            state.manager.plugin_disconnected(resource);
        }
        self.note_change();
    }
}

impl Plugin {
    async fn preference(&mut self, choice: &Choice) -> Result<Vec<String>, Status> {
        if !self.options.get_preferred_allocation_available || !choice.is_open() {
            return Ok(Vec::new());
        }
        let request = ContainerPreferredAllocationRequest {
            available_device_ids: choice.available.iter().cloned().collect(),
            must_include_device_ids: choice.must_include.iter().cloned().collect(),
            allocation_size: i32::try_from(choice.size).unwrap_or(i32::MAX),
        };
        let request = PreferredAllocationRequest { container_requests: vec![request] };
        let answer = self.client.get_preferred_allocation(request).await?.into_inner();
        Ok(answer.container_responses.into_iter().flat_map(|container| container.device_ids).collect())
    }
}

/// The devices of a list.
///
/// # Errors
/// One of them is malformed.
pub fn devices(list: &ListAndWatchResponse) -> Result<BTreeMap<String, Device>, prost::DecodeError> {
    let device = |d: gpu_migrate_kubelet_api::deviceplugin::Device| {
        let numa = d.topology.into_iter().flat_map(|t| t.nodes).map(|node| node.id).collect();
        (d.id, Device { healthy: d.health == HEALTHY, numa })
    };
    Ok(list.devices()?.into_iter().map(device).collect())
}

struct Registry {
    service: Arc<DeviceService>,
    life: CancellationToken,
}

#[tonic::async_trait]
impl Registration for Registry {
    async fn register(&self, request: tonic::Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        self.service.register(request.into_inner(), self.life.clone()).await?;
        Ok(Response::new(Empty {}))
    }
}

struct Lister {
    service: Arc<DeviceService>,
    pods: PodName,
}

#[tonic::async_trait]
impl PodResourcesLister for Lister {
    async fn list(
        &self,
        _: tonic::Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        Ok(Response::new(self.service.with(|manager| manager.pod_resources(|uid| (self.pods)(uid)))))
    }

    async fn get_allocatable_resources(
        &self,
        _: tonic::Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        Err(Status::unimplemented("GetAllocatableResources is not served by this stand-in"))
    }
}
