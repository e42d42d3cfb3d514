//! The alert rules, run by Prometheus' own promtool on made-up series: each fires for what it is there for and for nothing else,
//! and none in an hour in which nothing happens.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, too, may fail loudly

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

const RULES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/chart/gpu-migrate/files/alerts.yaml");

/// An hour without a pod: everything runs, nothing is asked for. Values a minute apart, in promtool's notation.
const IDLE: &[(&str, &str)] = &[
    ("up{job='apiserver',instance='a'}", "1x60"),
    (
        "apiserver_admission_webhook_admission_duration_seconds_bucket{name='pods.gpu-migrate.io',le='0.1'}",
        "9x60",
    ),
    (
        "apiserver_admission_webhook_admission_duration_seconds_bucket{name='pods.gpu-migrate.io',le='1'}",
        "9x60",
    ),
    (
        "apiserver_admission_webhook_admission_duration_seconds_bucket{name='pods.gpu-migrate.io',le='+Inf'}",
        "9x60",
    ),
    ("gpu_migrate_extender_calls_total{verb='Filter',outcome='Error'}", "0x60"),
    ("gpu_migrate_extender_disputed_cards", "0x60"),
    ("gpu_migrate_extender_ready", "1x60"),
    ("gpu_migrate_extender_unauthorized_total", "0x60"),
    ("gpu_migrate_extender_verb_seconds_bucket{verb='Filter',le='0.1'}", "9x60"),
    ("gpu_migrate_extender_verb_seconds_bucket{verb='Filter',le='1'}", "9x60"),
    ("gpu_migrate_extender_verb_seconds_bucket{verb='Filter',le='+Inf'}", "9x60"),
    ("gpu_migrate_node_agent_allocations_total{node='n',kind='shared',outcome='refused'}", "2x60"),
    ("gpu_migrate_node_agent_cards{node='n',state='Disputed'}", "0x60"),
    ("gpu_migrate_node_agent_cards{node='n',state='Unhealthy'}", "0x60"),
    ("gpu_migrate_node_agent_checkpoint_reads_total{node='n',result='unreadable'}", "2x60"),
    (
        "gpu_migrate_node_agent_container_memory_requested_bytes{node='n',UUID='u',pod='p',kind='shared'}",
        "10x60",
    ),
    ("gpu_migrate_node_agent_container_memory_used_bytes{node='n',UUID='u',pod='p',kind='shared'}", "10x60"),
    ("gpu_migrate_node_agent_container_processes{node='n',UUID='u',pod='p',kind='shared'}", "1x60"),
    ("gpu_migrate_node_agent_drift{node='n',gpu='0'}", "0x60"),
    ("gpu_migrate_node_agent_isolation_ready{node='n',isolation='mps'}", "1x60"),
    ("gpu_migrate_node_agent_publish_failures_total{node='n'}", "2x60"),
    ("gpu_migrate_node_agent_registrations_taken_back_total{node='n'}", "2x60"),
    ("gpu_migrate_node_agent_substitutions_total{node='n'}", "2x60"),
    ("gpu_migrate_operator_actions_total{action='roll_back'}", "2x60"),
    ("gpu_migrate_operator_invalid_templates", "0x60"),
    ("gpu_migrate_operator_leading", "1x60"),
    ("gpu_migrate_operator_policy_stalled{policy='p'}", "0x60"),
    ("gpu_migrate_operator_reconcile_failures_total", "2x60"),
    ("gpu_migrate_webhook_certificate_expiry_timestamp_seconds", "604800x60"),
    ("gpu_migrate_webhook_invalid_policies", "0x60"),
    ("gpu_migrate_webhook_policy_errors_total", "2x60"),
    ("gpu_migrate_webhook_registered", "1x60"),
    ("gpu_migrate_webhook_rejected_total{reason='overload'}", "2x60"),
    ("gpu_migrate_webhook_reviews_total{outcome='conflict'}", "2x60"),
    ("gpu_migrate_webhook_reviews_total{outcome='unknown_project'}", "2x60"),
];

const FAIL_OPEN: &str =
    "apiserver_admission_webhook_fail_open_count{job='apiserver',instance='a',name='pods.gpu-migrate.io'}";

/// What differs from [`IDLE`], and the alert that fires for it: series by their beginning, `""` for none.
const CASES: &[(&str, &str, &str)] = &[
    ("", "", ""),
    ("GpuMigrateCardDisputed", "gpu_migrate_extender_disputed_cards", "0x20 1 0x39"),
    ("GpuMigrateCardDisputed", "gpu_migrate_node_agent_cards{node='n',state='Disputed'}", "0x20 1 0x39"),
    ("GpuMigrateLedgerDrift", "gpu_migrate_node_agent_drift", "0x20 1x6 0x34"),
    ("", "gpu_migrate_node_agent_drift", "0x20 1x2 0x38"),
    ("GpuMigrateCardsDown", "gpu_migrate_node_agent_cards{node='n',state='Unhealthy'}", "0x20 3x6 0x34"),
    (
        "GpuMigrateUnknownProcess",
        "gpu_migrate_node_agent_container_processes{node='n',UUID='u',pod='q',kind='none'}",
        "_x20 1x12 _x28",
    ),
    // A container that starts is named a moment later.
    (
        "",
        "gpu_migrate_node_agent_container_processes{node='n',UUID='u',pod='q',kind='none'}",
        "_x20 1x5 _x35",
    ),
    ("GpuMigrateShareExceeded", "gpu_migrate_node_agent_container_memory_used_bytes", "10x20 12x12 10x28"),
    ("", "gpu_migrate_node_agent_container_memory_used_bytes", "10x20 12x5 10x35"),
    ("GpuMigrateAllocateRefused", "gpu_migrate_node_agent_allocations_total", "0x20 5x40"),
    ("GpuMigrateSubstitutions", "gpu_migrate_node_agent_substitutions_total", "0x20 7x40"),
    ("GpuMigrateRegistrationTakenBack", "gpu_migrate_node_agent_registrations_taken_back_total", "0x20 1x40"),
    ("GpuMigrateCheckpointUnreadable", "gpu_migrate_node_agent_checkpoint_reads_total", "0x20 7x40"),
    ("GpuMigrateAgentCannotPublish", "gpu_migrate_node_agent_publish_failures_total", "0x20 12x40"),
    ("GpuMigrateIsolationNotReady", "gpu_migrate_node_agent_isolation_ready", "1x20 0x3 1x37"),
    ("GpuMigrateExtenderNotReady", "gpu_migrate_extender_ready", "1x20 0x6 1x34"),
    ("GpuMigrateExtenderNotReady", "gpu_migrate_extender_ready", "_x60"),
    ("GpuMigrateExtenderSlow", "gpu_migrate_extender_verb_seconds_bucket{verb='Filter',le='0.1'}", "slow"),
    ("GpuMigrateExtenderErrors", "gpu_migrate_extender_calls_total", "0+10x60"),
    ("GpuMigrateExtenderUnauthorized", "gpu_migrate_extender_unauthorized_total", "0x20 1x40"),
    ("GpuMigrateWebhookNotRegistered", "gpu_migrate_webhook_registered", "1x20 0x12 1x28"),
    ("GpuMigrateWebhookNotRegistered", "gpu_migrate_webhook_registered", "_x60"),
    ("", "gpu_migrate_webhook_registered", "1x20 0x5 1x35"),
    ("GpuMigrateWebhookErrors", "gpu_migrate_webhook_rejected_total", "0+10x60"),
    ("", "gpu_migrate_webhook_rejected_total", "0x20 5x40"),
    (
        "GpuMigrateWebhookSlow",
        "apiserver_admission_webhook_admission_duration_seconds_bucket{name='pods.gpu-migrate.io',le='0.1'}",
        "slow",
    ),
    // The API server counts its first failure from one: there is no zero before it.
    ("GpuMigrateWebhookFailOpen", FAIL_OPEN, "_x20 1x40"),
    ("GpuMigrateWebhookFailOpen", FAIL_OPEN, "3x30 4x30"),
    ("", FAIL_OPEN, "3x60"),
    (
        "GpuMigrateWebhookConnections",
        "gpu_migrate_webhook_connections_closed_total{reason='peer'}",
        "0+10x60",
    ),
    (
        "GpuMigrateWebhookConnections",
        "gpu_migrate_webhook_connections_closed_total{reason='handshake'}",
        "0+10x60",
    ),
    // What every server does with connections that are of no use any more.
    ("", "gpu_migrate_webhook_connections_closed_total{reason='idle'}", "0+10x60"),
    ("GpuMigratePolicyInvalid", "gpu_migrate_webhook_invalid_policies", "0x20 1x7 0x33"),
    ("GpuMigratePoliciesNotRead", "gpu_migrate_webhook_policy_errors_total", "0+1x60"),
    ("GpuMigratePoliciesNotRead", "gpu_migrate_webhook_policy_errors_total", "_x60"),
    ("", "gpu_migrate_webhook_policy_errors_total", "0x20 1x40"),
    ("GpuMigratePolicyConflict", "gpu_migrate_webhook_reviews_total{outcome='conflict'}", "0x20 1x40"),
    ("GpuMigrateUnknownProject", "gpu_migrate_webhook_reviews_total{outcome='unknown_project'}", "0x20 1x40"),
    ("GpuMigrateCertificateExpires", "gpu_migrate_webhook_certificate_expiry_timestamp_seconds", "88000x60"),
    ("GpuMigrateNoLeader", "gpu_migrate_operator_leading", "1x20 0x4 1x36"),
    ("GpuMigrateNoLeader", "gpu_migrate_operator_leading", "_x60"),
    ("GpuMigrateOperatorFails", "gpu_migrate_operator_reconcile_failures_total", "0+5x60"),
    ("GpuMigrateWaveRolledBack", "gpu_migrate_operator_actions_total", "0x20 1x40"),
    ("GpuMigratePolicyStalled", "gpu_migrate_operator_policy_stalled", "0x20 1x17 0x23"),
    ("GpuMigrateTemplateBad", "gpu_migrate_operator_invalid_templates", "0x20 1x7 0x33"),
];

/// One test of promtool: the alerts that fire at any minute of the hour are `expected`.
fn case(expected: &str, changed: &str, values: &str) -> Value {
    let mut series: BTreeMap<String, String> =
        IDLE.iter().map(|(series, values)| ((*series).to_owned(), (*values).to_owned())).collect();
    let known = series.keys().find(|series| !changed.is_empty() && series.starts_with(changed)).cloned();
    match (known, values) {
        (_, "") => {}
        // Every call takes longer than the first bucket's bound.
        (Some(known), "slow") => {
            for le in ["1", "+Inf"] {
                series.insert(known.replace("le='0.1'", &format!("le='{le}'")), "0+10x60".into());
            }
        }
        (known, values) => {
            series.insert(known.unwrap_or_else(|| changed.to_owned()), values.to_owned());
        }
    }
    let samples: Vec<Value> = if expected.is_empty() {
        Vec::new()
    } else {
        vec![json!({"labels": format!("{{alertname='{expected}'}}"), "value": 1})]
    };
    json!({
        "name": format!("{changed} {values}"),
        "interval": "1m",
        "input_series": series.iter().map(|(series, values)| json!({"series": series, "values": values})).collect::<Vec<_>>(),
        "promql_expr_test": [{
            "expr": "group by (alertname) (count_over_time(ALERTS{alertstate='firing'}[1h]))",
            "eval_time": "1h",
            "exp_samples": samples,
        }],
    })
}

#[test]
fn every_alert_fires_for_its_cause_alone_and_none_in_an_idle_hour() {
    let rules: Value = serde_saphyr::from_str(&std::fs::read_to_string(RULES).unwrap()).unwrap();
    let rules = rules["groups"][0]["rules"].as_array().unwrap();
    let named: BTreeSet<&str> = rules.iter().map(|rule| rule["alert"].as_str().unwrap()).collect();
    let fired = CASES.iter().map(|(alert, ..)| *alert).filter(|alert| !alert.is_empty());
    assert_eq!(fired.collect::<BTreeSet<_>>(), named, "each alert has a case");

    let promtool = std::env::var("PROMTOOL").unwrap_or_else(|_| "promtool".to_owned());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("alerts.json");
    let cases: Vec<Value> = CASES.iter().map(|(alert, series, values)| case(alert, series, values)).collect();
    let test = json!({"rule_files": [Path::new(RULES)], "evaluation_interval": "1m", "tests": cases});
    std::fs::write(&file, test.to_string()).unwrap();
    match Command::new(&promtool).args(["test", "rules"]).arg(&file).output() {
        Ok(output) => assert!(
            output.status.success(),
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        ),
        Err(error) => gpu_migrate_tests::skipped(&format!(
            "{promtool}: {error} (`prepare promtool` builds it, or set PROMTOOL)"
        )),
    }
}
