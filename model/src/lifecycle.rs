//! Where a pod is in its life, in the words of Kubernetes' own controllers (`IsPodTerminal`, `IsPodActive`).

use k8s_openapi::api::core::v1::Pod;

/// Whether a pod of this `status.phase` has ended: its containers hold nothing any more, whatever else its object says.
#[must_use]
pub fn is_terminal_phase(phase: &str) -> bool {
    matches!(phase, "Succeeded" | "Failed")
}

/// Whether the pod has ended. A pod that is being deleted has not: it holds its cards until its containers are gone.
#[must_use]
pub fn is_terminal(pod: &Pod) -> bool {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).is_some_and(is_terminal_phase)
}

/// Whether the pod runs or is going to: it has not ended and its deletion was not asked for. For counting replicas, not
/// for counting cards.
#[must_use]
pub fn is_active(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_none() && !is_terminal(pod)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_pod_that_is_being_deleted_is_neither_terminal_nor_active() {
        let table = [
            (None, false, (false, true)),
            (Some("Pending"), false, (false, true)),
            (Some("Running"), false, (false, true)),
            (Some("Running"), true, (false, false)),
            (Some("Succeeded"), false, (true, false)),
            (Some("Failed"), true, (true, false)),
        ];
        for (phase, deleting, expected) in table {
            let deleted_at = deleting.then_some("2026-01-01T00:00:00Z");
            let pod = json!({"metadata": {"deletionTimestamp": deleted_at}, "status": {"phase": phase}});
            let pod: Pod = serde_json::from_value(pod).unwrap();
            assert_eq!((is_terminal(&pod), is_active(&pod)), expected, "{phase:?} {deleting}");
        }
    }
}
