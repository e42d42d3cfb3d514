//! The decision on each object: its policy, and the webhook's rewrite of its pods.

use super::waves::{WaveOf, waves};
use super::{Converted, Entry, Fallback, Namespaces, Outcome, Plan};
use super::{indirect, projects, systems};
use crate::manifest::{Manifest, Origin, Source};
use gpu_migrate_model::ask::{Demand, PodAsk};
use gpu_migrate_model::crd::{Convert, GPUConfig, GPUMigration, GPUShadow, read_strict};
use gpu_migrate_model::names::{self, Dialect, GROUP, VERSION};
use gpu_migrate_model::units::{Blocks, Cores};
use gpu_migrate_operator::kinds::Described;
use gpu_migrate_webhook::decide::{self as webhook, Skip};
use gpu_migrate_webhook::obstacles::ClusterFacts;
use gpu_migrate_webhook::plan::{PlanError, Rewrite, Subject, rewrite_template};
use gpu_migrate_webhook::policy::{Policies, Settings};
use json_patch::{AddOperation, Patch, PatchOperation};
use jsonptr::PointerBuf;
use k8s_openapi::api::core::v1::PodSpec;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use thiserror::Error;

/// A policy that cannot be used.
#[derive(Debug, Error)]
pub enum PolicyProblem {
    /// Not a GPUMigration of the version this program knows.
    #[error("{place}: GPUMigration {name}: {reason}")]
    Unreadable { place: String, name: String, reason: String },
    #[error("GPUMigration {name}: {reason}")]
    Rejected { name: String, reason: String },
    #[error(
        "GPUMigration {name} is given twice with different specs: {first} and {second}; the first is used"
    )]
    Twice { name: String, first: String, second: String },
    /// Namespace labels that are not strings.
    #[error(
        "{place}: Namespace {name}: metadata.labels: {reason}; expected strings: put values such as \"true\" in quotes"
    )]
    Labels { place: String, name: String, reason: String },
}

/// What was given to plan with.
#[derive(Default)]
pub struct Rules {
    pub(super) policies: Policies,
    migrations: Vec<GPUMigration>,
    /// How many policies can be used.
    pub policy_count: usize,
    pub namespaces: Namespaces,
    /// By the GPUShadows among the manifests.
    pub(super) cluster: ClusterFacts,
    /// Foreign kinds that the operator converts, by the GPUConfig among the manifests.
    pub(super) kinds: Vec<Arc<Described>>,
}

impl Rules {
    /// Takes the policies and the Namespaces out of `manifests`; the other objects stay in it.
    #[must_use]
    pub fn take_from(manifests: &mut Vec<Manifest>) -> (Self, Vec<PolicyProblem>) {
        let (mut migrations, mut namespaces, mut problems) = (Vec::new(), Namespaces::new(), Vec::new());
        let mut cluster = ClusterFacts::default();
        let mut kinds = Vec::new();
        manifests.retain(|manifest| {
            let group = manifest.api_version.split_once('/').map_or("", |(group, _)| group);
            match (group, manifest.kind.as_str()) {
                (GROUP, "GPUMigration") => match read_migration(manifest) {
                    Ok(migration) => migrations.push((migration, manifest.origin.clone())),
                    Err(problem) => problems.push(problem),
                },
                (GROUP, "GPUShadow") => {
                    let shadow = serde_json::from_value::<GPUShadow>(manifest.value.clone()).ok();
                    let cards = shadow.and_then(|shadow| shadow.status).unwrap_or_default().cards;
                    let memory = cards.iter().map(|card| card.card.memory_mib);
                    cluster.largest_card_mib = memory.chain(cluster.largest_card_mib).max();
                }
                (GROUP, "GPUConfig") => {
                    let config = serde_json::from_value::<GPUConfig>(manifest.value.clone()).ok();
                    let entries = config.map(|config| config.spec.workload_kinds).unwrap_or_default();
                    kinds.extend(entries.iter().filter_map(|entry| Described::of(entry).ok()).map(Arc::new));
                }
                ("", "Namespace") => match read_labels(manifest) {
                    Ok(labels) => drop(namespaces.insert(manifest.name.clone(), labels)),
                    Err(problem) => problems.push(problem),
                },
                _ => return true,
            }
            false
        });
        let migrations = unique(migrations, &mut problems);
        let (policies, rejected) = Policies::compile(migrations.iter(), &Settings::default());
        let policy_count = migrations.len() - rejected.len();
        problems.extend(
            rejected
                .into_iter()
                .map(|r| PolicyProblem::Rejected { name: r.name, reason: r.reason.to_string() }),
        );
        (Self { policies, migrations, policy_count, namespaces, cluster, kinds }, problems)
    }
}

/// Each policy once. One that is reached twice is one; a file's stands in for the cluster's of the same name.
fn unique(read: Vec<(GPUMigration, Origin)>, problems: &mut Vec<PolicyProblem>) -> Vec<GPUMigration> {
    let mut kept: Vec<(GPUMigration, Origin)> = Vec::new();
    for (migration, origin) in read {
        match kept.iter_mut().find(|(other, _)| other.metadata.name == migration.metadata.name) {
            None => kept.push((migration, origin)),
            Some((other, _)) if other.spec == migration.spec => {}
            Some(of_cluster) if of_cluster.1.source == Source::Cluster => *of_cluster = (migration, origin),
            Some((_, first)) => problems.push(PolicyProblem::Twice {
                name: migration.metadata.name.unwrap_or_default(),
                first: first.to_string(),
                second: origin.to_string(),
            }),
        }
    }
    kept.into_iter().map(|(migration, _)| migration).collect()
}

fn read_migration(manifest: &Manifest) -> Result<GPUMigration, PolicyProblem> {
    let known = format!("{GROUP}/{VERSION}");
    if manifest.api_version != known {
        return Err(PolicyProblem::Unreadable {
            place: manifest.origin.to_string(),
            name: manifest.name.clone(),
            reason: format!("apiVersion is {}; expected {known}", manifest.api_version),
        });
    }
    read_strict(&manifest.value).map_err(|error| PolicyProblem::Unreadable {
        place: manifest.origin.to_string(),
        name: manifest.name.clone(),
        reason: match manifest.value.pointer("/spec/mode") {
            // In the YAML that kubectl reads, Off is a boolean; the API server refuses it too.
            Some(Value::Bool(false)) => {
                "spec.mode: Off without quotes is the boolean false; write \"Off\"".to_owned()
            }
            _ => error.to_string(),
        },
    })
}

fn read_labels(manifest: &Manifest) -> Result<BTreeMap<String, String>, PolicyProblem> {
    let labels = manifest.value.pointer("/metadata/labels").cloned().unwrap_or_else(|| json!({}));
    let labels: Option<_> = serde_json::from_value(labels).map_err(|error| PolicyProblem::Labels {
        place: manifest.origin.to_string(),
        name: manifest.name.clone(),
        reason: error.to_string(),
    })?;
    Ok(labels.unwrap_or_default())
}

/// Decides every object. Objects without a namespace are taken to be in `default_namespace`.
#[must_use]
pub fn decide(manifests: Vec<Manifest>, rules: &Rules, default_namespace: &str) -> Plan {
    let mut plan = Plan::default();
    let (mut places, mut pods, mut others) = (Vec::new(), Vec::new(), Vec::new());
    for mut manifest in manifests {
        let Some(form) = manifest.pod_form() else {
            others.push(manifest);
            continue;
        };
        let bare = normalize(&mut manifest.value, form.pointer());
        places.push(Place { pointer: form.pointer(), bare });
        pods.push(manifest);
    }
    let all = pods.iter().chain(&others);
    let waves = waves(&rules.migrations, all, &rules.namespaces, &rules.kinds, default_namespace);
    for (manifest, place) in pods.into_iter().zip(places) {
        let outcome = decide_one(&manifest, place, rules, &waves, default_namespace);
        plan.entries.push(Entry { manifest, outcome });
    }
    for manifest in others {
        match indirect::outcome(&manifest, rules, &waves, default_namespace) {
            Some(outcome) => plan.entries.push(Entry { manifest, outcome }),
            None => plan.without_pods += 1,
        }
    }
    plan.projects = projects::sums(&plan.entries, &rules.namespaces, default_namespace);
    plan
}

/// Where in an object the pod stands.
#[derive(Clone, Copy)]
struct Place {
    pointer: &'static str,
    /// It has no `metadata` in the manifest.
    bare: bool,
}

fn decide_one(
    manifest: &Manifest,
    place: Place,
    rules: &Rules,
    waves: &BTreeMap<String, WaveOf>,
    default_namespace: &str,
) -> Outcome {
    let Some(template) = manifest.value.pointer(place.pointer) else {
        let why = format!("{} is missing; expected a pod template", field(place.pointer));
        return Outcome::CannotConvert { why, then: Fallback::Invalid };
    };
    let mut template = Cow::Borrowed(template);
    if place.bare
        && let Some(template) = template.to_mut().as_object_mut()
    {
        template.insert("metadata".to_owned(), json!({}));
    }
    let namespace = manifest.namespace.as_deref().unwrap_or(default_namespace);
    let controller = (manifest.kind != "Pod").then_some((manifest.kind.as_str(), manifest.name.as_str()));
    let namespace_labels = rules.namespaces.get(namespace);
    let subject = Subject { namespace, namespace_labels, controller, cluster: &rules.cluster };
    let known = if rules.namespaces.contains_key(namespace) { Ok(()) } else { Err(namespace) };
    let rewrite = |template: &Value| rewrite_template(template, &subject, &rules.policies);
    let turn = waves.get(&format!("{}/{namespace}/{}", manifest.kind, manifest.name)).copied();
    let mut written = rewrite(&template);
    let mut before = Patch::default();
    let is = |rewrite: &Rewrite, skip| rewrite.outcome == webhook::Outcome::Skipped(skip);
    if let Ok(now) = &written
        && is(now, Skip::NotInRollout)
    {
        if let Some(WaveOf::Wave(..)) = turn {
            // With the label that its wave will add.
            before = wave_label(&template);
            if json_patch::patch(template.to_mut(), &before).is_ok() {
                written = rewrite(&template);
            }
        } else if is_waved(rules, &rewrite, &template) {
            return Outcome::InNoWave { why: not_in_waves(turn).to_owned() };
        }
    }
    let mut outcome = match written {
        Err(error) => {
            let why = format!("{}: {error}", field(place.pointer));
            Outcome::CannotConvert { why, then: Fallback::Invalid }
        }
        Ok(rewrite) => outcome(manifest, place, (before, rewrite), turn, (known, rules)),
    };
    if let Some(lost) = systems::lost(&template) {
        match &mut outcome {
            Outcome::Converted(converted) => converted.notes.push(lost),
            Outcome::LeftAlone { why }
            | Outcome::InNoWave { why }
            | Outcome::Indirect { why, .. }
            | Outcome::CannotConvert { why, .. } => {
                *why += &format!("; {lost}");
            }
        }
    }
    outcome
}

/// Whether it would be in the rollout with the label of a wave: a policy without waves does not look at it.
pub(super) fn is_waved(
    rules: &Rules,
    rewrite: &impl Fn(&Value) -> Result<Rewrite, PlanError>,
    template: &Value,
) -> bool {
    if rules.migrations.iter().all(|migration| migration.spec.rollout.waves.is_empty()) {
        return false;
    }
    let mut labelled = template.clone();
    json_patch::patch(&mut labelled, &wave_label(template)).is_ok()
        && rewrite(&labelled)
            .is_ok_and(|rewrite| rewrite.outcome != webhook::Outcome::Skipped(Skip::NotInRollout))
}

/// Why it is in no wave, and how to convert it.
fn not_in_waves(turn: Option<WaveOf>) -> &'static str {
    match turn {
        Some(WaveOf::None) => "it is in no wave of its policy (spec.rollout.waves)",
        Some(WaveOf::ByHand) => {
            "the operator does not restart paused, partitioned or OnDelete workloads: add the label gpu-migrate.io/convert: \"true\" to its pod template"
        }
        _ => {
            "the operator does not restart bare pods and Jobs: add the label gpu-migrate.io/convert: \"true\" to the pod and re-create it"
        }
    }
}

/// The operator's change of a pod template: the label of a wave.
pub(super) fn wave_label(template: &Value) -> Patch {
    let add = |path: String, value| {
        PatchOperation::Add(AddOperation { path: PointerBuf::parse(path).unwrap_or_default(), value })
    };
    let label = names::CONVERT.replace('~', "~0").replace('/', "~1");
    let mut operations = Vec::new();
    if !template.pointer("/metadata/labels").is_some_and(Value::is_object) {
        operations.push(add("/metadata/labels".to_owned(), json!({})));
    }
    operations.push(add(format!("/metadata/labels/{label}"), json!("true")));
    Patch(operations)
}

/// A JSON pointer as people write a field: `spec.template`.
fn field(pointer: &str) -> String {
    if pointer.is_empty() { "pod".to_owned() } else { pointer.trim_start_matches('/').replace('/', ".") }
}

/// Why the webhook has nothing to do, and what would change that.
pub(super) fn reason(skip: Skip) -> &'static str {
    match skip {
        Skip::NotOptedIn => "its namespace is not opted in (label gpu-migrate.io/opt-in: \"true\")",
        Skip::OptedOut => "it is opted out (label gpu-migrate.io/opt-out: \"true\")",
        Skip::Mirror => "it is a static pod of the kubelet",
        Skip::Bound => "it is already bound to a node (spec.nodeName)",
        Skip::NoProject => {
            "it belongs to no project (label gpu-migrate.io/project on the pod or its namespace)"
        }
        Skip::UnknownProject => "there is no policy for the project that its label names",
        Skip::NoPolicy => "its project has no policy",
        Skip::Off => "its policy is off (spec.mode: Off)",
        Skip::NoGpu => "it requests no card",
        Skip::AlreadyShared => "it already requests shares",
        Skip::NotInRollout => "the rollout has not reached it (spec.rollout)",
    }
}

/// `before` is what the operator changes before the webhook sees it; `known` is an error with the name of a namespace whose
/// labels are not given.
fn outcome(
    manifest: &Manifest,
    place: Place,
    (before, rewrite): (Patch, Rewrite),
    turn: Option<WaveOf>,
    (known, rules): (Result<(), &str>, &Rules),
) -> Outcome {
    match &rewrite.outcome {
        webhook::Outcome::Converted | webhook::Outcome::Guarded | webhook::Outcome::Audited => {
            converted(manifest, place, (before, rewrite), turn, (known, rules))
        }
        webhook::Outcome::Unconvertible(why) | webhook::Outcome::Conflict(why) => {
            let then = if rewrite.deny.is_some() { Fallback::Deny } else { Fallback::Admit };
            Outcome::CannotConvert { why: why.clone(), then }
        }
        webhook::Outcome::Skipped(skip) => {
            let mut why = reason(*skip).to_owned();
            if let Err(namespace) = known {
                why += &format!(
                    "; Namespace {namespace} is not among the files: add it with its labels (-f or --policy)"
                );
            }
            Outcome::LeftAlone { why }
        }
    }
}

fn converted(
    manifest: &Manifest,
    place: Place,
    (before, rewrite): (Patch, Rewrite),
    turn: Option<WaveOf>,
    (known, rules): (Result<(), &str>, &Rules),
) -> Outcome {
    let audit = matches!(rewrite.outcome, webhook::Outcome::Audited);
    let of_webhook = if audit { &rewrite.audit_patch } else { &rewrite.patch };
    let patch = on_object(Patch(before.0.into_iter().chain(of_webhook.0.iter().cloned()).collect()), place);
    let mut after = manifest.value.clone();
    if let Err(error) = json_patch::patch(&mut after, &patch) {
        // The webhook's patch fits the template it was made for, or one of the two is wrong.
        return Outcome::CannotConvert {
            why: format!("the patch does not apply: {error}"),
            then: Fallback::Invalid,
        };
    }
    let mut notes = Vec::new();
    if audit {
        notes.push("the policy is in mode Audit: this is what Enforce would do".to_owned());
    }
    let wave = match turn {
        Some(WaveOf::Wave(wave, of)) => Some((wave, of)),
        _ => None,
    };
    if let Some((wave, of)) = wave {
        notes.push(format!("converted in wave {wave} of {of}"));
    }
    if let Err(namespace) = known {
        notes.push(format!("Namespace {namespace} is not among the files and is assumed to be opted in"));
    }
    if manifest.kind == "Job" {
        notes.push("a Job's template is immutable: this Job converts when it is re-created".to_owned());
    }
    let convert = convert_of(&rewrite, rules);
    let whole = convert.is_some_and(|convert| keeps_whole(convert, &rewrite));
    let mut demanded = demand(&after, place.pointer);
    let target = convert.map(|convert| convert.target).filter(|target| !target.is_ours());
    if let Some(target) = target {
        notes.push(format!("{target}'s scheduler and plugin serve it"));
    }
    if target.is_some() && !rewrite.changes.is_empty() {
        // Our own resources are not in it.
        let each = rewrite.changes.iter().map(|one| (Cores(one.cores), Blocks(one.blocks)));
        let sum = each.fold((Cores::ZERO, Blocks::ZERO), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        demanded = Some(Demand { cores: sum.0, blocks: sum.1, legacy: 0 });
    }
    Outcome::Converted(Box::new(Converted {
        demand: (demand(&manifest.value, place.pointer), demanded),
        patch: serde_json::to_value(&patch).unwrap_or(Value::Null),
        after,
        policy: rewrite.policy.unwrap_or_default(),
        guard: matches!(rewrite.outcome, webhook::Outcome::Guarded),
        whole,
        audit,
        wave,
        warnings: rewrite
            .warnings
            .iter()
            .map(|text| text.trim_start_matches("gpu-migrate: ").to_owned())
            .collect(),
        notes,
    }))
}

/// How the policy that decided converts.
fn convert_of<'r>(rewrite: &Rewrite, rules: &'r Rules) -> Option<&'r Convert> {
    let (name, _) = rewrite.policy.as_deref()?.rsplit_once('@')?;
    let policy = rules.migrations.iter().find(|one| one.metadata.name.as_deref() == Some(name))?;
    Some(&policy.spec.convert)
}

/// Whether a container of several cards keeps whole ones where the policy's ratio is a share.
fn keeps_whole(convert: &Convert, rewrite: &Rewrite) -> bool {
    convert.cores_per_card < Cores::CARD
        && rewrite.changes.iter().any(|one| one.cards > 1 && one.cores == one.cards * Cores::CARD.0)
}

/// A patch of a pod template as a patch of the object it stands in.
fn on_object(patch: Patch, place: Place) -> Patch {
    let at = |path: &str| {
        // Both halves are pointers already, so their concatenation is one.
        PointerBuf::parse(format!("{}{path}", place.pointer)).unwrap_or_default()
    };
    let metadata =
        place.bare.then(|| PatchOperation::Add(AddOperation { path: at("/metadata"), value: json!({}) }));
    let operations = patch.0.into_iter().map(|mut operation| {
        match &mut operation {
            PatchOperation::Add(op) => op.path = at(op.path.as_str()),
            PatchOperation::Remove(op) => op.path = at(op.path.as_str()),
            PatchOperation::Replace(op) => op.path = at(op.path.as_str()),
            PatchOperation::Test(op) => op.path = at(op.path.as_str()),
            PatchOperation::Move(op) => (op.from, op.path) = (at(op.from.as_str()), at(op.path.as_str())),
            PatchOperation::Copy(op) => (op.from, op.path) = (at(op.from.as_str()), at(op.path.as_str())),
        }
        operation
    });
    Patch(metadata.into_iter().chain(operations).collect())
}

/// What one pod of the object asks for, as the scheduler counts it.
pub(super) fn demand(object: &Value, pointer: &str) -> Option<Demand> {
    let spec = object.pointer(&format!("{pointer}/spec"))?;
    let spec = serde_json::from_value::<PodSpec>(spec.clone()).ok()?;
    Some(PodAsk::of_spec(&spec, &Dialect::default()).ok()?.effective())
}

/// Makes of a manifest what the API server makes of it before the webhook sees it: quantities are strings
/// (`nvidia.com/gpu: 2` is allowed in a manifest). Returns whether the pod has no `metadata`, which it always has
/// by then.
pub(super) fn normalize(object: &mut Value, pointer: &str) -> bool {
    let Some(Value::Object(template)) = object.pointer_mut(pointer) else { return false };
    for list in ["containers", "initContainers"] {
        let Some(Value::Array(containers)) = template.get_mut("spec").and_then(|spec| spec.get_mut(list))
        else {
            continue;
        };
        for container in containers {
            for part in ["/resources/limits", "/resources/requests"] {
                let Some(Value::Object(amounts)) = container.pointer_mut(part) else { continue };
                for amount in amounts.values_mut().filter(|amount| amount.is_number()) {
                    *amount = Value::String(amount.to_string());
                }
            }
        }
    }
    template.get("metadata").is_none_or(Value::is_null)
}
