//! The cards' health over time: XID events, memory errors, lost cards, and recovery.
//!
//! NVIDIA's plugin reports a card Unhealthy at the first critical event and never Healthy again. Here a card is healthy again when
//! NVML has answered for it for `RECOVERY` without a new event.
//!
//! Of memory errors the corrected ones are only logged. An uncorrected one (a double-bit ECC event, XID 48) is a bad event, and for as
//! long as a row remapping waits for a reset of the card, or has failed, nothing new is allocated on it (NVIDIA, "GPU Memory Error
//! Management"; before Ampere: a page that waits for its retirement). Running containers keep it.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gpu_migrate_model::card::Health;
use gpu_migrate_model::units::CardIndex;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id::{NVML_FI_DEV_REMAPPED_FAILURE, NVML_FI_DEV_REMAPPED_PENDING};
use nvml_wrapper::{Device, EventSet, Nvml};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use super::file;
use crate::decide::Millis;
use crate::node::{Node, NodeEvent};
use crate::nvidia::HealthSource;
use gpu_migrate_kubelet_api::directory::Stamp;

/// XIDs that applications cause; NVIDIA's plugin ignores the same (`internal/rm/health.go`).
const APPLICATION_XIDS: [u64; 6] = [13, 31, 43, 45, 68, 109];
/// How long a card must answer without a critical event before it is healthy again.
const RECOVERY: Millis = 30_000;
/// How long one wait for events lasts; after each, every card is queried.
const WAIT_MS: u32 = 5_000;

#[derive(Debug)]
pub enum Watcher {
    /// From NVML, on a thread of its own.
    Nvml(Box<Nvml>),
    /// From the inventory file, when it changes.
    File(PathBuf),
}

/// When each card was last found healthy.
#[derive(Debug, Clone)]
pub struct LastHealthy {
    cards: Arc<Vec<AtomicU64>>,
    monitored: bool,
}

impl HealthSource for LastHealthy {
    fn last_healthy_at(&self, card: CardIndex) -> Option<Millis> {
        self.monitored.then(|| self.cards.get(card.position()).map(|at| at.load(Ordering::Relaxed)))?
    }
}

impl Watcher {
    /// Starts to report the cards' health to the state.
    #[must_use]
    pub fn start(self, others: &Handle, node: Arc<Node>, stop: CancellationToken) -> LastHealthy {
        let uuids: Vec<String> = node.with(|state, _| {
            let ledger = state.ledger();
            ledger.indexes().filter_map(|i| ledger.card(i)).map(|c| c.uuid.clone()).collect()
        });
        let cards = Arc::new(uuids.iter().map(|_| AtomicU64::new(0)).collect::<Vec<_>>());
        match self {
            Self::Nvml(nvml) => {
                let last = LastHealthy { cards, monitored: true };
                let seen = last.clone();
                // A thread, not a task: waiting for events blocks it for ever.
                std::thread::spawn(move || follow_nvml(&nvml, &uuids, &node, &seen, &stop));
                last
            }
            Self::File(path) => {
                others.spawn(follow_file(path, uuids, node, stop));
                LastHealthy { cards, monitored: false }
            }
        }
    }
}

/// One card's health, decided from events and answers.
#[derive(Clone, Copy, Debug, Default)]
pub struct CardHealth {
    failed_since: Option<Millis>,
    last_failure: Millis,
}

impl CardHealth {
    /// A critical event, or no answer.
    pub fn failed(&mut self, now: Millis) {
        self.failed_since.get_or_insert(now);
        self.last_failure = now;
    }

    /// The card answered. Returns its health.
    pub fn answered(&mut self, now: Millis) -> Health {
        if self.failed_since.is_some() && now.saturating_sub(self.last_failure) >= RECOVERY {
            self.failed_since = None;
        }
        self.health()
    }

    #[must_use]
    pub fn health(&self) -> Health {
        if self.failed_since.is_some() { Health::Unhealthy } else { Health::Healthy }
    }
}

fn follow_nvml(nvml: &Nvml, uuids: &[String], node: &Node, last: &LastHealthy, stop: &CancellationToken) {
    let mut cards_health = vec![CardHealth::default(); uuids.len()];
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
                    // Unknown, so not an application's.
                    _ => 0,
                };
                let uuid = event.device.uuid().ok();
                if APPLICATION_XIDS.contains(&xid) {
                    tracing::info!(xid, ?uuid, "XID of an application; the card stays healthy");
                } else {
                    tracing::warn!(xid, ?uuid, "XID error");
                    record_failure(&mut cards_health, uuids, uuid.as_ref(), node.now());
                }
            }
            Ok(event) if event.event_type.contains(EventTypes::DOUBLE_BIT_ECC_ERROR) => {
                let uuid = event.device.uuid().ok();
                tracing::warn!(?uuid, "memory error that ECC could not correct");
                record_failure(&mut cards_health, uuids, uuid.as_ref(), node.now());
            }
            Ok(event) => tracing::info!(kind = ?event.event_type, "NVML event"),
            Err(NvmlError::Timeout) => {}
            // After this every card is queried, which finds the lost one.
            Err(error) => {
                tracing::warn!(%error, "waiting for NVML events failed; subscribing again");
                std::thread::sleep(Duration::from_secs(1));
                events = subscribe(nvml, uuids);
            }
        }
        for (position, uuid) in uuids.iter().enumerate() {
            let now = node.now();
            let condition = &mut cards_health[position];
            let device = nvml.device_by_uuid(uuid.as_str());
            let answers = device.as_ref().map_err(ToString::to_string).and_then(answers);
            match answers.and_then(|()| device.as_ref().map_or(Ok(()), check_memory)) {
                Ok(()) => {
                    if condition.answered(now) == Health::Healthy
                        && let Some(at) = last.cards.get(position)
                    {
                        at.store(now, Ordering::Relaxed);
                    }
                }
                Err(why) => {
                    tracing::warn!(%uuid, why, "card is unhealthy");
                    condition.failed(now);
                }
            }
            if let Ok(device) = &device {
                report_processes(node, CardIndex::from(position), device);
            }
            report(node, CardIndex::from(position), condition.health());
        }
    }
}

/// An event without a card counts for all of them.
fn record_failure(cards_health: &mut [CardHealth], uuids: &[String], uuid: Option<&String>, now: Millis) {
    for (condition, known) in cards_health.iter_mut().zip(uuids) {
        if uuid.is_none_or(|uuid| uuid == known) {
            condition.failed(now);
        }
    }
}

fn answers(device: &Device<'_>) -> Result<(), String> {
    match device.memory_info() {
        Ok(_) | Err(NvmlError::NotSupported) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

/// Values that the driver does not report count as good.
fn check_memory(device: &Device<'_>) -> Result<(), String> {
    let rows = device
        .field_values_for(&[FieldId(NVML_FI_DEV_REMAPPED_PENDING), FieldId(NVML_FI_DEV_REMAPPED_FAILURE)])
        .unwrap_or_default();
    let reported =
        |position: usize| match rows.get(position).and_then(|row| row.as_ref().ok()?.value.as_ref().ok()) {
            Some(SampleValue::U32(value)) => Some(*value != 0),
            _ => None,
        };
    memory_fault(reported(0), reported(1), device.are_pages_pending_retired().ok())
        .map_or(Ok(()), |why| Err(why.to_owned()))
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

/// The processes that NVML lists on a card, for drift.
fn report_processes(node: &Node, card: CardIndex, device: &Device<'_>) {
    if let Ok(processes) = device.running_compute_processes() {
        node.with(|state, _| state.observe_processes(card, processes.iter().map(|process| process.pid)));
    }
}

fn report(node: &Node, card: CardIndex, health: Health) {
    let changed = node.with(|state, _| {
        let changed = state.ledger().health(card) != health;
        if changed {
            state.set_health(card, health);
        }
        changed
    });
    if changed {
        tracing::warn!(%card, ?health, "health of a card changed");
        let note = format!("{card} is {health:?}");
        node.record_event(match health {
            Health::Healthy => NodeEvent::normal("CardHealthy", note),
            Health::Unhealthy => NodeEvent::warning("CardUnhealthy", note),
        });
    }
}

fn subscribe<'n>(nvml: &'n Nvml, uuids: &[String]) -> Option<EventSet<'n>> {
    let mut set =
        nvml.create_event_set().map_err(|error| tracing::warn!(%error, "NVML has no events")).ok()?;
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
                tracing::warn!(%uuid, %error, "no events of this card; it is only queried");
                // The set is gone with the error: go on without events.
                return None;
            }
        }
    }
    Some(set)
}

/// Follows the health in the inventory file, for tests.
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
                        report(&node, CardIndex::from(position), *health);
                    }
                }
            }
            Err(error) => tracing::warn!(%error, "reading the inventory file failed; health stays as it was"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_is_healthy_again_after_a_time_without_events() {
        let mut condition = CardHealth::default();
        assert_eq!(condition.answered(0), Health::Healthy);
        condition.failed(10);
        assert_eq!(condition.answered(20), Health::Unhealthy);
        condition.failed(1000);
        assert_eq!(condition.answered(1000 + RECOVERY - 1), Health::Unhealthy);
        assert_eq!(condition.answered(1000 + RECOVERY), Health::Healthy);
    }

    #[test]
    fn memory_that_waits_for_a_reset_is_a_fault() {
        assert_eq!(memory_fault(None, None, None), None);
        assert_eq!(memory_fault(Some(false), Some(false), Some(false)), None);
        assert!(memory_fault(Some(true), Some(true), None).is_some_and(|why| why.contains("replaced")));
        assert!(memory_fault(Some(true), Some(false), None).is_some_and(|why| why.contains("remapped")));
        assert!(memory_fault(None, None, Some(true)).is_some_and(|why| why.contains("retired")));
    }

    #[test]
    fn an_event_without_a_card_counts_for_all() {
        let uuids = ["GPU-a".to_owned(), "GPU-b".to_owned()];
        let unhealthy = |uuid: Option<&String>| {
            let mut cards_health = [CardHealth::default(); 2];
            record_failure(&mut cards_health, &uuids, uuid, 1);
            cards_health.map(|condition| condition.health() == Health::Unhealthy)
        };
        assert_eq!((unhealthy(None), unhealthy(Some(&uuids[1]))), ([true; 2], [false, true]));
    }
}
