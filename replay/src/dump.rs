//! Objects of a cluster's dump, one after the other: what is kept of each decides about the memory, not the length of the dump.

use std::fmt;
use std::io::Read;

use gpu_migrate_model::annotation::is_of_choice;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// What field managers own is half of an object, and nothing here reads it.
const UNREAD: [&str; 1] = ["managedFields"];
/// What else says nothing about where a pod runs and may run.
const UNREAD_OF_PODS_AND_NODES: [&str; 7] = [
    "managedFields",
    "conditions",
    "containerStatuses",
    "initContainerStatuses",
    "images",
    "volumes",
    "volumeMounts",
];
/// Bytes that are read at a time.
const BUFFER: usize = 1 << 18;
/// What tells a pod from the others of its workload.
const OF_ONE_POD: [&str; 3] = [
    "statefulset.kubernetes.io/pod-name",
    "apps.kubernetes.io/pod-index",
    "batch.kubernetes.io/job-completion-index",
];
/// Annotations of network plugins with addresses.
const OF_NETWORK: [&str; 2] = ["cni.projectcalico.org/", "k8s.v1.cni.cncf.io/network-status"];
/// The volume of a service account's token, with a random name in each pod.
const TOKEN_VOLUME: &str = "kube-api-access-";

/// Reads a v1 List in JSON, as of `kubectl get … -o json`, and hands over its items without what placement does not
/// look at: `managedFields`, conditions, states of containers, images, volumes.
///
/// # Errors
/// A text that is no such List. Items before the place of the error were handed over.
pub fn items(reader: impl Read, each: impl FnMut(Value)) -> serde_json::Result<()> {
    let mut json = serde_json::Deserializer::from_reader(std::io::BufReader::with_capacity(BUFFER, reader));
    List(each).deserialize(&mut json)?;
    json.end()
}

struct List<F>(F);

impl<'de, F: FnMut(Value)> DeserializeSeed<'de> for List<F> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, F: FnMut(Value)> Visitor<'de> for List<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a List of Kubernetes objects")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        let mut found = false;
        while let Some(key) = map.next_key::<String>()? {
            if key == "items" {
                found = true;
                map.next_value_seed(Items(&mut self.0))?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        if found { Ok(()) } else { Err(A::Error::missing_field("items")) }
    }
}

struct Items<'f, F>(&'f mut F);

impl<'de, F: FnMut(Value)> DeserializeSeed<'de> for Items<'_, F> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de, F: FnMut(Value)> Visitor<'de> for Items<'_, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Kubernetes objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while let Some(Lean(object)) = seq.next_element::<Lean<true>>()? {
            (self.0)(object);
        }
        Ok(())
    }
}

/// Any value, read without the `managedFields` in it; `BRIEF`: and without what [`items`] leaves out.
#[derive(Clone, Debug, PartialEq)]
pub struct Lean<const BRIEF: bool = false>(pub Value);

impl<'de, const BRIEF: bool> Deserialize<'de> for Lean<BRIEF> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(LeanVisitor::<BRIEF>).map(Self)
    }
}

/// Reads any value as [`Lean`] does.
#[derive(Clone, Copy, Debug)]
pub struct LeanVisitor<const BRIEF: bool = false>;

impl<'de, const BRIEF: bool> Visitor<'de> for LeanVisitor<BRIEF> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Lean(value)) = seq.next_element::<Lean<BRIEF>>()? {
            list.push(value);
        }
        Ok(list.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            let unread: &[&str] = if BRIEF { &UNREAD_OF_PODS_AND_NODES } else { &UNREAD };
            if unread.contains(&key.as_str()) {
                map.next_value::<IgnoredAny>()?;
            } else {
                let Lean(value) = map.next_value::<Lean<BRIEF>>()?;
                object.insert(key, value);
            }
        }
        Ok(object.into())
    }
}

/// Makes of a pod of a cluster what its controller would create again: without its name, its node and what else is of this pod alone.
/// So the pods of one workload become equal.
pub fn as_created(pod: &mut Value) {
    let of = |value: &mut Value, keys: &[&str]| {
        if let Some(object) = value.as_object_mut() {
            object.retain(|key, _| !keys.contains(&key.as_str()));
        }
    };
    of(pod, &["status"]);
    if let Some(metadata) = pod.get_mut("metadata") {
        of(metadata, &["name", "uid", "resourceVersion", "creationTimestamp", "generation", "selfLink"]);
        if let Some(labels) = metadata.get_mut("labels") {
            of(labels, &OF_ONE_POD);
        }
        if let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut) {
            annotations
                .retain(|key, _| !is_of_choice(key) && !OF_NETWORK.iter().any(|own| key.starts_with(own)));
        }
    }
    let Some(spec) = pod.get_mut("spec") else { return };
    of(spec, &["nodeName", "hostname"]);
    let is_token = |one: &Value| {
        one.get("name").and_then(Value::as_str).is_some_and(|name| name.starts_with(TOKEN_VOLUME))
    };
    if let Some(volumes) = spec.get_mut("volumes").and_then(Value::as_array_mut) {
        volumes.retain(|volume| !is_token(volume));
    }
    for list in ["containers", "initContainers"] {
        for container in spec.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            if let Some(mounts) = container.get_mut("volumeMounts").and_then(Value::as_array_mut) {
                mounts.retain(|mount| !is_token(mount));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::cell::Cell;
    use std::rc::Rc;

    /// A List that is made while it is read, and counts the bytes that were read of it.
    struct Made {
        rest: u32,
        text: Vec<u8>,
        read: Rc<Cell<usize>>,
    }

    const ITEM: &str = r#"{"kind":"Pod","metadata":{"name":"p","managedFields":[{"x":1}]}}"#;

    impl Read for Made {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            if self.text.is_empty() && self.rest > 0 {
                self.rest -= 1;
                self.text = format!("{ITEM}{}", if self.rest == 0 { "]}" } else { "," }).into_bytes();
            }
            let count = buffer.len().min(self.text.len());
            for (to, from) in buffer.iter_mut().zip(self.text.drain(..count)) {
                *to = from;
            }
            self.read.set(self.read.get() + count);
            Ok(count)
        }
    }

    #[test]
    fn no_more_than_a_buffer_is_read_before_an_item_is_handed_over() {
        let read = Rc::new(Cell::new(0));
        let (mut count, mut most) = (0_usize, 0);
        let made = Made { rest: 50_000, text: br#"{"items":["#.to_vec(), read: Rc::clone(&read) };
        items(made, |object| {
            assert_eq!(object, json!({"kind": "Pod", "metadata": {"name": "p"}}));
            most = most.max(read.get() - count * (ITEM.len() + 1));
            count += 1;
        })
        .unwrap();
        assert_eq!(count, 50_000);
        assert!(most <= BUFFER + 2 * ITEM.len(), "{most}");
    }

    #[test]
    fn what_is_no_list_is_an_error() {
        for text in [r#"{"kind":"Pod"}"#, "[]", r#"{"items":3}"#, r#"{"items":[]} x"#, r#"{"items":[{]}"#] {
            assert!(items(text.as_bytes(), drop).is_err(), "{text}");
        }
        assert!(items(&br#"{"items":[],"kind":"List"}"#[..], drop).is_ok());
    }

    #[test]
    fn the_pods_of_a_workload_become_equal() {
        let pod = |name: &str, node: &str| {
            let mut pod = json!({"kind": "Pod", "metadata": {"name": name, "uid": name, "generateName": "w-", "resourceVersion": name,
                    "labels": {"app": "w", "apps.kubernetes.io/pod-index": name},
                    "annotations": {"mine": "x", "tencent.com/predicate-node": node}},
                "spec": {"nodeName": node, "hostname": name, "volumes": [{"name": format!("kube-api-access-{name}")}, {"name": "data"}],
                    "containers": [{"name": "c", "volumeMounts": [{"name": format!("kube-api-access-{name}")}, {"name": "data"}]}]},
                "status": {"podIP": node}});
            as_created(&mut pod);
            pod
        };
        assert_eq!(pod("a", "n1"), pod("b", "n2"));
        let expected = json!({"kind": "Pod", "metadata": {"generateName": "w-", "labels": {"app": "w"}, "annotations": {"mine": "x"}},
            "spec": {"volumes": [{"name": "data"}], "containers": [{"name": "c", "volumeMounts": [{"name": "data"}]}]}});
        assert_eq!(pod("a", "n1"), expected);
    }
}
