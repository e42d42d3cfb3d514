//! Control loops for GPUConfig and GPUMigration.
