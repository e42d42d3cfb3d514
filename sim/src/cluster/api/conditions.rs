//! CEL over objects, evaluated by the `cel` crate: `matchConditions` of webhooks and `x-kubernetes-validations` of schemas. Comprehensions, `has`, `in` and list arithmetic work;
//! Kubernetes' own CEL libraries (quantity, authorizer, …) are not there, and an expression that needs them is an error.

use std::sync::Arc;

use cel::objects::{Key, Map};
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
    run(&program, &[("object", object), ("oldObject", &Value::Null), ("request", request)])
}

/// Whether a rule of a schema holds for a value. One about the value before holds where there was none.
///
/// # Errors
/// Why that cannot be said.
pub fn rule_holds(expression: &str, value: &Value, old: Option<&Value>) -> Result<bool, String> {
    let program = Program::compile(expression).map_err(|error| error.to_string())?;
    match old {
        None if program.references().has_variable("oldSelf") => Ok(true),
        None => run(&program, &[("self", value)]),
        Some(old) => run(&program, &[("self", value), ("oldSelf", old)]),
    }
}

fn run(program: &Program, variables: &[(&str, &Value)]) -> Result<bool, String> {
    let mut context = Context::default();
    for (name, value) in variables {
        context.add_variable_from_value(*name, cel_value(value));
    }
    match program.execute(&context) {
        Ok(Cel::Bool(value)) => Ok(value),
        Ok(other) => Err(format!("expected true or false, got {other:?}")),
        Err(error) => Err(error.to_string()),
    }
}

/// Whole numbers of JSON are signed in Kubernetes, which is why this is not left to serde.
fn cel_value(value: &Value) -> Cel {
    match value {
        Value::Null => Cel::Null,
        Value::Bool(value) => Cel::Bool(*value),
        Value::Number(number) => number
            .as_i64()
            .map(Cel::Int)
            .or_else(|| number.as_u64().map(Cel::UInt))
            .unwrap_or_else(|| Cel::Float(number.as_f64().unwrap_or_default())),
        Value::String(text) => Cel::String(Arc::new(text.clone())),
        Value::Array(list) => Cel::List(Arc::new(list.iter().map(cel_value).collect())),
        Value::Object(map) => {
            let pairs = map.iter().map(|(key, value)| (Key::String(Arc::new(key.clone())), cel_value(value)));
            Cel::Map(Map { map: Arc::new(pairs.collect()) })
        }
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
