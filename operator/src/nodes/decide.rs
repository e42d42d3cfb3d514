//! What follows for one node, and for all of them.

use super::daemonsets::{Owned, Role};
use super::driver::{self, Look, Run, Step, detected, step};
use super::switch::{Held, OFF, Stage, brings_agent, stage, take_off};
use super::templates::{Agent, Component, TemplateError, Templates, daemon_set, installer};
use super::{Labels, NodePods, NodeView, Say, Wanted};
use crate::pools::{self, Place};
use gpu_migrate_model::crd::{
    Driver, DriverInstall, Exporter, GPUConfigSpec, GPUShadowStatus, HolderStatus, InstallPhase, PluginMode,
};
use gpu_migrate_model::names;
use serde_json::Value;
use std::collections::BTreeMap;

/// What a node is to be: as the GPUConfig says, else as an owner has labelled it.
#[must_use]
pub fn wanted(spec: Option<&GPUConfigSpec>, node: &NodeView) -> Option<Wanted> {
    if let Some(place) = spec.and_then(|spec| pools::place(spec, &node.name, &node.labels)) {
        return Some(Wanted { place, by_hand: false });
    }
    let label = node.labels.get(names::PLUGIN).filter(|_| !node.ours.contains(names::PLUGIN))?;
    let plugin = match label.as_str() {
        "Bridged" => PluginMode::Bridged,
        "Shared" => PluginMode::Shared,
        _ => PluginMode::Legacy,
    };
    Some(Wanted { place: Place { plugin, ..Place::default() }, by_hand: true })
}

/// All that a node's plan depends on.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    /// The node.
    pub node: &'a NodeView,
    /// What it is to be; `None` for a node that is none of ours.
    pub wanted: Option<&'a Wanted>,
    /// Its GPUShadow.
    pub shadow: Option<&'a GPUShadowStatus>,
    /// DaemonSets that others run.
    pub owned: &'a [Owned<'a>],
    /// Its pods, where they were counted.
    pub pods: Option<&'a NodePods>,
    /// Pods of the installer on it.
    pub runs: &'a [Run],
    /// The owner's templates.
    pub templates: &'a Templates,
    /// Where the operator works.
    pub namespace: &'a str,
}

/// What is to be done with a node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodePlan {
    /// All the labels that are the operator's.
    pub labels: Labels,
    /// Conditions of its GPUShadow.
    pub says: Vec<Say>,
    /// How far the driver is.
    pub install: Option<DriverInstall>,
    /// A pod of the installer to create.
    pub create: Option<Value>,
    /// Pods of the installer that have served.
    pub remove: Vec<String>,
    /// A template that cannot be used.
    pub problem: Option<TemplateError>,
    /// Its GPUShadow is of an agent that has left: what it says of cards is no longer true.
    pub forget: bool,
    /// The pods of the node must be counted and the plan made again; until then nothing is to be done.
    pub count_pods: bool,
}

/// The plan of one node.
#[must_use]
pub fn plan(seen: &Seen<'_>) -> NodePlan {
    let mut plan = NodePlan { labels: seen.node.current(), ..NodePlan::default() };
    plan.labels.retain(|key, _| seen.node.ours.contains(*key));
    let mut target = Labels::new();
    if let Some(wanted) = seen.wanted {
        target = final_labels(seen, wanted, &mut plan.says);
        if let Some(driver) = &wanted.place.driver
            && !driver_is_good(seen, driver, &mut plan)
        {
            return plan;
        }
    } else if seen.node.ours.is_empty() {
        return plan;
    }
    let held = Held {
        shares: holders(seen.shadow, HolderStatus::is_share),
        deviating: holders(seen.shadow, HolderStatus::deviates),
    };
    match stage(seen.node, &target, held, seen.pods) {
        Stage::Count => plan.count_pods = true,
        Stage::Settled(labels) => {
            let came_away = seen.node.is(names::NO_NEW_SHARES, "true") && !brings_agent(&labels);
            plan.forget = came_away && seen.shadow.is_some_and(|shadow| !shadow.cards.is_empty());
            plan.labels = labels;
        }
        Stage::Waiting(labels, why) => {
            plan.labels = labels;
            plan.says.push(Say::new("ModeSettled", false, "Waiting", why));
        }
    }
    if seen.wanted.is_some_and(|wanted| wanted.by_hand) {
        // It is the owner's: who applies it owns it, and could not let it go.
        plan.labels.remove(names::PLUGIN);
    }
    plan
}

/// The labels of a node that is as it should be, and what is to be said of those who serve it already.
fn final_labels(seen: &Seen<'_>, wanted: &Wanted, says: &mut Vec<Say>) -> Labels {
    let place = &wanted.place;
    let mode = format!("{:?}", place.plugin);
    let mut labels = Labels::from([(names::PLUGIN, mode.clone())]);
    if let Some(pool) = &place.pool {
        labels.insert(names::POOL, pool.clone());
    }
    // Others' selectors may depend on our own label: judge by what the node will have.
    let mut as_labelled = seen.node.labels.clone();
    as_labelled.insert(names::PLUGIN.into(), mode);
    let there = seen.owned.iter().filter(|owned| owned.covers(seen.node, &as_labelled)).collect::<Vec<_>>();
    let served = |role: fn(&Role) -> bool| there.iter().find(|owned| owned.roles.iter().any(role));
    let agent = served(|role| *role == Role::NodeAgent);
    let nvidia = served(|role| matches!(role, Role::NvidiaPlugin { .. }));
    let dcgm = served(|role| *role == Role::DcgmExporter);
    let has_agent = place.plugin != PluginMode::Legacy;

    // Two agents on a node would keep two ledgers.
    let unknown_agent =
        agent.is_none() && !seen.node.labels.contains_key(names::RUN_AGENT) && seen.node.has_shares;
    if has_agent && agent.is_none() && !unknown_agent {
        labels.insert(names::RUN_AGENT, Agent::from(place.isolation).word().into());
    }
    let ours = seen.node.labels.contains_key(names::RUN_NVIDIA);
    let unknown = nvidia.is_none() && !ours && seen.node.has_whole_cards;
    let wants_nvidia = !wanted.by_hand && place.plugin != PluginMode::Shared;
    if wants_nvidia && nvidia.is_none() && !unknown {
        labels.insert(names::RUN_NVIDIA, format!("{:?}", place.plugin));
    } else if ours && nvidia.is_none() {
        labels.insert(names::RUN_NVIDIA, OFF.into());
    }
    if place.exporter == Exporter::Dcgm && dcgm.is_none() {
        labels.insert(names::RUN_DCGM, "true".into());
    }

    let mut respected =
        [agent.filter(|_| has_agent), nvidia, dcgm.filter(|_| place.exporter == Exporter::Dcgm)]
            .into_iter()
            .flatten()
            .map(|owned| format!("DaemonSet {}", owned.name))
            .collect::<Vec<_>>();
    respected.dedup();
    if unknown_agent && has_agent {
        respected.push("something that is no DaemonSet and registers shares".into());
    }
    if unknown && wants_nvidia {
        respected.push("something that is no DaemonSet and registers nvidia.com/gpu".into());
    }
    if !respected.is_empty() {
        let message = format!("left as it is: {}", respected.join(", "));
        says.push(Say::new("OwnersComponents", true, "Respected", message));
    }
    if let Some(conflict) = conflict(place.plugin, &there, seen.shadow) {
        labels.insert(names::NO_NEW_SHARES, "true".into());
        says.push(Say::new("PluginConflict", true, "TwoPlugins", conflict));
    }
    labels
}

/// Two who hand out the same cards and know nothing of each other.
fn conflict(mode: PluginMode, there: &[&Owned<'_>], shadow: Option<&GPUShadowStatus>) -> Option<String> {
    if mode == PluginMode::Legacy {
        return None;
    }
    let bridged = shadow.into_iter().flat_map(|shadow| &shadow.conditions);
    let bridged = bridged.into_iter().any(|c| c.type_ == "LegacyBridged" && c.status == "True");
    there.iter().find_map(|owned| {
        let name = &owned.name;
        owned.roles.iter().find_map(|role| match role {
            Role::OtherSharing => Some(format!("DaemonSet {name} hands out parts of the same cards; keep it off this node")),
            Role::NvidiaPlugin { behind_bridge: false } if mode == PluginMode::Shared || !bridged => Some(format!(
                "DaemonSet {name} registers with the kubelet itself: set KUBELET_SOCKET (deploy/nvidia/README.md); no share is added until then"
            )),
            _ => None,
        })
    })
}

/// Runs the installer's steps; whether the node may have its plugins.
fn driver_is_good(seen: &Seen<'_>, driver: &Driver, plan: &mut NodePlan) -> bool {
    let found = detected(seen.node, seen.shadow);
    plan.says.push(driver::say(driver, &found));
    let Some(key) = &driver.installer else { return true };
    let (pod, revision) =
        match installer(key, seen.templates, &driver.version, &seen.node.name, seen.namespace) {
            Ok(made) => made,
            Err(problem) => {
                // Without a usable template nothing begins, and nothing that runs is taken away.
                let say = Say::new("DriverInstalled", false, "BadTemplate", problem.to_string());
                plan.says.push(say);
                plan.problem = Some(problem);
                return driver::matches(driver, &found) == Some(true) || seen.node.has_agent();
            }
        };
    let recorded = seen.shadow.and_then(|shadow| shadow.driver_install.as_ref());
    let served = || {
        let run = [names::PLUGIN, names::RUN_AGENT, names::RUN_NVIDIA, names::RUN_DCGM];
        run.iter().any(|key| seen.node.labels.get(*key).is_some_and(|value| value != OFF))
            || seen.pods.is_some_and(|pods| pods.agents + pods.direct_plugins > 0)
    };
    let look = |users, served| Look {
        driver,
        matches: driver::matches(driver, &found),
        revision: &revision,
        recorded,
        run: seen.runs.iter().find(|run| run.revision == revision),
        users,
        served,
    };
    let users = seen.pods.map_or(0, |pods| {
        let whole = holders(seen.shadow, |holder| !holder.is_share());
        pods.legacy.max(whole) + pods.shared.max(holders(seen.shadow, HolderStatus::is_share))
    });
    let (next, install) = step(&look(users, served()));
    if matches!(next, Step::Begin | Step::Withdraw | Step::InUse) && seen.pods.is_none() {
        plan.count_pods = true;
        return false;
    }
    plan.says.push(driver::say_install(&install));
    // What has been written down is not needed any more, nor is what belonged to another version or template.
    let written =
        recorded.is_some_and(|one| one.revision == revision && one.phase == InstallPhase::Installed);
    let served_its_turn =
        |run: &&Run| run.revision != revision || (written && run.phase == InstallPhase::Installed);
    plan.remove = seen.runs.iter().filter(served_its_turn).map(|run| run.pod.clone()).collect();
    plan.install = Some(install);
    match next {
        Step::Good => return true,
        Step::InUse => {}
        Step::Withdraw | Step::Hold => withdraw(&mut plan.labels),
        Step::Begin => {
            withdraw(&mut plan.labels);
            plan.create = Some(pod);
        }
    }
    false
}

/// Takes everything off the node that uses the driver.
fn withdraw(labels: &mut Labels) {
    labels.retain(|key, _| [names::POOL, names::RUN_NVIDIA].contains(key));
    take_off(labels);
}

/// Holders of this kind, as the node agent reports them.
fn holders(shadow: Option<&GPUShadowStatus>, wanted: fn(&HolderStatus) -> bool) -> u32 {
    let holders = shadow.into_iter().flat_map(|shadow| &shadow.cards).flat_map(|card| &card.holders);
    u32::try_from(holders.filter(|holder| wanted(holder)).count()).unwrap_or(u32::MAX)
}

/// DaemonSets that are to be there and those that are not.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sets {
    /// To apply: a node asks for them.
    pub apply: Vec<(Component, Value)>,
    /// Names to delete: the last node that asked has gone, or the template has another name now.
    pub delete: Vec<String>,
    /// Templates that cannot be used: what runs from them stays.
    pub problems: Vec<TemplateError>,
}

/// What follows for the DaemonSets from the labels that all nodes have now and get next. `existing` are the operator's own,
/// by name, with their component.
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
        let there = existing.iter().filter(|(_, of)| *of == component.name()).map(|(name, _)| name);
        if !needed {
            sets.delete.extend(there.cloned());
            continue;
        }
        match daemon_set(component, templates, namespace) {
            Ok(set) => {
                sets.delete.extend(there.filter(|name| set["metadata"]["name"] != ***name).cloned());
                sets.apply.push((component, set));
            }
            Err(problem) => sets.problems.push(problem),
        }
    }
    sets
}
