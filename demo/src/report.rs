//! The closing table.

use std::time::Duration;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};

use super::observer::Violations;
use gpu_migrate_sim::cluster::scheduler::SchedulerCounts;

#[derive(Clone, Debug)]
pub struct Outcome {
    pub cards: usize,
    /// Cards in use at the step `before`.
    pub before: usize,
    /// Cards with a legacy pod at the end.
    pub legacy: usize,
    /// Cards with shared pods at the end.
    pub shared: usize,
    /// Shared containers at the end.
    pub sharing: usize,
    /// Starts of containers with cards.
    pub started: usize,
    pub violations: Violations,
    pub scheduler: SchedulerCounts,
    /// From the beginning of a cycle to the binding, one a pod.
    pub latencies: Vec<Duration>,
    pub took: Duration,
}

impl Outcome {
    /// Cards free at the end that were in use before; negative if more are in use.
    #[must_use]
    pub fn freed(&self) -> i64 {
        let signed = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        signed(self.before) - signed(self.legacy + self.shared)
    }

    fn percentile(&self, percent: usize) -> String {
        let mut sorted = self.latencies.clone();
        sorted.sort();
        let rank = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
        sorted.get(rank).map_or_else(|| "-".into(), |time| format!("{:.1} ms", time.as_secs_f64() * 1e3))
    }
}

#[must_use]
pub fn render(outcome: &Outcome) -> String {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    let rows = [
        ("cards in use before", format!("{} of {}", outcome.before, outcome.cards)),
        ("cards in use after", format!("{} of {}", outcome.legacy + outcome.shared, outcome.cards)),
        ("  with a legacy pod", outcome.legacy.to_string()),
        ("  with shared pods", format!("{} ({} containers)", outcome.shared, outcome.sharing)),
        ("cards freed", outcome.freed().to_string()),
        ("placements", outcome.scheduler.bound.to_string()),
        ("container starts with a card", outcome.started.to_string()),
        ("violations of I1 (a card for one kind)", outcome.violations.exclusive.to_string()),
        ("violations of I2 (no overcommit)", outcome.violations.overcommitted.to_string()),
        ("containers without their card", outcome.violations.without_card.to_string()),
        ("filter to binding, median", outcome.percentile(50)),
        ("filter to binding, 99 of 100", outcome.percentile(99)),
        ("the story took", format!("{:.1} s", outcome.took.as_secs_f64())),
    ];
    for (what, value) in rows {
        table.add_row([what.to_owned(), value]);
    }
    if let Some(column) = table.column_mut(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let told = outcome.violations.told.iter().map(|text| format!("\n  {text}"));
    format!("{table}{}", told.collect::<String>())
}
