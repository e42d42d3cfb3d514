//! The plan for one node, and for the DaemonSets of all.

use super::daemonsets::{External, Role};
use super::driver::{self, InstallInput, Run, Step, detected, step};
use super::switch::{OFF, RemainingHolders, Stage, brings_agent, pause_nvidia_plugin, stage};
use super::templates::{Agent, Component, TemplateError, Templates, daemon_set, installer};
use super::{Desired, Labels, NodePods, NodeView, OperatorCondition};
use crate::pools::{self, NodeSettings};
use gpu_migrate_model::crd::{
    Driver, DriverInstall, Exporter, GPUConfigSpec, GPUShadowStatus, HolderStatus, InstallPhase, PluginMode,
};
use gpu_migrate_model::names;
use serde_json::Value;
use std::collections::BTreeMap;

/// The desired state of a node: by the GPUConfig, else by a label that a user has set.
#[must_use]
pub fn desired(spec: Option<&GPUConfigSpec>, node: &NodeView) -> Option<Desired> {
    if let Some(settings) = spec.and_then(|spec| pools::settings(spec, &node.name, &node.labels)) {
        return Some(Desired { settings, by_label: false });
    }
    let label = node.labels.get(names::PLUGIN).filter(|_| !node.own_labels.contains(names::PLUGIN))?;
    let plugin = match label.as_str() {
        "Bridged" => PluginMode::Bridged,
        "Shared" => PluginMode::Shared,
        _ => PluginMode::Legacy,
    };
    Some(Desired { settings: NodeSettings { plugin, ..NodeSettings::default() }, by_label: true })
}

/// What a node's plan is decided from.
#[derive(Clone, Copy, Debug)]
pub struct NodeInput<'a> {
    pub node: &'a NodeView,
    /// Its desired state; `None` for a node that is not managed.
    pub desired: Option<&'a Desired>,
    pub shadow: Option<&'a GPUShadowStatus>,
    pub external: &'a [External<'a>],
    /// Counts of its pods, where they were listed.
    pub pods: Option<&'a NodePods>,
    /// Pods of the installer on it.
    pub runs: &'a [Run],
    pub templates: &'a Templates,
    pub namespace: &'a str,
    /// Nodes of its pool, without this one, on which a driver is being installed.
    pub installing: u32,
}

/// Whether a driver is being installed on a node, or has failed there: it has no plugins.
#[must_use]
pub fn is_installing(node: &NodeView, runs: &[Run]) -> bool {
    node.own_cordon || runs.iter().any(|run| run.phase != InstallPhase::Installed)
}

/// Changes to make for a node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodePlan {
    pub labels: Labels,
    /// Take no new pods: the driver is being installed.
    pub cordon: bool,
    pub conditions: Vec<OperatorCondition>,
    pub install: Option<DriverInstall>,
    /// A pod of the installer to create.
    pub create: Option<Value>,
    /// Pods of the installer to delete.
    pub remove: Vec<String>,
    pub problem: Option<TemplateError>,
    /// Delete its GPUShadow: the agent was removed, the reported cards are stale.
    pub delete_shadow: bool,
    /// The node's pods must be listed and the plan made again; nothing else applies.
    pub count_pods: bool,
}

#[must_use]
pub fn plan(input: &NodeInput<'_>) -> NodePlan {
    let mut plan = NodePlan { labels: input.node.current(), ..NodePlan::default() };
    plan.labels.retain(|key, _| input.node.own_labels.contains(*key));
    let mut target = Labels::new();
    if let Some(desired) = input.desired {
        target = final_labels(input, desired, &mut plan.conditions);
        if let Some(driver) = &desired.settings.driver
            && !driver_is_ready(input, driver, &mut plan)
        {
            return plan;
        }
    } else if input.node.own_labels.is_empty() {
        return plan;
    }
    let remaining = RemainingHolders {
        shares: holders(input.shadow, HolderStatus::is_share),
        deviating: holders(input.shadow, HolderStatus::deviates),
    };
    match stage(input.node, &target, remaining, input.pods) {
        Stage::NeedsPodCount => plan.count_pods = true,
        Stage::Converged(labels) => {
            let agent_removed = input.node.is(names::NO_NEW_SHARES, "true") && !brings_agent(&labels);
            plan.delete_shadow = agent_removed && input.shadow.is_some_and(|shadow| !shadow.cards.is_empty());
            plan.labels = labels;
        }
        Stage::Waiting(labels, why) => {
            plan.labels = labels;
            plan.conditions.push(OperatorCondition::new("ModeConverged", false, "Waiting", why));
        }
    }
    if input.desired.is_some_and(|desired| desired.by_label) {
        // Set by a user: applying it would make the operator its field owner.
        plan.labels.remove(names::PLUGIN);
    }
    plan
}

/// The labels of a converged node, and the conditions about external components.
fn final_labels(input: &NodeInput<'_>, desired: &Desired, conditions: &mut Vec<OperatorCondition>) -> Labels {
    let settings = &desired.settings;
    let mode = format!("{:?}", settings.plugin);
    let mut labels = Labels::from([(names::PLUGIN, mode.clone())]);
    if let Some(pool) = &settings.pool {
        labels.insert(names::POOL, pool.clone());
    }
    // Selectors of external DaemonSets may depend on the operator's label: judge by what the node will have.
    let mut as_labelled = input.node.labels.clone();
    as_labelled.insert(names::PLUGIN.into(), mode);
    let serving =
        input.external.iter().filter(|set| set.covers(input.node, &as_labelled)).collect::<Vec<_>>();
    let served = |role: fn(&Role) -> bool| serving.iter().find(|set| set.roles.iter().any(role));
    let agent = served(|role| *role == Role::NodeAgent);
    let nvidia = served(|role| matches!(role, Role::NvidiaPlugin { .. }));
    let dcgm = served(|role| *role == Role::DcgmExporter);
    let has_agent = settings.plugin != PluginMode::Legacy;

    // Two node agents would keep two ledgers.
    let unknown_agent =
        agent.is_none() && !input.node.labels.contains_key(names::RUN_AGENT) && input.node.has_shares;
    if has_agent && agent.is_none() && !unknown_agent {
        labels.insert(names::RUN_AGENT, Agent::from(settings.isolation).flag_value().into());
    }
    let ours = input.node.labels.contains_key(names::RUN_NVIDIA);
    let unknown = nvidia.is_none() && !ours && input.node.has_whole_cards;
    let wants_nvidia = !desired.by_label && settings.plugin != PluginMode::Shared;
    // The GPU operator's DaemonSet comes to a new node once that has its labels.
    let may_come = |set: &&External<'_>| {
        set.roles.iter().any(|role| matches!(role, Role::NvidiaPlugin { .. }))
            && set.lacks_labels(&as_labelled)
    };
    let awaited =
        input.external.iter().find(may_come).filter(|_| nvidia.is_none() && !ours && input.node.is_new);
    let awaited = awaited.filter(|_| wants_nvidia);
    if wants_nvidia && nvidia.is_none() && !unknown && awaited.is_none() {
        labels.insert(names::RUN_NVIDIA, format!("{:?}", settings.plugin));
    } else if ours && nvidia.is_none() {
        labels.insert(names::RUN_NVIDIA, OFF.into());
    }
    if settings.exporter == Exporter::Dcgm && dcgm.is_none() {
        labels.insert(names::RUN_DCGM, "true".into());
    }

    let mut external =
        [agent.filter(|_| has_agent), nvidia, dcgm.filter(|_| settings.exporter == Exporter::Dcgm)]
            .into_iter()
            .flatten()
            .map(|set| format!("DaemonSet {}", set.name))
            .collect::<Vec<_>>();
    external.dedup();
    external.extend(
        awaited.map(|set| format!("DaemonSet {}, which may come once the new node is labelled", set.name)),
    );
    if unknown_agent && has_agent {
        external.push("a plugin outside any DaemonSet that registers shares".into());
    }
    if unknown && wants_nvidia {
        external.push("a plugin outside any DaemonSet that registers nvidia.com/gpu".into());
    }
    if !external.is_empty() {
        let message = format!("not managed by the operator: {}", external.join(", "));
        conditions.push(OperatorCondition::new("ExternalComponents", true, "NotManaged", message));
    }
    if let Some(conflict) = conflict(settings.plugin, &serving, input.shadow) {
        labels.insert(names::NO_NEW_SHARES, "true".into());
        conditions.push(OperatorCondition::new("PluginConflict", true, "TwoPlugins", conflict));
    }
    labels
}

/// Two plugins that allocate the same cards independently.
fn conflict(mode: PluginMode, serving: &[&External<'_>], shadow: Option<&GPUShadowStatus>) -> Option<String> {
    if mode == PluginMode::Legacy {
        return None;
    }
    let bridged = shadow.is_some_and(GPUShadowStatus::has_nvidia_plugin);
    serving.iter().find_map(|set| {
        let name = &set.name;
        set.roles.iter().find_map(|role| match role {
            Role::OtherSharing => Some(format!("DaemonSet {name} allocates shares of the same cards; keep it off this node")),
            Role::NvidiaPlugin { behind_bridge: false } if mode == PluginMode::Shared || !bridged => Some(format!(
                "DaemonSet {name} is at the kubelet and not behind the node agent (deploy/nvidia/README.md); no new share is placed until then"
            )),
            _ => None,
        })
    })
}

/// Runs the installer's steps; returns whether the plugins may run.
fn driver_is_ready(input: &NodeInput<'_>, driver: &Driver, plan: &mut NodePlan) -> bool {
    let found = detected(input.node, input.shadow);
    plan.conditions.push(driver::matches_condition(driver, &found));
    let Some(key) = &driver.installer else { return true };
    let (pod, revision) =
        match installer(key, input.templates, &driver.version, &input.node.name, input.namespace) {
            Ok(made) => made,
            Err(problem) => {
                // Without a valid template nothing is started and nothing is removed.
                let condition =
                    OperatorCondition::new("DriverInstalled", false, "BadTemplate", problem.to_string());
                plan.conditions.push(condition);
                plan.problem = Some(problem);
                return driver::matches(driver, &found) == Some(true) || input.node.has_agent();
            }
        };
    let recorded = input.shadow.and_then(|shadow| shadow.driver_install.as_ref());
    let served = || {
        let run = [names::PLUGIN, names::RUN_AGENT, names::RUN_NVIDIA, names::RUN_DCGM];
        run.iter().any(|key| input.node.labels.get(*key).is_some_and(|value| value != OFF))
            || input.pods.is_some_and(|pods| pods.agents + pods.direct_plugins > 0)
    };
    let install = |users, served| InstallInput {
        driver,
        matches: driver::matches(driver, &found),
        revision: &revision,
        recorded,
        run: input.runs.iter().find(|run| run.revision == revision),
        users,
        served,
        may_begin: is_installing(input.node, input.runs) || input.installing < driver.max_unavailable.max(1),
    };
    let users = input.pods.map_or(0, |pods| {
        let whole = holders(input.shadow, |holder| !holder.is_share());
        let shares = holders(input.shadow, HolderStatus::is_share);
        pods.legacy.max(whole) + pods.shared.max(shares) + pods.unrequested
    });
    let (next, install) = step(&install(users, served()));
    if matches!(next, Step::Install | Step::Withdraw | Step::InUse | Step::Queue) && input.pods.is_none() {
        plan.count_pods = true;
        return false;
    }
    plan.conditions.push(driver::installed_condition(&install));
    // A pod whose result is recorded is not needed any more, nor one of another version or template.
    let written =
        recorded.is_some_and(|one| one.revision == revision && one.phase == InstallPhase::Installed);
    let is_obsolete =
        |run: &&Run| run.revision != revision || (written && run.phase == InstallPhase::Installed);
    plan.remove = input.runs.iter().filter(is_obsolete).map(|run| run.pod.clone()).collect();
    plan.install = Some(install);
    match next {
        Step::Satisfied => return true,
        // A pod that came before the cordon is waited for behind it.
        Step::InUse | Step::Queue => plan.cordon = input.node.own_cordon,
        Step::Withdraw | Step::Wait => withdraw(plan),
        Step::Install => {
            withdraw(plan);
            plan.create = Some(pod);
        }
    }
    false
}

/// Removes everything from the node that uses the driver, and lets nothing new come.
fn withdraw(plan: &mut NodePlan) {
    plan.cordon = true;
    plan.labels.retain(|key, _| [names::POOL, names::RUN_NVIDIA].contains(key));
    pause_nvidia_plugin(&mut plan.labels);
}

/// Number of such holders that the node agent reports.
fn holders(shadow: Option<&GPUShadowStatus>, wanted: fn(&HolderStatus) -> bool) -> u32 {
    let holders = shadow.into_iter().flat_map(|shadow| &shadow.cards).flat_map(|card| &card.holders);
    u32::try_from(holders.filter(|holder| wanted(holder)).count()).unwrap_or(u32::MAX)
}

/// DaemonSets to apply and to delete.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sets {
    pub apply: Vec<(Component, Value)>,
    /// Names of those that no node needs, or whose template has another name now.
    pub delete: Vec<String>,
    /// Invalid templates: what runs from them stays.
    pub problems: Vec<TemplateError>,
}

/// The DaemonSets needed by the current and next labels of all nodes. `existing` are the operator's own, by name, with their
/// component.
#[must_use]
pub fn sets<'a>(
    labels: impl Iterator<Item = &'a Labels> + Clone,
    existing: &BTreeMap<String, String>,
    templates: &Templates,
    namespace: &str,
) -> Sets {
    let mut sets = Sets::default();
    for component in Component::ALL {
        let (key, value) = component.label();
        let needed = labels.clone().any(|labels| labels.get(key).is_some_and(|found| found == value));
        let current = existing.iter().filter(|(_, of)| *of == component.name()).map(|(name, _)| name);
        if !needed {
            sets.delete.extend(current.cloned());
            continue;
        }
        match daemon_set(component, templates, namespace) {
            Ok(set) => {
                sets.delete.extend(current.filter(|name| set["metadata"]["name"] != ***name).cloned());
                sets.apply.push((component, set));
            }
            Err(problem) => sets.problems.push(problem),
        }
    }
    sets
}
