//! The containers of this node as the kernel has them: processes in the kubelet's cgroups.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::{Context, Result};
use gpu_migrate_model::names::NVIDIA_VISIBLE_DEVICES;

use crate::{device_nodes, migration::uuid};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    /// UID of its pod, from its cgroup.
    pub pod_uid: String,
    /// Its name in the pod, from where its termination log is mounted from.
    pub name: String,
    /// Its ID at the runtime, from its cgroup.
    pub id: String,
    pub pid: u32,
    pub environment: BTreeMap<String, String>,
    /// The cards whose device nodes it has.
    pub nodes: BTreeSet<String>,
}

impl Container {
    /// The cards it is shown: those of `NVIDIA_VISIBLE_DEVICES`, none if the variable is absent, empty or `void`, and those whose device
    /// nodes it has, by CDI or by the plugin's answer.
    pub fn cards(&self) -> Vec<String> {
        let value = self.environment.get(NVIDIA_VISIBLE_DEVICES).map_or("", String::as_str);
        let listed = value.split(',').map(str::trim).filter(|card| !matches!(*card, "" | "void" | "none"));
        let mut cards: Vec<String> = listed.map(String::from).collect();
        cards.extend(self.nodes.iter().filter(|card| !value.contains(card.as_str())).cloned());
        cards
    }
}

/// All workload containers that run now; sandboxes are left out.
pub fn containers() -> Result<Vec<Container>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("cannot read /proc")? {
        let folder = entry?.path();
        let Some(pid) = folder.file_name().and_then(|n| n.to_str()).and_then(|n| n.parse().ok()) else {
            continue;
        };
        found.extend(inspect(&folder, pid));
    }
    Ok(one_each(found))
}

/// One for each container: a probe or an `exec` is a process of the same one.
fn one_each(mut found: Vec<Container>) -> Vec<Container> {
    let key = |c: &Container| (c.pod_uid.clone(), c.name.clone(), c.id.clone(), c.pid);
    found.sort_by_key(key);
    found.dedup_by(|later, first| later.pod_uid == first.pod_uid && later.id == first.id);
    found
}

fn inspect(folder: &Path, pid: u32) -> Option<Container> {
    // Our program in its own image: the sandbox has another verb, and runc's first stages have another name.
    let command = fs::read(folder.join("cmdline")).ok()?;
    let mut arguments = command.split(|b| *b == 0);
    if arguments.next()? != b"/work" {
        return None;
    }
    // The stand-in for a program of ours holds no card, whatever is in its environment.
    let verb = arguments.next()?;
    if verb == b"pause" || verb.starts_with(b"--") {
        return None;
    }
    let (pod_uid, id) = cgroup_of(&fs::read_to_string(folder.join("cgroup")).ok()?)?;
    let name = container_name(&fs::read_to_string(folder.join("mountinfo")).ok()?, &pod_uid)?;
    let environment = fs::read(folder.join("environ")).ok()?;
    let nodes = device_nodes::cards_in(&folder.join("root/dev")).into_iter().map(uuid).collect();
    // The kernel reads both from the process's memory and returns nothing for a process that is exiting, so a truncated
    // environment does not count. Nor does an empty one, as during an execve: the kubelet always sets variables.
    if environment.is_empty() || fs::read(folder.join("cmdline")).ok()? != command {
        return None;
    }
    let environment = environment
        .split(|b| *b == 0)
        .filter_map(|pair| {
            String::from_utf8_lossy(pair).split_once('=').map(|(k, v)| (k.to_owned(), v.to_owned()))
        })
        .collect();
    Some(Container { pod_uid, name, id, pid, environment, nodes })
}

/// Pod UID and container ID from a line such as `5:memory:/kubepods/besteffort/pod<uid>/<id>` (v1) or `0::/kubepods/…` (v2).
fn cgroup_of(table: &str) -> Option<(String, String)> {
    table.lines().find_map(|line| {
        let path = line.splitn(3, ':').nth(2)?;
        let (rest, id) = path.rsplit_once('/')?;
        let uid = rest.rsplit('/').next()?.strip_prefix("pod")?;
        path.contains("/kubepods").then(|| (uid.to_owned(), id.to_owned()))
    })
}

/// The kubelet mounts `…/pods/<uid>/containers/<name>/<hash>` as the termination log; mountinfo shows the source's path.
fn container_name(mounts: &str, pod_uid: &str) -> Option<String> {
    let mark = format!("/pods/{pod_uid}/containers/");
    let (_, rest) = mounts.split_once(&mark)?;
    Some(rest.split('/').next()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "0a1b2c3d-0000-4000-8000-000000000001";

    #[test]
    fn cgroups_of_both_versions_name_pod_and_container() {
        for path in ["5:memory:/kubepods/besteffort/pod", "0::/kubepods/pod", "0::/kubelet-2/kubepods/pod"] {
            let table = format!("9:pids:/user\n{path}{UID}/cafe\n");
            assert_eq!(cgroup_of(&table), Some((UID.into(), "cafe".into())), "{path}");
        }
        assert_eq!(cgroup_of("0::/system.slice/pod/x\n"), None);
        assert_eq!(cgroup_of("0::/\n"), None);
    }

    #[test]
    fn the_termination_log_names_the_container() {
        let mounts = format!(
            "36 35 98:0 /lib/kubelet/pods/{UID}/containers/train/1f2e /dev/termination-log rw - ext4 /dev/vda rw\n"
        );
        assert_eq!(container_name(&mounts, UID).as_deref(), Some("train"));
        assert_eq!(container_name(&mounts, "another"), None);
    }

    #[test]
    fn a_probe_is_no_second_container_and_a_restarted_one_is() {
        let process = |id: &str, pid| Container {
            pod_uid: UID.into(),
            name: "main".into(),
            id: id.into(),
            pid,
            environment: BTreeMap::new(),
            nodes: BTreeSet::new(),
        };
        let found = one_each(vec![process("b", 30), process("a", 20), process("a", 10)]);
        assert_eq!(found, [process("a", 10), process("b", 30)]);
    }

    #[test]
    fn a_process_that_exits_while_it_is_read_is_no_container() {
        let name = format!("gpu-migrate-proc-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).unwrap();
        let file = |name: &str, text: &str| fs::write(folder.join(name), text).unwrap();
        file("cmdline", "/work\0hold\0");
        file("cgroup", &format!("0::/kubepods/pod{UID}/cafe\n"));
        file("mountinfo", &format!("/lib/kubelet/pods/{UID}/containers/train/1f2e /dev/termination-log\n"));
        file("environ", "NVIDIA_VISIBLE_DEVICES=GPU-a\0");
        let alive = inspect(&folder, 1).map(|container| container.cards());
        file("environ", "");
        let ended = inspect(&folder, 1);
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!((alive, ended), (Some(vec!["GPU-a".to_owned()]), None));
    }

    #[test]
    fn only_named_cards_and_device_nodes_count() {
        let seen = |value: Option<&str>, nodes: &[&str]| {
            let environment =
                value.map(|v| (NVIDIA_VISIBLE_DEVICES.to_owned(), v.to_owned())).into_iter().collect();
            let nodes = nodes.iter().map(|card| (*card).to_owned()).collect();
            let (pod_uid, name, id) = (UID.into(), "c".into(), "i".into());
            Container { pod_uid, name, id, pid: 1, environment, nodes }.cards()
        };
        assert_eq!(seen(Some("GPU-a,GPU-b"), &[]), ["GPU-a", "GPU-b"]);
        assert_eq!(seen(Some("GPU-a"), &["GPU-a"]), ["GPU-a"], "the same card in two ways");
        assert_eq!(seen(Some("void"), &["GPU-a", "GPU-b"]), ["GPU-a", "GPU-b"]);
        assert_eq!(seen(Some("GPU-a"), &["GPU-b"]), ["GPU-a", "GPU-b"], "one more than it is told");
        assert_eq!(seen(Some("all"), &[]), ["all"]);
        for nothing in [None, Some(""), Some("void"), Some("none")] {
            assert!(seen(nothing, &[]).is_empty(), "{nothing:?}");
        }
    }
}
