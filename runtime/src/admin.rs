//! The plain port of probes and metrics: `/livez`, `/readyz`, `/metrics`, and what a program adds.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper_util::service::TowerToHyperService;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::Tasks;
use crate::serve::{Limits, serve};

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Probes and scrapes are few, and each probe has a connection of its own: whoever opens more must neither exhaust file
/// descriptors nor keep the kubelet's probes out.
fn limits() -> Limits {
    Limits {
        connections: 64,
        per_peer: 32,
        headers: Duration::from_secs(2),
        idle: Duration::from_secs(30),
        drain: Duration::from_secs(1),
        ..Limits::default()
    }
}

/// The routes. `ready` says why the program is not ready; more routes can be added to what is returned.
pub fn router(
    registry: Arc<Registry>,
    ready: impl Fn() -> Result<(), String> + Clone + Send + Sync + 'static,
) -> Router {
    let readyz = async move || match ready() {
        Ok(()) => (StatusCode::OK, "ok\n".to_owned()),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    };
    Router::new()
        .route("/livez", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .route("/metrics", get(async move || metrics(&registry)))
}

fn metrics(registry: &Registry) -> Response {
    let mut text = String::new();
    match prometheus_client::encoding::text::encode(&mut text, registry) {
        Ok(()) => ([(header::CONTENT_TYPE, OPENMETRICS)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// Serves `router` at `bind` (`--metrics-bind`) until the process ends; nowhere if that is empty. Returns the address.
///
/// # Errors
/// If the address cannot be listened on.
pub async fn spawn(tasks: &mut Tasks, bind: &str, router: Router) -> anyhow::Result<Option<SocketAddr>> {
    if bind.is_empty() {
        return Ok(None);
    }
    let address = bind.to_owned();
    let listening = tasks.background().spawn(async move {
        match (TcpListener::bind(&address).await, address.strip_prefix("[::]:")) {
            // A host without IPv6.
            (Err(_), Some(port)) => TcpListener::bind(format!("0.0.0.0:{port}")).await,
            (outcome, _) => outcome,
        }
    });
    let listener = listening.await?.with_context(|| format!("--metrics-bind {bind}"))?;
    let address = listener.local_addr()?;
    tracing::info!(%address, "serving probes and metrics");
    let service = TowerToHyperService::new(router);
    // Probes are answered while the program shuts down.
    tasks
        .spawn_until_exit("admin server", serve(listener, None, service, limits(), CancellationToken::new()));
    Ok(Some(address))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::{Body, to_bytes};
    use axum::http::Request;
    use prometheus_client::metrics::counter::Counter;
    use std::sync::atomic::{AtomicBool, Ordering};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tower::ServiceExt as _;

    async fn get(router: &Router, path: &str) -> (u16, Option<String>, String) {
        let request = Request::get(path).body(Body::empty()).unwrap();
        let response = router.clone().oneshot(request).await.unwrap();
        let kind = response.headers().get(header::CONTENT_TYPE).map(|kind| kind.to_str().unwrap().to_owned());
        let status = response.status().as_u16();
        let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        (status, kind, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn probes_and_metrics_are_answered() {
        let mut registry = Registry::default();
        let counter = Counter::<u64>::default();
        registry.register("calls", "Calls", counter.clone());
        counter.inc();
        let ready = Arc::new(AtomicBool::new(false));
        let check = {
            let ready = Arc::clone(&ready);
            move || if ready.load(Ordering::Relaxed) { Ok(()) } else { Err("not synced".to_owned()) }
        };
        let router = router(Arc::new(registry), check).route("/cards", axum::routing::get(async || "[]"));
        assert_eq!(get(&router, "/livez").await.0, 200);
        let (status, _, text) = get(&router, "/readyz").await;
        assert_eq!((status, text.as_str()), (503, "not synced\n"));
        ready.store(true, Ordering::Relaxed);
        assert_eq!(get(&router, "/readyz").await.0, 200);
        let (_, kind, text) = get(&router, "/metrics").await;
        assert_eq!(kind.as_deref(), Some(OPENMETRICS));
        assert!(text.contains("calls_total 1"), "{text}");
        assert_eq!(get(&router, "/cards").await.2, "[]");
    }

    /// What would starve the kubelet's liveness probe, and so restart the program.
    #[tokio::test]
    async fn idle_connections_do_not_keep_a_probe_out() {
        let mut tasks = Tasks::new(CancellationToken::new());
        let routes = router(Arc::new(Registry::default()), || Ok(()));
        let address = spawn(&mut tasks, "127.0.0.1:0", routes).await.unwrap().unwrap();
        let mut idle = Vec::new();
        for _ in 0..200 {
            idle.push(tokio::net::TcpStream::connect(address).await.unwrap());
        }
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert_eq!(
            idle[0].read(&mut [0; 1]).await.unwrap_or(0),
            0,
            "the one that was idle longest was closed"
        );
    }

    #[tokio::test]
    async fn it_is_served_where_it_is_bound_and_an_empty_address_is_nowhere() {
        let mut tasks = Tasks::new(CancellationToken::new());
        let routes = || router(Arc::new(Registry::default()), || Ok(()));
        assert_eq!(spawn(&mut tasks, "", routes()).await.unwrap(), None);
        let address = spawn(&mut tasks, "127.0.0.1:0", routes()).await.unwrap().unwrap();
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        let error = spawn(&mut tasks, &address.to_string(), routes()).await.unwrap_err();
        assert!(format!("{error:#}").starts_with(&format!("--metrics-bind {address}: ")), "{error:#}");
    }
}
