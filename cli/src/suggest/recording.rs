//! Recordings: JSON lines that `gpu-migrate top --record` appends, one for each container on each of its cards.

use super::series::{Key, Percents, Seen, Series, is_at_limit};
use gpu_migrate_model::usage::{ContainerUse, UseKind};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{self, BufRead};

/// One line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Sample {
    /// The same for all samples of one look at the cluster.
    pub(crate) time: Timestamp,
    pub(crate) node: String,
    /// Empty where the pod has none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) project: String,
    /// UUID of the card.
    pub(crate) card: String,
    /// Of the card.
    #[serde(default)]
    pub(crate) model: String,
    /// All memory of the card.
    #[serde(default)]
    pub(crate) card_memory_bytes: u64,
    /// Who, what was requested and what is used.
    #[serde(flatten)]
    pub(crate) container: ContainerUse,
}

/// Lines that could not be read.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Skipped {
    pub(crate) count: usize,
    /// The number of the first one, and why.
    pub(crate) first: Option<(usize, String)>,
}

/// What containers of pods are seen to use, added up line by line: a recording of weeks takes no more memory than one of minutes.
#[derive(Debug, Default)]
pub(crate) struct Recording {
    seen: BTreeMap<Key, (Series, Percents, Limited)>,
    /// When a container was seen last, and on which cards then. A sample may be there twice: of two recorders.
    cards: HashMap<(String, String, String), (Timestamp, BTreeSet<String>)>,
    most_cards: HashMap<(String, String, String), usize>,
    pub(crate) skipped: Skipped,
}

/// Samples of a share, and those of them at its limit.
#[derive(Debug, Clone, Copy, Default)]
struct Limited {
    all: u64,
    at_limit: u64,
}

impl Recording {
    /// Adds the lines of a file. One that cannot be read, as the last one of a recorder that was killed, is skipped.
    pub(crate) fn add(&mut self, text: impl BufRead, namespace: Option<&str>) -> io::Result<()> {
        for (number, line) in (1..).zip(text.split(b'\n')) {
            let line = line?;
            if line.trim_ascii().is_empty() {
                continue;
            }
            match serde_json::from_slice::<Sample>(&line) {
                Ok(sample) if namespace.is_none_or(|only| only == sample.container.namespace) => {
                    self.add_sample(sample);
                }
                Ok(_) => {}
                Err(error) => {
                    self.skipped.count += 1;
                    self.skipped.first.get_or_insert_with(|| (number, error.to_string()));
                }
            }
        }
        Ok(())
    }

    fn add_sample(&mut self, sample: Sample) {
        let Sample { time, node: _, project, card, model, card_memory_bytes, container } = sample;
        // What the ledger does not give is nobody's request.
        if container.kind == UseKind::None || container.pod.is_empty() || container.container.is_empty() {
            return;
        }
        let of = (container.namespace.clone(), container.pod.clone(), container.container.clone());
        let (at, cards) = self.cards.entry(of.clone()).or_default();
        if std::mem::replace(at, time) != time {
            cards.clear();
        }
        cards.insert(card.clone());
        let most = self.most_cards.entry(of).or_default();
        *most = (*most).max(cards.len());

        let key =
            Key { namespace: container.namespace, pod: container.pod, container: container.container, card };
        let (series, percents, limited) = self.seen.entry(key).or_default();
        series.project = Some(project).filter(|project| !project.is_empty()).or(series.project.take());
        series.cores_requested = container.cores_requested;
        series.model = model;
        series.card_bytes = Some(card_memory_bytes).filter(|bytes| *bytes > 0);
        let Some(memory) = container.memory_used_bytes else { return };
        series.samples += 1;
        series.first = series.first.min(Some(time)).or(Some(time));
        series.last = series.last.max(Some(time));
        series.peak_bytes = series.peak_bytes.max(Some(memory));
        let Some(percent) = container.utilization_percent else { return };
        percents.add(percent);
        if let (UseKind::Shared, Some(cores)) = (container.kind, container.cores_requested) {
            limited.all += 1;
            limited.at_limit += u64::from(is_at_limit(percent, cores));
        }
    }

    /// All of it.
    pub(crate) fn finish(self) -> Seen {
        let most = self.most_cards;
        let series = self.seen.into_iter().map(|(key, (series, percents, limited))| {
            let of = (key.namespace.clone(), key.pod.clone(), key.container.clone());
            let at_limit = (limited.all > 0).then(|| limited.at_limit as f64 / limited.all as f64);
            let series = Series {
                p50: percents.quantile(0.5),
                p95: percents.quantile(0.95),
                at_limit,
                cards: most.get(&of).and_then(|most| u32::try_from(*most).ok()).unwrap_or(1),
                ..series
            };
            (key, series)
        });
        series.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    pub(crate) fn sample(second: i64, pod: &str, card: u32, use_of: (u32, u64), kind: UseKind) -> Sample {
        Sample {
            time: Timestamp::from_second(1_800_000_000 + second).unwrap(),
            node: "gpu-01".into(),
            project: "danlu".into(),
            card: format!("GPU-{card}"),
            model: "L40S".into(),
            card_memory_bytes: 48 * GIB,
            container: ContainerUse {
                namespace: "danlu".into(),
                pod: pod.into(),
                container: "main".into(),
                kind,
                processes: Some(1),
                utilization_percent: Some(use_of.0),
                memory_used_bytes: Some(use_of.1),
                cores_requested: Some(if kind == UseKind::Legacy { 100 } else { 50 }),
                memory_requested_bytes: Some(48 * GIB),
            },
        }
    }

    fn text(samples: &[Sample]) -> String {
        samples.iter().map(|sample| serde_json::to_string(sample).unwrap() + "\n").collect()
    }

    fn read(text: &str) -> (Seen, Skipped) {
        let mut recording = Recording::default();
        recording.add(text.as_bytes(), None).unwrap();
        let skipped = std::mem::take(&mut recording.skipped);
        (recording.finish(), skipped)
    }

    #[test]
    fn a_line_has_who_what_was_requested_and_what_is_used() {
        let line = text(&[sample(0, "a", 0, (30, GIB), UseKind::Legacy)]);
        insta::assert_snapshot!(line, @r#"{"time":"2027-01-15T08:00:00Z","node":"gpu-01","project":"danlu","card":"GPU-0","model":"L40S","cardMemoryBytes":51539607552,"namespace":"danlu","pod":"a","container":"main","kind":"legacy","processes":1,"utilizationPercent":30,"memoryUsedBytes":1073741824,"coresRequested":100,"memoryRequestedBytes":51539607552}"#);
        assert_eq!(
            serde_json::from_str::<Sample>(&line).unwrap(),
            sample(0, "a", 0, (30, GIB), UseKind::Legacy)
        );
    }

    #[test]
    fn lines_are_added_up_by_container_and_card() {
        let (seen, skipped) = read(&text(&[
            sample(0, "a", 0, (10, GIB), UseKind::Legacy),
            sample(0, "b", 1, (90, 9 * GIB), UseKind::Legacy),
            sample(60, "a", 0, (20, 3 * GIB), UseKind::Legacy),
            sample(120, "a", 0, (30, 2 * GIB), UseKind::Legacy),
        ]));
        assert_eq!((seen.len(), skipped), (2, Skipped::default()));
        let a = &seen.iter().find(|(key, _)| key.pod == "a").unwrap().1;
        assert_eq!((a.samples, a.p50, a.p95, a.peak_bytes), (3, Some(20.0), Some(29.0), Some(3 * GIB)));
        assert_eq!(a.last.unwrap().duration_since(a.first.unwrap()).as_secs(), 120);
        assert_eq!((a.cards, a.at_limit, a.card_bytes), (1, None, Some(48 * GIB)));
        assert_eq!(a.project.as_deref(), Some("danlu"));
    }

    #[test]
    fn a_share_knows_how_often_it_was_at_its_limit() {
        let (seen, _) = read(&text(&[
            sample(0, "a", 0, (45, GIB), UseKind::Shared),
            sample(1, "a", 0, (44, GIB), UseKind::Shared),
            sample(2, "a", 0, (50, GIB), UseKind::Shared),
            sample(3, "a", 0, (0, GIB), UseKind::Shared),
        ]));
        assert_eq!(seen.values().next().unwrap().at_limit, Some(0.5));
    }

    /// A pod of a StatefulSet comes again under its name, on another card: that is not two cards.
    #[test]
    fn cards_are_counted_that_a_container_has_at_one_time() {
        let (one_after_another, _) = read(&text(&[
            sample(0, "a", 0, (1, GIB), UseKind::Legacy),
            sample(60, "a", 1, (1, GIB), UseKind::Legacy),
        ]));
        assert!(one_after_another.values().all(|series| series.cards == 1), "{one_after_another:?}");
        let (at_once, _) = read(&text(&[
            sample(0, "a", 0, (1, GIB), UseKind::Legacy),
            sample(0, "a", 1, (1, GIB), UseKind::Legacy),
        ]));
        assert!(at_once.len() == 2 && at_once.values().all(|series| series.cards == 2), "{at_once:?}");
        let (by_two_recorders, _) = read(&text(&[
            sample(0, "a", 0, (1, GIB), UseKind::Legacy),
            sample(0, "a", 0, (1, GIB), UseKind::Legacy),
        ]));
        assert_eq!(by_two_recorders.values().next().unwrap().cards, 1);
    }

    #[test]
    fn what_cannot_be_read_is_skipped_and_counted() {
        let good = text(&[sample(0, "a", 0, (1, GIB), UseKind::Legacy)]);
        let (seen, skipped) = read(&format!("{good}\n{{\"time\": 3}}\n{}", &good[..40]));
        assert_eq!((seen.len(), skipped.count), (1, 2));
        let (number, why) = skipped.first.unwrap();
        assert!(number == 3 && why.contains("invalid type"), "{number}: {why}");
    }

    #[test]
    fn who_holds_nothing_and_whose_use_is_not_known_has_no_evidence() {
        let mut unseen = sample(0, "a", 0, (1, GIB), UseKind::Legacy);
        (unseen.container.utilization_percent, unseen.container.memory_used_bytes) = (None, None);
        let (seen, _) = read(&text(&[unseen, sample(0, "b", 0, (1, GIB), UseKind::None)]));
        assert_eq!(seen.len(), 1);
        let series = seen.values().next().unwrap();
        assert_eq!((series.samples, series.p95, series.peak_bytes), (0, None, None));
    }
}
