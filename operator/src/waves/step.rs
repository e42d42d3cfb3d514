//! One step of the state machine.

use super::gate::{self, Answer, Verdict};
use super::{Action, Decision, Key, Management, ObservedWorkload, assign, first_three, workloads};
use gpu_migrate_model::crd::{
    Direction, GPUMigrationSpec, GPUMigrationStatus, MigrationMode, MigrationPhase as Phase, OnUnready,
    RecordedConversion, WorkloadState, WorkloadStatus,
};
use gpu_migrate_model::names;
use jiff::Timestamp;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Interval at which a wave in progress is reconciled.
pub(super) const REQUEUE: Duration = Duration::from_secs(5);
/// Workloads that the operator does not restart, listed in the status. Those that it restarts are all listed: the status
/// remembers their waves.
const LISTED: usize = 100;
/// So often a workload is labelled; then something else removes the label each time.
const ATTEMPTS: u32 = 3;

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
    let target = Target::of(&input);
    // Going forward, a workload with a former conversion is one whose wave has not come yet.
    let seen = input.seen.iter().map(|one| {
        let reached = one.conversion.is_none() || target.id.is_none() || one.conversion == target.id;
        ObservedWorkload { labelled: one.labelled && reached, ..one.clone() }
    });
    let seen = seen.collect::<Vec<_>>();
    let mut machine = Machine::new(Input { seen: &seen, ..input }, input.seen, target);
    machine.advance();
    machine.finish()
}

/// What the waves convert to.
struct Target {
    /// `None` on the way back: every conversion is one to take back.
    id: Option<String>,
    conversions: Vec<RecordedConversion>,
    /// `spec.convert` has changed since the last wave.
    changed: bool,
}

impl Target {
    fn of(Input { spec, generation, status, .. }: &Input<'_>) -> Self {
        let mut conversions = status.conversions.clone();
        if spec.rollout.direction != Direction::Forward {
            return Self { id: None, conversions, changed: false };
        }
        let enforced = spec.mode == MigrationMode::Enforce && !spec.rollout.waves.is_empty();
        // A wave that has failed is taken back first.
        let takes_back = status.phase == Phase::RollingBack && status.wave.is_some();
        let former = conversions.last().map(|last| last.id.clone());
        if !enforced || spec.rollout.paused || takes_back {
            return Self { id: former, conversions, changed: false };
        }
        let known = conversions.iter().position(|one| one.value().as_ref() == Some(&spec.convert));
        let target = match known {
            Some(index) => conversions.remove(index),
            None => RecordedConversion {
                id: generation.to_string(),
                convert: serde_json::to_string(&spec.convert).unwrap_or_default(),
            },
        };
        let id = Some(target.id.clone());
        conversions.push(target);
        Self { changed: former.is_some() && former != id && status.wave.is_some(), id, conversions }
    }
}

struct Machine<'a> {
    /// With `labelled` for those alone that have the target's conversion.
    input: Input<'a>,
    /// As they are in the cluster.
    raw: &'a [ObservedWorkload],
    target: Target,
    edited: bool,
    waves: BTreeMap<Key, u32>,
    status: GPUMigrationStatus,
    message: String,
    actions: Vec<Action>,
    requeue_after: Option<Duration>,
    needs_query: bool,
    stalled: Option<String>,
    event: Option<(&'static str, String)>,
    /// Rolled back and not ready for so long that nothing waits for them any more.
    given_up: BTreeSet<Key>,
}

impl<'a> Machine<'a> {
    fn new(input: Input<'a>, raw: &'a [ObservedWorkload], target: Target) -> Self {
        let mut status = input.status.clone();
        if target.changed {
            status.wave = Some(1);
        }
        let waves = assign(&input.spec.rollout, input.seen, &status);
        let commanded = status.command.as_ref().map(|command| command.at.clone());
        let edited =
            status.observed_generation != Some(input.generation) || status.observed_command != commanded;
        (status.observed_generation, status.observed_command) = (Some(input.generation), commanded);
        Self {
            input,
            raw,
            target,
            edited,
            waves,
            status,
            message: String::new(),
            actions: Vec::new(),
            requeue_after: None,
            needs_query: false,
            stalled: None,
            event: None,
            given_up: BTreeSet::new(),
        }
    }

    fn advance(&mut self) {
        let Input { spec, .. } = self.input;
        if spec.rollout.direction != Direction::Forward {
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
        if self.target.changed {
            self.begin(1);
            self.event = Some((
                "ConversionChanged",
                format!("spec.convert has changed: {} started", self.wave_title()),
            ));
            return;
        }
        match self.status.phase {
            Phase::RollingBack if failing => self.roll_back_wave(),
            Phase::Failed if !self.edited => {
                self.message = "a wave failed; to retry edit the policy or start the rollout again".into();
            }
            Phase::Gating => self.check_gate(),
            Phase::Running => self.run(),
            Phase::Complete => self.stay_complete(),
            // The deadline of a wave restarts after a pause, a failure or a change of direction.
            Phase::Idle | Phase::Paused | Phase::Failed | Phase::RollingBack => {
                self.begin(self.status.wave.unwrap_or(1));
            }
        }
    }

    /// Begins a wave, or continues it after a pause.
    fn begin(&mut self, wave: u32) {
        let how = if self.status.phase == Phase::Paused { "resumed" } else { "started" };
        self.status.wave = Some(wave);
        self.status.wave_started_at = Some(self.input.now.to_string());
        (self.status.ready_at, self.status.unready_since, self.status.query) = (None, None, None);
        self.status.phase = Phase::Running;
        let reason = if how == "resumed" { "WaveResumed" } else { "WaveStarted" };
        self.event = Some((reason, format!("{} {how}", self.wave_title())));
        self.run();
    }

    /// Labels workloads of the wave, at most `maxUnavailable` at a time, until all are converted.
    fn run(&mut self) {
        let rollout = &self.input.spec.rollout;
        let members = self.members();
        self.note_progress(&members);
        let progress = self.time(|status| status.wave_started_at.as_ref());
        let (due, unready) = members.iter().copied().partition::<Vec<_>, _>(|one| self.can_begin(one));
        let pending = due.iter().copied().filter(|one| !one.is_converted()).collect::<Vec<_>>();
        let restarting = pending.iter().copied().filter(|one| one.labelled).collect::<Vec<_>>();
        let failure = gate::crashes(&rollout.gate, &due);
        let late = || gate::too_late(&rollout.gate, progress, self.input.now, (&restarting, members.len()));
        if let Some(why) = failure.or_else(late) {
            return self.fail(why);
        }
        self.requeue_after = Some(REQUEUE);
        let converted = due.len() - pending.len();
        self.message =
            format!("{}: {converted} of {} converted", self.wave_title(), workloads(members.len()));
        if pending.is_empty() {
            let late = gate::is_late(&rollout.gate, progress, self.input.now);
            let first = unready.iter().find(|one| self.waves.get(&one.key) == Some(&self.wave()));
            return match first.filter(|_| !late) {
                Some(first) => {
                    self.message += &format!("; waiting for {}", self.described(first));
                }
                None => self.soak_or_hold(),
            };
        }
        // Those that still restart for the conversion of before take room too, as long as they may become ready.
        let former =
            |one: &&ObservedWorkload| one.labelled && one.conversion != self.target.id && !one.rolled_out;
        let late = gate::is_late(&rollout.gate, progress, self.input.now);
        let former = self.raw.iter().filter(former).filter(|one| one.conversion.is_some() && !late).count();
        let free = (rollout.max_unavailable.max(1) as usize).saturating_sub(restarting.len() + former);
        let begin = pending.iter().filter(|one| !one.labelled).take(free).collect::<Vec<_>>();
        if let Some(why) = self.unusable_names().filter(|_| !begin.is_empty()) {
            return self.hold(&why);
        }
        let target = self.target.id.clone().unwrap_or_default();
        self.actions = begin.iter().map(|one| Action::Convert(one.key.clone(), target.clone())).collect();
        if !self.actions.is_empty() {
            self.status.wave_started_at = Some(self.input.now.to_string());
        }
    }

    /// It has begun, or it may: one that is not ready before would be taken for a failure of the conversion.
    fn can_begin(&self, one: &ObservedWorkload) -> bool {
        let ready = one.rolled_out || self.input.spec.rollout.on_unready == OnUnready::Convert;
        one.labelled || (ready && !self.is_reverted(one))
    }

    /// Its label was removed again and again, by something else than the operator.
    fn is_reverted(&self, one: &ObservedWorkload) -> bool {
        let was = self.status.workloads.iter().find(|was| is(was, &one.key));
        !one.labelled && !self.edited && was.is_some_and(|was| was.attempts >= ATTEMPTS)
    }

    /// Why a workload is not ready or not converted.
    fn described(&self, one: &ObservedWorkload) -> String {
        if !self.is_reverted(one) {
            return one.described();
        }
        format!(
            "{}: its label {} was removed {ATTEMPTS} times by another writer; let that one apply the manifest instead of replacing it, \
             then start the rollout again",
            one.key,
            names::CONVERT
        )
    }

    /// Every workload of the wave that could be converted is. The wave soaks, unless nothing could be learned from that.
    fn soak_or_hold(&mut self) {
        if let Some(why) = self.nothing_to_judge() {
            return self.hold(&why);
        }
        self.status.phase = Phase::Gating;
        (self.status.ready_at, self.status.unready_since) = (Some(self.input.now.to_string()), None);
        self.status.query = None;
        self.check_gate();
    }

    /// The wave waits for a person.
    fn hold(&mut self, why: &str) {
        self.status.phase = Phase::Running;
        (self.status.ready_at, self.status.unready_since) = (None, None);
        self.message = format!("{} waits: {why}", self.wave_title());
        self.stalled = Some(self.message.clone());
        self.requeue_after = Some(REQUEUE);
    }

    /// Why the wave must not pass although nothing has failed.
    fn nothing_to_judge(&self) -> Option<String> {
        if let Some(why) = self.unusable_names() {
            return Some(why);
        }
        let Input { spec, seen, .. } = self.input;
        if seen.iter().all(|one| one.management != Management::Restart) {
            return Some(format!(
                "the project has no workload that the operator can restart; expected in namespaces with the labels {}=true and \
                 {}={}",
                names::OPT_IN,
                names::PROJECT,
                spec.project
            ));
        }
        let (last, members) = (self.wave() as usize == spec.rollout.waves.len(), self.members());
        if last || seen.iter().any(|one| one.shared_pods > 0) {
            return None;
        }
        Some(match members.iter().find(|one| !one.labelled) {
            Some(first) => {
                format!("none of its workloads is ready to be converted; first {}", self.described(first))
            }
            None if members.is_empty() => "it has no workloads; correct spec.rollout.waves".into(),
            None => {
                "no converted pod runs, so there is nothing to judge: scale a workload up or name another one"
                    .into()
            }
        })
    }

    /// Which names of the wave the operator cannot use: nothing more of it is converted before they are corrected.
    fn unusable_names(&self) -> Option<String> {
        let wave = self.input.spec.rollout.waves.get(self.wave() as usize - 1)?;
        let unusable = wave.workloads.iter().flatten().filter_map(|name| self.unusable(name));
        let unusable = unusable.collect::<Vec<_>>();
        (!unusable.is_empty()).then(|| format!("{}; correct spec.rollout.waves", first_three(unusable)))
    }

    /// Why the operator cannot convert a workload that the policy names.
    fn unusable(&self, name: &str) -> Option<String> {
        let one = self.input.seen.iter().find(|one| one.key.to_string() == name);
        match one {
            None => Some(format!("{name} does not exist in the project or requests no cards")),
            Some(one) if one.management != Management::Restart => Some(format!(
                "{name} is not restarted by the operator{}",
                one.note.as_ref().map(|note| format!(" ({note})")).unwrap_or_default()
            )),
            Some(_) => None,
        }
    }

    /// A workload converted since the last step restarts the deadline.
    fn note_progress(&mut self, members: &[&ObservedWorkload]) {
        let was_ready = |key: &Key| self.had_state(key, WorkloadState::Ready);
        if members.iter().any(|one| one.is_converted() && !was_ready(&one.key)) {
            self.status.wave_started_at = Some(self.input.now.to_string());
        }
    }

    /// All workloads of the wave were ready: they must stay so for `soakSeconds`, and the query must pass. One that is not
    /// ready for a while, as after a scale-up or the eviction of a pod, stops the clock; `readyWithinSeconds` of it is a failure.
    fn check_gate(&mut self) {
        let gate = &self.input.spec.rollout.gate;
        let members = self.members();
        let converted = members.iter().copied().filter(|one| one.labelled).collect::<Vec<_>>();
        if let Some(why) = gate::crashes(gate, &converted) {
            return self.fail(why);
        }
        if members.iter().any(|one| !one.labelled && self.can_begin(one)) {
            self.status.phase = Phase::Running;
            self.status.wave_started_at = Some(self.input.now.to_string());
            (self.status.ready_at, self.status.unready_since) = (None, None);
            return self.run();
        }
        let unready = converted.iter().copied().filter(|one| !one.is_converted()).collect::<Vec<_>>();
        if let Some(first) = unready.first() {
            let since = self.time(|status| status.unready_since.as_ref());
            if let Some(why) = gate::too_late(gate, since, self.input.now, (&unready, members.len())) {
                return self.fail(why);
            }
            self.status.unready_since = Some(since.to_string());
            let (title, count) = (self.wave_title(), unready.len());
            self.message = format!(
                "{title}: soaking is interrupted, {count} of {} not ready; first {}",
                workloads(members.len()),
                first.described()
            );
            self.requeue_after = Some(REQUEUE);
            return;
        }
        if let Some(why) = self.nothing_to_judge() {
            return self.hold(&why);
        }
        let mut ready = self.time(|status| status.ready_at.as_ref());
        if self.status.unready_since.is_some() {
            ready += self.input.now.duration_since(self.time(|status| status.unready_since.as_ref()));
            (self.status.ready_at, self.status.unready_since) = (Some(ready.to_string()), None);
        }
        match gate::soak(gate, ready, self.input.now, &mut self.status.query, self.input.answer) {
            Verdict::Wait { why, again } => {
                self.message = format!("{}: {why}", self.wave_title());
                if matches!(self.input.answer, Some(Err(_))) {
                    self.stalled = Some(self.message.clone());
                }
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
        if next as usize <= self.input.spec.rollout.waves.len() {
            return self.begin(next);
        }
        self.status.phase = Phase::Complete;
        self.message = self.completion();
        self.event = Some(("Complete", self.message.clone()));
    }

    /// A workload that was created or became ready after its wave is still converted.
    fn stay_complete(&mut self) {
        let missed = self.input.seen.iter().filter(|one| !one.labelled && self.can_begin(one));
        match missed.filter_map(|one| self.waves.get(&one.key)).min().copied() {
            Some(wave) => self.begin(wave),
            None if (self.wave() as usize) < self.input.spec.rollout.waves.len() => {
                self.begin(self.wave() + 1);
            }
            None => self.message = self.completion(),
        }
    }

    /// That all is done, and what is not.
    fn completion(&self) -> String {
        let mut message = "all waves are complete".to_owned();
        let left = || {
            let managed = self.input.seen.iter().filter(|one| one.management == Management::Restart);
            managed.filter(|one| !one.labelled)
        };
        let (skipped, unreached) = left().partition::<Vec<_>, _>(|one| self.waves.contains_key(&one.key));
        if !skipped.is_empty() {
            let names = first_three(skipped.iter().map(|one| self.described(one)));
            message += &format!("; not converted, because not ready: {names}");
        }
        if !unreached.is_empty() {
            let names = first_three(unreached.iter().map(|one| one.key.to_string()));
            message += &format!("; in no wave of spec.rollout.waves: {names}");
        }
        message
    }

    fn fail(&mut self, why: String) {
        self.event = Some(("WaveFailed", format!("{} is rolled back: {why}", self.wave_title())));
        self.status.phase = Phase::RollingBack;
        self.status.wave_started_at = Some(self.input.now.to_string());
        self.roll_back_wave();
        self.message = format!("{} failed: {why}", self.wave_title());
    }

    fn roll_back_wave(&mut self) {
        let wave = self.wave();
        let of_wave = |one: &&ObservedWorkload| self.waves.get(&one.key) == Some(&wave);
        let members = self.input.seen.iter().filter(of_wave).collect::<Vec<_>>();
        if let Some(waiting) = self.roll_back(&members) {
            self.message = format!("{} is being rolled back: {waiting}", self.wave_title());
            return;
        }
        self.status.phase = Phase::Failed;
        self.message = format!(
            "{} failed and was rolled back; to retry edit the policy or start the rollout again",
            self.wave_title()
        );
        if let Some(rest) = self.not_back(&members) {
            self.message += &format!("; {rest}");
            self.stalled = Some(rest);
        }
        self.event = Some(("WaveRolledBack", self.message.clone()));
    }

    /// Rolls the whole project back.
    fn roll_back_project(&mut self) {
        let members = self.input.seen.iter().collect::<Vec<_>>();
        let was_idle = self.status.phase == Phase::Idle;
        let begins = self.status.phase != Phase::RollingBack || self.status.wave.is_some();
        if begins {
            self.status.wave_started_at = Some(self.input.now.to_string());
        }
        (self.status.wave, self.status.ready_at, self.status.unready_since) = (None, None, None);
        let labelled = members.iter().any(|one| one.labelled && one.management != Management::Unmanaged);
        // Once idle it stays so: what becomes unavailable later has other reasons.
        if (labelled || !was_idle)
            && let Some(waiting) = self.roll_back(&members)
        {
            self.status.phase = Phase::RollingBack;
            self.message = format!("rolling the project back: {waiting}");
            return;
        }
        let rest = self.not_back(&members);
        let message = match &rest {
            None => "every workload uses whole cards again".to_owned(),
            Some(rest) => format!("rolled back as far as the operator can; {rest}"),
        };
        if !was_idle {
            let reason = if rest.is_none() { "RolledBack" } else { "RollbackIncomplete" };
            self.event = Some((reason, message.clone()));
        }
        self.stalled = rest;
        self.idle(&message);
    }

    /// Takes the label from workloads: at once from those that are not ready, from the others `maxUnavailable` at a time. One
    /// that does not become ready delays the others by at most `readyWithinSeconds`, once. `None` at the end; else what it
    /// waits for.
    fn roll_back(&mut self, members: &[&ObservedWorkload]) -> Option<String> {
        let rollout = &self.input.spec.rollout;
        let since = self.time(|status| status.wave_started_at.as_ref());
        let late = gate::is_late(&rollout.gate, since, self.input.now);
        let waiting = members
            .iter()
            .filter(|one| !one.labelled && !one.rolled_out && one.management == Management::Restart)
            // What was not ready before, or was waited for long enough, is not waited for.
            .filter(|one| {
                [WorkloadState::Ready, WorkloadState::Restarting]
                    .iter()
                    .any(|was| self.had_state(&one.key, *was))
            })
            .collect::<Vec<_>>();
        let labelled = members.iter().filter(|one| one.labelled && one.management != Management::Unmanaged);
        let (ready, broken) = labelled.partition::<Vec<_>, _>(|one| one.is_converted());
        let at_once = match rollout.direction {
            Direction::RollbackNow => usize::MAX,
            Direction::Forward | Direction::Rollback => rollout.max_unavailable.max(1) as usize,
        };
        let room = if late { at_once } else { at_once.saturating_sub(waiting.len() + broken.len()) };
        let first = broken.first().or(waiting.first().copied()).or(ready.first()).map(|one| one.described());
        let left = workloads(waiting.len() + broken.len() + ready.len());
        let back = broken.iter().chain(ready.iter().take(room));
        let whole = rollout.direction != Direction::Forward;
        let former = |key: &Key| {
            let was = self.status.workloads.iter().find(|was| is(was, key));
            was.and_then(|was| was.former.clone()).filter(|_| !whole)
        };
        self.actions = back.map(|one| Action::RollBack(one.key.clone(), former(&one.key))).collect();
        if late {
            self.given_up = waiting.iter().map(|one| one.key.clone()).collect();
        }
        let done = self.actions.is_empty() && (waiting.is_empty() || late);
        if !self.actions.is_empty() {
            self.status.wave_started_at = Some(self.input.now.to_string());
        }
        for one in members {
            self.actions
                .extend(one.blocking.iter().map(|pod| Action::DeletePod(one.key.clone(), pod.clone())));
        }
        if done {
            return None;
        }
        self.requeue_after = Some(REQUEUE);
        Some(format!("{left} left; first {}", first.unwrap_or_default()))
    }

    /// What is not back, although there is nothing left that the operator would do.
    fn not_back(&self, members: &[&ObservedWorkload]) -> Option<String> {
        let unready = members.iter().filter(|one| !one.labelled && !one.rolled_out);
        let unready = unready.filter(|one| one.management == Management::Restart).map(|one| one.described());
        let shared =
            members.iter().filter(|one| one.shared_pods > 0 && one.management != Management::Restart);
        let shared = shared.map(|one| {
            let note = one.note.as_deref().map(|note| format!(" ({note})")).unwrap_or_default();
            format!("{} has shared pods until they are deleted or end: {}{note}", one.key, one.shared_pods)
        });
        let (unready, shared) = (unready.collect::<Vec<_>>(), shared.collect::<Vec<_>>());
        let unready = (!unready.is_empty()).then(|| format!("not ready: {}", first_three(unready)));
        let rest = unready.into_iter().chain((!shared.is_empty()).then(|| first_three(shared)));
        let rest = rest.collect::<Vec<_>>().join("; ");
        (!rest.is_empty()).then_some(rest)
    }

    fn idle(&mut self, why: &str) {
        self.status.phase = Phase::Idle;
        self.message = why.into();
    }

    fn finish(mut self) -> Decision {
        if self.stalled.is_none() && self.input.spec.rollout.direction == Direction::Forward {
            let reverted = self.input.seen.iter().find(|one| self.is_reverted(one));
            self.stalled = reverted.map(|one| self.described(one));
        }
        let mut workloads = self.input.seen.iter().map(|one| self.report(one)).collect::<Vec<_>>();
        workloads.sort_by(|a, b| {
            (a.wave.unwrap_or(u32::MAX), &a.kind, &a.namespace, &a.name).cmp(&(
                b.wave.unwrap_or(u32::MAX),
                &b.kind,
                &b.namespace,
                &b.name,
            ))
        });
        let (mut listed, all) = (0, workloads.len());
        workloads.retain(|one| {
            listed += usize::from(one.state == WorkloadState::Unmanaged);
            one.state != WorkloadState::Unmanaged || listed <= LISTED
        });
        self.status.unlisted = u32::try_from(all - workloads.len()).unwrap_or(u32::MAX);
        // What a template or the way back of one still names is kept.
        let named = self.raw.iter().filter_map(|one| one.conversion.as_deref());
        let named =
            named.chain(workloads.iter().filter_map(|one| one.former.as_deref())).collect::<BTreeSet<_>>();
        let current = self.target.id.as_deref();
        self.target
            .conversions
            .retain(|one| current == Some(one.id.as_str()) || named.contains(one.id.as_str()));
        self.status.conversions = self.target.conversions;
        self.status.workloads = workloads;
        Decision {
            status: self.status,
            message: self.message,
            actions: self.actions,
            requeue_after: self.requeue_after,
            needs_query: self.needs_query,
            stalled: self.stalled,
            event: self.event,
        }
    }

    fn report(&self, one: &ObservedWorkload) -> WorkloadStatus {
        let wave = self.waves.get(&one.key).copied();
        let was = self.status.workloads.iter().find(|was| is(was, &one.key));
        let converts =
            self.actions.iter().any(|action| matches!(action, Action::Convert(key, _) if *key == one.key));
        let attempts = was.filter(|_| !self.edited).map_or(0, |was| was.attempts) + u32::from(converts);
        let former = if converts {
            let raw = self.raw.iter().find(|raw| raw.key == one.key);
            raw.filter(|raw| raw.labelled).and_then(|raw| raw.conversion.clone())
        } else {
            // What has passed its gate is not rolled back alone any more.
            let over = self.status.phase == Phase::Complete
                || wave.zip(self.status.wave).is_some_and(|(own, now)| own < now);
            was.filter(|_| !over).and_then(|was| was.former.clone())
        };
        let state = match one.management {
            Management::Unmanaged | Management::Manual => WorkloadState::Unmanaged,
            Management::Restart => self.state(one, wave),
        };
        let reason = match one.management {
            Management::Unmanaged | Management::Manual => one.note.clone(),
            Management::Restart => match state {
                WorkloadState::Restarting | WorkloadState::Skipped | WorkloadState::NotReady => {
                    one.why_unready()
                }
                _ => wave.is_none().then(|| "not in any wave".to_owned()),
            },
        };
        WorkloadStatus {
            kind: one.key.kind.clone(),
            namespace: one.key.namespace.clone(),
            name: one.key.name.clone(),
            wave,
            state,
            reason,
            former,
            attempts,
        }
    }

    fn state(&self, one: &ObservedWorkload, wave: Option<u32>) -> WorkloadState {
        use WorkloadState::{NotReady, Pending, Ready, Restarting, RolledBack, Skipped};
        let phase = self.status.phase;
        let back = matches!(phase, Phase::RollingBack | Phase::Failed | Phase::Idle);
        let over = phase == Phase::Complete
            || wave
                .zip(self.status.wave)
                .is_some_and(|(own, current)| own < current || (own == current && phase == Phase::Gating));
        let acts = |action: &Action| matches!(action, Action::Convert(key, _) | Action::RollBack(key, _) if *key == one.key);
        let was = self.status.workloads.iter().find(|was| is(was, &one.key)).map(|was| was.state);
        match was {
            _ if self.actions.iter().any(acts) => Restarting,
            _ if one.is_converted() => Ready,
            _ if one.labelled => Restarting,
            _ if self.given_up.contains(&one.key) => NotReady,
            Some(NotReady) if back && !one.rolled_out => NotReady,
            Some(Ready | Restarting) if back && !one.rolled_out => Restarting,
            Some(was) if back && ![Pending, Skipped].contains(&was) => RolledBack,
            _ if over && !one.rolled_out => Skipped,
            _ => Pending,
        }
    }

    fn wave(&self) -> u32 {
        self.status.wave.unwrap_or(1).max(1)
    }

    fn wave_number(&self) -> String {
        format!("{} of {}", self.wave(), self.input.spec.rollout.waves.len())
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

    fn had_state(&self, key: &Key, state: WorkloadState) -> bool {
        self.status.workloads.iter().any(|was| is(was, key) && was.state == state)
    }

    /// A time of the status. One that is missing or cannot be parsed counts as now.
    fn time(&self, which: impl Fn(&GPUMigrationStatus) -> Option<&String>) -> Timestamp {
        which(&self.status).and_then(|text| text.parse().ok()).unwrap_or(self.input.now)
    }
}

fn is(was: &WorkloadStatus, key: &Key) -> bool {
    (&was.kind, &was.namespace, &was.name) == (&key.kind, &key.namespace, &key.name)
}
