//! Binding a pod to its node.

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::object::{self, items, meta, metadata, timestamp};
use super::request::Target;
use super::status::Refusal;
use super::store::Write;
use super::write::Done;
use super::{ApiServer, strategic};

/// Binds a pod: sets its node and merges the Binding's annotations in the same write (seen on 1.33; labels are not merged).
///
/// # Errors
/// 404; 409 for a pod that is bound, being deleted, or another than the one meant.
pub fn bind(server: &ApiServer, target: &Target, body: &Value) -> Result<Done, Refusal> {
    let node = body["target"]["name"].as_str().unwrap_or_default().to_owned();
    if node.is_empty() {
        return Err(Refusal::invalid("Binding", &target.name, "target.name", "Required value"));
    }
    let key = (target.namespace.clone(), target.name.clone());
    server.store.change(&target.kind.id(), &key, |live| {
        let Some(live) = live else { return Err(Refusal::not_found("pods", &target.name)) };
        let refuse = |why: String| Err(Refusal::conflict(format!("Operation cannot be fulfilled on pods/binding {:?}: {why}", target.name)));
        let wanted = meta(body, "uid");
        if !wanted.is_empty() && wanted != object::uid(live) {
            return refuse(format!("Precondition failed: UID in precondition: {wanted}, UID in object meta: {}", object::uid(live)));
        }
        if !meta(live, "deletionTimestamp").is_empty() {
            return refuse(format!("pod {} is being deleted, cannot be assigned to a host", target.name));
        }
        if let Some(bound) = live["spec"]["nodeName"].as_str().filter(|bound| !bound.is_empty()) {
            return refuse(format!("pod {} is already assigned to node {bound:?}", target.name));
        }
        if items(&live["spec"], "schedulingGates").next().is_some() {
            return refuse(format!("pod {} has non-empty .spec.schedulingGates", target.name));
        }
        let mut after = Value::clone(live);
        after["spec"]["nodeName"] = node.into();
        if let Some(annotations) = body["metadata"]["annotations"].as_object() {
            let own = object::map(metadata(&mut after).entry("annotations").or_insert(Value::Null));
            own.extend(annotations.iter().map(|(key, value)| (key.clone(), value.clone())));
        }
        let condition = json!({"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp(Timestamp::now())});
        strategic::apply(&mut after, &json!({"status": {"conditions": [condition]}}));
        Ok(Write::Put(after))
    })?;
    let answer =
        json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201});
    Ok(Done { object: Arc::new(answer), created: true, warnings: Vec::new() })
}
