//! The cards' health over time: XID events, memory errors, lost cards, and recovery.
//!
//! NVIDIA's plugin reports a card Unhealthy at the first critical event and never Healthy again. Here a card is healthy again when
//! NVML has answered for it for `RECOVERY` without a new event.
//!
//! Of memory errors the corrected ones are only logged. An uncorrected one (a double-bit ECC event, XID 48) is a bad event, and for as
//! long as a row remapping waits for a reset of the card, or has failed, nothing new is allocated on it (NVIDIA, "GPU Memory Error
//! Management"; before Ampere: a page that waits for its retirement). Running containers keep it. The same holds for as long as the driver
//! asks for a reset or a reboot, which ends what a card does not recover from by itself. Older drivers do not report it: with them a card
//! stays unhealthy after one of `FATAL_XIDS` until the agent is restarted. A reset needs that anyway, as no process may have the card open.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gpu_migrate_model::card::Health;
use gpu_migrate_model::units::CardIndex;
use tokio_util::sync::CancellationToken;

use super::file;
use super::nvml_process::{CardReport, Event, Found, Message, NvmlProcess, Report, change_of};
use crate::decide::Millis;
use crate::node::{Node, NodeEvent};
use crate::nvidia::HealthSource;
use gpu_migrate_kubelet_api::directory::Stamp;

/// XIDs that applications cause; NVIDIA's plugin ignores the same (`internal/rm/health.go`).
const APPLICATION_XIDS: [u64; 6] = [13, 31, 43, 45, 68, 109];
/// XIDs after which a card works again only when it was reset or the node rebooted: a halted micro-controller, a row that could not be
/// remapped, a card off the bus, an uncontained memory error, GSP errors, an unrecovered ECC error, a failed initialisation (NVIDIA, "Analyzing Xid Errors with the Xid Catalog").
const FATAL_XIDS: [u64; 8] = [62, 64, 79, 95, 119, 120, 140, 143];
/// How long a card must answer without a critical event before it is healthy again.
const RECOVERY: Millis = 30_000;
/// How long an Event gets to be written before the agent ends.
const LAST_WORDS: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub enum Watcher {
    /// By NVML, and what it found first.
    Nvml(Box<NvmlProcess>, Found),
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

impl LastHealthy {
    /// Nothing is known yet of the cards of this node.
    #[must_use]
    pub fn new(node: &Node, watcher: &Watcher) -> Self {
        let cards = node.with(|state, _| state.ledger().len());
        Self {
            cards: Arc::new((0..cards).map(|_| AtomicU64::new(0)).collect()),
            monitored: matches!(watcher, Watcher::Nvml(..)),
        }
    }
}

impl Watcher {
    /// Reports the cards' health to the state until `stop`, or until the cards are others than those that the agent started with.
    pub async fn run(self, node: Arc<Node>, last: LastHealthy, stop: CancellationToken) {
        let cards: Vec<(String, Health)> = node.with(|state, _| {
            let ledger = state.ledger();
            let of = |i| Some((ledger.card(i)?.uuid.clone(), ledger.health(i)));
            ledger.indexes().filter_map(of).collect()
        });
        match self {
            Self::Nvml(process, first) => {
                let monitor = Monitor::new(cards, node.now());
                let ended =
                    stop.run_until_cancelled(follow_nvml(*process, first, monitor, &node, &last)).await;
                if let Some(why) = ended {
                    tracing::warn!(why, "the cards are others than before; ending, to start anew with these");
                    node.record_event(NodeEvent::warning(
                        "CardsChanged",
                        format!("{why}; the node agent starts anew"),
                    ));
                    tokio::time::sleep(LAST_WORDS).await;
                }
            }
            Self::File(path) => {
                let uuids = cards.into_iter().map(|(uuid, _)| uuid).collect();
                follow_file(path, uuids, node, stop).await;
            }
        }
    }
}

/// One card's health, decided from events and answers.
#[derive(Clone, Copy, Debug, Default)]
pub struct CardHealth {
    failed_since: Option<Millis>,
    last_failure: Millis,
    /// It does not recover by itself.
    needs_reset: bool,
}

impl CardHealth {
    /// A critical event, or no answer.
    pub fn failed(&mut self, now: Millis) {
        self.failed_since.get_or_insert(now);
        self.last_failure = now;
    }

    /// The card answered. Returns its health.
    pub fn answered(&mut self, now: Millis) -> Health {
        if self.failed_since.is_some()
            && !self.needs_reset
            && now.saturating_sub(self.last_failure) >= RECOVERY
        {
            self.failed_since = None;
        }
        self.health()
    }

    #[must_use]
    pub fn health(&self) -> Health {
        if self.failed_since.is_some() { Health::Unhealthy } else { Health::Healthy }
    }
}

/// The health of all cards, decided from what is heard of NVML.
#[derive(Debug)]
struct Monitor {
    uuids: Vec<String>,
    cards: Vec<CardHealth>,
    /// Heard of in this round.
    answered: Vec<bool>,
}

impl Monitor {
    /// One that was not found at the start has failed, and is not taken for healthy before it answers.
    fn new(cards: Vec<(String, Health)>, now: Millis) -> Self {
        let (uuids, found): (Vec<String>, Vec<Health>) = cards.into_iter().unzip();
        let mut cards = vec![CardHealth::default(); uuids.len()];
        for (card, health) in cards.iter_mut().zip(found) {
            if health == Health::Unhealthy {
                card.failed(now);
            }
        }
        Self { answered: vec![false; uuids.len()], cards, uuids }
    }

    fn position(&self, uuid: &str) -> Option<usize> {
        self.uuids.iter().position(|known| known == uuid)
    }

    /// A failure without a card counts for all of them.
    fn failed(&mut self, uuid: Option<&str>, now: Millis) {
        for card in self.named(uuid) {
            card.failed(now);
        }
    }

    /// The card of this UUID; all of them without one.
    fn named<'a>(&'a mut self, uuid: Option<&'a str>) -> impl Iterator<Item = &'a mut CardHealth> {
        let cards = self.cards.iter_mut().zip(&self.uuids);
        cards.filter(move |(_, known)| uuid.is_none_or(|uuid| uuid == *known)).map(|(card, _)| card)
    }

    /// The card's position.
    fn answered(&mut self, report: &CardReport, now: Millis) -> Option<usize> {
        let position = self.position(&report.uuid)?;
        self.answered[position] = true;
        match &report.fault {
            None => {
                let card = &mut self.cards[position];
                card.needs_reset &= !report.tells_recovery;
                card.answered(now);
            }
            Some(_) => self.cards[position].failed(now),
        }
        Some(position)
    }

    /// All cards were asked about. Those that were left out, or that NVML does not list, have failed.
    fn round(&mut self, now: Millis) {
        for (card, answered) in self.cards.iter_mut().zip(&mut self.answered) {
            if !std::mem::take(answered) {
                card.failed(now);
            }
        }
    }

    fn health(&self) -> impl Iterator<Item = (CardIndex, Health)> {
        self.cards.iter().enumerate().map(|(position, card)| (CardIndex::from(position), card.health()))
    }
}

/// What of the cards is not as it was.
async fn follow_nvml(
    mut process: NvmlProcess,
    first: Found,
    mut monitor: Monitor,
    node: &Node,
    last: &LastHealthy,
) -> String {
    let mut by_index = by_index(&first);
    loop {
        let report = match process.next().await {
            Ok(report) => report,
            Err(error) => {
                tracing::warn!(%error, "the process that calls NVML cannot be started; retrying");
                monitor.failed(None, node.now());
                Report::Ended
            }
        };
        let now = node.now();
        match report {
            Report::Said(Message::Inventory(found)) => {
                if let Some(change) = found.change_since(&first) {
                    return change;
                }
                by_index = self::by_index(&found).into_iter().chain(by_index).collect();
            }
            Report::Said(Message::Event { uuid, event }) => {
                if let Event::Xid(xid) = event {
                    node.metrics.usage.count_xid(uuid.as_deref(), xid);
                }
                record_event(&mut monitor, uuid.as_deref(), event, now);
            }
            Report::Said(Message::Card(card)) => {
                if let Some(sample) = &card.sample {
                    node.metrics.usage.observe(&card.uuid, sample.clone(), now);
                }
                let at = first.cards.iter().position(|(_, known)| known.uuid == card.uuid);
                let before = at.and_then(|at| first.shape(at));
                if let (Some(shape), Some(before)) = (&card.shape, before)
                    && let Some(change) = change_of(&card.uuid, shape, &before)
                {
                    return change;
                }
                let Some(position) = monitor.answered(&card, now) else { continue };
                if let Some(why) = card.fault {
                    tracing::warn!(uuid = card.uuid, why, "card is unhealthy");
                } else if monitor.cards[position].health() == Health::Healthy
                    && let Some(at) = last.cards.get(position)
                {
                    at.store(now, Ordering::Relaxed);
                }
                if let Some(processes) = card.processes {
                    node.with(|state, _| state.observe_processes(CardIndex::from(position), processes));
                }
            }
            Report::Said(Message::Round) => monitor.round(now),
            Report::Said(Message::Unreadable { index, why }) => {
                tracing::warn!(index, why, "card does not answer");
            }
            Report::Said(Message::Failed(why)) => {
                tracing::warn!(why, "NVML cannot be used; retrying");
                monitor.failed(None, now);
            }
            Report::Silent(index) => {
                let uuid = index.and_then(|index| by_index.get(&index));
                tracing::warn!(
                    ?index,
                    uuid,
                    "NVML does not answer in time; the process that calls it is replaced"
                );
                monitor.failed(uuid.map(String::as_str), now);
            }
            Report::Said(Message::Asking(_)) | Report::Ended => {}
        }
        for (card, health) in monitor.health() {
            self::report(node, card, health);
        }
    }
}

fn by_index(found: &Found) -> BTreeMap<u32, String> {
    found.cards.iter().map(|(index, card)| (*index, card.uuid.clone())).collect()
}

fn record_event(monitor: &mut Monitor, uuid: Option<&str>, event: Event, now: Millis) {
    match event {
        Event::Xid(xid) if APPLICATION_XIDS.contains(&xid) => {
            tracing::info!(xid, ?uuid, "XID of an application; the card stays healthy");
        }
        Event::Xid(xid) => {
            tracing::warn!(xid, ?uuid, "XID error");
            monitor.failed(uuid, now);
            if FATAL_XIDS.contains(&xid) {
                monitor.named(uuid).for_each(|card| card.needs_reset = true);
            }
        }
        Event::DoubleBitEcc => {
            tracing::warn!(?uuid, "memory error that ECC could not correct");
            monitor.failed(uuid, now);
        }
        // After this every card is asked about, which finds the lost one.
        Event::Lost => tracing::warn!("waiting for NVML events failed; registering for them again"),
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
    fn a_failure_without_a_card_counts_for_all_and_silence_for_its_card() {
        let unhealthy = |monitor: &Monitor| -> Vec<usize> {
            let all = monitor.health().filter(|(_, health)| *health == Health::Unhealthy);
            all.map(|(card, _)| card.position()).collect()
        };
        let new =
            || Monitor::new(vec![("GPU-a".into(), Health::Healthy), ("GPU-b".into(), Health::Healthy)], 0);
        let mut monitor = new();
        record_event(&mut monitor, None, Event::Xid(79), 1);
        assert_eq!(unhealthy(&monitor), [0, 1]);
        let mut monitor = new();
        record_event(&mut monitor, Some("GPU-b"), Event::Xid(13), 1);
        assert!(unhealthy(&monitor).is_empty());
        record_event(&mut monitor, Some("GPU-b"), Event::DoubleBitEcc, 1);
        assert_eq!(unhealthy(&monitor), [1]);
        // A card that was left out of a round.
        let mut monitor = new();
        let report = CardReport { uuid: "GPU-b".into(), ..CardReport::default() };
        monitor.answered(&report, 1);
        monitor.round(1);
        assert_eq!(unhealthy(&monitor), [0]);
        monitor.answered(&report, 2);
        monitor.answered(&CardReport { uuid: "GPU-a".into(), ..report }, RECOVERY + 1);
        monitor.round(RECOVERY + 1);
        assert!(unhealthy(&monitor).is_empty());
    }

    #[test]
    fn a_card_stays_unhealthy_after_a_fatal_xid_unless_the_driver_says_that_it_recovered() {
        for (xid, tells_recovery, recovers) in [(94, false, true), (79, false, false), (79, true, true)] {
            let mut monitor = Monitor::new(vec![("GPU-a".into(), Health::Healthy)], 0);
            record_event(&mut monitor, Some("GPU-a"), Event::Xid(xid), 1);
            let report = CardReport { uuid: "GPU-a".into(), tells_recovery, ..CardReport::default() };
            monitor.answered(&report, 10 * RECOVERY);
            let health = monitor.health().next().unwrap().1;
            assert_eq!(health == Health::Healthy, recovers, "XID {xid}, told: {tells_recovery}");
        }
    }

    #[test]
    fn a_card_that_was_missing_at_the_start_is_unhealthy_until_it_answers() {
        let cards = vec![("GPU-a".into(), Health::Unhealthy), ("GPU-b".into(), Health::Healthy)];
        let mut monitor = Monitor::new(cards, 0);
        let health = |monitor: &Monitor| monitor.health().map(|(_, health)| health).collect::<Vec<_>>();
        // The other one is asked about first, and the round may take a while.
        let report = |uuid: &str| CardReport { uuid: uuid.into(), ..CardReport::default() };
        monitor.answered(&report("GPU-b"), 1);
        assert_eq!(health(&monitor), [Health::Unhealthy, Health::Healthy]);
        monitor.round(1);
        monitor.answered(&report("GPU-a"), RECOVERY + 1);
        assert_eq!(health(&monitor), [Health::Healthy, Health::Healthy]);
    }
}
