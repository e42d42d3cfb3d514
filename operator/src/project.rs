//! The workloads of a project, from lists of the API server. Pure.

use crate::kinds::{Described, display, why_not};
use crate::waves::{BlockingPod, Key, Management, ObservedWorkload};
use gpu_migrate_model::ask::PodAsk;
use gpu_migrate_model::crd::{Counts, GPUMigrationSpec, Match, MigrationMode, specificity};
use gpu_migrate_model::lifecycle::is_active;
use gpu_migrate_model::names::{self, Dialect};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, StatefulSet};
use k8s_openapi::api::batch::v1::CronJob;
use k8s_openapi::api::core::v1::{ContainerStatus, Namespace, Pod, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference};
use kube::core::{Selector, SelectorExt as _};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

type Labels = BTreeMap<String, String>;

/// A workload, read from a Deployment, StatefulSet, DaemonSet or CronJob.
#[derive(Clone, Debug)]
pub struct Workload {
    key: Key,
    /// Its `resourceVersion`: patches are refused if it has changed since.
    version: Option<String>,
    template: PodTemplateSpec,
    selector: LabelSelector,
    /// All pods are of the newest template and ready.
    rolled_out: bool,
    management: Management,
    note: Option<String>,
    /// Its pods are replaced in order: one that is not ready keeps it from going on.
    ordered: bool,
    replicas: u32,
    /// The object that controls it.
    owner: Option<Key>,
    /// Of a kind that is not Kubernetes' own: the merge patch of its pod templates for given metadata is made from it.
    foreign: Option<Foreign>,
}

/// An object of a described kind, as far as a patch of it needs that.
#[derive(Clone, Debug)]
pub struct Foreign {
    pub kind: Arc<Described>,
    /// Without its status.
    pub object: serde_json::Value,
}

/// What of a pod matters here. A namespace may have tens of thousands, so nothing else is kept.
#[derive(Clone, Debug)]
pub struct ListedPod {
    namespace: String,
    name: String,
    uid: String,
    labels: Labels,
    controller: Option<OwnerReference>,
    /// Name of the policy that converted it.
    policy: Option<String>,
    /// By an earlier generation of the policy than its conversion is of.
    outdated: bool,
    whole_cards: bool,
    /// Most restarts of one of its containers.
    restarts: u32,
    ready: bool,
    /// Why it is not ready.
    trouble: Option<String>,
}

/// Policies, and opted-in namespaces with their workloads and pods.
#[derive(Clone, Debug, Default)]
pub struct Listed {
    /// All of them, by name: which one a pod falls under depends on the others.
    pub policies: Vec<(String, GPUMigrationSpec)>,
    pub namespaces: Vec<Namespace>,
    pub workloads: Vec<Workload>,
    pub pods: Vec<ListedPod>,
}

/// A project as one policy sees it.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// Its workloads, bare pods and other owners of pods.
    pub workloads: Vec<ObservedWorkload>,
    pub counts: Counts,
    /// Workloads that other policies select with equal specificity, with the names of these: no policy converts them.
    pub conflicts: BTreeMap<Key, BTreeSet<String>>,
}

/// Which policy a pod falls under. The precedence is the webhook's (`webhook::policy::Policies::select`).
enum Governing<'a> {
    None,
    Policy(&'a str),
    Conflict(Vec<&'a str>),
}

/// A policy with its selector compiled.
struct Scope<'a> {
    name: &'a str,
    spec: &'a GPUMigrationSpec,
    selector: Option<Selector>,
    specificity: usize,
}

impl<'a> Scope<'a> {
    /// `None` for a selector that is invalid: the webhook does not accept such a policy.
    fn of((name, spec): &'a (String, GPUMigrationSpec)) -> Option<Self> {
        let narrowed = spec.r#match.as_ref();
        let selector = narrowed.and_then(|narrowed| narrowed.pod_selector.as_ref());
        Some(Self {
            name,
            spec,
            selector: selector.map(|selector| selector.clone().try_into()).transpose().ok()?,
            specificity: specificity(narrowed.map_or(&[], |narrowed| &narrowed.namespaces), selector),
        })
    }

    fn applies(&self, project: &str, namespace: &str, labels: &Labels) -> bool {
        let here = |Match { namespaces, .. }: &Match| {
            namespaces.is_empty() || namespaces.iter().any(|name| name == namespace)
        };
        self.spec.project == project
            && self.spec.r#match.as_ref().is_none_or(here)
            && self.selector.as_ref().is_none_or(|selector| selector.matches(labels))
    }
}

fn governing<'a>(scopes: &[Scope<'a>], project: &str, namespace: &str, labels: &Labels) -> Governing<'a> {
    let mut found =
        scopes.iter().filter(|scope| scope.applies(project, namespace, labels)).collect::<Vec<_>>();
    let Some(narrowest) = found.iter().map(|scope| scope.specificity).max() else { return Governing::None };
    found.retain(|scope| scope.specificity == narrowest);
    for mode in [MigrationMode::Enforce, MigrationMode::Audit] {
        let equal = found.iter().filter(|scope| scope.spec.mode == mode).map(|scope| scope.name);
        match equal.collect::<Vec<_>>().as_slice() {
            [] => {}
            [one] => return Governing::Policy(one),
            all => return Governing::Conflict(all.to_vec()),
        }
    }
    // One that is off still lists its workloads.
    found.first().map_or(Governing::None, |scope| Governing::Policy(scope.name))
}

impl Listed {
    /// The `resourceVersion` that a workload was listed with.
    #[must_use]
    pub fn version(&self, key: &Key) -> Option<&str> {
        self.workloads.iter().find(|workload| workload.key == *key)?.version.as_deref()
    }

    /// The object behind a workload of a described kind.
    #[must_use]
    pub fn foreign(&self, key: &Key) -> Option<&Foreign> {
        self.workloads.iter().find(|workload| workload.key == *key)?.foreign.as_ref()
    }

    /// The project as the policy `name` sees it.
    #[must_use]
    pub fn of_policy(&self, name: &str) -> Observed {
        let namespaces = self.projects();
        let scopes = self.policies.iter().filter_map(Scope::of).collect::<Vec<_>>();
        let governing = |namespace: &str, labels: &Labels| {
            let Some((of_namespace, fixed)) = namespaces.get(namespace) else { return Governing::None };
            let opted_out = labels.get(names::OPT_OUT).is_some_and(|value| value == "true");
            let of_pod = labels.get(names::PROJECT).map(String::as_str);
            match names::project_of(of_pod, *of_namespace, *fixed) {
                Some(project) if !opted_out => governing(&scopes, project, namespace, labels),
                _ => Governing::None,
            }
        };
        let mut pods: BTreeMap<&str, Vec<&ListedPod>> = BTreeMap::new();
        for pod in &self.pods {
            if matches!(governing(&pod.namespace, &pod.labels), Governing::Policy(policy) if policy == name) {
                pods.entry(&pod.namespace).or_default().push(pod);
            }
        }
        let mut observed = Observed::default();
        let known = self.workloads.iter().map(|workload| &workload.key).collect::<BTreeSet<_>>();
        // What a listed object controls is converted with that.
        let top = |workload: &&Workload| workload.owner.as_ref().is_none_or(|owner| !known.contains(owner));
        for workload in self.workloads.iter().filter(|workload| workload.is_relevant()).filter(top) {
            let namespace = workload.key.namespace.as_str();
            match governing(namespace, workload.labels()) {
                Governing::Policy(policy) if policy == name => {
                    let pods = pods.get(namespace).map_or(&[][..], Vec::as_slice);
                    observed.workloads.push(workload.observe(pods));
                }
                Governing::Conflict(all) if all.contains(&name) => {
                    let others = all.into_iter().filter(|other| *other != name).map(str::to_owned);
                    observed.conflicts.insert(workload.key.clone(), others.collect());
                }
                Governing::None | Governing::Policy(_) | Governing::Conflict(_) => {}
            }
        }
        let mut others: BTreeMap<Key, (u32, Option<&'static str>)> = BTreeMap::new();
        for pod in pods.values().flatten() {
            if let Some(owner) = pod.other_owner(&known) {
                let why =
                    pod.controller.as_ref().and_then(|owner| why_not(&owner.kind, group(&owner.api_version)));
                let entry = others.entry(owner).or_insert((0, why));
                entry.0 += u32::from(pod.policy.is_some());
            }
        }
        observed.workloads.extend(others.into_iter().map(|(key, (shared_pods, why))| ObservedWorkload {
            key,
            management: Management::Unmanaged,
            note: Some(format!(
                "not restarted by the operator; converts when it is recreated with the label {}: \"true\" on its pods{}",
                names::CONVERT,
                why.map(|why| format!(": {why}")).unwrap_or_default()
            )),
            rolled_out: true,
            shared_pods,
            ..ObservedWorkload::default()
        }));
        observed.counts = counts(name, pods.values().flatten().copied());
        observed
    }

    /// Opted-in namespaces with their project and whether it is fixed.
    fn projects(&self) -> BTreeMap<&str, (Option<&str>, Option<&str>)> {
        let opted_in = |namespace: &&Namespace| {
            labels(&namespace.metadata).get(names::OPT_IN).is_some_and(|v| v == "true")
        };
        self.namespaces
            .iter()
            .filter(opted_in)
            .filter_map(|namespace| {
                let label = |key| labels(&namespace.metadata).get(key).map(String::as_str);
                let project = (label(names::PROJECT), label(names::FIXED_PROJECT));
                Some((namespace.metadata.name.as_deref()?, project))
            })
            .collect()
    }
}

fn labels(meta: &ObjectMeta) -> &Labels {
    static NONE: Labels = BTreeMap::new();
    meta.labels.as_ref().unwrap_or(&NONE)
}

fn is_labelled(labels: &Labels) -> bool {
    labels.get(names::CONVERT).is_some_and(|value| value == "true")
}

fn requests_whole_cards(pod: &Pod) -> bool {
    PodAsk::of(pod, &Dialect::default()).is_ok_and(|ask| ask.containers.iter().any(|c| c.demand.legacy > 0))
}

/// Whether a webhook that had not seen the newest `spec.convert` made the pod.
fn is_outdated(annotations: Option<&Labels>) -> bool {
    let generation = |text: &str| text.parse::<i64>().ok();
    let wanted = annotations.and_then(|all| generation(all.get(names::CONVERSION)?));
    let by = annotations.and_then(|all| generation(all.get(names::POLICY)?.rsplit_once('@')?.1));
    wanted.zip(by).is_some_and(|(wanted, by)| by < wanted)
}

fn controller(meta: &ObjectMeta) -> Option<&OwnerReference> {
    meta.owner_references.iter().flatten().find(|owner| owner.controller == Some(true))
}

impl ListedPod {
    /// What matters of a pod; `None` of one that has ended, is being deleted or has nothing to do with cards.
    #[must_use]
    pub fn of(pod: &Pod) -> Option<Self> {
        let annotations = pod.metadata.annotations.as_ref();
        let policy = annotations.and_then(|all| all.get(names::POLICY));
        // The form of some targets names whole cards too.
        let whole_cards = policy.is_none() && requests_whole_cards(pod);
        let relevant = whole_cards || policy.is_some() || is_labelled(labels(&pod.metadata));
        if !is_active(pod) || !relevant {
            return None;
        }
        let status = pod.status.as_ref();
        let containers = status.into_iter().flat_map(|status| {
            let init = status.init_container_statuses.iter().flatten();
            init.chain(status.container_statuses.iter().flatten())
        });
        let restarts = containers.clone().map(|container| container.restart_count).max().unwrap_or(0);
        let conditions = status.iter().flat_map(|status| status.conditions.iter().flatten());
        let ready =
            conditions.clone().any(|condition| condition.type_ == "Ready" && condition.status == "True");
        let mut refused =
            conditions.filter(|condition| condition.type_ == "PodScheduled" && condition.status == "False");
        let refused = refused.find_map(|condition| condition.message.clone());
        let trouble = refused.or_else(|| containers.filter_map(waits).next());
        let name = pod.metadata.name.clone().unwrap_or_default();
        Some(Self {
            namespace: pod.metadata.namespace.clone().unwrap_or_default(),
            trouble: (!ready).then(|| format!("pod {name}: {}", trouble.as_deref().unwrap_or("not ready"))),
            name,
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            labels: labels(&pod.metadata).clone(),
            controller: controller(&pod.metadata).cloned(),
            policy: policy
                .map(|value| value.rsplit_once('@').map_or(value.as_str(), |(name, _)| name).to_owned()),
            outdated: is_outdated(annotations),
            whole_cards,
            restarts: restarts.try_into().unwrap_or(0),
            ready,
        })
    }

    /// Its owner, where the operator does not list that itself: a bare pod, a Job, another controller.
    fn other_owner(&self, known: &BTreeSet<&Key>) -> Option<Key> {
        if !self.whole_cards && self.policy.is_none() {
            return None;
        }
        let key = |kind: &str, name: &str| Key {
            kind: kind.to_owned(),
            namespace: self.namespace.clone(),
            name: name.to_owned(),
        };
        let Some(owner) = &self.controller else { return Some(key("Pod", &self.name)) };
        let ours = owner.api_version.starts_with("apps/");
        // A ReplicaSet is named after its Deployment or Rollout and the hash of the template.
        let parent = |label: &str| {
            let hash = self.labels.get(label)?;
            owner.name.strip_suffix(hash.as_str())?.strip_suffix('-')
        };
        match owner.kind.as_str() {
            "StatefulSet" | "DaemonSet" if ours => None,
            "ReplicaSet" if ours => {
                if let Some(rollout) = parent("rollouts-pod-template-hash") {
                    let rollout = key("Rollout", rollout);
                    return (!known.contains(&rollout)).then_some(rollout);
                }
                let deployment = parent("pod-template-hash").map(|name| key("Deployment", name));
                let listed = deployment.is_some_and(|deployment| known.contains(&deployment));
                (!listed).then(|| key("ReplicaSet", &owner.name))
            }
            kind => {
                let owner = key(&display(kind, &owner.api_version), &owner.name);
                (!known.contains(&owner)).then_some(owner)
            }
        }
    }
}

fn group(api_version: &str) -> &str {
    api_version.split_once('/').map_or("", |(group, _)| group)
}

/// Why a container does not run, in the kubelet's words.
fn waits(container: &ContainerStatus) -> Option<String> {
    let state = container.state.as_ref()?;
    let waiting =
        state.waiting.as_ref().map(|waiting| (waiting.reason.as_deref(), waiting.message.as_deref()));
    let ended = state.terminated.as_ref().map(|ended| (ended.reason.as_deref(), ended.message.as_deref()));
    let (reason, message) = waiting.or(ended)?;
    let message = message.map(|message| format!(": {message}")).unwrap_or_default();
    Some(format!("container {}: {}{message}", container.name, reason?))
}

impl Workload {
    fn labels(&self) -> &Labels {
        static NONE: Labels = BTreeMap::new();
        self.template.metadata.as_ref().and_then(|meta| meta.labels.as_ref()).unwrap_or(&NONE)
    }

    fn pod(&self) -> Pod {
        Pod { spec: self.template.spec.clone(), ..Pod::default() }
    }

    /// It requests whole cards, or it is labelled.
    fn is_relevant(&self) -> bool {
        is_labelled(self.labels()) || requests_whole_cards(&self.pod())
    }

    /// Whole cards of all its pods.
    fn cards(&self) -> u32 {
        let ask = PodAsk::of(&self.pod(), &Dialect::default());
        ask.map_or(0, |ask| ask.effective().legacy).saturating_mul(self.replicas)
    }

    /// As observed, with the pods of its namespace.
    pub(crate) fn observe(&self, pods: &[&ListedPod]) -> ObservedWorkload {
        let labelled = is_labelled(self.labels());
        let annotations = self.template.metadata.as_ref().and_then(|meta| meta.annotations.as_ref());
        let selector = Selector::try_from(self.selector.clone()).ok();
        let own =
            pods.iter().copied().filter(|pod| selector.as_ref().is_some_and(|s| s.matches(&pod.labels)));
        let (newest, former) =
            own.partition::<Vec<&ListedPod>, _>(|pod| is_labelled(&pod.labels) == labelled);
        let converting = newest.iter().filter(|_| labelled);
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let blocking = former.iter().filter(|pod| self.ordered && !labelled && !pod.ready);
        ObservedWorkload {
            key: self.key.clone(),
            management: self.management,
            note: self.note.clone(),
            labelled,
            conversion: annotations.and_then(|all| all.get(names::CONVERSION).cloned()),
            cards: self.cards(),
            rolled_out: self.rolled_out,
            restarts: converting.clone().map(|pod| pod.restarts).max().unwrap_or(0),
            unconverted: count(converting.filter(|pod| pod.policy.is_none() || pod.outdated).count()),
            shared_pods: count(newest.iter().chain(&former).filter(|pod| pod.policy.is_some()).count()),
            trouble: newest.iter().find_map(|pod| pod.trouble.clone()),
            blocking: blocking
                .map(|pod| BlockingPod { name: pod.name.clone(), uid: pod.uid.clone() })
                .collect(),
        }
    }
}

fn counts<'a>(policy: &str, pods: impl Iterator<Item = &'a ListedPod>) -> Counts {
    let mut counts = Counts::default();
    for pod in pods {
        counts.converted += u32::from(pod.policy.as_deref() == Some(policy));
        counts.legacy += u32::from(pod.whole_cards && !is_labelled(&pod.labels));
        counts.unconvertible += u32::from(pod.whole_cards && is_labelled(&pod.labels));
    }
    counts
}

/// Whether the operator restarts a workload. One with a controller of its own belongs to that: a change would be reverted.
fn management(kind: &str, meta: &ObjectMeta, by_hand: Option<&str>) -> (Management, Option<String>) {
    if let Some(owner) = controller(meta) {
        let note = format!(
            "controlled by {} {} ({}); set the label {}: \"true\" in the pod template there",
            owner.kind,
            owner.name,
            owner.api_version,
            names::CONVERT
        );
        return (Management::Unmanaged, Some(note));
    }
    match by_hand {
        Some(why) => (Management::Manual, Some(format!("the {kind} is not restarted: {why}"))),
        None => (Management::Restart, None),
    }
}

/// The controller of an object, as a workload.
fn owner(meta: &ObjectMeta) -> Option<Key> {
    let owner = controller(meta)?;
    let kind = display(&owner.kind, &owner.api_version);
    Some(Key { kind, namespace: meta.namespace.clone()?, name: owner.name.clone() })
}

fn key(kind: &str, meta: &ObjectMeta) -> Option<Key> {
    Some(Key { kind: kind.to_owned(), namespace: meta.namespace.clone()?, name: meta.name.clone()? })
}

/// The controller has observed the newest spec.
fn is_current(meta: &ObjectMeta, observed: Option<i64>) -> bool {
    observed >= meta.generation
}

impl Workload {
    /// Of a kind that [`crate::kinds`] describes.
    pub(crate) fn described(
        (key, meta): (Key, &ObjectMeta),
        template: PodTemplateSpec,
        selector: LabelSelector,
        rolled_out: bool,
        by_hand: Option<&str>,
        replicas: u32,
    ) -> Self {
        let (management, note) = management(&key.kind, meta, by_hand);
        Self {
            key,
            version: meta.resource_version.clone(),
            template,
            selector,
            rolled_out,
            management,
            note,
            ordered: false,
            replicas,
            owner: owner(meta),
            foreign: None,
        }
    }

    /// Of an object of a described kind.
    #[must_use]
    pub fn of_foreign(kind: &Arc<Described>, mut object: serde_json::Value) -> Option<Self> {
        let workload = kind.workload(&object)?;
        if let Some(object) = object.as_object_mut() {
            object.remove("status");
        }
        Some(Self { foreign: Some(Foreign { kind: Arc::clone(kind), object }), ..workload })
    }

    #[must_use]
    pub fn of_deployment(object: &Deployment) -> Option<Self> {
        let (spec, status) = (object.spec.as_ref()?, object.status.clone().unwrap_or_default());
        let wanted = spec.replicas.unwrap_or(1);
        let all = [status.replicas, status.updated_replicas, status.available_replicas];
        let paused = (spec.paused == Some(true)).then_some("spec.paused is true");
        let (management, note) = management("Deployment", &object.metadata, paused);
        Some(Self {
            key: key("Deployment", &object.metadata)?,
            version: object.metadata.resource_version.clone(),
            template: spec.template.clone(),
            selector: spec.selector.clone(),
            rolled_out: is_current(&object.metadata, status.observed_generation)
                && all.iter().all(|count| count.unwrap_or(0) == wanted),
            management,
            note,
            ordered: false,
            replicas: wanted.try_into().unwrap_or(0),
            owner: owner(&object.metadata),
            foreign: None,
        })
    }

    #[must_use]
    pub fn of_stateful_set(object: &StatefulSet) -> Option<Self> {
        let (spec, status) = (object.spec.as_ref()?, object.status.clone().unwrap_or_default());
        let wanted = spec.replicas.unwrap_or(1);
        let strategy = spec.update_strategy.as_ref();
        let partition = strategy.and_then(|s| s.rolling_update.as_ref()?.partition).unwrap_or(0);
        let ready = status.ready_replicas.unwrap_or(0) == wanted && status.replicas == wanted;
        let by_hand = match strategy.and_then(|strategy| strategy.type_.as_deref()) {
            Some("OnDelete") => Some("spec.updateStrategy is OnDelete; delete its pods"),
            _ => (partition > 0).then_some("spec.updateStrategy.rollingUpdate.partition is above 0"),
        };
        let (management, note) = management("StatefulSet", &object.metadata, by_hand);
        Some(Self {
            key: key("StatefulSet", &object.metadata)?,
            version: object.metadata.resource_version.clone(),
            template: spec.template.clone(),
            selector: spec.selector.clone(),
            rolled_out: is_current(&object.metadata, status.observed_generation)
                && ready
                && status.current_revision == status.update_revision,
            management,
            note,
            ordered: spec.pod_management_policy.as_deref() != Some("Parallel"),
            replicas: wanted.try_into().unwrap_or(0),
            owner: owner(&object.metadata),
            foreign: None,
        })
    }

    #[must_use]
    pub fn of_daemon_set(object: &DaemonSet) -> Option<Self> {
        let (spec, status) = (object.spec.as_ref()?, object.status.clone().unwrap_or_default());
        let wanted = status.desired_number_scheduled;
        let strategy = spec.update_strategy.as_ref().and_then(|strategy| strategy.type_.as_deref());
        let by_hand =
            (strategy == Some("OnDelete")).then_some("spec.updateStrategy is OnDelete; delete its pods");
        let (management, note) = management("DaemonSet", &object.metadata, by_hand);
        Some(Self {
            key: key("DaemonSet", &object.metadata)?,
            version: object.metadata.resource_version.clone(),
            template: spec.template.clone(),
            selector: spec.selector.clone(),
            rolled_out: is_current(&object.metadata, status.observed_generation)
                && status.updated_number_scheduled.unwrap_or(0) == wanted
                && status.number_available.unwrap_or(0) == wanted,
            management,
            note,
            ordered: false,
            replicas: wanted.try_into().unwrap_or(0),
            owner: owner(&object.metadata),
            foreign: None,
        })
    }

    /// Of a CronJob: its template applies to the next run; the current one is left to finish.
    #[must_use]
    pub fn of_cron_job(object: &CronJob) -> Option<Self> {
        let spec = object.spec.as_ref()?;
        let (management, note) = management("CronJob", &object.metadata, None);
        Some(Self {
            key: key("CronJob", &object.metadata)?,
            version: object.metadata.resource_version.clone(),
            template: spec.job_template.spec.as_ref()?.template.clone(),
            // Its pods are not waited for.
            selector: LabelSelector {
                match_labels: Some(BTreeMap::from([("gpu-migrate.io/none".to_owned(), String::new())])),
                ..LabelSelector::default()
            },
            rolled_out: true,
            management,
            note,
            ordered: false,
            replicas: 1,
            owner: owner(&object.metadata),
            foreign: None,
        })
    }
}

/// Workloads that the waves name and that do not exist.
#[must_use]
pub fn missing(spec: &GPUMigrationSpec, seen: &[ObservedWorkload]) -> BTreeSet<String> {
    let there = seen.iter().map(|one| one.key.to_string()).collect::<BTreeSet<_>>();
    let named = spec.rollout.waves.iter().filter_map(|wave| wave.workloads.as_ref()).flatten().cloned();
    named.filter(|name| !there.contains(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpu_migrate_model::crd::WorkloadKind;
    use serde_json::{Value, json};

    fn listed(objects: Value) -> Listed {
        let mut listed = Listed::default();
        for object in objects.as_array().unwrap() {
            let object = object.clone();
            let workload = match object["kind"].as_str().unwrap() {
                "Namespace" => {
                    listed.namespaces.push(serde_json::from_value(object).unwrap());
                    continue;
                }
                "Pod" => {
                    listed.pods.extend(ListedPod::of(&serde_json::from_value(object).unwrap()));
                    continue;
                }
                "Deployment" => Workload::of_deployment(&serde_json::from_value(object).unwrap()),
                "StatefulSet" => Workload::of_stateful_set(&serde_json::from_value(object).unwrap()),
                "DaemonSet" => Workload::of_daemon_set(&serde_json::from_value(object).unwrap()),
                _ => Workload::of_cron_job(&serde_json::from_value(object).unwrap()),
            };
            listed.workloads.push(workload.unwrap());
        }
        listed
    }

    fn template(labels: Value, cards: u32) -> Value {
        json!({"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": cards.to_string()}}}]}})
    }

    fn namespace(name: &str, project: Option<&str>, opted_in: &str) -> Value {
        json!({"kind": "Namespace", "metadata": {"name": name, "labels": {"gpu-migrate.io/opt-in": opted_in, "gpu-migrate.io/project": project.unwrap_or("-")}}})
    }

    fn deployment(namespace: &str, name: &str, labels: Value, ready: u32, observed: i64) -> Value {
        json!({"kind": "Deployment", "metadata": {"name": name, "namespace": namespace, "generation": 3},
            "spec": {"replicas": 2, "selector": {"matchLabels": {"app": name}}, "template": template(labels, 1)},
            "status": {"observedGeneration": observed, "replicas": 2, "updatedReplicas": 2, "availableReplicas": ready}})
    }

    fn policy(project: &str) -> GPUMigrationSpec {
        GPUMigrationSpec {
            project: project.into(),
            mode: MigrationMode::Enforce,
            ..GPUMigrationSpec::default()
        }
    }

    fn narrowed(project: &str, narrow: Value) -> GPUMigrationSpec {
        GPUMigrationSpec { r#match: Some(serde_json::from_value(narrow).unwrap()), ..policy(project) }
    }

    /// The project as the policy `m` sees it, alone.
    fn observed(mut listed: Listed, spec: GPUMigrationSpec) -> Observed {
        listed.policies = vec![("m".to_owned(), spec)];
        listed.of_policy("m")
    }

    fn names(seen: &[ObservedWorkload]) -> Vec<&str> {
        seen.iter().map(|one| one.key.name.as_str()).collect()
    }

    #[test]
    fn membership_is_opt_in_and_project_and_the_narrowing_of_the_policy() {
        let objects = json!([
            namespace("a", Some("p"), "true"), namespace("b", Some("p"), "false"), namespace("c", None, "true"),
            deployment("a", "by-namespace", json!({"app": "x"}), 2, 3),
            deployment("a", "other-project", json!({"gpu-migrate.io/project": "q"}), 2, 3),
            deployment("a", "opted-out", json!({"gpu-migrate.io/opt-out": "true"}), 2, 3),
            deployment("b", "not-opted-in", json!({}), 2, 3),
            deployment("c", "by-pod", json!({"gpu-migrate.io/project": "p"}), 2, 3),
            {"kind": "CronJob", "metadata": {"name": "no-card", "namespace": "a"}, "spec": {"schedule": "", "jobTemplate": {"spec": {"template": template(json!({}), 0)}}}},
        ]);
        assert_eq!(
            names(&observed(listed(objects.clone()), policy("p")).workloads),
            ["by-namespace", "by-pod"]
        );
        let narrow = narrowed(
            "p",
            json!({"namespaces": ["a"], "podSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["x"]}]}}),
        );
        assert_eq!(names(&observed(listed(objects), narrow).workloads), ["by-namespace"]);
    }

    #[test]
    fn settled_means_seen_by_the_controller_and_all_ready() {
        let rolled_out = |object: Value| listed(json!([object])).workloads[0].rolled_out;
        assert!(rolled_out(deployment("a", "d", json!({}), 2, 3)));
        assert!(!rolled_out(deployment("a", "d", json!({}), 1, 3)), "one is not ready");
        assert!(!rolled_out(deployment("a", "d", json!({}), 2, 2)), "the controller has not seen the change");
        let stateful = |current: &str, strategy: Value| {
            json!({"kind": "StatefulSet", "metadata": {"name": "s", "namespace": "a", "generation": 1},
            "spec": {"serviceName": "s", "replicas": 1, "selector": {}, "template": template(json!({}), 1), "updateStrategy": strategy},
            "status": {"observedGeneration": 1, "replicas": 1, "readyReplicas": 1, "currentRevision": current, "updateRevision": "2"}})
        };
        assert!(rolled_out(stateful("2", json!({}))));
        assert!(!rolled_out(stateful("1", json!({}))), "the old revision still runs");
        let rolls = |strategy: Value| {
            listed(json!([stateful("2", strategy)])).workloads[0].management == Management::Restart
        };
        assert!(rolls(json!({"type": "RollingUpdate"})));
        assert!(!rolls(json!({"type": "OnDelete"})), "it would never restart");
        let daemon = |available: u32| {
            json!({"kind": "DaemonSet", "metadata": {"name": "d", "namespace": "a", "generation": 1},
            "spec": {"selector": {}, "template": template(json!({}), 1)},
            "status": {"observedGeneration": 1, "desiredNumberScheduled": 3, "currentNumberScheduled": 3, "numberMisscheduled": 0, "numberReady": 3, "updatedNumberScheduled": 3, "numberAvailable": available}})
        };
        assert!(rolled_out(daemon(3)) && !rolled_out(daemon(2)));
    }

    #[test]
    fn pods_tell_restarts_and_whether_they_were_converted() {
        let pod = |name: &str, labels: Value, annotations: Value, restarts: u32, cards: u32| {
            json!({"kind": "Pod", "metadata": {"name": name, "namespace": "a", "labels": labels, "annotations": annotations,
                "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "u", "controller": true}]},
            "spec": template(json!({}), cards)["spec"], "status": {"phase": "Running", "containerStatuses": [{"name": "c", "ready": true, "image": "", "imageID": "", "restartCount": restarts}]}})
        };
        let labelled = json!({"app": "d", "gpu-migrate.io/convert": "true"});
        let objects = listed(json!([
            namespace("a", Some("p"), "true"),
            deployment("a", "d", labelled.clone(), 2, 3),
            pod("old", json!({"app": "d"}), json!({}), 9, 1),
            pod("new", labelled.clone(), json!({"gpu-migrate.io/policy": "m@4"}), 2, 0),
            pod("slipped", labelled, json!({}), 0, 1),
        ]));
        let Observed { workloads: seen, counts, .. } = observed(objects, policy("p"));
        let one = &seen[0];
        assert_eq!(
            (one.labelled, one.restarts, one.unconverted),
            (true, 2, 1),
            "the old pod's restarts are not the new one's"
        );
        assert_eq!(counts, Counts { converted: 1, legacy: 1, unconvertible: 1 });
    }

    #[test]
    fn bare_pods_and_jobs_are_reported_and_missing_names_too() {
        let pod = |name: &str, owner: Value| json!({"kind": "Pod", "metadata": {"name": name, "namespace": "a", "ownerReferences": owner}, "spec": template(json!({}), 1)["spec"]});
        let job = json!([{"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "u", "controller": true}]);
        let objects = json!([
            namespace("a", Some("p"), "true"),
            pod("bare", json!([])),
            pod("train-x", job.clone()),
            pod("train-y", job)
        ]);
        let seen = observed(listed(objects), policy("p")).workloads;
        assert!(seen.iter().all(|one| one.management == Management::Unmanaged));
        assert_eq!(
            seen.iter().map(|one| one.key.to_string()).collect::<Vec<_>>(),
            ["Job/a/train", "Pod/a/bare"],
            "a Job of many pods is one"
        );
        let mut spec = policy("p");
        spec.rollout.waves =
            serde_json::from_value(json!([{"workloads": ["Pod/a/bare", "Deployment/a/gone"]}])).unwrap();
        assert_eq!(missing(&spec, &seen).into_iter().collect::<Vec<_>>(), ["Deployment/a/gone"]);
    }

    #[test]
    fn a_workload_with_a_controller_of_its_own_is_never_changed() {
        let mut owned = deployment("a", "ksvc-00001-deployment", json!({}), 2, 3);
        owned["metadata"]["ownerReferences"] = json!([{"apiVersion": "serving.knative.dev/v1", "kind": "Revision", "name": "ksvc-00001", "uid": "u", "controller": true}]);
        let seen = observed(listed(json!([namespace("a", Some("p"), "true"), owned])), policy("p")).workloads;
        assert_eq!(seen[0].management, Management::Unmanaged);
        assert!(seen[0].note.as_ref().unwrap().contains("Revision ksvc-00001 (serving.knative.dev/v1)"));
    }

    #[test]
    fn pods_of_other_controllers_are_reported_by_owner() {
        let pod = |name: &str, hash: &str, owner: (&str, &str, &str)| {
            json!({"kind": "Pod", "metadata": {"name": name, "namespace": "a", "labels": {hash: "6f7c"},
                "ownerReferences": [{"apiVersion": owner.0, "kind": owner.1, "name": owner.2, "uid": "u", "controller": true}]},
                "spec": template(json!({}), 1)["spec"]})
        };
        let objects = json!([
            namespace("a", Some("p"), "true"),
            deployment("a", "d", json!({}), 2, 3),
            pod("d-6f7c-x", "pod-template-hash", ("apps/v1", "ReplicaSet", "d-6f7c")),
            pod("canary-6f7c-x", "rollouts-pod-template-hash", ("apps/v1", "ReplicaSet", "canary-6f7c")),
            pod("alone-x", "app", ("apps/v1", "ReplicaSet", "alone")),
            pod("set-0", "app", ("apps.kruise.io/v1beta1", "StatefulSet", "set")),
            pod("ray-head", "app", ("ray.io/v1", "RayCluster", "ray")),
        ]);
        let seen = observed(listed(objects), policy("p")).workloads;
        let others = seen.iter().filter(|one| one.management == Management::Unmanaged);
        assert_eq!(
            others.map(|one| one.key.to_string()).collect::<Vec<_>>(),
            [
                "RayCluster/a/ray",
                "ReplicaSet/a/alone",
                "Rollout/a/canary",
                "StatefulSet.apps.kruise.io/a/set"
            ]
        );
    }

    #[test]
    fn a_described_kind_is_a_workload_and_what_it_controls_is_none() {
        let rollout = json!({"metadata": {"name": "canary", "namespace": "a", "generation": 1},
            "spec": {"selector": {"matchLabels": {"app": "canary"}}, "template": template(json!({"app": "canary"}), 1)},
            "status": {"observedGeneration": "1", "phase": "Healthy"}});
        let owner = json!([{"apiVersion": "argoproj.io/v1alpha1", "kind": "Rollout", "name": "canary", "uid": "u", "controller": true}]);
        let mut owned = deployment("a", "made", json!({}), 2, 3);
        owned["metadata"]["ownerReferences"] = owner;
        let pod = json!({"kind": "Pod", "metadata": {"name": "canary-6f7c-x", "namespace": "a", "labels": {"app": "canary", "rollouts-pod-template-hash": "6f7c"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "canary-6f7c", "uid": "u", "controller": true}]},
            "spec": template(json!({}), 1)["spec"]});
        let mut listed = listed(json!([namespace("a", Some("p"), "true"), owned, pod]));
        let kind =
            Described::of(&WorkloadKind { name: "Rollout.argoproj.io".into(), ..WorkloadKind::default() });
        listed.workloads.extend(Workload::of_foreign(&Arc::new(kind.unwrap()), rollout));
        let key = Key { kind: "Rollout".into(), namespace: "a".into(), name: "canary".into() };
        assert!(listed.foreign(&key).unwrap().object["status"].is_null());
        let seen = observed(listed, policy("p")).workloads;
        assert_eq!(names(&seen), ["canary"]);
        assert_eq!((seen[0].management, seen[0].rolled_out, seen[0].cards), (Management::Restart, true, 1));
    }

    #[test]
    fn the_narrowest_policy_has_a_workload_and_equal_ones_have_none() {
        let objects = json!([
            namespace("a", Some("p"), "true"),
            deployment("a", "d", json!({"tier": "x"}), 2, 3),
            deployment("a", "e", json!({}), 2, 3),
        ]);
        let tier = || narrowed("p", json!({"podSelector": {"matchLabels": {"tier": "x"}}}));
        let mut listed = listed(objects);
        let off = GPUMigrationSpec { mode: MigrationMode::Off, ..tier() };
        let audit = GPUMigrationSpec { mode: MigrationMode::Audit, ..tier() };
        let mut seen = |policies: &[(&str, &GPUMigrationSpec)], name: &str| {
            listed.policies =
                policies.iter().map(|(name, spec)| ((*name).to_owned(), (*spec).clone())).collect();
            let observed = listed.of_policy(name);
            let conflicts =
                observed.conflicts.into_iter().map(|(key, others)| (key.name, others)).collect::<Vec<_>>();
            (names(&observed.workloads).into_iter().map(str::to_owned).collect::<Vec<_>>(), conflicts)
        };
        let (wide, narrow) = (policy("p"), tier());
        let two = [("wide", &wide), ("narrow", &narrow)];
        assert_eq!(seen(&two, "wide").0, ["e"]);
        assert_eq!(seen(&two, "narrow").0, ["d"]);
        let three = [("narrow", &narrow), ("same", &narrow), ("wide", &wide)];
        assert_eq!(seen(&three, "narrow"), (vec![], vec![("d".to_owned(), ["same".to_owned()].into())]));
        assert_eq!(seen(&three, "same").1[0].1, ["narrow".to_owned()].into());
        assert_eq!(seen(&three, "wide"), (vec!["e".to_owned()], vec![]));
        for weaker in [&off, &audit] {
            assert_eq!(seen(&[("narrow", &narrow), ("weaker", weaker)], "narrow").0, ["d"]);
        }
    }

    #[test]
    fn the_pod_that_an_ordered_stateful_set_waits_for_is_named() {
        let set = |policy: &str| {
            json!({"kind": "StatefulSet", "metadata": {"name": "s", "namespace": "a"},
                "spec": {"serviceName": "s", "replicas": 3, "podManagementPolicy": policy, "selector": {"matchLabels": {"app": "s"}}, "template": template(json!({"app": "s"}), 1)},
                "status": {"replicas": 3, "readyReplicas": 2, "currentRevision": "1", "updateRevision": "1"}})
        };
        let pod = |name: &str, converted: bool, ready: &str| {
            json!({"kind": "Pod", "metadata": {"name": name, "uid": name, "namespace": "a", "labels": if converted { json!({"app": "s", "gpu-migrate.io/convert": "true"}) } else { json!({"app": "s"}) },
                "annotations": {"gpu-migrate.io/policy": "m@1"}},
                "spec": template(json!({}), 0)["spec"], "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": ready}]}})
        };
        let blocking = |policy_: &str| {
            let objects = json!([
                namespace("a", Some("p"), "true"),
                set(policy_),
                pod("s-2", true, "False"),
                pod("s-1", true, "True"),
                pod("s-0", false, "False")
            ]);
            observed(listed(objects), policy("p")).workloads[0]
                .blocking
                .iter()
                .map(|pod| pod.name.clone())
                .collect::<Vec<_>>()
        };
        assert_eq!(blocking("OrderedReady"), ["s-2"]);
        assert!(blocking("Parallel").is_empty());
    }

    /// HAMi's form names `nvidia.com/gpu`.
    #[test]
    fn a_pod_that_was_converted_counts_so_whatever_its_form_names() {
        let pod = |name: &str, annotations: Value| {
            json!({"kind": "Pod", "metadata": {"name": name, "uid": name, "namespace": "a", "annotations": annotations},
                "spec": template(json!({}), 1)["spec"], "status": {"phase": "Running"}})
        };
        let objects = json!([
            namespace("a", Some("p"), "true"),
            pod("converted", json!({"gpu-migrate.io/policy": "m@1"})),
            pod("legacy", json!({})),
        ]);
        let counts = observed(listed(objects), policy("p")).counts;
        assert_eq!((counts.converted, counts.legacy, counts.unconvertible), (1, 1, 0));
    }

    #[test]
    fn why_a_pod_is_not_ready_is_in_the_words_of_scheduler_and_kubelet() {
        let trouble = |status: Value| {
            let pod = json!({"metadata": {"name": "x", "namespace": "a"}, "spec": template(json!({}), 1)["spec"], "status": status});
            ListedPod::of(&serde_json::from_value(pod).unwrap()).unwrap().trouble
        };
        let unschedulable = json!({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"}]});
        assert_eq!(trouble(unschedulable).unwrap(), "pod x: 0/3 nodes are available");
        let crashing = json!({"containerStatuses": [{"name": "c", "ready": false, "image": "", "imageID": "", "restartCount": 3,
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}}}]});
        assert_eq!(trouble(crashing).unwrap(), "pod x: container c: CrashLoopBackOff: back-off 40s");
        assert_eq!(trouble(json!({"conditions": [{"type": "Ready", "status": "True"}]})), None);
    }
}
