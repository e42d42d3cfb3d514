//! What was measured: as data, as text, and several of them as the table of `docs/isolation-measured.md`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::client::Setting;

/// How one probe ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// No more than the limit.
    #[default]
    Held,
    /// More than the limit.
    Exceeded,
    /// Nothing.
    Refused,
    /// What was given back cannot be had again.
    Kept,
    /// No more than the limit, but the card had no more.
    Unproven,
    /// The driver has no such function, or the card does not support it.
    Absent,
    /// The client did not get so far.
    Failed,
}

impl Verdict {
    /// Nothing is wrong.
    #[must_use]
    pub const fn is_good(self) -> bool {
        matches!(self, Self::Held | Self::Absent)
    }

    /// As in the data.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Exceeded => "exceeded",
            Self::Refused => "refused",
            Self::Kept => "kept",
            Self::Unproven => "unproven",
            Self::Absent => "absent",
            Self::Failed => "failed",
        }
    }
}

/// One probe.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    pub probe: String,
    pub verdict: Verdict,
    /// What all processes of the probe had together.
    pub mib: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// What the driver says of the card, in MiB: `free` and `total` of `cuMemGetInfo`, and `cuDeviceTotalMem`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shown {
    pub free: u64,
    pub total: u64,
    pub device: u64,
}

/// What one client got.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    pub client: String,
    /// Why nothing could be measured with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    pub shown: Option<Shown>,
    pub findings: Vec<Finding>,
    /// The driver's functions by the file that they are in: a limiter's own where it is in their place.
    pub functions: BTreeMap<String, Vec<String>>,
}

impl Measured {
    /// Nothing is held back where there is no more to be had.
    pub(super) fn doubt(&mut self, setting: &Setting) {
        let Some(shown) = self.shown else { return };
        if shown.total <= setting.limit_mib || shown.free >= setting.most_mib() {
            return;
        }
        for finding in self.findings.iter_mut().filter(|finding| finding.verdict == Verdict::Held) {
            finding.verdict = Verdict::Unproven;
            finding.note = Some(format!("the card had {} MiB free: use one that is idle", shown.free));
        }
    }

    fn with(&self, wanted: impl Fn(Verdict) -> bool) -> Vec<&Finding> {
        self.findings.iter().filter(|finding| wanted(finding.verdict)).collect()
    }
}

/// All clients in one container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// What limited them, as the caller named it.
    pub isolation: String,
    pub limit_mib: u64,
    pub clients: Vec<Measured>,
}

impl Report {
    /// Every client was measured, and held to the limit by every probe.
    #[must_use]
    pub fn holds(&self) -> bool {
        let good = |measured: &Measured| {
            measured.error.is_none() && measured.with(|verdict| !verdict.is_good()).is_empty()
        };
        !self.clients.is_empty() && self.clients.iter().all(good)
    }

    /// For people.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = format!("isolation {}, limit {} MiB\n", self.isolation, self.limit_mib);
        for measured in &self.clients {
            let _ = writeln!(text, "\n{}", measured.client);
            if let Some(error) = &measured.error {
                let _ = writeln!(text, "  not measured: {error}");
                continue;
            }
            if let Some(shown) = measured.shown {
                let _ = writeln!(text, "  {:<38}{:>6} MiB", "cuMemGetInfo shows in all", shown.total);
            }
            for finding in &measured.findings {
                let mib = finding.mib.map_or_else(|| " ".repeat(10), |mib| format!("{mib:>6} MiB"));
                let note = finding.note.as_ref().map_or_else(String::new, |note| format!(": {note}"));
                let _ = writeln!(text, "  {:<38}{mib}  {}{note}", finding.probe, finding.verdict.name());
            }
            for (file, names) in &measured.functions {
                let _ = writeln!(text, "  in {file}: {}", names.join(", "));
            }
        }
        text
    }
}

/// The isolations that a pool can name, for what a table lacks.
pub const ISOLATIONS: [&str; 5] = ["none", "driver", "mps", "hami-core", "vcuda"];

/// A Markdown table of these reports, with a line for each isolation of which there is none.
#[must_use]
pub fn table(reports: &[Report]) -> String {
    let mut text = String::from(
        "| limited by | client | limit | held | not held | `cuMemGetInfo` shows | functions of others |\n|---|---|---|---|---|---|---|\n",
    );
    for report in reports {
        for measured in &report.clients {
            let limit = report.limit_mib;
            let _ = write!(text, "| {} | {} | {limit} MiB | ", report.isolation, measured.client);
            if let Some(error) = &measured.error {
                let _ = writeln!(text, "not measured: {} | | | |", error.replace('|', "\\|"));
                continue;
            }
            let (held, tried) = (
                measured.with(|verdict| verdict == Verdict::Held).len(),
                measured.with(|verdict| verdict != Verdict::Absent).len(),
            );
            let shows = measured.shown.map_or_else(String::new, |shown| format!("{} MiB", shown.total));
            let _ = writeln!(
                text,
                "{held} of {tried} | {} | {shows} | {} |",
                not_held(measured),
                others(measured)
            );
        }
    }
    let missing = ISOLATIONS.iter().filter(|name| !reports.iter().any(|report| report.isolation == **name));
    for isolation in missing {
        let _ = writeln!(text, "| `{isolation}` on a card | all | | not run | | | |");
    }
    text
}

fn not_held(measured: &Measured) -> String {
    let all = measured.with(|verdict| !verdict.is_good());
    if all.len() > 4 && all.len() == measured.with(|verdict| verdict != Verdict::Absent).len() {
        return format!("all: {}", all.first().map_or("", |finding| finding.verdict.name()));
    }
    let shown = |finding: &&Finding| format!("{} ({})", finding.probe, finding.verdict.name());
    all.iter().map(shown).collect::<Vec<_>>().join("; ")
}

/// How many of the functions are in which file, where it is more than one.
fn others(measured: &Measured) -> String {
    if measured.functions.len() < 2 {
        return String::new();
    }
    let file = |path: &String| Path::new(path).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let shown = |(path, names): (&String, &Vec<String>)| format!("{} in `{}`", names.len(), file(path));
    measured.functions.iter().map(shown).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(verdicts: &[Verdict]) -> Report {
        let finding = |(number, verdict): (usize, &Verdict)| Finding {
            probe: format!("probe {number}"),
            verdict: *verdict,
            mib: Some(64),
            note: None,
        };
        let findings = verdicts.iter().enumerate().map(finding).collect();
        let shown = Some(Shown { free: 100, total: 4096, device: 4096 });
        let measured = Measured { client: "C".into(), shown, findings, ..Measured::default() };
        Report { isolation: "none".into(), limit_mib: 64, clients: vec![measured] }
    }

    #[test]
    fn only_what_is_held_or_not_there_is_good() {
        use Verdict::{Absent, Exceeded, Failed, Held, Kept, Refused, Unproven};
        assert!(report(&[Held, Absent]).holds());
        for bad in [Exceeded, Failed, Kept, Refused, Unproven] {
            assert!(!report(&[Held, bad]).holds(), "{bad:?}");
        }
        let mut broken = report(&[Held]);
        broken.clients[0].error = Some("cuInit answered 100".into());
        assert!(!broken.holds());
        assert!(!Report { clients: Vec::new(), ..broken }.holds(), "nothing was measured");
    }

    #[test]
    fn a_card_without_room_proves_nothing() {
        let setting = Setting { limit_mib: 1024, environment: Vec::new() };
        let mut measured = report(&[Verdict::Held, Verdict::Exceeded]).clients.remove(0);
        measured.doubt(&setting);
        assert_eq!(measured.findings[0].verdict, Verdict::Unproven);
        assert_eq!(measured.findings[1].verdict, Verdict::Exceeded);
        measured.findings[0].verdict = Verdict::Held;
        // What limits it shows the limit.
        measured.shown = Some(Shown { free: 600, total: 1024, device: 1024 });
        measured.doubt(&setting);
        assert_eq!(measured.findings[0].verdict, Verdict::Held);
    }

    #[test]
    fn a_table_names_what_was_not_run() {
        let table = table(&[report(&[Verdict::Held, Verdict::Exceeded, Verdict::Absent])]);
        assert!(
            table.contains("| none | C | 64 MiB | 1 of 2 | probe 1 (exceeded) | 4096 MiB |  |"),
            "{table}"
        );
        assert!(table.contains("| `mps` on a card | all | | not run |"), "{table}");
        assert!(!table.contains("`none`"), "{table}");
    }
}
