//! Objects of kinds that are not Kubernetes' own, whose controllers make pods that request cards: RayCluster, Rollout, Workflow, ….
//! Found by form, not by kind: a pod template, or `resources` that name a card, anywhere in the object.

use super::decide::{Rules, demand, is_waved, normalize, reason, wave_label};
use super::waves::WaveOf;
use super::{Outcome, Template, described};
use crate::manifest::Manifest;
use gpu_migrate_model::names::{CONVERT, Dialect};
use gpu_migrate_operator::kinds::{display, shipped, why_not};
use gpu_migrate_webhook::convert::is_gpu;
use gpu_migrate_webhook::decide::{self as webhook, Skip};
use gpu_migrate_webhook::plan::{Subject, rewrite_template};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Where an object requests cards: a path as people write it.
enum Place {
    Template(String, Value),
    /// In a form of its own, such as the `container` of an Argo Workflow.
    Resources(String, String),
}

/// What becomes of the pods of an object; `None` where it requests no card.
pub(super) fn outcome(
    manifest: &Manifest,
    rules: &Rules,
    waves: &BTreeMap<String, WaveOf>,
    default_namespace: &str,
) -> Option<Outcome> {
    let mut places = Vec::new();
    for (key, value) in manifest.value.as_object()? {
        // What a controller reports is not what it makes.
        if key != "status" {
            find(value, key, &mut places);
        }
    }
    let namespace = manifest.namespace.as_deref().unwrap_or(default_namespace);
    let turn = waves.get(&format!(
        "{}/{namespace}/{}",
        display(&manifest.kind, &manifest.api_version),
        manifest.name
    ));
    let (mut texts, mut templates) = (Vec::new(), Vec::new());
    for place in places {
        match place {
            Place::Template(path, value) => {
                let (text, template) = of_template(manifest, namespace, path, value, (rules, turn.copied()));
                texts.push(format!("{}: {text}", template.path));
                templates.push(template);
            }
            Place::Resources(path, resource) => texts.push(format!(
                "{path}: requests {resource}; how its pods look is known when they are created"
            )),
        }
    }
    (!texts.is_empty()).then(|| Outcome::Indirect { why: texts.join("; "), templates })
}

fn find(value: &Value, path: &str, places: &mut Vec<Place>) {
    match value {
        Value::Object(map)
            if map.get("spec").is_some_and(|spec| spec["containers"].is_array())
                && cards(value).is_some() =>
        {
            places.push(Place::Template(path.to_owned(), value.clone()));
        }
        Value::Object(map) => {
            if let Some(resource) = map.get("resources").and_then(requested) {
                places.push(Place::Resources(path.to_owned(), resource));
            }
            map.iter().for_each(|(key, value)| find(value, &format!("{path}.{key}"), places));
        }
        Value::Array(list) => {
            list.iter()
                .enumerate()
                .for_each(|(index, value)| find(value, &format!("{path}[{index}]"), places));
        }
        _ => {}
    }
}

/// The first resource in a pod template that is a card or a part of one.
fn cards(template: &Value) -> Option<String> {
    let lists = ["containers", "initContainers"].map(|list| template["spec"][list].as_array());
    lists.into_iter().flatten().flatten().find_map(|container| requested(&container["resources"]))
}

fn requested(resources: &Value) -> Option<String> {
    let names = ["limits", "requests"].map(|part| resources[part].as_object());
    let mut names = names.into_iter().flatten().flat_map(|amounts| amounts.keys());
    names.find(|name| is_gpu(name, &Dialect::default())).cloned()
}

fn of_template(
    manifest: &Manifest,
    namespace: &str,
    path: String,
    mut value: Value,
    (rules, turn): (&Rules, Option<WaveOf>),
) -> (String, Template) {
    if normalize(&mut value, "") {
        value["metadata"] = json!({});
    }
    let controller = Some((manifest.kind.as_str(), manifest.name.as_str()));
    let namespace_labels = rules.namespaces.get(namespace);
    let subject = Subject { namespace, namespace_labels, controller, cluster: &rules.cluster };
    let rewrite = |template: &Value| rewrite_template(template, &subject, &rules.policies);
    let now = demand(&value, "");
    let mut template = Template { value, path, demand: (now, now), in_no_wave: false, unconvertible: false };
    let mut before = now.map_or_else(|| "?".to_owned(), described);
    if let Some(lost) = super::systems::lost(&template.value) {
        before += &format!(" ({lost})");
    }
    let found = match rewrite(&template.value) {
        Ok(found) => found,
        Err(error) => return (error.to_string(), template),
    };
    let patch = if found.audit_patch.is_empty() { &found.patch } else { &found.audit_patch };
    let mut after = template.value.clone();
    let text = match &found.outcome {
        webhook::Outcome::Skipped(Skip::NotInRollout) if is_waved(rules, &rewrite, &template.value) => {
            match turn {
                Some(WaveOf::Wave(wave, of)) => {
                    // With the label that its wave will add.
                    let labelled = json_patch::patch(&mut after, &wave_label(&template.value)).is_ok();
                    let then = labelled.then(|| rewrite(&after).ok()).flatten();
                    if then.is_some_and(|then| json_patch::patch(&mut after, &then.patch).is_ok()) {
                        template.demand.1 = demand(&after, "");
                    }
                    format!("{before}; converted in wave {wave} of {of}")
                }
                _ => {
                    template.in_no_wave = true;
                    format!(
                        "{before}; left alone: set the label {CONVERT}: \"true\" in this template{}",
                        instead(manifest)
                    )
                }
            }
        }
        webhook::Outcome::Skipped(skip) => format!("{before}; left alone: {}", reason(*skip)),
        webhook::Outcome::Unconvertible(why) | webhook::Outcome::Conflict(why) => {
            template.unconvertible = true;
            format!("{before}; cannot be converted: {why}")
        }
        _ if patch.is_empty() || json_patch::patch(&mut after, patch).is_err() => before,
        outcome => {
            template.demand.1 = demand(&after, "");
            let then = template.demand.1.map_or_else(|| "?".to_owned(), described);
            let audited = matches!(outcome, webhook::Outcome::Audited);
            format!("{before} → {then}{}", if audited { " (mode Audit: not yet)" } else { "" })
        }
    };
    (text, template)
}

/// What the operator can do with the kind, or why it cannot.
fn instead(manifest: &Manifest) -> String {
    let group = manifest.api_version.split_once('/').map_or("", |(group, _)| group);
    let name = format!("{}.{group}", manifest.kind);
    match why_not(&manifest.kind, group) {
        Some(why) => format!("; {why}"),
        None if shipped().iter().any(|kind| kind.name == name) => {
            format!(
                ", or name {name} in spec.workloadKinds of the GPUConfig: then the operator does, in waves"
            )
        }
        None => String::new(),
    }
}
