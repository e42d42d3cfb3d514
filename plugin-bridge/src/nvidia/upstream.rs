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

/// How long the plugin gets to serve the socket that it registered, and to answer for its options.
const DIAL: Duration = Duration::from_secs(5);
/// How long its devices stay in the list after its stream ended: it makes its sockets anew in 25 to 40 ms. A new pod of it needs
/// more than this (0.6 s was seen), and if that one registers with the kubelet itself, ours must have ended before.
const RETURN: Duration = Duration::from_millis(300);

/// How long a call waits for a plugin that is on its way back: the whole node waits with it.
const PATIENCE: Duration = Duration::from_secs(1);

/// Why a call cannot be passed through.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    /// It is not there, and did not come back in time.
    #[error(
        "NVIDIA's plugin is not registered for {resource}; is KUBELET_SOCKET of its DaemonSet set to {socket}?"
    )]
    Away {
        /// The resource.
        resource: String,
        /// The path that it should register with.
        socket: String,
    },
    /// It answered with an error, or not in time.
    #[error("NVIDIA's plugin failed for {resource}: {status}")]
    Failed {
        /// The resource.
        resource: String,
        /// Its answer.
        status: Box<Status>,
    },
}

/// What is said of a resource of NVIDIA's plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Announcement {
    /// It has its first list, or its first after a new registration.
    Here(String),
    /// It did not come back.
    Gone(String),
}

/// One registration of one resource.
#[derive(Clone, Debug)]
pub struct Upstream {
    /// Counts all registrations.
    pub epoch: u64,
    /// The connection, with the stream on it.
    pub client: DevicePluginClient<Channel>,
    /// What it wants to be asked.
    pub options: DevicePluginOptions,
}

/// All resources that NVIDIA's plugin has registered.
#[derive(Debug)]
pub struct Upstreams {
    node: Arc<Node>,
    folder: PathBuf,
    slots: Mutex<BTreeMap<String, Arc<Slot>>>,
    announce: mpsc::UnboundedSender<Announcement>,
    doubt: Notify,
    vouched: Arc<dyn HealthSource>,
}

/// Says when a card was last found well by something other than NVIDIA's plugin.
pub trait HealthSource: Send + Sync + std::fmt::Debug {
    /// The last time, or `None` where nothing can tell.
    fn last_healthy_at(&self, card: usize) -> Option<Millis>;
}

#[derive(Debug)]
struct Slot {
    current: watch::Sender<Option<Upstream>>,
    epoch: Mutex<(u64, CancellationToken)>,
    memory: Mutex<HealthMemory>,
}

impl Upstreams {
    /// Nothing registered yet. The receiver hears of each resource when it comes and when it goes.
    #[must_use]
    pub fn new(
        node: Arc<Node>,
        vouched: Arc<dyn HealthSource>,
    ) -> (Arc<Self>, mpsc::UnboundedReceiver<Announcement>) {
        let (announce, announced) = mpsc::unbounded_channel();
        let folder = node.paths.device_plugins();
        let slots = Mutex::new(BTreeMap::new());
        (Arc::new(Self { node, folder, slots, announce, doubt: Notify::new(), vouched }), announced)
    }

    /// Takes a registration: a new epoch, whose stream replaces the old one.
    ///
    /// # Errors
    /// The refusal, for a resource that is not NVIDIA's to serve.
    pub fn register(self: &Arc<Self>, request: RegisterRequest) -> Result<(), Status> {
        let resource = request.resource_name.clone();
        let ours = self.node.with(|state, _| {
            let dialect = &state.settings().dialect;
            resource == dialect.cores || resource == dialect.memory
        });
        if ours {
            return Err(Status::already_exists(format!("{resource} is served by gpu-migrate-bridge itself")));
        }
        let slot = self.slots.lock().entry(resource.clone()).or_insert_with(|| Arc::new(Slot::new())).clone();
        let (epoch, stop) = {
            let mut current = slot.epoch.lock();
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
                outcome = this.follow(&slot, epoch, &request) => {
                    if let Err(status) = outcome {
                        tracing::warn!(resource = %request.resource_name, epoch, %status, "lost NVIDIA's plugin");
                    }
                    this.ended(&slot, epoch, &request.resource_name).await;
                }
            }
        });
        Ok(())
    }

    /// The one stream of a registration, from its beginning to its end.
    async fn follow(&self, slot: &Slot, epoch: u64, request: &RegisterRequest) -> Result<(), Status> {
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
            let devices = self.judge(slot, epoch, devices);
            tracing::info!(
                resource = %request.resource_name, epoch, devices = devices.len(),
                unhealthy = devices.iter().filter(|d| !d.healthy).count(), "NVIDIA's plugin lists"
            );
            self.node.with(|state, _| state.observe_upstream(&request.resource_name, Some(devices)));
            if !announced {
                announced = true;
                slot.current.send_replace(Some(Upstream { epoch, client: client.clone(), options }));
                // Nobody listens any more only when the agent is stopping.
                let _ = self.announce.send(Announcement::Here(request.resource_name.clone()));
            }
        }
        Ok(())
    }

    fn judge(&self, slot: &Slot, epoch: u64, devices: Vec<Device>) -> Vec<UpstreamDevice> {
        let mut memory = slot.memory.lock();
        self.node.with(|state, now| {
            devices
                .into_iter()
                .map(|device| {
                    let card = state.card_of(&DeviceKey::Legacy(device.id.as_str().into()));
                    let vouched = card.and_then(|card| self.vouched.last_healthy_at(card.position()));
                    let healthy = memory.judge(epoch, &device.id, device.health == HEALTHY, vouched, now);
                    let numa =
                        device.topology.map(|t| t.nodes.iter().map(|n| n.id).collect()).unwrap_or_default();
                    UpstreamDevice { id: device.id.into(), healthy, numa }
                })
                .collect()
        })
    }

    /// The stream of this epoch is over. Unless another registration comes soon, its devices are withdrawn.
    ///
    /// First wait, then doubt: a plugin that restarts registers by itself, and a new socket would make it restart again.
    async fn ended(&self, slot: &Slot, epoch: u64, resource: &str) {
        slot.current.send_if_modified(|current| {
            let mine = current.as_ref().is_some_and(|u| u.epoch == epoch);
            if mine {
                *current = None;
            }
            mine
        });
        tokio::time::sleep(RETURN).await;
        if slot.epoch.lock().0 == epoch {
            tracing::warn!(resource, "NVIDIA's plugin did not come back; its devices are withdrawn");
            self.node.with(|state, _| state.upstream_lost(resource));
            let _ = self.announce.send(Announcement::Gone(resource.to_owned()));
            self.request_reregistration();
        }
    }

    /// Something is not right with NVIDIA's plugin: have it register anew.
    pub fn request_reregistration(&self) {
        self.doubt.notify_one();
    }

    /// Waits for a doubt.
    pub async fn reregistration_requested(&self) {
        self.doubt.notified().await;
    }

    /// The current registration of a resource; waits a moment for one that is on its way.
    ///
    /// # Errors
    /// [`UpstreamError::Away`].
    pub async fn get(&self, resource: &str) -> Result<Upstream, UpstreamError> {
        let away = || UpstreamError::Away {
            resource: resource.to_owned(),
            socket: self.folder.join(super::SOCKET).display().to_string(),
        };
        let slot = self.slots.lock().get(resource).cloned().ok_or_else(away)?;
        let mut current = slot.current.subscribe();
        let found = tokio::time::timeout(PATIENCE, current.wait_for(Option::is_some)).await;
        found.ok().and_then(Result::ok).and_then(|u| u.clone()).ok_or_else(away)
    }

    /// What the plugin wants to be asked, as of its last registration.
    #[must_use]
    pub fn options(&self, resource: &str) -> DevicePluginOptions {
        let slot = self.slots.lock().get(resource).cloned();
        let options = slot.and_then(|slot| slot.current.borrow().as_ref().map(|u| u.options));
        options.unwrap_or_default()
    }

    /// Whether each resource has a living registration.
    #[must_use]
    pub fn registered_resources(&self) -> BTreeMap<String, bool> {
        self.slots.lock().iter().map(|(name, slot)| (name.clone(), slot.current.borrow().is_some())).collect()
    }
}

impl Slot {
    fn new() -> Self {
        Self {
            current: watch::Sender::new(None),
            epoch: Mutex::new((0, CancellationToken::new())),
            memory: Mutex::new(HealthMemory::default()),
        }
    }
}
