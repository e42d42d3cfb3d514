//! Plain HTTP on loopback: our components' admin ports, and etcd.

use anyhow::{Context, Result, ensure};
use axum::body::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::{
    client::legacy::{Client as HttpClient, connect::HttpConnector},
    rt::TokioExecutor,
};

/// Keeps its connections.
#[derive(Debug)]
pub struct Client(HttpClient<HttpConnector, Full<Bytes>>);

impl Default for Client {
    fn default() -> Self {
        Self(HttpClient::builder(TokioExecutor::new()).build_http())
    }
}

impl Client {
    /// Sends `body` to `http://127.0.0.1:<port><path>`.
    ///
    /// # Errors
    /// No answer, or another status than 200.
    pub async fn post(&self, port: u16, path: &str, body: String) -> Result<()> {
        self.send("POST", port, path, body).await.map(drop)
    }

    async fn send(&self, method: &str, port: u16, path: &str, body: String) -> Result<String> {
        let request = ::http::Request::builder().method(method).uri(format!("http://127.0.0.1:{port}{path}"));
        let answer = self.0.request(request.body(Full::from(body))?).await;
        let answer = answer.with_context(|| format!("no answer to {path} at port {port}"))?;
        let status = answer.status();
        let body = String::from_utf8_lossy(&answer.into_body().collect().await?.to_bytes()).into_owned();
        ensure!(status == ::http::StatusCode::OK, "{path} at port {port}: {status} {body}");
        Ok(body)
    }
}

/// The body of `http://127.0.0.1:<port><path>`.
///
/// # Errors
/// No answer, or another status than 200.
pub async fn get(port: u16, path: &str) -> Result<String> {
    Client::default().send("GET", port, path, String::new()).await
}
