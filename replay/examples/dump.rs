//! Writes the dump of a made cluster, as `kubectl get nodes,pods,namespaces,gpumigrations -A -o json` would: the same for the same numbers.
//!
//! `cargo run --release -p gpu-migrate-replay --example dump -- 5000 50000 > dump.json`

use std::io::{self, BufWriter, Write};

use serde_json::{Value, json};

/// Cards of a node.
const CARDS: u32 = 8;
/// Pods of a workload.
const PODS: u32 = 25;
/// Cards of a pod by the number of its workload: three of eight workloads ask for none.
const ASKS: [u32; 16] = [1, 0, 1, 1, 0, 0, 1, 1, 4, 0, 1, 1, 0, 0, 1, 1];

fn main() -> io::Result<()> {
    let mut numbers = std::env::args().skip(1).map_while(|text| text.parse().ok());
    let (nodes, pods) = (numbers.next().unwrap_or(5_000), numbers.next().unwrap_or(50_000));
    let mut out = BufWriter::new(io::stdout().lock());
    write(nodes, pods, &mut out)?;
    out.flush()
}

/// The dump of so many nodes and pods. Pods for whose cards there is no room wait.
///
/// # Errors
/// When `out` cannot be written.
pub(crate) fn write(nodes: u32, pods: u32, out: &mut impl Write) -> io::Result<()> {
    write!(out, "{{\n    \"apiVersion\": \"v1\",\n    \"items\": [\n")?;
    let mut first = true;
    let mut item = |object: Value| {
        let comma = if std::mem::take(&mut first) { "" } else { ",\n" };
        write!(out, "{comma}{object:#}")
    };
    (0..nodes).try_for_each(|number| item(node(number)))?;
    let mut free = (0..nodes).map(|_| CARDS).collect::<Vec<_>>();
    let mut next = 0;
    for number in 0..pods {
        let workload = number / PODS;
        let cards = ASKS[workload as usize % ASKS.len()];
        // Nodes in turn, as a scheduler that spreads; a full turn without room is the end.
        let at = (0..nodes).map(|step| (next + step) % nodes).find(|at| free[*at as usize] >= cards);
        if let Some(at) = at {
            free[at as usize] -= cards;
            next = (at + 1) % nodes;
        }
        item(pod(number, cards, at))?;
    }
    (0..projects(pods)).try_for_each(|number| item(namespace(number)))?;
    (0..projects(pods)).try_for_each(|number| item(policy(number)))?;
    writeln!(out, "\n    ],\n    \"kind\": \"List\"\n}}")
}

fn projects(pods: u32) -> u32 {
    pods.div_ceil(PODS).div_ceil(100)
}

fn namespace(number: u32) -> Value {
    let name = format!("team-{number:02}");
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "uid": format!("n-{number}"),
        "labels": {"gpu-migrate.io/opt-in": "true", "gpu-migrate.io/project": name}}})
}

fn policy(number: u32) -> Value {
    let name = format!("team-{number:02}");
    json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUMigration", "metadata": {"name": name, "uid": format!("m-{number}")},
        "spec": {"project": name, "mode": "Enforce", "convert": {"coresPerCard": 50, "blocksPerCard": 80}}})
}

fn node(number: u32) -> Value {
    let (product, mib) =
        if number.is_multiple_of(4) { ("NVIDIA-A100-SXM4-80GB", 81_920) } else { ("NVIDIA-L40S", 46_068) };
    let conditions = ["MemoryPressure", "DiskPressure", "PIDPressure", "Ready"].map(|kind| {
        json!({"type": kind, "status": if kind == "Ready" { "True" } else { "False" }, "reason": format!("Kubelet{kind}"),
            "message": "kubelet is posting ready status", "lastHeartbeatTime": "2026-11-01T00:00:00Z", "lastTransitionTime": "2026-05-01T00:00:00Z"})
    });
    let name = format!("gpu-{number:05}");
    let amounts = json!({"cpu": "128", "memory": "1056Gi", "ephemeral-storage": "3Ti", "pods": "110", "nvidia.com/gpu": CARDS.to_string()});
    let images = (0..20).map(|image| {
        json!({"names": [format!("registry.example.com/ml/image-{image}@sha256:{:064x}", image + 1), format!("registry.example.com/ml/image-{image}:v1.{image}")],
            "sizeBytes": 1_000_000_000_u64 + image})
    });
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "uid": format!("{number:08x}-0000-4000-8000-000000000000"), "resourceVersion": (number + 7).to_string(),
            "creationTimestamp": "2026-05-01T00:00:00Z", "labels": {
                "kubernetes.io/hostname": name, "kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux",
                "nvidia.com/gpu.product": product, "nvidia.com/gpu.memory": mib.to_string(), "nvidia.com/gpu.count": CARDS.to_string()}},
        "spec": {"podCIDR": format!("10.{}.{}.0/24", number / 256, number % 256), "providerID": format!("example://{name}")},
        "status": {
            "capacity": amounts, "allocatable": amounts, "images": images.collect::<Vec<_>>(),
            "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}, {"type": "Hostname", "address": name}],
            "conditions": conditions,
            "nodeInfo": {"architecture": "amd64", "kernelVersion": "6.8.0-60-generic", "kubeletVersion": "v1.37.1", "containerRuntimeVersion": "containerd://2.1.0",
                "operatingSystem": "linux", "osImage": "Ubuntu 24.04 LTS", "bootID": name, "machineID": name, "systemUUID": name, "kubeProxyVersion": ""}}
    })
}

fn pod(number: u32, cards: u32, node: Option<u32>) -> Value {
    let workload = number / PODS;
    let (namespace, app) = (format!("team-{:02}", workload / 100), format!("app-{workload:04}"));
    let (set, suffix) =
        (format!("{app}-{:08x}", workload.wrapping_mul(2_654_435_761)), format!("{number:05x}"));
    let name = format!("{set}-{suffix}");
    let token = format!("kube-api-access-{suffix}");
    let mut limits = json!({"cpu": if workload.is_multiple_of(2) { "4" } else { "8" }, "memory": "32Gi"});
    if cards > 0 {
        limits["nvidia.com/gpu"] = cards.to_string().into();
    }
    let env = (0..8).map(|n| json!({"name": format!("SETTING_{n}"), "value": format!("value-{n}-of-{app}")}));
    let conditions = ["PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled"]
        .map(|kind| json!({"type": kind, "status": "True", "lastProbeTime": null, "lastTransitionTime": "2026-11-01T00:00:00Z"}));
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "generateName": format!("{set}-"), "uid": format!("{number:08x}-1111-4000-8000-000000000000"),
            "resourceVersion": (number + 100_000).to_string(), "creationTimestamp": "2026-11-01T00:00:00Z",
            "labels": {"app": app, "pod-template-hash": format!("{:08x}", workload.wrapping_mul(2_654_435_761))},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": set, "uid": set, "controller": true, "blockOwnerDeletion": true}]},
        "spec": {
            "containers": [{"name": "main", "image": format!("registry.example.com/ml/{app}:v1.0.0"), "imagePullPolicy": "IfNotPresent",
                "args": ["serve", "--port=8080"], "env": env.collect::<Vec<_>>(), "resources": {"limits": limits, "requests": limits},
                "readinessProbe": {"httpGet": {"path": "/healthz", "port": 8080, "scheme": "HTTP"}, "periodSeconds": 10, "timeoutSeconds": 1,
                    "successThreshold": 1, "failureThreshold": 3},
                "volumeMounts": [{"name": "data", "mountPath": "/data"}, {"name": token, "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": true}],
                "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File"}],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": app}},
                {"name": token, "projected": {"defaultMode": 420, "sources": [{"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}}]}}],
            "dnsPolicy": "ClusterFirst", "enableServiceLinks": true, "preemptionPolicy": "PreemptLowerPriority", "priority": 0,
            "restartPolicy": "Always", "schedulerName": "default-scheduler", "securityContext": {}, "serviceAccountName": "default",
            "terminationGracePeriodSeconds": 30,
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
                {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}]},
        "status": {"phase": "Pending", "qosClass": "Guaranteed"}
    });
    if let Some(node) = node {
        pod["spec"]["nodeName"] = format!("gpu-{node:05}").into();
        pod["status"] = json!({"phase": "Running", "qosClass": "Guaranteed", "conditions": conditions, "hostIP": "10.0.0.1", "podIP": "10.1.0.1",
            "podIPs": [{"ip": "10.1.0.1"}], "startTime": "2026-11-01T00:00:00Z",
            "containerStatuses": [{"name": "main", "image": format!("registry.example.com/ml/{app}:v1.0.0"), "imageID": format!("registry.example.com/ml/{app}@sha256:{workload:064x}"),
                "containerID": format!("containerd://{number:064x}"), "ready": true, "started": true, "restartCount": 0, "lastState": {},
                "state": {"running": {"startedAt": "2026-11-01T00:00:00Z"}}}]});
    }
    pod
}
