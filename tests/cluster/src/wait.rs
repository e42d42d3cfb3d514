//! Waiting for a condition: polls, has a deadline, and reports the last observation.

use std::{future::Future, time::Duration};

use anyhow::{Result, bail};
use tokio::time::{Instant, sleep, timeout_at};

const INTERVAL: Duration = Duration::from_millis(50);
/// A poll that takes longer than this hangs.
const HANGS: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub enum Seen<T> {
    Done(T),
    /// It does not hold yet; the text describes the actual state.
    NotYet(String),
}

impl<T> Seen<T> {
    /// `Done` for `Some`, else the actual state.
    pub fn from_option(found: Option<T>, otherwise: impl FnOnce() -> String) -> Self {
        found.map_or_else(|| Self::NotYet(otherwise()), Self::Done)
    }
}

impl Seen<()> {
    /// `Done` if it holds, else the actual state.
    pub fn from_bool(holds: bool, otherwise: impl FnOnce() -> String) -> Self {
        if holds { Self::Done(()) } else { Self::NotYet(otherwise()) }
    }
}

/// Polls every 50 ms until the condition holds.
///
/// # Errors
/// At the deadline, with the condition and the last observation; a poll that hangs is ended by the deadline too. An error of a
/// poll counts as "not yet": components are killed on purpose here.
pub async fn until<T, F, Fut>(what: &str, within: Duration, mut poll: F) -> Result<T>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<Seen<T>>>,
{
    let deadline = Instant::now() + within;
    let mut last = "nothing".to_owned();
    loop {
        match timeout_at(deadline, poll()).await {
            Ok(Ok(Seen::Done(value))) => return Ok(value),
            Ok(Ok(Seen::NotYet(text))) => last = text,
            Ok(Err(error)) => last = format!("{error:#}"),
            Err(_) => {}
        }
        if Instant::now() >= deadline {
            bail!("waited {within:?} for {what}; last seen: {last}");
        }
        sleep(INTERVAL).await;
    }
}

/// Polls every 50 ms that a condition holds for the whole time.
///
/// # Errors
/// As soon as a poll fails, with its error; a poll that hangs fails 10 s after the end.
pub async fn throughout<F, Fut>(what: &str, time: Duration, mut poll: F) -> Result<()>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<()>>,
{
    let start = Instant::now();
    while start.elapsed() < time {
        let outcome = timeout_at(start + time + HANGS, poll()).await;
        if let Err(error) = outcome.map_err(Into::into).flatten() {
            bail!("{what} was to hold for {time:?}, and did for {:?}: {error:#}", start.elapsed());
        }
        sleep(INTERVAL).await;
    }
    Ok(())
}
