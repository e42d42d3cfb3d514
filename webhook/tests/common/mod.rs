//! Cases in few words: a pod, its namespace and policies, and what comes of it.
#![allow(dead_code)]

pub(crate) mod api;

use std::collections::BTreeMap;

use gpu_migrate_model::crd::GPUMigration;
use gpu_migrate_webhook::obstacles::ClusterFacts;
use gpu_migrate_webhook::plan::{Subject, rewrite_template};
use gpu_migrate_webhook::policy::{Policies, Settings};
use json_patch::Patch;
use serde_json::{Value, json};

/// A pod with a name and this spec.
pub(crate) fn pod(spec: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec})
}

/// A policy for the project of its name, enforced unless `spec` says otherwise.
pub(crate) fn policy(name: &str, spec: Value) -> GPUMigration {
    let mut full = json!({"project": name, "mode": "Enforce"});
    merge(&mut full, spec);
    serde_json::from_value(json!({
        "apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUMigration",
        "metadata": {"name": name, "generation": 1}, "spec": full,
    }))
    .unwrap()
}

/// Labels of an opted-in namespace of project `p`, and more.
pub(crate) fn namespace(more: &[(&str, &str)]) -> Value {
    let mut labels = json!({"gpu-migrate.io/opt-in": "true", "gpu-migrate.io/project": "p"});
    for (key, value) in more {
        labels[*key] = json!(value);
    }
    labels
}

/// Puts the fields of one object into another.
pub(crate) fn merge(into: &mut Value, from: Value) {
    let (Value::Object(into), Value::Object(from)) = (into, from) else { panic!("merge takes objects") };
    into.extend(from);
}

/// Sets a value by JSON pointer, making the objects on the way.
pub(crate) fn set(target: &mut Value, path: &str, value: Value) {
    let mut at = target;
    for token in path.split('/').skip(1) {
        at = &mut at[token.replace("~1", "/").as_str()];
    }
    *at = value;
}

pub(crate) struct Case {
    pod: Value,
    name: &'static str,
    namespace: Option<BTreeMap<String, String>>,
    policies: Vec<GPUMigration>,
    cluster: ClusterFacts,
    settings: Settings,
}

pub(crate) struct Done {
    pub(crate) before: Value,
    pub(crate) pod: Value,
    pub(crate) outcome: String,
    pub(crate) patch: Patch,
    pub(crate) audit_patch: Patch,
    pub(crate) policy: Option<String>,
    pub(crate) warnings: Vec<String>,
    pub(crate) deny: Option<String>,
    pub(crate) policies: Vec<GPUMigration>,
}

impl Case {
    /// In namespace `team-a`, opted in, of project `p`, which has a policy with defaults.
    pub(crate) fn new(pod: Value) -> Self {
        let namespace = serde_json::from_value(namespace(&[])).unwrap();
        let policies = vec![policy("p", json!({}))];
        let (cluster, settings) = (ClusterFacts::default(), Settings::default());
        Self { pod, name: "team-a", namespace: Some(namespace), policies, cluster, settings }
    }

    /// A pod with one container, `main`, with these resources.
    pub(crate) fn one(resources: Value) -> Self {
        Self::new(pod(json!({"containers": [{"name": "main", "resources": resources}]})))
    }

    pub(crate) fn namespace(self, labels: Value) -> Self {
        Self { namespace: Some(serde_json::from_value(labels).unwrap()), ..self }
    }

    pub(crate) fn named(self, name: &'static str) -> Self {
        Self { name, ..self }
    }

    pub(crate) fn unknown_namespace(self) -> Self {
        Self { namespace: None, ..self }
    }

    pub(crate) fn policies(self, policies: Vec<GPUMigration>) -> Self {
        Self { policies, ..self }
    }

    pub(crate) fn cluster(self, cluster: ClusterFacts) -> Self {
        Self { cluster, ..self }
    }

    /// With `--mark-reviewed`.
    pub(crate) fn marked(self) -> Self {
        Self { settings: Settings { mark_reviewed: true, ..self.settings }, ..self }
    }

    /// In a namespace where containers that ask for no card see none.
    pub(crate) fn guarded(self) -> Self {
        self.namespace(namespace(&[("gpu-migrate.io/void-guard", "true")]))
    }

    pub(crate) fn run(self) -> Done {
        let (policies, rejected) = Policies::compile(&self.policies, &self.settings);
        assert_eq!(rejected, []);
        let subject = Subject {
            namespace: self.name,
            namespace_labels: self.namespace.as_ref(),
            controller: None,
            cluster: &self.cluster,
        };
        let rewrite = rewrite_template(&self.pod, &subject, &policies).unwrap();
        let mut after = self.pod.clone();
        json_patch::patch(&mut after, &rewrite.patch).unwrap();
        Done {
            before: self.pod,
            pod: after,
            outcome: rewrite.outcome.as_str().to_owned(),
            patch: rewrite.patch,
            audit_patch: rewrite.audit_patch,
            policy: rewrite.policy,
            warnings: rewrite.warnings,
            deny: rewrite.deny,
            policies: self.policies,
        }
    }
}

impl Done {
    /// Whether nothing changes, not even by an empty operation.
    pub(crate) fn untouched(&self) -> bool {
        self.patch.0.is_empty() && self.before == self.pod
    }

    /// Resources of the first container.
    pub(crate) fn resources(&self) -> Value {
        self.pod["spec"]["containers"][0]["resources"].clone()
    }
}
