//! Which pods have processes, by the cgroups that the kubelet makes for them (`pkg/kubelet/cm/pod_container_manager_linux.go`).
//!
//! A pod's cgroup is `kubepods/burstable/pod<UID>` with the cgroupfs driver and `kubepods-burstable-pod<UID>.slice` with systemd's, where
//! the UID's dashes are underscores. A kubelet with `--cgroup-root` has them deeper, one with `--cgroups-per-qos=false` has none.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::platform::Cgroups;

/// How deep below the root of a hierarchy pods are looked for: `kubelet.slice/kubelet-kubepods.slice/…-burstable.slice/…-pod….slice`.
const DEPTH: usize = 5;
/// Hierarchies of cgroup v1 that kubelets manage, any of which will do.
const V1_CONTROLLERS: [&str; 3] = ["memory", "pids", "cpu,cpuacct"];

/// The host's cgroups below a mount point, of version 1 or 2.
#[derive(Debug)]
pub struct PodCgroups {
    root: PathBuf,
}

impl PodCgroups {
    #[must_use]
    pub fn new(mount: PathBuf) -> Self {
        let mut v1 = V1_CONTROLLERS.iter().map(|controller| mount.join(controller));
        Self { root: v1.find(|folder| folder.is_dir()).unwrap_or(mount) }
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
fn pod_uid(name: &str) -> Option<String> {
    match name.strip_suffix(".slice") {
        Some(slice) => Some(slice.rsplit_once("-pod")?.1.replace('_', "-")),
        None => name.strip_prefix("pod").filter(|uid| !uid.is_empty()).map(str::to_owned),
    }
}

/// Whether a process is in this cgroup or in one below. What cannot be read counts as one, unless it is gone.
fn has_processes(cgroup: &Path) -> bool {
    match std::fs::read_to_string(cgroup.join("cgroup.procs")) {
        Ok(text) if text.trim().is_empty() => {}
        Ok(_) => return true,
        Err(error) => return error.kind() != std::io::ErrorKind::NotFound,
    }
    folders(cgroup).any(|(_, path)| has_processes(&path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cgroup(root: &Path, path: &str, processes: &str) {
        let folder = root.join(path);
        std::fs::create_dir_all(&folder).unwrap();
        for folder in folder.ancestors().take_while(|folder| folder.starts_with(root)) {
            let procs = folder.join("cgroup.procs");
            if !procs.exists() {
                std::fs::write(procs, "").unwrap();
            }
        }
        std::fs::write(folder.join("cgroup.procs"), processes).unwrap();
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
            ("memory/kubepods/podaaaa-1/1", "memory/kubepods/podbbbb-2/1", "aaaa-1"),
            (
                "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-podaaaa_1.slice/1",
                "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-podbbbb_2.slice/1",
                "aaaa-1",
            ),
        ] {
            let root = tempfile::tempdir().unwrap();
            assert_eq!(populated(root.path()), None, "no kubelet has cgroups here");
            cgroup(root.path(), idle, "");
            assert_eq!(populated(root.path()), Some(vec![]), "{idle}");
            cgroup(root.path(), container, "7\n8\n");
            assert_eq!(populated(root.path()), Some(vec![uid.to_owned()]), "{container}");
        }
    }

    #[test]
    fn cgroups_of_others_are_no_pods() {
        let root = tempfile::tempdir().unwrap();
        cgroup(root.path(), "system.slice/podman.service", "7\n");
        cgroup(root.path(), "machine.slice/machine-pod1.slice", "7\n");
        assert_eq!(populated(root.path()), None);
    }
}
