//! The commands that look at a cluster, on dumps of clusters: `status`, `verify`, `preflight`, `quota`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, too, may fail loudly

use assert_cmd::Command;
use serde_json::{Value, json};

fn run(args: &[&str], dump: &Value) -> (i32, String, String) {
    let mut command = Command::cargo_bin("gpu-migrate").unwrap();
    let output = command.args(args).args(["--from", "-"]).write_stdin(dump.to_string()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn list(items: Vec<Value>) -> Value {
    json!({"apiVersion": "v1", "kind": "List", "items": items})
}

fn card(index: u32, state: &str, cores_left: u32, holders: Value) -> Value {
    json!({"uuid": format!("GPU-{index}"), "minor": index, "memoryMiB": 24576, "state": state, "coresLeft": cores_left, "holders": holders})
}

fn shadow(cards: Vec<Value>, conditions: Value) -> Value {
    json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUShadow", "metadata": {"name": "gpu-01"}, "spec": {},
        "status": {"total": cards.len(), "free": "", "legacy": "", "shared": "", "other": "", "cards": cards, "conditions": conditions}})
}

fn legacy_holder(pod: &str) -> Value {
    json!({"namespace": "ns", "pod": pod, "uid": format!("uid-{pod}"), "container": "c"})
}

fn share_holder(pod: &str, cores: u32) -> Value {
    json!({"namespace": "ns", "pod": pod, "uid": format!("uid-{pod}"), "container": "c", "cores": cores, "blocks": 10})
}

fn pod(name: &str, limits: Value, annotations: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "ns", "uid": format!("uid-{name}"), "annotations": annotations},
        "spec": {"nodeName": "gpu-01", "containers": [{"name": "c", "image": "i", "resources": {"limits": limits}}]}, "status": {"phase": "Running"}})
}

fn share(cores: u32) -> Value {
    json!({"tencent.com/vcuda-core": cores.to_string(), "tencent.com/vcuda-memory": "10"})
}

fn on_card(index: u32) -> Value {
    json!({"tencent.com/predicate-gpu-idx-0": index.to_string()})
}

/// Two shared pods on card 0, a legacy pod on card 1, card 2 free.
fn healthy() -> Vec<Value> {
    vec![
        shadow(
            vec![
                card(0, "Shared", 20, json!([share_holder("a", 50), share_holder("b", 30)])),
                card(1, "Legacy", 0, json!([legacy_holder("old")])),
                card(2, "Free", 100, json!([])),
            ],
            json!([]),
        ),
        pod("a", share(50), on_card(0)),
        pod("b", share(30), on_card(0)),
        pod("old", json!({"nvidia.com/gpu": "1"}), json!({"gpu-migrate.io/gpu-idx-c": "1"})),
    ]
}

#[test]
fn the_map_shows_every_card_at_a_glance() {
    let mut items = healthy();
    items[0]["status"]["cards"].as_array_mut().unwrap().extend([
        card(3, "Unhealthy", 0, json!([])),
        card(4, "Cordoned", 0, json!([])),
        card(5, "Disputed", 0, json!([])),
    ]);
    items.push(json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUMigration", "metadata": {"name": "danlu"},
        "spec": {"project": "danlu", "mode": "Enforce", "rollout": {"waves": [{"percent": 10}, {"percent": 100}]}},
        "status": {"phase": "Gating", "wave": 1, "counts": {"converted": 2, "legacy": 1},
            "conditions": [{"type": "Ready", "status": "False", "reason": "Gating", "message": "wave 1 of 2: watched", "lastTransitionTime": "2026-11-21T12:00:00Z"}]}}));
    let (code, out, err) = run(&["status"], &list(items.clone()));
    assert_eq!((code, err.as_str()), (0, ""));
    insta::assert_snapshot!(out, @"
    NODE    FREE  0   1  2  3     4     5
    gpu-01  1/6   80  L  ·  down  cord  both
    · free   L legacy   45 cores shared   down unhealthy   cord cordoned   both two kinds of holders

    POLICY  PROJECT  MODE     PHASE   WAVE  SHARED  LEGACY  WHY
    danlu   danlu    Enforce  Gating  1/2   2       1       wave 1 of 2: watched
    ");
    let (_, holders, _) = run(&["status", "gpu-01", "--holders"], &list(items.clone()));
    assert!(
        holders.contains("gpu-01  0     ns/a    c          50 cores and 10 blocks (2.5 GiB)"),
        "{holders}"
    );
    let (_, json, _) = run(&["status", "-o", "json"], &list(items));
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["nodes"][0]["status"]["cards"][1]["state"], "Legacy");
}

/// A thousand nodes on a screen: sums of those that are alike, then those to look at.
#[test]
fn a_thousand_nodes_are_summed_by_model_and_the_odd_ones_are_named() {
    let mut items = Vec::new();
    for number in 0..1000 {
        let model = if number % 4 == 0 { "A100" } else { "L40S" };
        let (first, second) = match number {
            17 => ("Unhealthy", "Free"),
            _ if number % 2 == 0 => ("Legacy", "Free"),
            _ => ("Shared", "Shared"),
        };
        let mut cards = vec![card(0, first, 40, json!([])), card(1, second, 20, json!([]))];
        for card in &mut cards {
            card["model"] = json!(model);
        }
        let late = json!([{"type": "Ready", "status": "False", "reason": "X", "message": "no kubelet", "lastTransitionTime": "2026-11-21T12:00:00Z"}]);
        let mut shadow = shadow(cards, if number == 500 { late } else { json!([]) });
        shadow["metadata"]["name"] = json!(format!("gpu-{number:04}"));
        items.push(shadow);
    }
    let dump = list(items);
    let (code, out, err) = run(&["status"], &dump);
    assert_eq!((code, err.as_str()), (0, ""));
    insta::assert_snapshot!(out, @"
    CARDS     NODES  FREE  LEGACY  SHARED  CORES SHARED  DOWN  CORDONED
    2 × A100  250    250   250     0       -             0     0
    2 × L40S  750    251   250     998     70%           1     0

    2 nodes to look at:
    NODE      FREE  0     1
    gpu-0017  1/2   down  ·
    gpu-0500  1/2   L     ·  Ready: no kubelet
    · free   L legacy   45 cores shared   down unhealthy   cord cordoned   both two kinds of holders
    1000 nodes; each of them: -o wide

    No policy (GPUMigration) exists: nothing is converted.
    ");
    let (_, wide, _) = run(&["status", "-o", "wide"], &dump);
    assert_eq!(wide.lines().filter(|line| line.starts_with("gpu-")).count(), 1000);
    let (_, bare, _) = run(&["status", "-o", "wide", "--no-headers"], &dump);
    assert!(bare.starts_with("gpu-0000  1/2  L ") && !bare.contains("free   L legacy"), "{bare}");
    let (_, names, _) = run(&["status", "-o", "name"], &dump);
    assert_eq!(names.lines().count(), 1000);
    assert!(names.starts_with("gpushadow.gpu-migrate.io/gpu-0000\n"), "{names}");
    let (code, _, err) = run(&["verify", "-o", "wide"], &dump);
    assert_eq!(code, 2, "{err}");
}

#[test]
fn top_shows_who_uses_how_much_and_who_waits() {
    let mut items = healthy();
    let mut late = pod("late", share(90), json!({}));
    late["spec"].as_object_mut().unwrap().remove("nodeName");
    late["status"] = json!({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}]});
    items.push(late);
    let (code, out, err) = run(&["top"], &list(items.clone()));
    assert_eq!((code, err.as_str()), (0, ""));
    insta::assert_snapshot!(out, @"
    NODE    CARDS  FREE  LEGACY  SHARED  OTHER  CORES  SHARED MEMORY
    gpu-01  3      1     1       1       0      60%    20% of 24.0 GiB

    POD     CONTAINER  NODE    CARDS  CORES         MEMORY
    ns/old  c          gpu-01  1      100 (legacy)  all
    ns/a    c          gpu-01  0      50            2.5 GiB
    ns/b    c          gpu-01  0      30            2.5 GiB

    WAITING  ASKS FOR  WHY
    ns/late  shares    0/1 nodes are available
    ");
    let (_, out, _) = run(&["top", "--limit", "1"], &list(items.clone()));
    assert!(out.contains("and 2 more (--limit)") && !out.contains("ns/b "), "{out}");
    let (_, out, _) = run(&["top", "-o", "json"], &list(items));
    let out: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (&out["nodes"][0]["cores"], &out["holders"][0]["legacy"], &out["waiting"][0]["pod"]),
        (&json!(180), &json!(true), &json!("ns/late"))
    );
    let (_, out, _) = run(&["top", "-o", "yaml"], &list(vec![]));
    assert!(out.contains("nodes: []"), "{out}");
}

#[test]
fn what_is_shown_can_be_narrowed_and_has_no_titles_where_none_are_wanted() {
    let dump = list(healthy());
    let (_, out, _) = run(&["top", "--no-headers"], &dump);
    assert!(out.starts_with("gpu-01  3 ") && !out.contains("POD "), "{out}");
    let (_, out, _) = run(&["top", "--filter", "old", "-o", "json"], &dump);
    let out: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((out["holders"].as_array().unwrap().len(), &out["holders"][0]["pod"]), (1, &json!("ns/old")));
    let (_, out, _) = run(&["top", "-n", "other"], &dump);
    assert!(out.contains("gpu-01") && !out.contains("ns/"), "{out}");
    let limits = json!({"requests.nvidia.com/gpu": "8"});
    let quotas = list(vec![namespace(), policy(), quota(limits)]);
    let (_, out, _) = run(&["quota", "translate", "-o", "table", "--no-headers"], &quotas);
    assert!(out.starts_with("ns  gpus  8 "), "{out}");
    let (_, out, _) = run(&["quota", "translate", "-o", "name"], &quotas);
    assert_eq!(out, "resourcequota/gpus\n");
}

#[test]
fn verify_agrees_with_a_healthy_cluster() {
    let (code, out, _) = run(&["verify"], &list(healthy()));
    assert_eq!(code, 0, "{out}");
    assert_eq!(
        out,
        "no card has two kinds of holders (I1), none is overcommitted (I2): checked 1 node, 3 cards, 3 holders\n"
    );
}

/// Pods of namespaces that have not opted in are not annotated: the node agent alone names their cards.
#[test]
fn a_whole_card_pod_without_an_annotation_is_where_its_node_agent_says() {
    let mut items = healthy();
    items[3]["metadata"]["annotations"] = json!({});
    let (code, out, _) = run(&["verify"], &list(items.clone()));
    assert!(code == 0 && !out.contains("ns/old"), "{out}");
    items.push(pod("nowhere", json!({"nvidia.com/gpu": "1"}), json!({})));
    let (_, out, _) = run(&["verify"], &list(items));
    assert!(out.contains("unknown: ns/nowhere, c: neither an annotation nor the node agent"), "{out}");
}

#[test]
fn verify_finds_breaches_in_either_source() {
    // The agent itself has two kinds of holders on a card.
    let mut items = healthy();
    items[0]["status"]["cards"][1]["holders"] = json!([legacy_holder("old"), share_holder("a", 10)]);
    let (code, out, _) = run(&["verify"], &list(items));
    assert_eq!(code, 3);
    assert!(out.contains("gpu-01, by its node agent: I1 broken"), "{out}");

    // Only the annotations of the pods show it.
    let mut items = healthy();
    items.push(pod("intruder", share(10), on_card(1)));
    let (code, out, _) = run(&["verify"], &list(items));
    assert_eq!(code, 3);
    assert!(out.contains("by the annotations of its pods: I1 broken"), "{out}");
    assert!(
        out.contains(
            "difference: gpu-01: ns/intruder, c is on card 1 by its annotations, not by the node agent"
        ),
        "{out}"
    );

    // Too many cores on one card.
    let mut items = healthy();
    items.push(pod("greedy", share(40), on_card(0)));
    let (code, out, _) = run(&["verify", "-o", "json"], &list(items));
    let out: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &out["holds"]), (3, &json!(false)));
    assert!(out["violations"][0].as_str().unwrap().contains("I2 broken"), "{out}");

    // A card that does not exist, an annotation that cannot be parsed, one that is missing: all are reported.
    let mut items = healthy();
    items.push(pod("astray", share(10), on_card(9)));
    items.push(pod("odd", share(10), json!({"tencent.com/predicate-gpu-idx-0": "one"})));
    items.push(pod("silent", share(10), json!({})));
    let (code, out, _) = run(&["verify"], &list(items));
    assert_eq!(code, 3);
    for part in
        ["ns/astray, c: card 9 is not on its node", "ns/odd: ", "ns/silent, c: no annotation names its card"]
    {
        assert!(out.contains(part), "{part}: {out}");
    }
}

#[test]
fn a_finished_pod_holds_nothing() {
    let mut items = healthy();
    let mut done = pod("done", share(90), on_card(0));
    done["status"]["phase"] = json!("Succeeded");
    items.push(done);
    assert_eq!(run(&["verify"], &list(items)).0, 0);
}

fn namespace() -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "ns", "labels": {"gpu-migrate.io/opt-in": "true", "gpu-migrate.io/project": "danlu"}}})
}

fn policy() -> Value {
    json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUMigration", "metadata": {"name": "danlu", "generation": 3},
        "spec": {"project": "danlu", "mode": "Enforce", "convert": {"coresPerCard": 50, "blocksPerCard": 20}}})
}

fn quota(hard: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpus", "namespace": "ns"}, "spec": {"hard": hard}})
}

#[test]
fn a_quota_gets_its_counterpart_by_the_policys_ratio() {
    let limits = json!({"requests.nvidia.com/gpu": "8", "pods": "20"});
    let (code, out, _) =
        run(&["quota", "translate"], &list(vec![namespace(), policy(), quota(limits.clone())]));
    assert_eq!(code, 0);
    let object: Value = serde_saphyr::from_str(&out).unwrap();
    assert_eq!(
        object["spec"]["hard"],
        json!({"requests.tencent.com/vcuda-core": "400", "requests.tencent.com/vcuda-memory": "160"})
    );
    let all = list(vec![namespace(), policy(), quota(limits.clone())]);
    let (_, table, _) = run(&["quota", "translate", "-o", "table"], &all);
    assert!(table.contains("ns         gpus   8      400 cores and 160 blocks (40 GiB)  danlu"), "{table}");
    let (_, out, _) = run(&["quota", "translate", "-o", "json"], &all);
    assert_eq!(serde_json::from_str::<Value>(&out).unwrap()["items"][0], object);
    let (code, out, err) = run(&["quota", "translate"], &list(vec![namespace(), quota(limits.clone())]));
    assert_eq!((code, out.as_str()), (3, ""));
    assert!(err.contains("no policy (GPUMigration) for project danlu"), "{err}");
    let half = quota(json!({"requests.nvidia.com/gpu": "500m"}));
    let (code, _, err) = run(&["quota", "translate"], &list(vec![namespace(), policy(), half]));
    assert_eq!(code, 3);
    assert!(
        err.contains("spec.hard[requests.nvidia.com/gpu]: 500m: expected a whole number of cards"),
        "{err}"
    );
    let (code, out, _) =
        run(&["quota", "translate", "-n", "other"], &list(vec![namespace(), policy(), quota(limits)]));
    assert_eq!((code, out.as_str()), (0, ""));
}

fn node(labels: Value, kubelet: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "gpu-01", "labels": labels},
        "status": {"capacity": {"nvidia.com/gpu": "3"}, "nodeInfo": {"architecture": "", "bootID": "", "containerRuntimeVersion": "", "kernelVersion": "",
            "kubeProxyVersion": "", "kubeletVersion": kubelet, "machineID": "", "operatingSystem": "", "osImage": "", "systemUUID": ""}}})
}

fn plugin(image: &str) -> Value {
    json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "plugin", "namespace": "kube-system"},
        "spec": {"selector": {}, "template": {"spec": {"containers": [{"name": "c", "image": image}]}}}})
}

fn webhook(name: &str, webhook: &str, failure_policy: &str, bundle: &str) -> Value {
    json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration", "metadata": {"name": name},
        "webhooks": [{"name": webhook, "admissionReviewVersions": ["v1"], "sideEffects": "None", "failurePolicy": failure_policy,
            "clientConfig": {"caBundle": bundle}, "namespaceSelector": {"matchLabels": {"gpu-migrate.io/opt-in": "true"}},
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}]}]})
}

fn behind_agent(status: &str) -> Value {
    json!([{"type": "NvidiaPluginRegistered", "status": status, "reason": "", "message": "", "lastTransitionTime": "2026-11-21T12:00:00Z"}])
}

fn ready_cluster() -> Vec<Value> {
    let mut items = healthy();
    items[0]["status"]["conditions"] = behind_agent("True");
    items.extend([
        namespace(),
        policy(),
        node(json!({"gpu-migrate.io/plugin": "Bridged"}), "v1.33.4"),
        plugin("nvcr.io/nvidia/k8s-device-plugin:v0.19.0"),
        webhook("gpu-migrate", "pods.gpu-migrate.io", "Ignore", "Y2E="),
    ]);
    items
}

#[test]
fn preflight_says_go_where_nothing_is_in_the_way() {
    let (code, out, err) = run(&["preflight"], &list(ready_cluster()));
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    assert!(out.ends_with("\ngo\n"), "{out}");
    assert!(!out.contains("warning") && !out.contains("no-go"), "{out}");
    for unseen in ["kubelets", "feature gates", "DRA", "schedulers"] {
        assert!(out.contains(&format!("skipped  {unseen}: ")), "not looked at is not ok: {out}");
    }
    assert!(
        out.contains("ok       pods: running pods that would be converted: 1; none is an obstacle"),
        "{out}"
    );
}

/// One policy that this version cannot read hides neither the others nor itself.
#[test]
fn a_malformed_policy_is_named_and_hides_nothing() {
    let mut items = ready_cluster();
    items.push(json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUMigration", "metadata": {"name": "bad"}, "spec": {"project": "q", "mode": "Bogus"}}));
    let (code, out, _) = run(&["status"], &list(items.clone()));
    assert_eq!(code, 0, "{out}");
    assert!(out.contains("gpu-01") && out.contains("GPUMigration bad") && out.contains("Bogus"), "{out}");
    let (code, out, _) = run(&["preflight"], &list(items));
    assert_eq!(code, 3);
    assert!(out.contains("no-go    pods: cannot be read: ") && out.contains("GPUMigration bad"), "{out}");
}

/// With another system as the target no promise of ours holds on its nodes.
#[test]
fn preflight_says_whose_the_nodes_of_another_target_are() {
    let mut cluster = ready_cluster();
    let mut hami = policy();
    hami["spec"]["convert"]["target"] = json!("hami");
    replace(&mut cluster, hami);
    let (code, out, _) = run(&["preflight"], &list(cluster));
    assert_eq!(code, 0, "{out}");
    assert!(
        out.contains("warning  pods: policy danlu converts to HAMi: its scheduler and its plugin serve"),
        "{out}"
    );
}

/// Every mistake alone is found and named; all together are all found.
#[test]
fn preflight_finds_every_mistake() {
    type Mistake = fn(&mut Vec<Value>);
    let mistakes: [(&str, Mistake); 13] = [
        ("failurePolicy Fail", |c| replace(c, webhook("gpu-migrate", "pods.gpu-migrate.io", "Fail", "Y2E="))),
        ("no caBundle", |c| replace(c, webhook("gpu-migrate", "pods.gpu-migrate.io", "Ignore", ""))),
        ("has no limit on shares", |c| c.push(quota(json!({"requests.nvidia.com/gpu": "8"})))),
        ("NVIDIA's plugin is not behind the node agent on gpu-01", |c| {
            c[0]["status"]["conditions"] = behind_agent("False");
        }),
        ("k8s-device-plugin:v0.16.2, which is older than v0.17.0", |c| {
            let mut old = plugin("nvcr.io/nvidia/k8s-device-plugin:v0.16.2");
            old["metadata"]["name"] = json!("nvidia-old");
            c.push(old);
        }),
        ("runs another GPU sharing plugin", |c| {
            let mut other = plugin("tkestack/gpu-manager:1.1.4");
            other["metadata"]["name"] = json!("gpu-manager");
            c.push(other);
        }),
        ("kubelet v1.20.2", |c| replace(c, node(json!({"gpu-migrate.io/plugin": "Bridged"}), "v1.20.2"))),
        ("reports no cards", |c| c.retain(|object| object["kind"] != "GPUShadow")),
        ("vgpu.hami.io also changes pods", |c| c.push(webhook("hami", "vgpu.hami.io", "Ignore", "Y2E="))),
        ("the extender 127.0.0.1:3456/scheduler is ignorable", |c| {
            let config = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\nextenders:\n- urlPrefix: https://x:secret@127.0.0.1:3456/scheduler\n  ignorable: true\n  managedResources: [{name: tencent.com/vcuda-core}]\n";
            c.push(json!({
                "apiVersion": "v1", "kind": "ConfigMap",
                "metadata": {"name": "scheduler", "namespace": "kube-system"}, "data": {"config.yaml": config},
            }));
        }),
        ("IsolationReady=False: isolation mps: no MPS control daemon answers", |c| {
            let shadow = c.iter_mut().find(|object| object["kind"] == "GPUShadow").unwrap();
            shadow["status"]["conditions"].as_array_mut().unwrap().push(json!({"type": "IsolationReady", "status": "False", "reason": "NotReady",
                "message": "isolation mps: no MPS control daemon answers", "lastTransitionTime": "2026-11-21T12:00:00Z"}));
        }),
        ("I1 broken", |c| c.push(pod("intruder", share(10), on_card(1)))),
        ("150: expected 1 to 100", |c| {
            let mut bad = policy();
            bad["spec"]["convert"]["coresPerCard"] = json!(150);
            replace(c, bad);
        }),
    ];
    for (said, mistake) in &mistakes {
        let mut cluster = ready_cluster();
        mistake(&mut cluster);
        let (code, out, err) = run(&["preflight"], &list(cluster));
        assert_eq!(code, 3, "{said}: {out}{err}");
        assert!(out.lines().any(|line| line.starts_with("no-go") && line.contains(said)), "{said}: {out}");
        assert!(out.ends_with("\nno-go\n"));
    }
    let mut cluster = ready_cluster();
    let together = [0, 2, 4, 5, 7, 8];
    for number in together {
        mistakes[number].1(&mut cluster);
    }
    let (_, out, _) = run(&["preflight", "-o", "json"], &list(cluster));
    let answer: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(answer["go"], false);
    for number in together {
        assert!(out.contains(mistakes[number].0), "{}: {out}", mistakes[number].0);
    }
}

fn replace(cluster: &mut Vec<Value>, object: Value) {
    let same = |other: &Value| {
        other["kind"] == object["kind"] && other["metadata"]["name"] == object["metadata"]["name"]
    };
    cluster.retain(|other| !same(other));
    cluster.push(object);
}

#[test]
fn bad_dumps_are_errors_and_changes_need_a_cluster() {
    let (code, _, err) = run(
        &["status"],
        &json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "p"}, "spec": {"containers": 3}}),
    );
    assert_eq!(code, 1);
    assert!(err.contains("Pod p") && err.contains("stdin:1"), "{err}");
    let (code, _, err) = run(&["cordon-card", "n", "1"], &list(vec![]));
    assert_eq!(code, 2);
    assert!(err.contains("unexpected argument '--from'"), "{err}");
}

#[test]
fn nothing_to_check_and_an_unknown_node_are_no_success() {
    let (code, out, _) = run(&["verify"], &list(Vec::new()));
    assert_eq!(code, 3);
    assert!(out.contains("nothing was checked"), "{out}");
    let (code, out, _) = run(&["status", "nope"], &list(healthy()));
    assert_eq!(code, 3);
    assert_eq!(out, "node nope: no GPUShadow; there are gpu-01\n");
    let (code, out, _) = run(&["status"], &list(vec![]));
    assert_eq!(code, 3, "neither agents nor policies: the wrong cluster");
    assert!(out.contains("No node reports its cards"), "{out}");
    assert_eq!(run(&["status"], &list(vec![policy()])).0, 0, "before the first node agent");
    let (code, out, _) = run(&["preflight"], &list(Vec::new()));
    assert_eq!(code, 3);
    assert!(out.contains("no node has cards") && out.ends_with("\nno-go\n"), "{out}");
}
