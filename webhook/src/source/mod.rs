//! Where policies and namespaces come from: a file, or a watch. Both end in one [`Store`].

pub mod cluster;
mod conditions;
pub mod file;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use arc_swap::ArcSwap;
use gpu_migrate_model::crd::GPUMigration;
use gpu_migrate_runtime::watch::SkippedObjects;
use tokio::sync::watch;

use crate::compile::Rejected;
use crate::metrics::Metrics;
use crate::obstacles::ClusterFacts;
use crate::policy::{Policies, Settings};
use crate::review::Snapshot;

/// Labels by namespace, as the snapshot holds them.
pub type Namespaces = HashMap<String, Arc<BTreeMap<String, String>>>;

/// Holds the snapshot that reviews are decided by. One task writes it, all requests read it.
#[derive(Clone)]
pub struct Store {
    snapshot: Arc<ArcSwap<Snapshot>>,
    settings: Settings,
    metrics: Metrics,
    changed: watch::Sender<()>,
}

impl Store {
    /// An empty one: nothing is touched.
    #[must_use]
    pub fn new(settings: Settings, metrics: Metrics) -> Self {
        let policies = Policies::new(Vec::new(), settings.clone());
        let snapshot = Arc::new(ArcSwap::from_pointee(Snapshot { policies, ..Snapshot::default() }));
        Self { snapshot, settings, metrics, changed: watch::channel(()).0 }
    }

    #[must_use]
    pub fn snapshot(&self) -> Arc<ArcSwap<Snapshot>> {
        Arc::clone(&self.snapshot)
    }

    #[must_use]
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Puts policies into force. An invalid one keeps its former form; so do those named in `unreadable`.
    pub fn set_policies<'m>(
        &self,
        migrations: impl IntoIterator<Item = &'m GPUMigration>,
        unreadable: &[String],
    ) -> Vec<Rejected> {
        let former = self.snapshot.load_full();
        let (policies, rejected) = Policies::compile(migrations, &self.settings);
        let keep = rejected.iter().map(|bad| bad.name.as_str()).chain(unreadable.iter().map(String::as_str));
        let policies = policies.keeping(&former.policies, keep);
        self.metrics.policies.set(i64::try_from(policies.iter().count()).unwrap_or(i64::MAX));
        let invalid = rejected.len() + unreadable.len();
        self.metrics.invalid_policies.set(i64::try_from(invalid).unwrap_or(i64::MAX));
        self.snapshot.store(Arc::new(Snapshot { policies, ..Snapshot::clone(&former) }));
        self.changed.send_replace(());
        for Rejected { name, reason, .. } in &rejected {
            tracing::warn!(policy = name, error = %reason, "policy is invalid; its last good form stays in force");
        }
        rejected
    }

    /// Exchanges what is known about namespaces.
    pub fn set_namespaces(&self, namespaces: Namespaces) {
        let former = self.snapshot.load_full();
        self.snapshot.store(Arc::new(Snapshot { namespaces, ..Snapshot::clone(&former) }));
    }

    /// Exchanges what is known about cards and RuntimeClasses.
    pub fn set_cluster(&self, cluster: ClusterFacts) {
        let former = self.snapshot.load_full();
        if *former.cluster != cluster {
            let cluster = Arc::new(cluster);
            self.snapshot.store(Arc::new(Snapshot { cluster, ..Snapshot::clone(&former) }));
        }
    }

    pub(crate) fn skipped_objects(&self) -> SkippedObjects {
        self.metrics.skipped_objects.clone()
    }

    pub(crate) fn count_error(&self) {
        self.metrics.policy_errors.inc();
    }
}
