//! `kubelet_internal_checkpoint`: the kubelet's book of devices, in the shape of 1.33, written beside and renamed over.

use std::collections::BTreeMap;
use std::path::Path;

use base64::Engine;
use gpu_migrate_kubelet_api::deviceplugin::ContainerAllocateResponse;
use prost::Message;
use serde::{Deserialize, Serialize};

/// The devices of one resource that one container holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// UID of the pod.
    pub pod_uid: String,
    /// Name of the container.
    pub container: String,
    /// The resource.
    pub resource: String,
    /// Its devices.
    pub ids: Vec<String>,
    /// What the plugin answered.
    pub answer: ContainerAllocateResponse,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct File {
    data: Data,
    checksum: u64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    /// `null` while there are none, as Go writes an empty slice.
    pod_device_entries: Option<Vec<Row>>,
    registered_devices: BTreeMap<String, Vec<String>>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Row {
    #[serde(rename = "PodUID")]
    pod_uid: String,
    container_name: String,
    resource_name: String,
    /// By NUMA node; `-1` for devices that have none.
    #[serde(rename = "DeviceIDs")]
    device_ids: BTreeMap<String, Vec<String>>,
    alloc_resp: String,
}

/// Writes the book.
///
/// # Errors
/// What the system said; the file is as it was.
pub fn write(path: &Path, entries: &[Entry], healthy: BTreeMap<String, Vec<String>>) -> std::io::Result<()> {
    let rows: Vec<Row> = entries.iter().map(row).collect();
    let data = Data { pod_device_entries: (!rows.is_empty()).then_some(rows), registered_devices: healthy };
    // The real one is over a Go pretty-print of the struct; nobody but the kubelet can verify that.
    let checksum = fnv(&serde_json::to_vec(&data)?);
    let beside = path.with_extension("tmp");
    std::fs::write(&beside, serde_json::to_vec(&File { data, checksum })?)?;
    std::fs::rename(beside, path)
}

/// Reads the book; nothing where there is none or it is broken, as a kubelet starts anew then.
#[must_use]
pub fn read(path: &Path) -> Vec<Entry> {
    let Ok(text) = std::fs::read(path) else { return Vec::new() };
    let file: Result<File, _> = serde_json::from_slice(&text);
    file.map(|file| file.data.pod_device_entries.unwrap_or_default().into_iter().map(entry).collect())
        .unwrap_or_default()
}

fn row(entry: &Entry) -> Row {
    Row {
        pod_uid: entry.pod_uid.clone(),
        container_name: entry.container.clone(),
        resource_name: entry.resource.clone(),
        device_ids: BTreeMap::from([("-1".to_owned(), entry.ids.clone())]),
        alloc_resp: base64::engine::general_purpose::STANDARD.encode(entry.answer.encode_to_vec()),
    }
}

fn entry(row: Row) -> Entry {
    let bytes = base64::engine::general_purpose::STANDARD.decode(row.alloc_resp).unwrap_or_default();
    Entry {
        pod_uid: row.pod_uid,
        container: row.container_name,
        resource: row.resource_name,
        ids: row.device_ids.into_values().flatten().collect(),
        answer: ContainerAllocateResponse::decode(&*bytes).unwrap_or_default(),
    }
}

fn fnv(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpu_migrate_kubelet_api::checkpoint::Checkpoint;

    #[test]
    fn the_node_agent_reads_what_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kubelet_internal_checkpoint");
        let mut answer = ContainerAllocateResponse::default();
        answer.envs.insert("A".into(), "1".into());
        let entry = Entry {
            pod_uid: "u".into(),
            container: "c".into(),
            resource: "nvidia.com/gpu".into(),
            ids: vec!["GPU-1".into()],
            answer,
        };
        let healthy =
            BTreeMap::from([("nvidia.com/gpu".to_owned(), vec!["GPU-1".to_owned(), "GPU-2".to_owned()])]);
        write(&path, &[], healthy.clone()).unwrap();
        let text = std::fs::read(&path).unwrap();
        assert!(Checkpoint::parse(&text).unwrap().entries.is_empty());
        write(&path, std::slice::from_ref(&entry), healthy).unwrap();
        let text = std::fs::read(&path).unwrap();
        let book = Checkpoint::parse(&text).unwrap();
        assert_eq!((book.entries[0].ids.len(), book.registered["nvidia.com/gpu"]), (1, 2));
        assert_eq!(read(&path), [entry]);
    }
}
