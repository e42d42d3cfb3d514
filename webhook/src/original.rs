//! The record of what a pod was before it was rewritten: the value of the annotation `gpu-migrate.io/original`.
//!
//! It holds differences, by name and not by position, so that a pod which other webhooks changed as well (an injected
//! sidecar moves every index) is still restored. `null` means that the field was not there.

use std::borrow::Cow;
use std::collections::BTreeMap;

use gpu_migrate_model::view::json::{Amount, Map, Text};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Former values by key; `None` where the key was not there.
pub type Former<'a> = Map<'a, Option<Amount<'a>>>;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Original<'a> {
    /// `name@generation` of the policy.
    #[serde(borrow)]
    pub policy: Text<'a>,
    /// By container name; init and app containers share one name space.
    #[serde(borrow, default, skip_serializing_if = "Map::is_empty")]
    pub containers: Map<'a, ContainerOriginal<'a>>,
    /// Single fields of the spec: `schedulerName`, `runtimeClassName`.
    #[serde(borrow, default, skip_serializing_if = "Map::is_empty")]
    pub spec: Former<'a>,
    #[serde(borrow, default, skip_serializing_if = "MapEdit::is_empty")]
    pub node_selector: MapEdit<'a>,
    #[serde(default, skip_serializing_if = "ListEdit::is_empty")]
    pub tolerations: ListEdit<'a>,
    #[serde(default, skip_serializing_if = "ListEdit::is_empty")]
    pub scheduling_gates: ListEdit<'a>,
    #[serde(borrow, default, skip_serializing_if = "MapEdit::is_empty")]
    pub annotations: MapEdit<'a>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ContainerOriginal<'a> {
    /// Changed keys of `resources.limits`.
    #[serde(borrow, default, skip_serializing_if = "Map::is_empty")]
    pub limits: Former<'a>,
    /// Changed keys of `resources.requests`.
    #[serde(borrow, default, skip_serializing_if = "Map::is_empty")]
    pub requests: Former<'a>,
    #[serde(default, skip_serializing_if = "ListEdit::is_empty")]
    pub env: ListEdit<'a>,
}

/// The changed keys of a map.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MapEdit<'a> {
    #[serde(borrow, default)]
    pub keys: Former<'a>,
    /// Whether the map itself is ours.
    #[serde(default, skip_serializing_if = "is_false")]
    pub created: bool,
}

/// The changed entries of a list.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ListEdit<'a> {
    /// Whether the list itself is ours.
    #[serde(default, skip_serializing_if = "is_false")]
    pub created: bool,
    /// Entries taken out, with the indexes they had, ascending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub removed: Vec<(usize, Value)>,
    /// Entries put in, at the end.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub added: Vec<Cow<'a, Value>>,
}

// serde's `skip_serializing_if` hands a reference.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_false(value: &bool) -> bool {
    !value
}

impl<'a> Original<'a> {
    /// The record after a second run, which wrote `later`; the policy stays that of the first. A second run only guards
    /// containers that came in between, and removes annotations.
    pub(crate) fn followed_by(self, later: Self) -> Self {
        let mut containers: BTreeMap<_, ContainerOriginal<'a>> = self.containers.into_iter().collect();
        for (name, ContainerOriginal { limits, requests, env }) in later.containers {
            let slot = containers.entry(name).or_default();
            slot.limits = merged(std::mem::take(&mut slot.limits), limits);
            slot.requests = merged(std::mem::take(&mut slot.requests), requests);
            if !env.is_empty() {
                slot.env = env;
            }
        }
        let annotations = MapEdit {
            keys: merged(self.annotations.keys, later.annotations.keys),
            created: self.annotations.created || later.annotations.created,
        };
        Self { containers: containers.into_iter().collect(), annotations, ..self }
    }

    pub(crate) fn to_json(&self) -> String {
        let mut text = Vec::with_capacity(1024);
        // Serialising strings and maps with string keys cannot fail, and what comes out is UTF-8.
        let _ = serde_json::to_writer(&mut text, self);
        String::from_utf8(text).unwrap_or_default()
    }
}

fn merged<'a>(former: Former<'a>, later: Former<'a>) -> Former<'a> {
    former.into_iter().chain(later).collect::<BTreeMap<_, _>>().into_iter().collect()
}

impl ContainerOriginal<'_> {
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl MapEdit<'_> {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl ListEdit<'_> {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}
