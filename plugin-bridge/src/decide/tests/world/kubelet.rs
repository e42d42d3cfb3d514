//! The kubelet around its device manager: which pods have ended, and what is on its disk.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use gpu_migrate_kubelet_api::checkpoint::FILE_NAME;
use gpu_migrate_kubelet_api::deviceplugin::KUBELET_SOCKET;
use gpu_migrate_kubelet_api::lister::{self, ClaimedDevice, ContainerDevices};
use gpu_migrate_sim::device_manager::DeviceManager;

use crate::decide::Millis;

#[derive(Debug)]
pub(in super::super) struct Kubelet {
    pub(super) manager: DeviceManager,
    pub(super) ended: BTreeSet<String>,
    /// Devices of NVIDIA's DRA driver that pods of no other interest have.
    pub(super) claimed: BTreeSet<String>,
    /// Its checkpoint on disk is cut short until it is written again.
    pub(super) truncated: bool,
    /// Grows with every change of its checkpoint on disk.
    version: u64,
    disk: Vec<u8>,
    /// The device plugin folder, for agents that read files.
    folder: Option<PathBuf>,
}

impl Kubelet {
    pub(super) fn new() -> Self {
        let mut kubelet = Self {
            manager: DeviceManager::default(),
            ended: BTreeSet::new(),
            claimed: BTreeSet::new(),
            truncated: false,
            version: 0,
            disk: Vec::new(),
            folder: None,
        };
        kubelet.write();
        kubelet
    }

    /// From now on its files are in this folder too.
    pub(in super::super) fn put_into(&mut self, folder: &Path) {
        self.folder = Some(folder.to_path_buf());
        self.store();
        self.stamp_socket(0);
    }

    pub(in super::super) fn checkpoint(&self) -> &[u8] {
        &self.disk
    }

    pub(in super::super) const fn version(&self) -> u64 {
        self.version
    }

    pub(in super::super) const fn is_truncated(&self) -> bool {
        self.truncated
    }

    /// There is no checkpoint.
    pub(in super::super) const fn is_missing(&self) -> bool {
        self.disk.is_empty()
    }

    /// The checkpoint on disk is not whole.
    pub(in super::super) const fn has_lost_checkpoint(&self) -> bool {
        self.truncated || self.is_missing()
    }

    pub(super) fn write(&mut self) {
        self.truncated = false;
        self.disk = self.manager.checkpoint();
        self.version += 1;
        self.store();
    }

    /// Something cuts the checkpoint on disk short.
    pub(super) fn truncate(&mut self) {
        self.truncated = true;
        self.disk.truncate(self.disk.len() / 2);
        self.version += 1;
        self.store();
    }

    /// The checkpoint is deleted.
    pub(super) fn remove(&mut self) {
        self.truncated = false;
        self.disk.clear();
        self.version += 1;
        if let Some(folder) = &self.folder {
            let _ = std::fs::remove_file(folder.join(FILE_NAME));
        }
    }

    /// A new process starts from the disk.
    pub(super) fn restart(&mut self, at: Millis) {
        self.manager = DeviceManager::restore(&self.disk);
        self.stamp_socket(at);
    }

    fn store(&self) {
        let Some(folder) = &self.folder else { return };
        let beside = folder.join("beside");
        std::fs::write(&beside, &self.disk).unwrap();
        stamp(&beside, self.version);
        std::fs::rename(&beside, folder.join(FILE_NAME)).unwrap();
    }

    fn stamp_socket(&self, at: Millis) {
        let Some(folder) = &self.folder else { return };
        let socket = folder.join(KUBELET_SOCKET);
        File::create(&socket).unwrap();
        stamp(&socket, at);
    }

    pub(in super::super) fn list(&self) -> Vec<ContainerDevices> {
        let name = |uid: &str| (!self.ended.contains(uid)).then(|| ("n".to_owned(), uid.to_owned()));
        let claim = |device: &String| ContainerDevices {
            pod: format!("claims-{device}"),
            claimed: vec![ClaimedDevice {
                driver: "gpu.nvidia.com".into(),
                device: device.clone(),
                ..ClaimedDevice::default()
            }],
            ..ContainerDevices::default()
        };
        let rows = lister::rows(self.manager.pod_resources(name));
        rows.into_iter().chain(self.claimed.iter().map(claim)).collect()
    }
}

/// Stamps are by the world's clock, so that no two versions have the same.
fn stamp(path: &Path, milliseconds: u64) {
    let file = File::options().write(true).open(path).unwrap();
    file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_millis(milliseconds)).unwrap();
}
