//! Schemas of the Kubernetes types in our custom resources. With its feature for them, k8s-openapi takes more than twice as long to
//! compile, for all of its types.

use schemars::{Schema, SchemaGenerator, json_schema};

/// `conditions`: a list of `metav1.Condition`, one of each type.
pub(super) fn conditions(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "items": {
            "type": "object",
            "description": "A condition as Kubernetes defines it.",
            "required": ["lastTransitionTime", "message", "reason", "status", "type"],
            "properties": {
                "lastTransitionTime": {"type": "string", "format": "date-time", "description": "When the status last changed."},
                "message": {"type": "string", "description": "What a person should know."},
                "observedGeneration": {
                    "type": "integer", "format": "int64",
                    "description": "The `metadata.generation` that the condition is about."
                },
                "reason": {"type": "string", "description": "Why, in one CamelCase word."},
                "status": {"type": "string", "description": "True, False or Unknown."},
                "type": {"type": "string", "description": "Its name."}
            }
        },
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"]
    })
}

/// A `metav1.LabelSelector`.
pub(super) fn label_selector(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "properties": {
            "matchExpressions": {
                "type": "array",
                "description": "Requirements, all of which must hold.",
                "items": {
                    "type": "object",
                    "required": ["key", "operator"],
                    "properties": {
                        "key": {"type": "string", "description": "The label's key."},
                        "operator": {"type": "string", "description": "In, NotIn, Exists or DoesNotExist."},
                        "values": {
                            "type": "array", "items": {"type": "string"},
                            "description": "Values for In and NotIn; empty for Exists and DoesNotExist."
                        }
                    }
                }
            },
            "matchLabels": {
                "type": "object", "additionalProperties": {"type": "string"},
                "description": "Labels that must be there with these values."
            }
        }
    })
}

/// A `LabelSelector` that may be null.
pub(super) fn label_selector_or_null(generator: &mut SchemaGenerator) -> Schema {
    let mut schema = label_selector(generator);
    schema.insert("nullable".to_owned(), true.into());
    schema
}

/// A list of `v1.Toleration`.
pub(super) fn tolerations(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "items": {
            "type": "object",
            "description": "A toleration as Kubernetes defines it.",
            "properties": {
                "effect": {"type": "string", "description": "NoSchedule, PreferNoSchedule or NoExecute; empty: all of them."},
                "key": {"type": "string", "description": "The taint's key; empty with operator Exists: all keys."},
                "operator": {"type": "string", "description": "Equal (the default) or Exists."},
                "tolerationSeconds": {
                    "type": "integer", "format": "int64",
                    "description": "How long a NoExecute taint is tolerated; without it for ever, 0 or less not at all."
                },
                "value": {"type": "string", "description": "The taint's value, for Equal."}
            }
        }
    })
}
