//! Strategic merge patch: a merge patch that knows which lists are maps (`k8s.io/apimachinery/pkg/util/strategicpatch`).
//!
//! Served: merging and replacing lists by their merge key, `$patch: replace | delete | merge`, `$deleteFromPrimitiveList`,
//! `$setElementOrder` (new elements go where it says), `$retainKeys`.

use serde_json::{Map, Value};

use super::merge_keys::{is_set, list_keys};

const PATCH: &str = "$patch";
const RETAIN: &str = "$retainKeys";
const DELETE_FROM: &str = "$deleteFromPrimitiveList/";
const ORDER: &str = "$setElementOrder/";

/// Applies a strategic merge patch.
pub fn apply(target: &mut Value, patch: &Value) {
    let (Value::Object(target), Value::Object(patch)) = (&mut *target, patch) else {
        *target = patch.clone();
        return;
    };
    if patch.get(PATCH).is_some_and(|p| p == "replace") {
        *target = without_directives(patch);
        return;
    }
    if let Some(Value::Array(keep)) = patch.get(RETAIN) {
        target.retain(|key, _| keep.iter().any(|k| k == key) || patch.contains_key(key));
    }
    for (key, value) in patch {
        if key == PATCH || key == RETAIN || key.starts_with(ORDER) {
            continue;
        }
        if let Some(list) = key.strip_prefix(DELETE_FROM) {
            remove_values(target, list, value);
            continue;
        }
        let order = patch.get(&format!("{ORDER}{key}"));
        merge_field(target, key, value, order);
    }
    // An order alone, with no element to merge, still sorts.
    for (key, order) in patch.iter().filter_map(|(key, order)| Some((key.strip_prefix(ORDER)?, order))) {
        if let Some(Value::Array(list)) = target.get_mut(key) {
            sort(key, list, order);
        }
    }
}

fn merge_field(target: &mut Map<String, Value>, key: &str, value: &Value, order: Option<&Value>) {
    match value {
        Value::Null => {
            target.remove(key);
        }
        Value::Object(patch) if patch.get(PATCH).is_some_and(|p| p == "delete") => {
            target.remove(key);
        }
        Value::Object(_) => {
            let slot = target.entry(key).or_insert(Value::Null);
            if !slot.is_object() {
                *slot = Value::Object(Map::new());
            }
            apply(slot, value);
        }
        Value::Array(patch) => {
            let slot = target.entry(key).or_insert(Value::Null);
            if !slot.is_array() {
                *slot = Value::Array(Vec::new());
            }
            if let Value::Array(list) = slot {
                merge_list(key, list, patch);
                if let Some(order) = order {
                    sort(key, list, order);
                }
            }
        }
        plain => {
            target.insert(key.to_owned(), plain.clone());
        }
    }
}

fn merge_list(field: &str, list: &mut Vec<Value>, patch: &[Value]) {
    if patch.iter().any(|element| element.get(PATCH).is_some_and(|p| p == "replace")) {
        *list = patch.iter().filter(|element| element.get(PATCH).is_none()).cloned().collect();
        return;
    }
    let sample = patch.iter().chain(list.iter()).next().unwrap_or(&Value::Null);
    let Some(keys) = list_keys(field, sample) else {
        if is_set(field) {
            let new = patch.iter().filter(|value| !list.contains(value)).cloned().collect::<Vec<_>>();
            list.extend(new);
        } else {
            *list = patch.to_vec();
        }
        return;
    };
    for element in patch {
        let same = |other: &Value| other.get(keys.patch) == element.get(keys.patch);
        if element.get(PATCH).is_some_and(|p| p == "delete") {
            list.retain(|other| !same(other));
        } else if let Some(found) = list.iter_mut().find(|other| same(other)) {
            apply(found, element);
        } else {
            let mut new = Value::Object(Map::new());
            apply(&mut new, element);
            list.push(new);
        }
    }
}

fn remove_values(target: &mut Map<String, Value>, key: &str, values: &Value) {
    if let (Some(Value::Array(list)), Value::Array(values)) = (target.get_mut(key), values) {
        list.retain(|value| !values.contains(value));
    }
}

/// Elements that the order names go in its order; the others keep their place behind what stood before them.
fn sort(field: &str, list: &mut [Value], order: &Value) {
    let Value::Array(order) = order else { return };
    let sample = list.first().unwrap_or(&Value::Null);
    let key = list_keys(field, sample).map(|keys| keys.patch);
    let position = |element: &Value| {
        order.iter().position(|wanted| match key {
            Some(key) => wanted.get(key) == element.get(key),
            None => wanted == element,
        })
    };
    let mut last = 0;
    let places: Vec<usize> = list
        .iter()
        .map(|e| {
            last = position(e).unwrap_or(last);
            last
        })
        .collect();
    let mut indexed: Vec<(usize, Value)> = places.into_iter().zip(list.iter().cloned()).collect();
    indexed.sort_by_key(|(place, _)| *place);
    for (slot, (_, element)) in list.iter_mut().zip(indexed) {
        *slot = element;
    }
}

fn without_directives(patch: &Map<String, Value>) -> Map<String, Value> {
    patch.iter().filter(|(key, _)| !key.starts_with('$')).map(|(k, v)| (k.clone(), v.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn patches_give_what_a_real_api_server_gives() {
        let pod = json!({"spec": {
            "containers": [{"name": "a", "image": "1", "env": [{"name": "X", "value": "1"}]}, {"name": "b", "image": "1"}],
            "tolerations": [{"key": "old"}], "nodeSelector": {"a": "1", "b": "2"},
        }, "metadata": {"finalizers": ["one", "two"]}});
        let cases = [
            (
                "containers merge by name",
                json!({"spec": {"containers": [{"name": "b", "image": "2"}]}}),
                "/spec/containers",
                json!([{"name": "a", "image": "1", "env": [{"name": "X", "value": "1"}]}, {"name": "b", "image": "2"}]),
            ),
            (
                "an element is deleted by its key",
                json!({"spec": {"containers": [{"name": "a", "$patch": "delete"}]}}),
                "/spec/containers",
                json!([{"name": "b", "image": "1"}]),
            ),
            (
                "lists without a key are replaced",
                json!({"spec": {"tolerations": [{"key": "new"}]}}),
                "/spec/tolerations",
                json!([{"key": "new"}]),
            ),
            (
                "null removes",
                json!({"spec": {"nodeSelector": {"a": null}}}),
                "/spec/nodeSelector",
                json!({"b": "2"}),
            ),
            (
                "a map is replaced",
                json!({"spec": {"nodeSelector": {"$patch": "replace", "c": "3"}}}),
                "/spec/nodeSelector",
                json!({"c": "3"}),
            ),
            (
                "keys not retained go",
                json!({"spec": {"nodeSelector": {"$retainKeys": ["b"], "b": "3"}}}),
                "/spec/nodeSelector",
                json!({"b": "3"}),
            ),
            (
                "values leave a set",
                json!({"metadata": {"$deleteFromPrimitiveList/finalizers": ["one"]}}),
                "/metadata/finalizers",
                json!(["two"]),
            ),
            (
                "values join a set",
                json!({"metadata": {"finalizers": ["three", "one"]}}),
                "/metadata/finalizers",
                json!(["one", "two", "three"]),
            ),
            (
                "an order is kept",
                json!({"spec": {"$setElementOrder/containers": [{"name": "b"}, {"name": "a"}]}}),
                "/spec/containers/0/name",
                json!("b"),
            ),
            (
                "nested lists merge too",
                json!({"spec": {"containers": [{"name": "a", "env": [{"name": "Y", "value": "2"}]}]}}),
                "/spec/containers/0/env",
                json!([{"name": "X", "value": "1"}, {"name": "Y", "value": "2"}]),
            ),
            (
                "a list is replaced on demand",
                json!({"spec": {"containers": [{"$patch": "replace"}, {"name": "z"}]}}),
                "/spec/containers",
                json!([{"name": "z"}]),
            ),
        ];
        for (what, patch, pointer, expected) in cases {
            let mut target = pod.clone();
            apply(&mut target, &patch);
            assert_eq!(target.pointer(pointer), Some(&expected), "{what}");
        }
    }

    #[test]
    fn ports_merge_by_the_key_of_their_kind() {
        for (before, patch, expected) in [
            (
                json!([{"port": 80, "name": "x"}]),
                json!([{"port": 80, "name": "y"}]),
                json!([{"port": 80, "name": "y"}]),
            ),
            (
                json!([{"containerPort": 80}]),
                json!([{"containerPort": 81}]),
                json!([{"containerPort": 80}, {"containerPort": 81}]),
            ),
        ] {
            let mut target = json!({"ports": before});
            apply(&mut target, &json!({"ports": patch}));
            assert_eq!(target["ports"], expected);
        }
    }
}
