//! Reconciles the webhook configuration in the cluster: creates it, and applies it again after any change.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use futures::StreamExt;
use gpu_migrate_certs::Certs;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::configuration::{NAME, WebhookConfiguration};
use crate::review::Snapshot;

const RECONCILE: Duration = Duration::from_secs(60);
const RETRY: Duration = Duration::from_secs(2);
const MANAGER: &str = "gpu-migrate-webhook";

/// Applies one [`WebhookConfiguration`] whenever it differs, and on a timer.
pub struct ConfigurationReconciler {
    client: Client,
    configuration: WebhookConfiguration,
    certs: Certs,
    snapshot: Arc<ArcSwap<Snapshot>>,
    policies: watch::Receiver<()>,
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
    ) -> Self {
        Self { client, configuration, certs, snapshot, policies, registered: watch::channel(false).0 }
    }

    /// Whether the cluster has the configuration with the CAs in use: a part of readiness.
    #[must_use]
    pub fn registered(&self) -> watch::Receiver<bool> {
        self.registered.subscribe()
    }

    /// Applies on every change of the configuration, the CAs or the policies, and once a minute.
    pub async fn run(mut self, stop: CancellationToken) {
        let kind =
            GroupVersionKind::gvk("admissionregistration.k8s.io", "v1", "MutatingWebhookConfiguration");
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &ApiResource::from_gvk(&kind));
        let mut bundle = self.certs.bundle();
        let mut events = pin!(kube::runtime::watcher::watch_object(api.clone(), NAME));
        loop {
            let applied = self.apply(&api).await;
            let pause = match &applied {
                Ok(()) => RECONCILE,
                Err(error) => {
                    tracing::warn!(%error, "applying the webhook configuration failed; retrying");
                    RETRY
                }
            };
            self.registered
                .send_if_modified(|old| std::mem::replace(old, applied.is_ok()) != applied.is_ok());
            tokio::select! {
                () = stop.cancelled() => return,
                event = events.next() => match event {
                    Some(Ok(_)) => {}
                    Some(Err(error)) => {
                        tracing::debug!(%error, "the watch of the webhook configuration failed; retrying");
                        tokio::time::sleep(RETRY).await;
                    }
                    None => return,
                },
                changed = bundle.changed() => if changed.is_err() { return },
                changed = self.policies.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    async fn apply(&self, api: &Api<DynamicObject>) -> Result<(), kube::Error> {
        // Another replica may have announced a CA that we have not read yet.
        let bundle = self.certs.refresh().await;
        let snapshot = self.snapshot.load();
        let mapped: BTreeSet<String> =
            snapshot.policies.iter().flat_map(|policy| policy.conversion.mapped.keys().cloned()).collect();
        let configuration = WebhookConfiguration { mapped, ..self.configuration.clone() };
        let configuration = configuration.mutating(bundle.as_ref());
        let parameters = PatchParams::apply(MANAGER).force();
        api.patch(NAME, &parameters, &Patch::Apply(configuration)).await.map(drop)
    }
}
