//! Everything that is spoken with the API server. Away, it stops nothing: decisions go on from what is known.

pub mod cordon;
pub mod pods;
pub mod publish;
