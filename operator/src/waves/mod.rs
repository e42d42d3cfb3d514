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
use gpu_migrate_model::text::{counted, some_of};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A workload by kind, namespace and name; `Deployment/namespace/name` in a policy.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
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

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Management {
    /// A change of its pod template, which its controller rolls out.
    #[default]
    Restart,
    /// Its controller does not replace pods by itself: `OnDelete`, a partition, paused. It loses its label when it is rolled back.
    Manual,
    /// Never written: another controller owns it, or it has no pod template that could be changed (Jobs, bare pods).
    Unmanaged,
}

/// A workload as observed in the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObservedWorkload {
    pub key: Key,
    pub management: Management,
    /// Why it is not restarted by the operator, and how it moves.
    pub note: Option<String>,
    /// Its pod template has the label `gpu-migrate.io/convert`.
    pub labelled: bool,
    /// The recorded conversion that its pod template names, by id.
    pub conversion: Option<String>,
    /// Whole cards that its template requests, all replicas together.
    pub cards: u32,
    /// Its controller has seen its spec, and all its pods are of the newest template and ready.
    pub rolled_out: bool,
    /// Most restarts of one container of its newest pods.
    pub restarts: u32,
    /// Newest pods with the label that were not converted, because the webhook was unavailable or refused.
    pub unconverted: u32,
    /// Its pods that a policy converted.
    pub shared_pods: u32,
    /// Which of its newest pods is not ready, and why.
    pub trouble: Option<String>,
    /// Pods that keep its controller from replacing any: not ready, of the template with the label, which the template of an
    /// ordered StatefulSet no longer has.
    pub blocking: Vec<BlockingPod>,
}

/// A pod that has to be deleted before its StatefulSet goes on (Kubernetes: "forced rollback").
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockingPod {
    pub name: String,
    pub uid: String,
}

impl ObservedWorkload {
    /// Labelled, rolled out, and all its newest pods are shared pods.
    #[must_use]
    pub fn is_converted(&self) -> bool {
        self.labelled && self.rolled_out && self.unconverted == 0
    }

    /// Why it is not ready, and what to do where that is known.
    fn why_unready(&self) -> Option<String> {
        if let Some(pod) = self.blocking.first() {
            let (namespace, name) = (&self.key.namespace, &pod.name);
            return Some(format!(
                "its controller waits for pod {name} of the former template: kubectl delete pod -n {namespace} {name}"
            ));
        }
        if self.unconverted > 0 {
            return Some(format!("pods not converted: {}; is the webhook running?", self.unconverted));
        }
        self.trouble.clone()
    }

    /// Its name, and why it is not ready.
    fn described(&self) -> String {
        match self.why_unready() {
            Some(why) => format!("{}: {why}", self.key),
            None => self.key.to_string(),
        }
    }
}

/// The first three, and how many more there are.
fn first_three(items: impl IntoIterator<Item = String>) -> String {
    some_of(3, items, "; ")
}

/// `1 workload`, `2 workloads`.
pub(crate) fn workloads(count: usize) -> String {
    counted(count, "workload")
}

/// A change of a workload; idempotent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Add the label to its pod template, and the recorded conversion that its pods get.
    Convert(Key, String),
    /// Back to the conversion that it had before; `None`: remove the label from its pod template.
    RollBack(Key, Option<String>),
    /// Delete a pod of an ordered StatefulSet that was rolled back and waits for it.
    DeletePod(Key, BlockingPod),
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
    /// What a person must do before the rollout goes on.
    pub stalled: Option<String>,
    /// The Event to publish: reason and message.
    pub event: Option<(&'static str, String)>,
}
