//! The dashboard and the alerts, on what a real Prometheus reads of the components.

use std::{collections::BTreeSet, fs, time::Duration};

use anyhow::{Context, Result, ensure};
use gpu_migrate_cluster_tests::{
    Cluster,
    cluster::TIMEOUT,
    migration::{GPU, all_uuids},
    stage::OPERATORS,
    wait::Seen,
    workload::{deployment, only_card, pod_spec},
};
use gpu_migrate_operator::query::Prometheus;
use serde_json::{Value, json};

const DASHBOARD: &str = include_str!("../../../../deploy/chart/gpu-migrate/files/dashboard.json");
/// Grafana's own variable is four scrapes at least.
const RATE_INTERVAL: &str = "15s";
/// So long nothing happens, and no alert may want to fire.
const IDLE: Duration = Duration::from_secs(20);

/// Each query of the dashboard returns series once both kinds of pods use cards; no alert wants to fire while nothing is wrong, and the
/// one for an extender that is gone does once it is.
pub(crate) async fn each_query_returns_series_and_no_alert_fires_without_a_cause(
    cluster: &mut Cluster,
) -> Result<()> {
    cluster.add_operators(1, &[])?;
    let namespace = cluster.project("watched", json!({})).await?;
    // A review that fails while the policy is waited for is over then.
    let url = cluster.start_prometheus().await?;
    let legacy = cluster.namespace("legacy", &[]).await?;
    cluster.create_deployment(&namespace, deployment("train", 1, GPU)).await?;
    cluster.create_pod(&legacy, "whole", pod_spec(GPU)).await?;
    let (_, share) = cluster.all_running(&namespace, "train", 1).await?.remove(0);
    let (_, whole) = cluster.running(&legacy, "whole").await?;
    let folder = cluster.setup.layout.nvml_faults();
    fs::create_dir_all(&folder)?;
    let mut files = Vec::new();
    for container in [share, whole] {
        let card = only_card(&container)?;
        let index = all_uuids().iter().position(|uuid| *uuid == card).context("a card of the stand-in")?;
        files.push(folder.join(format!("process-{index}")));
        fs::write(&files[files.len() - 1], format!("{} 512 30\n", container.pid))?;
    }
    // An application's, which closes no card; the second is the increase of which a query is.
    files.push(folder.join("xid-7"));
    let card = all_uuids().pop().context("eight cards")?;
    let seen = async {
        for xids in 1_u8..=2 {
            fs::write(&files[2], "13")?;
            let reported = format!(
                "gpu_migrate_node_agent_card_xid_errors_total{{xid=\"13\",UUID=\"{card}\"}} >= {xids}"
            );
            until_series(cluster, &url, &[reported]).await?;
        }
        until_series(cluster, &url, &dashboard()?).await?;
        idle(&url).await
    };
    let outcome = seen.await;
    for file in files.iter().filter(|file| file.exists()) {
        fs::remove_file(file)?;
    }
    outcome?;

    cluster.component("gpu-migrate-extender")?.stop()?;
    let gone = "ALERTS{alertname=\"GpuMigrateExtenderNotReady\"}".to_owned();
    let noticed = until_series(cluster, &url, &[gone]).await;
    cluster.start_component("gpu-migrate-extender")?;
    noticed?;
    cluster.stop_prometheus()?;
    cluster.remove(OPERATORS[0])
}

/// The queries of all panels, as Grafana would send them.
fn dashboard() -> Result<Vec<String>> {
    let dashboard: Value = serde_json::from_str(DASHBOARD)?;
    let mut queries = Vec::new();
    let mut values = vec![&dashboard];
    while let Some(value) = values.pop() {
        if let Some(query) = value["expr"].as_str() {
            queries.push(query.replace("$__rate_interval", RATE_INTERVAL));
        }
        values.extend(value.as_array().into_iter().flatten());
        values.extend(value.as_object().into_iter().flat_map(|object| object.values()));
    }
    ensure!(queries.len() > 30 && !queries.iter().any(|query| query.contains('$')), "{queries:?}");
    Ok(queries)
}

async fn series(url: &str, query: &str) -> Result<Vec<Value>> {
    let answer = Prometheus::default().query(url, query).await.map_err(anyhow::Error::msg)?;
    Ok(answer["data"]["result"].as_array().cloned().unwrap_or_default())
}

async fn until_series(cluster: &mut Cluster, url: &str, queries: &[String]) -> Result<()> {
    cluster
        .until("each query to return series", TIMEOUT, || async {
            let mut empty = Vec::new();
            for query in queries {
                if series(url, query).await.with_context(|| query.clone())?.is_empty() {
                    empty.push(query);
                }
            }
            Ok(Seen::from_bool(empty.is_empty(), || format!("these return none: {empty:#?}")))
        })
        .await
}

/// No alert is pending or firing at any of the evaluations, of which there was one every three seconds. How fast this machine is is left out.
async fn idle(url: &str) -> Result<()> {
    tokio::time::sleep(IDLE).await;
    let seconds = IDLE.as_secs();
    let read = series(url, &format!("min_over_time(up[{seconds}s]) == 1")).await?;
    ensure!(read.len() == 5, "not all were read: {read:#?}");
    let alerts = series(url, &format!("max_over_time(ALERTS{{alertname!~\".*Slow\"}}[{seconds}s])")).await?;
    let named: BTreeSet<String> = alerts.iter().map(|alert| alert["metric"].to_string()).collect();
    ensure!(named.is_empty(), "alerts without a cause: {named:#?}");
    Ok(())
}
