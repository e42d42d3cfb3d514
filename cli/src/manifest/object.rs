//! From documents to Kubernetes objects, and from an object to the pod it makes.

use super::{Document, Origin};
use serde_json::Value;
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
            Some(namespace) => write!(f, "{} {namespace}/{}", self.kind, self.name),
            None => write!(f, "{} {}", self.kind, self.name),
        }
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

fn expand_one(document: Document, found: &mut Vec<Manifest>, errors: &mut Vec<ManifestError>) {
    let Document { origin, value } = document;
    if value.is_null() {
        return;
    }
    let is_list = value.get("kind").and_then(Value::as_str).is_some_and(|kind| kind.ends_with("List"));
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
    Ok(Manifest { origin, api_version, kind, namespace, name, value })
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
    use super::super::{Input, Source, documents};
    use super::*;

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
