//! The kubelet's devices: what it knows, what it has written, and what it lists.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use gpu_migrate_model::ask::ContainerKind;

use crate::decide::Millis;
use gpu_migrate_kubelet_api::checkpoint::FILE_NAME;
use gpu_migrate_kubelet_api::lister::ContainerDevices;

/// One container's devices in the kubelet's book.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct Row {
    pub(super) pod: String,
    pub(super) container: String,
    pub(super) kind: ContainerKind,
    pub(super) resource: &'static str,
    pub(super) ids: BTreeSet<String>,
    /// The plugin's answer: the cards to show.
    pub(super) answer: BTreeSet<usize>,
}

#[derive(Debug)]
pub(in super::super) struct Kubelet {
    pub(super) rows: Vec<Row>,
    pub(super) written: Vec<Row>,
    pub(super) ended: BTreeSet<String>,
    /// Its book on disk is spoilt until it is written again.
    pub(super) spoilt: bool,
    /// Grows with every change of its book on disk.
    version: u64,
    disk: Vec<u8>,
    /// The device plugin folder, for agents that read files.
    folder: Option<PathBuf>,
}

impl Kubelet {
    pub(super) fn new() -> Self {
        let mut kubelet = Self {
            rows: Vec::new(),
            written: Vec::new(),
            ended: BTreeSet::new(),
            spoilt: false,
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

    /// What is on disk.
    pub(in super::super) fn book(&self) -> &[u8] {
        &self.disk
    }

    pub(in super::super) const fn version(&self) -> u64 {
        self.version
    }

    pub(in super::super) const fn is_spoilt(&self) -> bool {
        self.spoilt
    }

    pub(super) fn write(&mut self) {
        self.written.clone_from(&self.rows);
        self.spoilt = false;
        let rows: Vec<_> = self
            .written
            .iter()
            .map(|r| {
                serde_json::json!({"PodUID": r.pod, "ContainerName": r.container, "ResourceName": r.resource,
                "DeviceIDs": {"-1": r.ids}, "AllocResp": ""})
            })
            .collect();
        let book =
            serde_json::json!({"Data": {"PodDeviceEntries": rows, "RegisteredDevices": {}}, "Checksum": 0});
        self.disk = book.to_string().into_bytes();
        self.version += 1;
        self.store();
    }

    /// Something cuts the book on disk short.
    pub(super) fn spoil(&mut self) {
        self.spoilt = true;
        self.disk.truncate(self.disk.len() / 2);
        self.version += 1;
        self.store();
    }

    fn store(&self) {
        let Some(folder) = &self.folder else { return };
        let beside = folder.join("beside");
        std::fs::write(&beside, &self.disk).unwrap();
        stamp(&beside, self.version);
        std::fs::rename(&beside, folder.join(FILE_NAME)).unwrap();
    }

    /// It started at this moment.
    pub(super) fn stamp_socket(&self, at: Millis) {
        let Some(folder) = &self.folder else { return };
        let socket = folder.join("kubelet.sock");
        File::create(&socket).unwrap();
        stamp(&socket, at);
    }

    /// What pod-resources says.
    pub(in super::super) fn list(&self) -> Vec<ContainerDevices> {
        let mut rows: BTreeMap<(&str, &str), ContainerDevices> = BTreeMap::new();
        for row in self.rows.iter().filter(|r| !self.ended.contains(&r.pod)) {
            let entry = rows.entry((&row.pod, &row.container)).or_insert_with(|| ContainerDevices {
                namespace: "n".into(),
                pod: row.pod.clone(),
                container: row.container.clone(),
                devices: BTreeMap::new(),
            });
            entry.devices.insert(row.resource.to_owned(), row.ids.iter().cloned().collect());
        }
        rows.into_values().collect()
    }
}

/// Stamps are by the world's clock, so that no two versions have the same.
fn stamp(path: &Path, milliseconds: u64) {
    let file = File::options().write(true).open(path).unwrap();
    file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_millis(milliseconds)).unwrap();
}
