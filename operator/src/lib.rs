//! Control loops for GPUConfig and GPUMigration.
//!
//! What decides is pure: [`waves`] (what moves, waits or goes back), [`project`] (which workloads are a project's, and
//! how they are), [`pools`] (which labels a node gets), [`patches`] (what is written). Around it: `migrations` and
//! `config` (the loops), `query` (a gate's question to Prometheus), [`run`] (leader election, health, shutdown).

pub mod args;
mod config;
mod metrics;
mod migrations;
pub mod patches;
pub mod pools;
pub mod project;
mod query;
pub mod run;
pub mod waves;
