//! What is written to the cluster, as bodies. Pure.

use crate::waves::{Action, Decision, Key};
use gpu_migrate_model::crd::{Counts, MigrationPhase};
use gpu_migrate_model::names;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// The merge patch of a workload that carries out an action. The label and the annotation change the pod template,
/// which is what makes its controller roll it out.
#[must_use]
pub fn action(action: &Action, now: Timestamp) -> (&Key, Value) {
    let (key, label) = match action {
        Action::Send(key) => (key, json!("true")),
        Action::TakeBack(key) => (key, Value::Null),
    };
    let template = json!({"metadata": {
        "labels": {names::CONVERT: label},
        "annotations": {"kubectl.kubernetes.io/restartedAt": now.to_string()},
    }});
    let patch = match key.kind.as_str() {
        "CronJob" => json!({"spec": {"jobTemplate": {"spec": {"template": template}}}}),
        _ => json!({"spec": {"template": template}}),
    };
    (key, patch)
}

/// The status to apply, with the conditions that are the operator's. Others' conditions are theirs.
#[must_use]
pub fn status(
    name: &str,
    decision: &Decision,
    counts: Counts,
    missing: &BTreeSet<String>,
    before: &[Condition],
    now: Timestamp,
) -> Value {
    let mut status = decision.status.clone();
    status.counts = counts;
    let ready = matches!(status.phase, MigrationPhase::Complete | MigrationPhase::Idle);
    let progressing = matches!(
        status.phase,
        MigrationPhase::Running | MigrationPhase::Gating | MigrationPhase::RollingBack
    );
    let mut message = decision.why.clone();
    if !missing.is_empty() {
        let names = missing.iter().cloned().collect::<Vec<_>>().join(", ");
        message += &format!("; named in a wave and not there: {names}");
    }
    let condition = |kind: &str, on: bool| {
        let state = if on { "True" } else { "False" };
        let since = before.iter().find(|old| old.type_ == kind && old.status == state);
        Condition {
            type_: kind.to_owned(),
            status: state.to_owned(),
            reason: format!("{:?}", status.phase),
            message: message.clone(),
            observed_generation: status.observed_generation,
            last_transition_time: since.map_or(Time(now), |old| old.last_transition_time.clone()),
        }
    };
    status.conditions = vec![condition("Ready", ready), condition("Progressing", progressing)];
    json!({
        "apiVersion": format!("{}/{}", names::GROUP, names::VERSION),
        "kind": "GPUMigration",
        "metadata": {"name": name},
        "status": status,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> Timestamp {
        Timestamp::from_second(1_800_000_000).unwrap()
    }

    #[test]
    fn sending_sets_the_label_and_taking_back_removes_it() {
        let key = Key { kind: "Deployment".into(), namespace: "n".into(), name: "d".into() };
        let send = Action::Send(key.clone());
        let (_, send) = action(&send, now());
        assert_eq!(send["spec"]["template"]["metadata"]["labels"], json!({"gpu-migrate.io/convert": "true"}));
        let back = Action::TakeBack(key);
        let (_, back) = action(&back, now());
        assert_eq!(back["spec"]["template"]["metadata"]["labels"], json!({"gpu-migrate.io/convert": null}));
        let cron = Action::Send(Key { kind: "CronJob".into(), namespace: "n".into(), name: "c".into() });
        let (_, cron) = action(&cron, now());
        assert!(cron.pointer("/spec/jobTemplate/spec/template/metadata/labels").is_some());
    }
}
