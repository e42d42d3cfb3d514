//! Leaving a node: what the agent kept there is removed once the node is no longer to have it.
//!
//! An agent that is stopped cannot tell an update from a farewell by the signal. The node's labels can: the DaemonSet follows
//! them, so an agent that ends when they no longer ask for one was taken off this node, and no successor will read what it
//! leaves. On any doubt everything stays.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use gpu_migrate_model::names::{PLUGIN, RUN_AGENT};
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client, ResourceExt};

use crate::plugins::cdi::CdiSpecs;

/// The kubelet gives the agent 30 s to end.
const PATIENCE: Duration = Duration::from_secs(5);

/// Whether the node's labels asked for an agent when this one started.
#[derive(Debug)]
pub struct Label {
    api: Api<Node>,
    node: String,
    at_start: bool,
}

impl Label {
    /// Reads them. An agent that was started without any, or an API server that does not answer in time, never is a reason to
    /// remove anything.
    pub async fn read(client: Client, node: String) -> Self {
        let api = Api::all(client);
        let at_start = asks(&api, &node).await.unwrap_or(false);
        Self { api, node, at_start }
    }

    /// Whether the agent was taken off its node.
    pub async fn is_gone(&self) -> bool {
        self.at_start && asks(&self.api, &self.node).await == Some(false)
    }
}

/// Whether the node asks for an agent; `None` if that is not known.
async fn asks(api: &Api<Node>, node: &str) -> Option<bool> {
    let node = tokio::time::timeout(PATIENCE, api.get_metadata(node)).await.ok()?.ok()?;
    Some(wanted(node.labels()))
}

/// By the operator's label, or by the one that a DaemonSet of one's own goes by.
fn wanted(labels: &BTreeMap<String, String>) -> bool {
    let mode = labels.get(PLUGIN).map(String::as_str);
    labels.contains_key(RUN_AGENT) || matches!(mode, Some("Bridged" | "Shared"))
}

/// Removes the state folder and our CDI specifications. Running containers need neither: they have their cards.
///
/// # Errors
/// What the system said of the folder.
pub fn clean(state: &Path, cdi: Option<&CdiSpecs>) -> io::Result<()> {
    if let Some(cdi) = cdi {
        cdi.tidy(&Default::default());
    }
    match std::fs::remove_dir_all(state) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_asks_for_an_agent_by_either_label() {
        let node = |pairs: &[(&str, &str)]| {
            wanted(&pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect())
        };
        assert!(node(&[(PLUGIN, "Bridged")]) && node(&[(PLUGIN, "Shared")]));
        assert!(node(&[(PLUGIN, "Legacy"), (RUN_AGENT, "none")]), "on its way: shares are still there");
        assert!(!node(&[(PLUGIN, "Legacy")]) && !node(&[]));
    }

    #[test]
    fn a_folder_that_is_not_there_is_clean() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        clean(&state, None).unwrap();
        std::fs::create_dir(&state).unwrap();
        std::fs::write(state.join("nvidia_checkpoint"), "{}").unwrap();
        clean(&state, None).unwrap();
        assert!(!state.exists());
    }
}
