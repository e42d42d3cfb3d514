//! A request, taken apart: which resource, which object, which parameters, which form of answer.

use std::collections::HashMap;
use std::sync::Arc;

use http::{HeaderMap, Method, Uri, header};
use serde_json::Value;

use super::kinds::{Kind, Kinds};
use super::protobuf;
use super::select::Selector;
use super::status::Refusal;

#[derive(Clone, Debug)]
pub struct Target {
    pub kind: Arc<Kind>,
    /// Namespace; empty for cluster-scoped resources and for lists of all namespaces.
    pub namespace: String,
    /// Name of the object; empty for collections.
    pub name: String,
    /// Subresource, or empty.
    pub subresource: String,
}

impl Target {
    /// Reads a path.
    ///
    /// # Errors
    /// 404 where nothing is, 501 for what a real API server has there.
    pub fn of(path: &str, kinds: &Kinds) -> Result<Self, Refusal> {
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let (group, version, rest) = match parts.as_slice() {
            ["api", version, rest @ ..] => ("", *version, rest),
            ["apis", group, version, rest @ ..] => (*group, *version, rest),
            ["openapi", ..] => {
                return Err(Refusal::not_served("schemas: GET /openapi/v3 says which fields it checks"));
            }
            ["metrics" | "logs" | "debug", ..] => return Err(Refusal::not_served(path)),
            _ => return Err(Refusal::no_such_path()),
        };
        let (namespace, rest) = match rest {
            // `namespaces/x/status` is a subresource of the Namespace; `namespaces/x/pods` is not.
            ["namespaces", namespace, rest @ ..]
                if !rest.is_empty() && !["status", "finalize"].contains(&rest[0]) =>
            {
                (*namespace, rest)
            }
            rest => ("", rest),
        };
        let (plural, name, subresource) = match rest {
            ["watch", ..] => return Err(Refusal::not_served("the /watch/ paths; use ?watch=true")),
            [plural] => (*plural, "", ""),
            [plural, name] => (*plural, *name, ""),
            [plural, name, subresource] => (*plural, *name, *subresource),
            [_, _, subresource, ..] => {
                return Err(Refusal::not_served(format!("the subresource {subresource}")));
            }
            [] => return Err(Refusal::no_such_path()),
        };
        let Some(kind) = kinds.find(group, version, plural) else {
            if Kinds::refused(group, plural) {
                return Err(Refusal::not_served(format!("{plural} of group {group:?}")));
            }
            return Err(Refusal::no_such_path());
        };
        if !subresource.is_empty() && !kind.has(subresource) {
            return Err(Refusal::not_served(format!(
                "the subresource {subresource} of {}",
                kind.qualified()
            )));
        }
        if kind.namespaced && namespace.is_empty() && !name.is_empty() {
            return Err(Refusal::no_such_path());
        }
        if !kind.namespaced && !namespace.is_empty() {
            return Err(Refusal::no_such_path());
        }
        Ok(Self { kind, namespace: namespace.into(), name: name.into(), subresource: subresource.into() })
    }
}

/// The form in which objects are answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    #[default]
    Whole,
    Table,
    Partial,
}

impl Form {
    /// The first form of `Accept` that is served.
    #[must_use]
    pub fn of(headers: &HeaderMap) -> Self {
        let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
        for media in accept.split(',').filter(|media| media.trim_start().starts_with("application/json")) {
            if media.contains("as=Table") && media.contains("v=v1;") | media.trim_end().contains("v=v1") {
                return Self::Table;
            }
            if media.contains("as=PartialObjectMetadata") {
                return Self::Partial;
            }
            if !media.contains("as=") {
                return Self::Whole;
            }
        }
        Self::Whole
    }
}

/// The query, and the headers that matter.
#[derive(Clone, Debug, Default)]
pub struct Parameters {
    query: HashMap<String, String>,
    pub form: Form,
    /// Media type of the body.
    pub media: String,
    agent: String,
}

impl Parameters {
    #[must_use]
    pub fn of(uri: &Uri, headers: &HeaderMap) -> Self {
        let header = |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let query = uri.query().unwrap_or_default();
        let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        Self {
            query: pairs.map(|(key, value)| (decode(key), decode(value))).collect(),
            form: Form::of(headers),
            media: header(header::CONTENT_TYPE).split(';').next().unwrap_or_default().trim().to_owned(),
            agent: header(header::USER_AGENT).split('/').next().unwrap_or_default().to_owned(),
        }
    }

    /// A parameter; empty where it is not given.
    #[must_use]
    pub fn get(&self, key: &str) -> &str {
        self.query.get(key).map_or("", String::as_str)
    }

    /// A parameter that is `true` or `1`.
    #[must_use]
    pub fn flag(&self, key: &str) -> bool {
        ["true", "1"].contains(&self.get(key))
    }

    /// `dryRun=All`.
    #[must_use]
    pub fn dry_run(&self) -> bool {
        self.get("dryRun") == "All"
    }

    /// Who writes: `fieldManager`, or the client's name.
    #[must_use]
    pub fn manager(&self) -> &str {
        match self.get("fieldManager") {
            "" if self.agent.is_empty() => "unknown",
            "" => &self.agent,
            given => given,
        }
    }

    /// Which objects are wanted.
    ///
    /// # Errors
    /// 400.
    pub fn selector(&self) -> Result<Selector, Refusal> {
        Selector::parse(self.get("labelSelector"), self.get("fieldSelector"))
    }
}

fn decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        match byte {
            b'+' => bytes.push(b' '),
            b'%' => {
                let digits = [rest.next().unwrap_or(b'?'), rest.next().unwrap_or(b'?')];
                let parsed =
                    std::str::from_utf8(&digits).ok().and_then(|hex| u8::from_str_radix(hex, 16).ok());
                bytes.push(parsed.unwrap_or(b'?'));
            }
            byte => bytes.push(byte),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Reads a body: JSON, or YAML where the media type says so.
///
/// # Errors
/// 400 for what cannot be read, 415 for protobuf of another kind than Namespace.
pub fn body(bytes: &[u8], media: &str) -> Result<Value, Refusal> {
    if media.contains("protobuf") {
        return protobuf::read(bytes);
    }
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Ok(Value::Null);
    }
    if media.contains("yaml") && !bytes.trim_ascii_start().starts_with(b"{") {
        let text = std::str::from_utf8(bytes).map_err(|error| Refusal::bad_request(error.to_string()))?;
        return serde_saphyr::from_str(text).map_err(|error| Refusal::bad_request(error.to_string()));
    }
    serde_json::from_slice(bytes).map_err(|error| Refusal::bad_request(error.to_string()))
}

/// Refuses an object whose maps are something else: nothing behind this has to look again.
///
/// # Errors
/// 400 naming the field.
pub fn check_shape(object: &Value) -> Result<(), Refusal> {
    const MAPS: &[&str] = &[
        "",
        "/metadata",
        "/metadata/labels",
        "/metadata/annotations",
        "/spec",
        "/spec/strategy",
        "/spec/strategy/rollingUpdate",
        "/spec/template",
        "/spec/template/metadata",
        "/spec/template/spec",
        "/status",
        "/data",
        "/stringData",
    ];
    let wrong = MAPS.iter().find(|p| object.pointer(p).is_some_and(|v| !v.is_object() && !v.is_null()));
    if let Some(pointer) = wrong {
        let field = pointer.trim_start_matches('/').replace('/', ".");
        return Err(Refusal::bad_request(format!("{field}: expected an object")));
    }
    let specs = ["/spec", "/spec/template/spec"].into_iter().filter_map(|pointer| object.pointer(pointer));
    for container in specs.flat_map(|s| ["containers", "initContainers"].map(|l| s.get(l))).flatten() {
        let good = |c: &Value| {
            c.is_object()
                && c.get("resources").is_none_or(|r| {
                    let map = |key: &str| r.get(key).is_none_or(|v| v.is_object() || v.is_null());
                    (r.is_object() && map("limits") && map("requests")) || r.is_null()
                })
        };
        if !container.is_null() && !container.as_array().is_some_and(|list| list.iter().all(good)) {
            return Err(Refusal::bad_request(
                "spec.containers: expected a list of containers, with maps as resources",
            ));
        }
    }
    Ok(())
}

/// `GET` of a collection with `watch=true`, and so on: what is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    Get,
    List,
    Watch,
    Create,
    Update,
    /// A change, in one of four forms.
    Patch,
    Delete,
    DeleteAll,
}

impl Verb {
    /// The verb of a request.
    ///
    /// # Errors
    /// 405.
    pub fn of(method: &Method, target: &Target, parameters: &Parameters) -> Result<Self, Refusal> {
        let one = !target.name.is_empty();
        Ok(match (method.as_str(), one) {
            ("GET" | "HEAD", _) if parameters.flag("watch") => Self::Watch,
            ("GET" | "HEAD", true) => Self::Get,
            ("GET" | "HEAD", false) => Self::List,
            ("POST", false) => Self::Create,
            ("POST", true) if !target.subresource.is_empty() => Self::Create,
            ("PUT", true) => Self::Update,
            ("PATCH", true) => Self::Patch,
            ("DELETE", true) => Self::Delete,
            ("DELETE", false) => Self::DeleteAll,
            _ => return Err(Refusal::method()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn paths_lead_to_resources() {
        let kinds = Kinds::default();
        let found = |path: &str| {
            let target = Target::of(path, &kinds).map_err(|refusal| refusal.code.as_u16())?;
            Ok::<_, u16>((target.kind.plural.clone(), target.namespace, target.name, target.subresource))
        };
        let is = |plural: &str, ns: &str, name: &str, sub: &str| {
            Ok::<_, u16>((plural.to_owned(), ns.to_owned(), name.to_owned(), sub.to_owned()))
        };
        for (path, expected) in [
            ("/api/v1/pods", is("pods", "", "", "")),
            ("/api/v1/namespaces/a/pods/p/binding", is("pods", "a", "p", "binding")),
            ("/api/v1/namespaces/a", is("namespaces", "", "a", "")),
            ("/api/v1/namespaces/a/status", is("namespaces", "", "a", "status")),
            ("/apis/apps/v1/namespaces/a/deployments", is("deployments", "a", "", "")),
            ("/apis/apps/v1/namespaces/a/deployments/d/scale", is("deployments", "a", "d", "scale")),
            ("/apis/apps/v1/namespaces/a/daemonsets/d/scale", Err(501)),
            ("/api/v1/namespaces/a/pods/p/exec", Err(501)),
            ("/apis/rbac.authorization.k8s.io/v1/clusterroles", Err(501)),
            ("/apis/nothing.io/v1/things", Err(404)),
            ("/api/v1/pods/p", Err(404)),
            ("/api/v1/namespaces/a/nodes", Err(404)),
        ] {
            assert_eq!(found(path), expected, "{path}");
        }
    }

    #[test]
    fn maps_that_are_something_else_are_refused() {
        for object in [
            json!([]),
            json!({"metadata": "x"}),
            json!({"spec": 1}),
            json!({"spec": {"containers": {}}}),
            json!({"spec": {"template": {"spec": {"containers": ["x"]}}}}),
            json!({"spec": {"containers": [{"resources": {"limits": []}}]}}),
        ] {
            assert!(check_shape(&object).is_err(), "{object}");
        }
        assert!(check_shape(&json!({"spec": {"containers": [{"name": "c", "resources": null}]}})).is_ok());
    }
}
