//! Random lives of a node.

use std::sync::atomic::{AtomicU8, Ordering};

use gpu_migrate_model::ask::{ContainerKind, Demand};
use parking_lot::Mutex;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::agent::{Agent, Pure, Services, Trouble};
use super::world::{CARDS, Fault, World, share};

/// One thing that happens.
#[derive(Clone, Debug)]
pub(super) enum Step {
    Bind { containers: Vec<(ContainerKind, Demand)>, reserved: Option<usize> },
    Admit { core_first: bool, fault: Fault, at: usize, shuffle: usize },
    End(usize),
    Delete(usize),
    DeleteWithForce(usize),
    Hear(usize),
    Relist,
    KubeletHears(usize),
    ReadBook,
    SpoilBook,
    Ask,
    PassTime(u64),
    Health { card: usize, healthy: bool },
    Cordon(usize),
    LoseUpstream,
    TellUpstream,
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

fn step() -> impl Strategy<Value = Step> {
    let fault = prop_oneof![
        12 => Just(Fault::None),
        1 => Just(Fault::KubeletDies),
        1 => Just(Fault::AgentDies),
        1 => Just(Fault::AgentDiesAfterWriting),
        1 => Just(Fault::AgentDiesAfterAnswering),
        1 => (0..7_u8).prop_map(Fault::AgentDiesAtWrite),
        1 => (0..7_u8).prop_map(Fault::DiskFails),
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
        8 => (1..5_usize).prop_map(Step::Hear),
        1 => Just(Step::Relist),
        8 => (0..6_usize).prop_map(Step::KubeletHears),
        3 => Just(Step::ReadBook),
        1 => Just(Step::SpoilBook),
        4 => Just(Step::Ask),
        4 => prop_oneof![Just(10), Just(1_000), Just(6_000), Just(40_000), Just(100_000)].prop_map(Step::PassTime),
        1 => (0..CARDS, any::<bool>()).prop_map(|(card, healthy)| Step::Health { card, healthy }),
        1 => (0..1_usize << CARDS).prop_map(Step::Cordon),
        1 => Just(Step::LoseUpstream),
        1 => Just(Step::TellUpstream),
        1 => Just(Step::RestartAgent),
        1 => any::<bool>().prop_map(|noticed_late| Step::RestartKubelet { noticed_late }),
        2 => Just(Step::Notice),
        3 => Just(Step::Start),
        1 => (0..7_u8).prop_map(Step::StartAndDie),
    ]
}

/// One life, by the books alone and by the services.
pub(super) fn live(steps: &[Step]) -> Result<(), String> {
    live_by::<Pure>(steps, false).map_err(|what| format!("the books alone: {what}"))?;
    live_by::<Services>(steps, false).map_err(|what| format!("the services: {what}"))
}

fn live_by<A: Agent>(steps: &[Step], broken: bool) -> Result<(), String> {
    let mut world = World::<A>::new(broken);
    for (number, step) in steps.iter().enumerate() {
        match step.clone() {
            Step::Bind { containers, reserved } => world.bind(&containers, reserved),
            Step::Admit { core_first, fault, at, shuffle } => world.admit(core_first, fault, at, shuffle),
            Step::End(which) => world.end(which),
            Step::Delete(which) => world.delete(which),
            Step::DeleteWithForce(which) => world.delete_with_force(which),
            Step::Hear(count) => world.hear(count),
            Step::Relist => world.relist(),
            Step::KubeletHears(which) => world.kubelet_hears(which),
            Step::ReadBook => world.read_checkpoint(),
            Step::SpoilBook => world.spoil_book(),
            Step::Ask => world.ask(),
            Step::PassTime(milliseconds) => world.pass_time(milliseconds),
            Step::Health { card, healthy } => world.set_health(card, healthy),
            Step::Cordon(mask) => world.cordon(mask),
            Step::LoseUpstream => world.lose_upstream(),
            Step::TellUpstream => world.tell_upstream(),
            Step::RestartAgent => world.restart_agent(),
            Step::RestartKubelet { noticed_late } => world.restart_kubelet(noticed_late),
            Step::Notice => world.notice(),
            Step::Start => world.start(Trouble::None),
            Step::StartAndDie(at) => world.start_and_die(at),
        }
        world.check().map_err(|what| format!("after step {number} ({step:?}): {what}"))?;
    }
    Ok(())
}

fn sequences() -> u32 {
    std::env::var("GPU_MIGRATE_SEQUENCES").ok().and_then(|n| n.parse().ok()).unwrap_or(300)
}

/// So many parts, each with lives of its own, whatever the number of processors: they are the same on every machine.
const PARTS: u8 = 8;

/// The same lives in every run, so that a failure is the change's; `GPU_MIGRATE_RANDOM=1` lives others.
fn runner(part: u8, cases: u32) -> TestRunner {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    if std::env::var_os("GPU_MIGRATE_RANDOM").is_some() {
        return TestRunner::new(config);
    }
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &[part; 32]))
}

/// Lives so many random lives, on all processors. What the first failure of a part was.
fn lives_by<A: Agent>(count: u32, broken: bool) -> Result<(), String> {
    let next = AtomicU8::new(0);
    let failures = Mutex::new(Vec::new());
    let work = || {
        loop {
            let part = next.fetch_add(1, Ordering::Relaxed);
            if part >= PARTS {
                return;
            }
            let outcome = runner(part, count.div_ceil(PARTS.into()))
                .run(&prop::collection::vec(step(), 1..60), |steps| {
                    live_by::<A>(&steps, broken).map_err(TestCaseError::fail)
                });
            if let Err(failure) = outcome {
                failures.lock().push(failure.to_string());
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    failures.into_inner().into_iter().next().map_or(Ok(()), Err)
}

#[test]
fn the_invariants_hold_in_every_life_of_the_books() {
    lives_by::<Pure>(sequences(), false).unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn the_invariants_hold_in_every_life_of_the_services() {
    lives_by::<Services>(sequences(), false).unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn a_ledger_that_does_not_look_is_found_out() {
    // By the invariants, and not by something else that went wrong.
    let found = |outcome: Result<(), String>| outcome.is_err_and(|failure| failure.contains("I1: card"));
    let unnoticed = "a broken ledger went unnoticed: these tests test nothing";
    assert!(found(lives_by::<Pure>(2_000, true)), "{unnoticed}");
    assert!(found(lives_by::<Services>(2_000, true)), "{unnoticed}");
}
