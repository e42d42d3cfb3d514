//! Where a migration is and what happens next: a state machine without a clock, a cluster or a memory of its own.
//!
//! Everything it remembers is in the GPUMigration's status and on the workloads themselves: the label
//! `gpu-migrate.io/convert` on a pod template says that the workload has been sent over. So an operator that is
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
    /// Its namespace.
    pub namespace: String,
    /// Its name.
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

/// How a workload can be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Means {
    /// By a change of its pod template, which its controller rolls out.
    Restart,
    /// Not by us: a Job runs to its end, a bare pod belongs to its owner.
    Report,
}

/// A workload as it was seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Which one.
    pub key: Key,
    /// How it can be moved.
    pub means: Means,
    /// Its pod template carries the label that sends it over.
    pub sent: bool,
    /// Its controller has seen its spec, and all its pods are of the newest template and ready.
    pub settled: bool,
    /// Most restarts of one container of its newest pods.
    pub restarts: u32,
    /// Newest pods that were to be converted and were not, because the webhook was away or refused.
    pub unconverted: u32,
}

impl Seen {
    /// Whether it has arrived: sent over, rolled out, and its pods really are shared ones.
    #[must_use]
    pub fn arrived(&self) -> bool {
        self.sent && self.settled && self.unconverted == 0
    }
}

/// Something to do to a workload. Doing it twice does no harm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Put the label on its pod template.
    Send(Key),
    /// Take the label off again.
    TakeBack(Key),
}

/// What to do now.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// Why it stands where it stands, for the `Ready` condition.
    pub why: String,
    /// The status to write, before the actions are taken.
    pub status: GPUMigrationStatus,
    /// What to do.
    pub actions: Vec<Action>,
    /// When to look again, if nothing else happens before.
    pub again: Option<Duration>,
    /// Whether the gate's query has to be asked before the next step.
    pub ask: bool,
    /// What to tell the owner as an Event: reason and message. Only for what is new.
    pub event: Option<(&'static str, String)>,
}
