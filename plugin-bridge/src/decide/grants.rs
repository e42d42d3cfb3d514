//! Grants: one resource of one container, as answered to an Allocate or observed in the kubelet checkpoint.

use std::collections::BTreeSet;
use std::sync::Arc;

use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::ledger::HolderId;

use super::Millis;

/// A resource that the agent serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resource {
    /// One of the two vcuda resources.
    Shared(SharedResource),
    /// A resource of NVIDIA's plugin, by name.
    Legacy(Arc<str>),
}

/// One device ID. Legacy IDs (`GPU-…`, `GPU-…::n`, `MIG-…`) are unique across resources.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceKey {
    Core(u32),
    Block(u32),
    Legacy(Arc<str>),
}

impl DeviceKey {
    /// The key of a shared resource's number.
    #[must_use]
    pub const fn shared(resource: SharedResource, number: u32) -> Self {
        match resource {
            SharedResource::Cores => Self::Core(number),
            SharedResource::Memory => Self::Block(number),
        }
    }

    /// Its number, where it is of this resource.
    #[must_use]
    pub const fn number(&self, resource: SharedResource) -> Option<u32> {
        match (self, resource) {
            (Self::Core(number), SharedResource::Cores) | (Self::Block(number), SharedResource::Memory) => {
                Some(*number)
            }
            _ => None,
        }
    }
}

/// Identifies a grant within this process; later grants have greater ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GrantId(pub u64);

#[derive(Clone, Debug)]
pub struct Grant {
    pub resource: Resource,
    /// What the kubelet requested and has in its checkpoint.
    pub requested: BTreeSet<DeviceKey>,
    /// What the container got: the same, unless the grant deviates.
    pub actual: BTreeSet<DeviceKey>,
    /// The holder in the ledger: the container, or a placeholder until the kubelet names it.
    pub holder: HolderId,
    /// The kubelet has named the holder.
    pub confirmed: bool,
    /// Answered to an Allocate by this process, not only observed.
    pub answered: bool,
    /// The container that it is probably for, until confirmed.
    pub candidate: Option<HolderId>,
    /// The grant of the other vcuda resource that goes into the same container, where the pod is not known.
    pub partner: Option<GrantId>,
    /// The grace period of its pod, from an earlier process.
    pub grace: Option<Millis>,
    /// When it was made or observed.
    pub since: Millis,
    /// Since when the kubelet checkpoint does not list it.
    pub absent_since: Option<Millis>,
    /// Since when the API says that its pod is gone.
    pub gone_since: Option<Millis>,
}

impl Grant {
    /// A grant of `actual` for what the kubelet requested, with no known container yet.
    #[must_use]
    pub fn new(
        resource: Resource,
        requested: BTreeSet<DeviceKey>,
        actual: BTreeSet<DeviceKey>,
        since: Millis,
    ) -> Self {
        Self {
            resource,
            requested,
            actual,
            holder: HolderId::new("?", "?"),
            confirmed: false,
            answered: false,
            candidate: None,
            partner: None,
            grace: None,
            since,
            absent_since: None,
            gone_since: None,
        }
    }

    /// The same, for a container that is known.
    #[must_use]
    pub fn of(self, holder: HolderId) -> Self {
        Self { holder, confirmed: true, ..self }
    }

    /// Its container is known, from the kubelet or from an earlier process.
    #[must_use]
    pub const fn is_known(&self) -> bool {
        self.confirmed || !self.answered && self.candidate.is_some()
    }

    /// Its container is known, and is another than `holder`.
    #[must_use]
    pub fn belongs_to_another(&self, holder: &HolderId) -> bool {
        self.is_known() && self.holder_or_candidate() != Some(holder)
    }

    /// The container got other devices than the kubelet requested.
    #[must_use]
    pub fn deviates(&self) -> bool {
        self.requested != self.actual
    }

    /// Both were made for the same devices of the same resource.
    #[must_use]
    pub fn is_same_request(&self, other: &Self) -> bool {
        self.resource == other.resource && self.requested == other.requested
    }

    /// The container that has it, else the one that it is probably for.
    #[must_use]
    pub fn holder_or_candidate(&self) -> Option<&HolderId> {
        if self.confirmed { Some(&self.holder) } else { self.candidate.as_ref() }
    }
}
