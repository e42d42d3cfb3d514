//! Removes what the agent wrote to the host for containers that are gone, and serves those again that an earlier process has prepared.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::ledger::HolderId;
use tokio_util::sync::CancellationToken;

use crate::decide::{Grant, NodeState, Resource};
use crate::isolation::Share;
use crate::node::Node;
use crate::plugins::shared::{self, AllocateConfig};

const INTERVAL: Duration = Duration::from_secs(10);
/// A file that was written so recently may be of a container that was granted its cards after the list of containers was made.
const NEW: Duration = Duration::from_secs(60);

/// Removes CDI files and isolation folders of pods that are gone, and serves those of an earlier process again, every `INTERVAL`.
pub async fn run(node: Arc<Node>, config: Arc<AllocateConfig>, stop: CancellationToken) {
    loop {
        for (holder, ids) in node.with(|state, _| core_grants(state)) {
            let resume = |share: &Share<'_>| config.isolation.resume(&holder, share);
            if let Err(error) = shared::with_share(&node, &holder, &ids, resume) {
                tracing::warn!(%holder, %error, isolation = config.isolation.name(), "serving a container again failed; retrying");
            }
        }
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
        if let Some(living) = holders {
            config.isolation.remove_stale(&living, SystemTime::now() - NEW);
        }
    }
}

/// Grants of cores, with the device IDs that the kubelet requested.
fn of_cores(state: &NodeState) -> impl Iterator<Item = (&Grant, Vec<String>)> {
    let of_cores = state.grants().map(|(_, grant)| grant);
    let of_cores = of_cores.filter(|grant| grant.resource == Resource::Shared(SharedResource::Cores));
    of_cores.map(|grant| (grant, grant.requested.iter().map(|key| state.id_of(key)).collect()))
}

/// The containers that are known to have cores.
fn core_grants(state: &NodeState) -> Vec<(HolderId, Vec<String>)> {
    let confirmed = of_cores(state).filter(|(grant, _)| grant.confirmed && state.is_ready());
    confirmed.map(|(grant, ids)| (grant.holder.clone(), ids)).collect()
}

/// The keys of all containers with a grant of cores.
fn core_keys(state: &NodeState) -> BTreeSet<String> {
    of_cores(state).map(|(_, ids)| shared::key(&ids)).collect()
}
