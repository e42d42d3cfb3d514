//! Removes what the agent wrote to the host for containers that are gone.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use gpu_migrate_model::device_id::SharedResource;
use tokio_util::sync::CancellationToken;

use crate::decide::{NodeState, Resource};
use crate::node::Node;
use crate::plugins::shared::{self, AllocateConfig};

const INTERVAL: Duration = Duration::from_secs(10);
/// A file that was written so recently may be of a container that was granted its cards after the list of containers was made.
const NEW: Duration = Duration::from_secs(60);

/// Removes CDI files and isolation folders of pods that are gone, every `INTERVAL`.
pub async fn run(node: Arc<Node>, config: Arc<AllocateConfig>, stop: CancellationToken) {
    let mut before = None;
    loop {
        tokio::select! {
            () = tokio::time::sleep(INTERVAL) => {}
            () = stop.cancelled() => return,
        }
        let holders = node.with(|state, _| {
            let unconfirmed = state.grants().any(|(_, grant)| !grant.confirmed);
            let uids: BTreeSet<String> =
                state.grants().map(|(_, grant)| grant.holder.pod_uid.clone()).collect();
            (state.is_ready() && !unconfirmed).then_some(uids)
        });
        if let Some(cdi) = config.cdi.as_ref().filter(|_| node.with(|state, _| state.is_ready())) {
            let current = node.with(|state, _| core_keys(state));
            cdi.remove_stale(&current, SystemTime::now() - NEW);
        }
        // A folder may be of a pod that has an unconfirmed grant.
        if let Some(living) = holders.filter(|living| before.as_ref() != Some(living)) {
            config.isolation.remove_stale(&living);
            before = Some(living);
        }
    }
}

/// The keys of all containers with a grant of cores.
fn core_keys(state: &NodeState) -> BTreeSet<String> {
    let of_cores =
        state.grants().filter(|(_, grant)| grant.resource == Resource::Shared(SharedResource::Cores));
    let ids =
        of_cores.map(|(_, grant)| grant.requested.iter().map(|key| state.id_of(key)).collect::<Vec<_>>());
    ids.map(|ids| shared::key(&ids)).collect()
}
