//! A GPU cluster without one: replay of public traces, what a migration would give on a snapshot of one's own cluster, and an
//! embedded cluster ([`cluster`]) on which the real parts run for the demo ([`demo`]) and fast tests.
//!
//! The first two place pods with the code of the scheduler extender: [`gpu_migrate_model::place`] says whether and where a pod fits,
//! [`gpu_migrate_model::score`] which place is best, [`gpu_migrate_model::ledger`] keeps the books.

pub mod cluster;
pub mod command;
pub mod demo;
pub mod node;
pub mod snapshot;
pub mod trace;
