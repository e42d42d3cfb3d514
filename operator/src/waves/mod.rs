//! The state machine of a rollout: pure, with the clock handed in.
//!
//! Its state is the GPUMigration's status and the label `gpu-migrate.io/convert` on the pod templates. An operator that is
//! killed between any two writes continues the same wave.
//!
//! ```text
//!   Idle ──► Running ──► Gating ──► Running (next wave) … ──► Complete
//!               │           │
//!               └── gate ───┴──► RollingBack ──► Failed   (until the spec is edited)
//! ```

mod assign;
mod gate;
mod step;
#[cfg(test)]
mod tests;

pub use assign::assign;
pub use step::{Input, step};

use gpu_migrate_model::crd::GPUMigrationStatus;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A workload by kind, namespace and name; `Deployment/namespace/name` in a policy.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// `Deployment`, `StatefulSet`, …
    pub kind: String,
    pub namespace: String,
    pub name: String,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.kind, self.namespace, self.name)
    }
}

impl FromStr for Key {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split('/').collect::<Vec<_>>().as_slice() {
            [kind, namespace, name] if ![kind, namespace, name].iter().any(|part| part.is_empty()) => {
                Ok(Self { kind: (*kind).into(), namespace: (*namespace).into(), name: (*name).into() })
            }
            _ => Err(format!("{text:?}: expected Kind/namespace/name, such as Deployment/danlu/llm-serving")),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Management {
    /// A change of its pod template, which its controller rolls out.
    Restart,
    /// Not restarted by the operator: Jobs, bare pods, `OnDelete`, paused.
    Unmanaged,
}

/// A workload as observed in the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedWorkload {
    pub key: Key,
    pub management: Management,
    /// Its pod template has the label `gpu-migrate.io/convert`.
    pub labelled: bool,
    /// Its controller has seen its spec, and all its pods are of the newest template and ready.
    pub rolled_out: bool,
    /// Most restarts of one container of its newest pods.
    pub restarts: u32,
    /// Newest pods with the label that were not converted, because the webhook was unavailable or refused.
    pub unconverted: u32,
}

impl ObservedWorkload {
    /// Labelled, rolled out, and all its newest pods are shared pods.
    #[must_use]
    pub fn is_converted(&self) -> bool {
        self.labelled && self.rolled_out && self.unconverted == 0
    }
}

/// A change of a workload; idempotent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Add the label to its pod template.
    Convert(Key),
    RollBack(Key),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    pub message: String,
    /// The status to write, before the actions are taken.
    pub status: GPUMigrationStatus,
    pub actions: Vec<Action>,
    /// When to reconcile again at the latest.
    pub requeue_after: Option<Duration>,
    /// The gate's query must be answered before the next step.
    pub needs_query: bool,
    /// The Event to publish: reason and message.
    pub event: Option<(&'static str, String)>,
}
