//! gpu-manager's vcuda-controller: a library in front of libcuda, configured per container by a registration over a socket.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use gpu_migrate_model::ledger::HolderId;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use super::layout::VcudaConfig;
use super::vcuda_server::{self, Registered};
use super::{Folders, Isolation, Share, current_library, safe};
use gpu_migrate_kubelet_api::deviceplugin::{ContainerAllocateResponse, Mount};

/// The strategy `vcuda`.
#[derive(Debug)]
pub struct Vcuda {
    folders: Folders,
    /// One socket for each pod: ends with the token.
    served: Mutex<BTreeMap<String, (CancellationToken, Registered)>>,
}

impl Vcuda {
    /// With the controller's libraries in versions below `libraries/vcuda` (`nvidia` for parts, `origin` for whole cards).
    #[must_use]
    pub fn new(folders: Folders) -> Self {
        Self { folders, served: Mutex::default() }
    }

    fn vm(&self) -> PathBuf {
        self.folders.manager.join("vm")
    }

    /// Where the container's `/etc/vcuda` comes from. Named by its devices, because the pod is not known when this is answered;
    /// it is a link to the pod's own folder by the time the container is created.
    fn by_devices(&self, key: &str) -> PathBuf {
        self.vm().join("by-devices").join(safe(key))
    }
}

impl Isolation for Vcuda {
    fn name(&self) -> &'static str {
        "vcuda"
    }

    fn shape(&self, share: &Share<'_>, answer: &mut ContainerAllocateResponse) {
        let library = current_library(&self.folders.libraries.join("vcuda"));
        let library = library.join(if share.is_part() { "nvidia" } else { "origin" });
        answer.envs.insert("LD_LIBRARY_PATH".to_owned(), "/usr/local/nvidia/lib64".to_owned());
        let mount = |from: PathBuf, to: &str| Mount {
            host_path: from.display().to_string(),
            container_path: to.to_owned(),
            read_only: true,
        };
        answer
            .mounts
            .extend([mount(library, "/usr/local/nvidia"), mount(self.by_devices(share.key), "/etc/vcuda")]);
    }

    fn prepare(&self, holder: &HolderId, share: &Share<'_>) -> std::io::Result<()> {
        let folder = self.vm().join(safe(&holder.pod_uid));
        std::fs::create_dir_all(&folder)?;
        let link = self.by_devices(share.key);
        if std::fs::read_link(&link).ok().as_ref() != Some(&folder) {
            let temporary = link.with_extension("new");
            std::fs::create_dir_all(link.parent().unwrap_or(&link))?;
            let _ = std::fs::remove_file(&temporary);
            std::os::unix::fs::symlink(&folder, &temporary)?;
            std::fs::rename(&temporary, &link)?;
        }
        let config = VcudaConfig {
            pod_uid: holder.pod_uid.clone(),
            limit: 0,
            container: holder.container.clone(),
            bus_id: share.cards.first().map(|card| card.bus_id.clone()).unwrap_or_default(),
            memory: share.demand.blocks.mib() << 20,
            cores: i32::try_from(share.demand.cores.0).unwrap_or(i32::MAX),
            hard: true,
            driver: (0, 0),
            enable: share.is_part(),
        };
        let mut served = self.served.lock();
        if let Some((_, registered)) = served.get(&holder.pod_uid) {
            registered.lock().insert(holder.container.clone(), config);
            return Ok(());
        }
        let registered = Registered::default();
        registered.lock().insert(holder.container.clone(), config);
        let stop = CancellationToken::new();
        vcuda_server::serve(&folder, registered.clone(), stop.clone())?;
        served.insert(holder.pod_uid.clone(), (stop, registered));
        Ok(())
    }

    fn remove_stale(&self, current: &BTreeSet<String>) {
        self.served.lock().retain(|uid, (stop, _)| {
            let keep = current.contains(uid);
            if !keep {
                stop.cancel();
            }
            keep
        });
        let keep: BTreeSet<String> = current.iter().map(|uid| safe(uid)).collect();
        for entry in std::fs::read_dir(self.vm()).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name != "by-devices" && !keep.contains(&name) {
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
        for entry in std::fs::read_dir(self.vm().join("by-devices")).into_iter().flatten().flatten() {
            // The link's target has been removed.
            if !entry.path().exists() {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::shaped;
    use super::*;
    use crate::proto::vcuda::VDeviceRequest;
    use crate::proto::vcuda::vcuda_service_client::VcudaServiceClient;
    use gpu_migrate_model::ask::Demand;
    use gpu_migrate_model::card::Card;
    use gpu_migrate_model::units::{Blocks, Cores};

    #[tokio::test]
    async fn a_container_registers_and_finds_its_limits() {
        let root = tempfile::tempdir().unwrap();
        let folders =
            Folders { manager: root.path().into(), libraries: root.path().join("lib"), ..Folders::default() };
        let vcuda = Vcuda::new(folders);
        let answer = shaped(&vcuda, 30);
        assert_eq!(answer.mounts[0].host_path, root.path().join("lib/vcuda/nvidia").display().to_string());
        assert!(shaped(&vcuda, 100).mounts[0].host_path.ends_with("origin"));
        assert_eq!(answer.mounts[1].container_path, "/etc/vcuda");

        let card = Card { uuid: "GPU-a".into(), bus_id: "0000:65:00.0".into(), ..Card::default() };
        let demand = Demand { cores: Cores(30), blocks: Blocks(8), legacy: 0 };
        let holder = HolderId::new("pod-uid", "main");
        vcuda.prepare(&holder, &Share { demand, cards: &[&card], key: "core-300" }).unwrap();
        let etc_vcuda = std::path::PathBuf::from(&answer.mounts[1].host_path);
        let channel = gpu_migrate_kubelet_api::socket::dial(&etc_vcuda.join("vcuda.sock")).await.unwrap();
        let request = |container: &str| VDeviceRequest {
            bus_id: "0000:65:00.0".into(),
            pod_uid: "pod-uid".into(),
            container_name: container.into(),
            container_id: "abc".into(),
        };
        let mut client = VcudaServiceClient::new(channel);
        client.register_v_device(request("main")).await.unwrap();
        let config = std::fs::read(etc_vcuda.join("abc/vcuda.config")).unwrap();
        assert_eq!(config.len(), 8240);
        assert!(etc_vcuda.join("abc/pids.config").exists());
        let unknown = client.register_v_device(request("other")).await.unwrap_err();
        assert_eq!(unknown.code(), tonic::Code::NotFound);
        let platform = VDeviceRequest { container_id: "../../x".into(), ..request("main") };
        assert_eq!(
            client.register_v_device(platform).await.unwrap_err().code(),
            tonic::Code::InvalidArgument
        );

        vcuda.remove_stale(&BTreeSet::new());
        assert!(!etc_vcuda.exists());
    }
}
