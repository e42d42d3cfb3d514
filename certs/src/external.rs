//! Certificates that are written into a folder from outside: a Secret mount of cert-manager, or files put there by hand.
//!
//! A Secret mount is changed by swapping the `..data` symlink, so a watch on a file never fires: the folder is watched,
//! and polled behind it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::StreamExt;
use inotify::{Inotify, WatchMask};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use crate::CertError;
use crate::authority::Validity;
use crate::keyring::Bundle;

/// Names of the files, those of a `kubernetes.io/tls` Secret.
pub(crate) const CERTIFICATE: &str = "tls.crt";
pub(crate) const KEY: &str = "tls.key";
pub(crate) const CA: &str = "ca.crt";

/// What was found in the folder.
pub(crate) struct Files {
    pub(crate) chain: Vec<CertificateDer<'static>>,
    pub(crate) key: PrivateKeyDer<'static>,
    pub(crate) validity: Validity,
    pub(crate) bundle: Option<Bundle>,
}

/// Reads certificate, key and, where there is one, CA.
pub(crate) fn read(folder: &Path) -> Result<Files, CertError> {
    let file = |name: &str| {
        let path = folder.join(name);
        std::fs::read(&path).map_err(|e| CertError::file(&path, e))
    };
    let unusable = |name: &str, why: String| CertError::Unusable {
        origin: folder.display().to_string(),
        what: name.into(),
        why,
    };
    let pem = file(CERTIFICATE)?;
    let chain: Vec<_> = CertificateDer::pem_slice_iter(&pem)
        .collect::<Result<_, _>>()
        .map_err(|e| unusable(CERTIFICATE, format!("{e}; expected PEM certificates, the server's first")))?;
    let first = chain
        .first()
        .ok_or_else(|| unusable(CERTIFICATE, "expected a PEM certificate, found none".into()))?;
    let validity = Validity::of(first).map_err(|why| unusable(CERTIFICATE, why))?;
    let key = PrivateKeyDer::from_pem_slice(&file(KEY)?)
        .map_err(|e| unusable(KEY, format!("{e}; expected a PEM private key")))?;
    let bundle = match file(CA) {
        Ok(pem) => Some(Bundle(String::from_utf8_lossy(&pem).into_owned())),
        Err(_) => None,
    };
    Ok(Files { chain, key, validity, bundle })
}

/// Notices changes in a folder: by inotify where that works, at the latest after `poll`.
pub struct FolderWatch {
    folder: PathBuf,
    poll: Duration,
    events: Option<inotify::EventStream<[u8; 4096]>>,
}

impl FolderWatch {
    /// Watches `folder`; where that is not possible, only polls.
    #[must_use]
    pub fn new(folder: &Path, poll: Duration) -> Self {
        Self { events: stream(folder), folder: folder.to_owned(), poll }
    }

    /// Returns when something may have changed.
    pub async fn changed(&mut self) {
        let Some(events) = &mut self.events else {
            tokio::time::sleep(self.poll).await;
            self.events = stream(&self.folder);
            return;
        };
        match tokio::time::timeout(self.poll, events.next()).await {
            // Several files change together: wait for the others.
            Ok(Some(Ok(_))) => tokio::time::sleep(Duration::from_millis(50)).await,
            Ok(_) => self.events = None,
            Err(_) => {}
        }
    }
}

fn stream(folder: &Path) -> Option<inotify::EventStream<[u8; 4096]>> {
    let inotify = Inotify::init().ok()?;
    let mask = WatchMask::CREATE
        | WatchMask::MOVED_TO
        | WatchMask::CLOSE_WRITE
        | WatchMask::DELETE
        | WatchMask::DELETE_SELF
        | WatchMask::MOVE_SELF;
    match inotify.watches().add(folder, mask) {
        Ok(_) => inotify.into_event_stream([0; 4096]).ok(),
        Err(error) => {
            tracing::warn!(folder = %folder.display(), %error, "cannot watch the folder; polling it");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Lifetimes;
    use crate::authority::Ca;

    /// Lays files out as the kubelet does: a versioned folder, `..data` pointing to it, files pointing through `..data`.
    fn mount(folder: &Path, version: &str, files: &[(&str, &str)]) {
        let data = folder.join(version);
        std::fs::create_dir(&data).unwrap();
        for (name, text) in files {
            std::fs::write(data.join(name), text).unwrap();
            let link = folder.join(name);
            if !link.exists() {
                std::os::unix::fs::symlink(Path::new("..data").join(name), link).unwrap();
            }
        }
        std::os::unix::fs::symlink(version, folder.join("..data_tmp")).unwrap();
        std::fs::rename(folder.join("..data_tmp"), folder.join("..data")).unwrap();
    }

    #[tokio::test]
    async fn a_swapped_secret_mount_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        mount(folder.path(), "..1", &[("tls.crt", "one")]);
        let mut watch = FolderWatch::new(folder.path(), Duration::from_secs(3600));
        mount(folder.path(), "..2", &[("tls.crt", "two")]);
        watch.changed().await;
        assert_eq!(std::fs::read_to_string(folder.path().join("tls.crt")).unwrap(), "two");
    }

    #[test]
    fn files_that_cannot_be_used_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = |folder: &Path| read(folder).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error(folder.path()).contains("tls.crt"), "{}", error(folder.path()));
        std::fs::write(folder.path().join("tls.crt"), "nothing").unwrap();
        assert!(error(folder.path()).contains("found none"), "{}", error(folder.path()));
        let now = jiff::Timestamp::now();
        let ca = Ca::generate("t", now, &Lifetimes::default()).unwrap();
        std::fs::write(folder.path().join("tls.crt"), ca.pem()).unwrap();
        std::fs::write(folder.path().join("tls.key"), "nothing").unwrap();
        assert!(error(folder.path()).contains("tls.key"), "{}", error(folder.path()));
        std::fs::write(folder.path().join("tls.key"), ca.key_pem()).unwrap();
        assert_eq!(read(folder.path()).unwrap().chain.len(), 1);
    }
}
