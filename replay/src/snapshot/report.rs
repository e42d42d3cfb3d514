//! What migrating would give, as a table, CSV or JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use comfy_table::{Cell, CellAlignment, ContentArrangement, Table, presets};
use serde_json::json;

use super::card_map;
use super::migrate::{Gain, Project, Workload};
use super::read::Snapshot;

/// The tables that a person reads.
#[must_use]
pub fn table(snapshot: &Snapshot, gains: &[Gain]) -> String {
    let mut text = about(snapshot, gains);
    let _ = write!(text, "\n\n{}\n\n{}\n\n{}\n", plans(gains), projects(gains), counted_cards(gains));
    if snapshot.nodes.len() <= MAPPED {
        let _ = writeln!(text, "\n{}\n{}", map(snapshot, gains), card_map::LEGEND);
    }
    let _ = write!(text, "\n{}\n", workloads(gains));
    let reasons = reasons(gains);
    if !reasons.is_empty() {
        let _ = writeln!(text, "\nWhy workloads stay:\n{}", reasons.join("\n"));
    }
    let _ = writeln!(text, "\n{LEGEND}");
    text
}

/// Of more nodes the text has the sums alone; -o html and json have each card.
const MAPPED: usize = 16;

pub(super) const LEGEND: &str = "\
HELD: cards that are held, in whole or in part. FREED: held now and not afterwards. IDLE: compute that is not held, in cards.
FRAGMENTED: the part of it that the usual request cannot use, by the requests as they are now and as they would be then.
WAITING: legacy pods without a node, and how many of them would start. Whether a workload gets along with its share is not in a snapshot.";

fn about(snapshot: &Snapshot, gains: &[Gain]) -> String {
    let cards: u32 = snapshot.nodes.iter().map(|node| node.cards).sum();
    let mut text = format!("{} nodes with {cards} cards, {} pods", snapshot.nodes.len(), snapshot.pods.len());
    let unknown = snapshot.without_memory();
    if unknown > 0 {
        let _ = write!(
            text,
            "\nnote: {unknown} nodes have no card memory (label nvidia.com/gpu.memory): there memory is no limit"
        );
    }
    for note in gains.first().map(|gain| gain.notes.as_slice()).unwrap_or_default() {
        let _ = write!(text, "\nnote: {note}");
    }
    text
}

fn plans(gains: &[Gain]) -> Table {
    let mut table = plain();
    table.set_header(["PLAN", "PODS MOVED", "HELD", "FREED", "IDLE", "FRAGMENTED", "WAITING"]);
    for gain in gains {
        let (pods, moved) = counts(gain);
        let change = |before: f64, after: f64| format!("{before:.1} → {after:.1}");
        table.add_row([
            Cell::new(&gain.plan),
            right(format!("{moved} of {pods}")),
            right(format!("{} → {}", gain.before.held, gain.after.held)),
            right(freed(gain).to_string()),
            right(change(gain.before.idle, gain.after.idle)),
            right(change(gain.before.fragmented, gain.after.fragmented)),
            right(format!("{}, {} start", gain.waiting.0, gain.waiting.1)),
        ]);
    }
    table
}

/// What the pods of each project hold now and request afterwards, in cards.
fn projects(gains: &[Gain]) -> Table {
    let mut table = plain();
    table.set_header(headed(["PROJECT", "PODS", "CARDS", "WAITING"], gains));
    let Some(first) = gains.first() else { return table };
    for (row, project) in first.projects.iter().enumerate() {
        let mut cells = vec![
            Cell::new(&project.name),
            right(project.pods.to_string()),
            right(project.cards.to_string()),
            right(project.waiting.0.to_string()),
        ];
        // Every plan looks at the same pods, so at the same projects.
        cells.extend(
            gains.iter().map(|gain| right(gain.projects.get(row).map(afterwards).unwrap_or_default())),
        );
        table.add_row(cells);
    }
    table
}

/// `12.5 cards, 3 start`.
pub(super) fn afterwards(project: &Project) -> String {
    let starts = match project.waiting {
        (0, _) => String::new(),
        (_, started) => format!(", {started} start"),
    };
    format!("{:.1} cards{starts}", project.cards_after)
}

/// How many cards are held how, now and afterwards.
fn counted_cards(gains: &[Gain]) -> Table {
    let mut table = plain();
    table.set_header(headed(["CARDS", "NOW"], gains));
    for (name, counts) in counts_of_cards(gains) {
        let mut cells = vec![Cell::new(name)];
        cells.extend(counts.iter().map(|count| right(count.to_string())));
        table.add_row(cells);
    }
    table
}

/// How many cards are held in each way: now, and by each plan.
pub(super) fn counts_of_cards(gains: &[Gain]) -> impl Iterator<Item = (&'static str, Vec<u32>)> {
    let now = gains.first().map(|gain| card_map::count(&gain.map.before));
    let all = now.into_iter().chain(gains.iter().map(|gain| card_map::count(&gain.map.after)));
    let all = all.collect::<Vec<_>>();
    let of = move |at: usize| all.iter().map(|counts| counts[at]).collect::<Vec<_>>();
    card_map::COUNTED.into_iter().enumerate().map(move |(at, name)| (name, of(at)))
}

/// A node a row, its cards by one sign each.
fn map(snapshot: &Snapshot, gains: &[Gain]) -> Table {
    let mut table = plain();
    table.set_header(headed(["NODE", "NOW"], gains));
    let Some(first) = gains.first() else { return table };
    let maps = std::iter::once(&first.map.before).chain(gains.iter().map(|gain| &gain.map.after));
    let maps = maps.collect::<Vec<_>>();
    for (row, node) in snapshot.nodes.iter().enumerate() {
        let signs = maps.iter().filter_map(|map| map.get(row));
        table.add_row(std::iter::once(&node.name).chain(signs));
    }
    table
}

/// Titles of columns, and a column for each plan behind them.
fn headed<const N: usize>(titles: [&str; N], gains: &[Gain]) -> Vec<String> {
    let plans = gains.iter().map(|gain| gain.plan.to_uppercase());
    titles.into_iter().map(str::to_owned).chain(plans).collect()
}

fn workloads(gains: &[Gain]) -> Table {
    let mut table = plain();
    table.set_header(headed(["NAMESPACE", "WORKLOAD", "PODS", "CARDS"], gains));
    let Some(first) = gains.first() else { return table };
    for (row, workload) in first.workloads.iter().enumerate() {
        let mut cells = vec![
            Cell::new(&workload.namespace),
            Cell::new(&workload.name),
            right(workload.pods.to_string()),
            right(workload.cards.to_string()),
        ];
        // Every plan looks at the same workloads, in the same order.
        cells.extend(
            gains.iter().map(|gain| Cell::new(gain.workloads.get(row).map(verdict).unwrap_or_default())),
        );
        table.add_row(cells);
    }
    table
}

pub(super) fn verdict(workload: &Workload) -> String {
    let becomes = workload.becomes.as_deref().unwrap_or("stays");
    match workload.moved {
        0 => "stays".to_owned(),
        moved if moved == workload.pods => becomes.to_owned(),
        moved => format!("{becomes} ({moved} of {})", workload.pods),
    }
}

/// Each reason once, with the workloads and plans that it is about.
pub(super) fn reasons(gains: &[Gain]) -> Vec<String> {
    let mut by_reason: BTreeMap<(String, &str), Vec<&str>> = BTreeMap::new();
    for gain in gains {
        for workload in &gain.workloads {
            for why in workload.stays.keys() {
                let of = format!("{} {}", workload.namespace, workload.name);
                by_reason.entry((of, why.as_str())).or_default().push(&gain.plan);
            }
        }
    }
    let line = |((of, why), plans): ((String, &str), Vec<&str>)| {
        let when =
            if plans.len() == gains.len() { String::new() } else { format!(" ({})", plans.join(", ")) };
        format!("  {of}{when}: {why}")
    };
    by_reason.into_iter().map(line).collect()
}

/// Pods that hold legacy cards, and those of them that move.
pub(super) fn counts(gain: &Gain) -> (u32, u32) {
    gain.workloads.iter().fold((0, 0), |(pods, moved), one| (pods + one.pods, moved + one.moved))
}

/// Cards freed; below zero where a plan spreads pods over more cards than they hold now.
pub(super) fn freed(gain: &Gain) -> i64 {
    i64::from(gain.before.held) - i64::from(gain.after.held)
}

fn plain() -> Table {
    let mut table = Table::new();
    // Cells are broken at words where the terminal is too narrow.
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    table
}

fn right(text: String) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
}

/// One row for every plan and workload.
///
/// # Errors
/// None in practice: it is written to memory.
pub fn csv(gains: &[Gain]) -> Result<String, csv::Error> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record([
        "plan",
        "namespace",
        "workload",
        "pods",
        "cards",
        "moved",
        "becomes",
        "stays_because",
    ])?;
    for gain in gains {
        for one in &gain.workloads {
            let stays: Vec<&str> = one.stays.keys().map(String::as_str).collect();
            writer.write_record([
                gain.plan.as_str(),
                &one.namespace,
                &one.name,
                &one.pods.to_string(),
                &one.cards.to_string(),
                &one.moved.to_string(),
                one.becomes.as_deref().unwrap_or_default(),
                &stays.join(" | "),
            ])?;
        }
    }
    let bytes = writer.into_inner().map_err(csv::IntoInnerError::into_error)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// In the order of the card maps.
pub(super) fn names(snapshot: &Snapshot) -> Vec<&str> {
    snapshot.nodes.iter().map(|node| node.name.as_str()).collect()
}

#[must_use]
pub fn json(snapshot: &Snapshot, gains: &[Gain]) -> String {
    let cards: u32 = snapshot.nodes.iter().map(|node| node.cards).sum();
    let plans: Vec<serde_json::Value> = gains
        .iter()
        .map(|gain| {
            let mut value = json!(gain);
            value["cardsFreed"] = freed(gain).into();
            value
        })
        .collect();
    let value = json!({
        "nodes": snapshot.nodes.len(), "nodeNames": names(snapshot), "cards": cards, "pods": snapshot.pods.len(),
        "nodesWithoutCardMemory": snapshot.without_memory(), "plans": plans,
    });
    format!("{value:#}\n")
}
