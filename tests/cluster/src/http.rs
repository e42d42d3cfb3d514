//! GET on our components' admin ports: health and metrics.

use anyhow::{Context, Result, ensure};
use axum::body::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};

/// The body of `http://127.0.0.1:<port><path>`.
pub async fn get(port: u16, path: &str) -> Result<String> {
    let client = Client::builder(TokioExecutor::new()).build_http::<Empty<Bytes>>();
    let uri = format!("http://127.0.0.1:{port}{path}").parse()?;
    let answer = client.get(uri).await.with_context(|| format!("no answer to {path} at port {port}"))?;
    let status = answer.status();
    let body = String::from_utf8_lossy(&answer.into_body().collect().await?.to_bytes()).into_owned();
    ensure!(status == ::http::StatusCode::OK, "{path} at port {port}: {status} {body}");
    Ok(body)
}
