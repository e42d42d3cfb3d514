//! NVIDIA's plugin behind the agent: one process of it.

use std::path::PathBuf;

use gpu_migrate_kubelet_api::deviceplugin::KUBELET_SOCKET;
use gpu_migrate_plugin_bridge::nvidia::SOCKET;
use gpu_migrate_sim::nvidia::NvidiaPlugin;
use tokio_util::sync::CancellationToken;

use super::{until, uuid};

pub struct Nvidia {
    pub plugin: NvidiaPlugin,
    pub stop: CancellationToken,
    cards: usize,
}

impl Nvidia {
    /// Serves and registers with the agent, as the real one does at its start.
    pub async fn start(folder: PathBuf, cards: usize) -> Self {
        let nvidia = Self::run(folder, cards, SOCKET);
        until("NVIDIA's plugin is registered and its list is read", || nvidia.plugin.streams() > 0).await;
        nvidia
    }

    /// The same without `KUBELET_SOCKET`.
    pub fn start_at_kubelet(folder: PathBuf, cards: usize) -> Self {
        Self::run(folder, cards, KUBELET_SOCKET)
    }

    fn run(folder: PathBuf, cards: usize, registrar: &str) -> Self {
        let plugin = NvidiaPlugin::with_health((0..cards).map(uuid).collect(), vec![true; cards], Some(0));
        let stop = CancellationToken::new();
        tokio::spawn(plugin.clone().run(folder, registrar.into(), stop.clone()));
        Self { plugin, stop, cards }
    }

    /// A health event: these cards are unhealthy.
    pub fn fail(&self, cards: &[usize]) {
        self.plugin.report((0..self.cards).map(|card| !cards.contains(&card)).collect());
    }
}
