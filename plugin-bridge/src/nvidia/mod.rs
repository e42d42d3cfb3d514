//! NVIDIA's own device plugin, unmodified, behind us: it registers here instead of with the kubelet (`KUBELET_SOCKET`).
//!
//! Three things were seen with v0.20.0 and shape this part. It may be given exactly **one** `ListAndWatch` per registration (a second
//! stream takes the next health event away from the first). A card that it calls Unhealthy never comes back by itself,
//! and is all healthy again after its restart: so we remember. And making its socket anew makes it register anew within
//! milliseconds, which is the cure for every doubt.

mod health;
mod registrar;
mod upstream;

pub use health::HealthMemory;
pub use registrar::{SOCKET, run as run_registrar};
pub use upstream::{Announcement, HealthSource, Upstream, UpstreamError, Upstreams};
