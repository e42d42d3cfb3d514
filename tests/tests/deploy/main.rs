//! What deploy/ says, held against what the programs really are: flags, names, rights.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, too, may fail loudly

mod platforms;
mod values;

use clap::Parser as _;
use gpu_migrate_model::names::{self, Dialect};
use gpu_migrate_operator::nodes::daemonsets::{Role, roles};
use gpu_migrate_operator::nodes::templates::{Component, Templates, daemon_set};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy")
}

fn read(path: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(deploy().join(path)).unwrap();
    serde_saphyr::from_multiple(&text).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn base() -> Vec<Value> {
    ["webhook", "extender", "operator", "bridge", "templates", "write-restrictions"]
        .iter()
        .flat_map(|part| read(&format!("base/{part}.yaml")))
        .collect()
}

/// What the operator puts on nodes, as the ConfigMap has it.
fn templates() -> Templates {
    serde_json::from_value(read("base/templates.yaml").remove(0)["data"].clone()).unwrap()
}

/// The base, and what the operator makes of the templates in it.
fn all() -> Vec<Value> {
    let made =
        Component::ALL.map(|component| daemon_set(component, &templates(), "gpu-migrate-system").unwrap());
    base().into_iter().chain(made).collect()
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
    let args = |name: &str, container: &Value| {
        let mut args = vec![format!("gpu-migrate-{name}")];
        args.extend(strings(&container["args"]).into_iter().map(str::to_owned));
        args
    };
    let of = |name: &str| args(name, &containers[name]);
    gpu_migrate_webhook::args::Args::try_parse_from(of("webhook")).unwrap();
    gpu_migrate_admission_ext::run::Args::try_parse_from(of("extender")).unwrap();
    gpu_migrate_operator::args::Args::try_parse_from(of("operator")).unwrap();
    for component in Component::ALL {
        let Component::Agent(agent) = component else { continue };
        let set = daemon_set(component, &templates(), "ns").unwrap();
        let container = &set["spec"]["template"]["spec"]["containers"][0];
        let args = [args("bridge", container), vec!["--node-name=n".to_owned()]].concat();
        let args = gpu_migrate_plugin_bridge::args::Args::try_parse_from(args).unwrap();
        assert_eq!(
            args.isolation(gpu_migrate_plugin_bridge::isolation::NodeFacts::default()).name(),
            agent.flag_value()
        );
        let env = container["env"].as_array().unwrap();
        assert!(env.iter().any(|variable| variable["name"] == "NODE_NAME"), "the agent must know its node");
    }
}

/// The operator recognizes what it would install itself: so it respects the same from somebody else.
#[test]
fn the_templates_are_what_they_are_taken_for() {
    for component in Component::ALL {
        let set = daemon_set(component, &templates(), "ns").unwrap();
        let pod = serde_json::from_value(set["spec"]["template"]["spec"].clone()).unwrap();
        let expected = match component {
            Component::Agent(_) => Role::NodeAgent,
            Component::NvidiaDirect => Role::NvidiaPlugin { behind_bridge: false },
            Component::NvidiaBridged => Role::NvidiaPlugin { behind_bridge: true },
            Component::Dcgm => Role::DcgmExporter,
        };
        assert_eq!(roles(&pod), [expected], "{component}");
    }
}

#[test]
fn no_right_is_a_wildcard_and_every_account_has_its_own() {
    let base = base();
    let roles = [of_kind(&base, "ClusterRole"), of_kind(&base, "Role")].concat();
    assert_eq!(roles.len(), 8);
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
    for object in all().iter().filter(|object| object.pointer("/spec/template").is_some()) {
        let name = object["metadata"]["name"].as_str().unwrap();
        let pod = &object["spec"]["template"]["spec"];
        let on_node = object["kind"] == "DaemonSet";
        let nvidias = name.contains("nvidia") || name.contains("dcgm");
        assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault", "{name}");
        assert_eq!(pod["securityContext"]["runAsNonRoot"] == true, !on_node, "{name}");
        for field in ["hostNetwork", "hostIPC"] {
            assert!(pod[field].is_null(), "{name}: {field}");
        }
        // NVML lists the processes of its caller's PID namespace alone.
        assert_eq!(pod["hostPID"] == true, name.starts_with("gpu-migrate-bridge"), "{name}: hostPID");
        let volumes = pod["volumes"].as_array().cloned().unwrap_or_default();
        assert_eq!(volumes.iter().any(|volume| volume["hostPath"].is_object()), on_node, "{name}");
        for container in pod["containers"].as_array().unwrap() {
            let security = &container["securityContext"];
            assert_eq!(security["allowPrivilegeEscalation"], false, "{name}");
            assert_eq!(security["readOnlyRootFilesystem"] == true, !name.contains("dcgm"), "{name}");
            assert!(security["privileged"].is_null(), "{name}");
            assert_eq!(strings(&security["capabilities"]["drop"]), ["ALL"], "{name}");
            assert!(nvidias || container["livenessProbe"].is_object(), "{name}: no liveness probe");
            assert!(nvidias || container["readinessProbe"].is_object(), "{name}: no readiness probe");
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
        assert_eq!(
            configuration["percentageOfNodesToScore"], 100,
            "a node that is not looked at may be the only one"
        );
        assert!(configuration["clientConnection"]["qps"].as_u64().unwrap() >= 500);
        let settings = gpu_migrate_admission_ext::engine::Settings::default();
        let longest = settings.gang_timeout + 2 * settings.api_timeout;
        let limit = extender["httpTimeout"].as_str().unwrap().trim_end_matches('s').parse().unwrap();
        assert!(longest.as_secs() < limit, "a held bind is answered after {longest:?}");
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

/// The scheduler beside the extender has the version of the cluster, unless another is named.
#[test]
fn the_scheduler_has_the_version_of_the_cluster() {
    for (kubernetes, values, version) in [
        ("v1.33.0", &[][..], "v1.33.0"),
        ("v1.33.0", &["extender.scheduler.version=v1.32.9"], "v1.32.9"),
        // Of k3s, GKE, EKS and TKE.
        ("v1.33.1+k3s1", &[], "v1.33.1"),
        ("v1.33.4-gke.1234000", &[], "v1.33.4"),
        ("v1.32.9-eks-113cf36", &[], "v1.32.9"),
        ("v1.30.0-tke.5", &[], "v1.30.0"),
    ] {
        let Some(rendered) = template(kubernetes, &sets(values)) else { return };
        let image = format!("image: registry.k8s.io/kube-scheduler:{version}\n");
        assert!(rendered.contains(&image), "{kubernetes} {values:?}");
    }
}

#[test]
fn the_backstop_asks_what_the_webhook_asks() {
    use gpu_migrate_webhook::configuration::{Address, WebhookConfiguration};
    let configuration =
        WebhookConfiguration::new(Address::Url("https://unused".into()), "gpu-migrate-system");
    let [policy, _] = configuration.admission_policy(false);
    let ours = read("backstop/policy.yaml").remove(0);
    for pointer in ["/spec/validations/0/expression", "/spec/matchConditions/0/expression"] {
        let [written, made] = [&ours, &policy].map(|policy| {
            let words = policy.pointer(pointer).unwrap().as_str().unwrap().split_whitespace();
            words.collect::<Vec<_>>().join(" ")
        });
        assert_eq!(written, made, "{pointer}, but for line breaks");
    }
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
    let map = read("base/templates.yaml").remove(0);
    let bridged = map["data"]["nvidia-plugin-bridged.yaml"].as_str().unwrap();
    assert!(bridged.contains(&format!("{{name: KUBELET_SOCKET, value: {socket}}}")), "{bridged}");
    let documented = std::fs::read_to_string(deploy().join("nvidia/README.md")).unwrap();
    assert!(documented.contains(&format!("KUBELET_SOCKET={socket}")));
    let help =
        gpu_migrate_plugin_bridge::args::Args::try_parse_from(["b", "--help"]).unwrap_err().to_string();
    assert!(
        help.split_whitespace().collect::<String>().contains(socket),
        "the bridge's own help names the same socket"
    );
}

/// Every component that has replicas survives the loss of a node, and lets nobody in but where it must.
#[test]
fn components_are_spread_and_fenced() {
    let base = base();
    let component =
        |object: &Value| object.pointer("/spec/selector/matchLabels/app.kubernetes.io~1component").cloned();
    for deployment in of_kind(&base, "Deployment") {
        let name = &deployment["metadata"]["name"];
        let mine = component(deployment).unwrap();
        let budgets = of_kind(&base, "PodDisruptionBudget");
        assert!(budgets.iter().any(|budget| component(budget) == Some(mine.clone())), "{name}: no budget");
        let affinity =
            "/spec/template/spec/affinity/podAntiAffinity/preferredDuringSchedulingIgnoredDuringExecution";
        assert!(deployment.pointer(affinity).is_some(), "{name}: not spread");
        let replicas = deployment["spec"]["replicas"].as_u64().unwrap();
        assert!(replicas >= 2, "{name}: {replicas} replicas");
    }
    for part in ["webhook", "extender", "operator", "bridge"] {
        let policies = of_kind(&base, "NetworkPolicy");
        let fenced = policies.iter().any(|policy| {
            policy
                .pointer("/spec/podSelector/matchLabels/app.kubernetes.io~1component")
                .is_some_and(|c| c == part)
        });
        assert!(fenced, "{part}: no NetworkPolicy");
    }
}

/// Renders the chart without its hooks; `None` without helm.
fn rendered(values: &[&str]) -> Option<Vec<Value>> {
    let objects = rendered_with_hooks(values)?;
    Some(objects.into_iter().filter(|object| hook(object).is_none()).collect())
}

/// What Helm applies an object for, if not for the release itself.
fn hook(object: &Value) -> Option<&str> {
    object["metadata"]["annotations"]["helm.sh/hook"].as_str()
}

fn rendered_with_hooks(values: &[&str]) -> Option<Vec<Value>> {
    Some(serde_saphyr::from_multiple(&template("1.33.0", &sets(values))?).unwrap())
}

/// Values as arguments of helm.
fn sets<'a>(values: &[&'a str]) -> Vec<&'a str> {
    values.iter().flat_map(|value| ["--set", value]).collect()
}

/// What helm prints of the chart for a version of Kubernetes.
fn template(kubernetes: &str, arguments: &[&str]) -> Option<String> {
    let output = helm(kubernetes, arguments)?;
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap())
}

/// Calls helm; `None` without it, which is counted as skipped.
fn helm(kubernetes: &str, arguments: &[&str]) -> Option<Output> {
    let helm = std::env::var("HELM").unwrap_or_else(|_| "helm".to_owned());
    let mut command = Command::new(&helm);
    command.args(["template", "gpu-migrate"]).arg(deploy().join("chart/gpu-migrate"));
    command.args(["--namespace", "gpu-migrate-system", "--kube-version", kubernetes]).args(arguments);
    match command.output() {
        Ok(output) => Some(output),
        Err(error) => {
            gpu_migrate_tests::skipped(&format!("{helm}: {error} (install helm or set HELM)"));
            None
        }
    }
}

fn by_name(objects: &[Value]) -> BTreeMap<String, Value> {
    let name = |object: &Value| {
        format!("{} {} {}", object["kind"], object["metadata"]["namespace"], object["metadata"]["name"])
    };
    objects.iter().map(|object| (name(object), object.clone())).collect()
}

#[test]
fn the_base_is_the_chart_rendered() {
    let Some(rendered) = rendered(&[]) else { return };
    assert_eq!(by_name(&base()), by_name(&rendered), "run deploy/render.sh");
}

#[test]
fn monitoring_is_the_chart_rendered() {
    let on = ["podMonitor", "prometheusRule", "dashboard"].map(|part| format!("metrics.{part}.enabled=true"));
    let Some(rendered) = rendered(&on.each_ref().map(String::as_str)) else { return };
    let mut all = base();
    all.extend(read("monitoring/monitoring.yaml"));
    assert_eq!(by_name(&all), by_name(&rendered), "run deploy/render.sh");
}

/// One file for `kubectl apply`: the objects of the base, and nothing else.
#[test]
fn install_yaml_is_the_base_and_the_crds() {
    let mut all = [read("base/namespace.yaml"), base()].concat();
    for crd in ["gpuconfigs", "gpumigrations", "gpushadows"] {
        all.extend(read(&format!("crds/{crd}.yaml")));
    }
    let install = read("install.yaml");
    assert_eq!(install.iter().filter(|object| object.is_object()).count(), all.len(), "an object twice");
    assert_eq!(by_name(&install), by_name(&all), "run deploy/render.sh");
    assert_eq!(install[0]["kind"], "Namespace", "others are in it");
}

/// All pods that the chart leads to with some values, those of the operator's templates included, by name.
fn pods_with(values: &[&str]) -> Option<BTreeMap<String, Value>> {
    let rendered = rendered(values)?;
    let templates = of_kind(&rendered, "ConfigMap")
        .into_iter()
        .find(|map| map["metadata"]["name"] == "gpu-migrate-templates");
    let templates: Templates = serde_json::from_value(templates.unwrap()["data"].clone()).unwrap();
    let made =
        Component::ALL.map(|component| daemon_set(component, &templates, "gpu-migrate-system").unwrap());
    let all = rendered.iter().chain(&made).filter(|object| object.pointer("/spec/template").is_some());
    Some(
        all.map(|object| {
            (object["metadata"]["name"].as_str().unwrap().to_owned(), object["spec"]["template"].clone())
        })
        .collect(),
    )
}

/// Without it the operator has no right that only the page needs.
#[test]
fn the_status_page_comes_with_its_rights_and_only_where_it_is_asked_for() {
    for enabled in [false, true] {
        let Some(rendered) = rendered(&[&format!("operator.statusPage.enabled={enabled}")]) else { return };
        let of_operator = |kind: &str| {
            of_kind(&rendered, kind)
                .into_iter()
                .find(|o| o["metadata"]["name"] == "gpu-migrate-operator")
                .unwrap()
        };
        let rules = of_operator("ClusterRole")["rules"].to_string();
        let of_events = r#""resources":["events"],"verbs":["list","watch"]"#;
        for right in ["tokenreviews", "subjectaccessreviews", r#""verbs":["watch"]"#, of_events] {
            assert_eq!(rules.contains(right), enabled, "{right}");
        }
        let args = strings(&of_operator("Deployment")["spec"]["template"]["spec"]["containers"][0]["args"])
            .contains(&"--status-bind=127.0.0.1:9406");
        assert_eq!(args, enabled);
    }
}

/// What Artifact Hub shows is what is installed.
#[test]
fn the_chart_names_its_version_images_and_crds() {
    let chart = read("chart/gpu-migrate/Chart.yaml").remove(0);
    for field in ["version", "appVersion"] {
        assert_eq!(chart[field], env!("CARGO_PKG_VERSION"), "{field}");
    }
    let list = |name: &str| -> Vec<Value> {
        let text = chart["annotations"][format!("artifacthub.io/{name}")].as_str().unwrap();
        serde_saphyr::from_str(text).unwrap()
    };
    let Some(rendered) = rendered_with_hooks(&[]) else { return };
    let containers = containers(&[all(), rendered].concat());
    for image in list("images") {
        assert_eq!(containers[image["name"].as_str().unwrap()]["image"], image["image"]);
    }
    assert_eq!(list("images").len(), 5);
    let crds = list("crds").into_iter().map(|crd| crd["name"].as_str().unwrap().to_owned());
    let shipped = ["gpuconfigs", "gpumigrations", "gpushadows"]
        .map(|name| read(&format!("crds/{name}.yaml")).remove(0));
    assert_eq!(
        crds.collect::<Vec<_>>(),
        shipped.map(|crd| crd["metadata"]["name"].as_str().unwrap().to_owned())
    );
}

/// Without the operator: the chart's own DaemonSet, for each isolation.
#[test]
fn the_chart_can_run_the_agent_itself() {
    for isolation in ["none", "driver", "vcuda", "mps", "hami-core"] {
        let isolation = format!("bridge.isolation={isolation}");
        let Some(rendered) =
            rendered(&["bridge.managed=false", &isolation, "bridge.cdiSpecDir=/var/run/cdi"])
        else {
            return;
        };
        let set = of_kind(&rendered, "DaemonSet").remove(0);
        let pod = &set["spec"]["template"]["spec"];
        let nodes = pod.pointer("/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms/0/matchExpressions/0").unwrap();
        assert_eq!(
            (nodes["key"].as_str(), strings(&nodes["values"])),
            (Some(names::PLUGIN), vec!["Bridged", "Shared"])
        );
        let mut args = vec!["gpu-migrate-bridge", "--node-name=n"];
        args.extend(strings(&pod["containers"][0]["args"]));
        gpu_migrate_plugin_bridge::args::Args::try_parse_from(args).unwrap();
    }
}

/// `helm test` and the check before `helm uninstall` read, and have the rights for that while they run.
#[test]
fn the_hooks_only_read() {
    let Some(rendered) = rendered_with_hooks(&["image.registry=mirror.example/ours"]) else { return };
    let hooks = rendered.into_iter().filter(|object| hook(object).is_some()).collect::<Vec<_>>();
    assert!(
        hooks.iter().all(|object| object["metadata"]["name"].as_str().unwrap().starts_with("gpu-migrate-"))
    );
    for role in [of_kind(&hooks, "ClusterRole"), of_kind(&hooks, "Role")].concat() {
        assert_eq!(hook(role), Some("pre-delete,test"));
        for rule in role["rules"].as_array().unwrap() {
            let called =
                strings(&rule["resources"]) == ["services/proxy"] && rule["resourceNames"].is_array();
            assert!(
                called || strings(&rule["verbs"]).iter().all(|verb| ["get", "list"].contains(verb)),
                "{rule}"
            );
        }
    }
    let test = of_kind(&hooks, "Pod").remove(0);
    let check = of_kind(&hooks, "Job").remove(0);
    for (object, expected, pod, args) in [
        (test, "test", &test["spec"], vec!["verify", "--install", "--namespace=gpu-migrate-system"]),
        (check, "pre-delete", &check["spec"]["template"]["spec"], vec!["uninstall", "--check"]),
    ] {
        assert_eq!(hook(object), Some(expected));
        assert_eq!(
            (pod["restartPolicy"].as_str(), pod["securityContext"]["runAsNonRoot"].as_bool()),
            (Some("Never"), Some(true))
        );
        assert_eq!(strings(&pod["containers"][0]["args"]), args);
        assert_eq!(
            pod["containers"][0]["image"],
            format!("mirror.example/ours/gpu-migrate:{}", env!("CARGO_PKG_VERSION"))
        );
    }
}
