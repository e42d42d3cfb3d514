//! What the node agent decides, without any I/O: calls and observations go in, answers and changes come out.
//!
//! The state is [`NodeState`]: grants (which devices the kubelet requested, and which the container was given), the model's
//! [`Ledger`](gpu_migrate_model::ledger::Ledger) over them, and what is known of pods, cards and NVIDIA's plugin. The
//! services around it take one short lock, call one method, and do what it returns.
//!
//! Accounting is **by device ID**: every ID has at most one owner, so a card's shares cannot add up to more than the
//! card. The container that has an ID may become known late and corrected without moving anything.

mod capacity;
mod checkpoint_state;
mod claims;
mod colocation;
mod deviations;
mod devices;
mod drift;
mod grants;
mod ingest;
mod legacy;
mod plan;
mod pods;
mod registration;
mod release;
mod report;
mod shared;
mod state;
#[cfg(test)]
mod tests;
mod unaccounted;
mod withdrawals;

pub use colocation::StartRefusal;
pub use devices::{ListedDevice, Listing};
pub use drift::Drift;
pub use grants::{DeviceKey, Grant, GrantId, Resource};
pub use legacy::LegacyGrant;
pub use pods::{ContainerView, PodPhase, PodView};
pub use report::PodAnnotations;
pub use shared::{AllocateError, SharedGrant};
pub use state::{NodeState, Settings, UpstreamDevice};

/// Milliseconds on a monotonic clock of the caller's.
pub type Millis = u64;
