//! Mutating admission webhook: rewrites whole-card requests into shares, project by project.
//!
//! The way through this crate, from the inside out. Pure: [`view`] (a pod as borrowed bytes), [`convert`] (cards to
//! cores and blocks), [`policy`] and [`compile`] (which policy a pod falls under), [`decide`] (what happens to it, as a
//! JSON patch), [`original`] and [`restore`] (the way back), [`review`] (an AdmissionReview from bytes to bytes),
//! [`register`] (the webhook configuration). Around it: [`http`], [`source`] (policies from a file or a watch),
//! [`registrar`] and [`run`].
//!
//! `gpu-migrate plan` uses [`plan`] and [`mod@file`].

#[cfg(feature = "server")]
pub mod args;
pub mod compile;
pub mod convert;
pub mod decide;
pub mod file;
#[cfg(feature = "server")]
pub mod http;
#[cfg(feature = "server")]
pub mod metrics;
pub mod original;
pub mod plan;
pub mod policy;
mod record;
#[cfg(feature = "server")]
pub mod register;
#[cfg(feature = "server")]
pub mod registrar;
pub mod restore;
#[cfg(feature = "server")]
pub mod review;
mod rewrite;
#[cfg(feature = "server")]
pub mod run;
#[cfg(feature = "server")]
pub mod source;
pub mod text;
pub mod view;
