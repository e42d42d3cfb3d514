//! What happens to a pod, and why: from the gates (opt-in, opt-out, policy, rollout) to the decision. Pure.

use std::collections::BTreeMap;
use std::fmt;

use gpu_migrate_model::names;
use gpu_migrate_model::view::Place;
use serde_json::Value;

use crate::convert::{Conversions, asks, is_shared, names_gpu};
use crate::obstacles::{ClusterFacts, Obstacles};
use crate::policy::{Mode, Policies, Policy, Selected};
use crate::rewrite::{PatchBuilder, hide_cards};
use crate::rollout::TopOwner;
use crate::text::PatchText;
use crate::view::{ContainerView, EphemeralView, PodView};

/// What is known about a pod besides the pod.
#[derive(Clone, Copy, Debug)]
pub struct RequestContext<'f> {
    pub namespace: &'f str,
    /// The namespace's labels. Unknown ones (`None`) count as opted in, since the API server only sends us pods of
    /// namespaces that are; the project must then be on the pod.
    pub namespace_labels: Option<&'f BTreeMap<String, String>>,
    /// Whose pod it is; `None` for what the pod itself says.
    pub owner: Option<TopOwner<'f>>,
    pub cluster: &'f ClusterFacts,
}

#[derive(Clone, Debug)]
pub struct Decision<'p> {
    pub outcome: Outcome,
    /// What changes; empty when nothing does.
    pub patch: PatchText,
    /// The patch that Enforce mode would apply; only filled in Audit mode.
    pub audit_patch: PatchText,
    /// `name@generation` of the policy that decided.
    pub policy: Option<&'p str>,
    /// For the user, at most 120 characters each.
    pub warnings: Vec<String>,
    /// For the audit log, besides outcome and policy; the API server prefixes the key.
    pub audit: Option<(&'static str, String)>,
    /// The reason to refuse the pod.
    pub deny: Option<String>,
    /// What happens to each container that asks for cards.
    pub changes: Vec<Change>,
}

/// What one container asked for and what it gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub container: String,
    /// Whether it is an init container or sidecar.
    pub init: bool,
    pub cards: u32,
    pub cores: u32,
    pub blocks: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Converted,
    /// It keeps its request. Cards that it did not ask for are hidden, or the copied card choice of another pod is removed.
    Guarded,
    /// It would change if the policy were enforced.
    Audited,
    Unconvertible(String),
    Conflict(String),
    Skipped(Skip),
}

/// Why nothing is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Skip {
    /// Its namespace is not opted in, or is one that never is.
    NotOptedIn,
    OptedOut,
    /// A mirror pod: it stands for a static pod that the kubelet runs already.
    Mirror,
    /// It is bound to a node already.
    Bound,
    NoProject,
    /// There is no policy for the project that its own label names.
    UnknownProject,
    NoPolicy,
    Off,
    NoGpu,
    AlreadyShared,
    /// The rollout has not reached its workload yet.
    NotInRollout,
}

impl Skip {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NotOptedIn => "not_opted_in",
            Self::OptedOut => "opted_out",
            Self::Mirror => "mirror",
            Self::Bound => "bound",
            Self::NoProject => "no_project",
            Self::UnknownProject => "unknown_project",
            Self::NoPolicy => "no_policy",
            Self::Off => "off",
            Self::NoGpu => "no_gpu",
            Self::AlreadyShared => "already_shared",
            Self::NotInRollout => "not_in_rollout",
        }
    }
}

impl Outcome {
    /// One word for metrics and audit.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Converted => "converted",
            Self::Guarded => "guarded",
            Self::Audited => "audited",
            Self::Unconvertible(_) => "unconvertible",
            Self::Conflict(_) => "conflict",
            Self::Skipped(skip) => skip.as_str(),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Converted => f.write_str("becomes a shared pod"),
            Self::Guarded => {
                f.write_str("keeps its request; cards or a card choice that are not its own are removed")
            }
            Self::Audited => f.write_str("would change if the policy were enforced"),
            Self::Unconvertible(why) => write!(f, "cannot be converted: {why}"),
            Self::Conflict(why) => f.write_str(why),
            Self::Skipped(skip) => f.write_str(match skip {
                Skip::NotOptedIn => "left alone: its namespace is not opted in",
                Skip::OptedOut => "left alone: it is opted out",
                Skip::Mirror => "left alone: a mirror pod of a static pod",
                Skip::Bound => "left alone: it is bound to a node already",
                Skip::NoProject => "left alone: it belongs to no project",
                Skip::UnknownProject => "left alone: there is no policy for the project that its label names",
                Skip::NoPolicy => "left alone: its project has no policy",
                Skip::Off => "left alone: its policy is off",
                Skip::NoGpu => "left alone: it asks for no card",
                Skip::AlreadyShared => "left alone: it asks for shares already",
                Skip::NotInRollout => "left alone: the rollout has not reached its workload yet",
            }),
        }
    }
}

impl Decision<'_> {
    fn untouched(outcome: Outcome) -> Self {
        Self {
            outcome,
            patch: PatchText::default(),
            audit_patch: PatchText::default(),
            policy: None,
            warnings: Vec::new(),
            audit: None,
            deny: None,
            changes: Vec::new(),
        }
    }

    fn skipped(skip: Skip) -> Self {
        Self::untouched(Outcome::Skipped(skip))
    }
}

/// Decides about a pod that is created.
#[must_use]
pub fn decide<'p>(pod: &PodView<'_>, request: &RequestContext<'_>, policies: &'p Policies) -> Decision<'p> {
    if !opted_in(request, policies) {
        return Decision::skipped(Skip::NotOptedIn);
    }
    let governing = governing(pod, request, policies);
    let shared = match &governing {
        Ok(policy) => policy.conversion.is_shared_pod(pod),
        Err(_) => pod.containers().any(|(_, container)| is_shared(container, &policies.settings().dialect)),
    };
    let mut decision = match governing {
        Ok(policy) => under_policy(pod, request, policies, policy),
        Err(decision) => *decision,
    };
    // The guard does not depend on the policy, nor on anything else that is written into a pod.
    if decision.patch.is_empty() && decision.deny.is_none() {
        let dialect = &policies.settings().dialect;
        let mut edits = PatchBuilder::new(pod, dialect, "");
        edits.continue_from_record(shared);
        guard_and_mark(&mut edits, pod, request, policies, &decision.outcome);
        let (patch, warnings) = edits.finish();
        decision.patch = patch;
        decision.warnings.extend(warnings);
        if !decision.patch.is_empty() && matches!(decision.outcome, Outcome::Skipped(_)) && guards(request) {
            decision.outcome = Outcome::Guarded;
        }
    }
    trimmed(decision)
}

/// Decides about ephemeral containers that are added to a pod (`kubectl debug`): they ask for no card, so in a guarded namespace
/// they see none. Those that were there before cannot be changed.
#[must_use]
pub fn decide_ephemeral(
    pod: &EphemeralView<'_>,
    before: Option<&EphemeralView<'_>>,
    request: &RequestContext<'_>,
    policies: &Policies,
) -> Decision<'static> {
    if !opted_in(request, policies) {
        return Decision::skipped(Skip::NotOptedIn);
    }
    let mut decision = Decision::skipped(Skip::NoGpu);
    if !guards(request) {
        return decision;
    }
    let known = |name: &str| {
        let before = before.into_iter().flat_map(EphemeralView::containers);
        before.into_iter().any(|container| container.name.as_str() == name)
    };
    for (index, container) in pod.containers().enumerate().filter(|(_, container)| !known(&container.name)) {
        let index = index.to_string();
        let path = ["spec", "ephemeralContainers", index.as_str(), "env"];
        let (_, warning) = hide_cards(&mut decision.patch, &path, container);
        decision.warnings.extend(warning);
    }
    if !decision.patch.is_empty() {
        decision.outcome = Outcome::Guarded;
    }
    trimmed(decision)
}

fn namespace_label<'f>(request: &RequestContext<'f>, key: &str) -> Option<&'f str> {
    request.namespace_labels.and_then(|labels| labels.get(key)).map(String::as_str)
}

fn opted_in(request: &RequestContext<'_>, policies: &Policies) -> bool {
    let settings = policies.settings();
    let labelled =
        request.namespace_labels.is_none() || namespace_label(request, names::OPT_IN) == Some("true");
    labelled && !settings.excluded_namespaces.contains(request.namespace)
}

/// The policy that a pod falls under, or why there is none that counts.
fn governing<'p>(
    pod: &PodView<'_>,
    request: &RequestContext<'_>,
    policies: &'p Policies,
) -> Result<&'p Policy, Box<Decision<'p>>> {
    let skip = |skip| Err(Box::new(Decision::skipped(skip)));
    if pod.metadata.label(names::OPT_OUT) == Some("true") {
        return skip(Skip::OptedOut);
    }
    // `kubernetes.io/config.source` says nothing: the kubelet sets it itself on what it runs.
    if pod.metadata.annotation("kubernetes.io/config.mirror").is_some() {
        return skip(Skip::Mirror);
    }
    if pod.node().is_some() {
        return skip(Skip::Bound);
    }
    let of_namespace = namespace_label(request, names::PROJECT);
    let fixed = namespace_label(request, names::FIXED_PROJECT);
    let Some(project) = names::project_of(pod.metadata.label(names::PROJECT), of_namespace, fixed) else {
        return skip(Skip::NoProject);
    };
    match policies.select(project, request.namespace, pod) {
        Selected::None if of_namespace == Some(project) || policies.knows(project) => skip(Skip::NoPolicy),
        Selected::None => {
            let mut decision = Decision::skipped(Skip::UnknownProject);
            if pod.containers().any(|(_, container)| names_gpu(container, &policies.settings().dialect)) {
                let key = names::PROJECT;
                decision
                    .warnings
                    .push(format!("left alone: no policy is for project {project} (label {key})"));
                decision.audit = Some(("unknown_project", project.to_owned()));
            }
            Err(Box::new(decision))
        }
        Selected::One(policy) if policy.mode == Mode::Off => skip(Skip::Off),
        Selected::One(policy) => Ok(policy),
        Selected::Conflict(names) => {
            let why = format!(
                "left alone: policies {} select it with equal specificity: narrow one of them",
                names.join(", ")
            );
            let mut decision = Decision::untouched(Outcome::Conflict(why.clone()));
            decision.audit = Some(("conflict", names.join(",")));
            decision.warnings.push(why);
            Err(Box::new(decision))
        }
    }
}

fn under_policy<'p>(
    pod: &PodView<'_>,
    request: &RequestContext<'_>,
    policies: &'p Policies,
    policy: &'p Policy,
) -> Decision<'p> {
    let dialect = &policy.conversion.dialect;
    let shared = policy.conversion.is_shared_pod(pod);
    let gpus = pod.containers().any(|(_, container)| names_gpu(container, dialect));
    let owner = || request.owner.unwrap_or_else(|| TopOwner::of_pod(pod));
    let mut decision = match (shared, gpus) {
        (true, _) => shared_pod(pod, request, policies, policy),
        (false, false) => Decision::skipped(Skip::NoGpu),
        (false, true) if !policy.in_rollout(pod, request.namespace, owner()) => {
            Decision::skipped(Skip::NotInRollout)
        }
        (false, true) => legacy_pod(pod, request, policy),
    };
    decision.policy = Some(&policy.reference_text);
    if policy.mode == Mode::Audit { audited(decision, policy) } else { decision }
}

/// A pod that asks for whole cards and is in the rollout.
fn legacy_pod(pod: &PodView<'_>, request: &RequestContext<'_>, policy: &Policy) -> Decision<'static> {
    let product = if policy.by_product { product(pod) } else { None };
    // A workload whose wave has not come keeps its former ratio.
    let former = pod.metadata.annotation(names::CONVERSION).and_then(|id| policy.former.get(id));
    let conversion = former.unwrap_or(&policy.conversion);
    let mut conversions: Vec<(Place, &ContainerView<'_>, Conversions<'_>)> = Vec::new();
    for (place, container) in pod.containers() {
        match conversion.convert(container, product.as_deref()) {
            Ok(to) => conversions.push((place, container, to)),
            Err(error) => return unconvertible(policy, &error.to_string()),
        }
    }
    let left: Vec<String> = conversions.iter().flat_map(|(_, c, to)| stay(c, to, policy)).collect();
    let converts = conversions.iter().any(|(_, _, to)| to.converts());
    if !converts && !conversions.iter().any(|(_, _, to)| to.cards > 0) {
        return Decision { warnings: left, ..Decision::skipped(Skip::NoGpu) };
    }
    let guarded = guards(request);
    let obstacles = Obstacles { pod, policy, cluster: request.cluster, guarded };
    let converted = || conversions.iter().map(|(_, container, to)| (*container, to));
    if let Err(why) = obstacles.check(converted().filter(|(_, to)| to.converts())) {
        return unconvertible(policy, &why);
    }
    let mut edits = PatchBuilder::new(pod, &policy.conversion.dialect, &policy.reference_text);
    if !converts {
        edits.hand_over();
    }
    for (place, container, to) in &conversions {
        edits.convert(*place, container, to, guarded);
    }
    edits.schedule(&policy.scheduling);
    edits.drop_stale_choice();
    left.into_iter().for_each(|text| edits.warn(text));
    let (patch, warnings) = edits.finish();
    let changes =
        conversions.iter().filter(|(_, _, to)| to.converts()).map(|(place, container, to)| Change {
            container: container.name.as_str().to_owned(),
            init: place.init,
            cards: to.cards,
            cores: to.cores,
            blocks: to.blocks,
        });
    let changes: Vec<Change> = changes.collect();
    let described = if converts { describe(&changes) } else { "whole cards, as they are".to_owned() };
    let mut decision = Decision { changes, patch, warnings, ..Decision::untouched(Outcome::Converted) };
    if pod.metadata.controller().is_none() {
        // A person made this pod and reads the answer; a controller does not.
        let target = policy.conversion.target;
        let does = if target.is_ours() { "converts".into() } else { format!("converts to {target}") };
        decision.warnings.insert(0, summary(policy, &does, &described));
    }
    decision.audit = Some(("changes", described));
    decision
}

fn stay(container: &ContainerView<'_>, to: &Conversions<'_>, policy: &Policy) -> Vec<String> {
    let name = container.name.as_str();
    let text = |resource: &&str| {
        format!("container {name}: {resource} stays: policy {} does not map it", policy.reference.name)
    };
    to.left.iter().map(text).collect()
}

fn unconvertible(policy: &Policy, why: &str) -> Decision<'static> {
    let mut decision = Decision::untouched(Outcome::Unconvertible(why.to_owned()));
    decision.audit = Some(("unconvertible", why.to_owned()));
    if policy.deny_unconvertible {
        decision.deny = Some(format!(
            "gpu-migrate: policy {} refuses what it cannot convert: {why}",
            policy.reference.name
        ));
    } else {
        decision.warnings.push(format!("not converted: {why}"));
    }
    decision
}

/// A pod that asks for shares already: ours when it comes a second time, or written that way. What another webhook has changed
/// since in where ours is scheduled is set again: no other scheduler can place it.
fn shared_pod(
    pod: &PodView<'_>,
    request: &RequestContext<'_>,
    policies: &Policies,
    policy: &Policy,
) -> Decision<'static> {
    let dialect = &policy.conversion.dialect;
    let mut edits = PatchBuilder::new(pod, dialect, &policy.reference_text);
    if edits.continue_from_record(true) {
        edits.schedule(&policy.scheduling);
    }
    edits.drop_stale_choice();
    let outcome = Outcome::Skipped(Skip::AlreadyShared);
    let ours = policy.conversion.target.is_ours();
    if ours && pod.containers().any(|(_, container)| asks(container, &dialect.legacy)) {
        edits
            .warn("left alone: it asks for whole cards and for shares; no node places such a pod".to_owned());
    }
    guard_and_mark(&mut edits, pod, request, policies, &outcome);
    let (patch, warnings) = edits.finish();
    let outcome = if patch.is_empty() { outcome } else { Outcome::Guarded };
    Decision { patch, warnings, ..Decision::untouched(outcome) }
}

/// What is done to a pod whatever its policy says: the guard, and the mark on what keeps whole cards.
fn guard_and_mark<'a, 'p>(
    edits: &mut PatchBuilder<'p, 'a>,
    pod: &'p PodView<'a>,
    request: &RequestContext<'_>,
    policies: &Policies,
    outcome: &Outcome,
) {
    let settings = policies.settings();
    if guards(request) && *outcome != Outcome::Skipped(Skip::Mirror) {
        pod.containers().for_each(|(place, container)| edits.guard(place, container));
    }
    if settings.mark_reviewed
        && pod.containers().any(|(_, container)| names_gpu(container, &settings.dialect))
    {
        edits.mark_reviewed(outcome.as_str());
    }
}

/// Audit mode says what it would do.
fn audited<'p>(mut decision: Decision<'p>, policy: &Policy) -> Decision<'p> {
    decision.deny = None;
    if !decision.patch.is_empty() {
        decision.outcome = Outcome::Audited;
        decision.audit_patch = std::mem::take(&mut decision.patch);
        let what = match decision.changes.as_slice() {
            [] => "hides the cards".to_owned(),
            changes => describe(changes),
        };
        decision.warnings = vec![summary(policy, "(Audit) would convert", &what)];
    } else if let Outcome::Unconvertible(why) = &decision.outcome {
        decision.warnings =
            vec![format!("policy {} (Audit) could not convert: {why}", policy.reference.name)];
    }
    decision
}

/// Every text gets our name in front and fits into a warning.
fn trimmed(mut decision: Decision<'_>) -> Decision<'_> {
    if decision.warnings.len() > MOST_WARNINGS {
        let more = decision.warnings.split_off(MOST_WARNINGS - 1).len();
        decision.warnings.push(format!("{more} more warnings are not shown"));
    }
    decision.warnings = decision.warnings.into_iter().map(shorten).collect();
    decision
}

fn summary(policy: &Policy, does: &str, what: &str) -> String {
    [OUR_NAME, "policy ", &policy.reference.name, " ", does, ": ", what].concat()
}

/// `main: 2 cards → 200 cores, 84 blocks`
fn describe(changes: &[Change]) -> String {
    let each = changes.iter().map(|change| {
        let Change { container, cards, cores, blocks, .. } = change;
        match cards {
            0 => format!("{container}: {cores} cores, {blocks} blocks"),
            1 => format!("{container}: 1 card → {cores} cores, {blocks} blocks"),
            cards => format!("{container}: {cards} cards → {cores} cores, {blocks} blocks"),
        }
    });
    each.collect::<Vec<_>>().join("; ")
}

/// The API server cuts or drops warnings beyond 120 characters.
const LONGEST_WARNING: usize = 120;
/// A user may cause as many as there are containers and resource names; more than these are of no use.
const MOST_WARNINGS: usize = 10;
/// In front of every warning: a person sees many webhooks' warnings side by side.
const OUR_NAME: &str = "gpu-migrate: ";

fn shorten(text: String) -> String {
    let text = if text.starts_with(OUR_NAME) { text } else { [OUR_NAME, &text].concat() };
    if text.len() <= LONGEST_WARNING || text.chars().count() <= LONGEST_WARNING {
        return text;
    }
    let kept: String = text.chars().take(LONGEST_WARNING - 1).collect();
    format!("{kept}…")
}

fn guards(request: &RequestContext<'_>) -> bool {
    namespace_label(request, names::VOID_GUARD) == Some("true")
}

/// The card product that a pod is bound to, by nodeSelector or by a required affinity that leaves no other.
fn product(pod: &PodView<'_>) -> Option<String> {
    if let Some(product) = pod.spec.node_selector.as_ref().and_then(|map| map.get(names::GPU_PRODUCT)) {
        return Some(product.as_str().to_owned());
    }
    let affinity: Value = serde_json::from_str(pod.spec.affinity?.get()).ok()?;
    let terms = affinity
        .pointer("/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms")?
        .as_array()?;
    let of_term = |term: &Value| -> Option<String> {
        let expressions = term.get("matchExpressions")?.as_array()?;
        let ours = expressions.iter().find(|expression| {
            expression.get("key").and_then(Value::as_str) == Some(names::GPU_PRODUCT)
                && expression.get("operator").and_then(Value::as_str) == Some("In")
        })?;
        match ours.get("values")?.as_array()?.as_slice() {
            [one] => one.as_str().map(str::to_owned),
            _ => None,
        }
    };
    // Terms are alternatives: all must name the same product.
    let mut products = terms.iter().map(of_term);
    let first = products.next()??;
    products.all(|product| product.as_ref() == Some(&first)).then_some(first)
}
