//! Adds samples up by container. Pure.

use std::collections::BTreeMap;

use gpu_migrate_model::ask::ContainerKind;
use gpu_migrate_model::card::Card;
use gpu_migrate_model::ledger::{Hold, HolderId, Slot};
use gpu_migrate_model::units::{CardIndex, Cores, MIB_PER_BLOCK};
use gpu_migrate_model::usage::{CardUse, ContainerUse, NodeUse, UseKind};

use super::{CardSample, ProcessSample};
use crate::decide::NodeState;

/// Every card with those that hold it or have a process on it. `sample` is the latest of a card by its UUID, where there is one.
pub(super) fn node_use<'s>(state: &NodeState, sample: impl Fn(&str) -> Option<&'s CardSample>) -> NodeUse {
    let indexes = state.ledger().indexes();
    let cards = indexes.filter_map(|index| {
        let card = state.ledger().card(index)?;
        Some(card_use(state, index, card, sample(&card.uuid).unwrap_or(&CardSample::default())))
    });
    NodeUse { cards: cards.collect() }
}

fn card_use(state: &NodeState, index: CardIndex, card: &Card, sample: &CardSample) -> CardUse {
    CardUse {
        index: index.0,
        uuid: card.uuid.clone(),
        model: card.model.clone(),
        memory_bytes: card.memory_mib << 20,
        utilization_percent: sample.utilization_percent,
        memory_used_bytes: sample.memory_used_bytes,
        power_milliwatts: sample.power_milliwatts,
        temperature_celsius: sample.temperature_celsius,
        containers: containers(state, index, card, sample.processes.as_deref()),
    }
}

/// One container on the card, while processes are added.
#[derive(Default)]
struct Row {
    usage: ContainerUse,
    /// Holds the card for those after it, and has ended by then.
    init: bool,
    /// Its processes.
    found: Vec<ProcessSample>,
}

fn containers(
    state: &NodeState,
    index: CardIndex,
    card: &Card,
    processes: Option<&[ProcessSample]>,
) -> Vec<ContainerUse> {
    let mut rows: BTreeMap<HolderId, Row> = BTreeMap::new();
    for (holder, hold) in state.ledger().holds(index) {
        // Not known yet, and for a moment only.
        let Some(id) = container_of(state, holder) else { continue };
        let kind = state.pod(&id.pod_uid).and_then(|pod| pod.container(&id.container)).map(|c| c.ask.kind);
        let row = rows.entry(id).or_default();
        row.init = kind == Some(ContainerKind::Init);
        requested(&mut row.usage, hold, card);
    }
    let holders: Vec<HolderId> = rows.keys().cloned().collect();
    for process in processes.into_iter().flatten() {
        let id = match &process.owner {
            Some(owner) => {
                let mut of_pod = holders.iter().filter(|id| id.pod_uid == owner.pod_uid);
                let only = of_pod.next().filter(|_| of_pod.next().is_none());
                let pod = state.pod(&owner.pod_uid);
                let reported = pod.and_then(|pod| pod.container_ids.get(&owner.container_id));
                // The kubelet reports IDs a moment after a container starts.
                let name = reported.or_else(|| only.map(|id| &id.container));
                HolderId::new(&owner.pod_uid, name.map_or("", String::as_str))
            }
            None => HolderId::new("", ""),
        };
        rows.entry(id).or_default().found.push(process.clone());
    }
    rows.retain(|_, row| !row.init || !row.found.is_empty());
    let finished = rows.into_iter().map(|(id, row)| {
        let (namespace, pod) = state.pod_name(&id.pod_uid).unwrap_or_default();
        let usage = ContainerUse { namespace, pod, container: id.container, ..row.usage };
        if processes.is_some() { used(usage, &row.found) } else { usage }
    });
    finished.collect()
}

fn container_of(state: &NodeState, holder: &HolderId) -> Option<HolderId> {
    let mut grants = state.grants().map(|(_, grant)| grant).filter(|grant| grant.holder == *holder);
    grants.find_map(|grant| grant.holder_or_candidate().cloned())
}

fn requested(usage: &mut ContainerUse, hold: &Hold, card: &Card) {
    let (kind, request) = match hold {
        Hold::Share { cores, blocks, .. } => {
            (UseKind::Shared, Some((cores.0, (u64::from(blocks.0) * MIB_PER_BLOCK) << 20)))
        }
        Hold::Legacy(slots) if slots.contains(&Slot::Whole) => {
            (UseKind::Legacy, Some((Cores::CARD.0, card.memory_mib << 20)))
        }
        Hold::Legacy(_) => (UseKind::Legacy, None),
    };
    usage.kind = kind;
    (usage.cores_requested, usage.memory_requested_bytes) = request.unzip();
}

fn used(usage: ContainerUse, found: &[ProcessSample]) -> ContainerUse {
    // The sum of what is known; of nothing it is zero, and of unknown values unknown.
    fn sum<T: std::iter::Sum>(
        found: &[ProcessSample],
        value: impl Fn(&ProcessSample) -> Option<T>,
    ) -> Option<T> {
        let known = || found.iter().filter_map(&value);
        (found.is_empty() || known().next().is_some()).then(|| known().sum())
    }
    ContainerUse {
        processes: u32::try_from(found.len()).ok(),
        utilization_percent: sum(found, |process| process.utilization_percent).map(|sum: u32| sum.min(100)),
        memory_used_bytes: sum(found, |process| process.memory_bytes),
        ..usage
    }
}

#[cfg(test)]
pub(super) mod tests {
    use gpu_migrate_kubelet_api::checkpoint::Checkpoint;
    use gpu_migrate_model::ask::{ContainerAsk, Demand};
    use gpu_migrate_model::topology::{LinkLevel, Topology};

    use super::super::owner::Owner;
    use super::*;
    use crate::decide::{ContainerView, PodPhase, PodView, Settings, UpstreamDevice};

    const GIB: u64 = 1 << 30;

    pub(crate) fn process(
        pid: u32,
        pod: &str,
        container: &str,
        memory: u64,
        utilization: u32,
    ) -> ProcessSample {
        let owner = Owner { pod_uid: pod.into(), container_id: container.into() };
        ProcessSample {
            pid,
            owner: (!pod.is_empty()).then_some(owner),
            memory_bytes: Some(memory),
            utilization_percent: Some(utilization),
        }
    }

    fn pod(uid: &str, ids: &[(&str, &str)], containers: &[(&str, ContainerKind, Demand)]) -> PodView {
        let view =
            |(position, (name, kind, demand)): (usize, &(&str, ContainerKind, Demand))| ContainerView {
                ask: ContainerAsk { name: (*name).into(), kind: *kind, position, demand: *demand },
                reserved: vec![CardIndex(0)],
            };
        PodView {
            uid: uid.into(),
            api_uid: uid.into(),
            namespace: "team".into(),
            name: format!("{uid}-pod"),
            phase: PodPhase::Running,
            started: true,
            running: true,
            containers: containers.iter().enumerate().map(view).collect(),
            container_ids: ids.iter().map(|(id, name)| ((*id).into(), (*name).into())).collect(),
            ..PodView::default()
        }
    }

    /// Two cards of 4 GiB: `a` has a quarter of the first, `b` the second through NVIDIA's plugin.
    pub(crate) fn node() -> NodeState {
        let card = |n: u32| Card {
            uuid: format!("GPU-{n}"),
            minor: n,
            memory_mib: 4096,
            model: "A100".into(),
            ..Card::default()
        };
        let topology = Topology::uniform(2, LinkLevel::Pix);
        let mut state = NodeState::new(Settings::default(), (0..2).map(card).collect(), &topology);
        let ids = |resource: &str, count: u32| {
            let ids: Vec<String> = (0..count).map(|n| format!("\"tencent.com/{resource}-{n}\"")).collect();
            ids.join(",")
        };
        let row = |uid: &str, resource: &str, ids: &str| {
            format!(
                r#"{{"PodUID":"{uid}","ContainerName":"main","ResourceName":"{resource}","DeviceIDs":[{ids}],"AllocResp":""}}"#
            )
        };
        let rows = [
            row("a", "tencent.com/vcuda-core", &ids("vcuda-core", 25)),
            row("a", "tencent.com/vcuda-memory", &ids("vcuda-memory-268435456", 4)),
            row("b", "nvidia.com/gpu", "\"GPU-1\""),
        ];
        let device =
            |n: u32| UpstreamDevice { id: format!("GPU-{n}").into(), healthy: true, numa: Vec::new() };
        state.observe_upstream("nvidia.com/gpu", Some((0..2).map(device).collect()));
        let text = format!(r#"{{"Data":{{"PodDeviceEntries":[{}]}}}}"#, rows.join(","));
        state.ingest_checkpoint(&Checkpoint::parse(text.as_bytes()).unwrap(), 1);
        let share = Demand { cores: Cores(25), blocks: gpu_migrate_model::units::Blocks(4), ..Demand::NONE };
        let whole = Demand { legacy: 1, ..Demand::NONE };
        state.observe_pods(
            vec![
                pod("a", &[("id-a", "main"), ("id-log", "log")], &[("main", ContainerKind::App, share)]),
                pod("b", &[], &[("main", ContainerKind::App, whole)]),
                pod("c", &[("id-c", "main")], &[]),
            ],
            2,
        );
        state
    }

    fn of_card(state: &NodeState, card: usize, processes: Option<Vec<ProcessSample>>) -> Vec<ContainerUse> {
        let sample = CardSample { processes, ..CardSample::default() };
        node_use(state, |uuid| (uuid == format!("GPU-{card}")).then_some(&sample)).cards[card]
            .containers
            .clone()
    }

    fn shared(processes: Option<u32>, utilization: Option<u32>, memory: Option<u64>) -> ContainerUse {
        ContainerUse {
            namespace: "team".into(),
            pod: "a-pod".into(),
            container: "main".into(),
            kind: UseKind::Shared,
            processes,
            utilization_percent: utilization,
            memory_used_bytes: memory,
            cores_requested: Some(25),
            memory_requested_bytes: Some(GIB),
        }
    }

    #[test]
    fn what_is_used_stands_beside_what_was_requested() {
        let state = node();
        assert_eq!(of_card(&state, 0, None), [shared(None, None, None)], "processes are not seen");
        assert_eq!(of_card(&state, 0, Some(vec![])), [shared(Some(0), Some(0), Some(0))]);
        let two = vec![process(7, "a", "id-a", GIB / 2, 20), process(8, "a", "id-a", GIB / 4, 90)];
        assert_eq!(of_card(&state, 0, Some(two)), [shared(Some(2), Some(100), Some(GIB / 4 * 3))]);
        // A card that does not say how busy each process keeps it.
        let quiet = ProcessSample { utilization_percent: None, ..process(7, "a", "id-a", GIB, 0) };
        assert_eq!(of_card(&state, 0, Some(vec![quiet])), [shared(Some(1), None, Some(GIB))]);
    }

    #[test]
    fn a_legacy_container_has_requested_the_card_and_is_known_before_its_id_is() {
        let legacy = ContainerUse {
            pod: "b-pod".into(),
            kind: UseKind::Legacy,
            cores_requested: Some(100),
            memory_requested_bytes: Some(4 * GIB),
            ..shared(Some(1), Some(30), Some(GIB))
        };
        let of_unknown_id = vec![process(9, "b", "id-of-b", GIB, 30)];
        assert_eq!(of_card(&node(), 1, Some(of_unknown_id)), [legacy]);
    }

    #[test]
    fn processes_of_others_are_shown_as_theirs() {
        let nobody = |pod: &str, container: &str| ContainerUse {
            namespace: if pod.is_empty() { String::new() } else { "team".into() },
            pod: pod.into(),
            container: container.into(),
            processes: Some(1),
            utilization_percent: Some(1),
            memory_used_bytes: Some(5),
            ..ContainerUse::default()
        };
        let all = of_card(
            &node(),
            0,
            Some(vec![
                process(1, "", "", 5, 1),
                process(2, "c", "id-c", 5, 1),
                process(3, "c", "id-new", 5, 1),
                process(4, "a", "id-log", 5, 1),
                process(5, "a", "id-a", 5, 1),
            ]),
        );
        let expected = [
            nobody("", ""),
            nobody("a-pod", "log"),
            shared(Some(1), Some(1), Some(5)),
            nobody("c-pod", ""),
            nobody("c-pod", "main"),
        ];
        assert_eq!(all, expected);
    }

    #[test]
    fn an_init_container_counts_while_it_runs_and_a_gone_one_not_at_all() {
        let mut state = node();
        let share = Demand { cores: Cores(25), blocks: gpu_migrate_model::units::Blocks(4), ..Demand::NONE };
        state.observe_pod(pod("a", &[("id-a", "main")], &[("main", ContainerKind::Init, share)]), 3);
        assert!(of_card(&state, 0, Some(vec![])).is_empty());
        assert_eq!(of_card(&state, 0, Some(vec![process(5, "a", "id-a", 5, 1)])).len(), 1);
        // The device manager of the kubelet has dropped it, and the API has no pod.
        let empty = br#"{"Data":{"PodDeviceEntries":null}}"#;
        let mut state = NodeState::new(
            Settings::default(),
            vec![Card { uuid: "GPU-0".into(), ..Card::default() }],
            &Topology::uniform(1, LinkLevel::Pix),
        );
        state.ingest_checkpoint(&Checkpoint::parse(empty).unwrap(), 1);
        assert!(of_card(&state, 0, Some(vec![])).is_empty());
        let other = process(5, "gone", "id", 5, 1);
        let rows = of_card(&state, 0, Some(vec![other]));
        assert_eq!((rows[0].pod.as_str(), rows[0].kind), ("", UseKind::None), "its process is still there");
    }
}
