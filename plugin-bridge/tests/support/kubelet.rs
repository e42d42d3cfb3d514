//! A kubelet that admits the containers it is told to, around the device manager over sockets.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use gpu_migrate_sim::device_manager::service::{DeviceService, ServiceError};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

pub struct Kubelet {
    pub devices: Arc<DeviceService>,
    ended: Arc<Mutex<BTreeSet<String>>>,
    life: Mutex<CancellationToken>,
}

impl Kubelet {
    pub fn start(root: PathBuf) -> Self {
        // What no preference chooses is taken from the end, where no evaluator would choose.
        let devices = DeviceService::new(&root, |ids| ids.reverse());
        let kubelet = Self { devices, ended: Arc::default(), life: Mutex::new(CancellationToken::new()) };
        kubelet.serve();
        kubelet
    }

    fn serve(&self) {
        let life = CancellationToken::new();
        *self.life.lock() = life.clone();
        let ended = self.ended.clone();
        let name = move |uid: &str| (!ended.lock().contains(uid)).then(|| ("default".into(), uid.to_owned()));
        self.devices.start(Arc::new(name), &life).unwrap();
    }

    /// Stops, and starts again from the checkpoint.
    pub async fn restart(&self) {
        self.life.lock().cancel();
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        self.serve();
    }

    pub fn healthy(&self, resource: &str) -> BTreeSet<String> {
        self.devices.with(|manager| manager.healthy(resource))
    }

    pub fn registered(&self, resource: &str) -> bool {
        self.devices.counts().get(resource).is_some_and(|(all, _)| *all > 0)
    }

    /// What a container's processes see: the merged environment.
    pub fn environment(&self, pod: &str, container: &str) -> BTreeMap<String, String> {
        self.devices.with(|manager| {
            let rows = manager.rows().iter().filter(|r| r.pod == pod && r.container == container);
            rows.flat_map(|r| r.answer.envs.clone()).collect()
        })
    }

    pub fn ids(&self, pod: &str, container: &str, resource: &str) -> BTreeSet<String> {
        self.devices.with(|manager| {
            let row = manager.row(pod, container, resource);
            row.map(|r| r.ids.keys().cloned().collect()).unwrap_or_default()
        })
    }

    /// Admits one container: resources in the order given.
    pub async fn admit(
        &self,
        pod: &str,
        container: &str,
        is_init: bool,
        wants: &[(&str, usize)],
    ) -> Result<(), ServiceError> {
        self.devices.begin(|uid| !self.ended.lock().contains(uid));
        for (resource, size) in wants {
            self.devices.allocate(pod, container, resource, *size).await?;
        }
        self.devices.container_done(pod, container, is_init);
        Ok(())
    }

    /// Calls PreStartContainer for each resource of a container that wants it.
    pub async fn start_container(&self, pod: &str, container: &str) -> Result<(), ServiceError> {
        self.devices.pre_start(pod, container).await
    }

    /// The pod's containers have ended: pod-resources forgets it, the checkpoint does not.
    pub fn end(&self, pod: &str) {
        self.ended.lock().insert(pod.into());
    }
}
