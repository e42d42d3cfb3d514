//! Operator: reconciles GPUConfig and GPUMigration.
//!
//! Pure: [`waves`] (state machine of a rollout), [`project`] (workloads of a project), [`kinds`] (foreign kinds of them), [`pools`] (settings of a node), [`nodes`] (its
//! components and the steps between plugin modes), [`patches`] (bodies of writes). Feature `server`: `migrations` and `config` (the
//! reconcilers), `watched` (what the watches have shown), `run` (leader election, health, shutdown), `status` (the status page). Feature `prometheus`: `query` (of a
//! gate, and of `gpu-migrate suggest`).

#[cfg(feature = "server")]
pub mod args;
#[cfg(feature = "server")]
pub mod config;
pub mod kinds;
#[cfg(feature = "server")]
mod metrics;
#[cfg(feature = "server")]
mod migrations;
pub mod nodes;
pub mod patches;
pub mod pools;
pub mod project;
#[cfg(feature = "prometheus")]
pub mod query;
#[cfg(feature = "server")]
pub mod run;
#[cfg(feature = "server")]
pub mod status;
#[cfg(feature = "server")]
mod term;
#[cfg(feature = "server")]
mod watched;
pub mod waves;
