//! The verbs as HTTP round trips against the real binary with a made-up cluster, at 100, 1,000 and 5,000 nodes.
//!
//! `cargo bench -p gpu-migrate-admission-ext --bench http` prints, for each size, p50 and p99 of filter, prioritize
//! and bind with *all* node names in the request, the time from start to ready, and the resident memory. The ratios
//! of the last lines are to the smallest cluster of the same run.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a bench that cannot go on has nothing to say

use std::io::{BufWriter, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use gpu_migrate_admission_ext::generate::{self, Shape, node_name};
use serde_json::{Value, json};

const SIZES: [u32; 3] = [100, 1_000, 5_000];
const ROUNDS: usize = 1_000;

struct Server {
    child: Child,
    address: String,
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
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let address = format!("127.0.0.1:{port}");
        let start = Instant::now();
        let child = Command::new(env!("CARGO_BIN_EXE_gpu-migrate-extender"))
            .args(["--bind", &address, "--metrics-bind", "", "--scoring", scoring, "--snapshot"])
            .arg(snapshot)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut server = Self { child, address, ready: Duration::ZERO };
        while TcpStream::connect(&server.address).is_err() {
            assert!(start.elapsed() < Duration::from_secs(120), "not serving");
            std::thread::sleep(Duration::from_millis(2));
        }
        server.ready = start.elapsed();
        server
    }

    fn resident_mib(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib =
            line.and_then(|rest| rest.split_whitespace().next()).and_then(|kib| kib.parse::<f64>().ok());
        kib.unwrap_or(f64::NAN) / 1024.0
    }
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

fn main() {
    let folder = tempfile::tempdir().unwrap();
    let scorings = ["binpack", "fragmentation"];
    println!(
        "| scoring | nodes | pods | start ms | RSS MiB | filter p50/p99 ms | prioritize p50/p99 ms | bind p50/p99 ms | filter p50 µs/node |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let mut per_node = Vec::new();
    for nodes in SIZES {
        let path = folder.path().join(format!("{nodes}.json"));
        let shape = Shape { nodes, pods_per_node: 12, waiting: 3_000, cards: 8, seed: 1 };
        generate::write(shape, &mut BufWriter::new(std::fs::File::create(&path).unwrap())).unwrap();
        let pods = waiting_pods(&path);
        let names: Vec<String> = (0..nodes).map(node_name).collect();
        let bodies: Vec<Vec<u8>> = pods
            .iter()
            .map(|pod| serde_json::to_vec(&json!({"Pod": pod, "Nodes": null, "NodeNames": names})).unwrap())
            .take(64)
            .collect();
        for scoring in scorings {
            let server = Server::start(&path, scoring);
            let mut caller = Caller::new(&server);
            let mut binds = pods.iter();
            let mut bind = |caller: &mut Caller| {
                let pod = binds.next().unwrap();
                // As the scheduler does: bind to a node that filter passed.
                let body =
                    serde_json::to_vec(&json!({"Pod": pod, "Nodes": null, "NodeNames": names})).unwrap();
                let passed: Value = serde_json::from_slice(&caller.call("filter", &body)).unwrap();
                let node = passed["NodeNames"][0].as_str().expect("a node that fits").to_owned();
                let meta = &pod["metadata"];
                let body = json!({"PodName": meta["name"], "PodNamespace": meta["namespace"], "PodUID": meta["uid"], "Node": node});
                serde_json::to_vec(&body).unwrap()
            };
            // Warm: connections, caches, the mix of requests.
            let binding = ROUNDS.min(nodes as usize);
            for round in 0..binding / 5 {
                caller.call("filter", &bodies[round % bodies.len()]);
                let body = bind(&mut caller);
                caller.call("bind", &body);
            }
            let filter =
                Times::of(ROUNDS, |round| drop(caller.call("filter", &bodies[round % bodies.len()])));
            let prioritize =
                Times::of(ROUNDS, |round| drop(caller.call("prioritize", &bodies[round % bodies.len()])));
            let mut bound = Vec::new();
            for _ in 0..binding {
                let body = bind(&mut caller);
                let start = Instant::now();
                let answer = caller.call("bind", &body);
                bound.push(start.elapsed());
                assert_eq!(answer, b"{\"Error\":\"\"}", "{}", String::from_utf8_lossy(&answer));
            }
            bound.sort_unstable();
            let bound = Times(bound);
            let each = filter.ms(50) * 1e3 / f64::from(nodes);
            println!(
                "| {scoring} | {nodes} | {} | {:.0} | {:.0} | {:.2} / {:.2} | {:.2} / {:.2} | {:.3} / {:.3} | {each:.3} |",
                nodes * 12,
                server.ready.as_secs_f64() * 1e3,
                server.resident_mib(),
                filter.ms(50),
                filter.ms(99),
                prioritize.ms(50),
                prioritize.ms(99),
                bound.ms(50),
                bound.ms(99),
            );
            if scoring == scorings[0] {
                per_node.push((nodes, each));
            }
        }
    }
    let first = per_node[0].1;
    for (nodes, each) in per_node {
        println!("filter per node at {nodes}: {:.2} of that at {}", each / first, SIZES[0]);
    }
}
