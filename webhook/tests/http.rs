//! The HTTP face, without a port: what the API server really sent, and what it must never send.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::body::Body;
use base64::Engine;
use common::policy;
use futures::StreamExt as _;
use gpu_migrate_runtime::serve::Peer;
use gpu_migrate_webhook::http::{Context, LARGEST_BODY, webhook};
use gpu_migrate_webhook::metrics::{Metrics, ReasonLabel};
use gpu_migrate_webhook::policy::{Policies, Settings};
use gpu_migrate_webhook::review::Snapshot;
use http::{Request, StatusCode};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tower::ServiceExt;

/// Namespace `default` is opted in for project `p`; `other` is not.
fn snapshot(spec: Value) -> Snapshot {
    let (policies, rejected) = Policies::compile(&[policy("p", spec)], &Settings::default());
    assert_eq!(rejected, []);
    let labels = |labels: Value| Arc::new(serde_json::from_value(labels).unwrap());
    let namespaces = [
        ("default".to_owned(), labels(common::namespace(&[]))),
        ("other".to_owned(), labels(json!({"gpu-migrate.io/project": "p"}))),
    ];
    Snapshot { policies, namespaces: namespaces.into(), ..Snapshot::default() }
}

/// Room for two of the largest bodies from one address.
const MEMORY: usize = 32 << 20;

fn context(spec: Value) -> Context {
    let snapshot = Arc::new(arc_swap::ArcSwap::from_pointee(snapshot(spec)));
    Context::new(snapshot, Metrics::default(), MEMORY)
}

async fn send(context: &Context, request: Request<Body>) -> (StatusCode, Value) {
    let response = webhook(context.clone()).oneshot(request).await.unwrap();
    let status = response.status();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
}

fn post(body: impl Into<Body>) -> Request<Body> {
    let request = Request::post("/mutate?timeout=5s").header("content-type", "application/json");
    request.body(body.into()).unwrap()
}

fn capture(name: &str) -> Value {
    let path = format!("{}/tests/captures/{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn patched(review: &Value, answer: &Value) -> Value {
    let patch = base64::engine::general_purpose::STANDARD
        .decode(answer["response"]["patch"].as_str().unwrap())
        .unwrap();
    assert_eq!(answer["response"]["patchType"], "JSONPatch");
    let mut pod = review["request"]["object"].clone();
    let patch: json_patch::Patch = serde_json::from_slice(&patch).unwrap();
    json_patch::patch(&mut pod, &patch).unwrap();
    pod
}

#[tokio::test]
async fn what_a_real_api_server_sent_is_converted() {
    let context = context(json!({}));
    for name in [
        "bare-pod",
        "bare-pod-generateName",
        "deployment",
        "job",
        "statefulset",
        "daemonset",
        "dry-run",
        "init-containers",
        "kubectl-run-overrides",
        "limits-and-requests",
    ] {
        let review = capture(name);
        let before = review["request"]["object"]["spec"].to_string();
        assert!(before.contains("\"nvidia.com/gpu\""), "{name} asks for a card");
        let (status, answer) = send(&context, post(review.to_string())).await;
        assert_eq!(status, StatusCode::OK, "{name}");
        assert_eq!(answer["kind"], "AdmissionReview");
        assert_eq!(answer["apiVersion"], "admission.k8s.io/v1");
        assert_eq!(answer["response"]["uid"], review["request"]["uid"], "{name}");
        assert_eq!(answer["response"]["allowed"], true, "{name}");
        assert_eq!(answer["response"]["auditAnnotations"]["policy"], "p@1", "{name}");
        let spec = patched(&review, &answer)["spec"].to_string();
        assert!(
            !spec.contains("\"nvidia.com/gpu\"") && spec.contains("\"tencent.com/vcuda-core\""),
            "{name}: {spec}"
        );
    }
    let reviews = |outcome| {
        let label = gpu_migrate_webhook::metrics::OutcomeLabel { outcome };
        context.metrics.reviews.get_or_create(&label).get()
    };
    assert_eq!((reviews("converted"), context.metrics.dry_runs.get()), (9, 1));
}

#[tokio::test]
async fn a_review_that_does_not_concern_us_is_admitted_as_it_is() {
    let context = context(json!({}));
    let review = |edit: fn(&mut Value)| {
        let mut review = capture("bare-pod");
        edit(&mut review["request"]);
        review.to_string()
    };
    for (name, body) in [
        ("update", review(|request| request["operation"] = json!("UPDATE"))),
        (
            "delete",
            review(|request| {
                request["operation"] = json!("DELETE");
                request["object"] = Value::Null;
            }),
        ),
        ("another kind", review(|request| request["resource"]["resource"] = json!("deployments"))),
        (
            "another kind of another form",
            review(|request| {
                request["resource"] = json!({"group": "apps", "version": "v1", "resource": "deployments"});
                request["object"] = json!({"spec": {"containers": "none"}});
            }),
        ),
        ("another group", review(|request| request["resource"]["group"] = json!("metrics.k8s.io"))),
        ("a subresource", review(|request| request["subResource"] = json!("status"))),
        ("a namespace that is not opted in", review(|request| request["namespace"] = json!("other"))),
    ] {
        let (status, answer) = send(&context, post(body)).await;
        let uid = &capture("bare-pod")["request"]["uid"];
        assert_eq!(
            (status, &answer["response"]),
            (StatusCode::OK, &json!({"uid": uid, "allowed": true})),
            "{name}"
        );
    }
}

/// `kubectl debug` adds a container to a pod that runs: in a guarded namespace it sees no card.
#[tokio::test]
async fn ephemeral_containers_are_guarded() {
    let review = |namespace: &str| {
        let mut review = capture("bare-pod");
        let request = &mut review["request"];
        request["operation"] = json!("UPDATE");
        request["subResource"] = json!("ephemeralcontainers");
        request["namespace"] = json!(namespace);
        let mut pod = request["object"].clone();
        pod["spec"]["ephemeralContainers"] = json!([{"name": "old", "image": "i"}]);
        request["oldObject"] = pod.clone();
        pod["spec"]["ephemeralContainers"] = json!([{"name": "old", "image": "i"}, {"name": "new", "image": "i",
            "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}]);
        request["object"] = pod;
        review
    };
    let mut snapshot = snapshot(json!({}));
    let guarded =
        serde_json::from_value(common::namespace(&[("gpu-migrate.io/void-guard", "true")])).unwrap();
    snapshot.namespaces.insert("guarded".into(), Arc::new(guarded));
    let context =
        Context::new(Arc::new(arc_swap::ArcSwap::from_pointee(snapshot)), Metrics::default(), MEMORY);
    let (_, answer) = send(&context, post(review("guarded").to_string())).await;
    let mut expected = review("guarded")["request"]["object"].clone();
    expected["spec"]["ephemeralContainers"][1]["env"][0]["value"] = json!("void");
    assert_eq!(patched(&review("guarded"), &answer), expected, "the API server refuses any other change");
    let (_, answer) = send(&context, post(review("default").to_string())).await;
    assert!(answer["response"].get("patch").is_none() && answer["response"]["allowed"] == true, "{answer}");
    let mut removed = review("guarded");
    removed["request"]["object"]["spec"]["ephemeralContainers"] = json!("none");
    let (status, answer) = send(&context, post(removed.to_string())).await;
    assert_eq!((status, &answer["response"]["allowed"]), (StatusCode::OK, &json!(true)));
}

#[tokio::test]
async fn a_pod_that_does_not_parse_stays_legacy_with_a_warning() {
    let mut review = capture("bare-pod");
    review["request"]["object"]["spec"]["containers"] = json!("all of them");
    let (status, answer) = send(&context(json!({})), post(review.to_string())).await;
    assert_eq!((status, &answer["response"]["allowed"]), (StatusCode::OK, &json!(true)));
    assert!(answer["response"].get("patch").is_none());
    let warning = answer["response"]["warnings"][0].as_str().unwrap();
    assert!(
        warning.contains("not a pod: invalid type: string \"all of them\"") && warning.chars().count() <= 120
    );
}

/// Found by fuzzing: a patch on a part that is not there does not apply.
#[tokio::test]
async fn a_pod_without_metadata_or_spec_stays_legacy_with_a_warning() {
    for part in ["metadata", "spec"] {
        for value in [None, Some(json!(null))] {
            let mut review = capture("bare-pod");
            let object = review["request"]["object"].as_object_mut().unwrap();
            match &value {
                None => drop(object.remove(part)),
                Some(value) => drop(object.insert(part.into(), value.clone())),
            }
            let (status, answer) = send(&context(json!({})), post(review.to_string())).await;
            assert_eq!((status, &answer["response"]["allowed"]), (StatusCode::OK, &json!(true)));
            assert!(answer["response"].get("patch").is_none());
            let warning = answer["response"]["warnings"][0].as_str().unwrap();
            assert!(warning.contains("left alone: not a pod: "), "{warning}");
        }
    }
}

#[tokio::test]
async fn a_denial_is_an_answer() {
    let mut review = capture("bare-pod");
    for map in ["limits", "requests"] {
        review["request"]["object"]["spec"]["containers"][0]["resources"][map] =
            json!({"nvidia.com/gpu": "1500m"});
    }
    let (status, answer) = send(&context(json!({"onUnconvertible": "Deny"})), post(review.to_string())).await;
    assert_eq!((status, &answer["response"]["allowed"]), (StatusCode::OK, &json!(false)));
    assert_eq!(answer["response"]["status"]["code"], 403);
    assert!(answer["response"]["status"]["message"].as_str().unwrap().contains("1500m"));
}

#[tokio::test]
async fn bad_bodies_get_a_proper_answer() {
    let context = context(json!({}));
    let good = capture("bare-pod");
    let edited = |edit: &dyn Fn(&mut Value)| {
        let mut review = good.clone();
        edit(&mut review);
        review.to_string().into_bytes()
    };
    let nested = |open: &str, close: &str| (open.repeat(100_000) + &close.repeat(100_000)).into_bytes();
    let in_object = edited(&|review| review["request"]["object"]["spec"]["nodeName"] = json!("@@"));
    let in_object =
        String::from_utf8(in_object).unwrap().replace("\"@@\"", &"[".repeat(100_000)).into_bytes();
    for (name, body, status, expected) in [
        ("empty", Vec::new(), 400, "empty body"),
        ("not JSON", b"hello".to_vec(), 400, "not an AdmissionReview"),
        ("not UTF-8", vec![0xff, 0xfe, b'{'], 400, "not an AdmissionReview"),
        ("cut short", edited(&|_| {})[..2000].to_vec(), 400, "not an AdmissionReview: EOF"),
        ("10 MiB", vec![b' '; 10 << 20], 413, "larger than 7340032 bytes"),
        ("nested arrays", nested("[", "]"), 400, "not an AdmissionReview"),
        ("nested objects", nested("{\"a\":", "}"), 400, "not an AdmissionReview"),
        ("nested in the pod", in_object, 400, "not an AdmissionReview"),
        ("an array", b"[]".to_vec(), 400, "not an AdmissionReview"),
        ("null", b"null".to_vec(), 400, "not an AdmissionReview"),
        (
            "another kind",
            edited(&|review| review["kind"] = json!("Pod")),
            400,
            "kind: \"Pod\": expected AdmissionReview",
        ),
        (
            "an old version",
            edited(&|r| r["apiVersion"] = json!("admission.k8s.io/v1beta1")),
            400,
            "apiVersion",
        ),
        (
            "no request",
            edited(&|review| review["request"] = Value::Null),
            400,
            "request: \"\": expected an object",
        ),
        ("a number as UID", edited(&|review| review["request"]["uid"] = json!(7)), 400, "expected a string"),
        ("no UID", edited(&|review| review["request"]["uid"] = json!("")), 400, "request.uid"),
    ] {
        let (got, answer) = send(&context, post(body)).await;
        assert_eq!(got.as_u16(), status, "{name}");
        assert_eq!((&answer["kind"], &answer["code"]), (&json!("Status"), &json!(status)), "{name}");
        let message = answer["message"].as_str().unwrap();
        assert!(message.contains(expected), "{name}: {message}");
    }
    let too_large = ReasonLabel { reason: "too_large" };
    assert_eq!(context.metrics.rejected.get_or_create(&too_large).get(), 1);
    assert_eq!(context.metrics.in_flight.get(), 0);
}

#[tokio::test]
async fn a_body_of_unknown_length_is_cut_at_the_limit() {
    let chunk = || Ok::<_, std::io::Error>(vec![b' '; 1 << 20]);
    let endless = Body::from_stream(futures::stream::repeat_with(chunk));
    assert_eq!(send(&context(json!({})), post(endless)).await.0, StatusCode::PAYLOAD_TOO_LARGE);
}

#[tokio::test]
async fn the_largest_body_still_goes_through() {
    let mut body = capture("bare-pod").to_string().into_bytes();
    body.resize(LARGEST_BODY, b' ');
    assert_eq!(send(&context(json!({})), post(body)).await.0, StatusCode::OK);
}

#[tokio::test]
async fn wrong_paths_methods_and_content_types() {
    let context = context(json!({}));
    let request = |method: &str, path: &str, kind: &str| {
        Request::builder()
            .method(method)
            .uri(path)
            .header("content-type", kind)
            .body(Body::from("{}"))
            .unwrap()
    };
    for (request, expected) in [
        (request("POST", "/", "application/json"), 404),
        (request("GET", "/mutate", "application/json"), 405),
        (request("POST", "/mutate", "text/plain"), 415),
        (request("POST", "/mutate", "application/json; charset=utf-8"), 400),
    ] {
        let what = format!("{request:?}");
        assert_eq!(send(&context, request).await.0.as_u16(), expected, "{what}");
    }
}

/// What an address cannot do to the others: with many large bodies, or with many that never end.
#[tokio::test]
async fn bodies_of_one_address_leave_room_for_the_others() {
    let context = context(json!({}));
    let from = |last: u8, body: Body| {
        let mut request = post(body);
        request.extensions_mut().insert(Peer([10, 0, 0, last].into()));
        webhook(context.clone()).oneshot(request)
    };
    let unfinished = |bytes: usize| {
        let first = futures::stream::iter([Ok::<_, std::io::Error>(vec![b' '; bytes])]);
        Body::from_stream(first.chain(futures::stream::pending()))
    };
    let mut held = Vec::new();
    for bytes in std::iter::repeat_n(7 << 20, 50).chain(std::iter::repeat_n(100, 300)) {
        let mut request = Box::pin(from(1, unfinished(bytes)));
        match futures::poll!(&mut request) {
            std::task::Poll::Pending => held.push(request),
            std::task::Poll::Ready(response) => {
                let response = response.unwrap();
                assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
                assert_eq!(response.headers()["retry-after"], "1");
            }
        }
    }
    assert_eq!(held.len(), 2 + 300);
    assert!(context.memory.used() <= MEMORY / 2);
    let review = capture("bare-pod").to_string();
    assert_eq!(from(2, review.clone().into()).await.unwrap().status(), StatusCode::OK);
    assert_eq!(from(1, review.into()).await.unwrap().status(), StatusCode::OK);
    drop(held);
    assert_eq!((context.memory.used(), context.metrics.in_flight.get()), (0, 0));
}

/// The server says how long a body may take, not the client's `?timeout=`.
#[tokio::test(start_paused = true)]
async fn a_body_that_never_ends_meets_the_deadline() {
    let context = context(json!({}));
    let stuck = Body::from_stream(futures::stream::pending::<Result<Vec<u8>, std::io::Error>>());
    let mut request = post(stuck);
    *request.uri_mut() = "/mutate?timeout=30s".parse().unwrap();
    let (status, answer) = send(&context, request).await;
    assert_eq!(status, StatusCode::REQUEST_TIMEOUT);
    assert!(answer["message"].as_str().unwrap().contains("not there within 5s"), "{answer}");
    assert_eq!(context.memory.used(), 0);
}

#[tokio::test]
async fn a_panic_becomes_an_answer() {
    let context = Context { answer: |_, _, _| panic!("a fault"), ..context(json!({})) };
    let (status, answer) = send(&context, post(capture("bare-pod").to_string())).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(answer["message"].as_str().unwrap().contains("a fault in gpu-migrate-webhook"), "{answer}");
    assert_eq!(context.memory.used(), 0);
}

#[tokio::test]
async fn a_leaving_server_asks_for_the_connection_to_be_closed() {
    let context = context(json!({}));
    let ask = || webhook(context.clone()).oneshot(post(capture("bare-pod").to_string()));
    assert!(ask().await.unwrap().headers().get("connection").is_none());
    context.leaving.store(true, Ordering::Relaxed);
    assert_eq!(ask().await.unwrap().headers()["connection"], "close");
}

#[test]
fn metrics_have_the_prefix_of_the_component() {
    let mut registry = prometheus_client::registry::Registry::default();
    let metrics = Metrics::new(registry.sub_registry_with_prefix("gpu_migrate_webhook"));
    metrics.rejected.get_or_create(&ReasonLabel { reason: "overload" }).inc();
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    for expected in [
        "gpu_migrate_webhook_rejected_total{reason=\"overload\"} 1",
        "gpu_migrate_webhook_review_duration_seconds_bucket{le=\"0.0001\"} 0",
        "gpu_migrate_webhook_in_flight 0",
        "gpu_migrate_webhook_build_info{version=",
        "# EOF",
    ] {
        assert!(text.contains(expected), "{expected} in {text}");
    }
}
