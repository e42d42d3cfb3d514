//! The port: paths, callers.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use gpu_migrate_admission_ext::engine::Leads;
use gpu_migrate_admission_ext::serve::auth::Callers;
use gpu_migrate_admission_ext::serve::verbs;
use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tower::ServiceExt as _;

use crate::common::*;

async fn call(router: &Router, method: &str, path: &str, token: &str, body: &Value) -> (StatusCode, String) {
    let mut request = Request::builder().method(method).uri(path).header("content-type", "application/json");
    if !token.is_empty() {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    let answer = router.clone().oneshot(request.body(Body::from(body.to_string())).unwrap()).await.unwrap();
    let status = answer.status();
    let text = answer.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8_lossy(&text).into_owned())
}

#[tokio::test]
async fn every_verb_answers_200_on_its_path() {
    let pod = shared("p", &[(50, 4)]);
    let engine = engine(&[node("a", 2, 16), pod.clone()]);
    let router = verbs(engine, Callers::anyone());
    let names = json!({"Pod": pod, "Nodes": null, "NodeNames": ["a"]});
    let whole =
        json!({"Pod": pod, "Nodes": {"metadata": {}, "items": [node("a", 2, 16)]}, "NodeNames": null});
    let victims = json!({"Pod": pod, "NodeNameToVictims": null, "NodeNameToMetaVictims": {}});
    let binding = json!({"PodName": "p", "PodNamespace": "default", "PodUID": "uid-p", "Node": "a"});
    let fits =
        r#"{"Nodes":null,"NodeNames":["a"],"FailedNodes":{},"FailedAndUnresolvableNodes":{},"Error":""}"#;
    let table = [
        ("filter", &names, fits),
        ("filter-dryrun", &names, fits),
        ("predicates", &whole, "\"NodeNames\":null,\"FailedNodes\":{}"),
        ("prioritize", &names, r#"[{"Host":"a","Score":10}]"#),
        ("preempt", &victims, r#"{"NodeNameToMetaVictims":{}}"#),
        ("bind", &binding, r#"{"Error":""}"#),
    ];
    for (verb, body, expected) in table {
        let (status, text) = call(&router, "POST", &format!("/scheduler/{verb}"), "", body).await;
        assert_eq!(status, StatusCode::OK, "{verb}: {text}");
        assert!(text.contains(expected), "{verb}: {text}");
    }
    let (status, text) = call(&router, "POST", "/scheduler/filter", "", &json!({})).await;
    assert!(
        status == StatusCode::OK && text.contains("missing field `Pod`"),
        "an Error that the scheduler logs: {text}"
    );
    assert_eq!(
        call(&router, "GET", "/scheduler/filter", "", &json!({})).await.0,
        StatusCode::METHOD_NOT_ALLOWED
    );
    assert_eq!(call(&router, "POST", "/scheduler/unbind", "", &json!({})).await.0, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn without_the_token_nothing_is_moved() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "a-token-that-is-long-enough").unwrap();
    let pod = shared("p", &[(50, 4)]);
    let engine = engine(&[node("a", 2, 16), pod]);
    let router = verbs(Arc::clone(&engine), Callers::anyone().with_token_file(file.path()).unwrap());
    let body = json!({"PodName": "p", "PodNamespace": "default", "PodUID": "uid-p", "Node": "a"});
    for token in ["", "a-token-that-is-long-enougH"] {
        let (status, text) = call(&router, "POST", "/scheduler/bind", token, &body).await;
        assert_eq!(status, StatusCode::UNAUTHORIZED, "{text}");
    }
    assert_eq!(engine.metrics().unauthorized.get(), 2);
    assert!(!engine.read(|cluster| cluster.is_placed("uid-p")));
    let (status, text) = call(&router, "POST", "/scheduler/bind", "a-token-that-is-long-enough", &body).await;
    assert_eq!((status, text.as_str()), (StatusCode::OK, r#"{"Error":""}"#));
}

#[tokio::test]
async fn only_a_synced_leader_is_ready() {
    let engine = engine(&[]);
    assert_eq!(engine.not_ready(), None);
    engine.set_leading(Leads::Until(std::time::Instant::now()));
    assert!(engine.not_ready().unwrap().contains("not the leader"));
}
