//! Suggestions as a table, a diff, JSON and policies.

use super::belongs::Owners;
use super::propose::{Proposal, Ratio, Suggestion, Suggestions, is_same, show};
use crate::cluster::columns;
use crate::plan::diff::{to_yaml, unified};
use crate::style::{ADDED, FAINT, HEAD, WARNING, counted, paint};
use gpu_migrate_model::crd::{GPUMigration, GPUMigrationSpec};
use gpu_migrate_model::names::{GROUP, VERSION};
use gpu_migrate_model::text::some_of;
use gpu_migrate_model::units::Cores;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// Names that are listed.
const NAMED: usize = 3;

const LEGEND: &str = "\
P50, P95: percent of a card kept busy, of the pod that uses most. PEAK: most memory of a card. AT LIMIT: part of the time in which a share
kept nearly all of its cores busy. Peaks between two samples are not seen; the margins are for them.";

/// What was seen, and what follows.
pub(super) fn table(suggestions: &Suggestions, titles: bool) -> String {
    let mut rows = Vec::new();
    if titles {
        let names = [
            "PROJECT",
            "CONTAINER",
            "PODS",
            "SAMPLES",
            "OVER",
            "P50",
            "P95",
            "PEAK",
            "AT LIMIT",
            "NOW",
            "PROPOSED",
        ];
        rows.push(names.map(|name| paint(HEAD, name)).to_vec());
    }
    rows.extend(suggestions.containers.iter().map(row));
    let mut text = columns(&rows);
    text += &unjudged(suggestions);
    if titles {
        text += &format!("\n{}\n", paint(FAINT, LEGEND));
    }
    text
}

fn row(one: &Suggestion) -> Vec<String> {
    let evidence = &one.evidence;
    let percent = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), |value| format!("{value:.0}%"));
    let peak = evidence.peak_bytes.map(|bytes| format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)));
    let proposed = match one.proposed {
        None => paint(WARNING, "?"),
        Some(proposed) if is_same(one.now, proposed) => "as now".to_owned(),
        Some(proposed) => paint(ADDED, &share(proposed)),
    };
    vec![
        one.project.clone(),
        one.container.clone(),
        evidence.pods.to_string(),
        evidence.samples.to_string(),
        show(evidence.span()),
        percent(evidence.p50),
        percent(evidence.p95),
        peak.unwrap_or_else(|| "–".to_owned()),
        percent(evidence.at_limit_percent),
        share(one.now),
        proposed,
    ]
}

/// `50 cores, 5.25 GiB`; of a whole card all memory is its.
fn share(ratio: Ratio) -> String {
    if ratio.cores == Cores::CARD {
        return "whole card".to_owned();
    }
    format!("{}, {} GiB", ratio.cores, ratio.blocks.mib() as f64 / 1024.0)
}

/// What is not proposed, or not less, and why.
pub(super) fn unjudged(suggestions: &Suggestions) -> String {
    let mut text = String::new();
    for one in &suggestions.containers {
        if let Some(why) = &one.why {
            text += &format!("{} {}: {why}\n", one.project, one.container);
        }
    }
    for (why, pods) in &suggestions.left_out {
        let names = some_of(NAMED, pods, ", ");
        text += &format!("left out: {} {why}: {names}\n", counted(pods.len(), "pod"));
    }
    if text.is_empty() { text } else { format!("\n{text}") }
}

/// What changes of each policy.
pub(super) fn diffs(suggestions: &Suggestions) -> String {
    let mut text = String::new();
    for Proposal { before, after } in &suggestions.policies {
        let name = after.metadata.name.as_deref().unwrap_or_default();
        let (old, new) = (format!("GPUMigration {name}"), format!("GPUMigration {name} (proposed)"));
        let diff = match before {
            Some(before) => unified(&object(before), &object(after), (&old, &new), 3),
            None => added(&object(after), &new),
        };
        if !diff.is_empty() {
            text += &format!("\n{diff}");
        }
    }
    text
}

/// A policy where there was none.
fn added(policy: &Value, name: &str) -> String {
    let mut text = format!("{}\n{}\n", paint(HEAD, "--- no policy"), paint(HEAD, &format!("+++ {name}")));
    for line in to_yaml(policy).lines() {
        text += &format!("{}\n", paint(ADDED, &format!("+{line}")));
    }
    text
}

/// For programs.
pub(super) fn value(suggestions: &Suggestions) -> Value {
    json!({
        "containers": suggestions.containers,
        "leftOut": suggestions.left_out,
        "policies": policies(suggestions),
    })
}

/// Every policy as proposed.
pub(super) fn policies(suggestions: &Suggestions) -> Vec<Value> {
    suggestions.policies.iter().map(|one| object(&one.after)).collect()
}

/// The namespaces that the policies are about, with our labels as they are: `simulate` needs them.
pub(super) fn namespaces(suggestions: &Suggestions, owners: &Owners) -> Vec<Value> {
    let names: BTreeSet<&String> = suggestions.containers.iter().flat_map(|one| &one.namespaces).collect();
    let objects = names.into_iter().filter_map(|name| {
        let ours = |key: &&String| key.split_once('/').is_some_and(|(group, _)| group == GROUP);
        let labels = owners.namespace(name)?.iter().filter(|(key, _)| ours(key));
        let labels: Map<String, Value> =
            labels.map(|(key, value)| (key.clone(), value.as_str().into())).collect();
        Some(json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}))
    });
    objects.collect()
}

/// The policy as one writes it: without status, and without what is so anyway.
fn object(policy: &GPUMigration) -> Value {
    let mut spec = json!(policy.spec);
    let default = json!(GPUMigrationSpec::default());
    if let Some(fields) = spec.as_object_mut() {
        for (name, value) in fields.iter_mut().filter(|(name, _)| *name != "convert") {
            without_defaults(value, &default[name.as_str()]);
        }
        let written = ["project", "mode", "convert"];
        fields.retain(|name, value| {
            written.contains(&name.as_str())
                || (*value != default[name.as_str()]
                    && value.as_object().is_none_or(|inner| !inner.is_empty()))
        });
    }
    json!({
        "apiVersion": format!("{GROUP}/{VERSION}"),
        "kind": "GPUMigration",
        "metadata": {"name": policy.metadata.name},
        "spec": spec,
    })
}

/// Removes the fields that have the value they have without being written.
fn without_defaults(value: &mut Value, default: &Value) {
    let (Some(fields), Some(default)) = (value.as_object_mut(), default.as_object()) else { return };
    fields.retain(|name, value| {
        let Some(default) = default.get(name) else { return true };
        without_defaults(value, default);
        value != default && value.as_object().is_none_or(|inner| !inner.is_empty() || !default.is_object())
    });
}
