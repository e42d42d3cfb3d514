//! Mutating admission webhook: rewrites whole-card requests into shares, project by project.
//!
//! Modules, from the inside out. Pure: [`view`] (a pod as borrowed bytes), [`convert`] (cards to
//! cores and blocks), [`policy`] and [`compile`] (which policy a pod falls under), [`rollout`] (which workloads a percentage
//! covers), [`obstacles`] (what cannot be converted), [`decide`] (what happens to a pod, as a JSON patch), [`original`] and [`restore`] (the way back), [`review`] (an AdmissionReview from bytes to bytes),
//! [`configuration`] (the webhook configuration). Around it: [`http`], [`source`] (policies from a file or a watch),
//! [`reconciler`] and [`run`].
//!
//! `gpu-migrate plan` uses [`plan`] and [`policy_file`].

#[cfg(feature = "server")]
pub mod args;
pub mod compile;
#[cfg(feature = "server")]
pub mod configuration;
pub mod convert;
pub mod decide;
#[cfg(feature = "server")]
pub mod http;
#[cfg(feature = "server")]
pub mod metrics;
pub mod obstacles;
pub mod original;
pub mod plan;
pub mod policy;
pub mod policy_file;
#[cfg(feature = "server")]
pub mod reconciler;
pub mod restore;
#[cfg(feature = "server")]
pub mod review;
mod rewrite;
pub mod rollout;
#[cfg(feature = "server")]
pub mod run;
#[cfg(feature = "server")]
pub mod source;
pub mod text;
pub mod view;
