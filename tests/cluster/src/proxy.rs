//! What may stand between the scheduler and the extender: something slow, which forwards every call at once and holds back
//! some answers; and a Service of several replicas, which forwards to the one that is ready.

use std::{
    collections::HashSet,
    net::Ipv4Addr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU16, Ordering},
    },
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

use crate::http;

/// A running proxy. Dropping it ends it.
#[derive(Debug)]
pub struct SlowProxy {
    port: u16,
    server: JoinHandle<()>,
    held: Arc<Mutex<HashSet<String>>>,
}

type HttpClient = Client<HttpConnector, Full<Bytes>>;

#[derive(Clone)]
struct Shared {
    target: u16,
    delay: Duration,
    client: HttpClient,
    held: Arc<Mutex<HashSet<String>>>,
}

impl SlowProxy {
    /// Forwards to `127.0.0.1:target`. The answer to the first bind of each pod is held back for `delay`: it was carried
    /// out, but the caller has timed out by then.
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
    let call = tokio::spawn(call(shared.client.clone(), shared.target, uri, body));
    if first_bind {
        tokio::time::sleep(shared.delay).await;
    }
    match call.await {
        Ok(Ok(answer)) => answer,
        Ok(Err(error)) => (StatusCode::BAD_GATEWAY, format!("{error:#}")).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn call(client: HttpClient, target: u16, uri: Uri, body: Bytes) -> Result<Response> {
    let path = uri.path_and_query().map_or("/", |p| p.as_str());
    let request = ::http::Request::post(format!("http://127.0.0.1:{target}{path}"))
        .header("content-type", "application/json")
        .body(Full::new(body))?;
    let (head, body) = client.request(request).await?.into_parts();
    Ok((head.status, [("content-type", "application/json")], body.collect().await?.to_bytes())
        .into_response())
}

/// How often replicas are asked whether they are ready.
const PROBE: Duration = Duration::from_millis(200);

/// Replicas behind one port, as a Service has them. Dropping it ends it.
#[derive(Debug)]
pub struct ServiceProxy {
    port: u16,
    /// Port of the replica that is ready; 0: none.
    ready: Arc<AtomicU16>,
    tasks: [JoinHandle<()>; 2],
}

impl ServiceProxy {
    /// Forwards to the replica, of those given by port and health port, that was ready at the last probe.
    pub async fn start(replicas: Vec<[u16; 2]>) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("no port for the proxy")?;
        let port = listener.local_addr()?.port();
        let ready = Arc::<AtomicU16>::default();
        let client: HttpClient = Client::builder(TokioExecutor::new()).build_http();
        let router = Router::new().fallback(to_ready).with_state((client, ready.clone()));
        let server = tokio::spawn(async move {
            // It ends with the abort of its task.
            let _ = axum::serve(listener, router).await;
        });
        let found = ready.clone();
        let prober = tokio::spawn(async move {
            loop {
                let mut now = 0;
                for [port, health] in &replicas {
                    if http::get(*health, "/readyz").await.is_ok() {
                        now = *port;
                    }
                }
                found.store(now, Ordering::Relaxed);
                tokio::time::sleep(PROBE).await;
            }
        });
        Ok(Self { port, ready, tasks: [server, prober] })
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Port of the replica that is ready, if one is.
    pub fn ready(&self) -> Option<u16> {
        Some(self.ready.load(Ordering::Relaxed)).filter(|port| *port != 0)
    }
}

impl Drop for ServiceProxy {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

async fn to_ready(
    State((client, ready)): State<(HttpClient, Arc<AtomicU16>)>,
    uri: Uri,
    body: Bytes,
) -> Response {
    match call(client, ready.load(Ordering::Relaxed), uri, body).await {
        Ok(answer) => answer,
        Err(error) => (StatusCode::BAD_GATEWAY, format!("{error:#}")).into_response(),
    }
}
