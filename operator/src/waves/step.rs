//! One step of the state machine.

use super::gate::{Answer, Verdict, broken, soak};
use super::{Action, Decision, Key, Means, Seen, assign};
use gpu_migrate_model::crd::{
    Direction, GPUMigrationSpec, GPUMigrationStatus, MigrationMode, MigrationPhase as Phase, WorkloadState,
    WorkloadStatus,
};
use jiff::{SignedDuration, Timestamp};
use std::collections::BTreeMap;
use std::time::Duration;

/// How often a wave that is under way is looked at, besides whenever something changes.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// What a step is decided from.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// The policy.
    pub spec: &'a GPUMigrationSpec,
    /// Its `metadata.generation`.
    pub generation: i64,
    /// Its status as it was read.
    pub status: &'a GPUMigrationStatus,
    /// The project's workloads that ask for cards or have been sent over.
    pub seen: &'a [Seen],
    /// The answer of the gate's query, where one was asked.
    pub answer: Answer<'a>,
    /// Now.
    pub now: Timestamp,
}

/// Decides the next step.
#[must_use]
pub fn step(input: Input<'_>) -> Decision {
    let mut machine = Machine::new(input);
    machine.turn();
    machine.finish()
}

/// A step being decided: the status to be, and what is to be done.
struct Machine<'a> {
    input: Input<'a>,
    waves: BTreeMap<Key, u32>,
    status: GPUMigrationStatus,
    why: String,
    actions: Vec<Action>,
    again: Option<Duration>,
    ask: bool,
    event: Option<(&'static str, String)>,
}

impl<'a> Machine<'a> {
    fn new(input: Input<'a>) -> Self {
        let waves = assign(&input.spec.rollout.waves, input.seen, input.status);
        let status = input.status.clone();
        Self {
            input,
            waves,
            status,
            why: String::new(),
            actions: Vec::new(),
            again: None,
            ask: false,
            event: None,
        }
    }

    fn turn(&mut self) {
        let Input { spec, generation, .. } = self.input;
        let edited = self.status.observed_generation != Some(generation);
        self.status.observed_generation = Some(generation);
        if spec.rollout.direction == Direction::Back {
            return self.back();
        }
        // A wave that failed is taken back to its end, whatever else is said meanwhile.
        // (Without a wave it was the whole project that went back, and its owner has changed his mind.)
        let failing = self.status.phase == Phase::RollingBack && self.status.wave.is_some();
        if failing && !self.sent_in_wave().is_empty() {
            return self.take_back_wave();
        }
        if spec.mode != MigrationMode::Enforce || spec.rollout.waves.is_empty() {
            return self.rest(if spec.mode == MigrationMode::Enforce {
                "no waves: pods convert as they are created"
            } else {
                "the policy is not enforced"
            });
        }
        if spec.rollout.paused {
            self.status.phase = Phase::Paused;
            self.why = format!("paused by its owner in wave {}", self.wave_number());
            return;
        }
        match self.status.phase {
            Phase::RollingBack if failing => self.take_back_wave(),
            Phase::Failed if !edited => self.why = "a wave failed; edit the policy to try again".into(),
            Phase::Gating => self.watch(),
            Phase::Running => self.run(),
            Phase::Complete => self.stay_complete(),
            // The clock of a wave starts again after a pause, a failure, or a change of direction.
            Phase::Idle | Phase::Paused | Phase::Failed | Phase::RollingBack => {
                self.begin(self.status.wave.unwrap_or(0));
            }
        }
    }

    /// Begins a wave, or goes past it if nothing is left to be done in any.
    fn begin(&mut self, wave: u32) {
        self.status.wave = Some(wave);
        self.status.wave_started_at = Some(self.input.now.to_string());
        self.status.ready_at = None;
        self.status.phase = Phase::Running;
        self.event = Some(("WaveStarted", format!("{} begins", self.wave_title())));
        self.run();
    }

    /// Sends workloads of the wave over, a few at a time, until all have arrived.
    fn run(&mut self) {
        let rollout = &self.input.spec.rollout;
        let members = self.members();
        if members.is_empty() {
            return self.pass();
        }
        self.note_progress(&members);
        let started = self.time(|status| status.wave_started_at.as_ref());
        if let Some(why) = broken(&rollout.gate, started, self.input.now, &members) {
            return self.fail(why);
        }
        if members.iter().all(|one| one.arrived()) {
            self.status.phase = Phase::Gating;
            self.status.ready_at = Some(self.input.now.to_string());
            return self.watch();
        }
        // A workload that is unsettled for another reason counts too: two at a time is two at a time.
        let moving = members.iter().filter(|one| !one.settled || (one.sent && !one.arrived())).count();
        let room = (rollout.max_unavailable.max(1) as usize).saturating_sub(moving);
        let due = members.iter().filter(|one| !one.sent && one.settled).take(room);
        self.actions = due.map(|one| Action::Send(one.key.clone())).collect();
        let arrived = members.iter().filter(|one| one.arrived()).count();
        self.why = format!("{}: {arrived} of {} workloads have arrived", self.wave_title(), members.len());
        self.again = Some(LOOK_AGAIN);
    }

    /// A workload that has arrived since the last step gives the others their time again.
    fn note_progress(&mut self, members: &[&Seen]) {
        let was_ready = |key: &Key| {
            self.status.workloads.iter().any(|was| {
                was.state == WorkloadState::Ready
                    && (&was.kind, &was.namespace, &was.name) == (&key.kind, &key.namespace, &key.name)
            })
        };
        if members.iter().any(|one| one.arrived() && !was_ready(&one.key)) {
            self.status.wave_started_at = Some(self.input.now.to_string());
        }
    }

    /// All of the wave had arrived: they have to stay so for a while, and the query has to agree.
    fn watch(&mut self) {
        let gate = &self.input.spec.rollout.gate;
        let members = self.members();
        let started = self.time(|status| status.wave_started_at.as_ref());
        if let Some(why) = broken(gate, started, self.input.now, &members) {
            return self.fail(why);
        }
        if !members.iter().all(|one| one.arrived()) {
            self.status.phase = Phase::Running;
            self.status.ready_at = None;
            return self.run();
        }
        let ready = self.time(|status| status.ready_at.as_ref());
        match soak(gate, ready, self.input.now, self.input.answer) {
            Verdict::Wait { why, again } => {
                self.why = format!("{}: {why}", self.wave_title());
                self.again = Some(again);
            }
            Verdict::Ask => {
                self.why = format!("{}: the gate's query is asked", self.wave_title());
                self.ask = true;
            }
            Verdict::Fail(why) => self.fail(why),
            Verdict::Pass => self.pass(),
        }
    }

    fn pass(&mut self) {
        let next = self.wave() + 1;
        if (next as usize) < self.input.spec.rollout.waves.len() {
            return self.begin(next);
        }
        self.status.phase = Phase::Complete;
        self.why = "all waves are done".into();
        self.event = Some(("Complete", self.why.clone()));
    }

    /// A workload that came after the last wave still moves.
    fn stay_complete(&mut self) {
        let missed =
            self.input.seen.iter().filter(|one| !one.sent).filter_map(|one| self.waves.get(&one.key)).min();
        match missed.copied() {
            Some(wave) => self.begin(wave),
            None if (self.wave() as usize) + 1 < self.input.spec.rollout.waves.len() => {
                self.begin(self.wave() + 1);
            }
            None => self.why = "all waves are done".into(),
        }
    }

    fn fail(&mut self, why: String) {
        self.event = Some(("WaveFailed", format!("{} is taken back: {why}", self.wave_title())));
        self.status.phase = Phase::RollingBack;
        self.take_back_wave();
        self.why = format!("{} failed: {why}", self.wave_title());
    }

    /// All at once: they are what is broken, and their controllers still replace pod by pod.
    fn take_back_wave(&mut self) {
        let sent = self.sent_in_wave();
        if !sent.is_empty() {
            self.actions = sent.into_iter().map(Action::TakeBack).collect();
            self.why = format!("{} is taken back", self.wave_title());
            self.again = Some(LOOK_AGAIN);
            return;
        }
        if self.members().iter().any(|one| !one.settled) {
            self.why = format!("{} is taken back: waiting for its workloads to settle", self.wave_title());
            self.again = Some(LOOK_AGAIN);
            return;
        }
        self.status.phase = Phase::Failed;
        self.why = format!("{} failed and was taken back; edit the policy to try again", self.wave_title());
        self.event = Some(("WaveTakenBack", self.why.clone()));
    }

    /// Takes the whole project back, as gently as it came. Gentle is not for ever: a workload that does not settle
    /// keeps the others for as long as a wave may take, and no longer.
    fn back(&mut self) {
        let rollout = &self.input.spec.rollout;
        let movable = self.input.seen.iter().filter(|one| one.means == Means::Restart);
        let unsettled = movable.clone().filter(|one| !one.settled && !one.sent).count();
        let sent = movable.filter(|one| one.sent).collect::<Vec<_>>();
        if self.status.phase != Phase::RollingBack || self.status.wave.is_some() {
            self.status.wave_started_at = Some(self.input.now.to_string());
        }
        (self.status.wave, self.status.ready_at) = (None, None);
        let got_on = self.time(|status| status.wave_started_at.as_ref());
        let late = self.input.now.duration_since(got_on)
            >= SignedDuration::from_secs(rollout.gate.ready_within_seconds.into());
        // Once at rest it stays so: what is unsettled later has other reasons.
        let was_at_rest = self.status.phase == Phase::Idle;
        if sent.is_empty() && (unsettled == 0 || late || was_at_rest) {
            if self.status.phase == Phase::RollingBack {
                self.event = Some(("TakenBack", "every workload is back on whole cards".into()));
            }
            return self.rest("every workload is back on whole cards");
        }
        self.status.phase = Phase::RollingBack;
        let at_once = rollout.max_unavailable.max(1) as usize;
        let room = if late { at_once } else { at_once.saturating_sub(unsettled) };
        self.why = format!("the project is taken back: {} workloads left", sent.len() + unsettled);
        self.actions = sent.into_iter().take(room).map(|one| Action::TakeBack(one.key.clone())).collect();
        if !self.actions.is_empty() {
            self.status.wave_started_at = Some(self.input.now.to_string());
        }
        self.again = Some(LOOK_AGAIN);
    }

    fn rest(&mut self, why: &str) {
        self.status.phase = Phase::Idle;
        self.why = why.into();
    }

    fn finish(mut self) -> Decision {
        let taken_back = matches!(self.status.phase, Phase::RollingBack | Phase::Failed | Phase::Idle);
        self.status.workloads = self.input.seen.iter().map(|one| self.report(one, taken_back)).collect();
        self.status.workloads.sort_by(|a, b| {
            (a.wave.unwrap_or(u32::MAX), &a.kind, &a.namespace, &a.name).cmp(&(
                b.wave.unwrap_or(u32::MAX),
                &b.kind,
                &b.namespace,
                &b.name,
            ))
        });
        Decision {
            status: self.status,
            why: self.why,
            actions: self.actions,
            again: self.again,
            ask: self.ask,
            event: self.event,
        }
    }

    fn report(&self, one: &Seen, taken_back: bool) -> WorkloadStatus {
        let leaving = self.actions.contains(&Action::TakeBack(one.key.clone()));
        let coming = self.actions.contains(&Action::Send(one.key.clone()));
        let wave = self.waves.get(&one.key).copied();
        let was = self.status.workloads.iter().find(|was| {
            (&was.kind, &was.namespace, &was.name) == (&one.key.kind, &one.key.namespace, &one.key.name)
        });
        let state = match one.means {
            Means::Report => WorkloadState::Reported,
            Means::Restart if leaving || coming => WorkloadState::Restarting,
            Means::Restart if one.arrived() => WorkloadState::Ready,
            Means::Restart if one.sent || !one.settled => WorkloadState::Restarting,
            Means::Restart if taken_back && was.is_some_and(|was| was.state != WorkloadState::Pending) => {
                WorkloadState::RolledBack
            }
            Means::Restart => WorkloadState::Pending,
        };
        let reason = match one.means {
            Means::Report => Some("not ours to restart: it converts when it is created anew".to_owned()),
            Means::Restart if one.sent && one.unconverted > 0 => {
                Some(format!("{} pods were not converted: is the webhook there?", one.unconverted))
            }
            Means::Restart if wave.is_none() => Some("no wave reaches it".to_owned()),
            Means::Restart => None,
        };
        WorkloadStatus {
            kind: one.key.kind.clone(),
            namespace: one.key.namespace.clone(),
            name: one.key.name.clone(),
            wave,
            state,
            reason,
        }
    }

    fn wave(&self) -> u32 {
        self.status.wave.unwrap_or(0)
    }

    /// For people, who count from 1.
    fn wave_number(&self) -> String {
        format!("{} of {}", self.wave() + 1, self.input.spec.rollout.waves.len())
    }

    fn wave_title(&self) -> String {
        format!("wave {}", self.wave_number())
    }

    /// The workloads of the current wave, and those of earlier ones that are not over yet: a straggler that came
    /// later belongs to the wave that is under way.
    fn members(&self) -> Vec<&'a Seen> {
        let wave = self.wave();
        let belongs = |one: &&Seen| match self.waves.get(&one.key) {
            Some(own) => *own == wave || (*own < wave && !one.sent),
            None => false,
        };
        self.input.seen.iter().filter(belongs).collect()
    }

    fn sent_in_wave(&self) -> Vec<Key> {
        let of_wave = |one: &&Seen| one.sent && self.waves.get(&one.key) == Some(&self.wave());
        self.input.seen.iter().filter(of_wave).map(|one| one.key.clone()).collect()
    }

    /// A time of the status. One that is missing or cannot be read counts as now: the wave gets its time again.
    fn time(&self, which: impl Fn(&GPUMigrationStatus) -> Option<&String>) -> Timestamp {
        which(&self.status).and_then(|text| text.parse().ok()).unwrap_or(self.input.now)
    }
}
