//! The workloads of a project, from lists of the API server. Pure.

use crate::waves::{Key, Management, ObservedWorkload};
use gpu_migrate_model::ask::PodAsk;
use gpu_migrate_model::crd::{Counts, GPUMigrationSpec};
use gpu_migrate_model::lifecycle::is_active;
use gpu_migrate_model::names::{self, Dialect};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, StatefulSet};
use k8s_openapi::api::batch::v1::CronJob;
use k8s_openapi::api::core::v1::{Namespace, Pod, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use kube::core::{Selector, SelectorExt as _};
use std::collections::{BTreeMap, BTreeSet};

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
    /// Its controller rolls out a change of the template.
    restartable: bool,
}

/// Opted-in namespaces with their workloads and pods.
#[derive(Clone, Debug, Default)]
pub struct Listed {
    pub namespaces: Vec<Namespace>,
    pub workloads: Vec<Workload>,
    pub pods: Vec<Pod>,
}

impl Listed {
    /// The `resourceVersion` that a workload was listed with.
    #[must_use]
    pub fn version(&self, key: &Key) -> Option<&str> {
        self.workloads.iter().find(|workload| workload.key == *key)?.version.as_deref()
    }

    /// The workloads and bare pods of a policy, and its pods by kind.
    #[must_use]
    pub fn of_policy(&self, name: &str, spec: &GPUMigrationSpec) -> (Vec<ObservedWorkload>, Counts) {
        let namespaces = self.projects();
        let in_policy = |meta: &ObjectMeta, template: &BTreeMap<String, String>| {
            let namespace = meta.namespace.as_deref().unwrap_or_default();
            let Some(of_namespace) = namespaces.get(namespace) else { return false };
            let project = template.get(names::PROJECT).map(String::as_str).or(*of_namespace);
            project == Some(spec.project.as_str()) && matches(spec, namespace, template)
        };
        let pods = self
            .pods
            .iter()
            .filter(|pod| in_policy(&pod.metadata, labels(&pod.metadata)) && is_active(pod))
            .collect::<Vec<_>>();
        let mut seen = Vec::new();
        for workload in &self.workloads {
            let template = workload.labels();
            let meta =
                ObjectMeta { namespace: Some(workload.key.namespace.clone()), ..ObjectMeta::default() };
            if in_policy(&meta, template) && workload.is_relevant() {
                seen.push(workload.observe(&pods));
            }
        }
        seen.extend(pods.iter().filter_map(|pod| unmanaged_owner(pod)));
        (seen, counts(name, &pods))
    }

    /// Opted-in namespaces and their project.
    fn projects(&self) -> BTreeMap<&str, Option<&str>> {
        let opted_in = |namespace: &&Namespace| {
            labels(&namespace.metadata).get(names::OPT_IN).is_some_and(|v| v == "true")
        };
        self.namespaces
            .iter()
            .filter(opted_in)
            .filter_map(|namespace| {
                let project = labels(&namespace.metadata).get(names::PROJECT).map(String::as_str);
                Some((namespace.metadata.name.as_deref()?, project))
            })
            .collect()
    }
}

fn labels(meta: &ObjectMeta) -> &BTreeMap<String, String> {
    static NONE: BTreeMap<String, String> = BTreeMap::new();
    meta.labels.as_ref().unwrap_or(&NONE)
}

fn annotation<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

fn matches(spec: &GPUMigrationSpec, namespace: &str, pod_labels: &BTreeMap<String, String>) -> bool {
    let opted_out = pod_labels.get(names::OPT_OUT).is_some_and(|value| value == "true");
    let narrowed = spec.r#match.as_ref().is_none_or(|narrow| {
        (narrow.namespaces.is_empty() || narrow.namespaces.iter().any(|name| name == namespace))
            && narrow.pod_selector.as_ref().is_none_or(|selector| selects(selector, pod_labels))
    });
    !opted_out && narrowed
}

fn selects(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    Selector::try_from(selector.clone()).is_ok_and(|selector| selector.matches(labels))
}

fn is_labelled(labels: &BTreeMap<String, String>) -> bool {
    labels.get(names::CONVERT).is_some_and(|value| value == "true")
}

fn requests_whole_cards(pod: &Pod) -> bool {
    PodAsk::of(pod, &Dialect::default()).is_ok_and(|ask| ask.containers.iter().any(|c| c.demand.legacy > 0))
}

impl Workload {
    fn labels(&self) -> &BTreeMap<String, String> {
        static NONE: BTreeMap<String, String> = BTreeMap::new();
        self.template.metadata.as_ref().and_then(|meta| meta.labels.as_ref()).unwrap_or(&NONE)
    }

    /// It requests whole cards, or it is labelled.
    fn is_relevant(&self) -> bool {
        let pod = Pod { spec: self.template.spec.clone(), ..Pod::default() };
        is_labelled(self.labels()) || requests_whole_cards(&pod)
    }

    fn observe(&self, pods: &[&Pod]) -> ObservedWorkload {
        let newest = pods.iter().filter(|pod| {
            pod.metadata.namespace.as_deref() == Some(&self.key.namespace)
                && is_labelled(labels(&pod.metadata))
                && selects(&self.selector, labels(&pod.metadata))
        });
        let restarts = |pod: &&&Pod| {
            let status = pod.status.as_ref();
            let of = |list: Option<&Vec<k8s_openapi::api::core::v1::ContainerStatus>>| {
                list.into_iter().flatten().map(|container| container.restart_count).max().unwrap_or(0)
            };
            of(status.and_then(|s| s.container_statuses.as_ref()))
                .max(of(status.and_then(|s| s.init_container_statuses.as_ref())))
        };
        let unconverted = newest.clone().filter(|pod| annotation(pod, names::POLICY).is_none()).count();
        ObservedWorkload {
            key: self.key.clone(),
            management: if self.restartable { Management::Restart } else { Management::Unmanaged },
            labelled: is_labelled(self.labels()),
            rolled_out: self.rolled_out,
            restarts: newest.clone().map(|pod| restarts(&pod)).max().unwrap_or(0).try_into().unwrap_or(0),
            unconverted: u32::try_from(unconverted).unwrap_or(u32::MAX),
        }
    }
}

/// The owner of a pod that the operator does not restart: a bare pod, a Job, another controller.
fn unmanaged_owner(pod: &Pod) -> Option<ObservedWorkload> {
    const MOVED: [&str; 3] = ["ReplicaSet", "StatefulSet", "DaemonSet"];
    if !requests_whole_cards(pod) {
        return None;
    }
    let owner = pod.metadata.owner_references.iter().flatten().find(|owner| owner.controller == Some(true));
    let (kind, name) = match owner {
        Some(owner) if MOVED.contains(&owner.kind.as_str()) => return None,
        Some(owner) => (owner.kind.clone(), owner.name.clone()),
        None => ("Pod".to_owned(), pod.metadata.name.clone().unwrap_or_default()),
    };
    let key = Key { kind, namespace: pod.metadata.namespace.clone().unwrap_or_default(), name };
    Some(ObservedWorkload {
        key,
        management: Management::Unmanaged,
        labelled: false,
        rolled_out: true,
        restarts: 0,
        unconverted: 0,
    })
}

fn counts(policy: &str, pods: &[&Pod]) -> Counts {
    let converted_by_policy = |pod: &&&Pod| {
        annotation(pod, names::POLICY)
            .and_then(|value| value.rsplit_once('@'))
            .is_some_and(|(name, _)| name == policy)
    };
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let legacy = pods.iter().filter(|pod| requests_whole_cards(pod)).collect::<Vec<_>>();
    let labelled = legacy.iter().filter(|pod| is_labelled(labels(&pod.metadata))).count();
    Counts {
        converted: count(pods.iter().filter(converted_by_policy).count()),
        legacy: count(legacy.len() - labelled),
        unconvertible: count(labelled),
    }
}

fn key(kind: &str, meta: &ObjectMeta) -> Option<Key> {
    Some(Key { kind: kind.to_owned(), namespace: meta.namespace.clone()?, name: meta.name.clone()? })
}

/// The controller has observed the newest spec.
fn is_current(meta: &ObjectMeta, observed: Option<i64>) -> bool {
    observed >= meta.generation
}

impl Workload {
    #[must_use]
    pub fn of_deployment(object: &Deployment) -> Option<Self> {
        let (spec, status) = (object.spec.as_ref()?, object.status.clone().unwrap_or_default());
        let wanted = spec.replicas.unwrap_or(1);
        let all = [status.replicas, status.updated_replicas, status.available_replicas];
        Some(Self {
            key: key("Deployment", &object.metadata)?,
            version: object.metadata.resource_version.clone(),
            template: spec.template.clone(),
            selector: spec.selector.clone(),
            rolled_out: is_current(&object.metadata, status.observed_generation)
                && all.iter().all(|count| count.unwrap_or(0) == wanted),
            restartable: spec.paused != Some(true),
        })
    }

    #[must_use]
    pub fn of_stateful_set(object: &StatefulSet) -> Option<Self> {
        let (spec, status) = (object.spec.as_ref()?, object.status.clone().unwrap_or_default());
        let wanted = spec.replicas.unwrap_or(1);
        let strategy = spec.update_strategy.as_ref();
        let partition = strategy.and_then(|s| s.rolling_update.as_ref()?.partition).unwrap_or(0);
        let ready = status.ready_replicas.unwrap_or(0) == wanted && status.replicas == wanted;
        Some(Self {
            key: key("StatefulSet", &object.metadata)?,
            version: object.metadata.resource_version.clone(),
            template: spec.template.clone(),
            selector: spec.selector.clone(),
            rolled_out: is_current(&object.metadata, status.observed_generation)
                && ready
                && status.current_revision == status.update_revision,
            restartable: strategy.is_none_or(|s| s.type_.as_deref() != Some("OnDelete")) && partition == 0,
        })
    }

    #[must_use]
    pub fn of_daemon_set(object: &DaemonSet) -> Option<Self> {
        let (spec, status) = (object.spec.as_ref()?, object.status.clone().unwrap_or_default());
        let wanted = status.desired_number_scheduled;
        Some(Self {
            key: key("DaemonSet", &object.metadata)?,
            version: object.metadata.resource_version.clone(),
            template: spec.template.clone(),
            selector: spec.selector.clone(),
            rolled_out: is_current(&object.metadata, status.observed_generation)
                && status.updated_number_scheduled.unwrap_or(0) == wanted
                && status.number_available.unwrap_or(0) == wanted,
            restartable: spec.update_strategy.as_ref().is_none_or(|s| s.type_.as_deref() != Some("OnDelete")),
        })
    }

    /// Of a CronJob: its template applies to the next run; the current one is left to finish.
    #[must_use]
    pub fn of_cron_job(object: &CronJob) -> Option<Self> {
        let spec = object.spec.as_ref()?;
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
            restartable: true,
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
                    listed.pods.push(serde_json::from_value(object).unwrap());
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
        GPUMigrationSpec { project: project.into(), ..GPUMigrationSpec::default() }
    }

    fn names(seen: &[ObservedWorkload]) -> Vec<&str> {
        seen.iter().map(|one| one.key.name.as_str()).collect()
    }

    #[test]
    fn membership_is_opt_in_and_project_and_the_narrowing_of_the_policy() {
        let listed = listed(json!([
            namespace("a", Some("p"), "true"), namespace("b", Some("p"), "false"), namespace("c", None, "true"),
            deployment("a", "by-namespace", json!({"app": "x"}), 2, 3),
            deployment("a", "other-project", json!({"gpu-migrate.io/project": "q"}), 2, 3),
            deployment("a", "opted-out", json!({"gpu-migrate.io/opt-out": "true"}), 2, 3),
            deployment("b", "not-opted-in", json!({}), 2, 3),
            deployment("c", "by-pod", json!({"gpu-migrate.io/project": "p"}), 2, 3),
            {"kind": "CronJob", "metadata": {"name": "no-card", "namespace": "a"}, "spec": {"schedule": "", "jobTemplate": {"spec": {"template": template(json!({}), 0)}}}},
        ]));
        assert_eq!(names(&listed.of_policy("m", &policy("p")).0), ["by-namespace", "by-pod"]);
        let mut narrow = policy("p");
        narrow.r#match = Some(serde_json::from_value(json!({"namespaces": ["a"], "podSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["x"]}]}})).unwrap());
        assert_eq!(names(&listed.of_policy("m", &narrow).0), ["by-namespace"]);
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
        let rolls = |strategy: Value| listed(json!([stateful("2", strategy)])).workloads[0].restartable;
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
        let (seen, counts) = listed(json!([
            namespace("a", Some("p"), "true"),
            deployment("a", "d", labelled.clone(), 2, 3),
            pod("old", json!({"app": "d"}), json!({}), 9, 1),
            pod("new", labelled.clone(), json!({"gpu-migrate.io/policy": "m@4"}), 2, 0),
            pod("slipped", labelled, json!({}), 0, 1),
        ]))
        .of_policy("m", &policy("p"));
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
        let (seen, _) =
            listed(json!([namespace("a", Some("p"), "true"), pod("bare", json!([])), pod("train-x", job)]))
                .of_policy("m", &policy("p"));
        assert!(seen.iter().all(|one| one.management == Management::Unmanaged));
        assert_eq!(
            seen.iter().map(|one| one.key.to_string()).collect::<Vec<_>>(),
            ["Pod/a/bare", "Job/a/train"]
        );
        let mut spec = policy("p");
        spec.rollout.waves =
            serde_json::from_value(json!([{"workloads": ["Pod/a/bare", "Deployment/a/gone"]}])).unwrap();
        assert_eq!(missing(&spec, &seen).into_iter().collect::<Vec<_>>(), ["Deployment/a/gone"]);
    }
}
