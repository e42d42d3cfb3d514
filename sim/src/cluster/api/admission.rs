//! Mutating admission webhooks, called as a real API server calls them: over TLS against the registered `caBundle`, in the order
//! of their names, with `?timeout=`, and again (`reinvocationPolicy: IfNeeded`) if a later one changed the object.
//!
//! Only for CREATE and only by URL: there is no Service network here. A registration that needs more is refused with 501 when it
//! is made, rather than ignored later.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::{Request, Uri, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::kinds::Kind;
use super::object::{items, labels, name, namespace, new_uid};
use super::select::matches_labels;
use super::status::Refusal;
use super::{conditions, object};

/// Longest answer of a webhook.
const LARGEST_ANSWER: usize = 7 << 20;

#[derive(Clone, Copy, Debug)]
pub struct Creation<'a> {
    pub kind: &'a Kind,
    /// Labels of its namespace; null for cluster-scoped objects.
    pub namespace: Option<&'a Value>,
    pub dry_run: bool,
}

/// Refuses a configuration that this server could not follow.
///
/// # Errors
/// 501 naming the field.
pub fn check_configuration(configuration: &Value) -> Result<(), Refusal> {
    for (position, webhook) in items(configuration, "webhooks").enumerate() {
        let refuse = |field: &str, what: &str| {
            Err(Refusal::not_served(format!("webhooks[{position}].{field}: {what}")))
        };
        if webhook["clientConfig"]["url"].as_str().is_none() {
            return refuse("clientConfig.service", "there is no Service network; register a url");
        }
        // A rule for subresources alone is never needed: pods have none here for which webhooks are called.
        let of_objects = |rule: &&Value| {
            items(rule, "resources").any(|resource| !resource.as_str().unwrap_or_default().contains('/'))
        };
        for rule in items(webhook, "rules").filter(of_objects) {
            if items(rule, "operations").any(|operation| operation != "CREATE") {
                return refuse("rules[].operations", "webhooks are called for CREATE alone");
            }
        }
        for condition in items(webhook, "matchConditions") {
            if let Err(problem) = conditions::parses(condition["expression"].as_str().unwrap_or_default()) {
                return Err(Refusal::invalid(
                    "MutatingWebhookConfiguration",
                    name(configuration),
                    &format!("webhooks[{position}].matchConditions"),
                    &problem,
                ));
            }
        }
    }
    Ok(())
}

/// Shows a new object to all webhooks that want it. Returns their warnings.
///
/// # Errors
/// A denial, or a failure under `failurePolicy: Fail`.
pub async fn mutate(
    configurations: &[Arc<Value>],
    creation: Creation<'_>,
    object: &mut Value,
    refill: impl Fn(&mut Value),
) -> Result<Vec<String>, Refusal> {
    let webhooks: Vec<&Value> = configurations.iter().flat_map(|c| items(c, "webhooks")).collect();
    let mut warnings = Vec::new();
    let mut called_with: Vec<Option<Value>> = vec![None; webhooks.len()];
    for round in 0..2 {
        for (webhook, called_with) in webhooks.iter().zip(&mut called_with) {
            let again = called_with.is_some();
            let wanted = !again
                || (webhook["reinvocationPolicy"] == "IfNeeded" && called_with.as_ref() != Some(&*object));
            if (round == 1 && !again) || !wanted || !selects(webhook, creation, object) {
                continue;
            }
            let request = request(creation, object);
            one(webhook, creation, &request, object, &mut warnings).await?;
            refill(object);
            *called_with = Some(object.clone());
        }
    }
    Ok(warnings)
}

async fn one(
    webhook: &Value,
    creation: Creation<'_>,
    request: &Value,
    object: &mut Value,
    warnings: &mut Vec<String>,
) -> Result<(), Refusal> {
    let called = webhook["name"].as_str().unwrap_or_default();
    let ignore = webhook["failurePolicy"] == "Ignore";
    let failed = |problem: String| {
        if ignore {
            tracing::warn!(
                webhook = called,
                problem,
                "the webhook failed; failurePolicy Ignore lets the object pass as it is"
            );
            return Ok(());
        }
        Err(Refusal::internal(format!("failed calling webhook {called:?}: {problem}")))
    };
    match conditions::hold(webhook, object, request) {
        Ok(true) => {}
        Ok(false) => return Ok(()),
        Err(problem) => return failed(problem),
    }
    let answer = match call(webhook, creation, request).await {
        Ok(answer) => answer,
        Err(problem) => return failed(problem),
    };
    let response = &answer["response"];
    if response["uid"] != request["uid"] {
        return failed(format!("expected response.uid={}, got {}", request["uid"], response["uid"]));
    }
    warnings.extend(items(response, "warnings").filter_map(Value::as_str).map(str::to_owned));
    if response["allowed"] != true {
        let why = response["status"]["message"].as_str().unwrap_or("without explanation");
        return Err(Refusal::forbidden(format!("admission webhook {called:?} denied the request: {why}")));
    }
    match patched(response, object) {
        Ok(None) => Ok(()),
        Ok(Some(after)) => {
            *object = after;
            Ok(())
        }
        Err(problem) => failed(problem),
    }
}

/// The object after the patch of the answer; `None` where there is none.
fn patched(response: &Value, object: &Value) -> Result<Option<Value>, String> {
    let Some(patch) = response["patch"].as_str() else { return Ok(None) };
    if response["patchType"] != "JSONPatch" {
        return Err(format!("patchType: {}: expected JSONPatch", response["patchType"]));
    }
    let bytes = STANDARD.decode(patch).map_err(|error| format!("patch: {error}"))?;
    let patch: json_patch::Patch =
        serde_json::from_slice(&bytes).map_err(|error| format!("patch: {error}"))?;
    let mut after = object.clone();
    json_patch::patch(&mut after, &patch).map_err(|error| format!("patch: {error}"))?;
    Ok(Some(after))
}

fn selects(webhook: &Value, creation: Creation<'_>, object: &Value) -> bool {
    let kind = creation.kind;
    let named = |rule: &Value, key: &str, own: &str| items(rule, key).any(|v| v == "*" || v == own);
    let scope = |rule: &Value| match rule["scope"].as_str() {
        Some("Namespaced") => kind.namespaced,
        Some("Cluster") => !kind.namespaced,
        _ => true,
    };
    let ruled = items(webhook, "rules").any(|rule| {
        named(rule, "apiGroups", &kind.group)
            && named(rule, "apiVersions", &kind.version)
            && named(rule, "resources", &kind.plural)
            && named(rule, "operations", "CREATE")
            && scope(rule)
    });
    let of_namespace =
        creation.namespace.is_none_or(|labels| matches_labels(&webhook["namespaceSelector"], labels));
    // The webhooks' own configurations are never shown to webhooks: else nobody could take a broken one away.
    let own = kind.group == "admissionregistration.k8s.io";
    ruled && !own && of_namespace && matches_labels(&webhook["objectSelector"], labels(object))
}

fn request(creation: Creation<'_>, object: &Value) -> Value {
    let kind = creation.kind;
    let of_kind = json!({"group": kind.group, "version": kind.version, "kind": kind.kind});
    let resource = json!({"group": kind.group, "version": kind.version, "resource": kind.plural});
    let mut request = json!({
        "uid": new_uid(), "kind": of_kind, "resource": resource, "requestKind": of_kind, "requestResource": resource,
        "operation": "CREATE", "userInfo": {"username": "kubernetes-admin", "groups": ["system:masters", "system:authenticated"]},
        "object": object, "oldObject": null, "dryRun": creation.dry_run,
        "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
    });
    for (key, value) in [("name", name(object)), ("namespace", namespace(object))] {
        if !value.is_empty() {
            object::map(&mut request).insert(key.into(), value.into());
        }
    }
    request
}

async fn call(webhook: &Value, creation: Creation<'_>, request: &Value) -> Result<Value, String> {
    debug_assert_eq!(request["dryRun"], creation.dry_run);
    let seconds = webhook["timeoutSeconds"].as_u64().unwrap_or(10).clamp(1, 30);
    let url = webhook["clientConfig"]["url"].as_str().unwrap_or_default();
    let uri: Uri = format!("{url}?timeout={seconds}s").parse().map_err(|error| format!("{url}: {error}"))?;
    let review = json!({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": request})
        .to_string();
    let bundle = webhook["clientConfig"]["caBundle"].as_str().unwrap_or_default();
    let exchange = post(&uri, bundle, review);
    match tokio::time::timeout(Duration::from_secs(seconds), exchange).await {
        Ok(answer) => serde_json::from_slice(&answer?)
            .map_err(|error| format!("the answer is no AdmissionReview: {error}")),
        Err(_) => Err(format!("Post {uri}: context deadline exceeded")),
    }
}

/// One HTTP/1.1 exchange over TLS; a connection each, as there are few.
async fn post(uri: &Uri, bundle: &str, body: String) -> Result<Bytes, String> {
    let host = uri.host().ok_or_else(|| format!("{uri}: no host"))?;
    if uri.scheme_str() != Some("https") {
        return Err(format!("{uri}: webhooks are called over https alone"));
    }
    let at = |error: &dyn std::fmt::Display| format!("Post {uri}: {error}");
    let tcp = TcpStream::connect((host, uri.port_u16().unwrap_or(443))).await.map_err(|e| at(&e))?;
    let server = ServerName::try_from(host.to_owned()).map_err(|e| at(&e))?;
    let tls =
        TlsConnector::from(Arc::new(trusting(bundle)?)).connect(server, tcp).await.map_err(|e| at(&e))?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(tls)).await.map_err(|e| at(&e))?;
    tokio::spawn(connection);
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let request = Request::post(path)
        .header(header::HOST, uri.authority().map_or(host, |a| a.as_str()))
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::USER_AGENT, "kube-apiserver-admission")
        .body(Full::new(Bytes::from(body)))
        .map_err(|e| at(&e))?;
    let response = sender.send_request(request).await.map_err(|e| at(&e))?;
    let status = response.status();
    let body =
        Limited::new(response.into_body(), LARGEST_ANSWER).collect().await.map_err(|e| at(&e))?.to_bytes();
    if status.is_success() { Ok(body) } else { Err(format!("Post {uri}: the server answered {status}")) }
}

/// A TLS client that trusts what the `caBundle` (PEM in base64) names, and nobody else.
fn trusting(bundle: &str) -> Result<rustls::ClientConfig, String> {
    let pem = STANDARD.decode(bundle).map_err(|error| format!("caBundle: {error}"))?;
    let mut roots = rustls::RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        let certificate = certificate.map_err(|error| format!("caBundle: {error}"))?;
        roots.add(certificate).map_err(|error| format!("caBundle: {error}"))?;
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}
