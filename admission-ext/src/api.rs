//! What the extender asks of the cluster's API: little, and all of it behind one trait, so that the same engine runs
//! against an API server, in memory from a snapshot, and against a fake that loses replies.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;

use crate::state::pod::{PodFacts, PodGroups};

/// A binding to be made: the node and, in the same write, the annotations with the choice of cards (DESIGN decision 1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    pub namespace: Arc<str>,
    pub name: Arc<str>,
    /// Its UID: a pod of the same name that was re-created is refused by the API server.
    pub uid: Arc<str>,
    pub node: Arc<str>,
    /// Merged into the pod's annotations by the API server.
    pub annotations: BTreeMap<String, String>,
}

/// Why a binding was not made, or may not have been.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BindFailure {
    /// 409: bound already, being deleted, or of another UID.
    #[error("conflict: {0}")]
    Conflict(String),
    #[error("refused: {0}")]
    Refused(String),
    #[error("outcome unknown: {0}")]
    Unknown(String),
}

/// What a look-up of a pod found.
#[derive(Clone, Debug)]
pub enum Found {
    Pod(Box<PodFacts>),
    /// This pod, but it has finished.
    Finished,
    /// No pod of that name, or another one.
    Gone,
}

#[async_trait]
pub trait Api: Send + Sync + 'static {
    async fn bind(&self, binding: &Binding) -> Result<(), BindFailure>;

    /// Reads one pod, as it is now and not from a cache.
    ///
    /// # Errors
    /// A text, where the API cannot be asked.
    async fn look_up(&self, namespace: &str, name: &str, uid: &str) -> Result<Found, String>;

    /// Changes an annotation of a Node, which requeues the pods that wait for it in the scheduler (FACTS 4.6).
    ///
    /// # Errors
    /// A text, where it was not done.
    async fn requeue_pods_of(&self, node: &str) -> Result<(), String>;

    /// Takes the gang gate off a pod.
    ///
    /// # Errors
    /// A text, where it was not done.
    async fn lift_gate(&self, pod: &PodFacts) -> Result<(), String>;

    /// `spec.minMember` of the PodGroup of a gang; `None` where there is no such PodGroup.
    ///
    /// # Errors
    /// A text, where it cannot be read.
    async fn min_member(&self, namespace: &str, name: &str, group: PodGroups) -> Result<Option<u32>, String> {
        let _ = (namespace, name, group);
        Ok(None)
    }

    /// Records an Event on the pod. Best effort.
    async fn warn(&self, pod: &PodFacts, reason: &'static str, message: String);
}

/// The API of a snapshot: bindings are accepted once and kept in memory.
#[derive(Debug, Default)]
pub struct Memory {
    bound: parking_lot::Mutex<std::collections::HashMap<Arc<str>, Arc<str>>>,
}

#[async_trait]
impl Api for Memory {
    async fn bind(&self, binding: &Binding) -> Result<(), BindFailure> {
        let mut bound = self.bound.lock();
        if let Some(node) = bound.get(&binding.uid) {
            return Err(BindFailure::Conflict(format!(
                "pod {} is already assigned to node {node}",
                binding.name
            )));
        }
        bound.insert(Arc::clone(&binding.uid), Arc::clone(&binding.node));
        Ok(())
    }

    async fn look_up(&self, _: &str, _: &str, _: &str) -> Result<Found, String> {
        // All pods of a snapshot are in the index; one that is not there does not exist.
        Ok(Found::Gone)
    }

    async fn requeue_pods_of(&self, _: &str) -> Result<(), String> {
        Ok(())
    }

    async fn lift_gate(&self, _: &PodFacts) -> Result<(), String> {
        Ok(())
    }

    async fn warn(&self, pod: &PodFacts, reason: &'static str, message: String) {
        tracing::warn!(pod = %pod.shown(), reason, "{message}");
    }
}
