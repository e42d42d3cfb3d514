//! `gpu-migrate verify`: I1 and I2 over the whole cluster, from two independent sources. Pure.
//!
//! One source is each node agent's ledger, from the kubelet. The other are the annotations of the pods: the extender's choice and
//! the cards that legacy containers got. Each is checked by itself; then they are compared.

use super::{Answer, Snapshot};
use crate::exit::Exit;
use crate::style::{ADDED, REMOVED, WARNING, counted, paint};
use gpu_migrate_model::annotation::{card_key, read_cards};
use gpu_migrate_model::ask::{ContainerAsk, PodAsk};
use gpu_migrate_model::crd::GPUShadow;
use gpu_migrate_model::ledger::{Hold, HolderId, Ledger};
use gpu_migrate_model::lifecycle::is_terminal;
use gpu_migrate_model::names::{Dialect, LEGACY_CARDS_PREFIX};
use gpu_migrate_model::units::{Blocks, CardIndex, Cores};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// Breaches of I1 and I2.
    pub violations: Vec<String>,
    /// Differences between the sources; transient while pods start and stop.
    pub differences: Vec<String>,
    /// What could not be checked, and why.
    pub unknown: Vec<String>,
    pub cards: usize,
    pub holders: usize,
}

#[must_use]
pub fn findings(snapshot: &Snapshot) -> Findings {
    let unknown = snapshot.unreadable.clone();
    let mut found = Findings { unknown, ..Findings::default() };
    let mut by_node = BTreeMap::<&str, Vec<&Pod>>::new();
    for pod in snapshot.pods.iter().filter(|pod| !is_terminal(pod)) {
        if let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) {
            by_node.entry(node).or_default().push(pod);
        }
    }
    for shadow in &snapshot.shadows {
        let node = shadow.name_any();
        check_node(shadow, by_node.get(node.as_str()).map_or(&[], Vec::as_slice), &mut found);
    }
    found
}

fn check_node(shadow: &GPUShadow, pods: &[&Pod], found: &mut Findings) {
    let node = shadow.name_any();
    let Some(status) = &shadow.status else {
        found.unknown.push(format!("{node}: the node agent has not reported yet"));
        return;
    };
    let reported = status.ledger();
    found.cards += reported.len();
    found.holders += reported.holders().len();
    breaches(&format!("{node}, by its node agent"), &reported, found);
    let written = from_pods(&reported, pods, found);
    breaches(&format!("{node}, by the annotations of its pods"), &written, found);
    compare(&node, &reported, &written, pods, found);
}

fn breaches(what: &str, ledger: &Ledger, found: &mut Findings) {
    if let Err(violations) = ledger.check() {
        found.violations.extend(violations.iter().map(|violation| format!("{what}: {violation}")));
    }
}

/// The ledger by the annotations of the pods. Whole-card pods of namespaces that have not opted in have none: theirs is what the node
/// agent has `reported`.
fn from_pods(reported: &Ledger, pods: &[&Pod], found: &mut Findings) -> Ledger {
    let mut ledger =
        Ledger::new(reported.indexes().filter_map(|card| reported.card(card).cloned()).collect());
    for pod in pods {
        let shown = format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
        let ask = match PodAsk::of(pod, &Dialect::default()) {
            Ok(ask) => ask,
            Err(error) => {
                found.unknown.push(format!("{shown}: {error}"));
                continue;
            }
        };
        for container in ask.asking() {
            match cards_of(pod, container) {
                Ok(Some(cards)) => record(&mut ledger, pod, container, &cards, found),
                Ok(None) if !container.demand.is_shared() => {
                    let holder = HolderId::new(pod.uid().unwrap_or_default(), &container.name);
                    let held: Vec<_> = reported.held_by(&holder).collect();
                    if held.is_empty() {
                        let what = "neither an annotation nor the node agent names its card";
                        found.unknown.push(format!("{shown}, {}: {what}", container.name));
                    }
                    for (card, hold) in held {
                        ledger.record(&holder, card, hold.clone());
                    }
                }
                Ok(None) => {
                    found.unknown.push(format!("{shown}, {}: no annotation names its card", container.name));
                }
                Err(error) => found.unknown.push(format!("{shown}: {error}")),
            }
        }
    }
    ledger
}

fn cards_of(pod: &Pod, container: &ContainerAsk) -> Result<Option<Vec<CardIndex>>, String> {
    let key = if container.demand.is_shared() {
        card_key(container)
    } else {
        format!("{LEGACY_CARDS_PREFIX}{}", container.name)
    };
    match pod.annotations().get(&key) {
        None => Ok(None),
        Some(value) => read_cards(&key, value).map(Some).map_err(|error| error.to_string()),
    }
}

fn record(
    ledger: &mut Ledger,
    pod: &Pod,
    container: &ContainerAsk,
    cards: &[CardIndex],
    found: &mut Findings,
) {
    let holder = HolderId::new(pod.uid().unwrap_or_default(), &container.name);
    let count = u32::try_from(cards.len().max(1)).unwrap_or(1);
    for card in cards {
        if ledger.card(*card).is_none() {
            let shown = format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
            found.violations.push(format!("{shown}, {}: {card} is not on its node", container.name));
            continue;
        }
        let hold = if container.demand.is_shared() {
            Hold::Share {
                cores: Cores(container.demand.cores.0 / count),
                blocks: Blocks(container.demand.blocks.0 / count),
                phase: container.kind.phase(),
            }
        } else {
            Hold::whole()
        };
        ledger.record(&holder, *card, hold);
    }
}

/// Holders in one source and not in the other.
fn compare(node: &str, reported: &Ledger, written: &Ledger, pods: &[&Pod], found: &mut Findings) {
    let places = |ledger: &Ledger| {
        ledger
            .indexes()
            .flat_map(|card| {
                ledger.holds(card).map(move |(holder, _)| (holder.clone(), card)).collect::<Vec<_>>()
            })
            .collect::<BTreeSet<(HolderId, CardIndex)>>()
    };
    let name = |holder: &HolderId| {
        let pod = pods.iter().find(|pod| pod.uid().as_deref() == Some(&holder.pod_uid));
        pod.map_or_else(
            || format!("a deleted pod (uid {})", holder.pod_uid),
            |pod| format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any()),
        )
    };
    let (reported, written) = (places(reported), places(written));
    for (holder, card) in reported.difference(&written) {
        found.differences.push(format!(
            "{node}: {}, {} is on {card} by the node agent, not by its annotations",
            name(holder),
            holder.container
        ));
    }
    for (holder, card) in written.difference(&reported) {
        found.differences.push(format!(
            "{node}: {}, {} is on {card} by its annotations, not by the node agent",
            name(holder),
            holder.container
        ));
    }
}

pub(crate) fn verify(snapshot: &Snapshot) -> Answer {
    let found = findings(snapshot);
    let mut text = String::new();
    for (style, title, lines) in [
        (REMOVED, "violation", &found.violations),
        (WARNING, "difference", &found.differences),
        (WARNING, "unknown", &found.unknown),
    ] {
        for line in lines {
            text += &format!("{} {line}\n", paint(style, &format!("{title}:")));
        }
    }
    let (nodes, cards, holders) = (snapshot.shadows.len(), found.cards, found.holders);
    let (style, verdict) = if cards == 0 {
        (WARNING, "nothing was checked: no node agent reports a card (kubectl get gpushadows)")
    } else if found.violations.is_empty() {
        (ADDED, "no card has two kinds of holders (I1), none is overcommitted (I2)")
    } else {
        (REMOVED, "the invariants do not hold")
    };
    let checked =
        [(nodes, "node"), (cards, "card"), (holders, "holder")].map(|(count, noun)| counted(count, noun));
    text += &format!("{}: checked {}\n", paint(style, verdict), checked.join(", "));
    let value = json!({
        "holds": found.violations.is_empty(), "violations": found.violations, "differences": found.differences,
        "unknown": found.unknown, "nodes": nodes, "cards": cards, "holders": holders,
    });
    let exit = if cards > 0 && found.violations.is_empty() { Exit::Done } else { Exit::No };
    Answer { text, value, exit }
}
