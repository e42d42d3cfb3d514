//! HAMi-core: a preloaded library that reads its limits from the environment (HAMi, `nvinternal/plugin/server.go`).

use super::{Folders, Isolation, Share, current_library, safe};
use gpu_migrate_kubelet_api::deviceplugin::{ContainerAllocateResponse, Mount};

/// The strategy `hami-core`.
#[derive(Debug)]
pub struct HamiCore {
    folders: Folders,
}

impl HamiCore {
    /// With `libvgpu.so` and `ld.so.preload` in versions below `libraries/hami-core`.
    #[must_use]
    pub fn new(folders: Folders) -> Self {
        Self { folders }
    }
}

impl Isolation for HamiCore {
    fn name(&self) -> &'static str {
        "hami-core"
    }

    fn shape(&self, share: &Share<'_>, answer: &mut ContainerAllocateResponse) {
        if !share.is_part() {
            return;
        }
        let cache = format!("/usr/local/vgpu/cache/{}.cache", safe(share.key));
        for (number, _) in share.cards.iter().enumerate() {
            let limit = format!("{}m", share.demand.blocks.mib());
            answer.envs.insert(format!("CUDA_DEVICE_MEMORY_LIMIT_{number}"), limit);
        }
        answer.envs.insert("CUDA_DEVICE_SM_LIMIT".to_owned(), share.demand.cores.0.to_string());
        answer.envs.insert("CUDA_DEVICE_MEMORY_SHARED_CACHE".to_owned(), cache);
        let library = current_library(&self.folders.libraries.join("hami-core"));
        let mount = |file: &str, to: &str| Mount {
            host_path: library.join(file).display().to_string(),
            container_path: to.to_owned(),
            read_only: true,
        };
        let key = self.folders.manager.join("hami").join(safe(share.key)).display().to_string();
        answer.mounts.extend([
            mount("libvgpu.so", "/usr/local/vgpu/libvgpu.so"),
            mount("ld.so.preload", "/etc/ld.so.preload"),
            Mount { host_path: key, container_path: "/usr/local/vgpu/cache".into(), read_only: false },
        ]);
    }

    fn prepare(&self, _: &gpu_migrate_model::ledger::HolderId, share: &Share<'_>) -> std::io::Result<()> {
        std::fs::create_dir_all(self.folders.manager.join("hami").join(safe(share.key)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::shaped;
    use super::*;

    #[test]
    fn limits_and_the_preload_are_given_to_parts_alone() {
        let hami = HamiCore::new(Folders::default());
        let answer = shaped(&hami, 30);
        assert_eq!(answer.envs["CUDA_DEVICE_MEMORY_LIMIT_0"], "2048m");
        assert_eq!(answer.envs["CUDA_DEVICE_SM_LIMIT"], "30");
        assert_eq!(answer.mounts[1].container_path, "/etc/ld.so.preload");
        assert_eq!(shaped(&hami, 200), ContainerAllocateResponse::default());
    }
}
