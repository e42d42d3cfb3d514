//! What containers used, asked of a Prometheus that scrapes the node agents.
//!
//! Prometheus adds up over the window, so that a week of many containers is a few short answers.

use super::series::{AT_LIMIT_PERCENT, Key, Seen};
use crate::progress::Progress;
use anyhow::{Context as _, bail};
use gpu_migrate_operator::query::Prometheus;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};

/// What all metrics of containers begin with.
const CONTAINER: &str = "gpu_migrate_node_agent_container_";
/// Of how many containers it is known is counted by it.
const MEMORY: &str = "memory_used_bytes";
/// How far apart the moments are at which something is computed of several series.
const STEP: &str = "5m";

/// A value of a series.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Samples,
    First,
    Last,
    P50,
    P95,
    Peak,
    Cores,
    AtLimit,
    Cards,
}

/// The queries, over a window such as `7d`.
fn queries(window: &str, namespace: Option<&str>) -> Vec<(Part, String)> {
    // A Go string, as JSON writes one.
    let only = namespace.map(|name| format!(",namespace={}", Value::from(name))).unwrap_or_default();
    let series = |name: &str| format!("{CONTAINER}{name}{{kind=~\"legacy|shared\"{only}}}");
    let shares = |name: &str| format!("{CONTAINER}{name}{{kind=\"shared\"{only}}}");
    let (memory, busy) = (series(MEMORY), series("utilization_ratio"));
    let limit = f64::from(AT_LIMIT_PERCENT) / 100.0;
    let limited = format!("{} >= bool {limit} * {}", shares("utilization_ratio"), shares("requested_ratio"));
    vec![
        (Part::Samples, format!("count_over_time({memory}[{window}])")),
        (Part::First, format!("min_over_time(timestamp({memory})[{window}:{STEP}])")),
        (Part::Last, format!("max_over_time(timestamp({memory})[{window}:{STEP}])")),
        (Part::P50, format!("quantile_over_time(0.5, {busy}[{window}])")),
        (Part::P95, format!("quantile_over_time(0.95, {busy}[{window}])")),
        (Part::Peak, format!("max_over_time({memory}[{window}])")),
        (Part::Cores, format!("last_over_time({}[{window}])", series("requested_ratio"))),
        (Part::AtLimit, format!("avg_over_time(({limited})[{window}:{STEP}])")),
        (
            Part::Cards,
            // The inner one: for a while after a restart of an agent, a card can have two series.
            format!(
                "max_over_time(count by (namespace, pod, container) (count by (namespace, pod, container, UUID) ({memory}))[{window}:{STEP}])"
            ),
        ),
    ]
}

/// Memory and model of every card of the window.
fn cards_query(window: &str) -> String {
    format!("last_over_time(gpu_migrate_node_agent_card_memory_bytes[{window}])")
}

/// One of the series of an answer.
#[derive(Debug, Deserialize)]
struct Row {
    metric: BTreeMap<String, String>,
    /// When, and the value as a text.
    value: (f64, String),
}

impl Row {
    fn label(&self, name: &str) -> String {
        self.metric.get(name).cloned().unwrap_or_default()
    }

    fn key(&self) -> Key {
        Key {
            namespace: self.label("namespace"),
            pod: self.label("pod"),
            container: self.label("container"),
            card: self.label("UUID"),
        }
    }

    /// `None` where it is no number.
    fn number(&self) -> Option<f64> {
        self.value.1.parse().ok().filter(|number: &f64| number.is_finite())
    }
}

fn rows(mut answer: Value) -> anyhow::Result<Vec<Row>> {
    let result = answer.pointer_mut("/data/result").map(Value::take).unwrap_or_default();
    serde_json::from_value(result).context("the answer is no list of series, as Prometheus writes one")
}

/// Asks for everything.
///
/// # Errors
/// Prometheus cannot be asked, or its labels do not name the containers.
pub(super) async fn read(
    prometheus: &Prometheus,
    url: &str,
    window: &str,
    namespace: Option<&str>,
) -> anyhow::Result<Seen> {
    let queries = queries(window, namespace);
    let progress = Progress::new(queries.len() as u64 + 1);
    let mut seen = Answers::default();
    for (part, promql) in &queries {
        progress.step(format!("asking {url}"));
        let answer = prometheus.query(url, promql).await.map_err(anyhow::Error::msg)?;
        seen.add(*part, rows(answer).with_context(|| format!("{url}: query {promql}"))?)?;
    }
    progress.step(format!("asking {url}"));
    let promql = cards_query(window);
    let answer = prometheus.query(url, &promql).await.map_err(anyhow::Error::msg)?;
    Ok(seen.finish(&rows(answer).with_context(|| format!("{url}: query {promql}"))?))
}

/// Answers, by container and card.
#[derive(Debug, Default)]
struct Answers {
    seen: Seen,
    cards: HashMap<(String, String, String), u32>,
}

impl Answers {
    /// A restart of an agent or of Prometheus can make two series of one: they are put together.
    fn add(&mut self, part: Part, rows: Vec<Row>) -> anyhow::Result<()> {
        for row in rows {
            if row.metric.contains_key("exported_pod") {
                bail!(
                    "Prometheus has renamed the node agents' label pod to exported_pod: expected that the scrape has honorLabels: true, as the chart's PodMonitor"
                );
            }
            let Some(number) = row.number() else { continue };
            let key = row.key();
            if part == Part::Cards {
                self.cards.insert((key.namespace, key.pod, key.container), number as u32);
                continue;
            }
            if key.pod.is_empty() || key.container.is_empty() {
                continue;
            }
            let series = self.seen.entry(key).or_default();
            let time = || Timestamp::from_millisecond((number * 1000.0) as i64).ok();
            let most = |old: Option<f64>, new: f64| Some(old.map_or(new, |old| old.max(new)));
            match part {
                Part::Samples => series.samples += number as u64,
                Part::First => series.first = [series.first, time()].into_iter().flatten().min(),
                Part::Last => series.last = [series.last, time()].into_iter().flatten().max(),
                Part::P50 => series.p50 = most(series.p50, number * 100.0),
                Part::P95 => series.p95 = most(series.p95, number * 100.0),
                Part::Peak => series.peak_bytes = series.peak_bytes.max(Some(number as u64)),
                Part::Cores => {
                    let cores = Some((number * 100.0).round() as u32);
                    series.cores_requested = series.cores_requested.max(cores);
                }
                Part::AtLimit => series.at_limit = most(series.at_limit, number),
                Part::Cards => {}
            }
        }
        Ok(())
    }

    fn finish(self, cards: &[Row]) -> Seen {
        let of_card: HashMap<String, &Row> = cards.iter().map(|row| (row.label("UUID"), row)).collect();
        let mut seen = self.seen;
        for (key, series) in &mut seen {
            let of = (key.namespace.clone(), key.pod.clone(), key.container.clone());
            series.cards = self.cards.get(&of).copied().unwrap_or(1);
            if let Some(row) = of_card.get(&key.card) {
                series.model = row.label("modelName");
                series.card_bytes = row.number().map(|bytes| bytes as u64);
            }
        }
        seen
    }
}

/// Why there is nothing.
pub(super) fn nothing(url: &str, window: &str, namespace: Option<&str>) -> String {
    let only = namespace.map(|name| format!(" of namespace {name}")).unwrap_or_default();
    format!(
        "{url}: no series {CONTAINER}{MEMORY}{only} in the last {window}; expected one for each container with a card: are the node agents scraped (chart value metrics.podMonitor.enabled), and do they see processes (bridge.hostPID)?"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suggest::series::Series;
    use serde_json::json;

    fn row(labels: Value, value: &str) -> Row {
        serde_json::from_value(json!({"metric": labels, "value": [1_800_000_000.5, value]})).unwrap()
    }

    fn of(pod: &str, more: &[(&str, &str)]) -> Value {
        let mut labels = json!({"namespace": "danlu", "pod": pod, "container": "main", "UUID": "GPU-0"});
        more.iter().for_each(|(name, value)| labels[*name] = json!(value));
        labels
    }

    #[test]
    fn queries_are_over_the_window_and_of_one_namespace() {
        let queries = queries("7d", Some("danlu"));
        let of = |part| &queries.iter().find(|(of, _)| *of == part).unwrap().1;
        assert_eq!(
            of(Part::P95),
            "quantile_over_time(0.95, gpu_migrate_node_agent_container_utilization_ratio{kind=~\"legacy|shared\",namespace=\"danlu\"}[7d])"
        );
        assert_eq!(
            of(Part::AtLimit),
            "avg_over_time((gpu_migrate_node_agent_container_utilization_ratio{kind=\"shared\",namespace=\"danlu\"} >= bool 0.9 * gpu_migrate_node_agent_container_requested_ratio{kind=\"shared\",namespace=\"danlu\"})[7d:5m])"
        );
        assert!(
            super::queries("1h", Some("a\"b")).iter().all(|(_, query)| query.contains(r#"namespace="a\"b""#))
        );
        assert!(super::queries("1h", None).iter().all(|(_, query)| !query.contains("namespace=")));
    }

    /// Two series of one container: the agent was restarted, and has another `instance` since.
    #[test]
    fn series_of_one_container_are_put_together() {
        let mut answers = Answers::default();
        for (part, values) in [
            (Part::Samples, ["100", "50"]),
            (Part::First, ["1800000600", "1800000000"]),
            (Part::Last, ["1800000900", "1800000300"]),
            (Part::P50, ["0.1", "0.2"]),
            (Part::P95, ["0.5", "NaN"]),
            (Part::Peak, ["1073741824", "2147483648"]),
            (Part::Cores, ["1", "1"]),
        ] {
            let instances = ["10.0.0.1:9404", "10.0.0.2:9404"];
            let rows =
                values.iter().zip(instances).map(|(value, at)| row(of("a", &[("instance", at)]), value));
            answers.add(part, rows.collect()).unwrap();
        }
        answers
            .add(Part::Cards, vec![row(json!({"namespace": "danlu", "pod": "a", "container": "main"}), "2")])
            .unwrap();
        let cards = [row(json!({"UUID": "GPU-0", "modelName": "L40S"}), "51539607552")];
        let seen = answers.finish(&cards);
        assert_eq!(seen.len(), 1);
        let expected = Series {
            project: None,
            samples: 150,
            first: Timestamp::from_second(1_800_000_000).ok(),
            last: Timestamp::from_second(1_800_000_900).ok(),
            p50: Some(20.0),
            p95: Some(50.0),
            peak_bytes: Some(2 << 30),
            cores_requested: Some(100),
            at_limit: None,
            cards: 2,
            model: "L40S".into(),
            card_bytes: Some(48 << 30),
        };
        assert_eq!(seen.values().next(), Some(&expected));
    }

    #[test]
    fn a_scrape_that_renames_labels_is_named() {
        let row = row(of("agent-x", &[("exported_pod", "a")]), "1");
        let error = Answers::default().add(Part::Samples, vec![row]).unwrap_err().to_string();
        assert!(error.contains("honorLabels: true"), "{error}");
        assert!(rows(json!({"data": {"result": 3}})).is_err());
        assert!(rows(json!({"status": "success"})).is_err());
    }

    /// By Prometheus' own engine: ten hours of a container with two cards and of a share that is at its limit.
    #[test]
    fn prometheus_evaluates_the_queries() {
        let labels = |pod: &str, card: u32, kind: &str| {
            format!(
                "{{namespace=\"danlu\",pod=\"{pod}\",container=\"main\",UUID=\"GPU-{card}\",kind=\"{kind}\",instance=\"x\"}}"
            )
        };
        let (first, second, share) =
            (labels("a", 0, "legacy"), labels("a", 1, "legacy"), labels("b", 2, "shared"));
        let mut input = Vec::new();
        let mut series = |name: &str, labels: &str, values: &str| {
            input.push(json!({"series": format!("gpu_migrate_node_agent_{name}{labels}"), "values": values}));
        };
        for labels in [&first, &second] {
            series("container_memory_used_bytes", labels, "1000+10x600");
            series("container_utilization_ratio", labels, "0.25x600");
            series("container_requested_ratio", labels, "1x600");
        }
        series("container_memory_used_bytes", &share, "500x600");
        series("container_utilization_ratio", &share, "0.46x600");
        series("container_requested_ratio", &share, "0.5x600");
        let card = "{UUID=\"GPU-0\",modelName=\"L40S\"}";
        series("card_memory_bytes", card, "5000x600");

        let of = |value: &str, of_share: &str| {
            vec![
                (first.clone(), value.to_owned()),
                (second.clone(), value.to_owned()),
                (share.clone(), of_share.to_owned()),
            ]
        };
        let named = |name: &str, rows: Vec<(String, String)>| {
            let named = rows
                .into_iter()
                .map(|(labels, value)| (format!("gpu_migrate_node_agent_{name}{labels}"), value));
            named.collect::<Vec<_>>()
        };
        let pod = |pod: &str| format!("{{namespace=\"danlu\",pod=\"{pod}\",container=\"main\"}}");
        let expected = |part: Part| match part {
            Part::Samples => of("601", "601"),
            Part::First => of("0", "0"),
            Part::Last => of("36000", "36000"),
            Part::P50 | Part::P95 => of("0.25", "0.46"),
            Part::Peak => of("7000", "500"),
            Part::Cores => named("container_requested_ratio", of("1", "0.5")),
            Part::AtLimit => vec![(share.clone(), "1".to_owned())],
            Part::Cards => vec![(pod("a"), "2".to_owned()), (pod("b"), "1".to_owned())],
        };
        let queries = queries("7d", Some("danlu")).into_iter().map(|(part, query)| (query, expected(part)));
        let of_cards = named("card_memory_bytes", vec![(card.to_owned(), "5000".to_owned())]);
        let queries = queries.chain([(cards_query("7d"), of_cards)]);
        let checks = queries.map(|(query, rows)| {
            let samples = rows
                .iter()
                .map(|(labels, value)| json!({"labels": labels, "value": value.parse::<f64>().unwrap()}));
            json!({"expr": query, "eval_time": "600m", "exp_samples": samples.collect::<Vec<_>>()})
        });
        let tests = json!({"rule_files": [], "evaluation_interval": "1m",
            "tests": [{"interval": "1m", "input_series": input, "promql_expr_test": checks.collect::<Vec<_>>()}]});
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("queries.yaml");
        std::fs::write(&file, tests.to_string()).unwrap();
        let promtool = std::env::var("PROMTOOL").unwrap_or_else(|_| "promtool".to_owned());
        match std::process::Command::new(&promtool).args(["test", "rules"]).arg(&file).output() {
            Ok(output) => {
                let said = [output.stdout, output.stderr].concat();
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
            }
            Err(error) => gpu_migrate_tests::skipped(&format!(
                "{promtool}: {error} (`prepare promtool` builds it, or set PROMTOOL)"
            )),
        }
    }
}
