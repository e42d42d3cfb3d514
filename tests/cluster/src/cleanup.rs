//! What a crashed run leaves behind: containers with their shims, mounts, and the kubelet's folder.
//!
//! Components die with the test (see [`crate::process`]); shims do not, since containerd means them to outlive it.

use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::{
    errno::Errno,
    mount::{MntFlags, umount2},
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    configs::SECOND_CGROUP,
    layout::{KUBELET_ROOT, Layout, SOCKET},
    process::empty,
};

/// Says that a [`KUBELET_ROOT`] is of our making.
const MARK: &str = ".gpu-migrate-cluster-tests";

/// Removes all of it, and leaves an empty state folder and an empty, marked kubelet root.
///
/// # Errors
/// If the machine has a kubelet of its own: nothing is used then. Or if something cannot be removed.
pub fn clear(layout: &Layout) -> Result<()> {
    let root = Path::new(KUBELET_ROOT);
    let foreign =
        fs::read_dir(root).is_ok_and(|mut entries| entries.next().is_some()) && !root.join(MARK).exists();
    ensure!(
        !foreign,
        "{KUBELET_ROOT} is not empty and not ours: the scenarios do not run beside a real kubelet"
    );
    remove(layout)?;
    empty(&layout.state())?;
    fs::create_dir_all(root).with_context(|| format!("cannot make {KUBELET_ROOT}"))?;
    fs::write(root.join(MARK), "made by gpu-migrate's cluster scenarios, removed by the next run\n")
        .with_context(|| format!("cannot mark {KUBELET_ROOT}"))
}

/// Ends the containers, unmounts, and removes the state folder and the kubelet root. Logs stay.
///
/// # Errors
/// If something cannot be removed.
pub fn remove(layout: &Layout) -> Result<()> {
    end_containers(layout)?;
    remove_cgroups();
    unmount_below(&[layout.state(), PathBuf::from(KUBELET_ROOT)])?;
    for folder in [layout.state(), PathBuf::from(KUBELET_ROOT)] {
        empty(&folder)?;
        // The folder itself may be someone's mount point; that it is empty is enough.
        let _ = fs::remove_dir(&folder);
    }
    Ok(())
}

/// Ends the containers and empties the folders that are in memory on a real node.
///
/// # Errors
/// If something cannot be removed.
pub fn forget_containers(layout: &Layout) -> Result<()> {
    end_containers(layout)?;
    let memory = layout.containerd_run();
    unmount_below(std::slice::from_ref(&memory))?;
    empty(&memory)?;
    empty(&layout.cdi())
}

/// Kills the shims that serve a containerd below a state folder and everything that they started.
///
/// # Errors
/// They do not end.
pub fn end_containers(layout: &Layout) -> Result<()> {
    let state = layout.state();
    let is_ours = |argument: &String| argument.ends_with(SOCKET) && Path::new(argument).starts_with(&state);
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let processes = processes()?;
        let shims: HashSet<i32> = processes
            .iter()
            .filter(|p| p.command.first().is_some_and(|name| name.ends_with("containerd-shim-runc-v2")))
            .filter(|p| p.command.iter().any(is_ours))
            .map(|p| p.pid)
            .collect();
        let doomed: Vec<i32> = processes
            .iter()
            .filter(|p| shims.contains(&p.parent))
            .map(|p| p.pid)
            .chain(shims.iter().copied())
            .collect();
        if doomed.is_empty() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "containers of a former run do not die: processes {doomed:?}");
        for pid in doomed {
            match kill(Pid::from_raw(pid), Signal::SIGKILL) {
                Ok(()) | Err(Errno::ESRCH) => {}
                Err(error) => return Err(error).with_context(|| format!("cannot kill {pid}")),
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

struct Process {
    pid: i32,
    parent: i32,
    command: Vec<String>,
}

/// All processes that still have a command line (zombies have none).
fn processes() -> Result<Vec<Process>> {
    let mut all = Vec::new();
    for entry in fs::read_dir("/proc").context("cannot read /proc")? {
        let folder = entry?.path();
        let Some(pid) = folder.file_name().and_then(|n| n.to_str()).and_then(|n| n.parse().ok()) else {
            continue;
        };
        // A process that exits meanwhile is left out.
        let (Ok(command), Ok(stat)) =
            (fs::read(folder.join("cmdline")), fs::read_to_string(folder.join("stat")))
        else {
            continue;
        };
        let command: Vec<String> = command
            .split(|b| *b == 0)
            .filter(|a| !a.is_empty())
            .map(|a| String::from_utf8_lossy(a).into_owned())
            .collect();
        // "pid (name) state ppid …", and the name may contain anything, spaces and parentheses included.
        let parent = stat
            .rsplit_once(')')
            .and_then(|(_, rest)| rest.split_whitespace().nth(1))
            .and_then(|p| p.parse().ok());
        if let (Some(parent), false) = (parent, command.is_empty()) {
            all.push(Process { pid, parent, command });
        }
    }
    Ok(all)
}

/// Unmounts everything below the folders, innermost first.
fn unmount_below(folders: &[PathBuf]) -> Result<()> {
    let table = fs::read_to_string("/proc/self/mountinfo").context("cannot read the mount table")?;
    let mut points: Vec<PathBuf> = table.lines().filter_map(|line| ours(line, folders)).collect();
    points.sort_by_key(|point| std::cmp::Reverse(point.as_os_str().len()));
    for point in points {
        match umount2(&point, MntFlags::MNT_DETACH) {
            Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
            Err(error) => return Err(error).with_context(|| format!("cannot unmount {}", point.display())),
        }
    }
    Ok(())
}

/// The mount point of a line of mountinfo, if it is one that the cluster made.
///
/// The kubelet also binds its root onto itself, to share mounts: that shows as a part of another file system. A whole file
/// system mounted there is the machine's own and stays.
fn ours(line: &str, folders: &[PathBuf]) -> Option<PathBuf> {
    let mut fields = line.split(' ').skip(3);
    let (part, point) = (fields.next()?, fields.next()?);
    // Spaces are written in octal.
    let point = PathBuf::from(point.replace("\\040", " "));
    let below = folders.iter().any(|folder| point.starts_with(folder) && point != *folder);
    let bound_to_itself = folders.contains(&point) && part != "/";
    (below || bound_to_itself).then_some(point)
}

/// Removes the kubelets' cgroups of every hierarchy. They are empty of processes by now, and `rmdir` refuses any other.
fn remove_cgroups() {
    for hierarchy in hierarchies() {
        for root in ["kubepods", SECOND_CGROUP] {
            remove_cgroup(&hierarchy.join(root));
        }
    }
}

/// The cgroup that the second node's kubelet is given, which must exist.
///
/// # Errors
/// It cannot be made.
pub fn make_second_cgroup() -> Result<()> {
    for hierarchy in hierarchies() {
        let cgroup = hierarchy.join(SECOND_CGROUP);
        fs::create_dir_all(&cgroup).with_context(|| format!("cannot make {}", cgroup.display()))?;
    }
    Ok(())
}

/// The roots of all cgroup hierarchies: one of version 2, or those of version 1.
fn hierarchies() -> Vec<PathBuf> {
    let root = PathBuf::from("/sys/fs/cgroup");
    if root.join("cgroup.controllers").exists() {
        return vec![root];
    }
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|e| e.path()).collect()
}

fn remove_cgroup(cgroup: &Path) {
    let Ok(entries) = fs::read_dir(cgroup) else { return };
    entries
        .flatten()
        .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
        .for_each(|e| remove_cgroup(&e.path()));
    // One that is busy stays, and is harmless: the next kubelet takes it over.
    let _ = fs::remove_dir(cgroup);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mounts_of_the_cluster_are_unmounted() {
        let folders = [PathBuf::from("/var/lib/kubelet"), PathBuf::from("/tmp/it")];
        let line = |part: &str, point: &str| {
            format!("36 35 98:0 {part} {point} rw,noatime shared:1 - ext4 /dev/root rw")
        };
        let ours = |part: &str, point: &str| super::ours(&line(part, point), &folders).is_some();
        assert!(ours("/", "/var/lib/kubelet/pods/u/volumes/token"));
        assert!(ours("/", "/tmp/it/containerd-run/rootfs"));
        assert!(ours("/var/lib/kubelet", "/var/lib/kubelet"), "bound onto itself");
        assert!(!ours("/", "/var/lib/kubelet"), "a file system of the machine");
        assert!(!ours("/", "/var/lib/kubelet-other/x"));
        assert!(!ours("/", "/tmp"));
    }
}
