//! Histories that once broke an invariant, each found by the random ones, on a cluster, or by reasoning.

use gpu_migrate_model::ask::{ContainerKind, Demand};

use super::machine::{Step, run};
use super::world::{Change, Fault, share};

/// A pod with this one container.
fn bind(demand: Demand) -> Step {
    bind_all(&[(ContainerKind::App, demand)])
}

fn bind_all(containers: &[(ContainerKind, Demand)]) -> Step {
    Step::Bind { containers: containers.to_vec(), reserved: None }
}

/// Whole cards for a legacy container.
const fn whole(cards: u32) -> Demand {
    Demand { legacy: cards, ..share(0, 0) }
}

/// Admission of the next pod, memory before cores, without a fault, and with the first devices that are free.
const fn admit() -> Step {
    Step::Admit { core_first: false, fault: Fault::None, at: 0, shuffle: 0 }
}

impl Step {
    fn reserved(self, card: usize) -> Self {
        let Self::Bind { containers, .. } = self else { return self };
        Self::Bind { containers, reserved: Some(card) }
    }

    fn core_first(self) -> Self {
        self.core_first_if(true)
    }

    fn core_first_if(mut self, yes: bool) -> Self {
        if let Self::Admit { core_first, .. } = &mut self {
            *core_first = yes;
        }
        self
    }

    /// With this fault at this Allocate of the pod.
    fn failing(mut self, what: Fault, which: usize) -> Self {
        if let Self::Admit { fault, at, .. } = &mut self {
            (*fault, *at) = (what, which);
        }
        self
    }

    /// With this of everything that is random: see `World::allocate`.
    fn shuffled(mut self, bits: usize) -> Self {
        if let Self::Admit { shuffle, .. } = &mut self {
            *shuffle = bits;
        }
        self
    }
}

#[test]
fn a_pod_deleted_with_force_keeps_its_cards_while_it_ends() {
    let (init, app) = (ContainerKind::Init, ContainerKind::App);
    let steps = [
        bind_all(&[(init, whole(1)), (app, whole(2))]),
        Step::DeliverEvents(1),
        admit().shuffled(460_663_017_741_189),
        Step::End(0),
        Step::DeliverEvents(2),
        bind_all(&[(app, whole(2))]),
        bind_all(&[(init, whole(2)), (app, whole(1))]),
        admit().shuffled(5_396_973_775_100_211_831),
        Step::PassTime(100_000),
        Step::DeleteWithForce(0),
        admit().shuffled(13_689_454_767_575_737_854),
    ];
    run(&steps).unwrap();
}

/// With its own grace period where cgroups cannot be read (an odd number of steps), else for as long as its cgroup has processes.
#[test]
fn a_pod_deleted_with_force_keeps_its_card_for_as_long_as_it_takes_to_end() {
    let steps = [
        bind(whole(1)),
        bind(whole(1)),
        admit(),
        admit(),
        Step::DeliverEvents(9),
        Step::ListPodResources,
        Step::DeleteWithForce(5),
        Step::DeliverEvents(9),
        Step::PassTime(40_000),
        Step::ListPodResources,
        Step::PassTime(10),
        Step::RestartAgent,
        Step::Relist,
        Step::ListPodResources,
        Step::PassTime(10),
    ];
    run(&steps).unwrap();
    let hanging =
        [&steps[..6], &[Step::DeleteWithForce(3)], &steps[7..], &[Step::PassTime(100_000)]].concat();
    run(&hanging).unwrap();
}

/// The write that nobody waits for any more is done later, or never where the agent dies first.
#[test]
fn a_stalled_disk_allocates_nothing_twice() {
    for restarts in [false, true] {
        let mut steps =
            vec![bind(share(25, 1)), admit(), bind(whole(1)), admit().failing(Fault::DiskStalls, 0)];
        if restarts {
            steps.push(Step::RestartAgent);
        }
        steps.extend([bind(whole(1)), admit(), Step::PassTime(40_000), bind(whole(1)), admit(), Step::Start]);
        run(&steps).unwrap();
    }
}

/// The record of the agent before has the share, and not who came to its card while the checkpoint could not be read.
#[test]
fn who_gets_the_card_of_a_share_before_the_agent_knows_what_is_there_is_ended() {
    // One step more, and cgroups cannot be read.
    for last in [vec![], vec![Step::PassTime(600_000), Step::ReadCheckpoint, Step::TakeBack]] {
        for turn in 0..4 {
            let mut steps = vec![
                bind(share(25, 1)),
                admit(),
                bind(whole(1)),
                Step::Bypass,
                Step::TruncateCheckpoint,
                Step::RestartAgent,
                admit().shuffled(turn),
                Step::Relist,
                Step::TakeBack,
                bind(share(25, 1)),
            ];
            steps.extend(last.clone());
            run(&steps).unwrap();
        }
    }
}

/// Record and map are lost before it starts, and a card has other block numbers now: of its memory only a part is of a known card.
#[test]
fn a_container_with_blocks_of_no_card_does_not_start() {
    let (init, app, sidecar) = (ContainerKind::Init, ContainerKind::App, ContainerKind::Sidecar);
    let steps = [
        bind_all(&[(init, share(10, 1)), (app, share(10, 1))]),
        Step::Hardware(Change::Vanish(0)),
        bind_all(&[(sidecar, share(10, 1)), (app, share(10, 1))]),
        admit().shuffled(2_907_315_794_426_313),
        admit().shuffled(2_355_386_378_224_197_405).failing(Fault::DiskFails(0), 0),
        bind(whole(1)),
        bind(share(50, 2)),
        Step::StartAndDie(0),
        admit(),
        Step::LoseRecord,
        Step::End(18_144_454_359_050_772_809),
        Step::PassTime(100_000),
        admit().core_first().shuffled(2_935_137_213_234_649_217),
        Step::RestartAgent,
        Step::Start,
    ];
    run(&steps).unwrap();
}

/// The card that the kubelet chose for it is gone, and the agent starts anew while it still ends on another.
#[test]
fn a_container_keeps_its_card_though_the_one_that_the_kubelet_chose_is_gone() {
    let steps = [
        bind_all(&[(ContainerKind::Init, whole(2)), (ContainerKind::App, whole(1))]),
        admit().shuffled(4_799_835_220_292_595_137),
        Step::Hardware(Change::Vanish(0)),
        Step::LoseRecord,
        Step::DeleteWithForce(3_477_210_219_472_829_175),
        bind(share(25, 1)),
        admit(),
        Step::DeliverList(3),
        Step::StartAndDie(0),
        bind(share(25, 1)),
    ];
    run(&steps).unwrap();
}

/// What is left of a grant whose other devices have another owner now is no answer to a request for all of them.
#[test]
fn a_part_of_an_unclaimed_allocation_is_not_allocated_for_the_whole() {
    let (init, app) = (ContainerKind::Init, ContainerKind::App);
    let steps = [
        bind(whole(2)),
        admit().failing(Fault::AgentDiesAtWrite(6), 0).shuffled(575_289_179_802_773),
        bind_all(&[(init, whole(2)), (app, whole(1))]),
        admit().failing(Fault::AgentDies, 1).shuffled(157_694_456_323_956_315),
        Step::DeliverEvents(1),
        bind_all(&[(init, whole(1)), (app, whole(2))]),
        admit().shuffled(16_247_168_676_139_755_004),
    ];
    run(&steps).unwrap();
}

/// Found by running: a process that had not taken over the record of the one before wrote its own, empty one.
#[test]
fn a_record_survives_processes_that_never_became_ready() {
    let steps = [
        bind(share(25, 1)),
        admit(),
        Step::RemoveCheckpoint,
        Step::RestartAgent,
        Step::RestartAgent,
        Step::RestartKubelet { noticed_late: false },
        Step::DeliverList(3),
        Step::ReadCheckpoint,
    ];
    run(&steps).unwrap();
}

/// The record is gone, and the kubelet's checkpoint too: the pods that run are all that is known.
#[test]
fn a_running_container_that_no_file_names_closes_cards() {
    let steps = [
        bind(whole(1)),
        admit(),
        Step::DeliverEvents(9),
        Step::LoseRecord,
        Step::RemoveCheckpoint,
        Step::RestartKubelet { noticed_late: false },
        Step::DeliverList(3),
        Step::LoseRecord,
        Step::RestartAgent,
        Step::Relist,
        Step::PassTime(40_000),
        bind(share(25, 1)),
        admit(),
        Step::Start,
    ];
    run(&steps).unwrap();
}

#[test]
fn a_core_without_its_memory_does_not_split_the_next_container() {
    let steps = [
        bind(share(100, 2)),
        bind(share(25, 1)),
        bind(share(100, 4)),
        admit(),
        // Its cores are refused; its memory stays allocated.
        admit().shuffled(391_934_497_800_489),
        Step::End(0),
        Step::Relist,
        Step::TruncateCheckpoint,
        admit().core_first().shuffled(12_834_574_303_476_345),
    ];
    run(&steps).unwrap();
}

#[test]
fn a_device_allocated_twice_stays_with_the_other_allocation() {
    let (init, app) = (ContainerKind::Init, ContainerKind::App);
    run(&[
        bind_all(&[(init, whole(1)), (app, whole(2))]),
        admit().shuffled(6171894363430280776),
        Step::End(0),
        Step::DeliverEvents(3),
        bind_all(&[(app, whole(1))]),
        Step::DeliverList(0),
        admit().shuffled(2422399636045316660),
        Step::RestartAgent,
        Step::RestartKubelet { noticed_late: false },
    ])
    .unwrap();
}

#[test]
fn an_allocation_of_an_earlier_process_that_is_repeated_is_half_of_a_container() {
    let (init, app) = (ContainerKind::Init, ContainerKind::App);
    let two = [(init, share(10, 1)), (app, share(10, 1))];
    run(&[
        Step::Cordon(3),
        bind_all(&[(init, whole(2)), (app, whole(1))]),
        bind_all(&[(app, share(50, 2))]),
        bind_all(&[(app, whole(1))]),
        bind_all(&[(app, share(25, 1))]),
        admit(),
        bind_all(&two),
        admit().shuffled(1894715078474358924),
        admit(),
        admit(),
        admit().failing(Fault::AgentDiesAfterWriting, 1).shuffled(37898053067104565),
        bind_all(&two),
        admit().core_first().shuffled(2361517521015385),
    ])
    .unwrap();
}

#[test]
fn a_deviation_of_an_ended_pod_is_not_the_next_ones() {
    let steps = [
        bind_all(&[(ContainerKind::Init, whole(2)), (ContainerKind::App, whole(1))]),
        admit(),
        bind_all(&[(ContainerKind::App, whole(1))]),
        Step::RestartKubelet { noticed_late: false },
        Step::DeliverEvents(1),
        Step::End(0),
        admit().shuffled(58_092_910_745_780_588),
        Step::RestartAgent,
    ];
    run(&steps).unwrap();
}

#[test]
fn a_kubelet_without_its_checkpoint_transfers_nothing() {
    let steps = [
        bind_all(&[(ContainerKind::Init, whole(2)), (ContainerKind::App, whole(1))]),
        admit(),
        Step::TruncateCheckpoint,
        Step::RestartKubelet { noticed_late: false },
        Step::DeliverEvents(1),
        bind_all(&[(ContainerKind::App, whole(1))]),
        admit(),
    ];
    run(&steps).unwrap();
}

#[test]
fn an_allocation_that_a_truncated_checkpoint_may_have_named_survives_a_kubelet_restart() {
    let steps = [
        bind(whole(1)),
        admit().shuffled(2_302_755_381_981_336_333),
        Step::TruncateCheckpoint,
        Step::DeleteWithForce(0),
        bind(share(25, 1)),
        bind(whole(1)),
        admit(),
        Step::RestartKubelet { noticed_late: false },
        admit(),
    ];
    run(&steps).unwrap();
}

/// Seen on a cluster: 50 cores were spread over the two cards of somebody else's memory.
#[test]
fn a_half_on_two_cards_does_not_widen_the_next_container() {
    let steps = [
        bind(share(200, 8)),
        // The kubelet believes that there are no cores: after its memory the pod is refused.
        Step::Cordon(7),
        Step::DeliverList(1),
        Step::Cordon(0),
        admit(),
        Step::DeliverList(1),
        bind(share(50, 2)),
        admit().core_first(),
    ];
    run(&steps).unwrap();
}

#[test]
fn a_container_stays_whole_when_the_agent_dies_between_its_halves() {
    for core_first in [false, true] {
        for shuffle in 0..64 {
            let two = bind_all(&[(ContainerKind::Init, share(10, 1)), (ContainerKind::App, share(50, 2))]);
            for at in 0..4 {
                let steps = [
                    bind(share(60, 1)),
                    admit().core_first_if(core_first).shuffled(shuffle),
                    two.clone(),
                    bind(share(25, 1)),
                    admit()
                        .core_first_if(core_first)
                        .failing(Fault::AgentDiesAfterAnswering, at)
                        .shuffled(shuffle),
                    Step::RestartKubelet { noticed_late: true },
                    admit()
                        .core_first_if(core_first)
                        .failing(Fault::AgentDiesAfterAnswering, at)
                        .shuffled(shuffle),
                    Step::Start,
                ];
                run(&steps).unwrap();
            }
        }
    }
}

/// A list makes the kubelet write its checkpoint in the middle of a container; a kubelet that starts from that asks for the rest alone.
#[test]
fn a_container_stays_whole_when_only_half_of_it_was_written() {
    for core_first in [false, true] {
        for noticed_late in [false, true] {
            let steps = [
                bind(share(60, 1)),
                admit().core_first_if(core_first),
                bind(share(60, 2)),
                admit().core_first_if(core_first).failing(Fault::KubeletDies, 1),
                Step::PassTime(6_000),
                Step::RestartAgent,
                Step::RestartKubelet { noticed_late },
                bind(share(25, 1)),
                admit().core_first_if(core_first),
                admit().core_first_if(core_first),
                Step::Start,
            ];
            run(&steps).unwrap();
        }
    }
}

#[test]
fn what_was_allocated_to_a_kubelet_before_its_restart_was_noticed_is_kept() {
    let steps = [
        bind(share(60, 1)),
        Step::RestartKubelet { noticed_late: true },
        bind(share(50, 2)).reserved(1),
        admit().core_first(),
        Step::Notice,
        admit().core_first(),
        Step::Notice,
        Step::Start,
    ];
    run(&steps).unwrap();
}

#[test]
fn lists_alone_make_the_state_ready_only_after_what_they_omit_has_ended() {
    let two = [(ContainerKind::Init, share(10, 1)), (ContainerKind::App, share(10, 1))];
    let steps = [
        bind_all(&two).reserved(2),
        Step::DeliverEvents(1),
        admit().shuffled(837_921_569_270_895_081),
        Step::TruncateCheckpoint,
        bind(whole(1)),
        Step::RestartAgent,
        Step::DeleteWithForce(0),
        bind(share(25, 1)),
        Step::ListPodResources,
        Step::RestartKubelet { noticed_late: false },
        admit().shuffled(9_222_854_554_668_917_132),
    ];
    run(&steps).unwrap();
}

#[test]
fn a_deviation_keeps_its_name_over_two_restarts() {
    let two = [(ContainerKind::Init, whole(1)), (ContainerKind::App, whole(2))];
    let steps = [
        bind(whole(1)),
        admit().shuffled(9_960_601_913_984_443_444),
        Step::End(0),
        bind_all(&two),
        admit().shuffled(8_058_229_688_453_129_428),
        Step::Relist,
        bind(whole(1)),
        admit().shuffled(2_129_441_457),
        Step::RestartAgent,
        bind(share(25, 1)),
        admit(),
        Step::RestartAgent,
    ];
    run(&steps).unwrap();
}

#[test]
fn a_row_is_about_the_latest_allocation_of_its_devices() {
    let steps = [
        bind(share(60, 1)),
        admit().shuffled(644_362_180_298_581_549),
        bind_all(&[(ContainerKind::Sidecar, share(25, 1)), (ContainerKind::App, share(10, 1))]),
        Step::Cordon(6),
        admit().shuffled(1_398_105_005_505_895_680),
        Step::End(0),
        bind_all(&[(ContainerKind::Init, share(25, 1)), (ContainerKind::App, share(50, 1))]),
        Step::RestartAgent,
        admit().core_first().failing(Fault::KubeletDies, 2).shuffled(6_222_674_064_235_587_237),
        Step::TruncateCheckpoint,
        admit().shuffled(3_319_919_538_634_873_765),
        Step::RestartKubelet { noticed_late: false },
    ];
    run(&steps).unwrap();
}

#[test]
fn a_start_without_the_checkpoint_waits_for_what_the_next_one_omits() {
    let steps = [
        bind(share(25, 1)),
        admit().shuffled(1_152_820_421_115_284_465),
        bind(share(25, 1)),
        Step::TruncateCheckpoint,
        bind(share(25, 1)),
        bind(share(100, 4)),
        Step::RestartAgent,
        Step::DeleteWithForce(0),
        admit(),
        Step::DeliverList(3),
        bind(share(25, 1)),
        admit(),
        Step::RestartKubelet { noticed_late: false },
        admit().shuffled(2_099_341_409_385_481_216),
    ];
    run(&steps).unwrap();
}

#[test]
fn what_an_earlier_process_allocated_to_a_known_pod_is_no_answer_for_the_next() {
    let two = [(ContainerKind::Init, whole(2)), (ContainerKind::App, whole(1))];
    let steps = [
        bind(share(100, 4)).reserved(1),
        Step::DeliverEvents(1),
        admit().shuffled(458_531_746),
        bind_all(&two),
        Step::DeliverEvents(2),
        admit().shuffled(4_869_968_936_712_866_724),
        Step::End(503_111_215_992_143_005),
        bind(share(25, 1)),
        admit(),
        bind(whole(2)),
        Step::DeliverList(3),
        Step::RestartAgent,
        admit(),
        Step::RestartKubelet { noticed_late: false },
    ];
    run(&steps).unwrap();
}

#[test]
fn an_unused_deviation_is_not_its_successors() {
    let two = [(ContainerKind::Init, whole(2)), (ContainerKind::App, whole(1))];
    let steps = [
        bind_all(&two),
        admit().shuffled(1_802_359_183_200_049_589),
        Step::End(0),
        Step::DeliverEvents(3),
        Step::TruncateCheckpoint,
        bind(whole(1)),
        admit().shuffled(7_490_712_762_430_927_221),
        Step::RestartAgent,
    ];
    run(&steps).unwrap();
}

#[test]
fn an_init_container_with_the_devices_of_its_successor_is_checked_too() {
    let steps = [
        bind_all(&[(ContainerKind::Sidecar, share(10, 1)), (ContainerKind::App, share(25, 1))]),
        bind(share(50, 2)),
        bind_all(&[(ContainerKind::Init, share(10, 1)), (ContainerKind::App, share(10, 1))]),
        admit().failing(Fault::AgentDiesAfterAnswering, 0).shuffled(789_575_942_733_789_221),
        admit().shuffled(975_522_748_639_360_389),
        admit().shuffled(16_359_875_411_776_659_469),
    ];
    run(&steps).unwrap();
}

#[test]
fn what_an_earlier_process_gave_to_another_pod_is_not_confirmed_by_a_list() {
    let (init, app) = (ContainerKind::Init, ContainerKind::App);
    let steps = [
        bind_all(&[(init, whole(2)), (app, whole(1))]),
        admit(),
        Step::End(0),
        bind_all(&[(app, share(25, 1))]),
        admit(),
        bind_all(&[(app, share(25, 1))]),
        bind_all(&[(app, whole(1))]),
        Step::DeliverList(3),
        Step::ListPodResources,
        admit().failing(Fault::AgentDies, 0),
        admit(),
        Step::DeliverEvents(1),
        Step::DeliverEvents(1),
        Step::ListPodResources,
        Step::RestartAgent,
    ];
    run(&steps).unwrap();
}

#[test]
fn an_unused_allocation_is_not_confirmed_beside_the_one_that_was_used() {
    let steps = [
        bind_all(&[(ContainerKind::Init, whole(2)), (ContainerKind::App, whole(1))]),
        admit().failing(Fault::AgentDiesAfterWriting, 1),
        Step::TruncateCheckpoint,
        Step::DeliverEvents(1),
        Step::ListPodResources,
        bind_all(&[(ContainerKind::App, whole(1))]),
        Step::DeliverEvents(1),
        admit(),
        Step::DeliverEvents(1),
        Step::ListPodResources,
        Step::StartAndDie(0),
    ];
    run(&steps).unwrap();
}

#[test]
fn a_checkpoint_that_was_deleted_and_written_anew_frees_nothing_of_before() {
    let steps = [
        bind(share(25, 1)),
        admit(),
        bind(share(100, 4)),
        Step::End(0),
        admit().failing(Fault::DiskFails(0), 0).shuffled(63_043_842_999_125),
        Step::RemoveCheckpoint,
        Step::RestartAgent,
        Step::ListPodResources,
        Step::DeleteWithForce(3_988_031_724_922_992_046),
        bind(share(25, 1)),
        admit(),
        Step::DeliverList(3),
        Step::RestartKubelet { noticed_late: false },
    ];
    run(&steps).unwrap();
}

/// The kubelet has forgotten a running container, and only the agent's record has its device IDs: the card map is rebuilt from that too.
#[test]
fn a_lost_card_map_is_rebuilt_from_the_record() {
    let steps = [
        bind(share(25, 1)),
        admit().shuffled(112_748_494_892_405_049),
        Step::TruncateCheckpoint,
        Step::Hardware(Change::Renumber(0)),
        Step::RestartKubelet { noticed_late: false },
        Step::Bypass,
        Step::LoseRecord,
        Step::PassTime(10),
        Step::RestartAgent,
    ];
    run(&steps).unwrap();
}

/// An answer that the kubelet lost is not repeated for a card that was claimed through DRA since.
#[test]
fn an_answer_that_was_lost_is_not_repeated_for_a_claimed_card() {
    let steps = [
        Step::Cordon(3),
        bind(whole(1)),
        Step::Claim(2),
        admit().failing(Fault::AnswerLost, 0),
        Step::DeliverList(0),
        Step::ListPodResources,
        bind(whole(1)),
        admit(),
    ];
    run(&steps).unwrap();
}

/// The card that the kubelet asked for is gone, and the record that another was given: the answer says it.
#[test]
fn a_substitute_is_known_by_its_answer_where_the_card_that_was_asked_for_is_gone() {
    let steps = [
        bind(whole(2)),
        bind(share(200, 8)),
        bind(whole(1)),
        admit().shuffled(2_048_137_516_193_625),
        Step::Health { card: 0, healthy: false },
        bind(share(25, 1)),
        Step::DeliverList(0),
        Step::End(0),
        admit(),
        Step::Hardware(Change::Vanish(1)),
        admit().shuffled(9_793_530_152_740_605_544),
        Step::LoseRecord,
        Step::RestartKubelet { noticed_late: false },
        Step::RestartAgent,
    ];
    run(&steps).unwrap();
}

/// A process that has lost a source, and has not become ready since, tells the next one.
#[test]
fn what_one_process_does_not_know_the_next_one_does_not_either() {
    let steps = [
        bind(share(25, 1)),
        admit(),
        Step::Bypass,
        admit(),
        admit(),
        Step::TruncateCheckpoint,
        admit(),
        Step::Notice,
        bind(share(25, 1)),
        Step::End(0),
        Step::ListPodResources,
        Step::Notice,
        Step::End(0),
        Step::End(0),
        Step::RestartAgent,
        Step::ListPodResources,
        admit(),
        Step::DeliverList(0),
        Step::DeliverList(0),
        bind(whole(1)),
        admit().shuffled(274_484_193_564_690_682),
        bind(share(25, 1)),
        Step::TruncateCheckpoint,
        Step::RestartKubelet { noticed_late: false },
        Step::Bypass,
        Step::StartAndDie(0),
    ];
    run(&steps).unwrap();
}

/// The kubelet has device IDs of a range that no card of this start would get: another was given, and the card map is lost.
#[test]
fn a_rebuilt_card_map_has_the_ranges_that_the_kubelet_asked_for() {
    let (init, app) = (ContainerKind::Init, ContainerKind::App);
    let steps = [
        Step::LoseRecord,
        bind(whole(1)),
        admit().shuffled(4_457_441_080_201_182_129),
        Step::TruncateCheckpoint,
        Step::End(0),
        Step::Hardware(Change::Vanish(1)),
        Step::DeliverEvents(3),
        bind_all(&[(init, share(10, 1)), (app, share(10, 1))]).reserved(0),
        Step::RestartKubelet { noticed_late: false },
        Step::DeliverList(3),
        Step::DeliverEvents(1),
        admit().shuffled(66_150_441_251),
        Step::RestartAgent,
    ];
    run(&steps).unwrap();
}
