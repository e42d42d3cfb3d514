//! Random histories of a node.

use std::sync::atomic::{AtomicU8, Ordering};

use gpu_migrate_model::ask::{ContainerKind, Demand};
use gpu_migrate_model::ledger::Fault as LedgerFault;
use parking_lot::Mutex;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::agent::{Agent, Decisions, Mutant, Services, Trouble};
use super::record::{Digest, Record, numbers};
use super::world::{ALL_CARDS, CARDS, Change, Fault, World, share};

#[derive(Clone, Debug)]
pub(super) enum Step {
    Bind { containers: Vec<(ContainerKind, Demand)>, reserved: Option<usize> },
    Admit { core_first: bool, fault: Fault, at: usize, shuffle: usize },
    End(usize),
    Delete(usize),
    DeleteWithForce(usize),
    DeliverEvents(usize),
    Relist,
    DeliverList(usize),
    ReadCheckpoint,
    TruncateCheckpoint,
    RemoveCheckpoint,
    LoseRecord,
    ListPodResources,
    PassTime(u64),
    Health { card: usize, healthy: bool },
    Hardware(Change),
    Bypass,
    TakeBack,
    Claim(usize),
    EndClaims,
    Cordon(usize),
    LoseUpstream,
    ReturnUpstream,
    RestartAgent,
    RestartKubelet { noticed_late: bool },
    Notice,
    Start,
    StartAndDie(u8),
}

fn shares() -> impl Strategy<Value = Vec<(ContainerKind, Demand)>> {
    let size = prop_oneof![
        Just((25, 1)),
        Just((50, 2)),
        Just((60, 1)),
        Just((100, 4)),
        Just((100, 2)),
        Just((200, 8))
    ];
    let one = size.clone().prop_map(|(c, b)| vec![(ContainerKind::App, share(c, b))]);
    let small = prop_oneof![Just((10, 1)), Just((25, 1)), Just((50, 1))];
    let kind = prop_oneof![Just(ContainerKind::Init), Just(ContainerKind::Sidecar), Just(ContainerKind::App)];
    let two = (kind, small.clone(), small)
        .prop_map(|(kind, (c, b), (d, e))| vec![(kind, share(c, b)), (ContainerKind::App, share(d, e))]);
    prop_oneof![3 => one, 2 => two]
}

fn legacies() -> impl Strategy<Value = Vec<(ContainerKind, Demand)>> {
    let ask = |n| Demand { legacy: n, ..Demand::NONE };
    prop_oneof![
        3 => (1_u32..=2).prop_map(move |n| vec![(ContainerKind::App, ask(n))]),
        1 => Just(vec![(ContainerKind::Init, ask(1)), (ContainerKind::App, ask(2))]),
        1 => Just(vec![(ContainerKind::Init, ask(2)), (ContainerKind::App, ask(1))]),
    ]
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        3 => (0..ALL_CARDS).prop_map(Change::Vanish),
        4 => (0..ALL_CARDS).prop_map(Change::Return),
        1 => (0..ALL_CARDS, 2..6_u32).prop_map(|(card, blocks)| Change::Resize(card, blocks)),
        2 => (0..ALL_CARDS).prop_map(Change::Renumber),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let fault = prop_oneof![
        12 => Just(Fault::None),
        1 => Just(Fault::KubeletDies),
        1 => Just(Fault::AgentDies),
        1 => Just(Fault::AgentDiesAfterWriting),
        1 => Just(Fault::AgentDiesAfterAnswering),
        1 => (0..7_u8).prop_map(Fault::AgentDiesAtWrite),
        1 => prop_oneof![3 => (0..7_u8).prop_map(Fault::DiskFails), 1 => Just(Fault::DiskStalls)],
        1 => prop_oneof![Just(Fault::AnswerLost), Just(Fault::NvidiaRefuses), Just(Fault::NvidiaHangs)],
    ];
    prop_oneof![
        5 => (shares(), prop::option::of(0..CARDS)).prop_map(|(containers, reserved)| Step::Bind { containers, reserved }),
        4 => legacies().prop_map(|containers| Step::Bind { containers, reserved: None }),
        10 => (any::<bool>(), fault, 0..4_usize, any::<usize>())
            .prop_map(|(core_first, fault, at, shuffle)| Step::Admit { core_first, fault, at, shuffle }),
        3 => any::<usize>().prop_map(Step::End),
        3 => any::<usize>().prop_map(Step::Delete),
        1 => any::<usize>().prop_map(Step::DeleteWithForce),
        8 => (1..5_usize).prop_map(Step::DeliverEvents),
        1 => Just(Step::Relist),
        8 => (0..6_usize).prop_map(Step::DeliverList),
        3 => Just(Step::ReadCheckpoint),
        1 => Just(Step::TruncateCheckpoint),
        1 => Just(Step::RemoveCheckpoint),
        1 => Just(Step::LoseRecord),
        4 => Just(Step::ListPodResources),
        4 => prop_oneof![Just(10), Just(1_000), Just(6_000), Just(40_000), Just(100_000), Just(600_000)].prop_map(Step::PassTime),
        1 => (0..CARDS, any::<bool>()).prop_map(|(card, healthy)| Step::Health { card, healthy }),
        3 => change().prop_map(Step::Hardware),
        1 => Just(Step::Bypass),
        3 => Just(Step::TakeBack),
        1 => (0..ALL_CARDS).prop_map(Step::Claim),
        1 => Just(Step::EndClaims),
        1 => (0..1_usize << CARDS).prop_map(Step::Cordon),
        1 => Just(Step::LoseUpstream),
        1 => Just(Step::ReturnUpstream),
        2 => Just(Step::RestartAgent),
        1 => any::<bool>().prop_map(|noticed_late| Step::RestartKubelet { noticed_late }),
        2 => Just(Step::Notice),
        3 => Just(Step::Start),
        1 => (0..7_u8).prop_map(Step::StartAndDie),
    ]
}

/// Runs one history, on the decisions alone and on the services.
pub(super) fn run(steps: &[Step]) -> Result<(), String> {
    let run = |outcome: Result<_, String>, by| outcome.map(drop).map_err(|what| format!("{by}: {what}"));
    run(run_on::<Decisions>(steps, None), "the decisions alone")?;
    run(run_on::<Services>(steps, None), "the services")
}

fn run_on<A: Agent>(steps: &[Step], mutant: Option<Mutant>) -> Result<Digest, String> {
    run_steps(&mut World::<A>::new(mutant, reads_cgroups(steps)), steps)
}

/// Cgroups can be read in one half of the histories.
fn reads_cgroups(steps: &[Step]) -> bool {
    steps.len().is_multiple_of(2)
}

fn run_steps<A: Agent>(world: &mut World<A>, steps: &[Step]) -> Result<Digest, String> {
    let mut digest = Digest::default();
    for (number, step) in steps.iter().enumerate() {
        match step.clone() {
            Step::Bind { containers, reserved } => world.bind(&containers, reserved),
            Step::Admit { core_first, fault, at, shuffle } => world.admit(core_first, fault, at, shuffle),
            Step::End(which) => world.end(which),
            Step::Delete(which) => world.delete(which),
            Step::DeleteWithForce(which) => world.delete_with_force(which),
            Step::DeliverEvents(count) => world.deliver_events(count),
            Step::Relist => world.relist(),
            Step::DeliverList(which) => world.deliver_list(which),
            Step::ReadCheckpoint => world.read_checkpoint(),
            Step::TruncateCheckpoint => world.truncate_checkpoint(),
            Step::RemoveCheckpoint => world.remove_checkpoint(),
            Step::LoseRecord => world.lose_record(),
            Step::ListPodResources => world.list_pod_resources(),
            Step::PassTime(milliseconds) => world.pass_time(milliseconds),
            Step::Health { card, healthy } => world.set_health(card, healthy),
            Step::Hardware(change) => world.change_hardware(change),
            Step::Bypass => world.bypass(),
            Step::TakeBack => world.take_back(),
            Step::Claim(card) => world.claim(card),
            Step::EndClaims => world.end_claims(),
            Step::Cordon(mask) => world.cordon(mask),
            Step::LoseUpstream => world.lose_upstream(),
            Step::ReturnUpstream => world.return_upstream(),
            Step::RestartAgent => world.restart_agent_later(),
            Step::RestartKubelet { noticed_late } => world.restart_kubelet(noticed_late),
            Step::Notice => world.notice(),
            Step::Start => world.start(Trouble::None),
            Step::StartAndDie(at) => world.start_and_die(at),
        }
        world.check().map_err(|what| format!("after step {number} ({step:?}): {what}"))?;
        digest.add(&numbers(step));
        digest.add(&world.course());
    }
    Ok(digest)
}

fn sequences() -> u32 {
    std::env::var("GPU_MIGRATE_SEQUENCES").ok().and_then(|n| n.parse().ok()).unwrap_or(300)
}

/// So many parts, each with histories of its own, whatever the number of processors: they are the same on every machine.
const PARTS: u8 = 8;

/// The same histories in every run, so that a failure is the change's; others with `GPU_MIGRATE_RANDOM=1`.
fn runner(part: u8, cases: u32) -> TestRunner {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    if std::env::var_os("GPU_MIGRATE_RANDOM").is_some() {
        return TestRunner::new(config);
    }
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &[part; 32]))
}

/// Runs so many random histories, on all processors. What the first failure of a part was.
fn random(
    count: u32,
    record: &Record,
    run: impl Fn(&[Step]) -> Result<Digest, String> + Sync,
) -> Result<(), String> {
    let next = AtomicU8::new(0);
    let failures = Mutex::new(Vec::new());
    let work = || {
        loop {
            let part = next.fetch_add(1, Ordering::Relaxed);
            if part >= PARTS {
                return;
            }
            let outcome = runner(part, count.div_ceil(PARTS.into())).run(
                &prop::collection::vec(step(), 1..60),
                |steps| {
                    record.add(part, steps.len(), run(&steps).map_err(TestCaseError::fail)?);
                    Ok(())
                },
            );
            if let Err(failure) = outcome {
                failures.lock().push(failure.to_string());
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    failures.into_inner().into_iter().next().map_or(Ok(()), Err)
}

fn the_invariants_hold_on<A: Agent>(suffix: &str, count: u32) {
    let record = Record::default();
    random(count, &record, |steps| run_on::<A>(steps, None)).unwrap_or_else(|failure| panic!("{failure}"));
    record.write(suffix);
}

#[test]
fn the_invariants_hold_in_every_history_of_the_decisions() {
    the_invariants_hold_on::<Decisions>("decisions", sequences());
}

/// A fifth as many: each takes ten times as long, and what decides is the same.
#[test]
fn the_invariants_hold_in_every_history_of_the_services() {
    the_invariants_hold_on::<Services>("services", sequences() / 5);
}

/// Whether one of the random histories of a mutant fails with this text.
fn is_reported(reported: &str, run: impl Fn(&[Step]) -> Result<Digest, String>) -> bool {
    let (mut runner, histories) = (runner(0, 1), prop::collection::vec(step(), 1..60));
    (0..2_000).any(|_| {
        let steps = histories.new_tree(&mut runner).unwrap().current();
        run(&steps).is_err_and(|failure| failure.contains(reported))
    })
}

/// Each mutant is reported by the invariant that it breaks, and not only by something else that went wrong.
#[test]
fn each_invariant_is_seen_to_break() {
    for (mutant, reported) in [
        (Mutant::Ledger(LedgerFault::Unchecked), "I1: card"),
        (Mutant::OneCard, "I2: card"),
        (Mutant::Ledger(LedgerFault::Forgets), "I3: card"),
        (Mutant::IgnoresClaims, "is claimed through DRA and was given to"),
        (Mutant::KeepsIntruders, "past the agent, which does not end it"),
        (Mutant::EndsOthersToo, "was ended, and has cards that the agent gave it"),
    ] {
        let on_decisions = is_reported(reported, |steps| run_on::<Decisions>(steps, Some(mutant)));
        assert!(on_decisions, "{mutant:?} was not reported as {reported}");
        let on_services = is_reported(reported, |steps| run_on::<Services>(steps, Some(mutant)));
        assert!(on_services, "{mutant:?} was not reported as {reported} by the services");
    }
}

/// Liveness: an agent that refuses everything breaks no invariant.
#[test]
fn a_pod_that_fits_is_admitted_after_every_history() {
    let admits = |steps: &[Step], mutant| {
        let mut world = World::<Decisions>::new(mutant, reads_cgroups(steps));
        let digest = run_steps(&mut world, steps)?;
        world.admits_after_recovery().map(|()| digest)
    };
    random(sequences() / 3, &Record::default(), |steps| admits(steps, None))
        .unwrap_or_else(|failure| panic!("{failure}"));
    assert!(is_reported("is not admitted", |steps| admits(steps, Some(Mutant::Refuses))));
}
