//! Kubernetes objects as our components read them: a few fields, borrowed from the JSON they came in.
//!
//! Reading a pod into these costs a fraction of reading one into `Pod`, since what is not named here is skipped. The
//! webhook, the extender and the node agent read the same view, so that a pod means the same to all three; what it
//! asks for is read by [`crate::ask::PodAsk`].

pub mod json;
mod pod;
mod watched;

pub use pod::{
    ConditionView, ContainerStateView, ContainerStatusView, ContainerView, CountedResources, GateView,
    KnownAnnotations, MetaView, OwnerView, Place, PodView, ResourcesView, SpecView, StatusView, WatchedPod,
};
pub use watched::{Watchable, Watched};
