//! Clients without credentials that try to keep the apiserver from the webhook: pods are converted all the while.

use std::{
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use gpu_migrate_cluster_tests::{
    Cluster,
    cluster::TIMEOUT,
    http,
    metrics::WebhookCalls,
    migration::{GPU, dry_run, limit},
    process::output,
    stage::WEBHOOK,
    wait::{self, Seen},
    workload::{container, pod_spec},
};
use gpu_migrate_model::names::{Dialect, MIG_PREFIX};
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use kube::{Api, Client};
use rustls::pki_types::{CertificateDer, ServerName, pem::PemObject as _};
use serde_json::json;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
    task::JoinSet,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

/// Of the container in `deploy/`.
const MEMORY: &str = "128Mi";
const MEMORY_BYTES: u64 = 128 << 20;
const IDLE: usize = 2000;
const SLOW: usize = 300;
const LARGE: usize = 50;
const STATUS: usize = 200;
const ODD_KEYS: usize = 60_000;
/// At a time; each creates one pod after the other.
const CREATORS: usize = 4;
/// From one review at the webhook itself to the next.
const BETWEEN: Duration = Duration::from_millis(5);
/// How long the load stays once it is complete.
const TIME: Duration = Duration::from_secs(10);
/// Until a client that was refused or closed tries again.
const AGAIN: Duration = Duration::from_secs(1);
/// For 2,600 handshakes and all limits, on two cores that do this and all the rest.
const COMPLETE: Duration = TIMEOUT.saturating_mul(3);

/// 2,000 idle connections, 300 bodies a byte at a time, 50 bodies of 7 MiB, 200 connections to the status port and a pod with
/// 60,000 resource names, against one replica with the memory of its container: each pod is converted, and nothing restarts.
pub(crate) async fn clients_without_credentials_keep_no_pod_from_being_converted(
    cluster: &mut Cluster,
) -> Result<()> {
    let mut limit = MemoryLimit::new()?;
    cluster.restart_webhook_in(Some(&limit.folder)).await?;
    let namespace = cluster.project("hostile", json!({})).await?;
    let pid = cluster.component("gpu-migrate-webhook")?.pid();
    let before = WebhookCalls::read(&cluster.client).await?;
    let outcome = under_load(cluster, &namespace).await;
    let calls = WebhookCalls::read(&cluster.client).await?.since(&before);
    let peak = limit.peak()?;
    let restarted = cluster.component("gpu-migrate-webhook")?.pid() != pid;
    cluster.check()?;
    cluster.restart_webhook_in(None).await?;
    limit.remove();

    let (pods, reviews, counts) = outcome?;
    for (what, times) in [("pods created by the apiserver", &pods), ("reviews at the webhook", &reviews)] {
        let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
        eprintln!("    {} {what}: p50 {:.1?}, p99 {:.1?}", times.len(), at(0.5), at(0.99));
    }
    eprintln!("    {calls:?}, memory at most {} MiB of {MEMORY}; {}", peak >> 20, counts.0.join(", "));
    ensure!(!restarted && calls.failed == 0 && calls.failed_open == 0, "restarted: {restarted}, {calls:?}");
    ensure!(calls.answered >= pods.len() as u64, "{calls:?} for {} pods: this proves nothing", pods.len());
    Ok(())
}

/// What the webhook counts of its load: samples without their common prefix.
struct Counts(Vec<String>);

impl Counts {
    async fn read(port: u16) -> Result<Self> {
        let text = http::get(port, "/metrics").await?;
        let ours = text.lines().filter_map(|line| line.strip_prefix("gpu_migrate_webhook_"));
        let of_load = ours.filter(|line| line.starts_with("connections") || line.starts_with("rejected"));
        Ok(Self(of_load.map(str::to_owned).collect()))
    }

    fn get(&self, name: &str) -> usize {
        let value = self.0.iter().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        value.unwrap_or_default()
    }

    fn closed(&self, reason: &str) -> usize {
        self.get(&format!("connections_closed_total{{reason=\"{reason}\"}}"))
    }

    /// Whether every part of the load has met its limit.
    fn complete(&self) -> bool {
        self.get("connections") > SLOW
            && self.closed("peer") + self.closed("full") > IDLE / 2
            && self.get("rejected_total{reason=\"deadline\"}") > SLOW
            && self.get("rejected_total{reason=\"overload\"}") > 0
    }
}

/// How long each creation and each review took, ascending, and what the webhook counted.
async fn under_load(
    cluster: &mut Cluster,
    namespace: &str,
) -> Result<(Vec<Duration>, Vec<Duration>, Counts)> {
    // As root: the limit of a shell is often 1024.
    output(Command::new("prlimit").args(["--nofile=8192", "--pid", &std::process::id().to_string()]))?;
    let [port, status] = cluster.setup.ports.webhook;
    let tls = trust(&cluster.client).await?;
    let stop = Arc::new(AtomicBool::new(false));
    let mut creators = JoinSet::new();
    for _ in 0..CREATORS {
        creators.spawn(create(cluster.client.clone(), namespace.to_owned(), stop.clone()));
    }
    // From the apiserver's address.
    let reviewer = connect(1, port, &tls).await?;
    let reviewer = tokio::spawn(review(reviewer, namespace.to_owned(), stop.clone()));
    // Each from an address of its own, as other pods would: the webhook counts by address.
    let mut load = JoinSet::new();
    for index in 0..IDLE {
        let tls = tls.clone();
        load.spawn(async move {
            // A few at a time, or handshakes are all that they compete for.
            tokio::time::sleep(Duration::from_millis(index as u64 * 5)).await;
            hold(|| connect(2, port, &tls)).await;
        });
    }
    for _ in 0..SLOW {
        let tls = tls.clone();
        load.spawn(async move {
            loop {
                let _ = dribble(persistent(|| connect(3, port, &tls)).await).await;
            }
        });
    }
    for _ in 0..LARGE {
        let tls = tls.clone();
        load.spawn(async move {
            loop {
                // An end within the body is an answer too.
                let _ = large(persistent(|| connect(4, port, &tls)).await).await;
                tokio::time::sleep(AGAIN * 5).await;
            }
        });
    }
    for _ in 0..STATUS {
        load.spawn(hold(move || tcp(5, status)));
    }
    let loaded = hold_out(cluster, namespace, status).await;
    stop.store(true, Ordering::Relaxed);
    let mut pods = Vec::new();
    while let Some(times) = creators.join_next().await {
        pods.extend(times??);
    }
    let mut reviews = reviewer.await??;
    load.shutdown().await;
    pods.sort_unstable();
    reviews.sort_unstable();
    Ok((pods, reviews, loaded?))
}

/// Waits until the load is complete, and for a while more; the probes are answered, and a pod of many names too.
async fn hold_out(cluster: &mut Cluster, namespace: &str, status: u16) -> Result<Counts> {
    cluster
        .until("the load to be complete", COMPLETE, || async {
            let counts = Counts::read(status).await?;
            Ok(Seen::from_bool(counts.complete(), || counts.0.join(", ")))
        })
        .await?;
    wait::throughout("readiness and liveness", TIME, || async {
        http::get(status, "/livez").await?;
        http::get(status, "/readyz").await.map(drop)
    })
    .await?;
    odd_pod(cluster, namespace).await?;
    Counts::read(status).await
}

/// A review after the other on one connection, as the apiserver sends them.
async fn review(mut stream: Connection, namespace: String, stop: Arc<AtomicBool>) -> Result<Vec<Duration>> {
    let object = json!({"metadata": {"name": "p", "namespace": namespace}, "spec": pod_spec(GPU)});
    let resource = json!({"group": "", "version": "v1", "resource": "pods"});
    let body = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
        "uid": "u", "operation": "CREATE", "resource": resource, "namespace": namespace, "object": object}});
    let body = body.to_string();
    let request = format!("{HEAD}{}\r\n\r\n{body}", body.len());
    let mut times = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let begin = Instant::now();
        stream.write_all(request.as_bytes()).await?;
        let answer = response(&mut stream).await?;
        times.push(begin.elapsed());
        ensure!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"patch\""), "{answer}");
        tokio::time::sleep(BETWEEN).await;
    }
    Ok(times)
}

/// One response with a length.
async fn response(stream: &mut Connection) -> Result<String> {
    let mut bytes = vec![0; 64 << 10];
    let mut filled = 0;
    loop {
        let count = stream.read(&mut bytes[filled..]).await?;
        ensure!(count > 0, "the connection was closed after {filled} bytes");
        filled += count;
        let text = String::from_utf8_lossy(&bytes[..filled]);
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length =
            head.lines().find_map(|line| line.strip_prefix("content-length: ")).context("no length")?;
        if body.len() >= length.parse()? {
            return Ok(text.into_owned());
        }
    }
}

/// Creates pods until it is stopped; fails for one that is not converted.
async fn create(client: Client, namespace: String, stop: Arc<AtomicBool>) -> Result<Vec<Duration>> {
    let mut times = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let begin = Instant::now();
        let pod = dry_run(&client, &namespace, pod_spec(GPU)).await?;
        times.push(begin.elapsed());
        ensure!(limit(&pod, &Dialect::default().legacy) == 0, "not converted after {:?}", begin.elapsed());
    }
    Ok(times)
}

/// A pod that names so many resources that reading it could take long.
async fn odd_pod(cluster: &Cluster, namespace: &str) -> Result<()> {
    let names: Vec<String> = (0..ODD_KEYS).map(|index| format!("{MIG_PREFIX}{index}")).collect();
    let limits: Vec<(&str, u64)> = names.iter().map(|name| (name.as_str(), 1)).collect();
    let mut spec = pod_spec(GPU);
    spec["containers"] = json!([container("main", &limits)]);
    let pod = dry_run(&cluster.client, namespace, spec).await.context("the pod with odd keys")?;
    ensure!(limit(&pod, &format!("{MIG_PREFIX}7")) == 1, "it keeps what no policy maps");
    Ok(())
}

type Connection = TlsStream<TcpStream>;

/// A client that trusts what the apiserver trusts.
async fn trust(client: &Client) -> Result<TlsConnector> {
    let hook = Api::<MutatingWebhookConfiguration>::all(client.clone()).get(WEBHOOK).await?;
    let bundle = hook.webhooks.into_iter().flatten().find_map(|webhook| webhook.client_config.ca_bundle);
    let mut roots = rustls::RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&bundle.context("no caBundle")?.0) {
        roots.add(certificate?)?;
    }
    let config = rustls::ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

async fn tcp(from: u8, port: u16) -> Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind((Ipv4Addr::new(127, 0, 0, from), 0).into())?;
    Ok(socket.connect((Ipv4Addr::LOCALHOST, port).into()).await?)
}

async fn connect(from: u8, port: u16, tls: &TlsConnector) -> Result<Connection> {
    Ok(tls.connect(ServerName::try_from("localhost")?, tcp(from, port).await?).await?)
}

/// Keeps a connection as long as the server does, and then makes another.
async fn hold<T: AsyncRead + Unpin, F: Future<Output = Result<T>>>(attempt: impl Fn() -> F) {
    loop {
        let mut held = persistent(&attempt).await;
        // Until the server closes it.
        let _ = held.read(&mut [0]).await;
        tokio::time::sleep(AGAIN * 10).await;
    }
}

/// Tries until it connects: what a busy server refuses must come again, or there is no load.
async fn persistent<T, F: Future<Output = Result<T>>>(attempt: impl Fn() -> F) -> T {
    loop {
        if let Ok(connection) = attempt().await {
            return connection;
        }
        tokio::time::sleep(AGAIN).await;
    }
}

const HEAD: &str = "POST /mutate?timeout=30s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: ";

/// A body of which a byte comes each second.
async fn dribble(mut stream: Connection) -> Result<()> {
    stream.write_all(format!("{HEAD}100000\r\n\r\n").as_bytes()).await?;
    loop {
        stream.write_all(b"{").await?;
        stream.flush().await?;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// The largest body that is not refused for its length alone.
async fn large(mut stream: Connection) -> Result<()> {
    const SIZE: usize = 7 << 20;
    stream.write_all(format!("{HEAD}{SIZE}\r\n\r\n").as_bytes()).await?;
    let mut body = b"{\"kind\":\"".to_vec();
    body.resize(SIZE, b'a');
    stream.write_all(&body).await?;
    stream.read_to_end(&mut Vec::new()).await?;
    Ok(())
}

/// A cgroup with the memory limit of the webhook's container, of either version.
struct MemoryLimit {
    folder: PathBuf,
    files: [&'static str; 2],
}

impl MemoryLimit {
    fn new() -> Result<Self> {
        let root = Path::new("/sys/fs/cgroup");
        let (parent, files) = if root.join("memory").is_dir() {
            (root.join("memory"), ["memory.limit_in_bytes", "memory.max_usage_in_bytes"])
        } else {
            (root.to_owned(), ["memory.max", "memory.peak"])
        };
        let folder = parent.join("gpu-migrate-hostile");
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        std::fs::write(folder.join(files[0]), MEMORY_BYTES.to_string())
            .with_context(|| format!("{}: cannot limit its memory", folder.display()))?;
        Ok(Self { folder, files })
    }

    /// Bytes.
    fn peak(&self) -> Result<u64> {
        Ok(std::fs::read_to_string(self.folder.join(self.files[1]))?.trim().parse()?)
    }

    fn remove(&mut self) {
        // It is empty by now; one that stays is used again.
        let _ = std::fs::remove_dir(&self.folder);
    }
}
