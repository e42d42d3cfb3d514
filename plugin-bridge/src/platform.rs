//! Clock, disk, and the sockets of other programs. Real in the agent; tests replace them, so that a history of a node takes
//! milliseconds and a crash can come between any two writes.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use tonic::transport::Channel;

use crate::cgroups::PodCgroups;
use crate::decide::Millis;
use gpu_migrate_kubelet_api::lister::{self, ContainerDevices, PodResourcesError};
use gpu_migrate_kubelet_api::socket;

#[derive(Debug)]
pub struct Platform {
    pub clock: Box<dyn Clock>,
    pub disk: Box<dyn Disk>,
    pub pod_resources: Box<dyn PodResources>,
    pub cgroups: Box<dyn Cgroups>,
    pub sockets: Box<dyn Sockets>,
}

impl Platform {
    /// The real one, with the pod-resources API at this socket and the host's cgroups in this directory.
    #[must_use]
    pub fn real(pod_resources: PathBuf, cgroups: PathBuf) -> Self {
        Self {
            clock: Box::new(ProcessClock(Instant::now())),
            disk: Box::new(RealDisk),
            pod_resources: Box::new(PodResourcesSocket(pod_resources)),
            cgroups: Box::new(PodCgroups::new(cgroups)),
            sockets: Box::new(UnixSockets),
        }
    }
}

/// A monotonic clock, and the one of file times.
pub trait Clock: Send + Sync + std::fmt::Debug {
    /// Milliseconds since the start of this process, plus one: 0 is before everything.
    fn now(&self) -> Millis;

    /// How long ago a file was modified.
    fn age(&self, stamp: SystemTime) -> Millis;
}

#[derive(Debug)]
struct ProcessClock(Instant);

impl Clock for ProcessClock {
    fn now(&self) -> Millis {
        u64::try_from(self.0.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(1)
    }

    fn age(&self, stamp: SystemTime) -> Millis {
        let age = stamp.elapsed().unwrap_or_default();
        Millis::try_from(age.as_millis()).unwrap_or(Millis::MAX)
    }
}

#[tonic::async_trait]
pub trait Disk: Send + Sync + std::fmt::Debug {
    /// Replaces a file as a whole; see [`replace`]. It may take for ever, and does its work also where nobody waits for it any more.
    ///
    /// # Errors
    /// The system's; the old file or the new one is there then.
    async fn replace(&self, path: PathBuf, content: Vec<u8>) -> std::io::Result<()>;
}

#[derive(Debug)]
struct RealDisk;

#[tonic::async_trait]
impl Disk for RealDisk {
    async fn replace(&self, path: PathBuf, content: Vec<u8>) -> std::io::Result<()> {
        off_thread(move || replace(&path, &content, |_| Ok(()))).await
    }
}

/// Where it may block: what answers the kubelet has one thread.
pub async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> std::io::Result<T> {
    tokio::task::spawn_blocking(work).await?
}

/// How long an answer to the kubelet waits for a disk: every pod of the node waits with it.
pub const DISK: Duration = Duration::from_secs(2);

/// Waits for a disk, but no longer than [`DISK`].
pub async fn in_time<T>(work: impl Future<Output = std::io::Result<T>>) -> std::io::Result<T> {
    let late = || {
        std::io::Error::new(std::io::ErrorKind::TimedOut, format!("the disk did not answer within {DISK:?}"))
    };
    tokio::time::timeout(DISK, work).await.unwrap_or_else(|_| Err(late()))
}

/// A step of [`replace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WriteStep {
    Folder,
    Create,
    FirstHalf,
    SecondHalf,
    Flush,
    Rename,
    FlushFolder,
}

/// Writes a temporary file, flushes it to disk and renames it: a reader sees the old file or the new one, also after a crash.
///
/// `before` is called ahead of each step, and may end it there.
///
/// # Errors
/// The system's or `before`'s; the old file or the new one is there then.
pub fn replace(
    path: &Path,
    content: &[u8],
    mut before: impl FnMut(WriteStep) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or_else(|| Path::new("."));
    before(WriteStep::Folder)?;
    std::fs::create_dir_all(folder)?;
    before(WriteStep::Create)?;
    let temporary = path.with_extension(format!("tmp-{}", std::process::id()));
    let mut file = std::fs::File::create(&temporary)?;
    let (first, second) = content.split_at(content.len() / 2);
    before(WriteStep::FirstHalf)?;
    file.write_all(first)?;
    before(WriteStep::SecondHalf)?;
    file.write_all(second)?;
    before(WriteStep::Flush)?;
    file.sync_all()?;
    drop(file);
    before(WriteStep::Rename)?;
    std::fs::rename(&temporary, path)?;
    before(WriteStep::FlushFolder)?;
    std::fs::File::open(folder)?.sync_all()
}

#[tonic::async_trait]
pub trait PodResources: Send + Sync + std::fmt::Debug {
    /// # Errors
    /// [`PodResourcesError`]; nothing may be concluded from it.
    async fn list(&self) -> Result<Vec<ContainerDevices>, PodResourcesError>;
}

#[derive(Debug)]
struct PodResourcesSocket(PathBuf);

#[tonic::async_trait]
impl PodResources for PodResourcesSocket {
    async fn list(&self) -> Result<Vec<ContainerDevices>, PodResourcesError> {
        lister::list(&self.0).await
    }
}

pub trait Cgroups: Send + Sync + std::fmt::Debug {
    /// UIDs of the pods that have processes, as the kubelet knows them; `None` where that cannot be read.
    fn populated(&self) -> Option<BTreeSet<String>>;
}

#[tonic::async_trait]
pub trait Sockets: Send + Sync + std::fmt::Debug {
    /// # Errors
    /// The transport's.
    async fn dial(&self, path: &Path) -> Result<Channel, tonic::transport::Error>;
}

#[derive(Debug)]
struct UnixSockets;

#[tonic::async_trait]
impl Sockets for UnixSockets {
    async fn dial(&self, path: &Path) -> Result<Channel, tonic::transport::Error> {
        socket::dial(path).await
    }
}
