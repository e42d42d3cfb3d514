//! The context of a pod's trace: read from its annotation, and handed on with the binding.

use std::sync::Arc;

use async_trait::async_trait;
use gpu_migrate_admission_ext::api::{Api, BindFailure, Binding, Found, Memory};
use gpu_migrate_admission_ext::engine::Settings;
use gpu_migrate_admission_ext::state::pod::PodFacts;
use gpu_migrate_model::names;
use gpu_migrate_runtime::Tasks;
use gpu_migrate_runtime::trace::{SpanMetrics, TraceArgs, Tracer};
use parking_lot::Mutex;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::common::*;

const REVIEW: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// Remembers the annotations of the last Binding.
#[derive(Default)]
struct Recorder {
    memory: Memory,
    context: Mutex<Option<String>>,
}

#[async_trait]
impl Api for Recorder {
    async fn bind(&self, binding: &Binding) -> Result<(), BindFailure> {
        *self.context.lock() = binding.annotations.get(names::TRACEPARENT).cloned();
        self.memory.bind(binding).await
    }
    async fn look_up(&self, namespace: &str, name: &str, uid: &str) -> Result<Found, String> {
        self.memory.look_up(namespace, name, uid).await
    }
    async fn requeue_pods_of(&self, node: &str) -> Result<(), String> {
        self.memory.requeue_pods_of(node).await
    }
    async fn lift_gate(&self, pod: &PodFacts) -> Result<(), String> {
        self.memory.lift_gate(pod).await
    }
    async fn warn(&self, pod: &PodFacts, reason: &'static str, message: String) {
        self.memory.warn(pod, reason, message).await;
    }
}

#[tokio::test]
async fn the_binding_names_its_own_span_where_the_pod_is_traced() {
    // Connections are made and nothing is answered.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", silent.local_addr().unwrap()).parse().unwrap();
    let args = TraceArgs { otlp_endpoint: Some(endpoint) };
    let mut tasks = Tasks::new(CancellationToken::new());
    let on = Tracer::start(&args, "extender", None, SpanMetrics::default(), &mut tasks).unwrap();
    for (tracer, annotated, expected) in
        [(on.clone(), true, true), (on, false, false), (Tracer::default(), true, false)]
    {
        let mut pod = shared("p", &[(40, 4)]);
        if annotated {
            pod["metadata"]["annotations"][names::TRACEPARENT] = json!(REVIEW);
        }
        let api = Arc::new(Recorder::default());
        let settings = Settings { tracer: tracer.clone(), ..Settings::default() };
        let engine =
            engine_with(Arc::clone(&api) as Arc<dyn Api>, settings, &[node("a", 1, 16), pod.clone()]);
        assert_eq!(passing(&engine, &pod, &["a"]), ["a"]);
        let filter = tracer.take_kept("uid-p");
        assert_eq!(filter.is_some(), expected, "filter has a span below the review's");
        assert_eq!(bind(&engine, &pod, "a").await, "");
        let bound = api.context.lock().clone();
        assert_eq!(bound.is_some(), expected, "{bound:?}");
        if let Some(bound) = bound {
            assert_eq!(bound[..36], REVIEW[..36], "the same trace");
            assert!(bound != REVIEW && Some(bound) != filter, "a span of its own");
        }
    }
}
