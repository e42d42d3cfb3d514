//! `gpu-migrate status`: cards and their holders by node, and the progress of each project. Pure.

use super::{Answer, Snapshot, columns};
use crate::exit::Exit;
use crate::style::{ADDED, FAINT, HEAD, PLACE, REMOVED, WARNING, blocks, paint};
use gpu_migrate_model::card::CardState;
use gpu_migrate_model::crd::{CardStatus, GPUMigration, GPUShadow, HolderStatus};
use gpu_migrate_model::units::Cores;
use kube::ResourceExt as _;
use serde_json::{Value, json};

const LEGEND: &str =
    "· free   L legacy   45 cores shared   down unhealthy   cord cordoned   both two kinds of holders";

pub(crate) fn status(snapshot: &Snapshot, node: Option<&str>, holders: bool) -> Answer {
    if let Some(name) = node
        && !snapshot.shadows.iter().any(|shadow| shadow.name_any() == name)
    {
        let known = snapshot.shadows.iter().map(kube::ResourceExt::name_any).collect::<Vec<_>>();
        let text = format!(
            "node {name}: no GPUShadow; there are {}\n",
            if known.is_empty() { "none".to_owned() } else { known.join(", ") }
        );
        return Answer { text, value: json!({"nodes": [], "projects": []}), exit: Exit::No };
    }
    let mut shadows =
        snapshot.shadows.iter().filter(|s| node.is_none_or(|n| s.name_any() == n)).collect::<Vec<_>>();
    // The operator also writes GPUShadows of nodes without an agent: shown only with a problem.
    shadows.retain(|shadow| !cards(shadow).is_empty() || problem(shadow).is_some());
    shadows.sort_by_key(|shadow| shadow.name_any());
    let mut text = map(&shadows);
    if holders {
        text += &format!("\n{}", holder_table(&shadows));
    }
    if node.is_none() {
        text += &format!("\n{}", projects(&snapshot.migrations));
    }
    for one in &snapshot.unreadable {
        text += &format!("{} not shown, because it cannot be read: {one}\n", paint(WARNING, "warning:"));
    }
    let value = json!({
        "nodes": shadows.iter().map(|s| json!({"name": s.name_any(), "status": s.status})).collect::<Vec<Value>>(),
        "projects": snapshot.migrations.iter().map(|m| json!({"name": m.name_any(), "project": m.spec.project, "mode": m.settings().mode, "status": m.status})).collect::<Vec<Value>>(),
    });
    Answer { text, value, exit: Exit::Done }
}

fn cards(shadow: &GPUShadow) -> &[CardStatus] {
    shadow.status.as_ref().map_or(&[], |status| status.cards.as_slice())
}

fn map(shadows: &[&GPUShadow]) -> String {
    if shadows.is_empty() {
        return "No node reports its cards: is the node agent running? (kubectl get gpushadows)\n".to_owned();
    }
    let most = shadows.iter().map(|shadow| cards(shadow).len()).max().unwrap_or(0);
    let mut head = vec![paint(HEAD, "NODE"), paint(HEAD, "FREE")];
    head.extend((0..most).map(|index| paint(FAINT, &index.to_string())));
    let mut rows = vec![head];
    for shadow in shadows {
        let cards = cards(shadow);
        let free = cards.iter().filter(|card| card.state == CardState::Free).count();
        let mut row = vec![shadow.name_any(), format!("{free}/{}", cards.len())];
        row.extend(cards.iter().map(cell));
        if let Some(problem) = problem(shadow) {
            row.push(paint(WARNING, &problem));
        }
        rows.push(row);
    }
    format!("{}{}\n", columns(&rows), paint(FAINT, LEGEND))
}

fn cell(card: &CardStatus) -> String {
    match card.state {
        CardState::Free => paint(ADDED, "·"),
        CardState::Legacy => paint(PLACE, "L"),
        CardState::Shared => Cores::CARD.saturating_sub(card.cores_left).0.to_string(),
        CardState::Unhealthy => paint(REMOVED, "down"),
        CardState::Cordoned => paint(WARNING, "cord"),
        CardState::Disputed => paint(REMOVED, "both"),
    }
}

fn problem(shadow: &GPUShadow) -> Option<String> {
    let conditions = shadow.status.iter().flat_map(|status| &status.conditions);
    let bad = conditions.filter(|condition| {
        (condition.type_ == "Ready" && condition.status != "True")
            || (["Drift", "PluginConflict"].contains(&condition.type_.as_str()) && condition.status == "True")
            || (["DriverInstalled", "DriverMatches", "IsolationReady", "ModeConverged"]
                .contains(&condition.type_.as_str())
                && condition.status == "False")
    });
    let messages =
        bad.map(|condition| format!("{}: {}", condition.type_, condition.message)).collect::<Vec<_>>();
    (!messages.is_empty()).then(|| messages.join("; "))
}

fn holder_table(shadows: &[&GPUShadow]) -> String {
    let mut rows =
        vec![["NODE", "CARD", "POD", "CONTAINER", "HOLDS"].map(|title| paint(HEAD, title)).to_vec()];
    for shadow in shadows {
        for (index, card) in cards(shadow).iter().enumerate() {
            for holder in &card.holders {
                rows.push(vec![
                    shadow.name_any(),
                    index.to_string(),
                    pod(holder),
                    holder.container.clone(),
                    holds(holder),
                ]);
            }
        }
    }
    columns(&rows)
}

fn pod(holder: &HolderStatus) -> String {
    if holder.pod.is_empty() {
        format!("(uid {})", holder.uid)
    } else {
        format!("{}/{}", holder.namespace, holder.pod)
    }
}

fn holds(holder: &HolderStatus) -> String {
    match (holder.cores, holder.blocks) {
        (None, None) => "the card".to_owned(),
        (cores, held) => format!("{} and {}", cores.unwrap_or_default(), blocks(held.unwrap_or_default())),
    }
}

fn projects(migrations: &[GPUMigration]) -> String {
    if migrations.is_empty() {
        return "No policy (GPUMigration) exists: nothing is converted.\n".to_owned();
    }
    let titles = ["POLICY", "PROJECT", "MODE", "PHASE", "WAVE", "SHARED", "LEGACY", "WHY"];
    let mut rows = vec![titles.map(|title| paint(HEAD, title)).to_vec()];
    for migration in migrations {
        let status = migration.status.clone().unwrap_or_default();
        let waves = migration.spec.rollout.waves.len();
        let wave = status
            .wave
            .filter(|_| waves > 0)
            .map_or_else(|| "-".to_owned(), |wave| format!("{wave}/{waves}"));
        let why = status
            .conditions
            .iter()
            .find(|c| c.type_ == "Ready")
            .map(|c| c.message.clone())
            .unwrap_or_default();
        rows.push(vec![
            migration.name_any(),
            migration.spec.project.clone(),
            format!("{:?}", migration.settings().mode),
            format!("{:?}", status.phase),
            wave,
            status.counts.converted.to_string(),
            status.counts.legacy.to_string(),
            why,
        ]);
    }
    columns(&rows)
}
