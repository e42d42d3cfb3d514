//! Compares the ledger with pod-resources, the API and NVML, and reports drift.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::decide::Drift;
use crate::node::{Node, NodeEvent};

/// Time between two lists that were requested because they could free something.
const AFTER_CHANGE: Duration = Duration::from_secs(1);
const INTERVAL: Duration = Duration::from_secs(15);
/// Grants younger than this (milliseconds) are not compared: sources follow one another.
const MIN_AGE: u64 = 10_000;

/// Lists pod-resources when that could free something, else every `INTERVAL`. `drift` gets what differs, one sentence each.
pub async fn run(node: Arc<Node>, drift: watch::Sender<Vec<String>>, stop: CancellationToken) {
    let mut changes = node.deferred_changes();
    let mut next = tokio::time::Instant::now();
    let mut before = Vec::new();
    loop {
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return },
            () = tokio::time::sleep_until(next) => {}
            () = stop.cancelled() => return,
        }
        changes.borrow_and_update();
        let due = tokio::time::Instant::now() >= next;
        let wanted = node.with(|state, now| {
            state.reconcile(now);
            state.needs_pod_resources()
        });
        if !due && !wanted {
            continue;
        }
        next = tokio::time::Instant::now() + if wanted { AFTER_CHANGE } else { INTERVAL };
        match node.list_pod_resources().await {
            Ok(rows) => {
                let found = node.with(|state, now| state.drift(&rows, MIN_AGE, now));
                // Sources follow one another: a difference counts when it is found twice.
                let twice: Vec<_> = found.iter().filter(|d| before.contains(*d)).cloned().collect();
                before = found;
                report_drift(&node, &twice, &drift);
            }
            Err(error) => tracing::debug!(%error, "pod-resources did not answer"),
        }
        // Lists are not requested in a loop, however often the state changes.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn report_drift(node: &Node, found: &[Drift], drift: &watch::Sender<Vec<String>>) {
    let cards = node.with(|state, _| state.ledger().len());
    for card in 0..cards {
        let count = found.iter().filter(|d| d.card.position() == card).count();
        node.metrics.drift(&card.to_string(), i64::try_from(count).unwrap_or(i64::MAX));
    }
    let text: Vec<String> = found.iter().map(|d| format!("{}: {}", d.card, d.what)).collect();
    drift.send_if_modified(|before| {
        let changed = *before != text;
        if changed {
            for line in text.iter().filter(|line| !before.contains(line)) {
                tracing::warn!(drift = %line, "sources disagree");
                node.record_event(NodeEvent::warning("CardDrift", line.clone()));
            }
            *before = text;
        }
        changed
    });
}
