//! The webhook configuration in the cluster, kept by one of several replicas.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::api::{Answer, client, respond};
use futures::channel::mpsc::{UnboundedSender, unbounded};
use futures::{StreamExt, stream};
use gpu_migrate_certs::{Certs, Lifetimes, Options, Source, wall_clock};
use gpu_migrate_webhook::configuration::{Address, WebhookConfiguration};
use gpu_migrate_webhook::metrics::Metrics;
use gpu_migrate_webhook::policy::Settings;
use gpu_migrate_webhook::reconciler::ConfigurationReconciler;
use gpu_migrate_webhook::source::Store;
use http::{Method, Request};
use http_body_util::BodyExt;
use hyper::body::Bytes;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// An API server with one webhook configuration, which it replaces by whatever is applied.
#[derive(Clone, Default)]
struct Api(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    object: Option<Value>,
    version: u64,
    /// `timeoutSeconds` of each write that changed something.
    writes: Vec<u64>,
    watchers: Vec<UnboundedSender<Bytes>>,
}

impl Api {
    fn client(&self) -> kube::Client {
        let api = self.clone();
        client(move |request| {
            let api = api.clone();
            async move { api.answer(request).await }
        })
    }

    async fn answer(&self, request: Request<kube::client::Body>) -> Answer {
        let (parts, body) = request.into_parts();
        let mut state = self.0.lock().unwrap();
        if parts.method == Method::PATCH {
            drop(state);
            let body = body.collect().await.unwrap().to_bytes();
            let applied = self.apply(serde_json::from_slice(&body).unwrap());
            return respond(stream::iter([Bytes::from(applied.to_string())]).boxed());
        }
        if parts.uri.path().ends_with("/clusterroles/gpu-migrate-webhook") {
            let role = json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
                "metadata": {"name": "gpu-migrate-webhook", "uid": "of-the-role"}});
            return respond(stream::iter([Bytes::from(role.to_string())]).boxed());
        }
        if parts.uri.query().unwrap_or_default().contains("watch=") {
            let (sender, receiver) = unbounded();
            state.watchers.push(sender);
            return respond(receiver.boxed());
        }
        let list = json!({"kind": "MutatingWebhookConfigurationList", "apiVersion": "admissionregistration.k8s.io/v1",
            "metadata": {"resourceVersion": state.version.to_string()}, "items": state.object.iter().collect::<Vec<_>>()});
        respond(stream::iter([Bytes::from(list.to_string())]).boxed())
    }

    /// As server-side apply: what changes nothing makes no new version.
    fn apply(&self, mut object: Value) -> Value {
        let mut state = self.0.lock().unwrap();
        let known = state.object.clone().unwrap_or_default();
        if known["webhooks"] == object["webhooks"] {
            return known;
        }
        state.version += 1;
        object["metadata"]["resourceVersion"] = json!(state.version.to_string());
        object["metadata"]["uid"] = json!("u");
        state.writes.push(object["webhooks"][0]["timeoutSeconds"].as_u64().unwrap());
        let kind = if state.object.is_some() { "MODIFIED" } else { "ADDED" };
        let line = json!({"type": kind, "object": object}).to_string() + "\n";
        state.watchers.retain(|watcher| watcher.unbounded_send(Bytes::from(line.clone())).is_ok());
        state.object = Some(object.clone());
        object
    }

    fn writes(&self) -> Vec<u64> {
        self.0.lock().unwrap().writes.clone()
    }
}

/// A replica with a `--timeout-seconds` of its own: another version, or the same with other arguments.
async fn replica(
    api: &Api,
    folder: &std::path::Path,
    timeout_seconds: u8,
    stop: &CancellationToken,
) -> (watch::Sender<bool>, watch::Receiver<bool>) {
    let lifetimes = Lifetimes { ca: Duration::from_secs(1 << 30), leaf: Duration::from_secs(1 << 29) };
    let options = Options { owner: "test".into(), names: vec!["localhost".into()], lifetimes };
    let (certs, rotator) =
        Certs::start(Source::SelfSigned(folder.to_owned()), options, wall_clock()).await.unwrap();
    tokio::spawn(rotator.run(stop.clone()));
    let wanted = WebhookConfiguration {
        timeout_seconds,
        ..WebhookConfiguration::new(Address::Url("https://localhost".into()), "gpu")
    };
    let store = Store::new(Settings::default(), Metrics::default());
    let (leading, leads) = watch::channel(false);
    let reconciler =
        ConfigurationReconciler::new(api.client(), wanted, certs, store.snapshot(), store.changes(), leads);
    let registered = reconciler.registered();
    let stop = stop.clone();
    tokio::spawn(async move {
        let _kept = store;
        reconciler.run(stop).await;
    });
    (leading, registered)
}

/// Two that both wrote whenever the other did made thousands of writes during an upgrade.
#[tokio::test(start_paused = true)]
async fn one_replica_writes_and_all_are_registered() {
    let (api, stop) = (Api::default(), CancellationToken::new());
    let folder = tempfile::tempdir().unwrap();
    let (old, mut old_registered) = replica(&api, folder.path(), 5, &stop).await;
    let (new, mut new_registered) = replica(&api, folder.path(), 7, &stop).await;
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert!(api.writes().is_empty() && !*old_registered.borrow(), "none leads");
    old.send_replace(true);
    old_registered.wait_for(|registered| *registered).await.unwrap();
    new_registered.wait_for(|registered| *registered).await.unwrap();
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert_eq!(api.writes(), [5]);
    // The upgrade: the old one leaves, and the new one takes over.
    old.send_replace(false);
    new.send_replace(true);
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert_eq!(api.writes(), [5, 7]);
    assert!(*old_registered.borrow() && *new_registered.borrow());
    stop.cancel();
}

/// `helm uninstall` removes the role, and Kubernetes what it owns.
#[tokio::test(start_paused = true)]
async fn the_registration_is_owned_by_our_role() {
    let (api, stop) = (Api::default(), CancellationToken::new());
    let folder = tempfile::tempdir().unwrap();
    let (leading, mut registered) = replica(&api, folder.path(), 5, &stop).await;
    leading.send_replace(true);
    registered.wait_for(|registered| *registered).await.unwrap();
    let owners = api.0.lock().unwrap().object.as_ref().unwrap()["metadata"]["ownerReferences"].clone();
    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "name": "gpu-migrate-webhook",
        "uid": "of-the-role"});
    assert_eq!(owners, json!([role]));
    stop.cancel();
}

/// The writes of another client, such as a GitOps controller, are undone every few seconds, not at once.
#[tokio::test(start_paused = true)]
async fn what_another_client_writes_is_corrected_at_a_bounded_rate() {
    let (api, stop) = (Api::default(), CancellationToken::new());
    let folder = tempfile::tempdir().unwrap();
    let (leading, mut registered) = replica(&api, folder.path(), 5, &stop).await;
    leading.send_replace(true);
    registered.wait_for(|registered| *registered).await.unwrap();
    for _ in 0..100 {
        let mut meddled = api.0.lock().unwrap().object.clone().unwrap();
        meddled["webhooks"][0]["timeoutSeconds"] = json!(9);
        api.apply(meddled);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let ours = api.writes().iter().filter(|seconds| **seconds == 5).count();
    assert!((15..=25).contains(&ours), "{ours} writes in 100 s");
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(api.writes().last(), Some(&5), "and in the end it is ours");
    stop.cancel();
}
