//! The real services around the real decisions, with real files: only sockets are pipes, and time passes when nothing else can.
//!
//! Each process has a runtime of its own. To kill the agent is to drop that, wherever its tasks are; what it wrote by then is what
//! the next process finds.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::{Stream, StreamExt};
use gpu_migrate_model::card::Card;
use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::names::Dialect;
use gpu_migrate_model::topology::{LinkLevel, Topology};
use gpu_migrate_sim::nvidia::{self, NvidiaPlugin};
use parking_lot::Mutex;
use tokio::runtime::Runtime;
use tokio::time::Instant;
use tonic::{Request, Status};

use super::nvidia::{Inventory, Socket};
use super::{Agent, Mutant, Trouble, cards_of, fresh, shown, uuid};
use crate::cluster::pods::take_pending;
use crate::decide::tests::world::{Api, CORE, GPU, Kubelet, MEMORY, Surroundings};
use crate::decide::{Millis, NodeState, PodPhase};
use crate::inventory::card_map_file;
use crate::isolation::NoIsolation;
use crate::metrics::Metrics;
use crate::node::{ANSWERED, EarlierRecord, Node, Paths, PodLookup};
use crate::nvidia::Upstreams;
use crate::platform::{Cgroups, Clock, Disk, Platform, PodResources, replace};
use crate::plugins::answer::AnswerStyle;
use crate::plugins::legacy::LegacyPlugin;
use crate::plugins::list_and_watch::Streams;
use crate::plugins::shared::{AllocateConfig, SharedPlugin};
use gpu_migrate_kubelet_api::deviceplugin::device_plugin_server::DevicePlugin;
use gpu_migrate_kubelet_api::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerPreferredAllocationRequest, Empty, HEALTHY,
    ListAndWatchResponse, PreStartContainerRequest, PreferredAllocationRequest,
};
use gpu_migrate_kubelet_api::lister::{ContainerDevices, PodResourcesError};

type ListStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

pub(in super::super) struct Services {
    surroundings: Surroundings,
    mutant: Option<Mutant>,
    folder: tempfile::TempDir,
    disk: FailingDisk,
    socket: Socket,
    process: Option<Process>,
    /// The version of the kubelet checkpoint that it read.
    read: Option<u64>,
}

/// From a start to a death. The runtime last: it is dropped last.
struct Process {
    node: Arc<Node>,
    upstreams: Arc<Upstreams>,
    cores: SharedPlugin,
    memory: SharedPlugin,
    legacy: LegacyPlugin,
    lists: BTreeMap<&'static str, ListStream>,
    clock: ProcessClock,
    runtime: Runtime,
}

impl Services {
    /// A new process from the disk, at this moment of the world.
    fn begin(&mut self, at: Millis) {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let inside = runtime.enter();
        let clock = ProcessClock { at, born: Instant::now() };
        let platform = Platform {
            clock: Box::new(clock),
            disk: Box::new(self.disk.clone()),
            pod_resources: Box::new(KubeletApi(self.surroundings.kubelet.clone())),
            cgroups: Box::new(HostCgroups(self.surroundings.cgroups.clone())),
            sockets: Box::new(self.socket.clone()),
        };
        let kubelet = self.folder.path().to_path_buf();
        let state = kubelet.join("device-plugins/gpu-migrate");
        let paths = Paths { state, cgroups: kubelet.join("cgroup"), kubelet };
        let earlier = EarlierRecord::read(&paths);
        let (state, cards) = {
            let hardware = self.surroundings.hardware.lock();
            let (rows, found) = (&earlier.record.data.entries, hardware.inventory().cards);
            let resolved = card_map_file::resolve(&paths, &Dialect::default(), rows, &found);
            let number = |card: Card| Some(*cards_of([card.uuid.as_str()])?.first()?);
            let cards: Vec<Option<usize>> = resolved.cards().into_iter().map(number).collect();
            (fresh(self.mutant, &hardware, resolved), cards)
        };
        let topology = Topology::uniform(cards.len(), LinkLevel::Pix);
        let node = Node::start_in(platform, paths, earlier, state, topology, Metrics::default());
        node.lookup.set(Box::new(ApiServer(self.surroundings.api.clone()))).unwrap();
        node.read_cgroups();
        let (upstreams, _) = Upstreams::new(
            node.clone(),
            Arc::new(Inventory { hardware: self.surroundings.hardware.clone(), cards, clock }),
        );
        let config = Arc::new(AllocateConfig {
            tracer: Default::default(),
            style: AnswerStyle::default(),
            isolation: Arc::new(NoIsolation),
            cdi: None,
        });
        let shared = |resource| SharedPlugin::new(node.clone(), resource, config.clone(), Streams::default());
        let (cores, memory) = (shared(SharedResource::Cores), shared(SharedResource::Memory));
        let legacy = LegacyPlugin::new(node.clone(), upstreams.clone(), GPU.into(), Streams::default());
        let lists = BTreeMap::new();
        let spreading = node.clone();
        runtime.spawn(async move { spreading.forward_changes().await });
        let writing = node.clone();
        runtime.spawn(async move { writing.keep_record().await });
        drop(inside);
        self.process = Some(Process { node, upstreams, cores, memory, legacy, lists, clock, runtime });
        self.has_read();
        self.nvidia_returns();
    }

    fn process(&self) -> &Process {
        self.process.as_ref().unwrap()
    }

    /// It has read the checkpoint as it is on disk.
    fn has_read(&mut self) {
        let kubelet = self.surroundings.kubelet.lock();
        if !kubelet.is_truncated() {
            self.read = Some(kubelet.version());
        }
    }

    fn is_registered(&self) -> bool {
        self.process().upstreams.registered_resources().get(GPU) == Some(&true)
    }
}

impl Process {
    fn wait<T>(&self, what: impl Future<Output = T>) -> T {
        self.runtime.block_on(what)
    }

    fn pass(&self, milliseconds: Millis) {
        self.wait(async { tokio::time::sleep(Duration::from_millis(milliseconds)).await });
    }

    /// Until nothing happens any more but by time passing.
    fn settle(&self) {
        self.pass(2 * u64::try_from(ANSWERED.as_millis()).unwrap());
    }

    fn shared(&self, resource: &str) -> Option<&SharedPlugin> {
        match resource {
            CORE => Some(&self.cores),
            MEMORY => Some(&self.memory),
            _ => None,
        }
    }
}

impl Agent for Services {
    fn start(surroundings: Surroundings, mutant: Option<Mutant>) -> Self {
        let memory = Path::new("/dev/shm");
        let folder =
            if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
        let plugins = folder.path().join("device-plugins");
        std::fs::create_dir(&plugins).unwrap();
        surroundings.kubelet.lock().put_into(&plugins);
        let mut agent = Self {
            surroundings,
            mutant,
            folder,
            disk: FailingDisk::default(),
            socket: Socket::default(),
            process: None,
            read: None,
        };
        agent.begin(1);
        agent
    }

    fn restart(&mut self) {
        let at = self.now();
        self.process = None;
        self.read = None;
        self.begin(at);
    }

    fn now(&self) -> Millis {
        let _inside = self.process().runtime.enter();
        self.process().clock.of_world()
    }

    fn tick(&mut self) {
        self.process().settle();
    }

    fn pass(&mut self, milliseconds: Millis) {
        self.process().pass(milliseconds);
        let process = self.process();
        {
            let _inside = process.runtime.enter();
            process.node.read_cgroups();
        }
        self.with_state(NodeState::reconcile);
    }

    fn with_state<R>(&self, what: impl FnOnce(&mut NodeState, Millis) -> R) -> R {
        let _inside = self.process().runtime.enter();
        self.process().node.with(what)
    }

    fn read_checkpoint(&mut self) {
        {
            let _inside = self.process().runtime.enter();
            self.process().node.read_checkpoint();
        }
        self.has_read();
    }

    fn is_up_to_date(&self) -> bool {
        self.read == Some(self.surroundings.kubelet.lock().version())
    }

    fn notice_kubelet(&mut self, _: Millis) {
        {
            let _inside = self.process().runtime.enter();
            self.process().node.kubelet_started();
        }
        self.has_read();
    }

    fn list_pod_resources(&mut self) {
        let process = self.process();
        process.settle();
        // As the comparison of sources does, whenever it has a list.
        process.wait(async {
            process.node.read_cgroups();
            process.node.list_pod_resources().await.unwrap();
        });
        process.settle();
    }

    fn lose_record(&mut self) {
        let paths = &self.process().node.paths;
        let _ = std::fs::remove_file(paths.record());
        // That there was an agent before.
        std::fs::write(paths.card_map(), "").unwrap();
    }

    fn nvidia_returns(&mut self) {
        let (cards, healthy): (Vec<usize>, Vec<bool>) = {
            let mut hardware = self.surroundings.hardware.lock();
            hardware.plugin_starts();
            hardware.plugin_list().into_iter().unzip()
        };
        let served = self.socket.0.lock().clone();
        match served {
            Some(plugin) if self.is_registered() => {
                plugin.report(healthy);
            }
            _ => {
                let cards = cards.into_iter().map(uuid).collect();
                *self.socket.0.lock() = Some(NvidiaPlugin::with_health(cards, healthy, None));
                let _inside = self.process().runtime.enter();
                self.process().upstreams.register(nvidia::registration(nvidia::SOCKET)).unwrap();
            }
        }
        self.process().settle();
    }

    fn nvidia_goes(&mut self) {
        self.surroundings.hardware.lock().plugin_goes();
        *self.socket.0.lock() = None;
        self.process().settle();
    }

    fn list(&mut self, resource: &'static str) -> Option<BTreeMap<String, bool>> {
        let process = self.process.as_mut().unwrap();
        process.settle();
        let last = process.runtime.block_on(async {
            if !process.lists.contains_key(resource) {
                let empty = || Request::new(Empty {});
                let stream: ListStream = match resource {
                    CORE => process.cores.list_and_watch(empty()).await.unwrap().into_inner(),
                    MEMORY => process.memory.list_and_watch(empty()).await.unwrap().into_inner(),
                    _ => process.legacy.list_and_watch(empty()).await.unwrap().into_inner(),
                };
                process.lists.insert(resource, stream);
                tokio::task::yield_now().await;
            }
            let stream = process.lists.get_mut(resource).unwrap();
            let mut last = None;
            while let std::task::Poll::Ready(Some(list)) = futures::poll!(stream.next()) {
                last = Some(list.unwrap());
                tokio::task::yield_now().await;
            }
            last
        });
        last.map(|list| list.devices().unwrap().into_iter().map(|d| (d.id, d.health == HEALTHY)).collect())
    }

    fn end_streams(&mut self) {
        self.process.as_mut().unwrap().lists.clear();
        self.process().settle();
    }

    fn end_stream(&mut self, resource: &'static str) {
        self.process.as_mut().unwrap().lists.remove(resource);
        self.process().settle();
    }

    fn prefer(
        &mut self,
        resource: &'static str,
        offered: Vec<String>,
        must: Vec<String>,
        size: usize,
    ) -> Vec<String> {
        let ask = ContainerPreferredAllocationRequest {
            available_device_ids: offered,
            must_include_device_ids: must,
            allocation_size: i32::try_from(size).unwrap(),
        };
        let request = Request::new(PreferredAllocationRequest { container_requests: vec![ask] });
        let process = self.process();
        let answer = process.wait(async {
            match process.shared(resource) {
                Some(plugin) => plugin.get_preferred_allocation(request).await,
                None => process.legacy.get_preferred_allocation(request).await,
            }
        });
        self.has_read();
        answer.unwrap().into_inner().container_responses.remove(0).device_ids
    }

    fn allocate(
        &mut self,
        resource: &'static str,
        ids: Vec<String>,
        trouble: Trouble,
    ) -> Option<BTreeSet<usize>> {
        let ask = ContainerAllocateRequest { devices_ids: ids };
        let request = Request::new(AllocateRequest { container_requests: vec![ask] });
        self.disk.expect(trouble);
        let plugin = self.socket.0.lock().clone();
        if let Some(plugin) = &plugin {
            plugin.set_trouble(match trouble {
                Trouble::NvidiaRefuses => nvidia::Trouble::Refuses,
                Trouble::NvidiaHangs => nvidia::Trouble::Hangs,
                _ => nvidia::Trouble::None,
            });
        }
        let process = self.process();
        let answer = process.wait(async {
            match process.shared(resource) {
                Some(plugin) => plugin.allocate(request).await,
                None => process.legacy.allocate(request).await,
            }
        });
        self.disk.expect(Trouble::None);
        if let Some(plugin) = &plugin {
            plugin.set_trouble(nvidia::Trouble::None);
        }
        self.has_read();
        let answer = answer.ok()?.into_inner().container_responses.remove(0);
        match answer.envs.get("NVIDIA_VISIBLE_DEVICES") {
            Some(cards) => Some(shown(self.mutant, resource, cards_of(cards.split(','))?)),
            None => Some(BTreeSet::new()),
        }
    }

    fn may_start(&mut self, resource: &'static str, ids: Vec<String>, trouble: Trouble) -> bool {
        let request = Request::new(PreStartContainerRequest { devices_ids: ids });
        let Some(plugin) = self.process().shared(resource) else { return true };
        self.disk.expect(trouble);
        let answer = self.process().wait(plugin.pre_start_container(request));
        self.disk.expect(Trouble::None);
        self.has_read();
        answer.is_ok()
    }
}

/// The clock of one process, and of the world around it.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProcessClock {
    /// The world's time when it began.
    at: Millis,
    born: Instant,
}

impl ProcessClock {
    fn of_world(&self) -> Millis {
        self.at + self.now() - 1
    }
}

impl Clock for ProcessClock {
    fn now(&self) -> Millis {
        Millis::try_from(self.born.elapsed().as_millis()).unwrap() + 1
    }

    fn age(&self, stamp: SystemTime) -> Millis {
        let stamp = stamp.duration_since(SystemTime::UNIX_EPOCH).unwrap();
        self.of_world().saturating_sub(Millis::try_from(stamp.as_millis()).unwrap())
    }
}

/// A disk that fails at one step, once or from then on, or takes long.
#[derive(Clone, Debug, Default)]
struct FailingDisk(Arc<Mutex<Fails>>);

/// How long a stalled disk takes for a write: longer than anybody waits for it.
const STALL: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
struct Fails {
    after: Option<u8>,
    for_ever: bool,
    stalls: bool,
}

impl FailingDisk {
    fn expect(&self, trouble: Trouble) {
        *self.0.lock() = match trouble {
            Trouble::Dies(step) => Fails { after: Some(step), for_ever: true, stalls: false },
            Trouble::DiskFails(step) => Fails { after: Some(step), ..Fails::default() },
            Trouble::DiskStalls => Fails { stalls: true, ..Fails::default() },
            _ => Fails::default(),
        };
    }
}

#[tonic::async_trait]
impl Disk for FailingDisk {
    async fn replace(&self, path: PathBuf, content: Vec<u8>) -> std::io::Result<()> {
        let stalls = self.0.lock().stalls;
        if stalls {
            tokio::time::sleep(STALL).await;
        }
        replace(&path, &content, |_| {
            let mut fails = self.0.lock();
            let Some(left) = fails.after else { return Ok(()) };
            if left > 0 {
                fails.after = Some(left - 1);
                return Ok(());
            }
            fails.after = fails.for_ever.then_some(0);
            Err(std::io::ErrorKind::StorageFull.into())
        })
    }
}

#[derive(Debug)]
struct KubeletApi(Arc<Mutex<Kubelet>>);

#[tonic::async_trait]
impl PodResources for KubeletApi {
    async fn list(&self) -> Result<Vec<ContainerDevices>, PodResourcesError> {
        Ok(self.0.lock().list())
    }
}

#[derive(Debug)]
struct HostCgroups(Arc<Mutex<Option<BTreeSet<String>>>>);

impl Cgroups for HostCgroups {
    fn populated(&self) -> Option<BTreeSet<String>> {
        self.0.lock().clone()
    }
}

/// The API server, as it answers out of turn.
#[derive(Debug)]
struct ApiServer(Arc<Mutex<Api>>);

#[tonic::async_trait]
impl PodLookup for ApiServer {
    async fn refresh(&self, node: &Node) {
        let pending: Option<Vec<_>> = {
            let api = self.0.lock();
            let pods = api.pods.values().filter(|pod| pod.phase == PodPhase::Pending);
            (!api.away).then(|| pods.cloned().collect())
        };
        match pending {
            Some(pods) => take_pending(node, pods),
            None => std::future::pending().await,
        }
    }
}
