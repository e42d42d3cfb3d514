//! One trace follows a pod through the real components, as a collector receives it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;

use gpu_migrate_demo::{self as demo, DemoArgs};
use gpu_migrate_runtime::trace::TraceArgs;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value};
use tokio::sync::mpsc;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// A span as it arrived.
#[derive(Clone, Debug)]
struct Received {
    service: String,
    name: String,
    trace: Vec<u8>,
    id: Vec<u8>,
    parent: Vec<u8>,
    attributes: BTreeMap<String, String>,
}

/// Hands on what it receives.
struct Collector(mpsc::UnboundedSender<Received>);

fn texts(attributes: Vec<KeyValue>) -> BTreeMap<String, String> {
    let text = |attribute: KeyValue| match attribute.value?.value? {
        any_value::Value::StringValue(text) => Some((attribute.key, text)),
        any_value::Value::IntValue(number) => Some((attribute.key, number.to_string())),
        _ => None,
    };
    attributes.into_iter().filter_map(text).collect()
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for of_program in request.into_inner().resource_spans {
            let resource = texts(of_program.resource.unwrap().attributes);
            for span in of_program.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                assert!(span.start_time_unix_nano <= span.end_time_unix_nano);
                let _ = self.0.send(Received {
                    service: resource["service.name"].clone(),
                    name: span.name,
                    trace: span.trace_id,
                    id: span.span_id,
                    parent: span.parent_span_id,
                    attributes: texts(span.attributes),
                });
            }
        }
        Ok(Response::new(Default::default()))
    }
}

/// The demo's own story, with traces.
fn args(collector: std::net::SocketAddr) -> DemoArgs {
    let trace = TraceArgs { otlp_endpoint: Some(format!("http://{collector}").parse().unwrap()) };
    DemoArgs { fast: true, trace, ..DemoArgs::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_trace_follows_a_pod_from_its_review_to_the_start_of_its_container() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, mut received) = mpsc::unbounded_channel();
    let server = tonic::transport::Server::builder().add_service(TraceServiceServer::new(Collector(sender)));
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    demo::run(args(address)).await.unwrap();
    let mut spans = Vec::new();
    while let Ok(span) = received.try_recv() {
        spans.push(span);
    }

    // The path from each start of a container up to the first span.
    let by_id: BTreeMap<_, _> = spans.iter().map(|span: &Received| (span.id.clone(), span)).collect();
    let path = |span: &Received| {
        let mut path = vec![format!("{}: {}", span.service, span.name)];
        let mut at = span;
        while let Some(parent) = by_id.get(&at.parent) {
            assert_eq!(parent.trace, span.trace, "{parent:?}");
            path.insert(0, format!("{}: {}", parent.service, parent.name));
            at = parent;
        }
        path
    };
    let expected = [
        "gpu-migrate-webhook: review",
        "gpu-migrate-extender: filter",
        "gpu-migrate-extender: bind",
        "gpu-migrate-bridge: Allocate",
        "gpu-migrate-bridge: PreStartContainer",
    ];
    for resource in ["tencent.com/vcuda-core", "tencent.com/vcuda-memory"] {
        let is_start = |span: &&Received| {
            span.name == "PreStartContainer" && span.attributes["gpu_migrate.resource"] == resource
        };
        let whole = spans.iter().filter(is_start).filter(|span| path(span) == expected).count();
        assert!(whole >= 6, "{whole} of the six converted pods of danlu: {spans:#?}");
    }
    for span in spans.iter().filter(|span| span.name != "review") {
        assert!(!span.attributes["k8s.pod.uid"].is_empty(), "{span:?}");
        assert_eq!(span.attributes["k8s.namespace.name"], "danlu", "{span:?}");
    }
    let bound = spans.iter().filter(|span| span.name == "bind");
    assert!(
        bound.clone().count() >= 6
            && bound.into_iter().all(|span| span.attributes.contains_key("k8s.node.name"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_never_answers_changes_nothing() {
    // Connections are made and never accepted.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let outcome = demo::run(args(silent.local_addr().unwrap())).await.unwrap();
    assert_eq!((outcome.violations.total(), outcome.legacy, outcome.sharing), (0, 2, 12), "{outcome:?}");
}
