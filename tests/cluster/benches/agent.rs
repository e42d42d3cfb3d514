//! The node agent and NVIDIA's plugin as processes on one node: how long each takes to register and to answer, and how much memory.
//!
//! `GPU_MIGRATE_CLUSTER=1 cargo bench -p gpu-migrate-cluster-tests --bench agent` (root, like the scenarios; no cluster is started). The
//! kubelet is a socket of this program, in a mount namespace of its own since NVIDIA's plugin knows only `/var/lib/kubelet`. Both
//! programs find eight cards in the same stand-in for NVML. All times are seen from the kubelet's side of the socket, medians over
//! runs of each in turn. Targets: registered within 50 ms with an inventory file and twice NVIDIA's plugin over NVML, an Allocate
//! within 300 µs, less than 150 µs more for one that is passed through, 14 MiB with an inventory file. At the end, and alone with `-- use`:
//! what it costs to sample and serve, once a second, what 64 containers use.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use gpu_migrate_cluster_tests::{
    binaries::{self, Binaries},
    http,
    layout::KUBELET_ROOT,
};
use gpu_migrate_kubelet_api::{
    deviceplugin::{
        AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
        ContainerPreferredAllocationRequest, Empty, HEALTHY, PreferredAllocationRequest, RegisterRequest,
        device_plugin_client::DevicePluginClient,
        registration_server::{Registration, RegistrationServer},
    },
    socket::dial,
};
use gpu_migrate_model::{
    card::Card,
    device_id::{Layout, SharedResource},
    names::Dialect,
    usage::{self, NodeUse},
};
use nix::mount::{MsFlags, mount};
use prost::Message as _;
use serde_json::{Value, json};
use tokio::{net::UnixListener, runtime::Runtime, sync::mpsc, time::timeout};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{
    Request, Response, Status,
    transport::{Channel, Server},
};

/// Set in the copy of this program that has its own mounts.
const INSIDE: &str = "GPU_MIGRATE_BENCH_INSIDE";
const RUNS: usize = 15;
/// Pods on the node whose containers run, and pods that the kubelet admits during the bench: 50.
const RUNNING: u32 = 30;
const WAITING: u32 = 20;
const PODS_OF_A_CARD: u32 = 12;
/// Containers with a process each, of which it is sampled what they use, for so long, once a second.
const SAMPLED: u32 = 64;
const SAMPLING: Duration = Duration::from_secs(30);
const CARDS: u32 = 8;
const CARD_MIB: u64 = 40_960;
const TIMEOUT: Duration = Duration::from_secs(20);
const LEGACY: &str = "nvidia.com/gpu";

fn main() -> Result<()> {
    if !binaries::asked_for()? {
        println!("skipped: needs root: set GPU_MIGRATE_CLUSTER=1");
        return Ok(());
    }
    let programs = Binaries::prepare()?;
    let ours = binaries::ours()?;
    fs::create_dir_all(KUBELET_ROOT)?;
    if env::var_os(INSIDE).is_none() {
        let me = env::current_exe()?;
        let status = Command::new("unshare")
            .args(["--mount", "--propagation", "private"])
            .arg(me)
            .args(env::args_os().skip(1))
            .env(INSIDE, "1")
            .status()
            .context("unshare (Debian package util-linux)")?;
        ensure!(status.success(), "the bench failed");
        return Ok(());
    }
    let none: Option<&str> = None;
    mount(Some("tmpfs"), KUBELET_ROOT, Some("tmpfs"), MsFlags::empty(), none)
        .context("a tmpfs for the kubelet's folder")?;
    Runtime::new()
        .context("cannot start tokio")?
        .block_on(compare(&programs, &ours.join("gpu-migrate-bridge")))
}

async fn compare(programs: &Binaries, bridge: &Path) -> Result<()> {
    let bench = Bench { programs, bridge };
    if env::args().any(|argument| argument == "use") {
        return bench.use_of_containers().await;
    }
    let (mut nvidia, mut nvml, mut file, mut behind) =
        (Figures::default(), Figures::default(), Figures::default(), Figures::default());
    for _ in 0..RUNS {
        bench.nvidia_alone(&mut nvidia).await?;
        bench.agent(Cards::Nvml, &mut nvml, None).await?;
        bench.agent(Cards::File, &mut file, Some(&mut behind)).await?;
    }
    println!(
        "{RUNS} runs each, medians; {WAITING} Allocates of each kind in a run; 8 cards, 50 pods on the node"
    );
    println!(
        "| | from exec to registered | GetDevicePluginOptions | Allocate, whole card | Allocate, cores | Allocate, memory | resident memory |"
    );
    println!("|---|---|---|---|---|---|---|");
    nvidia.print("NVIDIA's plugin");
    nvml.print("agent, over the same NVML library");
    file.print("agent, with an inventory file");
    behind.print("NVIDIA's plugin behind that agent");
    let (direct, through) = (median(&nvidia.whole), median(&behind.whole));
    println!(
        "registered over NVML: {:.2} of NVIDIA's plugin (target: 2)",
        median(&nvml.start) / median(&nvidia.start)
    );
    println!("passed through: {:.0} µs more (target: 150)", (through - direct) * 1e6);

    bench.use_of_containers().await
}

/// Of the agent and of the process that calls NVML.
struct Cost {
    percent: f64,
    mib: f64,
}

/// Seconds, and MiB.
#[derive(Default)]
struct Figures {
    start: Vec<f64>,
    /// A call that decides nothing, as a baseline.
    options: Vec<f64>,
    whole: Vec<f64>,
    cores: Vec<f64>,
    memory: Vec<f64>,
    resident: Vec<f64>,
    /// Of that, what is not a file's: pages of a program are shared and can be dropped.
    anonymous: Vec<f64>,
}

impl Figures {
    fn print(&self, who: &str) {
        let cell = |values: &[f64], scale: f64, unit: &str| {
            if values.is_empty() { "–".to_owned() } else { format!("{:.0} {unit}", median(values) * scale) }
        };
        println!(
            "| {who} | {} | {} | {} | {} | {} | {} |",
            cell(&self.start, 1e3, "ms"),
            cell(&self.options, 1e6, "µs"),
            cell(&self.whole, 1e6, "µs"),
            cell(&self.cores, 1e6, "µs"),
            cell(&self.memory, 1e6, "µs"),
            if self.resident.is_empty() {
                "–".to_owned()
            } else {
                format!("{:.1} MiB, {:.1} anonymous", median(&self.resident), median(&self.anonymous))
            }
        );
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

#[derive(Clone, Copy, PartialEq)]
enum Cards {
    Nvml,
    File,
}

struct Bench<'a> {
    programs: &'a Binaries,
    bridge: &'a Path,
}

impl Bench<'_> {
    fn nvidia(&self, socket: &Path) -> Command {
        let mut command = Command::new(&self.programs.nvidia_plugin);
        command.env("NODE_NAME", "n1").env("LD_LIBRARY_PATH", &self.programs.nvml);
        command.env("KUBELET_SOCKET", socket).arg("--device-discovery-strategy=nvml");
        command
    }

    async fn nvidia_alone(&self, figures: &mut Figures) -> Result<()> {
        let mut kubelet = Kubelet::start()?;
        let (plugin, began) = spawn(&mut self.nvidia(&folder().join("stand-in@kubelet.sock")))?;
        let (at, mut client, ids) = kubelet.registered(LEGACY).await?;
        figures.start.push((at - began).as_secs_f64());
        bare_calls(&mut client, &mut figures.options).await?;
        whole_cards(&mut client, &ids, &mut figures.whole).await?;
        figures.resident.push(plugin.memory("VmRSS:")?);
        figures.anonymous.push(plugin.memory("RssAnon:")?);
        Ok(())
    }

    async fn agent(&self, cards: Cards, figures: &mut Figures, behind: Option<&mut Figures>) -> Result<()> {
        let mut kubelet = Kubelet::start()?;
        let mut runbook = Runbook::begin()?;
        let pods = Path::new(KUBELET_ROOT).join("pods.json");
        fs::write(&pods, json!({"apiVersion": "v1", "kind": "List", "items": pod_list()}).to_string())?;
        let mut command = Command::new(self.bridge);
        command
            .args(["--node-name=n1", "--metrics-bind=", "--kubelet-dir", KUBELET_ROOT, "--pods-file"])
            .arg(pods);
        match cards {
            Cards::Nvml => command.arg("--inventory=nvml").env("LD_LIBRARY_PATH", &self.programs.nvml),
            Cards::File => command.arg("--inventory").arg(inventory()?),
        };
        let (agent, began) = spawn(&mut command)?;
        let dialect = Dialect::default();
        let (first, mut cores, offered_cores) = kubelet.registered(&dialect.cores).await?;
        let (second, mut memory, offered_memory) = kubelet.registered(&dialect.memory).await?;
        figures.start.push((first.max(second) - began).as_secs_f64());
        bare_calls(&mut cores, &mut figures.options).await?;
        for call in 0..WAITING {
            let (card, place) = (RUNNING.div_ceil(PODS_OF_A_CARD) + call % 2, call / 2);
            let of_cores = ids(SharedResource::Cores, card, place, 5);
            let for_cores = allocate(&mut cores, &healthy(&offered_cores), of_cores.clone()).await?;
            figures.cores.push(for_cores.seconds);
            let of_memory = ids(SharedResource::Memory, card, place, 4);
            let for_memory = allocate(&mut memory, &healthy(&offered_memory), of_memory.clone()).await?;
            figures.memory.push(for_memory.seconds);
            let pod = format!("waiting-{call}");
            let rows = [
                (&*pod, &*dialect.cores, of_cores, for_cores),
                (&*pod, &*dialect.memory, of_memory, for_memory),
            ];
            runbook.write(&rows).await?;
        }
        figures.resident.push(agent.memory("VmRSS:")?);
        figures.anonymous.push(agent.memory("RssAnon:")?);
        if let Some(behind) = behind {
            let (_plugin, began) = spawn(&mut self.nvidia(&folder().join("gpu-migrate@kubelet.sock")))?;
            let (at, mut client, ids) = kubelet.registered(LEGACY).await?;
            behind.start.push((at - began).as_secs_f64());
            bare_calls(&mut client, &mut behind.options).await?;
            let mut offered = healthy(&ids);
            while let Some(id) = offered.pop() {
                // It is still offered when it is asked for.
                let of_all = [offered.as_slice(), std::slice::from_ref(&id)].concat();
                let answer = allocate(&mut client, &of_all, vec![id.clone()]).await?;
                behind.whole.push(answer.seconds);
                runbook.write(&[(&format!("legacy-{id}"), LEGACY, vec![id], answer)]).await?;
            }
        }
        Ok(())
    }

    async fn use_of_containers(&self) -> Result<()> {
        let idle = self.sampling(false).await?;
        let busy = self.sampling(true).await?;
        println!(
            "{SAMPLED} containers, sampled and served once a second: {:.2} % of a core, {:.2} MiB; while each uses a card {:.2} %, {:.2} MiB: \
             {:.2} % and {:.2} MiB more (targets: 2 and 1)",
            idle.percent,
            idle.mib,
            busy.percent,
            busy.mib,
            busy.percent - idle.percent,
            busy.mib - idle.mib
        );
        Ok(())
    }

    /// The agent with so many containers, each in a cgroup as the kubelet makes it, with or without a process of theirs on a card. NVML's
    /// events, one a second, begin a round of samples each.
    async fn sampling(&self, used: bool) -> Result<Cost> {
        let mut kubelet = Kubelet::start()?;
        let mut runbook = Runbook(Vec::new());
        let state = Path::new(KUBELET_ROOT).join("nvml");
        fs::create_dir_all(&state)?;
        let mut pods = Vec::new();
        let mut processes = Vec::new();
        for number in 0..SAMPLED {
            let (card, place) = (number % CARDS, number / CARDS);
            let uid = format!("00000000-0000-4000-8000-{number:012}");
            runbook.add_running(&uid, card, place);
            pods.push(pod(&uid, "Running", 8, 12));
            processes.push((card, Contained::start(&uid)?));
        }
        for card in 0..CARDS {
            let of_card = processes.iter().filter(|(of, _)| *of == card);
            let lines: String = of_card.map(|(_, one)| format!("{} 512 10\n", one.process.0.id())).collect();
            if used {
                fs::write(state.join(format!("process-{card}")), lines)?;
            }
        }
        runbook.replace()?;
        let file = Path::new(KUBELET_ROOT).join("pods.json");
        fs::write(&file, json!({"apiVersion": "v1", "kind": "List", "items": pods}).to_string())?;
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut command = Command::new(self.bridge);
        command
            .args(["--node-name=n1", "--inventory=nvml", "--kubelet-dir", KUBELET_ROOT, "--pods-file"])
            .arg(file)
            .arg(format!("--metrics-bind=127.0.0.1:{port}"))
            .env("LD_LIBRARY_PATH", &self.programs.nvml)
            .env("NVML_STAND_IN_STATE", &state);
        let (agent, _) = spawn(&mut command)?;
        kubelet.registered(&Dialect::default().cores).await?;
        let mut ticks = tokio::time::interval(Duration::from_secs(1));
        let round = async || -> Result<()> {
            fs::write(state.join("xid-0"), "13")?;
            http::get(port, "/metrics").await.map(drop)
        };
        for _ in 0..10 {
            ticks.tick().await;
            // At first the port may not be served yet.
            let _ = round().await;
        }
        let report: NodeUse = serde_json::from_str(&http::get(port, usage::PATH).await?)?;
        let known = report
            .cards
            .iter()
            .flat_map(|card| &card.containers)
            .filter(|one| one.processes == Some(u32::from(used)));
        ensure!(known.count() == SAMPLED as usize, "not all are attributed: {report:#?}");
        let before = agent.processor_seconds()?;
        let began = Instant::now();
        while began.elapsed() < SAMPLING {
            ticks.tick().await;
            round().await?;
        }
        let used = agent.processor_seconds()? - before;
        Ok(Cost { percent: used / began.elapsed().as_secs_f64() * 100.0, mib: agent.resident_of_all()? })
    }
}

/// A process in a cgroup of its own, as of a container.
struct Contained {
    process: Running,
    cgroup: PathBuf,
}

impl Contained {
    fn start(pod_uid: &str) -> Result<Self> {
        // Where both versions are mounted, one of version 1.
        let roots = ["/sys/fs/cgroup/pids", "/sys/fs/cgroup"].map(Path::new);
        let root = roots.into_iter().find(|root| root.join("cgroup.procs").exists()).context("no cgroups")?;
        let container = format!("{:0>64}", pod_uid.replace('-', ""));
        let cgroup = root.join(format!("kubepods/burstable/pod{pod_uid}/{container}"));
        fs::create_dir_all(&cgroup)?;
        let (process, _) = spawn(Command::new("sleep").arg("infinity"))?;
        fs::write(cgroup.join("cgroup.procs"), process.0.id().to_string())?;
        Ok(Self { process, cgroup })
    }
}

impl Drop for Contained {
    fn drop(&mut self) {
        let _ = self.process.0.kill();
        let _ = self.process.0.wait();
        for folder in self.cgroup.ancestors().take(2) {
            let _ = fs::remove_dir(folder);
        }
    }
}

/// `count` devices of a card, those of the pod in this place.
fn ids(resource: SharedResource, card: u32, place: u32, count: u32) -> Vec<String> {
    let card_of = |_| Card { memory_mib: CARD_MIB, ..Card::default() }.blocks();
    let layout = Layout::new(&Dialect::default(), (0..CARDS).map(card_of));
    let numbers = layout.numbers(resource, (card as usize).into()).skip((place * count) as usize);
    numbers.take(count as usize).map(|number| layout.id(resource, number)).collect()
}

/// The kubelet's runbook, which it writes after each container and before it asks for the next one's devices.
struct Runbook(Vec<Value>);

impl Runbook {
    /// With the containers that run: each 8 cores and 12 blocks.
    fn begin() -> Result<Self> {
        let mut runbook = Self(Vec::new());
        for pod in 0..RUNNING {
            runbook.add_running(&format!("running-{pod}"), pod / PODS_OF_A_CARD, pod % PODS_OF_A_CARD);
        }
        runbook.replace()?;
        Ok(runbook)
    }

    /// With the answer that the plugin gave.
    fn add(&mut self, pod: &str, resource: &str, ids: &[String], answer: &ContainerAllocateResponse) {
        self.0.push(json!({"PodUID": pod, "ContainerName": "main", "ResourceName": resource,
            "DeviceIDs": {"-1": ids}, "AllocResp": STANDARD.encode(answer.encode_to_vec())}));
    }

    /// A container that runs: its cores and blocks of a card.
    fn add_running(&mut self, pod: &str, card: u32, place: u32) {
        let dialect = Dialect::default();
        let shown = [("NVIDIA_VISIBLE_DEVICES".to_owned(), uuid(card))];
        let answer = ContainerAllocateResponse { envs: shown.into(), ..Default::default() };
        self.add(pod, &dialect.cores, &ids(SharedResource::Cores, card, place, 8), &answer);
        self.add(pod, &dialect.memory, &ids(SharedResource::Memory, card, place, 12), &answer);
    }

    fn replace(&self) -> Result<()> {
        let text = json!({"Data": {"PodDeviceEntries": self.0, "RegisteredDevices": {}}, "Checksum": 1});
        let draft = folder().join(".checkpoint");
        fs::write(&draft, text.to_string())?;
        Ok(fs::rename(draft, folder().join("kubelet_internal_checkpoint"))?)
    }

    /// Writes these down as well, and leaves the time that passes before the next pod.
    async fn write(&mut self, rows: &[(&str, &str, Vec<String>, Answer)]) -> Result<()> {
        for (pod, resource, ids, answer) in rows {
            self.add(pod, resource, ids, &answer.content);
        }
        self.replace()?;
        pause().await;
        Ok(())
    }
}

fn pod(name: &str, phase: &str, cores: u32, blocks: u32) -> Value {
    let dialect = Dialect::default();
    let limits = BTreeMap::from([(&dialect.cores, cores.to_string()), (&dialect.memory, blocks.to_string())]);
    json!({
        "metadata": {"name": name, "namespace": "default", "uid": name},
        "spec": {"nodeName": "n1", "containers": [{"name": "main", "resources": {"limits": limits, "requests": limits}}]},
        "status": {"phase": phase},
    })
}

fn pod_list() -> Vec<Value> {
    let running = (0..RUNNING).map(|n| pod(&format!("running-{n}"), "Running", 8, 12));
    running.chain((0..WAITING).map(|n| pod(&format!("waiting-{n}"), "Pending", 5, 4))).collect()
}

fn uuid(card: u32) -> String {
    format!("GPU-00000000-0000-4000-8000-{card:012x}")
}

/// The cards of the stand-in for NVML.
fn inventory() -> Result<PathBuf> {
    let card = |n: u32| json!({"uuid": uuid(n), "minor": n, "memoryMiB": CARD_MIB});
    let cards: Vec<Value> = (0..CARDS).map(card).collect();
    let path = Path::new(KUBELET_ROOT).join("inventory.json");
    fs::write(&path, json!({"cards": cards}).to_string())?;
    Ok(path)
}

fn folder() -> PathBuf {
    Path::new(KUBELET_ROOT).join("device-plugins")
}

/// Killed when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    /// MiB.
    fn memory(&self, field: &str) -> Result<f64> {
        memory_of(self.0.id(), field)
    }
}

/// MiB.
fn memory_of(id: u32, field: &str) -> Result<f64> {
    let status = fs::read_to_string(format!("/proc/{id}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)).context("no such field")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<f64>()? / 1024.0)
}

impl Running {
    /// The process and the one that it has started for NVML.
    fn all(&self) -> Result<Vec<u32>> {
        let own = self.0.id();
        let mut all = vec![own];
        for thread in fs::read_dir(format!("/proc/{own}/task"))?.flatten() {
            // A thread may have ended.
            let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            all.extend(children.split_whitespace().filter_map(|id| id.parse::<u32>().ok()));
        }
        Ok(all)
    }

    fn processor_seconds(&self) -> Result<f64> {
        let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.context("ticks a second")?;
        let mut sum = 0;
        for id in self.all()? {
            let stat = fs::read_to_string(format!("/proc/{id}/stat"))?;
            // After the name, which is in parentheses: user and system time are the 12th and 13th.
            let (_, fields) = stat.rsplit_once(") ").context("the form of stat")?;
            let times = fields.split(' ').skip(11).take(2).map(str::parse::<i64>);
            sum += times.sum::<Result<i64, _>>()?;
        }
        Ok(sum as f64 / ticks as f64)
    }

    /// MiB.
    fn resident_of_all(&self) -> Result<f64> {
        self.all()?.into_iter().map(|id| memory_of(id, "VmRSS:")).sum()
    }
}

fn spawn(command: &mut Command) -> Result<(Running, Instant)> {
    let began = Instant::now();
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    Ok((Running(child.with_context(|| format!("{}", command.get_program().display()))?), began))
}

/// What a plugin answered for a container, and how long that took.
struct Answer {
    seconds: f64,
    content: ContainerAllocateResponse,
}

/// As a kubelet does: first it asks which devices to take, where there is a choice. Only the second question is measured.
async fn allocate(
    client: &mut DevicePluginClient<Channel>,
    offered: &[String],
    devices_ids: Vec<String>,
) -> Result<Answer> {
    let ask = ContainerPreferredAllocationRequest {
        available_device_ids: offered.to_vec(),
        must_include_device_ids: Vec::new(),
        allocation_size: i32::try_from(devices_ids.len())?,
    };
    client.get_preferred_allocation(PreferredAllocationRequest { container_requests: vec![ask] }).await?;
    let container_requests = vec![ContainerAllocateRequest { devices_ids }];
    let began = Instant::now();
    let answer = client.allocate(AllocateRequest { container_requests }).await?;
    let seconds = began.elapsed().as_secs_f64();
    let content = answer.into_inner().container_responses.pop().context("an answer for the container")?;
    Ok(Answer { seconds, content })
}

/// The time that passes before a kubelet's next pod.
async fn pause() {
    tokio::time::sleep(Duration::from_millis(20)).await;
}

async fn bare_calls(client: &mut DevicePluginClient<Channel>, times: &mut Vec<f64>) -> Result<()> {
    for _ in 0..WAITING {
        let began = Instant::now();
        client.get_device_plugin_options(Empty {}).await?;
        times.push(began.elapsed().as_secs_f64());
    }
    Ok(())
}

fn healthy(devices: &BTreeMap<String, bool>) -> Vec<String> {
    devices.iter().filter(|(_, healthy)| **healthy).map(|(id, _)| id.clone()).collect()
}

/// One card after the other, those that can be had.
async fn whole_cards(
    client: &mut DevicePluginClient<Channel>,
    ids: &BTreeMap<String, bool>,
    times: &mut Vec<f64>,
) -> Result<()> {
    let offered = healthy(ids);
    for id in offered.iter().cycle().take(WAITING as usize) {
        pause().await;
        times.push(allocate(client, &offered, vec![id.clone()]).await?.seconds);
    }
    Ok(())
}

/// As much of a kubelet as a plugin meets.
struct Kubelet {
    registrations: mpsc::UnboundedReceiver<(RegisterRequest, Instant)>,
    /// Those that came before they were asked for.
    early: Vec<(RegisterRequest, Instant)>,
    /// End when dropped.
    _servers: tokio::task::JoinSet<Result<(), tonic::transport::Error>>,
    /// A kubelet reads what every plugin lists until it stops.
    lists: tokio::task::JoinSet<()>,
}

struct Desk(mpsc::UnboundedSender<(RegisterRequest, Instant)>);

#[tonic::async_trait]
impl Registration for Desk {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        self.0.send((request.into_inner(), Instant::now())).map_err(|_| Status::unavailable("gone"))?;
        Ok(Response::new(Empty {}))
    }
}

impl Kubelet {
    /// On empty folders.
    fn start() -> Result<Self> {
        for entry in fs::read_dir(KUBELET_ROOT)?.flatten() {
            if entry.file_type()?.is_dir() {
                fs::remove_dir_all(entry.path())?;
            } else {
                fs::remove_file(entry.path())?;
            }
        }
        fs::create_dir_all(folder())?;
        let (sender, registrations) = mpsc::unbounded_channel();
        let mut servers = tokio::task::JoinSet::new();
        // The second name is for NVIDIA's plugin: only a path with an `@` becomes an `:authority` that this server takes.
        for name in ["kubelet.sock", "stand-in@kubelet.sock"] {
            let listener = UnixListener::bind(folder().join(name))?;
            let server = Server::builder().add_service(RegistrationServer::new(Desk(sender.clone())));
            servers.spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
        }
        Ok(Self { registrations, early: Vec::new(), _servers: servers, lists: tokio::task::JoinSet::new() })
    }

    /// Waits for a resource: when it was registered, who serves it, and its devices with whether they can be had.
    async fn registered(
        &mut self,
        resource: &str,
    ) -> Result<(Instant, DevicePluginClient<Channel>, BTreeMap<String, bool>)> {
        let (request, at) = loop {
            if let Some(place) = self.early.iter().position(|(request, _)| request.resource_name == resource)
            {
                break self.early.remove(place);
            }
            let next = timeout(TIMEOUT, self.registrations.recv()).await;
            self.early.push(
                next.with_context(|| format!("{resource} was not registered"))?
                    .context("the socket is gone")?,
            );
        };
        let mut client = DevicePluginClient::new(dial(&folder().join(request.endpoint)).await?);
        let mut list = client.list_and_watch(Empty {}).await?.into_inner();
        let first = timeout(TIMEOUT, list.message()).await??.context("no list")?;
        self.lists.spawn(async move { while let Ok(Some(_)) = list.message().await {} });
        let devices =
            first.devices()?.into_iter().map(|device| (device.id, device.health == HEALTHY)).collect();
        Ok((at, client, devices))
    }
}
