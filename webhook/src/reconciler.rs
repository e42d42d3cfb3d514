//! Reconciles the webhook configuration in the cluster: of several replicas the one that leads creates it, and applies it again after
//! any change. The others look whether it carries their CAs.
//!
//! Two versions that run side by side during an upgrade want different configurations; two that wrote would never stop.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use futures::StreamExt;
use gpu_migrate_certs::Certs;
use k8s_openapi::api::rbac::v1::ClusterRole;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::configuration::{NAME, WebhookConfiguration, carries};
use crate::review::Snapshot;

const RECONCILE: Duration = Duration::from_secs(60);
/// From a write to the next that a write of another client causes: it may keep writing.
const PAUSE: Duration = Duration::from_secs(5);
const RETRY: Duration = Duration::from_secs(2);
/// Our name as a field manager, and that of our ClusterRole.
const MANAGER: &str = "gpu-migrate-webhook";

/// Applies one [`WebhookConfiguration`] whenever it differs, and on a timer.
pub struct ConfigurationReconciler {
    client: Client,
    configuration: WebhookConfiguration,
    certs: Certs,
    snapshot: Arc<ArcSwap<Snapshot>>,
    policies: watch::Receiver<()>,
    leading: watch::Receiver<bool>,
    registered: watch::Sender<bool>,
}

impl ConfigurationReconciler {
    /// For a configuration; the resources that policies map are added to it as policies change.
    #[must_use]
    pub fn new(
        client: Client,
        configuration: WebhookConfiguration,
        certs: Certs,
        snapshot: Arc<ArcSwap<Snapshot>>,
        policies: watch::Receiver<()>,
        leading: watch::Receiver<bool>,
    ) -> Self {
        Self {
            client,
            configuration,
            certs,
            snapshot,
            policies,
            leading,
            registered: watch::channel(false).0,
        }
    }

    /// Whether the cluster has the configuration with the CAs in use: a part of readiness.
    #[must_use]
    pub fn registered(&self) -> watch::Receiver<bool> {
        self.registered.subscribe()
    }

    /// While this replica leads: applies on every change of the configuration, the CAs or the policies, and once a minute.
    pub async fn run(mut self, stop: CancellationToken) {
        let kind =
            GroupVersionKind::gvk("admissionregistration.k8s.io", "v1", "MutatingWebhookConfiguration");
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &ApiResource::from_gvk(&kind));
        let mut bundle = self.certs.bundle();
        let mut events = pin!(kube::runtime::watcher::watch_object(api.clone(), NAME));
        let mut seen: Option<DynamicObject> = None;
        // The last write's resource version and time.
        let mut written: Option<(Option<String>, Instant)> = None;
        let mut due = Instant::now();
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                event = events.next() => match event {
                    Some(Ok(object)) => {
                        let version = object.as_ref().map(|object| &object.metadata.resource_version);
                        let ours = written.as_ref().is_some_and(|(written, _)| Some(written) == version);
                        seen = object;
                        if !ours {
                            due = due.min(written.as_ref().map_or_else(Instant::now, |(_, at)| *at + PAUSE));
                        }
                    }
                    Some(Err(error)) => {
                        tracing::debug!(%error, "the watch of the webhook configuration failed; retrying");
                        tokio::time::sleep(RETRY).await;
                    }
                    None => return,
                },
                changed = bundle.changed() => if changed.is_err() { return } else { due = Instant::now() },
                changed = self.policies.changed() => if changed.is_err() { return } else { due = Instant::now() },
                changed = self.leading.changed() => if changed.is_err() { return } else { due = Instant::now() },
                () = sleep_until(due) => {
                    let leading = *self.leading.borrow();
                    due = Instant::now() + RECONCILE;
                    if leading {
                        match self.apply(&api).await {
                            Ok(object) => {
                                written = Some((object.metadata.resource_version.clone(), Instant::now()));
                                seen = Some(object);
                            }
                            Err(error) => {
                                due = Instant::now() + RETRY;
                                tracing::warn!(%error, "applying the webhook configuration failed; retrying");
                            }
                        }
                    }
                }
            }
            let carried = seen.as_ref().is_some_and(|object| carries(&object.data, bundle.borrow().as_ref()));
            self.registered.send_if_modified(|before| std::mem::replace(before, carried) != carried);
        }
    }

    /// Our ClusterRole: what removes it, as `helm uninstall` does, removes the registration too, and nobody can register again. `None`
    /// where the rights come from elsewhere.
    async fn owner(&self) -> Result<Option<Value>, kube::Error> {
        let role = match Api::<ClusterRole>::all(self.client.clone()).get_metadata_opt(MANAGER).await {
            // It may not be read, or, in a demo's cluster, not exist as a kind.
            Err(kube::Error::Api(status)) if [403, 501].contains(&status.code) => None,
            role => role?,
        };
        Ok(role.map(|role| {
            let uid = role.uid().unwrap_or_default();
            json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "name": MANAGER, "uid": uid})
        }))
    }

    async fn apply(&self, api: &Api<DynamicObject>) -> Result<DynamicObject, kube::Error> {
        // Another replica may have announced a CA that we have not read yet.
        let bundle = self.certs.refresh().await;
        let snapshot = self.snapshot.load();
        let mapped: BTreeSet<String> =
            snapshot.policies.iter().flat_map(|policy| policy.conversion.mapped.keys().cloned()).collect();
        let configuration = WebhookConfiguration { mapped, ..self.configuration.clone() };
        let mut configuration = configuration.mutating(bundle.as_ref());
        if let Some(owner) = self.owner().await? {
            configuration["metadata"]["ownerReferences"] = json!([owner]);
        }
        let parameters = PatchParams::apply(MANAGER).force();
        api.patch(NAME, &parameters, &Patch::Apply(configuration)).await
    }
}
