//! NVIDIA's Multi-Process Service: the control daemon on the host, its limits by environment.
//!
//! `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` bounds compute and `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT` memory (since CUDA 11.5), by the device's
//! number in the container (CUDA Multi-Process Service documentation). The owner runs the daemon; without it CUDA programs in a
//! container run on the card by themselves, and without limits.

use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use super::{Isolation, NodeFacts, Share, mount};
use gpu_migrate_kubelet_api::deviceplugin::ContainerAllocateResponse;

/// Where the container finds the daemon.
const PIPE: &str = "/mps/pipe";

/// The strategy `mps`.
#[derive(Debug)]
pub struct Mps {
    root: PathBuf,
    node: NodeFacts,
}

impl Mps {
    /// With the control daemon's `pipe` and `shm` below `root`.
    #[must_use]
    pub const fn new(root: PathBuf, node: NodeFacts) -> Self {
        Self { root, node }
    }
}

impl Isolation for Mps {
    fn name(&self) -> &'static str {
        "mps"
    }

    fn obstacle(&self) -> Option<String> {
        let why = self.node.cuda_before((11, 5));
        let why = why.or_else(|| {
            let shm = self.root.join("shm");
            (!shm.is_dir()).then(|| {
                format!("{} is no directory: the control daemon's /dev/shm belongs there", shm.display())
            })
        });
        why.or_else(|| {
            let control = self.root.join("pipe/control");
            let refused = match UnixStream::connect(&control) {
                // It listens, for another kind of connection than a stream.
                Ok(_) => None,
                Err(error) if error.raw_os_error() == Some(EPROTOTYPE) => None,
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => Some("it has ended".to_owned()),
                Err(error) => Some(error.to_string()),
            };
            let path = control.display();
            refused.map(|why| {
                format!(
                    "no MPS control daemon answers at {path} ({why}): start nvidia-cuda-mps-control there"
                )
            })
        })
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
        answer.mounts.extend([
            mount(&self.root.join("pipe"), PIPE, false),
            mount(&self.root.join("shm"), "/dev/shm", false),
        ]);
    }
}

/// Of `connect`: something listens, with sockets of another type.
const EPROTOTYPE: i32 = 91;

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixDatagram, UnixListener};

    use super::super::tests::shaped;
    use super::*;

    #[test]
    fn a_part_is_limited_and_a_whole_card_is_not() {
        let mps = Mps::new("/run/nvidia/mps".into(), NodeFacts::default());
        let answer = shaped(&mps, 30);
        assert_eq!(answer.envs["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"], "30");
        assert_eq!(answer.envs["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"], "0=2048M");
        assert_eq!(answer.mounts[0].host_path, "/run/nvidia/mps/pipe");
        assert_eq!(shaped(&mps, 100), ContainerAllocateResponse::default());
    }

    #[test]
    fn it_needs_a_control_daemon_that_lives() {
        let root = tempfile::tempdir().unwrap();
        let with = |cuda| Mps::new(root.path().into(), NodeFacts { cuda, ..NodeFacts::default() });
        let mps = with(Some((12, 4)));
        let why = || mps.obstacle().unwrap_or_default();
        assert!(why().contains("shm is no directory"), "{}", why());
        std::fs::create_dir_all(root.path().join("shm")).unwrap();
        std::fs::create_dir_all(root.path().join("pipe")).unwrap();
        assert!(why().contains("no MPS control daemon answers"), "{}", why());
        let daemon = UnixListener::bind(root.path().join("pipe/control")).unwrap();
        assert_eq!(why(), "");
        drop(daemon);
        std::fs::remove_file(root.path().join("pipe/control")).unwrap();
        let daemon = UnixDatagram::bind(root.path().join("pipe/control")).unwrap();
        assert_eq!(why(), "", "the daemon's sockets are no streams");
        drop(daemon);
        assert!(why().contains("it has ended"), "{}", why());
        let old = with(Some((11, 4)));
        assert!(old.obstacle().is_some_and(|why| why.contains("11.5 is needed")));
    }
}
