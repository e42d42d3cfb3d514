//! The inventory as NVML reports it. Calls block: callers use a thread of their own.

use std::collections::BTreeMap;

use gpu_migrate_model::card::{Card, Health};
use gpu_migrate_model::topology::{LinkLevel, Topology};
use gpu_migrate_model::units::CardIndex;
use nvml_wrapper::enum_wrappers::device::TopologyLevel;
use nvml_wrapper::enums::device::DeviceArchitecture;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml, cuda_driver_version_major, cuda_driver_version_minor};

use super::{Inventory, InventoryError, by_numa};

/// NVLinks that a card can have (`NVML_NVLINK_MAX_LINKS`).
const MAX_LINKS: u32 = 18;

/// Reads the whole inventory.
///
/// # Errors
/// [`InventoryError::Card`] where NVML does not report a card's UUID, number or memory; other values are left empty.
pub fn read(nvml: &Nvml) -> Result<Inventory, InventoryError> {
    let mut devices = Vec::new();
    for index in 0..nvml.device_count()? {
        let device = nvml.device_by_index(index).map_err(|source| InventoryError::Card {
            index,
            what: "handle",
            source,
        })?;
        let card = card(&device, index)?;
        devices.push((card, device));
    }
    devices.sort_by_key(|(card, _)| card.minor);
    let mig_devices = mig_devices(&devices);
    let topology = topology(&devices);
    let version = nvml.sys_cuda_driver_version().unwrap_or_default();
    Ok(Inventory {
        health: vec![Health::Healthy; devices.len()],
        cards: devices.into_iter().map(|(card, _)| card).collect(),
        topology,
        mig_devices,
        driver_version: nvml.sys_driver_version().unwrap_or_default(),
        cuda_version: match version {
            0 => String::new(),
            v => format!("{}.{}", cuda_driver_version_major(v), cuda_driver_version_minor(v)),
        },
    })
}

fn card(device: &Device<'_>, index: u32) -> Result<Card, InventoryError> {
    let missing = |what| move |source| InventoryError::Card { index, what, source };
    let memory = match device.memory_info() {
        Ok(memory) => memory.total >> 20,
        // Cards without memory of their own (integrated ones) are whole cards only.
        Err(NvmlError::NotSupported) => 0,
        Err(source) => return Err(InventoryError::Card { index, what: "memory", source }),
    };
    let pci = device.pci_info().ok();
    Ok(Card {
        uuid: device.uuid().map_err(missing("UUID"))?,
        minor: device.minor_number().map_err(missing("minor number"))?,
        nvml_index: index,
        model: device.name().unwrap_or_default(),
        memory_mib: memory,
        numa: device.numa_node_id().ok().or_else(|| pci.as_ref().and_then(|p| numa_of(&p.bus_id))),
        bus_id: pci.map(|p| p.bus_id).unwrap_or_default(),
        mig: device.mig_mode().is_ok_and(|mode| mode.current != 0),
    })
}

/// The NUMA node from sysfs, for drivers that do not report it; bus IDs there have four digits of domain, in lower case.
fn numa_of(bus_id: &str) -> Option<u32> {
    let short = bus_id.get(bus_id.len().checked_sub(12)?..)?.to_lowercase();
    let text = std::fs::read_to_string(format!("/sys/bus/pci/devices/{short}/numa_node")).ok()?;
    // -1: the machine has no NUMA.
    text.trim().parse().ok()
}

fn mig_devices(devices: &[(Card, Device<'_>)]) -> BTreeMap<String, CardIndex> {
    let mut found = BTreeMap::new();
    for (position, (card, device)) in devices.iter().enumerate().filter(|(_, (card, _))| card.mig) {
        for slot in 0..device.mig_device_count().unwrap_or(0) {
            // A slot without a device is no error: profiles leave gaps.
            if let Ok(uuid) = device.mig_device_by_index(slot).and_then(|mig| mig.uuid()) {
                found.insert(uuid, CardIndex::from(position));
            }
        }
        tracing::debug!(card = %card.uuid, "MIG is on");
    }
    found
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
