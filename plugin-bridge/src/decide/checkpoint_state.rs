//! Whether it is known what was allocated before this process started, and how far the kubelet checkpoint can be trusted since.

use super::Millis;
use super::grants::GrantId;

/// Nothing is allocated before [`Startup::Ready`].
///
/// ```text
///                       checkpoint read
///  ┌─────────────────┐ ─────────────────────────────────────────────────────► ┌───────┐
///  │ NotRead         │   no file, and the kubelet quiet for `grace`           │       │
///  └────────┬────────┘ ─────────────────────────────────────────────────────► │       │
///           │ file unreadable, or our own record lost                         │ Ready │
///  ┌────────▼────────┐  read    ┌──────────────────┐  settled            ───► │       │
///  │ Lost            │ ───────► │ ReadAfterLoss    │                          │       │
///  └─────────────────┘          └──────────────────┘                          └───────┘
/// ```
///
/// From each state on the left, a pod-resources list leads to `Ready` too once the node is settled. A pod that was deleted with force
/// is in no source, and its containers may still run. The node is settled when the API has listed its pods and cgroups show no other;
/// where cgroups cannot be read, `grace` after the first source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Startup {
    Pending {
        file: FileState,
        /// The file was looked for, and there was none, first at this time.
        missing_since: Option<Millis>,
        /// When the first source was read that says what was allocated before.
        first_source: Option<Millis>,
    },
    Ready,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileState {
    NotRead,
    Lost,
    ReadAfterLoss,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct CheckpointState {
    startup: Startup,
    /// See [`Settings`](super::Settings).
    grace: Millis,
    /// The file on disk is truncated or malformed: what it does not list means nothing.
    pub(super) unreadable: bool,
    /// When the kubelet last started without its checkpoint, the file was last found unreadable, or was first read after it had been
    /// missing. What was allocated up to then may have been in the one before, and no later checkpoint says so.
    pub(super) lost_at: Option<Millis>,
    /// When the kubelet was last seen to restart, until its checkpoint has been read after that.
    restarted_at: Option<Millis>,
    /// Grants up to this one may be listed by the version that was read last.
    pub(super) last_grant: GrantId,
}

impl CheckpointState {
    pub(super) const fn new(grace: Millis) -> Self {
        Self {
            startup: Startup::Pending { file: FileState::NotRead, missing_since: None, first_source: None },
            grace,
            unreadable: false,
            lost_at: None,
            restarted_at: None,
            last_grant: GrantId(0),
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        self.startup == Startup::Ready
    }

    pub(super) fn kubelet_started(&mut self, checkpoint_readable: bool, at: Millis) {
        if checkpoint_readable {
            self.restarted_at = Some(at);
        } else {
            self.lost_at = Some(at);
        }
    }

    /// Whether a grant of this time was made before the kubelet restarted from the checkpoint that is being read.
    pub(super) fn predates_restart(&self, since: Millis) -> bool {
        self.restarted_at.is_some_and(|at| since < at)
    }

    /// When the kubelet restarted, once: its checkpoint has been read now.
    pub(super) fn take_restart(&mut self) -> Option<Millis> {
        self.restarted_at.take()
    }

    pub(super) fn found_missing(&mut self, now: Millis) {
        if let Startup::Pending { missing_since, .. } = &mut self.startup {
            missing_since.get_or_insert(now);
        }
    }

    /// What was allocated before is not known, and a source that said so is lost.
    pub(super) const fn is_lost(&self) -> bool {
        matches!(self.startup, Startup::Pending { file: FileState::Lost | FileState::ReadAfterLoss, .. })
    }

    /// A process that starts now, and finds a checkpoint that was written meanwhile, would not see that something is missing.
    pub(super) const fn is_to_be_told(&self) -> bool {
        self.is_lost() || matches!(self.startup, Startup::Pending { missing_since: Some(_), .. })
    }

    pub(super) fn found_unreadable(&mut self, now: Millis) {
        self.unreadable = true;
        self.lost_at = Some(now);
        self.source_lost();
    }

    /// What earlier processes wrote down, or the kubelet did, is lost: a later version of it does not say what is on the cards.
    pub(super) fn source_lost(&mut self) {
        if let Startup::Pending { file: file @ FileState::NotRead, .. } = &mut self.startup {
            *file = FileState::Lost;
        }
    }

    /// The checkpoint was read. Whether that made this ready.
    pub(super) fn found_readable(&mut self, now: Millis, settled: Option<bool>) -> bool {
        self.unreadable = false;
        let Startup::Pending { file, missing_since, .. } = &mut self.startup else { return false };
        if missing_since.is_some() {
            self.lost_at = Some(now);
        }
        if *file == FileState::NotRead {
            self.startup = Startup::Ready;
            return true;
        }
        *file = FileState::ReadAfterLoss;
        self.source_read(now, settled)
    }

    /// A source that lists allocations was read at this time. `settled`: whether all pods with processes are known, where that can be
    /// asked. Whether that made this ready.
    pub(super) fn source_read(&mut self, at: Millis, settled: Option<bool>) -> bool {
        let Startup::Pending { first_source, .. } = &mut self.startup else { return false };
        let first = *first_source.get_or_insert(at);
        self.ready_if(settled.unwrap_or(at.saturating_sub(first) >= self.grace))
    }

    /// Time has passed. Whether that made this ready.
    pub(super) fn tick(&mut self, now: Millis, settled: Option<bool>) -> bool {
        let Startup::Pending { file, missing_since, .. } = self.startup else { return false };
        if file == FileState::ReadAfterLoss && self.source_read(now, settled) {
            return true;
        }
        // Neither a file nor a source that answers: a kubelet that never allocated anything.
        let is_quiet = missing_since.is_some_and(|since| now.saturating_sub(since) >= self.grace);
        self.ready_if(is_quiet && settled != Some(false))
    }

    fn ready_if(&mut self, known: bool) -> bool {
        if known {
            self.startup = Startup::Ready;
        }
        known
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new() -> CheckpointState {
        CheckpointState::new(30)
    }

    #[test]
    fn a_readable_checkpoint_is_enough() {
        let mut state = new();
        assert!(!state.tick(100, None));
        assert!(state.found_readable(100, None) && state.is_ready());
        state.found_unreadable(101);
        assert!(state.is_ready(), "readiness is never lost");
    }

    #[test]
    fn after_a_loss_the_containers_of_force_deleted_pods_get_time_to_end() {
        for lose in [|state: &mut CheckpointState| state.found_unreadable(1), CheckpointState::source_lost] {
            let mut state = new();
            lose(&mut state);
            assert!(!state.tick(50, None), "no source yet");
            assert!(!state.found_readable(60, None));
            assert!(!state.tick(89, None));
            assert!(state.tick(90, None));
        }
    }

    #[test]
    fn where_cgroups_can_be_read_they_decide_when_that_is() {
        let mut state = new();
        state.source_lost();
        assert!(!state.found_readable(60, Some(false)));
        assert!(!state.tick(1_000, Some(false)), "a pod that no source knows still has processes");
        assert!(state.tick(1_001, Some(true)));
        let mut state = new();
        state.source_lost();
        assert!(state.found_readable(60, Some(true)));
    }

    #[test]
    fn a_file_that_was_missing_says_nothing_of_what_was_allocated_before_it() {
        let mut state = new();
        state.found_missing(5);
        assert!(state.found_readable(7, None) && state.lost_at == Some(7));
        let mut state = new();
        assert!(state.found_readable(7, None) && state.lost_at.is_none());
    }

    #[test]
    fn without_a_file_the_grace_period_or_a_later_list_decides() {
        let mut state = new();
        state.found_missing(5);
        assert!(!state.tick(34, None));
        assert!(!state.tick(35, Some(false)));
        assert!(state.tick(35, None));
        let mut state = new();
        assert!(!state.source_read(5, None) && !state.tick(100, None));
        assert!(state.source_read(35, None));
    }
}
