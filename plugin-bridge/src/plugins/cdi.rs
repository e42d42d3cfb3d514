//! CDI specifications of our own: one file for each container, for nodes where nothing else describes the cards.
//!
//! Files are replaced atomically, and removed when their container is gone. They are written at Allocate and again before each start of the
//! container: the folder is in memory, and a reboot may have given the cards other minor numbers.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use gpu_migrate_model::card::Card;
use serde_json::json;

use crate::isolation::safe;
use crate::platform::replace;

/// Kind of the devices in our files.
pub const KIND: &str = "gpu-migrate.io/gpu";
/// Names of our files begin with this.
const PREFIX: &str = "gpu-migrate-";
/// Device nodes that every container needs. Not all drivers have the last.
const OF_DRIVER: [&str; 3] = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"];

#[derive(Clone, Debug)]
pub struct CdiSpecs {
    folder: PathBuf,
}

impl CdiSpecs {
    /// Files in this folder, `/var/run/cdi` by default.
    #[must_use]
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Describes one container's cards as the device `gpu-migrate.io/gpu=<key>`. Returns that name.
    ///
    /// # Errors
    /// The system's; no file or the old file is there then.
    pub fn write(&self, key: &str, cards: &[&Card]) -> std::io::Result<String> {
        let key = safe(key);
        let own = cards.iter().map(|card| format!("/dev/nvidia{}", card.minor));
        // Where the host's device nodes are not to be seen from here, all are there.
        let visible = Path::new(OF_DRIVER[0]).exists();
        let of_driver = OF_DRIVER.iter().filter(|path| !visible || Path::new(path).exists());
        let nodes: Vec<_> = own
            .chain(of_driver.map(ToString::to_string))
            .map(|path| json!({"path": path, "permissions": "rwm"}))
            .collect();
        let spec = json!({
            "cdiVersion": "0.5.0",
            "kind": KIND,
            "devices": [{"name": key, "containerEdits": {"deviceNodes": nodes}}],
        });
        let path = self.folder.join(format!("{PREFIX}{key}.json"));
        replace(&path, spec.to_string().as_bytes(), |_| Ok(()))?;
        Ok(format!("{KIND}={key}"))
    }

    /// Removes the files of containers that are gone: all of ours but those of `current` keys, as far as they were written up to a time.
    pub fn remove_stale(&self, current: &BTreeSet<String>, written_until: SystemTime) {
        let keep: BTreeSet<String> =
            current.iter().map(|key| format!("{PREFIX}{}.json", safe(key))).collect();
        for entry in std::fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let written = entry.metadata().and_then(|metadata| metadata.modified());
            let is_old = written.is_ok_and(|at| at <= written_until);
            if name.starts_with(PREFIX) && !keep.contains(&name) && is_old {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_file_describes_the_cards_and_goes_with_its_container() {
        let folder = tempfile::tempdir().unwrap();
        let specs = CdiSpecs::new(folder.path().into());
        let card = Card { minor: 3, ..Card::default() };
        let name = specs.write("tencent.com/vcuda-core-300", &[&card]).unwrap();
        assert_eq!(name, "gpu-migrate.io/gpu=tencent.com_vcuda-core-300");
        let file = folder.path().join("gpu-migrate-tencent.com_vcuda-core-300.json");
        let spec: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        assert_eq!(spec["devices"][0]["containerEdits"]["deviceNodes"][0]["path"], "/dev/nvidia3");
        std::fs::write(folder.path().join("nvidia.json"), "{}").unwrap();
        let later = SystemTime::now() + Duration::from_secs(60);
        specs.remove_stale(&BTreeSet::from(["tencent.com/vcuda-core-300".to_owned()]), later);
        assert!(file.exists());
        specs.remove_stale(&BTreeSet::new(), SystemTime::UNIX_EPOCH);
        assert!(file.exists(), "its container may be newer than the list");
        specs.remove_stale(&BTreeSet::new(), later);
        assert!(!file.exists() && folder.path().join("nvidia.json").exists());
    }
}
