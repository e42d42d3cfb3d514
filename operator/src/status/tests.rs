use super::*;
use axum::body::{Body, Bytes, to_bytes};
use axum::http::Request;
use futures::StreamExt as _;
use gpu_migrate_runtime::watch::Update;
use kube::core::DeserializeGuard;
use kube::runtime::watcher;
use serde_json::{Value, json};
use std::sync::Mutex;
use tower::ServiceExt as _;

type Asked = Arc<Mutex<Vec<Value>>>;

/// An API server that knows the tokens `viewer`, who may list everything, `eventless`, who may not list Events, and `half`, who may list
/// GPUShadows alone.
fn api() -> (Client, Asked) {
    let asked = Asked::default();
    let seen = asked.clone();
    let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
        let seen = seen.clone();
        async move {
            let path = request.uri().path().to_owned();
            let body = request.into_body().collect_bytes().await.unwrap();
            let mut object: Value = serde_json::from_slice(&body).unwrap();
            seen.lock().unwrap().push(object["spec"].clone());
            object["status"] = match path.as_str() {
                "/apis/authentication.k8s.io/v1/tokenreviews" => {
                    match object["spec"]["token"].as_str().unwrap() {
                        known @ ("viewer" | "eventless" | "half") => {
                            json!({"authenticated": true, "user": {"username": known, "uid": "7", "groups": ["team"], "extra": {"k": ["v"]}}})
                        }
                        _ => json!({"authenticated": false, "error": "token expired"}),
                    }
                }
                "/apis/authorization.k8s.io/v1/subjectaccessreviews" => {
                    let of = &object["spec"];
                    let allowed = match of["resourceAttributes"]["resource"].as_str() {
                        Some("gpushadows") => true,
                        Some("gpumigrations") => of["user"] != "half",
                        _ => of["user"] == "viewer",
                    };
                    json!({"allowed": allowed})
                }
                path => panic!("{path}"),
            };
            let body = kube::client::Body::from(serde_json::to_vec(&object).unwrap());
            Ok::<_, std::convert::Infallible>(http::Response::new(body))
        }
    });
    (Client::new(service, "default"), asked)
}

fn shadow(name: &str, state: &str) -> GPUShadow {
    serde_json::from_value(json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUShadow", "metadata": {"name": name}, "spec": {},
        "status": {"total": 1, "cards": [{"uuid": "GPU-0", "minor": 0, "memoryMiB": 4096, "state": state, "holders": []}]}}))
    .unwrap()
}

async fn ask(router: &Router, path: &str, token: Option<&str>) -> Response {
    let mut request = Request::get(path);
    if let Some(token) = token {
        request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
    }
    router.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap()
}

async fn text(response: Response) -> String {
    String::from_utf8(to_bytes(response.into_body(), 1 << 20).await.unwrap().to_vec()).unwrap()
}

/// Feeds the page as the watches do; the senders keep them open.
fn fed() -> (Arc<Feed>, futures::channel::mpsc::UnboundedSender<watcher::Event<DeserializeGuard<GPUShadow>>>)
{
    let feed = Arc::new(Feed::new(1));
    let (sender, receiver) = futures::channel::mpsc::unbounded();
    let updates = receiver.map(Update::Event);
    tokio::spawn(feed::follow(updates, feed.clone(), feed::Kind::Node, |shadow: &GPUShadow| {
        view::node(shadow)
    }));
    (feed, sender)
}

/// The next event with its ID, keep-alives left out.
async fn next(
    body: &mut (impl Stream<Item = Result<Bytes, axum::Error>> + Unpin),
) -> Option<(String, Value)> {
    loop {
        let text = String::from_utf8(body.next().await?.unwrap().to_vec()).unwrap();
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        if field("event") == Some("changes") {
            let data = serde_json::from_str(field("data").unwrap()).unwrap();
            return Some((field("id").unwrap().to_owned(), data));
        }
    }
}

#[tokio::test]
async fn the_page_comes_to_everybody_and_loads_nothing_from_elsewhere() {
    let router = router(Arc::new(Feed::new(1)), Access::by_token(api().0), CancellationToken::new());
    for (path, kind) in [("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")] {
        let response = ask(&router, path, None).await;
        assert_eq!(response.status(), 200);
        let headers = response.headers().clone();
        assert!(headers[header::CONTENT_TYPE].to_str().unwrap().starts_with(kind), "{path}");
        assert_eq!(headers[header::CONTENT_SECURITY_POLICY], POLICY);
        let text = text(response).await;
        assert!(!text.contains("://") && !text.contains("innerHTML"), "{path}");
    }
    assert_eq!(ask(&router, "/other", None).await.status(), 404);
}

#[tokio::test]
async fn who_may_list_what_is_shown_sees_it_and_nobody_else() {
    let (client, asked) = api();
    let router = router(Arc::new(Feed::new(1)), Access::by_token(client), CancellationToken::new());
    for (token, status, says) in [
        (None, 401, "a bearer token"),
        (Some(""), 401, "a bearer token"),
        (Some("old"), 401, "token expired"),
        (Some("half"), 403, "half may not list gpumigrations.gpu-migrate.io"),
    ] {
        let response = ask(&router, "/events", token).await;
        assert_eq!(response.status(), status, "{token:?}");
        assert_eq!(response.headers().contains_key(header::WWW_AUTHENTICATE), status == 401);
        let text = text(response).await;
        assert!(text.contains(says), "{token:?}: {text}");
    }
    for (token, sees_events) in [("eventless", false), ("viewer", true)] {
        let response = ask(&router, "/events", Some(token)).await;
        assert_eq!(response.status(), 200);
        let (_, all) = next(&mut response.into_body().into_data_stream()).await.unwrap();
        assert_eq!(all.get("events").is_some(), sees_events, "{token}");
    }
    let asked = asked.lock().unwrap();
    let review = asked.last().unwrap();
    assert_eq!(
        (&review["groups"], &review["extra"], &review["uid"], &review["resourceAttributes"]),
        (
            &json!(["team"]),
            &json!({"k": ["v"]}),
            &json!("7"),
            &json!({"group": "events.k8s.io", "resource": "events", "verb": "list"})
        )
    );
}

#[tokio::test]
async fn an_api_server_that_cannot_be_asked_shows_it_to_nobody() {
    let service = tower::service_fn(async |_: http::Request<kube::client::Body>| {
        let status = json!({"kind": "Status", "status": "Failure", "code": 403, "message": "no right to review", "reason": "Forbidden"});
        let body = kube::client::Body::from(serde_json::to_vec(&status).unwrap());
        Ok::<_, std::convert::Infallible>(http::Response::builder().status(403).body(body).unwrap())
    });
    let client = Client::new(service, "default");
    let router = router(Arc::new(Feed::new(1)), Access::by_token(client), CancellationToken::new());
    let response = ask(&router, "/events", Some("viewer")).await;
    assert_eq!(response.status(), 503);
    assert!(text(response).await.contains("no right to review"));
}

#[tokio::test(start_paused = true)]
async fn changes_come_as_they_happen_and_a_stream_goes_on_where_the_last_one_ended() {
    let (feed, watch) = fed();
    let stop = CancellationToken::new();
    let router = router(feed.clone(), Access::Everybody, stop.clone());
    let say = |event| watch.unbounded_send(event).unwrap();
    let ok = |shadow| DeserializeGuard(Ok(shadow));
    say(watcher::Event::Init);
    say(watcher::Event::InitApply(ok(shadow("a", "Free"))));
    say(watcher::Event::InitDone);
    let mut changed = feed.changed();
    while feed.since("", Sight { events: true }).json().contains("\"nodes\":[]") {
        changed.changed().await.unwrap();
    }

    let mut body = ask(&router, "/events", None).await.into_body().into_data_stream();
    let (_, all) = next(&mut body).await.unwrap();
    assert_eq!((&all["all"], &all["nodes"][0]["cards"][0]["state"]), (&json!(true), &json!("free")));
    say(watcher::Event::Apply(ok(shadow("a", "Legacy"))));
    let id = loop {
        let (id, change) = next(&mut body).await.unwrap();
        if !change["nodes"].as_array().unwrap().is_empty() {
            assert_eq!(
                (&change["all"], &change["nodes"][0]["cards"][0]["state"]),
                (&json!(false), &json!("legacy"))
            );
            break id;
        }
    };
    // The stream ends, and the page asks again.
    assert_eq!(next(&mut body).await, None);
    say(watcher::Event::Delete(ok(shadow("a", "Legacy"))));
    let mut body = ask(&router, &format!("/events?after={id}"), None).await.into_body().into_data_stream();
    let gone = loop {
        let (_, change) = next(&mut body).await.unwrap();
        assert_eq!((&change["all"], &change["nodes"]), (&json!(false), &json!([])));
        if change["gone"] != json!([]) {
            break change;
        }
    };
    assert_eq!(gone["gone"], json!([{"kind": "node", "name": "a"}]));
    stop.cancel();
    assert_eq!(next(&mut body).await, None, "the program stops");
}
