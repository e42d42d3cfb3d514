//! Writes into the status of each GPUMigration whether the webhook can use it (condition `PolicyValid`), and the newest spec that it
//! could (`accepted`).

use gpu_migrate_model::crd::{AcceptedSpec, GPUMigration};
use gpu_migrate_model::names::{GROUP, VERSION};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams};
use kube::core::error_boundary::InvalidObject;
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

use crate::compile::PolicyError;

const TYPE: &str = "PolicyValid";
/// Field manager of everything that the webhook writes.
pub(crate) const MANAGER: &str = "gpu-migrate-webhook";
/// Of the accepted spec: it stays while conditions come and go.
const ACCEPTED_MANAGER: &str = "gpu-migrate-webhook-accepted";

/// Whether the webhook can use a policy, and what its status says now.
#[derive(Debug)]
pub(super) struct Verdict {
    name: String,
    generation: i64,
    fault: Option<(&'static str, String)>,
    current: Option<Condition>,
    /// What is to be written as accepted, unless it is.
    accepted: Option<AcceptedSpec>,
}

impl Verdict {
    pub(super) fn on(
        migration: &GPUMigration,
        fault: Option<&PolicyError>,
        identical_policies: &[&str],
    ) -> Self {
        let invalid = fault.map(|error| ("Invalid", format!("{error}; the last good form stays in force")));
        let conflict = (!identical_policies.is_empty()).then(|| {
            let text = format!(
                "selects the same pods as {}: they are not converted; narrow one of the policies",
                identical_policies.join(", ")
            );
            ("Conflict", text)
        });
        let conditions = migration.status.iter().flat_map(|status| &status.conditions);
        let generation = migration.metadata.generation.unwrap_or_default();
        let known = migration.status.as_ref().and_then(|status| status.accepted.as_ref());
        let spec = serde_json::to_string(&migration.spec).ok().filter(|_| fault.is_none());
        let accepted = spec.map(|spec| AcceptedSpec { generation, spec });
        Self {
            name: migration.name_any(),
            generation,
            accepted: accepted
                .filter(|accepted| known.is_none_or(|known| known.generation != accepted.generation)),
            fault: invalid.or(conflict),
            current: conditions.into_iter().find(|condition| condition.type_ == TYPE).cloned(),
        }
    }

    pub(super) fn unreadable(object: &InvalidObject) -> Self {
        Self {
            name: object.metadata.name.clone().unwrap_or_default(),
            generation: object.metadata.generation.unwrap_or_default(),
            fault: Some(("Unreadable", format!("{}; the last good form stays in force", object.error))),
            current: None,
            accepted: None,
        }
    }

    /// The condition to write; `None` where the status says so already.
    fn condition(&self, now: Timestamp) -> Option<Value> {
        let (status, reason, message) = match &self.fault {
            None => ("True", "Accepted", "the webhook uses this policy"),
            Some((reason, message)) => ("False", *reason, message.as_str()),
        };
        let same = |current: &Condition| {
            current.status == status
                && current.message == message
                && current.observed_generation == Some(self.generation)
        };
        if self.current.as_ref().is_some_and(same) {
            return None;
        }
        let kept = self.current.as_ref().filter(|current| current.status == status);
        let since = kept.map_or(now, |current| current.last_transition_time.0);
        Some(json!({
            "type": TYPE, "status": status, "reason": reason, "message": message,
            "observedGeneration": self.generation, "lastTransitionTime": format!("{since:.0}"),
        }))
    }
}

/// Writes conditions as reports come in, while this replica leads. A failed write is logged: status is never needed to rebuild state.
pub(super) async fn run(
    client: Client,
    mut reports: mpsc::Receiver<Vec<Verdict>>,
    mut leading: watch::Receiver<bool>,
) {
    let kind = GroupVersionKind::gvk(GROUP, VERSION, "GPUMigration");
    let resource = ApiResource::from_gvk_with_plural(&kind, "gpumigrations");
    let api: Api<DynamicObject> = Api::all_with(client, &resource);
    let mut last = Vec::new();
    loop {
        tokio::select! {
            report = reports.recv() => match report {
                Some(report) => last = report,
                None => return,
            },
            changed = leading.changed() => if changed.is_err() { return },
        }
        let writes = *leading.borrow();
        for verdict in last.iter().filter(|_| writes) {
            let condition = verdict.condition(Timestamp::now());
            let condition = condition.map(|condition| (MANAGER, json!({ "conditions": [condition] })));
            let accepted = verdict.accepted.as_ref();
            let accepted = accepted.map(|accepted| (ACCEPTED_MANAGER, json!({ "accepted": accepted })));
            for (manager, status) in condition.into_iter().chain(accepted) {
                let patch = json!({
                    "apiVersion": resource.api_version, "kind": resource.kind,
                    "metadata": { "name": verdict.name }, "status": status,
                });
                let parameters = PatchParams::apply(manager).force();
                if let Err(error) = api.patch_status(&verdict.name, &parameters, &Patch::Apply(patch)).await {
                    tracing::warn!(policy = verdict.name, %error, "status not written");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(fault: Option<&str>, current: Option<Value>) -> Verdict {
        let current = current.map(|value| serde_json::from_value(value).unwrap());
        let fault = fault.map(|text| ("Invalid", text.to_owned()));
        Verdict { name: "p".into(), generation: 2, fault, current, accepted: None }
    }

    #[test]
    fn a_condition_is_written_once_and_keeps_its_transition_time() {
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        let first = verdict(None, None).condition(now).unwrap();
        assert_eq!((&first["status"], &first["observedGeneration"]), (&json!("True"), &json!(2)));
        assert_eq!(verdict(None, Some(first.clone())).condition(now), None);
        let later = Timestamp::from_second(1_800_000_500).unwrap();
        let mut old = first.clone();
        old["observedGeneration"] = json!(1);
        let renewed = verdict(None, Some(old)).condition(later).unwrap();
        assert_eq!(renewed["lastTransitionTime"], first["lastTransitionTime"]);
        let bad = verdict(Some("spec.project: \"\""), Some(first.clone())).condition(later).unwrap();
        assert_eq!((&bad["status"], &bad["reason"]), (&json!("False"), &json!("Invalid")));
        assert!(bad["message"].as_str().unwrap().contains("spec.project"));
        assert_ne!(bad["lastTransitionTime"], first["lastTransitionTime"]);
    }
}
