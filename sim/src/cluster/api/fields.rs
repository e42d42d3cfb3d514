//! Sets of fields, as `metadata.managedFields` writes them (FieldsV1): `f:` for a field, `k:` for an element of a keyed list,
//! `v:` for a value of a set, `.` for the thing itself.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::merge_keys::{is_set, key_value, list_keys};

/// A set of fields of an object, as a tree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fields {
    /// The thing itself is in the set.
    here: bool,
    below: BTreeMap<String, Fields>,
}

impl Fields {
    /// All fields that a configuration names.
    #[must_use]
    pub fn of(object: &Value) -> Self {
        let mut all = Self::of_value("", object);
        all.here = false;
        all
    }

    /// What the owner of a field owns: not the identity of the object, nor what the server sets.
    #[must_use]
    pub fn of_configuration(object: &Value) -> Self {
        let mut bare = object.clone();
        strip(&mut bare);
        Self::of(&bare)
    }

    fn of_value(field: &str, value: &Value) -> Self {
        let mut set = Self { here: true, below: BTreeMap::new() };
        match value {
            Value::Object(map) if !map.is_empty() => {
                let below = map.iter().map(|(key, value)| (format!("f:{key}"), Self::of_value(key, value)));
                set.below = below.collect();
            }
            Value::Array(list) => {
                set.below = elements(field, list).map(|(key, v)| (key, Self::of_value("", v))).collect();
            }
            _ => {}
        }
        set
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.here && self.below.is_empty()
    }

    #[must_use]
    pub fn both(&self, other: &Self) -> Self {
        let below =
            self.below.iter().filter_map(|(key, one)| Some((key.clone(), one.both(other.below.get(key)?))));
        self.reduced(self.here && other.here, below.collect())
    }

    /// What is in this one and not in the other.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        let below = self.below.iter().map(|(key, one)| match other.below.get(key) {
            None => (key.clone(), one.clone()),
            Some(other) => (key.clone(), one.without(other)),
        });
        self.reduced(self.here && !other.here, below.collect())
    }

    /// A part of this set. A map or list that has lost all that was in it is no longer in the set either: bare, it would stand
    /// for the whole value.
    fn reduced(&self, here: bool, mut below: BTreeMap<String, Self>) -> Self {
        below.retain(|_, set| !set.is_empty());
        let hollow = below.is_empty() && !self.below.is_empty();
        Self { here: here && !hollow, below }
    }

    #[must_use]
    pub fn either(&self, other: &Self) -> Self {
        let mut union = self.clone();
        union.here |= other.here;
        for (key, set) in &other.below {
            let entry = union.below.entry(key.clone()).or_default();
            *entry = entry.either(set);
        }
        union
    }

    /// The fields in the form of `managedFields`.
    #[must_use]
    pub fn to_value(&self) -> Value {
        let mut map = Map::new();
        if self.here && !self.below.is_empty() {
            map.insert(".".into(), Value::Object(Map::new()));
        }
        map.extend(self.below.iter().map(|(key, set)| (key.clone(), set.to_value())));
        Value::Object(map)
    }

    #[must_use]
    pub fn from_value(value: &Value) -> Self {
        fn read(value: &Value) -> Fields {
            let map = value.as_object();
            let leaf = map.is_none_or(Map::is_empty);
            let below = map.into_iter().flatten().filter(|(key, _)| *key != ".");
            Fields {
                here: leaf || value.get(".").is_some(),
                below: below.map(|(key, value)| (key.clone(), read(value))).collect(),
            }
        }
        let mut all = read(value);
        all.here = false;
        all
    }

    /// The fields in both sets at which two objects differ, as paths. A map or a keyed list is never contested itself, only what
    /// is in it.
    #[must_use]
    pub fn contested(&self, owned: &Self, one: &Value, other: &Value) -> Vec<String> {
        let mut found = Vec::new();
        self.collect(owned, one, other, "", &mut found);
        found
    }

    fn collect(&self, owned: &Self, one: &Value, other: &Value, path: &str, found: &mut Vec<String>) {
        if self.below.is_empty() || owned.below.is_empty() {
            // An empty map claims that there is one, not that it is empty.
            let both_there = is_hollow(one) && std::mem::discriminant(one) == std::mem::discriminant(other);
            if self.here && owned.here && one != other && !both_there {
                found.push(path.to_owned());
            }
            return;
        }
        for (key, set) in &self.below {
            let Some(owned) = owned.below.get(key) else { continue };
            let field = path.rsplit('.').next().unwrap_or_default();
            let null = Value::Null;
            let left = child(field, one, key).unwrap_or(&null);
            let right = child(field, other, key).unwrap_or(&null);
            set.collect(owned, left, right, &format!("{path}{}", shown(key)), found);
        }
    }

    /// The fields of `after` that are not so in `before`.
    #[must_use]
    pub fn changed(field: &str, before: Option<&Value>, after: &Value) -> Self {
        let Some(before) = before else { return Self::of_value(field, after) };
        if before == after {
            return Self::default();
        }
        let all = Self::of_value(field, after);
        if all.below.is_empty() {
            return all;
        }
        let differs = |(key, set): (String, Self)| {
            let name = key.strip_prefix("f:").unwrap_or_default().to_owned();
            let now = child(field, after, &key)?;
            let set = match child(field, before, &key) {
                None => set,
                Some(was) => Self::changed(&name, Some(was), now),
            };
            (!set.is_empty()).then_some((key, set))
        };
        Self { here: false, below: all.below.into_iter().filter_map(differs).collect() }
    }

    /// Takes the fields of the set out of an object. A map or element that the set does not hold as such stays, emptied.
    pub fn remove_from(&self, field: &str, object: &mut Value) {
        for (key, set) in &self.below {
            let gone = set.here && set.below.is_empty();
            match object {
                Value::Object(map) => {
                    let Some(name) = key.strip_prefix("f:") else { continue };
                    if let Some(value) = map.get_mut(name) {
                        set.remove_from(name, value);
                        if gone || (set.here && is_hollow(value)) {
                            map.remove(name);
                        }
                    }
                }
                Value::Array(list) => {
                    let at = elements(field, list).position(|(k, _)| k == *key);
                    if let Some(at) = at {
                        if set.here {
                            list.remove(at);
                        } else {
                            set.remove_from("", &mut list[at]);
                        }
                    }
                }
                _ => {}
            }
        }
    }
}

fn is_hollow(value: &Value) -> bool {
    match value {
        Value::Object(map) => map.is_empty(),
        Value::Array(list) => list.is_empty(),
        _ => false,
    }
}

/// The elements of a list that is a map or a set, by their keys; nothing for one that is a value.
fn elements<'a>(field: &str, list: &'a [Value]) -> impl Iterator<Item = (String, &'a Value)> + use<'a> {
    let keys = list.first().and_then(|sample| list_keys(field, sample));
    let set = is_set(field);
    list.iter().filter_map(move |element| match keys {
        Some(keys) => Some((element_key(keys.apply, element), element)),
        None if set => Some((format!("v:{element}"), element)),
        None => None,
    })
}

/// `k:{"name":"main"}`.
#[must_use]
pub fn element_key(keys: &[&str], element: &Value) -> String {
    let key: Map<String, Value> = keys.iter().map(|k| ((*k).to_owned(), key_value(element, k))).collect();
    format!("k:{}", Value::Object(key))
}

fn child<'a>(field: &str, value: &'a Value, key: &str) -> Option<&'a Value> {
    match value {
        Value::Object(map) => map.get(key.strip_prefix("f:")?),
        // The name of the list is that of the field it stands in, without brackets of an element.
        Value::Array(list) => elements(field, list).find(|(k, _)| k == key).map(|(_, v)| v),
        _ => None,
    }
}

fn shown(key: &str) -> String {
    match key.split_at_checked(2) {
        Some(("f:", name)) => format!(".{name}"),
        Some(("k:", key)) => {
            let key: Value = serde_json::from_str(key).unwrap_or_default();
            let pairs = key.as_object().into_iter().flatten().map(|(k, v)| format!("{k}={v}"));
            format!("[{}]", pairs.collect::<Vec<_>>().join(","))
        }
        _ => format!("[{key}]"),
    }
}

/// Takes away what nobody owns: identity, and what the server keeps.
pub fn strip(object: &mut Value) {
    if let Value::Object(map) = object {
        map.remove("apiVersion");
        map.remove("kind");
        if let Some(Value::Object(metadata)) = map.get_mut("metadata") {
            for key in [
                "name",
                "namespace",
                "generateName",
                "uid",
                "resourceVersion",
                "generation",
                "creationTimestamp",
                "deletionTimestamp",
                "deletionGracePeriodSeconds",
                "managedFields",
                "selfLink",
            ] {
                metadata.remove(key);
            }
            if metadata.is_empty() {
                map.remove("metadata");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn fields_are_written_as_the_api_server_writes_them() {
        let pod = json!({
            "metadata": {"name": "x", "labels": {"a": "1"}, "finalizers": ["f"]},
            "spec": {"containers": [{"name": "c", "ports": [{"containerPort": 80}]}], "tolerations": [{"key": "t"}]},
        });
        let expected = json!({
            "f:metadata": {".": {}, "f:labels": {".": {}, "f:a": {}}, "f:finalizers": {".": {}, "v:\"f\"": {}}},
            "f:spec": {".": {}, "f:containers": {".": {}, "k:{\"name\":\"c\"}": {
                ".": {}, "f:name": {}, "f:ports": {".": {}, "k:{\"containerPort\":80,\"protocol\":\"TCP\"}": {".": {}, "f:containerPort": {}}},
            }}, "f:tolerations": {}},
        });
        let fields = Fields::of_configuration(&pod);
        assert_eq!(fields.to_value(), expected);
        assert_eq!(Fields::from_value(&expected), fields);
    }

    #[test]
    fn fields_can_be_taken_out_again() {
        let mut pod = json!({"spec": {"containers": [{"name": "c", "image": "i"}, {"name": "d"}], "nodeSelector": {"a": "1"}}});
        let set = json!({"f:spec": {
            "f:containers": {"k:{\"name\":\"c\"}": {"f:image": {}}, "k:{\"name\":\"d\"}": {".": {}, "f:name": {}}},
            "f:nodeSelector": {".": {}, "f:a": {}},
        }});
        Fields::from_value(&set).remove_from("", &mut pod);
        assert_eq!(pod, json!({"spec": {"containers": [{"name": "c"}]}}));
    }
}
