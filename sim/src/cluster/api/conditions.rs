//! `matchConditions`: CEL over the object, evaluated by the `cel` crate. Comprehensions, `has`, `in` and list arithmetic work;
//! Kubernetes' own CEL libraries (quantity, authorizer, …) are not there, and an expression that needs them is an error.

use cel::{Context, Program, Value as Cel};
use serde_json::Value;

use super::object::items;

/// Whether all conditions of a webhook hold, or why that cannot be said.
///
/// As in a real API server, one condition that is false decides, whatever the others would say.
///
/// # Errors
/// The condition and what is wrong with it.
pub fn hold(webhook: &Value, object: &Value, request: &Value) -> Result<bool, String> {
    let mut failure = None;
    for condition in items(webhook, "matchConditions") {
        match evaluate(condition["expression"].as_str().unwrap_or_default(), object, request) {
            Ok(true) => {}
            Ok(false) => return Ok(false),
            Err(problem) => failure = Some(format!("matchCondition {}: {problem}", condition["name"])),
        }
    }
    failure.map_or(Ok(true), Err)
}

fn evaluate(expression: &str, object: &Value, request: &Value) -> Result<bool, String> {
    let program = Program::compile(expression).map_err(|error| error.to_string())?;
    let mut context = Context::default();
    for (name, value) in [("object", object), ("oldObject", &Value::Null), ("request", request)] {
        context.add_variable(name, value).map_err(|error| error.to_string())?;
    }
    match program.execute(&context) {
        Ok(Cel::Bool(value)) => Ok(value),
        Ok(other) => Err(format!("expected true or false, got {other:?}")),
        Err(error) => Err(error.to_string()),
    }
}

/// Whether an expression can be read at all.
///
/// # Errors
/// What the parser says.
pub fn parses(expression: &str) -> Result<(), String> {
    Program::compile(expression).map(|_| ()).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const ASKS: &str = "(object.spec.containers + (has(object.spec.initContainers) ? object.spec.initContainers : [])).exists(c, \
        has(c.resources) && ((has(c.resources.limits) && ('nvidia.com/gpu' in c.resources.limits)) || \
        (has(c.resources.requests) && ('nvidia.com/gpu' in c.resources.requests))))";
    const NOT_MIRROR: &str = "!has(object.metadata.annotations) || !('kubernetes.io/config.mirror' in object.metadata.annotations)";

    #[test]
    fn conditions_of_the_webhooks_form() {
        let gpu = json!({"limits": {"nvidia.com/gpu": "1"}});
        for (pod, expected) in [
            (json!({"metadata": {}, "spec": {"containers": [{"name": "c", "resources": gpu}]}}), true),
            (
                json!({"metadata": {}, "spec": {"containers": [{"name": "c"}], "initContainers": [{"resources": gpu}]}}),
                true,
            ),
            (
                json!({"metadata": {}, "spec": {"containers": [{"name": "c", "resources": {"limits": {"cpu": "1"}}}]}}),
                false,
            ),
            (
                json!({"metadata": {"annotations": {"kubernetes.io/config.mirror": "x"}},
                    "spec": {"containers": [{"name": "c", "resources": gpu}]}}),
                false,
            ),
        ] {
            let webhook = json!({"matchConditions": [
                {"name": "asks", "expression": ASKS}, {"name": "mirror", "expression": NOT_MIRROR},
            ]});
            assert_eq!(hold(&webhook, &pod, &Value::Null), Ok(expected), "{pod}");
        }
        let broken = json!({"matchConditions": [{"name": "x", "expression": "object.spec.nothing.at.all"}]});
        assert!(hold(&broken, &json!({"spec": {}}), &Value::Null).is_err());
    }
}
