//! The one live ledger of the node behind a lock that is held for a decision and never across I/O, and its two files.

use std::path::PathBuf;
use std::sync::Arc;

use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::topology::Topology;
use parking_lot::Mutex;
use tokio::sync::{broadcast, watch};

use crate::decide::{Millis, NodeState};
use crate::deviations::DeviationFile;
use crate::metrics::Metrics;
use crate::platform::Platform;
use gpu_migrate_kubelet_api::checkpoint::{self, Checkpoint, CheckpointError};
use gpu_migrate_kubelet_api::directory::Stamp;
use gpu_migrate_kubelet_api::lister;

/// Where the kubelet's and our own files and sockets are.
#[derive(Clone, Debug)]
pub struct Paths {
    /// The kubelet's root, `/var/lib/kubelet`.
    pub kubelet: PathBuf,
    /// Our own state: `nvidia_checkpoint`.
    pub state: PathBuf,
}

impl Paths {
    /// Sockets of plugins, and the kubelet's book.
    #[must_use]
    pub fn device_plugins(&self) -> PathBuf {
        self.kubelet.join("device-plugins")
    }

    /// The socket that plugins register on; the kubelet makes it anew when it starts.
    #[must_use]
    pub fn kubelet_socket(&self) -> PathBuf {
        self.device_plugins().join("kubelet.sock")
    }

    /// The kubelet's book of devices.
    #[must_use]
    pub fn book(&self) -> PathBuf {
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

    /// Our book of deviations.
    #[must_use]
    pub fn deviations(&self) -> PathBuf {
        self.state.join("nvidia_checkpoint")
    }
}

/// A file of ours that could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Reading or writing failed.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Its content is not ours.
    #[error("{path} is not readable: {source}; move it away to start without the deviations it records")]
    Content {
        /// The file.
        path: PathBuf,
        /// What was expected.
        source: serde_json::Error,
    },
}

/// A look at the API server's pods of this node, out of turn.
#[tonic::async_trait]
pub trait PodLookup: Send + Sync + std::fmt::Debug {
    /// Takes what there is now into the books.
    async fn refresh(&self, node: &Node);
}

/// Something that an owner of the node may want to know: becomes an Event on the Node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeEvent {
    /// It calls for attention.
    pub warning: bool,
    /// One CamelCase word.
    pub reason: &'static str,
    /// One sentence.
    pub note: String,
}

impl NodeEvent {
    /// For the record.
    pub fn normal(reason: &'static str, note: impl Into<String>) -> Self {
        Self { warning: false, reason, note: note.into() }
    }

    /// For attention.
    pub fn warning(reason: &'static str, note: impl Into<String>) -> Self {
        Self { warning: true, reason, note: note.into() }
    }
}

/// How long an answer to the kubelet waits for such a look: the whole node waits with it.
const LOOK: std::time::Duration = std::time::Duration::from_millis(300);

/// How long after a change an answer has surely gone, where nothing is waited for. The kubelet's next question follows later still:
/// it writes its book first.
pub(crate) const ANSWERED: std::time::Duration = std::time::Duration::from_millis(2);

/// The live node. Shared by all services.
#[derive(Debug)]
pub struct Node {
    /// Who can look at pods out of turn.
    pub lookup: std::sync::OnceLock<Box<dyn PodLookup>>,
    /// Where files and sockets are.
    pub paths: Paths,
    /// The links between cards, for reports.
    pub topology: Topology,
    /// What is counted.
    pub metrics: Metrics,
    events: broadcast::Sender<NodeEvent>,
    state: Mutex<NodeState>,
    version: watch::Sender<u64>,
    settled: watch::Sender<u64>,
    /// Serialises writers of the file of deviations; taken before `books`. What is on disk, where that is known.
    writer: Mutex<Option<DeviationFile>>,
    read: Mutex<Option<Read>>,
    platform: Platform,
}

impl Node {
    /// Starts from the files of an earlier life: first our deviations, then the kubelet's book.
    ///
    /// # Errors
    /// [`StateError`] when our own file exists and cannot be used; nothing may be given out without it.
    pub fn start(
        paths: Paths,
        state: NodeState,
        topology: Topology,
        metrics: Metrics,
    ) -> Result<Arc<Self>, StateError> {
        let platform = Platform::real(paths.pod_resources());
        Self::start_in(platform, paths, state, topology, metrics)
    }

    /// The same, with this clock and these ways to disk and sockets.
    ///
    /// # Errors
    /// As [`Node::start`].
    pub fn start_in(
        platform: Platform,
        paths: Paths,
        mut state: NodeState,
        topology: Topology,
        metrics: Metrics,
    ) -> Result<Arc<Self>, StateError> {
        let deviations = read_deviations(&paths)?;
        state.restore_deviations(deviations.data.entries.clone());
        let node = Arc::new(Self {
            lookup: std::sync::OnceLock::new(),
            paths,
            topology,
            metrics,
            events: broadcast::Sender::new(64),
            state: Mutex::new(state),
            version: watch::Sender::new(0),
            settled: watch::Sender::new(0),
            writer: Mutex::new(Some(deviations)),
            read: Mutex::new(None),
            platform,
        });
        node.read_checkpoint();
        Ok(node)
    }

    /// Milliseconds since the start of this process, plus one: 0 is before everything.
    #[must_use]
    pub fn now(&self) -> Millis {
        self.platform.clock.now()
    }

    /// How others are reached.
    #[must_use]
    pub const fn platform(&self) -> &Platform {
        &self.platform
    }

    /// Decides something: `decide` gets the books for as short a time as it takes.
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

    /// Tells whoever listens.
    pub fn record_event(&self, event: NodeEvent) {
        // Nobody listens where there is no API server; the log has it too.
        let _ = self.events.send(event);
    }

    /// Listens to events.
    #[must_use]
    pub fn events(&self) -> broadcast::Receiver<NodeEvent> {
        self.events.subscribe()
    }

    /// Says at once when the books have changed. For who answers the kubelet.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// The same a moment later, for everyone else: see [`Node::forward_changes`].
    #[must_use]
    pub fn settled(&self) -> watch::Receiver<u64> {
        self.settled.subscribe()
    }

    /// Tells of changes once the answer that made them has gone. Otherwise lists, comparisons and reports would begin while the
    /// kubelet waits, and keep the books from whoever answers it.
    pub async fn forward_changes(&self) {
        let mut changes = self.changes();
        while changes.changed().await.is_ok() {
            tokio::time::sleep(ANSWERED).await;
            self.settled.send_replace(*changes.borrow_and_update());
        }
    }

    /// Reads the kubelet's book if it is another one than the last. Cheap when it is not: one `stat`.
    ///
    /// The kubelet writes a container's devices down before it asks for the next container's, so that reading here before each
    /// decision leaves no gap, whenever this process was started.
    pub fn read_checkpoint(&self) {
        let path = self.paths.book();
        let mut read = self.read.lock();
        let stamp = Stamp::of(&path);
        let Some(stamp) = stamp else {
            return self.with(|state, _| state.observe_missing_checkpoint());
        };
        if read.is_some_and(|read| read.stamp == stamp && !read.again) {
            return;
        }
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "the kubelet's checkpoint cannot be read; nothing is freed");
                return;
            }
        };
        match Checkpoint::parse(&text) {
            Ok(book) => {
                let before = read.replace(Read { stamp, again: false });
                self.metrics.checkpoint_read(true);
                self.with(|state, now| match before {
                    Some(before) if before.stamp == stamp => state.ingest_unchanged_checkpoint(&book, now),
                    _ => state.ingest_checkpoint(&book, now),
                });
            }
            Err(error) => {
                self.metrics.checkpoint_read(false);
                self.with(NodeState::observe_unreadable_checkpoint);
                // Seen again and again until it is whole; said once per file.
                if !matches!(error, CheckpointError::Empty) {
                    tracing::warn!(path = %path.display(), %error, "the kubelet's checkpoint is refused; nothing is freed");
                }
            }
        }
    }

    /// The kubelet started anew, from the book as it is on disk.
    pub fn kubelet_started(&self) {
        if let Some(read) = &mut *self.read.lock() {
            read.again = true;
        }
        let whole = std::fs::read(self.paths.book()).is_ok_and(|text| Checkpoint::parse(&text).is_ok());
        // It may have asked for something already before this is noticed; not before its socket was there.
        let socket = std::fs::metadata(self.paths.kubelet_socket()).and_then(|meta| meta.modified());
        let age = socket.map_or(0, |made| self.platform.clock.age(made));
        self.with(|state, now| state.observe_kubelet_start(whole, now.saturating_sub(age)));
        self.read_checkpoint();
    }

    /// The kubelet asks for a container that may not have been seen yet: it hears of pods when we do, or a little before.
    pub async fn wait_for_candidate(&self, resource: SharedResource, size: usize) {
        if self.with(|state, _| state.has_candidate(resource, size)) {
            return;
        }
        let mut changes = self.changes();
        let heard = async {
            // The watch may bring it while the question is on its way.
            while changes.changed().await.is_ok() {
                if self.with(|state, _| state.has_candidate(resource, size)) {
                    return;
                }
            }
        };
        let look = async {
            match self.lookup.get() {
                Some(lookup) => lookup.refresh(self).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = heard => {}
            () = look => {}
            () = tokio::time::sleep(LOOK) => tracing::debug!(?resource, size, "no pod is known that wants this"),
        }
    }

    /// Brings `nvidia_checkpoint` up to date, atomically. Returns once it is on disk.
    ///
    /// # Errors
    /// [`StateError::Io`]; the file is as it was, or as it should be.
    pub fn write_deviations(&self) -> Result<(), StateError> {
        let mut written = self.writer.lock();
        let wanted = self.with(|state, _| state.deviations());
        if written.as_ref() == Some(&wanted) {
            return Ok(());
        }
        let path = self.paths.deviations();
        // Until this has succeeded it is not known which of the two is there.
        *written = None;
        let text = serde_json::to_vec(&wanted).map_err(std::io::Error::from);
        let outcome = text.and_then(|text| self.platform.disk.replace(&path, &text));
        outcome.map_err(|source| StateError::Io { path, source })?;
        *written = Some(wanted);
        Ok(())
    }

    /// Asks pod-resources, and takes what it says.
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

/// The version of the kubelet's book that was read last.
#[derive(Clone, Copy, Debug)]
struct Read {
    stamp: Stamp,
    /// It is to be read once more: its reader changed.
    again: bool,
}

pub(crate) fn read_deviations(paths: &Paths) -> Result<DeviationFile, StateError> {
    let path = paths.deviations();
    match std::fs::read(&path) {
        Ok(text) => serde_json::from_slice(&text).map_err(|source| StateError::Content { path, source }),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(DeviationFile::default()),
        Err(source) => Err(StateError::Io { path, source }),
    }
}
