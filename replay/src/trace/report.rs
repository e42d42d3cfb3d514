//! The outcome of a replay as a table, CSV or JSON.

use std::fmt::Write as _;

use comfy_table::{Cell, CellAlignment, Table, presets};
use serde_json::json;

use super::experiment::{Outcome, Spread};
use super::replay::Setup;

/// Percents of arrival that the published experiment reports.
pub const REPORTED: [u32; 3] = [90, 100, 130];

/// The table that a person reads, with what it was measured on above it.
#[must_use]
pub fn table(setup: &Setup, seeds: &[u64], outcomes: &[Outcome]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    let reported = reported(setup);
    let mut head = vec!["POLICY".to_owned()];
    head.extend(reported.iter().map(|percent| format!("ALLOCATED AT {percent} %")));
    let last = reported.last().copied().unwrap_or_default();
    head.extend([format!("FRAGMENTED AT {last} %"), "PODS SKIPPED".to_owned(), "TIME A SEED".to_owned()]);
    table.set_header(head);
    for outcome in outcomes {
        let mut row = vec![Cell::new(name(outcome))];
        let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
        row.extend(reported.iter().map(|percent| right(percents(outcome.at(*percent).allocated))));
        row.push(right(percents(outcome.at(last).fragmented)));
        row.push(right(percents(outcome.skipped_percent)));
        row.push(right(format!("{:.2} s", outcome.seconds_per_seed)));
        table.add_row(row);
    }
    format!("{}\n\n{table}\n\n{LEGEND}\n", about(setup, seeds))
}

const LEGEND: &str = "\
Percent of the cluster's cards, mean ± standard deviation over seeds. ALLOCATED: given out when so much had been asked for.
FRAGMENTED: idle, and of no use to the usual request of the trace. SKIPPED: percent of the pods, which fitted nowhere.";

fn about(setup: &Setup, seeds: &[u64]) -> String {
    let rounded = setup.pods.iter().filter(|pod| pod.rounded).count();
    let cards: u32 = setup.nodes.iter().map(|node| node.cards).sum();
    let mut text = format!(
        "{} nodes, {cards} cards; {} pods in the trace; {} seeds; arrival up to {:.0} % of the cards",
        setup.nodes.len(),
        setup.pods.len(),
        seeds.len(),
        setup.ratio * 100.0
    );
    if rounded > 0 {
        let _ = write!(text, "\n{rounded} pods ask for a share that is no whole number of cores: rounded up");
    }
    text
}

/// One row for every policy and percent of arrival.
///
/// # Errors
/// None in practice: it is written to memory.
pub fn csv(outcomes: &[Outcome]) -> Result<String, csv::Error> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record([
        "policy",
        "arrived_percent",
        "allocated_percent",
        "allocated_deviation",
        "fragmented_percent",
        "fragmented_deviation",
    ])?;
    for outcome in outcomes {
        for point in &outcome.curve {
            let number = |value: f64| format!("{value:.4}");
            writer.write_record([
                name(outcome),
                point.arrived.to_string(),
                number(point.allocated.mean),
                number(point.allocated.deviation),
                number(point.fragmented.mean),
                number(point.fragmented.deviation),
            ])?;
        }
    }
    let bytes = writer.into_inner().map_err(csv::IntoInnerError::into_error)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[must_use]
pub fn json(setup: &Setup, seeds: &[u64], outcomes: &[Outcome]) -> String {
    let cards: u32 = setup.nodes.iter().map(|node| node.cards).sum();
    let reported: Vec<serde_json::Value> = outcomes
        .iter()
        .map(|outcome| {
            let at: serde_json::Map<String, serde_json::Value> = reported(setup)
                .iter()
                .map(|percent| (percent.to_string(), json!(outcome.at(*percent))))
                .collect();
            json!({"policy": outcome.policy, "at": at, "skippedPercent": outcome.skipped_percent,
                   "secondsPerSeed": outcome.seconds_per_seed, "curve": outcome.curve})
        })
        .collect();
    let value = json!({
        "nodes": setup.nodes.len(), "cards": cards, "podsInTrace": setup.pods.len(), "seeds": seeds, "ratio": setup.ratio,
        "mix": setup.mix, "plainPods": setup.plain,
        "podsRoundedUp": setup.pods.iter().filter(|pod| pod.rounded).count(),
        "policies": reported,
    });
    format!("{value:#}\n")
}

/// The policy's name on the command line.
#[must_use]
pub fn name(outcome: &Outcome) -> String {
    use clap::ValueEnum as _;
    outcome.policy.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// The percents that arrive at all, and the last one.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // percents
fn reported(setup: &Setup) -> Vec<u32> {
    let end = (setup.ratio * 100.0).round() as u32;
    REPORTED.into_iter().filter(|percent| *percent < end).chain([end]).collect()
}

fn percents(value: Spread) -> String {
    format!("{:.2} ±{:.2}", value.mean, value.deviation)
}
