//! Server-side apply: who owns which field, what a new configuration takes away, and who is in its way
//! (KEP-555; `sigs.k8s.io/structured-merge-diff`).

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::fields::{Fields, element_key, strip};
use super::merge_keys::{is_set, list_keys};
use super::object::{items, metadata, timestamp};
use super::status::Refusal;

#[derive(Clone, Copy, Debug)]
pub struct Writer<'a> {
    /// `fieldManager`, or the client's name.
    pub manager: &'a str,
    /// `status`, or empty.
    pub subresource: &'a str,
    /// Version of the API that is spoken.
    pub api_version: &'a str,
    pub now: Timestamp,
}

#[derive(Clone, Debug)]
struct Entry {
    manager: String,
    operation: String,
    subresource: String,
    api_version: String,
    time: Value,
    fields: Fields,
}

impl Entry {
    fn new(writer: &Writer<'_>, operation: &str, fields: Fields) -> Self {
        Self {
            manager: writer.manager.into(),
            operation: operation.into(),
            subresource: writer.subresource.into(),
            api_version: writer.api_version.into(),
            time: timestamp(writer.now).into(),
            fields,
        }
    }

    fn read(value: &Value) -> Self {
        let text = |key: &str| value[key].as_str().unwrap_or_default().to_owned();
        Self {
            manager: text("manager"),
            operation: text("operation"),
            subresource: text("subresource"),
            api_version: text("apiVersion"),
            time: value["time"].clone(),
            fields: Fields::from_value(&value["fieldsV1"]),
        }
    }

    fn is(&self, writer: &Writer<'_>, operation: &str) -> bool {
        self.manager == writer.manager
            && self.operation == operation
            && self.subresource == writer.subresource
    }

    fn write(&self) -> Value {
        let mut entry = json!({
            "manager": self.manager, "operation": self.operation, "apiVersion": self.api_version,
            "time": self.time, "fieldsType": "FieldsV1", "fieldsV1": self.fields.to_value(),
        });
        if !self.subresource.is_empty() {
            entry["subresource"] = self.subresource.clone().into();
        }
        entry
    }
}

fn entries(object: Option<&Value>) -> Vec<Entry> {
    object.into_iter().flat_map(|o| items(&o["metadata"], "managedFields")).map(Entry::read).collect()
}

fn write_entries(object: &mut Value, entries: &[Entry]) {
    let written: Vec<Value> = entries.iter().filter(|e| !e.fields.is_empty()).map(Entry::write).collect();
    if written.is_empty() {
        metadata(object).remove("managedFields");
    } else {
        metadata(object).insert("managedFields".into(), written.into());
    }
}

/// The object once `applied` is what `writer` wants of it.
///
/// # Errors
/// 409 naming each field that another manager owns and has otherwise, unless forced.
pub fn apply(
    live: Option<&Value>,
    applied: &Value,
    writer: &Writer<'_>,
    force: bool,
) -> Result<Value, Refusal> {
    let wanted = Fields::of_configuration(applied);
    let mut entries = entries(live);
    let empty = Value::Object(Map::new());
    let mut merged = live.cloned().unwrap_or_else(|| empty.clone());

    let mut conflicts = Vec::new();
    for entry in entries.iter_mut().filter(|entry| !entry.is(writer, "Apply")) {
        let contested = wanted.contested(&entry.fields, applied, live.unwrap_or(&empty));
        if contested.is_empty() {
            continue;
        }
        if force {
            let lost = Fields::changed("", live, applied).both(&wanted);
            entry.fields = entry.fields.without(&lost);
        } else {
            conflicts.push((format!("{} ({})", entry.manager, entry.operation), contested));
        }
    }
    if !conflicts.is_empty() {
        return Err(conflict(&conflicts));
    }

    let before = entries.iter().find(|entry| entry.is(writer, "Apply")).map(|entry| entry.fields.clone());
    entries.retain(|entry| !entry.is(writer, "Apply"));
    if let Some(before) = before {
        let others = entries.iter().fold(Fields::default(), |all, entry| all.either(&entry.fields));
        before.without(&wanted).without(&others).remove_from("", &mut merged);
    }
    let mut configuration = applied.clone();
    strip(&mut configuration);
    merge("", &mut merged, &configuration);
    entries.push(Entry::new(writer, "Apply", wanted));
    write_entries(&mut merged, &entries);
    Ok(merged)
}

fn conflict(conflicts: &[(String, Vec<String>)]) -> Refusal {
    let count: usize = conflicts.iter().map(|(_, fields)| fields.len()).sum();
    let each =
        conflicts.iter().map(|(owner, fields)| format!("conflicts with \"{owner}\": {}", fields.join(", ")));
    let causes = conflicts.iter().flat_map(|(owner, fields)| {
        fields.iter().map(move |field| {
            json!({"reason": "FieldManagerConflict", "message": format!("conflict with \"{owner}\""), "field": field})
        })
    });
    let plural = if count == 1 { "" } else { "s" };
    let text = each.collect::<Vec<_>>().join("\n");
    Refusal::conflict(format!("Apply failed with {count} conflict{plural}: {text}"))
        .about(json!({"causes": causes.collect::<Vec<_>>()}))
}

/// Notes in `after` that `writer` changed it from `before` by other means than apply.
pub fn record_update(before: Option<&Value>, after: &mut Value, writer: &Writer<'_>) {
    let bare = |object: &Value| {
        let mut object = object.clone();
        strip(&mut object);
        object
    };
    let (was, is) = (before.map(bare), bare(after));
    let changed = Fields::changed("", was.as_ref(), &is);
    let all = Fields::of(&is);
    let mut entries = entries(before);
    for entry in &mut entries {
        entry.fields = entry.fields.both(&all);
        if !entry.is(writer, "Update") {
            entry.fields = entry.fields.without(&changed);
        }
    }
    if !changed.is_empty() {
        match entries.iter_mut().find(|entry| entry.is(writer, "Update")) {
            Some(entry) => {
                entry.fields = entry.fields.either(&changed);
                entry.time = timestamp(writer.now).into();
            }
            None => entries.push(Entry::new(writer, "Update", changed)),
        }
    }
    write_entries(after, &entries);
}

fn merge(field: &str, live: &mut Value, applied: &Value) {
    match (live, applied) {
        (Value::Object(live), Value::Object(applied)) => {
            for (key, value) in applied {
                merge(key, live.entry(key).or_insert(Value::Null), value);
            }
        }
        (Value::Array(live), Value::Array(applied)) if is_set(field) => {
            let new = applied.iter().filter(|value| !live.contains(value)).cloned().collect::<Vec<_>>();
            live.extend(new);
        }
        (Value::Array(live), Value::Array(applied)) => {
            match applied.first().and_then(|s| list_keys(field, s)) {
                None => live.clone_from(applied),
                Some(keys) => {
                    for element in applied {
                        let key = element_key(keys.apply, element);
                        match live.iter_mut().find(|other| element_key(keys.apply, other) == key) {
                            Some(found) => merge("", found, element),
                            None => live.push(element.clone()),
                        }
                    }
                }
            }
        }
        (live, applied) => *live = applied.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writer(manager: &str) -> Writer<'_> {
        Writer { manager, subresource: "", api_version: "v1", now: Timestamp::UNIX_EPOCH }
    }

    fn owners(object: &Value) -> Vec<(String, String)> {
        let all = items(&object["metadata"], "managedFields");
        all.map(|e| (e["manager"].as_str().unwrap().into(), e["fieldsV1"].to_string())).collect()
    }

    #[test]
    fn what_a_manager_no_longer_wants_goes_unless_another_does() {
        let one = json!({"metadata": {"labels": {"a": "1", "b": "1"}}, "data": {"x": "1"}});
        let live = apply(None, &one, &writer("one"), false).unwrap();
        let two = json!({"metadata": {"labels": {"b": "1"}}});
        let live = apply(Some(&live), &two, &writer("two"), false).unwrap();
        let less = json!({"data": {"x": "1"}});
        let live = apply(Some(&live), &less, &writer("one"), false).unwrap();
        assert_eq!(live["metadata"]["labels"], json!({"b": "1"}), "b is also two's");
        assert_eq!(live["data"], json!({"x": "1"}));
    }

    #[test]
    fn two_managers_that_disagree_conflict_unless_forced() {
        let live = apply(None, &json!({"data": {"x": "1", "y": "1"}}), &writer("one"), false).unwrap();
        let other = json!({"data": {"x": "2"}});
        let refused = apply(Some(&live), &other, &writer("two"), false).unwrap_err();
        assert_eq!(refused.code, http::StatusCode::CONFLICT);
        assert_eq!(refused.message, "Apply failed with 1 conflict: conflicts with \"one (Apply)\": .data.x");
        assert_eq!(refused.details["causes"][0]["field"], ".data.x");

        let live = apply(Some(&live), &other, &writer("two"), true).unwrap();
        assert_eq!(live["data"], json!({"x": "2", "y": "1"}));
        let found = owners(&live);
        assert!(found[0].1.contains("f:y") && !found[0].1.contains("f:x"), "{found:?}");
        assert!(apply(Some(&live), &json!({"data": {"y": "1"}}), &writer("one"), false).is_ok());
    }

    #[test]
    fn agreeing_is_sharing() {
        let same = json!({"data": {"x": "1"}});
        let live = apply(None, &same, &writer("one"), false).unwrap();
        let live = apply(Some(&live), &same, &writer("two"), false).unwrap();
        assert_eq!(owners(&live).len(), 2);
        let live = apply(Some(&live), &json!({}), &writer("one"), false).unwrap();
        assert_eq!(live["data"], json!({"x": "1"}), "still two's");
        let live = apply(Some(&live), &json!({}), &writer("two"), false).unwrap();
        assert!(live.get("data").is_none_or(|d| d == &json!({})), "{live}");
    }

    #[test]
    fn an_update_takes_over_what_it_changes() {
        let live = apply(None, &json!({"data": {"x": "1", "y": "1"}}), &writer("one"), false).unwrap();
        let mut after = live.clone();
        after["data"]["x"] = json!("9");
        record_update(Some(&live), &mut after, &writer("kubectl"));
        let refused =
            apply(Some(&after), &json!({"data": {"x": "1", "y": "1"}}), &writer("one"), false).unwrap_err();
        assert_eq!(
            refused.message,
            "Apply failed with 1 conflict: conflicts with \"kubectl (Update)\": .data.x"
        );
        assert!(apply(Some(&after), &json!({"data": {"y": "2"}}), &writer("one"), false).is_ok());
    }

    #[test]
    fn elements_of_keyed_lists_are_owned_one_by_one() {
        let container =
            |name: &str, image: &str| json!({"spec": {"containers": [{"name": name, "image": image}]}});
        let live = apply(None, &container("a", "1"), &writer("one"), false).unwrap();
        let live = apply(Some(&live), &container("b", "1"), &writer("two"), false).unwrap();
        assert_eq!(live["spec"]["containers"].as_array().unwrap().len(), 2);
        let live = apply(Some(&live), &json!({"spec": {}}), &writer("one"), false).unwrap();
        assert_eq!(live["spec"]["containers"], json!([{"name": "b", "image": "1"}]));
        let refused = apply(Some(&live), &container("b", "2"), &writer("one"), false).unwrap_err();
        assert!(refused.message.ends_with(".spec.containers[name=\"b\"].image"), "{}", refused.message);
    }
}
