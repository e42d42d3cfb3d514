//! HTTP: the scheduler's verbs.

pub mod auth;

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use tower_http::catch_panic::CatchPanicLayer;

use self::auth::Callers;
use crate::engine::{Engine, Reply};
use crate::metrics::Verb;

/// 5,000 whole Node objects of 15 KB: what `nodeCacheCapable: false` may send.
pub const MAX_BODY: usize = 96 << 20;

pub fn verbs(engine: Arc<Engine>, callers: Callers) -> Router {
    let admit = move |State(engine): State<Arc<Engine>>, request: Request, next: Next| {
        let admitted = callers.admit(request.headers());
        async move {
            if admitted {
                return next.run(request).await;
            }
            engine.metrics().unauthorized.inc();
            (
                StatusCode::UNAUTHORIZED,
                "a bearer token, or a basic password, that matches --token-file is needed\n",
            )
                .into_response()
        }
    };
    Router::new()
        .route("/scheduler/filter", post(|s, b| look(s, b, Verb::Filter)))
        .route("/scheduler/filter-dryrun", post(|s, b| look(s, b, Verb::FilterDryrun)))
        .route("/scheduler/predicates", post(|s, b| look(s, b, Verb::Predicates)))
        .route("/scheduler/prioritize", post(|s, b| look(s, b, Verb::Prioritize)))
        .route("/scheduler/preempt", post(|s, b| look(s, b, Verb::Preempt)))
        .route("/scheduler/bind", post(bind))
        .layer(middleware::from_fn_with_state(Arc::clone(&engine), admit))
        .layer(CatchPanicLayer::new())
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(engine)
}

async fn look(State(engine): State<Arc<Engine>>, body: Bytes, verb: Verb) -> Response {
    let start = Instant::now();
    let reply = match verb {
        Verb::Prioritize => engine.prioritize(&body),
        Verb::Preempt => engine.preempt(&body),
        Verb::Predicates => engine.predicates(&body),
        // Filter is pure, so a dry run is the same; it has a path of its own for simulations (autoscalers).
        other => engine.filter(other.path(), &body),
    };
    engine.metrics().observe(verb, reply.outcome, start.elapsed());
    respond(reply)
}

async fn bind(State(engine): State<Arc<Engine>>, body: Bytes) -> Response {
    let start = Instant::now();
    let reply = engine.bind(&body).await;
    engine.metrics().observe(Verb::Bind, reply.outcome, start.elapsed());
    respond(reply)
}

fn respond(reply: Reply) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], reply.body).into_response()
}
