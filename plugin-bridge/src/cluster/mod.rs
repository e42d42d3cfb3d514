//! Everything that is spoken with the API server. Away, it stops nothing: decisions go on from what is known.

pub mod clean;
pub mod cordon;
pub mod events;
pub mod pods;
pub mod publish;
