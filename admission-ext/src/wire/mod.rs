//! The scheduler's JSON, borrowed: only the fields that decide are looked at, and they stay in the request body.
//!
//! Keys are Go field names, because `k8s.io/kube-scheduler/extender/v1` has no JSON tags on the outer types; the
//! Kubernetes objects inside have the usual ones. A request with 5,000 node names is one `Vec<&str>` and no copies;
//! of whole nodes (`nodeCacheCapable: false`) the text is kept raw, so that it can be handed back byte for byte.

pub mod answer;
pub mod node;

use std::collections::BTreeMap;

use gpu_migrate_model::view::PodView;
use serde::Deserialize;
use serde_json::value::RawValue;

use self::node::NodeItem;

/// Why a request body could not be used. The scheduler gets this text as `Error`.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The body is not the JSON that the verb takes.
    #[error(
        "{verb}: the body is not what kube-scheduler sends: {source}; expected the fields of extender/v1 {kind}"
    )]
    Body {
        verb: &'static str,
        /// The Go type that belongs there.
        kind: &'static str,
        source: serde_json::Error,
    },
    /// Neither `Nodes` nor `NodeNames` was set.
    #[error("{verb}: Nodes and NodeNames are both null; expected one of them, by nodeCacheCapable")]
    NoNodes { verb: &'static str },
}

/// `ExtenderArgs`: the body of filter and prioritize.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ExtenderArgs<'a> {
    #[serde(borrow)]
    pub pod: PodView<'a>,
    /// Whole nodes; set where `nodeCacheCapable` is false.
    #[serde(borrow, default)]
    pub nodes: Option<NodeList<'a>>,
    /// Names; set where `nodeCacheCapable` is true.
    #[serde(borrow, default)]
    pub node_names: Option<Vec<&'a str>>,
}

/// A `NodeList` whose items are kept as text.
#[derive(Debug, Deserialize)]
pub struct NodeList<'a> {
    /// The nodes. Go writes `null` for an empty list.
    #[serde(borrow, default)]
    pub items: Option<Vec<&'a RawValue>>,
}

/// The nodes of a request in either form.
#[derive(Debug)]
pub enum Nodes<'a> {
    /// `nodeCacheCapable: true`
    Names(Vec<&'a str>),
    /// `nodeCacheCapable: false`
    Objects(Vec<NodeItem<'a>>),
}

impl<'a> Nodes<'a> {
    /// How many nodes were asked about.
    pub fn len(&self) -> usize {
        match self {
            Nodes::Names(names) => names.len(),
            Nodes::Objects(items) => items.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The name of the node at `at`, which must be below [`Nodes::len`].
    pub fn name(&self, at: usize) -> &str {
        match self {
            Nodes::Names(names) => names[at],
            Nodes::Objects(items) => &items[at].name,
        }
    }

    /// The text of the node at `at`, where whole nodes were sent.
    pub fn raw(&self, at: usize) -> Option<&'a RawValue> {
        match self {
            Nodes::Names(_) => None,
            Nodes::Objects(items) => Some(items[at].raw),
        }
    }
}

/// Body of filter and prioritize, with the two node forms folded into one.
#[derive(Debug)]
pub struct Request<'a> {
    pub pod: PodView<'a>,
    pub nodes: Nodes<'a>,
}

impl<'a> Request<'a> {
    /// Reads the body of `verb`.
    ///
    /// # Errors
    /// Where the body is no `ExtenderArgs`, or names no nodes in either form.
    pub fn parse(verb: &'static str, body: &'a [u8]) -> Result<Self, WireError> {
        let bad = |source| WireError::Body { verb, kind: "ExtenderArgs", source };
        let args: ExtenderArgs<'a> = serde_json::from_slice(body).map_err(bad)?;
        let nodes = match (args.node_names, args.nodes) {
            (Some(names), _) => Nodes::Names(names),
            (None, Some(list)) => {
                let items = list.items.unwrap_or_default();
                Nodes::Objects(items.into_iter().map(NodeItem::new).collect::<Result<_, _>>().map_err(bad)?)
            }
            (None, None) => return Err(WireError::NoNodes { verb }),
        };
        Ok(Self { pod: args.pod, nodes })
    }
}

/// `ExtenderBindingArgs`: the pod is named, not sent.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct BindArgs<'a> {
    pub pod_name: &'a str,
    pub pod_namespace: &'a str,
    /// Its UID: a pod of the same name that was re-created has another.
    #[serde(rename = "PodUID")]
    pub pod_uid: &'a str,
    pub node: &'a str,
}

impl<'a> BindArgs<'a> {
    /// Reads the body of bind.
    ///
    /// # Errors
    /// Where the body is no `ExtenderBindingArgs`.
    pub fn parse(body: &'a [u8]) -> Result<Self, WireError> {
        serde_json::from_slice(body).map_err(|source| WireError::Body {
            verb: "bind",
            kind: "ExtenderBindingArgs",
            source,
        })
    }
}

/// `ExtenderPreemptionArgs`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct PreemptArgs<'a> {
    /// The pod that wants to preempt.
    #[serde(borrow)]
    pub pod: PodView<'a>,
    /// Whole victims, where `nodeCacheCapable` is false.
    #[serde(borrow, default)]
    node_name_to_victims: Option<BTreeMap<&'a str, Victims<'a>>>,
    /// UIDs of victims, where it is true.
    #[serde(borrow, default)]
    node_name_to_meta_victims: Option<BTreeMap<&'a str, MetaVictims<'a>>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Victims<'a> {
    #[serde(borrow, default)]
    pods: Option<Vec<VictimPod<'a>>>,
    #[serde(default, rename = "NumPDBViolations")]
    num_pdb_violations: i64,
}

#[derive(Debug, Deserialize)]
struct VictimPod<'a> {
    #[serde(borrow)]
    metadata: VictimMeta<'a>,
}

#[derive(Debug, Deserialize)]
struct VictimMeta<'a> {
    uid: &'a str,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct MetaVictims<'a> {
    #[serde(borrow, default)]
    pods: Option<Vec<MetaPod<'a>>>,
    #[serde(default, rename = "NumPDBViolations")]
    num_pdb_violations: i64,
}

#[derive(Debug, Deserialize)]
struct MetaPod<'a> {
    #[serde(rename = "UID")]
    uid: &'a str,
}

/// The victims that kube-scheduler proposes on one node, in its order (most important pod last to go first).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeVictims<'a> {
    pub node: &'a str,
    pub uids: Vec<&'a str>,
    /// PodDisruptionBudgets that would be violated; passed through.
    pub pdb_violations: i64,
}

impl<'a> PreemptArgs<'a> {
    /// Reads the body of preempt.
    ///
    /// # Errors
    /// Where the body is no `ExtenderPreemptionArgs`.
    pub fn parse(body: &'a [u8]) -> Result<Self, WireError> {
        serde_json::from_slice(body).map_err(|source| WireError::Body {
            verb: "preempt",
            kind: "ExtenderPreemptionArgs",
            source,
        })
    }

    /// The proposal in one form, whichever was sent.
    pub fn victims(&self) -> Vec<NodeVictims<'a>> {
        let meta = self.node_name_to_meta_victims.iter().flatten().map(|(node, victims)| NodeVictims {
            node,
            uids: victims.pods.iter().flatten().map(|pod| pod.uid).collect(),
            pdb_violations: victims.num_pdb_violations,
        });
        let whole = self.node_name_to_victims.iter().flatten().map(|(node, victims)| NodeVictims {
            node,
            uids: victims.pods.iter().flatten().map(|pod| pod.metadata.uid).collect(),
            pdb_violations: victims.num_pdb_violations,
        });
        meta.chain(whole).collect()
    }
}

#[cfg(test)]
mod tests;
