//! What would migrating give me? Answered from a snapshot of one's own cluster: `kubectl get nodes,pods -A -o json`.
//!
//! [`read`] the snapshot → [`cluster`]: who holds which card now → [`migrate`]: one legacy pod after the other is taken off, rewritten by
//! the code of the webhook and placed again by the code of the extender, beside those that are still legacy → [`report`]. A pod that cannot be
//! converted, or that fits nowhere as a shared pod, stays where it is, and the report says why. In the end pods are
//! tried that wait for a card.
//!
//! **What it cannot know.** Whether a workload gets along with half a card is not in a snapshot: that is for its owner, or a canary, to say.
//! Links between cards, volumes, pod (anti-)affinity and spread constraints are not looked at; node selectors, required node affinity,
//! taints, CPU and memory are.

mod card_map;
pub mod cluster;
pub mod html;
pub mod migrate;
pub mod node_fit;
pub mod plan;
pub mod read;
pub mod report;
