//! What a new object gets that its author left out, and what is refused: the part of defaulting and validation that the
//! migration meets (FACTS: requests follow limits before *and* after the webhooks; extended resources are whole and not
//! overcommitted). Everything else is stored as written.

use serde_json::{Map, Value, json};

use super::kinds::Kind;
use super::object::{default, items, map, name};
use super::schema;
use super::status::Refusal;

/// Fills in an object before it is shown to the webhooks, and again after.
pub fn fill(kind: &Kind, object: &mut Value) {
    match (kind.group.as_str(), kind.plural.as_str()) {
        ("", "pods") => {
            pod_spec(&mut object["spec"]);
            pod(object);
        }
        ("", "nodes") => default(&mut object["spec"], "podCIDR", ""),
        ("", "secrets") => {
            default(object, "type", "Opaque");
            secret(object);
        }
        ("", "namespaces") => {
            let own_name = name(object).to_owned();
            default(&mut object["metadata"], "labels", json!({}));
            map(&mut object["metadata"]["labels"])
                .insert("kubernetes.io/metadata.name".into(), own_name.into());
            object["status"] = json!({"phase": "Active"});
        }
        ("apps", "deployments") => deployment(object),
        ("apps", "replicasets") => {
            default(&mut object["spec"], "replicas", 1);
            pod_spec(&mut object["spec"]["template"]["spec"]);
        }
        _ => {}
    }
    if let Some(custom) = &kind.custom {
        schema::fill(object, &custom.schema);
    }
}

fn pod(pod: &mut Value) {
    default(&mut pod["metadata"], "namespace", "default");
    let spec = &mut pod["spec"];
    default(spec, "serviceAccountName", "default");
    default(spec, "priority", 0);
    default(spec, "preemptionPolicy", "PreemptLowerPriority");
    default(spec, "tolerations", json!([]));
    if let Some(tolerations) = spec["tolerations"].as_array_mut() {
        for key in ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"] {
            if !tolerations.iter().any(|t| t["key"] == key) {
                let (operator, effect) = ("Exists", "NoExecute");
                tolerations.push(
                    json!({"key": key, "operator": operator, "effect": effect, "tolerationSeconds": 300}),
                );
            }
        }
    }
    if pod["status"]["phase"].is_null() {
        pod["status"] = json!({"phase": "Pending", "qosClass": "BestEffort"});
    }
}

fn pod_spec(spec: &mut Value) {
    for (key, value) in [
        ("restartPolicy", json!("Always")),
        ("terminationGracePeriodSeconds", json!(30)),
        ("dnsPolicy", json!("ClusterFirst")),
        ("securityContext", json!({})),
        ("schedulerName", json!("default-scheduler")),
        ("enableServiceLinks", json!(true)),
    ] {
        default(spec, key, value);
    }
    for list in ["containers", "initContainers"] {
        for container in spec.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            default(container, "terminationMessagePath", "/dev/termination-log");
            default(container, "terminationMessagePolicy", "File");
            default(container, "imagePullPolicy", "IfNotPresent");
            default(container, "resources", json!({}));
            requests_from_limits(&mut container["resources"]);
        }
    }
}

/// A limit without a request is a request too.
fn requests_from_limits(resources: &mut Value) {
    let Some(limits) = resources["limits"].as_object().cloned() else { return };
    if limits.is_empty() {
        return;
    }
    default(resources, "requests", json!({}));
    let requests = map(&mut resources["requests"]);
    for (name, quantity) in limits {
        requests.entry(name).or_insert(quantity);
    }
}

fn secret(secret: &mut Value) {
    use base64::Engine;
    let Some(plain) = map(secret).remove("stringData") else { return };
    default(secret, "data", json!({}));
    for (key, value) in plain.as_object().into_iter().flatten() {
        let bytes = value.as_str().unwrap_or_default().as_bytes();
        secret["data"][key] = base64::engine::general_purpose::STANDARD.encode(bytes).into();
    }
}

fn deployment(deployment: &mut Value) {
    let spec = &mut deployment["spec"];
    default(spec, "replicas", 1);
    default(spec, "revisionHistoryLimit", 10);
    default(spec, "progressDeadlineSeconds", 600);
    default(spec, "strategy", json!({}));
    default(&mut spec["strategy"], "type", "RollingUpdate");
    if spec["strategy"]["type"] == "RollingUpdate" {
        default(&mut spec["strategy"], "rollingUpdate", json!({}));
        default(&mut spec["strategy"]["rollingUpdate"], "maxUnavailable", "25%");
        default(&mut spec["strategy"]["rollingUpdate"], "maxSurge", "25%");
    }
    pod_spec(&mut spec["template"]["spec"]);
}

/// Refuses what would not work.
///
/// # Errors
/// 422 naming the field.
pub fn check(kind: &Kind, object: &Value) -> Result<(), Refusal> {
    let refuse = |field: &str, problem: &str| Err(Refusal::invalid(&kind.kind, name(object), field, problem));
    let own_name = name(object);
    let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    if !own_name.chars().all(legal) || !own_name.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        let problem = format!("Invalid value: {own_name:?}: a lowercase RFC 1123 subdomain is expected");
        return refuse("metadata.name", &problem);
    }
    match (kind.group.as_str(), kind.plural.as_str()) {
        ("", "pods") => check_pod_spec(kind, own_name, "spec", &object["spec"]),
        ("apps", "deployments" | "replicasets") => {
            let spec = &object["spec"];
            let labels = &spec["template"]["metadata"]["labels"];
            if spec["selector"].is_null() {
                return refuse("spec.selector", "Required value");
            }
            if !super::select::matches_labels(&spec["selector"], labels) {
                let problem = format!("Invalid value: {labels}: `selector` does not match template `labels`");
                return refuse("spec.template.metadata.labels", &problem);
            }
            check_pod_spec(kind, own_name, "spec.template.spec", &spec["template"]["spec"])
        }
        _ => Ok(()),
    }
}

fn check_pod_spec(kind: &Kind, name: &str, path: &str, spec: &Value) -> Result<(), Refusal> {
    let refuse = |field: String, problem: &str| Err(Refusal::invalid(&kind.kind, name, &field, problem));
    if items(spec, "containers").next().is_none() {
        return refuse(format!("{path}.containers"), "Required value");
    }
    let mut seen = Vec::new();
    for list in ["initContainers", "containers"] {
        for (position, container) in items(spec, list).enumerate() {
            let path = format!("{path}.{list}[{position}]");
            match container["name"].as_str() {
                None | Some("") => return refuse(format!("{path}.name"), "Required value"),
                Some(name) if seen.contains(&name) => {
                    return refuse(format!("{path}.name"), &format!("Duplicate value: {name:?}"));
                }
                Some(name) => seen.push(name),
            }
            if let Err((field, problem)) = check_resources(&container["resources"]) {
                return refuse(format!("{path}.resources.{field}"), &problem);
            }
        }
    }
    Ok(())
}

/// Extended resources come in whole numbers, and requests are limits.
fn check_resources(resources: &Value) -> Result<(), (String, String)> {
    let none = Map::new();
    let map = |key: &str| resources[key].as_object().unwrap_or(&none).clone();
    let (limits, requests) = (map("limits"), map("requests"));
    for (list, quantities) in [("limits", &limits), ("requests", &requests)] {
        for (resource, quantity) in quantities.iter().filter(|(resource, _)| is_extended(resource)) {
            if whole(quantity).is_none() {
                return Err((
                    list.into(),
                    format!("Invalid value: {quantity}: {resource} must be a non-negative integer"),
                ));
            }
        }
    }
    for (resource, request) in requests.iter().filter(|(resource, _)| is_extended(resource)) {
        match limits.get(resource) {
            None => {
                return Err((
                    "limits".into(),
                    "Required value: Limit must be set for non overcommitable resources".into(),
                ));
            }
            Some(limit) if whole(limit) != whole(request) => {
                return Err((
                    "requests".into(),
                    format!("Invalid value: {request}: must be equal to {resource} limit of {limit}"),
                ));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// A resource of somebody's device plugin.
#[must_use]
pub fn is_extended(resource: &str) -> bool {
    resource.contains('/') && !resource.contains("kubernetes.io/") && !resource.starts_with("requests.")
}

/// A quantity as a whole number.
#[must_use]
pub fn whole(quantity: &Value) -> Option<u64> {
    match quantity {
        Value::Number(number) => number.as_u64(),
        Value::String(text) => text.parse::<gpu_migrate_model::quantity::Quantity>().ok()?.whole(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::api::kinds::Kinds;

    fn made(spec: Value) -> Result<Value, String> {
        let kind = Kinds::default().find("", "v1", "pods").unwrap();
        let mut pod = json!({"metadata": {"name": "p"}, "spec": spec});
        fill(&kind, &mut pod);
        check(&kind, &pod).map_err(|refusal| refusal.message)?;
        Ok(pod)
    }

    #[test]
    fn extended_resources_as_a_real_api_server_takes_them() {
        let pod = |resources: Value| made(json!({"containers": [{"name": "c", "resources": resources}]}));
        let requests = |pod: Value| pod["spec"]["containers"][0]["resources"]["requests"].clone();
        let gpu = "nvidia.com/gpu";
        assert_eq!(requests(pod(json!({"limits": {gpu: "1"}})).unwrap()), json!({gpu: "1"}));
        for quantity in ["100", "100.0", "1k", "0"] {
            assert!(pod(json!({"limits": {gpu: quantity}})).is_ok(), "{quantity}");
        }
        for (resources, says) in [
            (json!({"requests": {gpu: "1"}}), "Limit must be set for non overcommitable resources"),
            (json!({"limits": {gpu: "12.5"}}), "non-negative integer"),
            (json!({"limits": {gpu: "-1"}}), "non-negative integer"),
            (json!({"limits": {gpu: "1"}, "requests": {gpu: "2"}}), "must be equal to nvidia.com/gpu limit"),
        ] {
            let error = pod(resources).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
        assert!(pod(json!({"requests": {"cpu": "100m"}})).is_ok());
        assert!(
            made(json!({"containers": [{"name": "c"}, {"name": "c"}]})).unwrap_err().contains("Duplicate")
        );
    }
}
