//! The node's cards, their links and their health: from NVML, or from a file.

pub mod card_map;
pub mod card_map_file;
pub mod evidence;
pub mod file;
pub mod health;
pub mod nvml;
pub mod nvml_process;
mod nvml_sample;

use std::collections::BTreeMap;

use gpu_migrate_model::card::{Card, Health};
use gpu_migrate_model::topology::{LinkLevel, Topology};
use gpu_migrate_model::units::CardIndex;

use self::card_map::Resolved;
use self::nvml_process::{Limits, NvmlProcess};

/// Everything about the cards that does not change while they are there.
#[derive(Clone, Debug)]
pub struct Inventory {
    /// The cards: by minor number as they are found, in the order of their ranges of device IDs once [`arranged`](Inventory::arranged).
    pub cards: Vec<Card>,
    pub topology: Topology,
    /// MIG devices and the card each is on.
    pub mig_devices: BTreeMap<String, CardIndex>,
    /// Version of the driver; empty where unknown.
    pub driver_version: String,
    /// Version of CUDA that the driver supports; empty where unknown.
    pub cuda_version: String,
    /// How the cards are at this moment.
    pub health: Vec<Health>,
}

impl Inventory {
    /// The same in the order of the ranges of device IDs, which is that of [`CardIndex`] everywhere else. A card that is missing has its
    /// place, and is unhealthy.
    #[must_use]
    pub fn arranged(self, by: &Resolved) -> Self {
        let place: Vec<Option<CardIndex>> = by
            .cards()
            .iter()
            .map(|card| self.cards.iter().position(|c| c.uuid == card.uuid).map(CardIndex::from))
            .collect();
        let health = place
            .iter()
            .map(|at| at.and_then(|at| self.health.get(at.position()).copied()).unwrap_or(Health::Unhealthy));
        let topology = Topology::from_fn(place.len(), |a, b| {
            let (a, b) =
                (place.get(a.position()).copied().flatten(), place.get(b.position()).copied().flatten());
            a.zip(b).and_then(|(a, b)| self.topology.between(a, b)).unwrap_or(LinkLevel::Sys)
        });
        let mig_devices = self.mig_devices.iter().filter_map(|(device, card)| {
            let now = place.iter().position(|at| at.as_ref() == Some(card))?;
            Some((device.clone(), CardIndex::from(now)))
        });
        Self {
            health: health.collect(),
            topology,
            mig_devices: mig_devices.collect(),
            cards: by.cards(),
            ..self
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum InventoryError {
    /// The file cannot be read.
    #[error("inventory file {path}: {source}")]
    Read { path: std::path::PathBuf, source: std::io::Error },
    #[error("inventory file {path}: {message}")]
    Content {
        path: std::path::PathBuf,
        /// Field, value, and what was expected.
        message: String,
    },
    /// The library is not there, or the driver is not, or it does not answer.
    #[error(
        "NVML: {0}; is the NVIDIA driver installed and libnvidia-ml.so.1 in the library path? (or use --inventory FILE)"
    )]
    Nvml(String),
    #[error("the process that calls NVML cannot be started: {0}")]
    Process(std::io::Error),
}

/// The links that NUMA nodes alone suggest, for want of better: near on one node, far otherwise.
fn by_numa(cards: &[Card]) -> Topology {
    Topology::from_fn(cards.len(), |a, b| {
        let numa = |i: CardIndex| cards.get(i.position()).and_then(|c| c.numa);
        if numa(a).is_some() && numa(a) == numa(b) { LinkLevel::Node } else { LinkLevel::Sys }
    })
}

/// Loads the inventory: `nvml`, or the path of a file. The watcher follows its health.
///
/// # Errors
/// [`InventoryError`].
pub async fn load(
    source: &str,
    library: Option<&std::path::Path>,
) -> Result<(Inventory, health::Watcher), InventoryError> {
    if source != "nvml" {
        let path = std::path::PathBuf::from(source);
        return Ok((file::read(&path)?, health::Watcher::File(path)));
    }
    let program = std::env::current_exe().map_err(InventoryError::Process)?;
    let library = library.map(std::path::Path::to_path_buf);
    let mut process = NvmlProcess::new(program, library, Limits::default());
    let found = process.first_inventory().await?;
    Ok((found.inventory(), health::Watcher::Nvml(Box::new(process), found)))
}
