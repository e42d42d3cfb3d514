//! NVIDIA's own device plugin, unmodified, behind the node agent: it registers here instead of with the kubelet (`KUBELET_SOCKET`), or
//! the agent registers over it.
//!
//! Three observations with v0.20.0 decide how this works. It may be given exactly **one** `ListAndWatch` per registration (a second
//! stream takes the next health event away from the first). A device that it reports Unhealthy stays so until its restart, after
//! which all are healthy: so [`HealthMemory`] keeps the report. And re-creating the socket that it registers with makes it
//! register again within milliseconds, which recovers from any lost stream or call.

mod health;
mod registrar;
mod takeover;
mod upstream;

pub use health::HealthMemory;
pub use registrar::{SOCKET, run as run_registrar};
pub use takeover::run as run_takeover;
pub use upstream::{Announcement, HealthSource, Upstream, UpstreamError, Upstreams};
