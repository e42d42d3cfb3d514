//! The independent observer: what containers really hold, from the kernel, and whether that breaks an invariant.
//!
//! It uses neither the API's annotations nor our ledger nor GPUShadows. Which cards a container sees comes from the
//! environment of its process and from the device nodes in its `/dev` ([`containers`]); what it is entitled to comes from its pod's spec. [`check_invariants`] then checks I1
//! and I2 in pure code, and can be shown able to fail.

mod invariants;
mod observer;
mod proc;

pub use invariants::{Entitlement, Holding, Kind, Violation, check_invariants};
pub use observer::{Observer, Report, take_violated};
pub use proc::{Container, containers};
