//! Waves of every kind of project under one operator: what goes wrong in each is seen, said and undone.
//!
//! Soaks last an hour and are moved back in time by the scenario, so that nothing here depends on how long something takes. Pods of the
//! project `git` become ready when the scenario says so, by a readiness gate.

use std::{
    collections::BTreeSet,
    fs,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use base64::{Engine, engine::general_purpose::STANDARD};
use futures::{StreamExt, TryStreamExt, stream};
use gpu_migrate_cluster_tests::{
    Cluster,
    audit::{self, Entry},
    cluster::TIMEOUT,
    http, manifests,
    migration::{GPU, limit, shared_spec},
    observe::Observer,
    runbook::Runbook,
    stage::{OPERATORS, SYSTEM_NAMESPACE},
    wait::Seen,
    workload::{container, deployment, pod_spec},
};
use gpu_migrate_model::{
    crd::{GPUMigration, GPUMigrationStatus, MigrationMode, MigrationPhase},
    names::{self, Dialect, OPT_IN, PROJECT, SCHEDULER},
};
use k8s_openapi::{
    api::{
        apps::v1::{Deployment, ReplicaSet, StatefulSet},
        core::v1::Pod,
    },
    jiff::Timestamp,
};
use kube::{
    Api, Client, ResourceExt,
    api::{
        ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, ObjectMeta, Patch,
        PatchParams, PostParams,
    },
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

/// Shares so small that those of all projects are on one card.
const SHARE: (u64, u64) = (10, 10);
/// Pods of the project that has very many.
const MANY: usize = 10_000;
/// Workloads in a status that the operator does not restart.
const LISTED: usize = 100;
/// The readiness gate.
const GATE: &str = "example.com/ready";

/// All of it; what is made outside namespaces is removed whatever happens.
pub(crate) async fn what_goes_wrong_in_a_wave_is_seen_said_and_undone(cluster: &mut Cluster) -> Result<()> {
    let outcome = projects(cluster).await;
    cluster.remove(OPERATORS[0])?;
    for object in outside_namespaces() {
        delete(&cluster.client, &object).await?;
    }
    outcome
}

async fn projects(cluster: &mut Cluster) -> Result<()> {
    let observer = Observer::start(cluster.client.clone());
    for object in outside_namespaces() {
        applied(cluster, &object).await?;
    }
    let anchors = cluster.namespace("anchor", &[]).await?;
    cluster.create_pod(&anchors, "anchor", shared_spec(SHARE.0, SHARE.1)).await?;
    cluster.running(&anchors, "anchor").await?;
    cluster.add_operators(1, &[("interval-milliseconds", "400")])?;
    let begin = audit::read(&cluster.setup.layout.logs())?.len();

    // Two projects that nothing may be done to, all along.
    let overlap = overlapping(cluster).await?;
    let git = Git::new(cluster).await?;
    let ordered = ordered(cluster).await?;
    let crash = project(cluster, "crash").await?;
    cluster.create_deployment(&crash, deployment("crash", 1, GPU)).await?;
    cluster.all_running(&crash, "crash", 1).await?;
    short_of_cards(cluster).await?;
    let owned = owned(cluster).await?;

    let hour = json!({"readyWithinSeconds": 60, "soakSeconds": 3600, "maxRestarts": 0});
    policy(cluster, &crash, json!({"gate": hour, "waves": [{"percent": 100}]})).await?;
    policy(cluster, &ordered, json!({"gate": {"readyWithinSeconds": 3600}, "waves": [{"percent": 100}]}))
        .await?;
    git.typo(cluster).await?;
    git.flaps(cluster).await?;
    crashes(cluster, &crash).await?;
    owned.is_complete(cluster).await?;
    goes_back_in_order(cluster, &ordered, begin).await?;
    git.undo_now(cluster, begin).await?;

    untouched(cluster, &overlap, "both").await?;
    let conflicts =
        [status(&cluster.client, &overlap).await?, status(&cluster.client, &format!("{overlap}-2")).await?];
    ensure!(conflicts.iter().all(|status| condition(status, "Conflict").is_some()), "{conflicts:?}");
    // Before there are ten thousand pods: it lists them all.
    observer.finish().await?.check(9)?;
    very_many_pods(cluster).await?;
    cluster.check_forbidden_of(OPERATORS[0])
}

/// The definitions of Argo's Rollouts and of Knative's Services, as far as they matter here, the operator's right on the former, which the
/// chart grants with `operator.workloadKinds`, and the GPUConfig that switches it on.
fn outside_namespaces() -> [Value; 5] {
    let definition = |group: &str, kind: &str, plural: &str, version: &str| {
        json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": format!("{plural}.{group}")},
            "spec": {"group": group, "scope": "Namespaced",
                "names": {"kind": kind, "plural": plural, "singular": kind.to_lowercase()},
                "versions": [{"name": version, "served": true, "storage": true, "subresources": {"status": {}},
                    "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}]},
        })
    };
    let name = "waves-rollouts";
    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": name},
        "rules": [{"apiGroups": ["argoproj.io"], "resources": ["rollouts"], "verbs": ["list", "watch", "patch"]}]});
    let binding = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": "gpu-migrate-operator", "namespace": SYSTEM_NAMESPACE}]});
    let config = json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUConfig", "metadata": {"name": "cluster"},
        "spec": {"workloadKinds": [{"name": "Rollout.argoproj.io"}]}});
    [
        definition("argoproj.io", "Rollout", "rollouts", "v1alpha1"),
        definition("serving.knative.dev", "Service", "services", "v1"),
        role,
        binding,
        config,
    ]
}

/// Applies an object as soon as its kind is served.
async fn applied(cluster: &mut Cluster, object: &Value) -> Result<()> {
    let client = cluster.client.clone();
    cluster
        .until(&format!("{} to be applied", object["kind"]), TIMEOUT, || async {
            manifests::apply(&client, object, false).await.map(Seen::Done)
        })
        .await
}

async fn delete(client: &Client, object: &Value) -> Result<()> {
    let (group, version) =
        object["apiVersion"].as_str().and_then(|text| text.split_once('/')).context("a group")?;
    let kind = object["kind"].as_str().context("a kind")?;
    let api: Api<DynamicObject> =
        Api::all_with(client.clone(), &ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind)));
    match api.delete(object["metadata"]["name"].as_str().context("a name")?, &DeleteParams::default()).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        outcome => outcome.map(drop).map_err(Into::into),
    }
}

/// An opted-in namespace that is a project of its own, by its name. Its policy has the same name.
async fn project(cluster: &mut Cluster, name: &str) -> Result<String> {
    let namespace = cluster.namespace(name, &[(OPT_IN, "true")]).await?;
    let labels = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": {PROJECT: namespace}}});
    manifests::apply(&cluster.client, &labels, false).await?;
    Ok(namespace)
}

fn policy_of(name: &str, project: &str, mode: &str, rollout: &Value) -> Value {
    json!({
        "apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUMigration", "metadata": {"name": name},
        "spec": {"project": project, "mode": mode, "convert": {"coresPerCard": SHARE.0, "blocksPerCard": SHARE.1},
            "scheduling": {"schedulerName": SCHEDULER}, "rollout": rollout},
    })
}

/// Creates the policy of a project once the webhook can act upon it: what is converted before that stays legacy.
async fn policy(cluster: &mut Cluster, project: &str, rollout: Value) -> Result<()> {
    let enforced = policy_of(project, project, "Enforce", &rollout);
    let mut paused = enforced.clone();
    paused["spec"]["rollout"]["paused"] = json!(true);
    manifests::apply(&cluster.client, &paused, false).await?;
    cluster.forget_policy_after(project);
    let pods = cluster.pods(project);
    let labelled = json!({"metadata": {"generateName": "dry-", "labels": {names::CONVERT: "true"}}, "spec": pod_spec(GPU)});
    let labelled: Pod = serde_json::from_value(labelled)?;
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    cluster
        .until(&format!("the policy of {project} to be in force"), TIMEOUT, || async {
            let pod = pods.create(&dry_run, &labelled).await?;
            Ok(Seen::from_bool(limit(&pod, &Dialect::default().legacy) == 0, || format!("{:?}", pod.spec)))
        })
        .await?;
    manifests::apply(&cluster.client, &enforced, false).await
}

async fn status(client: &Client, policy: &str) -> Result<GPUMigrationStatus> {
    Ok(Api::<GPUMigration>::all(client.clone()).get(policy).await?.status.unwrap_or_default())
}

async fn until_status(
    cluster: &mut Cluster,
    policy: &str,
    what: &str,
    holds: impl Fn(&GPUMigrationStatus) -> bool,
) -> Result<GPUMigrationStatus> {
    let (client, holds) = (cluster.client.clone(), &holds);
    cluster
        .until(&format!("{what} ({policy})"), TIMEOUT, || async {
            let status = status(&client, policy).await?;
            let shown = format!("{status:?}");
            Ok(Seen::from_option(holds(&status).then_some(status), || shown))
        })
        .await
}

fn condition<'a>(status: &'a GPUMigrationStatus, kind: &str) -> Option<&'a str> {
    let found = status.conditions.iter().find(|one| one.type_ == kind && one.status == "True")?;
    Some(&found.message)
}

/// Moves a time of the status back: `readyAt`, since when a wave soaks, or `waveStartedAt`, since when it has got no further. The operator
/// writes only what it decided from this status.
async fn back_date(client: &Client, policy: &str, field: &str, seconds: u64) -> Result<()> {
    let status = serde_json::to_value(status(client, policy).await?)?;
    let time = status[field].as_str().with_context(|| format!("no {field} in {status}"))?;
    let earlier = time.parse::<Timestamp>()? - Duration::from_secs(seconds);
    let patch = Patch::Merge(json!({"status": {field: earlier.to_string()}}));
    Api::<GPUMigration>::all(client.clone()).patch_status(policy, &PatchParams::default(), &patch).await?;
    Ok(())
}

async fn deployed(client: &Client, namespace: &str, name: &str) -> Result<Deployment> {
    Ok(Api::<Deployment>::namespaced(client.clone(), namespace).get(name).await?)
}

/// The Deployment is as it was created.
async fn untouched(cluster: &Cluster, namespace: &str, name: &str) -> Result<()> {
    let found = deployed(&cluster.client, namespace, name).await?;
    ensure!(found.metadata.generation == Some(1), "{namespace}/{name} was changed: {:?}", found.spec);
    Ok(())
}

/// Whole cards and cores of each pod of an app that is not being deleted.
async fn asks(client: &Client, namespace: &str, app: &str) -> Result<Vec<(u64, u64)>> {
    let labelled = ListParams::default().labels(&format!("app={app}"));
    let pods = Api::<Pod>::namespaced(client.clone(), namespace).list(&labelled).await?.items;
    let dialect = Dialect::default();
    let alive = pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none());
    Ok(alive.map(|pod| (limit(pod, &dialect.legacy), limit(pod, &dialect.cores))).collect())
}

async fn all_ask(cluster: &mut Cluster, namespace: &str, app: &str, expected: &[(u64, u64)]) -> Result<()> {
    let client = cluster.client.clone();
    cluster
        .until(&format!("the pods of {namespace}/{app}"), TIMEOUT, || async {
            let asks = asks(&client, namespace, app).await?;
            Ok(Seen::from_bool(asks == expected, || format!("they ask for {asks:?}, not {expected:?}")))
        })
        .await
}

/// Two policies that select the same workload with equal specificity.
async fn overlapping(cluster: &mut Cluster) -> Result<String> {
    let namespace = project(cluster, "overlap").await?;
    for name in [namespace.clone(), format!("{namespace}-2")] {
        let rollout = json!({"gate": {"soakSeconds": 0}, "waves": [{"percent": 100}]});
        manifests::apply(&cluster.client, &policy_of(&name, &namespace, "Enforce", &rollout), false).await?;
        cluster.forget_policy_after(&name);
    }
    // Not before: a policy that is there alone is carried out at once.
    cluster.create_deployment(&namespace, deployment("both", 0, GPU)).await?;
    for (name, other) in
        [("", "-2"), ("-2", "")].map(|(a, b)| (format!("{namespace}{a}"), format!("{namespace}{b}")))
    {
        let names_other = |status: &GPUMigrationStatus| {
            condition(status, "Conflict").is_some_and(|why| why.contains(&other))
        };
        until_status(cluster, &name, "a condition that names the other policy", names_other).await?;
    }
    Ok(namespace)
}

/// A Deployment of which one pod runs and one waits for a card: converted, both run.
async fn short_of_cards(cluster: &mut Cluster) -> Result<()> {
    let namespace = project(cluster, "short").await?;
    let mut manifest = deployment("short", 2, GPU);
    manifest["spec"]["strategy"] = json!({"type": "Recreate"});
    cluster.create_deployment(&namespace, manifest).await?;
    let client = cluster.client.clone();
    cluster
        .until("one pod to run and one to wait for a card", TIMEOUT, || async {
            let ready = deployed(&client, &namespace, "short").await?.status.and_then(|s| s.ready_replicas);
            let waits = ListParams::default().fields("spec.nodeName=");
            let waiting = Api::<Pod>::namespaced(client.clone(), &namespace).list(&waits).await?.items.len();
            Ok(Seen::from_bool(ready == Some(1) && waiting == 1, || {
                format!("{ready:?} are ready, {waiting} wait")
            }))
        })
        .await?;
    let rollout = json!({"onUnready": "Convert", "gate": {"readyWithinSeconds": 60, "soakSeconds": 0}, "waves": [{"percent": 100}]});
    policy(cluster, &namespace, rollout).await?;
    until_status(cluster, &namespace, "the Deployment that was short of cards to be converted", |status| {
        status.phase == MigrationPhase::Complete && status.counts.converted == 2
    })
    .await?;
    cluster.all_running(&namespace, "short", 2).await.map(drop)
}

/// Three replicas, one after the other, with an image that gets ready on a whole card only; the owner lets the operator delete pods there.
async fn ordered(cluster: &mut Cluster) -> Result<String> {
    let namespace = project(cluster, "ordered").await?;
    let mut broken = container("main", GPU);
    let field = format!("metadata.annotations['{}']", names::GPU_ASSIGNED);
    broken["env"] = json!([{"name": "CONVERTED_BY", "valueFrom": {"fieldRef": {"fieldPath": field}}}]);
    broken["readinessProbe"] =
        json!({"exec": {"command": ["/work", "without", "CONVERTED_BY"]}, "periodSeconds": 1});
    let mut pod = pod_spec(&[]);
    pod["containers"] = json!([broken]);
    let set = json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "ordered", "namespace": namespace},
        "spec": {"replicas": 3, "serviceName": "ordered", "selector": {"matchLabels": {"app": "ordered"}},
            "template": {"metadata": {"labels": {"app": "ordered"}}, "spec": pod}},
    });
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
        "metadata": {"name": "gpu-migrate-operator-rollback", "namespace": namespace},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "gpu-migrate-operator-rollback"},
        "subjects": [{"kind": "ServiceAccount", "name": "gpu-migrate-operator", "namespace": SYSTEM_NAMESPACE}],
    });
    for object in [set, binding] {
        manifests::apply(&cluster.client, &object, false).await?;
    }
    cluster.all_running(&namespace, "ordered", 3).await?;
    all_ready(cluster, &namespace).await?;
    Ok(namespace)
}

async fn all_ready(cluster: &mut Cluster, namespace: &str) -> Result<()> {
    let api: Api<StatefulSet> = Api::namespaced(cluster.client.clone(), namespace);
    cluster
        .until("all replicas of the StatefulSet to be ready", TIMEOUT, || async {
            let status = api.get("ordered").await?.status.unwrap_or_default();
            let done = status.ready_replicas == Some(3) && status.current_revision == status.update_revision;
            Ok(Seen::from_bool(done, || format!("{status:?}")))
        })
        .await
}

/// Its wave fails at the last ordinal, which the controller of an ordered StatefulSet would wait for ever: the operator deletes that pod.
async fn goes_back_in_order(cluster: &mut Cluster, namespace: &str, begin: usize) -> Result<()> {
    all_ask(cluster, namespace, "ordered", &[(1, 0), (1, 0), (0, SHARE.0)]).await?;
    cluster.running(namespace, "ordered-2").await?;
    back_date(&cluster.client, namespace, "waveStartedAt", 3600).await?;
    let failed = |status: &GPUMigrationStatus| status.phase == MigrationPhase::Failed;
    until_status(cluster, namespace, "the StatefulSet's wave to be rolled back", failed).await?;
    all_ready(cluster, namespace).await?;
    all_ask(cluster, namespace, "ordered", &[(1, 0); 3]).await?;
    let log = audit::read(&cluster.setup.layout.logs())?.split_off(begin);
    let deleted =
        log.iter().filter(|entry| of_operator(entry) && entry.verb == "delete").filter_map(Entry::object);
    let deleted = deleted.collect::<BTreeSet<_>>();
    ensure!(deleted == BTreeSet::from([format!("{namespace}/ordered-2")]), "deleted: {deleted:?}");
    // Room for what is rolled back after it.
    Api::<StatefulSet>::namespaced(cluster.client.clone(), namespace)
        .delete("ordered", &DeleteParams::default())
        .await?;
    Ok(())
}

fn of_operator(entry: &Entry) -> bool {
    entry.is_of("gpu-migrate-operator") && entry.done()
}

/// In the middle of its soak, which is longer than a workload may take to become ready, a container ends: the wave is rolled back then, and
/// not at the end of the soak.
async fn crashes(cluster: &mut Cluster, namespace: &str) -> Result<()> {
    let soaks =
        |status: &GPUMigrationStatus| status.phase == MigrationPhase::Gating && status.ready_at.is_some();
    until_status(cluster, namespace, "the soak", soaks).await?;
    back_date(&cluster.client, namespace, "readyAt", 1800).await?;
    let running = cluster.all_running(namespace, "crash", 1).await?;
    let pid = running.first().context("one runs")?.1.pid;
    kill(Pid::from_raw(pid.try_into()?), Signal::SIGKILL)?;
    let failed = |status: &GPUMigrationStatus| status.phase == MigrationPhase::Failed;
    let status = until_status(cluster, namespace, "the wave to fail", failed).await?;
    let why = condition(&status, "WaveFailed").unwrap_or_default();
    ensure!(why.contains("crash: a container restarted 1 times, maximum is 0"), "{status:?}");
    all_ask(cluster, namespace, "crash", &[(1, 0)]).await
}

/// A Deployment that belongs to a Knative Service, and an Argo Rollout, whose controller is this task.
struct Owned {
    namespace: String,
    controller: JoinHandle<Result<()>>,
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.controller.abort();
    }
}

async fn owned(cluster: &mut Cluster) -> Result<Owned> {
    let namespace = project(cluster, "owned").await?;
    let service = json!({"apiVersion": "serving.knative.dev/v1", "kind": "Service",
        "metadata": {"name": "model", "namespace": namespace}, "spec": {}});
    let rollout = json!({
        "apiVersion": "argoproj.io/v1alpha1", "kind": "Rollout", "metadata": {"name": "argo", "namespace": namespace},
        "spec": {"replicas": 1, "selector": {"matchLabels": {"app": "argo"}},
            "template": {"metadata": {"labels": {"app": "argo"}}, "spec": pod_spec(GPU)}},
    });
    for object in [&service, &rollout] {
        applied(cluster, object).await?;
    }
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("serving.knative.dev", "v1", "Service"));
    let services: Api<DynamicObject> = Api::namespaced_with(cluster.client.clone(), &namespace, &kind);
    let mut child = deployment("model-00001", 0, GPU);
    child["metadata"]["ownerReferences"] = json!([{"apiVersion": "serving.knative.dev/v1", "kind": "Service", "name": "model",
        "uid": services.get("model").await?.uid(), "controller": true}]);
    cluster.create_deployment(&namespace, child).await?;
    let controller = tokio::spawn(argo(cluster.client.clone(), namespace.clone()));
    cluster.all_running(&namespace, "argo", 1).await?;
    policy(
        cluster,
        &namespace,
        json!({"gate": {"readyWithinSeconds": 60, "soakSeconds": 0}, "waves": [{"percent": 100}]}),
    )
    .await?;
    Ok(Owned { namespace, controller })
}

impl Owned {
    /// The Rollout is converted by its template; the Deployment is reported with its owner and never changed.
    async fn is_complete(&self, cluster: &mut Cluster) -> Result<()> {
        let complete = |status: &GPUMigrationStatus| status.phase == MigrationPhase::Complete;
        let status =
            until_status(cluster, &self.namespace, "the Rollout's wave to be complete", complete).await?;
        all_ask(cluster, &self.namespace, "argo", &[(0, SHARE.0)]).await?;
        let child = status.workloads.iter().find(|one| one.name == "model-00001");
        let reason = child.and_then(|child| child.reason.as_deref()).unwrap_or_default();
        ensure!(reason.contains("controlled by Service model (serving.knative.dev/v1)"), "{status:?}");
        ensure!(!self.controller.is_finished(), "the Rollout's controller has failed");
        untouched(cluster, &self.namespace, "model-00001").await
    }
}

/// As Argo's controller does: a ReplicaSet for each template, the status of Argo, and the former ReplicaSet goes when the new one is ready.
async fn argo(client: Client, namespace: String) -> Result<()> {
    const HASH: &str = "rollouts-pod-template-hash";
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("argoproj.io", "v1alpha1", "Rollout"));
    let rollouts: Api<DynamicObject> = Api::namespaced_with(client.clone(), &namespace, &kind);
    let sets: Api<ReplicaSet> = Api::namespaced(client.clone(), &namespace);
    loop {
        let rollout = rollouts.get("argo").await?;
        let revision = rollout.metadata.generation.context("a Rollout has a generation")?.to_string();
        let name = format!("argo-{revision}");
        let mut template = rollout.data["spec"]["template"].clone();
        template["metadata"]["labels"][HASH] = json!(revision);
        let labels = json!({"app": "argo", HASH: revision});
        let owner = json!({"apiVersion": "argoproj.io/v1alpha1", "kind": "Rollout", "name": "argo", "uid": rollout.uid(), "controller": true});
        let set = json!({
            "apiVersion": "apps/v1", "kind": "ReplicaSet",
            "metadata": {"name": name, "namespace": namespace, "labels": labels, "ownerReferences": [owner]},
            "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": template},
        });
        manifests::apply(&client, &set, false).await?;
        let all = sets.list(&ListParams::default().labels("app=argo")).await?.items;
        let available =
            |set: &ReplicaSet| set.status.as_ref().and_then(|status| status.available_replicas) == Some(1);
        let (current, former) = all.into_iter().partition::<Vec<_>, _>(|set| set.name_any() == name);
        let ready = current.iter().any(available);
        if ready {
            for set in &former {
                // It may be gone already.
                let _ = sets.delete(&set.name_any(), &DeleteParams::background()).await;
            }
        }
        let phase = if ready && former.is_empty() { "Healthy" } else { "Progressing" };
        let status = json!({"status": {"observedGeneration": revision, "phase": phase}});
        rollouts.patch_status("argo", &PatchParams::default(), &Patch::Merge(status)).await?;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// A project whose manifests, policy included, a GitOps controller applies again every second, with an autoscaler on one of its two
/// Deployments.
struct Git {
    namespace: String,
    /// What is in Git.
    manifests: Arc<Mutex<Vec<Value>>>,
    /// How often all of it was applied.
    rounds: Arc<AtomicUsize>,
    controller: JoinHandle<Result<()>>,
}

impl Drop for Git {
    fn drop(&mut self) {
        self.controller.abort();
    }
}

impl Git {
    async fn new(cluster: &mut Cluster) -> Result<Self> {
        let namespace = project(cluster, "git").await?;
        let workload = |name: &str| {
            let mut manifest = deployment(name, 1, GPU);
            manifest["apiVersion"] = json!("apps/v1");
            manifest["kind"] = json!("Deployment");
            manifest["metadata"]["namespace"] = json!(namespace);
            manifest["spec"]["template"]["spec"]["readinessGates"] = json!([{"conditionType": GATE}]);
            // The autoscaler's.
            if let Some(spec) = manifest["spec"].as_object_mut() {
                spec.remove("replicas");
            }
            manifest
        };
        let policy = policy_of(&namespace, &namespace, "Audit", &Self::rollout(&namespace, &["wbe"]));
        let manifests = Arc::new(Mutex::new(vec![workload("web"), workload("api"), policy]));
        let rounds = Arc::<AtomicUsize>::default();
        let controller = tokio::spawn(sync(cluster.client.clone(), manifests.clone(), rounds.clone()));
        cluster.forget_policy_after(&namespace);
        let git = Self { namespace, manifests, rounds, controller };
        git.scale(cluster, 1).await?;
        git.settles(cluster, 1).await?;
        Ok(git)
    }

    fn rollout(namespace: &str, names: &[&str]) -> Value {
        let named = names.iter().map(|name| format!("Deployment/{namespace}/{name}")).collect::<Vec<_>>();
        json!({"maxUnavailable": 1, "gate": {"readyWithinSeconds": 60, "soakSeconds": 3600}, "waves": [{"workloads": named}]})
    }

    /// A canary that is misspelt holds the wave and is named; nothing is changed before it is corrected, in Git.
    async fn typo(&self, cluster: &mut Cluster) -> Result<()> {
        command(cluster, &format!("gpu-migrate rollout start {} --yes", self.namespace)).await?;
        let name = format!("Deployment/{}/wbe does not exist", self.namespace);
        let named =
            |status: &GPUMigrationStatus| condition(status, "Stalled").is_some_and(|why| why.contains(&name));
        until_status(cluster, &self.namespace, "the misspelt name to be reported", named).await?;
        for name in ["web", "api"] {
            untouched(cluster, &self.namespace, name).await?;
        }
        let mut manifests = self.manifests.lock().unwrap_or_else(PoisonError::into_inner);
        manifests[2]["spec"]["rollout"] = Self::rollout(&self.namespace, &["web", "api"]);
        Ok(())
    }

    /// Pods come and go during the soak, long after a workload would have been too late: that is no failure. It passes the gate.
    async fn flaps(&self, cluster: &mut Cluster) -> Result<()> {
        let soaks = |status: &GPUMigrationStatus| {
            status.phase == MigrationPhase::Gating && status.unready_since.is_none()
        };
        self.until(cluster, "the soak", true, soaks).await?;
        back_date(&cluster.client, &self.namespace, "readyAt", 600).await?;
        let interrupted = |status: &GPUMigrationStatus| {
            status.phase == MigrationPhase::Gating && status.unready_since.is_some()
        };
        for _ in 0..2 {
            self.scale(cluster, 2).await?;
            self.until(cluster, "the soak to be interrupted by a new pod", false, interrupted).await?;
            self.until(cluster, "the soak to go on", true, soaks).await?;
            self.scale(cluster, 1).await?;
            self.settles(cluster, 1).await?;
            self.until(cluster, "the soak after the scale-down", true, soaks).await?;
        }
        back_date(&cluster.client, &self.namespace, "readyAt", 3600).await?;
        let complete = |status: &GPUMigrationStatus| status.phase == MigrationPhase::Complete;
        self.until(cluster, "the rollout to be complete", true, complete).await?;
        for app in ["web", "api"] {
            all_ask(cluster, &self.namespace, app, &[(0, SHARE.0)]).await?;
        }
        Ok(())
    }

    /// All workloads at once, although `maxUnavailable` is 1, and no write is taken back by who applies the manifests: each workload was
    /// changed once on the way there and once on the way back.
    async fn undo_now(&self, cluster: &mut Cluster, begin: usize) -> Result<()> {
        let before = audit::read(&cluster.setup.layout.logs())?.len();
        command(cluster, &format!("gpu-migrate rollout undo --now {} --yes", self.namespace)).await?;
        let back = |status: &GPUMigrationStatus| status.phase == MigrationPhase::Idle;
        self.until(cluster, "the project to be rolled back", true, back).await?;
        for app in ["web", "api"] {
            all_ask(cluster, &self.namespace, app, &[(1, 0)]).await?;
        }
        let log = audit::read(&cluster.setup.layout.logs())?;
        let of_project = |entry: &&Entry| {
            let object = entry.object().unwrap_or_default();
            let workload = object.starts_with(&format!("{}/", self.namespace)) && entry.verb == "patch";
            of_operator(entry) && (workload || object == format!("/{}", self.namespace))
        };
        let mut undo = log[before..].iter().filter(of_project).collect::<Vec<_>>();
        undo.sort_by_key(|entry| entry.request_received_timestamp);
        let writes = undo.iter().map(|entry| entry.object().unwrap_or_default()).collect::<Vec<_>>();
        let workloads = ["api", "web"].map(|name| format!("{}/{name}", self.namespace));
        let at_once = |pair: &[String]| pair.iter().collect::<BTreeSet<_>>() == workloads.iter().collect();
        ensure!(
            writes.windows(2).any(at_once),
            "between the two workloads something else was written: {writes:?}"
        );
        for workload in &workloads {
            let changes = log[begin..]
                .iter()
                .filter(of_project)
                .filter(|entry| entry.object().as_ref() == Some(workload));
            ensure!(changes.count() == 2, "{workload} was not changed twice");
        }
        let policy = Api::<GPUMigration>::all(cluster.client.clone()).get(&self.namespace).await?;
        ensure!(policy.spec.mode == MigrationMode::Audit, "the policy is not as in Git: {:?}", policy.spec);
        let rounds = self.rounds.load(Ordering::Relaxed);
        eprintln!("    the manifests were applied {rounds} times");
        ensure!(
            rounds > 5 && !self.controller.is_finished(),
            "the GitOps controller has failed after {rounds} rounds"
        );
        Ok(())
    }

    /// Sets both bounds of the autoscaler, which is Kubernetes' own: it needs no metrics to keep to them.
    async fn scale(&self, cluster: &Cluster, replicas: u32) -> Result<()> {
        let autoscaler = json!({
            "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": "web", "namespace": self.namespace},
            "spec": {"minReplicas": replicas, "maxReplicas": replicas,
                "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"}},
        });
        manifests::apply(&cluster.client, &autoscaler, false).await
    }

    /// Waits for a status, and lets pods become ready meanwhile or not.
    async fn until(
        &self,
        cluster: &mut Cluster,
        what: &str,
        ready: bool,
        holds: impl Fn(&GPUMigrationStatus) -> bool,
    ) -> Result<()> {
        let (client, holds) = (cluster.client.clone(), &holds);
        cluster
            .until(&format!("{what} ({})", self.namespace), TIMEOUT, || async {
                if ready {
                    self.let_pods_be_ready(&client).await?;
                }
                let status = status(&client, &self.namespace).await?;
                Ok(Seen::from_bool(holds(&status), || format!("{status:?}")))
            })
            .await
    }

    /// Waits until `web` has so many replicas, and both Deployments are ready.
    async fn settles(&self, cluster: &mut Cluster, replicas: i32) -> Result<()> {
        let client = cluster.client.clone();
        cluster
            .until("the Deployments from Git to be ready", TIMEOUT, || async {
                self.let_pods_be_ready(&client).await?;
                for (name, wanted) in [("web", replicas), ("api", 1)] {
                    let found = deployed(&client, &self.namespace, name).await?;
                    let status = found.status.unwrap_or_default();
                    if (status.replicas, status.available_replicas) != (Some(wanted), Some(wanted)) {
                        return Ok(Seen::NotYet(format!("{name}: {status:?}")));
                    }
                }
                Ok(Seen::Done(()))
            })
            .await
    }

    async fn let_pods_be_ready(&self, client: &Client) -> Result<()> {
        let pods: Api<Pod> = Api::namespaced(client.clone(), &self.namespace);
        for pod in pods.list(&ListParams::default()).await? {
            let mut conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
            if conditions.any(|one| one.type_ == GATE) || pod.metadata.deletion_timestamp.is_some() {
                continue;
            }
            let ready = json!({"status": {"conditions": [{"type": GATE, "status": "True"}]}});
            let patched =
                pods.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Strategic(ready)).await;
            if let Err(error) = patched
                && !matches!(&error, kube::Error::Api(status) if status.code == 404)
            {
                return Err(error.into());
            }
        }
        Ok(())
    }
}

/// What Argo CD's or Flux's controller does at each sync.
async fn sync(client: Client, manifests: Arc<Mutex<Vec<Value>>>, rounds: Arc<AtomicUsize>) -> Result<()> {
    let controller = PatchParams::apply("argocd-controller").force();
    loop {
        let all = manifests.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for object in &all {
            manifests::apply_as(&client, object, &controller).await?;
        }
        rounds.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// Runs a command line of ours as administrator.
async fn command(cluster: &mut Cluster, command: &str) -> Result<()> {
    let mut shell = Runbook::open(cluster, "no scenario")?;
    shell.follow = false;
    let output = shell.run_unlisted(cluster, command).await?;
    ensure!(output.status == 0, "{command}: {}", output.text);
    Ok(())
}

/// A workload is converted beside ten thousand bare pods, none of which the operator could: the status stays small, and the operator
/// within its memory.
async fn very_many_pods(cluster: &mut Cluster) -> Result<()> {
    let namespace = project(cluster, "many").await?;
    cluster.create_deployment(&namespace, deployment("one", 0, GPU)).await?;
    let etcd = Etcd { port: cluster.setup.ports.etcd, namespace: namespace.clone() };
    etcd.put(MANY).await?;
    let rollout = json!({"gate": {"readyWithinSeconds": 60, "soakSeconds": 0}, "waves": [{"percent": 100}]});
    let outcome = async {
        policy(cluster, &namespace, rollout).await?;
        // The pods come to the operator by its watch, not at once.
        let complete = |status: &GPUMigrationStatus| {
            status.phase == MigrationPhase::Complete && status.counts.legacy as usize == MANY
        };
        until_status(cluster, &namespace, "the workload beside very many pods to be converted", complete)
            .await
    };
    let outcome = outcome.await;
    etcd.delete(MANY).await?;
    let status = outcome?;
    let (legacy, unlisted) = (status.counts.legacy as usize, status.unlisted as usize);
    ensure!((legacy, unlisted) == (MANY, MANY - LISTED), "{legacy} legacy pods, {unlisted} are not listed");
    let size = serde_json::to_vec(&status)?.len();
    let pid = cluster.component(OPERATORS[0])?.pid().context("it runs")?;
    let usage = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let peak = usage
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    let peak = peak.context("no VmHWM")? / 1024;
    let shipped = manifests::objects("base")?;
    let operator =
        shipped.iter().find(|o| o["kind"] == "Deployment" && o["metadata"]["name"] == "gpu-migrate-operator");
    let limit = operator
        .and_then(|o| o.pointer("/spec/template/spec/containers/0/resources/limits/memory")?.as_str());
    let limit: u64 = limit.and_then(|text| text.strip_suffix("Mi")).context("no limit in Mi")?.parse()?;
    eprintln!("    {MANY} pods: a status of {size} bytes, at most {peak} of {limit} MiB");
    ensure!(size < 64 << 10 && peak < limit, "a status of {size} bytes, {peak} MiB");
    Ok(())
}

/// Pods put where the API server stores them: through it ten thousand take more than a minute. It decodes them as its own.
struct Etcd {
    port: u16,
    namespace: String,
}

impl Etcd {
    fn key(&self, index: usize) -> String {
        STANDARD.encode(format!("/registry/pods/{}/many-{index}", self.namespace))
    }

    async fn put(&self, count: usize) -> Result<()> {
        let mut spec = pod_spec(GPU);
        spec["schedulerName"] = json!("none");
        let created = ObjectMeta {
            creation_timestamp: Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(Timestamp::now())),
            namespace: Some(self.namespace.clone()),
            ..ObjectMeta::default()
        };
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": created, "spec": spec, "status": {"phase": "Pending"}});
        self.all(count, "/v3/kv/put", |index| {
            let mut pod = pod.clone();
            pod["metadata"]["name"] = json!(format!("many-{index}"));
            pod["metadata"]["uid"] = json!(format!("00000000-0000-4000-8000-{index:012}"));
            json!({"key": self.key(index), "value": STANDARD.encode(pod.to_string())})
        })
        .await
    }

    async fn delete(&self, count: usize) -> Result<()> {
        self.all(count, "/v3/kv/deleterange", |index| json!({"key": self.key(index)})).await
    }

    async fn all(&self, count: usize, path: &str, body: impl Fn(usize) -> Value) -> Result<()> {
        let client = http::Client::default();
        let calls = (0..count).map(|index| client.post(self.port, path, body(index).to_string()));
        stream::iter(calls).buffer_unordered(16).try_collect().await
    }
}
