//! Answers, written straight into one buffer.
//!
//! Shapes: `k8s.io/kube-scheduler/extender/v1/types.go`. `NodeNames: null` would remove every node, and a node that
//! was not asked about would fail the pod, so the writers take positions in the request and nothing else.

use super::Nodes;

/// What filter says of one node. Reasons are places in a list, because the same text comes thousands of times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Fits,
    /// It fits as well as the node that is answered, or worse.
    PassedOver,
    /// It does not fit now; preemption could help.
    Failed(u16),
    /// It does not fit, whichever pods leave.
    Unresolvable(u16),
}

/// `ExtenderFilterResult` for `verdicts[i]` about the i-th node of the request.
#[must_use]
pub fn filter(nodes: &Nodes<'_>, verdicts: &[Verdict], reasons: &[String]) -> Vec<u8> {
    let mut out = Buffer::with_capacity(256 + nodes.len() * 48);
    match nodes {
        Nodes::Names(names) => {
            out.text("{\"Nodes\":null,\"NodeNames\":[");
            out.list(fitting(verdicts), |out, at| out.name(names[at]));
            out.text("]");
        }
        Nodes::Objects(items) => {
            out.text("{\"Nodes\":{\"apiVersion\":\"v1\",\"kind\":\"NodeList\",\"metadata\":{},\"items\":[");
            out.list(fitting(verdicts), |out, at| out.text(items[at].raw.get()));
            out.text("]},\"NodeNames\":null");
        }
    }
    let quoted: Vec<String> = reasons.iter().map(|reason| quote(reason)).collect();
    out.text(",\"FailedNodes\":{");
    out.refused(nodes, verdicts, &quoted, |verdict| match verdict {
        Verdict::Failed(reason) => Some(reason),
        _ => None,
    });
    out.text("},\"FailedAndUnresolvableNodes\":{");
    out.refused(nodes, verdicts, &quoted, |verdict| match verdict {
        Verdict::Unresolvable(reason) => Some(reason),
        _ => None,
    });
    out.text("},\"Error\":\"\"}");
    out.0
}

/// `ExtenderFilterResult` that makes the scheduler try the pod again later.
#[must_use]
pub fn filter_error(error: &str) -> Vec<u8> {
    let error = quote(error);
    format!(
        "{{\"Nodes\":null,\"NodeNames\":null,\"FailedNodes\":{{}},\"FailedAndUnresolvableNodes\":{{}},\"Error\":{error}}}"
    )
    .into_bytes()
}

/// `HostPriorityList`; scores are 0 to 10.
#[must_use]
pub fn priorities(nodes: &Nodes<'_>, scores: &[u8]) -> Vec<u8> {
    let mut out = Buffer::with_capacity(16 + nodes.len() * 48);
    out.text("[");
    out.list(0..nodes.len(), |out, at| {
        out.text("{\"Host\":");
        out.name(nodes.name(at));
        // A two-digit number at most: no formatting machinery for it.
        out.text(",\"Score\":");
        out.text(SCORES[usize::from(scores[at].min(10))]);
        out.text("}");
    });
    out.text("]");
    out.0
}

const SCORES: [&str; 11] = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10"];

/// `ExtenderBindingResult`.
#[must_use]
pub fn binding(error: Option<&str>) -> Vec<u8> {
    format!("{{\"Error\":{}}}", quote(error.unwrap_or(""))).into_bytes()
}

/// One node of `ExtenderPreemptionResult`: the victims that stay victims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept<'a> {
    pub node: &'a str,
    pub uids: Vec<&'a str>,
    /// PodDisruptionBudgets that would be violated.
    pub pdb_violations: i64,
}

/// `ExtenderPreemptionResult`.
#[must_use]
pub fn preemption(kept: &[Kept<'_>]) -> Vec<u8> {
    let mut out = Buffer::with_capacity(64 + kept.len() * 128);
    out.text("{\"NodeNameToMetaVictims\":{");
    out.list(0..kept.len(), |out, at| {
        let node = &kept[at];
        out.text(&quote(node.node));
        out.text(":{\"Pods\":[");
        out.list(0..node.uids.len(), |out, at| {
            out.text("{\"UID\":");
            out.text(&quote(node.uids[at]));
            out.text("}");
        });
        out.text(&format!("],\"NumPDBViolations\":{}}}", node.pdb_violations));
    });
    out.text("}}");
    out.0
}

fn fitting(verdicts: &[Verdict]) -> impl Iterator<Item = usize> + '_ {
    verdicts.iter().enumerate().filter(|(_, verdict)| **verdict == Verdict::Fits).map(|(at, _)| at)
}

struct Buffer(Vec<u8>);

impl Buffer {
    fn with_capacity(bytes: usize) -> Self {
        Self(Vec::with_capacity(bytes))
    }

    fn text(&mut self, text: &str) {
        self.0.extend_from_slice(text.as_bytes());
    }

    /// A node name: copied between quotes where nothing needs an escape, which is always so for real names.
    fn name(&mut self, name: &str) {
        // Without an early end, so that many bytes are looked at in one step.
        let plain =
            name.bytes().fold(true, |plain, byte| plain & (byte >= b' ') & (byte != b'"') & (byte != b'\\'));
        if plain {
            self.0.push(b'"');
            self.text(name);
            self.0.push(b'"');
        } else {
            self.text(&quote(name));
        }
    }

    fn list(&mut self, positions: impl Iterator<Item = usize>, mut write: impl FnMut(&mut Self, usize)) {
        for (count, at) in positions.enumerate() {
            if count > 0 {
                self.0.push(b',');
            }
            write(self, at);
        }
    }

    fn refused(
        &mut self,
        nodes: &Nodes<'_>,
        verdicts: &[Verdict],
        quoted: &[String],
        of_kind: impl Fn(Verdict) -> Option<u16>,
    ) {
        let mut first = true;
        for (at, verdict) in verdicts.iter().enumerate() {
            let Some(reason) = of_kind(*verdict) else { continue };
            if !std::mem::take(&mut first) {
                self.0.push(b',');
            }
            self.name(nodes.name(at));
            self.0.push(b':');
            self.text(&quoted[usize::from(reason)]);
        }
    }
}

fn quote(text: &str) -> String {
    // A string has no key that could fail.
    serde_json::to_string(text).unwrap_or_default()
}
