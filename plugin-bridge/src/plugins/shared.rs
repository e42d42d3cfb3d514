//! The plugins of the two vcuda resources.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_migrate_model::card::Card;
use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::ledger::HolderId;
use gpu_migrate_model::units::Cores;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::answer::AnswerStyle;
use super::cdi::CdiSpecs;
use super::list_and_watch::{ListStream, watch_list};
use super::{not_written, refused};
use crate::decide::{AllocateError, Resource, SharedGrant, StartRefusal};
use crate::isolation::{Isolation, Share};
use crate::node::Node;
use gpu_migrate_kubelet_api::deviceplugin::device_plugin_server::DevicePlugin;
use gpu_migrate_kubelet_api::deviceplugin::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, ContainerPreferredAllocationResponse,
    DevicePluginOptions, Empty, PreStartContainerRequest, PreStartContainerResponse,
    PreferredAllocationRequest, PreferredAllocationResponse,
};

/// A second look at the kubelet before an Allocate is refused: the whole node waits for it.
const SECOND_LOOK: Duration = Duration::from_millis(300);
/// The kubelet waits 30 s for PreStartContainer.
const IDENTITY: Duration = Duration::from_secs(3);
/// Sources are not asked in a loop, however often the books change.
const SETTLE: Duration = Duration::from_millis(50);

/// One vcuda resource, for one registration.
pub struct SharedPlugin {
    node: Arc<Node>,
    resource: SharedResource,
    config: Arc<AllocateConfig>,
    streams: CancellationToken,
}

/// How containers are given their cards on this node.
#[derive(Debug)]
pub struct AllocateConfig {
    /// How cards are shown.
    pub style: AnswerStyle,
    /// How shares are kept apart.
    pub isolation: Arc<dyn Isolation>,
    /// Our own CDI specifications, where NVIDIA's are not at hand.
    pub cdi: Option<CdiSpecs>,
}

impl SharedPlugin {
    /// What the kubelet may call.
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
        streams: CancellationToken,
    ) -> Self {
        Self { node, resource, config, streams }
    }

    async fn allocate_one(&self, ids: &[String]) -> Result<ContainerAllocateResponse, Status> {
        self.node.read_checkpoint();
        self.node.wait_for_candidate(self.resource, ids.len()).await;
        let mut outcome = self.decide(ids);
        if matches!(outcome, Err(AllocateError::NoFreeCapacity { .. })) {
            // Perhaps a holder is gone and nobody has said so yet.
            let look = tokio::time::timeout(SECOND_LOOK, self.node.list_pod_resources()).await;
            tracing::debug!(heard = matches!(look, Ok(Ok(_))), "asked pod-resources before refusing");
            self.node.read_checkpoint();
            outcome = self.decide(ids);
        }
        let granted = outcome.map_err(|refusal| {
            tracing::warn!(resource = ?self.resource, %refusal, "Allocate refused");
            refused(&refusal)
        })?;
        // Also where this one does not deviate: a row of one that ended would be read back as this one's. Most often nothing
        // has changed.
        if let Err(error) = self.node.write_deviations() {
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
        self.describe(&granted, ids, &mut answer)?;
        Ok(answer)
    }

    /// Writes our own CDI file for these cards before a runtime can look for it.
    fn describe(
        &self,
        granted: &SharedGrant,
        ids: &[String],
        answer: &mut ContainerAllocateResponse,
    ) -> Result<(), Status> {
        let Some(specs) = &self.config.cdi else { return Ok(()) };
        if self.resource != SharedResource::Cores || !self.config.style.uses_cdi() {
            return Ok(());
        }
        let cards: Vec<Card> = self.node.with(|state, _| {
            granted.cards.iter().filter_map(|index| state.ledger().card(*index).cloned()).collect()
        });
        let device = specs
            .write(&key(ids), &cards.iter().collect::<Vec<_>>())
            .map_err(|e| Status::unavailable(format!("the CDI specification could not be written: {e}")))?;
        self.config.style.put_own_cdi(&device, answer);
        Ok(())
    }

    /// The host is made ready for a container that is known by now. Once for its cores; its memory says nothing new.
    fn prepare(&self, holder: &HolderId, ids: &[String]) -> std::io::Result<()> {
        if self.resource != SharedResource::Cores {
            return Ok(());
        }
        let (cards, demand) = self.node.with(|state, _| {
            let ledger = state.ledger();
            let cards: Vec<Card> =
                ledger.held_by(holder).filter_map(|(index, _)| ledger.card(index).cloned()).collect();
            (cards, state.demand_of_holder(holder))
        });
        let cards: Vec<&Card> = cards.iter().collect();
        self.config.isolation.prepare(holder, &Share { demand, cards: &cards, key: &key(ids) })
    }

    /// Who starts, once the kubelet has named him and his memory is where his cores are. Sources follow one another, so it
    /// waits a little; only this container waits with it.
    async fn may_start(&self, ids: &[String]) -> Result<HolderId, StartRefusal> {
        let ask = || {
            self.node.read_checkpoint();
            self.node.with(|state, _| state.may_start(self.resource, ids))
        };
        let first = ask();
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
                if ask().is_ok() {
                    return;
                }
                let _ = tokio::time::timeout(SECOND_LOOK, changes.changed()).await;
                tokio::time::sleep(SETTLE).await;
            }
        };
        let _ = tokio::time::timeout(IDENTITY, named).await;
        ask()
    }

    fn decide(&self, ids: &[String]) -> Result<SharedGrant, AllocateError> {
        self.node.with(|state, now| state.allocate_shared(self.resource, ids, now))
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
                // The answers of a container are merged, and where they differ one wins at random: only the one for cores says
                // which cards are seen, so that they are those whose cores are accounted for.
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

/// Names a container by its first core: nobody else has it while this container does.
#[must_use]
pub fn key(ids: &[String]) -> String {
    ids.iter().min().map(|id| id.replace('/', "_")).unwrap_or_default()
}

#[tonic::async_trait]
impl DevicePlugin for SharedPlugin {
    type ListAndWatchStream = ListStream;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(Self::options()))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let resource = Resource::Shared(self.resource);
        Ok(Response::new(watch_list(self.node.clone(), resource, self.streams.clone())))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        self.node.read_checkpoint();
        let requests = request.into_inner().container_requests;
        let mut container_responses = Vec::new();
        for ask in requests {
            let size = usize::try_from(ask.allocation_size).unwrap_or(0);
            self.node.wait_for_candidate(self.resource, size).await;
            let device_ids = self.node.with(|state, _| {
                state.preferred_shared(
                    self.resource,
                    &ask.available_device_ids,
                    &ask.must_include_device_ids,
                    size,
                )
            });
            container_responses.push(ContainerPreferredAllocationResponse { device_ids });
        }
        Ok(Response::new(PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let began = Instant::now();
        let mut container_responses = Vec::new();
        for ask in request.into_inner().container_requests {
            let answer = self.allocate_one(&ask.devices_ids).await;
            self.node.metrics.allocated("shared", answer.is_ok(), began.elapsed());
            container_responses.push(answer?);
        }
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        let ids = request.into_inner().devices_ids;
        let holder = self.may_start(&ids).await.map_err(|not_yet| {
            tracing::warn!(resource = ?self.resource, devices = ids.len(), %not_yet, "a container has to wait");
            Status::unavailable(not_yet.to_string())
        })?;
        // Where its memory was brought to its cores: another life must know it while the container runs.
        self.node.write_deviations().map_err(|error| not_written(&error))?;
        tracing::debug!(%holder, resource = ?self.resource, "container starts");
        self.prepare(&holder, &ids).map_err(|e| {
            Status::internal(format!(
                "{holder}: isolation {} could not be prepared: {e}",
                self.config.isolation.name()
            ))
        })?;
        Ok(Response::new(PreStartContainerResponse {}))
    }
}
