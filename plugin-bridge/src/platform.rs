//! What the services touch beside memory: clock, disk, and the sockets of others. Real in the agent; tests put others in their
//! place, so that a life of a node takes milliseconds and a crash can come between any two writes.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use tonic::transport::Channel;

use crate::decide::Millis;
use gpu_migrate_kubelet_api::lister::{self, ContainerDevices, PodResourcesError};
use gpu_migrate_kubelet_api::socket;

/// Everything outside.
#[derive(Debug)]
pub struct Platform {
    /// What time it is.
    pub clock: Box<dyn Clock>,
    /// Where our own files are written.
    pub disk: Box<dyn Disk>,
    /// The kubelet's list of what is given out.
    pub pod_resources: Box<dyn PodResources>,
    /// How device plugins are reached.
    pub sockets: Box<dyn Sockets>,
}

impl Platform {
    /// The real one, with the pod-resources API at this socket.
    #[must_use]
    pub fn real(pod_resources: PathBuf) -> Self {
        Self {
            clock: Box::new(ProcessClock(Instant::now())),
            disk: Box::new(RealDisk),
            pod_resources: Box::new(PodResourcesSocket(pod_resources)),
            sockets: Box::new(UnixSockets),
        }
    }
}

/// A clock that only goes forward, and the one that files are stamped by.
pub trait Clock: Send + Sync + std::fmt::Debug {
    /// Milliseconds since the start of this process, plus one: 0 is before everything.
    fn now(&self) -> Millis;

    /// How long ago a file's stamp is.
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

/// Where files are written.
pub trait Disk: Send + Sync + std::fmt::Debug {
    /// Replaces a file as a whole; see [`replace`].
    ///
    /// # Errors
    /// What the system said; the old file or the new one is there then.
    fn replace(&self, path: &Path, content: &[u8]) -> std::io::Result<()>;
}

#[derive(Debug)]
struct RealDisk;

impl Disk for RealDisk {
    fn replace(&self, path: &Path, content: &[u8]) -> std::io::Result<()> {
        replace(path, content, |_| Ok(()))
    }
}

/// A step of [`replace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WriteStep {
    /// The folder is made.
    Folder,
    /// The file beside is made, or emptied.
    Create,
    /// Its first half is written.
    FirstHalf,
    /// Its second half is written.
    SecondHalf,
    /// It is flushed to disk.
    Flush,
    /// It takes the place of the old file.
    Rename,
    /// That is flushed to disk.
    FlushFolder,
}

/// Writes beside, flushes to disk, renames over: a reader sees the old file or the new one, also after a crash.
///
/// `before` is called ahead of each step, and may end it there.
///
/// # Errors
/// What the system said, or `before`; the old file or the new one is there then.
pub fn replace(
    path: &Path,
    content: &[u8],
    mut before: impl FnMut(WriteStep) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or_else(|| Path::new("."));
    before(WriteStep::Folder)?;
    std::fs::create_dir_all(folder)?;
    before(WriteStep::Create)?;
    let beside = path.with_extension(format!("tmp-{}", std::process::id()));
    let mut file = std::fs::File::create(&beside)?;
    let (first, second) = content.split_at(content.len() / 2);
    before(WriteStep::FirstHalf)?;
    file.write_all(first)?;
    before(WriteStep::SecondHalf)?;
    file.write_all(second)?;
    before(WriteStep::Flush)?;
    file.sync_all()?;
    drop(file);
    before(WriteStep::Rename)?;
    std::fs::rename(&beside, path)?;
    before(WriteStep::FlushFolder)?;
    std::fs::File::open(folder)?.sync_all()
}

/// Who lists what the kubelet has given out.
#[tonic::async_trait]
pub trait PodResources: Send + Sync + std::fmt::Debug {
    /// What it is now.
    ///
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

/// How a socket is reached.
#[tonic::async_trait]
pub trait Sockets: Send + Sync + std::fmt::Debug {
    /// A connection to whoever serves this path.
    ///
    /// # Errors
    /// What the transport said.
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
