//! The extender against a real API server with a made-up cluster: from start to ready, memory, and its answers while it lists again.
//!
//! `GPU_MIGRATE_CLUSTER=1 cargo bench -p gpu-migrate-cluster-tests --bench extender` (root, like the scenarios) starts etcd and
//! kube-apiserver and makes 5,000 nodes of eight cards with their GPUShadows, and twelve pods on each; `-- NODES` for others. It
//! prints the time from exec to ready of five starts and the memory then; and the time of filter and prioritize with all names,
//! first undisturbed and then while kube-apiserver is restarted, upon which everything is listed again.

use std::{
    collections::HashMap,
    io::{Read as _, Write as _},
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use gpu_migrate_cluster_tests::{Cluster, binaries, cluster::TIMEOUT, http, wait::Seen};
use gpu_migrate_model::crd::GPUShadow;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, ResourceExt,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

#[path = "../../../admission-ext/examples/generate_snapshot/cluster.rs"]
mod generate;

const EXTENDER: &str = "gpu-migrate-extender";
const STARTS: usize = 5;
/// At least so many calls of each verb undisturbed.
const CALLS: usize = 1_000;
/// Of calls after kube-apiserver is back: everything is listed again by then.
const LISTING: Duration = Duration::from_secs(30);

fn main() -> Result<()> {
    if !binaries::asked_for()? {
        println!("skipped: needs root and a machine to itself: set GPU_MIGRATE_CLUSTER=1");
        return Ok(());
    }
    // cargo adds `--bench`.
    let nodes = std::env::args().skip(1).find_map(|arg| arg.parse().ok()).unwrap_or(5_000);
    // On the main thread, which components must be started from.
    Runtime::new().context("cannot start tokio")?.block_on(run(nodes))
}

async fn run(nodes: u32) -> Result<()> {
    let mut cluster = Cluster::start_without_node().await?;
    cluster.apply_crds().await?;
    let namespace = cluster.namespace("training", &[]).await?;
    for component in ["kube-scheduler", "kube-controller-manager"] {
        cluster.remove(component)?;
    }
    let shape = generate::Shape {
        nodes,
        pods_per_node: 12,
        plain_per_node: 0,
        waiting: 64,
        gangs: 0,
        cards: 8,
        seed: 1,
    };
    let waiting = Made::new(shape)?.create(&cluster, &namespace).await?;
    println!("{nodes} nodes, {} pods", nodes * 12);
    cluster.add_extender().await?;
    let [port, admin] = cluster.setup.ports.extender;
    for _ in 0..STARTS {
        cluster.component(EXTENDER)?.stop()?;
        let start = Instant::now();
        cluster.start_component(EXTENDER)?;
        while http::get(admin, "/readyz").await.is_err() {
            ensure!(start.elapsed() < TIMEOUT, "not ready after {TIMEOUT:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        println!("ready after {:.2} s, {}", start.elapsed().as_secs_f64(), memory(&mut cluster)?);
    }
    let names: Vec<String> = (0..nodes).map(generate::node_name).collect();
    let bodies: Vec<Vec<u8>> = waiting
        .iter()
        .map(|pod| serde_json::to_vec(&json!({"Pod": pod, "Nodes": null, "NodeNames": names})))
        .collect::<Result<_, _>>()?;
    let bodies = Arc::new(bodies);
    let (of, enough) = (Arc::clone(&bodies), Arc::new(AtomicBool::new(true)));
    println!("undisturbed: {}", tokio::task::spawn_blocking(move || calls(port, &of, &enough)).await??);
    let enough = Arc::new(AtomicBool::new(false));
    let (of, until) = (Arc::clone(&bodies), Arc::clone(&enough));
    let calling = tokio::task::spawn_blocking(move || calls(port, &of, &until));
    cluster.restart("kube-apiserver")?;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &namespace);
    cluster
        .until("kube-apiserver to be back", TIMEOUT, || async {
            Ok(Seen::Done(pods.get_opt("waiting-0").await.map(drop)?))
        })
        .await?;
    tokio::time::sleep(LISTING).await;
    enough.store(true, Ordering::Relaxed);
    println!("listing again: {}, then {}", calling.await??, memory(&mut cluster)?);
    cluster.check()
}

/// Resident memory, and the most of it so far.
fn memory(cluster: &mut Cluster) -> Result<String> {
    let pid = cluster.component(EXTENDER)?.pid().context("it runs")?;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let mib = |field: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(field));
        line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) / 1024
    };
    Ok(format!("{} MiB, at most {} MiB", mib("VmRSS:"), mib("VmHWM:")))
}

/// The objects of the made-up cluster.
struct Made {
    nodes: Vec<Value>,
    shadows: Vec<Value>,
    pods: Vec<Value>,
}

impl Made {
    fn new(shape: generate::Shape) -> Result<Self> {
        let mut text = Vec::new();
        generate::write(shape, &mut text)?;
        let mut list: Value = serde_json::from_slice(&text)?;
        let mut made = Self { nodes: Vec::new(), shadows: Vec::new(), pods: Vec::new() };
        for item in list["items"].as_array_mut().context("a List")? {
            match item["kind"].as_str() {
                Some("Node") => made.nodes.push(item.take()),
                Some("GPUShadow") => made.shadows.push(item.take()),
                _ => made.pods.push(item.take()),
            }
        }
        Ok(made)
    }

    /// Creates all of them; returns the pods that wait.
    async fn create(self, cluster: &Cluster, namespace: &str) -> Result<Vec<Pod>> {
        let nodes: Api<Node> = Api::all(cluster.client.clone());
        let making = self.nodes.into_iter().map(|node| {
            let nodes = nodes.clone();
            async move {
                let status = json!({"status": node["status"]});
                let made = nodes.create(&PostParams::default(), &serde_json::from_value(node)?).await?;
                nodes.patch_status(&made.name_any(), &PatchParams::default(), &Patch::Merge(status)).await?;
                anyhow::Ok(())
            }
        });
        stream::iter(making).buffer_unordered(16).try_collect::<()>().await?;
        let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), namespace);
        let making = self.pods.into_iter().map(|mut pod| {
            let pods = pods.clone();
            async move {
                pod["metadata"]["namespace"] = pods.namespace().into();
                let before = pod["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
                let made = pods.create(&PostParams::default(), &serde_json::from_value(pod)?).await?;
                anyhow::Ok((before, made))
            }
        });
        let made: Vec<(String, Pod)> = stream::iter(making).buffer_unordered(16).try_collect().await?;
        let uids: HashMap<&str, String> =
            made.iter().map(|(before, pod)| (&**before, pod.uid().unwrap_or_default())).collect();
        let shadows: Api<GPUShadow> = Api::all(cluster.client.clone());
        let making = self.shadows.into_iter().map(|mut shadow| {
            let (shadows, uids) = (shadows.clone(), &uids);
            async move {
                for card in shadow["status"]["cards"].as_array_mut().into_iter().flatten() {
                    // One without holders has no list of them.
                    let holders = card.get_mut("holders").and_then(Value::as_array_mut);
                    for holder in holders.into_iter().flatten() {
                        let now = holder["uid"].as_str().and_then(|before| uids.get(before));
                        holder["uid"] = json!(now.context("the pod of a holder")?);
                    }
                }
                let status = json!({"status": shadow["status"]});
                let made = shadows.create(&PostParams::default(), &serde_json::from_value(shadow)?).await?;
                shadows
                    .patch_status(&made.name_any(), &PatchParams::default(), &Patch::Merge(status))
                    .await?;
                anyhow::Ok(())
            }
        });
        stream::iter(making).buffer_unordered(16).try_collect::<()>().await?;
        let pods = made.into_iter().map(|(_, pod)| pod);
        Ok(pods.filter(|pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_none())).collect())
    }
}

/// Filter and prioritize in turns until it is `enough`, at least [`CALLS`] times.
fn calls(port: u16, bodies: &[Vec<u8>], enough: &AtomicBool) -> Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_nodelay(true)?;
    let mut times = [Vec::new(), Vec::new()];
    let mut errors = 0;
    while times[0].len() < CALLS || !enough.load(Ordering::Relaxed) {
        let body = &bodies[times[0].len() % bodies.len()];
        for (verb, times) in ["filter", "prioritize"].into_iter().zip(&mut times) {
            let start = Instant::now();
            let answer = call(&mut stream, verb, body)?;
            times.push(start.elapsed());
            errors += usize::from(!answer.starts_with(b"[") && !answer.ends_with(b"\"Error\":\"\"}"));
        }
    }
    let [filter, prioritize] = times.map(|mut times| {
        times.sort_unstable();
        let ms = |at: usize| times[at.min(times.len() - 1)].as_secs_f64() * 1e3;
        format!(
            "p50 {:.2}, p99 {:.2}, longest {:.1} ms",
            ms(times.len() / 2),
            ms(times.len() * 99 / 100),
            ms(times.len())
        )
    });
    Ok(format!("filter {filter}; prioritize {prioritize}; {errors} errors"))
}

fn call(stream: &mut TcpStream, verb: &str, body: &[u8]) -> Result<Vec<u8>> {
    let head = format!(
        "POST /scheduler/{verb} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)?;
    let (mut answer, mut part) = (Vec::new(), [0_u8; 65_536]);
    let (mut end, mut length) = (0_usize, usize::MAX);
    while answer.len() < end.saturating_add(length) {
        let read = stream.read(&mut part)?;
        ensure!(read > 0, "{verb}: the connection was closed");
        answer.extend_from_slice(&part[..read]);
        if end == 0
            && let Some(at) = answer.windows(4).position(|window| window == b"\r\n\r\n")
        {
            let head = String::from_utf8_lossy(&answer[..at]).to_ascii_lowercase();
            ensure!(head.starts_with("http/1.1 200"), "{verb}: {head}");
            let field = head.lines().find_map(|line| line.strip_prefix("content-length:"));
            (end, length) = (at + 4, field.context("an answer with its length")?.trim().parse()?);
        }
    }
    Ok(answer.split_off(end))
}
