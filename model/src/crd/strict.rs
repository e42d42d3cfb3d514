//! Reading a custom resource from a file: an unknown field is an error, with its path.
//!
//! In a cluster the API server prunes or refuses unknown fields, and an older reader must not fail on a newer field, so
//! the types themselves stay lenient.

use serde::de::DeserializeOwned;
use serde_json::Value;

/// Why a document does not read as the resource it claims to be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FieldError {
    /// A value has the wrong form.
    #[error("{path}: {problem}")]
    Value {
        /// Path of the field, for example `spec.rollout.percent`.
        path: String,
        /// What was expected and what was found.
        problem: String,
    },
    /// Fields that the resource does not have.
    #[error("unknown field{}: {}", if .0.len() == 1 { "" } else { "s" }, .0.join(", "))]
    Unknown(Vec<String>),
}

/// Reads a document, refusing unknown fields.
///
/// # Errors
/// The path of the first value of a wrong form, or of all unknown fields.
pub fn read_strict<T: DeserializeOwned>(document: &Value) -> Result<T, FieldError> {
    let mut unknown = Vec::new();
    let mut track = serde_path_to_error::Track::new();
    let tracked = serde_path_to_error::Deserializer::new(document, &mut track);
    // serde_ignored shows an optional field as "?": it is no part of the path that the user wrote.
    let read = serde_ignored::deserialize(tracked, |path| {
        let path = path.to_string().replace(".?", "").replace("?.", "");
        // Generated resource types read these two apart.
        if path != "apiVersion" && path != "kind" {
            unknown.push(path);
        }
    });
    match read {
        Err(problem) => {
            Err(FieldError::Value { path: track.path().to_string(), problem: problem.to_string() })
        }
        Ok(_) if !unknown.is_empty() => Err(FieldError::Unknown(unknown)),
        Ok(resource) => Ok(resource),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crd::GPUMigration;
    use serde_json::json;

    #[test]
    fn errors_name_the_field() {
        let table = [
            (json!({"project": "p", "convret": {}}), "unknown field: spec.convret"),
            (
                json!({"project": "p", "rollout": {"percent": 5, "step": 1}}),
                "unknown field: spec.rollout.step",
            ),
            (
                json!({"project": "p", "convert": {"overrides": [{"gpu": "A100"}]}}),
                "unknown field: spec.convert.overrides.0.gpu",
            ),
            (
                json!({"project": "p", "rollout": {"percent": "half"}}),
                "spec.rollout.percent: invalid type: string \"half\"",
            ),
            (json!({"project": "p", "mode": "On"}), "spec.mode: unknown variant `On`"),
            (json!({}), "spec: missing field `project`"),
        ];
        for (spec, expected) in table {
            let document = json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUMigration", "metadata": {"name": "m"}, "spec": spec});
            let error = read_strict::<GPUMigration>(&document).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
