//! What migrating would give, as a table, CSV or JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use comfy_table::{Cell, CellAlignment, ContentArrangement, Table, presets};
use serde_json::json;

use super::migrate::{Gain, Workload};
use super::read::Snapshot;

/// The tables that a person reads.
#[must_use]
pub fn table(snapshot: &Snapshot, gains: &[Gain]) -> String {
    let mut text = about(snapshot, gains);
    let _ = write!(text, "\n\n{}\n\n{}\n", plans(gains), workloads(gains));
    let reasons = reasons(gains);
    if !reasons.is_empty() {
        let _ = writeln!(text, "\nWhy workloads stay:\n{}", reasons.join("\n"));
    }
    let _ = writeln!(text, "\n{LEGEND}");
    text
}

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

fn workloads(gains: &[Gain]) -> Table {
    let mut table = plain();
    let mut head = vec!["NAMESPACE".to_owned(), "WORKLOAD".to_owned(), "PODS".to_owned(), "CARDS".to_owned()];
    head.extend(gains.iter().map(|gain| gain.plan.to_uppercase()));
    table.set_header(head);
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
        "nodes": snapshot.nodes.len(), "cards": cards, "pods": snapshot.pods.len(),
        "nodesWithoutCardMemory": snapshot.without_memory(), "plans": plans,
    });
    format!("{value:#}\n")
}
