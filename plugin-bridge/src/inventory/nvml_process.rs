//! NVML in a process of its own.
//!
//! A call of NVML can hang for good: a card that fell off the bus, a driver that is being replaced. A thread that hangs cannot be ended; a
//! process can. It names each card before it asks NVML about it. Where it says nothing for [`Limits::silence`], it is killed, the card is
//! unhealthy, and its successors leave that card out for [`Limits::left_out`]. The agent itself never opens the driver.
//!
//! The process also ends by itself where a card does not answer for a while: only a new one sees a card that is back, or another driver.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use gpu_migrate_model::card::{Card, Health};
use gpu_migrate_model::topology::{LinkLevel, Topology};
use gpu_migrate_model::units::CardIndex;
use nvml_wrapper::Nvml;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::Instant;

use super::{Inventory, InventoryError, nvml};
use crate::usage::CardSample;

/// First argument of the process.
const ARGUMENT: &str = "nvml";

/// One line of the process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Message {
    /// The next calls are about this card, by NVML's index.
    Asking(u32),
    /// A card that NVML lists and does not answer for.
    Unreadable { index: u32, why: String },
    /// What there is. Said once, first.
    Inventory(Found),
    /// An event of this card; of all cards where NVML names none.
    Event { uuid: Option<String>, event: Event },
    /// How a card is now.
    Card(CardReport),
    /// All cards were asked about.
    Round,
    /// NVML cannot be used. The process ends.
    Failed(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    Xid(u64),
    /// A memory error that ECC could not correct.
    DoubleBitEcc,
    /// Events are not delivered any more; every card is asked about nevertheless.
    Lost,
}

/// An [`Inventory`] on the wire, the cards in the order of their minor numbers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Found {
    /// With NVML's index.
    pub cards: Vec<(u32, Card)>,
    /// By position in `cards`, each with those before it.
    pub links: Vec<Vec<LinkLevel>>,
    /// Position of each MIG device's card.
    pub mig_devices: BTreeMap<String, usize>,
    pub driver_version: String,
    pub cuda_version: String,
}

/// How a card is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardReport {
    pub uuid: String,
    /// Why nothing may be allocated on it.
    pub fault: Option<String>,
    /// The driver says what the card needs after an error: `fault` has it.
    #[serde(default)]
    pub tells_recovery: bool,
    /// PIDs of the processes that compute on it, where NVML says so.
    pub processes: Option<Vec<u32>>,
    pub shape: Option<Shape>,
    /// Where it answered.
    #[serde(default)]
    pub sample: Option<CardSample>,
}

/// What of a card can change while it is there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    pub memory_mib: u64,
    pub mig: bool,
    /// In the order of their UUIDs.
    pub mig_devices: Vec<String>,
}

impl Found {
    pub fn new(inventory: Inventory) -> Self {
        let links = (0..inventory.cards.len()).map(|row| {
            let between = |column| inventory.topology.between(CardIndex::from(row), CardIndex::from(column));
            (0..row).map(|column| between(column).unwrap_or(LinkLevel::Sys)).collect()
        });
        Self {
            links: links.collect(),
            cards: inventory.cards.into_iter().map(|card| (card.nvml_index, card)).collect(),
            mig_devices: inventory.mig_devices.into_iter().map(|(id, card)| (id, card.position())).collect(),
            driver_version: inventory.driver_version,
            cuda_version: inventory.cuda_version,
        }
    }

    #[must_use]
    pub fn inventory(&self) -> Inventory {
        let with_index = |(nvml_index, card): &(u32, Card)| Card { nvml_index: *nvml_index, ..card.clone() };
        let link = |a: CardIndex, b: CardIndex| self.links.get(a.position())?.get(b.position()).copied();
        let mig_devices = self.mig_devices.iter();
        Inventory {
            cards: self.cards.iter().map(with_index).collect(),
            topology: Topology::from_fn(self.cards.len(), |a, b| {
                link(a, b).or_else(|| link(b, a)).unwrap_or(LinkLevel::Sys)
            }),
            mig_devices: mig_devices.map(|(id, card)| (id.clone(), CardIndex::from(*card))).collect(),
            driver_version: self.driver_version.clone(),
            cuda_version: self.cuda_version.clone(),
            health: vec![Health::Healthy; self.cards.len()],
        }
    }

    /// The shape of the card at this position.
    #[must_use]
    pub fn shape(&self, position: usize) -> Option<Shape> {
        let (_, card) = self.cards.get(position)?;
        let own = self.mig_devices.iter().filter(|(_, card)| **card == position);
        let mig_devices = own.map(|(id, _)| id.clone()).collect();
        Some(Shape { memory_mib: card.memory_mib, mig: card.mig, mig_devices })
    }

    /// What of these cards is not as it was found first: then the agent has to start anew. Cards that are missing now are none: they are
    /// unhealthy.
    #[must_use]
    pub fn change_since(&self, first: &Self) -> Option<String> {
        let (driver, before) = (&self.driver_version, &first.driver_version);
        if driver != before && !driver.is_empty() && !before.is_empty() {
            return Some(format!("the driver is {driver} and was {before}"));
        }
        self.cards.iter().enumerate().find_map(|(position, (index, card))| {
            let before = first.cards.iter().position(|(_, before)| before.uuid == card.uuid);
            let Some(before) = before else { return Some(format!("{} has come", card.uuid)) };
            let (index_before, card_before) = &first.cards[before];
            let (shape, shape_before) = (self.shape(position)?, first.shape(before)?);
            change_of(&card.uuid, &shape, &shape_before).or_else(|| {
                (card.minor != card_before.minor || index != index_before)
                    .then(|| format!("{} has another number than before", card.uuid))
            })
        })
    }
}

/// What changed of a card.
#[must_use]
pub fn change_of(uuid: &str, now: &Shape, before: &Shape) -> Option<String> {
    if now.mig != before.mig {
        Some(format!("MIG was switched {} on {uuid}", if now.mig { "on" } else { "off" }))
    } else if now.mig_devices != before.mig_devices {
        Some(format!("the MIG devices of {uuid} are others"))
    } else if now.memory_mib != before.memory_mib {
        Some(format!("{uuid} has {} MiB of memory and had {}", now.memory_mib, before.memory_mib))
    } else {
        None
    }
}

/// How long is waited.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// For the next line. Between two lines there is one card, or a wait for events ([`nvml::EVENT_WAIT`]).
    pub silence: Duration,
    /// For how long a card is left out that did not answer in time.
    pub left_out: Duration,
    /// Between two processes.
    pub pause: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            silence: Duration::from_secs(20),
            left_out: Duration::from_secs(600),
            pause: Duration::from_secs(1),
        }
    }
}

/// What is heard of NVML.
#[derive(Clone, Debug, PartialEq)]
pub enum Report {
    Said(Message),
    /// The process was killed: this card did not answer in time, by NVML's index; NVML itself, where there is none.
    Silent(Option<u32>),
    /// The process has ended; the next one follows.
    Ended,
}

/// The process, and its successors.
#[derive(Debug)]
pub struct NvmlProcess {
    program: PathBuf,
    library: Option<PathBuf>,
    limits: Limits,
    running: Option<Running>,
    /// Cards by NVML's index, and until when they are left out.
    left_out: BTreeMap<u32, Instant>,
    started_before: bool,
}

#[derive(Debug)]
struct Running {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    asking: Option<u32>,
}

impl NvmlProcess {
    /// Not started yet. `program` is this program; `library` another NVML than the driver's.
    #[must_use]
    pub const fn new(program: PathBuf, library: Option<PathBuf>, limits: Limits) -> Self {
        Self { program, library, limits, running: None, left_out: BTreeMap::new(), started_before: false }
    }

    /// The cards that answer.
    ///
    /// # Errors
    /// [`InventoryError`] where NVML cannot be used or does not answer.
    pub async fn first_inventory(&mut self) -> Result<Found, InventoryError> {
        loop {
            match self.next().await.map_err(InventoryError::Process)? {
                Report::Said(Message::Inventory(found)) => return Ok(found),
                Report::Said(Message::Failed(why)) => return Err(InventoryError::Nvml(why)),
                Report::Said(Message::Unreadable { index, why }) => {
                    tracing::warn!(index, why, "card does not answer; it is left out");
                }
                Report::Silent(Some(index)) => {
                    tracing::warn!(index, silence = ?self.limits.silence, "card does not answer in time; it is left out");
                }
                Report::Silent(None) => {
                    return Err(InventoryError::Nvml(format!("no answer within {:?}", self.limits.silence)));
                }
                Report::Ended => return Err(InventoryError::Nvml("the process that calls it ended".into())),
                Report::Said(_) => {}
            }
        }
    }

    /// The next of its reports; starts it where it does not run.
    ///
    /// # Errors
    /// The program cannot be started.
    pub async fn next(&mut self) -> std::io::Result<Report> {
        if self.running.is_none() {
            if std::mem::replace(&mut self.started_before, true) {
                tokio::time::sleep(self.limits.pause).await;
            }
            self.running = Some(self.start()?);
        }
        let Some(running) = &mut self.running else { return Ok(Report::Ended) };
        loop {
            let line = tokio::time::timeout(self.limits.silence, running.lines.next_line()).await;
            let message = match line {
                Ok(Ok(Some(line))) => serde_json::from_str::<Message>(&line).ok(),
                Ok(_) => None,
                Err(_) => {
                    let asking = running.asking;
                    // One that does not even die is left behind.
                    let _ = running.child.start_kill();
                    self.running = None;
                    self.left_out.extend(asking.map(|card| (card, Instant::now() + self.limits.left_out)));
                    return Ok(Report::Silent(asking));
                }
            };
            match message {
                Some(Message::Asking(card)) => running.asking = Some(card),
                Some(message) => {
                    if !matches!(message, Message::Card(_) | Message::Unreadable { .. }) {
                        running.asking = None;
                    }
                    return Ok(Report::Said(message));
                }
                None => {
                    let _ = running.child.start_kill();
                    self.running = None;
                    return Ok(Report::Ended);
                }
            }
        }
    }

    fn start(&mut self) -> std::io::Result<Running> {
        let now = Instant::now();
        self.left_out.retain(|_, until| *until > now);
        let left_out: Vec<String> = self.left_out.keys().map(u32::to_string).collect();
        let library = self.library.clone().map(PathBuf::into_os_string).unwrap_or_default();
        let mut child = Command::new(&self.program)
            .args([OsString::from(ARGUMENT), library, left_out.join(",").into()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let output = child.stdout.take().ok_or(std::io::ErrorKind::BrokenPipe)?;
        Ok(Running { child, lines: BufReader::new(output).lines(), asking: None })
    }
}

/// The process itself: `None` where this program was started as the agent.
#[must_use]
pub fn run(arguments: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    let mut arguments = arguments.skip(1);
    (arguments.next()? == ARGUMENT).then_some(())?;
    let library = arguments.next().filter(|path| !path.is_empty());
    let left_out = arguments.next().unwrap_or_default();
    let left_out: Vec<u32> =
        left_out.to_string_lossy().split(',').filter_map(|card| card.parse().ok()).collect();
    let mut output = std::io::stdout();
    // Nobody listens any more where a line cannot be written: the agent has ended.
    let mut say = move |message: Message| {
        let mut line = serde_json::to_vec(&message)?;
        line.push(b'\n');
        output.write_all(&line)?;
        output.flush()
    };
    let nvml = match library {
        None => Nvml::init(),
        Some(path) => Nvml::builder().lib_path(&path).init(),
    };
    let ended = match nvml {
        Ok(nvml) => nvml::follow(&nvml, &left_out, &mut say),
        Err(error) => say(Message::Failed(error.to_string())),
    };
    Some(if ended.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(cards: &[(u32, &str, bool)]) -> Found {
        let card = |(minor, uuid, mig): &(u32, &str, bool)| {
            let card =
                Card { uuid: (*uuid).into(), minor: *minor, memory_mib: 4096, mig: *mig, ..Card::default() };
            (*minor, card)
        };
        let links = (0..cards.len()).map(|row| vec![LinkLevel::Pix; row]).collect();
        Found { cards: cards.iter().map(card).collect(), links, ..Found::default() }
    }

    #[test]
    fn an_inventory_comes_back_as_it_was() {
        let mut inventory = found(&[(0, "a", false), (1, "b", true)]).inventory();
        inventory.mig_devices.insert("MIG-1".into(), CardIndex(1));
        let line = serde_json::to_string(&Message::Inventory(Found::new(inventory.clone()))).unwrap();
        let Ok(Message::Inventory(back)) = serde_json::from_str(&line) else { panic!("{line}") };
        let back = back.inventory();
        assert_eq!((&back.cards, &back.mig_devices), (&inventory.cards, &inventory.mig_devices));
        assert_eq!(back.topology.between(CardIndex(0), CardIndex(1)), Some(LinkLevel::Pix));
    }

    #[test]
    fn what_changes_of_the_cards_is_named() {
        let first = found(&[(0, "a", false), (1, "b", false)]);
        let change = |now: &[(u32, &str, bool)]| found(now).change_since(&first);
        assert_eq!(change(&[(0, "a", false)]), None, "a missing card is unhealthy");
        assert_eq!(change(&[(0, "a", false), (1, "b", true)]).as_deref(), Some("MIG was switched on on b"));
        let updated = Found { driver_version: "615.1".into(), ..first.clone() };
        let before = Found { driver_version: "550.2".into(), ..first.clone() };
        assert_eq!(updated.change_since(&before).as_deref(), Some("the driver is 615.1 and was 550.2"));
        assert_eq!(first.change_since(&before), None, "a version that NVML does not tell");
        assert_eq!(change(&[(0, "c", false)]).as_deref(), Some("c has come"));
        assert_eq!(change(&[(1, "a", false)]).as_deref(), Some("a has another number than before"));
        let mut reshaped = found(&[(1, "b", true)]);
        reshaped.mig_devices.insert("MIG-1".into(), 0);
        let before = found(&[(1, "b", true)]);
        assert_eq!(reshaped.change_since(&before).as_deref(), Some("the MIG devices of b are others"));
    }
}
