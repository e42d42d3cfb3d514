//! NVIDIA's Multi-Process Service: the control daemon on the host, its limits by environment.
//!
//! `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` bounds compute and `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT` memory, by the device's number in the
//! container (CUDA Multi-Process Service documentation).

use std::path::PathBuf;

use super::{Isolation, Share};
use gpu_migrate_kubelet_api::deviceplugin::{ContainerAllocateResponse, Mount};

/// Where the container finds the daemon.
const PIPE: &str = "/mps/pipe";

/// The strategy `mps`.
#[derive(Debug)]
pub struct Mps {
    root: PathBuf,
}

impl Mps {
    /// With the control daemon's `pipe` and `shm` below `root`.
    #[must_use]
    pub fn new(root: PathBuf) -> Self {
        Self { root }
    }
}

impl Isolation for Mps {
    fn name(&self) -> &'static str {
        "mps"
    }

    fn shape(&self, share: &Share<'_>, answer: &mut ContainerAllocateResponse) {
        if !share.is_part() {
            return;
        }
        let memory: Vec<String> = share
            .cards
            .iter()
            .enumerate()
            .map(|(number, _)| format!("{number}={}M", share.demand.blocks.mib()))
            .collect();
        answer.envs.extend([
            ("CUDA_MPS_PIPE_DIRECTORY".to_owned(), PIPE.to_owned()),
            ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE".to_owned(), share.demand.cores.0.to_string()),
            ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT".to_owned(), memory.join(",")),
        ]);
        let mount = |from: &str, to: &str| Mount {
            host_path: self.root.join(from).display().to_string(),
            container_path: to.to_owned(),
            read_only: false,
        };
        answer.mounts.extend([mount("pipe", PIPE), mount("shm", "/dev/shm")]);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::shaped;
    use super::*;

    #[test]
    fn a_part_is_limited_and_a_whole_card_is_not() {
        let mps = Mps::new("/run/nvidia/mps".into());
        let answer = shaped(&mps, 30);
        assert_eq!(answer.envs["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"], "30");
        assert_eq!(answer.envs["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"], "0=2048M");
        assert_eq!(answer.mounts[0].host_path, "/run/nvidia/mps/pipe");
        assert_eq!(shaped(&mps, 100), ContainerAllocateResponse::default());
    }
}
