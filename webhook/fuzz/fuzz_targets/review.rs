//! Any bytes as a review: never a panic; an answer is a valid AdmissionReview that echoes the UID; its patch applies to
//! the object it was made for, and the result gets no second patch.
#![no_main]

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use base64::Engine;
use gpu_migrate_model::crd::GPUMigration;
use gpu_migrate_webhook::policy::{Policies, Settings};
use gpu_migrate_webhook::review::{Snapshot, answer};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};

static SNAPSHOT: LazyLock<Snapshot> = LazyLock::new(|| {
    let migration: GPUMigration = serde_json::from_value(json!({
        "apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUMigration", "metadata": {"name": "p", "generation": 1},
        "spec": {"project": "p", "mode": "Enforce",
            "convert": {"overrides": [{"gpuProduct": "A100", "blocksPerCard": 316}],
                "resources": [{"name": "nvidia.com/mig-1g.5gb", "cores": 14, "blocks": 20}]},
            "scheduling": {"gangGate": true, "runtimeClassName": "nvidia",
                "nodeSelector": {"remove": ["gpu-type"], "set": {"pool": "shared"}},
                "tolerations": {"removeKeys": ["nvidia.com/gpu"], "add": [{"key": "pool", "operator": "Exists"}]}}},
    }))
    .unwrap();
    let (policies, _) = Policies::compile(&[migration], &Settings::default());
    let labels = ["opt-in", "void-guard"].map(|key| (format!("gpu-migrate.io/{key}"), "true".to_owned()));
    let mut labels: BTreeMap<String, String> = labels.into();
    labels.insert("gpu-migrate.io/project".into(), "p".into());
    let namespaces = [("default".to_owned(), Arc::new(labels))].into();
    Snapshot { policies, namespaces, ..Snapshot::default() }
});

fuzz_target!(|body: &[u8]| {
    let Ok(given) = answer(body, &SNAPSHOT, None) else { return };
    let review: Value = serde_json::from_slice(&given.body).unwrap();
    let response = &review["response"];
    // Escapes and duplicate keys: compared only where a plain parse of the input agrees that it is JSON.
    let Ok(mut input) = serde_json::from_slice::<Value>(body) else { return };
    assert_eq!(response["uid"], input["request"]["uid"]);
    assert_eq!(response["allowed"], true);
    let Some(patch) = response["patch"].as_str() else { return };
    let patch = base64::engine::general_purpose::STANDARD.decode(patch).unwrap();
    let patch: json_patch::Patch = serde_json::from_slice(&patch).unwrap();
    assert!(!patch.0.is_empty());
    // An API server sends typed pods; only on those a patch must apply, and a second run must be empty.
    let object = &mut input["request"]["object"];
    if serde_json::from_value::<Typed>(object.clone()).is_err() || repeats_a_name(object) {
        return;
    }
    json_patch::patch(object, &patch).unwrap();
    let second = answer(input.to_string().as_bytes(), &SNAPSHOT, None).unwrap();
    let second: Value = serde_json::from_slice(&second.body).unwrap();
    assert!(second["response"].get("patch").is_none(), "a second run changes more");
});

type Typed = k8s_openapi::api::core::v1::Pod;

/// Kubernetes refuses two containers of one name.
fn repeats_a_name(pod: &Value) -> bool {
    let mut seen = std::collections::HashSet::new();
    let lists = ["initContainers", "containers"].map(|list| pod["spec"][list].as_array());
    lists.into_iter().flatten().flatten().any(|container| !seen.insert(container["name"].to_string()))
}
