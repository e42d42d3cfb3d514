//! `gpu-migrate simulate`: replay of public traces, and what a migration would gain on a snapshot of one's own cluster.
//!
//! Both place pods with the code of the scheduler extender: [`gpu_migrate_model::place`] decides whether and where a pod fits,
//! [`gpu_migrate_model::score`] which place is best, [`gpu_migrate_model::ledger`] records who holds what.

pub mod command;
pub mod dump;
pub mod node;
pub mod snapshot;
pub mod trace;
