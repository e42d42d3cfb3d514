//! The image of all pods and sandboxes that are not of ours: one static binary in one layer. No registry is asked.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context, Result};
use gpu_migrate_release::oci::{Entry, Image, Layer, Tree, architecture};
use k8s_openapi::jiff::Timestamp;

/// What pods call it.
pub const WORK_IMAGE: &str = "gpu-migrate.test/work:1";
/// What containerd starts as a sandbox: the same image under a name of its own, since its command differs.
pub const PAUSE_IMAGE: &str = "gpu-migrate.test/pause:1";

/// The tar of an image that runs `/work <verb>`.
pub fn tarball(work: &Path, name: &str, verb: &str) -> Result<Vec<u8>> {
    let content = fs::read(work).with_context(|| format!("cannot read {}", work.display()))?;
    let tree = Tree::from([
        ("work".into(), Entry::File { mode: 0o755, content }),
        ("kube-scheduler".into(), Entry::Link("work".into())),
    ]);
    let layer = Layer::new(&tree, Timestamp::UNIX_EPOCH)?;
    let image = Image {
        name,
        architecture: architecture(),
        created: Timestamp::UNIX_EPOCH,
        layers: vec![&layer],
        entrypoint: vec!["/work"],
        arguments: vec![verb],
        environment: Vec::new(),
        user: "",
        labels: BTreeMap::new(),
    };
    Ok(image.layout()?.tar)
}
