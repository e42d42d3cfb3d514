//! Whether a node's driver has the desired version, and the steps of its installer.

use super::{NodeView, OperatorCondition};
use gpu_migrate_model::crd::{Driver, DriverInstall, GPUShadowStatus, InstallPhase};
use gpu_migrate_model::hash::fnv1a;
use gpu_migrate_model::names;
use k8s_openapi::api::core::v1::{Container, Pod};

/// Versions of driver and CUDA as the node agent reports them, else as NVIDIA's feature discovery labels the node.
#[must_use]
pub fn detected(node: &NodeView, shadow: Option<&GPUShadowStatus>) -> (Option<String>, Option<String>) {
    let nonempty = |text: Option<&String>| text.filter(|text| !text.is_empty()).cloned();
    let label = |key: &str| nonempty(node.labels.get(key));
    (
        nonempty(shadow.map(|shadow| &shadow.driver_version)).or_else(|| label(names::DRIVER_VERSION)),
        nonempty(shadow.map(|shadow| &shadow.cuda_version)).or_else(|| label(names::CUDA_VERSION)),
    )
}

fn numbers(version: &str) -> Vec<u32> {
    version.split('.').map_while(|part| part.trim().parse().ok()).collect()
}

/// Whether the detected versions are the desired ones; `None` where nothing was detected.
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

/// Condition `DriverMatches`.
#[must_use]
pub fn matches_condition(driver: &Driver, found: &(Option<String>, Option<String>)) -> OperatorCondition {
    let cuda = |version: &Option<String>| version.as_ref().map_or(String::new(), |v| format!(", CUDA {v}"));
    let wanted = format!("{}{}", driver.version, cuda(&driver.cuda));
    match (matches(driver, found), &found.0) {
        (Some(true), Some(version)) => OperatorCondition::new(
            "DriverMatches",
            true,
            "Matches",
            format!("driver {version}{}", cuda(&found.1)),
        ),
        (_, Some(version)) => {
            let message = format!("driver {version}{} found, {wanted} desired", cuda(&found.1));
            OperatorCondition::new("DriverMatches", false, "Differs", message)
        }
        (_, None) => OperatorCondition::new(
            "DriverMatches",
            false,
            "NotDetected",
            format!("no driver found, {wanted} desired"),
        ),
    }
}

/// Names a run by template and version. It must not change between releases.
#[must_use]
pub fn revision(template: &str, version: &str) -> String {
    let bytes = template.bytes().chain([0]).chain(version.bytes());
    format!("{:08x}", fnv1a(bytes) >> 32)
}

/// A pod of the installer on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    pub pod: String,
    pub revision: String,
    pub phase: InstallPhase,
    /// Reason of a failure, or empty.
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
        Self { pod: name, revision, phase, message: reason_of(pod) }
    }
}

/// The most specific reason: a container's termination message or exit code, its waiting reason, the pod's reason.
fn reason_of(pod: &Pod) -> String {
    let Some(status) = &pod.status else { return String::new() };
    let containers = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    for container in containers {
        let Some(state) = &container.state else { continue };
        if let Some(ended) = state.terminated.as_ref().filter(|ended| ended.exit_code != 0) {
            let reason = ended.reason.as_deref().unwrap_or("Error");
            let text = ended.message.as_deref().map_or(String::new(), |text| format!(": {}", text.trim()));
            return format!("{}: {reason}, exit code {}{text}", container.name, ended.exit_code);
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
    Satisfied,
    /// The plugins and the installer wait: the cards are in use.
    InUse,
    /// Other nodes of the pool come first.
    Queue,
    /// The plugins must be removed before the installer starts.
    Withdraw,
    Install,
    /// The installer is running or has failed.
    Wait,
}

/// The observed installation on a node.
#[derive(Clone, Copy, Debug)]
pub struct InstallInput<'a> {
    pub driver: &'a Driver,
    pub matches: Option<bool>,
    pub revision: &'a str,
    pub recorded: Option<&'a DriverInstall>,
    pub run: Option<&'a Run>,
    /// Pods of the node that use cards.
    pub users: u32,
    pub served: bool,
    /// Fewer nodes of its pool than `maxUnavailable` are without their plugins, or this one already is.
    pub may_begin: bool,
}

/// Whether a pod uses cards without a request: it mounts their device files, or NVIDIA's runtime shows it cards.
#[must_use]
pub fn uses_cards_unrequested(pod: &Pod) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let is_privileged =
        |c: &Container| c.security_context.as_ref().is_some_and(|security| security.privileged == Some(true));
    let shown = |c: &Container| {
        let variable = c.env.iter().flatten().find(|variable| variable.name == names::NVIDIA_VISIBLE_DEVICES);
        let value = variable.and_then(|variable| variable.value.as_deref()).unwrap_or_default();
        !["", "none", "void"].contains(&value)
    };
    let paths = spec.volumes.iter().flatten().filter_map(|volume| volume.host_path.as_ref());
    let mut paths = paths.map(|host| host.path.trim_end_matches('/'));
    let privileged = spec.containers.iter().any(is_privileged);
    spec.containers.iter().any(shown)
        || paths.any(|path| path.starts_with("/dev/nvidia") || (privileged && ["/dev", ""].contains(&path)))
}

/// The next step, and the record for the GPUShadow.
#[must_use]
pub fn step(input: &InstallInput<'_>) -> (Step, DriverInstall) {
    let record = |phase, message: String| DriverInstall {
        version: input.driver.version.clone(),
        revision: input.revision.to_owned(),
        phase,
        message,
    };
    if let Some(run) = input.run.filter(|run| run.revision == input.revision) {
        let step = if run.phase == InstallPhase::Installed { Step::Satisfied } else { Step::Wait };
        return (step, record(run.phase, run.message.clone()));
    }
    let done =
        input.recorded.filter(|one| one.revision == input.revision && one.phase == InstallPhase::Installed);
    if let Some(done) = done {
        return (Step::Satisfied, done.clone());
    }
    if input.matches == Some(true) {
        return (Step::Satisfied, record(InstallPhase::Installed, "already installed".into()));
    }
    let waiting = |why: &str| record(InstallPhase::Waiting, why.to_owned());
    if input.users > 0 {
        let why = format!("{} pods use cards on this node; no pod is evicted", input.users);
        (Step::InUse, waiting(&why))
    } else if !input.may_begin {
        (
            Step::Queue,
            waiting(&format!(
                "maxUnavailable is {}: other nodes of the pool come first",
                input.driver.max_unavailable
            )),
        )
    } else if input.served {
        (Step::Withdraw, waiting("waiting for the device plugins to stop"))
    } else {
        (Step::Install, record(InstallPhase::Installing, String::new()))
    }
}

/// Condition `DriverInstalled`.
#[must_use]
pub fn installed_condition(install: &DriverInstall) -> OperatorCondition {
    let text = |word: &str| match install.message.as_str() {
        "" => format!("driver {} {word}", install.version),
        message => format!("driver {} {word}: {message}", install.version),
    };
    let (status, reason, message) = match install.phase {
        InstallPhase::Installed => (true, "Installed", text("installed")),
        InstallPhase::Installing => (false, "Installing", text("is being installed")),
        InstallPhase::Waiting => (false, "Waiting", text("not installed yet")),
        InstallPhase::Failed => (false, "Failed", text("not installed")),
    };
    OperatorCondition::new("DriverInstalled", status, reason, message)
}
