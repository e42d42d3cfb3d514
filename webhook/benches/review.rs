//! One review in process: bytes in, bytes out, for each review that a real API server sent. Target: below 20 µs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::Arc;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use gpu_migrate_model::crd::GPUMigration;
use gpu_migrate_webhook::policy::{Policies, Settings};
use gpu_migrate_webhook::review::{Snapshot, answer};
use serde_json::{Value, json};

const CAPTURES: [&str; 5] = ["bare-pod", "deployment", "init-containers", "statefulset", "kubectl-run"];

fn snapshot() -> Snapshot {
    let migration: GPUMigration = serde_json::from_value(json!({
        "apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUMigration", "metadata": {"name": "p", "generation": 1},
        "spec": {"project": "p", "mode": "Enforce", "scheduling": {
            "nodeSelector": {"remove": ["gpu-type"], "set": {"pool": "shared"}},
            "tolerations": {"removeKeys": ["nvidia.com/gpu"],
                "add": [{"key": "pool", "operator": "Equal", "value": "shared", "effect": "NoSchedule"}]},
        }},
    }))
    .expect("a policy");
    let (policies, _) = Policies::compile(&[migration], &Settings::default());
    let labels = [("gpu-migrate.io/opt-in", "true"), ("gpu-migrate.io/project", "p")];
    let labels: BTreeMap<String, String> = labels.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
    let namespaces = [("default".to_owned(), Arc::new(labels))].into();
    Snapshot { policies, namespaces, ..Snapshot::default() }
}

/// As the API server sends it: without white space.
fn capture(name: &str) -> Vec<u8> {
    let path = format!("{}/tests/captures/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let value: Value =
        serde_json::from_str(&std::fs::read_to_string(path).expect("a capture")).expect("JSON");
    value.to_string().into_bytes()
}

fn reviews(criterion: &mut Criterion) {
    let snapshot = snapshot();
    let mut group = criterion.benchmark_group("review");
    for name in CAPTURES {
        let body = capture(name);
        let outcome = answer(&body, &snapshot, None).expect("an answer").outcome;
        group.throughput(Throughput::Bytes(body.len() as u64));
        group.bench_function(format!("{name} ({} bytes, {outcome})", body.len()), |bencher| {
            bencher.iter(|| answer(black_box(&body), &snapshot, None));
        });
    }
    group.finish();

    // What the obvious way would cost before anything is decided.
    let body = capture("deployment");
    criterion.bench_function("baseline: AdmissionReview<Pod> parsed, nothing decided", |bencher| {
        bencher.iter_batched(
            || body.as_slice(),
            |bytes| {
                type Review = kube::core::admission::AdmissionReview<k8s_openapi::api::core::v1::Pod>;
                serde_json::from_slice::<Review>(bytes).map(|review| review.request.is_some())
            },
            BatchSize::SmallInput,
        );
    });
}

criterion_group!(benches, reviews);
criterion_main!(benches);
