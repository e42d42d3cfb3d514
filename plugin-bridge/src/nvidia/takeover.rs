//! Takes the registration back from a plugin of NVIDIA's that has registered with the kubelet itself.
//!
//! The kubelet asks the plugin that registered a resource last. So this agent registers over the other one, and uses it from there on: it
//! is called at its own socket, as if it had registered here. Kubelets up to 1.36 replace one plugin by the other; from 1.37 on they keep
//! both and mark a resource unhealthy only when the last one goes, so an agent that is taken off leaves NVIDIA's plugin in force.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use gpu_migrate_kubelet_api::deviceplugin::{RegisterRequest, VERSION};
use gpu_migrate_kubelet_api::directory::{DirectoryWatch, Stamp};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::upstream::Upstreams;
use crate::node::{Node, NodeEvent};

/// Shortest time between two tries for a resource, unless the plugin has started anew: another program may be doing the same.
const PACE: Duration = Duration::from_secs(2);
/// How often it is looked at where nothing changes.
const TICK: Duration = Duration::from_secs(1);

/// What was tried for a resource.
#[derive(Clone, Copy, Default)]
struct Tried {
    /// Since when the plugin is not registered here.
    unregistered: Option<Instant>,
    /// When it was tried last, and of which socket.
    last: Option<(Option<Stamp>, Instant)>,
    /// The socket that the plugin was called at last. While a connection to an older one was not known to be broken, none is called.
    called: Option<Stamp>,
}

/// Looks at each version of the kubelet checkpoint, until `stop`. Unless `always`, only while there are shares: before the first and
/// after the last, a plugin that registers with the kubelet itself is left alone, and its cards take no share.
pub async fn run(
    node: Arc<Node>,
    upstreams: Arc<Upstreams>,
    always: bool,
    mut directory: DirectoryWatch,
    stop: CancellationToken,
) {
    let mut changes = node.changes();
    let mut tried: BTreeMap<Arc<str>, Tried> = BTreeMap::new();
    while !stop.is_cancelled() {
        changes.borrow_and_update();
        let (bypassed, resources) = node.with(|state, _| {
            let resources = state.nvidias_resources();
            (state.bypassed(), if always || state.has_shares() { resources } else { BTreeSet::new() })
        });
        for resource in resources {
            let is_registered = upstreams.is_registered(&resource);
            let is_bypassed = bypassed.contains(&resource);
            let tried = tried.entry(resource.clone()).or_default();
            let since = tried.unregistered.filter(|_| !is_registered).unwrap_or_else(Instant::now);
            tried.unregistered = (!is_registered).then_some(since);
            let endpoint = socket_of(&resource);
            let stamp = Stamp::of(&directory.path().join(&endpoint));
            let is_another = tried.last.is_none_or(|(before, _)| before != stamp);
            let due = if is_bypassed {
                is_another || tried.last.is_some_and(|(_, at)| at.elapsed() >= PACE)
            } else {
                // It may serve, and has registered neither here nor at a kubelet that still knows of it. It gets time to do so.
                !is_registered && stamp.is_some() && tried.called != stamp && since.elapsed() >= PACE
            };
            if due {
                tried.last = Some((stamp, Instant::now()));
                if !is_registered {
                    tried.called = stamp;
                }
                if is_bypassed {
                    report(&node, &resource);
                }
                take(&upstreams, &resource, is_registered, stamp.map(|_| endpoint));
            }
        }
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return },
            () = directory.changed() => {}
            () = tokio::time::sleep(TICK) => {}
            () = stop.cancelled() => return,
        }
    }
}

/// `endpoint`: the plugin's socket, where it is there.
fn take(upstreams: &Arc<Upstreams>, resource: &str, is_registered: bool, endpoint: Option<String>) {
    match endpoint {
        None if !is_registered => {
            tracing::warn!(
                resource,
                "another device plugin serves it at the kubelet, and the socket of NVIDIA's plugin is not there"
            );
            return;
        }
        Some(endpoint) if !is_registered => {
            let (version, resource_name) = (VERSION.to_owned(), resource.to_owned());
            let request = RegisterRequest { version, endpoint, resource_name, options: None };
            if let Err(status) = upstreams.register(request) {
                tracing::warn!(resource, %status, "using NVIDIA's plugin at its own socket failed; retrying");
                return;
            }
        }
        _ => {}
    }
    // Where it is served already, so as not to wait until the plugin has listed its devices.
    upstreams.take_back(resource);
}

fn report(node: &Node, resource: &str) {
    tracing::warn!(
        resource,
        "NVIDIA's plugin has registered with the kubelet itself; taking the registration back"
    );
    node.metrics.registration_taken_back();
    node.record_event(NodeEvent::warning(
        "RegistrationTakenBack",
        format!(
            "NVIDIA's plugin had registered {resource} with the kubelet itself: for a moment whole cards could be allocated without the node agent; set KUBELET_SOCKET in its DaemonSet (v0.17.0 or newer) to {}",
            node.paths.device_plugins().join(super::SOCKET).display()
        ),
    ));
}

/// NVIDIA's plugin names its socket after the resource: `nvidia-gpu.sock` for `nvidia.com/gpu`.
fn socket_of(resource: &str) -> String {
    let name = Path::new(resource).file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    format!("nvidia-{name}.sock")
}
