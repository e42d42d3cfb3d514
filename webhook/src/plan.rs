//! The same decision for a manifest: a Pod, or the pod template of any workload. Used by `gpu-migrate plan`.

use std::collections::BTreeMap;

use json_patch::Patch;
use serde_json::Value;

use crate::decide::{Change, Decision, Outcome, RequestContext, decide};
use crate::obstacles::ClusterFacts;
use crate::policy::Policies;
use crate::rollout::TopOwner;
use crate::view::PodView;

/// What is known about a manifest besides its text.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'s> {
    pub namespace: &'s str,
    /// The namespace's labels; unknown ones count as opted in, and the project must be on the pod.
    pub namespace_labels: Option<&'s BTreeMap<String, String>>,
    /// Kind and name of the controller whose template it is; `None` for a pod, which names its own owner.
    pub controller: Option<(&'s str, &'s str)>,
    pub cluster: &'s ClusterFacts,
}

#[derive(Clone, Debug)]
pub struct Rewrite {
    pub outcome: Outcome,
    /// What changes; empty when nothing does.
    pub patch: Patch,
    /// The patch that Enforce mode would apply; only filled in Audit mode.
    pub audit_patch: Patch,
    /// `name@generation` of the policy that decided.
    pub policy: Option<String>,
    /// For the user, at most 120 characters each.
    pub warnings: Vec<String>,
    /// The reason to refuse the pod.
    pub deny: Option<String>,
    /// What happens to each container that asks for cards.
    pub changes: Vec<Change>,
}

/// Why a manifest is no pod.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
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
    let Subject { namespace, namespace_labels, controller, cluster } = *subject;
    let owner = controller.map(|(kind, name)| TopOwner::above(kind, name, |key| pod.metadata.label(key)));
    let request = RequestContext { namespace, namespace_labels, owner, cluster };
    let Decision { outcome, patch, audit_patch, policy, warnings, audit: _, deny, changes } =
        decide(&pod, &request, policies);
    let (patch, audit_patch) =
        (patch.parse().map_err(PlanError::Form)?, audit_patch.parse().map_err(PlanError::Form)?);
    Ok(Rewrite { outcome, patch, audit_patch, policy: policy.map(str::to_owned), warnings, deny, changes })
}
