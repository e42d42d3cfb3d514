//! What each program needs to run.
//!
//! [`main`] is the frame of a server's `main`: crypto provider, log, signals, exit status. Inside it a program connects with
//! [`client`], starts its background work as supervised [`tasks`], serves probes and metrics with [`admin`], follows objects
//! with [`watch`], traces what happens to a pod with [`trace`], and, where one of several replicas acts, is elected by [`leader`]. All of that is behind the feature `server`;
//! without it there is the way to a cluster, for command lines.

#[cfg(feature = "server")]
pub mod admin;
pub mod client;
#[cfg(feature = "server")]
mod connections;
#[cfg(feature = "server")]
pub mod leader;
#[cfg(feature = "server")]
mod logging;
#[cfg(feature = "server")]
mod process;
#[cfg(feature = "server")]
pub mod serve;
#[cfg(feature = "server")]
mod signals;
#[cfg(feature = "server")]
pub mod tasks;
#[cfg(feature = "server")]
pub mod trace;
#[cfg(feature = "server")]
pub mod watch;

#[cfg(feature = "server")]
pub use self::{
    logging::LogFormat,
    process::{main, main_with_background, main_with_workers},
    tasks::Tasks,
};

/// Makes aws-lc-rs the crypto provider of rustls in this process. One that is installed already stays.
pub fn install_crypto_provider() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
}

/// `HOST-PID`: the name of a replica that was given none. A restarted process is another replica: it knows nothing of what
/// the former one decided.
#[must_use]
pub fn default_identity() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}-{}", host.trim(), std::process::id())
}
