//! `nvidia_checkpoint`: the containers that have devices, in the kubelet's own structure.
//!
//! A row whose devices differ from those in the kubelet checkpoint is on disk before the kubelet gets its answer: no other source has
//! it. The others follow a moment later; they are for the day when the kubelet checkpoint is lost.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// One row of `nvidia_checkpoint`: the kubelet's structure, with the devices that were granted.
///
/// `DeviceIDs` are the real ones; `KubeletDeviceIDs` are those of the kubelet checkpoint for the same container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordRow {
    /// UID of the pod; empty until the kubelet checkpoint has named the container.
    #[serde(rename = "PodUID", default)]
    pub pod_uid: String,
    /// Name of the container; empty like `pod_uid`.
    #[serde(rename = "ContainerName", default)]
    pub container: String,
    #[serde(rename = "ResourceName")]
    pub resource: String,
    /// What the container got, by NUMA node (`"-1"`: unknown).
    #[serde(rename = "DeviceIDs")]
    pub actual: BTreeMap<String, Vec<String>>,
    /// What the kubelet requested and has in its checkpoint.
    #[serde(rename = "KubeletDeviceIDs")]
    pub kubelet: Vec<String>,
    /// UUIDs of the cards that the devices are on: device IDs say it only together with the card map.
    #[serde(rename = "CardUUIDs", default, skip_serializing_if = "BTreeSet::is_empty")]
    pub cards: BTreeSet<String>,
    /// Unused; the kubelet stores the plugin's answer in this field.
    #[serde(rename = "AllocResp", default)]
    pub answer: String,
    /// How long its containers may take to end, where that is known.
    #[serde(rename = "TerminationGracePeriodSeconds", default, skip_serializing_if = "Option::is_none")]
    pub grace_seconds: Option<u64>,
}

impl RecordRow {
    /// The devices that the container really got.
    pub fn actual_ids(&self) -> impl Iterator<Item = &str> {
        self.actual.values().flatten().map(String::as_str)
    }

    /// How long its containers may take to end, in milliseconds.
    #[must_use]
    pub fn grace(&self) -> Option<u64> {
        self.grace_seconds.map(|seconds| seconds.saturating_mul(1_000))
    }

    /// The container has other devices than the kubelet checkpoint says.
    #[must_use]
    pub fn deviates(&self) -> bool {
        let actual: BTreeSet<&str> = self.actual_ids().collect();
        actual != self.kubelet.iter().map(String::as_str).collect()
    }
}

/// The content of `nvidia_checkpoint`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The rows, wrapped as the kubelet wraps its own.
    #[serde(rename = "Data")]
    pub data: RecordData,
    /// A process wrote it that had lost a source, and did not know yet what else is on the cards.
    #[serde(rename = "Incomplete", default, skip_serializing_if = "std::ops::Not::not")]
    pub incomplete: bool,
}

/// The `Data` of [`Record`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordData {
    /// One row per container and resource.
    #[serde(rename = "PodDeviceEntries")]
    pub entries: Vec<RecordRow>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpu_migrate_kubelet_api::checkpoint::Checkpoint;

    #[test]
    fn a_row_survives_writing_and_reading() {
        let file = Record {
            data: RecordData {
                entries: vec![RecordRow {
                    pod_uid: String::new(),
                    container: String::new(),
                    resource: "nvidia.com/gpu".into(),
                    actual: BTreeMap::from([("0".into(), vec!["GPU-2".into()])]),
                    kubelet: vec!["GPU-1".into()],
                    cards: BTreeSet::from(["GPU-2".into()]),
                    answer: String::new(),
                    grace_seconds: Some(60),
                }],
            },
            incomplete: true,
        };
        assert!(file.data.entries[0].deviates());
        let text = serde_json::to_string(&file).unwrap();
        assert_eq!(serde_json::from_str::<Record>(&text).unwrap(), file);
        let parsed = Checkpoint::parse(text.as_bytes()).unwrap();
        assert_eq!(parsed.entries[0].ids, ["GPU-2"], "the structure is the kubelet's");
    }
}
