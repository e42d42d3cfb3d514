//! What containers were given, as the kubelet's checkpoint and our own record say: the evidence by which each start
//! of the agent checks [which range of device IDs is which card's](super::card_map).

use std::collections::{BTreeMap, BTreeSet};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::names::{self, Dialect};
use prost::Message as _;

use super::card_map::Evidence;
use crate::plugins::answer::VOLUME_MOUNT_ROOT;
use crate::record::RecordRow;
use gpu_migrate_kubelet_api::checkpoint::{Checkpoint, Entry};
use gpu_migrate_kubelet_api::deviceplugin::ContainerAllocateResponse;

/// One piece of evidence for each container that has vcuda devices: by the checkpoint, and for those that it does not have by the record.
#[must_use]
pub fn of_containers(dialect: &Dialect, checkpoint: &Checkpoint<'_>, record: &[RecordRow]) -> Vec<Evidence> {
    let shared = |resource: &str| match resource {
        name if name == dialect.cores => Some(SharedResource::Cores),
        name if name == dialect.memory => Some(SharedResource::Memory),
        _ => None,
    };
    let mut containers: BTreeMap<(&str, &str), Evidence> = BTreeMap::new();
    for entry in &checkpoint.entries {
        let Some(resource) = shared(&entry.resource) else { continue };
        let evidence = containers.entry((&entry.pod_uid, &entry.container)).or_insert_with(|| Evidence {
            holder: format!("container {} of pod {}", entry.container, entry.pod_uid),
            ..Evidence::default()
        });
        let substituted = record.iter().find(|row| is_about(row, entry));
        let ids: Vec<&str> = match substituted {
            Some(deviation) => deviation.actual_ids().collect(),
            None => entry.ids.iter().map(|id| &**id).collect(),
        };
        let numbers = ids.into_iter().filter_map(|id| dialect.device_number(resource, id));
        let requested = entry.ids.iter().filter_map(|id| dialect.device_number(resource, id));
        match resource {
            SharedResource::Cores => {
                evidence.cores.extend(numbers);
                evidence.requested.0.extend(requested);
                evidence.uuids.extend(cards_of_answer(&entry.answer));
            }
            SharedResource::Memory => {
                evidence.blocks.extend(numbers);
                evidence.requested.1.extend(requested);
            }
        }
    }
    let mut all: Vec<Evidence> = containers.into_values().collect();
    for row in record {
        let Some(resource) = shared(&row.resource) else { continue };
        if !checkpoint.entries.iter().any(|entry| is_about(row, entry)) {
            let numbers = row.actual_ids().filter_map(|id| dialect.device_number(resource, id)).collect();
            let requested = row.kubelet.iter().filter_map(|id| dialect.device_number(resource, id)).collect();
            let holder = format!("container {} of pod {} in the agent's record", row.container, row.pod_uid);
            let mut evidence = Evidence { holder, ..Evidence::default() };
            match resource {
                SharedResource::Cores => {
                    (evidence.cores, evidence.requested.0, evidence.uuids) =
                        (numbers, requested, row.cards.clone());
                }
                SharedResource::Memory => (evidence.blocks, evidence.requested.1) = (numbers, requested),
            }
            all.push(evidence);
        }
    }
    all
}

/// Whether a row of the record is about this one of the kubelet. One without a pod is about whoever has the same devices.
fn is_about(deviation: &RecordRow, entry: &Entry<'_>) -> bool {
    let of_pod = deviation.pod_uid.is_empty()
        || (deviation.pod_uid == entry.pod_uid && deviation.container == entry.container);
    let same = |one: &Entry<'_>| {
        let ids: BTreeSet<&str> = one.ids.iter().map(|id| &**id).collect();
        ids == deviation.kubelet.iter().map(String::as_str).collect()
    };
    of_pod && deviation.resource == entry.resource && same(entry)
}

/// UUIDs of the cards that an answer to Allocate names, ours or NVIDIA's plugin's (protobuf in base64, as the kubelet keeps it). Empty
/// where the answer names none by UUID: `--device-id-strategy=index`, or a CDI device of another name.
#[must_use]
pub fn cards_of_answer(answer: &str) -> BTreeSet<String> {
    let answer = decoded(answer).unwrap_or_default();
    if let Some(cards) = answer.annotations.get(names::CARD_UUIDS) {
        return cards.split(',').map(str::to_owned).collect();
    }
    let variable =
        answer.envs.get(names::NVIDIA_VISIBLE_DEVICES).into_iter().flat_map(|list| list.split(','));
    let mounts = answer
        .mounts
        .iter()
        .filter_map(|mount| mount.container_path.strip_prefix(VOLUME_MOUNT_ROOT)?.strip_prefix('/'));
    let cdi = answer.annotations.values().flat_map(|names| names.split(','));
    let cdi = cdi.chain(answer.cdi_devices.iter().map(|device| device.name.as_str()));
    let cdi = cdi.filter_map(|name| Some(name.split_once('=')?.1));
    variable.chain(mounts).chain(cdi).filter(|name| is_uuid(name)).map(str::to_owned).collect()
}

/// An answer as the kubelet keeps it.
#[must_use]
pub fn decoded(answer: &str) -> Option<ContainerAllocateResponse> {
    ContainerAllocateResponse::decode(&*STANDARD.decode(answer).ok()?).ok()
}

fn is_uuid(name: &str) -> bool {
    ["GPU-", "MIG-"].iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpu_migrate_kubelet_api::deviceplugin::{CdiDevice, Mount};

    fn encoded(answer: &ContainerAllocateResponse) -> String {
        STANDARD.encode(answer.encode_to_vec())
    }

    fn cards(change: impl FnOnce(&mut ContainerAllocateResponse)) -> Vec<String> {
        let mut answer = ContainerAllocateResponse::default();
        change(&mut answer);
        cards_of_answer(&encoded(&answer)).into_iter().collect()
    }

    #[test]
    fn each_way_to_name_a_card_is_read() {
        let variable = |value: &'static str| {
            cards(move |answer| {
                answer.envs.insert(names::NVIDIA_VISIBLE_DEVICES.into(), value.into());
            })
        };
        assert_eq!(variable("GPU-a,GPU-b"), ["GPU-a", "GPU-b"]);
        for nothing in ["0,1", "void", "all", ""] {
            assert!(variable(nothing).is_empty(), "{nothing}");
        }
        let mounts = cards(|answer| {
            answer.envs.insert(names::NVIDIA_VISIBLE_DEVICES.into(), VOLUME_MOUNT_ROOT.into());
            let container_path = format!("{VOLUME_MOUNT_ROOT}/GPU-a");
            answer.mounts.push(Mount { container_path, ..Mount::default() });
        });
        assert_eq!(mounts, ["GPU-a"]);
        let cdi = cards(|answer| {
            answer.annotations.insert("cdi.k8s.io/x".into(), "nvidia.com/gpu=GPU-a".into());
            answer.cdi_devices.push(CdiDevice { name: "nvidia.com/gpu=GPU-b".into() });
        });
        assert_eq!(cdi, ["GPU-a", "GPU-b"]);
        let ours = cards(|answer| {
            answer.annotations.insert(names::CARD_UUIDS.into(), "a,b".into());
            answer.cdi_devices.push(CdiDevice { name: "gpu-migrate.io/share=core-1".into() });
        });
        assert_eq!(ours, ["a", "b"], "ours says it whatever the strategy");
        assert!(cards_of_answer("not base64").is_empty() && cards_of_answer("").is_empty());
    }

    #[test]
    fn a_substitution_counts_and_not_what_the_kubelet_asked_for() {
        let mut answer = ContainerAllocateResponse::default();
        answer.annotations.insert(names::CARD_UUIDS.into(), "GPU-b".into());
        let text = format!(
            r#"{{"Data":{{"PodDeviceEntries":[
                {{"PodUID":"p","ContainerName":"c","ResourceName":"tencent.com/vcuda-core","DeviceIDs":["tencent.com/vcuda-core-7"],"AllocResp":"{}"}},
                {{"PodUID":"p","ContainerName":"c","ResourceName":"tencent.com/vcuda-memory","DeviceIDs":["tencent.com/vcuda-memory-268435456-3"],"AllocResp":""}},
                {{"PodUID":"q","ContainerName":"c","ResourceName":"nvidia.com/gpu","DeviceIDs":["GPU-c"],"AllocResp":""}}
            ]}}}}"#,
            encoded(&answer)
        );
        let checkpoint = Checkpoint::parse(text.as_bytes()).unwrap();
        let dialect = Dialect::default();
        let plain = of_containers(&dialect, &checkpoint, &[]);
        assert_eq!(plain.len(), 1, "whole cards name their UUID themselves");
        assert_eq!((&plain[0].cores, &plain[0].blocks), (&BTreeSet::from([7]), &BTreeSet::from([3])));
        assert_eq!(plain[0].uuids, BTreeSet::from(["GPU-b".to_owned()]));
        let deviation = RecordRow {
            pod_uid: String::new(),
            container: String::new(),
            resource: dialect.cores.clone(),
            actual: BTreeMap::from([("-1".into(), vec!["tencent.com/vcuda-core-107".into()])]),
            kubelet: vec!["tencent.com/vcuda-core-7".into()],
            cards: BTreeSet::from(["GPU-b".into()]),
            answer: String::new(),
            grace_seconds: None,
        };
        let substituted = of_containers(&dialect, &checkpoint, std::slice::from_ref(&deviation));
        assert_eq!(substituted[0].cores, BTreeSet::from([107]));
        let of_another = RecordRow { pod_uid: "r".into(), container: "c".into(), ..deviation };
        let both = of_containers(&dialect, &checkpoint, &[of_another]);
        assert_eq!((both.len(), &both[0].cores), (2, &BTreeSet::from([7])));
        assert_eq!(
            both[1].cores,
            BTreeSet::from([107]),
            "a container that the kubelet has forgotten counts too"
        );
        assert_eq!(both[1].uuids, BTreeSet::from(["GPU-b".to_owned()]));
    }
}
