//! Removes the agent's files from a node that is no longer to have an agent.
//!
//! The signal that stops an agent does not distinguish an update from a removal. The node's labels do: the DaemonSet selects nodes by
//! them, so no other agent will read the files of one that stops when they no longer ask for an agent. Where that is not certain,
//! everything stays.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;
use std::time::SystemTime;

use gpu_migrate_model::names::{PLUGIN, RUN_AGENT};
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client, ResourceExt};

use crate::plugins::cdi::CdiSpecs;

/// The kubelet gives the agent 30 s to stop.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The node's labels, as they were when this agent started.
#[derive(Debug)]
pub struct NodeLabels {
    api: Api<Node>,
    node: String,
    at_start: bool,
}

impl NodeLabels {
    /// Reads them. If they ask for no agent, or the API server does not answer in time, nothing will be removed.
    pub async fn read(client: Client, node: String) -> Self {
        let api = Api::all(client);
        let at_start = asks_for_agent(&api, &node).await.unwrap_or(false);
        Self { api, node, at_start }
    }

    /// Whether the labels asked for an agent and do not any more.
    pub async fn agent_removed(&self) -> bool {
        self.at_start && asks_for_agent(&self.api, &self.node).await == Some(false)
    }
}

/// Whether the node asks for an agent; `None` if that is not known.
async fn asks_for_agent(api: &Api<Node>, node: &str) -> Option<bool> {
    let node = tokio::time::timeout(TIMEOUT, api.get_metadata(node)).await.ok()?.ok()?;
    Some(wanted(node.labels()))
}

/// By the operator's label, or by the one that a user's own DaemonSet may select.
fn wanted(labels: &BTreeMap<String, String>) -> bool {
    let mode = labels.get(PLUGIN).map(String::as_str);
    labels.contains_key(RUN_AGENT) || matches!(mode, Some("Bridged" | "Shared"))
}

/// Removes the state folder and our CDI specifications. Running containers need neither: they have their cards.
///
/// # Errors
/// The system's, about the folder.
pub fn remove_files(state: &Path, cdi: Option<&CdiSpecs>) -> io::Result<()> {
    if let Some(cdi) = cdi {
        cdi.remove_stale(&Default::default(), SystemTime::now());
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
        assert!(node(&[(PLUGIN, "Legacy"), (RUN_AGENT, "none")]), "it is being moved: shared pods still run");
        assert!(!node(&[(PLUGIN, "Legacy")]) && !node(&[]));
    }

    #[test]
    fn removing_files_twice_is_no_error() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        remove_files(&state, None).unwrap();
        std::fs::create_dir(&state).unwrap();
        std::fs::write(state.join("nvidia_checkpoint"), "{}").unwrap();
        remove_files(&state, None).unwrap();
        assert!(!state.exists());
    }
}
