//! Random lives of a node.

use gpu_migrate_model::ask::{ContainerKind, Demand};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::world::{CARDS, Fault, World, share};

#[derive(Clone, Debug)]
enum Step {
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
    RestartKubelet,
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
        8 => (0..3_usize).prop_map(Step::KubeletHears),
        3 => Just(Step::ReadBook),
        1 => Just(Step::SpoilBook),
        4 => Just(Step::Ask),
        4 => prop_oneof![Just(10), Just(1_000), Just(6_000), Just(40_000), Just(100_000)].prop_map(Step::PassTime),
        1 => (0..CARDS, any::<bool>()).prop_map(|(card, healthy)| Step::Health { card, healthy }),
        1 => (0..1_usize << CARDS).prop_map(Step::Cordon),
        1 => Just(Step::LoseUpstream),
        1 => Just(Step::TellUpstream),
        1 => Just(Step::RestartAgent),
        1 => Just(Step::RestartKubelet),
    ]
}

fn live(steps: &[Step], broken: bool) -> Result<(), String> {
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
            Step::RestartKubelet => world.restart_kubelet(),
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

#[test]
fn a_pod_deleted_with_force_keeps_its_cards_while_it_ends() {
    let legacy = |kind, n| (kind, Demand { legacy: n, ..Demand::NONE });
    let (init, app) = (ContainerKind::Init, ContainerKind::App);
    let bind = |containers: &[(ContainerKind, Demand)]| Step::Bind {
        containers: containers.to_vec(),
        reserved: None,
    };
    let admit = |shuffle| Step::Admit { core_first: false, fault: Fault::None, at: 0, shuffle };
    let steps = [
        bind(&[legacy(init, 1), legacy(app, 2)]),
        Step::Hear(1),
        admit(460_663_017_741_189),
        Step::End(0),
        Step::Hear(2),
        bind(&[legacy(app, 2)]),
        bind(&[legacy(init, 2), legacy(app, 1)]),
        admit(5_396_973_775_100_211_831),
        Step::PassTime(100_000),
        Step::DeleteWithForce(0),
        admit(13_689_454_767_575_737_854),
    ];
    live(&steps, false).unwrap();
}

#[test]
fn a_half_left_behind_does_not_part_the_next_container() {
    let bind = |cores, blocks| Step::Bind {
        containers: vec![(ContainerKind::App, share(cores, blocks))],
        reserved: None,
    };
    let admit = |core_first, shuffle| Step::Admit { core_first, fault: Fault::None, at: 0, shuffle };
    let steps = [
        bind(100, 2),
        bind(25, 1),
        bind(100, 4),
        admit(false, 0),
        // Its cores are refused; its memory stays promised.
        admit(false, 391_934_497_800_489),
        Step::End(0),
        Step::Relist,
        Step::SpoilBook,
        admit(true, 12_834_574_303_476_345),
    ];
    live(&steps, false).unwrap();
}

#[test]
fn a_device_promised_twice_stays_with_the_other_promise() {
    let (init, app) = (ContainerKind::Init, ContainerKind::App);
    let legacy = |kind, n| (kind, Demand { legacy: n, ..Demand::NONE });
    let bind = |containers: &[(ContainerKind, Demand)]| Step::Bind {
        containers: containers.to_vec(),
        reserved: None,
    };
    let admit = |core_first, fault, at, shuffle| Step::Admit { core_first, fault, at, shuffle };
    live(
        &[
            bind(&[legacy(init, 1), legacy(app, 2)]),
            admit(false, Fault::None, 0, 6171894363430280776),
            Step::End(0),
            Step::Hear(3),
            bind(&[legacy(app, 1)]),
            Step::KubeletHears(0),
            admit(false, Fault::None, 0, 2422399636045316660),
            Step::RestartAgent,
            Step::RestartKubelet,
        ],
        false,
    )
    .unwrap();
}

#[test]
fn a_promise_of_an_earlier_life_that_is_asked_for_again_is_a_half() {
    let (init, app) = (ContainerKind::Init, ContainerKind::App);
    let legacy = |kind, n| (kind, Demand { legacy: n, ..Demand::NONE });
    let bind = |containers: &[(ContainerKind, Demand)]| Step::Bind {
        containers: containers.to_vec(),
        reserved: None,
    };
    let admit = |core_first, fault, at, shuffle| Step::Admit { core_first, fault, at, shuffle };
    let two = [(init, share(10, 1)), (app, share(10, 1))];
    live(
        &[
            Step::Cordon(3),
            bind(&[legacy(init, 2), legacy(app, 1)]),
            bind(&[(app, share(50, 2))]),
            bind(&[legacy(app, 1)]),
            bind(&[(app, share(25, 1))]),
            admit(false, Fault::None, 0, 0),
            bind(&two),
            admit(false, Fault::None, 0, 1894715078474358924),
            admit(false, Fault::None, 0, 0),
            admit(false, Fault::None, 0, 0),
            admit(false, Fault::AgentDiesAfterWriting, 1, 37898053067104565),
            bind(&two),
            admit(true, Fault::None, 0, 2361517521015385),
        ],
        false,
    )
    .unwrap();
}

#[test]
fn a_deviation_of_an_ended_pod_is_not_the_next_ones() {
    let legacy = |kind, n| (kind, Demand { legacy: n, ..Demand::NONE });
    let bind = |containers: &[_]| Step::Bind { containers: containers.to_vec(), reserved: None };
    let admit = |shuffle| Step::Admit { core_first: false, fault: Fault::None, at: 0, shuffle };
    let steps = [
        bind(&[legacy(ContainerKind::Init, 2), legacy(ContainerKind::App, 1)]),
        admit(0),
        bind(&[legacy(ContainerKind::App, 1)]),
        Step::RestartKubelet,
        Step::Hear(1),
        Step::End(0),
        admit(58_092_910_745_780_588),
        Step::RestartAgent,
    ];
    live(&steps, false).unwrap();
}

#[test]
fn a_kubelet_without_its_book_hands_nothing_on() {
    let legacy = |kind, n| (kind, Demand { legacy: n, ..Demand::NONE });
    let bind = |containers: &[_]| Step::Bind { containers: containers.to_vec(), reserved: None };
    let admit = || Step::Admit { core_first: false, fault: Fault::None, at: 0, shuffle: 0 };
    let steps = [
        bind(&[legacy(ContainerKind::Init, 2), legacy(ContainerKind::App, 1)]),
        admit(),
        Step::SpoilBook,
        Step::RestartKubelet,
        Step::Hear(1),
        bind(&[legacy(ContainerKind::App, 1)]),
        admit(),
    ];
    live(&steps, false).unwrap();
}

#[test]
fn a_promise_that_a_spoilt_book_may_have_named_outlives_the_kubelet() {
    let bind = |demand| Step::Bind { containers: vec![(ContainerKind::App, demand)], reserved: None };
    let legacy = Demand { legacy: 1, ..Demand::NONE };
    let admit = |shuffle| Step::Admit { core_first: false, fault: Fault::None, at: 0, shuffle };
    let steps = [
        bind(legacy),
        admit(2_302_755_381_981_336_333),
        Step::SpoilBook,
        Step::DeleteWithForce(0),
        bind(share(25, 1)),
        bind(legacy),
        admit(0),
        Step::RestartKubelet,
        admit(0),
    ];
    live(&steps, false).unwrap();
}
