//! What is read of objects, and whose it is.

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
                listed.pods.extend(ListedPod::of(&serde_json::from_value(object).unwrap()).map(Arc::new));
                continue;
            }
            "Deployment" => Workload::of_deployment(&serde_json::from_value(object).unwrap()),
            "StatefulSet" => Workload::of_stateful_set(&serde_json::from_value(object).unwrap()),
            "DaemonSet" => Workload::of_daemon_set(&serde_json::from_value(object).unwrap()),
            _ => Workload::of_cron_job(&serde_json::from_value(object).unwrap()),
        };
        listed.workloads.push(Arc::new(workload.unwrap()));
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
    GPUMigrationSpec { project: project.into(), mode: MigrationMode::Enforce, ..GPUMigrationSpec::default() }
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
    assert_eq!(names(&observed(listed(objects.clone()), policy("p")).workloads), ["by-namespace", "by-pod"]);
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
fn a_workload_whose_pods_are_not_all_seen_is_not_rolled_out() {
    let labelled = json!({"app": "d", "gpu-migrate.io/convert": "true"});
    let pod = |name: &str, labels: &Value| {
        json!({"kind": "Pod", "metadata": {"name": name, "namespace": "a", "labels": labels, "annotations": {"gpu-migrate.io/policy": "m@1"}},
            "spec": template(json!({}), 0)["spec"], "status": {"phase": "Running"}})
    };
    let rolled_out = |template: &Value, pods: &[Value]| {
        let mut objects =
            vec![namespace("a", Some("p"), "true"), deployment("a", "d", template.clone(), 2, 3)];
        objects.extend(pods.iter().cloned());
        observed(listed(json!(objects)), policy("p")).workloads[0].rolled_out
    };
    let legacy = json!({"app": "d"});
    let mut opted_out = labelled.clone();
    opted_out["gpu-migrate.io/opt-out"] = json!("true");
    let [first, second] = ["d-1", "d-2"].map(|name| pod(name, &labelled));
    assert!(!rolled_out(&labelled, &[]));
    assert!(!rolled_out(&labelled, &[first.clone(), pod("d-0", &legacy)]), "one is of the former template");
    assert!(rolled_out(&labelled, &[first.clone(), second]));
    assert!(rolled_out(&labelled, &[first, pod("d-3", &opted_out)]), "under the policy or not");
    assert!(rolled_out(&legacy, &[]), "of what is not converted nothing is judged");
}

#[test]
fn bare_pods_and_jobs_are_reported_and_missing_names_too() {
    let pod = |name: &str, owner: Value| json!({"kind": "Pod", "metadata": {"name": name, "namespace": "a", "ownerReferences": owner}, "spec": template(json!({}), 1)["spec"]});
    let job =
        json!([{"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "u", "controller": true}]);
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
        ["RayCluster/a/ray", "ReplicaSet/a/alone", "Rollout/a/canary", "StatefulSet.apps.kruise.io/a/set"]
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
    let kind = Described::of(&WorkloadKind { name: "Rollout.argoproj.io".into(), ..WorkloadKind::default() });
    listed.workloads.extend(Workload::of_foreign(&Arc::new(kind.unwrap()), &rollout).map(Arc::new));
    let key = Key { kind: "Rollout".into(), namespace: "a".into(), name: "canary".into() };
    assert_eq!(listed.foreign(&key).unwrap().templates, ["/spec/template/metadata"]);
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
        listed.policies = policies.iter().map(|(name, spec)| ((*name).to_owned(), (*spec).clone())).collect();
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
