//! The kubelet's device plugin directory: what changes in it, and which file is still the one that was seen.
//!
//! Events are hints and may be lost; the state on disk decides. So a watch only asks for a re-check ([`DirectoryWatch::changed`]),
//! on inotify events and on a slow poll behind them, and the caller compares [`Stamp`]s.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::StreamExt;
use inotify::{Inotify, WatchMask};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Interval of checks without an event.
const POLL: Duration = Duration::from_secs(1);
/// Wait before a directory is watched again that could not be watched.
const RETRY: Duration = Duration::from_secs(2);

/// The identity of one file at one moment: another file of the same name, or the same file rewritten, has another stamp.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stamp {
    device: u64,
    inode: u64,
    modified: (i64, i64),
    length: u64,
}

impl Stamp {
    /// The stamp of the file at `path`; `None` where there is no file (or no right to see it).
    #[must_use]
    pub fn of(path: &Path) -> Option<Self> {
        let meta = std::fs::metadata(path).ok()?;
        Some(Self {
            device: meta.dev(),
            inode: meta.ino(),
            // Inodes are used again at once on some file systems; times are not. (Not the change time: a chmod moves it.)
            modified: (meta.mtime(), meta.mtime_nsec()),
            length: meta.len(),
        })
    }
}

/// Reports when to check a directory again. Clones share one watcher.
#[derive(Clone, Debug)]
pub struct DirectoryWatch {
    path: PathBuf,
    generation: watch::Receiver<u64>,
}

impl DirectoryWatch {
    /// Starts watching. The directory may come and go.
    #[must_use]
    pub fn start(path: PathBuf, stop: CancellationToken) -> Self {
        let (sender, generation) = watch::channel(0);
        let watched = path.clone();
        tokio::spawn(async move {
            while !stop.is_cancelled() && !sender.is_closed() {
                tokio::select! {
                    () = stop.cancelled() => return,
                    outcome = follow(&watched, &sender) => {
                        if let Err(error) = outcome {
                            tracing::debug!(path = %watched.display(), %error, "directory cannot be watched; polling");
                        }
                    }
                }
                sender.send_modify(|g| *g += 1);
                tokio::time::sleep(RETRY).await;
            }
        });
        Self { path, generation }
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits for the next event, at most a second.
    pub async fn changed(&mut self) {
        if self.generation.changed().await.is_err() {
            tokio::time::sleep(POLL).await;
        }
    }
}

/// Forwards events until the directory itself goes away.
async fn follow(path: &Path, sender: &watch::Sender<u64>) -> std::io::Result<()> {
    let inotify = Inotify::init()?;
    let mask = WatchMask::CREATE
        | WatchMask::DELETE
        | WatchMask::MOVED_TO
        | WatchMask::CLOSE_WRITE
        | WatchMask::DELETE_SELF
        | WatchMask::ONLYDIR;
    inotify.watches().add(path, mask)?;
    sender.send_modify(|g| *g += 1);
    let mut events = inotify.into_event_stream([0_u8; 4096])?;
    loop {
        match tokio::time::timeout(POLL, events.next()).await {
            Ok(Some(event)) => {
                let event = event?;
                sender.send_modify(|g| *g += 1);
                if event.mask.intersects(inotify::EventMask::DELETE_SELF | inotify::EventMask::IGNORED) {
                    return Err(std::io::Error::new(
                        std::io::ErrorKind::NotFound,
                        "the directory was deleted",
                    ));
                }
            }
            Ok(None) => return Ok(()),
            Err(_) => sender.send_modify(|g| *g += 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_new_file_is_noticed_and_has_another_stamp() {
        let dir = tempfile::tempdir().unwrap();
        let stop = CancellationToken::new();
        let mut watch = DirectoryWatch::start(dir.path().to_path_buf(), stop.clone());
        let file = dir.path().join("kubelet.sock");
        assert_eq!(Stamp::of(&file), None);
        std::fs::write(&file, "one").unwrap();
        let mut first = None;
        while first.is_none() {
            watch.changed().await;
            first = Stamp::of(&file);
        }
        std::fs::remove_file(&file).unwrap();
        std::fs::write(&file, "two").unwrap();
        assert_ne!(Stamp::of(&file), first);
        stop.cancel();
    }
}
