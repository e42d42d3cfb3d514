//! Scheduler extender: places shared pods beside legacy pods, card by card.

pub mod wire;
