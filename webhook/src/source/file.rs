//! Policies from a file, read again when it changes. A file that cannot be used changes nothing.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use gpu_migrate_certs::FolderWatch;
use tokio_util::sync::CancellationToken;

use super::Store;
use crate::compile::PolicyError;
use crate::policy_file::{PolicyFile, PolicyFileError};

const POLL: Duration = Duration::from_secs(10);

/// Why the policy file is not in force.
#[derive(Debug, thiserror::Error)]
pub enum FileSourceError {
    #[error("{}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{}: {source}", path.display())]
    Parse { path: PathBuf, source: PolicyFileError },
    /// There is none in it: a file that was emptied by mistake must not end all conversions. `mode: "Off"` does.
    #[error("{}: no GPUMigration in it: expected at least one; mode: \"Off\" turns a policy off", path.display())]
    Empty { path: PathBuf },
    /// A policy in it makes no sense.
    #[error("{}: GPUMigration {name}: {source}", path.display())]
    Policy { path: PathBuf, name: String, source: PolicyError },
}

/// A policy file and what was last read from it.
pub struct FileSource {
    path: PathBuf,
    store: Store,
    last: Option<String>,
}

impl FileSource {
    /// Reads the file for the first time.
    ///
    /// # Errors
    /// [`FileSourceError`]: a fault at the start is told at the start.
    pub fn open(path: &Path, store: Store) -> Result<Self, FileSourceError> {
        let mut source = Self { path: path.to_owned(), store, last: None };
        source.reload()?;
        Ok(source)
    }

    /// Reads the file again if its text changed.
    ///
    /// # Errors
    /// [`FileSourceError`]. A file that does not parse leaves all policies as they were; a policy that makes no sense
    /// leaves that one as it was.
    pub fn reload(&mut self) -> Result<(), FileSourceError> {
        let path = || self.path.clone();
        let text = std::fs::read_to_string(&self.path)
            .map_err(|source| FileSourceError::Read { path: path(), source })?;
        if self.last.as_ref() == Some(&text) {
            return Ok(());
        }
        let parsed =
            PolicyFile::parse(&text).map_err(|source| FileSourceError::Parse { path: path(), source });
        self.last = Some(text);
        let PolicyFile { migrations, namespaces } = parsed?;
        if migrations.is_empty() {
            return Err(FileSourceError::Empty { path: path() });
        }
        let rejected = self.store.set_policies(&migrations, &[]);
        let shared = namespaces.into_iter().map(|(name, labels)| (name, Arc::new(labels)));
        self.store.set_namespaces(shared.collect());
        tracing::info!(file = %self.path.display(), policies = migrations.len(), "policies read");
        match rejected.into_iter().next() {
            None => Ok(()),
            Some(bad) => Err(FileSourceError::Policy { path: path(), name: bad.name, source: bad.reason }),
        }
    }

    pub async fn run(mut self, stop: CancellationToken) {
        let folder = match self.path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
            _ => PathBuf::from("."),
        };
        let mut watch = FolderWatch::new(&folder, POLL);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = watch.changed() => {}
            }
            if let Err(error) = self.reload() {
                self.store.count_error();
                tracing::warn!(%error, "policy file not in force; the last good policies stay");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;
    use crate::policy::{Mode, Settings};

    fn policy(mode: &str, percent: u32) -> String {
        format!(
            "apiVersion: gpu-migrate.io/v1alpha1\nkind: GPUMigration\nmetadata: {{name: p}}\n\
             spec: {{project: p, mode: {mode}, rollout: {{percent: {percent}}}}}\n"
        )
    }

    fn mode(store: &Store) -> Vec<Mode> {
        store.snapshot().load().policies.iter().map(|policy| policy.mode).collect()
    }

    #[test]
    fn a_bad_file_keeps_the_last_good_policies() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("policy.yaml");
        let store = Store::new(Settings::default(), Metrics::default());
        std::fs::write(&path, policy("Audit", 100)).unwrap();
        let mut source = FileSource::open(&path, store.clone()).unwrap();
        assert_eq!(mode(&store), [Mode::Audit]);
        for (text, expected) in [
            ("kind: [".to_owned(), "not YAML"),
            (String::new(), "no GPUMigration in it"),
            ("---\n---\n".to_owned(), "no GPUMigration in it"),
            (policy("Perhaps", 100), "spec.mode"),
            (policy("Enforce", 101), "spec.rollout.percent: 101: expected 0 to 100"),
        ] {
            std::fs::write(&path, &text).unwrap();
            let error = source.reload().unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("policy.yaml"), "{error}");
            assert_eq!(mode(&store), [Mode::Audit], "after {text}");
        }
        std::fs::write(&path, policy("Enforce", 100)).unwrap();
        source.reload().unwrap();
        assert_eq!(mode(&store), [Mode::Enforce]);
        std::fs::remove_file(&path).unwrap();
        assert!(source.reload().is_err());
        assert_eq!(mode(&store), [Mode::Enforce]);
    }

    #[tokio::test]
    async fn a_changed_file_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("policy.yaml");
        let store = Store::new(Settings::default(), Metrics::default());
        std::fs::write(&path, policy("Audit", 100)).unwrap();
        let source = FileSource::open(&path, store.clone()).unwrap();
        let mut changes = store.changes();
        let stop = CancellationToken::new();
        let running = tokio::spawn(source.run(stop.clone()));
        tokio::task::yield_now().await;
        std::fs::write(folder.path().join("new"), policy("Enforce", 100)).unwrap();
        std::fs::rename(folder.path().join("new"), &path).unwrap();
        tokio::time::timeout(2 * POLL, changes.changed()).await.unwrap().unwrap();
        assert_eq!(mode(&store), [Mode::Enforce]);
        stop.cancel();
        running.await.unwrap();
    }
}
