//! The systems that pods can be converted to, and what a container's cards or share of a card are in their words.
//!
//! gpu-manager's form is served by our own extender and node agent. Of the others the webhook writes the form, and scheduler and nodes are
//! theirs: whole cards and shares are not kept apart card by card there.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::names;
use crate::units::{Blocks, Cores, MIB_PER_BLOCK};

/// The system that converted pods request their shares of.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Target {
    /// gpu-manager's resources, which gpu-migrate serves itself.
    #[default]
    GpuManager,
    /// HAMi: `nvidia.com/gpu` with `nvidia.com/gpumem` and `nvidia.com/gpucores`.
    Hami,
    /// vgpu-manager: `nvidia.com/vgpu-number`, `vgpu-cores` and `vgpu-memory`.
    VgpuManager,
    /// Volcano: `volcano.sh/vgpu-number`, `vgpu-cores` and `vgpu-memory`.
    Volcano,
    /// Koordinator: `koordinator.sh/gpu-core` and `gpu-memory`.
    Koordinator,
    /// KAI: the annotation `gpu-memory`.
    Kai,
    /// qGPU: `tke.cloud.tencent.com/qgpu-core` and `qgpu-memory`.
    Qgpu,
}

/// What one container requests of a target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// Resources and their amounts, in place of those that are replaced.
    pub resources: Vec<(String, u64)>,
    /// Annotations of its pod, which can be about one container alone.
    pub annotations: Vec<(&'static str, String)>,
}

/// How an amount is written.
#[derive(Clone, Copy, Debug)]
struct Amount {
    resource: &'static str,
    /// Bytes in a unit of memory, percent of a card in a unit of compute.
    unit: u64,
    /// A multiple of this is written.
    step: u64,
}

impl Amount {
    /// The least amount that is enough.
    const fn of(&self, value: u64) -> u64 {
        value.div_ceil(self.unit).next_multiple_of(self.step)
    }
}

/// How whole cards are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whole {
    /// As NVIDIA's plugin has them: nothing changes.
    Legacy,
    /// By the resource that counts cards alone.
    Count,
    /// As shares, cores and memory of all cards.
    Sums,
}

/// What is known of a target.
#[derive(Clone, Copy, Debug)]
struct Form {
    name: &'static str,
    whole: Whole,
    /// Counts cards, beside cores and memory of each; `None` where those are sums of all cards.
    count: Option<&'static str>,
    cores: Option<Amount>,
    memory: Option<Amount>,
    /// Annotation with the MiB of the pod's one container that has a share.
    memory_annotation: Option<&'static str>,
    scheduler: Option<&'static str>,
    /// Labels that its pods need.
    labels: &'static [(&'static str, &'static str)],
}

const MIB: u64 = 1 << 20;

const fn cores(resource: &'static str, step: u64) -> Option<Amount> {
    Some(Amount { resource, unit: 1, step })
}

const fn memory(resource: &'static str, unit: u64) -> Option<Amount> {
    Some(Amount { resource, unit, step: 1 })
}

/// Forms as in each system's code or documents of 2026.
const fn form(target: Target) -> Form {
    const NONE: Form = Form {
        name: "",
        whole: Whole::Legacy,
        count: None,
        cores: None,
        memory: None,
        memory_annotation: None,
        scheduler: None,
        labels: &[],
    };
    match target {
        Target::GpuManager => Form {
            name: "gpu-manager",
            whole: Whole::Sums,
            cores: cores("tencent.com/vcuda-core", 1),
            memory: memory("tencent.com/vcuda-memory", MIB_PER_BLOCK * MIB),
            scheduler: Some(names::SCHEDULER),
            ..NONE
        },
        // pkg/device/nvidia/device.go. Its webhook sets scheduler and RuntimeClass.
        Target::Hami => Form {
            name: "HAMi",
            count: Some("nvidia.com/gpu"),
            cores: cores("nvidia.com/gpucores", 1),
            memory: memory("nvidia.com/gpumem", MIB),
            ..NONE
        },
        // Its README and pkg/util/consts.go; its webhook sets the scheduler where that is the default.
        Target::VgpuManager => Form {
            name: "vgpu-manager",
            whole: Whole::Count,
            count: Some("nvidia.com/vgpu-number"),
            cores: cores("nvidia.com/vgpu-cores", 1),
            memory: memory("nvidia.com/vgpu-memory", MIB),
            scheduler: Some("vgpu-scheduler"),
            ..NONE
        },
        // docs/user-guide/how_to_use_volcano_vgpu.md.
        Target::Volcano => Form {
            name: "Volcano",
            whole: Whole::Count,
            count: Some("volcano.sh/vgpu-number"),
            cores: cores("volcano.sh/vgpu-cores", 1),
            memory: memory("volcano.sh/vgpu-memory", MIB),
            scheduler: Some("volcano"),
            ..NONE
        },
        // apis/extension/device_share.go.
        Target::Koordinator => Form {
            name: "Koordinator",
            cores: cores("koordinator.sh/gpu-core", 1),
            memory: memory("koordinator.sh/gpu-memory", 1),
            scheduler: Some("koord-scheduler"),
            labels: &[("koordinator.sh/gpu-isolation-provider", "HAMi-core")],
            ..NONE
        },
        // docs/gpu-sharing: a pod has one container with a share, and compute is not limited.
        Target::Kai => Form {
            name: "KAI",
            memory_annotation: Some(names::KAI_MEMORY),
            scheduler: Some("kai-scheduler"),
            ..NONE
        },
        // tencentcloud.com/document/product/457/65734: steps of 5 % and 1 GB.
        Target::Qgpu => Form {
            name: "qGPU",
            whole: Whole::Sums,
            cores: cores("tke.cloud.tencent.com/qgpu-core", 5),
            memory: memory("tke.cloud.tencent.com/qgpu-memory", 1024 * MIB),
            ..NONE
        },
    }
}

impl Target {
    /// Every one.
    pub const ALL: [Self; 7] = [
        Self::GpuManager,
        Self::Hami,
        Self::VgpuManager,
        Self::Volcano,
        Self::Koordinator,
        Self::Kai,
        Self::Qgpu,
    ];

    /// Its name, for people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        form(self).name
    }

    /// Whether gpu-migrate's own extender and node agent serve it.
    #[must_use]
    pub const fn is_ours(&self) -> bool {
        matches!(self, Self::GpuManager)
    }

    /// The scheduler that places its pods; `None` where its own webhook sets it, or the default scheduler does.
    #[must_use]
    pub const fn scheduler(self) -> Option<&'static str> {
        form(self).scheduler
    }

    /// Labels that a pod with a share needs.
    #[must_use]
    pub const fn labels(self) -> &'static [(&'static str, &'static str)] {
        form(self).labels
    }

    /// The resources by which a container that was converted is known: those of shares, not of whole cards.
    pub fn share_resources(self) -> impl Iterator<Item = &'static str> {
        let form = form(self);
        let count = form.count.filter(|count| *count != LEGACY);
        [form.cores.map(|amount| amount.resource), form.memory.map(|amount| amount.resource), count]
            .into_iter()
            .flatten()
    }

    /// The annotation by which a pod with a share is known, where no resource says so.
    #[must_use]
    pub const fn share_annotation(self) -> Option<&'static str> {
        form(self).memory_annotation
    }

    /// What a container requests that gets these cores and this memory: a share of one card, or whole cards.
    #[must_use]
    pub fn request(self, share_cores: Cores, share_memory: Blocks) -> Request {
        let form = form(self);
        let counted = |resource: &'static str, cards: u32| Request {
            resources: vec![(resource.to_owned(), u64::from(cards))],
            annotations: Vec::new(),
        };
        match (share_cores.whole_cards(), form.whole) {
            (Some(cards), Whole::Legacy) => return counted(LEGACY, cards),
            (Some(cards), Whole::Count) => return counted(form.count.unwrap_or(LEGACY), cards),
            (Some(_), Whole::Sums) | (None, _) => {}
        }
        let mut request = Request::default();
        let count = form.count.map(|count| (count, 1));
        let amounts = amounts(&form, share_cores, share_memory).filter(|(_, amount)| *amount > 0);
        request
            .resources
            .extend(count.into_iter().chain(amounts).map(|(name, amount)| (name.to_owned(), amount)));
        request.annotations.extend(form.memory_annotation.map(|key| (key, share_memory.mib().to_string())));
        request
    }

    /// The cores and memory that a container has by its request of this system, of which `amount` gives the amount of a resource; `None`
    /// where it requests no share of it. What it does not request is not limited there: of compute it has none to itself, of memory as
    /// much as the card has, so that it counts as the whole card. Several shares count as so many whole cards.
    #[must_use]
    pub fn share(self, amount: impl Fn(&str) -> Option<u64>) -> Option<(Cores, Blocks)> {
        let form = form(self);
        if !self.share_resources().any(|resource| amount(resource).is_some_and(|amount| amount > 0)) {
            return None;
        }
        let of = |unit: Option<Amount>| {
            let unit = unit?;
            Some(amount(unit.resource)?.saturating_mul(unit.unit)).filter(|value| *value > 0)
        };
        let small = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        let count = form.count.and_then(&amount).map_or(1, |count| small(count).max(1));
        let cores = of(form.cores).map(small);
        let blocks = of(form.memory).map(|bytes| Blocks(small(bytes.div_ceil(MIB_PER_BLOCK * MIB)).max(1)));
        let whole = |cards: u32| (Cores(cards.saturating_mul(Cores::CARD.0)), Blocks::default());
        Some(match (cores, blocks) {
            _ if count > 1 => whole(count),
            (Some(cores), _) if cores >= Cores::CARD.0 => whole(cores.div_ceil(Cores::CARD.0)),
            (_, None) => whole(1),
            (cores, Some(blocks)) => (Cores(cores.unwrap_or(1)), blocks),
        })
    }

    /// Limits of a ResourceQuota for so many cards, each of which becomes at most this. Empty where its shares are no resources.
    #[must_use]
    pub fn quota(self, cards: u64, cores_each: Cores, memory_each: Blocks) -> Vec<(&'static str, u64)> {
        let form = form(self);
        let count = form.count.filter(|count| *count != LEGACY).map(|count| (count, cards));
        let amounts = amounts(&form, cores_each, memory_each);
        count.into_iter().chain(amounts.map(|(name, each)| (name, each.saturating_mul(cards)))).collect()
    }
}

/// Cores and memory, by resource.
fn amounts(form: &Form, cores: Cores, memory: Blocks) -> impl Iterator<Item = (&'static str, u64)> + use<> {
    let both = [(form.cores, u64::from(cores.0)), (form.memory, memory.mib().saturating_mul(MIB))];
    both.into_iter().filter_map(|(amount, value)| amount.map(|amount| (amount.resource, amount.of(value))))
}

/// Whole cards, as NVIDIA's plugin serves them.
const LEGACY: &str = "nvidia.com/gpu";

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::Dialect;

    fn written(target: Target, cores: u32, blocks: u32) -> String {
        let request = target.request(Cores(cores), Blocks(blocks));
        let resources = request.resources.iter().map(|(name, amount)| format!("{name}={amount}"));
        let annotations = request.annotations.iter().map(|(key, value)| format!("@{key}={value}"));
        let all = resources.chain(annotations).collect::<Vec<_>>().join(" ");
        all.replace("nvidia.com/", "").replace("tencent.com/", "").replace("volcano.sh/", "")
    }

    #[test]
    fn each_target_has_its_own_words_for_a_share_and_for_whole_cards() {
        for (target, share, one, two) in [
            (
                Target::GpuManager,
                "vcuda-core=33 vcuda-memory=21",
                "vcuda-core=100 vcuda-memory=42",
                "vcuda-core=200 vcuda-memory=84",
            ),
            (Target::Hami, "gpu=1 gpucores=33 gpumem=5376", "gpu=1", "gpu=2"),
            (
                Target::VgpuManager,
                "vgpu-number=1 vgpu-cores=33 vgpu-memory=5376",
                "vgpu-number=1",
                "vgpu-number=2",
            ),
            (
                Target::Volcano,
                "vgpu-number=1 vgpu-cores=33 vgpu-memory=5376",
                "vgpu-number=1",
                "vgpu-number=2",
            ),
            (
                Target::Koordinator,
                "koordinator.sh/gpu-core=33 koordinator.sh/gpu-memory=5637144576",
                "gpu=1",
                "gpu=2",
            ),
            (Target::Kai, "@gpu-memory=5376", "gpu=1", "gpu=2"),
            (
                Target::Qgpu,
                "tke.cloud.qgpu-core=35 tke.cloud.qgpu-memory=6",
                "tke.cloud.qgpu-core=100 tke.cloud.qgpu-memory=11",
                "tke.cloud.qgpu-core=200 tke.cloud.qgpu-memory=21",
            ),
        ] {
            assert_eq!(written(target, 33, 21), share, "{target}");
            assert_eq!(written(target, 100, 42), one, "{target}");
            assert_eq!(written(target, 200, 84), two, "{target}");
        }
    }

    #[test]
    fn a_quota_has_room_for_every_share_that_its_cards_become() {
        for target in Target::ALL {
            for (cores, blocks) in [(1, 1), (33, 21), (50, 40), (99, 317)] {
                let quota = target.quota(3, Cores(cores), Blocks(blocks));
                for (resource, amount) in target.request(Cores(cores), Blocks(blocks)).resources {
                    let limit = quota.iter().find(|(name, _)| *name == resource);
                    assert!(
                        resource == LEGACY || limit.is_some_and(|(_, limit)| *limit >= 3 * amount),
                        "{target} {resource}"
                    );
                }
            }
        }
        assert!(Target::Kai.quota(3, Cores(50), Blocks(4)).is_empty());
    }

    /// What is written for a share is read as that share; what has no share of the system is none.
    #[test]
    fn a_share_is_read_as_it_was_written() {
        for target in Target::ALL.into_iter().filter(|target| *target != Target::Kai) {
            for (cores, blocks) in [(5, 4), (50, 40), (95, 80)] {
                let request = target.request(Cores(cores), Blocks(blocks));
                let amount = |name: &str| {
                    request.resources.iter().find(|(of, _)| of == name).map(|(_, amount)| *amount)
                };
                assert_eq!(target.share(amount), Some((Cores(cores), Blocks(blocks))), "{target}");
            }
            assert_eq!(target.share(|name| (name == "nvidia.com/gpu").then_some(2)), None, "{target}");
        }
        let hami = |resources: &[(&str, u64)]| {
            Target::Hami.share(|name| resources.iter().find(|(of, _)| *of == name).map(|(_, amount)| *amount))
        };
        let memory = ("nvidia.com/gpumem", 1000);
        assert_eq!(hami(&[("nvidia.com/gpu", 1), memory]), Some((Cores(1), Blocks(4))));
        assert_eq!(hami(&[("nvidia.com/gpu", 2), memory]), Some((Cores(200), Blocks(0))));
        assert_eq!(
            hami(&[("nvidia.com/gpu", 1), ("nvidia.com/gpucores", 30)]),
            Some((Cores(100), Blocks(0)))
        );
    }

    #[test]
    fn the_default_targets_words_are_those_of_our_own_dialect() {
        let dialect = Dialect::default();
        let resources: Vec<_> = Target::GpuManager.share_resources().collect();
        assert_eq!(resources, [dialect.cores, dialect.memory]);
        assert_eq!(LEGACY, dialect.legacy);
    }
}
