//! Writes the record of what a pod was before ([`crate::original`] says its form and reads it).

use serde_json::Value;

use crate::text::{array, key, string};

/// The record as it grows; sections without content leave no trace.
#[derive(Debug)]
pub(crate) struct Record {
    containers: String,
    spec: String,
    /// The other sections, each with a comma in front.
    rest: String,
}

impl Record {
    /// Nothing yet, with room for a typical pod: strings that grow from nothing were most of a review's allocations.
    pub(crate) fn new() -> Self {
        let [containers, spec, rest] = [512, 128, 512].map(String::with_capacity);
        Self { containers, spec, rest }
    }

    /// Begins the section of a container.
    pub(crate) fn container(&mut self, name: &str) -> ContainerRecord<'_> {
        let start = self.containers.len();
        comma(&mut self.containers);
        key(&mut self.containers, name);
        self.containers.push('{');
        let empty = self.containers.len();
        ContainerRecord { text: &mut self.containers, start, empty }
    }

    /// A single field of the spec and what it said.
    pub(crate) fn spec_field(&mut self, field: &str, former: Option<&str>) {
        comma(&mut self.spec);
        key(&mut self.spec, field);
        optional(&mut self.spec, former);
    }

    /// Begins the section of a map of the pod.
    pub(crate) fn map(&mut self, field: &str) -> MapRecord<'_> {
        let start = self.rest.len();
        self.rest.push(',');
        key(&mut self.rest, field);
        self.rest.push_str("{\"keys\":{");
        let empty = self.rest.len();
        MapRecord { text: &mut self.rest, start, empty }
    }

    /// How a list of the pod was changed.
    pub(crate) fn list(&mut self, field: &str, created: bool, removed: &[(usize, Value)], added: &[&str]) {
        if created || !removed.is_empty() || !added.is_empty() {
            self.rest.push(',');
            key(&mut self.rest, field);
            list(&mut self.rest, created, removed, added);
        }
    }

    pub(crate) fn finish(self, policy: &str) -> String {
        let Self { containers, spec, rest } = self;
        let mut out = String::with_capacity(containers.len() + spec.len() + rest.len() + policy.len() + 64);
        out.push('{');
        key(&mut out, "policy");
        string(&mut out, policy);
        for (field, section) in [("containers", containers), ("spec", spec)] {
            if !section.is_empty() {
                out.push(',');
                key(&mut out, field);
                out.push('{');
                out.push_str(&section);
                out.push('}');
            }
        }
        out.push_str(&rest);
        out.push('}');
        out
    }
}

/// The section of one container; closed when dropped.
pub(crate) struct ContainerRecord<'r> {
    text: &'r mut String,
    start: usize,
    empty: usize,
}

impl ContainerRecord<'_> {
    /// Begins `limits` or `requests`.
    pub(crate) fn map(&mut self, field: &str) -> Entries<'_> {
        let start = self.text.len();
        comma(self.text);
        key(self.text, field);
        self.text.push('{');
        let empty = self.text.len();
        Entries { text: self.text, start, empty }
    }

    pub(crate) fn list(&mut self, field: &str, created: bool, removed: &[(usize, Value)], added: &[&str]) {
        if created || !removed.is_empty() || !added.is_empty() {
            comma(self.text);
            key(self.text, field);
            list(self.text, created, removed, added);
        }
    }
}

impl Drop for ContainerRecord<'_> {
    fn drop(&mut self) {
        if self.text.len() == self.empty {
            self.text.truncate(self.start);
        } else {
            self.text.push('}');
        }
    }
}

pub(crate) struct Entries<'r> {
    text: &'r mut String,
    start: usize,
    empty: usize,
}

impl Entries<'_> {
    /// `value` appends JSON; `null` where the key was not there.
    pub(crate) fn json(&mut self, name: &str, value: impl FnOnce(&mut String)) {
        comma(self.text);
        key(self.text, name);
        value(self.text);
    }

    pub(crate) fn end(self) {
        if self.text.len() == self.empty {
            self.text.truncate(self.start);
        } else {
            self.text.push('}');
        }
    }
}

/// How a map of the pod was changed.
pub(crate) struct MapRecord<'r> {
    text: &'r mut String,
    start: usize,
    empty: usize,
}

impl MapRecord<'_> {
    /// A key and its former value.
    pub(crate) fn text(&mut self, name: &str, former: Option<&str>) {
        comma(self.text);
        key(self.text, name);
        optional(self.text, former);
    }

    /// `created` says that the map itself is ours.
    pub(crate) fn end(self, created: bool) {
        if self.text.len() == self.empty && !created {
            return self.text.truncate(self.start);
        }
        self.text.push('}');
        if created {
            self.text.push_str(",\"created\":true");
        }
        self.text.push('}');
    }
}

fn comma(out: &mut String) {
    if !out.is_empty() && !out.ends_with('{') {
        out.push(',');
    }
}

fn optional(out: &mut String, former: Option<&str>) {
    match former {
        Some(former) => string(out, former),
        None => out.push_str("null"),
    }
}

fn list(out: &mut String, created: bool, removed: &[(usize, Value)], added: &[&str]) {
    out.push('{');
    if created {
        out.push_str("\"created\":true");
    }
    if !removed.is_empty() {
        let entries: Vec<String> =
            removed.iter().map(|(index, entry)| format!("[{index},{entry}]")).collect();
        let entries: Vec<&str> = entries.iter().map(String::as_str).collect();
        comma(out);
        key(out, "removed");
        array(out, &entries);
    }
    if !added.is_empty() {
        comma(out);
        key(out, "added");
        array(out, added);
    }
    out.push('}');
}
