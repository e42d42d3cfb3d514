//! Label and field selectors, in the text forms of the API and the object form of manifests.

use serde_json::Value;

use super::object::items;
use super::status::Refusal;

/// Which objects of a list or watch are wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    labels: Vec<Requirement>,
    fields: Vec<(String, bool, String)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Requirement {
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
    Exists(String),
    Absent(String),
}

impl Requirement {
    fn holds(&self, labels: &Value) -> bool {
        let value = |key: &String| labels.get(key).and_then(Value::as_str);
        match self {
            Self::In(key, values) => value(key).is_some_and(|value| values.iter().any(|v| v == value)),
            Self::NotIn(key, values) => value(key).is_none_or(|value| !values.iter().any(|v| v == value)),
            Self::Exists(key) => value(key).is_some(),
            Self::Absent(key) => value(key).is_none(),
        }
    }
}

impl Selector {
    /// Reads the query parameters `labelSelector` and `fieldSelector`.
    ///
    /// # Errors
    /// 400 for what cannot be read.
    pub fn parse(labels: &str, fields: &str) -> Result<Self, Refusal> {
        let labels = split_outside_parentheses(labels).map(requirement).collect::<Result<_, _>>()?;
        let fields =
            fields.split(',').filter(|text| !text.trim().is_empty()).map(field).collect::<Result<_, _>>()?;
        Ok(Self { labels, fields })
    }

    #[must_use]
    pub fn matches(&self, object: &Value) -> bool {
        let labels = super::object::labels(object);
        self.labels.iter().all(|requirement| requirement.holds(labels))
            && self.fields.iter().all(|(path, equal, wanted)| (text_at(object, path) == *wanted) == *equal)
    }
}

/// Whether labels match a `LabelSelector`; a missing or empty one matches everything.
#[must_use]
pub fn matches_labels(selector: &Value, labels: &Value) -> bool {
    let equal = selector.get("matchLabels").and_then(Value::as_object).into_iter().flatten();
    let mut equal = equal.map(|(key, value)| labels.get(key) == Some(value));
    let expression = |e: &Value| {
        let key = e["key"].as_str().unwrap_or_default().to_owned();
        let values = items(e, "values").filter_map(Value::as_str).map(str::to_owned).collect();
        let requirement = match e["operator"].as_str() {
            Some("In") => Requirement::In(key, values),
            Some("NotIn") => Requirement::NotIn(key, values),
            Some("Exists") => Requirement::Exists(key),
            Some("DoesNotExist") => Requirement::Absent(key),
            _ => return false,
        };
        requirement.holds(labels)
    };
    equal.all(|holds| holds) && items(selector, "matchExpressions").all(expression)
}

fn split_outside_parentheses(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0_i32;
    let parts = text.split(move |c| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        c == ',' && depth == 0
    });
    parts.map(str::trim).filter(|part| !part.is_empty())
}

fn requirement(text: &str) -> Result<Requirement, Refusal> {
    let bad = || Refusal::bad_request(format!("unable to parse requirement: {text:?}"));
    let values = |list: &str| {
        let inner = list.trim().strip_prefix('(').and_then(|l| l.strip_suffix(')')).ok_or_else(bad)?;
        Ok(inner.split(',').map(|v| v.trim().to_owned()).collect())
    };
    if let Some((key, value)) = text.split_once("!=") {
        return Ok(Requirement::NotIn(key.trim().into(), vec![value.trim().into()]));
    }
    if let Some((key, value)) = text.split_once('=') {
        return Ok(Requirement::In(key.trim().into(), vec![value.trim_start_matches('=').trim().into()]));
    }
    if let Some(key) = text.strip_prefix('!') {
        return Ok(Requirement::Absent(key.trim().into()));
    }
    match text.split_once(char::is_whitespace).map(|(key, rest)| (key, rest.trim())) {
        None if !text.contains('(') => Ok(Requirement::Exists(text.into())),
        Some((key, rest)) if rest.starts_with("in") => Ok(Requirement::In(key.into(), values(&rest[2..])?)),
        Some((key, rest)) if rest.starts_with("notin") => {
            Ok(Requirement::NotIn(key.into(), values(&rest[5..])?))
        }
        _ => Err(bad()),
    }
}

fn field(text: &str) -> Result<(String, bool, String), Refusal> {
    let (path, equal, value) = match text.split_once("!=") {
        Some((path, value)) => (path, false, value),
        None => match text.split_once('=') {
            Some((path, value)) => (path, true, value.trim_start_matches('=')),
            None => return Err(Refusal::bad_request(format!("invalid field selector: {text:?}"))),
        },
    };
    Ok((path.trim().to_owned(), equal, value.trim().to_owned()))
}

/// The value at a dotted path as text; empty where there is none.
fn text_at(object: &Value, path: &str) -> String {
    let found = path.split('.').try_fold(object, |at, key| at.get(key));
    match found {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Number(number)) => number.to_string(),
        Some(Value::Bool(value)) => value.to_string(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn selectors_choose_as_the_api_server_does() {
        let pod = json!({
            "metadata": {"name": "a", "labels": {"app": "llm", "tier": "gold"}},
            "spec": {"nodeName": "n1"}, "status": {"phase": "Running"},
        });
        for (labels, fields, expected) in [
            ("", "", true),
            ("app=llm", "", true),
            ("app==llm,tier!=tin", "", true),
            ("app in (x, llm),tier", "", true),
            ("app notin (llm)", "", false),
            ("!app", "", false),
            ("!gpu,missing!=x", "", true),
            ("", "spec.nodeName=n1", true),
            ("", "spec.nodeName=", false),
            ("", "spec.nodeName!=,status.phase!=Failed", true),
            ("", "metadata.name=b", false),
        ] {
            let selector = Selector::parse(labels, fields).unwrap();
            assert_eq!(selector.matches(&pod), expected, "{labels:?} {fields:?}");
        }
        assert!(Selector::parse("a in b", "").is_err());
        assert!(Selector::parse("", "nodeName").is_err());
    }

    #[test]
    fn selectors_of_manifests() {
        let labels = json!({"a": "1"});
        for (selector, expected) in [
            (Value::Null, true),
            (json!({"matchLabels": {"a": "1"}}), true),
            (json!({"matchLabels": {"a": "2"}}), false),
            (json!({"matchExpressions": [{"key": "b", "operator": "NotIn", "values": ["x"]}]}), true),
            (json!({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}), false),
        ] {
            assert_eq!(matches_labels(&selector, &labels), expected, "{selector}");
        }
    }
}
