//! The verbs as HTTP round trips against the real binary with a made-up cluster, at 100, 1,000, 5,000 and 15,000 nodes with twelve
//! pods each, 10,000 that wait, and a gang for each 75 nodes that waits for whole nodes.
//!
//! `cargo bench -p gpu-migrate-admission-ext --bench http` prints, for each size, p50 and p99 of filter, prioritize
//! and bind with *all* node names in the request, and of filter for a member of a gang that does not fit, the server's processor time for one call (which a busy machine does
//! not change), the time from start to ready, the resident memory, and how much of the processors others used meanwhile: a
//! tail that came of them says nothing. The ratios of the last lines are to the smallest
//! cluster of the same run. Names of scorings after `--` measure those alone (`-- binpack`);
//! another program with `GPU_MIGRATE_EXTENDER=PATH`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::cast_precision_loss)] // a bench that cannot go on has nothing to say

use std::io::{BufWriter, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

#[path = "../examples/generate_snapshot/cluster.rs"]
mod generate;

use generate::{Shape, node_name};
use gpu_migrate_model::names::GANG_NAME;
use serde_json::{Value, json};

const SIZES: [u32; 4] = [100, 1_000, 5_000, 15_000];
const SCORINGS: [&str; 3] = ["binpack", "fragmentation", "lookahead"];
const ROUNDS: usize = 2_000;

struct Server {
    child: Child,
    address: String,
    metrics: String,
    ready: Duration,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start(snapshot: &std::path::Path, scoring: &str) -> Self {
        let free = || std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let (address, metrics) = (free(), free());
        let start = Instant::now();
        let child = Command::new(
            std::env::var_os("GPU_MIGRATE_EXTENDER")
                .unwrap_or(env!("CARGO_BIN_EXE_gpu-migrate-extender").into()),
        )
        .args(["--bind", &address, "--metrics-bind", &metrics, "--scoring", scoring, "--snapshot"])
        .arg(snapshot)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
        let mut server = Self { child, address, metrics, ready: Duration::ZERO };
        while TcpStream::connect(&server.address).is_err() {
            assert!(start.elapsed() < Duration::from_secs(120), "not serving");
            std::thread::sleep(Duration::from_millis(2));
        }
        server.ready = start.elapsed();
        server
    }

    /// Processor time so far: on a busy machine it tells what the clock on the wall cannot.
    fn cpu(&self) -> Duration {
        cpu_of(&self.child.id().to_string())
    }

    /// Processor time that neither we nor the server used, but somebody: what a tail may be made of.
    fn others(&self) -> Duration {
        let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        let fields = stat.lines().next().unwrap_or_default().split_whitespace().skip(1);
        let ticks: Vec<u64> = fields.filter_map(|ticks| ticks.parse().ok()).collect();
        // user nice system idle iowait irq softirq steal
        let busy = [0, 1, 2, 5, 6, 7].iter().filter_map(|at| ticks.get(*at)).sum::<u64>();
        let all = Duration::from_millis(busy * 10);
        all.saturating_sub(self.cpu()).saturating_sub(cpu_of("self"))
    }

    /// How often the lock of the cluster's state was held, for each limit in seconds: for at most so long. Another program has no such metric.
    fn lock_holds(&self) -> Vec<(f64, u64)> {
        let mut stream = TcpStream::connect(&self.metrics).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let buckets = text.lines().filter_map(|line| {
            let (limit, count) = line
                .strip_prefix("gpu_migrate_extender_state_lock_seconds_bucket{le=\"")?
                .split_once("\"} ")?;
            let limit = if limit == "+Inf" { f64::INFINITY } else { limit.parse().ok()? };
            Some((limit, count.trim().parse().ok()?))
        });
        buckets.collect()
    }

    fn resident_mib(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib =
            line.and_then(|rest| rest.split_whitespace().next()).and_then(|kib| kib.parse::<f64>().ok());
        kib.unwrap_or(f64::NAN) / 1024.0
    }
}

fn cpu_of(process: &str) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // After the name in parentheses, the 12th and 13th fields: user and system time in ticks of 10 ms.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let ticks = fields.iter().skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum::<u64>();
    Duration::from_millis(ticks * 10)
}

/// One connection, kept alive, as Go's client does.
struct Caller(TcpStream);

impl Caller {
    fn new(server: &Server) -> Self {
        let stream = TcpStream::connect(&server.address).unwrap();
        stream.set_nodelay(true).unwrap();
        Self(stream)
    }

    fn call(&mut self, verb: &str, body: &[u8]) -> Vec<u8> {
        let head = format!(
            "POST /scheduler/{verb} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        self.0.write_all(head.as_bytes()).unwrap();
        self.0.write_all(body).unwrap();
        let mut answer = Vec::with_capacity(1 << 20);
        let mut part = [0u8; 65_536];
        loop {
            let read = self.0.read(&mut part).unwrap();
            assert!(read > 0, "connection closed");
            answer.extend_from_slice(&part[..read]);
            let Some(end) = answer.windows(4).position(|window| window == b"\r\n\r\n") else { continue };
            let head = std::str::from_utf8(&answer[..end]).unwrap().to_ascii_lowercase();
            assert!(head.starts_with("http/1.1 200"), "{head}");
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
            let length: usize = length.trim().parse().unwrap();
            while answer.len() < end + 4 + length {
                let read = self.0.read(&mut part).unwrap();
                answer.extend_from_slice(&part[..read]);
            }
            return answer.split_off(end + 4);
        }
    }
}

#[derive(Debug)]
struct Times(Vec<Duration>);

impl Times {
    fn of(rounds: usize, mut call: impl FnMut(usize)) -> Self {
        let mut times: Vec<Duration> = (0..rounds)
            .map(|round| {
                let start = Instant::now();
                call(round);
                start.elapsed()
            })
            .collect();
        times.sort_unstable();
        Self(times)
    }

    fn ms(&self, percent: usize) -> f64 {
        self.0[(self.0.len() * percent / 100).min(self.0.len() - 1)].as_secs_f64() * 1e3
    }
}

fn waiting_pods(snapshot: &std::path::Path) -> Vec<Value> {
    let text = std::fs::read(snapshot).unwrap();
    let list: Value = serde_json::from_slice(&text).unwrap();
    let items = list["items"].as_array().unwrap();
    items.iter().filter(|item| item["kind"] == "Pod" && item["spec"]["nodeName"].is_null()).cloned().collect()
}

/// The scheduler's bodies for one made-up cluster.
struct Load {
    pods: Vec<Value>,
    names: Vec<String>,
    bodies: Vec<Vec<u8>>,
    of_gangs: Vec<Vec<u8>>,
}

impl Load {
    fn new(snapshot: &std::path::Path, nodes: u32) -> Self {
        let names = (0..nodes).map(node_name).collect::<Vec<_>>();
        let in_gang = |pod: &Value| !pod["metadata"]["annotations"][GANG_NAME].is_null();
        let (members, pods): (Vec<_>, Vec<_>) = waiting_pods(snapshot).into_iter().partition(in_gang);
        let bodies = |pods: &[Value]| pods.iter().take(64).map(|pod| args(pod, &names)).collect();
        Self { bodies: bodies(&pods), of_gangs: bodies(&members), pods, names }
    }

    /// The body that binds the pod at `at` to a node that filter has passed, as the scheduler does.
    fn binding(&self, caller: &mut Caller, at: usize) -> Vec<u8> {
        let pod = &self.pods[at];
        let passed: Value = serde_json::from_slice(&caller.call("filter", &args(pod, &self.names))).unwrap();
        let node = passed["NodeNames"][0].as_str().expect("a node that fits");
        let meta = &pod["metadata"];
        let body = json!({"PodName": meta["name"], "PodNamespace": meta["namespace"], "PodUID": meta["uid"], "Node": node});
        serde_json::to_vec(&body).unwrap()
    }
}

fn args(pod: &Value, names: &[String]) -> Vec<u8> {
    serde_json::to_vec(&json!({"Pod": pod, "Nodes": null, "NodeNames": names})).unwrap()
}

/// Measures one cluster and order, and prints its line. Returns processor time of one filter in µs per node.
fn measure(server: &Server, load: &Load, scoring: &str) -> f64 {
    let mut caller = Caller::new(server);
    let nodes = load.names.len();
    let (warm, bindings) = (ROUNDS.min(nodes) / 5, ROUNDS.min(nodes));
    // Connections, caches, the mix of requests.
    for at in 0..warm {
        let body = load.binding(&mut caller, at);
        caller.call("bind", &body);
    }
    let mut looks = |verb: &str, bodies: &[Vec<u8>]| {
        let before = server.cpu();
        let times = Times::of(ROUNDS, |round| drop(caller.call(verb, &bodies[round % bodies.len()])));
        (times, (server.cpu() - before).as_secs_f64() * 1e3 / ROUNDS as f64)
    };
    let (start, others, held) = (Instant::now(), server.others(), server.lock_holds());
    let (filter, filter_cpu) = looks("filter", &load.bodies);
    let (prioritize, prioritize_cpu) = looks("prioritize", &load.bodies);
    let (gang, gang_cpu) = looks("filter", &load.of_gangs);
    let mut bound = Vec::with_capacity(bindings);
    for at in warm..warm + bindings {
        let body = load.binding(&mut caller, at);
        let start = Instant::now();
        let answer = caller.call("bind", &body);
        bound.push(start.elapsed());
        assert_eq!(answer, b"{\"Error\":\"\"}", "{}", String::from_utf8_lossy(&answer));
    }
    bound.sort_unstable();
    let bound = Times(bound);
    let cores = std::thread::available_parallelism().map_or(1.0, |cores| cores.get() as f64);
    let disturbed =
        (server.others().saturating_sub(others)).as_secs_f64() / start.elapsed().as_secs_f64() / cores;
    // Of each limit, the holds that it is the first to cover.
    let mut within = 0;
    let lock: Vec<String> = held
        .iter()
        .zip(server.lock_holds())
        .map(|((limit, before), (_, now))| {
            let up_to = now - before;
            let here = up_to - std::mem::replace(&mut within, up_to);
            format!("{} ms: {here}", limit * 1e3)
        })
        .collect();
    eprintln!("{scoring}, {nodes} nodes: state locked for at most {}", lock.join(", "));
    println!(
        "| {scoring} | {nodes} | {} | {:.0} | {:.0} | {:.2} / {:.2} / {filter_cpu:.2} | {:.2} / {:.2} / {prioritize_cpu:.2} | {:.2} / {:.2} / {gang_cpu:.2} | {:.3} / {:.3} | {:.0} % |",
        nodes * 12,
        server.ready.as_secs_f64() * 1e3,
        server.resident_mib(),
        filter.ms(50),
        filter.ms(99),
        prioritize.ms(50),
        prioritize.ms(99),
        gang.ms(50),
        gang.ms(99),
        bound.ms(50),
        bound.ms(99),
        disturbed * 100.0,
    );
    filter_cpu * 1e3 / nodes as f64
}

fn main() {
    let folder = tempfile::tempdir().unwrap();
    // cargo adds `--bench`.
    let asked: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let asked = |scoring: &&str| asked.is_empty() || asked.iter().any(|name| name == scoring);
    println!(
        "| scoring | nodes | pods | start ms | RSS MiB | filter p50 / p99 / CPU ms | prioritize p50 / p99 / CPU ms | gang p50 / p99 / CPU ms | bind p50 / p99 ms | others |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    let mut per_node = Vec::new();
    for nodes in SIZES {
        let path = folder.path().join(format!("{nodes}.json"));
        let gangs = (nodes / 75).max(1);
        let shape =
            Shape { nodes, pods_per_node: 12, plain_per_node: 4, waiting: 10_000, gangs, cards: 8, seed: 1 };
        generate::write(shape, &mut BufWriter::new(std::fs::File::create(&path).unwrap())).unwrap();
        let load = Load::new(&path, nodes);
        for scoring in SCORINGS.into_iter().filter(asked) {
            let each = measure(&Server::start(&path, scoring), &load, scoring);
            per_node.push((scoring, nodes, each));
        }
    }
    for (scoring, nodes, each) in &per_node {
        let (.., first) =
            per_node.iter().find(|(other, ..)| other == scoring).copied().unwrap_or(("", 0, f64::NAN));
        println!(
            "{scoring}: filter's CPU per node at {nodes}: {each:.3} µs, {:.2} of that at {}",
            each / first,
            SIZES[0]
        );
    }
}
