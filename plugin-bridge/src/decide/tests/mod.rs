//! I1 to I3 under whatever happens: random lives of a node, with the real ledger and the real decisions of both plugins
//! against a kubelet, an API server and NVIDIA's plugin that are simulated with their lags and failures.
//!
//! `GPU_MIGRATE_SEQUENCES` sets how many lives are lived (default 300; `.ci/run` and the release use more).

mod lives;
mod machine;
mod world;
