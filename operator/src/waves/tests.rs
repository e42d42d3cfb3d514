//! The state machine against a cluster that is nothing but numbers: tables for what must happen, random histories for
//! what must never happen.

use super::*;
use gpu_migrate_model::crd::{
    Direction, GPUMigrationSpec, Gate, GateQuery, MigrationMode, MigrationPhase as Phase, OnUnready,
    PercentOf, Rollout, RolloutCommand, Wave, WorkloadState,
};
use gpu_migrate_model::units::Cores;
use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;
use std::collections::BTreeSet;

/// One workload: how long its pods take, and what is wrong with it when it runs on shares.
#[derive(Clone, Debug)]
struct Pods {
    key: Key,
    labelled: bool,
    conversion: Option<String>,
    cards: u32,
    /// Conversions with which it does not become ready.
    breaks_with: Option<String>,
    /// Ticks until its pods are ready.
    left: u32,
    takes: u32,
    breaks: bool,
}

impl Pods {
    fn new(key: Key, takes: u32) -> Self {
        Self {
            key,
            labelled: false,
            conversion: None,
            cards: 1,
            breaks_with: None,
            left: 0,
            takes,
            breaks: false,
        }
    }
}

/// The project, the policy, what is stored of it, and the time.
struct World {
    spec: GPUMigrationSpec,
    generation: i64,
    status: gpu_migrate_model::crd::GPUMigrationStatus,
    pods: Vec<Pods>,
    now: Timestamp,
    answer: Option<Result<f64, String>>,
    events: Vec<String>,
    born: usize,
}

fn key(number: usize) -> Key {
    Key { kind: "Deployment".into(), namespace: "ns".into(), name: format!("w{number}") }
}

fn percent(percent: u32) -> Wave {
    Wave { percent: Some(percent), workloads: None }
}

impl World {
    fn new(workloads: usize, waves: Vec<Wave>) -> Self {
        let gate = Gate { ready_within_seconds: 100, soak_seconds: 20, max_restarts: 3, query: None };
        let rollout = Rollout { waves, gate, ..Rollout::default() };
        let spec = GPUMigrationSpec {
            project: "p".into(),
            mode: MigrationMode::Enforce,
            rollout,
            ..GPUMigrationSpec::default()
        };
        let pods = (0..workloads).map(|n| Pods::new(key(n), 2)).collect();
        Self {
            spec,
            generation: 1,
            status: Default::default(),
            pods,
            now: Timestamp::from_second(1_800_000_000).unwrap(),
            answer: None,
            events: Vec::new(),
            born: workloads,
        }
    }

    fn seen(&self) -> Vec<ObservedWorkload> {
        let seen = |pods: &Pods| {
            let broken = pods.conversion.is_some() && pods.conversion == pods.breaks_with;
            let rolled_out = pods.left == 0 && !(pods.labelled && pods.breaks) && !broken;
            ObservedWorkload {
                key: pods.key.clone(),
                labelled: pods.labelled,
                conversion: pods.conversion.clone(),
                cards: pods.cards,
                rolled_out,
                shared_pods: u32::from(pods.labelled && rolled_out),
                ..ObservedWorkload::default()
            }
        };
        self.pods.iter().map(seen).collect()
    }

    /// Of this moment, without workloads.
    fn input(&self) -> Input<'_> {
        Input {
            spec: &self.spec,
            generation: self.generation,
            status: &self.status,
            seen: &[],
            answer: self.answer.as_ref(),
            now: self.now,
        }
    }

    fn decide(&self) -> Decision {
        step(Input { seen: &self.seen(), ..self.input() })
    }

    fn act(&mut self, action: &Action) {
        let (key, conversion) = match action {
            Action::Convert(key, conversion) => (key, Some(conversion.clone())),
            Action::RollBack(key, former) => (key, former.clone()),
            Action::DeletePod(..) => return,
        };
        let pods = self.pods.iter_mut().find(|pods| pods.key == *key).unwrap();
        if pods.labelled != conversion.is_some() || pods.conversion != conversion {
            (pods.labelled, pods.conversion, pods.left) = (conversion.is_some(), conversion, pods.takes);
        }
    }

    /// Five seconds pass, a decision is made, written down and carried out.
    fn tick(&mut self) -> Decision {
        self.now += SignedDuration::from_secs(5);
        for pods in &mut self.pods {
            pods.left = pods.left.saturating_sub(1);
        }
        let decision = self.decide();
        self.status = decision.status.clone();
        self.events.extend(decision.event.iter().map(|(reason, _)| (*reason).to_owned()));
        for action in &decision.actions {
            self.act(action);
        }
        decision
    }

    fn ticks(&mut self, count: usize) {
        for _ in 0..count {
            self.tick();
        }
    }

    fn labelled(&self) -> BTreeSet<usize> {
        (0..self.pods.len()).filter(|n| self.pods[*n].labelled).collect()
    }

    fn edit(&mut self, change: impl FnOnce(&mut GPUMigrationSpec)) {
        change(&mut self.spec);
        self.generation += 1;
    }
}

fn named(numbers: &[usize]) -> Wave {
    Wave { percent: None, workloads: Some(numbers.iter().map(|n| key(*n).to_string()).collect()) }
}

#[test]
fn three_waves_go_one_after_the_other() {
    let mut world = World::new(3, vec![named(&[1]), named(&[0]), percent(100)]);
    world.tick();
    assert_eq!(
        (world.status.phase, world.status.wave, world.labelled()),
        (Phase::Running, Some(1), [1].into())
    );
    world.ticks(2);
    assert_eq!((world.status.phase, world.labelled()), (Phase::Gating, [1].into()), "ready, soaking");
    world.ticks(4);
    assert_eq!((world.status.wave, world.labelled()), (Some(2), [0, 1].into()));
    world.ticks(20);
    assert_eq!((world.status.phase, world.labelled()), (Phase::Complete, [0, 1, 2].into()));
    assert_eq!(world.events, ["WaveStarted", "WaveStarted", "WaveStarted", "Complete"]);
    assert!(world.status.workloads.iter().all(|w| w.state == WorkloadState::Ready));
    let decision = world.tick();
    assert_eq!((decision.actions.len(), decision.event), (0, None), "and nothing more happens");
}

#[test]
fn a_failed_second_wave_is_rolled_back_and_the_first_stays() {
    let mut world = World::new(4, vec![named(&[0]), named(&[1, 2]), percent(100)]);
    world.pods[2].breaks = true;
    world.ticks(60);
    assert_eq!(
        (world.status.phase, world.status.wave, world.labelled()),
        (Phase::Failed, Some(2), [0].into())
    );
    assert_eq!(world.events, ["WaveStarted", "WaveStarted", "WaveFailed", "WaveRolledBack"]);
    let state = |n: usize| world.status.workloads.iter().find(|w| w.name == format!("w{n}")).unwrap().state;
    assert_eq!(
        [state(0), state(1), state(2), state(3)],
        [WorkloadState::Ready, WorkloadState::RolledBack, WorkloadState::RolledBack, WorkloadState::Pending]
    );
    world.ticks(100);
    assert_eq!(world.labelled(), [0].into(), "it does not retry by itself");
    world.pods[2].breaks = false;
    world.edit(|_| ());
    world.ticks(60);
    assert_eq!(
        (world.status.phase, world.labelled().len()),
        (Phase::Complete, 4),
        "it does once the policy is edited"
    );
}

#[test]
fn the_reason_names_the_workload_and_the_limit() {
    let mut world = World::new(1, vec![percent(100)]);
    world.pods[0].breaks = true;
    let message = (0..40).map(|_| world.tick().message).find(|why| why.contains("failed")).unwrap();
    assert_eq!(
        message,
        "wave 1 of 1 failed: 1 of 1 workload not ready, no progress for 100 s; first Deployment/ns/w0"
    );
}

#[test]
fn a_big_wave_one_by_one_has_time_for_each() {
    let mut world = World::new(40, vec![percent(100)]);
    world.ticks(200);
    assert_eq!(world.status.phase, Phase::Complete);
}

#[test]
fn pause_stops_the_wave_and_resume_restarts_its_deadline() {
    let mut world = World::new(3, vec![percent(100)]);
    world.tick();
    world.edit(|spec| spec.rollout.paused = true);
    world.ticks(200);
    assert_eq!((world.status.phase, world.labelled().len()), (Phase::Paused, 1));
    world.edit(|spec| spec.rollout.paused = false);
    world.ticks(30);
    assert_eq!(world.status.phase, Phase::Complete);
}

#[test]
fn a_rollback_reverts_all_and_can_be_reversed() {
    let mut world = World::new(4, vec![percent(50), percent(100)]);
    world.ticks(60);
    assert_eq!(world.status.phase, Phase::Complete);
    world.edit(|spec| spec.rollout.direction = Direction::Rollback);
    world.ticks(3);
    assert_eq!((world.status.phase, world.labelled().len()), (Phase::RollingBack, 2));
    world.edit(|spec| spec.rollout.direction = Direction::Forward);
    world.ticks(60);
    assert_eq!((world.status.phase, world.labelled().len()), (Phase::Complete, 4));
    world.edit(|spec| spec.rollout.direction = Direction::Rollback);
    world.ticks(60);
    assert_eq!((world.status.phase, world.labelled().len()), (Phase::Idle, 0));
    assert_eq!(world.events.last().unwrap(), "RolledBack");
}

#[test]
fn a_workload_that_never_becomes_ready_does_not_block_the_rollback() {
    let mut world = World::new(4, vec![percent(100)]);
    world.ticks(60);
    world.pods[1].left = u32::MAX;
    world.pods[1].labelled = false;
    world.edit(|spec| spec.rollout.direction = Direction::Rollback);
    world.ticks(5);
    assert_eq!(world.labelled().len(), 3, "it waits a while");
    world.ticks(100);
    assert_eq!((world.status.phase, world.labelled().len()), (Phase::Idle, 0));
}

#[test]
fn the_query_decides_after_the_soak() {
    let mut world = World::new(1, vec![percent(100)]);
    world.spec.rollout.gate.query =
        Some(GateQuery { url: "http://p".into(), promql: "errors".into(), max: 0.5, ..GateQuery::default() });
    let asked = (0..20).find(|_| world.tick().needs_query);
    assert!(asked.is_some() && world.status.phase == Phase::Gating);
    world.answer = Some(Err("connection refused".into()));
    world.ticks(100);
    assert_eq!((world.status.phase, world.labelled().len()), (Phase::Gating, 1), "an unanswered query waits");
    world.answer = Some(Ok(0.6));
    world.ticks(5);
    assert_eq!((world.status.phase, world.labelled().len()), (Phase::Failed, 0));
    world.edit(|_| ());
    world.answer = Some(Ok(0.5));
    world.ticks(20);
    assert_eq!(world.status.phase, Phase::Complete);
}

#[test]
fn the_query_is_asked_all_along_the_soak() {
    let soaking = |failure_limit| {
        let mut world = World::new(1, vec![percent(100)]);
        world.spec.rollout.gate.soak_seconds = 600;
        let (url, promql) = ("http://p".to_owned(), "errors".to_owned());
        world.spec.rollout.gate.query =
            Some(GateQuery { url, promql, max: 0.5, interval_seconds: 30, failure_limit });
        world.answer = Some(Ok(0.1));
        world.ticks(10);
        assert_eq!((world.status.phase, &world.status.query.as_ref().unwrap().failures), (Phase::Gating, &0));
        world.answer = None;
        let asked = (0..24).filter(|_| world.tick().needs_query).count();
        assert!(asked >= 4, "every 30 s of 120: {asked}");
        world.answer = Some(Ok(0.9));
        world.tick();
        world
    };
    assert_eq!(soaking(0).events.last().unwrap(), "WaveFailed", "long before the soak is over");
    let mut world = soaking(1);
    assert_eq!((world.status.phase, world.status.query.as_ref().unwrap().failures), (Phase::Gating, 1));
    world.answer = Some(Ok(0.1));
    world.ticks(200);
    assert_eq!(world.status.phase, Phase::Complete);
    let mut world = soaking(1);
    world.ticks(10);
    assert!(world.events.iter().any(|event| event == "WaveFailed"), "the second time is one too many");
}

#[test]
fn a_percentage_may_count_cards() {
    let mut world = World::new(5, vec![percent(50), percent(100)]);
    for (pods, cards) in world.pods.iter_mut().zip([8, 1, 1, 1, 1]) {
        pods.cards = cards;
    }
    let first = |world: &World| {
        let waves = assign(&world.spec.rollout, &world.seen(), &world.status);
        waves.into_iter().filter(|(_, wave)| *wave == 1).map(|(key, _)| key).collect::<BTreeSet<_>>()
    };
    assert_eq!(first(&world).len(), 3);
    world.spec.rollout.percent_of = PercentOf::Cards;
    let by_cards = first(&world);
    assert!(by_cards.contains(&key(0)), "the others have four of twelve cards: {by_cards:?}");
    world.pods.iter_mut().for_each(|pods| pods.cards = 0);
    assert_eq!(assign(&world.spec.rollout, &world.seen(), &world.status).len(), 5, "each is in a wave");
}

#[test]
fn another_ratio_is_a_rollout_of_its_own() {
    let mut world = World::new(4, vec![named(&[0]), named(&[1, 2]), percent(100)]);
    world.ticks(60);
    assert_eq!(world.status.phase, Phase::Complete);
    let with = |world: &World, id: &str| {
        let found = (0..world.pods.len()).filter(|n| world.pods[*n].conversion.as_deref() == Some(id));
        found.collect::<Vec<_>>()
    };
    assert_eq!(with(&world, "1").len(), 4);
    world.edit(|spec| spec.convert.cores_per_card = Cores(50));
    world.tick();
    assert_eq!(
        (with(&world, "2"), world.status.wave, world.status.phase),
        (vec![0], Some(1), Phase::Running)
    );
    assert_eq!(world.events.last().unwrap(), "ConversionChanged");
    world.ticks(60);
    assert_eq!((with(&world, "2").len(), world.status.phase), (4, Phase::Complete));
    assert_eq!(world.status.conversions.len(), 1, "the former ratio is forgotten once nothing has it");

    // The second wave does not work with the next ratio: it goes back to the one that it had.
    world.pods[2].breaks_with = Some("3".into());
    world.edit(|spec| spec.convert.cores_per_card = Cores(25));
    world.ticks(100);
    assert_eq!(world.status.phase, Phase::Failed);
    assert_eq!((with(&world, "3"), with(&world, "2")), (vec![0], vec![1, 2, 3]));
    assert_eq!(world.status.conversions.iter().map(|one| one.id.as_str()).collect::<Vec<_>>(), ["2", "3"]);
    // With the ratio of before in the policy everything has that again.
    world.edit(|spec| spec.convert.cores_per_card = Cores(50));
    world.ticks(100);
    assert_eq!((with(&world, "2").len(), world.status.phase), (4, Phase::Complete));
    world.edit(|spec| spec.rollout.direction = Direction::Rollback);
    world.ticks(60);
    assert_eq!((world.labelled().len(), world.status.phase), (0, Phase::Idle));
}

#[test]
fn a_ratio_that_changes_in_the_middle_begins_again_and_no_workload_is_left_out() {
    let mut world = World::new(3, vec![named(&[0]), named(&[1]), percent(100)]);
    world.ticks(9);
    assert_eq!((world.status.wave, world.labelled()), (Some(2), [0, 1].into()));
    world.edit(|spec| spec.convert.cores_per_card = Cores(50));
    world.ticks(60);
    assert_eq!(world.status.phase, Phase::Complete);
    assert!(world.pods.iter().all(|pods| pods.conversion.as_deref() == Some("2")));
}

#[test]
fn a_label_that_another_writer_removes_is_set_three_times_and_no_more() {
    let mut world = World::new(2, vec![named(&[0]), percent(100)]);
    let mut converted = 0;
    for _ in 0..200 {
        let decision = world.tick();
        converted += decision
            .actions
            .iter()
            .filter(|action| matches!(action, Action::Convert(k, _) if *k == key(0)))
            .count();
        // A GitOps controller that replaces the object.
        (world.pods[0].labelled, world.pods[0].conversion) = (false, None);
    }
    assert_eq!(converted, 3);
    let stalled = world.tick().stalled.unwrap();
    assert!(stalled.contains("its label gpu-migrate.io/convert was removed 3 times"), "{stalled}");
    world.edit(|_| ());
    world.ticks(100);
    assert_eq!(
        (world.status.phase, world.labelled().len()),
        (Phase::Complete, 2),
        "tried again once told to"
    );
}

#[test]
fn a_failed_wave_is_retried_by_a_command() {
    let mut world = World::new(1, vec![percent(100)]);
    world.pods[0].breaks = true;
    world.ticks(60);
    assert_eq!(world.status.phase, Phase::Failed);
    world.pods[0].breaks = false;
    let command = RolloutCommand { at: "2026-01-01T00:00:00Z".into(), ..RolloutCommand::default() };
    world.status.command = Some(command);
    world.ticks(30);
    assert_eq!(world.status.phase, Phase::Complete);
}

#[test]
fn pods_that_were_not_converted_do_not_count_as_ready() {
    let mut world = World::new(1, vec![percent(100)]);
    world.ticks(4);
    let mut seen = world.seen();
    seen[0].unconverted = 2;
    let decision = step(Input {
        spec: &world.spec,
        generation: 1,
        status: &world.status,
        seen: &seen,
        answer: None,
        now: world.now,
    });
    assert!(decision.message.contains("soaking is interrupted"), "{}", decision.message);
    assert_eq!(
        decision.status.workloads[0].reason.as_deref(),
        Some("pods not converted: 2; is the webhook running?")
    );
}

#[test]
fn a_soak_that_lasts_longer_than_the_deadline_is_looked_at_throughout() {
    let mut world = World::new(2, vec![named(&[0]), percent(100)]);
    world.spec.rollout.gate.soak_seconds = 3600;
    world.ticks(4);
    let decision = world.tick();
    assert_eq!(decision.requeue_after, Some(std::time::Duration::from_secs(5)), "{}", decision.message);
    world.ticks(100);
    // A scale-up: one pod more, which needs a while.
    world.pods[0].left = 6;
    let decision = world.tick();
    assert_eq!(
        (world.status.phase, decision.message.as_str()),
        (
            Phase::Gating,
            "wave 1 of 2: soaking is interrupted, 1 of 1 workload not ready; first Deployment/ns/w0"
        )
    );
    world.ticks(10);
    assert_eq!((world.status.phase, world.labelled()), (Phase::Gating, [0].into()), "a blip is no failure");
    world.pods[0].breaks = true;
    world.ticks(25);
    assert_eq!(
        (world.status.phase, world.labelled()),
        (Phase::Failed, [].into()),
        "a crash is seen in the soak"
    );
}

#[test]
fn time_in_which_a_workload_is_not_ready_does_not_count_as_soak() {
    let mut world = World::new(1, vec![percent(100)]);
    world.ticks(4);
    assert_eq!(world.status.phase, Phase::Gating);
    // Scaled up and down again and again: ready at every second look.
    let mut looks = 0;
    while world.status.phase == Phase::Gating {
        if looks % 2 == 0 {
            world.pods[0].left = 2;
        }
        world.tick();
        looks += 1;
    }
    assert_eq!(world.status.phase, Phase::Complete, "no failure");
    assert!((6..=10).contains(&looks), "half of the time counts for the 20 s: {looks} looks of 5 s");
}

#[test]
fn a_container_that_restarts_during_the_soak_fails_the_wave_at_once() {
    let mut world = World::new(1, vec![percent(100)]);
    world.spec.rollout.gate.soak_seconds = 3600;
    world.ticks(50);
    let mut seen = world.seen();
    seen[0].restarts = 4;
    let Decision { message, actions, .. } = step(Input { seen: &seen, ..world.input() });
    assert_eq!(actions, [Action::RollBack(key(0), None)], "{message}");
}

#[test]
fn a_wave_that_names_nothing_usable_waits_and_says_so() {
    let typo = || Wave { percent: None, workloads: Some(vec!["Deployment/ns/cannary".into()]) };
    let mut world = World::new(3, vec![typo(), percent(100)]);
    world.ticks(100);
    let decision = world.tick();
    assert_eq!(
        (world.status.phase, world.status.wave, world.labelled()),
        (Phase::Running, Some(1), [].into())
    );
    let expected = "wave 1 of 2 waits: Deployment/ns/cannary does not exist in the project or requests no cards; correct spec.rollout.waves";
    assert_eq!((decision.message.as_str(), decision.stalled.as_deref()), (expected, Some(expected)));
    world.edit(|spec| spec.rollout.waves[0] = named(&[0]));
    world.ticks(60);
    assert_eq!((world.status.phase, world.labelled().len()), (Phase::Complete, 3));
}

#[test]
fn a_wave_with_one_misspelt_name_changes_nothing_before_it_is_corrected() {
    let mut wave = named(&[1, 2]);
    wave.workloads.as_mut().unwrap().push("Deployment/ns/cannary".into());
    let mut world = World::new(3, vec![wave, percent(100)]);
    let decision = world.tick();
    assert_eq!((decision.actions.as_slice(), world.status.wave), (&[][..], Some(1)));
    assert!(decision.stalled.unwrap().contains("Deployment/ns/cannary does not exist"));
    world.ticks(100);
    assert_eq!((world.status.phase, world.labelled()), (Phase::Running, [].into()));
    world.edit(|spec| spec.rollout.waves[0] = named(&[1, 2]));
    world.ticks(60);
    assert_eq!((world.status.phase, world.labelled().len()), (Phase::Complete, 3));
}

#[test]
fn a_canary_that_shows_nothing_does_not_let_the_next_wave_begin() {
    let look = |change: fn(&mut ObservedWorkload), wave: Wave| {
        let mut world = World::new(3, vec![wave, percent(100)]);
        for _ in 0..60 {
            world.now += SignedDuration::from_secs(5);
            let mut seen = world.seen();
            seen.iter_mut().for_each(change);
            let decision = step(Input { seen: &seen, ..world.input() });
            world.status = decision.status.clone();
            decision.actions.iter().for_each(|action| world.act(action));
            world.pods.iter_mut().for_each(|pods| pods.left = 0);
            if decision.stalled.is_some() {
                return (world.status.wave, decision.message);
            }
        }
        panic!("it does not wait: {:?}", world.status);
    };
    let (wave, why) = look(|one| one.shared_pods = 0, named(&[0]));
    assert_eq!(wave, Some(1));
    assert!(
        why.ends_with(
            "no converted pod runs, so there is nothing to judge: scale a workload up or name another one"
        ),
        "{why}"
    );
    let (_, why) = look(|one| one.shared_pods = 0, percent(0));
    assert!(why.contains("it has no workloads"), "{why}");
    let by_hand = |one: &mut ObservedWorkload| {
        one.management = Management::Manual;
        one.note = Some("paused".into());
    };
    let (_, why) = look(by_hand, named(&[0]));
    assert!(why.contains("Deployment/ns/w0 is not restarted by the operator (paused)"), "{why}");
    let (_, why) = look(by_hand, percent(50));
    assert!(why.contains("the project has no workload that the operator can restart"), "{why}");
}

#[test]
fn a_workload_that_is_not_ready_before_is_left_out_until_it_is() {
    let mut world = World::new(3, vec![named(&[0, 1]), percent(100)]);
    world.pods[0].left = u32::MAX;
    world.ticks(4);
    assert_eq!(world.labelled(), [1].into(), "it does not use up the room of another");
    let decision = world.tick();
    assert!(decision.message.contains("waiting for Deployment/ns/w0"), "{}", decision.message);
    world.ticks(60);
    let message = world.tick().message;
    assert_eq!((world.status.phase, world.labelled()), (Phase::Complete, [1, 2].into()));
    assert_eq!(message, "all waves are complete; not converted, because not ready: Deployment/ns/w0");
    assert_eq!(world.status.workloads[0].state, WorkloadState::Skipped);
    world.pods[0].left = 0;
    world.ticks(60);
    assert_eq!(
        (world.status.phase, world.labelled().len()),
        (Phase::Complete, 3),
        "it is converted once it is ready"
    );
    // Where it is the only one, nothing was learned.
    let mut world = World::new(2, vec![named(&[0]), percent(100)]);
    world.pods[0].left = u32::MAX;
    world.ticks(60);
    let decision = world.tick();
    assert_eq!((world.status.wave, world.labelled()), (Some(1), [].into()));
    assert!(
        decision
            .stalled
            .unwrap()
            .contains("none of its workloads is ready to be converted; first Deployment/ns/w0")
    );
    world.pods[0].left = 0;
    world.ticks(60);
    assert_eq!((world.status.phase, world.labelled().len()), (Phase::Complete, 2));
}

#[test]
fn a_workload_that_waits_for_a_card_moves_where_the_policy_says_so() {
    let mut world = World::new(2, vec![percent(100)]);
    world.spec.rollout.on_unready = OnUnready::Convert;
    world.pods[0].left = u32::MAX;
    world.ticks(60);
    assert_eq!((world.status.phase, world.labelled().len()), (Phase::Complete, 2));
}

#[test]
fn a_workload_that_was_not_ready_before_does_not_hold_up_the_rollback() {
    let mut world = World::new(3, vec![percent(100)]);
    world.pods[0].left = u32::MAX;
    world.pods[1].breaks = true;
    let ticks = (0..200).find(|_| world.tick().status.phase == Phase::Failed);
    assert!(ticks.is_some_and(|ticks| ticks < 40), "{ticks:?} {:?}", world.status);
    world.edit(|spec| spec.rollout.direction = Direction::Rollback);
    world.ticks(20);
    assert_eq!(world.status.phase, Phase::Idle, "{:?}", world.status);
    assert_eq!(
        world.events.last().unwrap(),
        "RollbackIncomplete",
        "it is not ready, so not everything is back"
    );
}

#[test]
fn a_rollback_goes_at_once_from_what_is_broken_and_is_paced_for_the_rest() {
    let mut world = World::new(5, vec![percent(100)]);
    world.spec.rollout.max_unavailable = 5;
    world.ticks(3);
    world.spec.rollout.max_unavailable = 1;
    world.pods[3].breaks = true;
    world.pods[4].breaks = true;
    let first = (0..60).map(|_| world.tick()).find(|decision| !decision.actions.is_empty()).unwrap();
    assert_eq!(first.actions, [Action::RollBack(key(3), None), Action::RollBack(key(4), None)]);
    assert_eq!(world.tick().actions, [], "they are restarting");
    world.ticks(60);
    assert_eq!((world.status.phase, world.labelled()), (Phase::Failed, [].into()));
}

#[test]
fn one_workload_that_does_not_get_ready_again_delays_the_rollback_once_and_is_named() {
    let mut world = World::new(6, vec![percent(100)]);
    world.ticks(100);
    world.edit(|spec| spec.rollout.direction = Direction::Rollback);
    let stuck = world.tick().actions;
    world.pods.iter_mut().find(|pods| Action::RollBack(pods.key.clone(), None) == stuck[0]).unwrap().left =
        u32::MAX;
    let ticks = (0..200).find(|_| world.tick().status.phase == Phase::Idle).unwrap();
    assert!(ticks < 20 + 6 * 4, "{ticks}");
    assert!(world.labelled().is_empty());
    let message = world.tick();
    let name = world.pods.iter().find(|pods| pods.left > 0).unwrap().key.to_string();
    assert!(message.stalled.unwrap().contains(&format!("not ready: {name}")));
    let of = |state| world.status.workloads.iter().filter(|one| one.state == state).count();
    assert_eq!((of(WorkloadState::NotReady), of(WorkloadState::RolledBack)), (1, 5));
}

#[test]
fn undo_now_does_not_wait_for_one_before_the_next() {
    let mut world = World::new(6, vec![percent(100)]);
    world.ticks(100);
    world.edit(|spec| spec.rollout.direction = Direction::RollbackNow);
    world.tick();
    assert!(world.labelled().is_empty());
    world.ticks(4);
    assert_eq!((world.status.phase, world.events.last().unwrap().as_str()), (Phase::Idle, "RolledBack"));
}

#[test]
fn the_event_of_a_rollback_does_not_call_back_what_is_not() {
    let mut world = World::new(2, vec![percent(100)]);
    world.ticks(60);
    world.edit(|spec| spec.rollout.direction = Direction::RollbackNow);
    let mut seen = world.seen();
    seen[0].management = Management::Manual;
    seen[0].note = Some("OnDelete".into());
    let first = step(Input { seen: &seen, ..world.input() });
    assert_eq!(first.actions.len(), 2, "the label goes from all");
    world.status = first.status;
    seen.iter_mut().for_each(|one| one.labelled = false);
    seen[1].shared_pods = 0;
    let decision = step(Input { seen: &seen, ..world.input() });
    let (reason, message) = decision.event.unwrap();
    assert_eq!(reason, "RollbackIncomplete");
    assert!(
        message.contains("Deployment/ns/w0 has shared pods until they are deleted or end: 1 (OnDelete)"),
        "{message}"
    );
}

#[test]
fn the_pod_that_blocks_an_ordered_rollback_is_deleted() {
    let mut world = World::new(1, vec![percent(100)]);
    world.ticks(60);
    world.edit(|spec| spec.rollout.direction = Direction::Rollback);
    world.tick();
    let mut seen = world.seen();
    let pod = BlockingPod { name: "w0-2".into(), uid: "u".into() };
    (seen[0].blocking, seen[0].rolled_out) = (vec![pod.clone()], false);
    let decision = step(Input { seen: &seen, ..world.input() });
    assert_eq!(decision.actions, [Action::DeletePod(key(0), pod)]);
    assert!(decision.message.contains("kubectl delete pod -n ns w0-2"), "{}", decision.message);
}

#[test]
fn a_new_workload_that_no_wave_reaches_is_named_in_a_complete_project() {
    let mut world = World::new(2, vec![named(&[0, 1])]);
    world.ticks(60);
    assert_eq!(world.tick().message, "all waves are complete");
    world.happen(&Happening::Appear);
    assert_eq!(
        world.tick().message,
        "all waves are complete; in no wave of spec.rollout.waves: Deployment/ns/w3"
    );
}

#[test]
fn the_status_lists_all_that_is_restarted_and_some_of_the_rest() {
    let world = World::new(300, vec![percent(100)]);
    let mut seen = world.seen();
    seen.extend((0..20_000).map(|n| ObservedWorkload {
        key: Key { kind: "Pod".into(), namespace: "ns".into(), name: format!("bare-{n}") },
        management: Management::Unmanaged,
        ..ObservedWorkload::default()
    }));
    let status = step(Input { seen: &seen, ..world.input() }).status;
    assert_eq!((status.workloads.len(), status.unlisted), (400, 19_900));
}

#[test]
fn what_is_not_enforced_is_not_touched() {
    for mode in [MigrationMode::Off, MigrationMode::Audit] {
        let mut world = World::new(3, vec![percent(100)]);
        world.spec.mode = mode;
        world.ticks(10);
        assert_eq!((world.status.phase, world.labelled().len()), (Phase::Idle, 0));
    }
    let mut world = World::new(3, vec![]);
    world.ticks(10);
    assert_eq!((world.status.phase, world.labelled().len()), (Phase::Idle, 0));
}

#[test]
fn a_percentage_is_of_workloads_and_rounds_up() {
    let seen = World::new(10, vec![]).seen();
    let of = |waves: &[u32]| {
        let waves = waves.iter().map(|p| percent(*p)).collect::<Vec<_>>();
        let rollout = Rollout { waves: waves.clone(), ..Rollout::default() };
        let assigned = assign(&rollout, &seen, &Default::default());
        (1..=waves.len() as u32)
            .map(|wave| assigned.values().filter(|w| **w == wave).count())
            .collect::<Vec<_>>()
    };
    assert_eq!(of(&[10, 50, 100]), [1, 4, 5]);
    assert_eq!(of(&[1]), [1]);
    assert_eq!(of(&[0, 33]), [0, 4]);
    assert_eq!(of(&[50, 20]), [5, 0], "a smaller number later reverts nothing");
}

#[test]
fn a_key_reads_back() {
    assert_eq!(key(3).to_string().parse(), Ok(key(3)));
    for bad in ["", "a", "a/b", "a/b/c/d", "a//c"] {
        assert!(bad.parse::<Key>().unwrap_err().contains("expected Kind/namespace/name"), "{bad}");
    }
}

/// What may happen between two ticks.
#[derive(Clone, Debug)]
enum Happening {
    Tick,
    /// The operator dies after the status is written and some actions are done.
    CrashAfter(usize),
    /// It dies before the status is written, its actions all done.
    LostStatus,
    Break(usize),
    Mend(usize),
    Pause(bool),
    Appear,
    Vanish(usize),
    Touch,
    Ratio(u32),
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        20 => Just(Happening::Tick),
        2 => (0..3usize).prop_map(Happening::CrashAfter),
        1 => Just(Happening::LostStatus),
        1 => (0..8usize).prop_map(Happening::Break),
        2 => (0..8usize).prop_map(Happening::Mend),
        1 => any::<bool>().prop_map(Happening::Pause),
        1 => Just(Happening::Appear),
        1 => (0..8usize).prop_map(Happening::Vanish),
        1 => Just(Happening::Touch),
        1 => (1..4u32).prop_map(|quarters| Happening::Ratio(quarters * 25)),
    ]
}

impl World {
    fn happen(&mut self, happening: &Happening) {
        let before = (self.status.clone(), self.labelled());
        match happening {
            Happening::Tick => drop(self.tick()),
            Happening::CrashAfter(done) => {
                let decision = self.decide();
                self.status = decision.status.clone();
                decision.actions.iter().take(*done).for_each(|action| self.act(action));
            }
            Happening::LostStatus => {
                let decision = self.decide();
                decision.actions.iter().for_each(|action| self.act(action));
            }
            Happening::Break(n) | Happening::Mend(n) => {
                if let Some(pods) = self.pods.get_mut(*n) {
                    pods.breaks = matches!(happening, Happening::Break(_));
                }
            }
            Happening::Pause(paused) => self.edit(|spec| spec.rollout.paused = *paused),
            Happening::Appear => {
                self.born += 1;
                self.pods.push(Pods::new(key(self.born), 1));
            }
            Happening::Vanish(n) => {
                if *n < self.pods.len() && self.pods.len() > 1 {
                    self.pods.remove(*n);
                    return;
                }
            }
            Happening::Touch => self.edit(|_| ()),
            Happening::Ratio(cores) => self.edit(|spec| spec.convert.cores_per_card = Cores(*cores)),
        }
        self.check(&before.0, &before.1, happening);
    }

    fn check(
        &self,
        before: &gpu_migrate_model::crd::GPUMigrationStatus,
        labelled_before: &BTreeSet<usize>,
        what: &Happening,
    ) {
        let now = self.labelled();
        let newly = now.difference(labelled_before).count();
        let moving = self.pods.iter().filter(|p| p.labelled && p.left > 0).count();
        assert!(newly <= self.spec.rollout.max_unavailable as usize, "{what:?}: {newly} at once");
        if newly > 0 {
            assert!(moving <= self.spec.rollout.max_unavailable as usize, "{what:?}: {moving} under way");
            assert!(!self.spec.rollout.paused, "nothing is begun while paused");
        }
        // Workloads of earlier waves are not rolled back when a later one fails.
        if before.phase == Phase::RollingBack && self.status.phase == Phase::RollingBack {
            assert_eq!(before.wave, self.status.wave);
        }
        // A failed wave left nothing behind of its own.
        if self.status.phase == Phase::Failed && before.phase == Phase::RollingBack {
            let waves = assign(&self.spec.rollout, &self.seen(), &self.status);
            let target = self.status.conversions.last().map(|one| &one.id);
            for pods in self.pods.iter().filter(|p| p.labelled && p.conversion.as_ref() == target) {
                assert_ne!(waves.get(&pods.key), self.status.wave.as_ref(), "{} is still labelled", pods.key);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Crashes, lost writes, broken workloads, pauses, workloads that come and go: never more than allowed at once,
    /// never something begun while paused, never a failed wave left half done; and when the trouble ends, it ends.
    #[test]
    fn random_histories_keep_the_rules(
        workloads in 1..8usize,
        waves in proptest::collection::vec(1..=100u32, 1..4),
        at_once in 1..4u32,
        history in proptest::collection::vec(happening(), 0..120),
    ) {
        let mut waves = waves;
        waves.sort_unstable();
        waves.push(100);
        let mut world = World::new(workloads, waves.into_iter().map(percent).collect());
        world.spec.rollout.max_unavailable = at_once;
        for what in &history {
            world.happen(what);
        }
        for pods in &mut world.pods {
            pods.breaks = false;
        }
        world.edit(|spec| spec.rollout.paused = false);
        // A wave that is being taken back ends as failed first; one more edit begins it again.
        for _ in 0..2 {
            world.ticks(400);
            world.edit(|_| ());
        }
        world.ticks(400);
        prop_assert_eq!(world.status.phase, Phase::Complete);
        prop_assert!(world.pods.iter().all(|pods| pods.labelled));
        let target = world.status.conversions.last().unwrap();
        prop_assert_eq!(target.value().unwrap(), world.spec.convert.clone());
        prop_assert!(world.pods.iter().all(|pods| pods.conversion.as_ref() == Some(&target.id)));
    }

    /// A wave does not start before every workload of the waves before it is converted.
    #[test]
    fn waves_run_in_order(workloads in 1..8usize, first in 1..100u32, at_once in 1..4u32) {
        let mut world = World::new(workloads, vec![percent(first), percent(100)]);
        world.spec.rollout.max_unavailable = at_once;
        let waves = assign(&world.spec.rollout, &world.seen(), &world.status);
        for _ in 0..200 {
            let before = world.seen();
            let decision = world.tick();
            for action in &decision.actions {
                let Action::Convert(converted, _) = action else { continue };
                let behind = before.iter().filter(|one| waves[&one.key] < waves[converted]);
                // `before` is from before this tick's five seconds; what is still under way has one tick left at most.
                prop_assert!(behind.clone().all(|one| one.labelled), "{converted} before an earlier wave was done");
            }
        }
        prop_assert_eq!(world.status.phase, Phase::Complete);
    }
}
