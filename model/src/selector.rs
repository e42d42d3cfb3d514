//! Kubernetes' label selectors.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

/// Whether labels match a selector; `label` gives the value of a key. An unknown operator matches nothing.
#[must_use]
pub fn matches<'l>(selector: &LabelSelector, label: impl Fn(&str) -> Option<&'l str>) -> bool {
    let labels = selector.match_labels.iter().flatten();
    let expressions = selector.match_expressions.iter().flatten();
    labels.into_iter().all(|(key, value)| label(key) == Some(value))
        && expressions.into_iter().all(|expression| {
            let value = label(&expression.key);
            let listed = || value.is_some_and(|v| expression.values.iter().flatten().any(|entry| entry == v));
            match expression.operator.as_str() {
                "In" => listed(),
                "NotIn" => !listed(),
                "Exists" => value.is_some(),
                "DoesNotExist" => value.is_none(),
                _ => false,
            }
        })
}

/// Whether a selector has no requirement.
#[must_use]
pub fn is_empty(selector: &LabelSelector) -> bool {
    selector.match_labels.iter().flatten().next().is_none()
        && selector.match_expressions.iter().flatten().next().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn labels_match_as_in_kubernetes() {
        let expression = |operator: &str, values: Value| json!({"matchExpressions": [{"key": "tier", "operator": operator, "values": values}]});
        // With the labels app=web and tier=gpu; with none.
        for (selector, with, without) in [
            (json!({}), true, true),
            (json!({"matchLabels": {"app": "web"}}), true, false),
            (json!({"matchLabels": {"app": "web", "tier": "cpu"}}), false, false),
            (expression("In", json!(["cpu", "gpu"])), true, false),
            (expression("In", json!(["cpu"])), false, false),
            (expression("NotIn", json!(["gpu"])), false, true),
            (expression("NotIn", json!(["cpu"])), true, true),
            (expression("Exists", json!(null)), true, false),
            (expression("DoesNotExist", json!(null)), false, true),
            (expression("Gt", json!(["1"])), false, false),
        ] {
            let parsed: LabelSelector = serde_json::from_value(selector.clone()).unwrap();
            let labels = |key: &str| match key {
                "app" => Some("web"),
                "tier" => Some("gpu"),
                _ => None,
            };
            assert_eq!((matches(&parsed, labels), matches(&parsed, |_| None)), (with, without), "{selector}");
            assert_eq!(is_empty(&parsed), selector == json!({}), "{selector}");
        }
        let empty = json!({"matchLabels": {}, "matchExpressions": []});
        assert!(is_empty(&serde_json::from_value(empty).unwrap()));
    }
}
