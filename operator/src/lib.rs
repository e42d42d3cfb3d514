//! Control loops for GPUConfig and GPUMigration.

pub mod waves;
