//! The rewrite: a pod and what was decided about it become a JSON patch. Pure.
//!
//! Only the paths that change are in the patch. Maps are added to, never replaced; lists are edited entry by entry. What
//! was there before is recorded in one annotation ([`crate::original`]).

use gpu_migrate_model::annotation::is_of_choice;
use gpu_migrate_model::names;
use json_patch::{AddOperation, Patch, PatchOperation, RemoveOperation};
use jsonptr::PointerBuf;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::convert::Conversions;
use crate::original::{ContainerOriginal, ListEdit, Original};
use crate::policy::{Policy, Scheduling};
use crate::view::{Amount, ContainerView, Pairs, Place, PodView, Text};

/// Collects the operations of one patch and the record that undoes them.
pub(crate) struct Edits<'p, 'a> {
    pod: &'p PodView<'a>,
    policy: &'p Policy,
    operations: Vec<PatchOperation>,
    original: Original,
    pub(crate) warnings: Vec<String>,
}

const VISIBLE: &str = names::NVIDIA_VISIBLE_DEVICES;
const VOID: &str = "void";

impl<'p, 'a> Edits<'p, 'a> {
    pub(crate) fn new(pod: &'p PodView<'a>, policy: &'p Policy) -> Self {
        // A pod that comes a second time (reinvocation) keeps the record of the first time. One that asks for whole
        // cards again was copied from a rewritten pod: its record is about another pod.
        let original = Original { policy: policy.reference_text.clone(), ..Original::default() };
        Self { pod, policy, operations: Vec::with_capacity(16), original, warnings: Vec::new() }
    }

    /// Goes on from the record of an earlier rewrite of this same pod.
    pub(crate) fn continue_from(&mut self, original: Original) {
        self.original = original;
    }

    /// Exchanges the resources of a container, and takes away a choice of cards that would override the plugin's.
    pub(crate) fn convert(&mut self, place: Place, container: &ContainerView<'_>, to: &Conversions) {
        let dialect = &self.policy.conversion.dialect;
        let gained = [(&dialect.cores, to.cores), (&dialect.memory, to.blocks)];
        let mut record = ContainerOriginal::default();
        let resources = container.resources.as_ref();
        let maps = [
            ("limits", resources.and_then(|r| r.limits.as_ref()), &mut record.limits),
            ("requests", resources.and_then(|r| r.requests.as_ref()), &mut record.requests),
        ];
        for (field, map, former) in maps {
            let Some(map) = map else { continue };
            let mut held = false;
            for name in &to.replaced {
                let Some(amount) = map.get(name) else { continue };
                held = true;
                former.insert(name.clone(), amount.to_value());
                self.operations.push(remove(at(place, &["resources", field, name])));
            }
            for (name, amount) in gained {
                if held && amount > 0 {
                    former.insert(name.clone(), map.get(name).map_or(Value::Null, Amount::to_value));
                    self.operations
                        .push(add(at(place, &["resources", field, name]), amount.to_string().into()));
                }
            }
        }
        if to.converts() {
            let found = container.env_entries(VISIBLE).entries;
            if !found.is_empty() {
                self.warn(format!(
                    "container {}: {VISIBLE} was removed: the device plugin chooses the card",
                    container.name.as_str()
                ));
            }
            record.env.removed = self.remove_entries(|index| at(place, &["env", index]), found);
        }
        self.record(container, record);
    }

    /// Hides the cards from a container that asks for none.
    pub(crate) fn guard(&mut self, place: Place, container: &ContainerView<'_>) {
        let found = container.env_entries(VISIBLE);
        let value = |entry: &Value| entry.get("value").and_then(Value::as_str).map(str::to_owned);
        let hidden = |entry: &Value| matches!(value(entry).as_deref(), Some(VOID | "none" | ""));
        if !found.entries.is_empty() && found.entries.iter().all(|(_, entry)| hidden(entry)) {
            return;
        }
        if !found.entries.is_empty() {
            self.warn(format!(
                "container {}: {VISIBLE} was set to void: it asks for no card",
                container.name.as_str()
            ));
        }
        let entry = json!({ "name": VISIBLE, "value": VOID });
        let removed = self.remove_entries(|index| at(place, &["env", index]), found.entries);
        let operation = if found.has_list {
            add(at(place, &["env", "-"]), entry.clone())
        } else {
            add(at(place, &["env"]), json!([entry]))
        };
        self.operations.push(operation);
        let env = ListEdit { created: !found.has_list, removed, added: vec![entry] };
        self.record(container, ContainerOriginal { env, ..ContainerOriginal::default() });
    }

    /// Sends the pod to the scheduler and the nodes of shared pods.
    pub(crate) fn schedule(&mut self) {
        let Scheduling {
            scheduler_name,
            runtime_class_name,
            selector_remove,
            selector_set,
            toleration_remove,
            toleration_add,
            gate_gangs,
        } = &self.policy.scheduling;
        let spec = &self.pod.spec;
        if let Some(wanted) = scheduler_name {
            let former = spec.scheduler_name.as_ref().map(Text::as_str);
            if let Some(other) = former.filter(|name| !["", "default-scheduler", wanted].contains(name)) {
                self.warn(format!("schedulerName {other} was replaced by {wanted}"));
            }
            self.set_field("schedulerName", former, wanted);
        }
        if let Some(wanted) = runtime_class_name {
            self.set_field("runtimeClassName", spec.runtime_class_name.as_ref().map(Text::as_str), wanted);
        }
        self.edit_selector(selector_remove, selector_set);
        self.edit_tolerations(toleration_remove, toleration_add);
        if *gate_gangs && self.pod.annotation(names::GANG_NAME).is_some() {
            self.add_gate();
        }
    }

    fn set_field(&mut self, field: &str, former: Option<&str>, wanted: &str) {
        if former == Some(wanted) {
            return;
        }
        self.original.spec.insert(field.to_owned(), former.map_or(Value::Null, Into::into));
        self.operations.push(add(&["spec", field], wanted.into()));
    }

    fn edit_selector(&mut self, remove_keys: &[String], set: &std::collections::BTreeMap<String, String>) {
        let pod = self.pod;
        let current = pod.spec.node_selector.as_ref();
        let former = |key: &str| current.and_then(|map| map.get(key)).map(Text::as_str);
        let changed = |(key, value): &(&String, &String)| former(key) != Some(value.as_str());
        let sets: Vec<_> = set.iter().filter(changed).collect();
        for key in remove_keys.iter().filter(|key| !set.contains_key(*key)) {
            if let Some(value) = former(key) {
                self.original.node_selector.keys.insert(key.clone(), value.into());
                self.operations.push(remove(&["spec", "nodeSelector", key]));
            }
        }
        if sets.is_empty() {
            return;
        }
        for (key, _) in &sets {
            let value = former(key).map_or(Value::Null, Into::into);
            self.original.node_selector.keys.insert((*key).clone(), value);
        }
        if current.is_none() {
            self.original.node_selector.created = true;
            let map: Map<String, Value> =
                sets.iter().map(|(k, v)| ((*k).clone(), v.as_str().into())).collect();
            self.operations.push(add(&["spec", "nodeSelector"], map.into()));
        } else {
            for (key, value) in sets {
                self.operations.push(add(&["spec", "nodeSelector", key], value.as_str().into()));
            }
        }
    }

    fn edit_tolerations(&mut self, remove_keys: &[String], wanted: &[Value]) {
        if remove_keys.is_empty() && wanted.is_empty() {
            return;
        }
        if self.pod.spec.tolerations.is_some_and(|raw| foreign(raw, remove_keys, wanted)) {
            let added = wanted.iter().map(|entry| add(&["spec", "tolerations", "-"], entry.clone()));
            self.operations.extend(added);
            self.original.tolerations.added = wanted.to_vec();
            return;
        }
        // What is no list is no pod either: it is not overwritten, the API server will refuse it.
        let Ok(current) = list(self.pod.spec.tolerations) else { return };
        let keyed = |entry: &Value| {
            let key = entry.get("key").and_then(Value::as_str);
            key.is_some_and(|key| remove_keys.iter().any(|remove| remove == key)) && !wanted.contains(entry)
        };
        let entries = current.iter().flatten().cloned().enumerate();
        let removed: Vec<_> = entries.filter(|(_, entry)| keyed(entry)).collect();
        let added: Vec<Value> = wanted
            .iter()
            .filter(|entry| !current.iter().flatten().any(|has| has == *entry))
            .cloned()
            .collect();
        self.original.tolerations.removed =
            self.remove_entries(|index| pointer(["spec", "tolerations", index].into_iter()), removed);
        if current.is_none() && !added.is_empty() {
            self.original.tolerations.created = true;
            self.operations.push(add(&["spec", "tolerations"], added.clone().into()));
        } else {
            for entry in &added {
                self.operations.push(add(&["spec", "tolerations", "-"], entry.clone()));
            }
        }
        self.original.tolerations.added = added;
    }

    fn add_gate(&mut self) {
        let gate = json!({ "name": names::GANG_GATE });
        let Ok(current) = list(self.pod.spec.scheduling_gates) else { return };
        if current.iter().flatten().any(|has| *has == gate) {
            return;
        }
        let created = current.is_none();
        self.operations.push(if created {
            add(&["spec", "schedulingGates"], json!([gate]))
        } else {
            add(&["spec", "schedulingGates", "-"], gate.clone())
        });
        self.original.scheduling_gates = ListEdit { created, removed: Vec::new(), added: vec![gate] };
    }

    /// Removes the card choice of another pod, from which this one was copied.
    pub(crate) fn drop_stale_choice(&mut self) {
        let pod = self.pod;
        for (key, value) in pod.metadata.annotations.iter().flat_map(|Pairs(all)| all) {
            if is_of_choice(key.as_str()) {
                self.original.annotations.keys.insert(key.as_str().to_owned(), value.as_str().into());
                self.operations.push(remove(&["metadata", "annotations", key.as_str()]));
            }
        }
    }

    /// The patch, with the record written into the pod. Empty when nothing changed.
    pub(crate) fn finish(mut self) -> (Patch, Vec<String>) {
        if self.operations.is_empty() {
            return (Patch(Vec::new()), self.warnings);
        }
        let absent = self.pod.metadata.annotations.is_none();
        self.original.annotations.created |= absent;
        let policy = Value::from(self.original.policy.as_str());
        // Serialising strings and maps with string keys cannot fail.
        let record = Value::from(serde_json::to_string(&self.original).unwrap_or_default());
        if absent {
            let annotations = json!({ names::ORIGINAL: record, names::POLICY: policy });
            self.operations.push(add(&["metadata", "annotations"], annotations));
        } else {
            self.operations.push(add(&["metadata", "annotations", names::ORIGINAL], record));
            self.operations.push(add(&["metadata", "annotations", names::POLICY], policy));
        }
        (Patch(self.operations), self.warnings)
    }

    pub(crate) fn warn(&mut self, text: String) {
        self.warnings.push(text);
    }

    /// Removes list entries, the last first so that no index moves; hands them back ascending.
    fn remove_entries(
        &mut self,
        path: impl Fn(&str) -> PointerBuf,
        entries: Vec<(usize, Value)>,
    ) -> Vec<(usize, Value)> {
        for (index, _) in entries.iter().rev() {
            self.operations.push(remove(path(&index.to_string())));
        }
        entries
    }

    fn record(&mut self, container: &ContainerView<'_>, record: ContainerOriginal) {
        let ContainerOriginal { limits, requests, env } = record;
        if limits.is_empty() && requests.is_empty() && env == ListEdit::default() {
            return;
        }
        let slot = self.original.containers.entry(container.name.as_str().to_owned()).or_default();
        slot.limits.extend(limits);
        slot.requests.extend(requests);
        if env != ListEdit::default() {
            slot.env = env;
        }
    }
}

fn list(raw: Option<&RawValue>) -> Result<Option<Vec<Value>>, serde_json::Error> {
    raw.map(|raw| serde_json::from_str(raw.get())).transpose()
}

/// Whether a list of tolerations certainly has nothing to do with the edits, so that it need not be parsed: most pods
/// only carry the two that the API server adds.
fn foreign(raw: &RawValue, remove_keys: &[String], wanted: &[Value]) -> bool {
    let text = raw.get();
    let named = |key: &str| key.is_empty() || text.contains(key);
    let mut keys = wanted.iter().map(|entry| entry.get("key").and_then(Value::as_str).unwrap_or_default());
    text.starts_with('[')
        && !text.contains('\\')
        && !remove_keys.iter().any(|key| named(key))
        && !keys.any(named)
}

/// A path into a container.
fn at(place: Place, rest: &[&str]) -> PointerBuf {
    let index = place.index.to_string();
    let head = ["spec", place.list(), index.as_str()];
    pointer(head.iter().chain(rest).copied())
}

/// RFC 6901, in one allocation: paths are most of a patch.
fn pointer<'t>(tokens: impl Iterator<Item = &'t str> + Clone) -> PointerBuf {
    let mut text = String::with_capacity(96);
    for token in tokens.clone() {
        text.push('/');
        for part in token.split_inclusive(['~', '/']) {
            match part.as_bytes().last() {
                Some(b'~') => text.extend([&part[..part.len() - 1], "~0"]),
                Some(b'/') => text.extend([&part[..part.len() - 1], "~1"]),
                _ => text.push_str(part),
            }
        }
    }
    PointerBuf::parse(text).unwrap_or_else(|_| PointerBuf::from_tokens(tokens))
}

fn add(path: impl IntoPath, value: Value) -> PatchOperation {
    PatchOperation::Add(AddOperation { path: path.into_path(), value })
}

fn remove(path: impl IntoPath) -> PatchOperation {
    PatchOperation::Remove(RemoveOperation { path: path.into_path() })
}

/// A path, made already or as its tokens.
trait IntoPath {
    fn into_path(self) -> PointerBuf;
}

impl IntoPath for PointerBuf {
    fn into_path(self) -> PointerBuf {
        self
    }
}

impl<const N: usize> IntoPath for &[&str; N] {
    fn into_path(self) -> PointerBuf {
        pointer(self.iter().copied())
    }
}
