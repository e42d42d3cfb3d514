//! The webhook configuration: which pods the API server sends us. Pure; [`crate::reconciler`] keeps it in the cluster.
//!
//! Selectors and CEL keep the webhook out of everything that did not ask for it: an outage reaches opted-in namespaces
//! only, and there a pod stays legacy (`failurePolicy: Ignore`).

use std::collections::BTreeSet;

use base64::Engine;
use gpu_migrate_certs::Bundle;
use gpu_migrate_model::names::{self, Dialect};
use serde_json::{Value, json};

use crate::policy::Settings;

/// Name of the MutatingWebhookConfiguration, the ValidatingAdmissionPolicy and its binding.
pub const NAME: &str = "gpu-migrate";
/// Path that reviews are posted to.
pub const PATH: &str = "/mutate";

/// CEL: a mirror pod stands for a pod that the kubelet runs already. The API server refuses to add or remove the annotation later.
const NOT_A_MIRROR_POD: &str =
    "!has(object.metadata.annotations) || !('kubernetes.io/config.mirror' in object.metadata.annotations)";

/// CEL: whether containers are added to a pod that exists. A pod itself has no subresource.
const EPHEMERAL: &str = "(has(request.subResource) && request.subResource == 'ephemeralcontainers')";

/// How the API server reaches the webhook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    Service {
        namespace: String,
        name: String,
        port: u16,
    },
    /// By URL, for an API server outside the cluster network.
    Url(String),
}

/// What the webhook configuration and the admission policy are made from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebhookConfiguration {
    pub address: Address,
    /// Label keys, resource names, and the excluded namespaces.
    pub settings: Settings,
    /// Resources besides the whole card that some policy converts: MIG profiles, time-sliced cards.
    pub mapped: BTreeSet<String>,
    /// How long the API server waits for us, 1 to 30 s.
    pub timeout_seconds: u8,
}

impl WebhookConfiguration {
    /// For an address, with everything else by default.
    #[must_use]
    pub fn new(address: Address, own_namespace: &str) -> Self {
        let mut settings = Settings::default();
        settings.excluded_namespaces.insert(own_namespace.to_owned());
        Self { address, settings, mapped: BTreeSet::new(), timeout_seconds: 5 }
    }

    /// CEL: whether any container asks for cards or what a policy maps, or, with `shares`, for shares.
    fn asks_for(&self, shares: bool) -> String {
        let Dialect { legacy, cores, memory, .. } = &self.settings.dialect;
        let shares = [cores, memory].into_iter().filter(move |_| shares);
        let names = std::iter::once(legacy).chain(&self.mapped).chain(shares);
        let asks = |list: &str| {
            let each = names.clone().map(|name| format!("'{name}' in c.resources.{list}"));
            format!("(has(c.resources.{list}) && ({}))", each.collect::<Vec<_>>().join(" || "))
        };
        format!(
            "(object.spec.containers + (has(object.spec.initContainers) ? object.spec.initContainers : [])).exists(c, \
             has(c.resources) && ({} || {}))",
            asks("limits"),
            asks("requests"),
        )
    }

    fn namespace_selector(&self, guarded: bool) -> Value {
        let mut labels = serde_json::Map::new();
        labels.insert(names::OPT_IN.to_owned(), "true".into());
        if guarded {
            labels.insert(names::VOID_GUARD.to_owned(), "true".into());
        }
        json!({
            "matchLabels": labels,
            "matchExpressions": [{ "key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": self.settings.excluded_namespaces }],
        })
    }

    fn object_selector(&self) -> Value {
        json!({ "matchExpressions": [{ "key": names::OPT_OUT, "operator": "NotIn", "values": ["true"] }] })
    }

    /// CEL: whether the object selector keeps the pod from being converted.
    fn opted_out(&self) -> String {
        let key = names::OPT_OUT;
        format!(
            "(has(object.metadata.labels) && '{key}' in object.metadata.labels && object.metadata.labels['{key}'] == 'true')"
        )
    }

    fn client_config(&self, bundle: Option<&Bundle>) -> Value {
        let mut config = match &self.address {
            Address::Service { namespace, name, port } => {
                json!({ "service": { "namespace": namespace, "name": name, "port": port, "path": PATH } })
            }
            Address::Url(url) => json!({ "url": format!("{}{PATH}", url.trim_end_matches('/')) }),
        };
        if let Some(bundle) = bundle {
            config["caBundle"] = base64::engine::general_purpose::STANDARD.encode(&bundle.0).into();
        }
        config
    }

    fn webhook(&self, name: &str, guarded: bool, condition: Value, bundle: Option<&Bundle>) -> Value {
        let (mut rules, selector) = (vec![pod_creation()], self.object_selector());
        if guarded {
            rules.push(
                json!({ "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods/ephemeralcontainers"],
                "operations": ["UPDATE"], "scope": "Namespaced" }),
            );
        }
        json!({
            "name": name,
            "clientConfig": self.client_config(bundle),
            "rules": rules,
            "namespaceSelector": self.namespace_selector(guarded),
            "objectSelector": if guarded { json!({}) } else { selector },
            "matchConditions": [condition, { "name": "not-a-mirror-pod", "expression": NOT_A_MIRROR_POD }],
            "matchPolicy": "Equivalent",
            "failurePolicy": "Ignore",
            "sideEffects": "None",
            "reinvocationPolicy": "IfNeeded",
            "timeoutSeconds": self.timeout_seconds,
            "admissionReviewVersions": ["v1"],
        })
    }

    /// The MutatingWebhookConfiguration. Without a bundle the `caBundle` is left to what injects it.
    ///
    /// Pods that ask for cards or shares go to `pods.gpu-migrate.io`: a converted pod as well, when it is reinvoked after another
    /// webhook. In guarded namespaces the others go to `guard.gpu-migrate.io`, with pods that opted out of being converted and
    /// with ephemeral containers. Nothing that a user can write into a pod keeps it from the guard.
    #[must_use]
    pub fn mutating(&self, bundle: Option<&Bundle>) -> Value {
        let asks = self.asks_for(true);
        let pods = json!({ "name": "asks-for-cards", "expression": asks });
        let others = format!("{EPHEMERAL} || !{asks} || {}", self.opted_out());
        let guard = json!({ "name": "not-reviewed-by-pods", "expression": others });
        json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingWebhookConfiguration",
            "metadata": { "name": NAME, "labels": labels() },
            "webhooks": [
                self.webhook("pods.gpu-migrate.io", false, pods, bundle),
                self.webhook("guard.gpu-migrate.io", true, guard, bundle),
            ],
        })
    }

    /// For clusters where no pod may pass unconverted while the webhook is unavailable: a ValidatingAdmissionPolicy
    /// and its binding. It sees pods after all mutation; one that still asks for whole cards and does not carry the mark of
    /// `--mark-reviewed` was not seen by the webhook. A pod that the webhook left as it is passes, whatever the reason.
    /// `refuse` denies it, otherwise it is reported as a warning and in the audit log.
    #[must_use]
    pub fn admission_policy(&self, refuse: bool) -> [Value; 2] {
        let actions = if refuse { json!(["Deny"]) } else { json!(["Warn", "Audit"]) };
        let legacy = &self.settings.dialect.legacy;
        let message = format!(
            "this pod asks for {legacy} in an opted-in namespace, and the webhook of gpu-migrate has not reviewed it"
        );
        // The form of some targets names whole cards too.
        let (reviewed, converted) = (names::REVIEWED, names::POLICY);
        let expression = format!(
            "!{} || (has(object.metadata.annotations) && ('{reviewed}' in object.metadata.annotations || '{converted}' in object.metadata.annotations))",
            self.asks_for(false)
        );
        let policy = json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicy",
            "metadata": { "name": NAME, "labels": labels() },
            "spec": {
                "failurePolicy": "Ignore",
                "matchConstraints": {
                    "resourceRules": [pod_creation()],
                    "namespaceSelector": self.namespace_selector(false),
                    "objectSelector": self.object_selector(),
                    "matchPolicy": "Equivalent",
                },
                "matchConditions": [{ "name": "not-a-mirror-pod", "expression": NOT_A_MIRROR_POD }],
                "validations": [{ "expression": expression, "message": message, "reason": "Forbidden" }],
            },
        });
        let binding = json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": { "name": NAME, "labels": labels() },
            "spec": { "policyName": NAME, "validationActions": actions },
        });
        [policy, binding]
    }
}

/// Whether every webhook of a configuration carries these CAs; without a bundle, whether there is one that was injected.
#[must_use]
pub fn carries(configuration: &Value, bundle: Option<&Bundle>) -> bool {
    let wanted = bundle.map(|bundle| base64::engine::general_purpose::STANDARD.encode(&bundle.0));
    let webhooks =
        configuration.get("webhooks").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let carries = |webhook: &Value| {
        let carried = webhook.pointer("/clientConfig/caBundle").and_then(Value::as_str);
        wanted.is_none() || carried == wanted.as_deref()
    };
    !webhooks.is_empty() && webhooks.iter().all(carries)
}

fn labels() -> Value {
    json!({ "app.kubernetes.io/name": "gpu-migrate", "app.kubernetes.io/component": "webhook" })
}

fn pod_creation() -> Value {
    json!({ "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"], "scope": "Namespaced" })
}
