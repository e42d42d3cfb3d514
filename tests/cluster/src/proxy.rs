//! Something slow between the scheduler and the extender: it forwards every call at once and holds back some answers.

use std::{
    collections::HashSet,
    net::Ipv4Addr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result};
use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{StatusCode, Uri},
    response::{IntoResponse, Response},
};
use http_body_util::{BodyExt, Full};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use tokio::{net::TcpListener, task::JoinHandle};

/// A running proxy. Dropping it ends it.
#[derive(Debug)]
pub struct SlowProxy {
    port: u16,
    server: JoinHandle<()>,
    held: Arc<Mutex<HashSet<String>>>,
}

#[derive(Clone)]
struct Shared {
    target: u16,
    delay: Duration,
    client: Client<HttpConnector, Full<Bytes>>,
    held: Arc<Mutex<HashSet<String>>>,
}

impl SlowProxy {
    /// Forwards to `127.0.0.1:target`. The answer to the first bind of each pod is held back for `delay`: it was carried
    /// out, but whoever asked has given up by then.
    ///
    /// # Errors
    /// If no port is free.
    pub async fn start(target: u16, delay: Duration) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("no port for the proxy")?;
        let port = listener.local_addr()?.port();
        let held = Arc::<Mutex<HashSet<String>>>::default();
        let client = Client::builder(TokioExecutor::new()).build_http();
        let router =
            Router::new().fallback(forward).with_state(Shared { target, delay, client, held: held.clone() });
        let server = tokio::spawn(async move {
            // It ends with the abort of its task.
            let _ = axum::serve(listener, router).await;
        });
        Ok(Self { port, server, held })
    }

    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// How many answers it has held back.
    pub fn held(&self) -> usize {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

impl Drop for SlowProxy {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn forward(State(shared): State<Shared>, uri: Uri, body: Bytes) -> Response {
    let first_bind = uri.path().ends_with("/bind")
        && shared
            .held
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(String::from_utf8_lossy(&body).into_owned());
    // A caller that hangs up ends this handler, but the call behind it has to go on: hence a task of its own.
    let call = tokio::spawn(call(shared.clone(), uri, body));
    if first_bind {
        tokio::time::sleep(shared.delay).await;
    }
    match call.await {
        Ok(Ok(answer)) => answer,
        Ok(Err(error)) => (StatusCode::BAD_GATEWAY, format!("{error:#}")).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn call(shared: Shared, uri: Uri, body: Bytes) -> Result<Response> {
    let path = uri.path_and_query().map_or("/", |p| p.as_str());
    let request = ::http::Request::post(format!("http://127.0.0.1:{}{path}", shared.target))
        .header("content-type", "application/json")
        .body(Full::new(body))?;
    let (head, body) = shared.client.request(request).await?.into_parts();
    Ok((head.status, [("content-type", "application/json")], body.collect().await?.to_bytes())
        .into_response())
}
