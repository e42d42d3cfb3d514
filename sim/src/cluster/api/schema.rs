//! The schema of a CustomResourceDefinition, followed as an API server follows it: fields that it does not know are found and pruned,
//! defaults are filled in, values are validated, and the rules in CEL are evaluated.
//!
//! The messages are Kubernetes' own (`k8s.io/apiextensions-apiserver/pkg/apiserver/{schema,validation}`).

use serde_json::Value;

use super::conditions;
use super::kinds::Kind;
use super::object::{items, name};
use super::status::{Problem, Refusal};

/// What the root of every object has, whatever its schema says.
const OF_EVERY_OBJECT: [&str; 3] = ["apiVersion", "kind", "metadata"];

/// Takes away what the schema does not know. Returns the paths of it.
#[must_use]
pub fn prune(kind: &Kind, object: &mut Value) -> Vec<String> {
    let mut unknown = Vec::new();
    if let Some(custom) = kind.custom.as_ref().filter(|custom| custom.schema.is_object()) {
        prune_below(object, &custom.schema, "", &mut unknown);
    }
    unknown
}

fn prune_below(value: &mut Value, schema: &Value, path: &str, unknown: &mut Vec<String>) {
    let preserves = schema["x-kubernetes-preserve-unknown-fields"] == true;
    match value {
        Value::Object(map) => map.retain(|key, value| {
            let at = field(path, key);
            match schema_of(schema, key) {
                _ if path.is_empty() && OF_EVERY_OBJECT.contains(&key.as_str()) => true,
                Some(below) => {
                    prune_below(value, below, &at, unknown);
                    true
                }
                None if preserves || schema["additionalProperties"] == true => true,
                None => {
                    unknown.push(at);
                    false
                }
            }
        }),
        Value::Array(list) => {
            for (position, element) in list.iter_mut().enumerate() {
                prune_below(element, &schema["items"], &format!("{path}[{position}]"), unknown);
            }
        }
        _ => {}
    }
}

/// The schema of a field of an object.
fn schema_of<'a>(schema: &'a Value, key: &str) -> Option<&'a Value> {
    let property = schema.get("properties").and_then(|properties| properties.get(key));
    property.or_else(|| schema.get("additionalProperties").filter(|values| values.is_object()))
}

fn field(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// Fills in `default`, where a field is missing (or null and may not be) in an object that is there.
pub fn fill(value: &mut Value, schema: &Value) {
    match value {
        Value::Object(object) => {
            for (key, property) in schema["properties"].as_object().into_iter().flatten() {
                let missing = match object.get(key) {
                    None => true,
                    Some(given) => given.is_null() && property["nullable"] != true,
                };
                if let Some(default) = property.get("default").filter(|_| missing) {
                    object.insert(key.clone(), default.clone());
                }
            }
            for (key, below) in object {
                if let Some(schema) = schema_of(schema, key) {
                    fill(below, schema);
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(|element| fill(element, &schema["items"])),
        _ => {}
    }
}

/// Refuses an object that its schema refuses. What was wrong before and has not changed is let pass, as since Kubernetes 1.30.
///
/// # Errors
/// 422 with a cause for each field.
pub fn check(kind: &Kind, object: &Value, old: Option<&Value>) -> Result<(), Refusal> {
    let Some(custom) = kind.custom.as_ref().filter(|custom| custom.schema.is_object()) else { return Ok(()) };
    let mut problems = problems(object, old, &custom.schema);
    if let Some(old) = old.filter(|_| !problems.is_empty()) {
        let before = self::problems(old, None, &custom.schema);
        problems.retain(|problem| !before.contains(problem));
    }
    if problems.is_empty() { Ok(()) } else { Err(Refusal::invalid_fields(kind, name(object), problems)) }
}

fn problems(object: &Value, old: Option<&Value>, schema: &Value) -> Vec<Problem> {
    let mut problems = Vec::new();
    validate(object, schema, "", &mut problems);
    // Rules rely on the types.
    if problems.is_empty() {
        rules(object, old, schema, "", &mut problems);
    }
    problems
}

/// The type of a value, as schemas name it.
fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if is_whole(number) => "integer",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

fn is_whole(number: &serde_json::Number) -> bool {
    !number.is_f64() || number.as_f64().is_some_and(|float| float.fract() == 0.0)
}

fn has_type(value: &Value, schema: &Value) -> Result<(), String> {
    let found = type_of(value);
    if schema["x-kubernetes-int-or-string"] == true {
        return if ["integer", "string"].contains(&found) { Ok(()) } else { Err("integer,string".into()) };
    }
    match schema["type"].as_str() {
        None | Some("") => Ok(()),
        Some("number") if found == "integer" => Ok(()),
        Some(wanted) if wanted == found => Ok(()),
        Some(wanted) => Err(wanted.to_owned()),
    }
}

fn validate(value: &Value, schema: &Value, path: &str, problems: &mut Vec<Problem>) {
    if value.is_null() && schema["nullable"] == true {
        return;
    }
    if let Err(wanted) = has_type(value, schema) {
        let found = type_of(value);
        let message = format!("Invalid value: {found:?}: {path} in body must be of type {wanted}: {found:?}");
        problems.push(Problem::new(path, "FieldValueTypeInvalid", message));
        return;
    }
    if let Some(allowed) = schema["enum"].as_array().filter(|allowed| !allowed.contains(value)) {
        let allowed = allowed.iter().map(Value::to_string).collect::<Vec<_>>().join(", ");
        let message = format!("Unsupported value: {value}: supported values: {allowed}");
        problems.push(Problem::new(path, "FieldValueNotSupported", message));
    }
    match value {
        Value::String(text) => validate_text(text, schema, path, problems),
        Value::Number(number) => validate_number(number, schema, path, problems),
        Value::Array(list) => validate_list(list, schema, path, problems),
        Value::Object(_) => validate_object(value, schema, path, problems),
        _ => {}
    }
    combine(value, schema, path, problems);
}

fn invalid(path: &str, value: &str, what: &str) -> Problem {
    Problem::new(path, "FieldValueInvalid", format!("Invalid value: {value}: {path} in body {what}"))
}

fn validate_text(text: &str, schema: &Value, path: &str, problems: &mut Vec<Problem>) {
    let length = text.chars().count() as u64;
    let shown = format!("{text:?}");
    if let Some(least) = schema["minLength"].as_u64().filter(|least| length < *least) {
        problems.push(invalid(path, &shown, &format!("should be at least {least} chars long")));
    }
    if let Some(most) = schema["maxLength"].as_u64().filter(|most| length > *most) {
        let message = format!("Too long: may not be more than {most} bytes");
        problems.push(Problem::new(path, "FieldValueTooLong", message));
    }
    if let Some(pattern) = schema["pattern"].as_str() {
        match regex::Regex::new(pattern) {
            Ok(pattern) if pattern.is_match(text) => {}
            Ok(_) => problems.push(invalid(path, &shown, &format!("should match '{pattern}'"))),
            Err(error) => {
                problems.push(invalid(path, &shown, &format!("has a pattern that cannot be read: {error}")));
            }
        }
    }
    if schema["format"] == "date-time" && text.parse::<jiff::Timestamp>().is_err() {
        problems.push(invalid(path, &shown, &format!("must be of type date-time: {shown}")));
    }
}

fn validate_number(number: &serde_json::Number, schema: &Value, path: &str, problems: &mut Vec<Problem>) {
    let Some(value) = number.as_f64() else { return };
    let mut bound = |key: &str, exclusive: &str, broken: fn(f64, f64) -> bool, what: &str| {
        let Some(bound) = schema[key].as_f64() else { return };
        let exclusive = schema[exclusive] == true;
        if broken(value, bound) || (exclusive && (value - bound).abs() < f64::EPSILON) {
            let or_equal = if exclusive { "" } else { " or equal to" };
            problems.push(invalid(
                path,
                &number.to_string(),
                &format!("should be {what} than{or_equal} {bound}"),
            ));
        }
    };
    bound("minimum", "exclusiveMinimum", |value, least| value < least, "greater");
    bound("maximum", "exclusiveMaximum", |value, most| value > most, "less");
}

fn validate_list(list: &[Value], schema: &Value, path: &str, problems: &mut Vec<Problem>) {
    validate_count(list.len(), "Items", "items", schema, path, problems);
    for (position, element) in list.iter().enumerate() {
        validate(element, &schema["items"], &format!("{path}[{position}]"), problems);
    }
    let key = |element: &Value| match schema["x-kubernetes-list-type"].as_str() {
        Some("set") => Some(element.clone()),
        Some("map") => {
            let keys = items(schema, "x-kubernetes-list-map-keys").filter_map(Value::as_str);
            Some(keys.map(|key| (key.to_owned(), element[key].clone())).collect())
        }
        _ => None,
    };
    let keys: Vec<Value> = list.iter().filter_map(key).collect();
    for (position, key) in keys.iter().enumerate().filter(|(position, key)| keys[..*position].contains(key)) {
        let message = format!("Duplicate value: {key}");
        problems.push(Problem::new(&format!("{path}[{position}]"), "FieldValueDuplicate", message));
    }
}

/// `minItems` and `maxItems`, `minProperties` and `maxProperties`.
fn validate_count(
    count: usize,
    suffix: &str,
    things: &str,
    schema: &Value,
    path: &str,
    problems: &mut Vec<Problem>,
) {
    let count = count as u64;
    let bound = |which: &str| schema[format!("{which}{suffix}")].as_u64();
    if let Some(least) = bound("min").filter(|least| count < *least) {
        problems.push(invalid(path, &count.to_string(), &format!("should have at least {least} {things}")));
    }
    if let Some(most) = bound("max").filter(|most| count > *most) {
        let message = format!("Too many: {count}: must have at most {most} {things}");
        problems.push(Problem::new(path, "FieldValueTooMany", message));
    }
}

fn validate_object(object: &Value, schema: &Value, path: &str, problems: &mut Vec<Problem>) {
    for required in items(schema, "required").filter_map(Value::as_str) {
        if object.get(required).is_none() {
            let message = "Required value".to_owned();
            problems.push(Problem::new(&field(path, required), "FieldValueRequired", message));
        }
    }
    let count = object.as_object().map_or(0, serde_json::Map::len);
    validate_count(count, "Properties", "properties", schema, path, problems);
    for (key, value) in object.as_object().into_iter().flatten() {
        if let Some(schema) = schema_of(schema, key) {
            validate(value, schema, &field(path, key), problems);
        }
    }
}

/// `allOf`, `anyOf`, `oneOf`, `not`.
fn combine(value: &Value, schema: &Value, path: &str, problems: &mut Vec<Problem>) {
    for part in items(schema, "allOf") {
        validate(value, part, path, problems);
    }
    let fits = |schema: &Value| {
        let mut found = Vec::new();
        validate(value, schema, path, &mut found);
        found.is_empty()
    };
    let fitting = |key: &str| schema[key].as_array().map(|all| all.iter().filter(|one| fits(one)).count());
    let shown = format!("{:?}", type_of(value));
    if fitting("anyOf") == Some(0) {
        problems.push(invalid(path, &shown, "must validate at least one schema (anyOf)"));
    }
    if fitting("oneOf").is_some_and(|count| count != 1) {
        problems.push(invalid(path, &shown, "must validate one and only one schema (oneOf)"));
    }
    if schema.get("not").is_some_and(fits) {
        problems.push(invalid(path, &shown, "must not validate the schema (not)"));
    }
}

/// `x-kubernetes-validations`, here and below.
fn rules(value: &Value, old: Option<&Value>, schema: &Value, path: &str, problems: &mut Vec<Problem>) {
    if value.is_null() {
        return;
    }
    for rule in items(schema, "x-kubernetes-validations") {
        let expression = rule["rule"].as_str().unwrap_or_default();
        let why = match conditions::rule_holds(expression, value, old) {
            Ok(true) => continue,
            Ok(false) => {
                rule["message"].as_str().map_or_else(|| format!("failed rule: {expression}"), str::to_owned)
            }
            Err(error) => format!("rule {expression:?} cannot be evaluated: {error}"),
        };
        let message = format!("Invalid value: {:?}: {why}", type_of(value));
        problems.push(Problem::new(path, "FieldValueInvalid", message));
    }
    match value {
        Value::Object(map) => {
            for (key, below) in map {
                if let Some(schema) = schema_of(schema, key) {
                    rules(below, old.and_then(|old| old.get(key)), schema, &field(path, key), problems);
                }
            }
        }
        Value::Array(list) => {
            for (position, element) in list.iter().enumerate() {
                let old = old.and_then(|old| counterpart(element, old, schema));
                rules(element, old, &schema["items"], &format!("{path}[{position}]"), problems);
            }
        }
        _ => {}
    }
}

/// The element of the old list with the same keys; none where the list has no keys.
fn counterpart<'a>(element: &Value, old: &'a Value, schema: &Value) -> Option<&'a Value> {
    if schema["x-kubernetes-list-type"] != "map" {
        return None;
    }
    let same = |other: &&Value| {
        let mut keys = items(schema, "x-kubernetes-list-map-keys").filter_map(Value::as_str);
        keys.all(|key| other[key] == element[key])
    };
    old.as_array()?.iter().find(same)
}

/// The expressions of all rules of a schema that cannot be read, with what is wrong with them.
#[must_use]
pub fn unreadable_rules(schema: &Value) -> Vec<String> {
    let below: Vec<&Value> = match schema {
        Value::Object(map) => map.values().collect(),
        Value::Array(list) => list.iter().collect(),
        _ => Vec::new(),
    };
    let own = items(schema, "x-kubernetes-validations").filter_map(|rule| {
        let expression = rule["rule"].as_str()?;
        conditions::parses(expression).err().map(|error| format!("{expression:?}: {error}"))
    });
    own.chain(below.into_iter().flat_map(unreadable_rules)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::api::kinds::Kinds;
    use serde_json::json;
    use std::sync::Arc;

    /// The kind of one of our own definitions, by its plural.
    fn ours(plural: &str) -> Arc<Kind> {
        let kinds = Kinds::default();
        for definition in gpu_migrate_model::crd::definitions() {
            kinds.define(&serde_json::to_value(definition).unwrap());
        }
        kinds.find("gpu-migrate.io", "v1alpha1", plural).unwrap()
    }

    fn of(schema: Value) -> Kind {
        let custom = crate::cluster::api::kinds::Custom { schema, columns: Value::Null };
        Kind { custom: Some(Arc::new(custom)), ..Kind::clone(&ours("gpumigrations")) }
    }

    fn policy(spec: Value) -> Value {
        json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUMigration", "metadata": {"name": "team"}, "spec": spec})
    }

    /// What is said of a policy, defaults filled in.
    fn refused(spec: Value) -> Vec<String> {
        let kind = ours("gpumigrations");
        let mut object = policy(spec);
        fill(&mut object, &kind.custom.as_ref().unwrap().schema);
        match check(&kind, &object, None) {
            Ok(()) => Vec::new(),
            Err(refusal) => {
                let causes = items(&refusal.details, "causes");
                causes
                    .map(|c| format!("{}: {}", c["field"].as_str().unwrap(), c["message"].as_str().unwrap()))
                    .collect()
            }
        }
    }

    #[test]
    fn our_policies_are_validated_as_a_real_api_server_does() {
        for (spec, says) in [
            (json!({"project": "team"}), vec![]),
            (json!({"project": "team", "match": null}), vec![]),
            (json!({}), vec!["spec.project: Required value"]),
            (
                json!({"project": 1}),
                vec![
                    "spec.project: Invalid value: \"integer\": spec.project in body must be of type string: \"integer\"",
                ],
            ),
            (
                json!({"project": ""}),
                vec![
                    "spec.project: Invalid value: \"\": spec.project in body should be at least 1 chars long",
                ],
            ),
            (
                json!({"project": "x".repeat(64)}),
                vec!["spec.project: Too long: may not be more than 63 bytes"],
            ),
            (
                json!({"project": "team", "mode": "On"}),
                vec![
                    "spec.mode: Unsupported value: \"On\": supported values: \"Off\", \"Audit\", \"Enforce\"",
                ],
            ),
            (
                json!({"project": "team", "convert": {"coresPerCard": 200}}),
                vec![
                    "spec.convert: Invalid value: \"object\": coresPerCard must be from 1 to 100: 100 is a whole card",
                ],
            ),
            (
                json!({"project": "team", "rollout": {"maxUnavailable": 0, "gate": {"maxRestarts": "many"}}}),
                vec![
                    "spec.rollout.gate.maxRestarts: Invalid value: \"string\": spec.rollout.gate.maxRestarts in body must be of type integer: \"string\"",
                    "spec.rollout.maxUnavailable: Invalid value: 0: spec.rollout.maxUnavailable in body should be greater than or equal to 1",
                ],
            ),
            (
                json!({"project": "team", "rollout": {"waves": [{"percent": 10}, {}, {"percent": 120}]}}),
                vec![
                    "spec.rollout.waves[1]: Invalid value: \"object\": a wave has either percent or workloads",
                    "spec.rollout.waves[2]: Invalid value: \"object\": percent must be from 0 to 100",
                ],
            ),
        ] {
            assert_eq!(refused(spec.clone()), says, "{spec}");
        }
    }

    #[test]
    fn the_one_configuration_has_its_name() {
        let kind = ours("gpuconfigs");
        let named = |name: &str| {
            let object = json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUConfig", "metadata": {"name": name}, "spec": {}});
            check(&kind, &object, None).map_err(|refusal| refusal.message)
        };
        assert_eq!(named("cluster"), Ok(()));
        let expected = "GPUConfig.gpu-migrate.io \"mine\" is invalid: <nil>: Invalid value: \"object\": the one GPUConfig is named cluster";
        assert_eq!(named("mine").unwrap_err(), expected);
    }

    #[test]
    fn unknown_fields_are_named_and_pruned() {
        let kind = ours("gpumigrations");
        let mut object = policy(json!({
            "project": "team", "projekt": "team",
            "rollout": {"waves": [{"percent": 10, "soak": 1}]}, "match": {"podSelector": {"matchLabels": {"any": "label"}}},
        }));
        object["extra"] = 1.into();
        object["metadata"]["labels"] = json!({"a": "1"});
        let unknown = prune(&kind, &mut object);
        assert_eq!(unknown, ["extra", "spec.projekt", "spec.rollout.waves[0].soak"]);
        let expected = json!({
            "project": "team", "rollout": {"waves": [{"percent": 10}]}, "match": {"podSelector": {"matchLabels": {"any": "label"}}},
        });
        assert_eq!(object["spec"], expected);
        assert_eq!(object["metadata"]["labels"], json!({"a": "1"}));

        let keeps = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
        assert!(prune(&of(keeps), &mut policy(json!({"any": 1}))).is_empty());
    }

    #[test]
    fn other_definitions_too() {
        let schema = json!({"type": "object", "properties": {
            "port": {"x-kubernetes-int-or-string": true},
            "code": {"type": "string", "pattern": "^[a-z]+$"},
            "at": {"type": "string", "format": "date-time"},
            "share": {"type": "number", "maximum": 1, "exclusiveMaximum": true},
            "list": {"type": "array", "maxItems": 2, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k"],
                "items": {"type": "object", "properties": {"k": {"type": "string"}}}},
            "either": {"anyOf": [{"type": "string"}, {"type": "boolean"}]},
            "fixed": {"type": "integer", "x-kubernetes-validations": [{"rule": "self == oldSelf", "message": "is fixed"}]},
        }});
        let kind = of(schema);
        let says = |field: &str, value: Value, old: Option<Value>| {
            let object = json!({"metadata": {"name": "x"}, field: value});
            let old = old.map(|old| json!({"metadata": {"name": "x"}, field: old}));
            check(&kind, &object, old.as_ref())
                .map_err(|refusal| refusal.details["causes"][0]["message"].as_str().unwrap().to_owned())
        };
        for (field, good) in [
            ("port", json!(80)),
            ("port", json!("http")),
            ("code", json!("abc")),
            ("at", json!("2026-01-01T00:00:00Z")),
            ("share", json!(0.5)),
            ("share", json!(0)),
            ("list", json!([{"k": "a"}, {"k": "b"}])),
            ("either", json!(true)),
            ("fixed", json!(1)),
        ] {
            assert_eq!(says(field, good.clone(), None), Ok(()), "{field}: {good}");
        }
        for (field, bad, part) in [
            ("port", json!(1.5), "must be of type integer,string"),
            ("code", json!("A1"), "should match '^[a-z]+$'"),
            ("at", json!("yesterday"), "must be of type date-time"),
            ("share", json!(1), "should be less than 1"),
            ("list", json!([{"k": "a"}, {"k": "a"}]), "Duplicate value: {\"k\":\"a\"}"),
            ("list", json!([{"k": "a"}, {"k": "b"}, {"k": "c"}]), "Too many: 3: must have at most 2 items"),
            ("either", json!(1), "(anyOf)"),
            ("fixed", json!(null), "must be of type integer"),
        ] {
            let said = says(field, bad.clone(), None).unwrap_err();
            assert!(said.contains(part), "{field}: {bad}: {said}");
        }
        assert_eq!(
            says("fixed", json!(2), Some(json!(1))),
            Err("Invalid value: \"integer\": is fixed".into())
        );
        assert_eq!(says("code", json!("A1"), Some(json!("A1"))), Ok(()), "it was so before");
    }
}
