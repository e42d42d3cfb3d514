//! The decisions alone, with as much around them as the services do.

use std::collections::{BTreeMap, BTreeSet};

use super::{Agent, Mutant, Trouble, cards_of, fresh, shown, uuid};
use crate::decide::tests::world::{GPU, Surroundings};
use crate::decide::{GrantId, Millis, NodeState, PodPhase, Resource, UpstreamDevice};
use crate::inventory::card_map::CardMap;
use crate::inventory::evidence;
use crate::platform::WriteStep;
use crate::record::{Record, RecordRow};
use gpu_migrate_kubelet_api::checkpoint::Checkpoint;
use gpu_migrate_model::names::Dialect;
use gpu_migrate_model::units::CardIndex;

pub(in super::super) struct Decisions {
    surroundings: Surroundings,
    mutant: Option<Mutant>,
    state: parking_lot::Mutex<NodeState>,
    now: Millis,
    /// The version of the kubelet checkpoint that it read.
    read: Option<u64>,
    /// What is on its disk.
    record: Option<Record>,
    map: Option<CardMap>,
}

struct Answer {
    grant: GrantId,
    cards: BTreeSet<usize>,
    again: bool,
}

impl Decisions {
    fn fresh(
        surroundings: &Surroundings,
        mutant: Option<Mutant>,
        record: Option<&Record>,
        map: &mut Option<CardMap>,
    ) -> NodeState {
        let (kubelet, hardware) = (surroundings.kubelet.lock(), surroundings.hardware.lock());
        let rows = record.map(|record| &*record.data.entries).unwrap_or_default();
        let checkpoint = Checkpoint::parse(kubelet.checkpoint()).ok();
        let evidence =
            checkpoint.map(|checkpoint| evidence::of_containers(&Dialect::default(), &checkpoint, rows));
        let resolved = CardMap::resolve(map.take(), evidence.as_deref(), &hardware.inventory().cards);
        *map = resolved.known.then(|| resolved.map.clone());
        fresh(mutant, &hardware, resolved)
    }

    fn ingest(&mut self) {
        let kubelet = self.surroundings.kubelet.lock();
        let (state, now, version) = (self.state.get_mut(), self.now, Some(kubelet.version()));
        match Checkpoint::parse(kubelet.checkpoint()) {
            _ if kubelet.is_missing() => state.observe_missing_checkpoint(now),
            Ok(_) if kubelet.is_truncated() => panic!("half a checkpoint was read as a whole one"),
            Ok(checkpoint) if self.read == version => state.ingest_unchanged_checkpoint(&checkpoint, now),
            Ok(checkpoint) => {
                state.ingest_checkpoint(&checkpoint, now);
                self.read = version;
            }
            Err(_) => state.observe_unreadable_checkpoint(now),
        }
    }

    /// Looks for a pod that was not reported.
    fn look_for(&mut self, resource: &Resource, size: usize) {
        let Resource::Shared(shared) = *resource else { return };
        let (state, api) = (self.state.get_mut(), self.surroundings.api.lock());
        if state.has_candidate(shared, size) || api.away {
            return;
        }
        for pod in api.pods.values().filter(|pod| pod.phase == PodPhase::Pending) {
            if state.pod(&pod.uid).is_none() {
                state.observe_pod(pod.clone(), self.now);
            }
        }
    }

    fn decide(&mut self, resource: &str, ids: &[String]) -> Option<Answer> {
        let (state, now) = (self.state.get_mut(), self.now);
        match state.resource(resource) {
            Resource::Shared(shared) => {
                let granted = state.allocate_shared(shared, ids, now).ok()?;
                let card = |card: &CardIndex| state.ledger().card(*card).map(|card| card.uuid.clone());
                let uuids: Vec<String> = granted.cards.iter().filter_map(card).collect();
                let cards = cards_of(uuids.iter().map(String::as_str))?;
                Some(Answer { grant: granted.grant, cards, again: granted.repeated })
            }
            Resource::Legacy(_) => {
                let granted = state.allocate_legacy(resource, ids, now).ok()?;
                let cards = cards_of(granted.devices.iter().map(String::as_str))?;
                Some(Answer { grant: granted.grant, cards, again: granted.repeated })
            }
        }
    }

    fn write(&mut self) {
        let state = self.state.get_mut();
        if state.has_record() {
            self.record = Some(state.record());
        }
    }

    fn write_deviations(&mut self) {
        if self.record.is_none() || self.written_deviations() != self.state.get_mut().deviations() {
            self.write();
        }
    }

    fn written_deviations(&self) -> Vec<RecordRow> {
        let rows = self.record.iter().flat_map(|record| &record.data.entries);
        rows.filter(|row| row.deviates()).cloned().collect()
    }

    fn read_cgroups(&mut self) {
        let populated = self.surroundings.cgroups.lock().clone();
        if let Some(populated) = populated {
            self.state.get_mut().observe_cgroups(populated, self.now, self.now);
        }
    }
}

impl Agent for Decisions {
    fn start(surroundings: Surroundings, mutant: Option<Mutant>) -> Self {
        let mut map = None;
        let state = parking_lot::Mutex::new(Self::fresh(&surroundings, mutant, None, &mut map));
        let record = Some(Record::default());
        let mut agent = Self { surroundings, mutant, state, now: 1, read: None, record, map };
        agent.read_cgroups();
        agent.nvidia_returns();
        agent
    }

    fn restart(&mut self) {
        let Self { surroundings, mutant, record, map, .. } = self;
        *self.state.get_mut() = Self::fresh(surroundings, *mutant, record.as_ref(), map);
        self.read = None;
        match &self.record {
            Some(record) => {
                if record.incomplete {
                    self.state.get_mut().observe_lost_record();
                }
                self.state.get_mut().restore_record(record.data.entries.clone());
            }
            None => self.state.get_mut().observe_lost_record(),
        }
        self.now += 1;
        self.read_checkpoint();
        self.read_cgroups();
        self.nvidia_returns();
    }

    fn now(&self) -> Millis {
        self.now
    }

    fn tick(&mut self) {
        self.now += 1;
        self.write();
    }

    fn pass(&mut self, milliseconds: Millis) {
        self.now += milliseconds;
        self.write();
        self.read_cgroups();
        self.state.get_mut().reconcile(self.now);
    }

    fn with_state<R>(&self, what: impl FnOnce(&mut NodeState, Millis) -> R) -> R {
        what(&mut self.state.lock(), self.now)
    }

    fn read_checkpoint(&mut self) {
        if !self.is_up_to_date() {
            self.ingest();
        }
    }

    fn is_up_to_date(&self) -> bool {
        self.read == Some(self.surroundings.kubelet.lock().version())
    }

    fn notice_kubelet(&mut self, at: Millis) {
        let whole = !self.surroundings.kubelet.lock().has_lost_checkpoint();
        self.state.get_mut().observe_kubelet_start(whole, at);
        self.ingest();
    }

    fn list_pod_resources(&mut self) {
        self.now += 1;
        let (asked, rows) = (self.now, self.surroundings.kubelet.lock().list());
        self.now += 1;
        self.read_cgroups();
        self.state.get_mut().observe_pod_resources(&rows, asked, self.now);
    }

    fn lose_record(&mut self) {
        (self.record, self.map) = (None, None);
    }

    fn nvidia_returns(&mut self) {
        let mut hardware = self.surroundings.hardware.lock();
        hardware.plugin_starts();
        let devices = hardware.plugin_list().into_iter().map(|(n, healthy)| UpstreamDevice {
            id: uuid(n).into(),
            healthy,
            numa: Vec::new(),
        });
        self.state.get_mut().observe_upstream(GPU, Some(devices.collect()));
    }

    fn nvidia_goes(&mut self) {
        self.surroundings.hardware.lock().plugin_goes();
        self.state.get_mut().upstream_lost(GPU);
    }

    fn list(&mut self, resource: &'static str) -> Option<BTreeMap<String, bool>> {
        let state = self.state.get_mut();
        let listing = state.listing(&state.resource(resource), self.now);
        let mut list = BTreeMap::new();
        state.for_each_device(&listing, |device| {
            list.insert(device.id.clone(), device.healthy);
        });
        let resource = state.resource(resource);
        state.observe_sent(&resource, &listing, self.now);
        Some(list)
    }

    fn end_streams(&mut self) {}

    fn end_stream(&mut self, resource: &'static str) {
        let state = self.state.get_mut();
        state.observe_stream_end(&state.resource(resource));
    }

    fn prefer(
        &mut self,
        resource: &'static str,
        offered: Vec<String>,
        must: Vec<String>,
        size: usize,
    ) -> Vec<String> {
        self.read_checkpoint();
        let kind = self.state.get_mut().resource(resource);
        self.look_for(&kind, size);
        let state = self.state.get_mut();
        match kind {
            Resource::Shared(shared) => state.preferred_shared(shared, &offered, &must, size),
            Resource::Legacy(_) => state.available_legacy(&offered, &must, size),
        }
    }

    fn allocate(
        &mut self,
        resource: &'static str,
        ids: Vec<String>,
        trouble: Trouble,
    ) -> Option<BTreeSet<usize>> {
        self.read_checkpoint();
        let kind = self.state.get_mut().resource(resource);
        self.look_for(&kind, ids.len());
        if matches!(self.mutant, Some(Mutant::Refuses)) {
            return None;
        }
        let answer = self.decide(resource, &ids)?;
        let fails = match trouble {
            Trouble::NvidiaRefuses | Trouble::NvidiaHangs => resource == GPU,
            Trouble::DiskFails(_) | Trouble::DiskStalls => {
                self.written_deviations() != self.state.get_mut().deviations()
            }
            Trouble::Dies(step) => {
                if step > WriteStep::Rename as u8 {
                    self.write();
                }
                return None;
            }
            Trouble::None => false,
        };
        if fails {
            if !answer.again {
                self.state.get_mut().roll_back(answer.grant);
            }
            return None;
        }
        self.write_deviations();
        Some(shown(self.mutant, resource, answer.cards))
    }

    fn may_start(&mut self, resource: &'static str, ids: Vec<String>, trouble: Trouble) -> bool {
        let Resource::Shared(shared) = self.state.get_mut().resource(resource) else { return true };
        self.read_checkpoint();
        if self.state.get_mut().may_start(shared, &ids).is_err() {
            self.list_pod_resources();
            if self.state.get_mut().may_start(shared, &ids).is_err() {
                return false;
            }
        }
        if self.written_deviations() == self.state.get_mut().deviations() {
            return true;
        }
        match trouble {
            Trouble::Dies(step) if step <= WriteStep::Rename as u8 => return false,
            _ => self.write(),
        }
        !matches!(trouble, Trouble::Dies(_))
    }
}
