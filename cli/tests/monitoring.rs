//! Alerts and dashboard speak of metrics that there are, and every alert is explained.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, too, may fail loudly

use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn text(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The strings that stand first in each call of `function` in a source.
fn first_strings(source: &str, function: &str) -> Vec<String> {
    let calls = source.split(function).skip(1);
    calls
        .filter_map(|call| call.trim_start().strip_prefix('"')?.split('"').next().map(str::to_owned))
        .collect()
}

/// The first string in each call of `function`, which may follow an argument that is a name.
fn first_arguments(source: &str, function: &str) -> Vec<String> {
    let calls = source.split(function).skip(1);
    let string = |call: &str| {
        let call = call.trim_start();
        let call =
            call.strip_prefix('"').or_else(|| call.split_once(',')?.1.trim_start().strip_prefix('"'))?;
        call.split('"').next().map(str::to_owned)
    };
    calls.filter_map(string).collect()
}

/// Every series that the programs may export: read from what they register, since an unused family is not shown.
fn registered() -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for (component, sources) in [
        ("webhook", &["webhook/src/metrics.rs", "runtime/src/connections.rs"][..]),
        ("extender", &["admission-ext/src/metrics.rs"]),
        ("node_agent", &["plugin-bridge/src/metrics.rs"]),
        ("operator", &["operator/src/metrics.rs"]),
    ] {
        for source in sources {
            let source = text(source);
            let plain = first_strings(&source, ".register(");
            let timed =
                first_strings(&source, ".register_with_unit(").into_iter().map(|name| name + "_seconds");
            for name in plain.into_iter().chain(timed) {
                let name = format!("gpu_migrate_{component}_{name}");
                // Which of these it is, the type says; another one would only be absent.
                all.extend(
                    ["", "_total", "_bucket", "_sum", "_count", "_info"].map(|end| name.clone() + end),
                );
            }
        }
    }
    // What containers use is collected when it is asked for.
    let names = text("plugin-bridge/src/usage/export.rs");
    let of_use =
        ["family(", ".encode_descriptor("].into_iter().flat_map(|function| first_arguments(&names, function));
    all.extend(
        of_use.flat_map(|name| ["", "_total"].map(|end| format!("gpu_migrate_node_agent_{name}{end}"))),
    );
    // The certificates' collector names its metrics itself; the webhook has it.
    let certs = text("certs/src/certs.rs");
    for (name, end) in [
        ("certificate_expiry_timestamp", "_seconds"),
        ("certificates_issued", "_total"),
        ("certificate_errors", "_total"),
    ] {
        assert!(certs.contains(&format!("\"{name}\"")), "{name}");
        all.insert(format!("gpu_migrate_webhook_{name}{end}"));
    }
    all.extend(OF_THE_API_SERVER.map(str::to_owned));
    assert!(all.len() > 200, "the sources are not read as they should be");
    all
}

/// What the API server exports about its calls of webhooks (`k8s.io/apiserver/pkg/admission/metrics`).
const OF_THE_API_SERVER: [&str; 2] = [
    "apiserver_admission_webhook_fail_open_count",
    "apiserver_admission_webhook_admission_duration_seconds_bucket",
];

/// Names of metrics in an expression.
fn used(expression: &str) -> Vec<String> {
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words
        .filter(|word| word.starts_with("gpu_migrate_") || word.starts_with("apiserver_"))
        .map(str::to_owned)
        .collect()
}

fn alerts() -> Vec<Value> {
    let rules: Value = serde_saphyr::from_str(&text("deploy/chart/gpu-migrate/files/alerts.yaml")).unwrap();
    rules["groups"][0]["rules"].as_array().unwrap().clone()
}

fn expressions() -> Vec<String> {
    let dashboard: Value =
        serde_json::from_str(&text("deploy/chart/gpu-migrate/files/dashboard.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    let shown = targets.map(|target| target["expr"].as_str().unwrap().to_owned());
    let asked = alerts().into_iter().map(|alert| alert["expr"].as_str().unwrap().to_owned());
    shown.chain(asked).collect()
}

#[test]
fn alerts_and_dashboard_use_metrics_that_are_registered() {
    let registered = registered();
    for expression in expressions() {
        let used = used(&expression);
        assert!(!used.is_empty(), "{expression}");
        for name in used {
            assert!(registered.contains(&name), "{name} is not registered: {expression}");
        }
    }
}

#[test]
fn every_alert_is_explained_in_the_runbook_and_no_other() {
    let runbook = text("deploy/RUNBOOK.md");
    let words = runbook.split(|c: char| !c.is_ascii_alphanumeric());
    let explained =
        words.filter(|word| word.starts_with("GpuMigrate")).map(str::to_owned).collect::<BTreeSet<_>>();
    let alerts = alerts();
    let named =
        alerts.iter().map(|alert| alert["alert"].as_str().unwrap().to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(named.len(), alerts.len(), "a name stands twice");
    assert_eq!(explained, named);
}

/// A component that is not there exports nothing, and `max(x) < 1` of nothing is nothing.
#[test]
fn an_alert_that_waits_for_too_little_fires_for_nothing_too() {
    let mut count = 0;
    for alert in alerts() {
        let expression = alert["expr"].as_str().unwrap();
        if expression.contains(") < 1") || expression.starts_with("time() - ") {
            let metric = &used(expression)[0];
            assert!(expression.ends_with(&format!(" or absent({metric})")), "{expression}");
            count += 1;
        }
    }
    assert_eq!(count, 3);
}

/// The key that Alertmanager and Grafana show as a link.
#[test]
fn every_alert_links_to_its_runbook() {
    for alert in alerts() {
        let url = alert["annotations"]["runbook_url"].as_str().unwrap_or_default();
        assert!(
            url.starts_with("https://") && url.ends_with("/deploy/RUNBOOK.md#5-signs-and-alerts"),
            "{alert}"
        );
    }
    assert!(text("deploy/RUNBOOK.md").contains("\n## 5. Signs and alerts\n"));
}

/// Labels in braces must be words that the programs use: a typing error would make an alert that never fires.
#[test]
fn label_values_are_words_of_the_programs() {
    let sources = [
        "webhook/src/metrics.rs",
        "webhook/src/configuration.rs",
        "runtime/src/connections.rs",
        "admission-ext/src/metrics.rs",
        "plugin-bridge/src/metrics.rs",
        "operator/src/migrations.rs",
        "model/src/usage.rs",
    ]
    .map(text)
    .join("\n");
    let card_states = format!(
        "{:?}",
        [
            gpu_migrate_model::card::CardState::Free,
            gpu_migrate_model::card::CardState::Unhealthy,
            gpu_migrate_model::card::CardState::Disputed,
        ]
    );
    for expression in expressions() {
        for matcher in expression.split('{').skip(1).filter_map(|rest| rest.split('}').next()) {
            for value in matcher.split('"').skip(1).step_by(2).flat_map(|values| values.split('|')) {
                let known = sources.contains(value) || card_states.contains(value);
                assert!(known, "{value}: {expression}");
            }
        }
    }
}

/// The sources of a program, without its tests.
fn sources(folder: &Path, found: &mut String) {
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let (path, name) = (entry.path(), entry.file_name().into_string().unwrap());
        if path.is_dir() && name != "tests" {
            sources(&path, found);
        } else if name.ends_with(".rs") && name != "tests.rs" {
            let text = std::fs::read_to_string(&path).unwrap();
            found.push_str(text.split("#[cfg(test)]\nmod tests").next().unwrap());
        }
    }
}

/// Users search for the reasons of Events, and filter by them.
#[test]
fn every_reason_of_an_event_is_explained_in_the_runbook_and_no_other() {
    let mut reasons = BTreeSet::new();
    for (program, calls) in [
        ("plugin-bridge", &["NodeEvent::warning(", "NodeEvent::normal(", "Deletion {\n    reason: "][..]),
        ("admission-ext", &["api.warn(&pod, "]),
        ("operator", &["self.event = Some((", "let reason = if "]),
    ] {
        let mut text = String::new();
        sources(&root().join(program).join("src"), &mut text);
        for call in calls {
            let found = if *call == "let reason = if " {
                // One of two.
                let lines = text.split(call).skip(1).map(|rest| rest.split(';').next().unwrap());
                lines.flat_map(|line| line.split('"').skip(1).step_by(2).map(str::to_owned)).collect()
            } else {
                first_strings(&text, call)
            };
            assert!(!found.is_empty(), "{program}: no {call}");
            reasons.extend(found);
        }
    }
    reasons.retain(|reason| reason.starts_with(|first: char| first.is_ascii_uppercase()));
    for runbook in ["deploy/RUNBOOK.md", "deploy/RUNBOOK.zh-CN.md"] {
        let text = text(runbook);
        let table = text.split("\n| reason |").nth(1).unwrap().split("\n\n").next().unwrap();
        let rows = table.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
        assert_eq!(rows.map(str::to_owned).collect::<BTreeSet<_>>(), reasons, "{runbook}");
    }
}
