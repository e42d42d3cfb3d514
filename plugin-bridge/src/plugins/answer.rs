//! The Allocate answer of a shared container: its cards, in the form that the node's container runtime reads.

use std::collections::BTreeMap;

use gpu_migrate_model::ask::Demand;
use gpu_migrate_model::card::Card;
use gpu_migrate_model::names;

use gpu_migrate_kubelet_api::deviceplugin::{CdiDevice, ContainerAllocateResponse, DeviceSpec, Mount};

/// How cards are shown to a container; NVIDIA's plugin has the same choices (`--device-list-strategy`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum ListStrategy {
    /// `NVIDIA_VISIBLE_DEVICES`, read by NVIDIA's container runtime.
    Envvar,
    /// Mounts below `/var/run/nvidia-container-devices`, which an unprivileged image cannot forge.
    VolumeMounts,
    /// CDI names in the annotation `cdi.k8s.io/…`.
    CdiAnnotations,
    /// CDI names in the CRI field.
    CdiCri,
}

/// How a card is named to the runtime.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum IdStrategy {
    /// By UUID.
    #[default]
    Uuid,
    /// By NVML's number.
    Index,
}

/// How answers are made on this node.
#[derive(Clone, Debug)]
pub struct AnswerStyle {
    /// One or several ways at once.
    pub lists: Vec<ListStrategy>,
    /// UUID or number.
    pub ids: IdStrategy,
    /// Also name the device nodes, which survive a systemd daemon-reload (nvidia-container-toolkit#48).
    pub device_specs: bool,
    /// Kind of the CDI devices, `vendor/class`.
    pub cdi_kind: String,
    /// Prefix of the CDI annotation's key.
    pub cdi_annotation_prefix: String,
}

impl Default for AnswerStyle {
    fn default() -> Self {
        Self {
            lists: vec![ListStrategy::Envvar],
            ids: IdStrategy::Uuid,
            device_specs: false,
            cdi_kind: "nvidia.com/gpu".into(),
            cdi_annotation_prefix: "cdi.k8s.io/".into(),
        }
    }
}

/// Where NVIDIA's container toolkit reads the names of mounts as cards.
pub const VOLUME_MOUNT_ROOT: &str = "/var/run/nvidia-container-devices";

impl AnswerStyle {
    /// The answer for a container that sees no card: it requested memory without cores.
    #[must_use]
    pub fn nothing(&self) -> ContainerAllocateResponse {
        let mut answer = ContainerAllocateResponse::default();
        answer.envs.insert(names::NVIDIA_VISIBLE_DEVICES.to_owned(), "void".to_owned());
        answer
    }

    /// The answer for a container that gets these cards.
    #[must_use]
    pub fn answer(&self, cards: &[&Card], demand: &Demand) -> ContainerAllocateResponse {
        let names: Vec<String> = cards
            .iter()
            .map(|card| match self.ids {
                IdStrategy::Uuid => card.uuid.clone(),
                IdStrategy::Index => card.nvml_index.to_string(),
            })
            .collect();
        let mut answer = ContainerAllocateResponse::default();
        for list in &self.lists {
            match list {
                ListStrategy::Envvar => {
                    answer.envs.insert(names::NVIDIA_VISIBLE_DEVICES.to_owned(), names.join(","));
                }
                ListStrategy::VolumeMounts => {
                    answer
                        .envs
                        .insert(names::NVIDIA_VISIBLE_DEVICES.to_owned(), VOLUME_MOUNT_ROOT.to_owned());
                    answer.mounts.extend(names.iter().map(|name| Mount {
                        host_path: "/dev/null".into(),
                        container_path: format!("{VOLUME_MOUNT_ROOT}/{name}"),
                        read_only: false,
                    }));
                }
                ListStrategy::CdiAnnotations => {
                    let key = format!("{}gpu-migrate_{}", self.cdi_annotation_prefix, names.join("_"));
                    answer.annotations.insert(key, self.cdi_names(&names).join(","));
                }
                ListStrategy::CdiCri => {
                    answer
                        .cdi_devices
                        .extend(self.cdi_names(&names).into_iter().map(|name| CdiDevice { name }));
                }
            }
        }
        if self.device_specs {
            answer.devices = device_specs(cards);
        }
        answer.annotations.extend(gpu_manager_annotations(cards, demand));
        // The kubelet keeps the answer: later starts of the agent check by it which card these device IDs belong to.
        let uuids: Vec<&str> = cards.iter().map(|card| card.uuid.as_str()).collect();
        answer.annotations.insert(names::CARD_UUIDS.to_owned(), uuids.join(","));
        answer
    }

    /// Whether CDI names are part of the answer.
    #[must_use]
    pub fn uses_cdi(&self) -> bool {
        self.lists.iter().any(|list| matches!(list, ListStrategy::CdiAnnotations | ListStrategy::CdiCri))
    }

    /// Puts one CDI device of our own in the place of NVIDIA's.
    pub fn put_own_cdi(&self, device: &str, answer: &mut ContainerAllocateResponse) {
        for value in
            answer.annotations.iter_mut().filter(|(key, _)| key.starts_with(&self.cdi_annotation_prefix))
        {
            *value.1 = device.to_owned();
        }
        if !answer.cdi_devices.is_empty() {
            answer.cdi_devices = vec![CdiDevice { name: device.to_owned() }];
        }
    }

    fn cdi_names(&self, names: &[String]) -> Vec<String> {
        names.iter().map(|name| format!("{}={name}", self.cdi_kind)).collect()
    }
}

/// What an answer that was given to a container says by number, and means other cards by now: minor and NVML's numbers change with the
/// cards that are found at boot, and the kubelet keeps the answer for as long as the pod is there. `None` if it names these cards.
#[must_use]
pub fn outdated(answer: &ContainerAllocateResponse, cards: &[&Card]) -> Option<String> {
    let devices = answer.devices.iter().map(|device| device.host_path.as_str());
    let minors = devices.filter(|path| path.strip_prefix("/dev/nvidia").is_some_and(is_number));
    let current: Vec<String> = cards.iter().map(|card| format!("/dev/nvidia{}", card.minor)).collect();
    if let Some(path) = minors.into_iter().find(|path| !current.iter().any(|now| now == path)) {
        return Some(format!("the device node {path}"));
    }
    let listed = answer.envs.get(names::NVIDIA_VISIBLE_DEVICES).into_iter().flat_map(|list| list.split(','));
    let mounts =
        answer.mounts.iter().filter_map(|mount| mount.container_path.strip_prefix(VOLUME_MOUNT_ROOT));
    let mounts = mounts.filter_map(|path| path.strip_prefix('/'));
    let mut numbers = listed.chain(mounts).filter(|name| is_number(name));
    let number = numbers.find(|name| !cards.iter().any(|card| card.nvml_index.to_string() == *name))?;
    Some(format!("the card number {number}"))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// The nodes of these cards and of the driver.
fn device_specs(cards: &[&Card]) -> Vec<DeviceSpec> {
    let own = cards.iter().map(|card| format!("/dev/nvidia{}", card.minor));
    let shared = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"].map(str::to_owned);
    own.chain(shared)
        .map(|path| DeviceSpec { host_path: path.clone(), container_path: path, permissions: "rwm".into() })
        .collect()
}

/// Container annotations that gpu-manager writes (`pkg/types/types.go`) and its client side reads.
fn gpu_manager_annotations(cards: &[&Card], demand: &Demand) -> BTreeMap<String, String> {
    let nodes = cards.iter().map(|card| format!("/dev/nvidia{}", card.minor)).collect::<Vec<_>>().join(",");
    BTreeMap::from([
        (names::VCUDA_DEVICE.to_owned(), nodes),
        ("tencent.com/vcuda-core".to_owned(), demand.cores.0.to_string()),
        ("tencent.com/vcuda-memory".to_owned(), (demand.blocks.mib() << 20).to_string()),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpu_migrate_model::units::{Blocks, Cores};

    fn answer(style: &AnswerStyle) -> ContainerAllocateResponse {
        let cards = [("GPU-a", 3, 7), ("GPU-b", 5, 0)].map(|(uuid, minor, nvml_index)| Card {
            uuid: uuid.into(),
            minor,
            nvml_index,
            ..Card::default()
        });
        let demand = Demand { cores: Cores(200), blocks: Blocks(80), legacy: 0 };
        style.answer(&[&cards[0], &cards[1]], &demand)
    }

    #[test]
    fn the_variable_lists_the_cards_by_uuid_or_number() {
        let uuid = answer(&AnswerStyle::default());
        assert_eq!(uuid.envs["NVIDIA_VISIBLE_DEVICES"], "GPU-a,GPU-b");
        assert_eq!(uuid.annotations["tencent.com/vcuda-device"], "/dev/nvidia3,/dev/nvidia5");
        assert_eq!(uuid.annotations["tencent.com/vcuda-memory"], "21474836480");
        let index = answer(&AnswerStyle { ids: IdStrategy::Index, ..AnswerStyle::default() });
        assert_eq!(index.envs["NVIDIA_VISIBLE_DEVICES"], "7,0", "NVML's numbers, not the minor ones");
    }

    #[test]
    fn mounts_and_cdi_names_have_the_same_cards() {
        let lists = vec![ListStrategy::VolumeMounts, ListStrategy::CdiAnnotations, ListStrategy::CdiCri];
        let all = answer(&AnswerStyle { lists, device_specs: true, ..AnswerStyle::default() });
        assert_eq!(all.mounts[1].container_path, "/var/run/nvidia-container-devices/GPU-b");
        assert_eq!(
            all.annotations["cdi.k8s.io/gpu-migrate_GPU-a_GPU-b"],
            "nvidia.com/gpu=GPU-a,nvidia.com/gpu=GPU-b"
        );
        assert_eq!(all.cdi_devices[0].name, "nvidia.com/gpu=GPU-a");
        assert_eq!(all.devices[0].host_path, "/dev/nvidia3");
        assert_eq!(all.devices.len(), 5);
    }

    #[test]
    fn an_answer_by_numbers_is_outdated_when_the_cards_have_others() {
        let card = |uuid: &str, number: u32| Card {
            uuid: uuid.into(),
            minor: number,
            nvml_index: number,
            ..Card::default()
        };
        let before = [&card("GPU-a", 2), &card("GPU-b", 3)];
        let after = [&card("GPU-a", 1), &card("GPU-b", 2)];
        let style =
            |ids, device_specs, lists| AnswerStyle { ids, device_specs, lists, ..AnswerStyle::default() };
        for (style, what) in [
            (style(IdStrategy::Uuid, true, vec![ListStrategy::Envvar]), "the device node /dev/nvidia3"),
            (style(IdStrategy::Index, false, vec![ListStrategy::Envvar]), "the card number 3"),
            (style(IdStrategy::Index, false, vec![ListStrategy::VolumeMounts]), "the card number 3"),
        ] {
            let answer = style.answer(&before, &Demand::NONE);
            assert_eq!(outdated(&answer, &before), None);
            assert_eq!(outdated(&answer, &after).as_deref(), Some(what), "{style:?}");
        }
        let by_uuid = AnswerStyle::default().answer(&before, &Demand::NONE);
        assert_eq!(outdated(&by_uuid, &after), None);
    }
}
