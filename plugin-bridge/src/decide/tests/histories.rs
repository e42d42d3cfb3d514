//! Lives that once broke an invariant, each found by the random ones, on a cluster, or by thought.

use gpu_migrate_model::ask::{ContainerKind, Demand};

use super::machine::{Step, run};
use super::world::{Fault, share};

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
    run(&steps).unwrap();
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
        Step::TruncateCheckpoint,
        admit(true, 12_834_574_303_476_345),
    ];
    run(&steps).unwrap();
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
    run(&[
        bind(&[legacy(init, 1), legacy(app, 2)]),
        admit(false, Fault::None, 0, 6171894363430280776),
        Step::End(0),
        Step::Hear(3),
        bind(&[legacy(app, 1)]),
        Step::KubeletHears(0),
        admit(false, Fault::None, 0, 2422399636045316660),
        Step::RestartAgent,
        Step::RestartKubelet { noticed_late: false },
    ])
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
    run(&[
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
    ])
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
        Step::RestartKubelet { noticed_late: false },
        Step::Hear(1),
        Step::End(0),
        admit(58_092_910_745_780_588),
        Step::RestartAgent,
    ];
    run(&steps).unwrap();
}

#[test]
fn a_kubelet_without_its_book_hands_nothing_on() {
    let legacy = |kind, n| (kind, Demand { legacy: n, ..Demand::NONE });
    let bind = |containers: &[_]| Step::Bind { containers: containers.to_vec(), reserved: None };
    let admit = || Step::Admit { core_first: false, fault: Fault::None, at: 0, shuffle: 0 };
    let steps = [
        bind(&[legacy(ContainerKind::Init, 2), legacy(ContainerKind::App, 1)]),
        admit(),
        Step::TruncateCheckpoint,
        Step::RestartKubelet { noticed_late: false },
        Step::Hear(1),
        bind(&[legacy(ContainerKind::App, 1)]),
        admit(),
    ];
    run(&steps).unwrap();
}

#[test]
fn a_promise_that_a_spoilt_book_may_have_named_outlives_the_kubelet() {
    let bind = |demand| Step::Bind { containers: vec![(ContainerKind::App, demand)], reserved: None };
    let legacy = Demand { legacy: 1, ..Demand::NONE };
    let admit = |shuffle| Step::Admit { core_first: false, fault: Fault::None, at: 0, shuffle };
    let steps = [
        bind(legacy),
        admit(2_302_755_381_981_336_333),
        Step::TruncateCheckpoint,
        Step::DeleteWithForce(0),
        bind(share(25, 1)),
        bind(legacy),
        admit(0),
        Step::RestartKubelet { noticed_late: false },
        admit(0),
    ];
    run(&steps).unwrap();
}

fn bind(demand: Demand) -> Step {
    Step::Bind { containers: vec![(ContainerKind::App, demand)], reserved: None }
}

const fn legacy(cards: u32) -> Demand {
    Demand { legacy: cards, ..share(0, 0) }
}

fn admit(core_first: bool, fault: Fault, at: usize) -> Step {
    Step::Admit { core_first, fault, at, shuffle: 0 }
}

/// Seen on a cluster: 50 cores were spread over the two cards of somebody else's memory.
#[test]
fn a_half_on_two_cards_does_not_widen_the_next_container() {
    let nobody_knows = |core_first| admit(core_first, Fault::None, 0);
    let steps = [
        bind(share(200, 8)),
        // The kubelet believes that there are no cores: after its memory the pod is refused.
        Step::Cordon(7),
        Step::KubeletHears(1),
        Step::Cordon(0),
        nobody_knows(false),
        Step::KubeletHears(1),
        bind(share(50, 2)),
        nobody_knows(true),
    ];
    run(&steps).unwrap();
}

#[test]
fn a_container_stays_whole_when_the_agent_dies_between_its_halves() {
    for core_first in [false, true] {
        for shuffle in 0..64 {
            let admit = |fault, at| Step::Admit { core_first, fault, at, shuffle };
            let two = Step::Bind {
                containers: vec![(ContainerKind::Init, share(10, 1)), (ContainerKind::App, share(50, 2))],
                reserved: None,
            };
            for at in 0..4 {
                let steps = [
                    bind(share(60, 1)),
                    admit(Fault::None, 0),
                    two.clone(),
                    bind(share(25, 1)),
                    admit(Fault::AgentDiesAfterAnswering, at),
                    Step::RestartKubelet { noticed_late: true },
                    admit(Fault::AgentDiesAfterAnswering, at),
                    Step::Start,
                ];
                run(&steps).unwrap();
            }
        }
    }
}

/// A list makes the kubelet write its book in the middle of a container; a kubelet that starts from that asks for the rest alone.
#[test]
fn a_container_stays_whole_when_only_half_of_it_was_written() {
    for core_first in [false, true] {
        for noticed_late in [false, true] {
            let steps = [
                bind(share(60, 1)),
                admit(core_first, Fault::None, 0),
                bind(share(60, 2)),
                admit(core_first, Fault::KubeletDies, 1),
                Step::PassTime(6_000),
                Step::RestartAgent,
                Step::RestartKubelet { noticed_late },
                bind(share(25, 1)),
                admit(core_first, Fault::None, 0),
                admit(core_first, Fault::None, 0),
                Step::Start,
            ];
            run(&steps).unwrap();
        }
    }
}

#[test]
fn what_a_kubelet_promised_before_it_was_noticed_is_not_forgotten() {
    let steps = [
        bind(share(60, 1)),
        Step::RestartKubelet { noticed_late: true },
        Step::Bind { containers: vec![(ContainerKind::App, share(50, 2))], reserved: Some(1) },
        admit(true, Fault::None, 0),
        Step::Notice,
        admit(true, Fault::None, 0),
        Step::Notice,
        Step::Start,
    ];
    run(&steps).unwrap();
}

#[test]
fn lists_alone_open_the_books_only_after_what_they_do_not_show_has_ended() {
    let two = vec![(ContainerKind::Init, share(10, 1)), (ContainerKind::App, share(10, 1))];
    let admit = |shuffle| Step::Admit { core_first: false, fault: Fault::None, at: 0, shuffle };
    let steps = [
        Step::Bind { containers: two, reserved: Some(2) },
        Step::Hear(1),
        admit(837_921_569_270_895_081),
        Step::TruncateCheckpoint,
        bind(legacy(1)),
        Step::RestartAgent,
        Step::DeleteWithForce(0),
        bind(share(25, 1)),
        Step::Ask,
        Step::RestartKubelet { noticed_late: false },
        admit(9_222_854_554_668_917_132),
    ];
    run(&steps).unwrap();
}

#[test]
fn a_deviation_keeps_its_name_over_two_lives() {
    let admit = |shuffle| Step::Admit { core_first: false, fault: Fault::None, at: 0, shuffle };
    let two = vec![(ContainerKind::Init, legacy(1)), (ContainerKind::App, legacy(2))];
    let steps = [
        bind(legacy(1)),
        admit(9_960_601_913_984_443_444),
        Step::End(0),
        Step::Bind { containers: two, reserved: None },
        admit(8_058_229_688_453_129_428),
        Step::Relist,
        bind(legacy(1)),
        admit(2_129_441_457),
        Step::RestartAgent,
        bind(share(25, 1)),
        admit(0),
        Step::RestartAgent,
    ];
    run(&steps).unwrap();
}

#[test]
fn a_row_is_about_the_latest_promise_of_its_devices() {
    let two = |first, second| Step::Bind {
        containers: vec![(first, share(25, 1)), (ContainerKind::App, second)],
        reserved: None,
    };
    let admit = |core_first, fault, at, shuffle| Step::Admit { core_first, fault, at, shuffle };
    let steps = [
        bind(share(60, 1)),
        admit(false, Fault::None, 0, 644_362_180_298_581_549),
        two(ContainerKind::Sidecar, share(10, 1)),
        Step::Cordon(6),
        admit(false, Fault::None, 0, 1_398_105_005_505_895_680),
        Step::End(0),
        two(ContainerKind::Init, share(50, 1)),
        Step::RestartAgent,
        admit(true, Fault::KubeletDies, 2, 6_222_674_064_235_587_237),
        Step::TruncateCheckpoint,
        admit(false, Fault::None, 0, 3_319_919_538_634_873_765),
        Step::RestartKubelet { noticed_late: false },
    ];
    run(&steps).unwrap();
}

#[test]
fn a_life_that_began_without_the_book_waits_for_what_the_next_one_omits() {
    let admit = |shuffle| Step::Admit { core_first: false, fault: Fault::None, at: 0, shuffle };
    let steps = [
        bind(share(25, 1)),
        admit(1_152_820_421_115_284_465),
        bind(share(25, 1)),
        Step::TruncateCheckpoint,
        bind(share(25, 1)),
        bind(share(100, 4)),
        Step::RestartAgent,
        Step::DeleteWithForce(0),
        admit(0),
        Step::KubeletHears(3),
        bind(share(25, 1)),
        admit(0),
        Step::RestartKubelet { noticed_late: false },
        admit(2_099_341_409_385_481_216),
    ];
    run(&steps).unwrap();
}

#[test]
fn what_an_earlier_life_gave_to_a_known_pod_is_no_answer_for_the_next() {
    let admit = |shuffle| Step::Admit { core_first: false, fault: Fault::None, at: 0, shuffle };
    let two = vec![(ContainerKind::Init, legacy(2)), (ContainerKind::App, legacy(1))];
    let steps = [
        Step::Bind { containers: vec![(ContainerKind::App, share(100, 4))], reserved: Some(1) },
        Step::Hear(1),
        admit(458_531_746),
        Step::Bind { containers: two, reserved: None },
        Step::Hear(2),
        admit(4_869_968_936_712_866_724),
        Step::End(503_111_215_992_143_005),
        bind(share(25, 1)),
        admit(0),
        bind(legacy(2)),
        Step::KubeletHears(3),
        Step::RestartAgent,
        admit(0),
        Step::RestartKubelet { noticed_late: false },
    ];
    run(&steps).unwrap();
}

#[test]
fn a_deviation_that_nobody_took_up_is_not_its_successors() {
    let admit = |shuffle| Step::Admit { core_first: false, fault: Fault::None, at: 0, shuffle };
    let two = vec![(ContainerKind::Init, legacy(2)), (ContainerKind::App, legacy(1))];
    let steps = [
        Step::Bind { containers: two, reserved: None },
        admit(1_802_359_183_200_049_589),
        Step::End(0),
        Step::Hear(3),
        Step::TruncateCheckpoint,
        bind(legacy(1)),
        admit(7_490_712_762_430_927_221),
        Step::RestartAgent,
    ];
    run(&steps).unwrap();
}

#[test]
fn an_init_container_with_the_devices_of_its_successor_is_looked_at_too() {
    let admit = |fault, shuffle| Step::Admit { core_first: false, fault, at: 0, shuffle };
    let two = |kind, first, second| Step::Bind {
        containers: vec![(kind, first), (ContainerKind::App, second)],
        reserved: None,
    };
    let steps = [
        two(ContainerKind::Sidecar, share(10, 1), share(25, 1)),
        bind(share(50, 2)),
        two(ContainerKind::Init, share(10, 1), share(10, 1)),
        admit(Fault::AgentDiesAfterAnswering, 789_575_942_733_789_221),
        admit(Fault::None, 975_522_748_639_360_389),
        admit(Fault::None, 16_359_875_411_776_659_469),
    ];
    run(&steps).unwrap();
}

#[test]
fn what_an_earlier_life_knew_to_be_anothers_is_not_confirmed_by_a_list() {
    let admit = |fault| Step::Admit { core_first: false, fault, at: 0, shuffle: 0 };
    let legacy = |kind, n| (kind, Demand { legacy: n, ..Demand::NONE });
    let (init, app) = (ContainerKind::Init, ContainerKind::App);
    let bind = |containers: Vec<(ContainerKind, Demand)>| Step::Bind { containers, reserved: None };
    let steps = [
        bind(vec![legacy(init, 2), legacy(app, 1)]),
        admit(Fault::None),
        Step::End(0),
        bind(vec![(app, share(25, 1))]),
        admit(Fault::None),
        bind(vec![(app, share(25, 1))]),
        bind(vec![legacy(app, 1)]),
        Step::KubeletHears(3),
        Step::Ask,
        admit(Fault::AgentDies),
        admit(Fault::None),
        Step::Hear(1),
        Step::Hear(1),
        Step::Ask,
        Step::RestartAgent,
    ];
    run(&steps).unwrap();
}

#[test]
fn a_promise_that_nobody_took_up_is_not_confirmed_beside_the_one_that_was() {
    let admit = |fault, at| Step::Admit { core_first: false, fault, at, shuffle: 0 };
    let legacy = |kind, n| (kind, Demand { legacy: n, ..Demand::NONE });
    let bind = |containers: Vec<(ContainerKind, Demand)>| Step::Bind { containers, reserved: None };
    let steps = [
        bind(vec![legacy(ContainerKind::Init, 2), legacy(ContainerKind::App, 1)]),
        admit(Fault::AgentDiesAfterWriting, 1),
        Step::TruncateCheckpoint,
        Step::Hear(1),
        Step::Ask,
        bind(vec![legacy(ContainerKind::App, 1)]),
        Step::Hear(1),
        admit(Fault::None, 0),
        Step::Hear(1),
        Step::Ask,
        Step::StartAndDie(0),
    ];
    run(&steps).unwrap();
}
