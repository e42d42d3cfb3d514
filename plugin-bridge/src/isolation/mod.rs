//! How a container is limited to its share of a card. One strategy per node pool; the GPUShadow reports it, `none` included.
//!
//! A strategy is checked against what the node has, at the start and from then on: where it cannot limit, the node takes no share.
//! It adds to the answer of Allocate, when the pod is only a candidate, and prepares the host before the container starts,
//! when the holder is known. So what differs by pod is behind a path that is named by the *devices*, and is created late.

pub mod check;
mod driver;
mod folders;
mod hami;
mod layout;
mod mps;
mod vcuda;
mod vcuda_server;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use gpu_migrate_model::ask::Demand;
use gpu_migrate_model::card::Card;
use gpu_migrate_model::ledger::HolderId;

use gpu_migrate_kubelet_api::deviceplugin::{ContainerAllocateResponse, Mount};

pub use check::NodeFacts;
pub use driver::Driver;
pub use hami::HamiCore;
pub use layout::{VcudaConfig, pids_config};
pub use mps::Mps;
pub use vcuda::Vcuda;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum Kind {
    /// Containers can use more than their share.
    #[default]
    None,
    /// NVIDIA's driver limits memory, by the container's cgroup.
    Driver,
    /// gpu-manager's vcuda-controller, in front of libcuda.
    Vcuda,
    /// NVIDIA's Multi-Process Service.
    Mps,
    /// HAMi-core, preloaded.
    HamiCore,
}

/// One container's part of its cards.
#[derive(Clone, Debug)]
pub struct Share<'a> {
    pub demand: Demand,
    /// The cards it sees.
    pub cards: &'a [&'a Card],
    /// Identifies the container before its pod is known: made from its devices, safe in a path.
    pub key: &'a str,
}

impl Share<'_> {
    /// Less than a whole card.
    #[must_use]
    pub fn is_part(&self) -> bool {
        self.demand.cores.whole_cards().is_none()
    }
}

pub trait Isolation: Send + Sync + std::fmt::Debug {
    /// Its name in the GPUShadow.
    fn name(&self) -> &'static str;

    /// Why it cannot limit a container on this node as it is now, and what to do; `None` where it can. May block.
    fn obstacle(&self) -> Option<String>;

    /// Adds what a container needs to its answer.
    fn shape(&self, share: &Share<'_>, answer: &mut ContainerAllocateResponse);

    /// Prepares the host for a container that is about to start.
    ///
    /// # Errors
    /// The system's; the container is not started then.
    fn prepare(&self, holder: &HolderId, share: &Share<'_>) -> std::io::Result<()> {
        let _ = (holder, share);
        Ok(())
    }

    /// Serves a container again that an earlier process of the agent has prepared, and that may be running. Called often.
    ///
    /// # Errors
    /// The system's; it is called again.
    fn resume(&self, holder: &HolderId, share: &Share<'_>) -> std::io::Result<()> {
        let _ = (holder, share);
        Ok(())
    }

    /// Removes what belongs to pods that are gone: all but those of `current` UIDs, and but what was made after `new`.
    fn remove_stale(&self, current: &BTreeSet<String>, new: SystemTime) {
        let _ = (current, new);
    }
}

#[derive(Debug)]
pub struct NoIsolation;

impl Isolation for NoIsolation {
    fn name(&self) -> &'static str {
        "none"
    }

    fn obstacle(&self) -> Option<String> {
        None
    }

    fn shape(&self, _: &Share<'_>, _: &mut ContainerAllocateResponse) {}
}

/// Where strategies keep their files on the host.
#[derive(Clone, Debug)]
pub struct Folders {
    /// Libraries, in one folder per version (see [`current_library`]).
    pub libraries: PathBuf,
    /// What is made for each container: `vm` (gpu-manager's) and `hami` below it.
    pub manager: PathBuf,
    /// Root of the MPS control daemon: `pipe` and `shm` below it.
    pub mps: PathBuf,
}

impl Default for Folders {
    fn default() -> Self {
        Self {
            libraries: "/usr/local/gpu-migrate/lib".into(),
            manager: "/etc/gpu-manager".into(),
            mps: "/run/nvidia/mps".into(),
        }
    }
}

/// The strategy of this kind, on a node that has this.
#[must_use]
pub fn strategy(kind: Kind, folders: &Folders, node: NodeFacts) -> Arc<dyn Isolation> {
    match kind {
        Kind::None => Arc::new(NoIsolation),
        Kind::Driver => Arc::new(Driver::new(node)),
        Kind::Vcuda => Arc::new(Vcuda::new(folders, node)),
        Kind::Mps => Arc::new(Mps::new(folders.mps.clone(), node)),
        Kind::HamiCore => Arc::new(HamiCore::new(folders)),
    }
}

/// The folder of the library version to give to new containers.
///
/// Versions lie side by side, `current` is a symlink that an upgrade swaps. A container is given the *version's* folder, so that an
/// upgrade never touches a file that a running process has mapped (HAMi#727: replacing it in place crashed workloads).
#[must_use]
pub fn current_library(folder: &Path) -> PathBuf {
    let link = folder.join("current");
    match std::fs::read_link(&link) {
        Ok(version) if version.is_absolute() => version,
        Ok(version) => folder.join(version),
        // No versions: the folder itself is the only one.
        Err(_) => folder.to_path_buf(),
    }
}

/// Leaves only characters that are safe in a file name.
pub(crate) fn safe(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' }).collect()
}

fn mount(from: &Path, to: &str, read_only: bool) -> Mount {
    Mount { host_path: from.display().to_string(), container_path: to.to_owned(), read_only }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use gpu_migrate_model::units::{Blocks, Cores};

    pub(crate) const PART: Demand = Demand { cores: Cores(30), blocks: Blocks(8), legacy: 0 };

    /// A share of so many cores and 2 GiB on one card, shaped by a strategy.
    pub(crate) fn shaped(isolation: &dyn Isolation, cores: u32) -> ContainerAllocateResponse {
        let card = Card { uuid: "GPU-a".into(), minor: 3, memory_mib: 81920, ..Card::default() };
        let mut answer = ContainerAllocateResponse::default();
        let demand = Demand { cores: Cores(cores), ..PART };
        isolation.shape(&Share { demand, cards: &[&card], key: "core-300" }, &mut answer);
        answer
    }

    #[test]
    fn without_isolation_nothing_is_added_and_nothing_needed() {
        assert_eq!(shaped(&NoIsolation, 30), ContainerAllocateResponse::default());
        assert_eq!(NoIsolation.obstacle(), None);
    }

    #[test]
    fn a_container_is_given_the_version_and_not_the_link() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(current_library(folder.path()), folder.path());
        std::fs::create_dir(folder.path().join("v1")).unwrap();
        std::os::unix::fs::symlink("v1", folder.path().join("current")).unwrap();
        assert_eq!(current_library(folder.path()), folder.path().join("v1"));
    }
}
