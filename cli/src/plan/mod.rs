//! `gpu-migrate plan`: what the webhook would make of manifests.

pub mod decide;
pub mod diff;
mod indirect;
mod projects;
pub mod show;
pub mod systems;
mod waves;

use crate::manifest::Manifest;
use crate::style::{self, counted};
use gpu_migrate_model::ask::Demand;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;

pub use projects::Project;

/// Labels of the given Namespaces, by name.
pub type Namespaces = BTreeMap<String, BTreeMap<String, String>>;

/// What becomes of every object that was read, in the order it was read in.
#[derive(Debug, Default)]
pub struct Plan {
    pub entries: Vec<Entry>,
    /// How many objects make none and are not shown one by one.
    pub without_pods: usize,
    /// The same in numbers, by project.
    pub projects: Vec<Project>,
}

/// One object and what becomes of it.
#[derive(Debug)]
pub struct Entry {
    pub manifest: Manifest,
    pub outcome: Outcome,
}

#[derive(Debug)]
pub enum Outcome {
    Converted(Box<Converted>),
    /// Its pods stay as they are, and should.
    LeftAlone {
        why: String,
    },
    /// Its policy would convert it, and no wave of it reaches it.
    InNoWave {
        why: String,
    },
    /// Its controller makes pods that request cards, and is not one of Kubernetes' own: what becomes of each pod template.
    Indirect {
        why: String,
        /// What is known of each pod template.
        templates: Vec<Template>,
    },
    /// Its pods should be rewritten and cannot be.
    CannotConvert {
        /// Field, value, what was expected and what to do.
        why: String,
        /// What the policy does with such a pod.
        then: Fallback,
    },
}

/// A pod template of an object that is not one of Kubernetes' own.
#[derive(Debug)]
pub struct Template {
    /// As written.
    pub value: Value,
    /// Where in the object it stands: `spec.template`.
    pub path: String,
    /// What one pod asks for now and afterwards, where both can be counted.
    pub demand: (Option<Demand>, Option<Demand>),
    pub in_no_wave: bool,
    pub unconvertible: bool,
}

/// What happens to a pod that cannot be converted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fallback {
    /// It is admitted as it is.
    Admit,
    Deny,
    /// Kubernetes itself will refuse it.
    Invalid,
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Admit => "the webhook leaves it as written",
            Self::Deny => "the policy denies it",
            Self::Invalid => "Kubernetes will refuse it",
        })
    }
}

#[derive(Debug)]
pub struct Converted {
    /// The whole object with its pod form rewritten.
    pub after: Value,
    /// The change as RFC 6902 operations on the whole object.
    pub patch: Value,
    /// The policy that converts, `name@generation`.
    pub policy: String,
    /// The policy is in `mode: Audit`: the webhook changes nothing yet.
    pub audit: bool,
    /// The wave that moves it, from 1, and how many there are, where the policy has waves.
    pub wave: Option<(usize, usize)>,
    /// It keeps its request: what changes is that cards it did not ask for are hidden, or a stale card choice removed.
    pub guard: bool,
    /// What one pod asked for and asks for now, where both can be counted.
    pub demand: (Option<Demand>, Option<Demand>),
    /// A container of several cards gets whole ones, although the policy's ratio is a share.
    pub whole: bool,
    /// Warnings of the webhook at creation.
    pub warnings: Vec<String>,
    pub notes: Vec<String>,
}

impl Plan {
    /// The objects whose pods are rewritten.
    pub fn converted(&self) -> impl Iterator<Item = (&Entry, &Converted)> {
        self.entries.iter().filter_map(|entry| match &entry.outcome {
            Outcome::Converted(converted) => Some((entry, converted.as_ref())),
            _ => None,
        })
    }

    /// Whether something should be converted and cannot be.
    #[must_use]
    pub fn has_unconvertible(&self) -> bool {
        self.entries.iter().any(|entry| matches!(entry.outcome, Outcome::CannotConvert { .. }))
    }
}

impl Converted {
    /// What changes in the request, for people.
    #[must_use]
    pub fn change(&self) -> String {
        let text = |demand: Option<Demand>| demand.map_or_else(|| "?".to_owned(), described);
        let (before, after) = (text(self.demand.0), text(self.demand.1));
        if self.guard {
            return format!("{before}; guarded: other cards are hidden from it");
        }
        let change = if before == after { before } else { format!("{before} → {after}") };
        let reason =
            if self.whole { " (containers of several cards keep whole ones: multiCard)" } else { "" };
        let change = match self.wave {
            Some((wave, of)) => format!("{change}{reason}, in wave {wave} of {of}"),
            None => change + reason,
        };
        if self.audit { format!("{change} (mode Audit: not yet)") } else { change }
    }
}

/// A demand for people: blocks with their size.
fn described(demand: Demand) -> String {
    let Demand { legacy, cores, blocks, .. } = demand;
    let whole = counted(legacy as usize, "whole card");
    let share = || format!("{cores} and {}", style::blocks(blocks));
    match (legacy, demand.is_shared()) {
        (0, false) => "no card".to_owned(),
        (_, false) => whole,
        (0, true) => share(),
        (_, true) => format!("{whole}, {}", share()),
    }
}
