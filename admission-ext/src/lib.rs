//! Scheduler extender: places shared pods beside legacy pods, card by card.
//!
//! - [`wire`]: the scheduler's JSON, borrowed
//! - [`state`]: the cluster, one `NodeInfo` with ready-made occupancy per node
//! - [`decide`], [`score`]: pure decisions over one node
//! - [`engine`]: the verbs; only bind commits
//! - [`api`], [`kube_api`], [`watch`], [`snapshot`]: the cluster's API, for real, in memory, and where state comes from
//! - [`serve`]: HTTP, callers, health
//! - [`run`]: flags, and all of it put together

pub mod api;
pub mod decide;
pub mod engine;
pub mod kube_api;
pub mod metrics;
pub mod run;
pub mod score;
pub mod serve;
pub mod snapshot;
pub mod state;
pub mod watch;
pub mod wire;
