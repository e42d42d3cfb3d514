//! What the crate promises, called as the scheduler calls it. One binary, so that it links once.

mod common;
mod gangs;
mod http;
mod kube;
mod properties;
mod verbs;
