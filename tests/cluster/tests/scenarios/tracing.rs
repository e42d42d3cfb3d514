//! Traces of pods, in a real collector.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context, Result};
use axum::{Json, Router, extract::State, routing::post};
use gpu_migrate_cluster_tests::{
    Cluster, cluster::TIMEOUT, migration::GPU, wait::Seen, workload::deployment,
};
use gpu_migrate_model::names::Dialect;
use serde_json::{Value, json};
use tokio::net::TcpListener;

const FLAG: &str = "otlp-endpoint";

/// From the review to the start of the container, each below the one before; PreStartContainer is called for each resource.
const PATH: [&str; 5] = [
    "gpu-migrate-webhook: review",
    "gpu-migrate-extender: filter",
    "gpu-migrate-extender: bind",
    "gpu-migrate-bridge: Allocate",
    "gpu-migrate-bridge: PreStartContainer",
];

/// A span as the collector sends it on.
#[derive(Clone, Debug)]
struct Span {
    trace: String,
    parent: String,
    name: String,
    attributes: BTreeMap<String, String>,
}

/// By their IDs.
type Spans = Arc<Mutex<BTreeMap<String, Span>>>;

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn attributes(of: &Value) -> BTreeMap<String, String> {
    let all = of["attributes"].as_array().into_iter().flatten();
    all.map(|one| (text(&one["key"]), text(&one["value"]["stringValue"]))).collect()
}

async fn receive(State(spans): State<Spans>, Json(request): Json<Value>) -> Json<Value> {
    let each = |of: &Value, name: &str| of[name].as_array().cloned().unwrap_or_default();
    let mut spans = spans.lock().unwrap_or_else(PoisonError::into_inner);
    for of_program in each(&request, "resourceSpans") {
        let service = attributes(&of_program["resource"]).remove("service.name").unwrap_or_default();
        for span in each(&of_program, "scopeSpans").iter().flat_map(|scope| each(scope, "spans")) {
            let received = Span {
                trace: text(&span["traceId"]),
                parent: text(&span["parentSpanId"]),
                name: format!("{service}: {}", text(&span["name"])),
                attributes: attributes(&span),
            };
            spans.insert(text(&span["spanId"]), received);
        }
    }
    Json(json!({}))
}

/// Each converted pod has one trace, from its review to the start of its container, and the collector has it.
pub(crate) async fn a_collector_gets_one_trace_of_each_pod(cluster: &mut Cluster) -> Result<()> {
    let spans = Spans::default();
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    let routes = Router::new().route("/v1/traces", post(receive)).with_state(spans.clone());
    let serving = tokio::spawn(async move { axum::serve(listener, routes).await });
    let endpoint = cluster.start_collector(port).await?;
    cluster.restart_webhook(&[(FLAG, &endpoint)]).await?;
    cluster.one_extender(&[(FLAG, &endpoint)])?;
    cluster.restart_agent_with(&[(FLAG, Path::new(&endpoint))], &[]).await?;
    cluster.wait_for_webhook().await?;

    let namespace = cluster.project("traced", json!({})).await?;
    cluster.create_deployment(&namespace, deployment("train", 2, GPU)).await?;
    let pods = cluster.all_running(&namespace, "train", 2).await?;
    let pods: BTreeSet<String> = pods.into_iter().filter_map(|(pod, _)| pod.metadata.uid).collect();
    let dialect = Dialect::default();
    cluster
        .until("the collector to have the pods' traces", TIMEOUT, || async {
            let spans = spans.lock().unwrap_or_else(PoisonError::into_inner);
            let whole = |resource: &str| {
                let starts = spans.values().filter(|span| {
                    span.attributes.get("gpu_migrate.resource").is_some_and(|of| of == resource)
                        && path(&spans, span).is_some_and(|path| path == PATH)
                });
                starts.filter_map(|span| span.attributes.get("k8s.pod.uid").cloned()).collect::<BTreeSet<_>>()
            };
            let there = [&dialect.cores, &dialect.memory].iter().all(|resource| whole(resource) == pods);
            Ok(Seen::from_bool(there, || format!("of {pods:?}: {spans:#?}")))
        })
        .await?;
    let of_namespace =
        |span: &&Span| span.attributes.get("k8s.namespace.name").is_some_and(|of| *of == namespace);
    let traces: BTreeSet<String> = {
        let spans = spans.lock().unwrap_or_else(PoisonError::into_inner);
        spans.values().filter(of_namespace).map(|span| span.trace.clone()).collect()
    };
    anyhow::ensure!(traces.len() == pods.len(), "{traces:?} of {pods:?}");

    cluster.restart_webhook(&[]).await?;
    cluster.one_extender(&[])?;
    cluster.restart_agent_with(&[], &[]).await?;
    cluster.stop_collector()?;
    serving.abort();
    cluster.wait_for_webhook().await.context("the webhook as it was")
}

/// The names from the first span of a trace to this one; nothing while one is missing, or of another trace.
fn path(spans: &BTreeMap<String, Span>, span: &Span) -> Option<Vec<String>> {
    let mut path = vec![span.name.clone()];
    let mut at = span;
    while !at.parent.is_empty() {
        at = spans.get(&at.parent).filter(|parent| parent.trace == span.trace)?;
        path.insert(0, at.name.clone());
    }
    Some(path)
}
