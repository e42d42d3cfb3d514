//! The plugins of the two vcuda resources.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_migrate_kubelet_api::checkpoint::{Checkpoint, Entry};
use gpu_migrate_kubelet_api::deviceplugin::{
    ContainerAllocateResponse, ContainerPreferredAllocationRequest, DevicePluginOptions,
    PreStartContainerResponse,
};
use gpu_migrate_model::card::Card;
use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::ledger::HolderId;
use gpu_migrate_model::names;
use gpu_migrate_model::units::{CardIndex, Cores};
use gpu_migrate_runtime::trace::{Span, Tracer};
use tonic::Status;

use super::answer::{AnswerStyle, outdated};
use super::cdi::CdiSpecs;
use super::list_and_watch::Streams;
use super::not_written;
use super::service::{POD_RESOURCES, Plugin, Service, decide_twice};
use crate::decide::{Resource, SharedGrant, StartRefusal};
use crate::inventory::evidence::decoded;
use crate::isolation::{Isolation, Share};
use crate::node::Node;
use crate::platform::{in_time, off_thread};

/// How long PreStartContainer waits for the holder to be named. The kubelet waits 30 s.
const IDENTITY: Duration = Duration::from_secs(3);
/// Sources are not read in a loop, however often the state changes.
const SETTLE: Duration = Duration::from_millis(50);

pub type SharedPlugin = Service<Shared>;

#[derive(Clone)]
pub struct Shared {
    node: Arc<Node>,
    resource: SharedResource,
    config: Arc<AllocateConfig>,
}

/// How Allocate is answered on this node.
#[derive(Debug)]
pub struct AllocateConfig {
    /// How cards are shown to the container.
    pub style: AnswerStyle,
    /// How shares are limited to their part.
    pub isolation: Arc<dyn Isolation>,
    /// Our own CDI specifications, where NVIDIA's are not available.
    pub cdi: Option<CdiSpecs>,
    /// Of containers whose pod is traced.
    pub tracer: Tracer,
}

impl SharedPlugin {
    #[must_use]
    pub fn options() -> DevicePluginOptions {
        DevicePluginOptions { pre_start_required: true, get_preferred_allocation_available: true }
    }

    /// Serves `resource` until `streams` is cancelled.
    #[must_use]
    pub fn new(
        node: Arc<Node>,
        resource: SharedResource,
        config: Arc<AllocateConfig>,
        streams: Streams,
    ) -> Self {
        Self { plugin: Shared { node, resource, config }, streams }
    }
}

impl Shared {
    /// Our own CDI files, if the runtime is to look for one.
    fn cdi(&self) -> Option<&CdiSpecs> {
        let is_named = self.resource == SharedResource::Cores && self.config.style.uses_cdi();
        self.config.cdi.as_ref().filter(|_| is_named)
    }

    /// Writes our own CDI file for a container's cards. Returns the device's name.
    async fn write_cdi(&self, cards: Vec<Card>, ids: &[String]) -> Result<Option<String>, Status> {
        let Some(specs) = self.cdi().cloned() else { return Ok(None) };
        let key = key(ids);
        let written = in_time(off_thread(move || specs.write(&key, &cards.iter().collect::<Vec<_>>()))).await;
        written.map(Some).map_err(|error| no_cdi(&error))
    }

    fn cards(&self, indexes: impl IntoIterator<Item = CardIndex>) -> Vec<Card> {
        self.node.with(|state, _| {
            indexes.into_iter().filter_map(|index| state.ledger().card(index).cloned()).collect()
        })
    }

    /// Prepares the host for a container whose holder is known by now. May block.
    fn prepare(&self, holder: &HolderId, ids: &[String]) -> Result<(), Status> {
        let obstacle = self.node.with(|state, _| state.isolation_obstacle().map(str::to_owned));
        with_share(&self.node, holder, ids, |share| {
            if let Some(number) = self.outdated_answer(ids, share.cards) {
                return Err(Status::failed_precondition(format!(
                    "{holder}: it was allocated {number}, which is of another card since the node's cards changed; delete the pod"
                )));
            }
            if let Some(specs) = self.cdi() {
                specs.write(share.key, share.cards).map_err(|error| no_cdi(&error))?;
            }
            let isolation = &self.config.isolation;
            let prepared = match obstacle {
                Some(why) if share.is_part() => Err(std::io::Error::other(why)),
                _ => isolation.prepare(holder, share),
            };
            prepared.map_err(|error| {
                Status::internal(format!(
                    "{holder}: preparing isolation {} failed: {error}",
                    isolation.name()
                ))
            })
        })
    }

    /// What the kubelet will show to the container by number, if that is of other cards by now.
    fn outdated_answer(&self, ids: &[String], cards: &[&Card]) -> Option<String> {
        let text = std::fs::read(self.node.paths.checkpoint()).ok()?;
        let checkpoint = Checkpoint::parse(&text).ok()?;
        let resource = self.node.with(|state, _| state.settings().dialect.cores.clone());
        let is_this = |entry: &&Entry<'_>| {
            entry.resource == resource
                && entry.ids.len() == ids.len()
                && entry.ids.iter().all(|id| ids.iter().any(|own| own == id))
        };
        // One of a pod that is gone may have the same devices; the last is this container's.
        let entry = checkpoint.entries.iter().rfind(is_this)?;
        outdated(&decoded(&entry.answer)?, cards)
    }

    /// The container that starts, once the kubelet has named it and its memory is on the cards of its cores. Sources follow one
    /// another, so this waits a little; only this container waits with it.
    async fn may_start(&self, ids: &[String]) -> Result<HolderId, StartRefusal> {
        let check = || {
            self.node.read_checkpoint();
            self.node.with(|state, _| state.may_start(self.resource, ids))
        };
        let first = check();
        if first.is_ok() {
            return first;
        }
        let named = async {
            let mut changes = self.node.changes();
            loop {
                changes.borrow_and_update();
                if let Err(error) = self.node.list_pod_resources().await {
                    tracing::debug!(%error, "pod-resources did not answer");
                }
                if check().is_ok() {
                    return;
                }
                let _ = tokio::time::timeout(POD_RESOURCES, changes.changed()).await;
                tokio::time::sleep(SETTLE).await;
            }
        };
        let _ = tokio::time::timeout(IDENTITY, named).await;
        check()
    }

    fn answer(&self, granted: &SharedGrant, ids: &[String]) -> ContainerAllocateResponse {
        self.node.with(|state, _| {
            let ledger = state.ledger();
            let cards: Vec<_> = granted.cards.iter().filter_map(|index| ledger.card(*index)).collect();
            match self.resource {
                SharedResource::Cores => {
                    let mut answer = self.config.style.answer(&cards, &granted.demand);
                    let share = Share { demand: granted.demand, cards: &cards, key: &key(ids) };
                    self.config.isolation.shape(&share, &mut answer);
                    answer
                }
                // The kubelet merges the answers of a container, and where they differ one wins at random: only the one for cores
                // names cards, so that the container sees those on which its cores are accounted for.
                SharedResource::Memory
                    if granted.demand.cores > Cores::ZERO || granted.candidate.is_none() =>
                {
                    ContainerAllocateResponse::default()
                }
                SharedResource::Memory => self.config.style.nothing(),
            }
        })
    }
}

fn no_cdi(error: &std::io::Error) -> Status {
    Status::unavailable(format!("writing the CDI specification failed: {error}"))
}

/// What a container has by the ledger, for its isolation. `ids` are those of its cores.
pub fn with_share<R>(node: &Node, holder: &HolderId, ids: &[String], act: impl FnOnce(&Share<'_>) -> R) -> R {
    let (cards, demand) = node.with(|state, _| {
        let held = state.ledger().held_by(holder).filter_map(|(index, _)| state.ledger().card(index));
        (held.cloned().collect::<Vec<Card>>(), state.demand_of_holder(holder))
    });
    let cards: Vec<&Card> = cards.iter().collect();
    act(&Share { demand, cards: &cards, key: &key(ids) })
}

/// Identifies a container by its first core: no other container has that at the same time.
#[must_use]
pub fn key(ids: &[String]) -> String {
    ids.iter().min().map(|id| id.replace('/', "_")).unwrap_or_default()
}

#[tonic::async_trait]
impl Plugin for Shared {
    const KIND: &'static str = "shared";

    fn node(&self) -> &Arc<Node> {
        &self.node
    }

    fn resource(&self) -> Resource {
        Resource::Shared(self.resource)
    }

    fn options(&self) -> DevicePluginOptions {
        SharedPlugin::options()
    }

    async fn prefer(&self, request: ContainerPreferredAllocationRequest) -> Vec<String> {
        let size = usize::try_from(request.allocation_size).unwrap_or(0);
        self.node.wait_for_candidate(self.resource, size).await;
        self.node.with(|state, _| {
            let (offered, must) = (&request.available_device_ids, &request.must_include_device_ids);
            state.preferred_shared(self.resource, offered, must, size)
        })
    }

    async fn allocate(&self, ids: &[String]) -> Result<ContainerAllocateResponse, Status> {
        let began = Instant::now();
        let (granted, answer) = self.grant(ids).await?;
        if let Some(holder) = &granted.candidate
            && let Some(mut span) = self.span("Allocate", None, Some(holder), began)
        {
            let cards = self.cards(granted.cards);
            let uuids: Vec<&str> = cards.iter().map(|card| card.uuid.as_str()).collect();
            span.set("gpu_migrate.cards", uuids.join(","));
            span.keep_for(&key(ids));
            span.end();
        }
        Ok(answer)
    }

    async fn pre_start(&self, ids: Vec<String>) -> Result<PreStartContainerResponse, Status> {
        let began = Instant::now();
        let started = self.start(&ids).await;
        let tracer = &self.config.tracer;
        let allocate = if tracer.is_on() { tracer.take_kept(&key(&ids)) } else { None };
        if let Some(mut span) = self.span("PreStartContainer", allocate, started.as_ref().ok(), began) {
            if let Err(status) = &started {
                span.fail(status.message().to_owned());
            }
            span.end();
        }
        started.map(|_| PreStartContainerResponse {})
    }
}

impl Shared {
    async fn grant(&self, ids: &[String]) -> Result<(SharedGrant, ContainerAllocateResponse), Status> {
        self.node.wait_for_candidate(self.resource, ids.len()).await;
        let decide = || self.node.with(|state, now| state.allocate_shared(self.resource, ids, now));
        let granted = decide_twice(&self.node, decide).await?;
        // Also where this grant does not deviate: a row of an ended one would be read back as this one's. Mostly unchanged.
        if let Err(error) = self.node.write_deviations().await {
            if !granted.repeated {
                self.node.with(|state, _| state.roll_back(granted.grant));
            }
            return Err(not_written(&error));
        }
        tracing::info!(
            resource = ?self.resource, devices = ids.len(), cards = ?granted.cards, candidate = ?granted.candidate,
            deviates = granted.deviates, repeated = granted.repeated, "allocated"
        );
        let mut answer = self.answer(&granted, ids);
        let cards = self.cards(granted.cards.iter().copied());
        match self.write_cdi(cards, ids).await {
            Ok(Some(device)) => self.config.style.put_own_cdi(&device, &mut answer),
            Ok(None) => {}
            Err(error) => {
                if !granted.repeated {
                    self.node.with(|state, _| state.roll_back(granted.grant));
                }
                return Err(error);
            }
        }
        Ok((granted, answer))
    }

    /// The container that may start, prepared for it.
    async fn start(&self, ids: &[String]) -> Result<HolderId, Status> {
        let holder = self.may_start(ids).await.map_err(|refusal| {
            tracing::warn!(resource = ?self.resource, devices = ids.len(), %refusal, "PreStartContainer refused");
            Status::unavailable(refusal.to_string())
        })?;
        // Where its memory was moved to its cores: the next process must know it while the container runs.
        self.node.write_deviations().await.map_err(|error| not_written(&error))?;
        tracing::debug!(%holder, resource = ?self.resource, "container starts");
        // Once for each container: for its cores.
        if self.resource == SharedResource::Cores {
            let (this, holder, ids) = (self.clone(), holder.clone(), ids.to_vec());
            let prepared = in_time(off_thread(move || Ok(this.prepare(&holder, &ids)))).await;
            prepared.map_err(|error| Status::unavailable(format!("preparing the container: {error}")))??;
        }
        Ok(holder)
    }

    /// A span below `parent`, else below what the pod's annotation says. `None` where the pod is not traced.
    fn span(
        &self,
        name: &'static str,
        parent: Option<String>,
        holder: Option<&HolderId>,
        began: Instant,
    ) -> Option<Span> {
        let tracer = Some(&self.config.tracer).filter(|tracer| tracer.is_on())?;
        let pod = holder.and_then(|holder| self.node.with(|state, _| state.pod(&holder.pod_uid).cloned()));
        let annotated = || pod.as_ref()?.annotations.get(names::TRACEPARENT);
        let mut span = tracer.below(parent.as_ref().or_else(annotated).map(String::as_str), name, began)?;
        if let Some(pod) = &pod {
            span.set_pod(&pod.namespace, &pod.name, &pod.uid);
        }
        if let Some(holder) = holder {
            span.set("k8s.container.name", holder.container.clone());
        }
        span.set(
            "gpu_migrate.resource",
            self.node.with(|state, _| state.resource_name(&self.resource()).to_owned()),
        );
        Some(span)
    }
}
