//! Takes a rewrite back: from the annotation to the pod as it was written. Pure.

use gpu_migrate_model::names;
use serde_json::{Map, Value};

use crate::original::{ContainerOriginal, Former, ListEdit, MapEdit, Original};

/// Why a pod cannot be restored.
#[derive(Debug, thiserror::Error)]
#[error("annotation {}: {reason}: expected what gpu-migrate-webhook wrote", names::ORIGINAL)]
pub struct RestoreError {
    pub reason: String,
}

/// Restores a Pod or pod template in place. False when it was never rewritten.
///
/// # Errors
/// [`RestoreError`] when the annotation does not parse; the pod is unchanged then.
pub fn restore(pod: &mut Value) -> Result<bool, RestoreError> {
    let recorded =
        pod.get("metadata").and_then(|m| m.get("annotations")).and_then(|a| a.get(names::ORIGINAL));
    let Some(recorded) = recorded.and_then(Value::as_str).map(str::to_owned) else { return Ok(false) };
    let original: Original<'_> =
        serde_json::from_str(&recorded).map_err(|e| RestoreError { reason: e.to_string() })?;
    if let Some(spec) = pod.get_mut("spec").and_then(Value::as_object_mut) {
        restore_spec(spec, &original);
    }
    if let Some(metadata) = pod.get_mut("metadata").and_then(Value::as_object_mut) {
        if let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut) {
            let ours = [names::ORIGINAL, names::POLICY, names::REVIEWED, names::TRACEPARENT];
            annotations.retain(|key, _| !ours.contains(&key.as_str()));
        }
        restore_map(metadata, "annotations", &original.annotations);
        restore_map(metadata, "labels", &original.labels);
    }
    Ok(true)
}

fn restore_spec(spec: &mut Map<String, Value>, original: &Original<'_>) {
    put_back(spec, &original.spec);
    restore_map(spec, "nodeSelector", &original.node_selector);
    restore_list(spec, "tolerations", &original.tolerations);
    restore_list(spec, "schedulingGates", &original.scheduling_gates);
    for list in ["initContainers", "containers"] {
        for container in spec.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            let Some(container) = container.as_object_mut() else { continue };
            let name = container.get("name").and_then(Value::as_str).unwrap_or_default();
            if let Some(record) = original.containers.get(name) {
                restore_container(container, record);
            }
        }
    }
}

fn restore_container(container: &mut Map<String, Value>, record: &ContainerOriginal<'_>) {
    restore_list(container, "env", &record.env);
    let Some(resources) = container.get_mut("resources").and_then(Value::as_object_mut) else { return };
    if let Some(limits) = resources.get_mut("limits").and_then(Value::as_object_mut) {
        put_back(limits, &record.limits);
    }
    if let Some(requests) = resources.get_mut("requests").and_then(Value::as_object_mut) {
        // The API server defaults requests from limits: what went from the limits goes from here too.
        requests.retain(|key, _| record.limits.get(key) != Some(&None));
        put_back(requests, &record.requests);
    }
}

/// Former values go back, keys that were not there go away.
fn put_back(map: &mut Map<String, Value>, former: &Former<'_>) {
    for (key, value) in former.iter() {
        match value {
            None => map.remove(key),
            Some(value) => map.insert(key.to_owned(), value.into()),
        };
    }
}

fn restore_map(parent: &mut Map<String, Value>, field: &str, edit: &MapEdit<'_>) {
    if edit.keys.iter().any(|(_, value)| value.is_some()) && !parent.get(field).is_some_and(Value::is_object)
    {
        parent.insert(field.to_owned(), Value::Object(Map::new()));
    }
    let Some(map) = parent.get_mut(field).and_then(Value::as_object_mut) else { return };
    put_back(map, &edit.keys);
    if edit.created && map.is_empty() {
        parent.remove(field);
    }
}

fn restore_list(parent: &mut Map<String, Value>, field: &str, edit: &ListEdit<'_>) {
    if !edit.removed.is_empty() && !parent.get(field).is_some_and(Value::is_array) {
        parent.insert(field.to_owned(), Value::Array(Vec::new()));
    }
    let Some(list) = parent.get_mut(field).and_then(Value::as_array_mut) else { return };
    for added in &edit.added {
        if let Some(index) = list.iter().rposition(|entry| entry == added.as_ref()) {
            list.remove(index);
        }
    }
    for (index, entry) in &edit.removed {
        list.insert((*index).min(list.len()), entry.clone());
    }
    if edit.created && list.is_empty() {
        parent.remove(field);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_pod_that_was_never_rewritten_is_left_alone() {
        let mut pod = json!({"metadata": {"annotations": {"a": "b"}}, "spec": {}});
        let before = pod.clone();
        assert!(!restore(&mut pod).unwrap());
        assert_eq!(pod, before);
    }

    #[test]
    fn a_broken_record_changes_nothing_and_says_so() {
        let mut pod =
            json!({"metadata": {"annotations": {"gpu-migrate.io/original": "{\"policy\":1}"}}, "spec": {}});
        let before = pod.clone();
        let error = restore(&mut pod).unwrap_err().to_string();
        assert!(error.contains("gpu-migrate.io/original") && error.contains("expected a string"), "{error}");
        assert_eq!(pod, before);
    }

    #[test]
    fn an_injected_sidecar_does_not_confuse_it() {
        let record = json!({"policy": "p@1", "containers": {"main": {
            "limits": {"nvidia.com/gpu": "1", "tencent.com/vcuda-core": null, "tencent.com/vcuda-memory": null},
        }}});
        let shared = json!({"limits": {"tencent.com/vcuda-core": "100", "tencent.com/vcuda-memory": "42"},
            "requests": {"tencent.com/vcuda-core": "100", "tencent.com/vcuda-memory": "42", "cpu": "1"}});
        let mut pod = json!({
            "metadata": {"annotations": {"gpu-migrate.io/original": record.to_string()}},
            "spec": {"containers": [{"name": "istio"}, {"name": "main", "resources": shared}]},
        });
        assert!(restore(&mut pod).unwrap());
        assert_eq!(pod["spec"]["containers"][1]["resources"]["limits"], json!({"nvidia.com/gpu": "1"}));
        assert_eq!(pod["spec"]["containers"][1]["resources"]["requests"], json!({"cpu": "1"}));
        assert_eq!(pod["spec"]["containers"][0], json!({"name": "istio"}));
    }
}
