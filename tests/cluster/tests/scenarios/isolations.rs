//! What a container sees of the isolation of its node: variables, files and devices, on a real kubelet. Whether that limits it is
//! measured elsewhere (`gpu-migrate verify isolation`).

use std::{
    fs,
    os::unix::{
        fs::{FileTypeExt, symlink},
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use gpu_migrate_cluster_tests::{
    Cluster,
    migration::{shared_spec, uuid},
    observe::Container,
    workload::only_card,
};
use gpu_migrate_model::names::CARD_INCLUDE;
use kube::api::PostParams;
use serde_json::json;

/// A strategy, and a node that can have it.
struct Strategy {
    name: &'static str,
    /// As the NVML stand-in has it.
    driver: &'static str,
    cuda: &'static str,
    cgroup_v2: bool,
    /// What the container has besides its card.
    check: fn(&Inside, &Promise) -> Result<()>,
}

const STRATEGIES: [Strategy; 5] = [
    Strategy { name: "none", driver: "550.54.15", cuda: "12040", cgroup_v2: false, check: none },
    Strategy { name: "driver", driver: "615.71.05", cuda: "13040", cgroup_v2: true, check: driver },
    Strategy { name: "mps", driver: "550.54.15", cuda: "12040", cgroup_v2: false, check: mps },
    Strategy { name: "hami-core", driver: "580.82.07", cuda: "13000", cgroup_v2: true, check: hami_core },
    Strategy { name: "vcuda", driver: "470.82.01", cuda: "11040", cgroup_v2: false, check: vcuda },
];

/// What stands for a library of others; the container has the file, whatever is in it.
const LIBRARY: &str = "a library";

/// What a container requested.
struct Promise {
    cores: u64,
    blocks: u64,
    /// It has its own, whatever the one before it had on the same card.
    pod: &'static str,
}

impl Promise {
    const fn mib(&self) -> u64 {
        self.blocks * 256
    }
}

/// A container that runs.
struct Inside(Container);

impl Inside {
    fn variable(&self, name: &str) -> Option<&str> {
        self.0.environment.get(name).map(String::as_str)
    }

    fn has_variables(&self, expected: &[(&str, String)]) -> Result<()> {
        for (name, value) in expected {
            let found = self.variable(name);
            ensure!(found == Some(value), "{name} is {found:?} and not {value:?}");
        }
        Ok(())
    }

    /// A path of the container, as this machine reaches it.
    fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.0.pid))
    }

    fn has_text(&self, path: &str, expected: &str) -> Result<()> {
        let found = fs::read_to_string(self.path(path)).with_context(|| format!("no {path}"))?;
        ensure!(found == expected, "{path} has {found:?} and not {expected:?}");
        let write = fs::OpenOptions::new().append(true).open(self.path(path));
        ensure!(
            write.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::ReadOnlyFilesystem),
            "{path} can be opened for writing: {write:?}"
        );
        Ok(())
    }
}

/// What strategies need on the host, below a folder.
struct Host {
    folder: PathBuf,
    _control: UnixListener,
}

impl Host {
    fn new(folder: PathBuf) -> Result<Self> {
        for (file, text) in [
            ("lib/hami-core/v1/libvgpu.so", LIBRARY),
            ("lib/vcuda/v1/nvidia/lib64/libcuda-control.so", LIBRARY),
            ("lib/vcuda/v1/origin/lib64/libcuda.so.1", LIBRARY),
            ("mps/shm/of-the-daemon", ""),
            ("mps/pipe/log", ""),
            ("v2/cgroup.controllers", ""),
            ("v1/notify_on_release", ""),
        ] {
            let path = folder.join(file);
            fs::create_dir_all(path.parent().context("a folder")?)?;
            fs::write(path, text)?;
        }
        for library in ["hami-core", "vcuda"] {
            symlink("v1", folder.join("lib").join(library).join("current"))?;
        }
        // The cgroups of this machine, as those of a node with either version.
        let all = Path::new("/sys/fs/cgroup");
        let real = if all.join("pids").is_dir() { all.join("pids") } else { all.to_path_buf() };
        for version in ["v1", "v2"] {
            symlink(&real, folder.join(version).join("pids"))?;
        }
        let control = UnixListener::bind(folder.join("mps/pipe/control"))?;
        Ok(Self { folder, _control: control })
    }

    async fn restart_agent(&self, cluster: &mut Cluster, strategy: &Strategy) -> Result<()> {
        let (library, mps, manager) =
            (self.folder.join("lib"), self.folder.join("mps"), self.folder.join("manager"));
        let cgroups = self.folder.join(if strategy.cgroup_v2 { "v2" } else { "v1" });
        let flags = [
            ("isolation", Path::new(strategy.name)),
            ("library-dir", &library),
            ("mps-dir", &mps),
            ("manager-dir", &manager),
            ("cgroup-dir", &cgroups),
        ];
        let versions = [("NVML_STAND_IN_DRIVER", strategy.driver), ("NVML_STAND_IN_CUDA", strategy.cuda)];
        cluster.restart_agent_with(&flags, &versions).await
    }
}

/// Two shared pods, one after the other on one card, under each strategy: each sees its own limits in the way that the strategy
/// gives them, and nothing of the one before it.
pub(crate) async fn a_container_sees_what_its_isolation_promises(cluster: &mut Cluster) -> Result<()> {
    let folder = cluster.setup.layout.file("isolation");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    let host = Host::new(folder)?;
    let namespace = cluster.namespace("isolation", &[]).await?;
    let outcome = each(cluster, &host, &namespace).await;
    let restored = cluster.restart_agent_with(&[], &[]).await;
    outcome.and(restored)
}

async fn each(cluster: &mut Cluster, host: &Host, namespace: &str) -> Result<()> {
    for (card, strategy) in (0..).zip(&STRATEGIES) {
        let of = || format!("isolation {}", strategy.name);
        host.restart_agent(cluster, strategy).await.with_context(of)?;
        let first = Promise { cores: 30, blocks: 8, pod: "first" };
        let second = Promise { cores: 10, blocks: 4, pod: "second" };
        for promise in [first, second] {
            let name = format!("{}-{}", strategy.name, promise.pod);
            start(cluster, namespace, &name, &promise, card).await.with_context(of)?;
            let (_, container) = cluster.running(namespace, &name).await.with_context(of)?;
            let sees = only_card(&container)?;
            ensure!(sees == uuid(card), "{name} sees {sees} and not the card that it is for");
            (strategy.check)(&Inside(container), &promise).with_context(|| name.clone())?;
            if promise.pod == "first" {
                cluster.delete_pod(namespace, &name).await?;
            }
        }
    }
    Ok(())
}

/// Creates a shared pod that only this card is for.
async fn start(cluster: &Cluster, namespace: &str, name: &str, promise: &Promise, card: u64) -> Result<()> {
    let spec = shared_spec(promise.cores, promise.blocks);
    let metadata = json!({"name": name, "annotations": {CARD_INCLUDE: uuid(card)}});
    let pod = serde_json::from_value(json!({"metadata": metadata, "spec": spec}))?;
    cluster.pods(namespace).create(&PostParams::default(), &pod).await.map(drop)?;
    Ok(())
}

/// Nothing but the card.
fn none(inside: &Inside, _: &Promise) -> Result<()> {
    let limits = ["CUDA_", "LD_", "NVIDIA_GPU_MEMORY_"];
    let found: Vec<_> = inside
        .0
        .environment
        .keys()
        .filter(|name| limits.iter().any(|limit| name.starts_with(limit)))
        .collect();
    ensure!(found.is_empty(), "variables {found:?}");
    for path in
        ["/etc/ld.so.preload", "/overrideEnv", "/usr/local/vgpu", "/usr/local/nvidia", "/etc/vcuda", "/mps"]
    {
        ensure!(!inside.path(path).exists(), "{path} is there");
    }
    Ok(())
}

/// The variables of which NVIDIA's container toolkit makes the cgroup's limits.
fn driver(inside: &Inside, promise: &Promise) -> Result<()> {
    let mib = promise.mib().to_string();
    inside.has_variables(&[("NVIDIA_GPU_MEMORY_LIMIT", mib.clone()), ("NVIDIA_GPU_MEMORY_REQUEST", mib)])
}

/// The control daemon, and what a client may use.
fn mps(inside: &Inside, promise: &Promise) -> Result<()> {
    inside.has_variables(&[
        ("CUDA_MPS_PIPE_DIRECTORY", "/mps/pipe".to_owned()),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", promise.cores.to_string()),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", format!("0={}M", promise.mib())),
    ])?;
    let control = fs::metadata(inside.path("/mps/pipe/control")).context("no /mps/pipe/control")?;
    ensure!(control.file_type().is_socket(), "/mps/pipe/control is no socket");
    ensure!(inside.path("/dev/shm/of-the-daemon").exists(), "/dev/shm is not the daemon's");
    Ok(())
}

/// The library, preloaded, its limits in a file that the container cannot change, and a folder for what it uses.
fn hami_core(inside: &Inside, promise: &Promise) -> Result<()> {
    inside.has_text("/usr/local/vgpu/libvgpu.so", LIBRARY)?;
    inside.has_text("/etc/ld.so.preload", "/usr/local/vgpu/libvgpu.so\n")?;
    let limits = [
        ("CUDA_DEVICE_MEMORY_LIMIT_0", format!("{}m", promise.mib())),
        ("CUDA_DEVICE_SM_LIMIT", promise.cores.to_string()),
        ("CUDA_DEVICE_MEMORY_SHARED_CACHE", "/usr/local/vgpu/cache/usage".to_owned()),
    ];
    inside.has_variables(&limits)?;
    let text: String = limits.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
    inside.has_text("/overrideEnv", &text)?;
    let usage = inside.path("/usr/local/vgpu/cache/usage");
    ensure!(!usage.exists(), "it has what a container before it used");
    fs::write(&usage, "as the library writes it").context("it cannot write what it uses")?;
    ensure!(inside.path("/tmp/vgpulock").is_dir(), "no /tmp/vgpulock");
    Ok(())
}

/// The library in place of the driver's, and the socket at which it registers.
fn vcuda(inside: &Inside, _: &Promise) -> Result<()> {
    inside.has_variables(&[("LD_LIBRARY_PATH", "/usr/local/nvidia/lib64".to_owned())])?;
    inside.has_text("/usr/local/nvidia/lib64/libcuda-control.so", LIBRARY)?;
    let socket = inside.path("/etc/vcuda/vcuda.sock");
    UnixStream::connect(&socket).context("nobody answers at /etc/vcuda/vcuda.sock")?;
    Ok(())
}
