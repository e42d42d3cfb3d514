//! The read-only status page: the cluster's cards, the projects' rollouts and the latest Events of our components, live.
//!
//! The page itself says nothing of the cluster. What it shows comes as server-sent events, to whoever may list GPUShadows and GPUMigrations,
//! with the Events for who may list those too ([`access`]). A stream ends after a minute, and the next is asked for with the token again.

pub mod access;
pub mod feed;
pub mod view;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use access::{Access, Refusal, Sight};
use axum::Router;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use feed::Feed;
use futures::Stream;
use gpu_migrate_model::crd::{GPUMigration, GPUShadow};
use gpu_migrate_runtime::Tasks;
use gpu_migrate_runtime::serve::{Limits, serve};
use gpu_migrate_runtime::tasks::until;
use gpu_migrate_runtime::watch::{SkippedObjects, watch, watch_guarded};
use hyper_util::service::TowerToHyperService;
use k8s_openapi::api::events::v1;
use kube::runtime::watcher::Config;
use kube::{Api, Client};
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// How long one stream lasts: whoever loses the right to see it does so within this time.
const STREAM: Duration = Duration::from_secs(60);
/// Changes within this time come together.
const GATHER: Duration = Duration::from_millis(500);
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The Events that are shown: a watch can select by one controller alone. Of the scheduler's, why a pod is not placed: those of placed pods are
/// so many that no others would be among the newest.
const EVENTS: [(&str, &str); 4] = [
    ("reportingController=gpu-migrate-operator", "Event watch of the status page: operator"),
    ("reportingController=gpu-migrate-extender", "Event watch of the status page: extender"),
    ("reportingController=gpu-migrate-bridge", "Event watch of the status page: node agents"),
    ("reportingController=gpu-migrate-scheduler,type=Warning", "Event watch of the status page: scheduler"),
];

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

#[derive(Clone)]
struct Page {
    feed: Arc<Feed>,
    access: Access,
    stop: CancellationToken,
}

/// Watches the cluster and serves the page at `bind` until the tasks are stopped; nowhere if that is empty.
///
/// # Errors
/// The address cannot be listened on.
pub async fn spawn(
    tasks: &mut Tasks,
    bind: &str,
    access: Access,
    client: &Client,
    skipped: &SkippedObjects,
) -> anyhow::Result<()> {
    if bind.is_empty() {
        return Ok(());
    }
    let listener =
        TcpListener::bind(bind).await.map_err(|error| anyhow::anyhow!("--status-bind {bind}: {error}"))?;
    tracing::info!(address = %listener.local_addr()?, "serving the status page");
    let (feed, stop) = (Arc::new(Feed::new(random_epoch())), tasks.stop());
    let shadows = watch_guarded(Api::<_>::all(client.clone()), Config::default(), skipped.clone());
    let of_nodes =
        feed::follow(shadows, feed.clone(), feed::Kind::Node, |shadow: &GPUShadow| view::node(shadow));
    let migrations = watch_guarded(Api::<_>::all(client.clone()), Config::default(), skipped.clone());
    let of_projects = feed::follow(migrations, feed.clone(), feed::Kind::Project, |policy: &GPUMigration| {
        view::project(policy)
    });
    tasks.spawn("GPUShadow watch of the status page", until(stop.clone(), of_nodes));
    tasks.spawn("GPUMigration watch of the status page", until(stop.clone(), of_projects));
    for (selector, task) in EVENTS {
        let config = Config::default().fields(selector);
        let events = watch(Api::<v1::Event>::all(client.clone()), config);
        tasks.spawn(task, until(stop.clone(), feed::follow_events(events, feed.clone())));
    }
    let service = TowerToHyperService::new(router(feed, access, stop.clone()));
    let limits = Limits {
        connections: 256,
        per_peer: 256,
        // Above a stream's length: it counts as idle from its first byte.
        idle: STREAM * 2,
        drain: Duration::from_secs(1),
        ..Limits::default()
    };
    tasks.spawn("status page", serve(listener, None, service, limits, stop));
    Ok(())
}

/// Distinguishes the streams of two processes: versions are of one of them.
fn random_epoch() -> u64 {
    use std::hash::{BuildHasher as _, RandomState};
    RandomState::new().hash_one(std::process::id())
}

/// The page, its files and its events.
pub fn router(feed: Arc<Feed>, access: Access, stop: CancellationToken) -> Router {
    let file = |kind: &'static str, text: &'static str| get(async move || with_headers(kind, text));
    Router::new()
        .route("/", file("text/html; charset=utf-8", include_str!("page.html")))
        .route("/page.css", file("text/css; charset=utf-8", include_str!("page.css")))
        .route("/page.js", file("text/javascript; charset=utf-8", include_str!("page.js")))
        .route("/events", get(events))
        .with_state(Page { feed, access, stop })
}

fn with_headers(kind: &'static str, body: impl IntoResponse) -> Response {
    let mut response = body.into_response();
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    for (name, value) in headers {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

#[derive(Deserialize)]
struct After {
    /// The ID of the last event that the page has.
    #[serde(default)]
    after: String,
}

async fn events(State(page): State<Page>, Query(query): Query<After>, headers: HeaderMap) -> Response {
    let token =
        headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
    let sight = match page.access.check(token).await {
        Ok(sight) => sight,
        Err(refusal) => return refused(&refusal),
    };
    let changes = changes(page.feed, query.after, sight, page.stop);
    let response = Sse::new(changes).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response();
    with_headers("text/event-stream", response)
}

fn refused(refusal: &Refusal) -> Response {
    let status = match refusal {
        Refusal::NoToken | Refusal::Unknown(_) => StatusCode::UNAUTHORIZED,
        Refusal::Forbidden { .. } => StatusCode::FORBIDDEN,
        Refusal::Busy | Refusal::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
    };
    let mut response = with_headers("text/plain; charset=utf-8", (status, format!("{refusal}\n")));
    if status == StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

/// What is there, then what changes.
fn changes(
    feed: Arc<Feed>,
    after: String,
    sight: Sight,
    stop: CancellationToken,
) -> impl Stream<Item = Result<Event, Infallible>> {
    let ends = Instant::now() + STREAM;
    let changed = feed.changed();
    futures::stream::unfold((after, true, changed), move |(after, first, mut changed)| {
        let (feed, stop) = (feed.clone(), stop.clone());
        async move {
            if !first {
                tokio::select! {
                    outcome = changed.changed() => outcome.ok()?,
                    () = tokio::time::sleep_until(ends) => return None,
                    () = stop.cancelled() => return None,
                }
                tokio::time::sleep(GATHER).await;
            }
            changed.borrow_and_update();
            let batch = feed.since(&after, sight);
            let event = Event::default().event("changes").id(&batch.id).data(batch.json());
            Some((Ok(event), (batch.id, false, changed)))
        }
    })
}

#[cfg(test)]
mod tests;
