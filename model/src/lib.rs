//! The vocabulary of gpu-migrate: units, cards and their holders, the ledger, the topology, the evaluators, annotations
//! and custom resources. Pure: no I/O, no clock, no randomness of its own.

#![deny(missing_docs)]

pub mod annotation;
pub mod ask;
pub mod capacity;
pub mod card;
pub mod crd;
pub mod device_id;
pub mod evaluate;
pub mod hash;
pub mod ledger;
pub mod lifecycle;
pub mod names;
pub mod place;
pub mod quantity;
pub mod score;
pub mod selector;
pub mod target;
pub mod text;
pub mod topology;
pub mod units;
pub mod usage;
pub mod view;
