//! An AdmissionReview from bytes to bytes. Pure: what it knows besides the bytes is a [`Snapshot`].

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use crate::decide::{Facts, Rewrite, decide};
use crate::policy::Policies;
use crate::view::{PodView, Text};

const API_VERSION: &str = "admission.k8s.io/v1";
const KIND: &str = "AdmissionReview";

/// What reviews are decided by: never changed, only exchanged.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Policies in force.
    pub policies: Policies,
    /// Labels of the namespaces that are known.
    pub namespaces: HashMap<String, Arc<BTreeMap<String, String>>>,
}

/// The answer to a review.
#[derive(Debug)]
pub struct Answer {
    /// An AdmissionReview, to be sent with status 200.
    pub body: Vec<u8>,
    /// One word for metrics.
    pub outcome: &'static str,
    /// Whether it was a dry run.
    pub dry_run: bool,
}

/// Why bytes are no review: nothing to answer to, status 400.
#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    /// No body.
    #[error("empty body: expected an AdmissionReview of {API_VERSION}")]
    Empty,
    /// Not JSON, or a field of the wrong type.
    #[error("not an AdmissionReview: {0}")]
    Malformed(serde_json::Error),
    /// JSON, but not a review that we speak.
    #[error("{field}: {value:?}: expected {expected}")]
    Field {
        /// Path of the field.
        field: &'static str,
        /// What it says.
        value: String,
        /// What it should say.
        expected: &'static str,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Review<'a, O> {
    #[serde(borrow, default)]
    api_version: Text<'a>,
    #[serde(borrow, default)]
    kind: Text<'a>,
    #[serde(borrow = "'a", bound(deserialize = "O: Deserialize<'de>"))]
    request: Option<Request<'a, O>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Request<'a, O> {
    #[serde(borrow)]
    uid: Text<'a>,
    #[serde(borrow, default)]
    resource: Resource<'a>,
    #[serde(borrow, default)]
    sub_resource: Text<'a>,
    #[serde(borrow, default)]
    operation: Text<'a>,
    #[serde(borrow, default)]
    namespace: Text<'a>,
    dry_run: Option<bool>,
    #[serde(bound(deserialize = "O: Deserialize<'de>"))]
    object: Option<O>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Resource<'a> {
    #[serde(borrow)]
    group: Text<'a>,
    #[serde(borrow)]
    resource: Text<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Out<'a> {
    api_version: &'static str,
    kind: &'static str,
    response: Response<'a>,
}

#[derive(Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Response<'a> {
    uid: &'a str,
    allowed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<Denied<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch_type: Option<&'static str>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    warnings: &'a [String],
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    audit_annotations: BTreeMap<&'static str, &'a str>,
}

#[derive(Serialize)]
struct Denied<'a> {
    code: u16,
    reason: &'static str,
    message: &'a str,
}

/// Answers a review.
///
/// # Errors
/// [`ReviewError`] when there is no UID to answer to. A review whose object does not parse is answered: the pod is
/// admitted as it is (failing is staying legacy), with a warning.
pub fn answer(body: &[u8], snapshot: &Snapshot) -> Result<Answer, ReviewError> {
    if body.is_empty() {
        return Err(ReviewError::Empty);
    }
    match serde_json::from_slice::<Review<'_, PodView<'_>>>(body) {
        Ok(review) => decided(&accepted(review)?, snapshot),
        Err(error) => undecided(body, error),
    }
}

/// Everything parsed.
fn decided(request: &Request<'_, PodView<'_>>, snapshot: &Snapshot) -> Result<Answer, ReviewError> {
    let (Some(pod), Ok(())) = (&request.object, concerns_us(request)) else {
        return admitted(request, concerns_us(request).err().unwrap_or("no_object"), &[]);
    };
    let namespace = request.namespace.as_str();
    let facts = Facts {
        namespace,
        namespace_labels: snapshot.namespaces.get(namespace).map(AsRef::as_ref),
        rollout_key: request.uid.as_str(),
    };
    let rewrite = decide(pod, &facts, &snapshot.policies);
    respond(request, &rewrite)
}

/// The object does not parse, or nothing does.
fn undecided(body: &[u8], error: serde_json::Error) -> Result<Answer, ReviewError> {
    let Ok(review) = serde_json::from_slice::<Review<'_, IgnoredAny>>(body) else {
        return Err(ReviewError::Malformed(error));
    };
    let request = accepted(review)?;
    match concerns_us(&request) {
        Err(outcome) => admitted(&request, outcome, &[]),
        Ok(()) => {
            let text: String =
                format!("gpu-migrate: left alone: not a pod: {error}").chars().take(120).collect();
            admitted(&request, "malformed_object", &[text])
        }
    }
}

fn accepted<'a, O>(review: Review<'a, O>) -> Result<Request<'a, O>, ReviewError> {
    let field = |field, value: &Text<'_>, expected| {
        Err(ReviewError::Field { field, value: value.as_str().chars().take(100).collect(), expected })
    };
    if review.kind.as_str() != KIND {
        return field("kind", &review.kind, KIND);
    }
    if review.api_version.as_str() != API_VERSION {
        return field("apiVersion", &review.api_version, API_VERSION);
    }
    let Some(request) = review.request else {
        return field("request", &Text::default(), "an object");
    };
    if request.uid.as_str().is_empty() {
        return field("request.uid", &request.uid, "the UID to answer with");
    }
    Ok(request)
}

/// Only the creation of pods; the word says what it is instead.
fn concerns_us<O>(request: &Request<'_, O>) -> Result<(), &'static str> {
    let Resource { group, resource } = &request.resource;
    if resource.as_str() != "pods" || !group.as_str().is_empty() || !request.sub_resource.as_str().is_empty()
    {
        return Err("not_a_pod");
    }
    if request.operation.as_str() != "CREATE" { Err("not_create") } else { Ok(()) }
}

fn admitted<O>(
    request: &Request<'_, O>,
    outcome: &'static str,
    warnings: &[String],
) -> Result<Answer, ReviewError> {
    let response = Response { uid: request.uid.as_str(), allowed: true, warnings, ..Response::default() };
    write(request, outcome, response)
}

fn respond<O>(request: &Request<'_, O>, rewrite: &Rewrite) -> Result<Answer, ReviewError> {
    let mut response = Response {
        uid: request.uid.as_str(),
        allowed: rewrite.deny.is_none(),
        warnings: &rewrite.warnings,
        audit_annotations: rewrite.audit.iter().map(|(key, value)| (*key, value.as_str())).collect(),
        ..Response::default()
    };
    if let Some(message) = &rewrite.deny {
        response.status = Some(Denied { code: 403, reason: "Forbidden", message });
        return write(request, "denied", response);
    }
    if !rewrite.patch.0.is_empty() {
        use base64::Engine;
        let patch = serde_json::to_vec(&rewrite.patch).map_err(ReviewError::Malformed)?;
        response.patch = Some(base64::engine::general_purpose::STANDARD.encode(patch));
        response.patch_type = Some("JSONPatch");
    }
    write(request, rewrite.outcome.as_str(), response)
}

fn write<O>(
    request: &Request<'_, O>,
    outcome: &'static str,
    response: Response<'_>,
) -> Result<Answer, ReviewError> {
    let mut body = Vec::with_capacity(2048);
    serde_json::to_writer(&mut body, &Out { api_version: API_VERSION, kind: KIND, response })
        .map_err(ReviewError::Malformed)?;
    Ok(Answer { body, outcome, dry_run: request.dry_run == Some(true) })
}
