//! Objects as JSON, straight from the API server: what the small controllers work on.

use http::{Method, Request};
use kube::Client;
use serde_json::Value;

/// All objects at a collection's path, with `apiVersion` and `kind` left out as in any list.
///
/// # Errors
/// The API server's.
pub async fn list(client: &Client, path: &str) -> kube::Result<Vec<Value>> {
    let mut list: Value = send(client, Method::GET, path, "", None).await?;
    match list["items"].take() {
        Value::Array(items) => Ok(items),
        _ => Ok(Vec::new()),
    }
}

/// Creates an object.
///
/// # Errors
/// The API server's.
pub async fn create(client: &Client, path: &str, object: &Value) -> kube::Result<Value> {
    send(client, Method::POST, path, "application/json", Some(object)).await
}

/// Changes an object by a merge patch.
///
/// # Errors
/// The API server's.
pub async fn merge(client: &Client, path: &str, patch: &Value) -> kube::Result<Value> {
    send(client, Method::PATCH, path, "application/merge-patch+json", Some(patch)).await
}

/// Deletes an object.
///
/// # Errors
/// The API server's.
pub async fn delete(client: &Client, path: &str) -> kube::Result<Value> {
    send(client, Method::DELETE, path, "application/json", None).await
}

async fn send(
    client: &Client,
    method: Method,
    path: &str,
    media: &str,
    body: Option<&Value>,
) -> kube::Result<Value> {
    let mut request = Request::builder().method(method).uri(path);
    if !media.is_empty() {
        request = request.header(http::header::CONTENT_TYPE, media);
    }
    let body = body.map(|body| body.to_string().into_bytes()).unwrap_or_default();
    client.request(request.body(body).map_err(kube::Error::HttpError)?).await
}
