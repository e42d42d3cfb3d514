//! How the cards are, over time: XID events, cards lost, and the way back.
//!
//! NVIDIA's plugin calls a card Unhealthy at the first bad event and never Healthy again. Here a card is well again when NVML has
//! answered for it for a while without a new event.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gpu_migrate_model::card::Health;
use gpu_migrate_model::units::CardIndex;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{EventSet, Nvml};
use tokio_util::sync::CancellationToken;

use super::file;
use crate::decide::Millis;
use crate::kubelet::directory::Stamp;
use crate::node::{Node, Notice};
use crate::nvidia::Vouch;

/// XIDs that applications cause; NVIDIA's plugin ignores the same (`internal/rm/health.go`).
const OF_APPLICATIONS: [u64; 6] = [13, 31, 43, 45, 68, 109];
/// How long a card must answer without a bad event before it is well again.
const PROBATION: Millis = 30_000;
/// How long one wait for events lasts; after each, every card is asked.
const WAIT_MS: u32 = 5_000;

/// Where health is learnt.
#[derive(Debug)]
pub enum Watcher {
    /// From NVML, on a thread of its own.
    Nvml(Box<Nvml>),
    /// From the inventory file, when it changes.
    File(PathBuf),
}

/// When each card was last found well.
#[derive(Debug, Clone)]
pub struct LastWell {
    cards: Arc<Vec<AtomicU64>>,
    tells: bool,
}

impl Vouch for LastWell {
    fn last_well(&self, card: usize) -> Option<Millis> {
        self.tells.then(|| self.cards.get(card).map(|at| at.load(Ordering::Relaxed)))?
    }
}

impl Watcher {
    /// Starts to follow the cards' health into the books.
    #[must_use]
    pub fn start(self, node: Arc<Node>, stop: CancellationToken) -> LastWell {
        let uuids: Vec<String> = node.with(|books, _| {
            let ledger = books.ledger();
            ledger.indexes().filter_map(|i| ledger.card(i)).map(|c| c.uuid.clone()).collect()
        });
        let cards = Arc::new(uuids.iter().map(|_| AtomicU64::new(0)).collect::<Vec<_>>());
        match self {
            Self::Nvml(nvml) => {
                let last = LastWell { cards, tells: true };
                let seen = last.clone();
                // A thread, not a task: waiting for events blocks it for ever.
                std::thread::spawn(move || follow_nvml(&nvml, &uuids, &node, &seen, &stop));
                last
            }
            Self::File(path) => {
                tokio::spawn(follow_file(path, uuids, node, stop));
                LastWell { cards, tells: false }
            }
        }
    }
}

/// One card's health, decided from what was seen.
#[derive(Clone, Copy, Debug, Default)]
pub struct Condition {
    bad_since: Option<Millis>,
    last_bad: Millis,
}

impl Condition {
    /// A bad event, or no answer.
    pub fn bad(&mut self, now: Millis) {
        self.bad_since.get_or_insert(now);
        self.last_bad = now;
    }

    /// The card answered. Returns its health.
    pub fn answered(&mut self, now: Millis) -> Health {
        if self.bad_since.is_some() && now.saturating_sub(self.last_bad) >= PROBATION {
            self.bad_since = None;
        }
        self.health()
    }

    /// Its health now.
    #[must_use]
    pub fn health(&self) -> Health {
        if self.bad_since.is_some() { Health::Unhealthy } else { Health::Healthy }
    }
}

fn follow_nvml(nvml: &Nvml, uuids: &[String], node: &Node, last: &LastWell, stop: &CancellationToken) {
    let mut conditions = vec![Condition::default(); uuids.len()];
    let mut events = subscribe(nvml, uuids);
    while !stop.is_cancelled() {
        let event = match &events {
            Some(set) => set.wait(WAIT_MS),
            None => {
                std::thread::sleep(Duration::from_millis(u64::from(WAIT_MS)));
                Err(NvmlError::Timeout)
            }
        };
        match event {
            Ok(event) if event.event_type.contains(EventTypes::CRITICAL_XID_ERROR) => {
                let xid = match event.event_data {
                    Some(XidError::Value(number)) => number,
                    // Not one that applications are known to cause.
                    _ => 0,
                };
                let uuid = event.device.uuid().ok();
                if OF_APPLICATIONS.contains(&xid) {
                    tracing::info!(xid, ?uuid, "XID of an application; the card stays healthy");
                } else {
                    tracing::warn!(xid, ?uuid, "XID error");
                    // An event that names no card is about all of them.
                    for (position, known) in uuids.iter().enumerate() {
                        if uuid.as_ref().is_none_or(|u| u == known) {
                            conditions[position].bad(node.now());
                        }
                    }
                }
            }
            Ok(event) => tracing::warn!(kind = ?event.event_type, "NVML event"),
            Err(NvmlError::Timeout) => {}
            // Not before the cards were asked: they say which one is lost.
            Err(error) => {
                tracing::warn!(%error, "waiting for NVML events failed; subscribing anew");
                std::thread::sleep(Duration::from_secs(1));
                events = subscribe(nvml, uuids);
            }
        }
        for (position, uuid) in uuids.iter().enumerate() {
            let now = node.now();
            let condition = &mut conditions[position];
            match nvml.device_by_uuid(uuid.as_str()).and_then(|device| device.memory_info().map(drop)) {
                Ok(()) | Err(NvmlError::NotSupported) => {
                    if condition.answered(now) == Health::Healthy
                        && let Some(at) = last.cards.get(position)
                    {
                        at.store(now, Ordering::Relaxed);
                    }
                }
                Err(error) => {
                    tracing::warn!(%uuid, %error, "card does not answer");
                    condition.bad(now);
                }
            }
            tell(node, CardIndex::from(position), condition.health());
        }
    }
}

fn tell(node: &Node, card: CardIndex, health: Health) {
    let changed = node.with(|books, _| {
        let changed = books.ledger().health(card) != health;
        if changed {
            books.set_health(card, health);
        }
        changed
    });
    if changed {
        tracing::warn!(%card, ?health, "health of a card changed");
        let note = format!("{card} is {health:?}");
        node.notice(match health {
            Health::Healthy => Notice::normal("CardHealthy", note),
            Health::Unhealthy => Notice::warning("CardUnhealthy", note),
        });
    }
}

fn subscribe<'n>(nvml: &'n Nvml, uuids: &[String]) -> Option<EventSet<'n>> {
    let mut set =
        nvml.create_event_set().map_err(|error| tracing::warn!(%error, "NVML gives no events")).ok()?;
    for uuid in uuids {
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
            Err(error) => {
                tracing::warn!(%uuid, %error, "no events of this card; it is only asked");
                // The set is gone with the error: begin anew without hope for this card's events.
                return None;
            }
        }
    }
    Some(set)
}

/// The file says how cards are: for trying things out.
async fn follow_file(path: PathBuf, uuids: Vec<String>, node: Arc<Node>, stop: CancellationToken) {
    let mut last = Stamp::of(&path);
    loop {
        tokio::select! {
            () = tokio::time::sleep(Duration::from_millis(500)) => {}
            () = stop.cancelled() => return,
        }
        let stamp = Stamp::of(&path);
        if stamp == last || stamp.is_none() {
            continue;
        }
        match file::read(&path) {
            Ok(inventory) => {
                last = stamp;
                for (card, health) in inventory.cards.iter().zip(&inventory.health) {
                    if let Some(position) = uuids.iter().position(|uuid| *uuid == card.uuid) {
                        tell(&node, CardIndex::from(position), *health);
                    }
                }
            }
            Err(error) => tracing::warn!(%error, "what was known of the cards stays"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_is_well_again_after_probation_without_events() {
        let mut condition = Condition::default();
        assert_eq!(condition.answered(0), Health::Healthy);
        condition.bad(10);
        assert_eq!(condition.answered(20), Health::Unhealthy);
        condition.bad(1000);
        assert_eq!(condition.answered(1000 + PROBATION - 1), Health::Unhealthy);
        assert_eq!(condition.answered(1000 + PROBATION), Health::Healthy);
    }
}
