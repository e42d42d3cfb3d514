//! Throughput and latency over TLS keep-alive, against an echo server on the same stack in the same run.
//!
//! Both run as processes of their own, so that memory and CPU are theirs alone: the webhook is the program itself, the
//! echo server is this one started again. Rounds alternate, and the median of the rounds' ratios is reported, so that
//! other work on the machine hits both. Full speed first; then both at the same pace, since latencies at full speed are
//! those of different loads; connections take turns within an interval. Targets: processor time of a request at most the echo server's,
//! the review in process and 2 µs; p99 at 4,000 a second at most 1.2 of the echo server's; context switches at most twice its; resident
//! memory below 20 MiB.
//!
//! As images are built: `cargo bench -p gpu-migrate-webhook --profile dist --bench load -- [rounds] [seconds] [connections]`
//!
//! With `GPU_MIGRATE_PEERS=DIR` the webhooks of HAMi and vgpu-manager get the same bodies, at full speed and at a pace that all of them
//! keep; those that are in DIR. Target: fifteen requests in the processor time of one of theirs. Built in checkouts of theirs, by Go:
//! `mkdir cmd/webhook && cp OURS/webhook/benches/peers/hami.go cmd/webhook/main.go && go build -o DIR/hami ./cmd/webhook` and
//! `go build -o DIR/vgpu-manager ./cmd/device-webhook`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::hint::black_box;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::DefaultBodyLimit;
use axum::routing::post;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use gpu_migrate_certs::authority::Ca;
use gpu_migrate_certs::{Certs, Lifetimes, Options, Source, wall_clock};
use gpu_migrate_runtime::serve::{Limits, serve};
use gpu_migrate_webhook::metrics::Metrics;
use gpu_migrate_webhook::policy::Settings;
use gpu_migrate_webhook::review::answer;
use gpu_migrate_webhook::source::Store;
use gpu_migrate_webhook::source::file::FileSource;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use rustls_pki_types::ServerName;
use rustls_pki_types::pem::PemObject;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const CAPTURES: [&str; 8] = [
    "bare-pod",
    "bare-pod-generateName",
    "deployment",
    "job",
    "statefulset",
    "daemonset",
    "init-containers",
    "limits-and-requests",
];

const POLICY: &str = r#"
apiVersion: gpu-migrate.io/v1alpha1
kind: GPUMigration
metadata: {name: p, generation: 1}
spec:
  project: p
  mode: Enforce
  scheduling:
    nodeSelector: {remove: [gpu-type], set: {pool: shared}}
    tolerations: {removeKeys: [nvidia.com/gpu], add: [{key: pool, operator: Equal, value: shared, effect: NoSchedule}]}
---
apiVersion: v1
kind: Namespace
metadata: {name: default, labels: {gpu-migrate.io/opt-in: "true", gpu-migrate.io/project: p}}
"#;

#[tokio::main]
async fn main() -> Result<()> {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    if let [role, folder, address] = arguments.as_slice()
        && role == "echo-server"
    {
        return echo_server(Path::new(folder), address.parse()?).await;
    }
    let number = |index: usize, default: usize| {
        arguments.get(index).and_then(|text| text.parse::<usize>().ok()).unwrap_or(default)
    };
    compare(number(0, 7), Duration::from_secs(number(1, 2) as u64), number(2, 8)).await
}

async fn echo_server(folder: &Path, address: SocketAddr) -> Result<()> {
    let options =
        Options { owner: "echo".into(), names: vec!["localhost".into()], lifetimes: Default::default() };
    let (certs, _rotator) = Certs::start(Source::folder(folder), options, wall_clock()).await?;
    let json = [("content-type", "application/json")];
    let echo = post(move |body: Bytes| std::future::ready((json, body)));
    let router = Router::new().route("/mutate", echo).layer(DefaultBodyLimit::max(7 << 20));
    let listener = TcpListener::bind(address).await?;
    let service = TowerToHyperService::new(router);
    serve(listener, Some(certs.server_config(None)?), service, Limits::default(), CancellationToken::new())
        .await;
    Ok(())
}

/// A server in a process of its own; killed when dropped.
struct Server {
    name: &'static str,
    path: &'static str,
    child: Child,
    address: SocketAddr,
    tls: Arc<rustls::ClientConfig>,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// Waits until it accepts connections at the address, with the certificate of the folder.
    async fn start(
        (name, path): (&'static str, &'static str),
        mut command: Command,
        folder: &Path,
        address: SocketAddr,
    ) -> Result<Self> {
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        for _ in 0..200 {
            tokio::time::sleep(Duration::from_millis(50)).await;
            if TcpStream::connect(address).await.is_ok() {
                break;
            }
        }
        let mut roots = rustls::RootCertStore::empty();
        for certificate in rustls_pki_types::CertificateDer::pem_file_iter(folder.join("ca.crt"))? {
            roots.add(certificate?)?;
        }
        let tls = rustls::ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        Ok(Self { name, path, child, address, tls: Arc::new(tls) })
    }

    async fn connect(&self) -> Result<SendRequest<Full<Bytes>>> {
        let tcp = TcpStream::connect(self.address).await?;
        tcp.set_nodelay(true)?;
        let connector = tokio_rustls::TlsConnector::from(Arc::clone(&self.tls));
        let stream = connector.connect(ServerName::try_from("localhost")?, tcp).await?;
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        Ok(sender)
    }

    /// Peak of resident memory, MiB.
    fn peak_memory(&self) -> Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("no VmHWM")?;
        Ok(line.trim().trim_end_matches(" kB").parse::<f64>()? / 1024.0)
    }

    /// Of all threads so far: processor time in microseconds, and context switches.
    fn usage(&self) -> Result<[f64; 2]> {
        let mut usage = [0.0; 2];
        for thread in std::fs::read_dir(format!("/proc/{}/task", self.child.id()))? {
            let folder = thread?.path();
            let nanoseconds = std::fs::read_to_string(folder.join("schedstat"))?;
            usage[0] += nanoseconds.split(' ').next().ok_or("no schedstat")?.parse::<f64>()? / 1e3;
            for line in std::fs::read_to_string(folder.join("status"))?.lines() {
                if let Some((_, count)) = line.split_once("_ctxt_switches:") {
                    usage[1] += count.trim().parse::<f64>()?;
                }
            }
        }
        Ok(usage)
    }
}

#[derive(Clone, Copy)]
struct Round {
    per_second: f64,
    p50: f64,
    p99: f64,
    /// Of one request, µs.
    cpu: f64,
    /// Context switches of one request.
    switches: f64,
}

/// Between two reviews on one connection where all servers get the same load: 4,000 a second on eight.
const PACE: Duration = Duration::from_millis(2);

/// The same where peers take part: 1,000 a second on eight.
const PEERS_PACE: Duration = Duration::from_millis(8);

async fn round(
    server: &Server,
    bodies: &[Bytes],
    time: Duration,
    connections: usize,
    pace: Option<Duration>,
) -> Result<Round> {
    let mut senders = Vec::new();
    for _ in 0..connections {
        senders.push(server.connect().await?);
    }
    let before = server.usage()?;
    let began = Instant::now();
    let tasks: Vec<_> = senders
        .into_iter()
        .enumerate()
        .map(|(offset, sender)| {
            // One after the other within an interval, not all at once.
            let pace = pace.map(|pace| (began + pace * offset as u32 / connections as u32, pace));
            tokio::spawn(drive(sender, server.path, bodies.to_vec(), offset, began + time, pace))
        })
        .collect();
    let mut all = Vec::new();
    for task in tasks {
        all.extend(task.await??);
    }
    let took = began.elapsed().as_secs_f64();
    let after = server.usage()?;
    let per_request = |index: usize| (after[index] - before[index]) / all.len() as f64;
    let (cpu, switches) = (per_request(0), per_request(1));
    all.sort_unstable();
    let at = |share: f64| all[((all.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6;
    Ok(Round { per_second: all.len() as f64 / took, p50: at(0.5), p99: at(0.99), cpu, switches })
}

async fn drive(
    mut sender: SendRequest<Full<Bytes>>,
    path: &'static str,
    bodies: Vec<Bytes>,
    offset: usize,
    until: Instant,
    pace: Option<(Instant, Duration)>,
) -> Result<Vec<Duration>> {
    let mut times = Vec::with_capacity(100_000);
    let mut ticks = pace.map(|(start, pace)| tokio::time::interval_at(start.into(), pace));
    for body in bodies.iter().cycle().skip(offset) {
        if let Some(ticks) = &mut ticks {
            ticks.tick().await;
        }
        let request = http::Request::post(format!("{path}?timeout=5s"))
            .header("host", "localhost")
            .header("content-type", "application/json")
            .body(Full::new(body.clone()))?;
        let began = Instant::now();
        if began >= until {
            break;
        }
        let response = sender.send_request(request).await?;
        if response.status() != 200 {
            return Err(format!("status {}", response.status()).into());
        }
        response.into_body().collect().await?;
        times.push(began.elapsed());
    }
    Ok(times)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// What deciding alone takes, µs: the median of many passes over the bodies.
fn review_in_process(policy: &Path, bodies: &[Bytes]) -> Result<f64> {
    let store = Store::new(Settings::default(), Metrics::default());
    let _source = FileSource::open(policy, store.clone())?;
    let snapshot = store.snapshot().load_full();
    let mut passes = Vec::new();
    for _ in 0..2000 {
        let began = Instant::now();
        for body in bodies {
            black_box(answer(black_box(body), &snapshot, None)?);
        }
        passes.push(began.elapsed().as_secs_f64() * 1e6 / bodies.len() as f64);
    }
    Ok(median(passes))
}

async fn free_port() -> Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0").await?.local_addr()?)
}

async fn compare(rounds: usize, time: Duration, connections: usize) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (webhook_tls, echo_tls) = (folder.path().join("webhook"), folder.path().join("echo"));
    let policy = folder.path().join("policy.yaml");
    std::fs::write(&policy, POLICY)?;

    let address = free_port().await?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-migrate-webhook"));
    command.arg("--policy-file").arg(&policy).arg("--bind").arg(address.to_string());
    command.arg("--metrics-bind").arg("").arg("--tls-dir").arg(&webhook_tls);
    let webhook = Server::start(("webhook", "/mutate"), command, &webhook_tls, address).await?;
    let address = free_port().await?;
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("echo-server").arg(&echo_tls).arg(address.to_string());
    let echo = Server::start(("echo", "/mutate"), command, &echo_tls, address).await?;

    let mut bodies = Vec::new();
    for name in CAPTURES {
        let path = format!("{}/tests/captures/{name}.json", env!("CARGO_MANIFEST_DIR"));
        let value: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path)?)?;
        bodies.push(Bytes::from(value.to_string()));
    }
    println!("{rounds} rounds of {time:?}, {connections} connections, {} reviews in turn", bodies.len());
    // Warm both up.
    for server in [&echo, &webhook] {
        round(server, &bodies, time / 4, connections, None).await?;
    }
    let review = review_in_process(&policy, &bodies)?;
    println!("a review in process: {review:.1} µs");
    for pace in [None, Some(PACE)] {
        let both = rounds_of(rounds, &[&echo, &webhook], &bodies, time, connections, pace).await?;
        let ratio = |of| ratio(&both, of, 1, 0);
        let of = |of: fn(&Round) -> f64| [0, 1].map(|server| median(each(&both, of, server)));
        println!("{}:", speed(pace, connections));
        let paced = |target: &'static str| if pace.is_some() { target } else { "" };
        println!("throughput: {:.2} of the echo server's", ratio(|round| round.per_second));
        println!("p50:        {:.2} of the echo server's", ratio(|round| round.p50));
        println!(
            "p99:        {:.2} of the echo server's{}",
            ratio(|round| round.p99),
            paced(" (target: at most 1.2)")
        );
        let ([echo, webhook], most) = (of(|round| round.cpu), |echo: f64| echo + review + 2.0);
        println!(
            "CPU:        {webhook:.1} µs a request, {:.2} of the echo server's {echo:.1}; with the review and 2 µs that is {:.1} (target: at most that)",
            webhook / echo,
            most(echo)
        );
        println!("switches:   {:.2} of the echo server's (target: at most 2)", ratio(|round| round.switches));
    }
    println!(
        "memory:     {:.1} MiB at most (echo {:.1}; target: below 20)",
        webhook.peak_memory()?,
        echo.peak_memory()?
    );
    if let Some(programs) = std::env::var_os("GPU_MIGRATE_PEERS") {
        let tls = folder.path().join("peers");
        write_certificate(&tls)?;
        beside_peers(rounds, Path::new(&programs), (&webhook, &tls), &bodies, time, connections).await?;
    }
    Ok(())
}

/// A certificate of the kind that our own servers make, as files.
fn write_certificate(folder: &Path) -> Result<()> {
    let (now, lifetimes) = (wall_clock()(), Lifetimes::default());
    let ca = Ca::generate("peers", now, &lifetimes)?;
    let leaf = ca.issue(&["localhost".to_owned()], now, &lifetimes)?;
    let pem = |kind: &str, der: &[u8]| {
        format!("-----BEGIN {kind}-----\n{}\n-----END {kind}-----\n", BASE64_STANDARD.encode(der))
    };
    std::fs::create_dir(folder)?;
    std::fs::write(folder.join("ca.crt"), ca.pem())?;
    std::fs::write(folder.join("tls.crt"), pem("CERTIFICATE", &leaf.certificate))?;
    std::fs::write(folder.join("tls.key"), pem("PRIVATE KEY", leaf.key.secret_der()))?;
    Ok(())
}

async fn beside_peers(
    rounds: usize,
    programs: &Path,
    (webhook, tls): (&Server, &Path),
    bodies: &[Bytes],
    time: Duration,
    connections: usize,
) -> Result<()> {
    let mut peers = Vec::new();
    for (name, path) in [("hami", "/webhook"), ("vgpu-manager", "/pods/mutate")] {
        let (program, address) = (programs.join(name), free_port().await?);
        if !program.exists() {
            println!("{name}: not measured, there is no {}", program.display());
            continue;
        }
        let mut command = Command::new(program);
        if name == "hami" {
            command.arg(address.to_string()).arg(tls.join("tls.crt")).arg(tls.join("tls.key"));
        } else {
            // As in its manifests, but for less logging; the API server is never called.
            command.arg("--cert-dir").arg(tls).arg("--master=http://127.0.0.1:1");
            command.arg(format!("--server-bind-port={}", address.port()));
            command.args(["--scheduler-name=vgpu-scheduler", "--default-node-policy=binpack"]);
            command.arg("--default-device-policy=binpack");
        }
        peers.push(Server::start((name, path), command, tls, address).await?);
    }
    let all: Vec<&Server> = std::iter::once(webhook).chain(&peers).collect();
    for server in &peers {
        round(server, bodies, time / 4, connections, None).await?;
    }
    for pace in [None, Some(PEERS_PACE)] {
        let seen = rounds_of(rounds.min(3), &all, bodies, time, connections, pace).await?;
        println!("beside peers, {}:", speed(pace, connections));
        for (index, peer) in peers.iter().enumerate() {
            let ratio = |of| ratio(&seen, of, index + 1, 0);
            println!(
                "{}: CPU of a request {:.1} times the webhook's (target: at least 15), p99 {:.1} times, throughput 1/{:.1}, memory {:.1} MiB at most",
                peer.name,
                ratio(|round| round.cpu),
                ratio(|round| round.p99),
                1.0 / ratio(|round| round.per_second),
                peer.peak_memory()?
            );
        }
    }
    Ok(())
}

fn speed(pace: Option<Duration>, connections: usize) -> String {
    pace.map_or("full speed".to_owned(), |pace| {
        format!("each at {:.0} a second", connections as f64 / pace.as_secs_f64())
    })
}

fn each(rounds: &[Vec<Round>], of: fn(&Round) -> f64, server: usize) -> Vec<f64> {
    rounds.iter().map(|round| of(&round[server])).collect()
}

/// The median of the rounds' ratios of one server to another.
fn ratio(rounds: &[Vec<Round>], of: fn(&Round) -> f64, server: usize, to: usize) -> f64 {
    median(rounds.iter().map(|round| of(&round[server]) / of(&round[to])).collect())
}

/// The servers in turn, in each round.
async fn rounds_of(
    rounds: usize,
    servers: &[&Server],
    bodies: &[Bytes],
    time: Duration,
    connections: usize,
    pace: Option<Duration>,
) -> Result<Vec<Vec<Round>>> {
    let mut all = Vec::new();
    for index in 0..rounds {
        let mut seen = vec![None; servers.len()];
        for turn in 0..servers.len() {
            // The order changes too: a later one must not profit from it.
            let at = if index % 2 == 0 { turn } else { servers.len() - 1 - turn };
            seen[at] = Some(round(servers[at], bodies, time, connections, pace).await?);
        }
        let seen: Vec<Round> = seen.into_iter().flatten().collect();
        for (server, round) in servers.iter().zip(&seen) {
            let Round { per_second, p50, p99, cpu, switches } = round;
            println!(
                "{index} {:12} {per_second:9.0}/s  p50 {p50:6.0} µs  p99 {p99:6.0} µs  CPU {cpu:5.1} µs  {switches:.3} switches",
                server.name
            );
        }
        all.push(seen);
    }
    Ok(all)
}
