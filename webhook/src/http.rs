//! `/mutate`, for the API server.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use http::header::{CONNECTION, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, StatusCode, Uri, Version};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use tokio::sync::Semaphore;

use crate::metrics::Metrics;
use crate::review::{Answer, ReviewError, Snapshot};

/// What the API server sends at most: an object of 3 MiB twice, and some more. As in controller-runtime.
pub const LARGEST_BODY: usize = 7 << 20;
/// The deadline when the API server names none: its own default.
const DEFAULT_DEADLINE: Duration = Duration::from_secs(10);
/// The API server's own maximum for `timeoutSeconds`.
const LONGEST_DEADLINE: Duration = Duration::from_secs(30);

#[derive(Clone)]
pub struct Context {
    pub answer: fn(&[u8], &Snapshot) -> Result<Answer, ReviewError>,
    pub snapshot: Arc<ArcSwap<Snapshot>>,
    pub metrics: Metrics,
    /// Requests at a time; more are answered with 503 at once.
    pub slots: Arc<Semaphore>,
    /// Set while the server goes away: answers then ask for the connection to be closed, so that the API server
    /// goes to another replica before this one stops accepting.
    pub leaving: Arc<AtomicBool>,
}

impl Context {
    /// With room for `in_flight` requests at a time.
    #[must_use]
    pub fn new(snapshot: Arc<ArcSwap<Snapshot>>, metrics: Metrics, in_flight: usize) -> Self {
        let leaving = Arc::new(AtomicBool::new(false));
        let slots = Arc::new(Semaphore::new(in_flight));
        Self { answer: crate::review::answer, snapshot, metrics, slots, leaving }
    }
}

pub fn webhook(context: Context) -> Router {
    // Every request gets a copy of its own: of the pointer only.
    Router::new().route("/mutate", post(mutate)).fallback(not_found).with_state(Arc::new(context))
}

async fn not_found(uri: Uri) -> Response {
    refusal(StatusCode::NOT_FOUND, "NotFound", &format!("{}: expected POST /mutate", uri.path()))
}

async fn mutate(State(context): State<Arc<Context>>, request: Request) -> Response {
    let version = request.version();
    let mut response = review(&context, request).await.unwrap_or_else(|rejection| {
        let Rejection { status, reason, message } = rejection;
        context.metrics.reject(reason);
        tracing::warn!(status = status.as_u16(), message, "request refused");
        let mut response = refusal(status, reason, &message);
        if status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    });
    // HTTP/2 has no such header: there the drain sends GOAWAY.
    if version < Version::HTTP_2 && context.leaving.load(Ordering::Relaxed) {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// Why there is no review in the answer.
struct Rejection {
    status: StatusCode,
    reason: &'static str,
    message: String,
}

impl Rejection {
    fn new(status: StatusCode, reason: &'static str, message: impl Into<String>) -> Self {
        Self { status, reason, message: message.into() }
    }
}

async fn review(context: &Context, request: Request) -> Result<Response, Rejection> {
    check_content_type(request.headers())?;
    let _slot = context.slots.try_acquire().map_err(|_| {
        Rejection::new(StatusCode::SERVICE_UNAVAILABLE, "overload", "too many reviews at a time; try again")
    })?;
    let _counted = Counted::new(&context.metrics);
    let deadline = deadline(request.uri().query());
    let body = tokio::time::timeout(deadline, read(request.into_body())).await.map_err(|_| {
        Rejection::new(
            StatusCode::REQUEST_TIMEOUT,
            "deadline",
            format!("the body was not there within the deadline of {deadline:?}"),
        )
    })??;
    let began = Instant::now();
    let snapshot = context.snapshot.load();
    // A fault of ours in one review must not take the others' connections down with it.
    let answered = catch_unwind(AssertUnwindSafe(|| (context.answer)(&body, &snapshot)));
    let answer = match answered {
        Ok(Ok(answer)) => answer,
        Ok(Err(error)) => {
            return Err(Rejection::new(StatusCode::BAD_REQUEST, "malformed", error.to_string()));
        }
        Err(_) => {
            let message = "a fault in gpu-migrate-webhook; its log says where";
            return Err(Rejection::new(StatusCode::INTERNAL_SERVER_ERROR, "panic", message));
        }
    };
    context.metrics.duration.observe(began.elapsed().as_secs_f64());
    if answer.dry_run {
        context.metrics.dry_runs.inc();
    } else {
        let label = crate::metrics::OutcomeLabel { outcome: answer.outcome };
        context.metrics.reviews.get_or_create(&label).inc();
    }
    Ok(([(CONTENT_TYPE, HeaderValue::from_static("application/json"))], answer.body).into_response())
}

fn check_content_type(headers: &HeaderMap) -> Result<(), Rejection> {
    let given = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let media = given.split(';').next().unwrap_or_default().trim();
    if media.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = format!("Content-Type: {given:?}: expected application/json");
    Err(Rejection::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "content_type", message))
}

async fn read(body: Body) -> Result<Bytes, Rejection> {
    let too_large = || {
        let message = format!("the body is larger than {LARGEST_BODY} bytes");
        Rejection::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message)
    };
    // What announces its length is refused before it is read.
    if body.size_hint().lower() > LARGEST_BODY as u64 {
        return Err(too_large());
    }
    match Limited::new(body, LARGEST_BODY).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(too_large()),
        Err(error) => {
            Err(Rejection::new(StatusCode::BAD_REQUEST, "aborted", format!("the body broke off: {error}")))
        }
    }
}

/// The API server appends `?timeout=5s`.
fn deadline(query: Option<&str>) -> Duration {
    let values = query.unwrap_or_default().split('&').filter_map(|pair| pair.strip_prefix("timeout="));
    let seconds = |text: &str| text.strip_suffix('s')?.parse().ok().map(jiff::SignedDuration::from_secs);
    let parsed = values.filter_map(|text| seconds(text).or_else(|| text.parse().ok())).next();
    let duration = parsed.and_then(|duration| Duration::try_from(duration).ok()).filter(|d| !d.is_zero());
    duration.unwrap_or(DEFAULT_DEADLINE).min(LONGEST_DEADLINE)
}

/// An error in the form that Kubernetes' clients print.
fn refusal(status: StatusCode, reason: &str, message: &str) -> Response {
    let body = serde_json::json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "reason": reason, "message": message, "code": status.as_u16(),
    });
    (status, axum::Json(body)).into_response()
}

struct Counted<'m>(&'m Metrics);

impl<'m> Counted<'m> {
    fn new(metrics: &'m Metrics) -> Self {
        metrics.in_flight.inc();
        Self(metrics)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.in_flight.dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deadline_is_what_the_api_server_says() {
        for (query, seconds) in [
            (None, 10),
            (Some(""), 10),
            (Some("timeout=5s"), 5),
            (Some("a=b&timeout=1m0s"), 30),
            (Some("timeout=2s&x=y"), 2),
            (Some("timeout=0s"), 10),
            (Some("timeout=-3s"), 10),
            (Some("timeout=soon"), 10),
        ] {
            assert_eq!(deadline(query), Duration::from_secs(seconds), "{query:?}");
        }
    }
}
