//! Which pod and container a process belongs to, by the cgroup that the runtime made for the container.
//!
//! Below the pod's cgroup ([`crate::cgroups`]) it is `cri-containerd-<ID>.scope`, `crio-<ID>.scope` or `docker-<ID>.scope` with systemd,
//! `<ID>` or `crio-<ID>` with cgroupfs. A containerd without `SystemdCgroup` beside a kubelet with systemd's driver makes one cgroup
//! `…-pod<UID>.slice:cri-containerd:<ID>` of its own. Containers may have cgroups below theirs. In the agent's own cgroup namespace
//! paths begin with `/..`.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::cgroups::pod_uid;

/// IDs of containers have 64 hexadecimal digits, UIDs of pods 32 and dashes, or none where the kubelet made them from a file.
const SHORTEST_ID: usize = 32;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// As the kubelet knows it.
    pub pod_uid: String,
    /// The runtime's ID; empty where the cgroup is the pod's.
    pub container_id: String,
}

/// The owner of a running process; `proc` is where procfs is mounted.
#[must_use]
pub fn of_process(proc: &Path, pid: u32) -> Option<Owner> {
    of_cgroups(&std::fs::read_to_string(proc.join(pid.to_string()).join("cgroup")).ok()?)
}

/// The owner by the content of `/proc/<PID>/cgroup`, of version 1 (a line for each hierarchy), 2, or both.
#[must_use]
pub fn of_cgroups(lines: &str) -> Option<Owner> {
    lines.lines().filter_map(|line| line.splitn(3, ':').nth(2)).find_map(of_path)
}

fn of_path(path: &str) -> Option<Owner> {
    let mut folders = path.split(['/', ':']);
    let pod_uid = folders.find_map(|folder| pod_uid(folder).filter(|uid| is_id(uid)))?;
    let container_id = folders.find_map(container_id).unwrap_or_default().to_owned();
    Some(Owner { pod_uid, container_id })
}

fn container_id(folder: &str) -> Option<&str> {
    let name = folder.strip_suffix(".scope").unwrap_or(folder);
    let id = name.rsplit_once('-').map_or(name, |(_, id)| id);
    is_id(id).then_some(id)
}

fn is_id(text: &str) -> bool {
    text.len() >= SHORTEST_ID && text.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &str = "6f5ac6d6-9d3a-4c38-8d0f-2f4b1b7f8e11";
    const ID: &str = "3b1f0c9d8e7a6b5c4d3e2f1a0b9c8d7e6f5a4b3c2d1e0f9a8b7c6d5e4f3a2b1c";

    /// The forms of `/proc/<PID>/cgroup` in containers of each runtime, driver and version.
    fn recorded() -> Vec<(&'static str, String)> {
        let slice = POD.replace('-', "_");
        let burstable =
            format!("kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{slice}.slice");
        vec![
            ("v2, systemd, containerd", format!("0::/{burstable}/cri-containerd-{ID}.scope\n")),
            ("v2, systemd, CRI-O", format!("0::/{burstable}/crio-{ID}.scope/container\n")),
            ("v2, systemd, cri-dockerd", format!("0::/{burstable}/docker-{ID}.scope\n")),
            ("v2, cgroupfs, containerd", format!("0::/kubepods/besteffort/pod{POD}/{ID}\n")),
            ("v2, cgroupfs, CRI-O", format!("0::/kubepods/burstable/pod{POD}/crio-{ID}\n")),
            (
                "v2, guaranteed, with an init system in the container",
                format!(
                    "0::/kubepods.slice/kubepods-pod{slice}.slice/cri-containerd-{ID}.scope/system.slice/cron.service\n"
                ),
            ),
            (
                "v2, read in another cgroup namespace",
                format!("0::/../../kubepods-burstable-pod{slice}.slice/cri-containerd-{ID}.scope\n"),
            ),
            ("v2, cgroupfs, read in another cgroup namespace", format!("0::/../../pod{POD}/{ID}\n")),
            (
                "v2, kind",
                format!(
                    "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod{slice}.slice/cri-containerd-{ID}.scope\n"
                ),
            ),
            (
                "v2, containerd without SystemdCgroup",
                format!(
                    "0::/system.slice/containerd.service/kubepods-burstable-pod{slice}.slice:cri-containerd:{ID}\n"
                ),
            ),
            (
                "v1, cgroupfs, containerd",
                format!(
                    "12:rdma:/\n11:memory:/kubepods/burstable/pod{POD}/{ID}\n10:cpu,cpuacct:/kubepods/burstable/pod{POD}/{ID}\n1:name=systemd:/kubepods/burstable/pod{POD}/{ID}\n0::/system.slice/containerd.service\n"
                ),
            ),
            (
                "v1, systemd, containerd",
                format!(
                    "9:devices:/{burstable}/cri-containerd-{ID}.scope\n1:name=systemd:/{burstable}/cri-containerd-{ID}.scope\n"
                ),
            ),
        ]
    }

    #[test]
    fn every_runtime_driver_and_version_names_pod_and_container() {
        let expected = Owner { pod_uid: POD.into(), container_id: ID.into() };
        for (what, text) in recorded() {
            assert_eq!(of_cgroups(&text).as_ref(), Some(&expected), "{what}: {text}");
        }
        // Made from a file: the kubelet's UID is a hash.
        let hash = "9f2d7e6c5b4a39281706f5e4d3c2b1a0";
        let of_static = of_cgroups(&format!("0::/kubepods/burstable/pod{hash}/{ID}")).unwrap();
        assert_eq!((of_static.pod_uid.as_str(), of_static.container_id.as_str()), (hash, ID));
        let of_pod = of_cgroups(&format!("0::/kubepods/pod{POD}\n")).unwrap();
        assert_eq!((of_pod.pod_uid.as_str(), of_pod.container_id.as_str()), (POD, ""));
    }

    #[test]
    fn a_process_of_no_pod_has_no_owner() {
        for text in [
            "",
            "0::/\n",
            "0::/user.slice/user-1000.slice/session-2.scope\n",
            "0::/system.slice/podman.service\n",
            "0::/machine.slice/libpod-3b1f0c9d8e7a6b5c4d3e2f1a0b9c8d7e6f5a4b3c2d1e0f9a8b7c6d5e4f3a2b1c.scope\n",
            "0::/system.slice/docker-3b1f0c9d8e7a6b5c4d3e2f1a0b9c8d7e6f5a4b3c2d1e0f9a8b7c6d5e4f3a2b1c.scope\n",
        ] {
            assert_eq!(of_cgroups(text), None, "{text}");
        }
        assert_eq!(of_process(Path::new("/proc"), u32::MAX), None);
    }

    /// In cgroups that a kubelet would have made, of each hierarchy that this machine lets a test write to.
    #[test]
    fn a_real_process_has_the_owner_of_its_real_cgroup() {
        for mount in ["/sys/fs/cgroup/pids", "/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new) {
            let top = mount.join(format!("gpu-migrate-owner-{}", std::process::id()));
            let folder = top.join(format!("kubepods/pod{POD}/{ID}"));
            if !mount.join("cgroup.procs").exists() || std::fs::create_dir_all(&folder).is_err() {
                continue;
            }
            let mut process = std::process::Command::new("sleep").arg("60").spawn().unwrap();
            let moved = std::fs::write(folder.join("cgroup.procs"), process.id().to_string());
            let owner = of_process(Path::new("/proc"), process.id());
            process.kill().unwrap();
            process.wait().unwrap();
            for folder in folder.ancestors().take_while(|folder| folder.starts_with(&top)) {
                let _ = std::fs::remove_dir(folder);
            }
            if moved.is_ok() {
                assert_eq!(owner, Some(Owner { pod_uid: POD.into(), container_id: ID.into() }));
            }
        }
    }
}
