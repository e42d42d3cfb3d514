//! An object before and after, as a unified diff of its YAML.
//!
//! Both sides are written by the same serializer with sorted keys (as `kubectl diff` does), so that the diff
//! shows what changes and nothing of how the file happened to be laid out.

use crate::style::{ADDED, HEAD, PLACE, REMOVED};
use anstyle::Style;
use serde_json::Value;
use similar::{Algorithm, ChangeTag, TextDiff};
use std::borrow::Cow;
use std::fmt::Write as _;
use std::time::Duration;

/// Writes `value` as YAML with sorted keys and two spaces a level.
#[must_use]
pub fn to_yaml(value: &Value) -> String {
    let options = serde_saphyr::ser_options! { compact_list_indent: true };
    // A JSON value can always be written as YAML; if the writer ever disagrees, JSON is YAML too.
    serde_saphyr::to_string_with_options(value, options).unwrap_or_else(|_| format!("{value:#}\n"))
}

/// Lines of a diff are cut here: the annotation with the original request is long.
const MAX_LINE: usize = 120;

/// The unified diff of two objects with `context` lines around each change; empty if they are equal.
#[must_use]
pub fn unified(before: &Value, after: &Value, names: (&str, &str), context: usize) -> String {
    if before == after {
        return String::new();
    }
    let (before, after) = (to_yaml(before), to_yaml(after));
    // The deadline is for files made to be slow; past it the diff is coarser, never wrong.
    let diff = TextDiff::configure()
        .algorithm(Algorithm::Patience)
        .timeout(Duration::from_secs(2))
        .diff_lines(&before, &after);
    let mut out = String::new();
    line(&mut out, HEAD, &format!("--- {}", names.0));
    line(&mut out, HEAD, &format!("+++ {}", names.1));
    for hunk in diff.unified_diff().context_radius(context).iter_hunks() {
        line(&mut out, PLACE, &hunk.header().to_string());
        for change in hunk.iter_changes() {
            let (sign, style) = match change.tag() {
                ChangeTag::Delete => ('-', REMOVED),
                ChangeTag::Insert => ('+', ADDED),
                ChangeTag::Equal => (' ', Style::new()),
            };
            let text = change.value();
            line(&mut out, style, &format!("{sign}{}", shortened(text.strip_suffix('\n').unwrap_or(text))));
        }
    }
    out
}

fn shortened(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(MAX_LINE) {
        Some((end, _)) => Cow::Owned(format!("{}… ({} characters)", &text[..end], text.chars().count())),
        None => Cow::Borrowed(text),
    }
}

fn line(out: &mut String, style: Style, text: &str) {
    // Writing into a String cannot fail.
    let _ = writeln!(out, "{style}{text}{style:#}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn plain(text: &str) -> String {
        anstream::adapter::strip_str(text).to_string()
    }

    #[test]
    fn only_what_changes_is_shown() {
        let before = json!({"a": 1, "b": {"x": "1", "w": [1, 2]}, "z": null});
        let after = json!({"a": 1, "b": {"x": "2", "w": [1, 2]}, "z": null});
        let seen = unified(&before, &after, ("old", "new"), 1);
        assert_eq!(
            plain(&seen),
            "--- old\n+++ new\n@@ -5,3 +5,3 @@\n   - 2\n-  x: \"1\"\n+  x: \"2\"\n z: null\n"
        );
        assert!(seen.contains("\u{1b}[31m-  x"), "removed lines are red: {seen:?}");
        assert_eq!(unified(&before, &before, ("old", "new"), 3), "");
    }

    #[test]
    fn long_lines_are_cut_between_characters() {
        let seen = plain(&unified(&json!({"a": ""}), &json!({"a": "ü".repeat(300)}), ("old", "new"), 0));
        assert!(seen.contains("ü… (") && seen.lines().all(|line| line.chars().count() < 150), "{seen}");
    }

    #[test]
    fn what_yaml_could_take_for_something_else_comes_back_as_it_was() {
        let value = json!({
            "words": ["true", "yes", "on", "null", "~", "", " ", "1", "1e3", "0x1f", "0o7", "1_000", "1:30", ".inf", "2001-01-01",
                      "- a", "a: b", "a #b", "&a", "*a", "!a", "%a", "@a", "`a", "'", "\"", "line\nline\n", "tab\t", "\u{7f}", "…", "<<", "="],
            "numbers": [0, -1, 1.5, 18446744073709551615u64],
            "empty": {"map": {}, "list": []},
            "1": true, "true": 2, "a: b": 3, "": 4,
        });
        let back: Value = serde_saphyr::from_str(&to_yaml(&value)).unwrap();
        assert_eq!(back, value);
    }
}
