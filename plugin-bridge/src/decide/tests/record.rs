//! A record of random histories, to compare them before and after a change that must not alter behaviour: a number for each history, made
//! of its steps and of what every container has after each of them. No name of ours, no time and no layout of a file is in it.

use gpu_migrate_model::ask::{ContainerKind, Demand};
use parking_lot::Mutex;

use super::machine::Step;
use super::world::{Change, Fault};

/// FNV-1a of texts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Digest(u64);

impl Default for Digest {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Digest {
    pub(super) fn add(&mut self, text: &str) {
        for byte in text.bytes().chain([0]) {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

/// Histories by part and number in it, with how many steps each had.
#[derive(Default)]
pub(super) struct Record(Mutex<Vec<(u8, usize, usize, Digest)>>);

impl Record {
    pub(super) fn add(&self, part: u8, steps: usize, digest: Digest) {
        let mut all = self.0.lock();
        let number = all.iter().filter(|(of, ..)| *of == part).count();
        all.push((part, number, steps, digest));
    }

    /// Writes it to the file that `GPU_MIGRATE_RECORD_HISTORIES` names, with this suffix.
    pub(super) fn write(self, suffix: &str) {
        let Ok(file) = std::env::var("GPU_MIGRATE_RECORD_HISTORIES") else { return };
        let mut all = self.0.into_inner();
        all.sort_unstable();
        let line = |(part, number, steps, digest): &(u8, usize, usize, Digest)| {
            format!("{part} {number} {steps} {:016x}\n", digest.0)
        };
        std::fs::write(format!("{file}.{suffix}"), all.iter().map(line).collect::<String>()).unwrap();
    }
}

pub(super) fn numbers(step: &Step) -> String {
    let fault = |fault: &Fault| match fault {
        Fault::None => (0, 0),
        Fault::KubeletDies => (1, 0),
        Fault::AnswerLost => (2, 0),
        Fault::AgentDies => (3, 0),
        Fault::AgentDiesAtWrite(at) => (4, *at),
        Fault::AgentDiesAfterWriting => (5, 0),
        Fault::AgentDiesAfterAnswering => (6, 0),
        Fault::DiskFails(at) => (7, *at),
        Fault::NvidiaRefuses => (8, 0),
        Fault::NvidiaHangs => (9, 0),
        Fault::DiskStalls => (10, 0),
    };
    let container = |(kind, demand): &(ContainerKind, Demand)| {
        let kind = match kind {
            ContainerKind::Init => 0,
            ContainerKind::Sidecar => 1,
            ContainerKind::App => 2,
        };
        (kind, demand.cores.0, demand.blocks.0, demand.legacy)
    };
    match step {
        Step::Bind { containers, reserved } => {
            format!("0 {:?} {reserved:?}", containers.iter().map(container).collect::<Vec<_>>())
        }
        Step::Admit { core_first, fault: what, at, shuffle } => {
            format!("1 {core_first} {:?} {at} {shuffle}", fault(what))
        }
        Step::End(n) => format!("2 {n}"),
        Step::Delete(n) => format!("3 {n}"),
        Step::DeleteWithForce(n) => format!("4 {n}"),
        Step::DeliverEvents(n) => format!("5 {n}"),
        Step::Relist => "6".into(),
        Step::DeliverList(n) => format!("7 {n}"),
        Step::ReadCheckpoint => "8".into(),
        Step::TruncateCheckpoint => "9".into(),
        Step::ListPodResources => "10".into(),
        Step::PassTime(n) => format!("11 {n}"),
        Step::Health { card, healthy } => format!("12 {card} {healthy}"),
        Step::Cordon(n) => format!("13 {n}"),
        Step::LoseUpstream => "14".into(),
        Step::ReturnUpstream => "15".into(),
        Step::RestartAgent => "16".into(),
        Step::RestartKubelet { noticed_late } => format!("17 {noticed_late}"),
        Step::Notice => "18".into(),
        Step::Start => "19".into(),
        Step::StartAndDie(n) => format!("20 {n}"),
        Step::RemoveCheckpoint => "21".into(),
        Step::LoseRecord => "22".into(),
        Step::Bypass => "27".into(),
        Step::TakeBack => "28".into(),
        Step::Claim(card) => format!("29 {card}"),
        Step::EndClaims => "30".into(),
        Step::Hardware(change) => match change {
            Change::Vanish(card) => format!("23 {card}"),
            Change::Return(card) => format!("24 {card}"),
            Change::Resize(card, blocks) => format!("25 {card} {blocks}"),
            Change::Renumber(turn) => format!("26 {turn}"),
        },
    }
}
