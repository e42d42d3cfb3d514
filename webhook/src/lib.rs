//! Mutating admission webhook: rewrites whole-card requests into shares, project by project.
//!
//! The way through this crate, from the inside out. Pure: [`view`] (a pod as borrowed bytes), [`convert`] (cards to
//! cores and blocks), [`policy`] and [`compile`] (which policy a pod falls under), [`decide`] and [`rewrite`] (what
//! happens to it, as a JSON patch), [`original`] and [`restore`] (the way back). Around it: [`review`] (an
//! AdmissionReview from bytes to bytes), `serve` (HTTP), `source` (policies from a file or a watch) and [`register`]
//! (the webhook configuration).
//!
//! `gpu-migrate plan` uses [`plan`] and [`file`].

pub mod compile;
pub mod convert;
pub mod decide;
pub mod file;
pub mod original;
pub mod plan;
pub mod policy;
pub mod restore;
mod rewrite;
pub mod view;
