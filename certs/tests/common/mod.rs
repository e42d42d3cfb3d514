//! A small API server in memory: objects by path, resource versions, conflicts, merge and JSON patches.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use base64::Engine;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use kube::Client;
use serde_json::{Value, json};

/// Objects by path, and what was asked.
#[derive(Clone, Default)]
pub(crate) struct FakeApi(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Value>,
    version: u64,
    writes: Vec<String>,
    /// Conflicts to answer with before writes succeed again.
    conflicts: u32,
    /// What its clock says, in the form of the header.
    date: Option<String>,
}

impl FakeApi {
    pub(crate) fn client(&self) -> Client {
        let api = self.clone();
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            let api = api.clone();
            async move { Ok::<_, Infallible>(api.answer(request).await) }
        });
        Client::new(service, "default")
    }

    pub(crate) fn put(&self, path: &str, object: Value) {
        self.0.lock().unwrap().store(path, object);
    }

    pub(crate) fn get(&self, path: &str) -> Option<Value> {
        self.0.lock().unwrap().objects.get(path).cloned()
    }

    pub(crate) fn remove(&self, path: &str) {
        self.0.lock().unwrap().objects.remove(path);
    }

    pub(crate) fn writes(&self) -> Vec<String> {
        self.0.lock().unwrap().writes.clone()
    }

    pub(crate) fn refuse_writes(&self, times: u32) {
        self.0.lock().unwrap().conflicts = times;
    }

    pub(crate) fn set_date(&self, date: &str) {
        self.0.lock().unwrap().date = Some(date.to_owned());
    }

    async fn answer(&self, request: Request<kube::client::Body>) -> Response<Full<Bytes>> {
        let (parts, body) = request.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        // Others get their turn between two requests, as they would over a network.
        tokio::task::yield_now().await;
        if parts.uri.query().unwrap_or_default().contains("watch=") {
            return std::future::pending().await;
        }
        let patch_type = parts.headers.get("content-type").map(|value| value.to_str().unwrap().to_owned());
        let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
        let (status, value) =
            self.0.lock().unwrap().request(&parts.method, parts.uri.path(), patch_type.as_deref(), body);
        let mut response = Response::builder().status(status);
        if let Some(date) = &self.0.lock().unwrap().date {
            response = response.header("date", date);
        }
        response.body(Full::new(Bytes::from(value.to_string()))).unwrap()
    }
}

impl State {
    fn request(
        &mut self,
        method: &Method,
        path: &str,
        kind: Option<&str>,
        body: Value,
    ) -> (StatusCode, Value) {
        if method == Method::GET {
            let found = self.objects.get(path).cloned();
            return found.map_or_else(|| failure(404, "NotFound"), |object| (StatusCode::OK, object));
        }
        if self.conflicts > 0 {
            self.conflicts -= 1;
            return failure(409, "Conflict");
        }
        if method == Method::POST {
            let path = format!("{path}/{}", body["metadata"]["name"].as_str().unwrap());
            if self.objects.contains_key(&path) {
                return failure(409, "AlreadyExists");
            }
            self.writes.push(format!("POST {path}"));
            return (StatusCode::CREATED, self.store(&path, body));
        }
        let Some(mut object) = self.objects.get(path).cloned() else { return failure(404, "NotFound") };
        if method == Method::PUT {
            if body["metadata"]["resourceVersion"] != object["metadata"]["resourceVersion"] {
                return failure(409, "Conflict");
            }
            self.writes.push(format!("PUT {path}"));
            return (StatusCode::OK, self.store(path, body));
        }
        match kind {
            Some("application/merge-patch+json") => {
                let expected = &body["metadata"]["resourceVersion"];
                if !expected.is_null() && *expected != object["metadata"]["resourceVersion"] {
                    return failure(409, "Conflict");
                }
                json_patch::merge(&mut object, &body);
            }
            Some("application/json-patch+json") => {
                let patch: json_patch::Patch = serde_json::from_value(body).unwrap();
                if json_patch::patch(&mut object, &patch).is_err() {
                    return failure(422, "Invalid");
                }
            }
            other => panic!("{method} {path} as {other:?}"),
        }
        self.writes.push(format!("PATCH {path}"));
        (StatusCode::OK, self.store(path, object))
    }

    fn store(&mut self, path: &str, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        // The API server turns stringData into data.
        if let Some(Value::Object(text)) =
            object.as_object_mut().and_then(|object| object.remove("stringData"))
        {
            for (key, value) in text {
                let encoded = base64::engine::general_purpose::STANDARD.encode(value.as_str().unwrap());
                object["data"][key] = json!(encoded);
            }
        }
        self.objects.insert(path.to_owned(), object.clone());
        object
    }
}

fn failure(code: u16, reason: &str) -> (StatusCode, Value) {
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": reason, "reason": reason, "code": code});
    (StatusCode::from_u16(code).unwrap(), status)
}
