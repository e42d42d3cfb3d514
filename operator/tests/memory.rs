//! How much the operator keeps in memory of pods, counted by the allocator: in a program of its own.

#![allow(clippy::unwrap_used)] // a test may fail

use gpu_migrate_operator::project::ListedPod;
use gpu_migrate_runtime::watch::Gathered;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::runtime::watcher::Event;
use peak_alloc::PeakAlloc;
use serde_json::{Value, json};
use std::sync::Arc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// As the API server sends it: unschedulable, with what nobody here needs.
fn pod() -> Value {
    let fields = (0..60).map(|field| (format!("f:field-{field}"), json!({".": {}, "f:value": {}})));
    let env = (0..40)
        .map(|at| json!({"name": format!("VARIABLE_{at}"), "value": "a value of some length, as they have"}));
    json!({
        "metadata": {"name": "training-6f7c8d9b5-NUMBER", "namespace": "team-danlu", "uid": "00000000-0000-4000-8000-0000000NUMBER",
            "labels": {"app": "training", "pod-template-hash": "6f7c8d9b5", "gpu-migrate.io/convert": "true", "team": "danlu", "tier": "batch",
                "app.kubernetes.io/name": "training", "app.kubernetes.io/instance": "training-a", "app.kubernetes.io/managed-by": "Helm"},
            "annotations": {"gpu-migrate.io/policy": "danlu@4", "gpu-migrate.io/original": "x".repeat(400)},
            "managedFields": [{"manager": "kube-controller-manager", "operation": "Update", "apiVersion": "v1", "fieldsType": "FieldsV1",
                "fieldsV1": fields.collect::<serde_json::Map<_, _>>()}],
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "training-6f7c8d9b5", "uid": "00000000-0000-4000-8000-000000000000",
                "controller": true, "blockOwnerDeletion": true}]},
        "spec": {"containers": [{"name": "main", "image": "example.com/team/training:1", "env": env.collect::<Vec<_>>(),
            "resources": {"limits": {"nvidia.com/gpu": "1"}, "requests": {"nvidia.com/gpu": "1", "cpu": "4", "memory": "16Gi"}}}]},
        "status": {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "message": "0/500 nodes are available: 120 Insufficient nvidia.com/gpu, 380 node(s) had untolerated taint {gpu-type: a100}. preemption: 0/500 nodes are available: 500 Preemption is not helpful for scheduling."}]},
    })
}

/// The chart's limit is 256 MiB; a listing that begins anew, page by page, is in it.
#[test]
fn twenty_thousand_pods_take_less_than_half_of_the_limit() {
    const PODS: usize = 20_000;
    let pod = pod().to_string();
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let mut gathered = Gathered::default();
    let read = |pod: &Pod| ((pod.namespace().unwrap(), pod.name_any()), ListedPod::of(pod).map(Arc::new));
    for _ in 0..2 {
        gathered.take(Event::<Pod>::Init, read);
        for page in (0..PODS).step_by(500) {
            let page = (page..page + 500)
                .map(|at| pod.replace("NUMBER", &format!("{at:05}")))
                .collect::<Vec<_>>()
                .join(",");
            let pods: Vec<Pod> = serde_json::from_str(&format!("[{page}]")).unwrap();
            pods.into_iter().for_each(|pod| _ = gathered.take(Event::InitApply(pod), read));
        }
        gathered.take(Event::<Pod>::InitDone, read);
    }
    assert_eq!(gathered.live.len(), PODS);
    let [kept, peak] = [HEAP.current_usage(), HEAP.peak_usage()].map(|bytes| (bytes - before) >> 10);
    println!("{kept} KiB kept, at most {peak} KiB, {} bytes a pod", (kept << 10) / PODS);
    assert!(peak < 128 << 10, "{kept} KiB kept, at most {peak} KiB");
}
