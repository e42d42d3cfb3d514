//! From documents to Kubernetes objects, and from an object to the pod it makes.

use super::packed::{Item, Packed};
use super::{Document, Origin};
use gpu_migrate_model::annotation::is_of_choice;
use gpu_migrate_model::lifecycle::is_terminal_phase;
use gpu_migrate_model::names::GROUP;
use gpu_migrate_model::text::and_more;
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::fmt;
use thiserror::Error;

/// One Kubernetes object with its identity.
#[derive(Debug, Clone)]
pub struct Manifest {
    pub origin: Origin,
    pub api_version: String,
    pub kind: String,
    /// `metadata.namespace`, where it is given.
    pub namespace: Option<String>,
    /// `metadata.name`, or `metadata.generateName` with a `*` behind it.
    pub name: String,
    pub value: Value,
    /// How many more there are that differ in their names alone: pods of one controller.
    pub more: usize,
}

/// How an object makes pods: where in it the pod stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodForm {
    Pod,
    /// The object holds a pod template under this JSON pointer.
    Template(&'static str),
}

impl PodForm {
    /// The JSON pointer to the pod (its `metadata` and `spec`) in the object; empty for a pod.
    #[must_use]
    pub fn pointer(self) -> &'static str {
        match self {
            Self::Pod => "",
            Self::Template(pointer) => pointer,
        }
    }
}

/// A document that is not an object kubectl would take.
#[derive(Debug, Error)]
#[error("{origin}: {field}: {found}; expected {expected}{}{remedy}", if remedy.is_empty() { "" } else { ". " })]
pub struct ManifestError {
    pub origin: Origin,
    pub field: String,
    pub found: String,
    pub expected: &'static str,
    /// What to do, or empty.
    pub remedy: &'static str,
}

impl Manifest {
    /// The form of the pods that objects of this kind make, `None` for kinds that make none.
    #[must_use]
    pub fn pod_form(&self) -> Option<PodForm> {
        const TEMPLATE: PodForm = PodForm::Template("/spec/template");
        let group = self.api_version.rsplit_once('/').map_or("", |(group, _)| group);
        match (group, self.kind.as_str()) {
            ("", "Pod") => Some(PodForm::Pod),
            (
                "" | "apps" | "extensions",
                "ReplicationController" | "ReplicaSet" | "Deployment" | "DaemonSet" | "StatefulSet",
            ) => Some(TEMPLATE),
            ("batch", "Job") => Some(TEMPLATE),
            ("batch", "CronJob") => Some(PodForm::Template("/spec/jobTemplate/spec/template")),
            ("", "PodTemplate") => Some(PodForm::Template("/template")),
            _ => None,
        }
    }
}

impl fmt::Display for Manifest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.namespace {
            Some(namespace) => write!(f, "{} {namespace}/{}", self.kind, self.name)?,
            None => write!(f, "{} {}", self.kind, self.name)?,
        }
        f.write_str(&and_more(self.more))
    }
}

/// Turns documents into objects; Lists are taken apart, also Lists within Lists.
#[must_use]
pub fn expand(documents: Vec<Document>) -> (Vec<Manifest>, Vec<ManifestError>) {
    let (mut found, mut errors) = (Vec::new(), Vec::new());
    for document in documents {
        expand_one(document, &mut found, &mut errors);
    }
    (found, errors)
}

/// The same for `plan`. Pods that their controllers made alike are one object.
#[must_use]
pub fn expand_packed(documents: Vec<Document<Packed>>) -> (Vec<Manifest>, Vec<ManifestError>) {
    let (mut found, mut errors): (Vec<Manifest>, _) = (Vec::new(), Vec::new());
    let mut known: HashMap<String, usize> = HashMap::new();
    for Document { origin, value } in documents {
        let items = match value {
            Packed { value, items: Some(items) } if is_list(&value) => items,
            other => {
                expand_one(Document { origin, value: other.whole() }, &mut found, &mut errors);
                continue;
            }
        };
        for (index, item) in items.into_iter().enumerate() {
            let mut origin = origin.clone();
            origin.items.push(index);
            match item {
                Item::Ended => {}
                Item::Object(value) => expand_one(Document { origin, value }, &mut found, &mut errors),
                Item::Pod { name, template } => {
                    if let Some(one) = known.get(&template).and_then(|at| found.get_mut(*at)) {
                        one.more += 1;
                        continue;
                    }
                    let mut value: Value = serde_json::from_str(&template).unwrap_or_default();
                    value["metadata"]["name"] = name.into();
                    let at = found.len();
                    expand_one(Document { origin, value }, &mut found, &mut errors);
                    if found.len() > at {
                        known.insert(template, at);
                    }
                }
            }
        }
    }
    (found, errors)
}

/// Whether an API server gave the object: it was created, and has not only been written.
pub(crate) fn is_object_of_cluster(object: &Value) -> bool {
    object.pointer("/metadata/uid").is_some_and(Value::is_string)
}

/// Leaves out what a controller that is among the objects made: it is planned with its controller. And of what comes from a cluster, what
/// has ended and what the cluster added.
pub(crate) fn without_controlled(manifests: Vec<Manifest>) -> Vec<Manifest> {
    let key = |namespace: Option<&str>, kind: &str, name: &str| {
        (namespace.unwrap_or_default().to_owned(), kind.to_owned(), name.to_owned())
    };
    let there = manifests.iter().map(|one| key(one.namespace.as_deref(), &one.kind, &one.name));
    let there = there.collect::<HashSet<_>>();
    let is_wanted = |one: &Manifest| {
        let owners = one.value.pointer("/metadata/ownerReferences").and_then(Value::as_array);
        let by = |owner: &Value| {
            let (Some(kind), Some(name)) = (owner["kind"].as_str(), owner["name"].as_str()) else {
                return false;
            };
            owner["controller"] == true && there.contains(&key(one.namespace.as_deref(), kind, name))
        };
        !owners.into_iter().flatten().any(by) && !has_ended(&one.kind, &one.value)
    };
    let mut kept = manifests;
    kept.retain(is_wanted);
    let ours = |one: &Manifest| one.api_version.split_once('/').is_some_and(|(group, _)| group == GROUP);
    for one in kept.iter_mut().filter(|one| is_object_of_cluster(&one.value) && !ours(one)) {
        as_written(&one.kind, &mut one.value);
    }
    kept
}

/// Whether nothing comes of it any more.
pub(crate) fn has_ended(kind: &str, object: &Value) -> bool {
    match kind {
        "Pod" => object.pointer("/status/phase").and_then(Value::as_str).is_some_and(is_terminal_phase),
        "Job" => object.pointer("/status/completionTime").is_some(),
        _ => false,
    }
}

/// An object of a cluster as its owner wrote it: without what the cluster added.
pub(crate) fn as_written(kind: &str, object: &mut Value) {
    if let Some(top) = object.as_object_mut() {
        top.remove("status");
    }
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("managedFields");
    }
    if let Some(annotations) = object.pointer_mut("/metadata/annotations").and_then(Value::as_object_mut) {
        annotations
            .retain(|key, _| key != "kubectl.kubernetes.io/last-applied-configuration" && !is_of_choice(key));
    }
    // A bare pod as it would be re-created: the webhook skips a pod with a node.
    if kind == "Pod"
        && let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut)
    {
        spec.remove("nodeName");
    }
}

fn is_list(value: &Value) -> bool {
    value.get("kind").and_then(Value::as_str).is_some_and(|kind| kind.ends_with("List"))
}

fn expand_one(document: Document, found: &mut Vec<Manifest>, errors: &mut Vec<ManifestError>) {
    let Document { origin, value } = document;
    if value.is_null() {
        return;
    }
    let is_list = is_list(&value);
    match value {
        Value::Object(mut map) if is_list && map.contains_key("items") => match map.remove("items") {
            Some(Value::Array(items)) => {
                for (index, value) in items.into_iter().enumerate() {
                    let mut origin = origin.clone();
                    origin.items.push(index);
                    expand_one(Document { origin, value }, found, errors);
                }
            }
            // `items: null` is what an empty list of a Go client looks like.
            Some(Value::Null) | None => {}
            Some(other) => errors.push(wrong(origin, "items", &other, "a list of objects", "")),
        },
        other => match identify(origin, other) {
            Ok(manifest) => found.push(manifest),
            Err(error) => errors.push(*error),
        },
    }
}

fn identify(origin: Origin, value: Value) -> Result<Manifest, Box<ManifestError>> {
    const KUSTOMIZE: &str =
        "A kustomization is not an object: run `kubectl kustomize DIR | gpu-migrate plan -f -`";
    const OBJECT: &str = "Only Kubernetes manifests can be planned; leave other YAML out of the given paths";
    if !value.is_object() {
        return Err(Box::new(wrong(origin, "document", &value, "a Kubernetes object", OBJECT)));
    }
    let is_kustomization = value.get("resources").is_some() && value.get("spec").is_none();
    let remedy = if is_kustomization { KUSTOMIZE } else { OBJECT };
    let text = |field: &'static str, expected| match value.get(field) {
        Some(Value::String(text)) if !text.is_empty() => Ok(text.clone()),
        other => Err(Box::new(wrong(origin.clone(), field, other.unwrap_or(&Value::Null), expected, remedy))),
    };
    let kind = text("kind", "the kind of a Kubernetes object, such as Deployment")?;
    let api_version = text("apiVersion", "the API version of the object, such as apps/v1")?;
    let (namespace, name) = names(&origin, &value)?;
    Ok(Manifest { origin, api_version, kind, namespace, name, value, more: 0 })
}

fn names(origin: &Origin, value: &Value) -> Result<(Option<String>, String), Box<ManifestError>> {
    let metadata = value.get("metadata").unwrap_or(&Value::Null);
    if !(metadata.is_object() || metadata.is_null()) {
        return Err(Box::new(wrong(origin.clone(), "metadata", metadata, "an object", "")));
    }
    let text = |field: &str| match metadata.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) if text.is_empty() => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(other) => Err(Box::new(wrong(
            origin.clone(),
            &format!("metadata.{field}"),
            other,
            "a string",
            "Put it in quotes",
        ))),
    };
    let name = text("name")?.or(text("generateName")?.map(|prefix| prefix + "*"));
    Ok((text("namespace")?, name.unwrap_or_else(|| "(no name)".to_owned())))
}

fn wrong(
    origin: Origin,
    field: &str,
    value: &Value,
    expected: &'static str,
    remedy: &'static str,
) -> ManifestError {
    let found = match value {
        Value::Null => "is missing".to_owned(),
        Value::Object(_) => "is a mapping".to_owned(),
        Value::Array(_) => "is a list".to_owned(),
        scalar => format!("is {scalar}"),
    };
    ManifestError { origin, field: field.to_owned(), found, expected, remedy }
}

#[cfg(test)]
mod tests {
    use super::super::{Input, Source, documents, packed};
    use super::*;
    use serde_json::json;

    fn read(text: &str) -> (Vec<Manifest>, Vec<ManifestError>) {
        let (found, errors) = documents(&Input { source: Source::Stdin, text: text.to_owned() });
        assert!(errors.is_empty(), "{errors:?}");
        expand(found)
    }

    #[test]
    fn lists_are_taken_apart_and_keep_their_place() {
        let (found, errors) = read(
            "{kind: List, apiVersion: v1, items: [\
             {kind: Pod, apiVersion: v1, metadata: {name: a, namespace: ns}}, \
             {kind: PodList, apiVersion: v1, items: [{kind: Pod, apiVersion: v1, metadata: {generateName: b-}}]}]}",
        );
        assert!(errors.is_empty(), "{errors:?}");
        assert_eq!(found[0].to_string(), "Pod ns/a");
        assert_eq!(found[1].to_string(), "Pod b-*");
        assert_eq!(found[1].origin.to_string(), "stdin:1 (document 1, items[1], items[0])");
    }

    /// What `kubectl get -o json` says of a Deployment's pods and of a StatefulSet's, whose own object is not in the dump.
    #[test]
    fn pods_of_a_dump_are_planned_with_their_controller_or_as_one() {
        let object = |kind: &str, name: &str, owner: Option<(&str, &str)>| {
            let api = if kind == "Pod" { "v1" } else { "apps/v1" };
            let owners = owner.map(|(kind, name)| json!({"kind": kind, "name": name, "controller": true}));
            json!({"apiVersion": api, "kind": kind, "metadata": {"name": name, "namespace": "n", "uid": name,
                "ownerReferences": owners.into_iter().collect::<Vec<_>>(), "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}"}},
                "spec": {"nodeName": name}, "status": {"phase": "Running"}})
        };
        let mut pods = Vec::new();
        pods.push(object("Deployment", "web", None));
        pods.push(object("ReplicaSet", "web-1", Some(("Deployment", "web"))));
        pods.extend(["a", "b"].map(|name| object("Pod", name, Some(("ReplicaSet", "web-1")))));
        pods.extend(["c", "d", "e"].map(|name| object("Pod", name, Some(("StatefulSet", "db")))));
        pods.push(object("Pod", "bare", None));
        let text = json!({"apiVersion": "v1", "kind": "List", "items": pods}).to_string();
        let (found, errors) = packed(&Input { source: Source::Stdin, text });
        assert!(errors.is_empty(), "{errors:?}");
        let (found, errors) = expand_packed(found);
        assert!(errors.is_empty(), "{errors:?}");
        let kept = without_controlled(found);
        let names = kept.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(names, ["Deployment n/web", "Pod n/c and 2 more", "Pod n/bare"]);
        assert_eq!(kept[1].origin.items, [4]);
        assert!(kept.iter().all(|one| one.value.get("status").is_none()));
        assert!(kept[1..].iter().all(|pod| pod.value.pointer("/spec/nodeName").is_none()));
        assert_eq!(kept[2].value["metadata"]["annotations"], json!({}));
    }

    #[test]
    fn every_kind_that_makes_pods_is_known_by_group_and_kind() {
        let form = |api: &str, kind: &str| {
            let (found, _) = read(&format!("{{apiVersion: {api}, kind: {kind}, metadata: {{name: x}}}}"));
            found[0].pod_form().map(PodForm::pointer)
        };
        assert_eq!(form("v1", "Pod"), Some(""));
        for kind in ["Deployment", "StatefulSet", "DaemonSet", "ReplicaSet"] {
            assert_eq!(form("apps/v1", kind), Some("/spec/template"), "{kind}");
        }
        assert_eq!(form("v1", "ReplicationController"), Some("/spec/template"));
        assert_eq!(form("batch/v1", "Job"), Some("/spec/template"));
        assert_eq!(form("batch/v1", "CronJob"), Some("/spec/jobTemplate/spec/template"));
        assert_eq!(form("example.com/v1", "Deployment"), None, "somebody else's Deployment");
        assert_eq!(form("v1", "Service"), None);
    }

    #[test]
    fn what_is_no_object_says_so() {
        for (text, part) in [
            ("[1, 2]", "document: is a list"),
            ("just text", "document: is \"just text\""),
            ("a: 1", "kind: is missing"),
            ("kind: Pod", "apiVersion: is missing"),
            ("{kind: 7, apiVersion: v1}", "kind: is 7"),
            ("{kind: Pod, apiVersion: v1, metadata: [x]}", "metadata: is a list"),
            (
                "{kind: Pod, apiVersion: v1, metadata: {name: 12}}",
                "metadata.name: is 12; expected a string. Put it in quotes",
            ),
            ("{kind: List, apiVersion: v1, items: 3}", "items: is 3; expected a list of objects"),
            ("{resources: [a.yaml]}", "kubectl kustomize"),
        ] {
            let (found, errors) = read(text);
            assert!(found.is_empty(), "{text}");
            assert!(errors[0].to_string().contains(part), "{text}: {}", errors[0]);
        }
        let (found, errors) = read("{kind: List, apiVersion: v1, items: null}");
        assert!(found.is_empty() && errors.is_empty());
    }
}
