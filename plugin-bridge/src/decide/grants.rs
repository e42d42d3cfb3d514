//! Grants: what the kubelet was promised for one resource of one container.

use std::collections::BTreeSet;
use std::sync::Arc;

use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::ledger::HolderId;

use super::Millis;

/// A resource that the kubelet asks us for.
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
    /// Number of a core.
    Core(u32),
    /// Number of a memory block.
    Block(u32),
    /// ID of NVIDIA's plugin.
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

    /// Its number, if it is one of this resource.
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

/// Names a grant for as long as this process lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GrantId(pub u64);

/// One promise.
#[derive(Clone, Debug)]
pub struct Grant {
    /// Of which resource.
    pub resource: Resource,
    /// What the kubelet asked for and has in its book.
    pub requested: BTreeSet<DeviceKey>,
    /// What the container really got. The same, but for deviations.
    pub actual: BTreeSet<DeviceKey>,
    /// Who has it in the ledger: the container, or a stand-in until the kubelet's book says who it is.
    pub holder: HolderId,
    /// The kubelet's book has named the holder.
    pub confirmed: bool,
    /// Given to the kubelet as an answer in this life, not only found in a book.
    pub answered: bool,
    /// Whom it was probably for, until confirmed.
    pub candidate: Option<HolderId>,
    /// The grant of the other vcuda resource that goes into the same container, where the pod is not known.
    pub partner: Option<GrantId>,
    /// When it was made (or found).
    pub since: Millis,
    /// Since when the kubelet's book, read whole, does not list it.
    pub absent_since: Option<Millis>,
    /// Since when the API says that its pod is gone.
    pub gone_since: Option<Millis>,
}

impl Grant {
    /// A promise of `actual` for what the kubelet asked for, for nobody known yet.
    #[must_use]
    pub fn new(
        resource: Resource,
        kubelet: BTreeSet<DeviceKey>,
        actual: BTreeSet<DeviceKey>,
        since: Millis,
    ) -> Self {
        Self {
            resource,
            requested: kubelet,
            actual,
            holder: HolderId::new("?", "?"),
            confirmed: false,
            answered: false,
            candidate: None,
            partner: None,
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

    /// It is known whose it is, or was: by the kubelet's book, or by what an earlier life knew.
    #[must_use]
    pub const fn is_known(&self) -> bool {
        self.confirmed || !self.answered && self.candidate.is_some()
    }

    /// It is known, if only by an earlier life, to be another's than `holder`'s.
    #[must_use]
    pub fn belongs_to_another(&self, holder: &HolderId) -> bool {
        self.is_known() && self.holder_or_candidate() != Some(holder)
    }

    /// The answer differed from the question.
    #[must_use]
    pub fn deviates(&self) -> bool {
        self.requested != self.actual
    }

    /// The container that it is for, as far as known.
    #[must_use]
    pub fn holder_or_candidate(&self) -> Option<&HolderId> {
        if self.confirmed { Some(&self.holder) } else { self.candidate.as_ref() }
    }
}
