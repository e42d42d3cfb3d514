//! The rewrite: a pod and what was decided about it become a JSON patch. Pure.
//!
//! Only the paths that change are in the patch. Maps are added to, never replaced; lists are edited entry by entry. What
//! was there before is recorded in one annotation ([`crate::original`]).

use std::borrow::Cow;
use std::collections::BTreeMap;

use gpu_migrate_model::annotation::is_of_choice;
use gpu_migrate_model::names::{self, Dialect};
use gpu_migrate_model::view::json::{Amount, Map, Text};
use gpu_migrate_model::view::{CountedResources, Place};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::convert::{Conversions, asks, gpu_resources, is_shared, is_shared_anywhere};
use crate::original::{ContainerOriginal, Former, ListEdit, MapEdit, Original};
use crate::policy::{Constant, Scheduling};
use crate::text::{PatchText, array, object, string};
use crate::view::{ContainerView, EnvEntries, PodView, env_from_may_set};

/// Collects the operations of one patch and the record that undoes them.
pub(crate) struct PatchBuilder<'p, 'a> {
    pod: &'p PodView<'a>,
    dialect: &'p Dialect,
    patch: PatchText,
    record: Original<'p>,
    /// The record of an earlier rewrite of this same pod.
    former: Option<Original<'p>>,
    /// What the annotation [`names::REVIEWED`] is to say.
    reviewed: Option<&'static str>,
    /// It goes to the target as it is, and its record says so even where nothing else changes.
    hands_over: bool,
    /// Annotations that a target takes shares from.
    annotations: Vec<(&'static str, String)>,
    pub(crate) warnings: Vec<String>,
}

const VISIBLE: &str = names::NVIDIA_VISIBLE_DEVICES;
const VOID: &str = "void";

impl<'p, 'a> PatchBuilder<'p, 'a> {
    /// `policy` is the reference of the policy that converts; empty where nothing is converted.
    pub(crate) fn new(pod: &'p PodView<'a>, dialect: &'p Dialect, policy: &'p str) -> Self {
        let record = Original { policy: policy.into(), ..Original::default() };
        let (patch, former, reviewed) = (PatchText::default(), None, None);
        let (hands_over, annotations, warnings) = (false, Vec::new(), Vec::new());
        Self { pod, dialect, patch, record, former, reviewed, hands_over, annotations, warnings }
    }

    /// Goes on from the record of an earlier rewrite of this same pod (reinvocation). True where that was a conversion. The
    /// record on a pod that asks for whole cards only was copied from a rewritten pod: it is about another one.
    pub(crate) fn continue_from_record(&mut self, shared: bool) -> bool {
        let text = self.pod.metadata.annotation(names::ORIGINAL);
        let former = text.and_then(|text| serde_json::from_str::<Original<'_>>(text).ok());
        self.former = former.filter(|former| shared || !former.converts());
        self.former.as_ref().is_some_and(Original::converts)
    }

    /// The target takes this pod's whole cards as they are: the pod is recorded as converted all the same.
    pub(crate) fn hand_over(&mut self) {
        self.hands_over = !self.continue_from_record(false) && self.former.is_none();
    }

    /// Exchanges the resources of a container and takes away a choice of cards that would override the plugin's. One that gets
    /// nothing is guarded where `guarded` says so.
    pub(crate) fn convert(
        &mut self,
        place: Place,
        container: &'p ContainerView<'a>,
        to: &'p Conversions<'p>,
        guarded: bool,
    ) {
        let index = place.index.to_string();
        let at = [place.list(), index.as_str()];
        let mut record = ContainerOriginal::default();
        if let Some(resources) = &container.resources {
            let mut exchange = |field, map| exchange(&mut self.patch, (at, field, map), to);
            record.limits = exchange("limits", &resources.limits);
            record.requests = exchange("requests", &resources.requests);
        }
        let pod = self.pod;
        for (key, value) in &to.request.annotations {
            let former = pod.metadata.annotation(key).map(Amount::from);
            self.record.annotations.keys.push(*key, former);
            self.annotations.push((*key, value.clone()));
        }
        if to.converts() {
            record.env = self.show_plugins_choice(place, container);
        } else if guarded {
            record.env = self.guarded_env(place, container);
        }
        self.keep(container, record);
    }

    /// Hides the cards from a container that asks for none; from one that asks it takes away a choice of its own.
    pub(crate) fn guard(&mut self, place: Place, container: &'p ContainerView<'a>) {
        let env = self.guarded_env(place, container);
        self.keep(container, ContainerOriginal { env, ..ContainerOriginal::default() });
    }

    fn guarded_env(&mut self, place: Place, container: &ContainerView<'_>) -> ListEdit<'p> {
        if claims(container) {
            return ListEdit::default();
        }
        let gpus = || gpu_resources(container, self.dialect).iter().any(|resource| asks(container, resource));
        let recorded = self.former.as_ref().and_then(|former| former.containers.get(&container.name));
        let converted = recorded.is_some_and(ContainerOriginal::converts);
        if converted || is_shared(container, self.dialect) || is_shared_anywhere(container) || gpus() {
            // Which cards it gets is known on the node alone: there is no value that could be set here.
            if env_from_may_set(container, VISIBLE) {
                self.warn(format!(
                    "container {}: envFrom could set {VISIBLE} to other cards: give it a prefix",
                    container.name
                ));
            }
            return self.show_plugins_choice(place, container);
        }
        let index = place.index.to_string();
        let path = ["spec", place.list(), index.as_str(), "env"];
        let (edit, warning) = hide_cards(&mut self.patch, &path, container);
        self.warnings.extend(warning);
        edit
    }

    /// Removes the variable that would override what the device plugin sets.
    fn show_plugins_choice(&mut self, place: Place, container: &ContainerView<'_>) -> ListEdit<'p> {
        let removed = EnvEntries::of(container, VISIBLE).entries;
        if !removed.is_empty() {
            self.warn(format!(
                "container {}: {VISIBLE} was removed: the device plugin chooses the card",
                container.name
            ));
        }
        let index = place.index.to_string();
        remove_entries(&mut self.patch, &["spec", place.list(), index.as_str(), "env"], &removed);
        ListEdit { removed, ..ListEdit::default() }
    }

    fn keep(&mut self, container: &'p ContainerView<'a>, record: ContainerOriginal<'p>) {
        if !record.is_empty() {
            self.record.containers.push(container.name.as_str(), record);
        }
    }

    /// Says on the pod that it was reviewed, with this outcome.
    pub(crate) fn mark_reviewed(&mut self, outcome: &'static str) {
        self.reviewed = Some(outcome);
    }

    /// Sends the pod to the scheduler and the nodes of shared pods.
    pub(crate) fn schedule(&mut self, scheduling: &'p Scheduling) {
        let Scheduling {
            scheduler_name,
            replace_schedulers: _,
            runtime_class_name,
            selector_remove,
            selector_set,
            toleration_remove,
            toleration_add,
            labels_set,
            gate_gangs,
        } = scheduling;
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
        self.set_labels(labels_set);
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

    fn set_labels(&mut self, wanted: &'static [(&'static str, &'static str)]) {
        let pod = self.pod;
        let former = |key: &str| pod.metadata.label(key);
        let changed: Vec<_> =
            wanted.iter().copied().filter(|(key, value)| former(key) != Some(value)).collect();
        let created = pod.metadata.labels.is_none() && !changed.is_empty();
        let keys = changed.iter().map(|(key, _)| (*key, former(key).map(Amount::from))).collect();
        self.record.labels = MapEdit { keys, created };
        if created {
            return self.patch.add(&["metadata", "labels"], |out| object(out, changed.into_iter()));
        }
        for (key, value) in changed {
            self.patch.add(&["metadata", "labels", key], |out| string(out, value));
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
        let Self {
            pod,
            dialect: _,
            mut patch,
            mut record,
            former,
            reviewed,
            hands_over,
            annotations: of_shares,
            warnings,
        } = self;
        let created = pod.metadata.annotations.is_none();
        let mut annotations: Vec<_> = of_shares.iter().map(|(key, value)| (*key, value.as_str())).collect();
        let (text, policy);
        if !patch.is_empty() || hands_over {
            record.annotations.created = created;
            record = match former {
                None => record,
                Some(former) => former.followed_by(record),
            };
            (text, policy) = (record.to_json(), record.policy);
            annotations.push((names::ORIGINAL, text.as_str()));
            if !policy.is_empty() {
                annotations.push((names::POLICY, policy.as_str()));
            }
        }
        let known = pod.metadata.annotation(names::REVIEWED);
        annotations
            .extend(reviewed.filter(|value| known != Some(value)).map(|value| (names::REVIEWED, value)));
        if annotations.is_empty() {
            return (patch, warnings);
        }
        if created {
            patch.add(&["metadata", "annotations"], |out| object(out, annotations.into_iter()));
        } else {
            for (key, value) in annotations {
                patch.add(&["metadata", "annotations", key], |out| string(out, value));
            }
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
    (at, field, map): ([&str; 2], &str, &'p Map<'_, Amount<'_>, CountedResources>),
    to: &'p Conversions<'p>,
) -> Former<'p> {
    let path = |name| ["spec", at[0], at[1], "resources", field, name];
    let mut former = Former::default();
    let requested = &to.request.resources;
    let replaced = || to.replaced.iter().filter_map(|name| Some((*name, map.get(name)?)));
    for (name, amount) in replaced().filter(|(name, _)| requested.iter().all(|(wanted, _)| wanted != name)) {
        former.push(name, Some(amount.clone()));
        patch.remove(&path(name));
    }
    let held = replaced().next().is_some();
    for (name, amount) in requested.iter().filter(|_| held) {
        let (before, amount) = (map.get(name), amount.to_string());
        // HAMi counts cards by the name of whole ones.
        if before.is_none_or(|before| before.as_str() != amount) {
            former.push(name.as_str(), before.cloned());
            patch.add(&path(name), |out| string(out, &amount));
        }
    }
    former
}

/// Sets the variable so that the container sees no card; returns what changed, and a warning where a choice was replaced. It wins
/// over `envFrom` and over what is in the image.
pub(crate) fn hide_cards(
    patch: &mut PatchText,
    path: &[&str],
    container: &ContainerView<'_>,
) -> (ListEdit<'static>, Option<String>) {
    let found = EnvEntries::of(container, VISIBLE);
    let value = |entry: &'_ Value| entry.get("value").and_then(Value::as_str).map(str::to_owned);
    let hidden = |entry: &Value| matches!(value(entry).as_deref(), Some(VOID | "none" | ""));
    if !found.entries.is_empty() && found.entries.iter().all(|(_, entry)| hidden(entry)) {
        return (ListEdit::default(), None);
    }
    let warning = (!found.entries.is_empty())
        .then(|| format!("container {}: {VISIBLE} was set to void: it asks for no card", container.name));
    let entry = serde_json::json!({"name": VISIBLE, "value": VOID});
    remove_entries(patch, path, &found.entries);
    append(patch, path, found.has_list, &[&entry.to_string()]);
    let added = vec![Cow::Owned(entry)];
    (ListEdit { created: !found.has_list, removed: found.entries, added }, warning)
}

/// Devices that come through dynamic resource allocation.
fn claims(container: &ContainerView<'_>) -> bool {
    let resources = container.resources.as_ref();
    resources.and_then(|resources| resources.claims.as_ref()).is_some_and(|claims| !claims.is_empty())
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
