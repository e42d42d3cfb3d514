//! JSON written straight into one text: the shape is known, so there is no need to build values first.

use std::fmt::Write as _;

pub(crate) fn string(out: &mut String, text: &str) {
    out.push('"');
    escaped(out, text);
    out.push('"');
}

/// Appends `"key":`.
pub(crate) fn key(out: &mut String, key: &str) {
    string(out, key);
    out.push(':');
}

pub(crate) fn object<K: AsRef<str>, V: AsRef<str>>(out: &mut String, pairs: impl Iterator<Item = (K, V)>) {
    out.push('{');
    for (index, (name, value)) in pairs.enumerate() {
        if index > 0 {
            out.push(',');
        }
        key(out, name.as_ref());
        string(out, value.as_ref());
    }
    out.push('}');
}

/// Appends a list of `entries`, which are JSON already.
pub(crate) fn array(out: &mut String, entries: &[&str]) {
    out.push('[');
    for (index, entry) in entries.iter().enumerate() {
        if index > 0 {
            out.push(',');
        }
        out.push_str(entry);
    }
    out.push(']');
}

/// Appends the inside of a JSON string.
pub(crate) fn escaped(out: &mut String, text: &str) {
    let mut rest = text;
    // What needs an escape is one byte long, so cutting after it is safe.
    while let Some(at) = find(rest.as_bytes(), *b"\"\\") {
        out.push_str(&rest[..at]);
        escape(out, rest.as_bytes()[at]);
        rest = &rest[at + 1..];
    }
    out.push_str(rest);
}

/// Where the first control character or one of `special` is: eight bytes at a time, since nearly none have any.
fn find<const N: usize>(bytes: &[u8], special: [u8; N]) -> Option<usize> {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const HIGH: u64 = 0x8080_8080_8080_8080;
    // A borrow can only spoil bytes above a hit, and the lowest hit is the one that is asked for.
    let below = |word: u64, bound: u64| word.wrapping_sub(ONES * bound) & !word & HIGH;
    let (words, tail) = bytes.as_chunks::<8>();
    for (index, word) in words.iter().enumerate() {
        let word = u64::from_le_bytes(*word);
        let hits = special.iter().map(|byte| below(word ^ (ONES * u64::from(*byte)), 1));
        let hits = hits.fold(below(word, 0x20), |all, one| all | one);
        if hits != 0 {
            return Some(index * 8 + hits.trailing_zeros() as usize / 8);
        }
    }
    let hit = |byte: &u8| *byte < 0x20 || special.contains(byte);
    tail.iter().position(hit).map(|at| words.len() * 8 + at)
}

fn escape(out: &mut String, byte: u8) {
    match byte {
        b'"' => out.push_str("\\\""),
        b'\\' => out.push_str("\\\\"),
        // Writing into a string cannot fail.
        control => drop(write!(out, "\\u{control:04x}")),
    }
}

/// The operations of a JSON patch (RFC 6902), written as they are found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PatchText(String);

impl PatchText {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The array of operations; empty text for none.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// As the types of the `json-patch` crate.
    ///
    /// # Errors
    /// Never for what was written here.
    pub fn parse(&self) -> Result<json_patch::Patch, serde_json::Error> {
        if self.is_empty() {
            return Ok(json_patch::Patch(Vec::new()));
        }
        serde_json::from_str(&self.0)
    }

    pub(crate) fn remove(&mut self, path: &[&str]) {
        self.begin("remove", path);
        self.end();
    }

    /// `value` appends the JSON that is added.
    pub(crate) fn add(&mut self, path: &[&str], value: impl FnOnce(&mut String)) {
        self.begin("add", path);
        self.0.push_str(",\"value\":");
        value(&mut self.0);
        self.end();
    }

    fn begin(&mut self, operation: &str, path: &[&str]) {
        if self.0.is_empty() {
            // A typical patch; the record in it holds the same names once more.
            self.0.reserve(2048);
            self.0.push('[');
        } else {
            // In place of the closing bracket.
            self.0.pop();
            self.0.push(',');
        }
        self.0.push_str("{\"op\":\"");
        self.0.push_str(operation);
        self.0.push_str("\",\"path\":\"");
        for token in path {
            self.0.push('/');
            pointer_token(&mut self.0, token);
        }
        self.0.push('"');
    }

    fn end(&mut self) {
        self.0.push_str("}]");
    }
}

/// A token of a JSON pointer (RFC 6901) inside a JSON string.
fn pointer_token(out: &mut String, token: &str) {
    let mut rest = token;
    while let Some(at) = find(rest.as_bytes(), *b"~/\"\\") {
        out.push_str(&rest[..at]);
        match rest.as_bytes()[at] {
            b'~' => out.push_str("~0"),
            b'/' => out.push_str("~1"),
            other => escape(out, other),
        }
        rest = &rest[at + 1..];
    }
    out.push_str(rest);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    proptest! {
        #[test]
        fn every_text_is_read_back(text in any::<String>()) {
            let mut out = String::new();
            string(&mut out, &text);
            prop_assert_eq!(serde_json::from_str::<String>(&out).unwrap(), text);
        }

        #[test]
        fn every_path_is_read_back(tokens in prop::collection::vec("\\PC*|[~/\"\\\\\u{1}-\u{1f}]*", 1..4)) {
            let path: Vec<&str> = tokens.iter().map(String::as_str).collect();
            let mut patch = PatchText::default();
            patch.remove(&path);
            patch.add(&path, |out| out.push_str("[1]"));
            let expected = jsonptr::PointerBuf::from_tokens(path.iter().copied()).to_string();
            let operations: Value = serde_json::from_str(patch.as_str()).unwrap();
            prop_assert_eq!(operations, json!([
                {"op": "remove", "path": expected}, {"op": "add", "path": expected, "value": [1]},
            ]));
            prop_assert_eq!(patch.parse().unwrap().0.len(), 2);
        }
    }
}
