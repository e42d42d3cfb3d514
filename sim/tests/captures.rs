//! What a real kubelet 1.33 wrote and listed, replayed against the device manager: each recorded allocation is one that the manager
//! may make, and leads to the recorded checkpoint and pod-resources list. The captures are those of `kubelet-api`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};

use gpu_migrate_kubelet_api::checkpoint_file::{self, Row};
use gpu_migrate_kubelet_api::deviceplugin::ContainerAllocateResponse;
use gpu_migrate_sim::device_manager::{Device, DeviceManager, Request};
use prost::Message;
use serde_json::Value;

/// In the order in which they were recorded.
const CHECKPOINTS: [&str; 10] = [
    "checkpoint-01-registered-no-pods",
    "checkpoint-02-one-gpu-pod",
    "checkpoint-03-vcuda-pod",
    "checkpoint-04-two-containers",
    "checkpoint-05b-init-done-main-running",
    "checkpoint-06c-completed-later",
    "checkpoint-07b-10s-later",
    "checkpoint-07c-after-next-alloc",
    "checkpoint-08-unhealthy",
    "checkpoint-11b-reregistered",
];

fn text(name: &str) -> Vec<u8> {
    std::fs::read(format!("{}/../kubelet-api/tests/captures/{name}.json", env!("CARGO_MANIFEST_DIR")))
        .unwrap()
}

/// All devices of the node. Only this capture was kept whole.
fn devices() -> BTreeMap<String, BTreeMap<String, Device>> {
    let whole: Value = serde_json::from_slice(&text("checkpoint-04-two-containers")).unwrap();
    let registered = whole["Data"]["RegisteredDevices"].as_object().unwrap();
    let device = |resource: &str, id: &Value| {
        let numa = if resource == "nvidia.com/gpu" { vec![0] } else { Vec::new() };
        (id.as_str().unwrap().to_owned(), Device { healthy: true, numa })
    };
    let of = |(resource, ids): (&String, &Value)| {
        let ids = ids.as_array().unwrap().iter();
        (resource.clone(), ids.map(|id| device(resource, id)).collect())
    };
    registered.iter().map(of).collect()
}

fn list_all(manager: &mut DeviceManager) {
    devices().into_iter().for_each(|(resource, all)| manager.set_devices(&resource, all));
}

/// Rows by pod, container and resource, with the devices of each NUMA node as a set: neither is in a certain order.
type Rows = BTreeMap<(String, String, String), (BTreeMap<String, BTreeSet<String>>, Vec<u8>)>;

fn rows(checkpoint: &[u8]) -> Rows {
    let sets = |ids: BTreeMap<String, Vec<String>>| {
        ids.into_iter().map(|(node, ids)| (node, ids.into_iter().collect())).collect()
    };
    let row = |row: Row| {
        // Maps in the answer are in no certain order either.
        let answer = ContainerAllocateResponse::decode(row.answer.as_slice()).unwrap().encode_to_vec();
        ((row.pod_uid, row.container, row.resource), (sets(row.ids), answer))
    };
    checkpoint_file::read(checkpoint).unwrap().into_iter().map(row).collect()
}

/// Allocates what is new in the rows; init containers (`i0`) come first, and there is no sidecar among these.
fn allocate(manager: &mut DeviceManager, wanted: &Rows) {
    let known = rows(&manager.checkpoint());
    let new: BTreeSet<&String> =
        wanted.keys().filter(|key| !known.contains_key(*key)).map(|key| &key.0).collect();
    for pod in new {
        manager.begin(|uid| wanted.keys().any(|key| key.0 == uid));
        for container in ["i0", "c0", "c1"] {
            for ((_, _, resource), (by_node, answer)) in
                wanted.iter().filter(|(key, _)| key.0 == *pod && key.1 == container)
            {
                let ids: BTreeSet<String> = by_node.values().flatten().cloned().collect();
                let request = manager.request(pod, container, resource, ids.len()).unwrap();
                let Request::Choose(choice) = request else {
                    panic!("{pod} {container} has {resource} already")
                };
                let chosen = choice.settle(ids.iter().cloned(), |_| {});
                assert_eq!(chosen, ids, "{pod} {container} {resource}");
                let answer = ContainerAllocateResponse::decode(answer.as_slice()).unwrap();
                manager.allocated(pod, container, resource, chosen, answer);
            }
            manager.container_done(pod, container, container == "i0");
        }
    }
}

#[test]
fn the_recorded_allocations_lead_to_the_recorded_checkpoints() {
    let mut manager = DeviceManager::default();
    list_all(&mut manager);
    for name in CHECKPOINTS {
        let wanted = rows(&text(name));
        allocate(&mut manager, &wanted);
        assert_eq!(rows(&manager.checkpoint()), wanted, "{name}");
    }
}

#[test]
fn a_kubelet_that_starts_from_a_recorded_checkpoint_writes_the_same() {
    for name in CHECKPOINTS.into_iter().chain(["checkpoint-13-sidecar", "checkpoint-v120-01-pods"]) {
        let text = text(name);
        assert_eq!(rows(&DeviceManager::restore(&text).checkpoint()), rows(&text), "{name}");
    }
}

/// Elements of the recorded lists: container, resource, ID, whether it has a topology. The recordings leave out many elements.
#[test]
fn recorded_pod_resources_are_listed() {
    for number in ["02-one-gpu-pod", "04-two-containers", "13-sidecar"] {
        let manager = DeviceManager::restore(&text(&format!("checkpoint-{number}")));
        let listed = manager.pod_resources(|uid| Some(("default".into(), uid.to_owned())));
        let mut elements = BTreeSet::new();
        for container in listed.pod_resources.into_iter().flat_map(|pod| pod.containers) {
            for device in container.devices {
                assert_eq!(device.device_ids.len(), 1, "one element per device");
                let id = device.device_ids[0].clone();
                elements.insert((
                    container.name.clone(),
                    device.resource_name,
                    id,
                    device.topology.is_some(),
                ));
            }
        }
        let capture = text(&format!("podresources-list-{number}"));
        let recorded: Value =
            serde_json::Deserializer::from_slice(&capture).into_iter().next().unwrap().unwrap();
        let mut seen = 0;
        for pod in recorded["pod_resources"].as_array().unwrap() {
            for container in pod["containers"].as_array().unwrap() {
                let devices = container["devices"].as_array().into_iter().flatten();
                for device in devices.filter(|device| device.is_object()) {
                    let text = |value: &Value| value.as_str().unwrap().to_owned();
                    let element = (
                        text(&container["name"]),
                        text(&device["resource_name"]),
                        text(&device["device_ids"][0]),
                        device["topology"].is_object(),
                    );
                    assert!(elements.contains(&element), "{number}: {element:?}");
                    seen += 1;
                }
            }
        }
        assert!(seen > 0, "{number}");
    }
}
