//! Whether a node may take a pod, before cards are looked at: kube-scheduler's NodeAffinity and TaintToleration.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{NodeSelectorRequirement, NodeSelectorTerm, PodSpec, Taint, Toleration};

use super::read::SnapshotNode;

/// Why a node may not take a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mismatch {
    /// Node selector or required node affinity.
    Selector,
    /// A taint that the pod does not tolerate.
    Taint,
}

/// Whether the node may take the pod.
///
/// # Errors
/// What stands against it.
pub fn node_accepts(node: &SnapshotNode, pod: &PodSpec) -> Result<(), Mismatch> {
    if !selected(node, pod) {
        return Err(Mismatch::Selector);
    }
    let tolerations = pod.tolerations.as_deref().unwrap_or_default();
    let repels = |taint: &&Taint| matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute");
    let bad =
        node.taints.iter().filter(repels).find(|taint| !tolerations.iter().any(|one| tolerates(one, taint)));
    bad.map_or(Ok(()), |_| Err(Mismatch::Taint))
}

fn selected(node: &SnapshotNode, pod: &PodSpec) -> bool {
    let selector = pod.node_selector.iter().flatten();
    let by_selector = selector.into_iter().all(|(key, value)| node.labels.get(key) == Some(value));
    let required = pod.affinity.as_ref().and_then(|affinity| {
        affinity.node_affinity.as_ref()?.required_during_scheduling_ignored_during_execution.as_ref()
    });
    by_selector
        && required.is_none_or(|required| required.node_selector_terms.iter().any(|term| meets(node, term)))
}

/// An empty term selects nothing.
fn meets(node: &SnapshotNode, term: &NodeSelectorTerm) -> bool {
    let labels = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    let of_fields = BTreeMap::from([("metadata.name".to_owned(), node.name.clone())]);
    !(labels.is_empty() && fields.is_empty())
        && labels.iter().all(|one| holds(&node.labels, one))
        && fields.iter().all(|one| holds(&of_fields, one))
}

fn holds(labels: &BTreeMap<String, String>, one: &NodeSelectorRequirement) -> bool {
    let value = labels.get(&one.key);
    let values = one.values.as_deref().unwrap_or_default();
    let listed = || value.is_some_and(|value| values.contains(value));
    let number = |text: Option<&String>| text.and_then(|text| text.parse::<i64>().ok());
    let compared = |by: fn(&i64, &i64) -> bool| {
        number(value).zip(number(values.first())).is_some_and(|(value, bound)| by(&value, &bound))
    };
    match one.operator.as_str() {
        "In" => listed(),
        "NotIn" => !listed(),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compared(i64::gt),
        "Lt" => compared(i64::lt),
        _ => false,
    }
}

fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let effect = toleration.effect.as_deref().unwrap_or_default();
    let key = toleration.key.as_deref().unwrap_or_default();
    let exists = toleration.operator.as_deref() == Some("Exists");
    let value = toleration.value.as_deref().unwrap_or_default() == taint.value.as_deref().unwrap_or_default();
    (effect.is_empty() || effect == taint.effect)
        && (key == taint.key || (key.is_empty() && exists))
        && (exists || value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpu_migrate_model::score::HostResources;
    use serde_json::{Value, json};

    fn node() -> SnapshotNode {
        let taint = json!([{"key": "pool", "value": "a", "effect": "NoSchedule"}, {"key": "soft", "effect": "PreferNoSchedule"}]);
        SnapshotNode {
            name: "n1".into(),
            labels: [("zone".to_owned(), "b".to_owned()), ("gen".to_owned(), "7".to_owned())].into(),
            taints: serde_json::from_value(taint).unwrap(),
            cards: 1,
            product: String::new(),
            card_memory_mib: None,
            host: HostResources::UNLIMITED,
        }
    }

    fn admitted(mut spec: Value, tolerated: bool) -> Result<(), Mismatch> {
        spec["containers"] = json!([]);
        if tolerated {
            spec["tolerations"] = json!([{"key": "pool", "operator": "Equal", "value": "a"}]);
        }
        node_accepts(&node(), &serde_json::from_value(spec).unwrap())
    }

    fn affinity(key: &str, operator: &str, values: &[&str]) -> Value {
        let term = json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
        json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}})
    }

    #[test]
    fn selectors_and_affinity_are_looked_at() {
        let table = [
            (json!({}), Ok(())),
            (json!({"nodeSelector": {"zone": "b"}}), Ok(())),
            (json!({"nodeSelector": {"zone": "a"}}), Err(Mismatch::Selector)),
            (affinity("zone", "In", &["a", "b"]), Ok(())),
            (affinity("zone", "NotIn", &["b"]), Err(Mismatch::Selector)),
            (affinity("absent", "NotIn", &["b"]), Ok(())),
            (affinity("zone", "Exists", &[]), Ok(())),
            (affinity("zone", "DoesNotExist", &[]), Err(Mismatch::Selector)),
            (affinity("gen", "Gt", &["6"]), Ok(())),
            (affinity("gen", "Lt", &["7"]), Err(Mismatch::Selector)),
        ];
        for (spec, expected) in table {
            assert_eq!(admitted(spec.clone(), true), expected, "{spec}");
        }
    }

    #[test]
    fn taints_that_are_hard_must_be_tolerated() {
        assert_eq!(admitted(json!({}), false), Err(Mismatch::Taint));
        assert_eq!(admitted(json!({}), true), Ok(()));
        let all = json!({"tolerations": [{"operator": "Exists"}]});
        assert_eq!(admitted(all, false), Ok(()));
        let other = json!({"tolerations": [{"key": "pool", "operator": "Equal", "value": "b"}]});
        assert_eq!(admitted(other, false), Err(Mismatch::Taint));
    }
}
