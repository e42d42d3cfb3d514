//! The rewrite: a pod and what was decided about it become a JSON patch. Pure.
//!
//! Only the paths that change are in the patch. Maps are added to, never replaced; lists are edited entry by entry. What
//! was there before is recorded in one annotation ([`crate::original`]).

use std::borrow::Cow;
use std::collections::BTreeMap;

use gpu_migrate_model::annotation::is_of_choice;
use gpu_migrate_model::names;
use gpu_migrate_model::view::json::{Amount, Map, Text};
use gpu_migrate_model::view::{ExtendedResources, Place};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::convert::Conversions;
use crate::original::{ContainerOriginal, Former, ListEdit, Original};
use crate::policy::{Constant, Policy, Scheduling};
use crate::text::{PatchText, array, object, string};
use crate::view::{ContainerView, EnvEntries, PodView};

/// Collects the operations of one patch and the record that undoes them.
pub(crate) struct PatchBuilder<'p, 'a> {
    pod: &'p PodView<'a>,
    policy: &'p Policy,
    patch: PatchText,
    record: Original<'p>,
    /// The record of an earlier rewrite of this same pod.
    former: Option<Original<'p>>,
    pub(crate) warnings: Vec<String>,
}

const VISIBLE: &str = names::NVIDIA_VISIBLE_DEVICES;
const VOID: &str = "void";

impl<'p, 'a> PatchBuilder<'p, 'a> {
    pub(crate) fn new(pod: &'p PodView<'a>, policy: &'p Policy) -> Self {
        // A pod that comes a second time (reinvocation) keeps the record of the first time. One that asks for whole
        // cards again was copied from a rewritten pod: its record is about another pod.
        let record = Original { policy: policy.reference_text.as_str().into(), ..Original::default() };
        Self { pod, policy, patch: PatchText::default(), record, former: None, warnings: Vec::new() }
    }

    /// Goes on from the record of an earlier rewrite of this same pod.
    pub(crate) fn continue_from(&mut self, former: Original<'p>) {
        self.former = Some(former);
    }

    /// Exchanges the resources of a container and takes away a choice of cards that would override the plugin's; or,
    /// where `guard` says so, hides the cards from it.
    pub(crate) fn container(
        &mut self,
        place: Place,
        container: &'p ContainerView<'a>,
        to: &Conversions<'p>,
        guard: bool,
    ) {
        let index = place.index.to_string();
        let at = [place.list(), index.as_str()];
        let env = ["spec", at[0], at[1], "env"];
        let mut record = ContainerOriginal::default();
        if let Some(resources) = &container.resources {
            let mut exchange = |field, map| exchange(&mut self.patch, (at, field, map), to, self.policy);
            record.limits = exchange("limits", &resources.limits);
            record.requests = exchange("requests", &resources.requests);
        }
        let name = container.name.as_str();
        if to.converts() {
            let found = EnvEntries::of(container, VISIBLE).entries;
            if !found.is_empty() {
                self.warn(format!(
                    "container {name}: {VISIBLE} was removed: the device plugin chooses the card"
                ));
            }
            remove_entries(&mut self.patch, &env, &found);
            record.env.removed = found;
        } else if guard {
            let found = EnvEntries::of(container, VISIBLE);
            let value = |entry: &'_ Value| entry.get("value").and_then(Value::as_str).map(str::to_owned);
            let hidden = |entry: &Value| matches!(value(entry).as_deref(), Some(VOID | "none" | ""));
            if found.entries.is_empty() || !found.entries.iter().all(|(_, entry)| hidden(entry)) {
                if !found.entries.is_empty() {
                    self.warn(format!("container {name}: {VISIBLE} was set to void: it asks for no card"));
                }
                let entry = serde_json::json!({"name": VISIBLE, "value": VOID});
                remove_entries(&mut self.patch, &env, &found.entries);
                append(&mut self.patch, &env, found.has_list, &[&entry.to_string()]);
                let added = vec![Cow::Owned(entry)];
                record.env = ListEdit { created: !found.has_list, removed: found.entries, added };
            }
        }
        if !record.is_empty() {
            self.record.containers.push(name, record);
        }
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
        if *gate_gangs && self.pod.metadata.annotation(names::GANG_NAME).is_some() {
            self.add_gate();
        }
    }

    fn set_field(&mut self, field: &'static str, former: Option<&'p str>, wanted: &str) {
        if former == Some(wanted) {
            return;
        }
        self.record.spec.push(field, former.map(Amount::from));
        self.patch.add(&["spec", field], |out| string(out, wanted));
    }

    fn edit_selector(&mut self, remove_keys: &'p [String], set: &'p BTreeMap<String, String>) {
        let pod = self.pod;
        let current = pod.spec.node_selector.as_ref();
        let former = |key: &str| current.and_then(|map| map.get(key)).map(Text::as_str);
        let record = &mut self.record.node_selector;
        for key in remove_keys.iter().filter(|key| !set.contains_key(*key)) {
            if let Some(value) = former(key) {
                record.keys.push(key.as_str(), Some(value.into()));
                self.patch.remove(&["spec", "nodeSelector", key]);
            }
        }
        let changed = |(key, value): &(&String, &String)| former(key) != Some(value.as_str());
        let mut sets = set.iter().filter(changed).peekable();
        let create = current.is_none() && sets.peek().is_some();
        for (key, _) in sets.clone() {
            record.keys.push(key.as_str(), former(key).map(Amount::from));
        }
        record.created = create;
        if create {
            self.patch.add(&["spec", "nodeSelector"], |out| object(out, sets));
        } else {
            for (key, value) in sets {
                self.patch.add(&["spec", "nodeSelector", key], |out| string(out, value));
            }
        }
    }

    fn edit_tolerations(&mut self, remove_keys: &[String], wanted: &'p [Constant]) {
        const PATH: [&str; 2] = ["spec", "tolerations"];
        if remove_keys.is_empty() && wanted.is_empty() {
            return;
        }
        let untouched = self.pod.spec.tolerations.is_some_and(|raw| foreign(raw, remove_keys, wanted));
        // What is no list is no pod either: it is not overwritten, the API server will refuse it.
        let Ok(current) = (if untouched { Ok(Some(Vec::new())) } else { list(self.pod.spec.tolerations) })
        else {
            return;
        };
        let exists = current.is_some();
        let current = current.unwrap_or_default();
        let added: Vec<&Constant> = wanted.iter().filter(|entry| !current.contains(entry.value())).collect();
        let keyed = |entry: &Value| {
            let key = entry.get("key").and_then(Value::as_str);
            key.is_some_and(|key| remove_keys.iter().any(|remove| remove == key))
                && !wanted.iter().any(|constant| constant.value() == entry)
        };
        let removed: Vec<_> = current.into_iter().enumerate().filter(|(_, entry)| keyed(entry)).collect();
        remove_entries(&mut self.patch, &PATH, &removed);
        let texts: Vec<&str> = added.iter().map(|entry| entry.text()).collect();
        append(&mut self.patch, &PATH, exists, &texts);
        self.record.tolerations = ListEdit {
            created: !exists && !added.is_empty(),
            removed,
            added: added.into_iter().map(|entry| Cow::Borrowed(entry.value())).collect(),
        };
    }

    fn add_gate(&mut self) {
        if self.pod.is_gated() {
            return;
        }
        let exists = self.pod.spec.scheduling_gates.is_some();
        let gate = serde_json::json!({ "name": names::GANG_GATE });
        append(&mut self.patch, &["spec", "schedulingGates"], exists, &[&gate.to_string()]);
        let added = vec![Cow::Owned(gate)];
        self.record.scheduling_gates = ListEdit { created: !exists, removed: Vec::new(), added };
    }

    /// Removes the card choice of another pod, from which this one was copied.
    pub(crate) fn drop_stale_choice(&mut self) {
        for (key, value) in self.pod.metadata.annotations.iter().flat_map(Map::iter) {
            if is_of_choice(key) {
                self.record.annotations.keys.push(key, Some(value.as_str().into()));
                self.patch.remove(&["metadata", "annotations", key]);
            }
        }
    }

    /// The patch, with the record written into the pod. Empty when nothing changed.
    pub(crate) fn finish(self) -> (PatchText, Vec<String>) {
        let Self { pod, policy: _, mut patch, mut record, former, warnings } = self;
        if patch.is_empty() {
            return (patch, warnings);
        }
        record.annotations.created = pod.metadata.annotations.is_none();
        let created = record.annotations.created;
        let record = match former {
            None => record,
            Some(former) => former.followed_by(record),
        };
        let (text, policy) = (record.to_json(), record.policy.as_str());
        if created {
            let both = [(names::ORIGINAL, text.as_str()), (names::POLICY, policy)];
            patch.add(&["metadata", "annotations"], |out| object(out, both.into_iter()));
        } else {
            patch.add(&["metadata", "annotations", names::ORIGINAL], |out| string(out, &text));
            patch.add(&["metadata", "annotations", names::POLICY], |out| string(out, policy));
        }
        (patch, warnings)
    }

    pub(crate) fn warn(&mut self, text: String) {
        self.warnings.push(text);
    }
}

/// Exchanges the resources in the limits or the requests of a container; returns what they were.
fn exchange<'p>(
    patch: &mut PatchText,
    (at, field, map): ([&str; 2], &str, &'p Map<'_, Amount<'_>, ExtendedResources>),
    to: &Conversions<'p>,
    policy: &'p Policy,
) -> Former<'p> {
    let path = |name| ["spec", at[0], at[1], "resources", field, name];
    let mut former = Former::default();
    for name in &to.replaced {
        let Some(amount) = map.get(name) else { continue };
        former.push(*name, Some(amount.clone()));
        patch.remove(&path(name));
    }
    let dialect = &policy.conversion.dialect;
    let held = !former.is_empty();
    for (name, amount) in [(&dialect.cores, to.cores), (&dialect.memory, to.blocks)] {
        if held && amount > 0 {
            former.push(name.as_str(), map.get(name).cloned());
            patch.add(&path(name), |out| string(out, &amount.to_string()));
        }
    }
    former
}

/// Removes list entries, the last first so that no index moves.
fn remove_entries(patch: &mut PatchText, path: &[&str], entries: &[(usize, Value)]) {
    for (index, _) in entries.iter().rev() {
        let index = index.to_string();
        let mut path = path.to_vec();
        path.push(&index);
        patch.remove(&path);
    }
}

/// Adds entries at the end of a list, which is made where there is none.
fn append(patch: &mut PatchText, path: &[&str], exists: bool, entries: &[&str]) {
    if !exists && !entries.is_empty() {
        return patch.add(path, |out| array(out, entries));
    }
    for entry in entries {
        let mut path = path.to_vec();
        path.push("-");
        patch.add(&path, |out| out.push_str(entry));
    }
}

fn list(raw: Option<&RawValue>) -> Result<Option<Vec<Value>>, serde_json::Error> {
    raw.map(|raw| serde_json::from_str(raw.get())).transpose()
}

/// Whether a list of tolerations certainly has nothing to do with the edits, so that it need not be parsed: most pods
/// only carry the two that the API server adds.
fn foreign(raw: &RawValue, remove_keys: &[String], wanted: &[Constant]) -> bool {
    let text = raw.get();
    let named = |key: &str| key.is_empty() || text.contains(key);
    let key =
        |constant: &Constant| named(constant.value().get("key").and_then(Value::as_str).unwrap_or_default());
    text.starts_with('[')
        && !text.contains('\\')
        && !remove_keys.iter().any(|key| named(key))
        && !wanted.iter().any(key)
}
