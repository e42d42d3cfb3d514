//! Whether the kubelet allocates the devices of NVIDIA's plugin through this agent.
//!
//! The plugin registers with the kubelet itself where `KUBELET_SOCKET` is not set, and in versions before v0.17.0. The kubelet then uses
//! the plugin's list, which has the cards of shares as healthy. Its checkpoint has that list (`RegisteredDevices`).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use gpu_migrate_kubelet_api::checkpoint::Checkpoint;
use gpu_migrate_model::ask::ContainerKind;
use gpu_migrate_model::card::CardState;
use gpu_migrate_model::ledger::HolderId;
use gpu_migrate_model::units::CardIndex;

use super::devices::Listing;
use super::grants::{DeviceKey, Resource};
use super::{Millis, NodeState, PodView};
use crate::record::RecordRow;

/// How long the kubelet may still show what this agent listed before, where it has not shown the latest list yet. Its checkpoint
/// follows a list within milliseconds.
const LAG: Millis = 5_000;

type Ids = BTreeSet<Arc<str>>;

/// The devices of NVIDIA's plugin that may be allocated: at the kubelet, and by our own lists.
#[derive(Clone, Debug, Default)]
pub(super) struct Registration {
    at_kubelet: BTreeMap<Arc<str>, Ids>,
    listed: BTreeMap<Arc<str>, Listed>,
    /// Until when each ID was listed that is not any more.
    until: HashMap<Arc<str>, Millis>,
    /// Containers whose devices the kubelet did not get from this agent, and which are on the card of a share.
    intruders: BTreeSet<HolderId>,
    /// Shares that the whole record of an earlier process has.
    recorded_shares: BTreeSet<HolderId>,
    /// Containers with whole cards that were there when this process found out what is, and are not in that record.
    unrecorded: BTreeSet<HolderId>,
}

/// Our latest list of a resource.
#[derive(Clone, Debug, Default)]
struct Listed {
    healthy: Ids,
    /// The kubelet has had it since: what it shows now that is not in it is from another list, and no earlier one of ours.
    followed: bool,
}

impl Registration {
    /// Nothing is known of what the kubelet may allocate: it has restarted.
    pub(super) fn forget_kubelet(&mut self) {
        self.at_kubelet.clear();
    }

    fn is_ours(&self, resource: &str, id: &str, now: Millis) -> bool {
        let listed = self.listed.get(resource);
        listed.is_some_and(|listed| listed.healthy.contains(id))
            || !listed.is_some_and(|listed| listed.followed)
                && self.until.get(id).is_some_and(|until| now.saturating_sub(*until) < LAG)
    }

    /// What the kubelet may allocate although this agent does not list it as healthy.
    fn not_ours(&self, now: Millis) -> impl Iterator<Item = (&Arc<str>, &Arc<str>)> {
        let all = self.at_kubelet.iter().flat_map(|(resource, ids)| ids.iter().map(move |id| (resource, id)));
        all.filter(move |(resource, id)| !self.is_ours(resource, id, now))
    }
}

impl NodeState {
    /// A list was sent to the kubelet.
    pub fn observe_sent(&mut self, resource: &Resource, listing: &Listing, now: Millis) {
        let (Resource::Legacy(name), Listing::Legacy(devices)) = (resource, listing) else { return };
        let healthy = devices.iter().filter(|device| device.healthy).map(|device| Arc::from(&*device.id));
        let healthy = healthy.filter(|id| self.card_of_legacy(id).is_some()).collect();
        let Registration { listed, until, .. } = &mut self.registration;
        let before = listed.insert(name.clone(), Listed { healthy, followed: false });
        until.extend(before.into_iter().flat_map(|list| list.healthy).map(|id| (id, now)));
    }

    /// The kubelet does not follow the list of this resource any more.
    pub fn observe_stream_end(&mut self, resource: &Resource) {
        let Resource::Legacy(name) = resource else { return };
        let Registration { at_kubelet, listed, until, .. } = &mut self.registration;
        at_kubelet.remove(name);
        // A version that is read later is not of our list.
        for id in listed.remove(name).into_iter().flat_map(|list| list.healthy) {
            until.remove(&id);
        }
    }

    /// The kubelet's healthy devices of NVIDIA's resources with cards of this node. What it had before this process was ready is of an
    /// earlier agent's list.
    pub(super) fn observe_kubelet_lists(&mut self, checkpoint: &Checkpoint<'_>) {
        if !self.is_ready() {
            return;
        }
        let of_cards = |name: &String| {
            let ids = checkpoint.healthy(name).into_iter().map(|id| Arc::from(&*id));
            let ids: Ids = ids.filter(|id| self.card_of_legacy(id).is_some()).collect();
            (!ids.is_empty()).then(|| (Arc::from(name.as_str()), ids))
        };
        let names = checkpoint.registered.keys().filter(|name| self.is_nvidias(name));
        self.registration.at_kubelet = names.filter_map(of_cards).collect();
        let Registration { at_kubelet, listed, .. } = &mut self.registration;
        for (resource, list) in listed {
            list.followed |=
                at_kubelet.get(resource).map_or(list.healthy.is_empty(), |ids| *ids == list.healthy);
        }
    }

    fn card_of_legacy(&self, id: &Arc<str>) -> Option<CardIndex> {
        self.card_of(&DeviceKey::Legacy(id.clone()))
    }

    /// The resources that the kubelet does not allocate by the list of this agent, or not by that alone.
    #[must_use]
    pub fn bypassed(&self) -> BTreeSet<Arc<str>> {
        self.registration.not_ours(self.clock).map(|(resource, _)| resource.clone()).collect()
    }

    /// Resources of the domain of the legacy one: `nvidia.com/mig-1g.10gb` beside `nvidia.com/gpu`.
    fn is_nvidias(&self, resource: &str) -> bool {
        let domain = |name: &str| name.split_once('/').map(|(domain, _)| domain.to_owned());
        domain(resource) == domain(&self.settings.dialect.legacy)
    }

    /// The resources that NVIDIA's plugin may serve, registered here or not.
    #[must_use]
    pub fn nvidias_resources(&self) -> BTreeSet<Arc<str>> {
        let known = self.upstream.keys().chain(self.registration.at_kubelet.keys()).cloned();
        known.chain([self.settings.dialect.legacy.as_str().into()]).collect()
    }

    /// Whether a container has a share of a card here.
    #[must_use]
    pub fn has_shares(&self) -> bool {
        self.grants.values().any(|grant| matches!(grant.resource, Resource::Shared(_)))
    }

    /// The cards that the kubelet may allocate although this agent does not list them, and for which resource.
    pub(super) fn bypassed_cards(&self) -> BTreeMap<CardIndex, Arc<str>> {
        let not_ours = self.registration.not_ours(self.clock);
        not_ours.filter_map(|(resource, id)| Some((self.card_of_legacy(id)?, resource.clone()))).collect()
    }

    /// The rows of an earlier process that knew what is on the cards.
    pub(super) fn observe_whole_record(&mut self, rows: &[RecordRow]) {
        let shares = rows.iter().filter(|row| matches!(self.resource(&row.resource), Resource::Shared(_)));
        let shares = shares.map(|row| HolderId::new(&row.pod_uid, &row.container)).collect();
        self.registration.recorded_shares = shares;
    }

    /// Notes which of these containers with whole cards, new in the checkpoint, are on the card of a share.
    pub(super) fn observe_intruders(&mut self, new: BTreeSet<HolderId>) {
        let Registration { intruders, unrecorded, .. } = &mut self.registration;
        let (mut intruders, mut unrecorded) = (std::mem::take(intruders), std::mem::take(unrecorded));
        // To a process that is not ready all are new. One that an earlier process did not know came after what that one gave.
        if self.checkpoint.is_ready() { &mut intruders } else { &mut unrecorded }.extend(new);
        intruders.retain(|holder| self.is_disputed(holder));
        unrecorded.retain(|holder| self.is_disputed(holder));
        (self.registration.intruders, self.registration.unrecorded) = (intruders, unrecorded);
    }

    fn is_disputed(&self, holder: &HolderId) -> bool {
        self.disputed(holder).next().is_some()
    }

    /// The cards of a container that it may not have.
    fn disputed<'a>(&'a self, holder: &'a HolderId) -> impl Iterator<Item = CardIndex> + 'a {
        let cards = self.ledger.held_by(holder).map(|(card, _)| card);
        cards.filter(|card| self.ledger.state(*card) == CardState::Disputed)
    }

    /// It is in the record, and certainly still there: its pod is, and it is none that ends before the others begin.
    pub(super) fn is_recorded_share(&self, holder: &HolderId) -> bool {
        self.registration.recorded_shares.contains(holder)
            && self.pods.get(&holder.pod_uid).is_some_and(|pod| !pod.has_ended())
            && self.container_kind(holder).is_some_and(|kind| kind != ContainerKind::Init)
    }

    /// Pods that the kubelet gave the card of a share without asking this agent. They must end before they use it (I1).
    #[must_use]
    pub fn intruders(&self) -> Vec<PodView> {
        let on_recorded_share = |holder: &&HolderId| {
            let mut others = self.disputed(holder).flat_map(|card| self.ledger.holds(card));
            others.any(|(other, _)| self.is_recorded_share(other))
        };
        let Registration { intruders, unrecorded, .. } = &self.registration;
        let intruders = intruders.iter().filter(|holder| self.is_disputed(holder));
        let disputed = intruders.chain(unrecorded.iter().filter(on_recorded_share));
        let uids: BTreeSet<&str> = disputed.map(|holder| holder.pod_uid.as_str()).collect();
        let pods = uids.into_iter().filter_map(|uid| self.pods.get(uid));
        pods.filter(|pod| !pod.deleting && !pod.has_ended()).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use gpu_migrate_model::card::Card;
    use gpu_migrate_model::topology::Topology;

    use super::*;
    use crate::decide::{ContainerView, PodPhase, Settings, UpstreamDevice};
    use gpu_migrate_model::ask::{ContainerAsk, Demand};

    const GPU: &str = "nvidia.com/gpu";

    /// The kubelet's checkpoint with these cards healthy and these rows.
    fn checkpoint(healthy: &[u32], rows: &[(&str, &str, &str)]) -> String {
        let healthy: Vec<String> = healthy.iter().map(|n| format!("GPU-{n}")).collect();
        let rows: Vec<serde_json::Value> = rows
            .iter()
            .map(|(pod, resource, id)| serde_json::json!({"PodUID": pod, "ContainerName": "c", "ResourceName": resource, "DeviceIDs": [id], "AllocResp": ""}))
            .collect();
        serde_json::json!({"Data": {"PodDeviceEntries": rows, "RegisteredDevices": {GPU: healthy}}})
            .to_string()
    }

    fn read(state: &mut NodeState, text: &str, now: Millis) {
        state.ingest_checkpoint(&Checkpoint::parse(text.as_bytes()).unwrap(), now);
    }

    /// Two cards; NVIDIA's plugin is registered here. Nothing is known of what was allocated.
    fn unread() -> NodeState {
        let card = |n: u32| Card { uuid: format!("GPU-{n}"), minor: n, memory_mib: 4096, ..Card::default() };
        let mut state = NodeState::new(Settings::default(), (0..2).map(card).collect(), &Topology::default());
        let device =
            |n: u32| UpstreamDevice { id: format!("GPU-{n}").into(), healthy: true, numa: Vec::new() };
        state.observe_upstream(GPU, Some((0..2).map(device).collect()));
        state
    }

    fn new() -> NodeState {
        let mut state = unread();
        read(&mut state, &checkpoint(&[0, 1], &[]), 0);
        assert!(state.bypassed().is_empty(), "of the agent before this one");
        state
    }

    fn send(state: &mut NodeState, now: Millis) {
        let resource = state.resource(GPU);
        let listing = state.listing(&resource, now);
        state.observe_sent(&resource, &listing, now);
    }

    fn closed(state: &NodeState) -> Vec<usize> {
        let cards = state.ledger().indexes().filter(|card| state.closed_because(*card).is_some());
        cards.map(CardIndex::position).collect()
    }

    #[test]
    fn cards_that_the_kubelet_has_from_another_list_take_no_share() {
        let mut state = new();
        read(&mut state, &checkpoint(&[0, 1], &[]), 1);
        assert_eq!(
            (closed(&state), state.bypassed().len()),
            (vec![0, 1], 1),
            "this agent has listed nothing yet"
        );
        // Closed cards are not offered; the kubelet follows, and they are open again.
        send(&mut state, 2);
        read(&mut state, &checkpoint(&[], &[]), 3);
        assert!(closed(&state).is_empty() && state.bypassed().is_empty());
        send(&mut state, 4);
        read(&mut state, &checkpoint(&[0, 1], &[]), 5);
        assert!(closed(&state).is_empty(), "as this agent lists them");
    }

    #[test]
    fn the_kubelet_may_lag_behind_a_list_but_not_for_long() {
        let mut state = new();
        read(&mut state, &checkpoint(&[], &[]), 1);
        send(&mut state, 2);
        read(
            &mut state,
            &checkpoint(&[0, 1], &[("s", "tencent.com/vcuda-core", "tencent.com/vcuda-core-7")]),
            3,
        );
        send(&mut state, 4);
        state.reconcile(500);
        assert!(state.bypassed().is_empty());
        state.reconcile(4 + LAG);
        assert_eq!(
            state.bypassed(),
            BTreeSet::from([GPU.into()]),
            "card 0 has a share and is healthy at the kubelet"
        );
        read(
            &mut state,
            &checkpoint(&[1], &[("s", "tencent.com/vcuda-core", "tencent.com/vcuda-core-7")]),
            2 * LAG,
        );
        assert!(state.bypassed().is_empty());
    }

    #[test]
    fn a_kubelet_that_had_the_latest_list_does_not_go_back_to_an_earlier_one() {
        let share = ("s", "tencent.com/vcuda-core", "tencent.com/vcuda-core-7");
        let mut state = new();
        read(&mut state, &checkpoint(&[], &[]), 1);
        send(&mut state, 2);
        read(&mut state, &checkpoint(&[0, 1], &[share]), 3);
        send(&mut state, 4);
        read(&mut state, &checkpoint(&[1], &[share]), 5);
        assert!(state.bypassed().is_empty());
        read(&mut state, &checkpoint(&[0, 1], &[share]), 6);
        assert_eq!(state.bypassed(), BTreeSet::from([GPU.into()]));
    }

    #[test]
    fn a_kubelet_that_starts_has_no_list() {
        let mut state = new();
        read(&mut state, &checkpoint(&[0, 1], &[]), 1);
        state.observe_kubelet_start(true, 2);
        state
            .ingest_unchanged_checkpoint(&Checkpoint::parse(checkpoint(&[0, 1], &[]).as_bytes()).unwrap(), 3);
        assert!(state.bypassed().is_empty(), "the file is of the kubelet before");
    }

    #[test]
    fn a_pod_that_gets_the_card_of_a_share_past_the_agent_is_to_end() {
        let share = ("s", "tencent.com/vcuda-core", "tencent.com/vcuda-core-7");
        let pod = |uid: &str| {
            let demand = Demand { legacy: 1, ..Demand::NONE };
            let ask = ContainerAsk { name: "c".into(), kind: ContainerKind::App, position: 0, demand };
            let containers = vec![ContainerView { ask, reserved: Vec::new() }];
            PodView { uid: uid.into(), phase: PodPhase::Pending, containers, ..PodView::default() }
        };
        let mut state = unread();
        read(&mut state, &checkpoint(&[1], &[share, ("before", GPU, "GPU-0")]), 1);
        state.observe_pods(vec![pod("before"), pod("elsewhere"), pod("intruder")], 2);
        assert!(state.intruders().is_empty(), "which of the two was first is not known");
        let mut state = new();
        read(&mut state, &checkpoint(&[1], &[share]), 1);
        state.observe_pods(vec![pod("elsewhere"), pod("intruder")], 2);
        read(
            &mut state,
            &checkpoint(&[0, 1], &[share, ("elsewhere", GPU, "GPU-1"), ("intruder", GPU, "GPU-0")]),
            3,
        );
        let uids: Vec<String> = state.intruders().into_iter().map(|pod| pod.uid).collect();
        assert_eq!(uids, ["intruder"]);
        state.observe_pod(PodView { deleting: true, ..pod("intruder") }, 4);
        assert!(state.intruders().is_empty());
        // The agent starts anew. Its record says who was first, if it knew all, and if the share is still there.
        let row = |uid| (uid, GPU, "GPU-0");
        for (recorded, listed, incomplete, ends) in [
            (vec![share], vec!["s", "intruder"], false, true),
            (vec![share], vec!["s", "intruder"], true, false),
            (vec![share], vec!["intruder"], false, false),
            (vec![share, row("intruder")], vec!["s", "intruder"], false, false),
            (vec![], vec!["s", "intruder"], false, false),
        ] {
            let mut earlier = new();
            read(&mut earlier, &checkpoint(&[1], &recorded), 1);
            let mut state = unread();
            if incomplete {
                state.observe_lost_record();
            }
            state.restore_record(earlier.record().data.entries);
            read(&mut state, &checkpoint(&[0, 1], &[share, row("intruder")]), 2);
            state.observe_pods(listed.iter().map(|uid| pod(uid)).collect(), 3);
            state.reconcile(1_000_000);
            let uids: Vec<String> = state.intruders().into_iter().map(|pod| pod.uid).collect();
            let expected: &[&str] = if ends { &["intruder"] } else { &[] };
            assert_eq!(uids, expected, "{recorded:?}, {listed:?}, {incomplete}");
        }
    }
}
