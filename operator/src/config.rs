//! The GPUConfig loop: look, decide ([`crate::nodes`]), carry out. Level-triggered: every round starts from what is there.

mod look;
mod write;

use crate::metrics::Metrics;
use crate::nodes::decide::{self, NodePlan, Seen, wanted};
use crate::nodes::{Labels, NodeView, Say, Wanted, daemonsets};
use crate::pools;
use gpu_migrate_model::crd::{GPUConfigStatus, GPUShadow, PluginMode};
use jiff::Timestamp;
use kube::Client;
use look::World;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// How often it goes round: so long it takes until a new node has its labels.
const ROUND: Duration = Duration::from_secs(10);

/// Goes round until it is dropped.
pub(crate) async fn run(client: Client, namespace: String, metrics: Metrics) {
    let mut said = BTreeSet::new();
    loop {
        match round(&client, &namespace, Timestamp::now()).await {
            Err(error) => {
                metrics.failures.inc();
                tracing::warn!(%error, "nodes are not as the GPUConfig wants them; trying again");
            }
            Ok(problems) => {
                metrics.bad_templates.set(i64::try_from(problems.len()).unwrap_or(i64::MAX));
                for problem in problems.difference(&said) {
                    tracing::warn!(problem, "template not used; what runs from an earlier one stays");
                }
                said = problems;
            }
        }
        tokio::time::sleep(ROUND).await;
    }
}

/// One round over all nodes; returns what is wrong with the templates.
///
/// # Errors
/// What could not be read or written; the next round starts from what is there.
pub async fn round(client: &Client, namespace: &str, now: Timestamp) -> kube::Result<BTreeSet<String>> {
    let world = look::world(client, namespace).await?;
    let spec = world.config.as_ref().map(|config| &config.spec);
    let owned = daemonsets::owned(&world.sets);
    let mut places = BTreeMap::new();
    let mut plans = BTreeMap::new();
    for node in &world.nodes {
        let wanted = wanted(spec, node);
        let seen = |pods| Seen {
            node,
            wanted: wanted.as_ref(),
            shadow: world.shadows.get(&node.name).and_then(|shadow| shadow.status.as_ref()),
            owned: &owned,
            pods,
            runs: world.runs.get(&node.name).map_or(&[], Vec::as_slice),
            templates: &world.templates,
            namespace,
        };
        let mut plan = decide::plan(&seen(None));
        if plan.count_pods {
            let pods = look::pods_of(client, &node.name).await?;
            plan = decide::plan(&seen(Some(&pods)));
        }
        plans.insert(node.name.as_str(), plan);
        places.insert(node.name.clone(), wanted.filter(|wanted| !wanted.by_hand));
    }
    carry_out(client, namespace, &world, &plans, now).await;

    // A DaemonSet stays as long as a node has the label or is to get it: labels are written before it goes.
    let current = world.nodes.iter().map(NodeView::current).collect::<Vec<_>>();
    let labels = plans.values().map(|plan| &plan.labels).chain(&current);
    let mut sets = decide::sets(labels, &world.our_sets(namespace), &world.templates, namespace);
    sets.problems.extend(plans.values().filter_map(|plan| plan.problem.clone()));
    let mut problems = sets.problems.iter().map(ToString::to_string).collect::<BTreeSet<_>>();
    problems.extend(write::sets(client, namespace, &sets).await?);
    if let Some(config) = &world.config {
        let status = status(&world, &places, &plans, &problems);
        write::status(client, config, status, now).await?;
    }
    Ok(problems)
}

/// Carries out what was decided of each node. One that fails does not keep the others: the next round tries it again.
async fn carry_out(
    client: &Client,
    namespace: &str,
    world: &World,
    plans: &BTreeMap<&str, NodePlan>,
    now: Timestamp,
) {
    for node in &world.nodes {
        let Some(plan) = plans.get(node.name.as_str()).filter(|plan| !plan.count_pods) else { continue };
        let shadow = world.shadows.get(&node.name);
        if let Err(error) = carry_out_one(client, namespace, node, shadow, plan, now).await {
            tracing::warn!(node = node.name, %error, "node not as it should be; trying again");
        }
    }
}

async fn carry_out_one(
    client: &Client,
    namespace: &str,
    node: &NodeView,
    shadow: Option<&GPUShadow>,
    plan: &NodePlan,
    now: Timestamp,
) -> kube::Result<()> {
    let mine = node.current().into_iter().filter(|(key, _)| node.ours.contains(*key)).collect::<Labels>();
    let theirs = |(key, value): (&&str, &String)| node.is(key, value);
    if plan.forget {
        // Before the labels, which say that there is something to forget.
        write::forget(client, node).await?;
    }
    if mine != plan.labels && !(mine.is_empty() && plan.labels.iter().all(theirs)) {
        write::labels(client, node, &plan.labels).await?;
    }
    write::shadow(client, node, shadow.filter(|_| !plan.forget), plan, now).await?;
    for pod in &plan.remove {
        write::remove_pod(client, namespace, pod).await?;
    }
    match &plan.create {
        Some(pod) => write::create_pod(client, namespace, pod).await,
        None => Ok(()),
    }
}

/// What the GPUConfig says of it all. Its conditions' times are settled when it is written.
fn status(
    world: &World,
    places: &BTreeMap<String, Option<Wanted>>,
    plans: &BTreeMap<&str, NodePlan>,
    problems: &BTreeSet<String>,
) -> (GPUConfigStatus, Vec<Say>) {
    let ready =
        world.shadows.iter().filter(|(_, shadow)| look::is_ready(shadow)).map(|(name, _)| name.clone());
    let ready = ready.collect::<BTreeSet<_>>();
    let pools = places
        .iter()
        .map(|(name, wanted)| (name.clone(), wanted.as_ref().map(|wanted| wanted.place.clone())))
        .collect::<BTreeMap<_, _>>();
    let config = world.config.as_ref();
    let spec = config.map(|config| config.spec.clone()).unwrap_or_default();
    let status = pools::status(&spec, config.and_then(|config| config.metadata.generation), &pools, &ready);
    let agents =
        pools.iter().filter(|(_, place)| place.as_ref().is_some_and(|p| p.plugin != PluginMode::Legacy));
    let waiting = agents.filter(|(name, _)| !ready.contains(*name)).map(|(name, _)| name.as_str());
    let waiting = waiting.collect::<Vec<_>>();
    let of = |kind: &str, holds: bool| {
        let says = plans.iter().flat_map(|(node, plan)| plan.says.iter().map(move |say| (*node, say)));
        says.filter(move |(_, say)| say.kind == kind && say.holds == holds)
            .map(|(node, say)| format!("{node}: {}", say.message))
            .collect::<Vec<_>>()
    };
    let summary = |kind, reason, quiet: &str, found: Vec<String>| match found.is_empty() {
        true => Say::new(kind, false, "None", quiet),
        false => Say::new(kind, true, reason, some_of(&found)),
    };
    let says = vec![
        match waiting.is_empty() {
            true => Say::new("Ready", true, "AllReport", "every node that is to have an agent reports"),
            false => Say::new(
                "Ready",
                false,
                "Waiting",
                format!("{} nodes do not report: {}", waiting.len(), some_of(&waiting)),
            ),
        },
        summary("PluginConflict", "TwoPlugins", "no card is handed out by two", of("PluginConflict", true)),
        summary(
            "DriverMismatch",
            "Differs",
            "no driver differs from the wanted one",
            of("DriverMatches", false),
        ),
        match problems.is_empty() {
            true => Say::new("TemplatesValid", true, "Valid", "every template that is needed can be used"),
            false => {
                Say::new("TemplatesValid", false, "Invalid", some_of(&problems.iter().collect::<Vec<_>>()))
            }
        },
    ];
    (status, says)
}

/// The first of many: a condition is read by people.
fn some_of<T: AsRef<str>>(all: &[T]) -> String {
    const SHOWN: usize = 5;
    let shown = all.iter().take(SHOWN).map(AsRef::as_ref).collect::<Vec<_>>().join("; ");
    match all.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown}; and {more} more"),
    }
}
