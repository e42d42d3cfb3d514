//! The chart's values: each one changes what is rendered, and an unknown one is refused.

use std::collections::BTreeSet;

use clap::CommandFactory as _;

use super::*;

/// Each value by its path, another one than the default, and what there is more or less of then.
#[rustfmt::skip]
const VALUES: &[(&str, &str, &str)] = &[
    ("image.registry", "image.registry=marker.example/a", "marker.example/a/gpu-migrate"),
    ("image.tag", "image.tag=marker", "gpu-migrate-webhook:marker"),
    ("image.pullPolicy", "image.pullPolicy=Always", "imagePullPolicy: Always"),
    ("image.pullSecrets", "image.pullSecrets[0].name=marker", "- name: marker"),
    ("extraLabels", "extraLabels.team=marker", "team: marker"),
    ("priorityClassName", "priorityClassName=marker", "priorityClassName: marker"),
    ("logFormat", "logFormat=text", "--log-format=text"),
    ("logLevel", "logLevel=debug", r#"value: "debug""#),
    ("tracing.endpoint", "tracing.endpoint=http://marker:4317", "http://marker:4317"),
    ("webhook.replicas", "webhook.replicas=7", "replicas: 7"),
    ("webhook.port", "webhook.port=10443", "containerPort: 10443"),
    ("webhook.timeoutSeconds", "webhook.timeoutSeconds=7", "--timeout-seconds=7"),
    ("webhook.hostNetwork", "webhook.hostNetwork=true", "hostNetwork: true"),
    ("webhook.env", "webhook.env[0].name=MARKER,webhook.env[0].value=a", "name: MARKER"),
    ("webhook.volumes", "webhook.volumes[0].name=marker", "name: marker"),
    ("webhook.volumeMounts", "webhook.volumeMounts[0].name=marker,webhook.volumeMounts[0].mountPath=/marker", "mountPath: /marker"),
    ("webhook.resources.requests", "webhook.resources.requests.cpu=777m", "cpu: 777m"),
    ("webhook.resources.limits", "webhook.resources.limits.cpu=777m", "cpu: 777m"),
    ("webhook.nodeSelector", "webhook.nodeSelector.role=marker", "role: marker"),
    ("webhook.tolerations", "webhook.tolerations[0].key=marker", "key: marker"),
    ("extender.enabled", "extender.enabled=false", "name: gpu-migrate-extender"),
    ("extender.replicas", "extender.replicas=7", "replicas: 7"),
    ("extender.scheduler.name", "extender.scheduler.name=marker", "schedulerName: marker"),
    ("extender.scheduler.image", "extender.scheduler.image=marker", "image: marker:v1.33.0"),
    ("extender.scheduler.version", "extender.scheduler.version=v1.32.9", "kube-scheduler:v1.32.9"),
    ("extender.scheduler.resources.requests", "extender.scheduler.resources.requests.cpu=777m", "cpu: 777m"),
    ("extender.scheduler.resources.limits", "extender.scheduler.resources.limits.cpu=777m", "cpu: 777m"),
    ("extender.resources.requests", "extender.resources.requests.cpu=777m", "cpu: 777m"),
    ("extender.resources.limits", "extender.resources.limits.cpu=777m", "cpu: 777m"),
    ("extender.nodeSelector", "extender.nodeSelector.role=marker", "role: marker"),
    ("extender.tolerations", "extender.tolerations[0].key=marker", "key: marker"),
    ("operator.replicas", "operator.replicas=7", "replicas: 7"),
    ("operator.resources.requests", "operator.resources.requests.cpu=777m", "cpu: 777m"),
    ("operator.resources.limits", "operator.resources.limits.cpu=777m", "cpu: 777m"),
    ("operator.nodeSelector", "operator.nodeSelector.role=marker", "role: marker"),
    ("operator.tolerations", "operator.tolerations[0].key=marker", "key: marker"),
    ("operator.workloadKinds", "operator.workloadKinds[0].group=marker.io,operator.workloadKinds[0].resource=rollouts", "marker.io"),
    ("operator.statusPage.enabled", "operator.statusPage.enabled=true", "--status-bind=127.0.0.1:9406"),
    ("operator.statusPage.bind", "operator.statusPage.enabled=true,operator.statusPage.bind=127.0.0.1:9499", "--status-bind=127.0.0.1:9499"),
    ("operator.prometheusSecret", "operator.prometheusSecret=marker", "secretName: marker"),
    ("bridge.managed", "bridge.managed=false", "{key: gpu-migrate.io/plugin, operator: In"),
    ("bridge.isolation", "bridge.managed=false,bridge.isolation=mps", "--isolation=mps"),
    ("bridge.nodeSelector", "bridge.nodeSelector.role=marker", "role: marker"),
    ("bridge.tolerations", "bridge.tolerations[0].key=marker", "key: marker"),
    ("bridge.priorityClassName", "bridge.priorityClassName=marker", "priorityClassName: marker"),
    ("bridge.runtimeClassName", "bridge.runtimeClassName=marker", "runtimeClassName: marker"),
    ("bridge.hostPID", "bridge.hostPID=false", "hostPID: true"),
    ("bridge.kubeletDir", "bridge.kubeletDir=/marker", "--kubelet-dir=/marker"),
    ("bridge.deviceListStrategy", "bridge.deviceListStrategy[0]=cdi-cri", "--device-list-strategy=cdi-cri"),
    ("bridge.deviceIdStrategy", "bridge.deviceIdStrategy=index", "--device-id-strategy=index"),
    ("bridge.passDeviceSpecs", "bridge.passDeviceSpecs=true", "--pass-device-specs"),
    ("bridge.numaHints", "bridge.numaHints=true", "--numa-hints"),
    ("bridge.registerOverNvidiaPlugin", "bridge.registerOverNvidiaPlugin=false", "--register-over-nvidia-plugin"),
    ("bridge.cdiSpecDir", "bridge.cdiSpecDir=/marker", "--cdi-spec-dir=/marker"),
    ("bridge.libraryDir", "bridge.libraryDir=/marker", "--library-dir=/marker"),
    ("bridge.managerDir", "bridge.managerDir=/marker", "--manager-dir=/marker"),
    ("bridge.mpsDir", "bridge.mpsDir=/marker", "--mps-dir=/marker"),
    ("bridge.resources.requests", "bridge.resources.requests.cpu=777m", "cpu: 777m"),
    ("bridge.resources.limits", "bridge.resources.limits.cpu=777m", "cpu: 777m"),
    ("nvidiaPlugin.image", "nvidiaPlugin.image=marker:1", "image: marker:1"),
    ("nvidiaPlugin.env", "nvidiaPlugin.env[0].name=MARKER,nvidiaPlugin.env[0].value=a", "name: MARKER"),
    ("nvidiaPlugin.resources.requests", "nvidiaPlugin.resources.requests.cpu=777m", "cpu: 777m"),
    ("nvidiaPlugin.resources.limits", "nvidiaPlugin.resources.limits.cpu=777m", "cpu: 777m"),
    ("dcgmExporter.image", "dcgmExporter.image=marker:1", "image: marker:1"),
    ("dcgmExporter.resources.requests", "dcgmExporter.resources.requests.cpu=777m", "cpu: 777m"),
    ("dcgmExporter.resources.limits", "dcgmExporter.resources.limits.cpu=777m", "cpu: 777m"),
    ("driverInstallers", r#"driverInstallers.marker\.yaml.spec.nodeName=a"#, "marker.yaml"),
    ("backstop.enabled", "backstop.enabled=true", r#"validationActions: ["Warn","Audit"]"#),
    ("backstop.actions", "backstop.enabled=true,backstop.actions[0]=Deny", r#"validationActions: ["Deny"]"#),
    ("writeRestrictions.enabled", "writeRestrictions.enabled=false", "kind: ValidatingAdmissionPolicy"),
    ("networkPolicy.enabled", "networkPolicy.enabled=false", "kind: NetworkPolicy"),
    ("networkPolicy.apiServerCIDRs", "networkPolicy.apiServerCIDRs[0]=192.0.2.0/24", "192.0.2.0/24"),
    ("metrics.podMonitor.enabled", "metrics.podMonitor.enabled=true", "kind: PodMonitor"),
    ("metrics.podMonitor.labels", "metrics.podMonitor.enabled=true,metrics.podMonitor.labels.team=marker", "team: marker"),
    ("metrics.prometheusRule.enabled", "metrics.prometheusRule.enabled=true", "kind: PrometheusRule"),
    ("metrics.prometheusRule.labels", "metrics.prometheusRule.enabled=true,metrics.prometheusRule.labels.team=marker", "team: marker"),
    ("metrics.dashboard.enabled", "metrics.dashboard.enabled=true", r#"grafana_dashboard: "1""#),
    ("metrics.dashboard.labels", "metrics.dashboard.enabled=true,metrics.dashboard.labels.team=marker", "team: marker"),
];

/// The values by their path. Of objects whose keys are the user's the object itself.
fn leaves(path: &str, value: &Value, found: &mut BTreeSet<String>) {
    let users = ["labels", "requests", "limits"].iter().any(|name| path.ends_with(name));
    match value.as_object().filter(|fields| !users && !fields.is_empty()) {
        Some(fields) => fields.iter().for_each(|(key, value)| {
            leaves(&if path.is_empty() { key.clone() } else { format!("{path}.{key}") }, value, found);
        }),
        None => {
            found.insert(path.to_owned());
        }
    }
}

#[test]
fn every_value_does_something() {
    let mut all = BTreeSet::new();
    leaves("", &read("chart/gpu-migrate/values.yaml").remove(0), &mut all);
    let tried: BTreeSet<String> = VALUES.iter().map(|(path, ..)| (*path).to_owned()).collect();
    assert_eq!(all, tried);
    let Some(default) = template("1.33.0", &[]) else { return };
    for (path, set, text) in VALUES {
        let changed = template("1.33.0", &sets(&[set])).unwrap();
        let [before, after] = [&default, &changed].map(|rendered| rendered.matches(text).count());
        assert_ne!(before, after, "{path}: as many {text:?} with {set}");
    }
}

#[test]
fn unknown_values_are_refused() {
    /// Every object of the chart's values by its path; those whose keys are the user's are left out.
    fn objects(path: &str, value: &Value, found: &mut Vec<String>) {
        let users = ["nodeSelector", "extraLabels", "labels", "driverInstallers", "requests", "limits"];
        if let Some(object) = value.as_object()
            && !users.iter().any(|name| path.ends_with(&format!("{name}.")))
        {
            found.push(path.to_owned());
            object.iter().for_each(|(key, value)| objects(&format!("{path}{key}."), value, found));
        }
    }
    let mut all = Vec::new();
    objects("", &read("chart/gpu-migrate/values.yaml").remove(0), &mut all);
    assert!(all.contains(&"extender.scheduler.resources.".to_owned()), "{all:?}");
    for path in all {
        let Some(output) = helm("1.33.0", &["--set", &format!("{path}noSuchValue=1")]) else { return };
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains("noSuchValue"), "{path}noSuchValue: {error}");
    }
}

/// [`pods_with`], and those of the hooks.
fn all_pods_with(values: &[&str]) -> Option<BTreeMap<String, Value>> {
    let mut pods = pods_with(values)?;
    for object in rendered_with_hooks(values)?.iter().filter(|object| hook(object).is_some()) {
        let pod = if object["kind"] == "Pod" { Some(object) } else { object.pointer("/spec/template") };
        if let Some(pod) = pod {
            pods.insert(object["metadata"]["name"].as_str().unwrap().to_owned(), pod.clone());
        }
    }
    assert!(
        pods.contains_key("gpu-migrate-test") && pods.contains_key("gpu-migrate-before-uninstall"),
        "{:?}",
        pods.keys()
    );
    Some(pods)
}

/// cert-manager's certificate and the API server's client CA: files at the paths that flags of the webhook name by their variables.
#[test]
fn the_webhook_takes_certificates_from_volumes() {
    let values = [
        "webhook.env[0].name=GPU_MIGRATE_TLS_DIR",
        "webhook.env[0].value=/tls",
        "webhook.env[1].name=GPU_MIGRATE_CLIENT_CA_FILE",
        "webhook.env[1].value=/client-ca/ca.crt",
        "webhook.volumes[0].name=tls",
        "webhook.volumes[0].secret.secretName=gpu-migrate-webhook-tls",
        "webhook.volumes[1].name=client-ca",
        "webhook.volumes[1].configMap.name=client-ca",
        "webhook.volumeMounts[0].name=tls",
        "webhook.volumeMounts[0].mountPath=/tls",
        "webhook.volumeMounts[1].name=client-ca",
        "webhook.volumeMounts[1].mountPath=/client-ca",
    ];
    let Some(pods) = pods_with(&values) else { return };
    let pod = &pods["gpu-migrate-webhook"]["spec"];
    let container = &pod["containers"][0];
    assert_eq!(
        pod["volumes"],
        serde_json::json!([
            {"name": "tls", "secret": {"secretName": "gpu-migrate-webhook-tls"}},
            {"name": "client-ca", "configMap": {"name": "client-ca"}},
        ])
    );
    let mounts = container["volumeMounts"].as_array().unwrap();
    let flags = gpu_migrate_webhook::args::Args::command();
    for (variable, path) in
        [("GPU_MIGRATE_TLS_DIR", "/tls"), ("GPU_MIGRATE_CLIENT_CA_FILE", "/client-ca/ca.crt")]
    {
        let set = container["env"].as_array().unwrap().iter().find(|env| env["name"] == variable);
        assert_eq!(set.unwrap()["value"], path);
        assert!(
            flags.get_arguments().any(|flag| flag.get_env().is_some_and(|env| env == variable)),
            "{variable}"
        );
        assert!(mounts.iter().any(|mount| path.starts_with(mount["mountPath"].as_str().unwrap())), "{path}");
    }
}

/// Each pod has those of its own value, and of no other.
#[test]
fn resources_are_values() {
    let parts =
        ["webhook", "extender", "extender.scheduler", "operator", "bridge", "nvidiaPlugin", "dcgmExporter"];
    let sets: Vec<String> = parts
        .iter()
        .enumerate()
        .flat_map(|(index, part)| {
            [
                format!("{part}.resources.requests.cpu={index}01m"),
                format!("{part}.resources.limits.memory={index}01Mi"),
            ]
        })
        .collect();
    let Some(pods) = pods_with(&sets.iter().map(String::as_str).collect::<Vec<_>>()) else { return };
    let mut seen = BTreeSet::new();
    for pod in pods.values() {
        for container in pod["spec"]["containers"].as_array().unwrap() {
            let name = container["name"].as_str().unwrap();
            let index =
                ["webhook", "extender", "scheduler", "operator", "bridge", "nvidia-plugin", "dcgm-exporter"]
                    .iter()
                    .position(|known| *known == name)
                    .unwrap();
            seen.insert(index);
            assert_eq!(container["resources"]["requests"]["cpu"], format!("{index}01m"), "{name}");
            assert_eq!(container["resources"]["limits"]["memory"], format!("{index}01Mi"), "{name}");
        }
    }
    assert_eq!(seen.len(), parts.len());
}

#[test]
fn registries_and_pull_secrets_are_values() {
    let Some(pods) = all_pods_with(&[
        "image.registry=mirror.example/ours",
        "image.pullSecrets[0].name=mirror",
        "extender.scheduler.image=mirror.example/kube-scheduler",
        "nvidiaPlugin.image=mirror.example/plugin:1",
        "dcgmExporter.image=mirror.example/dcgm:1",
    ]) else {
        return;
    };
    for (name, pod) in pods {
        assert_eq!(pod["spec"]["imagePullSecrets"], serde_json::json!([{"name": "mirror"}]), "{name}");
        for container in pod["spec"]["containers"].as_array().unwrap() {
            let image = container["image"].as_str().unwrap();
            assert!(image.starts_with("mirror.example/"), "{name}: {image}");
        }
    }
}

#[test]
fn priority_classes_are_values() {
    let Some(pods) = all_pods_with(&[]) else { return };
    assert_eq!(pods["gpu-migrate-webhook"]["spec"]["priorityClassName"], "system-cluster-critical");
    assert_eq!(pods["gpu-migrate-bridge"]["spec"]["priorityClassName"], "system-node-critical");
    let Some(pods) = all_pods_with(&["priorityClassName=", "bridge.priorityClassName=ours"]) else { return };
    for (name, pod) in pods {
        let class = &pod["spec"]["priorityClassName"];
        let on_node = name.contains("bridge") || name.contains("nvidia");
        assert_eq!(class.as_str(), on_node.then_some("ours"), "{name}");
    }
}

#[test]
fn labels_and_node_selectors_are_values() {
    let Some(rendered) = rendered_with_hooks(&["extraLabels.team=infra"]) else { return };
    for object in &rendered {
        assert_eq!(
            object["metadata"]["labels"]["team"], "infra",
            "{} {}",
            object["kind"], object["metadata"]["name"]
        );
        let selected = object.pointer("/spec/selector/matchLabels/team");
        assert!(selected.is_none(), "a selector cannot be changed by an upgrade: {object}");
    }
    let Some(pods) = pods_with(&[
        "extraLabels.team=infra",
        "webhook.nodeSelector.role=a",
        "extender.nodeSelector.role=a",
        "operator.nodeSelector.role=a",
        "bridge.nodeSelector.role=a",
    ]) else {
        return;
    };
    for (name, pod) in pods {
        assert_eq!(pod["metadata"]["labels"]["team"], "infra", "{name}");
        if !name.contains("nvidia") && !name.contains("dcgm") {
            assert_eq!(pod["spec"]["nodeSelector"]["role"], "a", "{name}");
        }
    }
}

/// A replica more than there are nodes could not be rolled: an old one gives its port up first.
#[test]
fn the_webhook_can_be_on_the_hosts_network() {
    let Some(rendered) = rendered(&["webhook.hostNetwork=true", "webhook.port=10443"]) else { return };
    let webhook =
        of_kind(&rendered, "Deployment").into_iter().find(|d| d["metadata"]["name"] == "gpu-migrate-webhook");
    let spec = &webhook.unwrap()["spec"];
    assert_eq!(spec["strategy"]["rollingUpdate"], serde_json::json!({"maxUnavailable": 1, "maxSurge": 0}));
    let pod = &spec["template"]["spec"];
    assert_eq!(
        (pod["hostNetwork"].as_bool(), pod["dnsPolicy"].as_str()),
        (Some(true), Some("ClusterFirstWithHostNet"))
    );
    assert_eq!(pod["containers"][0]["ports"][0]["containerPort"], 10443);
}

#[test]
fn traces_are_sent_by_who_is_on_the_path_of_a_pod_and_only_where_a_collector_is_named() {
    let endpoint = "http://otel-collector.monitoring:4317";
    for (values, expected) in [(vec![], false), (vec![format!("tracing.endpoint={endpoint}")], true)] {
        let values: Vec<&str> = values.iter().map(String::as_str).collect();
        let Some(pods) = pods_with(&values) else { return };
        for (name, pod) in pods {
            let on_path = ["webhook", "extender", "scheduler", "bridge"];
            let on_path = on_path.iter().any(|part| name.starts_with(&format!("gpu-migrate-{part}")));
            let flag = pod["spec"]["containers"].to_string().matches(endpoint).count();
            assert_eq!(flag, usize::from(expected && on_path), "{name}");
        }
    }
}
