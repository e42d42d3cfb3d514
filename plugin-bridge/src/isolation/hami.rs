//! HAMi-core: a preloaded library that keeps limits and usage in a file which the container's processes share.
//!
//! It takes the limits from the environment when it *creates* that file, and from the file whenever that exists
//! (`multiprocess_memory_limit.c`, `try_create_shrreg`). So each start of a container has a new one. `/overrideEnv`, which is read over
//! the environment, comes before the limits in versions until May 2025 (9b3da62) and after them since.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use gpu_migrate_kubelet_api::deviceplugin::ContainerAllocateResponse;
use gpu_migrate_model::ledger::HolderId;

use super::check::missing_file;
use super::{Folders, Isolation, Share, current_library, folders, mount, safe};

const LIBRARY: &str = "libvgpu.so";
/// Where the container finds the library; the library names this path itself.
const IN_CONTAINER: &str = "/usr/local/vgpu";

/// The strategy `hami-core`.
#[derive(Debug)]
pub struct HamiCore {
    libraries: PathBuf,
    root: PathBuf,
}

impl HamiCore {
    /// With `libvgpu.so` in versions below `libraries/hami-core`.
    #[must_use]
    pub fn new(folders: &Folders) -> Self {
        Self { libraries: folders.libraries.join("hami-core"), root: folders.manager.join("hami") }
    }

    fn limits(share: &Share<'_>) -> Vec<(String, String)> {
        let memory = format!("{}m", share.demand.blocks.mib());
        let of_card = |(number, _)| (format!("CUDA_DEVICE_MEMORY_LIMIT_{number}"), memory.clone());
        let mut limits: Vec<_> = share.cards.iter().enumerate().map(of_card).collect();
        limits.extend([
            ("CUDA_DEVICE_SM_LIMIT".to_owned(), share.demand.cores.0.to_string()),
            ("CUDA_DEVICE_MEMORY_SHARED_CACHE".to_owned(), format!("{IN_CONTAINER}/cache/usage")),
        ]);
        limits
    }
}

impl Isolation for HamiCore {
    fn name(&self) -> &'static str {
        "hami-core"
    }

    fn obstacle(&self) -> Option<String> {
        missing_file(&current_library(&self.libraries), LIBRARY)
    }

    fn shape(&self, share: &Share<'_>, answer: &mut ContainerAllocateResponse) {
        if !share.is_part() {
            return;
        }
        answer.envs.extend(Self::limits(share));
        let library = current_library(&self.libraries).join(LIBRARY);
        let own = folders::by_devices(&self.root, share.key);
        answer.mounts.extend([
            mount(&library, &format!("{IN_CONTAINER}/{LIBRARY}"), true),
            mount(&own.join("ld.so.preload"), "/etc/ld.so.preload", true),
            mount(&own.join("overrideEnv"), "/overrideEnv", true),
            mount(&own.join("cache"), &format!("{IN_CONTAINER}/cache"), false),
            // Of the library's processes among themselves.
            mount(&own.join("lock"), "/tmp/vgpulock", false),
        ]);
    }

    fn prepare(&self, holder: &HolderId, share: &Share<'_>) -> std::io::Result<()> {
        if !share.is_part() {
            return Ok(());
        }
        let own = folders::of_pod(&self.root, &holder.pod_uid).join(safe(&holder.container));
        match std::fs::remove_dir_all(&own) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        for writable in ["cache", "lock"] {
            writable_by_all(&own.join(writable))?;
        }
        std::fs::write(own.join("ld.so.preload"), format!("{IN_CONTAINER}/{LIBRARY}\n"))?;
        let limits: String =
            Self::limits(share).iter().map(|(key, value)| format!("{key}={value}\n")).collect();
        std::fs::write(own.join("overrideEnv"), limits)?;
        folders::link(&self.root, share.key, &own)
    }

    fn remove_stale(&self, current: &BTreeSet<String>, new: SystemTime) {
        folders::remove_stale(&self.root, current, new);
    }
}

/// Containers run as any user.
fn writable_by_all(folder: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o1777))
}

#[cfg(test)]
mod tests {
    use gpu_migrate_model::ask::Demand;
    use gpu_migrate_model::card::Card;
    use gpu_migrate_model::units::{Blocks, Cores};

    use super::super::tests::{PART, shaped};
    use super::*;

    fn hami(root: &Path) -> HamiCore {
        let (libraries, manager) = (root.join("lib"), root.join("manager"));
        HamiCore::new(&Folders { libraries, manager, ..Folders::default() })
    }

    /// What the container has at this path, once it is prepared.
    fn source(answer: &ContainerAllocateResponse, path: &str) -> PathBuf {
        let found = answer.mounts.iter().find(|mount| mount.container_path == path).unwrap();
        PathBuf::from(&found.host_path)
    }

    #[test]
    fn limits_and_the_preload_are_given_to_parts_alone() {
        let hami = HamiCore::new(&Folders::default());
        let answer = shaped(&hami, 30);
        assert_eq!(answer.envs["CUDA_DEVICE_MEMORY_LIMIT_0"], "2048m");
        assert_eq!(answer.envs["CUDA_DEVICE_SM_LIMIT"], "30");
        let writable: Vec<_> = answer.mounts.iter().filter(|mount| !mount.read_only).collect();
        assert_eq!(writable.len(), 2, "usage and lock: {writable:?}");
        assert_eq!(shaped(&hami, 200), ContainerAllocateResponse::default());
    }

    #[test]
    fn the_second_container_on_the_same_cores_has_its_own_limits_and_no_usage_of_the_first() {
        let root = tempfile::tempdir().unwrap();
        let hami = hami(root.path());
        let answer = shaped(&hami, 30);
        let card = Card { uuid: "GPU-a".into(), ..Card::default() };
        let start = |pod: &str, demand: Demand| {
            let share = Share { demand, cards: &[&card], key: "core-300" };
            hami.prepare(&HolderId::new(pod, "main"), &share).unwrap();
        };
        let usage = source(&answer, "/usr/local/vgpu/cache").join("usage");
        let limits = || std::fs::read_to_string(source(&answer, "/overrideEnv")).unwrap();
        start("first", PART);
        assert!(limits().contains("CUDA_DEVICE_MEMORY_LIMIT_0=2048m\n"), "{}", limits());
        assert_eq!(
            std::fs::read_to_string(source(&answer, "/etc/ld.so.preload")).unwrap(),
            "/usr/local/vgpu/libvgpu.so\n"
        );
        std::fs::write(&usage, "the limits of the first").unwrap();
        start("second", Demand { cores: Cores(10), blocks: Blocks(4), legacy: 0 });
        assert!(!usage.exists(), "the library would keep the limits in it");
        assert!(limits().contains("CUDA_DEVICE_MEMORY_LIMIT_0=1024m\n"), "{}", limits());
        std::fs::write(&usage, "of an earlier start").unwrap();
        start("second", PART);
        assert!(!usage.exists(), "a restarted container starts anew");

        hami.remove_stale(&BTreeSet::new(), SystemTime::UNIX_EPOCH);
        assert!(
            root.path().join("manager/hami/first").exists(),
            "its pod may have come since the list was made"
        );
        hami.remove_stale(&BTreeSet::from(["second".to_owned()]), SystemTime::now());
        assert!(!root.path().join("manager/hami/first").exists());
        assert!(source(&answer, "/overrideEnv").exists());
        hami.remove_stale(&BTreeSet::new(), SystemTime::now());
        let left = std::fs::read_dir(root.path().join("manager/hami/by-devices")).unwrap().count();
        assert_eq!(left, 0);
    }

    #[test]
    fn it_needs_its_library() {
        let root = tempfile::tempdir().unwrap();
        let hami = hami(root.path());
        let why = hami.obstacle().unwrap();
        assert!(why.contains("lib/hami-core/libvgpu.so is missing"), "{why}");
        std::fs::create_dir_all(root.path().join("lib/hami-core/v2")).unwrap();
        std::os::unix::fs::symlink("v2", root.path().join("lib/hami-core/current")).unwrap();
        std::fs::write(root.path().join("lib/hami-core/v2/libvgpu.so"), "elf").unwrap();
        assert_eq!(hami.obstacle(), None);
    }
}
