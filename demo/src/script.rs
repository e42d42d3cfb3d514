//! The story as data: nodes with their cards, and steps. `story.yaml` is the one that runs by default.

use std::path::Path;

use anyhow::Context as _;
use gpu_migrate_model::crd::MigrationPhase;
use serde::Deserialize;
use serde_json::Value;

pub(super) const DEFAULT: &str = include_str!("story.yaml");

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Script {
    pub nodes: Vec<NodeScript>,
    pub steps: Vec<Step>,
}

/// A node and its cards, all alike.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeScript {
    pub name: String,
    pub cards: usize,
    /// Their model, as NVIDIA's feature discovery labels it.
    pub model: String,
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Step {
    Say(String),
    /// Wait, at the pace of a reader; not with `--fast`.
    Pause(f64),
    Apply(Value),
    /// Take this object away: its `apiVersion`, `kind` and `metadata`.
    Delete(Value),
    /// Wait until so many pods of a namespace are ready.
    Ready {
        namespace: String,
        pods: usize,
    },
    /// Wait until so many ready pods of a namespace are converted ones.
    Converted {
        namespace: String,
        pods: usize,
    },
    /// Wait until a migration is in this phase.
    Phase {
        migration: String,
        is: MigrationPhase,
    },
    /// Note how many cards are held now: "before", for the closing table.
    Before,
    /// The kubelet of a node restarts: all sockets of plugins are gone.
    RestartKubelet {
        node: String,
    },
    /// The node agent is killed and started again.
    CrashAgent {
        node: String,
    },
    /// The node agent is killed, and finds an old copy of the kubelet checkpoint when it is back.
    StaleCheckpoint {
        node: String,
    },
    /// Keep a copy of the kubelet checkpoint, for later.
    CopyCheckpoint {
        node: String,
    },
}

impl Script {
    /// Reads the script, or the default one.
    ///
    /// # Errors
    /// Naming the file and what is wrong with it.
    pub fn load(path: Option<&Path>) -> anyhow::Result<Self> {
        let Some(path) = path else { return Self::parse(DEFAULT).context("the built-in story") };
        let text = std::fs::read_to_string(path).with_context(|| format!("--script {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("--script {}", path.display()))
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        let script: Self = serde_saphyr::from_str(text)?;
        anyhow::ensure!(!script.nodes.is_empty(), "nodes: at least one is needed");
        let known = |name: &String| script.nodes.iter().any(|node| node.name == *name);
        for step in &script.steps {
            if let Step::RestartKubelet { node }
            | Step::CrashAgent { node }
            | Step::StaleCheckpoint { node }
            | Step::CopyCheckpoint { node } = step
            {
                anyhow::ensure!(known(node), "steps: node {node:?} is not among nodes");
            }
        }
        Ok(script)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_story_is_readable() {
        let script = Script::parse(DEFAULT).unwrap();
        assert_eq!(script.nodes.len(), 3);
        type Is = fn(&Step) -> bool;
        let wants: [(&str, Is); 4] = [
            ("a kubelet restart", |s| matches!(s, Step::RestartKubelet { .. })),
            ("an agent crash", |s| matches!(s, Step::CrashAgent { .. })),
            ("a stale checkpoint", |s| matches!(s, Step::StaleCheckpoint { .. })),
            ("a failed wave", |s| matches!(s, Step::Phase { is: MigrationPhase::Failed, .. })),
        ];
        for (what, is) in wants {
            assert!(script.steps.iter().any(is), "the story has {what}");
        }
    }

    #[test]
    fn mistakes_in_a_script_are_named() {
        for (text, says) in [
            ("nodes: []\nsteps: []", "at least one"),
            (
                "nodes: [{name: a, cards: 1, model: x, memoryMiB: 1}]\nsteps: [{crashAgent: {node: b}}]",
                "\"b\"",
            ),
            ("nodes: [{name: a, cards: 1, model: x, memoryMiB: 1}]\nsteps: [{dance: 1}]", "dance"),
        ] {
            let error = Script::parse(text).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
