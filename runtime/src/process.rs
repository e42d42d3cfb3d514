//! The frame of a server's `main`.

use std::num::NonZeroU8;
use std::process::ExitCode;

use anyhow::Context as _;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio_util::sync::CancellationToken;

use crate::{LogFormat, install_crypto_provider, signals};

/// Runs a server until it ends: with crypto provider and log, on a multi-threaded tokio runtime. The token that `program` gets
/// is cancelled by the first signal; a second one aborts the process with status 130.
///
/// An error is printed once on stderr, with its causes.
pub fn main<F>(log: LogFormat, program: impl FnOnce(CancellationToken) -> F) -> ExitCode
where
    F: Future<Output = anyhow::Result<()>>,
{
    on(&mut Builder::new_multi_thread(), log, program)
}

/// As [`main()`], with so many threads that answer requests instead of one for each core of the node.
pub fn main_with_workers<F>(
    log: LogFormat,
    workers: NonZeroU8,
    program: impl FnOnce(CancellationToken) -> F,
) -> ExitCode
where
    F: Future<Output = anyhow::Result<()>>,
{
    on(Builder::new_multi_thread().worker_threads(usize::from(workers.get())), log, program)
}

fn on<F>(runtime: &mut Builder, log: LogFormat, program: impl FnOnce(CancellationToken) -> F) -> ExitCode
where
    F: Future<Output = anyhow::Result<()>>,
{
    log.install();
    let runtime = runtime.enable_all().build().context("starting tokio");
    exit_code(runtime.and_then(|runtime| {
        let signals = runtime.handle().clone();
        run(runtime, &signals, program)
    }))
}

/// As [`main()`], on two runtimes: `program` has the calling thread to itself, where a request is answered without waking
/// another thread; what nothing urgent waits for goes to the background runtime, whose handle it gets.
pub fn main_with_background<F>(
    log: LogFormat,
    program: impl FnOnce(CancellationToken, Handle) -> F,
) -> ExitCode
where
    F: Future<Output = anyhow::Result<()>>,
{
    log.install();
    let run = || {
        let foreground = Builder::new_current_thread().enable_all().build().context("starting tokio")?;
        let background = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let background = background.context("starting the background runtime")?;
        let handle = background.handle();
        let outcome = run(foreground, handle, |shutdown| program(shutdown, handle.clone()));
        background.shutdown_background();
        outcome
    };
    exit_code(run())
}

fn run<F>(
    runtime: Runtime,
    signals: &Handle,
    program: impl FnOnce(CancellationToken) -> F,
) -> anyhow::Result<()>
where
    F: Future<Output = anyhow::Result<()>>,
{
    install_crypto_provider();
    let shutdown = CancellationToken::new();
    let listening = {
        let _context = signals.enter();
        signals::listen(shutdown.clone()).context("installing signal handlers")?
    };
    signals.spawn(listening);
    let outcome = runtime.block_on(async { program(shutdown).await });
    // Without waiting for blocking work, such as a host name that is still being resolved.
    runtime.shutdown_background();
    outcome
}

fn exit_code(outcome: anyhow::Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", with_causes(&error));
            ExitCode::FAILURE
        }
    }
}

/// The error with its causes, leaving out a cause whose text is already part of what contains it.
fn with_causes(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_told_with_its_causes_each_once() {
        let missing = || std::io::Error::other("no such file");
        let plain = anyhow::Error::new(missing()).context("kubeconfig /k").context("no cluster");
        assert_eq!(with_causes(&plain), "no cluster: kubeconfig /k: no such file");
        let repeated = anyhow::Error::new(missing()).context("kubeconfig /k: no such file");
        assert_eq!(with_causes(&repeated), "kubeconfig /k: no such file");
    }

    #[test]
    fn the_exit_status_is_that_of_the_program() {
        let run = |outcome: fn() -> anyhow::Result<()>| main(LogFormat::Text, |_| async move { outcome() });
        assert_eq!(run(|| Ok(())), ExitCode::SUCCESS);
        assert_eq!(run(|| anyhow::bail!("no")), ExitCode::FAILURE);
        let workers = NonZeroU8::new(3).unwrap();
        let counted = main_with_workers(LogFormat::Text, workers, |_| async {
            anyhow::ensure!(Handle::current().metrics().num_workers() == 3);
            Ok(())
        });
        assert_eq!(counted, ExitCode::SUCCESS);
        let apart = main_with_background(LogFormat::Text, |_, background| async move {
            Ok(background.spawn(async {}).await?)
        });
        assert_eq!(apart, ExitCode::SUCCESS);
    }
}
