//! A policy file: a YAML stream of GPUMigrations and of the Namespaces whose labels matter. Pure.

use std::collections::BTreeMap;

use gpu_migrate_model::crd::{FieldError, GPUMigration, read_strict};
use serde_json::Value;

#[derive(Clone, Debug, Default)]
pub struct PolicyFile {
    /// Its policies; `metadata.generation` is 0 where the file gives none.
    pub migrations: Vec<GPUMigration>,
    pub namespaces: BTreeMap<String, BTreeMap<String, String>>,
}

/// Why a policy file cannot be used. Documents are counted from 1.
#[derive(Debug, thiserror::Error)]
pub enum PolicyFileError {
    #[error("not YAML: {0}")]
    Yaml(String),
    /// Not what a policy file holds.
    #[error(
        "document {document}: kind {kind}: expected GPUMigration of gpu-migrate.io/v1alpha1 or Namespace of v1"
    )]
    Kind { document: usize, kind: String },
    /// A field of a policy is wrong.
    #[error("document {document} (GPUMigration {name}): {source}")]
    Field { document: usize, name: String, source: FieldError },
    /// A label that is no string.
    #[error(
        "document {document} (Namespace {name}): metadata.labels: {key}: {value}: expected a string: \"{value}\""
    )]
    Label { document: usize, name: String, key: String, value: String },
    #[error("document {document}: a second GPUMigration {name}: expected every name once")]
    Twice { document: usize, name: String },
}

impl PolicyFile {
    /// Reads a file's text.
    ///
    /// # Errors
    /// The first document that cannot be used.
    pub fn parse(text: &str) -> Result<Self, PolicyFileError> {
        // YAML 1.2: only `true` and `false` are booleans, so that `mode: Off` is the word that it looks like.
        let options = serde_saphyr::options! { strict_booleans: true, with_snippet: false };
        let documents: Vec<Value> = serde_saphyr::from_multiple_with_options(text, options)
            .map_err(|e| PolicyFileError::Yaml(e.to_string()))?;
        let mut file = Self::default();
        for (index, value) in documents.into_iter().enumerate() {
            if !value.is_null() {
                file.take(index + 1, &value)?;
            }
        }
        Ok(file)
    }

    fn take(&mut self, document: usize, value: &Value) -> Result<(), PolicyFileError> {
        let text = |path: &str| value.pointer(path).and_then(Value::as_str).unwrap_or_default();
        let name = text("/metadata/name").to_owned();
        match (text("/apiVersion"), text("/kind")) {
            ("v1", "Namespace") => {
                let labels =
                    value.pointer("/metadata/labels").and_then(Value::as_object).into_iter().flatten();
                let texts = labels.map(|(key, value)| match value.as_str() {
                    Some(text) => Ok((key.clone(), text.to_owned())),
                    None => Err(PolicyFileError::Label {
                        document,
                        name: name.clone(),
                        key: key.clone(),
                        value: value.to_string(),
                    }),
                });
                let texts = texts.collect::<Result<_, _>>()?;
                self.namespaces.insert(name, texts);
                Ok(())
            }
            ("v1", "List") => {
                let items = value.get("items").and_then(Value::as_array);
                items.into_iter().flatten().try_for_each(|item| self.take(document, item))
            }
            ("gpu-migrate.io/v1alpha1", "GPUMigration") => {
                if self.migrations.iter().any(|known| known.metadata.name.as_ref() == Some(&name)) {
                    return Err(PolicyFileError::Twice { document, name });
                }
                let migration =
                    read_strict(value).map_err(|source| PolicyFileError::Field { document, name, source })?;
                self.migrations.push(migration);
                Ok(())
            }
            (version, kind) => {
                Err(PolicyFileError::Kind { document, kind: format!("{kind:?} of {version:?}") })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "
apiVersion: gpu-migrate.io/v1alpha1
kind: GPUMigration
metadata: {name: danlu}
spec: {project: danlu, mode: Enforce}
---
---
apiVersion: v1
kind: Namespace
metadata: {name: team-a, labels: {gpu-migrate.io/opt-in: \"true\", gpu-migrate.io/project: danlu}}
";

    #[test]
    fn policies_and_namespaces_are_read() {
        let file = PolicyFile::parse(GOOD).unwrap();
        assert_eq!(file.migrations[0].spec.project, "danlu");
        assert_eq!(file.namespaces["team-a"]["gpu-migrate.io/project"], "danlu");
        assert!(PolicyFile::parse("").unwrap().migrations.is_empty());
        let off = PolicyFile::parse(&GOOD.replace("Enforce", "Off")).unwrap();
        assert_eq!(off.migrations[0].spec.mode, gpu_migrate_model::crd::MigrationMode::Off, "no boolean");
    }

    #[test]
    fn faults_name_document_and_field() {
        for (text, expected) in [
            ("a: [", "not YAML"),
            ("kind: Pod\napiVersion: v1\n", "document 1: kind \"Pod\" of \"v1\": expected GPUMigration"),
            (
                &GOOD.replace("mode: Enforce", "mod: Enforce"),
                "document 1 (GPUMigration danlu): unknown field: spec.mod",
            ),
            (&GOOD.replace("Enforce", "Enforced"), "(GPUMigration danlu): spec.mode: unknown variant"),
            (&GOOD.replace("\"true\"", "true"), "gpu-migrate.io/opt-in: true: expected a string: \"true\""),
            (&format!("{GOOD}---{GOOD}"), "a second GPUMigration danlu"),
        ] {
            let error = PolicyFile::parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
