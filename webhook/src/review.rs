//! An AdmissionReview from bytes to bytes. Pure: what it knows besides the bytes is a [`Snapshot`].

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::sync::Arc;

use gpu_migrate_model::names;
use gpu_migrate_model::view::json::Text;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::decide::{Decision, Outcome, RequestContext, decide, decide_ephemeral};
use crate::obstacles::ClusterFacts;
use crate::policy::Policies;
use crate::text::{key, string};
use crate::view::{EphemeralView, PodView};

const API_VERSION: &str = "admission.k8s.io/v1";
const KIND: &str = "AdmissionReview";

/// What reviews are decided by: never changed, only exchanged.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    pub policies: Policies,
    /// Labels of the namespaces that are known.
    pub namespaces: HashMap<String, Arc<BTreeMap<String, String>>>,
    pub cluster: Arc<ClusterFacts>,
}

#[derive(Debug)]
pub struct Answer {
    /// An AdmissionReview, to be sent with status 200.
    pub body: Vec<u8>,
    pub outcome: &'static str,
    /// Whether it was a dry run.
    pub dry_run: bool,
    /// The pod into which the context of its trace was written.
    pub traced: Option<TracedPod>,
}

/// What a trace says of a converted pod.
#[derive(Debug, PartialEq, Eq)]
pub struct TracedPod {
    pub namespace: String,
    /// Its name, or the prefix of one.
    pub name: String,
    pub uid: String,
    /// `name@generation` of the policy.
    pub policy: String,
}

/// Why bytes are no review: nothing to answer to, status 400.
#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    #[error("empty body: expected an AdmissionReview of {API_VERSION}")]
    Empty,
    /// Not JSON, or a field of the wrong type.
    #[error("not an AdmissionReview: {0}")]
    Malformed(serde_json::Error),
    /// JSON, but not a review that we speak.
    #[error("{field}: {value:?}: expected {expected}")]
    Field { field: &'static str, value: String, expected: &'static str },
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
    #[serde(bound(deserialize = "O: Deserialize<'de>"))]
    old_object: Option<O>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Resource<'a> {
    #[serde(borrow)]
    group: Text<'a>,
    #[serde(borrow)]
    resource: Text<'a>,
}

/// Answers a review. A pod that is converted, and not only to try it, gets `traceparent` as the context of its trace, where there is one.
///
/// # Errors
/// [`ReviewError`] when there is no UID to answer to. A review whose object does not parse is answered: the pod is
/// admitted as it is (failing is staying legacy), with a warning.
pub fn answer(body: &[u8], snapshot: &Snapshot, traceparent: Option<&str>) -> Result<Answer, ReviewError> {
    if body.is_empty() {
        return Err(ReviewError::Empty);
    }
    // Checked once as a whole, text need not be checked again string by string. What is not text gets an error that
    // says where.
    let parsed = match std::str::from_utf8(body) {
        Ok(text) => serde_json::from_str::<Review<'_, PodView<'_>>>(text),
        Err(_) => serde_json::from_slice(body),
    };
    match parsed {
        Ok(review) => {
            let request = accepted(review)?;
            match (reviewed(&request), &request.object) {
                (Ok(Reviewed::Pod), Some(pod)) => {
                    let mut decision = decide(pod, &context(&request, snapshot), &snapshot.policies);
                    let real = traceparent.filter(|_| request.dry_run != Some(true));
                    let traced =
                        real.and_then(|traceparent| trace(&request, pod, &mut decision, traceparent));
                    Ok(Answer { traced, ..respond(&request, &decision) })
                }
                (Ok(Reviewed::EphemeralContainers), Some(_)) => ephemeral_containers(body, snapshot),
                (Ok(_), None) => Ok(admitted(&request, "no_object", &[])),
                (Err(outcome), _) => Ok(admitted(&request, outcome, &[])),
            }
        }
        Err(error) => undecided(body, error),
    }
}

fn context<'r, O>(request: &'r Request<'_, O>, snapshot: &'r Snapshot) -> RequestContext<'r> {
    let namespace = request.namespace.as_str();
    let namespace_labels = snapshot.namespaces.get(namespace).map(AsRef::as_ref);
    RequestContext { namespace, namespace_labels, owner: None, cluster: &snapshot.cluster }
}

/// Writes the context of its trace into a pod that is converted. The conversion has made the annotations, where there were none.
fn trace<O>(
    request: &Request<'_, O>,
    pod: &PodView<'_>,
    decision: &mut Decision<'_>,
    traceparent: &str,
) -> Option<TracedPod> {
    if decision.outcome != Outcome::Converted || decision.patch.is_empty() {
        return None;
    }
    decision.patch.add(&["metadata", "annotations", names::TRACEPARENT], |out| string(out, traceparent));
    let meta = &pod.metadata;
    let name = if meta.name.is_empty() { &meta.generate_name } else { &meta.name };
    Some(TracedPod {
        namespace: request.namespace.to_string(),
        name: name.to_string(),
        uid: meta.uid.to_string(),
        policy: decision.policy.unwrap_or_default().to_owned(),
    })
}

/// Such a review is rare, so that it is parsed once more rather than every pod with one more field.
fn ephemeral_containers(body: &[u8], snapshot: &Snapshot) -> Result<Answer, ReviewError> {
    match serde_json::from_slice::<Review<'_, EphemeralView<'_>>>(body) {
        Ok(review) => {
            let request = accepted(review)?;
            let Some(pod) = &request.object else { return Ok(admitted(&request, "no_object", &[])) };
            let (context, before) = (context(&request, snapshot), request.old_object.as_ref());
            Ok(respond(&request, &decide_ephemeral(pod, before, &context, &snapshot.policies)))
        }
        Err(error) => undecided(body, error),
    }
}

/// The object does not parse, or nothing does.
fn undecided(body: &[u8], error: serde_json::Error) -> Result<Answer, ReviewError> {
    let Ok(review) = serde_json::from_slice::<Review<'_, IgnoredAny>>(body) else {
        return Err(ReviewError::Malformed(error));
    };
    let request = accepted(review)?;
    match reviewed(&request) {
        Err(outcome) => Ok(admitted(&request, outcome, &[])),
        Ok(_) => {
            let text: String =
                format!("gpu-migrate: left alone: not a pod: {error}").chars().take(120).collect();
            Ok(admitted(&request, "malformed_object", &[text]))
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

/// What is created.
enum Reviewed {
    Pod,
    /// In a pod that exists.
    EphemeralContainers,
}

/// Only the creation of pods and of ephemeral containers is reviewed; the error is the outcome for anything else.
fn reviewed<O>(request: &Request<'_, O>) -> Result<Reviewed, &'static str> {
    let Resource { group, resource } = &request.resource;
    if resource.as_str() != "pods" || !group.as_str().is_empty() {
        return Err("not_a_pod");
    }
    match (request.sub_resource.as_str(), request.operation.as_str()) {
        ("", "CREATE") => Ok(Reviewed::Pod),
        ("", _) => Err("not_create"),
        ("ephemeralcontainers", "UPDATE") => Ok(Reviewed::EphemeralContainers),
        _ => Err("not_a_pod"),
    }
}

fn admitted<O>(request: &Request<'_, O>, outcome: &'static str, warnings: &[String]) -> Answer {
    let mut body = begin(request, true, 256);
    write_warnings(&mut body, warnings);
    end(request, outcome, body)
}

fn respond<O>(request: &Request<'_, O>, decision: &Decision<'_>) -> Answer {
    let patch = decision.patch.as_str();
    let mut body = begin(request, decision.deny.is_none(), 768 + patch.len() * 4 / 3);
    let mut outcome = decision.outcome.as_str();
    if let Some(message) = &decision.deny {
        outcome = "denied";
        body.push_str(r#","status":{"code":403,"reason":"Forbidden","message":"#);
        string(&mut body, message);
        body.push('}');
    } else if !patch.is_empty() {
        use base64::Engine;
        body.push_str(r#","patchType":"JSONPatch","patch":""#);
        base64::engine::general_purpose::STANDARD.encode_string(patch, &mut body);
        body.push('"');
    }
    write_warnings(&mut body, &decision.warnings);
    write_audit(&mut body, decision);
    end(request, outcome, body)
}

/// Everything up to `allowed`; the fields are few and fixed, and the patch in them need not be searched for escapes.
fn begin<O>(request: &Request<'_, O>, allowed: bool, capacity: usize) -> String {
    let mut body = String::with_capacity(capacity);
    // Writing into a string cannot fail.
    let _ = write!(body, r#"{{"apiVersion":"{API_VERSION}","kind":"{KIND}","response":{{"uid":"#);
    string(&mut body, request.uid.as_str());
    let _ = write!(body, r#","allowed":{allowed}"#);
    body
}

fn end<O>(request: &Request<'_, O>, outcome: &'static str, mut body: String) -> Answer {
    body.push_str("}}");
    Answer { body: body.into_bytes(), outcome, dry_run: request.dry_run == Some(true), traced: None }
}

fn write_warnings(body: &mut String, warnings: &[String]) {
    for (index, warning) in warnings.iter().enumerate() {
        body.push_str(if index == 0 { r#","warnings":["# } else { "," });
        string(body, warning);
    }
    if !warnings.is_empty() {
        body.push(']');
    }
}

fn write_audit(body: &mut String, decision: &Decision<'_>) {
    let outcome = decision.policy.map(|_| ("outcome", decision.outcome.as_str()));
    let policy = decision.policy.map(|policy| ("policy", policy));
    let more = decision.audit.as_ref().map(|(key, text)| (*key, text.as_str()));
    let mut first = true;
    for (name, value) in [more, outcome, policy].into_iter().flatten() {
        body.push_str(if first { r#","auditAnnotations":{"# } else { "," });
        first = false;
        key(body, name);
        string(body, value);
    }
    if !first {
        body.push('}');
    }
}
