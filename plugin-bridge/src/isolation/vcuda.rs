//! gpu-manager's vcuda-controller: a library in front of libcuda, configured per container by a registration over a socket.
//!
//! It is of 2022: it has no `cuGetProcAddress_v2`, by which programs of CUDA 12 and newer get every function, and finds its container in
//! the `memory` line of `/proc/self/cgroup` (`loader.c`, `get_cgroup_data`), which cgroup v2 does not have.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::SystemTime;

use gpu_migrate_model::ledger::HolderId;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use super::check::missing_file;
use super::layout::{VcudaConfig, short_bus_id};
use super::vcuda_server::{self, Registered};
use super::{Folders, Isolation, NodeFacts, Share, current_library, folders, mount};
use gpu_migrate_kubelet_api::deviceplugin::ContainerAllocateResponse;

/// The strategy `vcuda`.
#[derive(Debug)]
pub struct Vcuda {
    libraries: PathBuf,
    root: PathBuf,
    /// One socket for each pod: ends with the token.
    served: Mutex<BTreeMap<String, (CancellationToken, Registered)>>,
    node: NodeFacts,
}

impl Vcuda {
    /// With the controller's libraries in versions below `libraries/vcuda` (`nvidia` for parts, `origin` for whole cards).
    #[must_use]
    pub fn new(folders: &Folders, node: NodeFacts) -> Self {
        Self {
            libraries: folders.libraries.join("vcuda"),
            root: folders.manager.join("vm"),
            served: Mutex::default(),
            node,
        }
    }
}

impl Isolation for Vcuda {
    fn name(&self) -> &'static str {
        "vcuda"
    }

    fn obstacle(&self) -> Option<String> {
        match self.node.cuda {
            Some((major, minor)) if major >= 12 => {
                return Some(format!(
                    "the driver supports CUDA {major}.{minor}, and vcuda-controller limits programs up to CUDA 11 only: use another isolation"
                ));
            }
            None => {
                return Some(
                    "NVML does not tell the driver's CUDA version, and vcuda-controller ends before 12"
                        .to_owned(),
                );
            }
            Some(_) => {}
        }
        if self.node.cgroup_v2 {
            return Some(
                "vcuda-controller reads cgroup v1, and this node has v2: use another isolation".to_owned(),
            );
        }
        if !self.node.host_pids {
            return Some(
                "the node agent does not see the host's processes: its pod needs hostPID".to_owned(),
            );
        }
        let library = current_library(&self.libraries);
        missing_file(&library, "nvidia/lib64/libcuda-control.so").or_else(|| missing_file(&library, "origin"))
    }

    fn shape(&self, share: &Share<'_>, answer: &mut ContainerAllocateResponse) {
        let library = current_library(&self.libraries);
        let library = library.join(if share.is_part() { "nvidia" } else { "origin" });
        answer.envs.insert("LD_LIBRARY_PATH".to_owned(), "/usr/local/nvidia/lib64".to_owned());
        let own = folders::by_devices(&self.root, share.key);
        answer.mounts.extend([mount(&library, "/usr/local/nvidia", true), mount(&own, "/etc/vcuda", true)]);
    }

    fn prepare(&self, holder: &HolderId, share: &Share<'_>) -> std::io::Result<()> {
        let folder = folders::of_pod(&self.root, &holder.pod_uid);
        std::fs::create_dir_all(&folder)?;
        folders::link(&self.root, share.key, &folder)?;
        let bus_id = share.cards.first().map(|card| short_bus_id(&card.bus_id)).unwrap_or_default();
        let config = VcudaConfig {
            pod_uid: holder.pod_uid.clone(),
            limit: 0,
            container: holder.container.clone(),
            bus_id: bus_id.to_owned(),
            memory: share.demand.blocks.mib() << 20,
            cores: i32::try_from(share.demand.cores.0).unwrap_or(i32::MAX),
            hard: true,
            driver: self.node.driver.unwrap_or_default(),
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

    fn resume(&self, holder: &HolderId, share: &Share<'_>) -> std::io::Result<()> {
        let is_served = |(_, registered): &(_, Registered)| registered.lock().contains_key(&holder.container);
        if self.served.lock().get(&holder.pod_uid).is_some_and(is_served) {
            return Ok(());
        }
        self.prepare(holder, share)
    }

    fn remove_stale(&self, current: &BTreeSet<String>, new: SystemTime) {
        self.served.lock().retain(|uid, (stop, _)| {
            let keep = current.contains(uid);
            if !keep {
                stop.cancel();
            }
            keep
        });
        folders::remove_stale(&self.root, current, new);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{PART, shaped};
    use super::*;
    use crate::proto::vcuda::VDeviceRequest;
    use crate::proto::vcuda::vcuda_service_client::VcudaServiceClient;
    use gpu_migrate_model::card::Card;

    #[tokio::test]
    async fn a_container_registers_and_finds_its_limits() {
        let root = tempfile::tempdir().unwrap();
        let folders =
            Folders { manager: root.path().into(), libraries: root.path().join("lib"), ..Folders::default() };
        let vcuda = Vcuda::new(&folders, ABLE);
        let answer = shaped(&vcuda, 30);
        assert_eq!(answer.mounts[0].host_path, root.path().join("lib/vcuda/nvidia").display().to_string());
        assert!(shaped(&vcuda, 100).mounts[0].host_path.ends_with("origin"));
        assert_eq!(answer.mounts[1].container_path, "/etc/vcuda");

        let card = Card { uuid: "GPU-a".into(), bus_id: "00000000:65:00.0".into(), ..Card::default() };
        let holder = HolderId::new("pod-uid", "main");
        let share = Share { demand: PART, cards: &[&card], key: "core-300" };
        assert!(vcuda.obstacle().is_some_and(|why| why.contains("libcuda-control.so is missing")));
        vcuda.prepare(&holder, &share).unwrap();
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
        assert_eq!(&config[8192..8205], b"0000:65:00.0\0");
        assert_eq!(&config[8224..8232], [470_u32.to_ne_bytes(), 82_u32.to_ne_bytes()].concat());
        assert!(etc_vcuda.join("abc/pids.config").exists());
        let unknown = client.register_v_device(request("other")).await.unwrap_err();
        assert_eq!(unknown.code(), tonic::Code::NotFound);
        let platform = VDeviceRequest { container_id: "../../x".into(), ..request("main") };
        assert_eq!(
            client.register_v_device(platform).await.unwrap_err().code(),
            tonic::Code::InvalidArgument
        );

        // The next process of the agent serves the container again.
        drop(client);
        drop(vcuda);
        let vcuda = Vcuda::new(&folders, ABLE);
        vcuda.resume(&holder, &share).unwrap();
        vcuda.resume(&holder, &share).unwrap();
        let channel = gpu_migrate_kubelet_api::socket::dial(&etc_vcuda.join("vcuda.sock")).await.unwrap();
        VcudaServiceClient::new(channel).register_v_device(request("main")).await.unwrap();

        vcuda.remove_stale(&BTreeSet::new(), SystemTime::now());
        assert!(!etc_vcuda.exists());
    }

    const ABLE: NodeFacts =
        NodeFacts { driver: Some((470, 82)), cuda: Some((11, 4)), cgroup_v2: false, host_pids: true };

    #[test]
    fn it_refuses_what_its_controller_cannot_limit() {
        let root = tempfile::tempdir().unwrap();
        let folders = Folders { libraries: root.path().into(), ..Folders::default() };
        let on = |node| Vcuda::new(&folders, node);
        std::fs::create_dir_all(root.path().join("vcuda/nvidia/lib64")).unwrap();
        std::fs::create_dir_all(root.path().join("vcuda/origin")).unwrap();
        std::fs::write(root.path().join("vcuda/nvidia/lib64/libcuda-control.so"), "elf").unwrap();
        assert_eq!(on(ABLE).obstacle(), None);
        for (node, expected) in [
            (NodeFacts { cuda: Some((12, 0)), ..ABLE }, "up to CUDA 11 only"),
            (NodeFacts { cuda: None, ..ABLE }, "does not tell"),
            (NodeFacts { cgroup_v2: true, ..ABLE }, "cgroup v1"),
            (NodeFacts { host_pids: false, ..ABLE }, "hostPID"),
        ] {
            let why = on(node).obstacle().unwrap_or_default();
            assert!(why.contains(expected), "{why}");
        }
    }
}
