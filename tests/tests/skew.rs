//! Components of two versions run beside each other while an upgrade goes on, and what they wrote outlives them. So what an earlier version
//! wrote is read whole, and what the next one adds does not keep this one from reading the rest.
//!
//! `tests/formats` has an object of each format that crosses components, as the version that its folder names wrote it. A file there is
//! never changed; a new form of an object is another folder (docs/decisions/0008).
#![allow(clippy::unwrap_used, clippy::panic)]

use std::{collections::BTreeMap, fs, path::PathBuf};

use gpu_migrate_model::{
    annotation::{Choice, PolicyRef},
    ask::PodAsk,
    crd::{GPUConfig, GPUMigration, GPUShadow},
    names::{self, Dialect},
    units::CardIndex,
    usage::NodeUse,
};
use gpu_migrate_plugin_bridge::{inventory::card_map::CardMap, record::Record};
use gpu_migrate_webhook::restore::restore;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

/// What a reader makes of an object, written again.
type Reader = fn(Value) -> serde_json::Result<Value>;

/// Each format, its reader, and the objects in it that have any keys or, since an older reader would lose what a new field means, no
/// others than these.
const FORMATS: [(&str, Reader, &[&str]); 6] = [
    // Owners, the webhook and the command line to the operator and each other.
    ("gpumigration.json", read_and_write::<GPUMigration>, &[]),
    ("gpuconfig.json", read_and_write::<GPUConfig>, &[]),
    // The node agent to extender, operator and command line.
    ("gpushadow.json", read_and_write::<GPUShadow>, &[]),
    // The node agent to the operator.
    ("use.json", read_and_write::<NodeUse>, &[]),
    // A node agent to its successor, which rebuilds a card map that it cannot read.
    ("nvidia_checkpoint.json", read_and_write::<Record>, &["/Data/PodDeviceEntries/0/DeviceIDs"]),
    ("cards.json", read_and_write::<CardMap>, &["", "/ranges/0", "/ranges/1"]),
];

fn read_and_write<T: serde::Serialize + serde::de::DeserializeOwned>(
    object: Value,
) -> serde_json::Result<Value> {
    serde_json::to_value(serde_json::from_value::<T>(object)?)
}

/// The files of each version.
fn versions() -> BTreeMap<String, BTreeMap<String, Value>> {
    let folders = fs::read_dir(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("formats")).unwrap();
    let name = |entry: &fs::DirEntry| entry.file_name().into_string().unwrap();
    let file = |entry: fs::DirEntry| {
        (name(&entry), serde_json::from_slice(&fs::read(entry.path()).unwrap()).unwrap())
    };
    let version = |folder: fs::DirEntry| {
        let files = fs::read_dir(folder.path()).unwrap().map(|entry| file(entry.unwrap()));
        (name(&folder), files.collect())
    };
    folders.map(|folder| version(folder.unwrap())).collect()
}

/// Where `new` does not have what `old` has.
fn lost(old: &Value, new: &Value, path: &str, found: &mut Vec<String>) {
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => {
            for (key, value) in old {
                lost(value, new.get(key).unwrap_or(&Value::Null), &format!("{path}/{key}"), found);
            }
        }
        (Value::Array(old), Value::Array(new)) if old.len() == new.len() => {
            for (index, (old, new)) in old.iter().zip(new).enumerate() {
                lost(old, new, &format!("{path}/{index}"), found);
            }
        }
        (old, new) if old == new => {}
        _ => found.push(format!("{path}: {old} became {new}")),
    }
}

#[test]
fn what_an_earlier_version_wrote_is_read_whole() {
    let versions = versions();
    let first = &versions["v0.1.0"];
    assert_eq!(first.len(), FORMATS.len() + 2, "a format without a reader or a file: {:?}", first.keys());
    for (version, files) in &versions {
        for (name, read, _) in FORMATS {
            let Some(old) = files.get(name) else { continue };
            let new = read(old.clone()).unwrap_or_else(|error| panic!("{version}/{name}: {error}"));
            let mut found = Vec::new();
            lost(old, &new, "", &mut found);
            assert_eq!(found, Vec::<String>::new(), "{version}/{name}");
        }
    }
}

/// The paths of all objects in a document.
fn objects(value: &Value, path: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            found.push(path.to_owned());
            fields.iter().for_each(|(key, value)| {
                objects(value, &format!("{path}/{}", key.replace('/', "~1")), found);
            });
        }
        Value::Array(items) => {
            items
                .iter()
                .enumerate()
                .for_each(|(index, item)| objects(item, &format!("{path}/{index}"), found));
        }
        _ => {}
    }
}

#[test]
fn a_field_of_the_next_version_is_ignored() {
    for (version, files) in versions() {
        for (name, read, closed) in FORMATS {
            let Some(document) = files.get(name) else { continue };
            let mut paths = Vec::new();
            objects(document, "", &mut paths);
            let is_refused = |path: &String| {
                let mut next = document.clone();
                next.pointer_mut(path).unwrap()["fieldOfTheNextVersion"] = json!("value");
                read(next).is_err()
            };
            assert_eq!(paths.into_iter().filter(is_refused).collect::<Vec<_>>(), closed, "{version}/{name}");
        }
    }
}

/// The webhook to the command line, operator and another webhook; the extender to the node agent.
#[test]
fn a_pod_of_an_earlier_version_is_restored_and_its_cards_are_read() {
    for (version, files) in versions() {
        let pod = &files["pod.json"];
        let typed: Pod = serde_json::from_value(pod.clone()).unwrap();
        let ask = PodAsk::of(&typed, &Dialect::default()).unwrap();
        let annotations = typed.metadata.annotations.unwrap();
        let choice = Choice::read(&annotations, &ask).unwrap().unwrap();
        let cards = [("main", vec![CardIndex(1), CardIndex(2)]), ("warm", vec![CardIndex(1)])];
        assert_eq!(choice.cards, cards.map(|(name, cards)| (name.to_owned(), cards)).into(), "{version}");
        assert_eq!((choice.node.as_str(), choice.time), ("gpu-01", 1_764_000_000_000_000_000), "{version}");
        let policy = PolicyRef::try_from(annotations[names::POLICY].clone()).unwrap();
        assert_eq!((policy.name.as_str(), policy.generation), ("danlu", 3), "{version}");

        let mut restored = pod.clone();
        assert!(restore(&mut restored).unwrap());
        assert_eq!(restored["spec"], files["pod-as-written.json"]["spec"], "{version}");
        assert!(restored["metadata"]["annotations"].get(names::ORIGINAL).is_none(), "{version}");

        // What it does not know it cannot restore: the pod stays as it is.
        let mut next = pod.clone();
        let record = annotations[names::ORIGINAL].replacen('{', r#"{"fieldOfTheNextVersion":"value","#, 1);
        next["metadata"]["annotations"][names::ORIGINAL] = json!(record);
        let before = next.clone();
        let error = restore(&mut next).unwrap_err().to_string();
        assert!(error.contains("fieldOfTheNextVersion"), "{version}: {error}");
        assert_eq!(next, before, "{version}");
    }
}
