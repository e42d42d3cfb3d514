//! The filters that come before the extender's: readiness, node selector and affinity, taints, room.

use std::collections::BTreeMap;

use gpu_migrate_model::quantity::Quantity;
use serde_json::{Value, json};

use crate::cluster::api::matches_labels;
use crate::cluster::api::object::{items, labels, name};

/// Thousandths of what is asked for, by resource.
pub type Amounts = BTreeMap<String, i128>;

/// Why a node does not take a pod; `None` if it does. `used` is what the pods on it ask for.
#[must_use]
pub fn refusal(pod: &Value, node: &Value, used: &Amounts) -> Option<String> {
    if node["spec"]["unschedulable"] == true {
        return Some("node(s) were unschedulable".into());
    }
    let ready = items(&node["status"], "conditions").any(|c| c["type"] == "Ready" && c["status"] == "True");
    if !ready {
        return Some("node(s) were not ready".into());
    }
    if let Some(wanted) = pod["spec"]["nodeSelector"].as_object()
        && wanted.iter().any(|(key, value)| labels(node).get(key) != Some(value))
    {
        return Some("node(s) didn't match Pod's node affinity/selector".into());
    }
    if !affinity(&pod["spec"]["affinity"]["nodeAffinity"], node) {
        return Some("node(s) didn't match Pod's node affinity/selector".into());
    }
    if let Some(taint) = items(&node["spec"], "taints").find(|taint| !tolerated(pod, taint)) {
        return Some(format!(
            "node(s) had untolerated taint {{{}}}",
            taint["key"].as_str().unwrap_or_default()
        ));
    }
    let room = |resource: &str| {
        amount(&node["status"]["allocatable"][resource]) - used.get(resource).copied().unwrap_or(0)
    };
    let short = requests(pod).into_iter().find(|(resource, wanted)| *wanted > 0 && room(resource) < *wanted);
    short.map(|(resource, _)| format!("Insufficient {resource}"))
}

fn affinity(affinity: &Value, node: &Value) -> bool {
    let required = &affinity["requiredDuringSchedulingIgnoredDuringExecution"];
    if required.is_null() {
        return true;
    }
    let field = |term: &Value| {
        items(term, "matchFields").all(|f| {
            f["key"] == "metadata.name"
                && f["operator"] == "In"
                && items(f, "values").any(|v| v == name(node))
        })
    };
    items(required, "nodeSelectorTerms").any(|term| {
        let expressions = json!({"matchExpressions": term["matchExpressions"]});
        field(term) && matches_labels(&expressions, labels(node))
    })
}

fn tolerated(pod: &Value, taint: &Value) -> bool {
    if taint["effect"] == "PreferNoSchedule" {
        return true;
    }
    items(&pod["spec"], "tolerations").any(|toleration| {
        let effect = toleration["effect"].is_null()
            || toleration["effect"] == ""
            || toleration["effect"] == taint["effect"];
        let exists = toleration["operator"] == "Exists";
        let key = toleration["key"] == taint["key"]
            || (exists && toleration["key"].as_str().is_none_or(str::is_empty));
        let value = exists
            || toleration["value"].as_str().unwrap_or_default()
                == taint["value"].as_str().unwrap_or_default();
        effect && key && value
    })
}

/// What a pod asks for: the sum of its containers and sidecars, or the largest of its init containers.
#[must_use]
pub fn requests(pod: &Value) -> Amounts {
    let mut total = Amounts::from([("pods".to_owned(), 1000)]);
    let mut largest = Amounts::new();
    for container in items(&pod["spec"], "containers") {
        add(&mut total, container);
    }
    for container in items(&pod["spec"], "initContainers") {
        if container["restartPolicy"] == "Always" {
            add(&mut total, container);
        } else {
            for (resource, wanted) in of_container(container) {
                let slot = largest.entry(resource).or_default();
                *slot = wanted.max(*slot);
            }
        }
    }
    for (resource, wanted) in largest {
        let slot = total.entry(resource).or_default();
        *slot = wanted.max(*slot);
    }
    total
}

fn add(total: &mut Amounts, container: &Value) {
    for (resource, wanted) in of_container(container) {
        *total.entry(resource).or_default() += wanted;
    }
}

fn of_container(container: &Value) -> impl Iterator<Item = (String, i128)> {
    let requests = container["resources"]["requests"].as_object().into_iter().flatten();
    requests.map(|(resource, quantity)| (resource.clone(), amount(quantity)))
}

fn amount(quantity: &Value) -> i128 {
    let text = match quantity {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        _ => return 0,
    };
    text.parse::<Quantity>().map_or(0, Quantity::milli)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> Value {
        json!({
            "metadata": {"name": "n", "labels": {"pool": "a"}},
            "spec": {"taints": [{"key": "gpu", "value": "x", "effect": "NoSchedule"}]},
            "status": {"allocatable": {"cpu": "2", "pods": "2", "nvidia.com/gpu": "1"}, "conditions": [{"type": "Ready", "status": "True"}]},
        })
    }

    fn pod(spec: Value) -> Value {
        let mut pod =
            json!({"spec": {"tolerations": [{"key": "gpu", "operator": "Exists"}], "containers": []}});
        for (key, value) in spec.as_object().unwrap() {
            pod["spec"][key] = value.clone();
        }
        pod
    }

    #[test]
    fn nodes_refuse_for_the_reasons_that_the_scheduler_gives() {
        let gpu =
            |n: u32| json!({"resources": {"requests": {"nvidia.com/gpu": n.to_string(), "cpu": "500m"}}});
        for (spec, used, expected) in [
            (json!({}), Amounts::new(), None),
            (json!({"tolerations": []}), Amounts::new(), Some("untolerated taint {gpu}")),
            (json!({"nodeSelector": {"pool": "b"}}), Amounts::new(), Some("affinity/selector")),
            (json!({"containers": [gpu(1)]}), Amounts::new(), None),
            (
                json!({"containers": [gpu(1)]}),
                Amounts::from([("nvidia.com/gpu".into(), 1000)]),
                Some("Insufficient nvidia.com/gpu"),
            ),
            (
                json!({"containers": [gpu(0)], "initContainers": [gpu(2)]}),
                Amounts::new(),
                Some("Insufficient nvidia.com/gpu"),
            ),
            (json!({}), Amounts::from([("pods".into(), 2000)]), Some("Insufficient pods")),
        ] {
            let found = refusal(&pod(spec.clone()), &node(), &used);
            match (found, expected) {
                (None, None) => {}
                (Some(found), Some(expected)) => assert!(found.contains(expected), "{found}"),
                other => panic!("{spec}: {other:?}"),
            }
        }
        let mut away = node();
        away["spec"]["unschedulable"] = true.into();
        assert!(refusal(&pod(json!({})), &away, &Amounts::new()).is_some());
    }
}
