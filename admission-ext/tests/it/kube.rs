//! What goes over the wire to a real API server: method, path and body of each call, and what its answers mean.

use std::sync::Arc;
use std::time::Duration;

use gpu_migrate_admission_ext::api::{Api, BindFailure, Binding, Found};
use gpu_migrate_admission_ext::engine::{Engine, Leads, Settings};
use gpu_migrate_admission_ext::kube_api::Kube;
use gpu_migrate_admission_ext::state::Cluster;
use gpu_migrate_admission_ext::state::pod::{PodGroups, Rules};
use gpu_migrate_admission_ext::watch;
use http::{Request, Response, StatusCode};
use kube::client::Body;
use serde_json::{Value, json};

use crate::common::*;

type Handle = tower_test::mock::Handle<Request<Body>, Response<Body>>;

/// A client and the server's end of it.
fn mocked() -> (kube::Client, Handle) {
    let (service, handle) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
    (kube::Client::new(service, "default"), handle)
}

fn api(client: kube::Client) -> Kube {
    Kube::new(client, Rules::default(), Duration::from_millis(500))
}

/// Answers the next call; returns what was asked.
async fn answer(handle: &mut Handle, status: u16, body: Value) -> (String, String, Value) {
    let (request, send) = handle.next_request().await.expect("a call");
    let (parts, sent) = request.into_parts();
    let bytes = sent.collect_bytes().await.unwrap();
    let sent = if bytes.is_empty() { Value::Null } else { serde_json::from_slice(&bytes).unwrap() };
    let text = serde_json::to_vec(&body).unwrap();
    let response = Response::builder().status(StatusCode::from_u16(status).unwrap());
    send.send_response(response.header("content-type", "application/json").body(Body::from(text)).unwrap());
    (parts.method.to_string(), parts.uri.to_string(), sent)
}

fn failure(code: u16, message: &str) -> Value {
    let reason = if code == 404 { "NotFound" } else { "Other" };
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "reason": reason, "code": code})
}

fn binding() -> Binding {
    Binding {
        namespace: "default".into(),
        name: "p".into(),
        uid: "uid-p".into(),
        node: "a".into(),
        annotations: [("tencent.com/predicate-gpu-idx-0".to_owned(), "3".to_owned())].into(),
    }
}

#[tokio::test]
async fn a_binding_carries_uid_node_and_cards_in_one_post() {
    let (client, mut handle) = mocked();
    let server = tokio::spawn(async move {
        answer(
            &mut handle,
            201,
            json!({"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}),
        )
        .await
    });
    assert_eq!(api(client).bind(&binding()).await, Ok(()));
    let (method, path, body) = server.await.unwrap();
    assert_eq!((method.as_str(), path.as_str()), ("POST", "/api/v1/namespaces/default/pods/p/binding?"));
    assert_eq!(body["metadata"]["uid"], "uid-p");
    assert_eq!(body["metadata"]["annotations"], json!({"tencent.com/predicate-gpu-idx-0": "3"}));
    assert_eq!(body["target"], json!({"apiVersion": "v1", "kind": "Node", "name": "a"}));
}

#[tokio::test]
async fn answers_say_made_not_made_or_unknown() {
    let table = [
        (409, BindFailure::Conflict("no".into())),
        (404, BindFailure::Refused("no".into())),
        (403, BindFailure::Refused("no".into())),
        (422, BindFailure::Refused("no".into())),
        (429, BindFailure::Unknown("no".into())),
        (500, BindFailure::Unknown("no".into())),
        (504, BindFailure::Unknown("no".into())),
    ];
    for (code, expected) in table {
        let (client, mut handle) = mocked();
        tokio::spawn(async move { answer(&mut handle, code, failure(code, "no")).await });
        assert_eq!(api(client).bind(&binding()).await, Err(expected), "{code}");
    }
}

#[tokio::test]
async fn no_answer_in_time_is_unknown() {
    let (client, handle) = mocked();
    let failure = api(client).bind(&binding()).await.unwrap_err();
    assert!(matches!(failure, BindFailure::Unknown(_)), "{failure}");
    drop(handle);
}

#[tokio::test]
async fn a_pod_of_the_same_name_is_not_the_same_pod() {
    for (uid, same) in [("uid-p", true), ("uid-of-another", false)] {
        let (client, mut handle) = mocked();
        let pod = bound(shared("p", &[(50, 4)]), "a", "1");
        let server = tokio::spawn(async move { answer(&mut handle, 200, pod).await });
        let found = api(client).look_up("default", "p", uid).await.unwrap();
        assert_eq!(matches!(&found, Found::Pod(pod) if pod.node.as_deref() == Some("a")), same);
        assert_eq!(server.await.unwrap().1, "/api/v1/namespaces/default/pods/p");
    }
}

#[tokio::test]
async fn a_node_is_touched_by_one_annotation() {
    let (client, mut handle) = mocked();
    let server =
        tokio::spawn(async move { answer(&mut handle, 200, json!({"metadata": {"name": "a"}})).await });
    api(client).requeue_pods_of("a").await.unwrap();
    let (method, path, body) = server.await.unwrap();
    assert_eq!((method.as_str(), path.as_str()), ("PATCH", "/api/v1/nodes/a?"));
    assert!(body["metadata"]["annotations"]["gpu-migrate.io/cards-generation"].is_string());
    assert_eq!(body.as_object().unwrap().len(), 1, "nothing else: {body}");
}

#[tokio::test]
async fn a_gate_is_lifted_by_its_name_and_only_from_this_pod() {
    let (client, mut handle) = mocked();
    let server =
        tokio::spawn(async move { answer(&mut handle, 200, json!({"metadata": {"name": "p"}})).await });
    let engine = engine(&[shared("p", &[(50, 4)])]);
    let pod = engine.read(|cluster| Arc::clone(cluster.pod("uid-p").unwrap()));
    api(client).lift_gate(&pod).await.unwrap();
    let (_, path, body) = server.await.unwrap();
    assert_eq!(path, "/api/v1/namespaces/default/pods/p?");
    assert_eq!(body["metadata"]["uid"], "uid-p");
    assert_eq!(body["spec"]["schedulingGates"], json!([{"$patch": "delete", "name": "gpu-migrate.io/gang"}]));
}

#[tokio::test]
async fn a_pod_group_need_not_exist_nor_its_kind() {
    for (status, body, expected) in [
        (200, json!({"metadata": {}, "spec": {"minMember": 3}}), Ok(Some(3))),
        (200, json!({"metadata": {}, "spec": {}}), Ok(Some(1))),
        (404, failure(404, "the server could not find the requested resource"), Ok(None)),
        (403, failure(403, "no"), Err("refused: no".to_owned())),
    ] {
        let (client, mut handle) = mocked();
        let server = tokio::spawn(async move { answer(&mut handle, status, body).await });
        assert_eq!(api(client).min_member("team", "g", PodGroups::Volcano).await, expected);
        let (method, path, _) = server.await.unwrap();
        let expected = "/apis/scheduling.volcano.sh/v1beta1/namespaces/team/podgroups/g";
        assert_eq!((method.as_str(), path.as_str()), ("GET", expected));
    }
}

#[tokio::test]
async fn an_event_is_about_the_pod() {
    let (client, mut handle) = mocked();
    let server =
        tokio::spawn(async move { answer(&mut handle, 201, json!({"metadata": {"name": "e"}})).await });
    let engine = engine(&[shared("p", &[(50, 4)])]);
    let pod = engine.read(|cluster| Arc::clone(cluster.pod("uid-p").unwrap()));
    api(client).warn(&pod, "GangReleased", "why".into()).await;
    let (method, path, body) = server.await.unwrap();
    assert_eq!(
        (method.as_str(), path.as_str()),
        ("POST", "/apis/events.k8s.io/v1/namespaces/default/events?")
    );
    assert_eq!(
        (&body["reason"], &body["note"], &body["type"]),
        (&json!("GangReleased"), &json!("why"), &json!("Warning"))
    );
    assert_eq!((&body["regarding"]["kind"], &body["regarding"]["uid"]), (&json!("Pod"), &json!("uid-p")));
}

/// What the API server lists; `None` where the resource is not defined.
#[derive(Default)]
struct Lists {
    pods: Vec<Value>,
    nodes: Vec<Value>,
    shadows: Option<Vec<Value>>,
    configs: Option<Vec<Value>>,
}

/// Answers list calls from `lists`, and each first watch of pods with `events`; later watches hang.
async fn serve_watches(mut handle: Handle, lists: Lists, events: Vec<Value>) {
    let mut watched = false;
    while let Some((request, send)) = handle.next_request().await {
        let uri = request.uri().to_string();
        let watching = uri.contains("watch=true");
        let (status, text) = if watching {
            if !uri.contains("/pods") || watched {
                // Kept open: the test has what it needs.
                std::mem::forget(send);
                continue;
            }
            watched = true;
            (200, events.iter().map(|event| format!("{event}\n")).collect::<String>())
        } else {
            let items = match () {
                () if uri.contains("/pods") => Some(&lists.pods),
                () if uri.contains("/nodes") => Some(&lists.nodes),
                () if uri.contains("/gpushadows") => lists.shadows.as_ref(),
                () => lists.configs.as_ref(),
            };
            match items {
                Some(items) => {
                    (200, json!({"metadata": {"resourceVersion": "7"}, "items": items}).to_string())
                }
                None => (404, failure(404, "no such resource").to_string()),
            }
        };
        send.send_response(Response::builder().status(status).body(Body::from(text.into_bytes())).unwrap());
    }
}

fn version(mut object: Value) -> Value {
    object["metadata"]["resourceVersion"] = json!("7");
    object
}

async fn until(what: &str, mut met: impl FnMut() -> bool) {
    for _ in 0..200 {
        if met() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("never: {what}");
}

#[tokio::test]
async fn lists_and_events_become_books() {
    let (client, handle) = mocked();
    let pods = vec![version(bound(shared("old", &[(50, 4)]), "a", "0")), version(shared("new", &[(30, 4)]))];
    let nodes = vec![version(node("a", 2, 16))];
    let shadows = Some(vec![version(shadow("a", 2, 16, &[]))]);
    let mut finished = bound(shared("old", &[(50, 4)]), "a", "0");
    finished["status"]["phase"] = json!("Succeeded");
    let events = vec![
        json!({"type": "MODIFIED", "object": version(bound(shared("new", &[(30, 4)]), "a", "1"))}),
        json!({"type": "DELETED", "object": version(finished)}),
    ];
    tokio::spawn(serve_watches(handle, Lists { pods, nodes, shadows, configs: None }, events));
    let engine = engine_with(Arc::new(api(client.clone())), Settings::default(), &[]);
    engine.set_synced(false);
    tokio::spawn(watch::run(Arc::clone(&engine), client));
    until("synced", || engine.is_ready()).await;
    let left = || {
        engine.read(|cluster| {
            let info = cluster.node("a").unwrap();
            info.occupancy.cards.iter().map(|card| card.cores_left.0).collect::<Vec<_>>()
        })
    };
    until("the finished pod gone and the new one placed", || left() == [100, 70]).await;
}

#[tokio::test]
async fn without_the_definition_of_shadows_nodes_are_known_by_capacity() {
    let (client, handle) = mocked();
    let nodes = vec![version(node("a", 2, 16))];
    tokio::spawn(serve_watches(handle, Lists { nodes, ..Lists::default() }, vec![]));
    let engine = engine_with(Arc::new(api(client.clone())), Settings::default(), &[]);
    engine.set_synced(false);
    tokio::spawn(watch::run(Arc::clone(&engine), client));
    until("synced", || engine.is_ready()).await;
    assert_eq!(passing(&engine, &shared("p", &[(200, 0)]), &["a"]), ["a"]);
}

#[tokio::test]
async fn a_malformed_custom_resource_is_skipped_and_counted() {
    let mut bad_shadow = version(shadow("b", 2, 16, &[]));
    bad_shadow["status"]["cards"] = json!("two");
    let bad_config =
        json!({"metadata": {"name": "cluster", "resourceVersion": "7"}, "spec": {"nodePools": 1}});
    let nodes = || vec![version(node("a", 2, 16)), version(node("b", 2, 16))];
    let good_shadow = || version(shadow("a", 1, 16, &[]));
    let table = [
        ("GPUShadow", Some(vec![good_shadow(), bad_shadow]), None),
        ("GPUConfig", Some(vec![good_shadow()]), Some(vec![bad_config])),
    ];
    for (kind, shadows, configs) in table {
        let (client, handle) = mocked();
        let lists = Lists { nodes: nodes(), shadows, configs, ..Lists::default() };
        tokio::spawn(serve_watches(handle, lists, vec![]));
        let engine = engine_with(Arc::new(api(client.clone())), Settings::default(), &[]);
        engine.set_synced(false);
        tokio::spawn(watch::run(Arc::clone(&engine), client));
        until(&format!("synced beside a malformed {kind}"), || engine.is_ready()).await;
        assert_eq!(engine.metrics().skipped_objects.count(kind), 1);
        assert_eq!(
            passing(&engine, &shared("p", &[(200, 0)]), &["a"]),
            Vec::<String>::new(),
            "one card is published"
        );
    }
}

/// Binds pod `p` to node `a` against a server that answers the POST with `post` and the look-up with `pod`.
async fn bind_against(post: u16, pod: Option<Value>) -> (String, Arc<Engine>, Value) {
    let (client, mut handle) = mocked();
    let engine = engine_with(
        Arc::new(api(client)),
        Settings::default(),
        &[node("a", 2, 16), node("b", 2, 16), shared("p", &[(50, 4)])],
    );
    let server = tokio::spawn(async move {
        let status =
            if post < 300 { json!({"kind": "Status", "status": "Success"}) } else { failure(post, "no") };
        let (_, path, sent) = answer(&mut handle, post, status).await;
        assert!(path.ends_with("/pods/p/binding?"), "{path}");
        if post >= 300 {
            let (method, path, _) = match pod {
                Some(pod) => answer(&mut handle, 200, pod).await,
                None => answer(&mut handle, 404, failure(404, "gone")).await,
            };
            assert_eq!((method.as_str(), path.as_str()), ("GET", "/api/v1/namespaces/default/pods/p"));
        }
        sent
    });
    let error = bind(&engine, &shared("p", &[(50, 4)]), "a").await;
    (error, engine, server.await.unwrap())
}

#[tokio::test]
async fn ok_is_said_only_when_the_pod_is_bound() {
    let unbound = || shared("p", &[(50, 4)]);
    let mut another = bound(unbound(), "a", "0");
    another["metadata"]["uid"] = json!("uid-of-another");
    // The answer to the POST, what the look-up finds, the error that the scheduler gets, and whether cards stay reserved.
    let table = [
        (201, None, "", true),
        (409, Some(bound(unbound(), "a", "1")), "", true),
        (409, Some(bound(unbound(), "b", "1")), "already bound to node b", true),
        (409, Some(unbound()), "conflict", false),
        (409, Some(another), "does not exist any more", false),
        (409, None, "does not exist any more", false),
        (504, Some(bound(unbound(), "a", "1")), "", true),
        (504, Some(unbound()), "outcome unknown", true),
        (504, None, "outcome unknown", true),
    ];
    for (post, found, expected, kept) in table {
        let shown = format!("{post}, then {found:?}");
        let (error, engine, sent) = bind_against(post, found).await;
        assert!(
            if expected.is_empty() { error.is_empty() } else { error.contains(expected) },
            "{shown}: {error:?}"
        );
        assert_eq!(engine.read(|cluster| cluster.is_placed("uid-p")), kept, "{shown}");
        assert_eq!(sent["metadata"]["annotations"]["tencent.com/predicate-gpu-idx-0"], "0", "{shown}");
        assert_eq!(sent["metadata"]["annotations"]["tencent.com/predicate-node"], "a", "{shown}");
    }
}

#[tokio::test]
async fn after_a_lost_answer_the_same_node_gets_the_same_cards_and_no_other_node_is_tried() {
    let (client, mut handle) = mocked();
    let pods = [shared("p", &[(50, 4)]), shared("q", &[(50, 4)])];
    let mut items = vec![node("a", 2, 16), node("b", 2, 16), bound(shared("old", &[(40, 4)]), "a", "0")];
    items.extend(pods.iter().cloned());
    let engine = engine_with(Arc::new(api(client)), Settings::default(), &items);
    let server = tokio::spawn(async move {
        let (.., first) = answer(&mut handle, 500, failure(500, "no")).await;
        answer(&mut handle, 200, shared("p", &[(50, 4)])).await;
        let (.., second) = answer(&mut handle, 201, json!({"kind": "Status", "status": "Success"})).await;
        (first, second)
    });
    assert!(bind(&engine, &pods[0], "a").await.contains("outcome unknown"));
    assert_eq!(passing(&engine, &pods[0], &["a", "b"]), ["a"]);
    let elsewhere = filter(&engine, &pods[0], &["a", "b"]);
    assert!(
        elsewhere["FailedAndUnresolvableNodes"].get("b").is_some(),
        "no preemption while it may be bound: {elsewhere}"
    );
    assert!(bind(&engine, &pods[0], "b").await.contains("earlier binding to node a is not confirmed yet"));
    // Room that would change the choice if it were made again.
    engine.remove_pod("uid-old");
    assert_eq!(bind(&engine, &pods[0], "a").await, "");
    let (mut first, mut second) = server.await.unwrap();
    for binding in [&mut first, &mut second] {
        binding["metadata"]["annotations"]["tencent.com/predicate-time"] = Value::Null;
    }
    assert_eq!(first, second);
}

/// Frozen between its decision and its request, while another replica took over: what it knows is old.
#[tokio::test]
async fn a_replica_that_runs_again_after_its_time_sends_no_binding() {
    let (client, mut handle) = mocked();
    let frozen = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let (start, thaw) = (std::time::Instant::now(), Arc::clone(&frozen));
    let clock: gpu_migrate_admission_ext::engine::Clock = Arc::new(move || {
        let passed = if thaw.load(std::sync::atomic::Ordering::Acquire) { 60 } else { 0 };
        gpu_migrate_admission_ext::engine::Now { instant: start + Duration::from_secs(passed), unix_nanos: 1 }
    });
    let engine = engine_at(clock, Arc::new(api(client)), Settings::default(), &[node("a", 2, 16)]);
    engine.set_leading(Leads::Until(start + Duration::from_secs(15)));
    // The pod is looked up, as our watch does not know it; meanwhile the process stands still.
    let server = tokio::spawn(async move {
        let (request, send) = handle.next_request().await.expect("a look-up");
        assert_eq!(request.method(), "GET");
        frozen.store(true, std::sync::atomic::Ordering::Release);
        let text = serde_json::to_vec(&shared("p", &[(50, 4)])).unwrap();
        send.send_response(Response::builder().status(200).body(Body::from(text)).unwrap());
        tokio::time::timeout(Duration::from_millis(200), handle.next_request())
            .await
            .is_ok_and(|next| next.is_some())
    });
    let error = bind(&engine, &shared("p", &[(50, 4)]), "a").await;
    assert!(error.contains("may not lead much longer"), "{error}");
    assert_eq!(engine.read(Cluster::assumption_count), 0);
    drop(engine);
    assert!(!server.await.unwrap(), "a Binding was sent");
}

/// The API server applies a request up to 60 s after it came (`--request-timeout`), whatever its client has heard.
#[test]
fn an_unanswered_bind_keeps_its_cards_as_long_as_it_may_come_true() {
    assert!(Settings::default().unconfirmed_timeout >= Duration::from_secs(60));
}
