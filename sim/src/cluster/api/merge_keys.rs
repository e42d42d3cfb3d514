//! Which lists are maps in disguise, and by which key: what Go's struct tags and the OpenAPI schema say for the core types.

use serde_json::Value;

/// How the elements of a list are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListKeys {
    /// The key of strategic merge patches.
    pub patch: &'static str,
    pub apply: &'static [&'static str],
}

const fn by(patch: &'static str, apply: &'static [&'static str]) -> ListKeys {
    ListKeys { patch, apply }
}

/// The keys of a list of objects by the name of its field; `None` for a list that is replaced as a whole.
///
/// `sample` is any element: containers' and services' `ports` differ.
#[must_use]
pub fn list_keys(field: &str, sample: &Value) -> Option<ListKeys> {
    let keys = match field {
        "containers"
        | "initContainers"
        | "ephemeralContainers"
        | "env"
        | "volumes"
        | "imagePullSecrets"
        | "schedulingGates"
        | "webhooks"
        | "matchConditions"
        | "secrets"
        | "resourceClaims" => by("name", &["name"]),
        "volumeMounts" => by("mountPath", &["mountPath"]),
        "volumeDevices" => by("devicePath", &["devicePath"]),
        "conditions" => by("type", &["type"]),
        "ownerReferences" => by("uid", &["uid"]),
        "hostAliases" => by("ip", &["ip"]),
        "podIPs" => by("ip", &["ip"]),
        "addresses" => by("type", &["type"]),
        "topologySpreadConstraints" => by("topologyKey", &["topologyKey", "whenUnsatisfiable"]),
        "ports" if sample.get("containerPort").is_some() => {
            by("containerPort", &["containerPort", "protocol"])
        }
        "ports" if sample.get("port").is_some() => by("port", &["port", "protocol"]),
        _ => return None,
    };
    // A list of plain values may have such a name in a custom resource.
    (sample.is_object() && keys.apply.first().is_some_and(|key| sample.get(key).is_some())).then_some(keys)
}

/// Whether a list of plain values is a set.
#[must_use]
pub fn is_set(field: &str) -> bool {
    field == "finalizers"
}

/// The key that an element of `ports` has where the manifest leaves the protocol out.
#[must_use]
pub fn key_value(element: &Value, key: &str) -> Value {
    match element.get(key) {
        Some(value) => value.clone(),
        None if key == "protocol" => "TCP".into(),
        None => Value::Null,
    }
}
