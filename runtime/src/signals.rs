//! SIGTERM, SIGINT and SIGHUP: the first asks for a graceful shutdown, the second ends the process at once.

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// 128 + SIGINT, as shells report a program that was interrupted.
const ABORTED: i32 = 130;

/// Cancels `shutdown` at the first signal and exits at the second. Handlers are installed when this returns.
///
/// # Errors
/// If the handlers cannot be installed.
pub(crate) fn listen(shutdown: CancellationToken) -> std::io::Result<impl Future<Output = ()>> {
    let mut term = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    Ok(async move {
        let name = next(&mut term, &mut interrupt, &mut hangup).await;
        tracing::info!(signal = name, "shutting down; a second signal aborts");
        shutdown.cancel();
        let name = next(&mut term, &mut interrupt, &mut hangup).await;
        tracing::warn!(signal = name, "aborted by a second signal");
        std::process::exit(ABORTED);
    })
}

async fn next(term: &mut Signal, interrupt: &mut Signal, hangup: &mut Signal) -> &'static str {
    tokio::select! {
        _ = term.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
        _ = hangup.recv() => "SIGHUP",
    }
}
