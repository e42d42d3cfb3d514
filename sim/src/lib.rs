//! A GPU cluster without one: an embedded cluster ([`cluster`]) on which the real parts run for the demo ([`demo`]) and fast tests.

pub mod cluster;
pub mod demo;
