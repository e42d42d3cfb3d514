//! gpu-migrate, the command line of the migration.
