//! `ListAndWatch`: the list of one resource, sent when it differs from the last one sent.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::decide::{ListedDevice, Listing, Resource};
use crate::node::Node;
use crate::proto::deviceplugin::{Device, HEALTHY, ListAndWatchResponse, NumaNode, TopologyInfo, UNHEALTHY};

/// The stream type of `ListAndWatch`.
pub(super) type ListStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

/// Starts sending. Ends with the token, or when the kubelet hangs up.
pub(super) fn watch_list(node: Arc<Node>, resource: Resource, stop: CancellationToken) -> ListStream {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        let mut changes = node.changes();
        let mut last: Option<Listing> = None;
        loop {
            changes.borrow_and_update();
            let (listing, back) = node.with(|books, now| {
                let back = books.next_return(now).map(|at| Duration::from_millis(at - now));
                (books.listing(&resource, now), back)
            });
            if last.as_ref() != Some(&listing) {
                let list = node.with(|books, _| books.spell_out(&listing));
                let message = ListAndWatchResponse { devices: list.into_iter().map(device).collect() };
                if sender.send(Ok(message)).await.is_err() {
                    return;
                }
                last = Some(listing);
            }
            tokio::select! {
                changed = changes.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(back.unwrap_or(Duration::MAX)) => {}
                () = sender.closed() => return,
                () = stop.cancelled() => return,
            }
        }
    });
    Box::pin(ReceiverStream::new(receiver))
}

fn device(listed: ListedDevice) -> Device {
    let nodes: Vec<NumaNode> = listed.numa.iter().map(|id| NumaNode { id: *id }).collect();
    Device {
        id: listed.id,
        health: if listed.healthy { HEALTHY } else { UNHEALTHY }.to_owned(),
        topology: (!nodes.is_empty()).then_some(TopologyInfo { nodes }),
    }
}
