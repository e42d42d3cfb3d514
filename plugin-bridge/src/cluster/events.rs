//! Events on the agent's Node.

use k8s_openapi::api::core::v1::{Node as ApiNode, ObjectReference};
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Client, Resource};
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;

use crate::cluster::publish::MANAGER;
use crate::node::NodeEvent;

/// Publishes events until `stop`, each by a recorder of its own: one recorder would merge those with the same reason into a series
/// with the note of the first, and a second card would not be named.
pub async fn run(
    client: Client,
    node_name: String,
    mut events: broadcast::Receiver<NodeEvent>,
    stop: CancellationToken,
) {
    let reporter = Reporter { controller: MANAGER.into(), instance: Some(node_name.clone()) };
    let node = ObjectReference {
        api_version: Some(ApiNode::api_version(&()).into_owned()),
        kind: Some(ApiNode::kind(&()).into_owned()),
        name: Some(node_name.clone()),
        // The kubelet's own events about its node carry the name here too; `kubectl describe node` looks for it.
        uid: Some(node_name),
        ..ObjectReference::default()
    };
    loop {
        let notice = tokio::select! {
            notice = events.recv() => match notice {
                Ok(notice) => notice,
                Err(broadcast::error::RecvError::Lagged(missed)) => {
                    tracing::warn!(missed, "events dropped: the API server is too slow");
                    continue;
                }
                Err(broadcast::error::RecvError::Closed) => return,
            },
            () = stop.cancelled() => return,
        };
        let event = Event {
            type_: if notice.warning { EventType::Warning } else { EventType::Normal },
            reason: notice.reason.to_owned(),
            note: Some(notice.note),
            action: notice.reason.to_owned(),
            secondary: None,
        };
        let recorder = Recorder::new(client.clone(), reporter.clone());
        if let Err(error) = recorder.publish(&event, &node).await {
            tracing::debug!(%error, "writing an Event failed");
        }
    }
}
