//! Starts the agent's tasks in order, and stops them.

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use gpu_migrate_model::card::Health;
use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::units::CardIndex;
use gpu_migrate_model::usage;
use gpu_migrate_runtime::client::{self, ConnectError};
use gpu_migrate_runtime::tasks::{TaskEnded, until};
use gpu_migrate_runtime::trace::{TraceError, Tracer};
use gpu_migrate_runtime::{Tasks, admin};
use kube::Client;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::args::Args;
use crate::cluster::publish::StaticStatus;
use crate::cluster::{clean, events, namespaces, own_node, pods, publish};
use crate::decide::{NodeState, Resource, Settings};
use crate::inventory::card_map::Resolved;
use crate::inventory::health::LastHealthy;
use crate::inventory::{self, Inventory, InventoryError, card_map_file};
use crate::isolation::{self, NodeFacts};
use crate::kubelet::endpoint::{self, EndpointSpec, RegistrationState};
use crate::metrics::Metrics;
use crate::node::{EarlierRecord, Node, Paths, StateError};
use crate::nvidia::{Announcement, Upstreams, run_registrar, run_takeover};
use crate::plugins::cdi::CdiSpecs;
use crate::plugins::legacy::LegacyPlugin;
use crate::plugins::shared::{AllocateConfig, SharedPlugin};
use crate::uninstall::{self, NodeLabels};
use gpu_migrate_kubelet_api::directory::{DirectoryWatch, Stamp};

/// Reconcile interval: ended holders are released at least this often.
const TICK: Duration = Duration::from_secs(1);
/// Time between two attempts to become the only agent of the node.
const LOCK_INTERVAL: Duration = Duration::from_millis(200);
/// How long tasks may take to end.
const SHUTDOWN: Duration = Duration::from_secs(3);

/// Why the agent cannot start.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The cards are not known.
    #[error(transparent)]
    Inventory(#[from] InventoryError),
    /// No API server is configured.
    #[error("an API server is needed without --pods-file: {0}")]
    Client(#[from] ConnectError),
    #[error("{0}; the directory of the agent's state must be writable")]
    Lock(StateError),
    #[error(transparent)]
    Trace(#[from] TraceError),
    #[error(transparent)]
    Ended(#[from] TaskEnded),
}

/// Runs the agent until `stop`: what the kubelet waits for on this runtime, everything else on `others`.
///
/// # Errors
/// [`AgentError`].
pub async fn run(args: Args, others: &Handle, stop: CancellationToken) -> Result<(), AgentError> {
    let state_dir = state_dir(&args);
    let Some(_lock) = only_agent(&state_dir, &stop).await.map_err(AgentError::Lock)? else { return Ok(()) };
    let (source, library) = (args.inventory.clone(), args.nvml_library.clone());
    let loaded = others.spawn(async move { inventory::load(&source, library.as_deref()).await }).await;
    let (inventory, watcher) = loaded.map_err(|_| TaskEnded::Returned("reading the inventory".into()))??;
    let (node, inventory) = open(&args, inventory);
    tracing::info!(
        node = %args.node_name, cards = inventory.cards.len(), driver = %inventory.driver_version,
        holders = node.with(|state, _| state.grants().count()), "ledger rebuilt"
    );
    let mut tasks = Tasks::with_background(stop.clone(), others.clone());
    let (program, spans) = ("gpu-migrate-bridge", node.metrics.spans.clone());
    let tracer = Tracer::start(&args.trace, program, Some(&args.node_name), spans, &mut tasks)?;
    let config = Arc::new(AllocateConfig {
        style: args.style(),
        isolation: args.isolation(NodeFacts::read(
            &inventory.driver_version,
            &inventory.cuda_version,
            &args.cgroup_dir,
        )),
        cdi: args.cdi_spec_dir.clone().map(CdiSpecs::new),
        tracer,
    });
    isolation::check::once(&node, &*config.isolation);
    endpoint::remove_old_sockets(&node.paths.device_plugins());
    let directory = DirectoryWatch::start(node.paths.device_plugins(), stop.clone());
    let health = LastHealthy::new(&node, &watcher);
    let (upstreams, announced) = Upstreams::new(node.clone(), Arc::new(health.clone()));
    tasks.spawn_background("health of the cards", watcher.run(node.clone(), health, stop.clone()));

    tasks.spawn_background(
        "check of the isolation",
        isolation::check::run(node.clone(), config.isolation.clone(), stop.clone()),
    );
    tasks.spawn("change notifier", until(stop.clone(), node.clone().forward_changes()));
    let registrations: Vec<_> = [SharedResource::Cores, SharedResource::Memory]
        .map(|resource| serve_shared(&mut tasks, &node, resource, config.clone(), &directory))
        .into();
    tasks.spawn(
        "registrations of NVIDIA's plugin",
        run_registrar(upstreams.clone(), directory.clone(), stop.clone()),
    );
    tasks.spawn(
        "taking back registrations",
        run_takeover(
            node.clone(),
            upstreams.clone(),
            args.register_over_nvidia_plugin,
            directory.clone(),
            stop.clone(),
        ),
    );
    tasks.spawn(
        "plugins of NVIDIA's resources",
        serve_legacy(node.clone(), upstreams.clone(), announced, directory.clone(), stop.clone()),
    );
    tasks.spawn_background("record writer", until(stop.clone(), node.clone().keep_record()));
    tasks.spawn_background("cgroup reader", follow_cgroups(node.clone(), stop.clone()));
    tasks.spawn("kubelet checkpoint reader", follow_kubelet(node.clone(), directory.clone(), stop.clone()));
    let (drift_sender, drift) = watch::channel(Vec::new());
    tasks.spawn_background(
        "comparison of sources",
        crate::compare::run(node.clone(), drift_sender, stop.clone()),
    );

    tasks.spawn_background(
        "removal of leftovers",
        crate::leftovers::run(node.clone(), config.clone(), stop.clone()),
    );

    let static_status = StaticStatus {
        node_name: args.node_name.clone(),
        isolation: config.isolation.name().to_owned(),
        driver_version: inventory.driver_version.clone(),
        cuda_version: inventory.cuda_version.clone(),
    };
    let mut label = None;
    match &args.pods_file {
        Some(path) => {
            let _ = node.lookup.set(Box::new(pods::FileLookup(path.clone())));
            tasks.spawn_background(
                "pods file reader",
                pods::follow_file(path.clone(), node.clone(), stop.clone()),
            );
        }
        None => {
            let cluster = client::config(args.kubeconfig.as_deref(), None).await?;
            // Its connections are served by the runtime on which it is made.
            let client = {
                let _background = others.enter();
                Client::try_from(cluster).map_err(ConnectError::Client)?
            };
            let name = args.node_name.clone();
            label = Some(NodeLabels::read(client.clone(), name.clone()).await);
            let dialect = node.with(|state, _| state.settings().dialect.clone());
            let _ = node.lookup.set(Box::new(pods::ApiLookup::new(client.clone(), &name, dialect)));
            tasks.spawn_background(
                "pod watch",
                pods::follow(client.clone(), name.clone(), node.clone(), stop.clone()),
            );
            tasks.spawn_background(
                "Node watch",
                own_node::follow(client.clone(), name.clone(), node.clone(), stop.clone()),
            );
            tasks.spawn_background(
                "watch of opted-in namespaces",
                namespaces::follow(client.clone(), node.clone(), stop.clone()),
            );
            tasks.spawn_background(
                "Event writer",
                events::run(client.clone(), name, node.events(), stop.clone()),
            );
            tasks.spawn_background(
                "deletion of failed pods",
                clean::run(client.clone(), node.clone(), stop.clone()),
            );
            let publisher = publish::run(
                client,
                node.clone(),
                upstreams.clone(),
                static_status.clone(),
                drift.clone(),
                stop.clone(),
            );
            tasks.spawn_background("GPUShadow publisher", publisher);
        }
    }
    let pages = pages(&node, &upstreams, static_status, drift, registrations);
    if let Err(error) = admin::spawn(&mut tasks, &args.metrics_bind, pages).await {
        // Containers need the agent more than a scraper does.
        tracing::error!(error = format!("{error:#}"), "probes and metrics are not served");
    }
    tasks.run(SHUTDOWN).await?;
    if let Some(label) = label
        && label.agent_removed().await
    {
        match uninstall::remove_files(&node.paths.state, config.cdi.as_ref()) {
            Ok(()) => tracing::info!("this node asks for no agent any more: removed the agent's state"),
            Err(error) => {
                tracing::warn!(%error, state = %node.paths.state.display(), "this node asks for no agent any more, but removing the agent's state failed");
            }
        }
    }
    Ok(())
}

/// Below a folder that the agent mounts anyhow, so that it can remove its own. A kubelet that starts removes the sockets there and leaves
/// folders alone (devicemanager, CleanupPluginDirectory).
fn state_dir(args: &Args) -> PathBuf {
    args.state_dir.clone().unwrap_or_else(|| args.kubelet_dir.join("device-plugins/gpu-migrate"))
}

/// Waits until no other agent runs on this node: one whose pod was deleted with force outlives its successor's start, and two would take
/// each other's sockets and records away. `None` where this one is to stop before.
async fn only_agent(state: &Path, stop: &CancellationToken) -> Result<Option<File>, StateError> {
    let path = state.join("lock");
    let open = || {
        std::fs::create_dir_all(state)?;
        File::options().create(true).append(true).open(&path)
    };
    let lock = open().map_err(|source| StateError { path: path.clone(), source })?;
    let mut waits = false;
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(Some(lock)),
            Err(TryLockError::Error(source)) => return Err(StateError { path, source }),
            Err(TryLockError::WouldBlock) => {}
        }
        if !std::mem::replace(&mut waits, true) {
            tracing::warn!(lock = %path.display(), "another node agent runs on this node; waiting until it has ended");
        }
        if stop.run_until_cancelled(tokio::time::sleep(LOCK_INTERVAL)).await.is_none() {
            return Ok(None);
        }
    }
}

/// The state of this node, from what earlier processes and the kubelet left on disk.
fn open(args: &Args, found: Inventory) -> (Arc<Node>, Inventory) {
    let settings = Settings { numa_hints: args.numa_hints, ..Settings::default() };
    let paths =
        Paths { kubelet: args.kubelet_dir.clone(), state: state_dir(args), cgroups: args.cgroup_dir.clone() };
    let earlier = EarlierRecord::read(&paths);
    let resolved =
        card_map_file::resolve(&paths, &settings.dialect, &earlier.record.data.entries, &found.cards);
    let inventory = found.arranged(&resolved);
    let mut state = state_of(settings, &inventory, resolved);
    own_node::restore(&paths, &mut state);
    let node = Node::start(paths, earlier, state, inventory.topology.clone(), Metrics::default());
    node.metrics.usage.set_name(&args.node_name);
    node.read_cgroups();
    (node, inventory)
}

/// The state over these cards, which are in the order of their ranges. Nothing is known of holders.
pub(crate) fn state_of(settings: Settings, inventory: &Inventory, resolved: Resolved) -> NodeState {
    let layout = resolved.layout(&settings.dialect);
    let mut state = NodeState::new(settings, inventory.cards.clone(), &inventory.topology);
    state.set_layout(layout);
    state.set_mig_devices(inventory.mig_devices.clone());
    for (position, health) in inventory.health.iter().enumerate() {
        if *health == Health::Unhealthy {
            state.set_health(CardIndex::from(position), *health);
        }
    }
    state.close_cards(resolved.closed);
    state
}

fn serve_shared(
    tasks: &mut Tasks,
    node: &Arc<Node>,
    resource: SharedResource,
    config: Arc<AllocateConfig>,
    directory: &DirectoryWatch,
) -> watch::Receiver<RegistrationState> {
    let name = node.with(|state, _| state.resource_name(&Resource::Shared(resource)).to_owned());
    let spec = EndpointSpec { resource: name, options: SharedPlugin::options() };
    let (sender, registration) = watch::channel(RegistrationState::default());
    let (of_service, stop) = (node.clone(), tasks.stop());
    let make =
        Arc::new(move |streams| SharedPlugin::new(of_service.clone(), resource, config.clone(), streams));
    tasks.spawn("vcuda plugin", endpoint::run(spec, directory.clone(), make, sender, stop));
    registration
}

/// One endpoint for each resource that NVIDIA's plugin has registered; it ends when the plugin does not register again, so that no
/// stream of ours ends after another plugin has registered: a kubelet up to 1.36 would disconnect that one.
async fn serve_legacy(
    node: Arc<Node>,
    upstreams: Arc<Upstreams>,
    mut announced: tokio::sync::mpsc::UnboundedReceiver<Announcement>,
    directory: DirectoryWatch,
    stop: CancellationToken,
) {
    let start = |resource: String| {
        let spec = EndpointSpec {
            resource: resource.clone(),
            options: LegacyPlugin::options(&upstreams, &resource),
        };
        let (node, upstreams) = (node.clone(), upstreams.clone());
        let make = Arc::new(move |streams| {
            LegacyPlugin::new(node.clone(), upstreams.clone(), resource.clone(), streams)
        });
        let (over, sender) = (stop.child_token(), watch::Sender::new(RegistrationState::default()));
        let task = tokio::spawn(endpoint::run(spec, directory.clone(), make, sender, over.clone()));
        (over, task)
    };
    let mut served: BTreeMap<String, (CancellationToken, tokio::task::JoinHandle<()>)> = BTreeMap::new();
    loop {
        let announced = tokio::select! {
            announced = announced.recv() => announced,
            () = stop.cancelled() => None,
        };
        match announced {
            Some(Announcement::Registered(resource)) => {
                if !served.contains_key(&resource) {
                    served.insert(resource.clone(), start(resource));
                }
            }
            Some(Announcement::TakeBack(resource)) => {
                if let Some((over, task)) = served.remove(&resource) {
                    over.cancel();
                    let _ = task.await;
                } else if !upstreams.is_registered(&resource) {
                    // It will be served with its first list.
                    continue;
                }
                served.insert(resource.clone(), start(resource));
            }
            Some(Announcement::Lost(resource)) => {
                if let Some((over, task)) = served.remove(&resource) {
                    over.cancel();
                    let _ = task.await;
                    tracing::info!(resource, "not served until NVIDIA's plugin registers again");
                }
            }
            None => {
                stop.cancelled().await;
                for (_, task) in served.into_values() {
                    let _ = task.await;
                }
                return;
            }
        }
    }
}

/// Reads the kubelet checkpoint when it changes, detects restarts of the kubelet, and reconciles.
async fn follow_kubelet(node: Arc<Node>, mut directory: DirectoryWatch, stop: CancellationToken) {
    let socket = directory.path().join("kubelet.sock");
    let mut kubelet = Stamp::of(&socket);
    loop {
        node.read_checkpoint();
        let now = Stamp::of(&socket);
        if now.is_some() && now != kubelet {
            tracing::info!("the kubelet restarted");
            node.kubelet_started();
            kubelet = now;
        }
        tokio::select! {
            () = directory.changed() => {}
            () = tokio::time::sleep(TICK) => node.with(NodeState::reconcile),
            () = stop.cancelled() => return,
        }
    }
}

/// Reads cgroups while a pod's end is waited for.
async fn follow_cgroups(node: Arc<Node>, stop: CancellationToken) {
    while stop.run_until_cancelled(tokio::time::sleep(TICK)).await.is_some() {
        if node.with(|state, _| state.needs_cgroups()) {
            node.read_cgroups();
        }
    }
}

fn pages(
    node: &Arc<Node>,
    upstreams: &Arc<Upstreams>,
    static_status: StaticStatus,
    drift: watch::Receiver<Vec<String>>,
    registrations: Vec<watch::Receiver<RegistrationState>>,
) -> axum::Router {
    let ready = move || {
        if registrations.iter().all(|registration| registration.borrow().registered) {
            Ok(())
        } else {
            Err("not registered with the kubelet; is the kubelet running?".to_owned())
        }
    };
    let (of_cards, upstreams) = (node.clone(), upstreams.clone());
    let cards =
        async move || axum::Json(publish::status(&of_cards, &upstreams, &static_status, &drift.borrow()));
    let usage = node.metrics.usage.clone();
    admin::router(node.metrics.registry(), ready)
        .route("/cards", axum::routing::get(cards))
        .route(usage::PATH, axum::routing::get(async move || axum::Json(usage.report())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_second_agent_waits_for_the_first_to_end() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let stop = CancellationToken::new();
        let first = only_agent(&state, &stop).await.unwrap().unwrap();
        let second = only_agent(&state, &stop);
        tokio::pin!(second);
        assert!(tokio::time::timeout(Duration::from_secs(60), &mut second).await.is_err());
        drop(first);
        assert!(second.await.unwrap().is_some());
        let _held = only_agent(&state, &stop).await.unwrap();
        stop.cancel();
        assert!(only_agent(&state, &stop).await.unwrap().is_none(), "it is to stop");
    }
}
