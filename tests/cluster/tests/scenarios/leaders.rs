//! Two operator replicas, killed and paused in the middle of a migration: it completes, and nothing is done twice.
//!
//! What happened is read from the apiserver's audit log: which replica wrote what, in which order. The operators' replicas share an account
//! and differ by a group of their own.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gpu_migrate_cluster_tests::{
    Cluster,
    audit::{self, Entry},
    manifests,
    migration::{GPU, limit},
    observe::Observer,
    process::Component,
    stage::OPERATORS,
    wait::{self, Seen},
    workload::{deployment, pod_spec},
};
use gpu_migrate_model::{
    crd::{GPUMigration, MigrationPhase},
    names::{Dialect, OPT_IN, PROJECT, SCHEDULER},
};
use k8s_openapi::api::apps::v1::Deployment;
use kube::{
    Api, ResourceExt,
    api::{ListParams, PostParams},
};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::json;

const PROJECT_NAME: &str = "leaders";
const WORKLOADS: [&str; 3] = ["one", "two", "three"];
/// Workloads of other kinds, all in the last wave: name, kind, and plural in lower case.
const OTHERS: [(&str, &str, &str); 3] = [
    ("four", "StatefulSet", "statefulsets"),
    ("five", "DaemonSet", "daemonsets"),
    ("six", "CronJob", "cronjobs"),
];
/// How often the leader is killed or paused.
const FAILOVERS: usize = 4;
/// Long enough for four waves, with a new leader after a lost Lease in each.
const LONG: Duration = Duration::from_secs(150);

/// The leader is killed, or paused for longer than its Lease, at random moments; the other takes over, and the one that is
/// resumed finds that it has lost the Lease. Every workload is restarted once.
pub(crate) async fn killed_and_paused_leaders_restart_no_workload_twice(cluster: &mut Cluster) -> Result<()> {
    let seed = std::env::var("GPU_MIGRATE_LEADERS_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let mut random = StdRng::seed_from_u64(seed);
    let observer = Observer::start(cluster.client.clone());
    let namespace = cluster.namespace(PROJECT_NAME, &[(OPT_IN, "true"), (PROJECT, PROJECT_NAME)]).await?;
    for name in WORKLOADS {
        cluster.create_deployment(&namespace, deployment(name, 1, GPU)).await?;
    }
    for name in WORKLOADS {
        cluster.all_running(&namespace, name, 1).await?;
    }
    create_others(cluster, &namespace).await?;
    for (name, ..) in &OTHERS[..2] {
        cluster.all_running(&namespace, name, 1).await?;
    }
    let begin = audit::read(&cluster.setup.layout.logs())?.len();
    cluster.add_operators(OPERATORS.len(), &[])?;
    enforce(cluster, &namespace).await?;

    let mut history = Vec::new();
    let outcome = failovers(cluster, begin, &mut random, &mut history).await;
    eprintln!("    seed {seed}: {}", history.join(", "));
    outcome?;
    let migrations: Api<GPUMigration> = Api::all(cluster.client.clone());
    cluster
        .until("the migration to be complete", LONG, || async {
            let status = migrations.get(&namespace).await?.status.unwrap_or_default();
            let done = status.phase == MigrationPhase::Complete;
            Ok(Seen::from_bool(done, || format!("{:?} {:?}", status.phase, status.conditions)))
        })
        .await?;
    for name in OPERATORS {
        cluster.check_forbidden_of(name)?;
        cluster.remove(name)?;
    }

    all_moved_once(cluster, &namespace).await?;
    let log = audit::read(&cluster.setup.layout.logs())?.split_off(begin);
    nothing_was_done_twice(&log, &namespace)?;
    one_acted_at_a_time(&log)?;
    // Each is there twice, on a whole card and then on a share; the CronJob's next run is far away.
    observer.finish().await?.check(2 * (WORKLOADS.len() + 2))
}

async fn create_others(cluster: &Cluster, namespace: &str) -> Result<()> {
    for (name, kind, _) in OTHERS {
        let template = json!({"metadata": {"labels": {"app": name}}, "spec": pod_spec(GPU)});
        let selector = json!({"matchLabels": {"app": name}});
        let mut job = template.clone();
        job["spec"]["restartPolicy"] = json!("Never");
        let (group, spec) = match kind {
            "StatefulSet" => (
                "apps/v1",
                json!({"replicas": 1, "serviceName": name, "selector": selector, "template": template}),
            ),
            "DaemonSet" => ("apps/v1", json!({"selector": selector, "template": template})),
            _ => ("batch/v1", json!({"schedule": "0 0 1 1 *", "jobTemplate": {"spec": {"template": job}}})),
        };
        let object = json!({"apiVersion": group, "kind": kind, "metadata": {"name": name, "namespace": namespace}, "spec": spec});
        manifests::apply(&cluster.client, &object, false).await?;
    }
    Ok(())
}

/// A wave for each Deployment and one for all other kinds, with short gates.
async fn enforce(cluster: &mut Cluster, namespace: &str) -> Result<()> {
    let wave = |name: &&str| json!({"workloads": [format!("Deployment/{namespace}/{name}")]});
    let others = OTHERS.iter().map(|(name, kind, _)| format!("{kind}/{namespace}/{name}"));
    let last = json!({"workloads": others.collect::<Vec<_>>()});
    let waves: Vec<_> = WORKLOADS.iter().map(wave).chain([last]).collect();
    let policy: GPUMigration = serde_json::from_value(json!({
        "metadata": {"name": namespace},
        "spec": {
            "project": PROJECT_NAME, "mode": "Enforce", "scheduling": {"schedulerName": SCHEDULER},
            "rollout": {"gate": {"readyWithinSeconds": 60, "soakSeconds": 2}, "maxUnavailable": 2, "waves": waves},
        },
    }))?;
    Api::<GPUMigration>::all(cluster.client.clone()).create(&PostParams::default(), &policy).await?;
    cluster.forget_policy_after(namespace);
    Ok(())
}

/// Kills or pauses the leader repeatedly, some time after it became the leader.
async fn failovers(
    cluster: &mut Cluster,
    begin: usize,
    random: &mut StdRng,
    history: &mut Vec<String>,
) -> Result<()> {
    for round in 0..FAILOVERS {
        let logs = cluster.setup.layout.logs();
        let leader = cluster
            .until("an operator to lead", LONG, || async {
                let log = audit::read(&logs)?;
                let holder = log[begin..]
                    .iter()
                    .filter_map(operator_leader)
                    .next_back()
                    .unwrap_or_default()
                    .to_owned();
                Ok(Seen::from_option(OPERATORS.into_iter().find(|name| *name == holder), || {
                    format!("{holder:?} does")
                }))
            })
            .await?;
        let moment = Duration::from_millis(random.random_range(0..4000));
        tokio::time::sleep(moment).await;
        let pause = round % 2 == 1;
        history.push(format!("{leader} {} after {moment:.1?}", if pause { "paused" } else { "killed" }));
        let before = audit::read(&logs)?.len();
        if pause {
            cluster.component(leader)?.pause()?;
        } else {
            cluster.kill(leader)?;
        }
        cluster
            .until("the other to take over", LONG, || async {
                let log = audit::read(&logs)?;
                let holder = log[before..]
                    .iter()
                    .filter_map(operator_leader)
                    .find(|holder| *holder != leader && !holder.is_empty());
                Ok(Seen::from_bool(holder.is_some(), || "it still has the Lease".into()))
            })
            .await?;
        if pause {
            // Resumed, it may still try to write; then it notices the lost Lease and exits.
            cluster.component(leader)?.resume()?;
            exits(cluster.component(leader)?)
                .await
                .with_context(|| format!("{leader} lost the Lease and does not exit"))?;
        }
        cluster.start_component(leader)?;
    }
    Ok(())
}

/// The replica that a write of the operator's Lease names. Other programs have Leases of their own.
fn operator_leader(entry: &Entry) -> Option<&str> {
    entry.leader().filter(|_| entry.is_of("gpu-migrate-operator"))
}

/// Waits for a process that is to exit by itself.
async fn exits(component: &mut Component) -> Result<()> {
    wait::until("its exit", Duration::from_secs(15), || {
        let status = component.ended();
        async { Ok(Seen::from_option(status?, || "it is running".into())) }
    })
    .await
    .map(drop)
}

/// All pods are shared ones, and every Deployment had one change and two revisions.
async fn all_moved_once(cluster: &Cluster, namespace: &str) -> Result<()> {
    let deployments: Api<Deployment> = Api::namespaced(cluster.client.clone(), namespace);
    for deployment in deployments.list(&ListParams::default()).await? {
        let revision = deployment.annotations().get("deployment.kubernetes.io/revision").cloned();
        ensure!(
            deployment.metadata.generation == Some(2) && revision.as_deref() == Some("2"),
            "{} was restarted more than once: generation {:?}, revision {revision:?}",
            deployment.name_any(),
            deployment.metadata.generation
        );
    }
    let pods = cluster.pods(namespace).list(&ListParams::default()).await?.items;
    let legacy: Vec<String> = pods
        .iter()
        .filter(|pod| limit(pod, &Dialect::default().legacy) > 0)
        .map(ResourceExt::name_any)
        .collect();
    ensure!(legacy.is_empty(), "still on whole cards: {legacy:?}");
    Ok(())
}

/// By the audit: one write that was carried out for each workload, whoever it is of.
fn nothing_was_done_twice(log: &[Entry], namespace: &str) -> Result<()> {
    let deployments = WORKLOADS.into_iter().map(|name| (name, "deployments"));
    for (name, kind) in deployments.chain(OTHERS.into_iter().map(|(name, _, kind)| (name, kind))) {
        let object = format!("{namespace}/{name}");
        let writes = log
            .iter()
            .filter(|entry| entry.is_of("gpu-migrate-operator") && entry.verb == "patch" && entry.done())
            .filter(|entry| entry.object().as_deref() == Some(&object))
            .filter(|entry| entry.resource().is_some_and(|(_, resource)| resource == kind))
            .count();
        ensure!(writes == 1, "{object} was written {writes} times");
    }
    Ok(())
}

/// By the audit: every write of an operator that was carried out came while the Lease named it. Events are left out: they
/// are written afterwards.
fn one_acted_at_a_time(log: &[Entry]) -> Result<()> {
    let (mut leader, mut writes, mut changes) = (String::new(), 0, 0);
    let mut ours: Vec<&Entry> = log.iter().filter(|entry| entry.is_of("gpu-migrate-operator")).collect();
    // The log is in the order of the answers; what was asked before counts as before.
    ours.sort_by_key(|entry| entry.request_received_timestamp);
    for entry in ours {
        if let Some(holder) = entry.leader() {
            changes += usize::from(holder != leader);
            leader = holder.to_owned();
        } else if ["create", "patch", "update", "delete"].contains(&entry.verb.as_str())
            && entry.done()
            && entry
                .resource()
                .is_some_and(|(_, resource)| !["leases", "events"].contains(&resource.as_str()))
        {
            writes += 1;
            let writer = OPERATORS
                .into_iter()
                .find(|name| entry.in_group(name))
                .context("a write without a replica")?;
            ensure!(
                writer == leader,
                "{writer} wrote {:?} {:?} while {leader:?} had the Lease",
                entry.resource(),
                entry.object()
            );
        }
    }
    ensure!(
        writes > 8 && changes > FAILOVERS,
        "{writes} writes, {changes} changes of the Lease: this proves nothing"
    );
    eprintln!("    {writes} writes under {changes} changes of the Lease");
    Ok(())
}
