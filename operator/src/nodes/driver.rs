//! Whether a node's driver is the wanted one, and what the owner's installer is to do about it.

use super::{NodeView, Say};
use gpu_migrate_model::crd::{Driver, DriverInstall, GPUShadowStatus, InstallPhase};
use gpu_migrate_model::names;
use k8s_openapi::api::core::v1::Pod;

/// Versions of driver and CUDA as the node agent reports them, else as NVIDIA's feature discovery labels the node.
#[must_use]
pub fn detected(node: &NodeView, shadow: Option<&GPUShadowStatus>) -> (Option<String>, Option<String>) {
    let told = |text: Option<&String>| text.filter(|text| !text.is_empty()).cloned();
    let label = |key: &str| told(node.labels.get(key));
    (
        told(shadow.map(|shadow| &shadow.driver_version)).or_else(|| label(names::DRIVER_VERSION)),
        told(shadow.map(|shadow| &shadow.cuda_version)).or_else(|| label(names::CUDA_VERSION)),
    )
}

fn numbers(version: &str) -> Vec<u32> {
    version.split('.').map_while(|part| part.trim().parse().ok()).collect()
}

/// Whether the detected versions are the wanted ones; `None` where nothing was detected.
#[must_use]
pub fn matches(driver: &Driver, found: &(Option<String>, Option<String>)) -> Option<bool> {
    let version = found.0.as_ref()?;
    let begins = version == &driver.version
        || version.strip_prefix(&driver.version).is_some_and(|rest| rest.starts_with('.'));
    let cuda = driver
        .cuda
        .as_ref()
        .is_none_or(|lowest| found.1.as_ref().is_some_and(|found| numbers(found) >= numbers(lowest)));
    Some(begins && cuda)
}

/// What is to be said of it.
#[must_use]
pub fn say(driver: &Driver, found: &(Option<String>, Option<String>)) -> Say {
    let cuda = |version: &Option<String>| version.as_ref().map_or(String::new(), |v| format!(", CUDA {v}"));
    let wanted = format!("{}{}", driver.version, cuda(&driver.cuda));
    match (matches(driver, found), &found.0) {
        (Some(true), Some(version)) => {
            Say::new("DriverMatches", true, "AsWanted", format!("driver {version}{}", cuda(&found.1)))
        }
        (_, Some(version)) => {
            let message = format!("driver {version}{} found, {wanted} wanted", cuda(&found.1));
            Say::new("DriverMatches", false, "Differs", message)
        }
        (_, None) => {
            Say::new("DriverMatches", false, "NotDetected", format!("no driver found, {wanted} wanted"))
        }
    }
}

/// Names a run: another template or another version is another run. FNV-1a, since it must stay the same for ever.
#[must_use]
pub fn revision(template: &str, version: &str) -> String {
    let bytes = template.bytes().chain([0]).chain(version.bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{:08x}", hash >> 32)
}

/// A pod of the installer on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Name of the pod.
    pub pod: String,
    /// Which run it is.
    pub revision: String,
    /// How far it is.
    pub phase: InstallPhase,
    /// What it said.
    pub message: String,
}

impl Run {
    /// Reads a pod of the installer.
    #[must_use]
    pub fn of(pod: &Pod, revision: String) -> Self {
        let status = pod.status.as_ref();
        let phase = match status.and_then(|status| status.phase.as_deref()) {
            Some("Succeeded") => InstallPhase::Installed,
            Some("Failed") => InstallPhase::Failed,
            _ => InstallPhase::Installing,
        };
        let name = pod.metadata.name.clone().unwrap_or_default();
        Self { pod: name, revision, phase, message: why(pod) }
    }
}

/// The reason in the words of who knows it best: the container's own message, its exit, the kubelet, the pod.
fn why(pod: &Pod) -> String {
    let Some(status) = &pod.status else { return String::new() };
    let containers = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    for container in containers {
        let Some(state) = &container.state else { continue };
        if let Some(ended) = state.terminated.as_ref().filter(|ended| ended.exit_code != 0) {
            let reason = ended.reason.as_deref().unwrap_or("Error");
            let said = ended.message.as_deref().map_or(String::new(), |text| format!(": {}", text.trim()));
            return format!("{}: {reason}, exit code {}{said}", container.name, ended.exit_code);
        }
        if let Some(reason) = state.waiting.as_ref().and_then(|waiting| waiting.reason.as_deref())
            && reason != "ContainerCreating"
            && reason != "PodInitializing"
        {
            return format!("{}: {reason}", container.name);
        }
    }
    let parts = [&status.reason, &status.message].into_iter().flatten();
    parts.map(String::as_str).collect::<Vec<_>>().join(": ")
}

/// What to do about the driver of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing stands in the way of the plugins.
    Good,
    /// The plugins wait; the cards are in use, so nothing else happens either.
    InUse,
    /// The plugins must leave before the installer can begin.
    Withdraw,
    /// Run the installer.
    Begin,
    /// The installer runs, or has failed.
    Hold,
}

/// What is known of the installation on a node.
#[derive(Clone, Copy, Debug)]
pub struct Look<'a> {
    /// The wanted driver.
    pub driver: &'a Driver,
    /// Whether the detected versions are the wanted ones.
    pub matches: Option<bool>,
    /// The run that is wanted.
    pub revision: &'a str,
    /// What was written down of the last one.
    pub recorded: Option<&'a DriverInstall>,
    /// Its pod.
    pub run: Option<&'a Run>,
    /// Pods of the node that have or ask for cards.
    pub users: u32,
    /// Plugins and agents are still there.
    pub served: bool,
}

/// The step, and what is written into the GPUShadow.
#[must_use]
pub fn step(look: &Look<'_>) -> (Step, DriverInstall) {
    let record = |phase, message: String| DriverInstall {
        version: look.driver.version.clone(),
        revision: look.revision.to_owned(),
        phase,
        message,
    };
    if let Some(run) = look.run.filter(|run| run.revision == look.revision) {
        let step = if run.phase == InstallPhase::Installed { Step::Good } else { Step::Hold };
        return (step, record(run.phase, run.message.clone()));
    }
    let done =
        look.recorded.filter(|one| one.revision == look.revision && one.phase == InstallPhase::Installed);
    if let Some(done) = done {
        return (Step::Good, done.clone());
    }
    if look.matches == Some(true) {
        return (Step::Good, record(InstallPhase::Installed, "found as wanted".into()));
    }
    let waiting = |why: &str| record(InstallPhase::Waiting, why.to_owned());
    if look.users > 0 {
        let why = format!("{} pods use cards here; nothing is evicted", look.users);
        (Step::InUse, waiting(&why))
    } else if look.served {
        (Step::Withdraw, waiting("the plugins leave first"))
    } else {
        (Step::Begin, record(InstallPhase::Installing, String::new()))
    }
}

/// What is to be said of the installation.
#[must_use]
pub fn say_install(install: &DriverInstall) -> Say {
    let text = |word: &str| match install.message.as_str() {
        "" => format!("driver {} {word}", install.version),
        said => format!("driver {} {word}: {said}", install.version),
    };
    let (holds, reason, message) = match install.phase {
        InstallPhase::Installed => (true, "Installed", text("installed")),
        InstallPhase::Installing => (false, "Installing", text("is being installed")),
        InstallPhase::Waiting => (false, "Waiting", text("not installed yet")),
        InstallPhase::Failed => (false, "Failed", text("not installed")),
    };
    Say::new("DriverInstalled", holds, reason, message)
}
