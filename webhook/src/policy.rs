//! Policies in decided form, and which one a pod falls under. Pure.
//!
//! What can be worked out once per policy is worked out when it is compiled ([`crate::compile`]), not per pod.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use gpu_migrate_model::annotation::PolicyRef;
use gpu_migrate_model::crd::specificity;
use gpu_migrate_model::names;
use gpu_migrate_model::selector::matches;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde_json::Value;

use crate::convert::Conversion;
use crate::rollout::{TopOwner, in_share};
use crate::view::PodView;

/// What a policy does with the pods under it, from the weakest to the strongest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    Off,
    Audit,
    Enforce,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rollout {
    /// This percentage of workloads, by namespace and top owner.
    Percent(u32),
    /// Only pods that carry the label `gpu-migrate.io/convert: "true"`, which the operator sets wave by wave.
    Labelled,
}

/// Where converted pods go.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scheduling {
    pub scheduler_name: Option<String>,
    /// Schedulers whose pods are converted, besides `default-scheduler` and `scheduler_name`.
    pub replace_schedulers: Vec<String>,
    pub runtime_class_name: Option<String>,
    pub selector_remove: Vec<String>,
    /// Keys that are set in it.
    pub selector_set: BTreeMap<String, String>,
    /// Tolerations of these keys go away.
    pub toleration_remove: Vec<String>,
    /// Tolerations that are added where they are missing.
    pub toleration_add: Vec<Constant>,
    /// Labels that the target's pods need.
    pub labels_set: &'static [(&'static str, &'static str)],
    /// Whether members of a gang get a scheduling gate.
    pub gate_gangs: bool,
}

/// JSON that a policy puts into pods, with its text at hand.
#[derive(Clone, Debug, PartialEq)]
pub struct Constant {
    value: Value,
    text: String,
}

impl Constant {
    #[must_use]
    pub fn value(&self) -> &Value {
        &self.value
    }

    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl From<Value> for Constant {
    fn from(value: Value) -> Self {
        Self { text: value.to_string(), value }
    }
}

#[derive(Clone, Debug)]
pub struct Policy {
    /// `name@generation`.
    pub reference: PolicyRef,
    /// The same as text, as it goes into annotations.
    pub reference_text: String,
    pub project: String,
    /// Only these namespaces; empty for all.
    pub namespaces: Vec<String>,
    /// Only pods with these labels.
    pub selector: Option<LabelSelector>,
    pub mode: Mode,
    pub conversion: Conversion,
    /// Conversions that pods of workloads get whose wave has not come since `conversion` changed, by id.
    pub former: BTreeMap<String, Conversion>,
    /// Whether any override depends on the card's product.
    pub by_product: bool,
    pub scheduling: Scheduling,
    pub rollout: Rollout,
    /// Whether a pod that cannot be converted is refused.
    pub deny_unconvertible: bool,
}

#[derive(Clone, Debug)]
pub struct Policies {
    /// Of one project, the most specific first.
    by_project: HashMap<String, Vec<Arc<Policy>>>,
    settings: Settings,
}

/// What is the same for all policies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Namespaces whose pods are never changed, whatever their labels say: the system's and our own.
    pub excluded_namespaces: BTreeSet<String>,
    /// Which resources stand for cards and shares.
    pub dialect: names::Dialect,
    /// Whether pods that keep whole cards get the annotation [`names::REVIEWED`].
    pub mark_reviewed: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            excluded_namespaces: ["kube-system", "kube-node-lease"].map(str::to_owned).into(),
            dialect: names::Dialect::default(),
            mark_reviewed: false,
        }
    }
}

/// The policy that a pod falls under.
#[derive(Clone, Debug)]
pub enum Selected<'p> {
    None,
    One(&'p Policy),
    /// These are equally specific, so none of them is applied.
    Conflict(Vec<&'p str>),
}

impl Default for Policies {
    fn default() -> Self {
        Self::new(Vec::new(), Settings::default())
    }
}

impl Policies {
    #[must_use]
    pub fn new(policies: Vec<Policy>, settings: Settings) -> Self {
        let mut by_project: HashMap<String, Vec<Arc<Policy>>> = HashMap::new();
        for policy in policies {
            by_project.entry(policy.project.clone()).or_default().push(Arc::new(policy));
        }
        for policies in by_project.values_mut() {
            policies.sort_by_key(|policy| std::cmp::Reverse(policy.specificity()));
        }
        Self { by_project, settings }
    }

    /// The same, with the former policy of each of `names` that has none now: a policy that is invalid in its newest
    /// form stays in force as it was.
    #[must_use]
    pub fn keeping<'n>(self, former: &Self, names: impl IntoIterator<Item = &'n str>) -> Self {
        let mut policies: Vec<Policy> = self.iter().cloned().collect();
        for name in names {
            let known = policies.iter().any(|policy| policy.reference.name == name);
            policies.extend(former.iter().filter(|policy| !known && policy.reference.name == name).cloned());
        }
        Self::new(policies, self.settings)
    }

    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    pub fn iter(&self) -> impl Iterator<Item = &Policy> {
        self.by_project.values().flatten().map(AsRef::as_ref)
    }

    /// Names of the other policies that select exactly the same pods as `name` and keep it from being applied: those that
    /// enforce, and to a policy that only audits also the others that audit.
    #[must_use]
    pub fn identical_policies(&self, name: &str) -> Vec<&str> {
        let Some(policy) = self.iter().find(|policy| policy.reference.name == name) else {
            return Vec::new();
        };
        let same = |other: &&Policy| {
            other.reference.name != name
                && other.project == policy.project
                && other.namespaces == policy.namespaces
                && other.selector == policy.selector
                && other.mode >= policy.mode
                && policy.mode != Mode::Off
        };
        let mut identical_policies: Vec<_> =
            self.iter().filter(same).map(|other| other.reference.name.as_str()).collect();
        identical_policies.sort_unstable();
        identical_policies
    }

    /// Whether any policy is for `project`.
    #[must_use]
    pub fn knows(&self, project: &str) -> bool {
        self.by_project.contains_key(project)
    }

    /// The policy for a pod of `project` in `namespace`.
    #[must_use]
    pub fn select(&self, project: &str, namespace: &str, pod: &PodView<'_>) -> Selected<'_> {
        let candidates = self.by_project.get(project).map(Vec::as_slice).unwrap_or_default();
        let mut fitting = candidates.iter().filter(|policy| policy.applies(namespace, pod));
        let Some(first) = fitting.next() else { return Selected::None };
        let level = first.specificity();
        let mut equal = vec![first];
        equal.extend(fitting.take_while(|policy| policy.specificity() == level));
        // A policy that is off takes no part in a conflict: turning one off is how a conflict is ended. Nor does one that
        // only audits stop one that enforces.
        let mode = equal.iter().map(|policy| policy.mode).max().unwrap_or(Mode::Off);
        equal.retain(|policy| policy.mode == mode);
        match equal.as_slice() {
            [one] => Selected::One(one),
            _ if mode == Mode::Off => Selected::One(first),
            all => {
                let mut names: Vec<_> = all.iter().map(|policy| policy.reference.name.as_str()).collect();
                names.sort_unstable();
                Selected::Conflict(names)
            }
        }
    }
}

impl Policy {
    fn specificity(&self) -> usize {
        specificity(&self.namespaces, self.selector.as_ref())
    }

    fn applies(&self, namespace: &str, pod: &PodView<'_>) -> bool {
        (self.namespaces.is_empty() || self.namespaces.iter().any(|name| name == namespace))
            && self.selector.as_ref().is_none_or(|selector| matches(selector, |key| pod.metadata.label(key)))
    }

    /// Whether the rollout has reached a pod of `owner`.
    #[must_use]
    pub fn in_rollout(&self, pod: &PodView<'_>, namespace: &str, owner: TopOwner<'_>) -> bool {
        match self.rollout {
            Rollout::Labelled => pod.metadata.label(names::CONVERT) == Some("true"),
            Rollout::Percent(100..) => true,
            Rollout::Percent(percent) => in_share(&owner.key(namespace), percent),
        }
    }
}
