//! The GPUConfig reconciler: observe, decide ([`crate::nodes`]), apply. Level-triggered.

mod observe;
mod write;

use crate::kinds::Described;
use crate::metrics::Metrics;
use crate::nodes::decide::{self, NodeInput, NodePlan, desired};
use crate::nodes::{Desired, Labels, NodeView, OperatorCondition, daemonsets};
use crate::pools;
use futures::StreamExt as _;
use gpu_migrate_model::crd::{GPUConfig, GPUConfigStatus, GPUShadow, PluginMode};
use gpu_migrate_model::text::some_of;
use gpu_migrate_runtime::watch::{SkippedObjects, Update, watch_guarded};
use jiff::Timestamp;
use kube::core::DeserializeGuard;
use kube::runtime::watcher::{Config, Event};
use kube::{Api, Client, Resource as _};
use observe::ClusterState;
pub(crate) use observe::NAME;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Reconcile interval; bounds how long a new node stays unlabelled.
pub(crate) const INTERVAL: Duration = Duration::from_secs(10);

/// Reconciles until it is dropped: when the GPUConfig changes, and every `interval` for what changes on nodes.
pub(crate) async fn run(client: Client, namespace: String, metrics: Metrics, interval: Duration) {
    let mut reported = BTreeSet::new();
    // One that cannot be read is counted by the GPUMigration loop, which watches it too.
    let api = Api::<DeserializeGuard<GPUConfig>>::all(client.clone());
    let mut changes = watch_guarded(api, only_ours(), SkippedObjects::default());
    let mut generation = None;
    loop {
        match reconcile(&client, &namespace, Timestamp::now()).await {
            Err(error) => {
                metrics.failures.inc();
                tracing::warn!(%error, "reconciling nodes with the GPUConfig failed; retrying");
            }
            Ok(problems) => {
                metrics.invalid_templates.set(i64::try_from(problems.len()).unwrap_or(i64::MAX));
                for problem in problems.difference(&reported) {
                    tracing::warn!(problem, "invalid template; what runs from an earlier version stays");
                }
                reported = problems;
            }
        }
        let next = async {
            while let Some(update) = changes.next().await {
                // Our own writes of its status are no change.
                let now = match &update {
                    Update::Event(Event::InitApply(config) | Event::Apply(config)) => {
                        config.meta().generation
                    }
                    Update::Event(Event::Delete(_)) => None,
                    _ => continue,
                };
                if std::mem::replace(&mut generation, now) != now {
                    break;
                }
            }
        };
        // What is over is the wait, not the watch.
        _ = tokio::time::timeout(interval, next).await;
    }
}

/// The one GPUConfig that counts.
pub(crate) fn only_ours() -> Config {
    Config::default().fields(&format!("metadata.name={NAME}"))
}

/// Reconciles all nodes; returns the problems of the templates.
///
/// # Errors
/// What could not be read or written.
pub async fn reconcile(client: &Client, namespace: &str, now: Timestamp) -> kube::Result<BTreeSet<String>> {
    let state = observe::cluster_state(client, namespace, now).await?;
    let spec = state.config.as_ref().map(|config| &config.spec);
    let external = daemonsets::external(&state.sets);
    let mut desired_nodes = BTreeMap::new();
    let mut plans = BTreeMap::new();
    let runs = |node: &NodeView| state.runs.get(&node.name).map_or(&[][..], Vec::as_slice);
    let pool = |desired: Option<&Desired>| desired.and_then(|desired| desired.settings.pool.clone());
    let mut installing = BTreeMap::<Option<String>, BTreeSet<&str>>::new();
    for node in state.nodes.iter().filter(|node| decide::is_installing(node, runs(node))) {
        installing.entry(pool(desired(spec, node).as_ref())).or_default().insert(&node.name);
    }
    for node in &state.nodes {
        let desired = desired(spec, node);
        let others = installing.entry(pool(desired.as_ref())).or_default();
        others.remove(node.name.as_str());
        let installing_elsewhere = u32::try_from(others.len()).unwrap_or(u32::MAX);
        let input = |pods| NodeInput {
            node,
            desired: desired.as_ref(),
            shadow: state.shadows.get(&node.name).and_then(|shadow| shadow.status.as_ref()),
            external: &external,
            pods,
            runs: runs(node),
            templates: &state.templates,
            namespace,
            installing: installing_elsewhere,
        };
        let mut plan = decide::plan(&input(None));
        if plan.count_pods {
            let pods = observe::pods_of(client, &node.name).await?;
            plan = decide::plan(&input(Some(&pods)));
        }
        if plan.cordon || decide::is_installing(node, runs(node)) {
            others.insert(&node.name);
        }
        plans.insert(node.name.as_str(), plan);
        desired_nodes.insert(node.name.clone(), desired.filter(|desired| !desired.by_label));
    }
    apply_to_nodes(client, namespace, &state, &plans, now).await;

    // A DaemonSet stays while a node has or gets its label: labels are written before it is deleted.
    let current = state.nodes.iter().map(NodeView::current).collect::<Vec<_>>();
    let labels = plans.values().map(|plan| &plan.labels).chain(&current);
    let mut sets = decide::sets(labels, &state.our_sets(namespace), &state.templates, namespace);
    sets.problems.extend(plans.values().filter_map(|plan| plan.problem.clone()));
    let mut problems = sets.problems.iter().map(ToString::to_string).collect::<BTreeSet<_>>();
    problems.extend(write::sets(client, namespace, &sets).await?);
    if let Some(config) = &state.config {
        let status = status(&state, &desired_nodes, &plans, &problems);
        write::status(client, config, status, now).await?;
    }
    Ok(problems)
}

/// Applies the plan of each node. A failure of one does not affect the others; it is retried.
async fn apply_to_nodes(
    client: &Client,
    namespace: &str,
    state: &ClusterState,
    plans: &BTreeMap<&str, NodePlan>,
    now: Timestamp,
) {
    for node in &state.nodes {
        let Some(plan) = plans.get(node.name.as_str()).filter(|plan| !plan.count_pods) else { continue };
        let shadow = state.shadows.get(&node.name);
        if let Err(error) = apply_to_node(client, namespace, node, shadow, plan, now).await {
            tracing::warn!(node = node.name, %error, "reconciling the node failed; retrying");
        }
    }
}

async fn apply_to_node(
    client: &Client,
    namespace: &str,
    node: &NodeView,
    shadow: Option<&GPUShadow>,
    plan: &NodePlan,
    now: Timestamp,
) -> kube::Result<()> {
    let current =
        node.current().into_iter().filter(|(key, _)| node.own_labels.contains(*key)).collect::<Labels>();
    let is_set = |(key, value): (&&str, &String)| node.is(key, value);
    if plan.delete_shadow {
        // Before the labels, from which the deletion is decided.
        write::delete_shadow(client, node).await?;
    }
    let labels_differ = current != plan.labels && !(current.is_empty() && plan.labels.iter().all(is_set));
    if labels_differ || node.own_cordon != plan.cordon {
        write::node(client, node, &plan.labels, plan.cordon).await?;
    }
    write::shadow(client, node, shadow.filter(|_| !plan.delete_shadow), plan, now).await?;
    for pod in &plan.remove {
        write::remove_pod(client, namespace, pod).await?;
    }
    match &plan.create {
        Some(pod) => write::create_pod(client, namespace, pod).await,
        None => Ok(()),
    }
}

/// Status and conditions of the GPUConfig.
fn status(
    state: &ClusterState,
    desired: &BTreeMap<String, Option<Desired>>,
    plans: &BTreeMap<&str, NodePlan>,
    problems: &BTreeSet<String>,
) -> (GPUConfigStatus, Vec<OperatorCondition>) {
    let ready =
        state.shadows.iter().filter(|(_, shadow)| observe::is_ready(shadow)).map(|(name, _)| name.clone());
    let ready = ready.collect::<BTreeSet<_>>();
    let pools = desired
        .iter()
        .map(|(name, desired)| (name.clone(), desired.as_ref().map(|desired| desired.settings.clone())))
        .collect::<BTreeMap<_, _>>();
    let config = state.config.as_ref();
    let spec = config.map(|config| config.spec.clone()).unwrap_or_default();
    let status = pools::status(&spec, config.and_then(|config| config.metadata.generation), &pools, &ready);
    let agents = pools
        .iter()
        .filter(|(_, settings)| settings.as_ref().is_some_and(|s| s.plugin != PluginMode::Legacy));
    let waiting = agents.filter(|(name, _)| !ready.contains(*name)).map(|(name, _)| name.as_str());
    let waiting = waiting.collect::<Vec<_>>();
    let of = |kind: &str, status: bool| {
        let all = plans.iter().flat_map(|(node, plan)| plan.conditions.iter().map(move |one| (*node, one)));
        all.filter(move |(_, one)| one.kind == kind && one.status == status)
            .map(|(node, one)| format!("{node}: {}", one.message))
            .collect::<Vec<_>>()
    };
    let summary = |kind, reason, quiet: &str, found: Vec<String>| match found.is_empty() {
        true => OperatorCondition::new(kind, false, "None", quiet),
        false => OperatorCondition::new(kind, true, reason, some_of(NAMED, &found, "; ")),
    };
    let kinds = spec.workload_kinds.iter().filter_map(|entry| Described::of(entry).err()).collect::<Vec<_>>();
    let conditions = vec![
        match kinds.is_empty() {
            true => OperatorCondition::new("WorkloadKindsValid", true, "Valid", "every kind is described"),
            false => {
                OperatorCondition::new("WorkloadKindsValid", false, "Invalid", some_of(NAMED, &kinds, "; "))
            }
        },
        match waiting.is_empty() {
            true => OperatorCondition::new(
                "Ready",
                true,
                "AllReady",
                "the node agent of every node that needs one is ready",
            ),
            false => OperatorCondition::new(
                "Ready",
                false,
                "Waiting",
                format!(
                    "{} nodes have no ready node agent: {}",
                    waiting.len(),
                    some_of(NAMED, &waiting, "; ")
                ),
            ),
        },
        summary(
            "PluginConflict",
            "TwoPlugins",
            "no card is allocated by two plugins",
            of("PluginConflict", true),
        ),
        summary(
            "DriverMismatch",
            "Differs",
            "every driver has the desired version",
            of("DriverMatches", false),
        ),
        match problems.is_empty() {
            true => OperatorCondition::new(
                "TemplatesValid",
                true,
                "Valid",
                "every template that is needed is valid",
            ),
            false => {
                OperatorCondition::new("TemplatesValid", false, "Invalid", some_of(NAMED, problems, "; "))
            }
        },
    ];
    (status, conditions)
}

/// Problems that a message names; the others are counted.
const NAMED: usize = 5;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::migrations::tests::api_server;
    use kube::api::{Patch, PatchParams, PostParams};
    use serde_json::json;

    #[tokio::test]
    async fn a_change_of_the_gpuconfig_is_acted_upon_before_the_next_interval() {
        let (_running, client) = api_server().await;
        let configs = Api::<GPUConfig>::all(client.clone());
        let config = json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUConfig", "metadata": {"name": NAME}, "spec": {}});
        configs.create(&PostParams::default(), &serde_json::from_value(config).unwrap()).await.unwrap();
        let never = Duration::from_secs(3600);
        let running = run(client.clone(), "default".to_owned(), Metrics::default(), never);
        let edits = async {
            let observed =
                async || configs.get(NAME).await.unwrap().status.unwrap_or_default().observed_generation;
            for generation in 1..4 {
                while observed().await != Some(generation) {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                let name = format!("pool-{generation}");
                let pool =
                    json!({"name": name, "selector": {"matchLabels": {"pool": "a"}}, "plugin": "Legacy"});
                let patch = json!({"spec": {"nodePools": [pool]}});
                configs.patch(NAME, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
            }
        };
        tokio::select! {
            () = running => panic!("it ended"),
            outcome = tokio::time::timeout(Duration::from_secs(60), edits) => outcome.expect("it waits for the next interval"),
        }
    }
}
