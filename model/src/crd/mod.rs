//! The custom resources: what owners write (GPUConfig, GPUMigration) and what nodes report (GPUShadow).

// Each printer column has a name, a type and a path of its own; the lint takes them for repeats.
#![allow(clippy::duplicated_attributes)]

mod config;
mod migration;
mod shadow;
mod strict;

pub use config::{
    Driver, Exporter, GPUConfig, GPUConfigSpec, GPUConfigStatus, Isolation, NodePool, OrphanNodes,
    PluginMode, PoolStatus, Quota,
};
pub use migration::{
    Convert, Counts, Direction, GPUMigration, GPUMigrationSpec, GPUMigrationStatus, Gate, GateQuery, Match,
    MigrationMode, MigrationPhase, MultiCard, NodeSelectorEdit, OnUnconvertible, Override, ResourceMapping,
    Rollout, RolloutUnit, Scheduling, TolerationsEdit, Wave, WorkloadState, WorkloadStatus,
};
pub use shadow::{CardStatus, GPUShadow, GPUShadowSpec, GPUShadowStatus, HolderStatus};
pub use strict::{FieldError, read_strict};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;

/// All definitions, in the order in which `deploy/crds` lists them.
#[must_use]
pub fn definitions() -> Vec<CustomResourceDefinition> {
    vec![GPUConfig::crd(), GPUMigration::crd(), GPUShadow::crd()]
}
