//! `nvidia_checkpoint`: the containers whose devices differ from those in the kubelet checkpoint, in the kubelet's own structure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// One row of `nvidia_checkpoint`: the kubelet's structure, with the devices that were granted.
///
/// A deviation is recorded when the answer to the kubelet named other devices than it requested. `DeviceIDs` are the real ones;
/// `KubeletDeviceIDs` are those of the kubelet checkpoint for the same container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deviation {
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
    /// Unused; the kubelet stores the plugin's answer in this field.
    #[serde(rename = "AllocResp", default)]
    pub answer: String,
}

impl Deviation {
    /// The devices that the container really got.
    pub fn actual_ids(&self) -> impl Iterator<Item = &str> {
        self.actual.values().flatten().map(String::as_str)
    }
}

/// `nvidia_checkpoint`: every container whose devices differ from the kubelet checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviationFile {
    /// The rows, wrapped as the kubelet wraps its own.
    #[serde(rename = "Data")]
    pub data: DeviationData,
}

/// The `Data` of [`DeviationFile`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviationData {
    /// One row per container and resource.
    #[serde(rename = "PodDeviceEntries")]
    pub entries: Vec<Deviation>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpu_migrate_kubelet_api::checkpoint::Checkpoint;

    #[test]
    fn deviations_survive_writing_and_reading() {
        let file = DeviationFile {
            data: DeviationData {
                entries: vec![Deviation {
                    pod_uid: String::new(),
                    container: String::new(),
                    resource: "nvidia.com/gpu".into(),
                    actual: BTreeMap::from([("0".into(), vec!["GPU-2".into()])]),
                    kubelet: vec!["GPU-1".into()],
                    answer: String::new(),
                }],
            },
        };
        let text = serde_json::to_string(&file).unwrap();
        assert_eq!(serde_json::from_str::<DeviationFile>(&text).unwrap(), file);
        let parsed = Checkpoint::parse(text.as_bytes()).unwrap();
        assert_eq!(parsed.entries[0].ids, ["GPU-2"], "the structure is the kubelet's");
    }
}
