//! The node's own Node: an annotation that takes cards out of new allocation, and what the kubelet has reported as allocatable.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::StreamExt;
use gpu_migrate_model::ledger::Ledger;
use gpu_migrate_model::names::CORDONED_CARDS;
use gpu_migrate_model::quantity::Quantity;
use gpu_migrate_model::units::CardIndex;
use gpu_migrate_runtime::watch::{Update, watch};
use k8s_openapi::api::core::v1::Node as ApiNode;
use kube::runtime::watcher::{Config, Event};
use kube::{Api, Client, ResourceExt};
use tokio_util::sync::CancellationToken;

use crate::decide::NodeState;
use crate::node::{Node, Paths};

/// The cards that an annotation's value names, by index or UUID; what is no card is returned beside.
#[must_use]
pub fn cordoned(value: &str, ledger: &Ledger) -> (BTreeSet<CardIndex>, Vec<String>) {
    let mut cards = BTreeSet::new();
    let mut unknown = Vec::new();
    for word in value.split(',').map(str::trim).filter(|word| !word.is_empty()) {
        let by_index = word.parse().ok().map(CardIndex).filter(|card| ledger.card(*card).is_some());
        match by_index.or_else(|| ledger.find(word)) {
            Some(card) => {
                cards.insert(card);
            }
            None => unknown.push(word.to_owned()),
        }
    }
    (cards, unknown)
}

/// Follows this node's Node until `stop`.
pub async fn follow(client: Client, node_name: String, node: Arc<Node>, stop: CancellationToken) {
    let api: Api<ApiNode> = Api::all(client);
    let config = Config::default().fields(&format!("metadata.name={node_name}"));
    let mut updates = watch(api, config);
    let mut last = None;
    while let Some(Some(update)) = stop.run_until_cancelled(updates.next()).await {
        if let Update::Event(Event::InitApply(object) | Event::Apply(object)) = update {
            let amounts = allocatable(&object);
            node.with(|state, now| state.observe_allocatable(&amounts, now));
            let value = annotation(&object);
            if last.as_ref() != Some(&value) {
                node.with(|state, _| cordon(state, &value));
                // For the time before the API server answers the next process.
                if let Err(error) = node.write_file(node.paths.cordon(), value.clone().into_bytes()).await {
                    tracing::warn!(%error, "the cordoned cards were not written down");
                }
                last = Some(value);
            }
        }
    }
}

/// Cordons what was cordoned when the Node was last seen.
pub fn restore(paths: &Paths, state: &mut NodeState) {
    if let Ok(value) = std::fs::read_to_string(paths.cordon()) {
        cordon(state, &value);
    }
}

fn cordon(state: &mut NodeState, value: &str) {
    let (cards, unknown) = cordoned(value, state.ledger());
    if !unknown.is_empty() {
        tracing::warn!(annotation = CORDONED_CARDS, ?unknown, "expected card indexes or UUIDs of this node");
    }
    state.set_cordoned(&cards);
}

fn annotation(object: &ApiNode) -> String {
    object.annotations().get(CORDONED_CARDS).cloned().unwrap_or_default()
}

fn allocatable(object: &ApiNode) -> BTreeMap<String, u64> {
    let all = object.status.iter().filter_map(|status| status.allocatable.as_ref()).flatten();
    all.filter_map(|(name, amount)| Some((name.clone(), amount.0.parse::<Quantity>().ok()?.whole()?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpu_migrate_model::card::Card;

    #[test]
    fn cards_are_named_by_index_or_uuid() {
        let card = |minor: u32| Card { uuid: format!("GPU-{minor}"), minor, ..Card::default() };
        let ledger = Ledger::new((0..4).map(card).collect());
        let (cards, unknown) = cordoned("1, GPU-3,7,GPU-9,,", &ledger);
        assert_eq!(cards, BTreeSet::from([CardIndex(1), CardIndex(3)]));
        assert_eq!(unknown, ["7", "GPU-9"]);
        assert!(cordoned("", &ledger).0.is_empty());
    }
}
