//! The record of what a pod was before it was rewritten: the value of the annotation `gpu-migrate.io/original`.
//!
//! It holds differences, by name and not by position, so that a pod which other webhooks changed as well (an injected
//! sidecar moves every index) is still restored. `null` means that the field was not there.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Original {
    /// `name@generation` of the policy.
    pub policy: String,
    /// By container name; init and app containers share one name space.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub containers: BTreeMap<String, ContainerOriginal>,
    /// Single fields of the spec: `schedulerName`, `runtimeClassName`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub spec: BTreeMap<String, Value>,
    /// Changed keys of `nodeSelector`.
    #[serde(default, skip_serializing_if = "MapEdit::is_empty")]
    pub node_selector: MapEdit,
    #[serde(default, skip_serializing_if = "ListEdit::is_empty")]
    pub tolerations: ListEdit,
    #[serde(default, skip_serializing_if = "ListEdit::is_empty")]
    pub scheduling_gates: ListEdit,
    /// Removed annotations.
    #[serde(default, skip_serializing_if = "MapEdit::is_empty")]
    pub annotations: MapEdit,
}

/// What to put back into one container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ContainerOriginal {
    /// Changed keys of `resources.limits`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<String, Value>,
    /// Changed keys of `resources.requests`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub requests: BTreeMap<String, Value>,
    #[serde(default, skip_serializing_if = "ListEdit::is_empty")]
    pub env: ListEdit,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MapEdit {
    /// Whether the map itself is ours.
    #[serde(default, skip_serializing_if = "is_false")]
    pub created: bool,
    /// Former value by key; `null` where the key is ours.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub keys: BTreeMap<String, Value>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ListEdit {
    /// Whether the list itself is ours.
    #[serde(default, skip_serializing_if = "is_false")]
    pub created: bool,
    /// Entries taken out, with the indexes they had, ascending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub removed: Vec<(usize, Value)>,
    /// Entries put in, at the end.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub added: Vec<Value>,
}

// serde's `skip_serializing_if` hands a reference.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_false(value: &bool) -> bool {
    !value
}

impl Original {
    /// The record after a second run, which wrote `later`: as JSON, with the policy of the first. A second run only
    /// guards containers that came in between, and removes annotations.
    pub(crate) fn followed_by(mut self, later: &str) -> (String, String) {
        // It was written a moment ago, in this form.
        let later: Self = serde_json::from_str(later).unwrap_or_default();
        for (name, ContainerOriginal { limits, requests, env }) in later.containers {
            let slot = self.containers.entry(name).or_default();
            slot.limits.extend(limits);
            slot.requests.extend(requests);
            if !env.is_empty() {
                slot.env = env;
            }
        }
        self.annotations.keys.extend(later.annotations.keys);
        self.annotations.created |= later.annotations.created;
        // Serialising strings and maps with string keys cannot fail.
        (serde_json::to_string(&self).unwrap_or_default(), self.policy)
    }
}

impl MapEdit {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl ListEdit {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}
