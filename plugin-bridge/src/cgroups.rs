//! Which pods have processes, by the cgroups that the kubelet makes for them (`pkg/kubelet/cm/pod_container_manager_linux.go`).
//!
//! A pod's cgroup is `kubepods/burstable/pod<UID>` with the cgroupfs driver and `kubepods-burstable-pod<UID>.slice` with systemd's, where
//! the UID's dashes are underscores. A kubelet with `--cgroup-root` has them deeper, one with `--cgroups-per-qos=false` has none.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::platform::Cgroups;

/// How deep below the root of a hierarchy pods are looked for: `kubelet.slice/kubelet-kubepods.slice/…-burstable.slice/…-pod….slice`.
const DEPTH: usize = 5;
/// The hierarchy of cgroup v1 that is read: kubelets manage it, and it counts tasks.
const V1_CONTROLLER: &str = "pids";

/// The host's cgroups below a mount point, of version 1 or 2.
#[derive(Debug)]
pub struct PodCgroups {
    root: PathBuf,
}

impl PodCgroups {
    #[must_use]
    pub fn new(mount: PathBuf) -> Self {
        let v1 = mount.join(V1_CONTROLLER);
        Self { root: if v1.is_dir() { v1 } else { mount } }
    }
}

impl Cgroups for PodCgroups {
    fn populated(&self) -> Option<BTreeSet<String>> {
        let mut found = None;
        walk(&self.root, DEPTH, false, &mut found);
        found
    }
}

/// Collects the pods below a folder; `found` becomes `Some` with the first folder of a kubelet.
fn walk(folder: &Path, depth: usize, of_kubelet: bool, found: &mut Option<BTreeSet<String>>) {
    for (name, path) in folders(folder) {
        let of_kubelet = of_kubelet || name.contains("kubepods");
        if of_kubelet {
            let pods = found.get_or_insert_default();
            if let Some(uid) = pod_uid(&name) {
                if has_processes(&path) {
                    pods.insert(uid);
                }
                continue;
            }
        }
        if depth > 1 && (of_kubelet || name.contains("kubelet")) {
            walk(&path, depth - 1, of_kubelet, found);
        }
    }
}

fn folders(folder: &Path) -> impl Iterator<Item = (String, PathBuf)> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path()))
}

/// `pod<UID>`, or `…-pod<UID>.slice` with underscores.
pub(crate) fn pod_uid(name: &str) -> Option<String> {
    match name.strip_suffix(".slice") {
        Some(slice) => Some(slice.rsplit_once("-pod")?.1.replace('_', "-")),
        None => name.strip_prefix("pod").filter(|uid| !uid.is_empty()).map(str::to_owned),
    }
}

/// Whether a process is in this cgroup or in one below. What cannot be read counts as one, unless it is gone.
///
/// By `populated` of version 2 and the number of tasks of version 1. `cgroup.procs` of version 1 leaves out the processes that the
/// reader's PID namespace does not have: to an agent in a namespace of its own every pod would be empty.
fn has_processes(cgroup: &Path) -> bool {
    for (file, nobody) in [("cgroup.events", "populated 0"), ("pids.current", "0")] {
        match std::fs::read_to_string(cgroup.join(file)) {
            Ok(text) => return !text.lines().any(|line| line == nobody),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(_) => return true,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cgroup of version 2, of 1 below `pids`, with so many tasks in it or below.
    fn cgroup(root: &Path, path: &str, tasks: u32) {
        let folder = root.join(path);
        std::fs::create_dir_all(&folder).unwrap();
        for folder in folder.ancestors().take_while(|folder| folder.starts_with(root)) {
            // The kernel's text in a PID namespace that has none of them.
            std::fs::write(folder.join("cgroup.procs"), "").unwrap();
            let (file, text) = if path.starts_with("pids") {
                ("pids.current", format!("{tasks}\n"))
            } else {
                ("cgroup.events", format!("populated {}\nfrozen 0\n", u32::from(tasks > 0)))
            };
            std::fs::write(folder.join(file), text).unwrap();
        }
    }

    fn populated(root: &Path) -> Option<Vec<String>> {
        Some(PodCgroups::new(root.to_path_buf()).populated()?.into_iter().collect())
    }

    #[test]
    fn pods_with_processes_are_found_under_each_driver_and_version() {
        let systemd = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podaaaa_1.slice";
        for (container, idle, uid) in [
            (
                &*format!("{systemd}/cri-containerd-1.scope"),
                "kubepods.slice/kubepods-podbbbb_2.slice",
                "aaaa-1",
            ),
            ("kubepods/burstable/podaaaa-1/1", "kubepods/podbbbb-2", "aaaa-1"),
            ("pids/kubepods/burstable/podaaaa-1/1", "pids/kubepods/podbbbb-2/1", "aaaa-1"),
            (
                "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-podaaaa_1.slice/1",
                "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-podbbbb_2.slice/1",
                "aaaa-1",
            ),
        ] {
            let root = tempfile::tempdir().unwrap();
            assert_eq!(populated(root.path()), None, "no kubelet has cgroups here");
            cgroup(root.path(), idle, 0);
            assert_eq!(populated(root.path()), Some(vec![]), "{idle}");
            cgroup(root.path(), container, 2);
            assert_eq!(populated(root.path()), Some(vec![uid.to_owned()]), "{container}");
        }
    }

    #[test]
    fn a_real_cgroup_has_its_process_where_this_machine_lets_a_test_make_one() {
        let mounts = ["/sys/fs/cgroup/pids", "/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new);
        let mut tried = 0;
        for mount in mounts.into_iter().filter(|mount| mount.join("cgroup.procs").exists()) {
            let folder = mount.join(format!("gpu-migrate-test-{}", std::process::id()));
            if std::fs::create_dir(&folder).is_err() {
                continue;
            }
            assert!(!has_processes(&folder));
            let mut process = std::process::Command::new("sleep").arg("60").spawn().unwrap();
            let moved = std::fs::write(folder.join("cgroup.procs"), process.id().to_string());
            let counted = has_processes(&folder);
            process.kill().unwrap();
            process.wait().unwrap();
            if moved.is_ok() {
                assert!(counted, "{}", folder.display());
                tried += 1;
            }
            if std::fs::remove_dir(&folder).is_ok() {
                assert!(!has_processes(&folder), "it is gone");
            }
        }
        eprintln!("{tried} hierarchies of this machine");
    }

    #[test]
    fn cgroups_of_others_are_no_pods() {
        let root = tempfile::tempdir().unwrap();
        cgroup(root.path(), "system.slice/podman.service", 1);
        cgroup(root.path(), "machine.slice/machine-pod1.slice", 1);
        assert_eq!(populated(root.path()), None);
    }
}
