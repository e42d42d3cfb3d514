//! Policies and namespaces from a watch, and what the webhook says about each policy in its status.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::{Arc, Mutex};

use common::api::{Answer, client, eventually, respond};
use futures::channel::mpsc::{UnboundedSender, unbounded};
use futures::{StreamExt, stream};
use gpu_migrate_webhook::metrics::Metrics;
use gpu_migrate_webhook::obstacles::ClusterFacts;
use gpu_migrate_webhook::policy::{Mode, Settings};
use gpu_migrate_webhook::source::Store;
use gpu_migrate_webhook::source::cluster::ClusterSource;
use http::{Method, Request};
use http_body_util::BodyExt;
use hyper::body::Bytes;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

const MIGRATIONS: &str = "/apis/gpu-migrate.io/v1alpha1/gpumigrations";
const NAMESPACES: &str = "/api/v1/namespaces";
const SHADOWS: &str = "/apis/gpu-migrate.io/v1alpha1/gpushadows";
const RUNTIME_CLASSES: &str = "/apis/node.k8s.io/v1/runtimeclasses";

/// An API server that lists what it is given, streams what it is told, and keeps the statuses written to it.
#[derive(Clone)]
struct Api {
    migrations: Arc<Mutex<Vec<Value>>>,
    watchers: Arc<Mutex<Vec<UnboundedSender<Bytes>>>>,
    conditions: Arc<Mutex<Vec<(String, Value)>>>,
    accepted: Arc<Mutex<Vec<(String, Value)>>>,
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
        let path = parts.uri.path().to_owned();
        if parts.method == Method::PATCH {
            let body: Value = serde_json::from_slice(&body.collect().await.unwrap().to_bytes()).unwrap();
            let name = path.trim_start_matches(MIGRATIONS).trim_matches('/').trim_end_matches("/status");
            match &body["status"]["accepted"] {
                Value::Null => {
                    let condition = body["status"]["conditions"][0].clone();
                    self.conditions.lock().unwrap().push((name.to_owned(), condition));
                }
                accepted => self.accepted.lock().unwrap().push((name.to_owned(), accepted.clone())),
            }
            return respond(stream::iter([Bytes::from(body.to_string())]).boxed());
        }
        if parts.uri.query().unwrap_or_default().contains("watch=") {
            let (sender, receiver) = unbounded();
            // Only policies change here; the other watch stays silent.
            if path == MIGRATIONS {
                self.watchers.lock().unwrap().push(sender);
                return respond(receiver.boxed());
            }
            return respond(stream::pending().boxed());
        }
        let list = |kind: &str, version: &str, items: Value| json!({"kind": kind, "apiVersion": version, "metadata": {"resourceVersion": "1"}, "items": items});
        let answer = match path.as_str() {
            MIGRATIONS => {
                list("GPUMigrationList", "gpu-migrate.io/v1alpha1", json!(*self.migrations.lock().unwrap()))
            }
            NAMESPACES => {
                let labels = json!({"gpu-migrate.io/opt-in": "true", "other": "not kept"});
                let item = json!({"metadata": {"name": "team-a", "uid": "n", "labels": labels}});
                list("PartialObjectMetadataList", "meta.k8s.io/v1", json!([item]))
            }
            SHADOWS => {
                let card =
                    |memory: u32| json!({"uuid": format!("GPU-{memory}"), "minor": 0, "memoryMiB": memory});
                let shadow = |name: &str, memory: u32| {
                    json!({"metadata": {"name": name, "uid": name}, "spec": {},
                    "status": {"total": 1, "cards": [card(memory)]}})
                };
                let items = json!([shadow("n1", 15_360), shadow("n2", 81_920)]);
                list("GPUShadowList", "gpu-migrate.io/v1alpha1", items)
            }
            RUNTIME_CLASSES => {
                let overhead = json!({"podFixed": {"memory": "120Mi"}});
                let items = json!([{"metadata": {"name": "kata"}, "handler": "kata", "overhead": overhead},
                    {"metadata": {"name": "nvidia"}, "handler": "nvidia"}]);
                list("RuntimeClassList", "node.k8s.io/v1", items)
            }
            other => panic!("{} {other}", parts.method),
        };
        respond(stream::iter([Bytes::from(answer.to_string())]).boxed())
    }

    fn modified(&self, object: &Value) {
        let line = json!({"type": "MODIFIED", "object": object}).to_string() + "\n";
        for watcher in self.watchers.lock().unwrap().iter() {
            let _ = watcher.unbounded_send(Bytes::from(line.clone()));
        }
    }

    fn condition(&self, name: &str) -> Option<Value> {
        let written = self.conditions.lock().unwrap();
        written.iter().rev().find(|(of, _)| of == name).map(|(_, condition)| condition.clone())
    }
}

fn migration(name: &str, generation: i64, spec: Value) -> Value {
    json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUMigration",
        "metadata": {"name": name, "uid": name, "generation": generation, "resourceVersion": generation.to_string()},
        "spec": spec})
}

#[tokio::test]
async fn policies_are_followed_and_judged_in_their_status() {
    let api = Api {
        migrations: Arc::new(Mutex::new(vec![
            migration("good", 1, json!({"project": "good", "mode": "Audit"})),
            migration("strange", 1, json!({"project": "strange", "mode": "Sideways"})),
            migration("twin-a", 1, json!({"project": "twin", "mode": "Enforce"})),
            migration("twin-b", 1, json!({"project": "twin", "mode": "Enforce"})),
        ])),
        watchers: Arc::default(),
        conditions: Arc::default(),
        accepted: Arc::default(),
    };
    let metrics = Metrics::default();
    let store = Store::new(Settings::default(), metrics.clone());
    let (_leading, leads) = tokio::sync::watch::channel(true);
    let source = ClusterSource::new(api.client(), store.clone(), leads);
    let listed = source.listed();
    assert!(listed.check().is_err());
    let stop = CancellationToken::new();
    let running = tokio::spawn(source.run(stop.clone()));
    eventually("both lists", || listed.check().is_ok()).await;

    let mode = |name: &str| {
        let snapshot = store.snapshot().load_full();
        snapshot.policies.iter().find(|policy| policy.reference.name == name).map(|policy| policy.mode)
    };
    assert_eq!((mode("good"), mode("strange")), (Some(Mode::Audit), None), "one bad object stops no other");
    assert_eq!((metrics.policies.get(), metrics.invalid_policies.get()), (3, 1));
    let labels = store.snapshot().load().namespaces["team-a"].clone();
    assert_eq!(labels.len(), 1, "only the labels that decide: {labels:?}");

    let cluster = ClusterFacts {
        largest_card_mib: Some(81_920),
        runtime_classes: Some([("kata".to_owned(), true), ("nvidia".to_owned(), false)].into()),
    };
    eventually("what the cluster has", || *store.snapshot().load().cluster == cluster).await;

    let said =
        |name: &str, reason: &str| api.condition(name).is_some_and(|condition| condition["reason"] == reason);
    eventually("a word on each", || {
        said("good", "Accepted")
            && said("strange", "Unreadable")
            && said("twin-a", "Conflict")
            && said("twin-b", "Conflict")
    })
    .await;

    // An invalid new form keeps the last good one, and says so.
    eventually("the watch", || !api.watchers.lock().unwrap().is_empty()).await;
    api.modified(&migration(
        "good",
        2,
        json!({"project": "good", "mode": "Enforce", "rollout": {"percent": 500}}),
    ));
    eventually("the verdict", || said("good", "Invalid")).await;
    assert_eq!(mode("good"), Some(Mode::Audit));
    let condition = api.condition("good").unwrap();
    assert_eq!((&condition["status"], &condition["observedGeneration"]), (&json!("False"), &json!(2)));
    assert!(condition["message"].as_str().unwrap().contains("spec.rollout.percent: 500: expected 0 to 100"));

    api.modified(&migration("good", 3, json!({"project": "good", "mode": "Enforce"})));
    eventually("the repaired policy", || mode("good") == Some(Mode::Enforce) && said("good", "Accepted"))
        .await;
    // What another replica, or this one after a restart, goes by while a newer form is invalid.
    let accepted = |name: &str, generation: i64| {
        let all = api.accepted.lock().unwrap();
        all.iter().rev().find(|(of, accepted)| of == name && accepted["generation"] == generation).cloned()
    };
    eventually("the accepted spec", || accepted("good", 3).is_some()).await;
    let (_, spec) = accepted("good", 3).unwrap();
    let spec: Value = serde_json::from_str(spec["spec"].as_str().unwrap()).unwrap();
    assert_eq!((&spec["project"], &spec["mode"]), (&json!("good"), &json!("Enforce")));
    assert!(
        accepted("good", 1).is_some() && accepted("good", 2).is_none() && accepted("strange", 1).is_none()
    );
    stop.cancel();
    running.await.unwrap();
}
