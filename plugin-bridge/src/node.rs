//! The state of the node behind a lock that is held for a decision and never across I/O, and the two files it is read from.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;

use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::topology::Topology;
use parking_lot::Mutex;
use tokio::sync::{broadcast, watch};

use crate::decide::{Millis, NodeState};
use crate::metrics::Metrics;
use crate::platform::{Platform, in_time};
use crate::record::{Record, RecordRow};
use gpu_migrate_kubelet_api::checkpoint::{self, Checkpoint, CheckpointError};
use gpu_migrate_kubelet_api::directory::Stamp;
use gpu_migrate_kubelet_api::lister;

/// Where the kubelet's and our own files and sockets are.
#[derive(Clone, Debug)]
pub struct Paths {
    /// The kubelet's root, `/var/lib/kubelet`.
    pub kubelet: PathBuf,
    /// Our own state: `nvidia_checkpoint` and `cards.json`.
    pub state: PathBuf,
    /// The host's cgroups.
    pub cgroups: PathBuf,
}

impl Paths {
    /// Sockets of plugins, and the kubelet checkpoint.
    #[must_use]
    pub fn device_plugins(&self) -> PathBuf {
        self.kubelet.join("device-plugins")
    }

    /// The socket that plugins register on; the kubelet re-creates it when it starts.
    #[must_use]
    pub fn kubelet_socket(&self) -> PathBuf {
        self.device_plugins().join("kubelet.sock")
    }

    #[must_use]
    pub fn checkpoint(&self) -> PathBuf {
        self.device_plugins().join(checkpoint::FILE_NAME)
    }

    /// The socket of the pod-resources API.
    #[must_use]
    pub fn pod_resources(&self) -> PathBuf {
        self.kubelet.join("pod-resources/kubelet.sock")
    }

    /// Which range of device IDs is which card's.
    #[must_use]
    pub fn card_map(&self) -> PathBuf {
        self.state.join(crate::inventory::card_map::FILE_NAME)
    }

    #[must_use]
    pub fn record(&self) -> PathBuf {
        self.state.join("nvidia_checkpoint")
    }

    /// There was an agent on this node before: each writes these at its first start.
    #[must_use]
    pub fn has_state(&self) -> bool {
        self.card_map().exists() || self.record().exists()
    }

    /// The Node's annotation of cordoned cards, as it was last seen.
    #[must_use]
    pub fn cordon(&self) -> PathBuf {
        self.state.join("cordoned-cards")
    }
}

/// A file of ours could not be written.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {source}")]
pub struct StateError {
    pub path: PathBuf,
    pub source: std::io::Error,
}

impl StateError {
    fn at(path: PathBuf, outcome: std::io::Result<()>) -> Result<(), Self> {
        outcome.map_err(|source| Self { path, source })
    }
}

/// What an earlier process left in `nvidia_checkpoint`.
#[derive(Debug, Default)]
pub struct EarlierRecord {
    pub record: Record,
    /// There was an agent before, and its record is missing or damaged, or does not have everything.
    pub lost: bool,
}

impl EarlierRecord {
    /// Reads it. A damaged file is moved aside, so that the agent starts: what running containers have is then taken from the kubelet
    /// checkpoint and the pods, and nothing is allocated before those agree.
    #[must_use]
    pub fn read(paths: &Paths) -> Self {
        let path = paths.record();
        let is_missing = |error: &std::io::Error| error.kind() == ErrorKind::NotFound;
        match std::fs::read(&path) {
            Ok(text) => match serde_json::from_slice::<Record>(&text) {
                Ok(record) => return Self { lost: record.incomplete, record },
                Err(error) => {
                    let aside = path.with_extension("damaged");
                    let moved = std::fs::rename(&path, &aside).is_ok();
                    tracing::warn!(path = %path.display(), %error, moved_to = %aside.display(), moved, "the agent's record is damaged");
                }
            },
            Err(error) if is_missing(&error) && !paths.has_state() => return Self::default(),
            Err(error) => tracing::warn!(path = %path.display(), %error, "the agent's record is lost"),
        }
        Self { record: Record::default(), lost: true }
    }
}

/// Reads the API server's pods of this node ahead of the watch.
#[tonic::async_trait]
pub trait PodLookup: Send + Sync + std::fmt::Debug {
    /// Updates the state from the pods as they are now.
    async fn refresh(&self, node: &Node);
}

/// Becomes an Event on the Node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeEvent {
    pub warning: bool,
    pub reason: &'static str,
    pub note: String,
}

impl NodeEvent {
    pub fn normal(reason: &'static str, note: impl Into<String>) -> Self {
        Self { warning: false, reason, note: note.into() }
    }

    pub fn warning(reason: &'static str, note: impl Into<String>) -> Self {
        Self { warning: true, reason, note: note.into() }
    }
}

/// How long an answer to the kubelet waits for a pod that is not known yet: every pod of the node waits with it.
const POD_WAIT: std::time::Duration = std::time::Duration::from_millis(300);

/// Time between two attempts to write the record.
const RETRY: std::time::Duration = std::time::Duration::from_secs(1);

/// How long after a change the answer that made it has surely been sent. The kubelet's next request follows later still: it writes
/// its checkpoint first.
pub(crate) const ANSWERED: std::time::Duration = std::time::Duration::from_millis(2);

#[derive(Debug)]
pub struct Node {
    pub lookup: std::sync::OnceLock<Box<dyn PodLookup>>,
    pub paths: Paths,
    /// The links between cards, for reports.
    pub topology: Topology,
    pub metrics: Metrics,
    events: broadcast::Sender<NodeEvent>,
    state: Mutex<NodeState>,
    version: watch::Sender<u64>,
    deferred: watch::Sender<u64>,
    /// What `nvidia_checkpoint` has. Held for a comparison, never across I/O.
    written: Mutex<Written>,
    /// Serialises the writes of our files. A write keeps it until the disk has done it, also where nobody waits for that any more.
    writer: Arc<tokio::sync::Mutex<()>>,
    read: Mutex<Option<Read>>,
    platform: Platform,
}

impl Node {
    /// Starts from the files of an earlier process: its record, then the kubelet checkpoint.
    #[must_use]
    pub fn start(
        paths: Paths,
        earlier: EarlierRecord,
        state: NodeState,
        topology: Topology,
        metrics: Metrics,
    ) -> Arc<Self> {
        let platform = Platform::real(paths.pod_resources(), paths.cgroups.clone());
        Self::start_in(platform, paths, earlier, state, topology, metrics)
    }

    /// The same, on another platform than the real one.
    #[must_use]
    pub fn start_in(
        platform: Platform,
        paths: Paths,
        earlier: EarlierRecord,
        mut state: NodeState,
        topology: Topology,
        metrics: Metrics,
    ) -> Arc<Self> {
        let EarlierRecord { record, lost } = earlier;
        if lost {
            state.observe_lost_record();
        }
        state.restore_record(record.data.entries.clone());
        let node = Arc::new(Self {
            lookup: std::sync::OnceLock::new(),
            paths,
            topology,
            metrics,
            events: broadcast::Sender::new(64),
            state: Mutex::new(state),
            version: watch::Sender::new(0),
            deferred: watch::Sender::new(0),
            // An empty record is written too: its absence means that it was lost.
            written: Mutex::new(if lost || record.data.entries.is_empty() {
                Written::default()
            } else {
                Written::of(record)
            }),
            writer: Arc::default(),
            read: Mutex::new(None),
            platform,
        });
        node.metrics.usage.set_node(&node);
        node.read_checkpoint();
        node
    }

    /// Milliseconds since the start of this process, plus one: 0 is before everything.
    #[must_use]
    pub fn now(&self) -> Millis {
        self.platform.clock.now()
    }

    #[must_use]
    pub const fn platform(&self) -> &Platform {
        &self.platform
    }

    /// Runs `decide` under the lock. It must be short: no I/O, no waiting.
    pub fn with<R>(&self, decide: impl FnOnce(&mut NodeState, Millis) -> R) -> R {
        let now = self.now();
        let mut state = self.state.lock();
        let before = state.version();
        let outcome = decide(&mut state, now);
        let after = state.version();
        drop(state);
        if before != after {
            self.version.send_replace(after);
        }
        outcome
    }

    pub fn record_event(&self, event: NodeEvent) {
        // There is no receiver without an API server; the log has it too.
        let _ = self.events.send(event);
    }

    #[must_use]
    pub fn events(&self) -> broadcast::Receiver<NodeEvent> {
        self.events.subscribe()
    }

    /// Notifies at once when the state has changed. For the services that answer the kubelet.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// The same a moment later, for everything else: see [`Node::forward_changes`].
    #[must_use]
    pub fn deferred_changes(&self) -> watch::Receiver<u64> {
        self.deferred.subscribe()
    }

    /// Notifies of changes once the answer that made them has been sent. Otherwise lists, comparisons and reports would start while
    /// the kubelet waits, and take the lock from the service that answers it.
    pub async fn forward_changes(self: Arc<Self>) {
        let mut changes = self.changes();
        while changes.changed().await.is_ok() {
            tokio::time::sleep(ANSWERED).await;
            self.deferred.send_replace(*changes.borrow_and_update());
        }
    }

    /// Reads the kubelet checkpoint if it has changed. Cheap when it has not: one `stat`.
    ///
    /// The kubelet writes a container's devices to it before it requests the next container's, so reading it before each decision
    /// leaves no gap, whenever this process was started.
    pub fn read_checkpoint(&self) {
        let path = self.paths.checkpoint();
        let mut read = self.read.lock();
        let stamp = Stamp::of(&path);
        let Some(stamp) = stamp else {
            return self.with(NodeState::observe_missing_checkpoint);
        };
        if read.is_some_and(|read| read.stamp == stamp && !read.reread) {
            return;
        }
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "reading the kubelet checkpoint failed; nothing is freed");
                return;
            }
        };
        match Checkpoint::parse(&text) {
            Ok(parsed) => {
                let before = read.replace(Read { stamp, reread: false });
                self.metrics.checkpoint_read(true);
                self.with(|state, now| match before {
                    Some(before) if before.stamp == stamp => state.ingest_unchanged_checkpoint(&parsed, now),
                    _ => state.ingest_checkpoint(&parsed, now),
                });
            }
            Err(error) => {
                self.metrics.checkpoint_read(false);
                self.with(NodeState::observe_unreadable_checkpoint);
                // An empty file is being written.
                if !matches!(error, CheckpointError::Empty) {
                    tracing::warn!(path = %path.display(), %error, "the kubelet checkpoint is truncated or malformed; nothing is freed");
                }
            }
        }
    }

    /// The kubelet restarted, from the checkpoint as it is on disk.
    pub fn kubelet_started(&self) {
        if let Some(read) = &mut *self.read.lock() {
            read.reread = true;
        }
        let whole = std::fs::read(self.paths.checkpoint()).is_ok_and(|text| Checkpoint::parse(&text).is_ok());
        // It may have made requests before this is noticed; not before its socket existed.
        let socket = std::fs::metadata(self.paths.kubelet_socket()).and_then(|meta| meta.modified());
        let age = socket.map_or(0, |made| self.platform.clock.age(made));
        self.with(|state, now| state.observe_kubelet_start(whole, now.saturating_sub(age)));
        self.read_checkpoint();
    }

    /// Waits a moment for a pending container that requests this much: the kubelet learns of pods when the agent does, or a little
    /// before.
    pub async fn wait_for_candidate(&self, resource: SharedResource, size: usize) {
        if self.with(|state, _| state.has_candidate(resource, size)) {
            return;
        }
        let mut changes = self.changes();
        let watched = async {
            while changes.changed().await.is_ok() {
                if self.with(|state, _| state.has_candidate(resource, size)) {
                    return;
                }
            }
        };
        let listed = async {
            match self.lookup.get() {
                Some(lookup) => lookup.refresh(self).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = watched => {}
            () = listed => {}
            () = tokio::time::sleep(POD_WAIT) => tracing::debug!(?resource, size, "no pending pod requests this"),
        }
    }

    /// Updates `nvidia_checkpoint` atomically, if it lacks a deviation or has one too many. Returns once it is on disk, or when that
    /// takes too long: the write is finished nevertheless, and the next one follows it.
    ///
    /// # Errors
    /// [`StateError`]; the file is as it was, or up to date.
    pub async fn write_deviations(self: &Arc<Self>) -> Result<(), StateError> {
        let wanted = self.with(|state, _| state.deviations());
        if self.written.lock().deviations.as_ref() == Some(&wanted) {
            return Ok(());
        }
        StateError::at(self.paths.record(), in_time(self.write_record()).await)
    }

    /// Updates `nvidia_checkpoint` atomically, if it differs in anything.
    async fn write_record(self: &Arc<Self>) -> std::io::Result<()> {
        let node = self.clone();
        self.write(async move { node.replace_record().await }).await
    }

    /// Replaces a small file of ours.
    ///
    /// # Errors
    /// [`StateError`]; the file is as it was, or will be replaced later.
    pub async fn write_file(self: &Arc<Self>, path: PathBuf, text: Vec<u8>) -> Result<(), StateError> {
        let (node, to) = (self.clone(), path.clone());
        let write = self.write(async move { node.platform.disk.replace(to, text).await });
        StateError::at(path, in_time(write).await)
    }

    /// One write after the other, each to its end also where nobody waits for that any more.
    async fn write(
        &self,
        write: impl Future<Output = std::io::Result<()>> + Send + 'static,
    ) -> std::io::Result<()> {
        let one = self.writer.clone().lock_owned().await;
        let write = tokio::spawn(async move {
            let outcome = write.await;
            drop(one);
            outcome
        });
        write.await?
    }

    /// Writes down who holds what a moment after it changes, and again where that failed.
    pub async fn keep_record(self: Arc<Self>) {
        let mut changes = self.deferred_changes();
        loop {
            changes.borrow_and_update();
            let written = self.write_record().await;
            if let Err(error) = &written {
                let path = self.paths.record();
                tracing::warn!(path = %path.display(), %error, retry_in = ?RETRY, "writing the agent's record failed");
            }
            tokio::select! {
                changed = changes.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(RETRY), if written.is_err() => {}
            }
        }
    }

    async fn replace_record(&self) -> std::io::Result<()> {
        let Some(wanted) = self.with(|state, _| state.has_record().then(|| state.record())) else {
            return Ok(());
        };
        let wanted = Written::of(wanted);
        {
            let mut written = self.written.lock();
            if written.record == wanted.record {
                return Ok(());
            }
            // Until this has succeeded it is not known which of the two is there.
            written.record = None;
            if written.deviations != wanted.deviations {
                written.deviations = None;
            }
        }
        let text = serde_json::to_vec(&wanted.record)?;
        self.platform.disk.replace(self.paths.record(), text).await?;
        *self.written.lock() = wanted;
        Ok(())
    }

    /// Reads which pods still have processes.
    pub fn read_cgroups(&self) {
        let at = self.now();
        if let Some(populated) = self.platform.cgroups.populated() {
            self.with(|state, now| state.observe_cgroups(populated, at, now));
        }
    }

    /// Lists pod-resources into the state.
    ///
    /// # Errors
    /// [`lister::PodResourcesError`]; nothing may be concluded from it.
    pub async fn list_pod_resources(
        &self,
    ) -> Result<Vec<lister::ContainerDevices>, lister::PodResourcesError> {
        let asked = self.now();
        let rows = self.platform.pod_resources.list().await?;
        self.with(|state, now| state.observe_pod_resources(&rows, asked, now));
        Ok(rows)
    }
}

/// The content of `nvidia_checkpoint`, as far as it is known: while it is being replaced, and after that failed, it is one of two.
#[derive(Debug, Default)]
struct Written {
    record: Option<Record>,
    deviations: Option<Vec<RecordRow>>,
}

impl Written {
    fn of(record: Record) -> Self {
        let deviations = record.data.entries.iter().filter(|row| row.deviates()).cloned().collect();
        Self { record: Some(record), deviations: Some(deviations) }
    }
}

/// The version of the kubelet checkpoint that was read last.
#[derive(Clone, Copy, Debug)]
struct Read {
    stamp: Stamp,
    /// The kubelet restarted from it since.
    reread: bool,
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use gpu_migrate_model::card::Card;
    use tokio::sync::Semaphore;
    use tokio::time::Instant;

    use super::*;
    use crate::decide::{Settings, UpstreamDevice};
    use crate::platform::{Disk, replace};

    const GPU: &str = "nvidia.com/gpu";

    /// A disk that does one write for each permit.
    #[derive(Clone, Debug)]
    struct Stalling(Arc<Semaphore>);

    #[tonic::async_trait]
    impl Disk for Stalling {
        async fn replace(&self, path: PathBuf, content: Vec<u8>) -> std::io::Result<()> {
            self.0.acquire().await.map_err(std::io::Error::other)?.forget();
            replace(&path, &content, |_| Ok(()))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stalled_disk_delays_only_answers_that_deviate_and_none_for_long() {
        let folder = tempfile::tempdir().unwrap();
        let kubelet = folder.path().to_path_buf();
        let paths = Paths { state: kubelet.join("state"), cgroups: kubelet.join("cgroup"), kubelet };
        let card = |n: u32| Card { uuid: format!("GPU-{n}"), minor: n, memory_mib: 4096, ..Card::default() };
        let mut state = NodeState::new(Settings::default(), (0..2).map(card).collect(), &Topology::default());
        state.ingest_checkpoint(&Checkpoint::parse(br#"{"Data":{"PodDeviceEntries":null}}"#).unwrap(), 1);
        let device =
            |n: u32| UpstreamDevice { id: format!("GPU-{n}").into(), healthy: true, numa: Vec::new() };
        state.observe_upstream(GPU, Some((0..2).map(device).collect()));
        let permits = Arc::new(Semaphore::new(1));
        let mut platform = Platform::real(paths.pod_resources(), paths.cgroups.clone());
        platform.disk = Box::new(Stalling(permits.clone()));
        let earlier = EarlierRecord::default();
        let node = Node::start_in(platform, paths, earlier, state, Topology::default(), Metrics::default());
        node.write_deviations().await.unwrap();

        // Nothing is written any more; the record of this share waits.
        let (began, ids) = (Instant::now(), ["tencent.com/vcuda-core-0".to_owned()]);
        node.with(|state, now| state.allocate_shared(SharedResource::Cores, &ids, now)).unwrap();
        let (keeper, sleep) = (node.clone(), Duration::from_millis(10));
        let record = tokio::spawn(async move { keeper.write_record().await });
        tokio::time::sleep(sleep).await;
        node.write_deviations().await.unwrap();
        assert_eq!(began.elapsed(), sleep, "it is the kubelet's own choice: the record is not needed for it");

        // The kubelet requested the card of the share.
        let granted = node.with(|state, now| state.allocate_legacy(GPU, &["GPU-0".to_owned()], now)).unwrap();
        assert!(granted.deviates);
        let late = node.write_deviations().await.unwrap_err();
        assert_eq!(late.source.kind(), ErrorKind::TimedOut);
        node.with(|state, _| state.roll_back(granted.grant));

        permits.add_permits(9);
        record.await.unwrap().unwrap();
        node.with(|state, now| state.allocate_legacy(GPU, &["GPU-0".to_owned()], now)).unwrap();
        node.write_deviations().await.unwrap();
        let record = std::fs::read_to_string(node.paths.record()).unwrap();
        assert!(record.contains(r#""KubeletDeviceIDs":["GPU-0"]"#), "{record}");
    }
}
