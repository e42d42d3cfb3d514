//! Commands that change one object: `cordon-card` and `rollout`.

use super::{Snapshot, report};
use crate::args::{ChangeArgs, CordonArgs, RolloutAction, RolloutArgs};
use crate::exit::Exit;
use crate::style::{counted, fit, window};
use anyhow::Context as _;
use gpu_migrate_model::ask::PodAsk;
use gpu_migrate_model::card::CardState;
use gpu_migrate_model::crd::{
    CardStatus, CommandAction, GPUMigration, GPUShadow, MigrationMode, RolloutCommand,
};
use gpu_migrate_model::ledger::Ledger;
use gpu_migrate_model::lifecycle::is_terminal;
use gpu_migrate_model::names::{CORDONED_CARDS, Dialect, GROUP, POLICY};
use gpu_migrate_model::units::CardIndex;
use gpu_migrate_webhook::restore::restore;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::{IsTerminal as _, Write};

/// Field manager of the command line.
pub(super) const MANAGER: &str = "gpu-migrate";

pub(crate) async fn cordon_card(args: &CordonArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let client = args.reach.client().await?;
    let nodes = Api::<Node>::all(client.clone());
    let node = nodes.get(&args.node).await.with_context(|| format!("node {}", args.node))?;
    let shadow = Api::<GPUShadow>::all(client).get_opt(&args.node).await?;
    let ledger = shadow.and_then(|shadow| shadow.status).map(|status| status.ledger());
    let before = node.annotations().get(CORDONED_CARDS).map_or("", String::as_str);
    let after = cordoned(before, &args.cards, args.undo, ledger.as_ref()).map_err(anyhow::Error::msg)?;
    let list = if after.is_empty() { "none" } else { after.as_str() };
    let question = format!("node/{}: cordoned cards will be: {list}; change it?", args.node);
    if !confirmed(args.change, out, &question)? {
        return Ok(Exit::No);
    }
    let value = if after.is_empty() { Value::Null } else { json!(after) };
    // With the version that was read: concurrent changes must not be lost.
    let patch = json!({"metadata": {"resourceVersion": node.resource_version(), "annotations": {CORDONED_CARDS: value}}});
    let params = PatchParams { dry_run: args.change.dry_run, ..PatchParams::default() };
    let patched = nodes.patch_metadata(&args.node, &params, &Patch::Merge(&patch)).await;
    patched.with_context(|| format!("node {}", args.node))?;
    let text =
        format!("node/{}: cordoned cards: {list}; running containers stay{}", args.node, dry(args.change));
    let cards = after.split(',').filter(|card| !card.is_empty()).collect::<Vec<_>>();
    let value = json!({"node": args.node, "cordonedCards": cards, "dryRun": args.change.dry_run});
    Ok(report(args.output, out, (&format!("node/{}", args.node), &text), value)?)
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
    let client: Client = args.reach.client().await?;
    let policies = Api::<GPUMigration>::all(client.clone());
    let policy = policies.get(&args.policy).await.with_context(|| format!("GPUMigration {}", args.policy))?;
    let (command, what) =
        change(args.action, args.now, &policy, Timestamp::now()).map_err(anyhow::Error::msg)?;
    let mut lines = vec![format!("gpumigration/{}: {what}{}", args.policy, dry(args.change))];
    let undo = args.action == RolloutAction::Undo;
    if undo && let Ok(snapshot) = Snapshot::of_cards(&client).await {
        lines.push(WayBack::of(&args.policy, &snapshot).text());
    }
    let asks = undo || args.action == RolloutAction::Start;
    if asks && !confirmed(args.change, out, &format!("{}\nchange it?", lines.join("\n")))? {
        return Ok(Exit::No);
    }
    let manager = Some(MANAGER.to_owned());
    let params =
        PatchParams { field_manager: manager, dry_run: args.change.dry_run, ..PatchParams::default() };
    // With the version that was read: the command depends on what is in force.
    let patch =
        json!({"metadata": {"resourceVersion": policy.resource_version()}, "status": {"command": command}});
    let patched = policies.patch_status(&args.policy, &params, &Patch::Merge(&patch)).await;
    patched.with_context(|| format!("GPUMigration {}", args.policy))?;
    if asks && !args.change.dry_run {
        lines.push("next: gpu-migrate status; kubectl get gpumigrations -o wide -w".to_owned());
    }
    let value =
        json!({"policy": args.policy, "command": command, "message": what, "dryRun": args.change.dry_run});
    let name = format!("gpumigration.{GROUP}/{}", args.policy);
    Ok(report(args.output, out, (&name, &lines.join("\n")), value)?)
}

fn change(
    action: RolloutAction,
    now: bool,
    policy: &GPUMigration,
    at: Timestamp,
) -> Result<(RolloutCommand, &'static str), String> {
    let waves = !policy.spec.rollout.waves.is_empty();
    if now && action != RolloutAction::Undo {
        return Err("--now: only with undo".to_owned());
    }
    if policy.spec.mode == MigrationMode::Off {
        return Err(format!(
            "GPUMigration {}: spec.mode is Off, which no command overrules; set it to Audit or Enforce first",
            policy.name_any()
        ));
    }
    let (command, message) = match (action, waves) {
        (RolloutAction::Start, true) => {
            (CommandAction::Start, "enforced; the operator starts the first wave")
        }
        (RolloutAction::Start, false) => (CommandAction::Start, "enforced; pods convert as they are created"),
        (RolloutAction::Pause, _) => {
            (CommandAction::Pause, "paused; converted workloads stay, no further one is restarted")
        }
        (RolloutAction::Resume, _) => (CommandAction::Resume, "resumed"),
        (RolloutAction::Undo, true) if now => {
            (CommandAction::UndoNow, "the operator rolls every workload back to whole cards, all at once")
        }
        (RolloutAction::Undo, true) => {
            (CommandAction::Undo, "the operator rolls every workload back to whole cards")
        }
        (RolloutAction::Undo, false) => {
            return Err(format!(
                "GPUMigration {}: spec.rollout.waves is empty, so the operator has restarted nothing and there is nothing to undo. \
                 Set spec.mode to Off and restart the workloads: kubectl rollout restart",
                policy.name_any()
            ));
        }
    };
    Ok((command.command(policy, at.to_string()), message))
}

/// What rolling a project back needs, and whether it is there.
#[derive(Debug, PartialEq, Eq)]
struct WayBack {
    pods: usize,
    /// Whole cards that the pods requested before.
    cards: u64,
    free: usize,
    /// Cards that only these pods hold.
    freed: usize,
}

impl WayBack {
    fn of(policy: &str, snapshot: &Snapshot) -> Self {
        let converted = snapshot.pods.iter().filter(|pod| !is_terminal(pod)).filter(|pod| {
            let by = pod.annotations().get(POLICY).and_then(|value| value.rsplit_once('@'));
            by.is_some_and(|(name, _)| name == policy)
        });
        let pods = converted.collect::<Vec<_>>();
        let uids = pods.iter().filter_map(|pod| pod.uid()).collect::<BTreeSet<_>>();
        let cards =
            snapshot.shadows.iter().flat_map(|shadow| shadow.status.iter().flat_map(|status| &status.cards));
        let ours = |card: &&CardStatus| {
            card.state == CardState::Shared && card.holders.iter().all(|holder| uids.contains(&holder.uid))
        };
        Self {
            pods: pods.len(),
            cards: pods.iter().map(|pod| u64::from(requested_before(pod))).sum(),
            free: cards.clone().filter(|card| card.state == CardState::Free).count(),
            freed: cards.filter(ours).count(),
        }
    }

    fn text(&self) -> String {
        let Self { pods, cards, free, freed } = self;
        let need = format!(
            "{} requested {} before; free: {free}, free once they have ended: {freed} more",
            counted(*pods, "shared pod"),
            counted(usize::try_from(*cards).unwrap_or(usize::MAX), "whole card"),
        );
        if *cards > (free + freed) as u64 {
            let missing = cards - (free + freed) as u64;
            return format!("{need}; {missing} too few: some pods will wait for a card");
        }
        need
    }
}

/// Whole cards of a converted pod, by the record of its conversion; 0 where that cannot be read.
fn requested_before(pod: &Pod) -> u32 {
    let before = serde_json::to_value(pod).ok().and_then(|mut value| {
        restore(&mut value).ok()?;
        serde_json::from_value::<Pod>(value).ok()
    });
    let ask = before.and_then(|pod| PodAsk::of(&pod, &Dialect::default()).ok());
    ask.map_or(0, |ask| ask.effective().legacy)
}

/// Whether to go on. Asked on a terminal only: scripts are not asked.
pub(super) fn confirmed(change: ChangeArgs, out: &mut dyn Write, question: &str) -> std::io::Result<bool> {
    let (stdin, stdout) = (std::io::stdin(), std::io::stdout());
    if change.yes || change.dry_run || !stdin.is_terminal() || !stdout.is_terminal() {
        return Ok(true);
    }
    write!(out, "{}", fit(&format!("{question} [y/N] "), window()))?;
    out.flush()?;
    let mut answer = String::new();
    stdin.read_line(&mut answer)?;
    let yes = ["y", "yes"].contains(&answer.trim().to_lowercase().as_str());
    if !yes {
        writeln!(out, "nothing was changed")?;
    }
    Ok(yes)
}

/// What stands behind the messages of a command that changes nothing.
pub(super) fn dry(change: ChangeArgs) -> &'static str {
    if change.dry_run { " (dry run: nothing was changed)" } else { "" }
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
        let change = |action, now, policy: &GPUMigration| change(action, now, policy, Timestamp::UNIX_EPOCH);
        assert!(change(RolloutAction::Start, false, &policy).unwrap_err().contains("spec.mode is Off"));
        policy.spec.mode = MigrationMode::Audit;
        assert!(change(RolloutAction::Undo, false, &policy).unwrap_err().contains("kubectl rollout restart"));
        policy.spec.rollout.waves.push(Default::default());
        let (command, _) = change(RolloutAction::Undo, false, &policy).unwrap();
        assert_eq!(command.action, CommandAction::Undo);
        let (command, _) = change(RolloutAction::Undo, true, &policy).unwrap();
        assert_eq!(command.action, CommandAction::UndoNow);
        assert!(change(RolloutAction::Start, true, &policy).unwrap_err().contains("only with undo"));
    }

    #[test]
    fn the_way_back_says_how_many_cards_it_needs_and_whether_they_are_there() {
        let original = json!({"policy": "m@1", "containers": {"c": {"limits": {"nvidia.com/gpu": "2", "tencent.com/vcuda-core": null, "tencent.com/vcuda-memory": null}}}});
        let pod = |uid: &str, policy: &str| -> Pod {
            serde_json::from_value(json!({"metadata": {"name": uid, "uid": uid, "annotations": {"gpu-migrate.io/policy": policy, "gpu-migrate.io/original": original.to_string()}},
                "spec": {"containers": [{"name": "c", "resources": {"limits": {"tencent.com/vcuda-core": "50", "tencent.com/vcuda-memory": "10"}}}]}}))
            .unwrap()
        };
        let card = |state: &str, holders: &[&str]| {
            let holders = holders.iter().map(|uid| json!({"namespace": "n", "pod": uid, "uid": uid, "container": "c", "cores": 50, "blocks": 10}));
            json!({"uuid": "GPU-a", "minor": 0, "memoryMiB": 4096, "state": state, "holders": holders.collect::<Vec<_>>()})
        };
        let shadow = json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUShadow", "metadata": {"name": "g"}, "spec": {},
            "status": {"cards": [card("Free", &[]), card("Shared", &["a", "b"]), card("Shared", &["a", "x"]), card("Legacy", &["y"])]}});
        let snapshot = Snapshot {
            pods: vec![pod("a", "m@1"), pod("b", "m@2"), pod("x", "other@1")],
            shadows: vec![serde_json::from_value(shadow).unwrap()],
            ..Snapshot::default()
        };
        let back = WayBack::of("m", &snapshot);
        assert_eq!(back, WayBack { pods: 2, cards: 4, free: 1, freed: 1 });
        assert_eq!(
            back.text(),
            "2 shared pods requested 4 whole cards before; free: 1, free once they have ended: 1 more; 2 too few: some pods will wait for a card"
        );
    }
}
