//! A migration as a cluster's owner does it: by the runbook, command by command, from the first plan to the uninstall. A second node
//! with cards has nothing to do with it.
//!
//! **What is real, what is not.** Kubernetes, the containers of the workloads and NVIDIA's plugin are real. What `deploy/`
//! ships is applied as it stands there, and Kubernetes makes pods of it; a stand-in image waits in each, and its program
//! runs as a process beside it, see [`gpu_migrate_cluster_tests::pod_programs`]. NVIDIA's DaemonSet is treated in the same way.
//! `gpu-migrate` and `kubectl` are the real programs.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use gpu_migrate_cluster_tests::{
    Cluster,
    cluster::TIMEOUT,
    configs::{NODE, SECOND_NODE},
    manifests,
    migration::{GPU, limit},
    observe::Observer,
    runbook::Runbook,
    snapshot::Snapshot,
    stage::{CARDS, SYSTEM_NAMESPACE, WEBHOOK},
    wait::Seen,
    workload::{container, deployment},
};
use gpu_migrate_model::{
    crd::{GPUMigration, GPUShadow, MigrationPhase},
    names::{self, Dialect},
};

use crate::two_nodes::{self, Allocatable};
use k8s_openapi::{
    api::{
        admissionregistration::v1::MutatingWebhookConfiguration,
        apps::v1::Deployment,
        core::v1::{Node, Pod},
    },
    jiff::Timestamp,
};
use kube::{
    Api, Client, ResourceExt,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};

/// The project, its namespace and its policy, as in the runbook.
const DANLU: &str = "danlu";
/// Its workloads, one a wave. The second has an image that gets ready on a whole card only.
const WORKLOADS: [&str; 3] = ["canary", "trainer", "serving"];
/// Of a project that is not migrated.
const BYSTANDERS: &str = "bystanders";
/// The image of NVIDIA's plugin, by name.
const NVIDIA_IMAGE: &str = "nvcr.io/nvidia/k8s-device-plugin:v0.19.0";

/// The whole of it. The second wave is broken on purpose: it is rolled back by itself and the first stays. Then all is
/// rolled back, gpu-migrate is uninstalled, and no trace of it is left. All along the other node offers the same cards, and its pod runs.
pub(crate) async fn from_install_to_uninstall(cluster: &mut Cluster) -> Result<()> {
    let mut runbook = Runbook::open(cluster, "migration::from_install_to_uninstall")?;
    let mut clock = Clock::start();
    cluster.add_node().await?;
    the_owners_cluster(cluster).await?;
    let other_node = Allocatable::watch(cluster.client.clone(), SECOND_NODE);
    let bystander = two_nodes::run(cluster, BYSTANDERS, "bystander", SECOND_NODE).await?;
    clock.lap("the cluster before");

    runbook.file("policies.yaml", &policies(json!({}))?)?;
    runbook.run(cluster, "gpu-migrate plan -f examples/").await?;
    let plan = "kubectl get deployments,statefulsets,daemonsets,cronjobs -n danlu -o yaml | gpu-migrate plan --policy policies.yaml -f -";
    let planned = runbook.run(cluster, plan).await?;
    ensure!(planned.contains("tencent.com/vcuda-core"), "{planned}");
    runbook.file("policies.yaml", &policies(waves())?)?;
    let before = Snapshot::take(&cluster.client).await?;
    let observer = Observer::start(cluster.client.clone());

    install(cluster, &mut runbook).await?;
    clock.lap("install");
    bridge(cluster, &mut runbook).await?;
    clock.lap("first node");
    begin(cluster, &mut runbook).await?;
    clock.lap("first wave");
    second_wave_fails(cluster, &mut runbook).await?;
    clock.lap("second wave, broken, and back");
    undo(cluster, &mut runbook).await?;
    clock.lap("undo");
    without_webhook(cluster, &mut runbook).await?;
    clock.lap("without the webhook, and again with it");
    uninstall(cluster, &mut runbook).await?;
    clock.lap("uninstall");
    as_before(cluster, &before).await?;
    clock.lap("compare");

    let report = observer.finish().await?;
    eprintln!("    the observer took {} samples of {} holders", report.samples, report.holders.len());
    // Three at first, two that were converted, one that was rolled back; the others kept their card.
    report.check(7)?;
    runbook.finish()?;
    let (pod, _) = cluster.running(BYSTANDERS, "bystander").await?;
    ensure!(pod.uid() == Some(bystander), "the other node's pod was replaced");
    other_node.has_seen(cluster, Timestamp::now()).await?;
    let seen = other_node.values();
    ensure!(seen == [seen[0].clone()] && seen[0].len() == 1, "the other node's cards have changed: {seen:?}");
    forget_the_owners_objects(cluster).await
}

/// Prints how long each part took.
struct Clock(Instant);

impl Clock {
    fn start() -> Self {
        Self(Instant::now())
    }

    fn lap(&mut self, what: &str) {
        eprintln!("    {:5.1?}  {what}", std::mem::replace(&mut self.0, Instant::now()).elapsed());
    }
}

/// Waits for something while the programs follow their pods.
async fn until<T>(
    cluster: &mut Cluster,
    what: &str,
    mut poll: impl AsyncFnMut(&Client) -> Result<Seen<T>>,
) -> Result<T> {
    let (client, deadline) = (cluster.client.clone(), tokio::time::Instant::now() + TIMEOUT);
    let mut last = "nothing".to_owned();
    loop {
        cluster.sync_pod_programs().await.with_context(|| format!("while waiting for {what}"))?;
        cluster.check()?;
        match tokio::time::timeout_at(deadline, poll(&client)).await {
            Ok(Ok(Seen::Done(value))) => return Ok(value),
            Ok(Ok(Seen::NotYet(text))) => last = text,
            Ok(Err(error)) => last = format!("{error:#}"),
            Err(_) => bail!("waited {TIMEOUT:?} for {what}; last seen: {last}"),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// NVIDIA's plugin as a DaemonSet, its RuntimeClass, and a project with a quota and three workloads on whole cards.
async fn the_owners_cluster(cluster: &mut Cluster) -> Result<()> {
    cluster.tag_work_image_as(&BTreeSet::from([NVIDIA_IMAGE.to_owned()]))?;
    for object in owners_objects() {
        until(cluster, "the owner's objects", async |client| {
            manifests::apply(client, &object, false).await.map(Seen::Done)
        })
        .await?;
    }
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let pool =
        json!({"metadata": {"labels": {"pool": "a100"}, "annotations": {"owner.example/note": "stays"}}});
    nodes.patch(NODE, &PatchParams::default(), &Patch::Merge(pool)).await?;
    for name in WORKLOADS {
        cluster.create_deployment(DANLU, workload(name)).await?;
    }
    all_settled(cluster).await?;
    let legacy = Dialect::default().legacy;
    offered_on(cluster, SECOND_NODE, &legacy, CARDS).await?;
    offered(cluster, &legacy, CARDS).await
}

fn owners_objects() -> Vec<Value> {
    let namespace = |name: &str, labels: Value| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}});
    let labels = json!({"name": "nvidia-device-plugin-ds"});
    let plugin = json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": {"name": "nvidia-device-plugin-daemonset", "namespace": "kube-system"},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": {
            "terminationGracePeriodSeconds": 1,
            "volumes": [{"name": "device-plugin", "hostPath": {"path": "/var/lib/kubelet/device-plugins"}}],
            "containers": [{"name": "nvidia-device-plugin-ctr", "image": NVIDIA_IMAGE, "imagePullPolicy": "IfNotPresent",
                "args": ["--device-discovery-strategy=nvml"],
                "volumeMounts": [{"name": "device-plugin", "mountPath": "/var/lib/kubelet/device-plugins"}]}]}}},
    });
    vec![
        json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}, "handler": "runc"}),
        plugin,
        namespace(BYSTANDERS, json!({})),
        namespace(DANLU, json!({"team": "nlp"})),
        json!({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpus", "namespace": DANLU}, "spec": {"hard": {"requests.nvidia.com/gpu": "6"}}}),
    ]
}

/// A Deployment of one whole card. The trainer's image is one that works on a whole card and never gets ready on a share.
fn workload(name: &str) -> Value {
    let mut workload = deployment(name, 1, GPU);
    let pod = &mut workload["spec"]["template"]["spec"];
    pod["terminationGracePeriodSeconds"] = json!(1);
    pod["nodeSelector"] = json!({"pool": "a100"});
    if name == WORKLOADS[1] {
        let mut broken = container("main", GPU);
        // Not an annotation of our own group: this is the owner's manifest, and stays when we go.
        let field = format!("metadata.annotations['{}']", names::GPU_ASSIGNED);
        broken["env"] = json!([{"name": "CONVERTED_BY", "valueFrom": {"fieldRef": {"fieldPath": field}}}]);
        broken["readinessProbe"] =
            json!({"exec": {"command": ["/work", "without", "CONVERTED_BY"]}, "periodSeconds": 1});
        pod["containers"] = json!([broken]);
    }
    workload
}

/// Waves of a workload each, and a gate that a test can wait for.
fn waves() -> Value {
    json!({
        "maxUnavailable": 1,
        "gate": {"readyWithinSeconds": 15, "soakSeconds": 1, "maxRestarts": 2},
        "waves": [
            {"workloads": [format!("Deployment/{DANLU}/{}", WORKLOADS[0])]},
            {"workloads": [format!("Deployment/{DANLU}/{}", WORKLOADS[1])]},
            {"percent": 100},
        ],
    })
}

/// The runbook's policy with another rollout, and the namespace as it will be opted in.
fn policies(rollout: Value) -> Result<String> {
    let mut policy = manifests::of_document("deploy/RUNBOOK.md", "GPUMigration")?;
    policy["spec"]["rollout"] = rollout;
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": DANLU,
        "labels": {names::OPT_IN: "true", names::PROJECT: DANLU}}});
    Ok(format!("{}\n---\n{}", serde_saphyr::to_string(&policy)?, serde_saphyr::to_string(&namespace)?))
}

/// Runbook 1: by Helm, and away again; then everything of `deploy/base`, as it stands there.
async fn install(cluster: &mut Cluster, runbook: &mut Runbook) -> Result<()> {
    cluster.tag_work_image_as(&manifests::images("base")?)?;
    runbook.run(cluster, "kubectl apply --server-side -k deploy/crds").await?;
    runbook.run(cluster, "kubectl apply -f deploy/base/namespace.yaml").await?;
    // No program is started for what is away again at once: Helm takes its rights before its pod.
    runbook.follow = false;
    let by_helm = "helm install gpu-migrate deploy/chart/gpu-migrate --namespace gpu-migrate-system";
    runbook.run(cluster, by_helm).await?;
    for command in [
        "helm lint --strict deploy/chart/gpu-migrate",
        // The images are stand-ins, the hooks' too.
        "helm uninstall --no-hooks --wait gpu-migrate --namespace gpu-migrate-system",
    ] {
        let output = runbook.run_unlisted(cluster, command).await?;
        ensure!(output.status == 0, "{command}: {}", output.text);
    }
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), SYSTEM_NAMESPACE);
    cluster
        .until("Helm's pods to go", TIMEOUT, || async {
            let left = pods.list(&ListParams::default()).await?.items.len();
            Ok(Seen::from_bool(left == 0, || format!("{left} are there")))
        })
        .await?;
    runbook.follow = true;
    runbook.run(cluster, "kubectl apply --server-side -k deploy/base").await?;
    until(cluster, "all Deployments of gpu-migrate to be available", async |client| {
        let list = Api::<Deployment>::namespaced(client.clone(), SYSTEM_NAMESPACE)
            .list(&ListParams::default())
            .await?;
        let waiting: Vec<String> =
            list.iter().filter(|d| !is_settled(d)).map(ResourceExt::name_any).collect();
        Ok(Seen::from_bool(waiting.is_empty() && list.items.len() == 3, || format!("{waiting:?} are not")))
    })
    .await?;
    cluster.wait_for_webhook().await?;
    // Other tests check the verdict: here the node is not bridged yet.
    let output = runbook.run_with_status(cluster, "gpu-migrate preflight", &[0, 3]).await?;
    ensure!(output.trim_end().ends_with("go"), "{output}");
    Ok(())
}

/// Runbook 2: a label brings the agent, which takes the place of NVIDIA's plugin. No pod moves; every one is a holder.
async fn bridge(cluster: &mut Cluster, runbook: &mut Runbook) -> Result<()> {
    let config = manifests::of_document("deploy/RUNBOOK.md", "GPUConfig")?;
    runbook.run(cluster, "kubectl label node gpu-01 gpu-migrate.io/plugin=Bridged").await?;
    runbook
        .run(
            cluster,
            "kubectl -n gpu-migrate-system wait --for=create daemonset/gpu-migrate-bridge --timeout=60s",
        )
        .await?;
    runbook.run(cluster, "kubectl -n gpu-migrate-system rollout status daemonset/gpu-migrate-bridge").await?;
    manifests::apply(&cluster.client, &config, false).await?;
    let dialect = Dialect::default();
    // Of cards that whole-card pods hold, no share is offered.
    offered(cluster, &dialect.cores, (CARDS - WORKLOADS.len() as u64) * 100).await?;
    offered(cluster, &dialect.legacy, CARDS).await?;
    until(cluster, "the GPUConfig to be carried out", async |client| {
        let node = Api::<Node>::all(client.clone()).get(NODE).await?;
        Ok(Seen::from_bool(node.labels().contains_key(names::POOL), || format!("{:?}", node.labels())))
    })
    .await?;
    // The agent publishes the holders of the kubelet's checkpoint, and their names once it has listed its pods.
    until(cluster, "the names of the holders", async |client| {
        let shadow = Api::<GPUShadow>::all(client.clone()).get_status(NODE).await?;
        let holders = shadow.status.iter().flat_map(|status| &status.cards).flat_map(|card| &card.holders);
        let nameless: Vec<&str> = holders.filter(|h| h.pod.is_empty()).map(|h| h.uid.as_str()).collect();
        Ok(Seen::from_bool(nameless.is_empty(), || format!("{nameless:?} have none")))
    })
    .await?;
    let output = runbook.run(cluster, "gpu-migrate status gpu-01 --holders").await?;
    for name in WORKLOADS {
        ensure!(output.contains(&format!("{DANLU}/{name}-")), "{name} is no holder:\n{output}");
    }
    Ok(())
}

/// Runbook 3 and 4: opt in, watch, begin, hold, go on; the first wave arrives.
async fn begin(cluster: &mut Cluster, runbook: &mut Runbook) -> Result<()> {
    runbook
        .run(cluster, "kubectl label namespace danlu gpu-migrate.io/opt-in=true gpu-migrate.io/project=danlu")
        .await?;
    let output = runbook
        .run_unlisted(
            cluster,
            "kubectl apply --server-side --force-conflicts --field-manager=owner -f policies.yaml",
        )
        .await?;
    ensure!(output.status == 0, "{}", output.text);
    let output = runbook.run(cluster, "gpu-migrate quota translate -n danlu").await?;
    ensure!(output.contains("requests.tencent.com/vcuda-core"), "{output}");
    runbook.run(cluster, "gpu-migrate quota translate -n danlu --apply").await?;
    runbook.run(cluster, "gpu-migrate rollout start danlu").await?;
    until(cluster, "the first workload to be restarted", async |client| {
        let restarted = generation(client, WORKLOADS[0]).await? > 1;
        Ok(Seen::from_bool(restarted, || "not yet".into()))
    })
    .await?;
    runbook.run(cluster, "gpu-migrate rollout pause danlu").await?;
    phase(cluster, MigrationPhase::Paused).await?;
    runbook.run(cluster, "gpu-migrate status").await?;
    runbook.run(cluster, "gpu-migrate rollout resume danlu").await?;
    until(cluster, "the second wave", async |client| {
        let wave = policy(client).await?.status.and_then(|status| status.wave);
        Ok(Seen::from_bool(wave == Some(2), || format!("wave {wave:?}")))
    })
    .await?;
    is_shared(cluster, WORKLOADS[0], true).await
}

/// The second wave never gets ready: it is rolled back by itself, the first stays, the third was never started.
async fn second_wave_fails(cluster: &mut Cluster, runbook: &mut Runbook) -> Result<()> {
    let third = pod_of(&cluster.client, WORKLOADS[2]).await?.uid();
    let output = runbook.run(cluster, "kubectl get gpumigrations danlu -o wide").await?;
    ensure!(output.contains(DANLU), "{output}");
    phase(cluster, MigrationPhase::Failed).await?;
    let status = policy(&cluster.client).await?.status.unwrap_or_default();
    let why = status.conditions.iter().find(|c| c.type_ == "WaveFailed").map(|c| c.message.clone());
    ensure!(
        why.as_ref().is_some_and(|why| why.contains(WORKLOADS[1])),
        "the reason does not name it: {why:?}"
    );
    is_shared(cluster, WORKLOADS[0], true).await?;
    is_shared(cluster, WORKLOADS[1], false).await?;
    is_shared(cluster, WORKLOADS[2], false).await?;
    let mut restarts = Vec::new();
    for name in WORKLOADS {
        restarts.push(generation(&cluster.client, name).await? - 1);
    }
    ensure!(
        restarts == [1, 2, 0],
        "the first is changed once, the second there and back, the third never: {restarts:?}"
    );
    ensure!(pod_of(&cluster.client, WORKLOADS[2]).await?.uid() == third, "the third was restarted");
    let output =
        runbook.run(cluster, "kubectl get events --field-selector involvedObject.kind=GPUMigration").await?;
    ensure!(output.contains("WaveFailed") && output.contains("WaveRolledBack"), "{output}");
    ensure!(
        output.contains("wave 1 of 3 started") && output.contains("wave 2 of 3 started"),
        "a wave has the message of another: {output}"
    );
    runbook.run(cluster, "gpu-migrate verify").await?;
    runbook.run(cluster, "gpu-migrate cordon-card gpu-01 3").await?;
    let output = runbook.run_unlisted(cluster, "gpu-migrate status gpu-01").await?.text;
    let cordoned = until(cluster, "the card to be cordoned", async |client| {
        let shadow: gpu_migrate_model::crd::GPUShadow = Api::all(client.clone()).get(NODE).await?;
        let state = format!("{:?}", shadow.status.and_then(|s| s.cards.get(3).map(|c| c.state)));
        Ok(Seen::from_bool(state.contains("Cordoned") || !state.contains("Free"), || state))
    });
    cordoned.await.with_context(|| output)?;
    runbook.run(cluster, "gpu-migrate cordon-card gpu-01 3 --undo").await.map(drop)
}

/// Runbook 6: the project is rolled back.
async fn undo(cluster: &mut Cluster, runbook: &mut Runbook) -> Result<()> {
    runbook.run(cluster, "gpu-migrate rollout undo danlu").await?;
    phase(cluster, MigrationPhase::Idle).await?;
    all_settled(cluster).await?;
    for name in WORKLOADS {
        is_shared(cluster, name, false).await?;
    }
    Ok(())
}

/// Runbook 6, for everything at once: without the webhook pods are created as they are written. Then it is scaled up
/// again, so that the uninstall has something to remove.
async fn without_webhook(cluster: &mut Cluster, runbook: &mut Runbook) -> Result<()> {
    runbook
        .run(cluster, "kubectl -n gpu-migrate-system scale deployment gpu-migrate-webhook --replicas=0")
        .await?;
    until(cluster, "the webhook's pods to go", async |client| {
        let of_webhook = ListParams::default().labels("app.kubernetes.io/component=webhook");
        let left =
            Api::<Pod>::namespaced(client.clone(), SYSTEM_NAMESPACE).list(&of_webhook).await?.items.len();
        Ok(Seen::from_bool(left == 0, || format!("{left} are there")))
    })
    .await?;
    runbook.run(cluster, "kubectl delete mutatingwebhookconfiguration gpu-migrate").await?;
    runbook
        .run(cluster, "kubectl -n gpu-migrate-system scale deployment gpu-migrate-webhook --replicas=2")
        .await?;
    until(cluster, "the webhook to be registered again", async |client| {
        let hook: Option<MutatingWebhookConfiguration> = Api::all(client.clone()).get_opt(WEBHOOK).await?;
        Ok(Seen::from_bool(hook.is_some(), || "not yet".into()))
    })
    .await
}

/// Runbook 7: everything is removed, and NVIDIA's plugin on that node is restarted.
async fn uninstall(cluster: &mut Cluster, runbook: &mut Runbook) -> Result<()> {
    let output = runbook.run(cluster, "gpu-migrate uninstall --dry-run").await?;
    ensure!(output.contains("dry run"), "{output}");
    let output = runbook.run(cluster, "gpu-migrate uninstall").await?;
    eprintln!("{output}");
    runbook
        .run(cluster, "kubectl label namespace danlu gpu-migrate.io/opt-in- gpu-migrate.io/project-")
        .await?;
    let restart = "kubectl -n kube-system delete pod -l name=nvidia-device-plugin-ds --field-selector spec.nodeName=gpu-01";
    runbook.run(cluster, restart).await.map(drop)
}

/// No object or file is new, none is missing, and no object has our name in it; all cards are whole cards
/// again, and nothing is offered in shares. The kubelet counts the devices of a plugin that is gone in the node's capacity for
/// five minutes more, and then as 0 until its Node is re-created: that is all that may differ.
async fn as_before(cluster: &mut Cluster, before: &Snapshot) -> Result<()> {
    let dialect = Dialect::default();
    let shares = [&dialect.cores, &dialect.memory];
    let capacity = shares.map(|name| format!(" Node /{NODE} capacity {name}: was null, "));
    until(cluster, "the cluster to be as before", async |client| {
        let now = Snapshot::take(client).await?;
        let mut left = before.differences(&now);
        left.retain(|line| !capacity.iter().any(|start| line.starts_with(start)));
        left.extend(now.traces(&["gpu-migrate.io", "gpu-migrate-system", "predicate-gpu-idx"]));
        Ok(Seen::from_bool(left.is_empty(), || format!("{left:#?}")))
    })
    .await?;
    for name in shares {
        offered(cluster, name, 0).await?;
    }
    offered(cluster, &dialect.legacy, CARDS).await
}

/// So that the next scenario finds the cluster as this one did.
async fn forget_the_owners_objects(cluster: &mut Cluster) -> Result<()> {
    for command in [
        "kubectl delete --wait=false namespace danlu bystanders",
        "kubectl -n kube-system delete daemonset nvidia-device-plugin-daemonset",
        "kubectl delete runtimeclass nvidia",
    ] {
        let runbook = Runbook::open(cluster, "no scenario")?;
        let output = runbook.run_unlisted(cluster, command).await?;
        ensure!(output.status == 0, "{command}: {}", output.text);
    }
    until(cluster, "the pods to go", async |client| {
        let left = Api::<Pod>::all(client.clone()).list(&ListParams::default()).await?.items.len();
        Ok(Seen::from_bool(left == 0, || format!("{left} are there")))
    })
    .await
}

async fn policy(client: &Client) -> Result<GPUMigration> {
    Ok(Api::<GPUMigration>::all(client.clone()).get(DANLU).await?)
}

/// Waits until the policy is in a phase.
async fn phase(cluster: &mut Cluster, wanted: MigrationPhase) -> Result<()> {
    until(cluster, &format!("the policy to be {wanted:?}"), async |client| {
        let status = policy(client).await?.status.unwrap_or_default();
        Ok(Seen::from_bool(status.phase == wanted, || format!("{:?} {:?}", status.phase, status.conditions)))
    })
    .await
}

async fn offered(cluster: &mut Cluster, resource: &str, amount: u64) -> Result<()> {
    offered_on(cluster, NODE, resource, amount).await
}

async fn offered_on(cluster: &mut Cluster, node: &str, resource: &str, amount: u64) -> Result<()> {
    until(cluster, &format!("{amount} {resource} on {node}"), async |client| {
        let all = Api::<Node>::all(client.clone())
            .get(node)
            .await?
            .status
            .and_then(|s| s.allocatable)
            .unwrap_or_default();
        Ok(Seen::from_bool(all.get(resource).is_some_and(|q| q.0 == amount.to_string()), || {
            format!("{all:?}")
        }))
    })
    .await
}

fn is_settled(deployment: &Deployment) -> bool {
    let status = deployment.status.clone().unwrap_or_default();
    let wanted = deployment.spec.as_ref().and_then(|spec| spec.replicas);
    status.observed_generation == deployment.metadata.generation
        && [status.replicas, status.updated_replicas, status.available_replicas]
            .iter()
            .all(|count| *count == wanted)
}

async fn all_settled(cluster: &mut Cluster) -> Result<()> {
    until(cluster, "the project's workloads to be ready", async |client| {
        let list = Api::<Deployment>::namespaced(client.clone(), DANLU).list(&ListParams::default()).await?;
        let waiting: Vec<String> =
            list.iter().filter(|d| !is_settled(d)).map(ResourceExt::name_any).collect();
        Ok(Seen::from_bool(waiting.is_empty(), || format!("{waiting:?} are not")))
    })
    .await
}

/// How often the workload's spec was written, from 1.
async fn generation(client: &Client, name: &str) -> Result<i64> {
    let deployment = Api::<Deployment>::namespaced(client.clone(), DANLU).get(name).await?;
    deployment.metadata.generation.context("a Deployment has a generation")
}

/// The one pod of a workload that is not on its way out.
async fn pod_of(client: &Client, name: &str) -> Result<Pod> {
    let labelled = ListParams::default().labels(&format!("app={name}"));
    let mut pods = Api::<Pod>::namespaced(client.clone(), DANLU).list(&labelled).await?.items;
    pods.retain(|pod| pod.metadata.deletion_timestamp.is_none());
    ensure!(pods.len() == 1, "{name} has {} pods", pods.len());
    pods.pop().context("there is one")
}

/// Whether a workload's pod runs on a share, or on a whole card.
async fn is_shared(cluster: &mut Cluster, name: &str, shared: bool) -> Result<()> {
    until(
        cluster,
        &format!("{name}'s pod to be {}", if shared { "shared" } else { "legacy" }),
        async |client| {
            let pod = pod_of(client, name).await?;
            let dialect = Dialect::default();
            let asks = (limit(&pod, &dialect.legacy), limit(&pod, &dialect.cores));
            Ok(Seen::from_bool(asks == if shared { (0, 100) } else { (1, 0) }, || {
                format!("it asks for {asks:?}")
            }))
        },
    )
    .await
}
