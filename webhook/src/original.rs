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
    #[serde(borrow, default, skip_serializing_if = "MapEdit::is_empty")]
    pub labels: MapEdit<'a>,
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
    /// Whether it is the record of a conversion, not only of a guarded pod.
    pub(crate) fn converts(&self) -> bool {
        self.containers.iter().any(|(_, container)| container.converts())
    }

    /// The record after a second run, which wrote `later`: what the first run found is what the pod was. The policy stays that
    /// of the first.
    pub(crate) fn followed_by(self, later: Self) -> Self {
        let mut containers: BTreeMap<_, ContainerOriginal<'a>> = self.containers.into_iter().collect();
        for (name, ContainerOriginal { limits, requests, env }) in later.containers {
            let slot = containers.entry(name).or_default();
            slot.limits = merged(std::mem::take(&mut slot.limits), limits);
            slot.requests = merged(std::mem::take(&mut slot.requests), requests);
            slot.env = std::mem::take(&mut slot.env).followed_by(env);
        }
        Self {
            policy: if self.policy.is_empty() { later.policy } else { self.policy },
            containers: containers.into_iter().collect(),
            spec: merged(self.spec, later.spec),
            node_selector: self.node_selector.followed_by(later.node_selector),
            tolerations: self.tolerations.followed_by(later.tolerations),
            scheduling_gates: self.scheduling_gates.followed_by(later.scheduling_gates),
            annotations: self.annotations.followed_by(later.annotations),
            labels: self.labels.followed_by(later.labels),
        }
    }

    pub(crate) fn to_json(&self) -> String {
        let mut text = Vec::with_capacity(1024);
        // Serialising strings and maps with string keys cannot fail, and what comes out is UTF-8.
        let _ = serde_json::to_writer(&mut text, self);
        String::from_utf8(text).unwrap_or_default()
    }
}

/// Of a key that is in both, the former value.
fn merged<'a>(former: Former<'a>, later: Former<'a>) -> Former<'a> {
    later.into_iter().chain(former).collect::<BTreeMap<_, _>>().into_iter().collect()
}

impl ContainerOriginal<'_> {
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether it got something else. One that asked for 0 cards got nothing in their place.
    pub(crate) fn converts(&self) -> bool {
        let mut amounts = self.limits.iter().chain(self.requests.iter());
        amounts.any(|(_, amount)| amount.as_ref().is_none_or(|amount| amount.as_str() != "0"))
    }
}

impl MapEdit<'_> {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn followed_by(self, later: Self) -> Self {
        Self { keys: merged(self.keys, later.keys), created: self.created || later.created }
    }
}

impl ListEdit<'_> {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// An entry that was taken out twice was put back in between; one that was added twice had been taken out.
    fn followed_by(mut self, later: Self) -> Self {
        let new = |(_, entry): &(usize, Value)| {
            !self.removed.iter().any(|(_, known)| known == entry)
                && !self.added.iter().any(|known| known.as_ref() == entry)
        };
        let removed: Vec<_> = later.removed.into_iter().filter(new).collect();
        self.removed.extend(removed);
        let added: Vec<_> = later.added.into_iter().filter(|entry| !self.added.contains(entry)).collect();
        self.added.extend(added);
        self.created |= later.created;
        self
    }
}
