//! A GPU cluster without one: replay of public traces, and what a migration would give on a snapshot of one's own cluster.
//!
//! Both place pods with the code of the scheduler extender: [`gpu_migrate_model::place`] says whether and where a pod fits,
//! [`gpu_migrate_model::score`] which place is best, [`gpu_migrate_model::ledger`] keeps the books.

pub mod cluster;
pub mod command;
pub mod node;
pub mod snapshot;
pub mod trace;
