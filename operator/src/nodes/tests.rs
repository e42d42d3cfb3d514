//! The decisions as tables: what a node looks like, what it is to be, what follows.

use super::daemonsets::{Role, external, roles};
use super::decide::{NodeInput, NodePlan, desired, plan, sets};
use super::driver::{Run, matches, uses_cards_unrequested};
use super::templates::{Component, Templates, daemon_set, installer};
use super::{Labels, NodePods, NodeView};
use gpu_migrate_model::crd::{Driver, GPUConfigSpec, GPUShadowStatus, InstallPhase};
use k8s_openapi::api::apps::v1::DaemonSet;
use serde_json::{Value, json};
use std::collections::BTreeMap;

const PLUGIN: &str = "gpu-migrate.io/plugin";
const AGENT: &str = "gpu-migrate.io/run-node-agent";
const NVIDIA: &str = "gpu-migrate.io/run-nvidia-plugin";
const CLOSED: &str = "gpu-migrate.io/no-new-shares";

fn spec(plugin: &str, more: Value) -> GPUConfigSpec {
    let mut pool = json!({"name": "p", "selector": {"matchLabels": {"pool": "p"}}, "plugin": plugin});
    pool.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    serde_json::from_value(json!({"nodePools": [pool]})).unwrap()
}

/// A node of the pool with labels that the operator wrote.
fn node(own: &[(&str, &str)]) -> NodeView {
    let mut labels = BTreeMap::from([("pool".to_owned(), "p".to_owned())]);
    labels.extend(own.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())));
    let own_labels = own.iter().map(|(key, _)| (*key).to_owned()).collect();
    NodeView { name: "n".into(), labels, own_labels, ..NodeView::default() }
}

fn set(name: &str, pod: Value) -> DaemonSet {
    serde_json::from_value(json!({"metadata": {"name": name, "namespace": "kube-system"},
        "spec": {"selector": {}, "template": {"spec": pod}}}))
    .unwrap()
}

fn device_plugin(container: Value) -> Value {
    let mut container = container;
    container["name"] = json!("c");
    json!({"containers": [container], "volumes": [{"name": "d", "hostPath": {"path": "/var/lib/kubelet/device-plugins"}}]})
}

fn shadow(status: Value) -> GPUShadowStatus {
    serde_json::from_value(status).unwrap()
}

fn held(by: Value) -> GPUShadowStatus {
    shadow(json!({"cards": [{"uuid": "GPU-a", "minor": 0, "memoryMiB": 4096, "holders": [by]}]}))
}

#[derive(Default)]
struct Case {
    sets: Vec<DaemonSet>,
    shadow: Option<GPUShadowStatus>,
    pods: Option<NodePods>,
    runs: Vec<Run>,
    templates: Templates,
    installing: u32,
}

impl Case {
    fn plan(&self, spec: Option<&GPUConfigSpec>, node: &NodeView) -> NodePlan {
        let external = external(&self.sets);
        let desired = desired(spec, node);
        plan(&NodeInput {
            node,
            desired: desired.as_ref(),
            shadow: self.shadow.as_ref(),
            external: &external,
            pods: self.pods.as_ref(),
            runs: &self.runs,
            templates: &self.templates,
            namespace: "sys",
            installing: self.installing,
        })
    }
}

/// Without the pool's label, which is always there.
fn shown(labels: &Labels) -> Vec<(&str, &str)> {
    let short = |key: &'static str| key.trim_start_matches("gpu-migrate.io/");
    labels.iter().map(|(key, value)| (short(key), value.as_str())).filter(|(key, _)| *key != "pool").collect()
}

fn conditions(plan: &NodePlan) -> Vec<String> {
    plan.conditions.iter().map(|one| format!("{}={}: {}", one.kind, one.status, one.message)).collect()
}

#[test]
fn who_serves_a_node_is_known_by_what_it_mounts_and_reads() {
    let pod = |spec: Value| roles(&serde_json::from_value(spec).unwrap());
    let plugin = |behind_bridge| vec![Role::NvidiaPlugin { behind_bridge }];
    let cases: [(&str, Value, Vec<Role>); 9] = [
        (
            "by its image",
            device_plugin(json!({"image": "mirror.example/x/k8s-device-plugin@sha256:1"})),
            plugin(false),
        ),
        (
            "by a variable of its own",
            device_plugin(json!({"image": "x", "env": [{"name": "MIG_STRATEGY", "value": "none"}]})),
            plugin(false),
        ),
        (
            "by its command",
            device_plugin(json!({"image": "x", "command": ["/usr/bin/nvidia-device-plugin"]})),
            plugin(false),
        ),
        (
            "behind the bridge by the variable",
            device_plugin(json!({"image": "x",
            "env": [{"name": "KUBELET_SOCKET", "value": "/var/lib/kubelet/device-plugins/gpu-migrate@kubelet.sock"}]})),
            plugin(true),
        ),
        (
            "behind the bridge by another folder",
            json!({"containers": [{"name": "c", "image": "k8s-device-plugin",
            "volumeMounts": [{"name": "d", "mountPath": "/var/lib/kubelet/device-plugins"}]}],
            "volumes": [{"name": "d", "hostPath": {"path": "/var/lib/kubelet/plugins/gpu-migrate/sockets"}}]}),
            plugin(true),
        ),
        (
            "another sharing plugin",
            device_plugin(json!({"image": "projecthami/hami:v2.10.0"})),
            vec![Role::OtherSharing],
        ),
        (
            "the node agent",
            json!({"containers": [{"name": "c"}], "volumes": [
            {"name": "a", "hostPath": {"path": "/k/device-plugins"}}, {"name": "b", "hostPath": {"path": "/k/pod-resources"}}]}),
            vec![Role::NodeAgent],
        ),
        (
            "the exporter",
            json!({"containers": [{"name": "c", "env": [{"name": "DCGM_EXPORTER_LISTEN", "value": ":9400"}]}]}),
            vec![Role::DcgmExporter],
        ),
        ("a plugin of another device", device_plugin(json!({"image": "intel/intel-gpu-plugin"})), vec![]),
    ];
    for (what, spec, expected) in cases {
        assert_eq!(pod(spec), expected, "{what}");
    }
    let image = json!({"containers": [{"name": "c", "image": "k8s-device-plugin"}]});
    assert_eq!(pod(image), [], "an image alone registers nothing");
}

#[test]
fn a_daemon_set_counts_where_it_would_run() {
    let covers = |more: Value, node: &NodeView| {
        let mut spec = device_plugin(json!({"image": "k8s-device-plugin"}));
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let sets = [set("d", spec)];
        external(&sets)[0].covers(node, &node.labels)
    };
    let here = node(&[]);
    let affinity = |term: Value| json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}});
    let expression = |operator: &str, values: &[&str]| {
        affinity(json!({"matchExpressions": [{"key": "pool", "operator": operator, "values": values}]}))
    };
    assert!(covers(json!({}), &here));
    assert!(covers(json!({"nodeSelector": {"pool": "p"}}), &here));
    assert!(!covers(json!({"nodeSelector": {"pool": "q"}}), &here));
    assert!(covers(expression("In", &["p", "q"]), &here));
    assert!(!covers(expression("NotIn", &["p"]), &here));
    assert!(!covers(expression("DoesNotExist", &[]), &here));
    assert!(!covers(
        affinity(json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["m"]}]})),
        &here
    ));
    assert!(!covers(affinity(json!({})), &here), "an empty term matches nothing");
    let mut tainted = here.clone();
    tainted.taints = serde_json::from_value(json!([
        {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}, {"key": "gpu", "value": "yes", "effect": "NoSchedule"}])).unwrap();
    assert!(!covers(json!({}), &tainted));
    assert!(covers(json!({"tolerations": [{"operator": "Exists"}]}), &tainted));
    assert!(covers(json!({"tolerations": [{"key": "gpu", "value": "yes"}]}), &tainted));
    assert!(!covers(json!({"tolerations": [{"key": "gpu", "value": "no"}]}), &tainted));
}

#[test]
fn a_new_node_gets_what_its_mode_needs() {
    let bare = node(&[]);
    let cases = [
        (
            "Bridged",
            json!({}),
            vec![("plugin", "Bridged"), ("run-node-agent", "none"), ("run-nvidia-plugin", "Bridged")],
        ),
        ("Shared", json!({"isolation": "mps"}), vec![("plugin", "Shared"), ("run-node-agent", "mps")]),
        (
            "Bridged",
            json!({"exporter": "Dcgm"}),
            vec![
                ("plugin", "Bridged"),
                ("run-dcgm-exporter", "true"),
                ("run-node-agent", "none"),
                ("run-nvidia-plugin", "Bridged"),
            ],
        ),
    ];
    for (mode, more, expected) in cases {
        let plan = Case::default().plan(Some(&spec(mode, more)), &bare);
        assert_eq!(shown(&plan.labels), expected, "{mode}");
        assert!(plan.conditions.is_empty(), "{:?}", plan.conditions);
    }
    // NVIDIA's plugin registers with the kubelet only where no agent runs: the pods must be counted.
    let legacy = spec("Legacy", json!({}));
    assert!(Case::default().plan(Some(&legacy), &bare).count_pods);
    let counted = Case { pods: Some(NodePods::default()), ..Case::default() };
    let plan = counted.plan(Some(&legacy), &bare);
    assert_eq!(shown(&plan.labels), [("plugin", "Legacy"), ("run-nvidia-plugin", "Legacy")]);
}

#[test]
fn a_node_that_an_owner_labelled_gets_the_agent_alone() {
    let mut labelled = node(&[(PLUGIN, "Bridged")]);
    labelled.own_labels.clear();
    let plan = Case::default().plan(None, &labelled);
    assert_eq!(shown(&plan.labels), [("run-node-agent", "none")], "the label itself stays the owner's");
    let other = NodeView { name: "other".into(), ..NodeView::default() };
    assert_eq!(Case::default().plan(None, &other), NodePlan::default(), "nothing is touched");
}

#[test]
fn what_an_owner_runs_is_left_as_it_is() {
    let bridged = spec("Bridged", json!({"exporter": "Dcgm"}));
    let behind = device_plugin(
        json!({"image": "k8s-device-plugin", "env": [{"name": "KUBELET_SOCKET", "value": "/x/gpu-migrate@kubelet.sock"}]}),
    );
    let dcgm = json!({"containers": [{"name": "c", "image": "nvidia/dcgm-exporter:4"}]});
    let case = Case { sets: vec![set("any-name", behind), set("metrics", dcgm)], ..Case::default() };
    let plan = case.plan(Some(&bridged), &node(&[]));
    assert_eq!(shown(&plan.labels), [("plugin", "Bridged"), ("run-node-agent", "none")]);
    assert_eq!(
        conditions(&plan),
        [
            "ExternalComponents=true: not managed by the operator: DaemonSet kube-system/any-name, DaemonSet kube-system/metrics"
        ]
    );

    // The chart's own DaemonSet, which selects by the label that the node is only about to get.
    let agent = json!({"containers": [{"name": "bridge"}], "nodeSelector": {PLUGIN: "Bridged"}, "volumes": [
        {"name": "a", "hostPath": {"path": "/var/lib/kubelet/device-plugins"}}, {"name": "b", "hostPath": {"path": "/var/lib/kubelet/pod-resources"}}]});
    let case = Case { sets: vec![set("gpu-migrate-bridge", agent)], ..Case::default() };
    let plan = case.plan(Some(&spec("Bridged", json!({}))), &node(&[]));
    assert_eq!(shown(&plan.labels), [("plugin", "Bridged"), ("run-nvidia-plugin", "Bridged")]);

    // Neither a DaemonSet nor ours, and registered all the same.
    let mut registered = node(&[]);
    (registered.has_whole_cards, registered.has_shares) = (true, true);
    let plan = Case::default().plan(Some(&spec("Bridged", json!({}))), &registered);
    assert_eq!(shown(&plan.labels), [("plugin", "Bridged")]);
    assert_eq!(plan.conditions.len(), 1, "{:?}", plan.conditions);
}

#[test]
fn two_plugins_for_the_same_cards_are_a_conflict_and_close_the_node_to_shares() {
    let bridged = spec("Bridged", json!({}));
    let direct = || set("nvidia", device_plugin(json!({"image": "k8s-device-plugin"})));
    let mut case = Case { sets: vec![direct()], ..Case::default() };
    let plan = case.plan(Some(&bridged), &node(&[]));
    assert_eq!(
        shown(&plan.labels),
        [("no-new-shares", "true"), ("plugin", "Bridged"), ("run-node-agent", "none")]
    );
    assert!(conditions(&plan)[1].starts_with(
        "PluginConflict=true: DaemonSet kube-system/nvidia is at the kubelet and not behind the node agent"
    ));
    // As soon as the agent has it behind itself, the node opens.
    case.shadow = Some(shadow(
        json!({"conditions": [{"type": "NvidiaPluginRegistered", "status": "True", "reason": "", "message": "", "lastTransitionTime": "2026-11-21T12:00:00Z"}]}),
    ));
    assert_eq!(
        shown(&case.plan(Some(&bridged), &node(&[])).labels),
        [("plugin", "Bridged"), ("run-node-agent", "none")]
    );
    let hami =
        Case { sets: vec![set("h", device_plugin(json!({"image": "projecthami/hami"})))], ..Case::default() };
    assert!(
        conditions(&hami.plan(Some(&bridged), &node(&[])))[0].contains("allocates shares of the same cards")
    );
    let mut counted = Case { sets: vec![direct()], pods: Some(NodePods::default()), ..Case::default() };
    counted.sets.push(set("h", device_plugin(json!({"image": "projecthami/hami"}))));
    let plan = counted.plan(Some(&spec("Legacy", json!({}))), &node(&[]));
    assert_eq!(shown(&plan.labels), [("plugin", "Legacy")], "a Legacy node is theirs");
}

/// Walks a node from mode to mode; `world` says how many pods are there at each step.
fn walk(
    from: &[(&str, &str)],
    to: Option<&GPUConfigSpec>,
    world: &[(NodePods, Option<GPUShadowStatus>)],
) -> Vec<Vec<(String, String)>> {
    let mut at = node(from);
    let mut seen = Vec::new();
    for (pods, shadow) in world {
        let case = Case { pods: Some(*pods), shadow: shadow.clone(), ..Case::default() };
        let plan = case.plan(to, &at);
        seen.push(shown(&plan.labels).into_iter().map(|(k, v)| (k.to_owned(), v.to_owned())).collect());
        let labels = plan.labels.iter().map(|(k, v)| (*k, v.as_str())).collect::<Vec<_>>();
        at = node(&labels);
        at.has_whole_cards = true;
    }
    seen
}

fn pairs(labels: &[(&str, &str)]) -> Vec<(String, String)> {
    labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

#[test]
fn towards_the_bridge_the_direct_plugin_leaves_first() {
    let there = NodePods { legacy: 2, direct_plugins: 1, ..NodePods::default() };
    let gone = NodePods { legacy: 2, ..NodePods::default() };
    let steps = walk(
        &[(PLUGIN, "Legacy"), (NVIDIA, "Legacy")],
        Some(&spec("Bridged", json!({}))),
        &[(there, None), (there, None), (gone, None)],
    );
    let paused = pairs(&[("plugin", "Legacy"), ("run-nvidia-plugin", "Off")]);
    assert_eq!(steps[0], paused);
    assert_eq!(steps[1], paused, "its pod is still there");
    assert_eq!(
        steps[2],
        pairs(&[("plugin", "Bridged"), ("run-node-agent", "none"), ("run-nvidia-plugin", "Bridged")])
    );
}

#[test]
fn away_from_the_bridge_the_last_share_and_then_the_agent_leave_first() {
    let pods = |shared, agents| NodePods { shared, agents, ..NodePods::default() };
    let share = || Some(held(json!({"uid": "u", "container": "c", "cores": 30, "blocks": 3})));
    let from = [(PLUGIN, "Bridged"), (AGENT, "none"), (NVIDIA, "Bridged")];
    let world = [
        (pods(1, 1), share()), // a share runs: closed, kept
        (pods(0, 1), share()), // the API does not know its pod any more, the agent still does
        (pods(0, 1), None),    // the last one is gone: the agent leaves
        (pods(0, 1), None),    // it takes its time
        (pods(0, 0), None),    // and is gone
        (pods(0, 0), None),
    ];
    let steps = walk(&from, Some(&spec("Legacy", json!({}))), &world);
    let closed = pairs(&[
        ("no-new-shares", "true"),
        ("plugin", "Bridged"),
        ("run-node-agent", "none"),
        ("run-nvidia-plugin", "Bridged"),
    ]);
    assert_eq!((&steps[0], &steps[1]), (&closed, &closed));
    assert_eq!(
        steps[2],
        pairs(&[("no-new-shares", "true"), ("plugin", "Bridged"), ("run-nvidia-plugin", "Off")])
    );
    assert_eq!(
        steps[3],
        pairs(&[("no-new-shares", "true"), ("plugin", "Legacy"), ("run-nvidia-plugin", "Off")])
    );
    let done = pairs(&[("plugin", "Legacy"), ("run-nvidia-plugin", "Legacy")]);
    assert_eq!((&steps[4], &steps[5]), (&done, &done));
    // A legacy pod on another card than the kubelet knows of: the agent is the only one who knows.
    let moved = Some(held(json!({"uid": "u", "container": "c", "kubeletDevices": ["GPU-b"]})));
    let steps = walk(
        &from,
        Some(&spec("Legacy", json!({}))),
        &[(pods(0, 1), moved.clone()), (pods(0, 1), moved), (pods(0, 1), None)],
    );
    assert_eq!((&steps[0], &steps[1]), (&closed, &closed));
    assert_eq!(
        steps[2],
        pairs(&[("no-new-shares", "true"), ("plugin", "Bridged"), ("run-nvidia-plugin", "Off")])
    );
    // What the agent that left has reported is forgotten, once it is gone.
    let mut closed_node = node(&[(PLUGIN, "Legacy"), (NVIDIA, "Off"), (CLOSED, "true")]);
    let mut case = Case { shadow: Some(held(json!({"uid": "old", "container": "c"}))), ..Case::default() };
    for (agents, forgotten) in [(1, false), (0, true)] {
        case.pods = Some(pods(0, agents));
        assert_eq!(case.plan(Some(&spec("Legacy", json!({}))), &closed_node).delete_shadow, forgotten);
    }
    closed_node = node(&[(PLUGIN, "Bridged"), (AGENT, "none"), (CLOSED, "true")]);
    assert!(!case.plan(Some(&spec("Bridged", json!({}))), &closed_node).delete_shadow, "it stays after all");
    // A node that leaves its pool takes the same steps, to no labels.
    let none = GPUConfigSpec::default();
    let steps = walk(&from, Some(&none), &world);
    assert_eq!(steps[0], closed);
    assert_eq!(steps[5], pairs(&[]));
    // One without a share is closed for a round before anything leaves: a choice may be on its way.
    let steps = walk(&from, Some(&none), &[(pods(0, 1), None), (pods(0, 1), None)]);
    assert_eq!(steps[0], closed);
}

#[test]
fn between_bridged_and_shared_only_nvidias_plugin_moves() {
    let busy = NodePods { legacy: 1, shared: 3, agents: 1, ..NodePods::default() };
    let bridged = [(PLUGIN, "Bridged"), (AGENT, "none"), (NVIDIA, "Bridged")];
    let steps = walk(&bridged, Some(&spec("Shared", json!({}))), &[(busy, None)]);
    let shared = [("plugin", "Shared"), ("run-node-agent", "none"), ("run-nvidia-plugin", "Off")];
    assert_eq!(steps[0], pairs(&shared));
    let from = [(PLUGIN, "Shared"), (AGENT, "none"), (NVIDIA, "Off")];
    let steps = walk(&from, Some(&spec("Bridged", json!({}))), &[(busy, None)]);
    assert_eq!(
        steps[0],
        pairs(&[("plugin", "Bridged"), ("run-node-agent", "none"), ("run-nvidia-plugin", "Bridged")])
    );
}

#[test]
fn versions_match_by_their_parts() {
    let driver = |version: &str, cuda: Option<&str>| Driver {
        version: version.into(),
        cuda: cuda.map(Into::into),
        installer: None,
        ..Driver::default()
    };
    let found = |version: &str, cuda: &str| (Some(version.to_owned()), Some(cuda.to_owned()));
    assert_eq!(matches(&driver("550", None), &found("550.54.15", "12.4")), Some(true));
    assert_eq!(matches(&driver("550.54", None), &found("550.54.15", "12.4")), Some(true));
    assert_eq!(matches(&driver("550.5", None), &found("550.54.15", "12.4")), Some(false));
    assert_eq!(matches(&driver("550", Some("12.4")), &found("550.1", "12.10")), Some(true));
    assert_eq!(matches(&driver("550", Some("12.4")), &found("550.1", "11.8")), Some(false));
    assert_eq!(matches(&driver("550", None), &(None, None)), None);
}

const INSTALLER: &str = "apiVersion: v1\nkind: Pod\nspec:\n  containers: [{name: install, image: drivers, env: [{name: A, value: b}]}]\n";

fn with_driver() -> GPUConfigSpec {
    spec("Bridged", json!({"driver": {"version": "550", "installer": "driver.yaml"}}))
}

fn with_installer() -> Case {
    Case { templates: Templates::from([("driver.yaml".into(), INSTALLER.into())]), ..Case::default() }
}

#[test]
fn a_node_gets_its_plugins_only_after_the_driver() {
    let spec = with_driver();
    let mut case = with_installer();
    assert!(case.plan(Some(&spec), &node(&[])).count_pods);
    case.pods = Some(NodePods::default());
    let first = case.plan(Some(&spec), &node(&[]));
    let pod = first.create.clone().unwrap();
    assert_eq!((shown(&first.labels), pod["spec"]["nodeName"].as_str()), (vec![], Some("n")));
    let env = &pod["spec"]["containers"][0]["env"];
    assert_eq!((env[0]["name"].as_str(), env[1]["value"].as_str()), (Some("A"), Some("550")));

    let (_, revision) = installer("driver.yaml", &case.templates, "550", "n", "sys").unwrap();
    let run = |phase, message: &str| Run {
        pod: "x".into(),
        revision: revision.clone(),
        phase,
        message: message.into(),
    };
    case.runs = vec![run(InstallPhase::Installing, "")];
    let waiting = case.plan(Some(&spec), &node(&[]));
    assert_eq!((shown(&waiting.labels), waiting.create), (vec![], None));
    case.runs = vec![run(InstallPhase::Failed, "install: Error, exit code 7: no kernel headers")];
    let failed = case.plan(Some(&spec), &node(&[]));
    assert_eq!((shown(&failed.labels), failed.create.clone()), (vec![], None), "retried only on request");
    assert!(
        conditions(&failed)[1].ends_with("not installed: install: Error, exit code 7: no kernel headers"),
        "{:?}",
        conditions(&failed)
    );
    case.runs = vec![run(InstallPhase::Installed, "")];
    let done = case.plan(Some(&spec), &node(&[]));
    assert_eq!(shown(&done.labels).len(), 3);
    assert!(done.remove.is_empty(), "kept until its success is written down");
    case.shadow = Some(GPUShadowStatus { driver_install: done.install.clone(), ..Default::default() });
    assert_eq!(case.plan(Some(&spec), &node(&[])).remove, ["x"]);
    case.runs.clear();
    assert_eq!(shown(&case.plan(Some(&spec), &node(&[])).labels).len(), 3, "what was written down counts");
}

#[test]
fn a_driver_is_not_changed_under_running_pods() {
    let spec = with_driver();
    let labels = [(PLUGIN, "Bridged"), (AGENT, "none"), (NVIDIA, "Bridged")];
    let mut case = with_installer();
    case.shadow = Some(shadow(
        json!({"driverVersion": "535.1", "cards": [{"uuid": "GPU-a", "minor": 0, "memoryMiB": 4096, "holders": [{"uid": "u", "container": "c"}]}]}),
    ));
    case.pods = Some(NodePods { agents: 1, ..NodePods::default() });
    let busy = case.plan(Some(&spec), &node(&labels));
    assert_eq!((shown(&busy.labels).len(), busy.create.clone()), (3, None), "a legacy holder is left");
    assert!(
        conditions(&busy)[0].contains("driver 535.1 found, 550 desired")
            && conditions(&busy)[1].contains("no pod is evicted"),
        "{:?}",
        conditions(&busy)
    );
    case.shadow = Some(shadow(json!({"driverVersion": "535.1"})));
    let empty = case.plan(Some(&spec), &node(&labels));
    assert_eq!(
        (shown(&empty.labels), empty.create.clone()),
        (vec![("run-nvidia-plugin", "Off")], None),
        "first the plugins leave"
    );
    case.pods = Some(NodePods::default());
    assert!(case.plan(Some(&spec), &node(&[(NVIDIA, "Off")])).create.is_some());
    // Found as wanted: nothing to install.
    case.shadow = Some(shadow(json!({"driverVersion": "550.90.07"})));
    assert_eq!(shown(&case.plan(Some(&spec), &node(&labels)).labels).len(), 3);
    // A template that is not there keeps a new node waiting and takes nothing from one that runs.
    case.templates.clear();
    case.shadow = None;
    let missing = case.plan(Some(&spec), &node(&[]));
    assert_eq!((shown(&missing.labels), missing.problem.is_some()), (vec![], true));
    assert_eq!(shown(&case.plan(Some(&spec), &node(&labels)).labels).len(), 3);
}

#[test]
fn drivers_are_installed_on_a_few_nodes_at_a_time_behind_a_cordon() {
    let spec = with_driver();
    let labels = [(PLUGIN, "Bridged"), (AGENT, "none"), (NVIDIA, "Bridged")];
    let mut case = with_installer();
    case.shadow = Some(shadow(json!({"driverVersion": "535.1"})));
    case.pods = Some(NodePods { agents: 1, ..NodePods::default() });
    case.installing = 1;
    let queued = case.plan(Some(&spec), &node(&labels));
    assert_eq!((shown(&queued.labels).len(), queued.cordon), (3, false), "it keeps its plugins meanwhile");
    assert!(conditions(&queued)[1].contains("maxUnavailable is 1: other nodes of the pool come first"));
    case.installing = 0;
    let begun = case.plan(Some(&spec), &node(&labels));
    assert_eq!((shown(&begun.labels), begun.cordon), (vec![("run-nvidia-plugin", "Off")], true));
    // One that has begun goes on whatever the others do.
    case.installing = 1;
    let cordoned = NodeView { own_cordon: true, ..node(&[(NVIDIA, "Off")]) };
    case.pods = Some(NodePods { legacy: 1, ..NodePods::default() });
    let late = case.plan(Some(&spec), &cordoned);
    assert_eq!((late.create, late.cordon), (None, true), "a pod that came before the cordon is waited for");
    case.pods = Some(NodePods::default());
    let installing = case.plan(Some(&spec), &cordoned);
    assert!(installing.create.is_some() && installing.cordon);
    let (_, revision) = installer("driver.yaml", &case.templates, "550", "n", "sys").unwrap();
    let run = |phase| Run { pod: "x".into(), revision: revision.clone(), phase, message: String::new() };
    case.runs = vec![run(InstallPhase::Failed)];
    assert!(case.plan(Some(&spec), &cordoned).cordon, "a node without a driver takes no pods");
    case.runs = vec![run(InstallPhase::Installed)];
    assert!(!case.plan(Some(&spec), &cordoned).cordon);
    assert!(!case.plan(None, &cordoned).cordon, "nor one that is not managed any more");
}

#[test]
fn a_pod_that_uses_cards_without_a_request_is_in_the_way_of_an_installer() {
    let uses = |spec: Value| uses_cards_unrequested(&serde_json::from_value(json!({"spec": spec})).unwrap());
    let with = |container: Value, path: &str| json!({"containers": [container], "volumes": [{"name": "v", "hostPath": {"path": path}}]});
    let plain = json!({"name": "c"});
    let privileged = json!({"name": "c", "securityContext": {"privileged": true}});
    let shown =
        |cards: &str| json!({"name": "c", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": cards}]});
    assert!(uses(with(plain.clone(), "/dev/nvidia0")) && uses(with(privileged.clone(), "/dev/")));
    assert!(uses(with(shown("all"), "/x")) && !uses(with(shown("void"), "/x")));
    assert!(
        !uses(with(plain.clone(), "/dev"))
            && !uses(with(privileged, "/var"))
            && !uses(json!({"containers": [plain]}))
    );
    let mut case = with_installer();
    case.shadow = Some(shadow(json!({"driverVersion": "535.1"})));
    case.pods = Some(NodePods { unrequested: 1, ..NodePods::default() });
    let busy = case.plan(Some(&with_driver()), &node(&[(PLUGIN, "Bridged")]));
    assert!(conditions(&busy)[1].contains("1 pods use cards on this node"), "{:?}", conditions(&busy));
}

#[test]
fn on_a_new_node_the_plugin_whose_labels_may_still_come_is_waited_for() {
    let mut pod = device_plugin(json!({"image": "k8s-device-plugin"}));
    pod["nodeSelector"] = json!({"nvidia.com/gpu.deploy.device-plugin": "true"});
    let sets = vec![set("nvidia-device-plugin-daemonset", pod)];
    let case = Case { sets, pods: Some(NodePods::default()), ..Case::default() };
    let spec = spec("Legacy", json!({}));
    let at = |is_new| case.plan(Some(&spec), &NodeView { is_new, ..node(&[]) });
    assert!(!at(true).labels.contains_key(NVIDIA));
    assert!(conditions(&at(true))[0].contains("may come once the new node is labelled"));
    assert_eq!(at(false).labels[NVIDIA], "Legacy");
    let elsewhere = NodeView { is_new: true, ..node(&[("nvidia.com/gpu.deploy.device-plugin", "false")]) };
    assert_eq!(case.plan(Some(&spec), &elsewhere).labels[NVIDIA], "Legacy", "kept off on purpose");
}

const AGENT_TEMPLATE: &str = "apiVersion: apps/v1\nkind: DaemonSet\nmetadata: {name: gpu-migrate-bridge}\nspec:\n  selector: {matchLabels: {a: b}}\n  template:\n    metadata: {labels: {a: b}}\n    spec: {containers: [{name: bridge, image: x}]}\n";

#[test]
fn daemon_sets_come_with_the_first_node_and_go_with_the_last() {
    let templates = Templates::from([("node-agent.yaml".into(), AGENT_TEMPLATE.into())]);
    let labels = Labels::from([("gpu-migrate.io/run-node-agent", "none".into())]);
    let there = BTreeMap::from([("gpu-migrate-bridge".to_owned(), "node-agent".to_owned())]);
    let none = sets([].iter(), &BTreeMap::new(), &templates, "sys");
    assert_eq!(
        (none.apply.len(), none.delete.len(), none.problems.len()),
        (0, 0, 0),
        "a cluster without cards"
    );
    let first = sets([&labels].into_iter(), &BTreeMap::new(), &templates, "sys");
    let (component, set) = &first.apply[0];
    assert_eq!((*component, set["metadata"]["namespace"].as_str()), (Component::ALL[0], Some("sys")));
    assert_eq!(
        set["spec"]["template"]["spec"]["nodeSelector"],
        json!({"gpu-migrate.io/run-node-agent": "none"})
    );
    assert_eq!(sets([].iter(), &there, &templates, "sys").delete, ["gpu-migrate-bridge"]);
    let renamed = BTreeMap::from([("old".to_owned(), "node-agent".to_owned())]);
    assert_eq!(sets([&labels].into_iter(), &renamed, &templates, "sys").delete, ["old"]);
    let broken = sets([&labels].into_iter(), &there, &Templates::new(), "sys");
    assert_eq!(
        (broken.apply.len(), broken.delete.len(), broken.problems.len()),
        (0, 0, 1),
        "the last good one stays"
    );
}

#[test]
fn a_bad_template_is_named() {
    let error = |text: &str| {
        let templates = Templates::from([("node-agent.yaml".into(), text.into())]);
        daemon_set(Component::ALL[0], &templates, "sys").unwrap_err().to_string()
    };
    let replaced = |from: &str, to: &str| AGENT_TEMPLATE.replace(from, to);
    assert!(error("{").starts_with("ConfigMap gpu-migrate-templates, key node-agent.yaml: "));
    assert!(
        error(&replaced("DaemonSet", "Deployment")).ends_with("kind is \"Deployment\"; expected DaemonSet")
    );
    assert!(
        error(&replaced("labels: {a: b}", "labels: {a: c}")).contains(
            "spec.selector.matchLabels is {\"a\":\"b\"}; expected labels that the pod template has"
        )
    );
    assert!(
        error(&replaced("containers: [{name: bridge, image: x}]", "containers: []"))
            .contains("spec.template.spec.containers")
    );
    let always = Templates::from([("d".into(), format!("{INSTALLER}  restartPolicy: Always\n"))]);
    assert!(installer("d", &always, "1", "n", "sys").unwrap_err().to_string().contains("Never or OnFailure"));
}

#[test]
fn the_label_against_new_shares_is_the_extenders() {
    assert_eq!(CLOSED, gpu_migrate_model::names::NO_NEW_SHARES);
}
