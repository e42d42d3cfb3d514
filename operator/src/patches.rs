//! Bodies of the patches that the operator writes. Pure.

use crate::kinds;
use crate::project::Foreign;
use crate::waves::{Action, Decision, Key, workloads};
use gpu_migrate_model::crd::{Counts, MigrationPhase};
use gpu_migrate_model::names;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// The merge patch of a workload that carries out an action. The label and the annotation change the pod template,
/// which is what makes its controller roll it out.
///
/// It carries the `resourceVersion` that the decision was made from, so the API server refuses it if the workload has changed
/// since. An operator that was suspended for longer than its Lease cannot restart what its successor has restarted.
#[must_use]
pub fn action(action: &Action, version: Option<&str>, foreign: Option<&Foreign>, now: Timestamp) -> Value {
    let (key, conversion) = match action {
        Action::Convert(key, conversion) => (key, Some(conversion.as_str())),
        Action::RollBack(key, former) => (key, former.as_deref()),
        Action::DeletePod(key, _) => (key, None),
    };
    let metadata = json!({
        "labels": {names::CONVERT: conversion.map(|_| "true")},
        "annotations": {names::CONVERSION: conversion, "kubectl.kubernetes.io/restartedAt": now.to_string()},
    });
    let template = json!({"metadata": metadata});
    let mut patch = match key.kind.as_str() {
        _ if foreign.is_some() => foreign.map_or(Value::Null, |one| kinds::patch(&one.templates, &metadata)),
        "CronJob" => json!({"spec": {"jobTemplate": {"spec": {"template": template}}}}),
        _ => json!({"spec": {"template": template}}),
    };
    if let Some(version) = version {
        patch["metadata"] = json!({"resourceVersion": version});
    }
    patch
}

/// The status to apply, with the operator's own conditions and, as in [`action`], the `resourceVersion`.
#[must_use]
pub fn status(
    (name, version): (&str, Option<&str>),
    decision: &Decision,
    counts: Counts,
    (missing, conflicts): (&BTreeSet<String>, &BTreeMap<Key, BTreeSet<String>>),
    before: &[Condition],
    now: Timestamp,
) -> Value {
    let mut status = decision.status.clone();
    status.counts = counts;
    // The webhook's and the command line's.
    (status.accepted, status.command) = (None, None);
    let ready = matches!(status.phase, MigrationPhase::Complete | MigrationPhase::Idle);
    let progressing = matches!(
        status.phase,
        MigrationPhase::Running | MigrationPhase::Gating | MigrationPhase::RollingBack
    );
    let mut message = decision.message.clone();
    if !missing.is_empty() {
        let names = missing.iter().cloned().collect::<Vec<_>>().join(", ");
        message += &format!("; spec.rollout.waves names workloads that do not exist: {names}");
    }
    let condition = |kind: &str, on: bool, message: &str| {
        let state = if on { "True" } else { "False" };
        let since = before.iter().find(|old| old.type_ == kind && old.status == state);
        Condition {
            type_: kind.to_owned(),
            status: state.to_owned(),
            reason: format!("{:?}", status.phase),
            message: message.to_owned(),
            observed_generation: status.observed_generation,
            last_transition_time: since.map_or(Time(now), |old| old.last_transition_time.clone()),
        }
    };
    let mut conditions =
        vec![condition("Ready", ready, &message), condition("Progressing", progressing, &message)];
    conditions.extend(decision.stalled.as_ref().map(|why| condition("Stalled", true, why)));
    conditions.extend(conflict(conflicts).map(|why| condition("Conflict", true, &why)));
    conditions.extend(failure(decision, before, now));
    status.conditions = conditions;
    json!({
        "apiVersion": format!("{}/{}", names::GROUP, names::VERSION),
        "kind": "GPUMigration",
        "metadata": {"name": name, "resourceVersion": version},
        "status": status,
    })
}

/// What other policies claim as well.
fn conflict(conflicts: &BTreeMap<Key, BTreeSet<String>>) -> Option<String> {
    let others = conflicts.values().flatten().map(String::as_str).collect::<BTreeSet<_>>();
    let (first, _) = conflicts.first_key_value()?;
    Some(format!(
        "{} selected with equal specificity by {} too and converted by neither; narrow one of the policies; first {first}",
        workloads(conflicts.len()),
        others.into_iter().collect::<Vec<_>>().join(", "),
    ))
}

/// The condition `WaveFailed`: it stays until the wave is retried, whatever `Ready` says meanwhile.
fn failure(decision: &Decision, before: &[Condition], now: Timestamp) -> Option<Condition> {
    const FAILED: &str = "WaveFailed";
    if let Some((FAILED, why)) = &decision.event {
        return Some(Condition {
            type_: FAILED.to_owned(),
            status: "True".to_owned(),
            reason: "Gate".to_owned(),
            message: why.clone(),
            observed_generation: decision.status.observed_generation,
            last_transition_time: Time(now),
        });
    }
    let lasts = matches!(
        decision.status.phase,
        MigrationPhase::RollingBack | MigrationPhase::Failed | MigrationPhase::Paused
    );
    before.iter().find(|old| old.type_ == FAILED && lasts && decision.status.wave.is_some()).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> Timestamp {
        Timestamp::from_second(1_800_000_000).unwrap()
    }

    #[test]
    fn the_cause_of_a_failure_stays_until_it_is_retried() {
        let decision = |phase, event: Option<(&'static str, String)>| Decision {
            message: "now".into(),
            status: gpu_migrate_model::crd::GPUMigrationStatus { phase, wave: Some(1), ..Default::default() },
            actions: Vec::new(),
            requeue_after: None,
            needs_query: false,
            stalled: None,
            event,
        };
        let write = |decision: &Decision, before: &[Condition]| {
            let body = status(
                ("m", Some("7")),
                decision,
                Counts::default(),
                (&BTreeSet::new(), &BTreeMap::new()),
                before,
                now(),
            );
            serde_json::from_value::<Vec<Condition>>(body["status"]["conditions"].clone()).unwrap()
        };
        let failed = decision(MigrationPhase::RollingBack, Some(("WaveFailed", "too many restarts".into())));
        let first = write(&failed, &[]);
        let later = write(&decision(MigrationPhase::Failed, None), &first);
        assert_eq!(later.last().unwrap().message, "too many restarts");
        assert_eq!(later[0].message, "now");
        let again = write(&decision(MigrationPhase::Running, None), &later);
        assert_eq!(again.len(), 2);
    }

    #[test]
    fn converting_adds_the_label_and_rolling_back_removes_it() {
        let key = Key { kind: "Deployment".into(), namespace: "n".into(), name: "d".into() };
        let convert = Action::Convert(key.clone(), "3".into());
        let convert = action(&convert, Some("7"), None, now());
        assert_eq!(convert["metadata"]["resourceVersion"], "7", "only if it has not changed since");
        assert_eq!(
            convert["spec"]["template"]["metadata"]["labels"],
            json!({"gpu-migrate.io/convert": "true"})
        );
        assert_eq!(convert["spec"]["template"]["metadata"]["annotations"]["gpu-migrate.io/conversion"], "3");
        let former = action(&Action::RollBack(key.clone(), Some("2".into())), None, None, now());
        assert_eq!(
            former["spec"]["template"]["metadata"]["labels"],
            json!({"gpu-migrate.io/convert": "true"})
        );
        assert_eq!(former["spec"]["template"]["metadata"]["annotations"]["gpu-migrate.io/conversion"], "2");
        let back = Action::RollBack(key, None);
        let back = action(&back, None, None, now());
        assert_eq!(back["spec"]["template"]["metadata"]["labels"], json!({"gpu-migrate.io/convert": null}));
        let cron = Key { kind: "CronJob".into(), namespace: "n".into(), name: "c".into() };
        let cron = Action::Convert(cron, "3".into());
        let cron = action(&cron, None, None, now());
        assert!(cron.pointer("/spec/jobTemplate/spec/template/metadata/labels").is_some());
    }
}
