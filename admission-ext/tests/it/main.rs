//! What the crate promises, called as the scheduler calls it. One binary, so that it links once.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests

mod common;
mod gangs;
mod holders;
mod host;
mod http;
mod kube;
mod preemption;
mod properties;
mod requeue;
mod tls;
mod traces;
mod verbs;
