//! NVIDIA's plugin over a pipe in place of its socket, and the inventory's view of its cards.

use std::path::Path;
use std::sync::Arc;

use gpu_migrate_kubelet_api::socket::{dial_stream, serve_stream};
use gpu_migrate_sim::nvidia::NvidiaPlugin;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use crate::decide::Millis;
use crate::decide::tests::world::Hardware;
use crate::nvidia::HealthSource;
use crate::platform::Sockets;
use gpu_migrate_model::units::CardIndex;

/// The plugin's socket: not served, or served by this process of the plugin.
#[derive(Clone, Debug, Default)]
pub(super) struct Socket(pub(super) Arc<Mutex<Option<NvidiaPlugin>>>);

#[tonic::async_trait]
impl Sockets for Socket {
    async fn dial(&self, _: &Path) -> Result<Channel, tonic::transport::Error> {
        let pipe = self.0.lock().as_ref().map(|plugin| {
            let (client, server) = tokio::io::duplex(1 << 16);
            tokio::spawn(serve_stream(server, plugin.routes(CancellationToken::new())));
            client
        });
        dial_stream(pipe).await
    }
}

/// The inventory: it sees a card healthy as soon as it is.
#[derive(Debug)]
pub(super) struct Inventory {
    pub(super) hardware: Arc<Mutex<Hardware>>,
    /// The cards in the order of their ranges; one that is nobody's is none.
    pub(super) cards: Vec<Option<usize>>,
    pub(super) clock: super::services::ProcessClock,
}

impl HealthSource for Inventory {
    fn last_healthy_at(&self, card: CardIndex) -> Option<Millis> {
        let card = self.cards[card.position()]?;
        self.hardware.lock().is_healthy(card).then(|| crate::platform::Clock::now(&self.clock) + 1)
    }
}
