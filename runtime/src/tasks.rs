//! Supervised background tasks: one that ends or panics ends the process, which is then restarted.
//!
//! A task that stopped unnoticed would leave the program answering from state that is no longer updated.

use std::borrow::Cow;
use std::collections::HashMap;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::{Id, JoinError, JoinSet};
use tokio_util::sync::CancellationToken;

/// A task ended although the program was not shutting down.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TaskEnded {
    #[error("background task ended: {0}")]
    Returned(Cow<'static, str>),
    /// It panicked; the log has the place.
    #[error("background task panicked: {name}: {message}")]
    Panicked { name: Cow<'static, str>, message: String },
}

/// Work for [`Tasks::spawn`] that is dropped where it is when `stop` is cancelled.
pub async fn until(stop: CancellationToken, work: impl Future<Output = ()>) {
    stop.run_until_cancelled(work).await;
}

/// Tasks that must not end before the program does.
#[derive(Debug)]
pub struct Tasks {
    set: JoinSet<()>,
    running: HashMap<Id, Task>,
    background: Handle,
    stop: CancellationToken,
}

#[derive(Debug)]
struct Task {
    name: Cow<'static, str>,
    /// It goes on until the process ends.
    until_exit: bool,
}

impl Tasks {
    /// None yet. `stop` asks all of them to end.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    #[must_use]
    pub fn new(stop: CancellationToken) -> Self {
        Self::with_background(stop, Handle::current())
    }

    /// With a runtime of its own for [`Tasks::spawn_background`].
    #[must_use]
    pub fn with_background(stop: CancellationToken, background: Handle) -> Self {
        Self { set: JoinSet::new(), running: HashMap::new(), background, stop }
    }

    /// The token that asks the tasks to end.
    #[must_use]
    pub fn stop(&self) -> CancellationToken {
        self.stop.clone()
    }

    /// The runtime of [`Tasks::spawn_background`].
    #[must_use]
    pub fn background(&self) -> &Handle {
        &self.background
    }

    /// Starts a task that ends when [`Tasks::stop`] is cancelled.
    pub fn spawn(
        &mut self,
        name: impl Into<Cow<'static, str>>,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        let id = self.set.spawn(task).id();
        self.running.insert(id, Task { name: name.into(), until_exit: false });
    }

    /// The same on the background runtime.
    pub fn spawn_background(
        &mut self,
        name: impl Into<Cow<'static, str>>,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        let id = self.set.spawn_on(task, &self.background).id();
        self.running.insert(id, Task { name: name.into(), until_exit: false });
    }

    /// Starts a task on the background runtime that goes on while the others shut down, until the process ends.
    pub fn spawn_until_exit(
        &mut self,
        name: impl Into<Cow<'static, str>>,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        let id = self.set.spawn_on(task, &self.background).id();
        self.running.insert(id, Task { name: name.into(), until_exit: true });
    }

    /// Waits for `shutdown`, and fails as soon as a task ends before it.
    ///
    /// # Errors
    /// [`TaskEnded`] names the task.
    pub async fn supervise(&mut self, shutdown: impl Future<Output = ()>) -> Result<(), TaskEnded> {
        tokio::select! {
            biased;
            () = shutdown => Ok(()),
            Some(ended) = self.set.join_next_with_id() => Err(self.ended(ended)),
        }
    }

    /// Asks the tasks to end and waits for them, at most `limit` long. Those that run until exit are cut last.
    pub async fn shut_down(mut self, limit: Duration) {
        self.stop.cancel();
        let ends = async {
            while self.running.values().any(|task| !task.until_exit)
                && let Some(ended) = self.set.join_next_with_id().await
            {
                if let panicked @ TaskEnded::Panicked { .. } = self.ended(ended) {
                    tracing::error!(error = %panicked, "during shutdown");
                }
            }
        };
        if tokio::time::timeout(limit, ends).await.is_err() {
            let left: Vec<_> =
                self.running.values().filter(|task| !task.until_exit).map(|task| &task.name).collect();
            tracing::warn!(tasks = ?left, ?limit, "background tasks did not end in time");
        }
    }

    /// [`Tasks::supervise`] until the stop token is cancelled, then [`Tasks::shut_down`].
    ///
    /// # Errors
    /// [`TaskEnded`] names the task that ended before.
    pub async fn run(mut self, limit: Duration) -> Result<(), TaskEnded> {
        let stop = self.stop();
        let outcome = self.supervise(stop.cancelled()).await;
        self.shut_down(limit).await;
        outcome
    }

    fn ended(&mut self, ended: Result<(Id, ()), JoinError>) -> TaskEnded {
        let id = ended.as_ref().map_or_else(JoinError::id, |(id, ())| *id);
        let name = self.running.remove(&id).map_or_else(|| "unnamed".into(), |task| task.name);
        match ended {
            Err(error) if error.is_panic() => {
                TaskEnded::Panicked { name, message: message(&*error.into_panic()) }
            }
            _ => TaskEnded::Returned(name),
        }
    }
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message").to_owned()
}

#[cfg(test)]
#[allow(clippy::panic)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_task_that_ends_or_panics_is_named_and_the_others_are_stopped() {
        let table: [(fn(), TaskEnded); 2] = [
            (|| {}, TaskEnded::Returned("watch of Pods".into())),
            (
                || panic!("index 3"),
                TaskEnded::Panicked { name: "watch of Pods".into(), message: "index 3".into() },
            ),
        ];
        for (end, expected) in table {
            let mut tasks = Tasks::new(CancellationToken::new());
            let stop = tasks.stop();
            tasks.spawn("server", stop.clone().cancelled_owned());
            tasks.spawn("watch of Pods", async move { end() });
            let ended = tasks.run(Duration::from_secs(60)).await.unwrap_err();
            assert_eq!(ended, expected);
            assert!(stop.is_cancelled());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_shutdown_waits_for_tasks_but_not_for_those_that_run_until_exit_nor_for_ever() {
        let mut tasks = Tasks::new(CancellationToken::new());
        let stop = tasks.stop();
        let slow = stop.clone();
        tasks.spawn("slow", async move {
            slow.cancelled().await;
            tokio::time::sleep(Duration::from_secs(5)).await;
        });
        tasks.spawn_until_exit("probes", std::future::pending());
        let began = tokio::time::Instant::now();
        stop.cancel();
        assert_eq!(tasks.run(Duration::from_secs(60)).await, Ok(()));
        assert_eq!(began.elapsed(), Duration::from_secs(5));

        let mut tasks = Tasks::new(CancellationToken::new());
        tasks.spawn("hangs", std::future::pending());
        let began = tokio::time::Instant::now();
        tasks.shut_down(Duration::from_secs(7)).await;
        assert_eq!(began.elapsed(), Duration::from_secs(7));
    }
}
