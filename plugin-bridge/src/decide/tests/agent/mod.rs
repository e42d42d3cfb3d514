//! What answers for the agent in the [world](super::world): the decisions alone, or the services around them.

mod decisions;
mod nvidia;
mod services;

use std::collections::{BTreeMap, BTreeSet};

use gpu_migrate_model::ledger::Fault;

pub(super) use self::decisions::Decisions;
pub(super) use self::services::Services;
use super::world::{ALL_CARDS, CORE, Hardware, Surroundings};
use crate::agent::state_of;
use crate::decide::{Millis, NodeState, Settings};
use crate::inventory::card_map::Resolved;

/// A failure inside the agent or below it, while it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    None,
    /// It dies at this step of writing, or with its answer where it writes less. It is restarted after the call.
    Dies(u8),
    /// The disk fails at this step of writing.
    DiskFails(u8),
    /// A write takes longer than the kubelet can wait.
    DiskStalls,
    NvidiaRefuses,
    NvidiaHangs,
}

/// An agent with a fault that the checks must report.
#[derive(Clone, Copy, Debug)]
pub(super) enum Mutant {
    Ledger(Fault),
    /// Every shared container is shown the first card.
    OneCard,
    Refuses,
    /// It never hears of DRA.
    IgnoresClaims,
    /// It ends no pod that came past it.
    KeepsIntruders,
    /// It ends all pods with one that came past it.
    EndsOthersToo,
}

/// The agent of one node, over all its processes.
pub(super) trait Agent: Sized {
    /// The first process, with an empty disk.
    fn start(surroundings: Surroundings, mutant: Option<Mutant>) -> Self;
    /// Killed, and restarted from the disk.
    fn restart(&mut self);
    /// The world's clock, which passes while the agent waits.
    fn now(&self) -> Millis;
    /// The few milliseconds until everything has been written down.
    fn tick(&mut self);
    /// Time passes, and the agent's own timers run.
    fn pass(&mut self, milliseconds: Millis);

    /// Changes or reads its state.
    fn with_state<R>(&self, what: impl FnOnce(&mut NodeState, Millis) -> R) -> R;
    fn read_checkpoint(&mut self);
    /// It has read the kubelet checkpoint as it is on disk.
    fn is_up_to_date(&self) -> bool;
    /// It sees that the kubelet restarted at this moment.
    fn notice_kubelet(&mut self, at: Millis);
    fn list_pod_resources(&mut self);

    /// Its record and its card map are removed from disk.
    fn lose_record(&mut self);
    /// NVIDIA's plugin is there, and sends its list.
    fn nvidia_returns(&mut self);
    fn nvidia_goes(&mut self);

    /// What the kubelet has on its stream of this resource; `None` where nothing came.
    fn list(&mut self, resource: &'static str) -> Option<BTreeMap<String, bool>>;
    fn end_streams(&mut self);
    /// The kubelet follows another plugin's list of this resource from now on.
    fn end_stream(&mut self, resource: &'static str);
    fn prefer(
        &mut self,
        resource: &'static str,
        offered: Vec<String>,
        must: Vec<String>,
        size: usize,
    ) -> Vec<String>;
    /// Answers Allocate: which cards the container sees.
    fn allocate(
        &mut self,
        resource: &'static str,
        ids: Vec<String>,
        trouble: Trouble,
    ) -> Option<BTreeSet<usize>>;
    fn may_start(&mut self, resource: &'static str, ids: Vec<String>, trouble: Trouble) -> bool;
}

fn fresh(mutant: Option<Mutant>, hardware: &Hardware, resolved: Resolved) -> NodeState {
    let inventory = hardware.inventory().arranged(&resolved);
    let state = state_of(Settings::default(), &inventory, resolved);
    match mutant {
        Some(Mutant::Ledger(fault)) => state.with_ledger_fault(fault),
        _ => state,
    }
}

pub(super) fn uuid(card: usize) -> String {
    format!("GPU-{card}")
}

/// The cards that this agent shows.
fn shown(mutant: Option<Mutant>, resource: &str, cards: BTreeSet<usize>) -> BTreeSet<usize> {
    if matches!(mutant, Some(Mutant::OneCard)) && resource == CORE { [0].into() } else { cards }
}

/// The cards that an answer names.
pub(super) fn cards_of<'a>(uuids: impl IntoIterator<Item = &'a str>) -> Option<BTreeSet<usize>> {
    uuids.into_iter().map(|id| (0..ALL_CARDS).find(|n| uuid(*n) == id)).collect()
}
