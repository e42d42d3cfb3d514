//! `/livez`, `/readyz`, `/metrics`, and `/cards`: the GPUShadow's status as this agent sees it now.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use gpu_migrate_model::crd::GPUShadowStatus;
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;

/// What the pages are made of.
#[derive(Clone)]
pub struct Pages {
    /// All metrics.
    pub metrics: Metrics,
    /// Why this agent is not ready, or that it is.
    pub ready: Arc<dyn Fn() -> Result<(), String> + Send + Sync>,
    /// The cards as they are now.
    pub cards: Arc<dyn Fn() -> GPUShadowStatus + Send + Sync>,
}

/// The pages as a router.
pub fn router(pages: Pages) -> Router {
    Router::new()
        .route("/livez", get(|| async { "ok" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .route("/cards", get(|State(pages): State<Pages>| async move { axum::Json((pages.cards)()) }))
        .with_state(pages)
}

/// Serves the pages until `stop`.
///
/// # Errors
/// When the address cannot be listened on.
pub async fn serve(address: &str, pages: Pages, stop: CancellationToken) -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::bind(address).await?;
    tracing::info!(address = %listener.local_addr()?, "metrics and health are served");
    axum::serve(listener, router(pages)).with_graceful_shutdown(stop.cancelled_owned()).await
}

async fn ready(State(pages): State<Pages>) -> Response {
    match (pages.ready)() {
        Ok(()) => "ok".into_response(),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, why).into_response(),
    }
}

async fn metrics(State(pages): State<Pages>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(http::header::CONTENT_TYPE, kind)], pages.metrics.text()).into_response()
}
