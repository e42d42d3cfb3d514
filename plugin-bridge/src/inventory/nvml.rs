//! What NVML reports of the cards. Calls block, some for good: all of this runs in [a process of its own](super::nvml_process).

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::Duration;

use gpu_migrate_model::card::{Card, Health};
use gpu_migrate_model::topology::{LinkLevel, Topology};
use gpu_migrate_model::units::CardIndex;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::TopologyLevel;
use nvml_wrapper::enums::device::{DeviceArchitecture, SampleValue};
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::event::EventData;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id::{
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, NVML_FI_DEV_REMAPPED_FAILURE, NVML_FI_DEV_REMAPPED_PENDING,
};
use nvml_wrapper::{Device, EventSet, Nvml, cuda_driver_version_major, cuda_driver_version_minor};

use super::nvml_process::{CardReport, Event, Found, Message, Shape};
use super::nvml_sample::{Sampler, computing};
use super::{Inventory, by_numa};

/// How long one wait for events lasts; after each, every card is asked about.
pub const EVENT_WAIT: Duration = Duration::from_secs(5);
/// After so many rounds in which a card did not answer the process ends: only a new one sees a card that is back.
const ROUNDS_WITH_A_LOST_CARD: u32 = 3;

/// NVLinks that a card can have (`NVML_NVLINK_MAX_LINKS`).
const MAX_LINKS: u32 = 18;

type Say<'a> = &'a mut dyn FnMut(Message) -> io::Result<()>;

/// Says what there is, and then how it is, for as long as somebody listens.
///
/// # Errors
/// Nobody listens.
pub fn follow(nvml: &Nvml, left_out: &[u32], say: Say<'_>) -> io::Result<()> {
    let count = match nvml.device_count() {
        Ok(count) => count,
        Err(error) => return say(Message::Failed(error.to_string())),
    };
    let mut devices = Vec::new();
    for index in (0..count).filter(|index| !left_out.contains(index)) {
        say(Message::Asking(index))?;
        match read_card(nvml, index) {
            Ok(found) => devices.push(found),
            Err(why) => say(Message::Unreadable { index, why })?,
        }
    }
    devices.sort_by_key(|(card, _)| card.minor);
    let cards: Vec<(u32, String)> =
        devices.iter().map(|(card, _)| (card.nvml_index, card.uuid.clone())).collect();
    say(Message::Inventory(Found::new(inventory(nvml, devices))))?;
    let all_answered_at_first = cards.len() == count as usize;
    let mut events = subscribe(nvml, &cards, say)?;
    let mut with_a_lost_card = 0;
    let mut sampler = Sampler::new();
    loop {
        say_event(&mut events, say)?;
        if events.is_none() {
            events = subscribe(nvml, &cards, say)?;
        }
        let mut lost = !all_answered_at_first;
        for (index, uuid) in &cards {
            say(Message::Asking(*index))?;
            let report = ask(nvml, uuid, &mut sampler);
            lost |= report.shape.is_none();
            say(Message::Card(report))?;
        }
        say(Message::Round)?;
        with_a_lost_card = if lost { with_a_lost_card + 1 } else { 0 };
        if with_a_lost_card == ROUNDS_WITH_A_LOST_CARD {
            return Ok(());
        }
    }
}

fn inventory(nvml: &Nvml, devices: Vec<(Card, Device<'_>)>) -> Inventory {
    let mig_devices = devices.iter().enumerate().flat_map(|(position, (card, device))| {
        let ids = if card.mig { mig(device).map(|(_, ids)| ids).unwrap_or_default() } else { Vec::new() };
        ids.into_iter().map(move |id| (id, CardIndex::from(position)))
    });
    Inventory {
        mig_devices: mig_devices.collect::<BTreeMap<_, _>>(),
        topology: topology(&devices),
        health: vec![Health::Healthy; devices.len()],
        cards: devices.into_iter().map(|(card, _)| card).collect(),
        driver_version: nvml.sys_driver_version().unwrap_or_default(),
        cuda_version: match nvml.sys_cuda_driver_version().unwrap_or_default() {
            0 => String::new(),
            v => format!("{}.{}", cuda_driver_version_major(v), cuda_driver_version_minor(v)),
        },
    }
}

/// One card with UUID, number and memory; other values that NVML does not report are left empty.
fn read_card(nvml: &Nvml, index: u32) -> Result<(Card, Device<'_>), String> {
    let what = |what: &'static str| move |error: NvmlError| format!("{what}: {error}");
    let device = nvml.device_by_index(index).map_err(what("handle"))?;
    let pci = device.pci_info().ok();
    let card = Card {
        uuid: device.uuid().map_err(what("UUID"))?,
        minor: device.minor_number().map_err(what("minor number"))?,
        nvml_index: index,
        model: device.name().unwrap_or_default(),
        memory_mib: memory_mib(&device).map_err(what("memory"))?,
        numa: device.numa_node_id().ok().or_else(|| pci.as_ref().and_then(|p| numa_of(&p.bus_id))),
        bus_id: pci.map(|p| p.bus_id).unwrap_or_default(),
        mig: mig(&device).map_err(what("MIG mode"))?.0,
    };
    Ok((card, device))
}

fn memory_mib(device: &Device<'_>) -> Result<u64, NvmlError> {
    match device.memory_info() {
        Ok(memory) => Ok(memory.total >> 20),
        // Cards without memory of their own (integrated ones) are whole cards only.
        Err(NvmlError::NotSupported) => Ok(0),
        Err(error) => Err(error),
    }
}

/// Whether MIG is on, and the UUIDs of the MIG devices. An error is none of both: a card that seems to change makes the agent start anew.
fn mig(device: &Device<'_>) -> Result<(bool, Vec<String>), NvmlError> {
    let on = match device.mig_mode() {
        Ok(mode) => mode.current != 0,
        Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_)) => false,
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for slot in 0..if on { device.mig_device_count()? } else { 0 } {
        match device.mig_device_by_index(slot).and_then(|mig| mig.uuid()) {
            Ok(uuid) => found.push(uuid),
            // A slot without a device is no error: profiles leave gaps.
            Err(NvmlError::NotFound | NvmlError::InvalidArg) => {}
            Err(error) => return Err(error),
        }
    }
    found.sort();
    Ok((on, found))
}

fn ask(nvml: &Nvml, uuid: &str, sampler: &mut Sampler) -> CardReport {
    let uuid = uuid.to_owned();
    let asked = nvml.device_by_uuid(uuid.as_str()).and_then(|device| {
        let (mig, mig_devices) = mig(&device)?;
        Ok((Shape { memory_mib: memory_mib(&device)?, mig, mig_devices }, device))
    });
    let (shape, device) = match asked {
        Ok(asked) => asked,
        Err(error) => return CardReport { uuid, fault: Some(error.to_string()), ..CardReport::default() },
    };
    let processes = computing(&device);
    let (fault, tells_recovery) = fault_of(&device);
    CardReport {
        fault,
        tells_recovery,
        sample: Some(sampler.sample(&uuid, &device, processes.as_deref())),
        processes: processes.map(|all| all.iter().map(|process| process.pid).collect()),
        shape: Some(shape),
        uuid,
    }
}

/// Why nothing may be allocated on a card that answers, and whether the driver says what it needs after an error. Values that the driver
/// does not report count as good.
fn fault_of(device: &Device<'_>) -> (Option<String>, bool) {
    let fields =
        [NVML_FI_DEV_REMAPPED_PENDING, NVML_FI_DEV_REMAPPED_FAILURE, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION];
    let values = device.field_values_for(&fields.map(FieldId)).unwrap_or_default();
    let reported =
        |position: usize| match values.get(position).and_then(|row| row.as_ref().ok()?.value.as_ref().ok()) {
            Some(SampleValue::U32(value)) => Some(*value),
            _ => None,
        };
    let row = |position| reported(position).map(|value| value != 0);
    let of_memory = memory_fault(row(0), row(1), device.are_pages_pending_retired().ok());
    let action = reported(2);
    (of_memory.map(str::to_owned).or_else(|| recovery(action?)), action.is_some())
}

/// What the driver asks for after an error that the card does not recover from by itself (`nvmlDeviceGpuRecoveryAction_t`; the kernel log
/// has it as XID 154). It asks until that was done.
fn recovery(action: u32) -> Option<String> {
    let what = match action {
        0 => return None,
        1 => "a reset of the card",
        2 => "a reboot of the node",
        3 => "an end of its peer-to-peer traffic",
        4 => "an end of its peer-to-peer traffic and a reset of the card",
        other => return Some(format!("the driver asks for recovery action {other} (nvidia-smi -q)")),
    };
    Some(format!("the driver asks for {what}"))
}

/// The fault of a card's memory, if any.
fn memory_fault(
    row_pending: Option<bool>,
    row_failed: Option<bool>,
    page_pending: Option<bool>,
) -> Option<&'static str> {
    if row_failed == Some(true) {
        Some("the remapping of a faulty memory row failed; the card has to be replaced")
    } else if row_pending == Some(true) {
        Some("a faulty memory row waits to be remapped; reset the card once it is free")
    } else if page_pending == Some(true) {
        Some("a faulty memory page waits to be retired; reset the card once it is free")
    } else {
        None
    }
}

/// Waits for the next event.
fn say_event(events: &mut Option<EventSet<'_>>, say: Say<'_>) -> io::Result<()> {
    let Some(set) = events else {
        std::thread::sleep(EVENT_WAIT);
        return Ok(());
    };
    match set.wait(u32::try_from(EVENT_WAIT.as_millis()).unwrap_or(u32::MAX)) {
        Ok(event) => match event_of(&event) {
            Some(kind) => say(Message::Event { uuid: event.device.uuid().ok(), event: kind }),
            None => Ok(()),
        },
        Err(NvmlError::Timeout) => Ok(()),
        Err(_) => {
            *events = None;
            std::thread::sleep(Duration::from_secs(1));
            say(Message::Event { uuid: None, event: Event::Lost })
        }
    }
}

fn event_of(event: &EventData<'_>) -> Option<Event> {
    if event.event_type.contains(EventTypes::CRITICAL_XID_ERROR) {
        Some(Event::Xid(match event.event_data {
            Some(XidError::Value(number)) => number,
            // Unknown, so not an application's.
            _ => 0,
        }))
    } else if event.event_type.contains(EventTypes::DOUBLE_BIT_ECC_ERROR) {
        Some(Event::DoubleBitEcc)
    } else {
        None
    }
}

/// The events of all cards that have any. One that refuses takes the set with it: then all are registered again without it.
fn subscribe<'n>(nvml: &'n Nvml, cards: &[(u32, String)], say: Say<'_>) -> io::Result<Option<EventSet<'n>>> {
    let mut refused: BTreeSet<u32> = BTreeSet::new();
    'all: loop {
        let Ok(mut set) = nvml.create_event_set() else { return Ok(None) };
        for (index, uuid) in cards.iter().filter(|(index, _)| !refused.contains(index)) {
            say(Message::Asking(*index))?;
            let Ok(device) = nvml.device_by_uuid(uuid.as_str()) else { continue };
            let wanted = EventTypes::CRITICAL_XID_ERROR
                | EventTypes::DOUBLE_BIT_ECC_ERROR
                | EventTypes::SINGLE_BIT_ECC_ERROR;
            let supported = device.supported_event_types().unwrap_or(EventTypes::CRITICAL_XID_ERROR) & wanted;
            if supported.is_empty() {
                continue;
            }
            match device.register_events(supported, set) {
                Ok(registered) => set = registered,
                Err(_) => {
                    refused.insert(*index);
                    continue 'all;
                }
            }
        }
        return Ok(Some(set));
    }
}

/// The NUMA node from sysfs, for drivers that do not report it; bus IDs there have four digits of domain, in lower case.
fn numa_of(bus_id: &str) -> Option<u32> {
    let short = bus_id.get(bus_id.len().checked_sub(12)?..)?.to_lowercase();
    let text = std::fs::read_to_string(format!("/sys/bus/pci/devices/{short}/numa_node")).ok()?;
    // -1: the machine has no NUMA.
    text.trim().parse().ok()
}

/// NVLink where there is one, else the common ancestor, else NUMA.
fn topology(devices: &[(Card, Device<'_>)]) -> Topology {
    let cards: Vec<Card> = devices.iter().map(|(card, _)| card.clone()).collect();
    let guess = by_numa(&cards);
    let linked: Vec<Vec<String>> = devices.iter().map(|(_, device)| nvlink_peers(device)).collect();
    let switched: Vec<bool> = devices
        .iter()
        .zip(&linked)
        // On machines with NVSwitch the links end at switches, not at cards: every such card reaches every other.
        .map(|((_, device), peers)| {
            let of_data_centre = device.architecture().is_ok_and(|a| {
                !matches!(
                    a,
                    DeviceArchitecture::Kepler | DeviceArchitecture::Maxwell | DeviceArchitecture::Pascal
                )
            });
            of_data_centre
                && !peers.is_empty()
                && !peers.iter().any(|p| cards.iter().any(|c| same_bus(&c.bus_id, p)))
        })
        .collect();
    Topology::from_fn(devices.len(), |a, b| {
        let (i, j) = (a.position(), b.position());
        let direct = linked[i].iter().any(|peer| same_bus(peer, &cards[j].bus_id));
        if direct || (switched[i] && switched[j]) {
            return LinkLevel::NvLink;
        }
        // By value: the crate looks up the other handle itself.
        match devices[i]
            .1
            .nvml()
            .device_by_uuid(cards[j].uuid.as_str())
            .and_then(|d| devices[i].1.topology_common_ancestor(d))
        {
            Ok(TopologyLevel::Internal | TopologyLevel::Single) => LinkLevel::Pix,
            Ok(TopologyLevel::Multiple) => LinkLevel::Pxb,
            Ok(TopologyLevel::HostBridge) => LinkLevel::Phb,
            Ok(TopologyLevel::Node) => LinkLevel::Node,
            Ok(TopologyLevel::System) => LinkLevel::Sys,
            Err(_) => guess.between(a, b).unwrap_or(LinkLevel::Sys),
        }
    })
}

/// Bus IDs at the other ends of a card's active links.
fn nvlink_peers(device: &Device<'_>) -> Vec<String> {
    let mut peers = Vec::new();
    for number in 0..MAX_LINKS {
        let link = device.link_wrapper_for(number);
        match link.is_active() {
            Ok(true) => peers.extend(link.remote_pci_info().ok().map(|pci| pci.bus_id)),
            Ok(false) => {}
            // No such link, or no NVLink at all.
            Err(_) => break,
        }
    }
    peers
}

fn same_bus(one: &str, other: &str) -> bool {
    // The domain is written with four digits or eight.
    let tail = |s: &str| s.get(s.len().saturating_sub(12)..).unwrap_or(s).to_lowercase();
    !one.is_empty() && tail(one) == tail(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_waits_for_a_reset_is_a_fault() {
        assert_eq!(memory_fault(None, None, None), None);
        assert_eq!(memory_fault(Some(false), Some(false), Some(false)), None);
        assert!(memory_fault(Some(true), Some(true), None).is_some_and(|why| why.contains("replaced")));
        assert!(memory_fault(Some(true), Some(false), None).is_some_and(|why| why.contains("remapped")));
        assert!(memory_fault(None, None, Some(true)).is_some_and(|why| why.contains("retired")));
    }

    #[test]
    fn what_the_driver_asks_for_is_named() {
        assert_eq!(recovery(0), None);
        assert_eq!(recovery(2).as_deref(), Some("the driver asks for a reboot of the node"));
        assert!(recovery(7).is_some_and(|why| why.contains("action 7")), "newer drivers know more of them");
    }
}
