//! How the server says no: the `Status` object of Kubernetes, with the codes and reasons that clients act upon.

use axum::response::{IntoResponse, Response};
use http::{StatusCode, header};
use serde_json::{Value, json};

use super::kinds::Kind;

#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    pub code: StatusCode,
    /// Machine-readable reason, as `k8s.io/apimachinery/pkg/apis/meta/v1` names them.
    pub reason: &'static str,
    pub message: String,
    /// `details` of the Status.
    pub details: Value,
}

/// What is wrong with one field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Its path; empty for the whole object.
    field: String,
    /// As `k8s.io/apimachinery/pkg/apis/meta/v1` names the causes.
    reason: &'static str,
    message: String,
}

impl Problem {
    #[must_use]
    pub fn new(field: &str, reason: &'static str, message: String) -> Self {
        Self { field: field.to_owned(), reason, message }
    }

    fn shown(&self) -> &str {
        if self.field.is_empty() { "<nil>" } else { &self.field }
    }
}

impl Refusal {
    fn new(code: StatusCode, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into(), details: Value::Null }
    }

    /// 400.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "BadRequest", message)
    }

    /// 403: an admission webhook, or the pod's own admission, denied it.
    pub fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "Forbidden", message)
    }

    /// 404 for an object.
    pub fn not_found(plural: &str, name: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "NotFound", format!("{plural} \"{name}\" not found"))
            .about(json!({"name": name, "kind": plural}))
    }

    /// 404 for a path.
    pub fn no_such_path() -> Self {
        Self::new(StatusCode::NOT_FOUND, "NotFound", "the server could not find the requested resource")
    }

    /// 405.
    pub fn method() -> Self {
        let message = "the server does not allow this method on the requested resource";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed", message)
    }

    /// 409: an object of that name exists.
    pub fn exists(plural: &str, name: &str) -> Self {
        Self::new(StatusCode::CONFLICT, "AlreadyExists", format!("{plural} \"{name}\" already exists"))
            .about(json!({"name": name, "kind": plural}))
    }

    /// 409: somebody else was first, or owns the field.
    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, "Conflict", message)
    }

    /// 410: the resource version is older than what is remembered.
    pub fn expired(asked: u64, oldest: u64) -> Self {
        Self::new(StatusCode::GONE, "Expired", format!("too old resource version: {asked} ({oldest})"))
    }

    /// 415.
    pub fn media_type(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "UnsupportedMediaType", message)
    }

    /// 422: a field has a wrong value.
    pub fn invalid(kind: &str, name: &str, field: &str, problem: &str) -> Self {
        let cause = json!({"reason": "FieldValueInvalid", "field": field, "message": problem});
        let message = format!("{kind} \"{name}\" is invalid: {field}: {problem}");
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", message)
            .about(json!({"name": name, "kind": kind, "causes": [cause]}))
    }

    /// 422: fields of a custom resource have wrong values.
    pub fn invalid_fields(kind: &Kind, name: &str, mut problems: Vec<Problem>) -> Self {
        problems.sort_by(|a, b| a.field.cmp(&b.field));
        let texts: Vec<String> = problems.iter().map(|p| format!("{}: {}", p.shown(), p.message)).collect();
        let text = match texts.as_slice() {
            [one] => one.clone(),
            several => format!("[{}]", several.join(", ")),
        };
        let causes = problems
            .iter()
            .map(|p| json!({"reason": p.reason, "field": p.shown(), "message": p.message}))
            .collect::<Vec<_>>();
        let message = format!("{}.{} {name:?} is invalid: {text}", kind.kind, kind.group);
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", message)
            .about(json!({"name": name, "group": kind.group, "kind": kind.kind, "causes": causes}))
    }

    /// 500, as a webhook that cannot be called gives under `failurePolicy: Fail`.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", message)
    }

    /// 501: a real API server would do it; this one says that it does not.
    pub fn not_served(what: impl AsRef<str>) -> Self {
        let message = format!("the embedded API server does not serve {}", what.as_ref());
        Self::new(StatusCode::NOT_IMPLEMENTED, "NotImplemented", message)
    }

    /// With `details`.
    #[must_use]
    pub fn about(mut self, details: Value) -> Self {
        self.details = details;
        self
    }

    /// The `Status` object.
    #[must_use]
    pub fn to_value(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code.as_u16(),
        });
        if !self.details.is_null() {
            status["details"] = self.details.clone();
        }
        status
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let body = self.to_value().to_string();
        (self.code, [(header::CONTENT_TYPE, "application/json")], body).into_response()
    }
}

/// `Status` of a success, as a deletion that left nothing answers.
#[must_use]
pub fn success(plural: &str, name: &str, uid: &str) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success",
        "details": {"name": name, "kind": plural, "uid": uid},
    })
}
