//! Traces of pods, sent by OTLP over gRPC to an OpenTelemetry collector.
//!
//! One trace follows a pod through the components; its context, a W3C `traceparent`, travels in an annotation of the pod. No request
//! waits for the collector: a span that has ended goes into a queue of limited length, from which a background task sends batches; what
//! does not fit is dropped and counted. Where no collector is named a [`Tracer`] does nothing.
//!
//! Spans are made here and not by the SDK's tracer: one is sent only if [`Span::end`] is called, so that a review that converts nothing
//! leaves no trace, and the SDK's batch processor counts nothing of what it drops.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use http::Uri;
use opentelemetry::propagation::{Extractor, TextMapPropagator as _};
use opentelemetry::trace::{
    SpanContext, SpanId, SpanKind, Status, TraceContextExt as _, TraceFlags, TraceState,
};
use opentelemetry::{Context, InstrumentationScope, KeyValue, Value};
use opentelemetry_otlp::{ExporterBuildError, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{
    IdGenerator as _, RandomIdGenerator, SpanData, SpanEvents, SpanExporter, SpanLinks,
};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::Tasks;

/// Spans that wait to be sent, less than 1 KiB each.
const QUEUE: usize = 1024;
/// Spans in one request.
const BATCH: usize = 256;
/// How long spans are gathered after the first.
const GATHER: Duration = Duration::from_millis(500);
/// For one request and its repetitions.
const EXPORT: Duration = Duration::from_secs(5);
/// For the last one, when the program stops.
const LAST_EXPORT: Duration = Duration::from_millis(500);
/// Spans that later ones may go below; with one more, all are forgotten.
const KEPT: usize = 4096;

/// The header of W3C Trace Context.
pub const TRACEPARENT: &str = "traceparent";

/// Where traces are sent to.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct TraceArgs {
    /// Send a trace of each converted pod to the OpenTelemetry collector at this address, by OTLP over gRPC without TLS, such as
    /// `http://otel-collector.monitoring:4317` [default: no traces]
    #[arg(long, env = "GPU_MIGRATE_OTLP_ENDPOINT", value_name = "URL", value_parser = endpoint)]
    pub otlp_endpoint: Option<Uri>,
}

fn endpoint(text: &str) -> Result<Uri, String> {
    let plain = |uri: &Uri| {
        uri.scheme_str() == Some("http") && uri.port().is_some() && ["", "/"].contains(&uri.path())
    };
    text.parse().ok().filter(plain).ok_or_else(|| {
        format!(
            "{text:?}: expected http://HOST:PORT of a collector's OTLP receiver for gRPC; a collector that demands TLS needs another \
             before it, on the node or in the cluster"
        )
    })
}

/// What became of spans: `…_spans_total{outcome}`, where `outcome` is `exported`, `failed` (the collector did not take them) or
/// `dropped` (too many were waiting).
#[derive(Clone, Debug, Default)]
pub struct SpanMetrics(Family<OutcomeLabel, Counter>);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

impl SpanMetrics {
    /// Registers the counter; the registry's prefix names the component.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Spans of traces: exported, failed (the collector did not take them) or dropped (too many were waiting)";
        registry.register("spans", help, self.0.clone());
    }

    /// How many had this outcome.
    #[must_use]
    pub fn count(&self, outcome: &'static str) -> u64 {
        self.0.get_or_create(&OutcomeLabel { outcome }).get()
    }

    fn add(&self, outcome: &'static str, spans: usize) {
        self.0.get_or_create(&OutcomeLabel { outcome }).inc_by(u64::try_from(spans).unwrap_or(u64::MAX));
    }
}

/// The exporter cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("--otlp-endpoint {endpoint}: {source}")]
pub struct TraceError {
    endpoint: Uri,
    source: ExporterBuildError,
}

/// Begins spans, where a collector is named. Clones share one queue.
#[derive(Clone, Debug, Default)]
pub struct Tracer(Option<Arc<Queue>>);

struct Queue {
    spans: mpsc::Sender<SpanData>,
    metrics: SpanMetrics,
    kept: Mutex<HashMap<String, String>>,
    ids: RandomIdGenerator,
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("free", &self.spans.capacity()).finish_non_exhaustive()
    }
}

impl Tracer {
    /// Starts to send what is traced to the collector that `args` names, in the name of this program, on this node where it has one.
    ///
    /// # Errors
    /// [`TraceError`]; not where the collector does not answer.
    pub fn start(
        args: &TraceArgs,
        program: &'static str,
        node: Option<&str>,
        metrics: SpanMetrics,
        tasks: &mut Tasks,
    ) -> Result<Self, TraceError> {
        let Some(endpoint) = &args.otlp_endpoint else { return Ok(Self::default()) };
        let built = {
            // Its connection is served by the runtime on which it is made.
            let _background = tasks.background().enter();
            let exporter = opentelemetry_otlp::SpanExporter::builder().with_tonic();
            exporter.with_endpoint(endpoint.to_string()).with_timeout(EXPORT).build()
        };
        let mut exporter = built.map_err(|source| TraceError { endpoint: endpoint.clone(), source })?;
        let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
        let node = node.map(|node| KeyValue::new("k8s.node.name", node.to_owned()));
        let resource = Resource::builder().with_service_name(program).with_attribute(version);
        exporter.set_resource(&resource.with_attributes(node).build());
        tracing::info!(%endpoint, "sending traces");
        Ok(Self::queue(exporter, metrics, tasks))
    }

    fn queue(exporter: impl SpanExporter + 'static, metrics: SpanMetrics, tasks: &mut Tasks) -> Self {
        let (spans, queued) = mpsc::channel(QUEUE);
        tasks.spawn_background("trace exporter", export(exporter, queued, metrics.clone(), tasks.stop()));
        let (kept, ids) = (Mutex::default(), RandomIdGenerator::default());
        Self(Some(Arc::new(Queue { spans, metrics, kept, ids })))
    }

    #[must_use]
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// A span that began at `began` below `parent`, a `traceparent`. `None` where nothing is traced, or the parent is not.
    #[must_use]
    pub fn below(&self, parent: Option<&str>, name: &'static str, began: Instant) -> Option<Span> {
        let queue = self.0.as_ref()?;
        Some(Span::begin(queue, Some(context(parent?)?), name, began))
    }

    /// The same below `caller`, else the first span of a new trace.
    #[must_use]
    pub fn first(&self, caller: Option<&str>, name: &'static str, began: Instant) -> Option<Span> {
        Some(Span::begin(self.0.as_ref()?, caller.and_then(context), name, began))
    }

    /// The `traceparent` of the last span that was kept for `key`, once.
    #[must_use]
    pub fn take_kept(&self, key: &str) -> Option<String> {
        self.0.as_ref()?.kept().remove(key)
    }
}

impl Queue {
    fn kept(&self) -> std::sync::MutexGuard<'_, HashMap<String, String>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads a `traceparent`; `None` where it is malformed, or of a trace that is not sampled.
fn context(traceparent: &str) -> Option<SpanContext> {
    struct Carrier<'a>(&'a str);
    impl Extractor for Carrier<'_> {
        fn get(&self, key: &str) -> Option<&str> {
            (key == TRACEPARENT).then_some(self.0)
        }
        fn keys(&self) -> Vec<&str> {
            vec![TRACEPARENT]
        }
    }
    let read = TraceContextPropagator::new().extract_with_context(&Context::new(), &Carrier(traceparent));
    Some(read.span().span_context().clone()).filter(|context| context.is_valid() && context.is_sampled())
}

/// Something that is done to a pod. It is sent when it ends; one that is dropped is forgotten.
#[derive(Debug)]
#[must_use]
pub struct Span {
    queue: Arc<Queue>,
    data: SpanData,
}

impl Span {
    fn begin(queue: &Arc<Queue>, parent: Option<SpanContext>, name: &'static str, began: Instant) -> Self {
        let trace = parent.as_ref().map_or_else(|| queue.ids.new_trace_id(), SpanContext::trace_id);
        let id = queue.ids.new_span_id();
        let now = SystemTime::now();
        let data = SpanData {
            span_context: SpanContext::new(trace, id, TraceFlags::SAMPLED, false, TraceState::NONE),
            parent_span_id: parent.as_ref().map_or(SpanId::INVALID, SpanContext::span_id),
            parent_span_is_remote: parent.is_some(),
            span_kind: SpanKind::Server,
            name: name.into(),
            start_time: now.checked_sub(began.elapsed()).unwrap_or(now),
            end_time: now,
            attributes: Vec::new(),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: InstrumentationScope::default(),
        };
        Self { queue: Arc::clone(queue), data }
    }

    /// For the spans below it.
    #[must_use]
    pub fn traceparent(&self) -> String {
        let context = &self.data.span_context;
        format!("00-{}-{}-{:02x}", context.trace_id(), context.span_id(), context.trace_flags())
    }

    /// Sets an attribute.
    pub fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        self.data.attributes.push(KeyValue::new(key, value));
    }

    /// Names the pod that it is about.
    pub fn set_pod(&mut self, namespace: &str, name: &str, uid: &str) {
        self.set("k8s.namespace.name", namespace.to_owned());
        self.set("k8s.pod.name", name.to_owned());
        if !uid.is_empty() {
            self.set("k8s.pod.uid", uid.to_owned());
        }
    }

    /// It failed.
    pub fn fail(&mut self, why: impl Into<Cow<'static, str>>) {
        self.data.status = Status::error(why);
    }

    /// The next span about `key` in this process can go below it ([`Tracer::take_kept`]).
    pub fn keep_for(&self, key: &str) {
        let mut kept = self.queue.kept();
        if kept.len() >= KEPT {
            kept.clear();
        }
        kept.insert(key.to_owned(), self.traceparent());
    }

    /// Ends now, and is sent.
    pub fn end(mut self) {
        self.data.end_time = SystemTime::now();
        if self.queue.spans.try_send(self.data).is_err() {
            self.queue.metrics.add("dropped", 1);
        }
    }
}

/// Sends spans in batches until `stop`, and then once more what waits.
async fn export(
    exporter: impl SpanExporter,
    mut queued: mpsc::Receiver<SpanData>,
    metrics: SpanMetrics,
    stop: CancellationToken,
) {
    let mut failing = false;
    let mut batch = Vec::new();
    loop {
        if stop.run_until_cancelled(queued.recv_many(&mut batch, BATCH)).await == Some(0) {
            // Nobody traces any more.
            stop.cancelled().await;
        }
        stop.run_until_cancelled(tokio::time::sleep(GATHER)).await;
        while batch.len() < BATCH
            && let Ok(span) = queued.try_recv()
        {
            batch.push(span);
        }
        let last = stop.is_cancelled();
        if batch.is_empty() {
            return;
        }
        let spans = batch.len();
        let sent = tokio::time::timeout(EXPORT, exporter.export(std::mem::take(&mut batch)));
        let stopped = async {
            stop.cancelled().await;
            tokio::time::sleep(LAST_EXPORT).await;
        };
        let problem = tokio::select! {
            sent = sent => match sent {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some(format!("no answer within {EXPORT:?}")),
            },
            () = stopped => Some("no answer before the program stopped".to_owned()),
        };
        metrics.add(if problem.is_none() { "exported" } else { "failed" }, spans);
        // Once, and not for each batch: `…_spans_total` has the number.
        match &problem {
            Some(problem) if !failing => {
                tracing::warn!(
                    problem,
                    "the collector of traces does not take them; trying again with later ones"
                );
            }
            None if failing => tracing::info!("the collector takes traces again"),
            _ => {}
        }
        failing = problem.is_some();
        if last || failing && stop.is_cancelled() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use opentelemetry_sdk::error::OTelSdkResult;
    use tokio::sync::Notify;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    /// Takes batches; each only after `answer` has notified it, where there is one.
    #[derive(Clone, Debug, Default)]
    struct Collector {
        batches: Arc<Mutex<Vec<Vec<SpanData>>>>,
        answer: Option<Arc<Notify>>,
    }

    impl SpanExporter for Collector {
        async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
            self.batches.lock().unwrap().push(batch);
            if let Some(answer) = &self.answer {
                answer.notified().await;
            }
            Ok(())
        }
    }

    impl Collector {
        fn spans(&self) -> Vec<SpanData> {
            self.batches.lock().unwrap().iter().flatten().cloned().collect()
        }
    }

    fn traced(collector: &Collector) -> (Tracer, SpanMetrics, Tasks) {
        let (metrics, mut tasks) = (SpanMetrics::default(), Tasks::new(CancellationToken::new()));
        (Tracer::queue(collector.clone(), metrics.clone(), &mut tasks), metrics, tasks)
    }

    #[tokio::test(start_paused = true)]
    async fn a_trace_goes_on_by_its_traceparent_and_ended_spans_alone_are_sent() {
        let collector = Collector::default();
        let (tracer, metrics, tasks) = traced(&collector);
        let mut first = tracer.first(None, "review", Instant::now()).unwrap();
        first.set_pod("team", "train", "");
        let parent = first.traceparent();
        first.end();
        let mut second = tracer.below(Some(&parent), "filter", Instant::now()).unwrap();
        second.keep_for("uid");
        second.fail("no node");
        second.end();
        let kept = tracer.take_kept("uid").unwrap();
        assert_eq!(tracer.take_kept("uid"), None, "once");
        tracer.below(Some(&kept), "bind", Instant::now()).unwrap().end();
        drop(tracer.first(None, "forgotten", Instant::now()).unwrap());
        tokio::time::sleep(2 * GATHER).await;
        let spans = collector.spans();
        assert_eq!(spans.iter().map(|span| &*span.name).collect::<Vec<_>>(), ["review", "filter", "bind"]);
        assert_eq!(spans[0].parent_span_id, SpanId::INVALID);
        for pair in spans.windows(2) {
            assert_eq!(pair[1].parent_span_id, pair[0].span_context.span_id());
            assert_eq!(pair[1].span_context.trace_id(), pair[0].span_context.trace_id());
        }
        assert_eq!(spans[1].status, Status::error("no node"));
        assert_eq!(spans[0].attributes.len(), 2, "a pod has no UID before it is created");
        assert_eq!(metrics.count("exported"), 3);
        tasks.shut_down(Duration::from_secs(1)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_is_not_traced_begins_no_span_below_it() {
        let collector = Collector::default();
        let (tracer, ..) = traced(&collector);
        assert_eq!(
            &tracer.first(Some(PARENT), "review", Instant::now()).unwrap().traceparent()[..36],
            &PARENT[..36]
        );
        let not_sampled = PARENT.replace("-01", "-00");
        for parent in ["", "x", "00-0-0-01", &PARENT.replace("0af", "0AF"), &not_sampled] {
            assert!(tracer.below(Some(parent), "filter", Instant::now()).is_none(), "{parent}");
            let own = tracer.first(Some(parent), "review", Instant::now()).unwrap().traceparent();
            assert_ne!(own[..36], PARENT[..36], "{parent}");
        }
        assert!(tracer.below(None, "filter", Instant::now()).is_none());
        let off = Tracer::default();
        assert!(off.first(Some(PARENT), "review", Instant::now()).is_none());
        assert!(off.below(Some(PARENT), "filter", Instant::now()).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_collector_that_hangs_costs_spans_and_nothing_else() {
        let answer = Arc::new(Notify::new());
        let collector = Collector { answer: Some(Arc::clone(&answer)), ..Collector::default() };
        let (tracer, metrics, tasks) = traced(&collector);
        let span = || tracer.first(None, "review", Instant::now()).unwrap().end();
        span();
        tokio::time::sleep(GATHER + EXPORT / 2).await;
        assert_eq!(collector.spans().len(), 1, "it is being sent");
        // As many as can wait, and some more, without a pause in which the exporter could run.
        (0..QUEUE + 10).for_each(|_| span());
        assert_eq!(metrics.count("dropped"), 10);
        tokio::time::sleep(EXPORT).await;
        assert_eq!(metrics.count("failed"), 1);
        answer.notify_one();
        tokio::time::sleep(EXPORT).await;
        assert_eq!(metrics.count("exported"), BATCH as u64, "it has answered once");
        // The program stops although the collector hangs.
        let before = tokio::time::Instant::now();
        tasks.shut_down(Duration::from_secs(60)).await;
        assert!(before.elapsed() <= LAST_EXPORT);
    }

    #[tokio::test(start_paused = true)]
    async fn what_waits_is_sent_when_the_program_stops() {
        let collector = Collector::default();
        let (tracer, metrics, tasks) = traced(&collector);
        tracer.first(None, "review", Instant::now()).unwrap().end();
        tasks.shut_down(Duration::from_secs(1)).await;
        assert_eq!(metrics.count("exported"), 1);
    }

    #[tokio::test]
    async fn nothing_is_started_without_an_endpoint_and_an_absent_collector_is_no_error() {
        #[derive(Debug, Parser)]
        struct Args {
            #[command(flatten)]
            trace: TraceArgs,
        }
        let start = |arguments: &[&str]| {
            let args =
                Args::try_parse_from([&["p"][..], arguments].concat()).map_err(|error| error.to_string())?;
            let mut tasks = Tasks::new(CancellationToken::new());
            let metrics = SpanMetrics::default();
            Ok::<_, String>(Tracer::start(&args.trace, "p", None, metrics, &mut tasks).unwrap().is_on())
        };
        assert_eq!(start(&[]), Ok(false));
        assert_eq!(start(&["--otlp-endpoint", "http://127.0.0.1:1"]), Ok(true));
        for wrong in [
            "https://collector:4317",
            "http://collector",
            "collector:4317",
            "http://collector:4318/v1/traces",
        ] {
            let error = start(&["--otlp-endpoint", wrong]).unwrap_err();
            assert!(error.contains(wrong) && error.contains("expected http://HOST:PORT"), "{error}");
        }
    }
}
