//! The cards' device nodes in `/dev`, as NVIDIA's driver makes them: `nvidia<minor>`, with the minor numbers of the cards that are present.
//!
//! No driver is behind them. Their device number names the card of the NVML stand-in, whatever minor number it has at the moment: a runtime
//! makes a container's node with the same device number, so that the observer sees which card a container really has.

use std::{
    fs, io,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use nix::sys::stat::{Mode, SFlag, major, makedev, minor, mknod};

use crate::{layout::Layout, stage::CARDS};

/// The major number of NVIDIA's character devices.
const MAJOR: u64 = 195;
/// The minor number of `/dev/nvidiactl`.
const CONTROL: u64 = 255;
/// What a container needs besides its cards' nodes. The second has a major number of its own, given out by the kernel.
const OF_DRIVER: [(&str, u64); 2] = [("/dev/nvidiactl", CONTROL), ("/dev/nvidia-uvm", CONTROL - 1)];

/// The machine's nodes, removed when this is dropped.
#[derive(Debug)]
pub struct DeviceNodes(Vec<PathBuf>);

impl DeviceNodes {
    /// Makes the nodes of the cards that are present.
    ///
    /// # Errors
    /// The machine has cards of its own, or a node cannot be made.
    pub fn make(layout: &Layout) -> Result<Self> {
        let mut made = Self(Vec::new());
        made.make_all(layout)?;
        Ok(made)
    }

    /// Makes them anew: after a boot other cards may be present.
    ///
    /// # Errors
    /// As of [`DeviceNodes::make`].
    pub fn renew(&mut self, layout: &Layout) -> Result<()> {
        self.remove();
        self.make_all(layout)
    }

    fn make_all(&mut self, layout: &Layout) -> Result<()> {
        let present = (0..CARDS).filter(|card| !layout.nvml_faults().join(format!("absent-{card}")).exists());
        for (minor, card) in present.enumerate() {
            self.make_one(&format!("/dev/nvidia{minor}"), card)?;
        }
        OF_DRIVER.iter().try_for_each(|(path, number)| self.make_one(path, *number))
    }

    fn make_one(&mut self, path: &str, number: u64) -> Result<()> {
        // What a killed run left is replaced; a driver's node of that name has another number, or a driver behind it.
        ensure!(
            !Path::new("/proc/driver/nvidia").exists(),
            "this machine has an NVIDIA driver: {path} is its own"
        );
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {path}"));
            }
            _ => {}
        }
        mknod(path, SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(MAJOR, number))
            .with_context(|| format!("cannot make {path}"))?;
        self.0.push(path.into());
        Ok(())
    }

    fn remove(&mut self) {
        for path in std::mem::take(&mut self.0) {
            let _ = fs::remove_file(path);
        }
    }
}

impl Drop for DeviceNodes {
    fn drop(&mut self) {
        self.remove();
    }
}

/// The cards of the NVML stand-in whose nodes are in the `dev` folder of a container.
pub(crate) fn cards_in(dev: &Path) -> Vec<u64> {
    let mut cards: Vec<u64> = fs::read_dir(dev)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"nvidia"))
        .filter_map(|entry| entry.metadata().ok())
        .filter(|metadata| metadata.file_type().is_char_device() && major(metadata.rdev()) == MAJOR)
        .map(|metadata| minor(metadata.rdev()))
        .filter(|number| *number < CARDS)
        .collect();
    cards.sort_unstable();
    cards
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_known_by_their_device_number() {
        if !nix::unistd::geteuid().is_root() {
            let why = "only root makes device nodes";
            return gpu_migrate_tests::skipped_test("cards_are_known_by_their_device_number", why);
        }
        let folder = std::env::temp_dir().join(format!("gpu-migrate-nodes-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        for (name, number) in [("nvidia0", 3), ("nvidia1", 5), ("nvidiactl", CONTROL), ("other", 4)] {
            let number = makedev(MAJOR, number);
            mknod(&folder.join(name), SFlag::S_IFCHR, Mode::S_IRUSR, number).unwrap();
        }
        fs::write(folder.join("nvidia2"), "").unwrap();
        let found = cards_in(&folder);
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found, [3, 5]);
    }
}
