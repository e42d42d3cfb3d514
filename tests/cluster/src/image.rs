//! The image of all pods and sandboxes: an OCI layout in a tar, with one static binary in one layer. No registry is asked.

use std::{fmt::Write as _, fs, path::Path};

use anyhow::{Context, Result};
use serde_json::json;
use sha2::{Digest, Sha256};

/// What pods call it.
pub const WORK_IMAGE: &str = "gpu-migrate.test/work:1";
/// What containerd starts as a sandbox: the same image under a name of its own, since its command differs.
pub const PAUSE_IMAGE: &str = "gpu-migrate.test/pause:1";

/// The tar of an image that runs `/work <verb>`.
pub fn tarball(work: &Path, name: &str, verb: &str) -> Result<Vec<u8>> {
    let binary = fs::read(work).with_context(|| format!("cannot read {}", work.display()))?;
    let mut layer = tar::Builder::new(Vec::new());
    append(&mut layer, "work", 0o755, &binary)?;
    let mut link = tar::Header::new_gnu();
    link.set_entry_type(tar::EntryType::Symlink);
    link.set_size(0);
    link.set_mode(0o777);
    layer
        .append_link(&mut link, "kube-scheduler", "work")
        .context("cannot add kube-scheduler to the image")?;
    let layer = layer.into_inner()?;

    let config = json!({
        "architecture": architecture(), "os": "linux",
        "config": {"Entrypoint": ["/work"], "Cmd": [verb], "Env": ["PATH=/"]},
        "rootfs": {"type": "layers", "diff_ids": [digest(&layer)]},
    })
    .to_string();
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": descriptor("application/vnd.oci.image.config.v1+json", config.as_bytes()),
        "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", &layer)],
    })
    .to_string();
    let mut entry = descriptor("application/vnd.oci.image.manifest.v1+json", manifest.as_bytes());
    entry["annotations"] = json!({"io.containerd.image.name": name});
    let index = json!({"schemaVersion": 2, "manifests": [entry]}).to_string();

    let mut image = tar::Builder::new(Vec::new());
    append(&mut image, "oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    append(&mut image, "index.json", 0o644, index.as_bytes())?;
    for blob in [layer.as_slice(), config.as_bytes(), manifest.as_bytes()] {
        append(&mut image, &format!("blobs/{}", digest(blob).replace(':', "/")), 0o644, blob)?;
    }
    Ok(image.into_inner()?)
}

fn append(tar: &mut tar::Builder<Vec<u8>>, path: &str, mode: u32, content: &[u8]) -> Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_size(content.len() as u64);
    header.set_mode(mode);
    tar.append_data(&mut header, path, content).with_context(|| format!("cannot add {path} to the image"))
}

fn descriptor(media_type: &str, blob: &[u8]) -> serde_json::Value {
    json!({"mediaType": media_type, "digest": digest(blob), "size": blob.len()})
}

fn digest(blob: &[u8]) -> String {
    let mut text = String::from("sha256:");
    for byte in Sha256::digest(blob) {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// Go's name for what we run on.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
