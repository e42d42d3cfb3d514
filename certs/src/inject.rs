//! Keeps the `caBundle` of our webhook configurations equal to the CAs in use.
//!
//! Only webhooks whose name ends in `.gpu-migrate.io` are touched, and nothing in a configuration that asks
//! cert-manager to inject. Someone may clear the field at any time (a `kubectl apply` of a manifest does), so it is
//! watched and put back.

use std::pin::pin;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::StreamExt;
use json_patch::{AddOperation, Patch, PatchOperation, TestOperation};
use jsonptr::PointerBuf;
use kube::Client;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, Patch as ApiPatch, PatchParams};
use serde_json::Value;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{Bundle, CertError, Certs};

/// Names of our webhooks end so.
pub const OUR_SUFFIX: &str = ".gpu-migrate.io";
const CERT_MANAGER: &str = "cert-manager.io/inject-";
const ATTEMPTS: u32 = 5;
const RECONCILE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `MutatingWebhookConfiguration`
    Mutating,
    /// `ValidatingWebhookConfiguration`
    Validating,
}

/// What has to change in a configuration so that our webhooks carry `bundle`; `None` when nothing has to.
///
/// Each change tests the resource version first, so that it never lands in another configuration than the one seen.
#[must_use]
pub fn plan(configuration: &DynamicObject, bundle: &Bundle) -> Option<Patch> {
    let by_cert_manager =
        configuration.metadata.annotations.iter().flatten().any(|(key, _)| key.starts_with(CERT_MANAGER));
    if by_cert_manager {
        return None;
    }
    let wanted = STANDARD.encode(&bundle.0);
    let webhooks = configuration.data.get("webhooks").and_then(Value::as_array)?;
    let stale = webhooks.iter().enumerate().filter(|(_, webhook)| {
        let ours = webhook.get("name").and_then(Value::as_str).is_some_and(|name| name.ends_with(OUR_SUFFIX));
        let current = webhook.pointer("/clientConfig/caBundle").and_then(Value::as_str);
        ours && current != Some(&wanted)
    });
    let mut operations: Vec<PatchOperation> = stale
        .map(|(index, _)| {
            let index = index.to_string();
            let path = PointerBuf::from_tokens(["webhooks", &index, "clientConfig", "caBundle"]);
            PatchOperation::Add(AddOperation { path, value: Value::String(wanted.clone()) })
        })
        .collect();
    if operations.is_empty() {
        return None;
    }
    let path = PointerBuf::from_tokens(["metadata", "resourceVersion"]);
    let value = configuration.metadata.resource_version.clone().map_or(Value::Null, Value::String);
    operations.insert(0, PatchOperation::Test(TestOperation { path, value }));
    Some(Patch(operations))
}

/// Watches one webhook configuration and keeps its `caBundle`.
pub struct Injector {
    api: Api<DynamicObject>,
    name: String,
    kind: Kind,
    certs: Certs,
    registered: watch::Sender<bool>,
}

impl Injector {
    /// For the configuration `name`, with the CAs of `certs`.
    #[must_use]
    pub fn new(client: Client, kind: Kind, name: &str, certs: Certs) -> Self {
        let kind_name = match kind {
            Kind::Mutating => "MutatingWebhookConfiguration",
            Kind::Validating => "ValidatingWebhookConfiguration",
        };
        let resource =
            ApiResource::from_gvk(&GroupVersionKind::gvk("admissionregistration.k8s.io", "v1", kind_name));
        Self {
            api: Api::all_with(client, &resource),
            name: name.into(),
            kind,
            certs,
            registered: watch::channel(false).0,
        }
    }

    /// Whether the configuration exists and carries the CAs in use: a part of readiness.
    #[must_use]
    pub fn registered(&self) -> watch::Receiver<bool> {
        self.registered.subscribe()
    }

    /// Reconciles on every change of the configuration, on every change of the CAs and once a minute.
    pub async fn run(self, stop: CancellationToken) {
        let mut bundle = self.certs.bundle();
        let mut events = pin!(kube::runtime::watcher::watch_object(self.api.clone(), &self.name));
        loop {
            match self.reconcile().await {
                Ok(registered) => {
                    self.registered.send_if_modified(|old| std::mem::replace(old, registered) != registered);
                }
                Err(error) => tracing::warn!(%error, "caBundle not injected; trying again"),
            }
            tokio::select! {
                () = stop.cancelled() => return,
                event = events.next() => match event {
                    Some(Ok(_)) => {}
                    Some(Err(error)) => {
                        tracing::debug!(%error, "watch of the webhook configuration");
                        tokio::time::sleep(Duration::from_secs(1)).await;
                    }
                    None => return,
                },
                changed = bundle.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(RECONCILE) => {}
            }
        }
    }

    /// Puts the CAs in where they are missing. True when the configuration exists and carries them.
    async fn reconcile(&self) -> Result<bool, CertError> {
        let object = || format!("{:?}WebhookConfiguration {}", self.kind, self.name);
        for _ in 0..ATTEMPTS {
            let found = self.api.get_opt(&self.name).await.map_err(|e| CertError::api(object(), e))?;
            let Some(configuration) = found else { return Ok(false) };
            let known = self.certs.bundle().borrow().clone();
            let Some(bundle) = known else { return Ok(false) };
            if plan(&configuration, &bundle).is_none() {
                return Ok(true);
            }
            // Another replica may have announced a CA that we have not read yet: look before overwriting.
            let Some(patch) = self.certs.refresh().await.and_then(|bundle| plan(&configuration, &bundle))
            else {
                return Ok(true);
            };
            let sent =
                self.api.patch(&self.name, &PatchParams::default(), &ApiPatch::<()>::Json(patch)).await;
            match sent {
                Ok(_) => {
                    tracing::info!(configuration = self.name, "caBundle written");
                    return Ok(true);
                }
                // Changed since we read it: the test failed (422) or the write did (409).
                Err(kube::Error::Api(status)) if matches!(status.code, 409 | 422) => {}
                Err(error) => return Err(CertError::api(object(), error)),
            }
        }
        Err(CertError::Contended { object: object(), attempts: ATTEMPTS })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn configuration(value: Value) -> DynamicObject {
        serde_json::from_value(value).unwrap()
    }

    fn two_webhooks() -> Value {
        json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingWebhookConfiguration",
            "metadata": { "name": "gpu-migrate", "resourceVersion": "7" },
            "webhooks": [
                { "name": "foreign.example.com", "clientConfig": { "caBundle": "YQ==" } },
                { "name": "pods.gpu-migrate.io", "clientConfig": { "url": "https://127.0.0.1" } },
            ],
        })
    }

    #[test]
    fn only_our_webhooks_are_patched_and_only_when_stale() {
        let bundle = Bundle("pem".into());
        let mut value = two_webhooks();
        let patch = plan(&configuration(value.clone()), &bundle).unwrap();
        json_patch::patch(&mut value, &patch).unwrap();
        assert_eq!(value["webhooks"][0]["clientConfig"]["caBundle"], "YQ==");
        assert_eq!(value["webhooks"][1]["clientConfig"]["caBundle"], STANDARD.encode("pem"));
        assert_eq!(plan(&configuration(value), &bundle), None);
    }

    #[test]
    fn a_patch_does_not_apply_to_a_changed_configuration() {
        let patch = plan(&configuration(two_webhooks()), &Bundle("pem".into())).unwrap();
        let mut changed = two_webhooks();
        changed["metadata"]["resourceVersion"] = json!("8");
        assert!(json_patch::patch(&mut changed, &patch).is_err());
    }

    #[test]
    fn what_cert_manager_injects_is_left_to_it() {
        let mut value = two_webhooks();
        value["metadata"]["annotations"] = json!({ "cert-manager.io/inject-ca-from": "a/b" });
        assert_eq!(plan(&configuration(value), &Bundle("pem".into())), None);
    }
}
