//! Folders on the host that are made for containers: `<root>/<pod UID>`, and `<root>/by-devices/<key>`, a link to one of them.
//!
//! The answer to Allocate names the link, because the pod is not known yet; the runtime follows it when it creates the container.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::safe;

const BY_DEVICES: &str = "by-devices";

/// The link of the container with these devices.
pub(super) fn by_devices(root: &Path, key: &str) -> PathBuf {
    root.join(BY_DEVICES).join(safe(key))
}

/// The folder of a pod.
pub(super) fn of_pod(root: &Path, uid: &str) -> PathBuf {
    root.join(safe(uid))
}

/// Points the link at this folder, atomically.
pub(super) fn link(root: &Path, key: &str, to: &Path) -> io::Result<()> {
    let link = by_devices(root, key);
    if std::fs::read_link(&link).is_ok_and(|now| now == to) {
        return Ok(());
    }
    std::fs::create_dir_all(root.join(BY_DEVICES))?;
    let temporary = link.with_extension("new");
    let _ = std::fs::remove_file(&temporary);
    std::os::unix::fs::symlink(to, &temporary)?;
    std::fs::rename(&temporary, &link)
}

/// Removes the folders of all pods but these, and but those made after `new`, and the links to them.
pub(super) fn remove_stale(root: &Path, current: &BTreeSet<String>, new: SystemTime) {
    let keep: BTreeSet<String> = current.iter().map(|uid| safe(uid)).collect();
    for entry in std::fs::read_dir(root).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let made = entry.metadata().and_then(|entry| entry.modified());
        if name != BY_DEVICES && !keep.contains(&name) && made.is_ok_and(|made| made <= new) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
    for entry in std::fs::read_dir(root.join(BY_DEVICES)).into_iter().flatten().flatten() {
        // The link's target has been removed.
        if !entry.path().exists() {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}
