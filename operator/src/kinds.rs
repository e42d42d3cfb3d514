//! Kinds of workloads that are not Kubernetes' own: how the operator converts them, and which cannot be converted. Pure.
//!
//! The owner switches a kind on in the GPUConfig (`spec.workloadKinds`) and grants the operator `list`, `watch` and `patch` on it. The
//! descriptions here are those that only need their name there.

use crate::project::Workload;
use crate::waves::Key;
use gpu_migrate_model::crd::{FieldRule, PodPlace, WorkloadKind};
use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Kinds of Kubernetes that a foreign kind may share its name with.
const BUILT_IN: [&str; 7] = ["Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "CronJob", "Job", "Pod"];

/// How a kind is named in a policy and its status: with its group where Kubernetes has one of that name.
#[must_use]
pub fn display(kind: &str, api_version: &str) -> String {
    let group = api_version.split_once('/').map_or("", |(group, _)| group);
    let own = ["", "apps", "batch"].contains(&group);
    if BUILT_IN.contains(&kind) && !own { format!("{kind}.{group}") } else { kind.to_owned() }
}

/// A kind that the operator restarts.
#[derive(Clone, Debug, PartialEq)]
pub struct Described {
    pub group: String,
    pub kind: String,
    pub spec: WorkloadKind,
}

impl Described {
    /// The kind that an entry of the GPUConfig switches on.
    ///
    /// # Errors
    /// An entry that is neither described nor shipped, or a shipped one that cannot be converted, with the reason.
    pub fn of(entry: &WorkloadKind) -> Result<Self, String> {
        let name = &entry.name;
        let Some((kind, group)) = name.split_once('.') else {
            return Err(format!(
                "spec.workloadKinds: {name:?}: expected Kind.group, such as Rollout.argoproj.io"
            ));
        };
        let spec = if entry.templates.is_empty() {
            let shipped = shipped().into_iter().find(|shipped| shipped.name == *name);
            shipped.ok_or_else(|| match why_not(kind, group) {
                Some(why) => format!("spec.workloadKinds: {name} cannot be converted by the operator: {why}"),
                None => format!(
                    "spec.workloadKinds: {name} is not known; describe it: version, plural, templates, ready"
                ),
            })?
        } else {
            entry.clone()
        };
        Ok(Self { group: group.to_owned(), kind: kind.to_owned(), spec })
    }

    #[must_use]
    pub fn api_version(&self) -> String {
        format!("{}/{}", self.group, self.spec.version)
    }

    /// As a policy names it.
    #[must_use]
    pub fn display(&self) -> String {
        display(&self.kind, &self.api_version())
    }

    /// The places that an object has: others are optional.
    fn places<'a>(&'a self, object: &Value) -> Vec<&'a PodPlace> {
        self.spec.templates.iter().filter(|place| !containers(place, object).is_empty()).collect()
    }

    /// The workload; `None` where none of its templates is in the object.
    #[must_use]
    pub fn workload(&self, object: &Value) -> Option<Workload> {
        let metadata: ObjectMeta = serde_json::from_value(object["metadata"].clone()).ok()?;
        let key = Key {
            kind: self.display(),
            namespace: metadata.namespace.clone()?,
            name: metadata.name.clone()?,
        };
        let places = self.places(object);
        let first = places.first()?;
        let all = places.iter().flat_map(|place| containers(place, object)).collect::<Vec<_>>();
        let template = json!({"metadata": object.pointer(&first.metadata), "spec": {"containers": all}});
        let selector = match &self.spec.name_label {
            Some(label) => LabelSelector {
                match_labels: Some(BTreeMap::from([(label.clone(), key.name.clone())])),
                ..LabelSelector::default()
            },
            None => serde_json::from_value(object.pointer("/spec/selector").cloned().unwrap_or_default())
                .unwrap_or_default(),
        };
        let by_hand = self.spec.manual.iter().find(|rule| holds(rule, object));
        let by_hand =
            by_hand.map(|rule| format!("{} is {}", words(&rule.path), text(object, &rule.path, "")));
        let replicas = text(object, "/spec/replicas", "1").parse().unwrap_or(1);
        let template: PodTemplateSpec = serde_json::from_value(template).ok()?;
        let rolled_out = self.spec.ready.iter().all(|rule| holds(rule, object));
        Some(Workload::described(
            (key, &metadata),
            &template,
            &selector,
            rolled_out,
            by_hand.as_deref(),
            replicas,
        ))
    }

    /// Paths of the metadata of the pod templates that an object has.
    #[must_use]
    pub fn templates(&self, object: &Value) -> Vec<String> {
        self.places(object).into_iter().map(|place| place.metadata.clone()).collect()
    }
}

/// The merge patch that puts metadata into every pod template of an object.
#[must_use]
pub fn patch(templates: &[String], metadata: &Value) -> Value {
    let mut patch = json!({});
    for template in templates {
        let mut at = &mut patch;
        for token in template.split('/').skip(1) {
            if !at.is_object() {
                *at = Value::Object(Map::new());
            }
            at = &mut at[token];
        }
        *at = metadata.clone();
    }
    patch
}

fn containers(place: &PodPlace, object: &Value) -> Vec<Value> {
    let lists = ["containers", "initContainers"].map(|list| format!("{}/{list}/*", place.spec));
    let pointers = lists.iter().chain(&place.containers);
    let mut found = Vec::new();
    for pointer in pointers {
        collect(object, pointer.trim_start_matches('/'), &mut found);
    }
    for (index, container) in found.iter_mut().enumerate() {
        if let Some(map) = container.as_object_mut() {
            map.entry("name").or_insert_with(|| json!(format!("container-{index}")));
        }
    }
    found
}

/// What a path leads to; `*` stands for every element of a list.
fn collect(value: &Value, path: &str, found: &mut Vec<Value>) {
    let (token, rest) = path.split_once('/').unwrap_or((path, ""));
    match (token, value) {
        ("", Value::Object(_)) => found.push(value.clone()),
        ("*", Value::Array(all)) => all.iter().for_each(|one| collect(one, rest, found)),
        _ => {
            if let Some(inside) = value.get(token) {
                collect(inside, rest, found);
            }
        }
    }
}

/// A scalar as text. An element of a list is found by its `type`, as in `/status/conditions/Ready/status`.
fn text(object: &Value, path: &str, missing: &str) -> String {
    let found = path.split('/').skip(1).try_fold(object, |at, token| match at {
        Value::Array(all) => all.iter().find(|one| one["type"] == token),
        _ => at.get(token),
    });
    match found {
        None | Some(Value::Null) => missing.to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

fn holds(rule: &FieldRule, object: &Value) -> bool {
    let found = text(object, &rule.path, "0");
    match (&rule.equals, &rule.equals_field, &rule.differs) {
        (Some(expected), ..) => found == *expected,
        // Kubernetes' default of replicas.
        (_, Some(other), _) => found == text(object, other, "1"),
        (.., Some(unexpected)) => found != *unexpected,
        _ => false,
    }
}

fn words(path: &str) -> String {
    path.trim_start_matches('/').replace('/', ".")
}

fn template() -> Vec<PodPlace> {
    vec![at("/spec/template/metadata", "/spec/template/spec")]
}

fn at(metadata: &str, spec: &str) -> PodPlace {
    PodPlace { metadata: metadata.into(), spec: spec.into(), containers: Vec::new() }
}

fn is(path: &str, value: &str) -> FieldRule {
    FieldRule { path: path.into(), equals: Some(value.into()), ..FieldRule::default() }
}

fn same(path: &str, field: &str) -> FieldRule {
    FieldRule { path: path.into(), equals_field: Some(field.into()), ..FieldRule::default() }
}

fn seen() -> FieldRule {
    same("/status/observedGeneration", "/metadata/generation")
}

fn kind(name: &str, version: &str, plural: &str) -> WorkloadKind {
    WorkloadKind {
        name: name.into(),
        version: version.into(),
        plural: plural.into(),
        templates: template(),
        ..WorkloadKind::default()
    }
}

/// The descriptions that need only their name in the GPUConfig. Fields as in the CRDs of Argo Rollouts 1.8, Kruise 1.8, LWS 0.6, KServe
/// 0.15 and Argo Workflows 3.6.
#[must_use]
pub fn shipped() -> Vec<WorkloadKind> {
    let replicas = |status: &str| same(status, "/spec/replicas");
    let partition = FieldRule {
        path: "/spec/updateStrategy/partition".into(),
        differs: Some("0".into()),
        ..FieldRule::default()
    };
    vec![
        WorkloadKind {
            ready: vec![seen(), is("/status/phase", "Healthy")],
            manual: vec![is("/spec/paused", "true")],
            ..kind("Rollout.argoproj.io", "v1alpha1", "rollouts")
        },
        WorkloadKind {
            ready: vec![seen(), replicas("/status/replicas"), replicas("/status/updatedReadyReplicas")],
            manual: vec![is("/spec/updateStrategy/paused", "true"), partition],
            ..kind("CloneSet.apps.kruise.io", "v1alpha1", "clonesets")
        },
        WorkloadKind {
            ready: vec![seen(), replicas("/status/readyReplicas"), replicas("/status/updatedReplicas")],
            manual: vec![is("/spec/updateStrategy/type", "OnDelete")],
            ..kind("StatefulSet.apps.kruise.io", "v1beta1", "statefulsets")
        },
        WorkloadKind {
            ready: vec![
                seen(),
                same("/status/updatedNumberScheduled", "/status/desiredNumberScheduled"),
                same("/status/numberAvailable", "/status/desiredNumberScheduled"),
            ],
            manual: vec![is("/spec/updateStrategy/type", "OnDelete")],
            ..kind("DaemonSet.apps.kruise.io", "v1alpha1", "daemonsets")
        },
        WorkloadKind {
            templates: ["leaderTemplate", "workerTemplate"]
                .map(|which| {
                    let path = format!("/spec/leaderWorkerTemplate/{which}");
                    at(&format!("{path}/metadata"), &format!("{path}/spec"))
                })
                .to_vec(),
            name_label: Some("leaderworkerset.sigs.k8s.io/name".into()),
            ready: vec![replicas("/status/readyReplicas"), replicas("/status/updatedReplicas")],
            ..kind("LeaderWorkerSet.leaderworkerset.x-k8s.io", "v1", "leaderworkersets")
        },
        WorkloadKind {
            templates: vec![PodPlace {
                containers: vec!["/spec/predictor/model".into()],
                ..at("/spec/predictor", "/spec/predictor")
            }],
            name_label: Some("serving.kserve.io/inferenceservice".into()),
            ready: vec![seen(), is("/status/conditions/Ready/status", "True")],
            ..kind("InferenceService.serving.kserve.io", "v1beta1", "inferenceservices")
        },
        // Its next run is converted; the current one is left to finish.
        WorkloadKind {
            templates: vec![PodPlace {
                containers: ["container", "script"]
                    .map(|form| format!("/spec/workflowSpec/templates/*/{form}"))
                    .to_vec(),
                ..at("/spec/workflowSpec/podMetadata", "/spec/workflowSpec")
            }],
            name_label: Some("gpu-migrate.io/none".into()),
            ..kind("CronWorkflow.argoproj.io", "v1alpha1", "cronworkflows")
        },
    ]
}

/// Why the operator does not convert a kind that makes pods, and what to do instead.
#[must_use]
pub fn why_not(kind: &str, group: &str) -> Option<&'static str> {
    const ONCE: &str = "it runs once, and its pods are not replaced; its next run converts with that label on its pod templates";
    const RAY: &str = "KubeRay does not replace running pods when a template changes; it converts when it is created again with that label";
    Some(match (group, kind) {
        ("ray.io", "RayCluster" | "RayService") => RAY,
        ("ray.io", "RayJob")
        | (
            "kubeflow.org",
            "PyTorchJob" | "TFJob" | "MPIJob" | "XGBoostJob" | "PaddleJob" | "JAXJob" | "MXJob",
        )
        | ("trainer.kubeflow.org", "TrainJob")
        | ("argoproj.io", "Workflow")
        | ("batch.volcano.sh", "Job")
        | ("jobset.x-k8s.io", "JobSet")
        | ("sparkoperator.k8s.io", "SparkApplication") => ONCE,
        ("serving.knative.dev", "Service" | "Revision" | "Configuration") => {
            "a Knative Service is rolled out by its template alone: set that label in its spec.template"
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::waves::{Management, ObservedWorkload};

    fn of(name: &str) -> Described {
        Described::of(&WorkloadKind { name: name.into(), ..WorkloadKind::default() }).unwrap()
    }

    fn pod(cards: u32) -> Value {
        json!({"containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": cards.to_string()}}}]})
    }

    fn seen(name: &str, spec: Value, status: Value) -> Option<ObservedWorkload> {
        let object = json!({"metadata": {"name": "x", "namespace": "a", "generation": 2}, "spec": spec, "status": status});
        Some(of(name).workload(&object)?.observe(&[]))
    }

    #[test]
    fn every_shipped_kind_is_read_and_patched_where_its_pods_are_described() {
        let spec = |template: &str| match template {
            "lws" => json!({"replicas": 2, "leaderWorkerTemplate": {"workerTemplate": {"spec": pod(1)}}}),
            "kserve" => json!({"predictor": {"model": {"resources": {"limits": {"nvidia.com/gpu": "1"}}}}}),
            "workflow" => json!({"workflowSpec": {"templates": [{"container": pod(1)["containers"][0]}]}}),
            _ => {
                json!({"replicas": 2, "selector": {"matchLabels": {"a": "b"}}, "template": {"metadata": {"labels": {"a": "b"}}, "spec": pod(1)}})
            }
        };
        let ready = json!({"observedGeneration": "2", "phase": "Healthy", "replicas": 2, "readyReplicas": 2, "updatedReplicas": 2, "updatedReadyReplicas": 2,
            "desiredNumberScheduled": 2, "numberAvailable": 2, "updatedNumberScheduled": 2, "conditions": [{"type": "Ready", "status": "True"}]});
        for (name, form, labels) in [
            ("Rollout.argoproj.io", "", "/spec/template/metadata/labels"),
            ("CloneSet.apps.kruise.io", "", "/spec/template/metadata/labels"),
            ("StatefulSet.apps.kruise.io", "", "/spec/template/metadata/labels"),
            ("DaemonSet.apps.kruise.io", "", "/spec/template/metadata/labels"),
            (
                "LeaderWorkerSet.leaderworkerset.x-k8s.io",
                "lws",
                "/spec/leaderWorkerTemplate/workerTemplate/metadata/labels",
            ),
            ("InferenceService.serving.kserve.io", "kserve", "/spec/predictor/labels"),
            ("CronWorkflow.argoproj.io", "workflow", "/spec/workflowSpec/podMetadata/labels"),
        ] {
            let one = seen(name, spec(form), ready.clone()).unwrap_or_else(|| panic!("{name} is not read"));
            assert!(one.rolled_out && one.management == Management::Restart, "{name}");
            assert!(one.cards >= 1, "{name}");
            let templates = of(name).templates(&json!({"spec": spec(form)}));
            let patch = patch(&templates, &json!({"labels": {"l": "true"}}));
            assert_eq!(patch.pointer(labels), Some(&json!({"l": "true"})), "{name}: {patch}");
        }
        assert_eq!(shipped().len(), 7, "each is in the table above");
    }

    #[test]
    fn what_is_not_rolled_out_or_held_by_its_owner_is_told() {
        let rollout = |spec: Value, status: Value| {
            let mut full = json!({"template": {"spec": pod(1)}});
            full.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
            seen("Rollout.argoproj.io", full, status).unwrap()
        };
        let healthy = json!({"observedGeneration": "2", "phase": "Healthy"});
        assert!(!rollout(json!({}), json!({"observedGeneration": "1", "phase": "Healthy"})).rolled_out);
        assert!(!rollout(json!({}), json!({"observedGeneration": "2", "phase": "Progressing"})).rolled_out);
        let paused = rollout(json!({"paused": true}), healthy);
        assert_eq!(paused.management, Management::Manual);
        assert!(paused.note.unwrap().contains("spec.paused is true"));
        assert!(
            seen(
                "Rollout.argoproj.io",
                json!({"workloadRef": {"kind": "Deployment", "name": "d"}}),
                json!({})
            )
            .is_none()
        );
    }

    #[test]
    fn a_kind_of_ones_own_is_described_and_what_cannot_be_converted_says_why() {
        let own = WorkloadKind {
            ready: vec![is("/status/ok", "true")],
            ..kind("Widget.example.com", "v2", "widgets")
        };
        assert_eq!(Described::of(&own).unwrap().api_version(), "example.com/v2");
        let error = |name: &str| {
            Described::of(&WorkloadKind { name: name.into(), ..WorkloadKind::default() }).unwrap_err()
        };
        assert!(error("Gadget.example.com").contains("is not known; describe it"));
        assert!(error("RayCluster.ray.io").contains("KubeRay does not replace running pods"));
        assert!(error("Job.batch.volcano.sh").contains("it runs once"));
        assert!(error("Rollout").contains("expected Kind.group"));
        assert_eq!(display("StatefulSet", "apps.kruise.io/v1beta1"), "StatefulSet.apps.kruise.io");
        assert_eq!(
            [display("StatefulSet", "apps/v1"), display("Rollout", "argoproj.io/v1alpha1")],
            ["StatefulSet", "Rollout"]
        );
    }
}
