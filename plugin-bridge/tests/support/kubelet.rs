//! The kubelet's device manager, as far as a plugin can tell.
//!
//! Admission is serial; per container and resource one GetPreferredAllocation (where there is a choice) and one Allocate; devices
//! of init containers are used again; the checkpoint is written at every registration, health change and after each
//! container; rows of ended pods stay until the next allocation; at its start it deletes every socket and then makes its own.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use gpu_migrate_kubelet_api::deviceplugin::device_plugin_client::DevicePluginClient;
use gpu_migrate_kubelet_api::deviceplugin::registration_server::{Registration, RegistrationServer};
use gpu_migrate_kubelet_api::deviceplugin::*;
use gpu_migrate_kubelet_api::podresources::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use gpu_migrate_kubelet_api::podresources::{
    self, AllocatableResourcesRequest, AllocatableResourcesResponse, ContainerDevices, ContainerResources,
    ListPodResourcesRequest, ListPodResourcesResponse, PodResources,
};
use gpu_migrate_kubelet_api::socket::dial;
use parking_lot::Mutex;
use serde_json::json;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Server};
use tonic::{Request, Response, Status};

#[derive(Clone, Debug)]
pub struct Row {
    pub pod: String,
    pub container: String,
    pub init: bool,
    pub resource: String,
    pub ids: BTreeSet<String>,
    pub answer: ContainerAllocateResponse,
}

#[derive(Default)]
pub struct State {
    pub devices: BTreeMap<String, BTreeMap<String, bool>>,
    pub clients: BTreeMap<String, (u64, DevicePluginClient<Channel>, DevicePluginOptions)>,
    pub rows: Vec<Row>,
    pub ended: BTreeSet<String>,
    pub registrations: BTreeMap<String, u64>,
    pub lists: BTreeMap<String, u64>,
    /// An old stream ended after a newer registration: the real kubelet drops the new one then.
    pub overlaps: u64,
}

pub struct FakeKubelet {
    root: PathBuf,
    pub state: Arc<Mutex<State>>,
    life: Mutex<CancellationToken>,
}

impl FakeKubelet {
    pub async fn start(root: PathBuf) -> Self {
        let kubelet = Self { root, state: Arc::default(), life: Mutex::new(CancellationToken::new()) };
        kubelet.serve();
        kubelet
    }

    fn serve(&self) {
        let life = CancellationToken::new();
        *self.life.lock() = life.clone();
        let plugins = self.root.join("device-plugins");
        for entry in std::fs::read_dir(&plugins).unwrap().flatten() {
            use std::os::unix::fs::FileTypeExt;
            if entry.file_type().unwrap().is_socket() {
                std::fs::remove_file(entry.path()).unwrap();
            }
        }
        let desk = Desk { root: self.root.clone(), state: self.state.clone(), life: life.clone() };
        let lister = PodResourcesListerServer::new(Lister { state: self.state.clone() });
        let socket = self.root.join("pod-resources/kubelet.sock");
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).unwrap();
        tokio::spawn(
            Server::builder().add_service(lister).serve_with_incoming_shutdown(
                UnixListenerStream::new(listener),
                life.clone().cancelled_owned(),
            ),
        );
        let listener = UnixListener::bind(plugins.join("kubelet.sock")).unwrap();
        tokio::spawn(
            Server::builder()
                .add_service(RegistrationServer::new(desk))
                .serve_with_incoming_shutdown(UnixListenerStream::new(listener), life.cancelled_owned()),
        );
    }

    /// Stops, and starts anew from the checkpoint.
    pub async fn restart(&self) {
        self.life.lock().cancel();
        {
            let mut state = self.state.lock();
            state.devices.clear();
            state.clients.clear();
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        self.serve();
    }

    pub fn healthy(&self, resource: &str) -> BTreeSet<String> {
        let state = self.state.lock();
        state
            .devices
            .get(resource)
            .into_iter()
            .flatten()
            .filter(|(_, h)| **h)
            .map(|(id, _)| id.clone())
            .collect()
    }

    pub fn registered(&self, resource: &str) -> bool {
        self.state.lock().devices.get(resource).is_some_and(|d| !d.is_empty())
    }

    /// What a container's processes see: the merged environment.
    pub fn environment(&self, pod: &str, container: &str) -> BTreeMap<String, String> {
        let state = self.state.lock();
        let rows = state.rows.iter().filter(|r| r.pod == pod && r.container == container);
        rows.flat_map(|r| r.answer.envs.clone()).collect()
    }

    pub fn ids(&self, pod: &str, container: &str, resource: &str) -> BTreeSet<String> {
        let state = self.state.lock();
        let row =
            state.rows.iter().find(|r| r.pod == pod && r.container == container && r.resource == resource);
        row.map(|r| r.ids.clone()).unwrap_or_default()
    }

    /// Admits one container: resources in the order given.
    pub async fn admit(
        &self,
        pod: &str,
        container: &str,
        init: bool,
        wants: &[(&str, usize)],
    ) -> Result<(), Status> {
        {
            let mut state = self.state.lock();
            let ended = state.ended.clone();
            state.rows.retain(|r| !ended.contains(&r.pod));
        }
        for (resource, size) in wants {
            self.allocate(pod, container, init, resource, *size).await?;
        }
        write_checkpoint(&self.root, &self.state.lock());
        Ok(())
    }

    async fn allocate(
        &self,
        pod: &str,
        container: &str,
        init: bool,
        resource: &str,
        size: usize,
    ) -> Result<(), Status> {
        let (mut client, options, free, reusable) = {
            let state = self.state.lock();
            let (_, client, options) = state.clients.get(resource).cloned().ok_or_else(|| {
                Status::unavailable(format!(
                    "no healthy devices present; cannot allocate unhealthy devices {resource}"
                ))
            })?;
            let used: BTreeSet<&String> =
                state.rows.iter().filter(|r| r.resource == resource).flat_map(|r| &r.ids).collect();
            let free: BTreeSet<String> = state.devices[resource]
                .iter()
                .filter(|(id, healthy)| **healthy && !used.contains(id))
                .map(|(id, _)| id.clone())
                .collect();
            let of_inits = state.rows.iter().filter(|r| r.pod == pod && r.init && r.resource == resource);
            let taken: BTreeSet<&String> = state
                .rows
                .iter()
                .filter(|r| r.pod == pod && !r.init && r.resource == resource)
                .flat_map(|r| &r.ids)
                .collect();
            let reusable: BTreeSet<String> =
                of_inits.flat_map(|r| r.ids.clone()).filter(|id| !taken.contains(id)).collect();
            (client, options, free, reusable)
        };
        let mut chosen: BTreeSet<String> = reusable.into_iter().take(size).collect();
        let needed = size - chosen.len();
        if free.len() < needed {
            return Err(Status::resource_exhausted(format!(
                "requested number of devices unavailable for {resource}. Requested: {needed}, Available: {}",
                free.len()
            )));
        }
        let offered: BTreeSet<String> = free.union(&chosen).cloned().collect();
        if needed > 0 && options.get_preferred_allocation_available && offered.len() > size {
            let ask = ContainerPreferredAllocationRequest {
                available_device_ids: offered.iter().cloned().collect(),
                must_include_device_ids: chosen.iter().cloned().collect(),
                allocation_size: i32::try_from(size).unwrap(),
            };
            let answer = client
                .get_preferred_allocation(PreferredAllocationRequest { container_requests: vec![ask] })
                .await?;
            for id in answer.into_inner().container_responses.into_iter().flat_map(|c| c.device_ids) {
                if chosen.len() < size && free.contains(&id) {
                    chosen.insert(id);
                }
            }
        }
        // The rest is random in the real one; here from the end, where nobody would choose.
        for id in free.into_iter().rev() {
            if chosen.len() < size {
                chosen.insert(id);
            }
        }
        let ask = ContainerAllocateRequest { devices_ids: chosen.iter().cloned().collect() };
        let answer = client.allocate(AllocateRequest { container_requests: vec![ask] }).await?.into_inner();
        let answer = answer.container_responses.into_iter().next().unwrap();
        self.state.lock().rows.push(Row {
            pod: pod.into(),
            container: container.into(),
            init,
            resource: resource.into(),
            ids: chosen,
            answer,
        });
        Ok(())
    }

    /// Calls PreStartContainer for each resource of a container that wants it.
    pub async fn start_container(&self, pod: &str, container: &str) -> Result<(), Status> {
        let calls: Vec<_> = {
            let state = self.state.lock();
            let rows = state.rows.iter().filter(|r| r.pod == pod && r.container == container);
            rows.filter_map(|r| {
                let (_, client, options) = state.clients.get(&r.resource)?;
                options
                    .pre_start_required
                    .then(|| (client.clone(), r.ids.iter().cloned().collect::<Vec<_>>()))
            })
            .collect()
        };
        for (mut client, devices_ids) in calls {
            client.pre_start_container(PreStartContainerRequest { devices_ids }).await?;
        }
        Ok(())
    }

    /// The pod's containers have ended: pod-resources forgets it, the checkpoint does not.
    pub fn end(&self, pod: &str) {
        self.state.lock().ended.insert(pod.into());
    }
}

fn write_checkpoint(root: &std::path::Path, state: &State) {
    let rows: Vec<_> = state
        .rows
        .iter()
        .map(|r| json!({"PodUID": r.pod, "ContainerName": r.container, "ResourceName": r.resource, "DeviceIDs": {"-1": r.ids}, "AllocResp": ""}))
        .collect();
    let registered: BTreeMap<&String, Vec<&String>> = state
        .devices
        .iter()
        .map(|(r, d)| (r, d.iter().filter(|(_, h)| **h).map(|(id, _)| id).collect()))
        .collect();
    let rows = if rows.is_empty() { serde_json::Value::Null } else { json!(rows) };
    let text = json!({"Data": {"PodDeviceEntries": rows, "RegisteredDevices": registered}, "Checksum": 1})
        .to_string();
    let folder = root.join("device-plugins");
    let beside = folder.join(".4018335065");
    std::fs::write(&beside, text).unwrap();
    std::fs::rename(beside, folder.join("kubelet_internal_checkpoint")).unwrap();
}

struct Desk {
    root: PathBuf,
    state: Arc<Mutex<State>>,
    life: CancellationToken,
}

#[tonic::async_trait]
impl Registration for Desk {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        assert_eq!(request.version, "v1beta1");
        let resource = request.resource_name.clone();
        let channel = dial(&self.root.join("device-plugins").join(&request.endpoint))
            .await
            .map_err(|e| Status::unavailable(e.to_string()))?;
        let mut client = DevicePluginClient::new(channel);
        let options = client.get_device_plugin_options(Empty {}).await?.into_inner();
        let epoch = {
            let mut state = self.state.lock();
            let epoch = state.registrations.entry(resource.clone()).or_default();
            *epoch += 1;
            let epoch = *epoch;
            state.clients.insert(resource.clone(), (epoch, client.clone(), options));
            epoch
        };
        let (root, state, life) = (self.root.clone(), self.state.clone(), self.life.clone());
        tokio::spawn(async move {
            let Ok(stream) = client.list_and_watch(Empty {}).await else { return };
            let mut stream = stream.into_inner();
            while let Some(Ok(Some(list))) = life.run_until_cancelled(stream.message()).await {
                let mut state = state.lock();
                *state.lists.entry(resource.clone()).or_default() += 1;
                let devices =
                    list.devices().unwrap().into_iter().map(|d| (d.id, d.health == HEALTHY)).collect();
                state.devices.insert(resource.clone(), devices);
                write_checkpoint(&root, &state);
            }
            let mut state = state.lock();
            if life.is_cancelled() {
                return;
            }
            if state.clients.get(&resource).is_some_and(|(current, ..)| *current != epoch) {
                state.overlaps += 1;
            } else {
                state.clients.remove(&resource);
                for healthy in state.devices.get_mut(&resource).into_iter().flatten().map(|(_, h)| h) {
                    *healthy = false;
                }
            }
        });
        Ok(Response::new(Empty {}))
    }
}

struct Lister {
    state: Arc<Mutex<State>>,
}

#[tonic::async_trait]
impl PodResourcesLister for Lister {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        let state = self.state.lock();
        let mut pods: BTreeMap<String, PodResources> = BTreeMap::new();
        for row in state.rows.iter().filter(|r| !state.ended.contains(&r.pod)) {
            let pod = pods.entry(row.pod.clone()).or_insert_with(|| PodResources {
                name: row.pod.clone(),
                namespace: "default".into(),
                containers: Vec::new(),
            });
            // One element per device, as 1.33 does.
            let devices = row.ids.iter().map(|id| ContainerDevices {
                resource_name: row.resource.clone(),
                device_ids: vec![id.clone()],
                topology: Some(podresources::NumaTopology { nodes: vec![podresources::NumaNode { id: 0 }] }),
            });
            pod.containers
                .push(ContainerResources { name: row.container.clone(), devices: devices.collect() });
        }
        Ok(Response::new(ListPodResourcesResponse { pod_resources: pods.into_values().collect() }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        Err(Status::unimplemented("not in 1.20"))
    }
}
