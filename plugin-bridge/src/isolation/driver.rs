//! NVIDIA's driver limits a container's memory by its cgroup; nothing is put into the container.
//!
//! NVIDIA's container toolkit sets the limit before the container starts, from these two variables (its hook
//! `apply-cuda-memory-limits`, nvidia-container-toolkit#2075; the limits are in NVIDIA's "MPS v3 Memory Partitioning"). Cores are not
//! limited.

use super::{Isolation, NodeFacts, Share};
use gpu_migrate_kubelet_api::deviceplugin::ContainerAllocateResponse;

/// The strategy `driver`.
#[derive(Debug)]
pub struct Driver {
    node: NodeFacts,
}

impl Driver {
    #[must_use]
    pub const fn new(node: NodeFacts) -> Self {
        Self { node }
    }
}

impl Isolation for Driver {
    fn name(&self) -> &'static str {
        "driver"
    }

    fn obstacle(&self) -> Option<String> {
        match self.node.driver {
            Some((major, _)) if major < 615 => {
                return Some(format!(
                    "memory limits are in drivers from 615, and this one is {major}: update it"
                ));
            }
            None => return Some("NVML does not tell the driver's version, and 615 is needed".to_owned()),
            Some(_) => {}
        }
        if !self.node.cgroup_v2 {
            return Some("memory limits of the driver need cgroup v2, and this node has v1".to_owned());
        }
        self.node.cuda_before((13, 4))
    }

    fn shape(&self, share: &Share<'_>, answer: &mut ContainerAllocateResponse) {
        if !share.is_part() {
            return;
        }
        // MiB. All of it is guaranteed too: shares never add up to more than the card.
        let limit = share.demand.blocks.mib().to_string();
        for variable in ["NVIDIA_GPU_MEMORY_REQUEST", "NVIDIA_GPU_MEMORY_LIMIT"] {
            answer.envs.insert(variable.to_owned(), limit.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::shaped;
    use super::*;

    #[test]
    fn a_part_has_its_memory_and_a_whole_card_no_limit() {
        let driver = Driver::new(NodeFacts::default());
        let answer = shaped(&driver, 30);
        assert_eq!(answer.envs["NVIDIA_GPU_MEMORY_LIMIT"], "2048");
        assert_eq!(answer.envs["NVIDIA_GPU_MEMORY_REQUEST"], "2048");
        assert_eq!(shaped(&driver, 100), ContainerAllocateResponse::default());
    }

    #[test]
    fn it_needs_a_driver_that_can() {
        let able =
            NodeFacts { driver: Some((615, 71)), cuda: Some((13, 4)), cgroup_v2: true, host_pids: false };
        assert_eq!(Driver::new(able).obstacle(), None);
        for (node, expected) in [
            (NodeFacts { driver: Some((580, 0)), ..able }, "this one is 580"),
            (NodeFacts { driver: None, ..able }, "615 is needed"),
            (NodeFacts { cuda: Some((13, 0)), ..able }, "13.4 is needed"),
            (NodeFacts { cgroup_v2: false, ..able }, "cgroup v2"),
        ] {
            let why = Driver::new(node).obstacle().unwrap_or_default();
            assert!(why.contains(expected), "{why}");
        }
    }
}
