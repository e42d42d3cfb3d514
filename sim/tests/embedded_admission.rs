//! Mutating webhooks on the embedded API server: who is called, what is taken over, and what happens when a webhook fails.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use axum::routing::post;
use axum::{Json, Router};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use gpu_migrate_sim::cluster::api::ApiServer;
use gpu_migrate_sim::cluster::json_client;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use kube::Client;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

/// What the webhooks were asked, by path.
type Asked = Arc<Mutex<BTreeMap<String, Vec<Value>>>>;

async fn review(State(asked): State<Asked>, uri: axum::http::Uri, Json(review): Json<Value>) -> Json<Value> {
    let path = uri.path().trim_start_matches('/').to_owned();
    asked.lock().entry(path.clone()).or_default().push(review["request"].clone());
    let mut response = json!({"uid": review["request"]["uid"], "allowed": true});
    let patch = |operations: Value| STANDARD.encode(operations.to_string());
    match path.as_str() {
        "deny" => {
            response = json!({"uid": response["uid"], "allowed": false, "status": {"message": "not today"}});
        }
        "label" => {
            response["patchType"] = json!("JSONPatch");
            response["patch"] =
                patch(json!([{"op": "add", "path": "/metadata/labels", "value": {"seen": "yes"}}])).into();
            response["warnings"] = json!(["mind the label"]);
        }
        "limit" => {
            response["patchType"] = json!("JSONPatch");
            let limits = json!({"limits": {"nvidia.com/gpu": "2"}});
            response["patch"] =
                patch(json!([{"op": "replace", "path": "/spec/containers/0/resources", "value": limits}]))
                    .into();
        }
        "nonsense" => {
            response["patchType"] = json!("JSONPatch");
            response["patch"] = patch(json!([{"op": "remove", "path": "/not/there"}])).into();
        }
        "slow" => tokio::time::sleep(std::time::Duration::from_secs(5)).await,
        _ => {}
    }
    Json(json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}))
}

struct Stage {
    client: Client,
    asked: Asked,
    url: String,
    bundle: String,
}

async fn start() -> Stage {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let running = ApiServer::default().serve(0, CancellationToken::new()).await.unwrap();
    let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
    let key = rustls::pki_types::PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let config = rustls::ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    let asked = Asked::default();
    let router = Router::new().route("/{name}", post(review)).with_state(asked.clone());
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            let (acceptor, service) = (acceptor.clone(), TowerToHyperService::new(router.clone()));
            tokio::spawn(async move {
                let Ok(tls) = acceptor.accept(tcp).await else { return };
                let server = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                let _ = server.serve_connection(TokioIo::new(tls), service).await;
            });
        }
    });
    Stage { client: running.client().unwrap(), asked, url, bundle: STANDARD.encode(made.cert.pem()) }
}

impl Stage {
    fn hook(&self, path: &str, more: Value) -> Value {
        let mut hook = json!({
            "name": format!("{path}.example.org"), "sideEffects": "None", "admissionReviewVersions": ["v1"],
            "clientConfig": {"url": format!("{}/{path}", self.url), "caBundle": self.bundle}, "failurePolicy": "Fail",
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}],
        });
        for (key, value) in more.as_object().unwrap() {
            hook[key] = value.clone();
        }
        hook
    }

    async fn register(&self, hooks: Vec<Value>) -> kube::Result<Value> {
        let path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations";
        let _ = json_client::delete(&self.client, &format!("{path}/hooks")).await;
        json_client::create(&self.client, path, &json!({"metadata": {"name": "hooks"}, "webhooks": hooks}))
            .await
    }

    async fn create(&self, resources: Value) -> Result<Value, kube::core::Status> {
        let pod = json!({"metadata": {"generateName": "p-"}, "spec": {"containers": [{"name": "c", "resources": resources}]}});
        match json_client::create(&self.client, "/api/v1/namespaces/default/pods", &pod).await {
            Ok(pod) => Ok(pod),
            Err(kube::Error::Api(status)) => Err(*status),
            Err(other) => panic!("{other}"),
        }
    }

    fn times(&self, path: &str) -> usize {
        self.asked.lock().get(path).map_or(0, Vec::len)
    }
}

#[tokio::test]
async fn only_who_is_selected_is_shown_and_as_a_real_api_server_shows_it() {
    let stage = start().await;
    let gpu =
        "object.spec.containers.exists(c, has(c.resources.limits) && 'nvidia.com/gpu' in c.resources.limits)";
    let hooks = vec![
        stage.hook("label", json!({"matchConditions": [{"name": "gpu", "expression": gpu}]})),
        stage.hook("elsewhere", json!({"namespaceSelector": {"matchLabels": {"opted": "in"}}})),
        stage.hook("others", json!({"objectSelector": {"matchLabels": {"never": "so"}}})),
    ];
    stage.register(hooks).await.unwrap();
    let plain = stage.create(json!({})).await.unwrap();
    assert!(plain["metadata"]["labels"].is_null());
    let shown = stage.create(json!({"limits": {"nvidia.com/gpu": 1}})).await.unwrap();
    assert_eq!(shown["metadata"]["labels"]["seen"], "yes");
    assert_eq!((stage.times("label"), stage.times("elsewhere"), stage.times("others")), (1, 0, 0));
    let asked = stage.asked.lock()["label"][0].clone();
    assert!(asked["name"].is_null(), "a generated name is not there yet");
    assert_eq!((&asked["operation"], &asked["dryRun"]), (&json!("CREATE"), &json!(false)));
    let requests = &asked["object"]["spec"]["containers"][0]["resources"]["requests"];
    assert_eq!(requests["nvidia.com/gpu"], 1, "requests follow limits before the webhook");
}

#[tokio::test]
async fn defaults_and_checks_come_again_after_the_patch() {
    let stage = start().await;
    stage.register(vec![stage.hook("limit", json!({}))]).await.unwrap();
    let pod = stage.create(json!({})).await.unwrap();
    assert_eq!(pod["spec"]["containers"][0]["resources"]["requests"]["nvidia.com/gpu"], "2");
}

#[tokio::test]
async fn an_earlier_webhook_is_asked_again_if_a_later_one_changed_the_object() {
    let stage = start().await;
    let first = stage.hook("first", json!({"reinvocationPolicy": "IfNeeded"}));
    stage.register(vec![first.clone(), stage.hook("label", json!({}))]).await.unwrap();
    stage.create(json!({})).await.unwrap();
    assert_eq!((stage.times("first"), stage.times("label")), (2, 1));
    stage.register(vec![first, stage.hook("nothing", json!({}))]).await.unwrap();
    stage.create(json!({})).await.unwrap();
    assert_eq!(stage.times("first"), 3, "nothing changed since");
}

#[tokio::test]
async fn failures_go_by_the_policy_and_denials_do_not() {
    let stage = start().await;
    for (path, more) in
        [("nonsense", json!({})), ("slow", json!({"timeoutSeconds": 1})), ("absent/", json!({}))]
    {
        for (policy, admitted) in [("Ignore", true), ("Fail", false)] {
            let mut hook = stage.hook(path, more.clone());
            hook["failurePolicy"] = policy.into();
            stage.register(vec![hook]).await.unwrap();
            match stage.create(json!({})).await {
                Ok(_) => assert!(admitted, "{path} {policy}"),
                Err(status) => {
                    assert!(!admitted, "{path} {policy}");
                    assert_eq!(status.reason, "InternalError");
                    assert!(status.message.contains("failed calling webhook"), "{}", status.message);
                }
            }
        }
    }
    let mut untrusted = stage.hook("label", json!({}));
    untrusted["clientConfig"]["caBundle"] =
        STANDARD.encode(rcgen::generate_simple_self_signed(vec!["x".to_owned()]).unwrap().cert.pem()).into();
    stage.register(vec![untrusted]).await.unwrap();
    assert_eq!(stage.create(json!({})).await.unwrap_err().reason, "InternalError", "another CA");

    stage.register(vec![stage.hook("deny", json!({"failurePolicy": "Ignore"}))]).await.unwrap();
    let denied = stage.create(json!({})).await.unwrap_err();
    assert_eq!((denied.code, denied.message.contains("denied the request: not today")), (403, true));
}

#[tokio::test]
async fn what_could_not_be_followed_is_refused_when_it_is_registered() {
    let stage = start().await;
    let code = |result: kube::Result<Value>| match result {
        Err(kube::Error::Api(status)) => status.code,
        other => panic!("{other:?}"),
    };
    let updates = json!({"rules": [{"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["UPDATE"]}]});
    assert_eq!(code(stage.register(vec![stage.hook("label", updates)]).await), 501);
    let broken = json!({"matchConditions": [{"name": "x", "expression": "object.("}]});
    assert_eq!(code(stage.register(vec![stage.hook("label", broken)]).await), 422);
}
