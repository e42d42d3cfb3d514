//! Random lives of a node.

use gpu_migrate_model::ask::{ContainerKind, Demand};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

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
    ]
}

pub(super) fn live(steps: &[Step], broken: bool) -> Result<(), String> {
    let mut world = World::new(broken);
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
            Step::ReadBook => world.read_book(),
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
            Step::Start => world.start(),
        }
        world.check().map_err(|what| format!("after step {number} ({step:?}): {what}"))?;
    }
    Ok(())
}

fn sequences() -> u32 {
    std::env::var("GPU_MIGRATE_SEQUENCES").ok().and_then(|n| n.parse().ok()).unwrap_or(300)
}

/// The same lives in every run, so that a failure is the change's; `GPU_MIGRATE_RANDOM=1` lives others.
fn runner(cases: u32) -> TestRunner {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    if std::env::var_os("GPU_MIGRATE_RANDOM").is_some() {
        return TestRunner::new(config);
    }
    TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha))
}

#[test]
fn the_invariants_hold_in_every_life() {
    runner(sequences())
        .run(&prop::collection::vec(step(), 1..60), |steps| live(&steps, false).map_err(TestCaseError::fail))
        .unwrap();
}

#[test]
fn a_ledger_that_does_not_look_is_found_out() {
    let outcome = runner(sequences().max(2_000))
        .run(&prop::collection::vec(step(), 1..60), |steps| live(&steps, true).map_err(TestCaseError::fail));
    assert!(outcome.is_err(), "a broken ledger went unnoticed: these tests test nothing");
}
