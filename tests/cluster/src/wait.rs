//! Waiting for something to become true: polls, has a deadline, and says what it saw last.

use std::{
    future::Future,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};

/// One look at the world.
#[derive(Debug)]
pub enum Seen<T> {
    /// It is as awaited.
    Done(T),
    /// Not yet; the text says what is there instead.
    NotYet(String),
}

impl<T> Seen<T> {
    /// `Done` for `Some`, else what is there instead.
    pub fn from_option(found: Option<T>, otherwise: impl FnOnce() -> String) -> Self {
        found.map_or_else(|| Self::NotYet(otherwise()), Self::Done)
    }
}

impl Seen<()> {
    /// `Done` if it holds, else what is there instead.
    pub fn from_bool(holds: bool, otherwise: impl FnOnce() -> String) -> Self {
        if holds { Self::Done(()) } else { Self::NotYet(otherwise()) }
    }
}

/// Looks every 50 ms until it is done.
///
/// # Errors
/// At the deadline, with what was awaited and what the last look saw. An error of a look counts as "not yet": components
/// are killed on purpose here.
pub async fn until<T, F, Fut>(what: &str, within: Duration, mut look: F) -> Result<T>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<Seen<T>>>,
{
    let deadline = Instant::now() + within;
    loop {
        let last = match look().await {
            Ok(Seen::Done(value)) => return Ok(value),
            Ok(Seen::NotYet(text)) => text,
            Err(error) => format!("{error:#}"),
        };
        if Instant::now() >= deadline {
            bail!("waited {within:?} for {what}; last seen: {last}");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Looks every 50 ms that something stays true for the whole time.
///
/// # Errors
/// As soon as a look fails, with its error.
pub async fn throughout<F, Fut>(what: &str, time: Duration, mut look: F) -> Result<()>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<()>>,
{
    let start = Instant::now();
    while start.elapsed() < time {
        if let Err(error) = look().await {
            bail!("{what} was to hold for {time:?}, and did for {:?}: {error:#}", start.elapsed());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}
