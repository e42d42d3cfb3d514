//! Writes a container image as an OCI layout in a tar (image-spec 1.1), as `ctr images import`, `docker load` and
//! `skopeo copy oci-archive:` read it.
//!
//! Nothing of the machine gets into it: entries are sorted, belong to root and carry the time that the caller names.

use std::{collections::BTreeMap, fmt::Write as _, io::Write as _};

use anyhow::{Context, Result, bail};
use flate2::{Compression, write::GzEncoder};
use jiff::Timestamp;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

/// The files of a layer by their path, without a leading slash. Folders above a file need not be named.
pub type Tree = BTreeMap<String, Entry>;

/// What is at a path. It belongs to root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    Folder {
        mode: u32,
    },
    File {
        mode: u32,
        content: Vec<u8>,
    },
    /// A symbolic link, with its target.
    Link(String),
}

/// A gzipped tar of files.
#[derive(Clone, Debug)]
pub struct Layer {
    blob: Vec<u8>,
    /// The digest of the tar before compression.
    diff_id: String,
}

impl Layer {
    /// `created` is the modification time of all files.
    ///
    /// # Errors
    /// If a path is longer than a tar can have, or not one.
    pub fn new(tree: &Tree, created: Timestamp) -> Result<Self> {
        let mut all = tree.clone();
        for path in tree.keys() {
            for (end, _) in path.match_indices('/') {
                all.entry(path[..end].to_owned()).or_insert(Entry::Folder { mode: 0o755 });
            }
        }
        let mtime = u64::try_from(created.as_second()).context("a file cannot be older than 1970")?;
        let mut tar = Builder::new(Vec::new());
        for (path, entry) in &all {
            append(&mut tar, path, entry, mtime).with_context(|| format!("cannot add {path} to a layer"))?;
        }
        let tar = tar.into_inner()?;
        let mut zipped = GzEncoder::new(Vec::new(), Compression::default());
        zipped.write_all(&tar)?;
        Ok(Self { blob: zipped.finish()?, diff_id: digest(&tar) })
    }

    /// The gzipped tar: an archive as well as a layer.
    #[must_use]
    pub fn gzip(&self) -> &[u8] {
        &self.blob
    }
}

/// An image: what it is called, what it consists of, what it runs.
#[derive(Clone, Debug)]
pub struct Image<'a> {
    /// `registry/repository:tag`.
    pub name: &'a str,
    /// Go's name of it, such as `amd64`.
    pub architecture: &'a str,
    pub created: Timestamp,
    pub layers: Vec<&'a Layer>,
    pub entrypoint: Vec<&'a str>,
    pub arguments: Vec<&'a str>,
    /// `NAME=value`, besides the `PATH`.
    pub environment: Vec<&'a str>,
    /// `uid:gid`, or empty for root.
    pub user: &'a str,
    pub labels: BTreeMap<&'a str, String>,
}

/// A written image.
#[derive(Clone, Debug)]
pub struct Layout {
    /// The manifest's digest, by which a registry knows the image.
    pub digest: String,
    /// The OCI layout.
    pub tar: Vec<u8>,
}

impl Image<'_> {
    /// # Errors
    /// If the name has no tag.
    pub fn layout(&self) -> Result<Layout> {
        let Some((_, tag)) = self.name.rsplit_once(':').filter(|(_, tag)| !tag.contains('/')) else {
            bail!("{} is no name of an image with a tag, such as registry/name:1.0", self.name);
        };
        let path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/";
        let environment: Vec<&str> = [path].into_iter().chain(self.environment.iter().copied()).collect();
        let config = json!({
            "created": self.created.to_string(),
            "architecture": self.architecture,
            "os": "linux",
            "config": {
                "User": self.user,
                "Env": environment,
                "Entrypoint": self.entrypoint,
                "Cmd": self.arguments,
                "WorkingDir": "/",
                "Labels": self.labels,
            },
            "rootfs": {"type": "layers", "diff_ids": self.layers.iter().map(|layer| &layer.diff_id).collect::<Vec<_>>()},
        })
        .to_string();
        let layer = |layer: &&Layer| descriptor("application/vnd.oci.image.layer.v1.tar+gzip", &layer.blob);
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor("application/vnd.oci.image.config.v1+json", config.as_bytes()),
            "layers": self.layers.iter().map(layer).collect::<Vec<_>>(),
            "annotations": self.labels,
        })
        .to_string();
        let mut entry = descriptor("application/vnd.oci.image.manifest.v1+json", manifest.as_bytes());
        // The first is containerd's and Docker's, the second is the specification's.
        entry["annotations"] =
            json!({"io.containerd.image.name": self.name, "org.opencontainers.image.ref.name": tag});
        let index = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [entry],
        })
        .to_string();

        let mut files: BTreeMap<String, &[u8]> = BTreeMap::from([
            ("oci-layout".to_owned(), br#"{"imageLayoutVersion":"1.0.0"}"#.as_slice()),
            ("index.json".to_owned(), index.as_bytes()),
        ]);
        let blobs = self.layers.iter().map(|layer| layer.blob.as_slice());
        for blob in blobs.chain([config.as_bytes(), manifest.as_bytes()]) {
            files.insert(format!("blobs/{}", digest(blob).replace(':', "/")), blob);
        }
        let mut tar = Builder::new(Vec::new());
        for (path, content) in files {
            let mut header = header(EntryType::Regular, 0o644, 0);
            header.set_size(content.len() as u64);
            tar.append_data(&mut header, &path, content)?;
        }
        Ok(Layout { digest: digest(manifest.as_bytes()), tar: tar.into_inner()? })
    }
}

/// Go's name of the machine that this program was built for.
#[must_use]
pub fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// `sha256:` and the hex digits, as registries name content.
#[must_use]
pub fn digest(blob: &[u8]) -> String {
    let mut text = String::from("sha256:");
    for byte in Sha256::digest(blob) {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

fn append(tar: &mut Builder<Vec<u8>>, path: &str, entry: &Entry, mtime: u64) -> Result<()> {
    match entry {
        Entry::Folder { mode } => {
            let mut header = header(EntryType::Directory, *mode, mtime);
            tar.append_data(&mut header, format!("{path}/"), std::io::empty())?;
        }
        Entry::File { mode, content } => {
            let mut header = header(EntryType::Regular, *mode, mtime);
            header.set_size(content.len() as u64);
            tar.append_data(&mut header, path, content.as_slice())?;
        }
        Entry::Link(target) => {
            tar.append_link(&mut header(EntryType::Symlink, 0o777, mtime), path, target)?;
        }
    }
    Ok(())
}

fn header(kind: EntryType, mode: u32, mtime: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_mtime(mtime);
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(0);
    header
}

fn descriptor(media_type: &str, blob: &[u8]) -> Value {
    json!({"mediaType": media_type, "digest": digest(blob), "size": blob.len()})
}
