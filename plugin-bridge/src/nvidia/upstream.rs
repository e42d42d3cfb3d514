//! Each resource of NVIDIA's plugin: its current registration (epoch), the one stream of it, and calls passed through.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, watch};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::transport::Channel;

use super::health::HealthMemory;
use crate::decide::{DeviceKey, Millis, UpstreamDevice};
use crate::node::Node;
use gpu_migrate_kubelet_api::deviceplugin::device_plugin_client::DevicePluginClient;
use gpu_migrate_kubelet_api::deviceplugin::{Device, DevicePluginOptions, Empty, HEALTHY, RegisterRequest};
use gpu_migrate_model::units::CardIndex;

/// How long the plugin gets to serve the socket that it registered, and to answer for its options.
const DIAL: Duration = Duration::from_secs(5);
/// How long its devices stay listed after its stream ended: it re-creates its sockets in 25 to 40 ms. A new pod of it needs
/// more than this (0.6 s was seen), and if that one registers with the kubelet itself, our endpoint must have ended before.
const RECONNECT: Duration = Duration::from_millis(300);

/// How long a call waits for a plugin that is registering again: every pod of the node waits with it.
const REGISTRATION: Duration = Duration::from_secs(1);

/// Why a call cannot be passed through.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    #[error(
        "NVIDIA's plugin is not registered for {resource}; is KUBELET_SOCKET of its DaemonSet set to {socket}?"
    )]
    NotRegistered { resource: String, socket: String },
    #[error("NVIDIA's plugin failed for {resource}: {status}")]
    Failed { resource: String, status: Box<Status> },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Announcement {
    /// With its first list of devices.
    Registered(String),
    /// Its stream ended and it did not register again.
    Lost(String),
    /// The kubelet asks another plugin for it: register with the kubelet anew.
    TakeBack(String),
}

#[derive(Clone, Debug)]
pub struct Upstream {
    pub epoch: u64,
    /// The connection, with the stream on it.
    pub client: DevicePluginClient<Channel>,
    pub options: DevicePluginOptions,
}

/// All resources that NVIDIA's plugin has registered.
#[derive(Debug)]
pub struct Upstreams {
    node: Arc<Node>,
    folder: PathBuf,
    resources: Mutex<BTreeMap<String, Arc<Registrations>>>,
    announce: mpsc::UnboundedSender<Announcement>,
    reregister: Notify,
    health: Arc<dyn HealthSource>,
}

/// Tells when a card was last found healthy by something other than NVIDIA's plugin.
pub trait HealthSource: Send + Sync + std::fmt::Debug {
    /// `None` where the card is not monitored.
    fn last_healthy_at(&self, card: CardIndex) -> Option<Millis>;
}

#[derive(Debug)]
struct Registrations {
    current: watch::Sender<Option<Upstream>>,
    epoch: Mutex<(u64, CancellationToken)>,
    memory: Mutex<HealthMemory>,
}

impl Upstreams {
    /// Nothing registered yet. The receiver gets each resource when it is registered and when it is lost.
    #[must_use]
    pub fn new(
        node: Arc<Node>,
        health: Arc<dyn HealthSource>,
    ) -> (Arc<Self>, mpsc::UnboundedReceiver<Announcement>) {
        let (announce, announced) = mpsc::unbounded_channel();
        let folder = node.paths.device_plugins();
        let resources = Mutex::new(BTreeMap::new());
        (Arc::new(Self { node, folder, resources, announce, reregister: Notify::new(), health }), announced)
    }

    /// Starts a new epoch, whose stream replaces the old one.
    ///
    /// # Errors
    /// For a resource that the node agent serves itself.
    pub fn register(self: &Arc<Self>, request: RegisterRequest) -> Result<(), Status> {
        let resource = request.resource_name.clone();
        let ours = self.node.with(|state, _| {
            let dialect = &state.settings().dialect;
            resource == dialect.cores || resource == dialect.memory
        });
        if ours {
            return Err(Status::already_exists(format!("{resource} is served by the node agent itself")));
        }
        let entry = self
            .resources
            .lock()
            .entry(resource.clone())
            .or_insert_with(|| Arc::new(Registrations::new()))
            .clone();
        let (epoch, stop) = {
            let mut current = entry.epoch.lock();
            // The old stream ends before the new one begins.
            current.1.cancel();
            *current = (current.0 + 1, CancellationToken::new());
            (current.0, current.1.clone())
        };
        tracing::info!(%resource, epoch, endpoint = %request.endpoint, "NVIDIA's plugin registered");
        self.node.metrics.upstream_registered();
        let this = self.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                outcome = this.follow(&entry, epoch, &request) => {
                    if let Err(status) = outcome {
                        tracing::warn!(resource = %request.resource_name, epoch, %status, "lost NVIDIA's plugin");
                    }
                    this.ended(&entry, epoch, &request.resource_name).await;
                }
            }
        });
        Ok(())
    }

    /// The one stream of a registration, from its beginning to its end.
    async fn follow(
        &self,
        entry: &Registrations,
        epoch: u64,
        request: &RegisterRequest,
    ) -> Result<(), Status> {
        let socket = self.folder.join(&request.endpoint);
        let unreachable =
            |e: tonic::transport::Error| Status::unavailable(format!("{}: {e}", socket.display()));
        let channel = tokio::time::timeout(DIAL, self.node.platform().sockets.dial(&socket))
            .await
            .map_err(|_| Status::deadline_exceeded(format!("{} did not accept in time", socket.display())))?
            .map_err(unreachable)?;
        let mut client = DevicePluginClient::new(channel).max_decoding_message_size(64 << 20);
        let mut ask = tonic::Request::new(Empty {});
        ask.set_timeout(DIAL);
        let options = client.get_device_plugin_options(ask).await?.into_inner();
        let mut stream = client.list_and_watch(Empty {}).await?.into_inner();
        let mut announced = false;
        while let Some(list) = stream.message().await? {
            let devices = list.devices().map_err(|error| Status::internal(error.to_string()))?;
            let devices = self.with_reported_health(entry, epoch, devices);
            tracing::info!(
                resource = %request.resource_name, epoch, devices = devices.len(),
                unhealthy = devices.iter().filter(|d| !d.healthy).count(), "NVIDIA's plugin listed its devices"
            );
            self.node.with(|state, _| state.observe_upstream(&request.resource_name, Some(devices)));
            if !announced {
                announced = true;
                entry.current.send_replace(Some(Upstream { epoch, client: client.clone(), options }));
                // The receiver is gone only when the agent is stopping.
                let _ = self.announce.send(Announcement::Registered(request.resource_name.clone()));
            }
        }
        Ok(())
    }

    fn with_reported_health(
        &self,
        entry: &Registrations,
        epoch: u64,
        devices: Vec<Device>,
    ) -> Vec<UpstreamDevice> {
        let mut memory = entry.memory.lock();
        self.node.with(|state, now| {
            devices
                .into_iter()
                .map(|device| {
                    let card = state.card_of(&DeviceKey::Legacy(device.id.as_str().into()));
                    let last_healthy = card.and_then(|card| self.health.last_healthy_at(card));
                    let healthy =
                        memory.is_healthy(epoch, &device.id, device.health == HEALTHY, last_healthy, now);
                    let numa =
                        device.topology.map(|t| t.nodes.iter().map(|n| n.id).collect()).unwrap_or_default();
                    UpstreamDevice { id: device.id.into(), healthy, numa }
                })
                .collect()
        })
    }

    /// The stream of this epoch is over. Unless another registration comes soon, its devices are withdrawn.
    ///
    /// Waits first: a plugin that restarts registers by itself, and a new socket would make it restart again.
    async fn ended(&self, entry: &Registrations, epoch: u64, resource: &str) {
        entry.current.send_if_modified(|current| {
            let mine = current.as_ref().is_some_and(|u| u.epoch == epoch);
            if mine {
                *current = None;
            }
            mine
        });
        tokio::time::sleep(RECONNECT).await;
        // Held until it is announced: a registration that comes meanwhile is announced after it.
        let current = entry.epoch.lock();
        if current.0 == epoch {
            tracing::warn!(
                resource,
                "NVIDIA's plugin did not register again; its devices are listed as unhealthy"
            );
            self.node.with(|state, _| state.upstream_lost(resource));
            let _ = self.announce.send(Announcement::Lost(resource.to_owned()));
            self.request_reregistration();
        }
    }

    /// Has this agent register the resource with the kubelet again, where it serves it.
    pub fn take_back(&self, resource: &str) {
        // The receiver is gone only when the agent is stopping.
        let _ = self.announce.send(Announcement::TakeBack(resource.to_owned()));
    }

    /// Has NVIDIA's plugin register again, by a new socket.
    pub fn request_reregistration(&self) {
        self.reregister.notify_one();
    }

    pub async fn reregistration_requested(&self) {
        self.reregister.notified().await;
    }

    /// The current registration of a resource; waits a moment for one that is expected.
    ///
    /// # Errors
    /// [`UpstreamError::NotRegistered`].
    pub async fn get(&self, resource: &str) -> Result<Upstream, UpstreamError> {
        let not_registered = || UpstreamError::NotRegistered {
            resource: resource.to_owned(),
            socket: self.folder.join(super::SOCKET).display().to_string(),
        };
        let entry = self.resources.lock().get(resource).cloned().ok_or_else(not_registered)?;
        let mut current = entry.current.subscribe();
        let found = tokio::time::timeout(REGISTRATION, current.wait_for(Option::is_some)).await;
        found.ok().and_then(Result::ok).and_then(|u| u.clone()).ok_or_else(not_registered)
    }

    /// The plugin's options, as of its last registration.
    #[must_use]
    pub fn options(&self, resource: &str) -> DevicePluginOptions {
        let entry = self.resources.lock().get(resource).cloned();
        let options = entry.and_then(|entry| entry.current.borrow().as_ref().map(|u| u.options));
        options.unwrap_or_default()
    }

    #[must_use]
    pub fn is_registered(&self, resource: &str) -> bool {
        self.resources.lock().get(resource).is_some_and(|entry| entry.current.borrow().is_some())
    }

    /// Whether each resource is registered now.
    #[must_use]
    pub fn registered_resources(&self) -> BTreeMap<String, bool> {
        self.resources
            .lock()
            .iter()
            .map(|(name, entry)| (name.clone(), entry.current.borrow().is_some()))
            .collect()
    }
}

impl Registrations {
    fn new() -> Self {
        Self {
            current: watch::Sender::new(None),
            epoch: Mutex::new((0, CancellationToken::new())),
            memory: Mutex::new(HealthMemory::default()),
        }
    }
}
