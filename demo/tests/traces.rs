//! One trace follows a pod through the real components, as a collector receives it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::time::Duration;

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

/// A pod on a whole card, which then is converted.
const STORY: &str = "
nodes: [{name: node-a, cards: 1, model: Tesla-T4, memoryMiB: 15360}]
steps:
  - apply: {apiVersion: v1, kind: Namespace, metadata: {name: team, labels: {gpu-migrate.io/project: team}}}
  - apply:
      apiVersion: apps/v1
      kind: Deployment
      metadata: {name: serve, namespace: team}
      spec:
        replicas: 1
        strategy: {rollingUpdate: {maxSurge: 0, maxUnavailable: 1}}
        selector: {matchLabels: {app: serve}}
        template:
          metadata: {labels: {app: serve}}
          spec:
            terminationGracePeriodSeconds: 1
            containers: [{name: main, image: serve, command: [serve], resources: {limits: {nvidia.com/gpu: 1}}}]
  - ready: {namespace: team, pods: 1}
  - apply:
      apiVersion: gpu-migrate.io/v1alpha1
      kind: GPUMigration
      metadata: {name: team}
      spec:
        project: team
        mode: Enforce
        convert: {coresPerCard: 20, blocksPerCard: 12}
        rollout:
          gate: {readyWithinSeconds: 60, soakSeconds: 1, maxRestarts: 0}
          waves: [{workloads: [Deployment/team/serve]}]
  - converted: {namespace: team, pods: 1}
";

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
        Ok(Response::default())
    }
}

fn args(folder: &std::path::Path, story: &str, collector: std::net::SocketAddr) -> DemoArgs {
    let script = folder.join("story.yaml");
    std::fs::write(&script, story).unwrap();
    let trace = TraceArgs { otlp_endpoint: Some(format!("http://{collector}").parse().unwrap()) };
    DemoArgs { script: Some(script), trace, ..DemoArgs::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_trace_follows_a_pod_from_its_review_to_the_start_of_its_container() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, mut received) = mpsc::unbounded_channel();
    let server = tonic::transport::Server::builder().add_service(TraceServiceServer::new(Collector(sender)));
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));

    let folder = tempfile::tempdir().unwrap();
    // The parts stand until the trace has come.
    let story = format!("{STORY}  - pause: 600\n");
    let mut spans: Vec<Received> = Vec::new();
    let collect = async {
        // One Allocate and one PreStartContainer for each of the two vcuda resources.
        while spans.iter().filter(|span| span.name == "PreStartContainer").count() < 2
            || !["review", "filter", "bind"].iter().all(|name| spans.iter().any(|span| span.name == *name))
        {
            spans.push(received.recv().await.unwrap());
        }
    };
    tokio::select! {
        told = demo::run(args(folder.path(), &story, address)) => panic!("the demo ended: {told:?}"),
        outcome = tokio::time::timeout(Duration::from_secs(120), collect) => outcome.expect("the whole trace within two minutes"),
    }

    let root = spans.iter().find(|span| span.name == "review").unwrap();
    assert!(root.parent.is_empty(), "{root:?}");
    assert!(root.attributes["gpu_migrate.policy"].starts_with("team@"), "{root:?}");
    assert!(spans.iter().all(|span| span.trace == root.trace), "one trace: {spans:#?}");
    // The path from each span up to the first.
    let by_id: BTreeMap<_, _> = spans.iter().map(|span| (span.id.clone(), span)).collect();
    let path = |span: &Received| {
        let mut path = vec![format!("{}: {}", span.service, span.name)];
        let mut at = span;
        while let Some(parent) = by_id.get(&at.parent) {
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
        let started = |span: &&Received| {
            span.name == "PreStartContainer" && span.attributes["gpu_migrate.resource"] == resource
        };
        let started = spans.iter().find(started).unwrap();
        assert_eq!(path(started), expected, "{spans:#?}");
        assert_eq!(started.attributes["k8s.container.name"], "main");
    }
    for span in spans.iter().filter(|span| span.name != "review") {
        assert_eq!(span.attributes["k8s.namespace.name"], "team", "{span:?}");
        assert!(span.attributes["k8s.pod.name"].starts_with("serve-"), "{span:?}");
        assert!(!span.attributes["k8s.pod.uid"].is_empty(), "{span:?}");
    }
    let bind = spans.iter().find(|span| span.name == "bind").unwrap();
    assert_eq!(bind.attributes["k8s.node.name"], "node-a");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_never_answers_changes_nothing() {
    // Connections are made and never accepted.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let outcome = demo::run(args(folder.path(), STORY, silent.local_addr().unwrap())).await.unwrap();
    assert_eq!((outcome.violations.total(), outcome.sharing), (0, 1), "{outcome:?}");
}
