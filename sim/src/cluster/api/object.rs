//! Small readers and writers of JSON objects: what every handler does to `metadata`.

use serde_json::{Map, Value};

/// An empty object, for where there is none.
static NOTHING: Value = Value::Null;

/// `metadata.<key>` as text; empty where there is none.
#[must_use]
pub fn meta<'a>(object: &'a Value, key: &str) -> &'a str {
    object["metadata"][key].as_str().unwrap_or_default()
}

/// `metadata.name`.
#[must_use]
pub fn name(object: &Value) -> &str {
    meta(object, "name")
}

/// `metadata.namespace`; empty for cluster-scoped objects.
#[must_use]
pub fn namespace(object: &Value) -> &str {
    meta(object, "namespace")
}

/// `metadata.uid`.
#[must_use]
pub fn uid(object: &Value) -> &str {
    meta(object, "uid")
}

/// `metadata.labels`.
#[must_use]
pub fn labels(object: &Value) -> &Value {
    object.get("metadata").and_then(|m| m.get("labels")).unwrap_or(&NOTHING)
}

/// The elements of a list at `key`; none where it is missing or null.
pub fn items<'a>(object: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    object.get(key).and_then(Value::as_array).into_iter().flatten()
}

/// The object as a map, made one if it was not.
pub fn map(value: &mut Value) -> &mut Map<String, Value> {
    match value {
        Value::Object(map) => map,
        other => {
            *other = Value::Object(Map::new());
            map(other)
        }
    }
}

/// `metadata` as a map.
pub fn metadata(object: &mut Value) -> &mut Map<String, Value> {
    map(map(object).entry("metadata").or_insert(Value::Null))
}

/// Sets a field that is not there (or null).
pub fn default(object: &mut Value, key: &str, value: impl Into<Value>) {
    let slot = map(object).entry(key).or_insert(Value::Null);
    if slot.is_null() {
        *slot = value.into();
    }
}

/// Takes fields away that are null: in Kubernetes' own kinds they are as good as left out, and Go's clients write some.
pub fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, value| !value.is_null());
            map.values_mut().for_each(drop_nulls);
        }
        Value::Array(list) => list.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

/// The time as Kubernetes writes it: whole seconds, UTC.
#[must_use]
pub fn timestamp(now: jiff::Timestamp) -> String {
    now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// A random UID (version 4).
#[must_use]
pub fn new_uid() -> String {
    let bits: u128 = rand::random();
    let bits = (bits & !(0xf000 << 64) & !(0b11 << 62)) | (0x4000 << 64) | (0b10 << 62);
    let hex = format!("{bits:032x}");
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// The suffix of a generated name: five characters without vowels, as Kubernetes makes them.
#[must_use]
pub fn new_suffix() -> String {
    const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    (0..5).map(|_| LETTERS[rand::random_range(0..LETTERS.len())] as char).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uids_are_of_version_4() {
        let uid = new_uid();
        assert_eq!(uid.len(), 36);
        assert_eq!(uid.as_bytes()[14], b'4', "{uid}");
        assert!(b"89ab".contains(&uid.as_bytes()[19]), "{uid}");
        assert_ne!(uid, new_uid());
    }
}
