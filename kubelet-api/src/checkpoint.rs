//! The kubelet checkpoint of devices, `kubelet_internal_checkpoint`, read without trusting it.
//!
//! Three shapes are known: device IDs as a flat list (kubelets before 1.20), as a map from NUMA node to list (since), and both of
//! these with or without the `Data` wrapper, `Checksum` and `BootID`. The checksum is over a Go pretty-print of the struct and is
//! not verified. A file that is cut short, empty or of another shape is refused as a whole: what cannot be read frees no card.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// File name inside the device plugin directory.
pub const FILE_NAME: &str = "kubelet_internal_checkpoint";

/// Why a checkpoint was refused. Nothing may be concluded from a refused file.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// No byte in it: the writer was interrupted.
    #[error(
        "checkpoint is empty; expected a JSON object with PodDeviceEntries (the file is being written, or was cut short)"
    )]
    Empty,
    /// Not JSON, or cut short, or fields of other types.
    #[error("checkpoint ({length} bytes) is not readable at line {line}, column {column}: {message}")]
    Syntax { length: usize, line: usize, column: usize, message: String },
    /// JSON, but none of the known shapes.
    #[error(
        "checkpoint has neither Data.PodDeviceEntries nor PodDeviceEntries; expected a kubelet's device checkpoint"
    )]
    NoEntries,
}

/// One row: the devices of one resource that one container holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// UID of the pod, as the kubelet knows it (for static pods: the hash of their manifest).
    pub pod_uid: Cow<'a, str>,
    pub container: Cow<'a, str>,
    pub resource: Cow<'a, str>,
    /// Device IDs of all NUMA nodes, in the order of the file.
    pub ids: Vec<Cow<'a, str>>,
    /// The plugin's answer, protobuf in base64, as it stands in the file.
    pub answer: Cow<'a, str>,
}

/// A checkpoint that was read whole. Borrows from the text it was parsed from.
#[derive(Clone, Debug, Default)]
pub struct Checkpoint<'a> {
    /// Which container has which devices. May still list pods that are gone (until the next allocation on the node).
    pub entries: Vec<Entry<'a>>,
    /// The healthy devices of each resource when it was written, as they stand in the file: see [`Checkpoint::healthy`].
    pub registered: BTreeMap<String, &'a RawValue>,
    /// Identity of the boot that wrote it, where the kubelet records it.
    pub boot_id: Option<Cow<'a, str>>,
}

impl<'a> Checkpoint<'a> {
    /// Reads a checkpoint of any known shape.
    ///
    /// # Errors
    /// [`CheckpointError`] when the text is not one whole checkpoint.
    pub fn parse(text: &'a [u8]) -> Result<Self, CheckpointError> {
        if text.iter().all(u8::is_ascii_whitespace) {
            return Err(CheckpointError::Empty);
        }
        let raw: Outer<'a> = serde_json::from_slice(text).map_err(|e| CheckpointError::Syntax {
            length: text.len(),
            line: e.line(),
            column: e.column(),
            message: e.to_string(),
        })?;
        let (entries, registered) = match raw {
            Outer { data: Some(Inner { entries: Some(entries), registered }), .. } => (entries, registered),
            Outer { entries: Some(entries), registered, .. } => (entries, registered),
            _ => return Err(CheckpointError::NoEntries),
        };
        Ok(Self {
            entries: entries.0,
            registered: registered.unwrap_or_default(),
            boot_id: raw.boot_id.map(|b| b.0),
        })
    }

    /// IDs of a resource that the kubelet may allocate, those that containers hold included. A node has thousands of shares: they are
    /// parsed only for the resource that is asked for.
    #[must_use]
    pub fn healthy(&self, resource: &str) -> Vec<Cow<'a, str>> {
        let ids =
            self.registered.get(resource).and_then(|raw| serde_json::from_str::<Ids<'a>>(raw.get()).ok());
        ids.map(|ids| ids.0).unwrap_or_default()
    }
}

#[derive(Deserialize)]
struct Outer<'a> {
    #[serde(rename = "Data", borrow)]
    data: Option<Inner<'a>>,
    #[serde(rename = "PodDeviceEntries", borrow, default, deserialize_with = "present")]
    entries: Option<Entries<'a>>,
    #[serde(rename = "RegisteredDevices", borrow)]
    registered: Option<BTreeMap<String, &'a RawValue>>,
    #[serde(rename = "BootID", borrow)]
    boot_id: Option<Text<'a>>,
}

#[derive(Deserialize)]
struct Inner<'a> {
    #[serde(rename = "PodDeviceEntries", borrow, default, deserialize_with = "present")]
    entries: Option<Entries<'a>>,
    #[serde(rename = "RegisteredDevices", borrow)]
    registered: Option<BTreeMap<String, &'a RawValue>>,
}

/// Tells a field that is there (`null` included) from one that is not.
fn present<'de: 'a, 'a, D: Deserializer<'de>>(d: D) -> Result<Option<Entries<'a>>, D::Error> {
    Option::<Vec<RawEntry<'a>>>::deserialize(d)
        .map(|rows| Some(Entries(rows.unwrap_or_default().into_iter().map(Entry::from).collect())))
}

struct Entries<'a>(Vec<Entry<'a>>);

#[derive(Deserialize)]
struct RawEntry<'a> {
    #[serde(rename = "PodUID", borrow)]
    pod_uid: Cow<'a, str>,
    #[serde(rename = "ContainerName", borrow)]
    container: Cow<'a, str>,
    #[serde(rename = "ResourceName", borrow)]
    resource: Cow<'a, str>,
    #[serde(rename = "DeviceIDs", borrow)]
    ids: Ids<'a>,
    #[serde(rename = "AllocResp", borrow, default)]
    answer: Option<Text<'a>>,
}

impl<'a> From<RawEntry<'a>> for Entry<'a> {
    fn from(raw: RawEntry<'a>) -> Self {
        Self {
            pod_uid: raw.pod_uid,
            container: raw.container,
            resource: raw.resource,
            ids: raw.ids.0,
            answer: raw.answer.map(|a| a.0).unwrap_or_default(),
        }
    }
}

/// A string that borrows wherever the text allows it. (serde's own `Cow` inside `Vec` and `Option` copies.)
struct Text<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Cow<'de, str>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_borrowed_str<E: de::Error>(self, s: &'de str) -> Result<Self::Value, E> {
                Ok(Cow::Borrowed(s))
            }
            fn visit_str<E: de::Error>(self, s: &str) -> Result<Self::Value, E> {
                Ok(Cow::Owned(s.to_owned()))
            }
        }
        d.deserialize_str(V).map(Text)
    }
}

/// Device IDs: a flat list, a map from NUMA node to list, or null.
struct Ids<'a>(Vec<Cow<'a, str>>);

impl<'de: 'a, 'a> Deserialize<'de> for Ids<'a> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Vec<Cow<'de, str>>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of device IDs, or a map from NUMA node to such lists")
            }
            fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
                Ok(Vec::new())
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let mut ids = Vec::new();
                while let Some(Text(id)) = list.next_element()? {
                    ids.push(id);
                }
                Ok(ids)
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut ids = Vec::new();
                while let Some((Text(node), list)) = map.next_entry::<Text<'de>, Option<Ids<'de>>>()? {
                    if node.parse::<i64>().is_err() {
                        return Err(de::Error::custom(format!("NUMA node {node:?} is not a number")));
                    }
                    ids.extend(list.into_iter().flat_map(|l| l.0));
                }
                Ok(ids)
            }
        }
        d.deserialize_any(V).map(Ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(checkpoint: &Checkpoint<'_>) -> Vec<Vec<String>> {
        checkpoint.entries.iter().map(|e| e.ids.iter().map(ToString::to_string).collect()).collect()
    }

    #[test]
    fn every_known_shape_reads_the_same() {
        let flat = r#"{"Data":{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c","ResourceName":"r","DeviceIDs":["a","b"],"AllocResp":"eA=="}],"RegisteredDevices":{"r":["a","b","c"]}},"Checksum":1}"#;
        let numa = r#"{"Data":{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c","ResourceName":"r","DeviceIDs":{"0":["a"],"-1":["b"]},"AllocResp":"eA=="}],"RegisteredDevices":{"r":["a","b","c"]}},"Checksum":1,"BootID":"boot"}"#;
        let bare = r#"{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c","ResourceName":"r","DeviceIDs":["a","b"],"AllocResp":"eA=="}],"RegisteredDevices":{"r":["a","b","c"]}}"#;
        for text in [flat, numa, bare] {
            let read = Checkpoint::parse(text.as_bytes()).unwrap();
            assert_eq!(ids(&read), [["a", "b"]], "{text}");
            assert_eq!(read.healthy("r"), ["a", "b", "c"]);
            assert_eq!(read.entries[0].answer, "eA==");
            assert!(matches!(read.entries[0].ids[0], Cow::Borrowed(_)), "IDs are borrowed from the text");
        }
        assert_eq!(Checkpoint::parse(numa.as_bytes()).unwrap().boot_id.as_deref(), Some("boot"));
    }

    #[test]
    fn null_entries_are_an_empty_checkpoint() {
        let read = Checkpoint::parse(
            br#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{"r":null}},"Checksum":1}"#,
        )
        .unwrap();
        assert_eq!(read.entries, []);
        assert!(read.healthy("r").is_empty() && read.healthy("another").is_empty());
    }

    #[test]
    fn other_texts_are_refused_with_a_reason() {
        let cases: [(&str, &str); 8] = [
            ("", "is empty"),
            (" \n", "is empty"),
            ("{", "not readable at line 1"),
            ("null", "not readable"),
            ("{}", "neither Data.PodDeviceEntries"),
            (r#"{"Data":null}"#, "neither Data.PodDeviceEntries"),
            (r#"{"Data":{"PodDeviceEntries":[{"PodUID":"u"}]}}"#, "missing field `ContainerName`"),
            (
                r#"{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c","ResourceName":"r","DeviceIDs":{"x":["a"]}}]}"#,
                "NUMA node \"x\" is not a number",
            ),
        ];
        for (text, reason) in cases {
            let error = Checkpoint::parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(reason), "{text:?}: {error}");
        }
    }
}
