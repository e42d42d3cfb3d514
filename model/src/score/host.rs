//! CPU and memory of a node. Whether they are enough is kube-scheduler's to say; scores look at what would be left.

use k8s_openapi::api::core::v1::PodSpec;

use crate::ask::{reserved, view_of};
use crate::quantity::Quantity;
use crate::view::json::{Amount, Map};
use crate::view::{CountedResources, ResourcesView, SpecView};

/// CPU and memory: what a node has left, or what a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostResources {
    /// Thousandths of a CPU core; `u32::MAX`: not looked at.
    pub cpu_milli: u32,
    /// Main memory in MiB; `u32::MAX`: not looked at.
    pub memory_mib: u32,
}

/// Not looked at.
impl Default for HostResources {
    fn default() -> Self {
        Self::UNLIMITED
    }
}

/// Leading binary digits that scores look at: steps of a quarter at most.
const DIGITS: u32 = 3;

impl HostResources {
    /// Needs nothing.
    pub const NONE: Self = Self { cpu_milli: 0, memory_mib: 0 };
    /// Of a node whose CPU and memory are not looked at: never used up.
    pub const UNLIMITED: Self = Self { cpu_milli: u32::MAX, memory_mib: u32::MAX };

    /// What the scheduler reserves for a pod of this spec: as [`crate::ask::PodAsk::effective`], or what the pod as a whole requests
    /// (KEP-2837), and the overhead. What is no quantity counts as nothing.
    #[must_use]
    pub fn requested<R>(spec: &SpecView<'_, R>) -> Self {
        let containers = spec.all_containers().map(|(place, container)| {
            (place.kind(container), Self::request(container.resources.as_ref(), Self::NONE))
        });
        let sum = reserved(containers, Self::NONE, Self::plus, Self::larger);
        Self::request(spec.resources.as_ref(), sum).plus(Self::read(&spec.overhead, Self::NONE))
    }

    /// The same of a typed spec.
    #[must_use]
    pub fn requested_by(spec: &PodSpec) -> Self {
        Self::requested(&view_of(spec))
    }

    /// CPU and memory of a list of resources, each `or` where it is not in it.
    #[must_use]
    pub fn read(of: &Resources<'_>, or: Self) -> Self {
        Self {
            cpu_milli: read(of, "cpu").map_or(or.cpu_milli, |cpu| most(cpu.milli())),
            memory_mib: read(of, "memory").map_or(or.memory_mib, |bytes| most(bytes.ceil() >> 20)),
        }
    }

    /// A request is the limit where it is left out, as the API server has it.
    fn request(of: Option<&ResourcesView<'_>>, or: Self) -> Self {
        of.map_or(or, |of| Self::read(&of.requests, Self::read(&of.limits, or)))
    }

    /// Whether `need` is left.
    #[must_use]
    pub const fn has(self, need: Self) -> bool {
        self.cpu_milli >= need.cpu_milli && self.memory_mib >= need.memory_mib
    }

    /// What is left after `need` was taken; what is not looked at stays so.
    #[must_use]
    pub const fn less(self, need: Self) -> Self {
        const fn less(left: u32, need: u32) -> u32 {
            if left == u32::MAX { left } else { left.saturating_sub(need) }
        }
        Self {
            cpu_milli: less(self.cpu_milli, need.cpu_milli),
            memory_mib: less(self.memory_mib, need.memory_mib),
        }
    }

    /// Both together.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            cpu_milli: self.cpu_milli.saturating_add(other.cpu_milli),
            memory_mib: self.memory_mib.saturating_add(other.memory_mib),
        }
    }

    fn larger(self, other: Self) -> Self {
        Self {
            cpu_milli: self.cpu_milli.max(other.cpu_milli),
            memory_mib: self.memory_mib.max(other.memory_mib),
        }
    }

    /// What is left, a little less of it: of thousands of nodes many then have the same left, and need be scored once.
    #[must_use]
    pub const fn rounded_down(self) -> Self {
        Self { cpu_milli: round_down(self.cpu_milli), memory_mib: round_down(self.memory_mib) }
    }

    /// What is needed, a little more of it: there are fewer kinds of requests then.
    #[must_use]
    pub const fn rounded_up(self) -> Self {
        Self { cpu_milli: round_up(self.cpu_milli), memory_mib: round_up(self.memory_mib) }
    }
}

/// The resources of a Node or a container.
pub type Resources<'a> = Map<'a, Amount<'a>, CountedResources>;

fn read(of: &Resources<'_>, name: &str) -> Option<Quantity> {
    of.get(name)?.as_str().parse().ok()
}

fn most(value: i128) -> u32 {
    u32::try_from(value.max(0)).unwrap_or(u32::MAX)
}

const fn step(value: u32) -> u32 {
    1 << (u32::BITS - value.leading_zeros()).saturating_sub(DIGITS)
}

const fn round_down(value: u32) -> u32 {
    if value == u32::MAX { value } else { value - value % step(value) }
}

const fn round_up(value: u32) -> u32 {
    match value.checked_next_multiple_of(step(value)) {
        Some(rounded) => rounded,
        None => u32::MAX,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_pod_reserves_what_the_scheduler_counts() {
        let container = |cpu: &str, memory: &str| json!({"name": "c", "resources": {"requests": {"cpu": cpu, "memory": memory}}});
        let sidecar = |cpu: &str| {
            let mut sidecar = container(cpu, "0");
            sidecar["restartPolicy"] = json!("Always");
            sidecar
        };
        let cases = [
            (json!({"containers": [{"name": "c"}]}), (0, 0)),
            (json!({"containers": [container("1500m", "1Gi"), container("0.5", "512Mi")]}), (2_000, 1_536)),
            (
                json!({"containers": [{"name": "c", "resources": {"limits": {"cpu": "2", "memory": "1Gi"}, "requests": {"cpu": "1"}}}]}),
                (1_000, 1_024),
            ),
            // Each init container alone, with the sidecars before it.
            (
                json!({"containers": [container("1", "1Gi")], "initContainers": [container("4", "64Mi")]}),
                (4_000, 1_024),
            ),
            (
                json!({"containers": [container("1", "0")], "initContainers": [sidecar("2"), container("2", "0")]}),
                (4_000, 0),
            ),
            (
                json!({"containers": [container("1", "0")], "initContainers": [container("2", "0"), sidecar("2")]}),
                (3_000, 0),
            ),
            (
                json!({"containers": [container("1", "1Gi")], "overhead": {"cpu": "250m", "memory": "128Mi"}}),
                (1_250, 1_152),
            ),
            (
                json!({"containers": [container("1", "1Gi")], "resources": {"requests": {"cpu": "3"}}}),
                (3_000, 1_024),
            ),
            (json!({"containers": [container("many", "1")]}), (0, 0)),
        ];
        for (spec, (cpu_milli, memory_mib)) in cases {
            let expected = HostResources { cpu_milli, memory_mib };
            let text = spec.to_string();
            let view: SpecView<'_> = serde_json::from_str(&text).unwrap();
            assert_eq!(HostResources::requested(&view), expected, "{spec}");
            let typed: PodSpec = serde_json::from_value(spec.clone()).unwrap();
            assert_eq!(HostResources::requested_by(&typed), expected, "{spec}");
        }
    }

    #[test]
    fn what_is_not_looked_at_stays_so() {
        let need = HostResources { cpu_milli: 5, memory_mib: 5 };
        assert_eq!(HostResources::UNLIMITED.less(need).rounded_down(), HostResources::UNLIMITED);
        let cpu = HostResources { cpu_milli: 8, ..HostResources::UNLIMITED };
        assert_eq!(cpu.less(need), HostResources { cpu_milli: 3, ..cpu });
    }

    proptest! {
        #[test]
        fn rounding_is_by_a_quarter_at_most(value in any::<u32>(), shift in 0_u32..32) {
            let value = value >> shift;
            let (down, up) = (round_down(value), round_up(value));
            prop_assert!(down <= value && value <= up);
            prop_assert!(value - down <= value / 4 && up - value <= value / 4, "{} {} {}", down, value, up);
            prop_assert_eq!((round_down(down), round_up(up)), (down, up));
        }
    }
}
