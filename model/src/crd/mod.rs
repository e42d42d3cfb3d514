//! The custom resources: what owners write (GPUConfig, GPUMigration) and what nodes report (GPUShadow).

// Each printer column has a name, a type and a path of its own; the lint takes them for repeats.
#![allow(clippy::duplicated_attributes)]

mod config;
mod kubernetes;
mod migration;
mod shadow;
mod strict;

pub use config::{
    Driver, Exporter, FieldRule, GPUConfig, GPUConfigSpec, GPUConfigStatus, Isolation, NodePool, OrphanNodes,
    PluginMode, PodPlace, PoolStatus, Quota, WorkloadKind,
};
pub use migration::{
    AcceptedSpec, CommandAction, Convert, Counts, Direction, GPUMigration, GPUMigrationSpec,
    GPUMigrationStatus, Gate, GateQuery, Match, MigrationMode, MigrationPhase, MultiCard, NodeSelectorEdit,
    OnUnconvertible, OnUnready, Override, PercentOf, QueryStatus, RecordedConversion, ResourceMapping,
    Rollout, RolloutCommand, RolloutSettings, RolloutUnit, Scheduling, TolerationsEdit, Wave, WorkloadState,
    WorkloadStatus, specificity,
};
pub use shadow::{
    CardStatus, DriverInstall, GPUShadow, GPUShadowSpec, GPUShadowStatus, HolderStatus, InstallPhase,
};
pub use strict::{FieldError, read_strict};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube::CustomResourceExt;

/// All definitions, in the order in which `deploy/crds` lists them.
#[must_use]
pub fn definitions() -> Vec<CustomResourceDefinition> {
    let mut definitions = vec![GPUConfig::crd(), GPUMigration::crd(), GPUShadow::crd()];
    for version in definitions.iter_mut().flat_map(|definition| &mut definition.spec.versions) {
        if let Some(schema) = version.schema.as_mut().and_then(|schema| schema.open_api_v3_schema.as_mut()) {
            forget_unsigned(schema);
        }
    }
    definitions
}

/// OpenAPI knows no unsigned formats: since 1.32 the API server warns of each one. The minimum of 0 stays.
fn forget_unsigned(schema: &mut JSONSchemaProps) {
    if schema.format.as_deref().is_some_and(|format| format.starts_with("uint")) {
        schema.format = None;
    }
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &mut schema.items {
        forget_unsigned(items);
    }
    if let Some(JSONSchemaPropsOrBool::Schema(values)) = &mut schema.additional_properties {
        forget_unsigned(values);
    }
    schema.properties.iter_mut().flat_map(|properties| properties.values_mut()).for_each(forget_unsigned);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A default that the schema itself refuses.
    fn invalid_defaults(schema: &serde_json::Value, path: &str, found: &mut Vec<String>) {
        let short = |least: &serde_json::Value| {
            let length = schema["default"].as_str().map(|text| text.chars().count() as u64);
            length.zip(least.as_u64()).is_some_and(|(length, least)| length < least)
        };
        if short(&schema["minLength"]) {
            found.push(path.to_owned());
        }
        for (key, inner) in schema.as_object().into_iter().flatten() {
            invalid_defaults(inner, &format!("{path}.{key}"), found);
        }
        for inner in schema.as_array().into_iter().flatten() {
            invalid_defaults(inner, path, found);
        }
    }

    #[test]
    fn no_default_is_refused_by_its_own_schema() {
        for definition in definitions() {
            let mut found = Vec::new();
            invalid_defaults(&serde_json::to_value(&definition.spec).unwrap(), "spec", &mut found);
            assert_eq!(found, Vec::<String>::new(), "{}", definition.spec.names.kind);
        }
    }

    #[test]
    fn definitions_have_what_the_api_server_takes() {
        for definition in definitions() {
            let json = serde_json::to_string(&definition).unwrap();
            assert!(!json.contains("uint"), "{json}");
            assert_eq!(definition.spec.scope, "Cluster");
            let version = &definition.spec.versions[0];
            assert!(version.subresources.as_ref().is_some_and(|subresources| subresources.status.is_some()));
            assert!(version.additional_printer_columns.as_ref().is_some_and(|columns| columns.len() >= 4));
        }
    }
}
