//! Commands that change one object: `cordon-card` and `rollout`.

use super::report;
use crate::args::{CordonArgs, RolloutAction, RolloutArgs};
use crate::exit::Exit;
use anyhow::Context as _;
use gpu_migrate_model::crd::{GPUMigration, GPUShadow};
use gpu_migrate_model::ledger::Ledger;
use gpu_migrate_model::names::CORDONED_CARDS;
use gpu_migrate_model::units::CardIndex;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};
use std::io::Write;

/// Field manager of the command line.
pub(super) const MANAGER: &str = "gpu-migrate";

pub(crate) async fn cordon_card(args: &CordonArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let client = args.cluster.client().await?;
    let nodes = Api::<Node>::all(client.clone());
    let node = nodes.get(&args.node).await.with_context(|| format!("node {}", args.node))?;
    let shadow = Api::<GPUShadow>::all(client).get_opt(&args.node).await?;
    let ledger = shadow.and_then(|shadow| shadow.status).map(|status| status.ledger());
    let before = node.annotations().get(CORDONED_CARDS).map_or("", String::as_str);
    let after = cordoned(before, &args.cards, args.undo, ledger.as_ref()).map_err(anyhow::Error::msg)?;
    let value = if after.is_empty() { Value::Null } else { json!(after) };
    // With the version that was read: concurrent changes must not be lost.
    let patch = json!({"metadata": {"resourceVersion": node.resource_version(), "annotations": {CORDONED_CARDS: value}}});
    nodes.patch_metadata(&args.node, &PatchParams::default(), &Patch::Merge(&patch)).await?;
    let list = if after.is_empty() { "none" } else { after.as_str() };
    let text = format!("node/{}: cordoned cards: {list}; running containers stay", args.node);
    let cards = after.split(',').filter(|card| !card.is_empty()).collect::<Vec<_>>();
    Ok(report(args.output, out, &text, json!({"node": args.node, "cordonedCards": cards}))?)
}

/// The annotation's new value. Cards are named by index or UUID; both are checked against the node's ledger.
fn cordoned(before: &str, cards: &[String], undo: bool, ledger: Option<&Ledger>) -> Result<String, String> {
    let known = |card: &str| match ledger {
        None => Err("the node agent does not report its cards: is it running?".to_owned()),
        Some(ledger) => card
            .parse()
            .ok()
            .map(CardIndex)
            .filter(|index| ledger.card(*index).is_some())
            .or_else(|| ledger.find(card))
            .ok_or_else(|| {
                format!(
                    "card {card:?}: expected an index from 0 to {} or the UUID of a card of this node",
                    ledger.len().saturating_sub(1)
                )
            }),
    };
    let mut list = before
        .split(',')
        .map(str::trim)
        .filter(|word| !word.is_empty())
        .map(str::to_owned)
        .collect::<Vec<_>>();
    for card in cards {
        let index = known(card)?;
        // The same card may stand there by its other name.
        list.retain(|word| known(word) != Ok(index));
        if !undo {
            list.push(card.clone());
        }
    }
    Ok(list.join(","))
}

pub(crate) async fn rollout(args: &RolloutArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let client: Client = args.cluster.client().await?;
    let policies = Api::<GPUMigration>::all(client);
    let policy = policies.get(&args.policy).await.with_context(|| format!("GPUMigration {}", args.policy))?;
    let (patch, what) = change(args.action, &policy).map_err(anyhow::Error::msg)?;
    let params = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
    policies.patch(&args.policy, &params, &Patch::Merge(&patch)).await?;
    let text = format!("gpumigration/{}: {what}", args.policy);
    Ok(report(
        args.output,
        out,
        &text,
        json!({"policy": args.policy, "spec": patch["spec"], "message": what}),
    )?)
}

fn change(action: RolloutAction, policy: &GPUMigration) -> Result<(Value, &'static str), String> {
    let waves = !policy.spec.rollout.waves.is_empty();
    let spec = match action {
        RolloutAction::Start => {
            json!({"mode": "Enforce", "rollout": {"paused": false, "direction": "Forward"}})
        }
        RolloutAction::Pause => json!({"rollout": {"paused": true}}),
        RolloutAction::Resume => json!({"rollout": {"paused": false}}),
        RolloutAction::Undo => json!({"rollout": {"paused": false, "direction": "Rollback"}}),
    };
    let message = match (action, waves) {
        (RolloutAction::Start, true) => "enforced; the operator starts the first wave",
        (RolloutAction::Start, false) => "enforced; pods convert as they are created",
        (RolloutAction::Pause, _) => "paused; converted workloads stay, no further one is restarted",
        (RolloutAction::Resume, _) => "resumed",
        (RolloutAction::Undo, true) => "the operator rolls every workload back to whole cards",
        (RolloutAction::Undo, false) => {
            return Err(format!(
                "GPUMigration {}: spec.rollout.waves is empty, so the operator has restarted nothing and there is nothing to undo. \
                 Set spec.mode to Off and restart the workloads: kubectl rollout restart",
                policy.name_any()
            ));
        }
    };
    Ok((json!({"spec": spec}), message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpu_migrate_model::card::Card;

    #[test]
    fn cards_are_added_and_removed_by_index_or_uuid() {
        let card = |n: u32| Card { uuid: format!("GPU-{n}"), ..Card::default() };
        let ledger = Ledger::new((0..4).map(card).collect());
        let edit = |before: &str, cards: &[&str], undo| {
            let cards = cards.iter().map(|card| (*card).to_owned()).collect::<Vec<_>>();
            cordoned(before, &cards, undo, Some(&ledger))
        };
        assert_eq!(edit("", &["1"], false).unwrap(), "1");
        assert_eq!(edit("1", &["GPU-3"], false).unwrap(), "1,GPU-3");
        assert_eq!(edit("1,GPU-3", &["3"], false).unwrap(), "1,3", "not twice");
        assert_eq!(edit("1, GPU-3", &["3", "1"], true).unwrap(), "");
        assert_eq!(edit("9", &["1"], false).unwrap(), "9,1", "entries of others stay");
        assert!(edit("", &["4"], false).unwrap_err().contains("expected an index from 0 to 3"));
        assert!(cordoned("", &["0".to_owned()], false, None).unwrap_err().contains("does not report"));
    }

    #[test]
    fn undo_without_waves_says_what_to_do_instead() {
        let mut policy = GPUMigration::new("m", Default::default());
        assert!(change(RolloutAction::Undo, &policy).unwrap_err().contains("kubectl rollout restart"));
        policy.spec.rollout.waves.push(Default::default());
        let (patch, _) = change(RolloutAction::Undo, &policy).unwrap();
        assert_eq!(patch, json!({"spec": {"rollout": {"paused": false, "direction": "Rollback"}}}));
    }
}
