//! Measures how much memory of a card a program gets, whatever limits it: run in a container that has a share, it says whether the share is
//! a limit, by each way in which CUDA programs allocate.
//!
//! What allocates are [clients](client): small CUDA programs, in C for the CUDA versions 11, 12 and 13, and by NVIDIA's Python bindings.
//! [`measure`] starts them with the [`probe`]s' steps and judges what they got. A [`report::Report`] has the outcome.

pub mod client;
pub mod probe;
pub mod report;

pub use client::{Client, Error, Setting, unpack};
pub use probe::measure;
pub use report::Report;
