//! I1 to I3 under whatever happens: random lives of a node, with the real ledger and the real decisions of both plugins
//! against a kubelet, an API server and NVIDIA's plugin that are simulated with their lags and failures. The same lives are
//! lived by the books alone, which is quick, and by the services around them, which is the whole agent but for its sockets.
//!
//! `GPU_MIGRATE_SEQUENCES` sets how many lives each lives (`.ci/run` sets 100,000), `GPU_MIGRATE_RANDOM=1` makes them others
//! in every run.

mod agent;
mod lives;
mod machine;
mod world;
