//! The device manager: who registered what, which devices are well, who holds which.
//!
//! As the real one was seen to behave (`pkg/kubelet/cm/devicemanager` 1.33): registration dials back before it returns; the end of
//! a ListAndWatch stream makes the resource's devices unhealthy, also when it is the *old* stream that ends after a new
//! registration; devices of an init container are used again by the containers after it; without a preference the choice is random;
//! rows of pods that are gone stay until the next Allocate.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use gpu_migrate_kubelet_api::deviceplugin::device_plugin_client::DevicePluginClient;
use gpu_migrate_kubelet_api::deviceplugin::registration_server::{Registration, RegistrationServer};
use gpu_migrate_kubelet_api::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, DevicePluginOptions, Empty, HEALTHY, ListAndWatchResponse,
    PreStartContainerRequest, PreferredAllocationRequest, RegisterRequest, VERSION,
};
use gpu_migrate_kubelet_api::socket::{bind, dial};
use parking_lot::Mutex;
use rand::seq::SliceRandom;
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Server};
use tonic::{Request, Response, Status, Streaming};

use super::checkpoint::{self, Entry};

/// The kubelet waits this long for a plugin to serve what it registered.
const DIAL: Duration = Duration::from_secs(10);

/// Why a container cannot have its devices. The kubelet fails the pod with it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// Too few are left.
    #[error(
        "requested number of devices unavailable for {resource}. Requested: {wanted}, Available: {available}"
    )]
    TooFew {
        /// The resource.
        resource: String,
        /// How many were asked for.
        wanted: usize,
        /// How many are free and well.
        available: usize,
    },
    /// The plugin said no.
    #[error("rpc error: code = {code:?} desc = {message}")]
    Refused {
        /// gRPC code.
        code: tonic::Code,
        /// The plugin's text.
        message: String,
    },
}

impl From<Status> for DeviceError {
    fn from(status: Status) -> Self {
        Self::Refused { code: status.code(), message: status.message().to_owned() }
    }
}

/// What a container asks of one resource.
#[derive(Clone, Debug)]
pub struct Ask<'a> {
    /// UID of its pod.
    pub pod_uid: &'a str,
    /// Its name.
    pub container: &'a str,
    /// The resource.
    pub resource: &'a str,
    /// How many devices.
    pub count: usize,
}

/// Devices of finished init containers, which the containers after them get again.
pub type Reusable = BTreeMap<String, BTreeSet<String>>;

/// The device manager of one kubelet.
#[derive(Debug)]
pub struct DeviceManager {
    folder: PathBuf,
    state: Mutex<State>,
    changed: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    resources: BTreeMap<String, Resource>,
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Resource {
    /// Whether each is well.
    devices: BTreeMap<String, bool>,
    options: DevicePluginOptions,
    client: DevicePluginClient<Channel>,
}

impl DeviceManager {
    /// One that keeps its book and its sockets in `folder`, and goes on from the book that is there.
    #[must_use]
    pub fn new(folder: PathBuf) -> Arc<Self> {
        let entries = checkpoint::read(&folder.join("kubelet_internal_checkpoint"));
        let state = Mutex::new(State { resources: BTreeMap::new(), entries });
        Arc::new(Self { folder, state, changed: watch::Sender::new(0) })
    }

    /// Says when capacity or health has changed.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Capacity and allocatable of each resource.
    pub fn counts(&self) -> BTreeMap<String, (usize, usize)> {
        let state = self.state.lock();
        let count = |r: &Resource| (r.devices.len(), r.devices.values().filter(|well| **well).count());
        state.resources.iter().map(|(name, resource)| (name.clone(), count(resource))).collect()
    }

    /// The rows of the book.
    pub fn entries(&self) -> Vec<Entry> {
        self.state.lock().entries.clone()
    }

    /// As a kubelet that starts: deletes every socket of the folder, forgets every plugin, keeps the book, and then serves
    /// registrations until `life` ends.
    ///
    /// # Errors
    /// Where the folder cannot be used.
    pub async fn start(self: &Arc<Self>, life: CancellationToken) -> std::io::Result<()> {
        std::fs::create_dir_all(&self.folder)?;
        for file in std::fs::read_dir(&self.folder)? {
            let file = file?;
            if std::os::unix::fs::FileTypeExt::is_socket(&file.file_type()?) {
                std::fs::remove_file(file.path())?;
            }
        }
        self.state.lock().resources.clear();
        self.note_change();
        let listener = bind(&self.folder.join("kubelet.sock")).map_err(std::io::Error::other)?;
        let desk = RegistrationServer::new(Desk { manager: self.clone(), life: life.clone() });
        let server = Server::builder()
            .add_service(desk)
            .serve_with_incoming_shutdown(UnixListenerStream::new(listener), life.cancelled_owned());
        tokio::spawn(server);
        Ok(())
    }

    fn note_change(&self) {
        self.write_book();
        self.changed.send_modify(|count| *count += 1);
    }

    fn write_book(&self) {
        let state = self.state.lock();
        let well =
            |r: &Resource| r.devices.iter().filter(|(_, well)| **well).map(|(id, _)| id.clone()).collect();
        let healthy = state.resources.iter().map(|(name, resource)| (name.clone(), well(resource))).collect();
        if let Err(error) = checkpoint::write(&self.path_of_book(), &state.entries, healthy) {
            tracing::warn!(%error, "the kubelet's checkpoint could not be written");
        }
    }

    fn path_of_book(&self) -> PathBuf {
        self.folder.join("kubelet_internal_checkpoint")
    }

    async fn register(
        self: &Arc<Self>,
        request: RegisterRequest,
        life: CancellationToken,
    ) -> Result<(), Status> {
        if request.version != VERSION {
            return Err(Status::invalid_argument(format!("version {} is not {VERSION}", request.version)));
        }
        let socket = self.folder.join(&request.endpoint);
        let client = tokio::time::timeout(DIAL, connect(&socket))
            .await
            .map_err(|_| Status::deadline_exceeded(format!("nobody serves {}", socket.display())))??;
        let (mut client, options) = client;
        let stream = client.list_and_watch(Empty {}).await?.into_inner();
        let resource = Resource { devices: BTreeMap::new(), options, client };
        self.state.lock().resources.insert(request.resource_name.clone(), resource);
        let manager = self.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = manager.follow(&request.resource_name, stream) => {}
                // A kubelet that stops drops its streams; that tells it nothing about the devices.
                () = life.cancelled() => {}
            }
        });
        Ok(())
    }

    async fn follow(&self, resource: &str, mut stream: Streaming<ListAndWatchResponse>) {
        while let Ok(Some(list)) = stream.message().await {
            let Ok(devices) = list.devices() else { break };
            if let Some(found) = self.state.lock().resources.get_mut(resource) {
                found.devices = devices.into_iter().map(|d| (d.id, d.health == HEALTHY)).collect();
            }
            self.note_change();
        }
        if let Some(found) = self.state.lock().resources.get_mut(resource) {
            found.devices.values_mut().for_each(|well| *well = false);
        }
        self.note_change();
    }

    /// Gives a container its devices of one resource. `active` are the pods that are not over: what others hold is free.
    ///
    /// # Errors
    /// [`DeviceError`]; nothing was given.
    pub async fn allocate(
        &self,
        ask: &Ask<'_>,
        reusable: &mut Reusable,
        init: bool,
        active: &HashSet<String>,
    ) -> Result<ContainerAllocateResponse, DeviceError> {
        let ids = self.choose(ask, reusable, active).await?;
        let mut client = self.client(ask.resource).ok_or_else(|| DeviceError::TooFew {
            resource: ask.resource.into(),
            wanted: ask.count,
            available: 0,
        })?;
        let request = AllocateRequest {
            container_requests: vec![ContainerAllocateRequest { devices_ids: ids.clone() }],
        };
        let answer = client.allocate(request).await?.into_inner();
        let answer = answer.container_responses.into_iter().next().unwrap_or_default();
        let of_resource = reusable.entry(ask.resource.to_owned()).or_default();
        for id in &ids {
            if init {
                of_resource.insert(id.clone())
            } else {
                of_resource.remove(id)
            };
        }
        self.state.lock().entries.push(Entry {
            pod_uid: ask.pod_uid.into(),
            container: ask.container.into(),
            resource: ask.resource.into(),
            ids,
            answer: answer.clone(),
        });
        self.write_book();
        Ok(answer)
    }

    async fn choose(
        &self,
        ask: &Ask<'_>,
        reusable: &Reusable,
        active: &HashSet<String>,
    ) -> Result<Vec<String>, DeviceError> {
        let mut chosen: Vec<String> =
            reusable.get(ask.resource).into_iter().flatten().take(ask.count).cloned().collect();
        let needed = ask.count - chosen.len();
        if needed == 0 {
            return Ok(chosen);
        }
        let (mut free, options) = self.free(ask.resource, active);
        free.retain(|id| !chosen.contains(id));
        if free.len() < needed {
            let available = free.len();
            return Err(DeviceError::TooFew { resource: ask.resource.into(), wanted: ask.count, available });
        }
        let mut preferred = Vec::new();
        if options.get_preferred_allocation_available && needed < free.len() {
            preferred = self.preference(ask, &free, &chosen).await;
        }
        free.shuffle(&mut rand::rng());
        for id in preferred.iter().filter(|id| free.contains(id)).chain(&free) {
            if chosen.len() < ask.count && !chosen.contains(id) {
                chosen.push(id.clone());
            }
        }
        Ok(chosen)
    }

    /// Forgets the rows of pods that are over, and lists what nobody holds.
    fn free(&self, resource: &str, active: &HashSet<String>) -> (Vec<String>, DevicePluginOptions) {
        let mut state = self.state.lock();
        state.entries.retain(|entry| active.contains(&entry.pod_uid));
        let of_resource = state.entries.iter().filter(|entry| entry.resource == resource);
        let held: HashSet<&String> = of_resource.flat_map(|entry| &entry.ids).collect();
        match state.resources.get(resource) {
            None => (Vec::new(), DevicePluginOptions::default()),
            Some(found) => {
                let well = found.devices.iter().filter(|(id, well)| **well && !held.contains(id));
                (well.map(|(id, _)| id.clone()).collect(), found.options)
            }
        }
    }

    async fn preference(&self, ask: &Ask<'_>, free: &[String], chosen: &[String]) -> Vec<String> {
        let Some(mut client) = self.client(ask.resource) else { return Vec::new() };
        let request = ContainerPreferredAllocationRequest {
            available_device_ids: free.iter().chain(chosen).cloned().collect(),
            must_include_device_ids: chosen.to_vec(),
            allocation_size: i32::try_from(ask.count).unwrap_or(i32::MAX),
        };
        match client
            .get_preferred_allocation(PreferredAllocationRequest { container_requests: vec![request] })
            .await
        {
            Ok(answer) => {
                answer.into_inner().container_responses.into_iter().flat_map(|c| c.device_ids).collect()
            }
            Err(status) => {
                tracing::debug!(%status, resource = ask.resource, "no preference");
                Vec::new()
            }
        }
    }

    /// Tells the plugin, if it wants to know, that a container is about to start.
    ///
    /// # Errors
    /// The plugin's refusal: the container does not start.
    pub async fn pre_start(&self, pod_uid: &str, container: &str) -> Result<(), DeviceError> {
        for entry in self.entries().into_iter().filter(|e| e.pod_uid == pod_uid && e.container == container) {
            let wanted = self
                .state
                .lock()
                .resources
                .get(&entry.resource)
                .is_some_and(|r| r.options.pre_start_required);
            if let Some(mut client) = self.client(&entry.resource).filter(|_| wanted) {
                client.pre_start_container(PreStartContainerRequest { devices_ids: entry.ids }).await?;
            }
        }
        Ok(())
    }

    fn client(&self, resource: &str) -> Option<DevicePluginClient<Channel>> {
        self.state.lock().resources.get(resource).map(|found| found.client.clone())
    }
}

async fn connect(socket: &Path) -> Result<(DevicePluginClient<Channel>, DevicePluginOptions), Status> {
    let channel = dial(socket).await.map_err(|error| Status::unavailable(error.to_string()))?;
    // 1,000 IDs of a large node are more than a default message.
    let mut client = DevicePluginClient::new(channel).max_decoding_message_size(16 << 20);
    let options = client.get_device_plugin_options(Empty {}).await?.into_inner();
    Ok((client, options))
}

struct Desk {
    manager: Arc<DeviceManager>,
    life: CancellationToken,
}

#[tonic::async_trait]
impl Registration for Desk {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        self.manager.register(request.into_inner(), self.life.clone()).await?;
        Ok(Response::new(Empty {}))
    }
}
