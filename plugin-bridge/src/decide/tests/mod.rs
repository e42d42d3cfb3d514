//! I1 to I3 under whatever happens: random histories of a node, with the real ledger and the real decisions of both plugins
//! against a kubelet, an API server and NVIDIA's plugin that are simulated with their lags and failures. The same histories run
//! on the decisions alone, which is quick, and on the services around them, which is the whole agent but for its sockets.
//!
//! `GPU_MIGRATE_SEQUENCES` sets how many histories run, `GPU_MIGRATE_RANDOM=1` makes them others in every run, and
//! `GPU_MIGRATE_RECORD_HISTORIES=FILE` records what came of each, see [`record`].

mod agent;
mod histories;
mod machine;
mod record;
mod world;
