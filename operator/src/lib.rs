//! Control loops for GPUConfig and GPUMigration.
//!
//! What decides is pure: [`waves`] (what moves, waits or goes back), [`project`] (which workloads are a project's, and
//! how they are), [`pools`] (which pool a node is of), [`nodes`] (what it gets, and how it moves), [`patches`] (what is
//! written). Around it: `migrations` and `config` (the loops), `query` (a gate's question to Prometheus), [`run`] (leader election, health, shutdown).

#[cfg(feature = "server")]
pub mod args;
#[cfg(feature = "server")]
pub mod config;
#[cfg(feature = "server")]
mod metrics;
#[cfg(feature = "server")]
mod migrations;
pub mod nodes;
pub mod patches;
pub mod pools;
pub mod project;
#[cfg(feature = "server")]
mod query;
#[cfg(feature = "server")]
pub mod run;
#[cfg(feature = "server")]
mod term;
pub mod waves;
