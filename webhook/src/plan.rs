//! The same decision for a manifest: a Pod, or the pod template of any workload. Used by `gpu-migrate plan`.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::decide::{Facts, Rewrite, decide};
use crate::policy::Policies;
use crate::view::PodView;

/// What is known about a manifest besides its text.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'s> {
    /// Namespace that it goes into.
    pub namespace: &'s str,
    /// The namespace's labels; unknown ones count as opted in, and the project must be on the pod.
    pub namespace_labels: Option<&'s BTreeMap<String, String>>,
    /// What a percentage is decided by: the workload's UID, or any stable name while it has none.
    pub rollout_key: &'s str,
}

/// Why a manifest is no pod.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A part is missing.
    #[error("{field}: expected an object")]
    Missing {
        /// `metadata` or `spec`.
        field: &'static str,
    },
    /// A field has the wrong form.
    #[error("the pod does not parse: {0}")]
    Form(serde_json::Error),
}

/// Decides about a Pod or a PodTemplateSpec. The patch's paths are relative to `template`.
///
/// # Errors
/// [`PlanError`] when it is neither.
pub fn rewrite_template(
    template: &Value,
    subject: &Subject<'_>,
    policies: &Policies,
) -> Result<Rewrite, PlanError> {
    for field in ["metadata", "spec"] {
        if !template.get(field).is_some_and(Value::is_object) {
            return Err(PlanError::Missing { field });
        }
    }
    let text = serde_json::to_string(template).map_err(PlanError::Form)?;
    let pod: PodView<'_> = serde_json::from_str(&text).map_err(PlanError::Form)?;
    let Subject { namespace, namespace_labels, rollout_key } = *subject;
    Ok(decide(&pod, &Facts { namespace, namespace_labels, rollout_key }, policies))
}
