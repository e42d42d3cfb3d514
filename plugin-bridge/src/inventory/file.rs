//! An inventory from a file: for standalone runs and tests.

use std::collections::BTreeSet;
use std::path::Path;

use gpu_migrate_model::card::{Card, Health};
use gpu_migrate_model::topology::Topology;
use serde::Deserialize;

use super::{Inventory, InventoryError, by_numa};

/// The form of the file, YAML or JSON.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct InventoryFile {
    cards: Vec<CardEntry>,
    /// As `nvidia-smi topo -m` prints it. Without it, cards of one NUMA node are near.
    #[serde(default)]
    topology: Option<String>,
    #[serde(default)]
    driver_version: String,
    #[serde(default)]
    cuda_version: String,
}

/// A card as in a GPUShadow, and how it is.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct CardEntry {
    uuid: String,
    minor: u32,
    #[serde(rename = "memoryMiB")]
    memory_mib: u64,
    #[serde(default)]
    model: String,
    #[serde(default)]
    bus_id: String,
    #[serde(default)]
    numa: Option<u32>,
    #[serde(default)]
    mig: bool,
    #[serde(default)]
    health: Health,
}

/// Reads an inventory file.
///
/// # Errors
/// [`InventoryError`] naming the file and field.
pub fn read(path: &Path) -> Result<Inventory, InventoryError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| InventoryError::Read { path: path.to_path_buf(), source })?;
    parse(&text).map_err(|message| InventoryError::Content { path: path.to_path_buf(), message })
}

fn parse(text: &str) -> Result<Inventory, String> {
    let file: InventoryFile = serde_saphyr::from_str(text).map_err(|e| e.to_string())?;
    // The order of the file is NVML's.
    let mut entries: Vec<(u32, CardEntry)> = (0..).zip(file.cards).collect();
    entries.sort_by_key(|(_, entry)| entry.minor);
    let (mut uuids, mut minors) = (BTreeSet::new(), BTreeSet::new());
    for (_, entry) in &entries {
        if entry.uuid.is_empty() || !uuids.insert(&entry.uuid) {
            return Err(format!(
                "cards[].uuid: {:?} is empty or appears twice; expected one UUID a card",
                entry.uuid
            ));
        }
        if !minors.insert(entry.minor) {
            return Err(format!(
                "cards[].minor: {} appears twice; expected the number of /dev/nvidia<minor>",
                entry.minor
            ));
        }
    }
    let health = entries.iter().map(|(_, entry)| entry.health).collect();
    let cards: Vec<Card> = entries
        .into_iter()
        .map(|(nvml_index, entry)| Card {
            uuid: entry.uuid,
            minor: entry.minor,
            nvml_index,
            model: entry.model,
            memory_mib: entry.memory_mib,
            bus_id: entry.bus_id,
            numa: entry.numa,
            mig: entry.mig,
        })
        .collect();
    let topology = match file.topology {
        None => by_numa(&cards),
        Some(text) => {
            let topology = Topology::parse(&text).map_err(|e| format!("topology: {e}"))?;
            if topology.cards() != cards.len() {
                return Err(format!("topology: {} cards, but cards lists {}", topology.cards(), cards.len()));
            }
            topology
        }
    };
    Ok(Inventory {
        cards,
        topology,
        mig_devices: Default::default(),
        driver_version: file.driver_version,
        cuda_version: file.cuda_version,
        health,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_ordered_by_minor_number() {
        let text = "cards:\n  - {uuid: GPU-b, minor: 1, memoryMiB: 81920, numa: 0}\n  - {uuid: GPU-a, minor: 0, memoryMiB: 81920, numa: 0, health: Unhealthy}\n";
        let inventory = parse(text).unwrap();
        assert_eq!(inventory.cards[0].uuid, "GPU-a");
        assert_eq!(inventory.cards[0].nvml_index, 1, "the order of the file is NVML's");
        assert_eq!(inventory.health, [Health::Unhealthy, Health::Healthy]);
        assert_eq!(inventory.cards[0].blocks().0, 320);
    }

    #[test]
    fn mistakes_name_the_field() {
        let card = "cards:\n  - {uuid: GPU-a, minor: 0, memoryMiB: 1024}\n";
        for (text, expected) in [
            (format!("{card}  - {{uuid: GPU-a, minor: 1, memoryMiB: 1}}\n"), "cards[].uuid: \"GPU-a\""),
            (format!("{card}  - {{uuid: GPU-b, minor: 0, memoryMiB: 1}}\n"), "cards[].minor: 0"),
            (format!("{card}colour: red\n"), "colour"),
            (
                format!("{card}topology: |\n  GPU0 X PIX\n  GPU1 PIX X\n"),
                "topology: 2 cards, but cards lists 1",
            ),
            ("cards:\n  - {uuid: GPU-a, minor: 0}\n".to_owned(), "memoryMiB"),
        ] {
            let error = parse(&text).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
