//! What happens to a pod, clause by clause: one table, each row a pod, a policy and what must come out.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Case, namespace, pod, policy};
use gpu_migrate_webhook::obstacles::ClusterFacts;
use serde_json::{Value, json};

fn gpu(count: &str) -> Value {
    json!({"limits": {"nvidia.com/gpu": count}, "requests": {"nvidia.com/gpu": count}})
}

fn shares(cores: &str, blocks: &str) -> Value {
    let map = json!({"tencent.com/vcuda-core": cores, "tencent.com/vcuda-memory": blocks});
    json!({"limits": map, "requests": map})
}

fn container(name: &str, resources: Value) -> Value {
    json!({"name": name, "resources": resources})
}

#[test]
fn a_card_becomes_cores_and_blocks_in_every_kind_of_container() {
    let mut sidecar = container("proxy", gpu("1"));
    sidecar["restartPolicy"] = json!("Always");
    let case = Case::new(pod(json!({
        "initContainers": [container("warm", gpu("2")), sidecar],
        "containers": [container("main", gpu("3")), container("plain", json!({}))],
    })));
    let done = case.run();
    assert_eq!(done.outcome, "converted");
    assert_eq!(done.pod["spec"]["initContainers"][0]["resources"], shares("200", "84"));
    assert_eq!(done.pod["spec"]["initContainers"][1]["resources"], shares("100", "42"));
    assert_eq!(done.pod["spec"]["containers"][0]["resources"], shares("300", "126"));
    assert_eq!(done.pod["spec"]["containers"][1], container("plain", json!({})));
}

#[test]
fn limits_and_requests_in_every_combination() {
    let limit = json!({"nvidia.com/gpu": "1"});
    // Limits alone: the API server sets the requests from them, before and after us.
    let done = Case::one(json!({"limits": limit})).run();
    assert_eq!(done.resources(), json!({"limits": shares("100", "42")["limits"]}));
    // Both, and other resources beside them stay.
    let mixed = json!({"limits": {"nvidia.com/gpu": "1", "cpu": "2"}, "requests": {"nvidia.com/gpu": "1", "memory": "1Gi"}});
    let done = Case::one(mixed).run();
    let (mut limits, mut requests) =
        (shares("100", "42")["limits"].clone(), shares("100", "42")["requests"].clone());
    (limits["cpu"], requests["memory"]) = (json!("2"), json!("1Gi"));
    assert_eq!(done.resources(), json!({"limits": limits, "requests": requests}));
    // Requests alone, and unequal ones: Kubernetes refuses these; so they stay, and the warning names the field.
    for (resources, expected) in [
        (json!({"requests": limit}), "limits.nvidia.com/gpu is not set"),
        (
            json!({"limits": limit, "requests": {"nvidia.com/gpu": "2"}}),
            "requests.nvidia.com/gpu is 2 but limits",
        ),
    ] {
        let done = Case::one(resources).run();
        assert_eq!(done.outcome, "unconvertible");
        assert!(done.untouched() && done.warnings[0].contains(expected), "{:?}", done.warnings);
    }
}

#[test]
fn who_is_left_alone() {
    let whole = || pod(json!({"containers": [container("main", gpu("1"))]}));
    let with = |path: &str, value: Value| {
        let mut pod = whole();
        common::set(&mut pod, path, value);
        pod
    };
    for (name, case, expected) in [
        (
            "namespace not opted in",
            Case::new(whole()).namespace(json!({"gpu-migrate.io/project": "p"})),
            "not_opted_in",
        ),
        (
            "opted in with another value",
            Case::new(whole()).namespace(json!({"gpu-migrate.io/opt-in": "yes"})),
            "not_opted_in",
        ),
        ("the system's namespace", Case::new(whole()).named("kube-system"), "not_opted_in"),
        (
            "pod opted out",
            Case::new(with("/metadata/labels/gpu-migrate.io~1opt-out", json!("true"))),
            "opted_out",
        ),
        ("bound", Case::new(with("/spec/nodeName", json!("n1"))), "bound"),
        (
            "mirror",
            Case::new(with("/metadata/annotations/kubernetes.io~1config.mirror", json!("x"))),
            "mirror",
        ),
        ("no project", Case::new(whole()).namespace(json!({"gpu-migrate.io/opt-in": "true"})), "no_project"),
        ("no policy at all", Case::new(whole()).policies(vec![]), "no_policy"),
        ("off", Case::new(whole()).policies(vec![policy("p", json!({"mode": "Off"}))]), "off"),
        (
            "nothing in the rollout",
            Case::new(whole()).policies(vec![policy("p", json!({"rollout": {"percent": 0}}))]),
            "not_in_rollout",
        ),
        (
            "on the way back",
            Case::new(whole()).policies(vec![policy("p", json!({"rollout": {"direction": "Rollback"}}))]),
            "not_in_rollout",
        ),
        (
            "wave not reached",
            Case::new(whole()).policies(vec![policy("p", json!({"rollout": {"waves": [{"percent": 50}]}}))]),
            "not_in_rollout",
        ),
        ("no card", Case::one(json!({"limits": {"cpu": "1"}})), "no_gpu"),
        ("zero cards", Case::one(gpu("0")), "no_gpu"),
        ("shares already", Case::one(shares("50", "21")), "already_shared"),
    ] {
        let done = case.run();
        assert_eq!(done.outcome, expected, "{name}");
        assert!(done.untouched() && done.warnings.is_empty(), "{name}: {:?}", done.warnings);
    }
}

#[test]
fn a_pod_gets_the_conversion_that_its_template_was_labelled_with() {
    let mut changed = policy("p", json!({"convert": {"coresPerCard": 50, "blocksPerCard": 42}}));
    let status = json!({"conversions": [{"id": "1", "convert": "{\"coresPerCard\": 25, \"blocksPerCard\": 10}"},
        {"id": "2", "convert": "{\"coresPerCard\": 50, \"blocksPerCard\": 42}"}]});
    changed.status = serde_json::from_value(status).unwrap();
    let cores = |id: &str| {
        let mut pod = pod(json!({"containers": [container("main", gpu("1"))]}));
        common::set(&mut pod, "/metadata/annotations/gpu-migrate.io~1conversion", json!(id));
        let done = Case::new(pod).policies(vec![changed.clone()]).run();
        done.pod["spec"]["containers"][0]["resources"]["limits"]["tencent.com/vcuda-core"].clone()
    };
    assert_eq!(
        [cores("1"), cores("2"), cores("0")],
        ["25", "50", "50"],
        "one that is not recorded gets the policy's"
    );
}

#[test]
fn both_kinds_in_one_pod_are_left_alone_with_a_warning() {
    let done = Case::new(pod(json!({
        "containers": [container("whole", gpu("1")), container("share", shares("50", "21"))],
    })))
    .run();
    assert_eq!(done.outcome, "already_shared");
    assert!(
        done.untouched() && done.warnings[0].contains("whole cards and for shares"),
        "{:?}",
        done.warnings
    );
}

#[test]
fn warnings_are_few_whatever_a_pod_names() {
    let limits: serde_json::Map<_, _> = (0..100)
        .map(|i| (format!("nvidia.com/mig-{i}"), json!("1")))
        .chain([("nvidia.com/gpu".into(), json!("1"))])
        .collect();
    let done = Case::one(json!({"limits": limits})).run();
    assert_eq!((done.outcome.as_str(), done.warnings.len()), ("converted", 10));
    assert!(done.warnings[9].contains("92 more warnings are not shown"), "{:?}", done.warnings);
}

#[test]
fn the_project_is_the_pods_label_else_the_namespaces() {
    let policies = || vec![policy("p", json!({})), policy("q", json!({"convert": {"blocksPerCard": 7}}))];
    let mut labelled = pod(json!({"containers": [container("main", gpu("1"))]}));
    let done = Case::new(labelled.clone()).policies(policies()).run();
    assert_eq!(done.policy.as_deref(), Some("p@1"));
    labelled["metadata"]["labels"] = json!({"gpu-migrate.io/project": "q"});
    let done = Case::new(labelled.clone()).policies(policies()).run();
    assert_eq!((done.policy.as_deref(), done.resources()), (Some("q@1"), shares("100", "7")));
    // Labels of an unknown namespace: the API server's selector is believed, the project must be on the pod.
    let done = Case::new(labelled).policies(policies()).unknown_namespace().run();
    assert_eq!(done.outcome, "converted");
    assert_eq!(Case::one(gpu("1")).unknown_namespace().run().outcome, "no_project");
}

#[test]
fn the_most_specific_policy_wins_and_a_tie_touches_nothing() {
    let narrow = |name: &str, spec: Value| {
        let mut policy = policy(name, spec);
        policy.spec.project = "p".into();
        policy
    };
    let wide = || narrow("wide", json!({"convert": {"blocksPerCard": 1}}));
    let here =
        || narrow("here", json!({"match": {"namespaces": ["team-a"]}, "convert": {"blocksPerCard": 2}}));
    let elsewhere = || narrow("elsewhere", json!({"match": {"namespaces": ["team-b"]}}));
    let selected = |name: &str, mode: &str| {
        narrow(
            name,
            json!({"mode": mode, "match": {"namespaces": ["team-a"], "podSelector": {"matchLabels": {"app": "x"},
            "matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["db"]}]}}}),
        )
    };
    let mut app = pod(json!({"containers": [container("main", gpu("1"))]}));
    app["metadata"]["labels"] = json!({"app": "x"});
    let run = |policies| Case::new(app.clone()).policies(policies).run();

    assert_eq!(run(vec![wide(), here(), elsewhere()]).policy.as_deref(), Some("here@1"));
    assert_eq!(run(vec![wide(), here(), selected("app", "Enforce")]).policy.as_deref(), Some("app@1"));
    assert_eq!(run(vec![wide(), elsewhere()]).policy.as_deref(), Some("wide@1"));
    assert_eq!(
        run(vec![here(), selected("app", "Off")]).outcome,
        "off",
        "a narrow policy that is off is an exception"
    );

    let tie = run(vec![wide(), selected("b", "Enforce"), selected("a", "Enforce")]);
    assert_eq!(tie.outcome, "conflict");
    assert!(
        tie.untouched() && tie.warnings[0].contains("policies a, b select it with equal specificity"),
        "{:?}",
        tie.warnings
    );
    let ended = run(vec![selected("b", "Enforce"), selected("a", "Off")]);
    assert_eq!(ended.policy.as_deref(), Some("b@1"), "turning one off ends the conflict");
    let audited = run(vec![selected("a", "Audit"), selected("b", "Enforce"), selected("c", "Audit")]);
    assert_eq!(audited.policy.as_deref(), Some("b@1"), "what only audits does not stop what enforces");
    assert_eq!(run(vec![selected("a", "Audit"), selected("b", "Audit")]).outcome, "conflict");
}

#[test]
fn policies_that_can_only_conflict_are_told_so() {
    let twin = |name: &str, mode: &str| {
        let mut policy = policy(name, json!({"mode": mode, "match": {"namespaces": ["team-a"]}}));
        policy.spec.project = "p".into();
        policy
    };
    let all = [policy("p", json!({})), twin("a", "Enforce"), twin("b", "Audit"), twin("c", "Off")];
    let (policies, _) = gpu_migrate_webhook::policy::Policies::compile(&all, &Default::default());
    assert_eq!(policies.identical_policies("b"), ["a"], "the audit says nothing where a policy enforces");
    for alone in ["a", "p", "c", "unknown"] {
        assert!(policies.identical_policies(alone).is_empty(), "{alone}");
    }
}

#[test]
fn overrides_by_product_and_container() {
    let convert = json!({"overrides": [
        {"gpuProduct": "NVIDIA-A100-SXM4-80GB", "blocksPerCard": 316},
        {"container": "infer", "coresPerCard": 50, "blocksPerCard": 21},
    ]});
    let affinity = |products: &[&[&str]]| {
        let terms: Vec<Value> = products
            .iter()
            .map(|values| json!({"matchExpressions": [{"key": "nvidia.com/gpu.product", "operator": "In", "values": values}]}))
            .collect();
        json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}})
    };
    let a100 = "NVIDIA-A100-SXM4-80GB";
    for (name, spec, expected) in [
        ("by nodeSelector", json!({"nodeSelector": {"nvidia.com/gpu.product": a100}}), "316"),
        ("by affinity", json!({"affinity": affinity(&[&[a100]])}), "316"),
        ("by every term", json!({"affinity": affinity(&[&[a100], &[a100]])}), "316"),
        ("one term allows another", json!({"affinity": affinity(&[&[a100], &["T4"]])}), "42"),
        ("one of two products", json!({"affinity": affinity(&[&[a100, "T4"]])}), "42"),
        ("no product", json!({}), "42"),
    ] {
        let mut spec = spec;
        spec["containers"] = json!([container("main", gpu("1"))]);
        let done = Case::new(pod(spec)).policies(vec![policy("p", json!({"convert": convert}))]).run();
        assert_eq!(done.resources(), shares("100", expected), "{name}");
    }
    let done =
        Case::new(pod(json!({"containers": [container("infer", gpu("1")), container("main", gpu("1"))]})))
            .policies(vec![policy("p", json!({"convert": convert}))])
            .run();
    assert_eq!(done.pod["spec"]["containers"][0]["resources"], shares("50", "21"));
    assert_eq!(done.pod["spec"]["containers"][1]["resources"], shares("100", "42"));
}

#[test]
fn right_sizing_is_for_one_card() {
    let sized = |count: &str, more: Value| {
        let mut convert = json!({"coresPerCard": 50, "blocksPerCard": 21});
        common::merge(&mut convert, more);
        Case::one(gpu(count)).policies(vec![policy("p", json!({"convert": convert}))]).run()
    };
    assert_eq!(sized("1", json!({})).resources(), shares("50", "21"));
    assert_eq!(sized("2", json!({})).resources(), shares("200", "84"), "two cards at 50 do not become one");
    assert_eq!(sized("4", json!({"multiCard": "Scale"})).resources(), shares("200", "84"));
    let odd = sized("3", json!({"multiCard": "Scale"}));
    assert!(odd.untouched() && odd.warnings[0].contains("150"), "{:?}", odd.warnings);
}

#[test]
fn scheduling_is_edited_and_nothing_else() {
    let toleration = |key: &str| json!({"key": key, "operator": "Exists", "effect": "NoSchedule"});
    let shared = json!({"key": "pool", "operator": "Equal", "value": "shared", "effect": "NoSchedule"});
    let scheduling = json!({
        "nodeSelector": {"remove": ["gpu-type"], "set": {"pool": "shared"}},
        "tolerations": {"removeKeys": ["nvidia.com/gpu"], "add": [shared]},
        "runtimeClassName": "nvidia", "replaceSchedulers": ["own"],
    });
    let run = |mut spec: Value| {
        spec["containers"] = json!([container("main", gpu("1"))]);
        Case::new(pod(spec)).policies(vec![policy("p", json!({"scheduling": scheduling}))]).run()
    };
    let done = run(json!({
        "schedulerName": "default-scheduler",
        "nodeSelector": {"gpu-type": "a100", "zone": "z1", "pool": "legacy"},
        "tolerations": [toleration("nvidia.com/gpu"), toleration("own"), toleration("nvidia.com/gpu")],
    }));
    let spec = &done.pod["spec"];
    assert_eq!(spec["schedulerName"], "gpu-migrate-scheduler");
    assert_eq!(spec["runtimeClassName"], "nvidia");
    assert_eq!(spec["nodeSelector"], json!({"zone": "z1", "pool": "shared"}));
    assert_eq!(spec["tolerations"], json!([toleration("own"), shared]));
    assert_eq!(done.warnings.len(), 1, "only the summary: {:?}", done.warnings);

    let done = run(json!({"tolerations": [shared], "schedulerName": "own"}));
    assert_eq!(done.pod["spec"]["tolerations"], json!([shared]), "no duplicate");
    assert!(
        done.warnings.iter().any(|w| w.contains("schedulerName own was replaced")),
        "{:?}",
        done.warnings
    );

    let done = run(json!({}));
    assert_eq!(done.pod["spec"]["tolerations"], json!([shared]));
    assert_eq!(done.pod["spec"]["nodeSelector"], json!({"pool": "shared"}));
}

#[test]
fn gang_members_get_a_gate_where_the_policy_says_so() {
    let mut member = pod(json!({"containers": [container("main", gpu("1"))]}));
    member["metadata"]["annotations"] =
        json!({"scheduling.k8s.io/group-name": "g", "scheduling.k8s.io/group-pod-num": "2"});
    let gated = || vec![policy("p", json!({"scheduling": {"gangGate": true}}))];
    let done = Case::new(member.clone()).policies(gated()).run();
    assert_eq!(done.pod["spec"]["schedulingGates"], json!([{"name": "gpu-migrate.io/gang"}]));
    assert!(Case::new(member).run().pod["spec"].get("schedulingGates").is_none());
    assert!(Case::one(gpu("1")).policies(gated()).run().pod["spec"].get("schedulingGates").is_none());
}

#[test]
fn a_wave_reaches_pods_by_their_label() {
    let mut labelled = pod(json!({"containers": [container("main", gpu("1"))]}));
    labelled["metadata"]["labels"] = json!({"gpu-migrate.io/convert": "true"});
    let waves = || vec![policy("p", json!({"rollout": {"waves": [{"percent": 50}]}}))];
    assert_eq!(Case::new(labelled).policies(waves()).run().outcome, "converted");
    assert_eq!(Case::one(gpu("1")).policies(waves()).run().outcome, "not_in_rollout");
    let audit = vec![policy("p", json!({"mode": "Audit", "rollout": {"waves": [{"percent": 50}]}}))];
    let done = Case::one(gpu("1")).policies(audit).run();
    assert_eq!((done.outcome.as_str(), done.untouched()), ("audited", true), "an audit waits for no wave");
}

#[test]
fn an_owner_can_fix_the_project_of_a_namespace() {
    let policies = || vec![policy("p", json!({})), policy("q", json!({"mode": "Off"}))];
    let mut labelled = pod(json!({"containers": [container("main", gpu("1"))]}));
    labelled["metadata"]["labels"] = json!({"gpu-migrate.io/project": "q"});
    assert_eq!(Case::new(labelled.clone()).policies(policies()).run().outcome, "off");
    for (value, expected) in [("true", "converted"), ("false", "off")] {
        let fixed = namespace(&[("gpu-migrate.io/fixed-project", value)]);
        let done = Case::new(labelled.clone()).policies(policies()).namespace(fixed).run();
        assert_eq!(done.outcome, expected);
    }
}

#[test]
fn a_project_that_no_policy_knows_is_reported() {
    let labelled = |resources: Value| {
        let mut pod = pod(json!({"containers": [container("main", resources)]}));
        pod["metadata"]["labels"] = json!({"gpu-migrate.io/project": "mistyped"});
        pod
    };
    let done = Case::new(labelled(gpu("1"))).run();
    assert_eq!((done.outcome.as_str(), done.untouched()), ("unknown_project", true));
    assert_eq!(
        done.warnings,
        ["gpu-migrate: left alone: no policy is for project mistyped (label gpu-migrate.io/project)"]
    );
    let done = Case::new(labelled(json!({}))).run();
    assert!(done.warnings.is_empty(), "it asks for no card: {:?}", done.warnings);
    let migrated_later = Case::one(gpu("1")).policies(vec![]).run();
    assert_eq!((migrated_later.outcome.as_str(), migrated_later.warnings.len()), ("no_policy", 0));
}

/// What would wait for ever, be refused or see cards of others stays as it was written, and says why.
#[test]
fn what_the_cluster_cannot_take_is_not_converted() {
    let cluster = || ClusterFacts {
        largest_card_mib: Some(81_920),
        runtime_classes: Some([("nvidia".into(), false), ("kata".into(), true)].into()),
    };
    let quarter = json!({"convert": {"coresPerCard": 25, "blocksPerCard": 160}});
    let class = |name: &str| json!({"scheduling": {"runtimeClassName": name}});
    let with = |path: &str, value: Value| {
        let mut pod = pod(json!({"containers": [container("main", gpu("1"))]}));
        common::set(&mut pod, path, value);
        pod
    };
    let cards = |count: &str| pod(json!({"containers": [container("main", gpu(count))]}));
    let beside = |resource: &str| {
        let limits = json!({"nvidia.com/gpu": "1", resource: "3000"});
        pod(json!({"containers": [container("main", json!({"limits": limits}))]}))
    };
    let gang = "/metadata/annotations/scheduling.k8s.io~1group-name";
    for (name, pod, spec, expected) in [
        ("one card at 25 cores", cards("1"), quarter.clone(), None),
        (
            "640 blocks on a card",
            cards("2"),
            quarter,
            Some("640 blocks on a card are 163840 MiB; the largest card has 81920"),
        ),
        ("exactly a card", cards("1"), json!({"convert": {"blocksPerCard": 320}}), None),
        (
            "a block more",
            cards("1"),
            json!({"convert": {"blocksPerCard": 321}}),
            Some("the largest card has 81920"),
        ),
        (
            "Volcano",
            with("/spec/schedulerName", json!("volcano")),
            json!({}),
            Some("schedulerName volcano: not in spec.scheduling.replaceSchedulers of policy p"),
        ),
        (
            "a scheduler that is listed",
            with("/spec/schedulerName", json!("volcano")),
            json!({"scheduling": {"replaceSchedulers": ["volcano"]}}),
            None,
        ),
        (
            "a node with Windows",
            with("/spec/nodeSelector", json!({"kubernetes.io/os": "windows"})),
            json!({}),
            Some("nodeSelector kubernetes.io/os: windows: shares are on Linux nodes only"),
        ),
        (
            "a node with Linux",
            with("/spec/nodeSelector", json!({"kubernetes.io/os": "linux"})),
            json!({}),
            None,
        ),
        ("our scheduler", with("/spec/schedulerName", json!("gpu-migrate-scheduler")), json!({}), None),
        (
            "a gang of unknown size",
            with(gang, json!("g")),
            json!({}),
            Some("gang g: annotation scheduling.k8s.io/group-pod-num is not a number"),
        ),
        (
            "HAMi's memory",
            beside("nvidia.com/gpumem"),
            json!({}),
            Some("container main: nvidia.com/gpumem is a request to HAMi"),
        ),
        (
            "HAMi's cores",
            beside("nvidia.com/gpucores"),
            json!({}),
            Some("nvidia.com/gpucores is a request to HAMi"),
        ),
        ("a network device", beside("nvidia.com/hostdev"), json!({}), None),
        ("a RuntimeClass without overhead", cards("1"), class("nvidia"), None),
        ("one with overhead", cards("1"), class("kata"), Some("RuntimeClass kata has an overhead")),
        (
            "one that is not there",
            cards("1"),
            class("nvidai"),
            Some("RuntimeClass nvidai, which does not exist"),
        ),
        (
            "its own with overhead",
            with("/spec/runtimeClassName", json!("kata")),
            class("nvidia"),
            Some("RuntimeClass kata has an overhead"),
        ),
        ("the same with overhead", with("/spec/runtimeClassName", json!("kata")), class("kata"), None),
    ] {
        let done = Case::new(pod.clone()).policies(vec![policy("p", spec.clone())]).cluster(cluster()).run();
        match expected {
            None => assert_eq!(done.outcome, "converted", "{name}: {:?}", done.warnings),
            Some(why) => {
                assert_eq!((done.outcome.as_str(), done.untouched()), ("unconvertible", true), "{name}");
                assert!(
                    done.warnings[0].contains(why) && !done.warnings[0].ends_with('…'),
                    "{name}: {:?}",
                    done.warnings
                );
            }
        }
        let unknown = Case::new(pod).policies(vec![policy("p", spec)]).run();
        let by_the_pod =
            expected.is_some_and(|why| !why.contains("card has") && !why.contains("RuntimeClass"));
        assert_eq!(unknown.outcome == "unconvertible", by_the_pod, "{name}: what is not known stops nothing");
    }
}

#[test]
fn mig_and_time_sliced_resources_stay_unless_mapped() {
    let both = json!({"limits": {"nvidia.com/gpu": "1", "nvidia.com/mig-1g.5gb": "2"}});
    let done = Case::one(both.clone()).run();
    assert_eq!(done.resources()["limits"]["nvidia.com/mig-1g.5gb"], "2");
    assert_eq!(done.resources()["limits"]["tencent.com/vcuda-core"], "100");
    assert!(done.warnings.iter().any(|w| w.contains("nvidia.com/mig-1g.5gb stays")), "{:?}", done.warnings);

    let done = Case::one(json!({"limits": {"nvidia.com/gpu.shared": "1"}})).run();
    assert!(
        done.untouched() && done.warnings[0].contains("nvidia.com/gpu.shared stays"),
        "{:?}",
        done.warnings
    );

    let mapping = json!({"resources": [{"name": "nvidia.com/mig-1g.5gb", "cores": 14, "blocks": 20}]});
    let mapped = || vec![policy("p", json!({"convert": mapping}))];
    let done = Case::one(json!({"limits": {"nvidia.com/mig-1g.5gb": "2"}})).policies(mapped()).run();
    assert_eq!(done.resources()["limits"], shares("28", "40")["limits"]);
    assert!(Case::one(both).policies(mapped()).run().untouched(), "114 cores are no share of a card");
}

#[test]
fn the_choice_of_cards_is_not_the_users() {
    let mut chooser = container("main", gpu("1"));
    chooser["env"] = json!([
        {"name": "A", "value": "1"}, {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
        {"name": "B", "value": "2"}, {"name": "NVIDIA_VISIBLE_DEVICES", "value": "0"},
    ]);
    let done = Case::new(pod(json!({"containers": [chooser]}))).run();
    assert_eq!(
        done.pod["spec"]["containers"][0]["env"],
        json!([{"name": "A", "value": "1"}, {"name": "B", "value": "2"}])
    );
    assert!(
        done.warnings.iter().any(|w| w.contains("NVIDIA_VISIBLE_DEVICES was removed")),
        "{:?}",
        done.warnings
    );
}

#[test]
fn a_copied_card_choice_is_removed() {
    let stale = json!({
        "tencent.com/predicate-gpu-idx-0": "3", "tencent.com/predicate-node": "n", "tencent.com/predicate-time": "1",
        "tencent.com/gpu-assigned": "true", "gpu-migrate.io/gpu-idx-main": "5", "own": "stays",
    });
    for resources in [gpu("1"), shares("50", "21")] {
        let mut copied = pod(json!({"containers": [container("main", resources)]}));
        copied["metadata"]["annotations"] = stale.clone();
        let done = Case::new(copied).run();
        let annotations = done.pod["metadata"]["annotations"].as_object().unwrap();
        assert_eq!(
            annotations.keys().collect::<Vec<_>>(),
            ["gpu-migrate.io/original", "gpu-migrate.io/policy", "own"]
        );
    }
}

#[test]
fn guarded_namespaces_hide_the_cards_from_who_asks_for_none() {
    let guarded = |pod: Value| Case::new(pod).namespace(namespace(&[("gpu-migrate.io/void-guard", "true")]));
    let void = json!({"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"});
    let mut leaking = container("leaking", json!({}));
    leaking["env"] = json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}, {"name": "A", "value": "1"}]);
    let mut careful = container("careful", json!({}));
    careful["env"] = json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "none"}]);
    let claimed = container("claimed", json!({"claims": [{"name": "c"}]}));
    let mig = container("mig", json!({"limits": {"nvidia.com/mig-1g.5gb": "1"}}));
    let spec = json!({"containers": [container("plain", json!({})), leaking, careful, claimed, mig]});
    let done = guarded(pod(spec.clone())).run();
    assert_eq!(done.outcome, "guarded");
    let env = |index: usize| done.pod["spec"]["containers"][index].get("env").cloned().unwrap_or(Value::Null);
    assert_eq!(env(0), json!([void]));
    assert_eq!(env(1), json!([{"name": "A", "value": "1"}, void]));
    assert_eq!(env(2), json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "none"}]));
    assert_eq!((env(3), env(4)), (Value::Null, Value::Null));
    assert!(done.warnings.iter().any(|w| w.contains("container leaking")), "{:?}", done.warnings);

    let beside = pod(json!({"containers": [container("main", gpu("1")), container("plain", json!({}))]}));
    let done = guarded(beside.clone()).run();
    assert_eq!(done.outcome, "converted");
    assert_eq!(done.pod["spec"]["containers"][1]["env"], json!([void]));
    assert!(done.pod["spec"]["containers"][0].get("env").is_none());
    assert!(
        Case::new(beside).run().pod["spec"]["containers"][1].get("env").is_none(),
        "only where it is asked for"
    );
    assert!(Case::new(pod(spec)).run().untouched());
}

/// Whatever else is decided: nothing that is written into a pod keeps the guard from it.
#[test]
fn the_guard_cannot_be_talked_away() {
    let void = json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]);
    let waves = json!({"rollout": {"waves": [{"percent": 50}]}});
    let both = || {
        vec![policy("p", json!({})), {
            let mut twin = policy("twin", json!({}));
            twin.spec.project = "p".into();
            twin
        }]
    };
    let set = |path: &'static str, value: Value| move |pod: &mut Value| common::set(pod, path, value.clone());
    type Edit = Box<dyn Fn(&mut Value)>;
    let nothing: fn() -> Edit = || Box::new(|_| ());
    let cases: Vec<(&str, Edit, Vec<_>)> = vec![
        ("bound", Box::new(set("/spec/nodeName", json!("n"))), vec![policy("p", json!({}))]),
        (
            "static",
            Box::new(set("/metadata/annotations/kubernetes.io~1config.source", json!("file"))),
            vec![policy("p", json!({}))],
        ),
        (
            "opted out",
            Box::new(set("/metadata/labels/gpu-migrate.io~1opt-out", json!("true"))),
            vec![policy("p", json!({}))],
        ),
        (
            "unknown project",
            Box::new(set("/metadata/labels/gpu-migrate.io~1project", json!("x"))),
            vec![policy("p", json!({}))],
        ),
        (
            "another scheduler",
            Box::new(set("/spec/schedulerName", json!("volcano"))),
            vec![policy("p", json!({}))],
        ),
        ("no policy", nothing(), vec![]),
        ("off", nothing(), vec![policy("p", json!({"mode": "Off"}))]),
        ("audit", nothing(), vec![policy("p", json!({"mode": "Audit"}))]),
        ("not in a wave", nothing(), vec![policy("p", waves)]),
        ("conflict", nothing(), both()),
        ("enforced", nothing(), vec![policy("p", json!({}))]),
    ];
    for (name, edit, policies) in cases {
        for resources in [json!({}), gpu("1"), shares("50", "21")] {
            let mut guarded =
                pod(json!({"containers": [container("main", resources), container("plain", json!({}))]}));
            edit(&mut guarded);
            let done = Case::new(guarded.clone()).policies(policies.clone()).guarded().run();
            assert_eq!(done.pod["spec"]["containers"][1]["env"], void, "{name}: {}", done.outcome);
            let again = Case::new(done.pod.clone()).policies(policies.clone()).guarded().run();
            assert!(again.untouched(), "{name}: {:?}", again.patch);
            let mut back = done.pod;
            assert!(gpu_migrate_webhook::restore::restore(&mut back).unwrap());
            assert_eq!(back, guarded, "{name}");
        }
    }
    let mut mirror = pod(json!({"containers": [container("plain", json!({}))]}));
    mirror["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "x"});
    assert!(Case::new(mirror).guarded().run().untouched(), "the kubelet runs its static pod, not this");
}

#[test]
fn guarded_containers_that_ask_for_cards_do_not_choose_them() {
    let choice = json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]);
    let mut legacy = container("main", gpu("1"));
    legacy["env"] = choice.clone();
    let off = || vec![policy("p", json!({"mode": "Off"}))];
    let done = Case::new(pod(json!({"containers": [legacy.clone()]}))).policies(off()).guarded().run();
    assert_eq!((done.outcome.as_str(), &done.pod["spec"]["containers"][0]["env"]), ("guarded", &json!([])));
    assert!(Case::new(pod(json!({"containers": [legacy]}))).policies(off()).run().untouched());
}

/// The environment of a ConfigMap comes after the device plugin's.
#[test]
fn an_environment_from_outside_does_not_choose_the_cards() {
    let with = |resources: Value, from: Value| {
        let mut main = container("main", resources);
        main["envFrom"] = from;
        pod(json!({"containers": [main]}))
    };
    let all = || json!([{"configMapRef": {"name": "a"}, "prefix": "APP_"}, {"secretRef": {"name": "b"}}]);
    let done = Case::new(with(json!({}), all())).guarded().run();
    assert_eq!(done.pod["spec"]["containers"][0]["env"][0]["value"], "void", "what is written in env wins");
    for (from, converts) in [
        (all(), false),
        (json!([{"configMapRef": {"name": "a"}, "prefix": "NVIDIA_"}]), false),
        (json!([{"configMapRef": {"name": "a"}, "prefix": "APP_"}]), true),
        (json!([]), true),
    ] {
        let done = Case::new(with(gpu("1"), from.clone())).guarded().run();
        assert_eq!(done.outcome == "converted", converts, "{from}: {:?}", done.warnings);
        assert!(
            converts || done.warnings[0].contains("envFrom could set NVIDIA_VISIBLE_DEVICES"),
            "{:?}",
            done.warnings
        );
        assert_eq!(
            Case::new(with(gpu("1"), from.clone())).run().outcome,
            "converted",
            "only where it is a boundary"
        );
        // The same of containers that keep what they ask for: which cards that is, is decided on the node.
        let shared = json!({"limits": {"tencent.com/vcuda-core": "50", "tencent.com/vcuda-memory": "20"}});
        for resources in [gpu("1"), shared] {
            let off = vec![policy("p", json!({"mode": "Off"}))];
            let done = Case::new(with(resources, from.clone())).policies(off).guarded().run();
            let warning = "gpu-migrate: container main: envFrom could set NVIDIA_VISIBLE_DEVICES to other cards: give it a prefix";
            assert!(done.untouched(), "{:?}", done.patch);
            assert_eq!(done.warnings == [warning], !converts, "{from}: {:?}", done.warnings);
        }
    }
}

#[test]
fn what_keeps_its_cards_is_marked_where_the_backstop_asks_for_it() {
    let mark = |case: Case| {
        let done = case.marked().run();
        let mark = done.pod["metadata"]["annotations"]["gpu-migrate.io/reviewed"].as_str().map(str::to_owned);
        let again = Case::new(done.pod.clone()).policies(done.policies).marked().run();
        assert!(again.untouched(), "{:?}", again.patch);
        (done.outcome, mark)
    };
    let in_mode = |spec: Value| Case::one(gpu("1")).policies(vec![policy("p", spec)]);
    for (case, expected) in [
        (in_mode(json!({})), ("converted", None)),
        (in_mode(json!({"mode": "Off"})), ("off", Some("off"))),
        (in_mode(json!({"mode": "Audit"})), ("audited", Some("audited"))),
        (in_mode(json!({"rollout": {"direction": "Rollback"}})), ("not_in_rollout", Some("not_in_rollout"))),
        (
            in_mode(json!({"rollout": {"waves": [{"percent": 50}]}})),
            ("not_in_rollout", Some("not_in_rollout")),
        ),
        (Case::one(gpu("1.5")), ("unconvertible", Some("unconvertible"))),
        (Case::one(gpu("1")).policies(vec![]), ("no_policy", Some("no_policy"))),
        (Case::one(json!({})), ("no_gpu", None)),
    ] {
        let (outcome, mark) = mark(case);
        assert_eq!((outcome.as_str(), mark.as_deref()), expected);
    }
    let done = Case::one(gpu("1")).policies(vec![policy("p", json!({"mode": "Off"}))]).run();
    assert!(done.untouched(), "nothing without --mark-reviewed");
}

/// Another webhook may run after ours; only our scheduler can place the pod.
#[test]
fn a_second_run_repairs_where_the_pod_is_scheduled() {
    let policies = || {
        let tolerations =
            json!({"removeKeys": ["nvidia.com/gpu"], "add": [{"key": "pool", "operator": "Exists"}]});
        let selector = json!({"remove": ["gpu-type"], "set": {"pool": "shared"}});
        vec![policy("p", json!({"scheduling": {"nodeSelector": selector, "tolerations": tolerations}}))]
    };
    let written = pod(json!({
        "schedulerName": "default-scheduler", "nodeSelector": {"gpu-type": "a100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "containers": [container("main", gpu("1"))],
    }));
    let first = Case::new(written.clone()).policies(policies()).run();
    let mut meddled = first.pod.clone();
    meddled["spec"]["schedulerName"] = json!("volcano");
    meddled["spec"]["nodeSelector"] = json!({"pool": "legacy"});
    meddled["spec"]["tolerations"] = json!([{"key": "nvidia.com/gpu", "operator": "Exists"}]);
    let second = Case::new(meddled).policies(policies()).run();
    assert_eq!(second.pod["spec"], first.pod["spec"]);
    let mut back = second.pod;
    assert!(gpu_migrate_webhook::restore::restore(&mut back).unwrap());
    assert_eq!(back, written);
    let mut native =
        pod(json!({"schedulerName": "volcano", "containers": [container("main", shares("50", "21"))]}));
    assert!(Case::new(native.clone()).policies(policies()).run().untouched(), "not one of ours");
    native["spec"]["schedulerName"] = json!("default-scheduler");
    assert!(Case::new(native).policies(policies()).run().untouched());
}

#[test]
fn audit_says_what_it_would_do_and_changes_nothing() {
    let audit = |more: Value| {
        let mut spec = json!({"mode": "Audit"});
        common::merge(&mut spec, more);
        vec![policy("p", spec)]
    };
    let done = Case::one(gpu("2")).policies(audit(json!({}))).run();
    assert_eq!((done.outcome.as_str(), done.untouched()), ("audited", true));
    assert_eq!(
        done.warnings,
        ["gpu-migrate: policy p (Audit) would convert: main: 2 cards → 200 cores, 84 blocks"]
    );
    assert!(!done.audit_patch.0.is_empty());
    let done = Case::one(gpu("1.5")).policies(audit(json!({"onUnconvertible": "Deny"}))).run();
    assert!(
        done.deny.is_none() && done.warnings[0].contains("(Audit) could not convert"),
        "{:?}",
        done.warnings
    );
}

#[test]
fn what_cannot_be_converted_is_admitted_or_denied() {
    let done = Case::one(gpu("1.5")).run();
    assert!(done.untouched() && done.deny.is_none());
    assert!(
        done.warnings[0].starts_with("gpu-migrate: not converted: container main: nvidia.com/gpu: 1500m"),
        "{:?}",
        done.warnings
    );
    let done = Case::one(gpu("1.5")).policies(vec![policy("p", json!({"onUnconvertible": "Deny"}))]).run();
    assert!(
        done.untouched() && done.deny.as_deref().is_some_and(|why| why.contains("1500m")),
        "{:?}",
        done.deny
    );
}

#[test]
fn warnings_fit_and_are_for_people() {
    let long = "x".repeat(63);
    let pod = pod(json!({"containers": [container(&long, gpu("1.5"))]}));
    let done = Case::new(pod).run();
    assert!(done.warnings.iter().all(|warning| warning.chars().count() <= 120), "{:?}", done.warnings);
    let done = Case::one(gpu("1")).run();
    assert_eq!(done.warnings, ["gpu-migrate: policy p converts: main: 1 card → 100 cores, 42 blocks"]);
    let mut owned = common::pod(json!({"containers": [container("main", gpu("1"))]}));
    owned["metadata"]["ownerReferences"] = json!([{"kind": "Job", "uid": "u", "controller": true}]);
    assert!(Case::new(owned).run().warnings.is_empty(), "a controller reads no warnings");
}

#[test]
fn the_patch_touches_only_what_changes() {
    let mut full =
        pod(json!({"containers": [container("main", gpu("1"))], "tolerations": [{"operator": "Exists"}]}));
    full["metadata"]["annotations"] = json!({"own": "x"});
    let done = Case::new(full).run();
    let paths: Vec<_> = done.patch.0.iter().map(|operation| operation.path().to_string()).collect();
    assert_eq!(
        paths,
        [
            "/spec/containers/0/resources/limits/nvidia.com~1gpu",
            "/spec/containers/0/resources/limits/tencent.com~1vcuda-core",
            "/spec/containers/0/resources/limits/tencent.com~1vcuda-memory",
            "/spec/containers/0/resources/requests/nvidia.com~1gpu",
            "/spec/containers/0/resources/requests/tencent.com~1vcuda-core",
            "/spec/containers/0/resources/requests/tencent.com~1vcuda-memory",
            "/spec/schedulerName",
            "/metadata/annotations/gpu-migrate.io~1original",
            "/metadata/annotations/gpu-migrate.io~1policy",
        ]
    );
}

#[test]
fn a_second_run_and_the_way_back() {
    let mut everything = pod(json!({
        "schedulerName": "default-scheduler",
        "nodeSelector": {"gpu-type": "a100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}, {"key": "k", "operator": "Exists"}],
        "initContainers": [container("warm", gpu("1"))],
        "containers": [
            {"name": "main", "resources": gpu("2"), "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]},
            container("none", gpu("0")), container("plain", json!({})),
        ],
    }));
    everything["metadata"]["annotations"] = json!({"scheduling.k8s.io/group-name": "g", "scheduling.k8s.io/group-pod-num": "2",
            "tencent.com/predicate-node": "n"});
    let policies = || {
        vec![policy(
            "p",
            json!({"scheduling": {
                "nodeSelector": {"remove": ["gpu-type"], "set": {"pool": "shared"}},
                "tolerations": {"removeKeys": ["nvidia.com/gpu"], "add": [{"key": "pool", "operator": "Exists"}]},
                "runtimeClassName": "nvidia", "gangGate": true,
            }}),
        )]
    };
    let guarded = || namespace(&[("gpu-migrate.io/void-guard", "true")]);
    let first = Case::new(everything.clone()).policies(policies()).namespace(guarded()).run();
    assert_eq!(first.outcome, "converted");
    let second = Case::new(first.pod.clone()).policies(policies()).namespace(guarded()).run();
    assert!(second.untouched() && second.warnings.is_empty(), "{:?} {:?}", second.patch, second.warnings);

    // A sidecar that another webhook injects between the two runs is guarded too, and still everything goes back.
    let mut injected = first.pod.clone();
    injected["spec"]["containers"].as_array_mut().unwrap().insert(0, container("istio", json!({})));
    let third = Case::new(injected).policies(policies()).namespace(guarded()).run();
    assert_eq!(third.outcome, "guarded");
    for (mut pod, extra) in [(first.pod, 0), (third.pod, 1)] {
        assert!(gpu_migrate_webhook::restore::restore(&mut pod).unwrap());
        for _ in 0..extra {
            let removed = pod["spec"]["containers"].as_array_mut().unwrap().remove(0);
            assert_eq!(removed, container("istio", json!({})));
        }
        assert_eq!(pod, everything);
    }
}

/// KAI's share is an annotation, which cannot say for which of several containers it is.
#[test]
fn what_a_target_has_no_form_for_is_not_converted() {
    let container = |name: &str| json!({"name": name, "resources": {"limits": {"nvidia.com/gpu": "1"}}});
    let convert = |target: &str, cores: u32| json!({"convert": {"target": target, "coresPerCard": cores, "blocksPerCard": 20}});
    let run = |spec: Value, convert: Value| Case::new(pod(spec)).policies(vec![policy("p", convert)]).run();
    let two = json!({"containers": [container("a"), container("b")]});
    let init = json!({"initContainers": [container("a")], "containers": [{"name": "b"}]});
    for (spec, expected) in [
        (two, "2 containers ask for cards: KAI gives a share to one container of a pod"),
        (init, "container a: KAI gives no share to an init container"),
    ] {
        let done = run(spec, convert("kai", 50));
        assert_eq!(done.outcome, "unconvertible");
        assert!(done.warnings.iter().any(|warning| warning.contains(expected)), "{:?}", done.warnings);
        assert!(done.untouched());
    }
    let one = json!({"containers": [container("a")]});
    let done = run(one.clone(), convert("kai", 50));
    assert_eq!(done.pod["metadata"]["annotations"]["gpu-memory"], "5120");
    assert_eq!(done.pod["spec"]["schedulerName"], "kai-scheduler");
    let done = run(one.clone(), convert("hami", 100));
    assert_eq!(done.outcome, "converted", "a wave waits for it");
    assert_eq!(done.pod["metadata"]["annotations"]["gpu-migrate.io/policy"], "p@1");
    assert_eq!(done.pod["spec"], done.before["spec"]);
    let done = run(one, convert("hami", 50));
    assert_eq!(
        done.pod["spec"]["containers"][0]["resources"]["limits"],
        json!({"nvidia.com/gpu": "1", "nvidia.com/gpucores": "50", "nvidia.com/gpumem": "5120"})
    );
    assert!(done.pod["spec"]["schedulerName"].is_null(), "HAMi's webhook sets it");
}
