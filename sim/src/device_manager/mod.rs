//! The kubelet's device manager (`pkg/kubelet/cm/devicemanager`, 1.33) without its I/O: lists of devices in; the choice of devices,
//! the checkpoint and the pod-resources list out. [`service`] is the same over sockets.
//!
//! As the real one was seen to behave: devices of an init container are allocated again to the containers after it; a preference is
//! asked for where there is a choice, and what it leaves open is chosen by the caller; rows of pods that have ended stay until the
//! next pod is admitted. One thing is left out: devices that a container already holds are not checked for health again.

pub mod service;

use std::collections::{BTreeMap, BTreeSet};

use gpu_migrate_kubelet_api::checkpoint_file::{self, NO_NUMA};
use gpu_migrate_kubelet_api::deviceplugin::ContainerAllocateResponse;
use gpu_migrate_kubelet_api::podresources::{
    ContainerDevices, ContainerResources, ListPodResourcesResponse, NumaNode, NumaTopology, PodResources,
};
use prost::Message;

/// A device as its plugin lists it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Device {
    pub healthy: bool,
    pub numa: Vec<i64>,
}

/// The devices of one resource that one container holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    pub pod: String,
    pub container: String,
    pub resource: String,
    /// Device IDs, with their NUMA nodes as the checkpoint records them.
    pub ids: BTreeMap<String, Vec<i64>>,
    pub answer: ContainerAllocateResponse,
}

/// Why a container cannot have its devices. The kubelet rejects the pod.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// No plugin has listed devices of this resource since the kubelet started.
    #[error("cannot allocate unregistered device {0}")]
    Unregistered(String),
    /// Too few devices are free and healthy.
    #[error(
        "requested number of devices unavailable for {resource}. Requested: {wanted}, Available: {available}"
    )]
    TooFew {
        resource: String,
        /// How many were needed beyond those of the pod's init containers.
        wanted: usize,
        /// How many are free and healthy.
        available: usize,
    },
}

/// What the manager does about a container's request.
#[derive(Clone, Debug)]
pub enum Request {
    /// The container has them already, with this answer; the plugin is not called again.
    Held(ContainerAllocateResponse),
    Choose(Choice),
}

/// The devices among which to choose.
#[derive(Clone, Debug)]
pub struct Choice {
    pub size: usize,
    /// All candidates, those of `must_include` among them.
    pub available: BTreeSet<String>,
    /// Those of the pod's init containers, where they are fewer than `size`.
    pub must_include: BTreeSet<String>,
    /// The candidates are devices of the pod's init containers alone.
    reuses: bool,
}

impl Choice {
    /// Whether there is a choice, and so a call of GetPreferredAllocation.
    #[must_use]
    pub fn is_open(&self) -> bool {
        !self.reuses && self.available.len() > self.size
    }

    /// The devices: those that must be in, then the preferred ones, then from the rest in the order of `arrange`.
    pub fn settle(
        self,
        preferred: impl IntoIterator<Item = String>,
        arrange: impl FnOnce(&mut Vec<String>),
    ) -> BTreeSet<String> {
        let mut chosen = self.must_include;
        for id in preferred {
            if chosen.len() < self.size && self.available.contains(&id) {
                chosen.insert(id);
            }
        }
        let mut rest: Vec<String> = self.available.into_iter().filter(|id| !chosen.contains(id)).collect();
        if !self.reuses {
            arrange(&mut rest);
        }
        rest.truncate(self.size - chosen.len());
        chosen.extend(rest);
        chosen
    }
}

/// The device manager of one kubelet process.
#[derive(Clone, Debug, Default)]
pub struct DeviceManager {
    /// By resource and ID.
    devices: BTreeMap<String, BTreeMap<String, Device>>,
    rows: Vec<Row>,
    /// Devices of init containers of the pod that is being admitted, by resource.
    reusable: BTreeMap<String, BTreeSet<String>>,
}

impl DeviceManager {
    /// A kubelet that starts from this checkpoint; with nothing where there is none or it is broken.
    #[must_use]
    pub fn restore(checkpoint: &[u8]) -> Self {
        let rows = checkpoint_file::read(checkpoint).unwrap_or_default();
        Self { rows: rows.into_iter().map(of_file).collect(), ..Self::default() }
    }

    /// A plugin's list replaces all devices of the resource.
    pub fn set_devices(&mut self, resource: &str, devices: BTreeMap<String, Device>) {
        self.devices.insert(resource.to_owned(), devices);
    }

    /// The stream of the resource's plugin ended: its devices stay, unhealthy.
    pub fn plugin_disconnected(&mut self, resource: &str) {
        let devices = self.devices.get_mut(resource).into_iter().flat_map(BTreeMap::values_mut);
        devices.for_each(|device| device.healthy = false);
    }

    #[must_use]
    pub const fn devices(&self) -> &BTreeMap<String, BTreeMap<String, Device>> {
        &self.devices
    }

    /// IDs that may be allocated, held ones included.
    #[must_use]
    pub fn healthy(&self, resource: &str) -> BTreeSet<String> {
        self.devices.get(resource).map(healthy).unwrap_or_default().into_iter().collect()
    }

    /// Who holds what, in the order of allocation.
    #[must_use]
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The row of one container and resource.
    #[must_use]
    pub fn row(&self, pod: &str, container: &str, resource: &str) -> Option<&Row> {
        self.rows.iter().find(|r| r.pod == pod && r.container == container && r.resource == resource)
    }

    /// Admission of a pod begins: rows of pods that are not active are removed.
    pub fn begin(&mut self, is_active: impl Fn(&str) -> bool) {
        self.reusable.clear();
        self.rows.retain(|row| is_active(&row.pod));
    }

    /// A container of the pod that is being admitted asks for devices.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn request(
        &self,
        pod: &str,
        container: &str,
        resource: &str,
        size: usize,
    ) -> Result<Request, DeviceError> {
        if let Some(row) = self.row(pod, container, resource) {
            return Ok(Request::Held(row.answer.clone()));
        }
        let listed =
            self.devices.get(resource).ok_or_else(|| DeviceError::Unregistered(resource.to_owned()))?;
        let reusable = self.reusable.get(resource).cloned().unwrap_or_default();
        if reusable.len() >= size {
            let must_include = BTreeSet::new();
            return Ok(Request::Choose(Choice { size, available: reusable, must_include, reuses: true }));
        }
        let of_resource = self.rows.iter().filter(|row| row.resource == resource);
        let held: BTreeSet<&String> = of_resource.flat_map(|row| row.ids.keys()).collect();
        let free: BTreeSet<String> = healthy(listed).into_iter().filter(|id| !held.contains(id)).collect();
        let wanted = size - reusable.len();
        if free.len() < wanted {
            return Err(DeviceError::TooFew { resource: resource.to_owned(), wanted, available: free.len() });
        }
        let available = free.union(&reusable).cloned().collect();
        Ok(Request::Choose(Choice { size, available, must_include: reusable, reuses: false }))
    }

    pub fn allocated(
        &mut self,
        pod: &str,
        container: &str,
        resource: &str,
        ids: BTreeSet<String>,
        answer: ContainerAllocateResponse,
    ) {
        let listed = self.devices.get(resource);
        let numa =
            |id: &String| listed.and_then(|all| all.get(id)).map(|d| d.numa.clone()).unwrap_or_default();
        let ids = ids.into_iter().map(|id| (id.clone(), numa(&id))).collect();
        let (pod, container, resource) = (pod.to_owned(), container.to_owned(), resource.to_owned());
        self.rows.push(Row { pod, container, resource, ids, answer });
    }

    /// A container has all its devices. Those of an init container that ends are the next containers'. The real one writes its
    /// checkpoint now.
    pub fn container_done(&mut self, pod: &str, container: &str, is_init: bool) {
        for row in self.rows.iter().filter(|row| row.pod == pod && row.container == container) {
            let reusable = self.reusable.entry(row.resource.clone()).or_default();
            for id in row.ids.keys() {
                if is_init {
                    reusable.insert(id.clone())
                } else {
                    reusable.remove(id)
                };
            }
        }
    }

    /// The checkpoint's bytes.
    #[must_use]
    pub fn checkpoint(&self) -> Vec<u8> {
        let registered =
            self.devices.iter().map(|(resource, all)| (resource.clone(), healthy(all))).collect();
        // Strings and numbers: no value of these types is refused.
        checkpoint_file::write(self.rows.iter().map(to_file).collect(), registered).unwrap_or_default()
    }

    /// The answer of pod-resources List: the pods that `name` knows, with namespace and name; one element per device.
    pub fn pod_resources(&self, name: impl Fn(&str) -> Option<(String, String)>) -> ListPodResourcesResponse {
        let mut pods: BTreeMap<&str, (PodResources, BTreeMap<&str, Vec<ContainerDevices>>)> = BTreeMap::new();
        for row in &self.rows {
            let Some((namespace, own_name)) = name(&row.pod) else { continue };
            let pod = PodResources { name: own_name, namespace, containers: Vec::new() };
            let (_, containers) = pods.entry(&row.pod).or_insert_with(|| (pod, BTreeMap::new()));
            let devices = row.ids.iter().map(|(id, numa)| ContainerDevices {
                resource_name: row.resource.clone(),
                device_ids: vec![id.clone()],
                topology: (!numa.is_empty())
                    .then(|| NumaTopology { nodes: numa.iter().map(|id| NumaNode { id: *id }).collect() }),
            });
            containers.entry(&row.container).or_default().extend(devices);
        }
        let pod = |(mut pod, containers): (PodResources, BTreeMap<&str, Vec<ContainerDevices>>)| {
            let container = |(name, devices): (&str, _)| ContainerResources {
                name: name.to_owned(),
                devices,
                dynamic_resources: Vec::new(),
            };
            pod.containers = containers.into_iter().map(container).collect();
            pod
        };
        ListPodResourcesResponse { pod_resources: pods.into_values().map(pod).collect() }
    }
}

fn healthy(devices: &BTreeMap<String, Device>) -> Vec<String> {
    devices.iter().filter(|(_, device)| device.healthy).map(|(id, _)| id.clone()).collect()
}

fn to_file(row: &Row) -> checkpoint_file::Row {
    let mut ids: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (id, numa) in &row.ids {
        match numa.as_slice() {
            [] => ids.entry(NO_NUMA.to_owned()).or_default().push(id.clone()),
            nodes => {
                for node in nodes {
                    ids.entry(node.to_string()).or_default().push(id.clone());
                }
            }
        }
    }
    checkpoint_file::Row {
        pod_uid: row.pod.clone(),
        container: row.container.clone(),
        resource: row.resource.clone(),
        ids,
        answer: row.answer.encode_to_vec(),
    }
}

fn of_file(row: checkpoint_file::Row) -> Row {
    let mut ids: BTreeMap<String, Vec<i64>> = BTreeMap::new();
    for (node, of_node) in row.ids {
        let numa: Option<i64> = (node != NO_NUMA).then(|| node.parse().ok()).flatten();
        for id in of_node {
            ids.entry(id).or_default().extend(numa);
        }
    }
    Row {
        pod: row.pod_uid,
        container: row.container,
        resource: row.resource,
        ids,
        answer: ContainerAllocateResponse::decode(row.answer.as_slice()).unwrap_or_default(),
    }
}
