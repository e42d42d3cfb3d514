//! Objects of a cluster's dump, packed as they are read: pods of one controller that are equal are planned as one.

use super::is_object_of_cluster;
use gpu_migrate_model::lifecycle::is_terminal_phase;
use gpu_migrate_replay::dump::{Lean, LeanVisitor, as_created};
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::fmt;

/// A document; what is listed under `items` apart from it.
#[derive(Debug)]
pub struct Packed {
    pub(super) value: Value,
    pub(super) items: Option<Vec<Item>>,
}

impl Packed {
    /// The document with what is listed in it.
    pub(super) fn whole(mut self) -> Value {
        if let (Some(items), Some(object)) = (self.items, self.value.as_object_mut()) {
            object.insert("items".to_owned(), items.into_iter().map(Item::whole).collect());
        }
        self.value
    }
}

/// An item of a List.
#[derive(Debug)]
pub(super) enum Item {
    Object(Value),
    /// A pod of a cluster that a controller made. Thousands are kept at a time: what it has in common with others is text.
    Pod {
        name: String,
        template: String,
    },
    /// A pod that has ended: it makes nothing.
    Ended,
}

impl Item {
    fn whole(self) -> Value {
        match self {
            Self::Object(object) => object,
            Self::Pod { template, .. } => serde_json::from_str(&template).unwrap_or_default(),
            Self::Ended => Value::Null,
        }
    }

    fn of(mut object: Value) -> Self {
        let kind = object.get("kind").and_then(Value::as_str);
        if !is_object_of_cluster(&object) || kind != Some("Pod") {
            // The images of a node are most of it.
            if kind == Some("Node")
                && let Some(node) = object.as_object_mut()
            {
                node.remove("status");
            }
            return Self::Object(object);
        }
        if object.pointer("/status/phase").and_then(Value::as_str).is_some_and(is_terminal_phase) {
            return Self::Ended;
        }
        let owners = object.pointer("/metadata/ownerReferences").and_then(Value::as_array);
        let controlled = owners.into_iter().flatten().any(|owner| owner["controller"] == true);
        match object.pointer("/metadata/name").and_then(Value::as_str).map(str::to_owned) {
            Some(name) if controlled => {
                as_created(&mut object);
                Self::Pod { name, template: object.to_string() }
            }
            _ => Self::Object(object),
        }
    }
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        <Lean>::deserialize(deserializer).map(|Lean(object)| Self::of(object))
    }
}

impl<'de> Deserialize<'de> for Packed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PackedVisitor { of_items: false })
    }
}

/// What stands under `items`.
struct Items(Packed);

impl<'de> Deserialize<'de> for Items {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PackedVisitor { of_items: true }).map(Self)
    }
}

impl From<Value> for Packed {
    fn from(value: Value) -> Self {
        Self { value, items: None }
    }
}

struct PackedVisitor {
    of_items: bool,
}

/// What is no object is read as any value.
macro_rules! as_value {
    ($($visit:ident($type:ty)),*) => {
        $(fn $visit<E: serde::de::Error>(self, value: $type) -> Result<Packed, E> {
            LeanVisitor::<false>.$visit(value).map(Packed::from)
        })*
    };
}

impl<'de> Visitor<'de> for PackedVisitor {
    type Value = Packed;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a Kubernetes object")
    }

    as_value!(
        visit_bool(bool),
        visit_i64(i64),
        visit_u64(u64),
        visit_f64(f64),
        visit_str(&str),
        visit_string(String)
    );

    fn visit_unit<E>(self) -> Result<Packed, E> {
        Ok(Value::Null.into())
    }

    fn visit_none<E>(self) -> Result<Packed, E> {
        Ok(Value::Null.into())
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Packed, D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Packed, A::Error> {
        if !self.of_items {
            return LeanVisitor::<false>.visit_seq(seq).map(Packed::from);
        }
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(Packed { value: Value::Null, items: Some(items) })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Packed, A::Error> {
        if self.of_items {
            return LeanVisitor::<false>.visit_map(map).map(Packed::from);
        }
        let (mut object, mut items) = (Map::new(), None);
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "items" => {
                    let Items(found) = map.next_value()?;
                    items = found.items;
                    if items.is_none() {
                        object.insert(key, found.value);
                    }
                }
                "managedFields" => drop(map.next_value::<IgnoredAny>()?),
                _ => {
                    let Lean(value) = map.next_value::<Lean>()?;
                    object.insert(key, value);
                }
            }
        }
        Ok(Packed { value: object.into(), items })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn pods_of_controllers_are_packed_and_all_else_is_as_it_was() {
        let pod = |name: &str, phase: &str, owner: bool| {
            json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "uid": name, "ownerReferences": [{"controller": owner}]},
                "spec": {"nodeName": name}, "status": {"phase": phase}})
        };
        let text = json!({"kind": "List", "items": [pod("a", "Running", true), pod("b", "Running", true), pod("c", "Failed", true),
            pod("d", "Running", false), {"kind": "Pod", "metadata": {"name": "written"}}]});
        let packed: Packed = serde_json::from_str(&text.to_string()).unwrap();
        let items = packed.items.unwrap();
        let Item::Pod { name, template } = &items[0] else { panic!("{:?}", items[0]) };
        assert_eq!(name, "a");
        assert!(matches!(&items[1], Item::Pod { template: other, .. } if other == template));
        assert!(matches!((&items[2], &items[3], &items[4]), (Item::Ended, Item::Object(_), Item::Object(_))));
        for other in [
            json!({"kind": "List", "items": 3}),
            json!([1, "x"]),
            json!("text"),
            json!({"a": {"items": [1]}}),
        ] {
            let packed: Packed = serde_json::from_str(&other.to_string()).unwrap();
            assert_eq!(packed.whole(), other);
        }
    }
}
