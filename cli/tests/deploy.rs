//! What deploy/ says, held against what the programs really are: flags, names, rights.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, too, may fail loudly

use clap::Parser as _;
use gpu_migrate_model::names::{self, Dialect};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy")
}

fn read(path: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(deploy().join(path)).unwrap();
    serde_saphyr::from_multiple(&text).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn base() -> Vec<Value> {
    ["webhook", "extender", "operator", "bridge"]
        .iter()
        .flat_map(|part| read(&format!("base/{part}.yaml")))
        .collect()
}

fn of_kind<'a>(objects: &'a [Value], kind: &str) -> Vec<&'a Value> {
    objects.iter().filter(|object| object["kind"] == kind).collect()
}

fn strings(list: &Value) -> Vec<&str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

/// Our containers by name.
fn containers(objects: &[Value]) -> BTreeMap<String, Value> {
    objects
        .iter()
        .filter_map(|object| object.pointer("/spec/template/spec/containers")?.as_array())
        .flatten()
        .map(|container| (container["name"].as_str().unwrap().to_owned(), container.clone()))
        .collect()
}

#[test]
fn every_flag_in_the_manifests_is_one() {
    let containers = containers(&base());
    let args = |name: &str| {
        let mut args = vec![format!("gpu-migrate-{name}")];
        args.extend(strings(&containers[name]["args"]).into_iter().map(str::to_owned));
        args
    };
    gpu_migrate_webhook::args::Args::try_parse_from(args("webhook")).unwrap();
    gpu_migrate_admission_ext::run::Args::try_parse_from(args("extender")).unwrap();
    gpu_migrate_operator::args::Args::try_parse_from(args("operator")).unwrap();
    let with_node = [args("bridge"), vec!["--node-name=n".to_owned()]].concat();
    gpu_migrate_plugin_bridge::args::Args::try_parse_from(with_node).unwrap();
    let env = containers["bridge"]["env"].as_array().unwrap();
    assert!(env.iter().any(|variable| variable["name"] == "NODE_NAME"), "the agent must know its node");
}

#[test]
fn no_right_is_a_wildcard_and_every_account_has_its_own() {
    let base = base();
    let roles = [of_kind(&base, "ClusterRole"), of_kind(&base, "Role")].concat();
    assert_eq!(roles.len(), 7);
    for role in roles {
        let name = &role["metadata"]["name"];
        for rule in role["rules"].as_array().unwrap() {
            for part in ["apiGroups", "resources", "verbs"] {
                let values = strings(&rule[part]);
                assert!(!values.is_empty(), "{name}: empty {part} in {rule}");
                assert!(values.iter().all(|value| !value.contains('*')), "{name}: wildcard in {rule}");
            }
            let verbs = strings(&rule["verbs"]);
            assert!(
                !verbs.iter().any(|v| ["escalate", "impersonate", "deletecollection"].contains(v)),
                "{name}: {rule}"
            );
            let secrets = strings(&rule["resources"]).contains(&"secrets");
            assert!(
                !secrets || verbs == ["create"] || rule["resourceNames"].is_array(),
                "{name}: all Secrets: {rule}"
            );
        }
    }
    for binding in [of_kind(&base, "ClusterRoleBinding"), of_kind(&base, "RoleBinding")].concat() {
        for subject in binding["subjects"].as_array().unwrap() {
            assert_eq!(subject["kind"], "ServiceAccount", "{binding}");
            assert!(subject["name"].as_str().unwrap().starts_with("gpu-migrate-"), "{binding}");
        }
    }
}

/// The restricted pod security standard, as far as it concerns what stands in these manifests.
#[test]
fn pods_are_restricted_but_the_node_agent() {
    for object in base().iter().filter(|object| object.pointer("/spec/template").is_some()) {
        let name = object["metadata"]["name"].as_str().unwrap();
        let pod = &object["spec"]["template"]["spec"];
        let agent = name == "gpu-migrate-bridge";
        assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault", "{name}");
        assert_eq!(pod["securityContext"]["runAsNonRoot"] == true, !agent, "{name}");
        for field in ["hostNetwork", "hostPID", "hostIPC"] {
            assert!(pod[field].is_null(), "{name}: {field}");
        }
        let volumes = pod["volumes"].as_array().cloned().unwrap_or_default();
        assert_eq!(volumes.iter().any(|volume| volume["hostPath"].is_object()), agent, "{name}");
        for container in pod["containers"].as_array().unwrap() {
            let security = &container["securityContext"];
            assert_eq!(security["allowPrivilegeEscalation"], false, "{name}");
            assert_eq!(security["readOnlyRootFilesystem"], true, "{name}");
            assert_eq!(strings(&security["capabilities"]["drop"]), ["ALL"], "{name}");
            assert!(container["livenessProbe"].is_object(), "{name}: no liveness probe");
            assert!(container["resources"]["requests"].is_object(), "{name}: no requests");
            assert!(container["resources"]["limits"]["memory"].is_string(), "{name}: no memory limit");
        }
    }
}

#[test]
fn the_extender_is_never_ignorable_and_sees_both_kinds() {
    let embedded = of_kind(&base(), "ConfigMap")[0]["data"]["scheduler.yaml"].as_str().unwrap().to_owned();
    let embedded: Value = serde_saphyr::from_str(&embedded).unwrap();
    let dialect = Dialect::default();
    for configuration in [embedded, read("scheduler/default-scheduler.yaml").remove(0)] {
        let extender = &configuration["extenders"][0];
        assert_eq!(extender["ignorable"], false);
        assert_eq!(extender["nodeCacheCapable"], true);
        let verbs = ["filterVerb", "prioritizeVerb", "preemptVerb", "bindVerb"];
        assert_eq!(
            verbs.map(|verb| extender[verb].as_str().unwrap()),
            ["filter", "prioritize", "preempt", "bind"]
        );
        let managed = extender["managedResources"].as_array().unwrap();
        let names = managed.iter().map(|m| m["name"].as_str().unwrap()).collect::<Vec<_>>();
        assert_eq!(names, [&dialect.cores, &dialect.memory, &dialect.legacy]);
        assert!(managed.iter().all(|m| m["ignoredByScheduler"] == false));
        if extender["urlPrefix"].as_str().unwrap().starts_with("https") {
            assert!(
                extender["tlsConfig"]["caFile"].is_string(),
                "without a CA the scheduler takes any certificate"
            );
        }
    }
    let scheduler = of_kind(&base(), "ConfigMap")[0]["data"]["scheduler.yaml"].as_str().unwrap().to_owned();
    assert!(scheduler.contains(&format!("schedulerName: {}", names::SCHEDULER)));
}

#[test]
fn the_backstop_asks_what_the_webhook_asks() {
    use gpu_migrate_webhook::register::{Address, Registration};
    let registration = Registration::new(Address::Url("https://unused".into()), "gpu-migrate-system");
    let [policy, _] = registration.admission_policy(false);
    let ours = read("backstop/policy.yaml").remove(0);
    let squeeze =
        |text: &Value| text.as_str().unwrap().split_whitespace().collect::<String>().replace("(('", "('");
    let pointer = "/spec/validations/0/expression";
    let plain = |text: String| text.replace(['(', ')'], "");
    assert_eq!(
        plain(squeeze(ours.pointer(pointer).unwrap())),
        plain(squeeze(policy.pointer(pointer).unwrap())),
        "the same condition, but for brackets"
    );
    // The order of the namespaces that are left out does not matter.
    let constraints = |policy: &Value| {
        let mut constraints = policy["spec"]["matchConstraints"].clone();
        let namespaces = constraints.pointer_mut("/namespaceSelector/matchExpressions/0/values").unwrap();
        namespaces.as_array_mut().unwrap().sort_by_key(|name| name.as_str().map(str::to_owned));
        constraints
    };
    assert_eq!(constraints(&ours), constraints(&policy));
}

#[test]
fn the_nvidia_plugin_is_pointed_at_the_bridge() {
    let socket = "/var/lib/kubelet/device-plugins/gpu-migrate@kubelet.sock";
    let daemonset = read("nvidia/daemonset-patch.yaml").remove(0);
    let variable = daemonset.pointer("/spec/template/spec/containers/0/env/0").unwrap();
    assert_eq!(
        (variable["name"].as_str(), variable["value"].as_str()),
        (Some("KUBELET_SOCKET"), Some(socket))
    );
    let policy = read("nvidia/clusterpolicy-patch.yaml").remove(0);
    assert_eq!(policy.pointer("/spec/devicePlugin/env/0").unwrap(), variable);
    let help =
        gpu_migrate_plugin_bridge::args::Args::try_parse_from(["b", "--help"]).unwrap_err().to_string();
    assert!(
        help.split_whitespace().collect::<String>().contains(socket),
        "the bridge's own help names the same socket"
    );
}

#[test]
fn the_base_is_the_chart_rendered() {
    let helm = std::env::var("HELM").unwrap_or_else(|_| "helm".to_owned());
    let chart = deploy().join("chart/gpu-migrate");
    let arguments = [
        "template",
        "gpu-migrate",
        chart.to_str().unwrap(),
        "--namespace",
        "gpu-migrate-system",
        "--kube-version",
        "1.33.0",
    ];
    let output = match Command::new(&helm).args(arguments).output() {
        Ok(output) => output,
        Err(error) => {
            eprintln!("skipped: {helm}: {error} (install helm or set HELM)");
            return;
        }
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rendered: Vec<Value> =
        serde_saphyr::from_multiple(std::str::from_utf8(&output.stdout).unwrap()).unwrap();
    let by_name = |objects: &[Value]| {
        let name = |object: &Value| {
            format!("{} {} {}", object["kind"], object["metadata"]["namespace"], object["metadata"]["name"])
        };
        objects.iter().map(|object| (name(object), object.clone())).collect::<BTreeMap<_, _>>()
    };
    assert_eq!(by_name(&base()), by_name(&rendered), "run deploy/render.sh");
}
