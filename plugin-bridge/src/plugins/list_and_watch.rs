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
use gpu_migrate_kubelet_api::deviceplugin::{HEALTHY, ListAndWatchResponse, ListWriter, UNHEALTHY};

/// The stream type of `ListAndWatch`.
pub(super) type ListStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

/// The `ListAndWatch` streams of one registration.
#[derive(Clone, Debug, Default)]
pub struct Streams {
    /// Ends them.
    pub stop: CancellationToken,
    /// The kubelet has ended one: it does not use this registration any more.
    pub lost: CancellationToken,
}

/// Starts sending. Ends with the token, or when the kubelet hangs up.
pub(super) fn watch_list(node: Arc<Node>, resource: Resource, streams: Streams) -> ListStream {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        let Streams { stop, lost } = streams;
        let mut changes = node.deferred_changes();
        let mut last: Option<Listing> = None;
        loop {
            changes.borrow_and_update();
            let (listing, back) = node.with(|state, now| {
                let back = state.next_withdrawal_end(now).map(|at| Duration::from_millis(at - now));
                (state.listing(&resource, now), back)
            });
            if last.as_ref() != Some(&listing) {
                let mut writer = ListWriter::default();
                node.with(|state, _| state.for_each_device(&listing, |device| write(device, &mut writer)));
                // Before it is sent: the kubelet may act on it at once.
                node.with(|state, now| state.observe_sent(&resource, &listing, now));
                if sender.send(Ok(writer.finish())).await.is_err() {
                    lost.cancel();
                    break;
                }
                last = Some(listing);
            }
            tokio::select! {
                changed = changes.changed() => if changed.is_err() { break },
                () = tokio::time::sleep(back.unwrap_or(Duration::MAX)) => {}
                () = sender.closed() => {
                    lost.cancel();
                    break;
                }
                () = stop.cancelled() => break,
            }
        }
        node.with(|state, _| state.observe_stream_end(&resource));
    });
    Box::pin(ReceiverStream::new(receiver))
}

fn write(listed: &ListedDevice, writer: &mut ListWriter) {
    writer.add(&listed.id, if listed.healthy { HEALTHY } else { UNHEALTHY }, &listed.numa);
}
