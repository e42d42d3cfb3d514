//! Where a keyring is kept: a Secret that replicas share, or a folder of a single process.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use gpu_migrate_runtime::leader::Candidate;
use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::Client;
use kube::api::{Api, ObjectMeta, Patch, PatchParams, PostParams};

use crate::CertError;
use crate::keyring::{Keyring, entry};

/// A keyring as it was read, with what is needed to replace exactly this one.
pub(crate) struct Stored {
    pub(crate) keyring: Keyring,
    version: Option<String>,
}

/// How long the Lease is held without renewal.
const LEASE: Duration = Duration::from_secs(60);

/// How far clocks may be apart: certificates are back-dated by as much.
const CLOCKS_APART: Duration = Duration::from_secs(300);

pub(crate) enum Store {
    Secret(Box<InSecret>),
    Folder(PathBuf),
}

/// A Secret, and the Lease of the same name, which a replica takes while it rotates. Writes are also guarded by the Secret's
/// resource version; the Lease keeps replicas from racing in the first place.
pub(crate) struct InSecret {
    client: Client,
    secrets: Api<Secret>,
    namespace: String,
    name: String,
    candidate: Candidate,
}

impl Store {
    pub(crate) fn secret(client: Client, namespace: &str, name: &str, identity: &str) -> Self {
        Self::Secret(Box::new(InSecret {
            client: client.clone(),
            secrets: Api::namespaced(client.clone(), namespace),
            namespace: namespace.into(),
            name: name.into(),
            candidate: Candidate::new(client, namespace, name, identity).with_duration(LEASE),
        }))
    }

    /// What this store is called in errors.
    pub(crate) fn origin(&self) -> String {
        match self {
            Self::Secret(place) => format!("Secret {}/{}", place.namespace, place.name),
            Self::Folder(path) => format!("folder {}", path.display()),
        }
    }

    /// The keyring, `None` where there is none yet.
    pub(crate) async fn load(&self) -> Result<Option<Stored>, CertError> {
        let (entries, version) = match self {
            Self::Secret(place) => {
                let found =
                    place.secrets.get_opt(&place.name).await.map_err(|e| CertError::api(self.origin(), e))?;
                let Some(secret) = found else { return Ok(None) };
                let text = |(key, value): (String, ByteString)| Some((key, String::from_utf8(value.0).ok()?));
                let data = secret.data.unwrap_or_default();
                (data.into_iter().filter_map(text).collect(), secret.metadata.resource_version)
            }
            Self::Folder(path) => match read_folder(path)? {
                entries if entries.is_empty() => return Ok(None),
                entries => (entries, None),
            },
        };
        let keyring = Keyring::from_entries(&self.origin(), &entries)?;
        Ok(Some(Stored { keyring, version }))
    }

    /// Writes the first keyring; false when another replica was first.
    pub(crate) async fn create(&self, keyring: &Keyring) -> Result<bool, CertError> {
        match self {
            Self::Secret(place) => {
                let label = ("app.kubernetes.io/managed-by".to_owned(), "gpu-migrate".to_owned());
                let secret = Secret {
                    metadata: ObjectMeta {
                        name: Some(place.name.clone()),
                        labels: Some(BTreeMap::from([label])),
                        ..ObjectMeta::default()
                    },
                    string_data: Some(owned(keyring)),
                    ..Secret::default()
                };
                won(place.secrets.create(&PostParams::default(), &secret).await)
                    .map_err(|e| CertError::api(self.origin(), e))
            }
            Self::Folder(path) => write_folder(path, keyring).map(|()| true),
        }
    }

    /// Compares the clock with the API server's, by the Date of a response, before anything is made by it. A folder is of this
    /// machine alone.
    pub(crate) async fn check_clock(&self, now: Timestamp) -> Result<(), CertError> {
        let Self::Secret(place) = self else { return Ok(()) };
        let mut request = http::Request::new(kube::client::Body::empty());
        *request.uri_mut() = http::Uri::from_static("/version");
        let response = place.client.send(request).await.map_err(|e| CertError::api("/version", e))?;
        let date = response.headers().get(http::header::DATE).and_then(|date| date.to_str().ok());
        let date = date.and_then(|date| jiff::fmt::rfc2822::parse(date).ok());
        match date.map(|date| date.timestamp()) {
            Some(server) if now.duration_since(server).unsigned_abs() > CLOCKS_APART => {
                Err(CertError::Clock { now, server })
            }
            _ => Ok(()),
        }
    }

    /// Whether this replica may write a rotation step now: no other one is at it.
    pub(crate) async fn may_rotate(&mut self) -> Result<bool, CertError> {
        let Self::Secret(place) = self else { return Ok(true) };
        let held = place.candidate.try_hold().await;
        held.map(|held| held.is_some()).map_err(|e| CertError::api(format!("Lease {}", place.name), e))
    }

    /// The rotation step is done. A Lease that is not released expires by itself.
    pub(crate) async fn release(&self) {
        if let Self::Secret(place) = self
            && let Err(error) = place.candidate.release().await
        {
            tracing::warn!(lease = place.name, %error, "Lease not released; it expires by itself");
        }
    }

    /// Replaces the keyring that was read; false when another replica replaced it meanwhile.
    pub(crate) async fn replace(&self, version: Option<&str>, keyring: &Keyring) -> Result<bool, CertError> {
        match self {
            Self::Secret(place) => {
                let entries = keyring.to_entries();
                let data: BTreeMap<&str, Option<ByteString>> = entry::ALL
                    .iter()
                    .map(|key| (*key, entries.get(key).map(|text| ByteString(text.clone().into_bytes()))))
                    .collect();
                let patch = serde_json::json!({ "metadata": { "resourceVersion": version }, "data": data });
                won(place.secrets.patch(&place.name, &PatchParams::default(), &Patch::Merge(patch)).await)
                    .map_err(|e| CertError::api(self.origin(), e))
            }
            Self::Folder(path) => write_folder(path, keyring).map(|()| true),
        }
    }
}

impl Stored {
    pub(crate) fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }
}

/// Conflict and AlreadyExists mean that another replica was first: no error, but not written.
fn won<T>(result: Result<T, kube::Error>) -> Result<bool, kube::Error> {
    match result {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(error),
    }
}

fn owned(keyring: &Keyring) -> BTreeMap<String, String> {
    keyring.to_entries().into_iter().map(|(key, text)| (key.to_owned(), text)).collect()
}

fn read_folder(folder: &Path) -> Result<BTreeMap<String, String>, CertError> {
    let mut entries = BTreeMap::new();
    for name in entry::ALL {
        let path = folder.join(name);
        match std::fs::read_to_string(&path) {
            Ok(text) => {
                entries.insert(name.to_owned(), text);
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(CertError::file(&path, e)),
        }
    }
    Ok(entries)
}

/// Each file by a temporary one and a rename, readable by the owner alone; the bundle by all users, since clients need it.
fn write_folder(folder: &Path, keyring: &Keyring) -> Result<(), CertError> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    std::fs::create_dir_all(folder).map_err(|e| CertError::file(folder, e))?;
    let entries = keyring.to_entries();
    for name in entry::ALL {
        let path = folder.join(name);
        let Some(text) = entries.get(name) else {
            match std::fs::remove_file(&path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(CertError::file(&path, e)),
                _ => continue,
            }
        };
        let new = folder.join(format!(".{name}.new"));
        let mode = if name == entry::BUNDLE { 0o644 } else { 0o600 };
        std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(mode)
            .open(&new)
            .and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
            .and_then(|()| std::fs::rename(&new, &path))
            .map_err(|e| CertError::file(&path, e))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Lifetimes;

    #[tokio::test]
    async fn a_folder_keeps_a_keyring() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::Folder(folder.path().join("ca"));
        assert!(store.load().await.unwrap().is_none());
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        let keyring = Keyring::generate("test", now, &Lifetimes::default()).unwrap();
        assert!(store.create(&keyring).await.unwrap());
        let back = store.load().await.unwrap().unwrap();
        assert_eq!(back.keyring.bundle(), keyring.bundle());
        use std::os::unix::fs::PermissionsExt;
        let mode =
            |name: &str| std::fs::metadata(folder.path().join("ca").join(name)).unwrap().permissions().mode();
        assert_eq!((mode("signing.key") & 0o777, mode("ca.crt") & 0o777), (0o600, 0o644));
    }
}
