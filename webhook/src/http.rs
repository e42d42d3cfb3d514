//! `/mutate`, for the API server.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::{IpAddr, Ipv4Addr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use gpu_migrate_runtime::serve::Peer;
use gpu_migrate_runtime::trace::{Span, TRACEPARENT, Tracer};
use http::header::{CONNECTION, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, StatusCode, Uri, Version};
use http_body_util::BodyExt;

use crate::metrics::Metrics;
use crate::review::{Answer, ReviewError, Snapshot};

/// What the API server sends at most: an object of 3 MiB twice, and some more. As in controller-runtime.
pub const LARGEST_BODY: usize = 7 << 20;
/// For a body to arrive. The API server has it at hand; what it names as its own timeout is whatever a client says.
const BODY_DEADLINE: Duration = Duration::from_secs(5);

/// Answers a review; with the `traceparent` of who asks.
pub type Review = fn(&[u8], &Snapshot, Option<&str>) -> Result<Answer, ReviewError>;

#[derive(Clone)]
pub struct Context {
    pub answer: Review,
    pub snapshot: Arc<ArcSwap<Snapshot>>,
    pub metrics: Metrics,
    /// For the bodies that are being read or reviewed; what does not fit is answered with 503 at once.
    pub memory: Arc<BodyMemory>,
    /// Set while the server goes away: answers then ask for the connection to be closed, so that the API server
    /// goes to another replica before this one stops accepting.
    pub leaving: Arc<AtomicBool>,
    pub tracer: Tracer,
}

impl Context {
    /// With room for so many bytes of bodies at a time.
    #[must_use]
    pub fn new(snapshot: Arc<ArcSwap<Snapshot>>, metrics: Metrics, memory: usize) -> Self {
        let leaving = Arc::new(AtomicBool::new(false));
        let memory = Arc::new(BodyMemory::new(memory));
        Self { answer: crate::review::answer, snapshot, metrics, memory, leaving, tracer: Tracer::default() }
    }
}

/// How much memory bodies may take, together and, at most half of that, from one address.
#[derive(Debug)]
pub struct BodyMemory {
    limit: usize,
    used: Mutex<(usize, HashMap<IpAddr, usize>)>,
}

impl BodyMemory {
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self { limit, used: Mutex::default() }
    }

    /// Bytes in use.
    #[must_use]
    pub fn used(&self) -> usize {
        self.lock().0
    }

    fn lock(&self) -> MutexGuard<'_, (usize, HashMap<IpAddr, usize>)> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What one body takes; given back when dropped.
struct Taken<'m> {
    memory: &'m BodyMemory,
    peer: IpAddr,
    bytes: usize,
}

impl Taken<'_> {
    fn take(&mut self, bytes: usize) -> Result<(), Rejection> {
        let mut used = self.memory.lock();
        let (all, of_peers) = &mut *used;
        let of_peer = of_peers.get(&self.peer).copied().unwrap_or_default() + bytes;
        if *all + bytes > self.memory.limit || of_peer > self.memory.limit / 2 {
            let message = "too many bytes of reviews at a time; try again";
            return Err(Rejection::new(StatusCode::SERVICE_UNAVAILABLE, "overload", message));
        }
        of_peers.insert(self.peer, of_peer);
        *all += bytes;
        self.bytes += bytes;
        Ok(())
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut used = self.memory.lock();
        used.0 -= self.bytes;
        if let Entry::Occupied(mut of_peer) = used.1.entry(self.peer) {
            *of_peer.get_mut() -= self.bytes;
            if *of_peer.get() == 0 {
                of_peer.remove();
            }
        }
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
    let _counted = Counted::new(&context.metrics);
    let peer = request.extensions().get().map_or(Ipv4Addr::UNSPECIFIED.into(), |Peer(address)| *address);
    let caller = context.tracer.is_on().then(|| request.headers().get(TRACEPARENT).cloned()).flatten();
    let mut taken = Taken { memory: &context.memory, peer, bytes: 0 };
    let reading = read(request.into_body(), &mut taken);
    let body = tokio::time::timeout(BODY_DEADLINE, reading).await.map_err(|_| {
        Rejection::new(
            StatusCode::REQUEST_TIMEOUT,
            "deadline",
            format!("the body was not there within {BODY_DEADLINE:?}"),
        )
    })??;
    let began = Instant::now();
    let caller = caller.as_ref().and_then(|header| header.to_str().ok());
    let span = context.tracer.first(caller, "review", began);
    let traceparent = span.as_ref().map(Span::traceparent);
    let snapshot = context.snapshot.load();
    // A fault of ours in one review must not take the others' connections down with it.
    let answered =
        catch_unwind(AssertUnwindSafe(|| (context.answer)(&body, &snapshot, traceparent.as_deref())));
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
    if let (Some(mut span), Some(pod)) = (span, answer.traced) {
        span.set_pod(&pod.namespace, &pod.name, &pod.uid);
        span.set("gpu_migrate.policy", pod.policy);
        span.end();
    }
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

async fn read(mut body: Body, taken: &mut Taken<'_>) -> Result<Bytes, Rejection> {
    let too_large = || {
        let message = format!("the body is larger than {LARGEST_BODY} bytes");
        Rejection::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message)
    };
    // What announces its length is refused before it is read.
    let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    if announced > LARGEST_BODY {
        return Err(too_large());
    }
    let mut whole = Vec::new();
    while let Some(frame) = body.frame().await {
        let broken = |error| {
            Rejection::new(StatusCode::BAD_REQUEST, "aborted", format!("the body broke off: {error}"))
        };
        let Ok(data) = frame.map_err(broken)?.into_data() else { continue };
        if taken.bytes + data.len() > LARGEST_BODY {
            return Err(too_large());
        }
        // Most bodies are one frame: nothing waits with it, so there are no more of them at a time than threads.
        if whole.is_empty() && body.is_end_stream() {
            return Ok(data);
        }
        taken.take(data.len())?;
        whole.reserve(announced.saturating_sub(whole.len()));
        whole.extend_from_slice(&data);
    }
    Ok(whole.into())
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
