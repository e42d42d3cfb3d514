//! Certificates for the webhook and the extender: CA, leafs, rotation, hot reload, caBundle.
//!
//! The way through this crate:
//!
//! 1. [`Certs::start`] takes a [`Source`] (own CA in a Secret or a folder, or a folder that is filled from outside) and
//!    returns a handle and a [`CertRotator`], the background task that rotates.
//! 2. [`Certs::server_config`] gives the rustls configuration. Certificates change under it without a restart.
//! 3. [`inject::Injector`] keeps the `caBundle` of a webhook configuration equal to [`Certs::bundle`].
//!
//! What decides is pure and takes the time as an argument: [`authority`] (what a certificate is and when it is due),
//! [`keyring`] (the steps of a CA rotation), [`inject::plan`] (what to patch).

pub mod authority;
mod certs;
mod error;
mod external;
pub mod inject;
pub mod keyring;
mod resolver;
mod store;
mod verifier;

use std::sync::Arc;

pub use authority::Lifetimes;
pub use certs::{CertRotator, Certs, Options, SecretPlace, Source};
pub use error::CertError;
pub use external::FolderWatch;
pub use keyring::Bundle;
pub use verifier::ClientAuth;

/// Where the time comes from: the wall clock in programs, a hand-set one in tests.
pub type Clock = Arc<dyn Fn() -> jiff::Timestamp + Send + Sync>;

#[must_use]
pub fn wall_clock() -> Clock {
    Arc::new(jiff::Timestamp::now)
}
