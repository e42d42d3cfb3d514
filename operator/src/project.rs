//! The workloads of a project, from lists of the API server. Pure.

use crate::kinds::{Described, display, why_not};
use crate::waves::{BlockingPod, Key, Management, ObservedWorkload};
use gpu_migrate_model::ask::PodAsk;
use gpu_migrate_model::crd::{Counts, GPUMigrationSpec, Match, MigrationMode, specificity};
use gpu_migrate_model::lifecycle::is_active;
use gpu_migrate_model::names::{self, Dialect};
use gpu_migrate_model::selector::matches;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, StatefulSet};
use k8s_openapi::api::batch::v1::CronJob;
use k8s_openapi::api::core::v1::{ContainerStatus, Namespace, Pod, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

type Labels = BTreeMap<String, String>;

/// What matters here of a workload. All of the cluster are kept, so nothing else of them is.
#[derive(Clone, Debug)]
pub struct Workload {
    key: Key,
    /// Its `resourceVersion`: patches are refused if it has changed since.
    version: Option<String>,
    /// Of its pod template.
    labels: Labels,
    /// The recorded conversion that its pod template names.
    conversion: Option<String>,
    /// Its pod template requests whole cards.
    whole_cards: bool,
    /// Whole cards of one pod.
    cards: u32,
    selector: Option<LabelSelector>,
    /// All pods are of the newest template and ready.
    rolled_out: bool,
    management: Management,
    note: Option<String>,
    /// Its pods are replaced in order: one that is not ready keeps it from going on.
    ordered: bool,
    replicas: u32,
    /// It is rolled out with no fewer pods than `replicas`.
    exact: bool,
    /// The object that controls it.
    owner: Option<Key>,
    /// Of a kind that is not Kubernetes' own: the merge patch of its pod templates for given metadata is made from it.
    foreign: Option<Foreign>,
}

/// An object of a described kind, as far as a patch of it needs that.
#[derive(Clone, Debug)]
pub struct Foreign {
    pub kind: Arc<Described>,
    /// Paths of the metadata of its pod templates.
    pub templates: Vec<String>,
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
    pub workloads: Vec<Arc<Workload>>,
    pub pods: Vec<Arc<ListedPod>>,
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

/// A policy with how specific it is.
struct Scope<'a> {
    name: &'a str,
    spec: &'a GPUMigrationSpec,
    selector: Option<&'a LabelSelector>,
    specificity: usize,
}

impl<'a> Scope<'a> {
    fn of((name, spec): &'a (String, GPUMigrationSpec)) -> Self {
        let narrowed = spec.r#match.as_ref();
        let selector = narrowed.and_then(|narrowed| narrowed.pod_selector.as_ref());
        let specificity = specificity(narrowed.map_or(&[], |narrowed| &narrowed.namespaces), selector);
        Self { name, spec, selector, specificity }
    }

    fn applies(&self, project: &str, namespace: &str, labels: &Labels) -> bool {
        let here = |Match { namespaces, .. }: &Match| {
            namespaces.is_empty() || namespaces.iter().any(|name| name == namespace)
        };
        self.spec.project == project
            && self.spec.r#match.as_ref().is_none_or(here)
            && self
                .selector
                .is_none_or(|selector| matches(selector, |key| labels.get(key).map(String::as_str)))
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
        self.workloads.iter().find(|workload| workload.key == *key)?.version()
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
        let scopes = self.policies.iter().map(Scope::of).collect::<Vec<_>>();
        let governing = |namespace: &str, labels: &Labels| {
            let Some((of_namespace, fixed)) = namespaces.get(namespace) else { return Governing::None };
            let opted_out = labels.get(names::OPT_OUT).is_some_and(|value| value == "true");
            let of_pod = labels.get(names::PROJECT).map(String::as_str);
            match names::project_of(of_pod, *of_namespace, *fixed) {
                Some(project) if !opted_out => governing(&scopes, project, namespace, labels),
                _ => Governing::None,
            }
        };
        // With whether they are under this policy: a pod's own labels may say otherwise than those of its workload.
        let mut pods: BTreeMap<&str, Vec<(&ListedPod, bool)>> = BTreeMap::new();
        for pod in self.pods.iter().filter(|pod| namespaces.contains_key(pod.namespace.as_str())) {
            let ours =
                matches!(governing(&pod.namespace, &pod.labels), Governing::Policy(policy) if policy == name);
            pods.entry(&pod.namespace).or_default().push((pod, ours));
        }
        let mut observed = Observed::default();
        let known = self.workloads.iter().map(|workload| workload.key()).collect::<BTreeSet<_>>();
        // What a listed object controls is converted with that.
        let top =
            |workload: &&Arc<Workload>| workload.owner.as_ref().is_none_or(|owner| !known.contains(owner));
        for workload in self.workloads.iter().filter(|workload| workload.is_relevant()).filter(top) {
            let namespace = workload.key.namespace.as_str();
            match governing(namespace, &workload.labels) {
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
        let ours = pods.values().flatten().filter(|(_, ours)| *ours).map(|(pod, _)| *pod);
        for pod in ours.clone() {
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
        observed.counts = counts(name, ours);
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
    /// Of its object and pod template; ready, and with one replica.
    fn new(
        key: Key,
        meta: &ObjectMeta,
        template: &PodTemplateSpec,
        selector: &LabelSelector,
        by_hand: Option<&str>,
    ) -> Self {
        let (management, note) = management(&key.kind, meta, by_hand);
        let of_template = template.metadata.as_ref();
        let annotations = of_template.and_then(|meta| meta.annotations.as_ref());
        let pod = Pod { spec: template.spec.clone(), ..Pod::default() };
        Self {
            key,
            version: meta.resource_version.clone(),
            labels: of_template.and_then(|meta| meta.labels.clone()).unwrap_or_default(),
            conversion: annotations.and_then(|all| all.get(names::CONVERSION).cloned()),
            whole_cards: requests_whole_cards(&pod),
            cards: PodAsk::of(&pod, &Dialect::default()).map_or(0, |ask| ask.effective().legacy),
            selector: Some(selector.clone()),
            rolled_out: true,
            management,
            note,
            ordered: false,
            replicas: 1,
            exact: false,
            owner: owner(meta),
            foreign: None,
        }
    }

    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// The `resourceVersion` that it was read with.
    #[must_use]
    pub fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }

    /// It requests whole cards, or it is labelled.
    fn is_relevant(&self) -> bool {
        is_labelled(&self.labels) || self.whole_cards
    }

    /// As observed, with the pods of its namespace and whether they are under its policy.
    pub(crate) fn observe(&self, pods: &[(&ListedPod, bool)]) -> ObservedWorkload {
        let labelled = is_labelled(&self.labels);
        let selector = self.selector.as_ref();
        let own = pods.iter().copied().filter(|(pod, _)| {
            selector.is_some_and(|one| matches(one, |key| pod.labels.get(key).map(String::as_str)))
        });
        let (newest, former) = own.partition::<Vec<_>, _>(|(pod, _)| is_labelled(&pod.labels) == labelled);
        // Pods are watched apart from what makes them: until all of them are seen there is nothing to judge.
        let all_seen = !labelled || !self.exact || newest.len() >= self.replicas as usize;
        let [newest, former] = [newest, former]
            .map(|pods| pods.into_iter().filter(|(_, ours)| *ours).map(|(pod, _)| pod).collect::<Vec<_>>());
        let converting = newest.iter().filter(|_| labelled);
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let blocking = former.iter().filter(|pod| self.ordered && !labelled && !pod.ready);
        ObservedWorkload {
            key: self.key.clone(),
            management: self.management,
            note: self.note.clone(),
            labelled,
            conversion: self.conversion.clone(),
            cards: self.cards.saturating_mul(self.replicas),
            rolled_out: self.rolled_out && all_seen,
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
        template: &PodTemplateSpec,
        selector: &LabelSelector,
        rolled_out: bool,
        by_hand: Option<&str>,
        replicas: u32,
    ) -> Self {
        Self { rolled_out, replicas, ..Self::new(key, meta, template, selector, by_hand) }
    }

    /// Of an object of a described kind.
    #[must_use]
    pub fn of_foreign(kind: &Arc<Described>, object: &serde_json::Value) -> Option<Self> {
        let workload = kind.workload(object)?;
        let foreign = Foreign { kind: Arc::clone(kind), templates: kind.templates(object) };
        Some(Self { foreign: Some(foreign), ..workload })
    }

    #[must_use]
    pub fn of_deployment(object: &Deployment) -> Option<Self> {
        let (spec, status) = (object.spec.as_ref()?, object.status.clone().unwrap_or_default());
        let (key, meta) = (key("Deployment", &object.metadata)?, &object.metadata);
        let wanted = spec.replicas.unwrap_or(1);
        let all = [status.replicas, status.updated_replicas, status.available_replicas];
        let paused = (spec.paused == Some(true)).then_some("spec.paused is true");
        Some(Self {
            rolled_out: is_current(meta, status.observed_generation)
                && all.iter().all(|count| count.unwrap_or(0) == wanted),
            replicas: wanted.try_into().unwrap_or(0),
            exact: true,
            ..Self::new(key, meta, &spec.template, &spec.selector, paused)
        })
    }

    #[must_use]
    pub fn of_stateful_set(object: &StatefulSet) -> Option<Self> {
        let (spec, status) = (object.spec.as_ref()?, object.status.clone().unwrap_or_default());
        let (key, meta) = (key("StatefulSet", &object.metadata)?, &object.metadata);
        let wanted = spec.replicas.unwrap_or(1);
        let strategy = spec.update_strategy.as_ref();
        let partition = strategy.and_then(|s| s.rolling_update.as_ref()?.partition).unwrap_or(0);
        let ready = status.ready_replicas.unwrap_or(0) == wanted && status.replicas == wanted;
        let by_hand = match strategy.and_then(|strategy| strategy.type_.as_deref()) {
            Some("OnDelete") => Some("spec.updateStrategy is OnDelete; delete its pods"),
            _ => (partition > 0).then_some("spec.updateStrategy.rollingUpdate.partition is above 0"),
        };
        Some(Self {
            rolled_out: is_current(meta, status.observed_generation)
                && ready
                && status.current_revision == status.update_revision,
            ordered: spec.pod_management_policy.as_deref() != Some("Parallel"),
            replicas: wanted.try_into().unwrap_or(0),
            exact: true,
            ..Self::new(key, meta, &spec.template, &spec.selector, by_hand)
        })
    }

    #[must_use]
    pub fn of_daemon_set(object: &DaemonSet) -> Option<Self> {
        let (spec, status) = (object.spec.as_ref()?, object.status.clone().unwrap_or_default());
        let (key, meta) = (key("DaemonSet", &object.metadata)?, &object.metadata);
        let wanted = status.desired_number_scheduled;
        let strategy = spec.update_strategy.as_ref().and_then(|strategy| strategy.type_.as_deref());
        let by_hand =
            (strategy == Some("OnDelete")).then_some("spec.updateStrategy is OnDelete; delete its pods");
        Some(Self {
            rolled_out: is_current(meta, status.observed_generation)
                && status.updated_number_scheduled.unwrap_or(0) == wanted
                && status.number_available.unwrap_or(0) == wanted,
            replicas: wanted.try_into().unwrap_or(0),
            exact: true,
            ..Self::new(key, meta, &spec.template, &spec.selector, by_hand)
        })
    }

    /// Of a CronJob: its template applies to the next run; the current one is left to finish.
    #[must_use]
    pub fn of_cron_job(object: &CronJob) -> Option<Self> {
        let template = &object.spec.as_ref()?.job_template.spec.as_ref()?.template;
        let (key, meta) = (key("CronJob", &object.metadata)?, &object.metadata);
        // Its pods are not waited for.
        Some(Self { selector: None, ..Self::new(key, meta, template, &LabelSelector::default(), None) })
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
mod tests;
