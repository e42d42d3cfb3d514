//! The subresource `scale`: how many pods a workload shall have, in a form that is the same for all kinds (`autoscaling/v1`).

use serde_json::{Value, json};

use super::object::{items, map, meta, metadata};
use super::status::Refusal;

/// A workload as its Scale.
#[must_use]
pub fn of(workload: &Value) -> Value {
    let mut scale = json!({
        "apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": {},
        "spec": {"replicas": workload["spec"]["replicas"].as_u64().unwrap_or(1)},
        "status": {
            "replicas": workload["status"]["replicas"].as_u64().unwrap_or(0),
            "selector": as_text(&workload["spec"]["selector"]),
        },
    });
    for key in ["name", "namespace", "uid", "resourceVersion", "creationTimestamp"] {
        if let Some(value) = workload["metadata"].get(key) {
            metadata(&mut scale).insert(key.into(), value.clone());
        }
    }
    scale
}

/// The workload with as many pods as a changed Scale of it says.
///
/// # Errors
/// 422 for a number that is none.
pub fn put(workload: &Value, scale: &Value) -> Result<Value, Refusal> {
    // Left out is zero, as in Go.
    let wanted = scale["spec"].get("replicas").cloned().unwrap_or_else(|| 0.into());
    if wanted.as_u64().is_none_or(|replicas| i32::try_from(replicas).is_err()) {
        let problem = format!("Invalid value: {wanted}: must be greater than or equal to 0");
        return Err(Refusal::invalid("Scale", meta(workload, "name"), "spec.replicas", &problem));
    }
    let mut after = workload.clone();
    map(map(&mut after).entry("spec").or_insert(Value::Null)).insert("replicas".into(), wanted);
    if let Some(version) = scale["metadata"].get("resourceVersion") {
        metadata(&mut after).insert("resourceVersion".into(), version.clone());
    }
    Ok(after)
}

/// A selector as queries write it: `app=web,tier in (a,b),!old`.
fn as_text(selector: &Value) -> String {
    let equal = selector["matchLabels"].as_object().into_iter().flatten();
    let equal = equal.map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or_default()));
    let expressions = items(selector, "matchExpressions").map(|expression| {
        let key = expression["key"].as_str().unwrap_or_default();
        let values = items(expression, "values").filter_map(Value::as_str).collect::<Vec<_>>().join(",");
        match expression["operator"].as_str() {
            Some("In") => format!("{key} in ({values})"),
            Some("NotIn") => format!("{key} notin ({values})"),
            Some("DoesNotExist") => format!("!{key}"),
            _ => key.to_owned(),
        }
    });
    equal.chain(expressions).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload() -> Value {
        json!({
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web", "namespace": "a", "resourceVersion": "7"},
            "spec": {"replicas": 3, "selector": {"matchLabels": {"app": "web"}, "matchExpressions": [
                {"key": "tier", "operator": "In", "values": ["a", "b"]}, {"key": "old", "operator": "DoesNotExist"},
            ]}},
            "status": {"replicas": 2},
        })
    }

    #[test]
    fn a_scale_shows_wanted_and_existing_pods_and_whose_they_are() {
        let scale = of(&workload());
        assert_eq!((&scale["kind"], &scale["spec"]["replicas"]), (&json!("Scale"), &json!(3)));
        assert_eq!(scale["status"], json!({"replicas": 2, "selector": "app=web,tier in (a,b),!old"}));
        assert_eq!(scale["metadata"], json!({"name": "web", "namespace": "a", "resourceVersion": "7"}));
        assert_eq!(
            of(&json!({"metadata": {"name": "w"}}))["spec"]["replicas"],
            1,
            "one where none is written"
        );
    }

    #[test]
    fn only_the_number_goes_back() {
        let changed = |replicas: Value| {
            let mut scale = of(&workload());
            scale["spec"]["replicas"] = replicas;
            scale["status"]["replicas"] = 9.into();
            put(&workload(), &scale)
        };
        let after = changed(json!(5)).unwrap();
        assert_eq!(after["spec"]["replicas"], 5);
        assert_eq!(after["status"], workload()["status"]);
        assert_eq!(after["spec"]["selector"], workload()["spec"]["selector"]);
        for wrong in [json!(-1), json!("2"), json!(1.5), json!(u64::MAX), Value::Null] {
            assert_eq!(changed(wrong.clone()).unwrap_err().code.as_u16(), 422, "{wrong}");
        }
    }
}
