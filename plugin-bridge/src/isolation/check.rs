//! Whether the node's strategy can limit containers: found out before the first device is listed, and every `INTERVAL` from then on.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::Isolation;
use crate::node::{Node, NodeEvent};

const INTERVAL: Duration = Duration::from_secs(5);

/// The initial PID namespace has this inode number in every Linux (`PROC_PID_INIT_INO`).
const HOST_PIDS: &str = "pid:[4026531836]";

/// What the node has of what strategies need. Versions are major and minor; `None` where NVML does not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeFacts {
    pub driver: Option<(u32, u32)>,
    /// Of CUDA, the latest that the driver supports.
    pub cuda: Option<(u32, u32)>,
    /// The host has cgroup v2, and no hierarchy of v1.
    pub cgroup_v2: bool,
    /// The agent sees the host's processes.
    pub host_pids: bool,
}

impl NodeFacts {
    /// From NVML's versions, the folder where the host's cgroups are mounted, and this process.
    #[must_use]
    pub fn read(driver: &str, cuda: &str, cgroups: &Path) -> Self {
        let namespace = std::fs::read_link("/proc/self/ns/pid");
        Self {
            driver: version(driver),
            cuda: version(cuda),
            cgroup_v2: cgroups.join("cgroup.controllers").exists(),
            host_pids: namespace.is_ok_and(|namespace| namespace.as_os_str() == HOST_PIDS),
        }
    }

    /// Says that the driver's CUDA is older than this, where it is.
    pub(super) fn cuda_before(&self, wanted: (u32, u32)) -> Option<String> {
        let (major, minor) = wanted;
        match self.cuda {
            Some(have) if have >= wanted => None,
            Some((has_major, has_minor)) => Some(format!(
                "the driver supports CUDA {has_major}.{has_minor}, and {major}.{minor} is needed: update the driver"
            )),
            None => {
                Some(format!("NVML does not tell the driver's CUDA version, and {major}.{minor} is needed"))
            }
        }
    }
}

/// `550.54.15` is 550 and 54, `615` is 615 and 0.
fn version(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.split('.').map(str::parse::<u32>);
    let major = parts.next()?.ok()?;
    Some((major, parts.next().unwrap_or(Ok(0)).ok()?))
}

/// What is missing in a folder of libraries, as a sentence.
pub(super) fn missing_file(folder: &Path, file: &str) -> Option<String> {
    let path = folder.join(file);
    // Links in it are resolved in the container, so that they may lead nowhere here.
    let found = path.symlink_metadata().is_ok_and(|found| found.is_symlink() || found.len() > 0);
    (!found).then(|| format!("{} is missing or empty: install it on the node", path.display()))
}

/// Checks once, and reports what has changed. Before the first list of devices, so that no share is offered that cannot be limited.
pub fn once(node: &Node, isolation: &dyn Isolation) {
    report(node, isolation.name(), isolation.obstacle());
}

/// Checks until `stop`.
pub async fn run(node: Arc<Node>, isolation: Arc<dyn Isolation>, stop: CancellationToken) {
    let name = isolation.name();
    while stop.run_until_cancelled(tokio::time::sleep(INTERVAL)).await.is_some() {
        let checked = isolation.clone();
        // A file system or a daemon that hangs must not take the agent with it, and is asked once.
        let mut check = tokio::task::spawn_blocking(move || checked.obstacle());
        let outcome = match tokio::time::timeout(INTERVAL, &mut check).await {
            Ok(outcome) => outcome,
            Err(_) => {
                report(&node, name, Some(format!("its check did not end within {INTERVAL:?}")));
                match stop.run_until_cancelled(check).await {
                    Some(outcome) => outcome,
                    None => return,
                }
            }
        };
        report(&node, name, outcome.unwrap_or_else(|error| Some(format!("its check failed: {error}"))));
    }
}

fn report(node: &Node, name: &'static str, obstacle: Option<String>) {
    node.metrics.isolation_ready(name, obstacle.is_none());
    if !node.with(|state, _| state.set_isolation_obstacle(obstacle.clone())) {
        return;
    }
    node.record_event(match obstacle {
        Some(why) => {
            tracing::error!(isolation = name, why, "containers cannot be limited; this node takes no share");
            let note = format!("isolation {name}: {why}; this node takes no share meanwhile");
            NodeEvent::warning("IsolationNotReady", note)
        }
        None => {
            tracing::info!(isolation = name, "containers can be limited again");
            NodeEvent::normal("IsolationReady", format!("isolation {name} can limit containers again"))
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_have_two_numbers() {
        for (text, expected) in [
            ("550.54.15", Some((550, 54))),
            ("12.4", Some((12, 4))),
            ("615", Some((615, 0))),
            ("", None),
            ("a.b", None),
        ] {
            assert_eq!(version(text), expected, "{text}");
        }
    }

    #[test]
    fn an_older_cuda_is_named_with_what_is_needed() {
        let with = |cuda| NodeFacts { cuda, ..NodeFacts::default() };
        assert_eq!(with(Some((13, 4))).cuda_before((13, 4)), None);
        assert!(
            with(Some((12, 9))).cuda_before((13, 4)).is_some_and(|why| why.contains("supports CUDA 12.9"))
        );
        assert!(with(None).cuda_before((13, 4)).is_some());
    }
}
