//! The JSONPath of printer columns: fields, quoted fields, indexes, `[*]`, and filters that compare one field with a text.

use serde_json::Value;

/// What a path finds; several values are joined as kubectl joins them.
#[must_use]
pub fn find(object: &Value, path: &str) -> Option<Value> {
    let path = path.trim().trim_start_matches('{').trim_end_matches('}');
    let mut found = vec![object];
    let mut rest = path.strip_prefix('$').unwrap_or(path);
    while !rest.is_empty() {
        let step;
        (step, rest) = next(rest)?;
        found = found.into_iter().flat_map(|value| step.take(value)).collect();
    }
    match found.as_slice() {
        [] => None,
        [Value::Null] => None,
        [one] => Some((*one).clone()),
        several => {
            let texts = several.iter().map(|v| v.as_str().map_or_else(|| v.to_string(), str::to_owned));
            Some(texts.collect::<Vec<_>>().join(",").into())
        }
    }
}

enum Step<'a> {
    Field(String),
    Index(usize),
    All,
    Where(&'a str, &'a str),
}

impl Step<'_> {
    fn take<'v>(&self, value: &'v Value) -> Vec<&'v Value> {
        match self {
            Self::Field(name) => value.get(name).into_iter().collect(),
            Self::Index(index) => value.get(index).into_iter().collect(),
            Self::All => value.as_array().into_iter().flatten().collect(),
            Self::Where(field, text) => {
                value.as_array().into_iter().flatten().filter(|v| v[*field] == **text).collect()
            }
        }
    }
}

fn next(path: &str) -> Option<(Step<'_>, &str)> {
    if let Some(rest) = path.strip_prefix("[?(@.") {
        let (condition, rest) = rest.split_once(")]")?;
        let (field, text) = condition.split_once("==")?;
        return Some((Step::Where(field.trim(), text.trim().trim_matches(['"', '\''])), rest));
    }
    if let Some(rest) = path.strip_prefix("['") {
        let (name, rest) = rest.split_once("']")?;
        return Some((Step::Field(name.into()), rest));
    }
    if let Some(rest) = path.strip_prefix('[') {
        let (inside, rest) = rest.split_once(']')?;
        let step = if inside == "*" { Step::All } else { Step::Index(inside.parse().ok()?) };
        return Some((step, rest));
    }
    let path = path.strip_prefix('.')?;
    let mut name = String::new();
    let mut characters = path.char_indices();
    while let Some((at, c)) = characters.next() {
        match c {
            '\\' => name.push(characters.next()?.1),
            '.' | '[' => return Some((Step::Field(name), &path[at..])),
            c => name.push(c),
        }
    }
    Some((Step::Field(name), ""))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn paths_of_printer_columns() {
        let object = json!({
            "metadata": {"annotations": {"a.b/c": "x"}},
            "status": {"conditions": [{"type": "Ready", "status": "True"}, {"type": "Other"}], "n": [1, 2], "none": null},
        });
        for (path, expected) in [
            (".status.conditions[?(@.type==\"Ready\")].status", Some(json!("True"))),
            (".status.conditions[0].type", Some(json!("Ready"))),
            (".status.conditions[*].type", Some(json!("Ready,Other"))),
            (".status.n[*]", Some(json!("1,2"))),
            (".status.n", Some(json!([1, 2]))),
            (".metadata.annotations['a.b/c']", Some(json!("x"))),
            (".metadata.annotations.a\\.b/c", Some(json!("x"))),
            (".status.none", None),
            (".nothing.here", None),
            ("[broken", None),
        ] {
            assert_eq!(find(&object, path), expected, "{path}");
        }
    }
}
