//! One step of the state machine.

use super::gate::{Answer, Verdict, failure, soak};
use super::{Action, Decision, Key, Management, ObservedWorkload, assign};
use gpu_migrate_model::crd::{
    Direction, GPUMigrationSpec, GPUMigrationStatus, MigrationMode, MigrationPhase as Phase, WorkloadState,
    WorkloadStatus,
};
use jiff::{SignedDuration, Timestamp};
use std::collections::BTreeMap;
use std::time::Duration;

/// Interval at which a wave in progress is reconciled.
const REQUEUE: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    pub spec: &'a GPUMigrationSpec,
    pub generation: i64,
    pub status: &'a GPUMigrationStatus,
    /// The project's workloads that request cards or are labelled.
    pub seen: &'a [ObservedWorkload],
    /// The result of the gate's query, where it was sent.
    pub answer: Answer<'a>,
    pub now: Timestamp,
}

#[must_use]
pub fn step(input: Input<'_>) -> Decision {
    let mut machine = Machine::new(input);
    machine.advance();
    machine.finish()
}

struct Machine<'a> {
    input: Input<'a>,
    waves: BTreeMap<Key, u32>,
    status: GPUMigrationStatus,
    message: String,
    actions: Vec<Action>,
    requeue_after: Option<Duration>,
    needs_query: bool,
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
            message: String::new(),
            actions: Vec::new(),
            requeue_after: None,
            needs_query: false,
            event: None,
        }
    }

    fn advance(&mut self) {
        let Input { spec, generation, .. } = self.input;
        let edited = self.status.observed_generation != Some(generation);
        self.status.observed_generation = Some(generation);
        if spec.rollout.direction == Direction::Rollback {
            return self.roll_back_project();
        }
        // A failed wave is rolled back completely, whatever the policy says meanwhile.
        // (Without a wave the whole project was rolled back, and the direction was changed to Forward since.)
        let failing = self.status.phase == Phase::RollingBack && self.status.wave.is_some();
        if failing && !self.labelled_in_wave().is_empty() {
            return self.roll_back_wave();
        }
        if spec.mode != MigrationMode::Enforce || spec.rollout.waves.is_empty() {
            return self.idle(if spec.mode == MigrationMode::Enforce {
                "no waves: pods convert as they are created"
            } else {
                "the policy is not enforced"
            });
        }
        if spec.rollout.paused {
            self.status.phase = Phase::Paused;
            self.message = format!("paused in wave {}", self.wave_number());
            return;
        }
        match self.status.phase {
            Phase::RollingBack if failing => self.roll_back_wave(),
            Phase::Failed if !edited => self.message = "a wave failed; edit the policy to retry".into(),
            Phase::Gating => self.check_gate(),
            Phase::Running => self.run(),
            Phase::Complete => self.stay_complete(),
            // The deadline of a wave restarts after a pause, a failure or a change of direction.
            Phase::Idle | Phase::Paused | Phase::Failed | Phase::RollingBack => {
                self.begin(self.status.wave.unwrap_or(0));
            }
        }
    }

    /// Begins a wave, or passes it if it has no workloads left.
    fn begin(&mut self, wave: u32) {
        self.status.wave = Some(wave);
        self.status.wave_started_at = Some(self.input.now.to_string());
        self.status.ready_at = None;
        self.status.phase = Phase::Running;
        self.event = Some(("WaveStarted", format!("{} started", self.wave_title())));
        self.run();
    }

    /// Labels workloads of the wave, at most `maxUnavailable` at a time, until all are converted.
    fn run(&mut self) {
        let rollout = &self.input.spec.rollout;
        let members = self.members();
        if members.is_empty() {
            return self.pass();
        }
        self.note_progress(&members);
        let started = self.time(|status| status.wave_started_at.as_ref());
        if let Some(why) = failure(&rollout.gate, started, self.input.now, &members) {
            return self.fail(why);
        }
        if members.iter().all(|one| one.is_converted()) {
            self.status.phase = Phase::Gating;
            self.status.ready_at = Some(self.input.now.to_string());
            return self.check_gate();
        }
        // A workload that is unavailable for another reason counts too.
        let unavailable =
            members.iter().filter(|one| !one.rolled_out || (one.labelled && !one.is_converted())).count();
        let free = (rollout.max_unavailable.max(1) as usize).saturating_sub(unavailable);
        let due = members.iter().filter(|one| !one.labelled && one.rolled_out).take(free);
        self.actions = due.map(|one| Action::Convert(one.key.clone())).collect();
        let converted = members.iter().filter(|one| one.is_converted()).count();
        self.message = format!("{}: {converted} of {} workloads converted", self.wave_title(), members.len());
        self.requeue_after = Some(REQUEUE);
    }

    /// A workload converted since the last step restarts the deadline.
    fn note_progress(&mut self, members: &[&ObservedWorkload]) {
        let was_ready = |key: &Key| {
            self.status.workloads.iter().any(|was| {
                was.state == WorkloadState::Ready
                    && (&was.kind, &was.namespace, &was.name) == (&key.kind, &key.namespace, &key.name)
            })
        };
        if members.iter().any(|one| one.is_converted() && !was_ready(&one.key)) {
            self.status.wave_started_at = Some(self.input.now.to_string());
        }
    }

    /// All workloads of the wave were ready: they must stay so for `soakSeconds`, and the query must pass.
    fn check_gate(&mut self) {
        let gate = &self.input.spec.rollout.gate;
        let members = self.members();
        let started = self.time(|status| status.wave_started_at.as_ref());
        if let Some(why) = failure(gate, started, self.input.now, &members) {
            return self.fail(why);
        }
        if !members.iter().all(|one| one.is_converted()) {
            self.status.phase = Phase::Running;
            self.status.ready_at = None;
            return self.run();
        }
        let ready = self.time(|status| status.ready_at.as_ref());
        match soak(gate, ready, self.input.now, self.input.answer) {
            Verdict::Wait { why, again } => {
                self.message = format!("{}: {why}", self.wave_title());
                self.requeue_after = Some(again);
            }
            Verdict::Query => {
                self.message = format!("{}: waiting for the gate query", self.wave_title());
                self.needs_query = true;
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
        self.message = "all waves are complete".into();
        self.event = Some(("Complete", self.message.clone()));
    }

    /// A workload created after the last wave is still converted.
    fn stay_complete(&mut self) {
        let missed = self
            .input
            .seen
            .iter()
            .filter(|one| !one.labelled)
            .filter_map(|one| self.waves.get(&one.key))
            .min();
        match missed.copied() {
            Some(wave) => self.begin(wave),
            None if (self.wave() as usize) + 1 < self.input.spec.rollout.waves.len() => {
                self.begin(self.wave() + 1);
            }
            None => self.message = "all waves are complete".into(),
        }
    }

    fn fail(&mut self, why: String) {
        self.event = Some(("WaveFailed", format!("{} is rolled back: {why}", self.wave_title())));
        self.status.phase = Phase::RollingBack;
        self.roll_back_wave();
        self.message = format!("{} failed: {why}", self.wave_title());
    }

    /// All at once: they are broken, and their controllers still replace pod by pod.
    fn roll_back_wave(&mut self) {
        let labelled = self.labelled_in_wave();
        if !labelled.is_empty() {
            self.actions = labelled.into_iter().map(Action::RollBack).collect();
            self.message = format!("{} is being rolled back", self.wave_title());
            self.requeue_after = Some(REQUEUE);
            return;
        }
        if self.members().iter().any(|one| !one.rolled_out) {
            self.message = format!(
                "{} is being rolled back: waiting for its workloads to become ready",
                self.wave_title()
            );
            self.requeue_after = Some(REQUEUE);
            return;
        }
        self.status.phase = Phase::Failed;
        self.message = format!("{} failed and was rolled back; edit the policy to retry", self.wave_title());
        self.event = Some(("WaveRolledBack", self.message.clone()));
    }

    /// Rolls the whole project back, `maxUnavailable` at a time. A workload that does not become ready delays the others by at
    /// most `readyWithinSeconds`.
    fn roll_back_project(&mut self) {
        let rollout = &self.input.spec.rollout;
        let movable = self.input.seen.iter().filter(|one| one.management == Management::Restart);
        let unavailable = movable.clone().filter(|one| !one.rolled_out && !one.labelled).count();
        let labelled = movable.filter(|one| one.labelled).collect::<Vec<_>>();
        if self.status.phase != Phase::RollingBack || self.status.wave.is_some() {
            self.status.wave_started_at = Some(self.input.now.to_string());
        }
        (self.status.wave, self.status.ready_at) = (None, None);
        let last_progress = self.time(|status| status.wave_started_at.as_ref());
        let late = self.input.now.duration_since(last_progress)
            >= SignedDuration::from_secs(rollout.gate.ready_within_seconds.into());
        // Once idle it stays so: what becomes unavailable later has other reasons.
        let was_idle = self.status.phase == Phase::Idle;
        if labelled.is_empty() && (unavailable == 0 || late || was_idle) {
            if self.status.phase == Phase::RollingBack {
                self.event = Some(("RolledBack", "every workload uses whole cards again".into()));
            }
            return self.idle("every workload uses whole cards again");
        }
        self.status.phase = Phase::RollingBack;
        let at_once = rollout.max_unavailable.max(1) as usize;
        let free = if late { at_once } else { at_once.saturating_sub(unavailable) };
        self.message = format!("rolling the project back: {} workloads left", labelled.len() + unavailable);
        self.actions = labelled.into_iter().take(free).map(|one| Action::RollBack(one.key.clone())).collect();
        if !self.actions.is_empty() {
            self.status.wave_started_at = Some(self.input.now.to_string());
        }
        self.requeue_after = Some(REQUEUE);
    }

    fn idle(&mut self, why: &str) {
        self.status.phase = Phase::Idle;
        self.message = why.into();
    }

    fn finish(mut self) -> Decision {
        let rolled_back = matches!(self.status.phase, Phase::RollingBack | Phase::Failed | Phase::Idle);
        self.status.workloads = self.input.seen.iter().map(|one| self.report(one, rolled_back)).collect();
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
            message: self.message,
            actions: self.actions,
            requeue_after: self.requeue_after,
            needs_query: self.needs_query,
            event: self.event,
        }
    }

    fn report(&self, one: &ObservedWorkload, rolled_back: bool) -> WorkloadStatus {
        let rolling_back = self.actions.contains(&Action::RollBack(one.key.clone()));
        let converting = self.actions.contains(&Action::Convert(one.key.clone()));
        let wave = self.waves.get(&one.key).copied();
        let was = self.status.workloads.iter().find(|was| {
            (&was.kind, &was.namespace, &was.name) == (&one.key.kind, &one.key.namespace, &one.key.name)
        });
        let state = match one.management {
            Management::Unmanaged => WorkloadState::Unmanaged,
            Management::Restart if rolling_back || converting => WorkloadState::Restarting,
            Management::Restart if one.is_converted() => WorkloadState::Ready,
            Management::Restart if one.labelled || !one.rolled_out => WorkloadState::Restarting,
            Management::Restart
                if rolled_back && was.is_some_and(|was| was.state != WorkloadState::Pending) =>
            {
                WorkloadState::RolledBack
            }
            Management::Restart => WorkloadState::Pending,
        };
        let reason = match one.management {
            Management::Unmanaged => {
                Some("not restarted by the operator; converts when it is recreated".to_owned())
            }
            Management::Restart if one.labelled && one.unconverted > 0 => {
                Some(format!("{} pods were not converted: is the webhook running?", one.unconverted))
            }
            Management::Restart if wave.is_none() => Some("not in any wave".to_owned()),
            Management::Restart => None,
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

    /// Counted from 1.
    fn wave_number(&self) -> String {
        format!("{} of {}", self.wave() + 1, self.input.spec.rollout.waves.len())
    }

    fn wave_title(&self) -> String {
        format!("wave {}", self.wave_number())
    }

    /// The workloads of the current wave, and those of earlier waves that are not labelled yet because they were created later.
    fn members(&self) -> Vec<&'a ObservedWorkload> {
        let wave = self.wave();
        let belongs = |one: &&ObservedWorkload| match self.waves.get(&one.key) {
            Some(own) => *own == wave || (*own < wave && !one.labelled),
            None => false,
        };
        self.input.seen.iter().filter(belongs).collect()
    }

    fn labelled_in_wave(&self) -> Vec<Key> {
        let of_wave =
            |one: &&ObservedWorkload| one.labelled && self.waves.get(&one.key) == Some(&self.wave());
        self.input.seen.iter().filter(of_wave).map(|one| one.key.clone()).collect()
    }

    /// A time of the status. One that is missing or cannot be parsed counts as now.
    fn time(&self, which: impl Fn(&GPUMigrationStatus) -> Option<&String>) -> Timestamp {
        which(&self.status).and_then(|text| text.parse().ok()).unwrap_or(self.input.now)
    }
}
