//! The kubelet checkpoint as kubelet 1.33 writes it: rows that own their text, to write and to read back.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The NUMA key of devices that have no topology.
pub const NO_NUMA: &str = "-1";

/// The devices of one resource that one container holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Row {
    #[serde(rename = "PodUID")]
    pub pod_uid: String,
    #[serde(rename = "ContainerName")]
    pub container: String,
    #[serde(rename = "ResourceName")]
    pub resource: String,
    /// Device IDs by NUMA node, [`NO_NUMA`] where a device has none.
    #[serde(rename = "DeviceIDs")]
    pub ids: BTreeMap<String, Vec<String>>,
    /// The plugin's answer, a `ContainerAllocateResponse`.
    #[serde(rename = "AllocResp", serialize_with = "to_base64", deserialize_with = "of_base64")]
    pub answer: Vec<u8>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct File {
    data: Data,
    checksum: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    /// `null` while there are none, as Go writes an empty slice.
    pod_device_entries: Option<Vec<Row>>,
    registered_devices: BTreeMap<String, Vec<String>>,
}

/// The file's bytes: who holds what, and the healthy devices of each resource.
///
/// # Errors
/// The JSON writer's; none is known.
pub fn write(rows: Vec<Row>, healthy: BTreeMap<String, Vec<String>>) -> serde_json::Result<Vec<u8>> {
    let data = Data { pod_device_entries: (!rows.is_empty()).then_some(rows), registered_devices: healthy };
    // The real one is over a Go pretty-print of the struct; only a kubelet verifies it.
    let fnv = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    let checksum = serde_json::to_vec(&data)?.iter().fold(0xcbf2_9ce4_8422_2325, fnv);
    serde_json::to_vec(&File { data, checksum })
}

/// The rows of a file that was written whole.
///
/// # Errors
/// The text is not a checkpoint of this shape.
pub fn read(text: &[u8]) -> serde_json::Result<Vec<Row>> {
    serde_json::from_slice(text).map(|file: File| file.data.pod_device_entries.unwrap_or_default())
}

fn to_base64<S: Serializer>(bytes: &[u8], s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(&STANDARD.encode(bytes))
}

fn of_base64<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<u8>, D::Error> {
    let text = Option::<String>::deserialize(d)?.unwrap_or_default();
    STANDARD.decode(text).map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Checkpoint;

    #[test]
    fn what_is_written_is_read_back() {
        let row = Row {
            pod_uid: "u".into(),
            container: "c".into(),
            resource: "nvidia.com/gpu".into(),
            ids: BTreeMap::from([(NO_NUMA.to_owned(), vec!["GPU-1".to_owned()])]),
            answer: b"answer".to_vec(),
        };
        let healthy =
            BTreeMap::from([("nvidia.com/gpu".to_owned(), vec!["GPU-1".to_owned(), "GPU-2".to_owned()])]);
        let empty = write(Vec::new(), healthy.clone()).unwrap();
        assert!(Checkpoint::parse(&empty).unwrap().entries.is_empty());
        assert_eq!(read(&empty).unwrap(), []);
        let text = write(vec![row.clone()], healthy).unwrap();
        let parsed = Checkpoint::parse(&text).unwrap();
        assert_eq!((parsed.entries[0].ids.len(), parsed.healthy("nvidia.com/gpu").len()), (1, 2));
        assert_eq!(read(&text).unwrap(), [row]);
        assert!(read(&text[..text.len() / 2]).is_err());
    }
}
