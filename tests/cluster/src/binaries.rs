//! The programs of the cluster: found, or built once and kept outside the repository.
//!
//! Debian's packages give etcd and runc. Kubernetes and NVIDIA's plugin are taken from `KUBEBUILDER_ASSETS` or the `PATH`, else built by
//! Go from the pinned modules into `${GPU_MIGRATE_CACHE:-${XDG_CACHE_HOME:-~/.cache}/gpu-migrate}/bin/<what>-<version>/`, one after the
//! other: two at a time need more memory and are no faster on two cores. containerd is always built: what is installed may be of another
//! major version, with another configuration. Our own binaries are built by cargo, or taken from `GPU_MIGRATE_BIN_DIR`.

use std::{
    env,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::process::output;

const KUBERNETES_GO_MOD: &str = include_str!("../go.mod");
const OLDEST_KUBERNETES_GO_MOD: &str = include_str!("../kubernetes-1.30/go.mod");
const CONTAINERD_GO_MOD: &str = include_str!("../containerd/go.mod");
const HELM_GO_MOD: &str = include_str!("../helm/go.mod");
const PROMETHEUS_GO_MOD: &str = include_str!("../prometheus/go.mod");
const NVIDIA_GO_MOD: &str = include_str!("../nvidia/go.mod");
const WORK_SOURCE: &str = include_str!("../work/main.go");
const COLLECTOR_GO_MOD: &str = include_str!("../collector/go.mod");
const COLLECTOR_SOURCE: &str = include_str!("../collector/main.go");
const DRA_SOURCE: &str = include_str!("../dra/main.go");
const NVML_SOURCE: &str = include_str!("../nvml/nvml.c");

/// What has to be installed, and the Debian package that brings it.
const PACKAGES: [(&str, &str); 9] = [
    ("etcd", "etcd-server"),
    ("runc", "runc"),
    ("setpriv", "util-linux"),
    ("ptp", "containernetworking-plugins"),
    ("ip", "iproute2"),
    ("strip", "binutils"),
    ("dpkg-deb", "dpkg"),
    ("cc", "gcc"),
    ("go", "golang (1.26 or newer: Kubernetes asks for it)"),
];

#[derive(Clone, Debug)]
pub struct Binaries {
    pub etcd: PathBuf,
    pub containerd: PathBuf,
    /// What containerd starts for each pod.
    pub shim: PathBuf,
    /// containerd's own client, for the image import.
    pub ctr: PathBuf,
    pub apiserver: PathBuf,
    pub controller_manager: PathBuf,
    pub scheduler: PathBuf,
    /// kubectl, for the commands of the documents.
    pub kubectl: PathBuf,
    pub kubelet: PathBuf,
    pub runc: PathBuf,
    /// CNI's own plugins: loopback, ptp, host-local.
    pub cni: [PathBuf; 3],
    pub nvidia_plugin: PathBuf,
    /// The stand-in for NVIDIA's DRA driver, see `dra/main.go`.
    pub dra_driver: PathBuf,
    /// OpenTelemetry's collector, see `collector/main.go`.
    pub collector: PathBuf,
    pub prometheus: PathBuf,
    /// The folder with the stand-in `libnvidia-ml.so.1`.
    pub nvml: PathBuf,
    /// The one program of all pods, see `work/main.go`.
    pub work: PathBuf,
}

/// Whether the scenarios are to run (`GPU_MIGRATE_CLUSTER=1`).
///
/// # Errors
/// If they were asked for (`GPU_MIGRATE_CLUSTER=1`) but something is missing: everything that is, in one message.
pub fn asked_for() -> Result<bool> {
    if env::var("GPU_MIGRATE_CLUSTER").as_deref() != Ok("1") {
        return Ok(false);
    }
    let mut missing: Vec<String> = PACKAGES
        .iter()
        .filter(|(program, _)| find(program).is_none())
        .map(|(program, package)| format!("{program} (Debian package {package})"))
        .collect();
    if !nix::unistd::geteuid().is_root() {
        missing.push("root: a kubelet mounts and makes cgroups".into());
    }
    if missing.is_empty() {
        return Ok(true);
    }
    bail!("GPU_MIGRATE_CLUSTER=1 asks for the cluster scenarios, but there is no {}", missing.join(", no "))
}

impl Binaries {
    /// Finds or builds all of them. A first build takes minutes, so each is announced.
    pub fn prepare() -> Result<Self> {
        let here = &crate::package_folder();
        Ok(Self {
            etcd: installed("etcd")?,
            containerd: containerd(here, "containerd")?,
            shim: containerd(here, "containerd-shim-runc-v2")?,
            ctr: containerd(here, "ctr")?,
            runc: installed("runc")?,
            cni: [installed("loopback")?, installed("ptp")?, installed("host-local")?],
            kubectl: kubectl()?,
            kubelet: kubernetes("kubelet")?,
            apiserver: kubernetes("kube-apiserver")?,
            controller_manager: kubernetes("kube-controller-manager")?,
            scheduler: kubernetes("kube-scheduler")?,
            nvidia_plugin: go_tool(
                &here.join("nvidia"),
                NVIDIA_GO_MOD,
                "github.com/NVIDIA/k8s-device-plugin",
                "nvidia-device-plugin",
            )?,
            dra_driver: go_program(here, "dra", DRA_SOURCE)?,
            collector: collector(here)?,
            prometheus: prometheus("prometheus")?,
            nvml: nvml(here)?,
            work: go_program(here, "work", WORK_SOURCE)?,
        })
    }
}

fn containerd(here: &Path, name: &str) -> Result<PathBuf> {
    built_go_tool(&here.join("containerd"), CONTAINERD_GO_MOD, "github.com/containerd/containerd/v2", name)
}

const KUBERNETES: &str = "k8s.io/kubernetes";

/// Whether the scenarios run on the oldest minor that the chart accepts (`GPU_MIGRATE_KUBERNETES=1.30`) instead of the newest.
///
/// # Errors
/// Another minor is asked for.
pub fn oldest_kubernetes() -> Result<bool> {
    match env::var("GPU_MIGRATE_KUBERNETES").unwrap_or_default().as_str() {
        "" | "1.37" => Ok(false),
        "1.30" => Ok(true),
        other => bail!("GPU_MIGRATE_KUBERNETES={other}: expected 1.30 or 1.37"),
    }
}

fn kubernetes(name: &str) -> Result<PathBuf> {
    let here = crate::package_folder();
    if oldest_kubernetes()? {
        return built_go_tool(&here.join("kubernetes-1.30"), OLDEST_KUBERNETES_GO_MOD, KUBERNETES, name);
    }
    go_tool(&here, KUBERNETES_GO_MOD, KUBERNETES, name)
}

/// The newest one, whatever the cluster is: it is only a client.
pub fn kubectl() -> Result<PathBuf> {
    go_tool(&crate::package_folder(), KUBERNETES_GO_MOD, KUBERNETES, "kubectl")
}

/// Helm, apart from [`Binaries`]: most scenarios do without it.
pub fn helm() -> Result<PathBuf> {
    go_tool(&crate::package_folder().join("helm"), HELM_GO_MOD, "helm.sh/helm/v3", "helm")
}

/// Prometheus itself, or `promtool`.
pub fn prometheus(name: &str) -> Result<PathBuf> {
    let folder = crate::package_folder().join("prometheus");
    go_tool(&folder, PROMETHEUS_GO_MOD, "github.com/prometheus/prometheus", name)
}

fn collector(here: &Path) -> Result<PathBuf> {
    let group = format!("collector-{}", short_digest(&[COLLECTOR_GO_MOD, COLLECTOR_SOURCE].concat()));
    cached(&group, "collector", |target| build_program(&here.join("collector"), ".", target))
}

/// The version that a `go.mod` requires of a module.
fn required_version<'a>(go_mod: &'a str, module: &str) -> Result<&'a str> {
    go_mod
        .lines()
        .filter_map(|line| line.trim().trim_start_matches("require ").split_once(' '))
        .find(|(name, _)| *name == module)
        .and_then(|(_, rest)| rest.split_whitespace().next())
        .with_context(|| format!("go.mod requires no {module}"))
}

/// Builds `<module>/cmd/<name>` unless it is installed or in the cache.
fn go_tool(folder: &Path, go_mod: &str, module: &str, name: &str) -> Result<PathBuf> {
    find(name).map_or_else(|| built_go_tool(folder, go_mod, module, name), Ok)
}

/// Builds `<module>/cmd/<name>` unless it is in the cache.
fn built_go_tool(folder: &Path, go_mod: &str, module: &str, name: &str) -> Result<PathBuf> {
    let version = required_version(go_mod, module)?;
    let (major, minor) = version.trim_start_matches('v').split_once('.').context("a version has a dot")?;
    let minor = minor.split('.').next().unwrap_or_default();
    // Kubernetes' components compare versions among each other; NVIDIA's plugin ignores the variables and needs its NVML
    // symbols bound late, since the library is loaded at run time.
    let variables = "k8s.io/component-base/version";
    let ldflags = format!(
        "-s -w -extldflags=-Wl,-z,lazy -X {variables}.gitVersion={version} -X {variables}.gitMajor={major} -X {variables}.gitMinor={minor}"
    );
    // `helm.sh/helm/v3` is called after the part before its major version.
    let group = module.rsplit('/').find(|part| !part.starts_with('v')).unwrap_or(module);
    cached(&format!("{group}-{version}"), name, |target| {
        output(
            Command::new("go")
                .current_dir(folder)
                // Of Prometheus, without the clients of all clouds; of containerd, without btrfs, whose headers it needs.
                .args(["build", "-trimpath", "-tags", "remove_all_sd,no_btrfs", "-ldflags", &ldflags, "-o"])
                .arg(target)
                .arg(format!("{module}/cmd/{name}")),
        )
    })
}

/// A program of our own in `<name>/main.go`, for a container without any library.
fn go_program(here: &Path, name: &str, source: &str) -> Result<PathBuf> {
    cached(&format!("{name}-{}", short_digest(source)), name, |target| {
        build_program(here, &format!("./{name}"), target)
    })
}

/// Builds a package of the module in a folder, without C.
fn build_program(folder: &Path, package: &str, target: &Path) -> Result<String> {
    output(
        Command::new("go")
            .current_dir(folder)
            .env("CGO_ENABLED", "0")
            .args(["build", "-trimpath", "-ldflags", "-s -w", "-o"])
            .arg(target)
            .arg(package),
    )
}

/// The folder of the NVML stand-in.
fn nvml(here: &Path) -> Result<PathBuf> {
    let library = cached(&format!("nvml-{}", short_digest(NVML_SOURCE)), "libnvidia-ml.so.1", |target| {
        output(
            Command::new("cc")
                .args(["-shared", "-fPIC", "-O2", "-Wl,-soname,libnvidia-ml.so.1", "-o"])
                .arg(target)
                .arg(here.join("nvml/nvml.c")),
        )
    })?;
    Ok(library.parent().context("a file has a folder")?.to_owned())
}

/// Our own binaries, freshly built, once a run, by the cargo that runs the tests and with its profile, so that they are never stale.
pub fn ours() -> Result<PathBuf> {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    if let Some(folder) = BUILT.get() {
        return Ok(folder.clone());
    }
    let folder = build()?;
    Ok(BUILT.get_or_init(|| folder).clone())
}

fn build() -> Result<PathBuf> {
    if let Some(folder) = env::var_os("GPU_MIGRATE_BIN_DIR") {
        return Ok(folder.into());
    }
    let me = env::current_exe().context("cannot find the path of this test")?;
    let folder = me.ancestors().nth(2).context("a test is in <target>/<profile>/deps")?;
    let profile = match folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(name) => name,
    };
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(crate::package_folder()).args(["build", "--quiet", "--locked"]);
    for package in ["webhook", "admission-ext", "plugin-bridge", "operator", "cli"] {
        command.args(["--package", &format!("gpu-migrate-{package}")]);
    }
    command.args(["--profile", profile]);
    command.arg("--bins").env("CARGO_TARGET_DIR", folder.parent().context("a profile folder has a parent")?);
    output(&mut command)?;
    Ok(folder.to_owned())
}

/// `<cache>/bin/<group>/<name>`, made by `build` under another name first: a build that is cut short leaves nothing.
fn cached(group: &str, name: &str, build: impl FnOnce(&Path) -> Result<String>) -> Result<PathBuf> {
    let folder = cache()?.join("bin").join(group);
    let target = folder.join(name);
    if target.exists() {
        return Ok(target);
    }
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    eprintln!("building {name} ({group}) into {}", folder.display());
    let draft = folder.join(format!(".{name}.{}", std::process::id()));
    build(&draft)?;
    fs::rename(&draft, &target).with_context(|| format!("cannot make {}", target.display()))?;
    Ok(target)
}

/// Where what was built or downloaded is kept.
pub fn cache() -> Result<PathBuf> {
    if let Some(folder) = env::var_os("GPU_MIGRATE_CACHE") {
        return Ok(folder.into());
    }
    let base = env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| env::var_os("HOME").map(|home| Path::new(&home).join(".cache")))
        .context("none of GPU_MIGRATE_CACHE, XDG_CACHE_HOME and HOME is set")?;
    Ok(base.join("gpu-migrate"))
}

fn installed(name: &str) -> Result<PathBuf> {
    find(name).with_context(|| format!("{name} is neither in KUBEBUILDER_ASSETS nor on the PATH"))
}

fn find(name: &str) -> Option<PathBuf> {
    let assets = env::var_os("KUBEBUILDER_ASSETS").map(PathBuf::from);
    let path = env::var_os("PATH").unwrap_or_default();
    // A cron-like PATH lacks the sbin folders, where Debian puts runc; CNI plugins are never on it.
    let extra = ["/usr/sbin", "/sbin", "/usr/lib/cni", "/opt/cni/bin"].map(PathBuf::from);
    assets
        .into_iter()
        .chain(env::split_paths(&path))
        .chain(extra)
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
}

/// The first twelve hex digits of the SHA-256.
fn short_digest(text: &str) -> String {
    let mut hex = String::new();
    for byte in Sha256::digest(text).iter().take(6) {
        let _ = write!(hex, "{byte:02x}");
    }
    hex
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_come_from_go_mod() {
        let single = "module x\nrequire k8s.io/kubernetes v1.2.3\nreplace k8s.io/kubernetes v9 => y v1\n";
        assert_eq!(required_version(single, "k8s.io/kubernetes").unwrap(), "v1.2.3");
        let block = "require (\n\tgithub.com/a/b v0.1.0 // indirect\n\tgithub.com/a/c v0.2.0\n)\n";
        assert_eq!(required_version(block, "github.com/a/b").unwrap(), "v0.1.0");
        assert!(required_version(block, "github.com/a").is_err());
    }

    #[test]
    fn the_pinned_modules_are_there() {
        assert!(required_version(KUBERNETES_GO_MOD, KUBERNETES).unwrap().starts_with("v1.37."));
        assert!(required_version(OLDEST_KUBERNETES_GO_MOD, KUBERNETES).unwrap().starts_with("v1.30."));
        assert!(
            required_version(NVIDIA_GO_MOD, "github.com/NVIDIA/k8s-device-plugin")
                .unwrap()
                .starts_with("v0.")
        );
    }
}
