//! What is served, told the way clients ask: `/api`, `/apis`, `/version`, and as much of OpenAPI as kubectl needs to leave
//! validation to the server.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::kinds::{Kind, Kinds};

/// Answers a discovery path; `None` where it is none.
#[must_use]
pub fn answer(path: &str, kinds: &Kinds) -> Option<Value> {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    match parts.as_slice() {
        ["api"] => Some(json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})),
        ["apis"] => Some(json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups(kinds)})),
        ["apis", group] => groups(kinds).into_iter().find(|found| found["name"] == *group),
        ["api", version] => resources(kinds, "", version),
        ["apis", group, version] => resources(kinds, group, version),
        ["version"] => Some(json!({
            "major": "1", "minor": "33", "gitVersion": "v1.33.0+gpu-migrate-embedded", "gitCommit": "", "gitTreeState": "clean",
            "buildDate": "2026-01-01T00:00:00Z", "goVersion": "none", "compiler": "rustc", "platform": "embedded",
        })),
        ["openapi", "v3"] => Some(json!({"paths": openapi_paths(kinds)})),
        ["openapi", "v3", "api", version] => openapi(kinds, "", version),
        ["openapi", "v3", "apis", group, version] => openapi(kinds, group, version),
        _ => None,
    }
}

fn by_group(kinds: &Kinds) -> BTreeMap<String, Vec<String>> {
    let mut groups: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for kind in kinds.all() {
        let versions = groups.entry(kind.group.clone()).or_default();
        if !versions.contains(&kind.version) {
            versions.push(kind.version.clone());
        }
    }
    groups
}

fn groups(kinds: &Kinds) -> Vec<Value> {
    let group = |(group, versions): (String, Vec<String>)| {
        let of = |version: &String| json!({"groupVersion": format!("{group}/{version}"), "version": version});
        let versions: Vec<Value> = versions.iter().map(of).collect();
        json!({"kind": "APIGroup", "apiVersion": "v1", "name": group, "versions": versions, "preferredVersion": versions.first()})
    };
    by_group(kinds).into_iter().filter(|(name, _)| !name.is_empty()).map(group).collect()
}

fn resources(kinds: &Kinds, group: &str, version: &str) -> Option<Value> {
    let of_version: Vec<_> =
        kinds.all().into_iter().filter(|k| k.group == group && k.version == version).collect();
    let first = of_version.first()?;
    let resources: Vec<Value> = of_version.iter().flat_map(|kind| rows(kind)).collect();
    Some(
        json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": first.api_version(), "resources": resources}),
    )
}

fn rows(kind: &Kind) -> Vec<Value> {
    let verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"];
    let mut rows = vec![json!({
        "name": kind.plural, "singularName": kind.singular, "namespaced": kind.namespaced, "kind": kind.kind,
        "verbs": verbs, "shortNames": kind.short,
        "categories": if kind.kind == "Pod" || kind.group == "apps" { vec!["all"] } else { vec![] },
    })];
    for subresource in &kind.subresources {
        let (of, verbs) = match subresource.as_str() {
            "binding" => ("Binding", vec!["create"]),
            "eviction" => ("Eviction", vec!["create"]),
            "log" => (kind.kind.as_str(), vec!["get"]),
            _ => (kind.kind.as_str(), vec!["get", "patch", "update"]),
        };
        let name = format!("{}/{subresource}", kind.plural);
        let mut row = json!({"name": name, "singularName": "", "namespaced": kind.namespaced, "kind": of, "verbs": verbs});
        if subresource == "scale" {
            row["kind"] = "Scale".into();
            row["group"] = "autoscaling".into();
            row["version"] = "v1".into();
        }
        rows.push(row);
    }
    rows
}

fn group_version_path(group: &str, version: &str) -> String {
    if group.is_empty() { format!("api/{version}") } else { format!("apis/{group}/{version}") }
}

fn openapi_paths(kinds: &Kinds) -> Value {
    let all = by_group(kinds).into_iter().flat_map(|(group, versions)| {
        versions.into_iter().map(move |version| group_version_path(&group, &version))
    });
    let paths = all.map(|path| (path.clone(), json!({"serverRelativeURL": format!("/openapi/v3/{path}")})));
    Value::Object(paths.collect())
}

/// Says of each kind that the server checks fields itself: kubectl then does not ask for schemas, of which there are none.
fn openapi(kinds: &Kinds, group: &str, version: &str) -> Option<Value> {
    let mut paths = Map::new();
    for kind in kinds.all().into_iter().filter(|k| k.group == group && k.version == version) {
        let scope = if kind.namespaced { "namespaces/{namespace}/" } else { "" };
        let path = format!("/{}/{scope}{}/{{name}}", group_version_path(group, version), kind.plural);
        let of = json!({"group": group, "version": version, "kind": kind.kind});
        let parameters: Vec<Value> = ["dryRun", "fieldManager", "fieldValidation"]
            .map(|name| json!({"name": name, "in": "query", "schema": {"type": "string"}}))
            .into();
        paths.insert(
            path,
            json!({"patch": {
                "operationId": format!("patch{}", kind.kind), "parameters": parameters, "responses": {},
                "x-kubernetes-action": "patch", "x-kubernetes-group-version-kind": of,
            }}),
        );
    }
    let info = json!({"title": "gpu-migrate embedded API server", "version": "v1"});
    (!paths.is_empty())
        .then(|| json!({"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": {}}}))
}
