//! Resources that are withdrawn after an Allocate had to be refused: the next pod would fail in the same way, and its controller replaces
//! it at once.
//!
//! The scheduler sees a withdrawal when the kubelet has written it to the Node's status, every 10 s (`nodeStatusUpdateFrequency`). So it
//! lasts until the Node was seen to carry it.

use std::collections::BTreeMap;

use super::devices::Listing;
use super::grants::Resource;
use super::{Millis, NodeState, Settings};

#[derive(Clone, Copy, Debug)]
pub(super) struct Withdrawal {
    since: Millis,
    /// The Node carried it.
    seen: bool,
}

impl Withdrawal {
    fn end(self, settings: &Settings) -> Millis {
        self.since + if self.seen { settings.withdraw } else { settings.withdraw_unseen }
    }
}

impl NodeState {
    pub(super) fn withdraw(&mut self, resource: &str, now: Millis) {
        self.withdrawn.insert(resource.to_owned(), Withdrawal { since: now, seen: false });
        self.mark_changed();
    }

    pub(super) fn is_withdrawn(&self, resource: &str, now: Millis) -> bool {
        self.withdrawn.get(resource).is_some_and(|withdrawal| now < withdrawal.end(&self.settings))
    }

    /// What the Node has allocatable of each resource, as the API server tells it.
    pub fn observe_allocatable(&mut self, amounts: &BTreeMap<String, u64>, now: Millis) {
        let carried = |state: &Self, name: &str| {
            let listed = match state.listing(&state.resource_named(name), now) {
                Listing::Shared(_, healthy) => healthy.into_iter().filter(|healthy| *healthy).count(),
                Listing::Legacy(devices) => devices.iter().filter(|device| device.healthy).count(),
            };
            amounts
                .get(name)
                .is_none_or(|amount| usize::try_from(*amount).is_ok_and(|amount| amount <= listed))
        };
        let unseen = self.withdrawn.iter().filter(|(_, withdrawal)| !withdrawal.seen);
        let seen: Vec<String> =
            unseen.map(|(name, _)| name).filter(|name| carried(self, name)).cloned().collect();
        for (_, withdrawal) in self.withdrawn.iter_mut().filter(|(name, _)| seen.contains(name)) {
            withdrawal.seen = true;
        }
        if !seen.is_empty() {
            self.mark_changed();
        }
    }

    /// When a withdrawal ends next, after `now`.
    #[must_use]
    pub fn next_withdrawal_end(&self, now: Millis) -> Option<Millis> {
        self.withdrawn
            .values()
            .map(|withdrawal| withdrawal.end(&self.settings))
            .filter(|end| *end > now)
            .min()
    }

    pub(super) fn end_withdrawals(&mut self, now: Millis) {
        let before = self.withdrawn.len();
        let settings = &self.settings;
        self.withdrawn.retain(|_, withdrawal| withdrawal.end(settings) > now);
        if self.withdrawn.len() != before {
            self.mark_changed();
        }
    }

    fn resource_named(&self, name: &str) -> Resource {
        use gpu_migrate_model::device_id::SharedResource::{Cores, Memory};
        let dialect = &self.settings.dialect;
        match name {
            name if name == dialect.cores => Resource::Shared(Cores),
            name if name == dialect.memory => Resource::Shared(Memory),
            name => Resource::Legacy(name.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use gpu_migrate_kubelet_api::checkpoint::Checkpoint;
    use gpu_migrate_model::card::Card;
    use gpu_migrate_model::topology::{LinkLevel, Topology};

    use super::*;
    use crate::decide::UpstreamDevice;

    const GPU: &str = "nvidia.com/gpu";

    #[test]
    fn a_withdrawal_lasts_until_the_node_carries_it() {
        let card = |n: u32| Card { uuid: format!("GPU-{n}"), minor: n, memory_mib: 4096, ..Card::default() };
        let cards = (0..2).map(card).collect();
        let mut state = NodeState::new(Settings::default(), cards, &Topology::uniform(2, LinkLevel::Pix));
        state.ingest_checkpoint(&Checkpoint::parse(br#"{"Data":{"PodDeviceEntries":null}}"#).unwrap(), 1);
        let device =
            |n: u32| UpstreamDevice { id: format!("GPU-{n}").into(), healthy: true, numa: Vec::new() };
        state.observe_upstream(GPU, Some((0..2).map(device).collect()));
        state.allocate_legacy(GPU, &["GPU-0".to_owned()], 2).unwrap();
        let of = |amount: u64| BTreeMap::from([(GPU.to_owned(), amount)]);
        let healthy = |state: &NodeState, now| match state.listing(&Resource::Legacy(GPU.into()), now) {
            Listing::Legacy(devices) => devices.iter().filter(|device| device.healthy).count(),
            Listing::Shared(..) => 0,
        };

        state.withdraw_resource(GPU, 1_000);
        // The kubelet's next report is of before.
        state.observe_allocatable(&of(2), 2_000);
        assert_eq!((healthy(&state, 9_999), state.next_withdrawal_end(9_999)), (1, Some(31_000)));
        state.observe_allocatable(&of(1), 10_000);
        assert_eq!((healthy(&state, 10_000), state.next_withdrawal_end(10_000)), (2, None));

        // Seen at once: it lasts a moment all the same.
        state.withdraw_resource(GPU, 20_000);
        state.observe_allocatable(&of(1), 20_001);
        assert_eq!((healthy(&state, 24_999), healthy(&state, 25_000)), (1, 2));

        // Nobody says what the Node carries.
        state.withdraw_resource(GPU, 40_000);
        assert_eq!((healthy(&state, 69_999), healthy(&state, 70_000)), (1, 2));
    }
}
