//! The context of a trace goes into pods that are converted, and into no others; the collector changes nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use base64::Engine;
use common::policy;
use gpu_migrate_model::names;
use gpu_migrate_runtime::Tasks;
use gpu_migrate_runtime::trace::{TraceArgs, Tracer};
use gpu_migrate_webhook::http::{Context, webhook};
use gpu_migrate_webhook::metrics::Metrics;
use gpu_migrate_webhook::policy::{Policies, Settings};
use gpu_migrate_webhook::restore::restore;
use gpu_migrate_webhook::review::{Snapshot, TracedPod, answer};
use http::Request;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

const OURS: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

fn snapshot(spec: Value) -> Snapshot {
    let (policies, _) = Policies::compile(&[policy("p", spec)], &Settings::default());
    let labels = Arc::new(serde_json::from_value(common::namespace(&[])).unwrap());
    Snapshot { policies, namespaces: [("team".to_owned(), labels)].into(), ..Snapshot::default() }
}

fn review(metadata: Value, resource: &str, dry_run: bool) -> Value {
    let spec = json!({"containers": [{"name": "main", "resources": {"limits": {resource: "1"}}}]});
    json!({
        "kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1",
        "request": {"uid": "r", "operation": "CREATE", "resource": {"group": "", "version": "v1", "resource": "pods"},
            "namespace": "team", "dryRun": dry_run, "object": {"metadata": metadata, "spec": spec}},
    })
}

/// The pod as it is after the answer, and what the trace says of it.
fn reviewed(review: &Value, spec: Value) -> (Value, Option<TracedPod>) {
    let answer = answer(review.to_string().as_bytes(), &snapshot(spec), Some(OURS)).unwrap();
    let body: Value = serde_json::from_slice(&answer.body).unwrap();
    let mut pod = review["request"]["object"].clone();
    if let Some(patch) = body["response"]["patch"].as_str() {
        let patch = base64::engine::general_purpose::STANDARD.decode(patch).unwrap();
        json_patch::patch(&mut pod, &serde_json::from_slice::<json_patch::Patch>(&patch).unwrap()).unwrap();
    }
    (pod, answer.traced)
}

#[test]
fn only_a_converted_pod_gets_the_context_of_its_trace() {
    let gpu = "nvidia.com/gpu";
    let other = json!({"name": "x", "annotations": {names::TRACEPARENT: "of the pod it was copied from"}});
    for (what, review, spec, traced) in [
        ("converted", review(json!({"name": "x"}), gpu, false), json!({}), true),
        ("copied from a traced pod", review(other, gpu, false), json!({}), true),
        ("tried", review(json!({"name": "x"}), gpu, true), json!({}), false),
        ("audited", review(json!({"name": "x"}), gpu, false), json!({"mode": "Audit"}), false),
        ("without a card", review(json!({"name": "x"}), "cpu", false), json!({}), false),
        ("shared by itself", review(json!({"name": "x"}), "tencent.com/vcuda-core", false), json!({}), false),
    ] {
        let before = review["request"]["object"].clone();
        let (mut pod, of_trace) = reviewed(&review, spec);
        let written = pod["metadata"]["annotations"][names::TRACEPARENT].as_str().map(str::to_owned);
        assert_eq!(written.as_deref(), traced.then_some(OURS), "{what}");
        assert_eq!(of_trace.is_some(), traced, "{what}");
        if let Some(of_trace) = of_trace {
            let [namespace, name, policy] = ["team", "x", "p@1"].map(str::to_owned);
            assert_eq!(of_trace, TracedPod { namespace, name, uid: String::new(), policy }, "{what}");
            let again = json!({"metadata": pod["metadata"], "spec": pod["spec"]});
            let mut second = review.clone();
            second["request"]["object"] = again.clone();
            assert_eq!(reviewed(&second, json!({})), (again, None), "{what}, reviewed once more");
        }
        if what == "converted" {
            restore(&mut pod).unwrap();
            assert_eq!(pod, before, "restored");
        }
    }
}

/// A listener that never accepts: connections are made and nothing is answered.
#[tokio::test(flavor = "multi_thread")]
async fn reviews_are_answered_the_same_while_the_collector_hangs() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", silent.local_addr().unwrap()).parse().unwrap();
    let metrics = Metrics::default();
    let mut tasks = Tasks::new(CancellationToken::new());
    let args = TraceArgs { otlp_endpoint: Some(endpoint) };
    let tracer = Tracer::start(&args, "webhook", None, metrics.spans.clone(), &mut tasks).unwrap();
    let snapshot = Arc::new(arc_swap::ArcSwap::from_pointee(snapshot(json!({}))));
    let context = Context { tracer, ..Context::new(snapshot, metrics.clone(), 32 << 20) };
    let body = review(json!({"name": "x"}), "nvidia.com/gpu", false).to_string();
    for _ in 0..1_500 {
        let request = Request::post("/mutate").header("content-type", "application/json");
        // Of the API server's own trace.
        let request = request.header("traceparent", OURS).body(Body::from(body.clone())).unwrap();
        let response = webhook(context.clone()).oneshot(request).await.unwrap();
        assert_eq!(response.status(), 200);
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let body: Value = serde_json::from_slice(&body).unwrap();
        let patch = body["response"]["patch"].as_str().unwrap();
        let patch = base64::engine::general_purpose::STANDARD.decode(patch).unwrap();
        let patch = String::from_utf8(patch).unwrap();
        assert!(
            patch.contains(&OURS[..36]) && !patch.contains(OURS),
            "in the caller's trace, below it: {patch}"
        );
    }
    assert_eq!(metrics.spans.count("exported"), 0);
    tasks.shut_down(Duration::from_secs(60)).await;
    drop(silent);
}
