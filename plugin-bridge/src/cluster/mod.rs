//! Reads from and writes to the API server. While it is unavailable, decisions are made from what is known.

pub mod clean;
pub mod events;
pub mod namespaces;
pub mod own_node;
pub mod pods;
pub mod publish;
