//! Policies from GPUMigration objects and labels from Namespaces; from GPUShadows the largest card, from RuntimeClasses those
//! with an overhead. All are watched: nothing is asked while a review waits.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::StreamExt;
use gpu_migrate_model::crd::{GPUMigration, GPUShadow, RecordedConversion, RolloutSettings};
use gpu_migrate_model::names;
use gpu_migrate_runtime::watch::{Gathered, Update, watch, watch_guarded};
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::core::error_boundary::InvalidObject;
use kube::core::{DeserializeGuard, PartialObjectMeta};
use kube::runtime::watcher::Config;
use kube::{Api, Client, Resource, ResourceExt};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::Store;
use super::conditions::{self, Verdict};
use crate::compile::Rejected;
use crate::obstacles::ClusterFacts;

pub struct ClusterSource {
    client: Client,
    store: Store,
    ready: Arc<Ready>,
    published: Option<Published>,
    leading: tokio::sync::watch::Receiver<bool>,
}

/// What of a policy decides: its UID and generation, and of its status the command and the recorded conversions.
type InForce = (Option<String>, Option<i64>, RolloutSettings, Vec<RecordedConversion>);

fn in_force(guarded: &Guarded) -> InForce {
    let migration = guarded.0.as_ref().ok();
    let status = migration.and_then(|migration| migration.status.as_ref());
    let conversions = status.map(|status| status.conversions.clone()).unwrap_or_default();
    let settings = migration.map(GPUMigration::settings).unwrap_or_default();
    (guarded.meta().uid.clone(), guarded.meta().generation, settings, conversions)
}

/// The policies that were put into force last.
struct Published {
    specs: Vec<InForce>,
    rejected: Vec<Rejected>,
}

#[derive(Default)]
struct Ready {
    policies: AtomicBool,
    namespaces: AtomicBool,
}

/// Says whether both watches have listed everything once.
#[derive(Clone)]
pub struct Listed(Arc<Ready>);

impl Listed {
    /// What is still missing.
    ///
    /// # Errors
    /// The kind that has not been listed.
    pub fn check(&self) -> Result<(), String> {
        match (self.0.policies.load(Ordering::Acquire), self.0.namespaces.load(Ordering::Acquire)) {
            (false, _) => Err("GPUMigrations are not listed yet".into()),
            (_, false) => Err("Namespaces are not listed yet".into()),
            _ => Ok(()),
        }
    }
}

type Guarded = DeserializeGuard<GPUMigration>;

impl ClusterSource {
    /// Watches through `client` into `store`; writes what it makes of each policy into its status while `leading`.
    #[must_use]
    pub fn new(client: Client, store: Store, leading: tokio::sync::watch::Receiver<bool>) -> Self {
        Self { client, store, ready: Arc::default(), published: None, leading }
    }

    #[must_use]
    pub fn listed(&self) -> Listed {
        Listed(Arc::clone(&self.ready))
    }

    /// Watches until `stop`.
    pub async fn run(mut self, stop: CancellationToken) {
        let (verdicts, receiver) = mpsc::channel(64);
        let mut reporting = pin!(conditions::run(self.client.clone(), receiver, self.leading.clone()));
        let mut policies = Gathered::<String, Guarded>::default();
        let mut namespaces = Gathered::<String, Arc<BTreeMap<String, String>>>::default();
        let api = Api::<Guarded>::all(self.client.clone());
        let mut policy_updates = watch_guarded(api, Config::default(), self.store.skipped_objects());
        let api = Api::<PartialObjectMeta<Namespace>>::all(self.client.clone());
        let mut namespace_updates = watch(api, Config::default());
        let mut cards = Gathered::<String, u64>::default();
        let mut classes = Gathered::<String, bool>::default();
        let mut cluster = ClusterFacts::default();
        let api = Api::<DeserializeGuard<GPUShadow>>::all(self.client.clone());
        let mut card_updates = watch_guarded(api, Config::default(), self.store.skipped_objects());
        let mut class_updates = watch(Api::<RuntimeClass>::all(self.client.clone()), Config::default());
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                () = &mut reporting => break,
                Some(update) = policy_updates.next() => match update {
                    Update::Event(event) => if policies.take(event, |policy| (policy.name_any(), Some(policy.clone()))) {
                        self.ready.policies.store(true, Ordering::Release);
                        self.publish(&policies.live, &verdicts);
                    },
                    // What is known stays in force.
                    Update::Interrupted | Update::Undefined => self.store.count_error(),
                },
                Some(update) = namespace_updates.next() => match update {
                    Update::Event(event) => if namespaces.take(event, |namespace| (namespace.name_any(), Some(Self::labels(namespace)))) {
                        self.ready.namespaces.store(true, Ordering::Release);
                        self.store.set_namespaces(namespaces.live.clone().into_iter().collect());
                    },
                    Update::Interrupted | Update::Undefined => self.store.count_error(),
                },
                Some(update) = card_updates.next() => match update {
                    Update::Event(event) => if cards.take(event, |shadow| (shadow.name_any(), Some(largest_card(shadow)))) {
                        cluster.largest_card_mib = cards.live.values().copied().max().filter(|mib| *mib > 0);
                        self.store.set_cluster(cluster.clone());
                    },
                    Update::Interrupted => self.store.count_error(),
                    Update::Undefined => {}
                },
                Some(update) = class_updates.next() => match update {
                    Update::Event(event) => if classes.take(event, |class| (class.name_any(), Some(class.overhead.is_some()))) {
                        cluster.runtime_classes = Some(classes.live.clone());
                        self.store.set_cluster(cluster.clone());
                    },
                    Update::Interrupted | Update::Undefined => self.store.count_error(),
                },
                else => break,
            }
        }
    }

    /// Only the labels that decide: namespaces carry many others.
    fn labels(namespace: &PartialObjectMeta<Namespace>) -> Arc<BTreeMap<String, String>> {
        let keys = [names::OPT_IN, names::PROJECT, names::VOID_GUARD, names::FIXED_PROJECT];
        let ours = keys.iter().filter_map(|key| namespace.labels().get_key_value(*key));
        Arc::new(ours.map(|(key, value)| (key.clone(), value.clone())).collect())
    }

    /// Puts the policies into force if a spec changed, and reports on each. Their statuses change all the time.
    fn publish(&mut self, live: &BTreeMap<String, Guarded>, verdicts: &mpsc::Sender<Vec<Verdict>>) {
        let readable: Vec<&GPUMigration> =
            live.values().filter_map(|guarded| guarded.0.as_ref().ok()).collect();
        let broken: Vec<&InvalidObject> =
            live.values().filter_map(|guarded| guarded.0.as_ref().err()).collect();
        let mut specs: Vec<InForce> = live.values().map(in_force).collect();
        specs.sort_by(|a, b| a.0.cmp(&b.0));
        let rejected = match self.published.take() {
            Some(published) if published.specs == specs => published.rejected,
            _ => {
                let unreadable: Vec<String> =
                    broken.iter().map(|bad| bad.metadata.name.clone().unwrap_or_default()).collect();
                self.store.set_policies(readable.iter().copied(), &unreadable)
            }
        };
        let snapshot = self.store.snapshot.load();
        let mut report: Vec<Verdict> = broken.into_iter().map(Verdict::unreadable).collect();
        report.extend(readable.iter().map(|migration| {
            let name = migration.name_any();
            let fault = rejected.iter().find(|bad| bad.name == name).map(|bad| &bad.reason);
            Verdict::on(migration, fault, &snapshot.policies.identical_policies(&name))
        }));
        self.published = Some(Published { specs, rejected });
        // A full queue only means that an older report is still on its way; the next change sends a newer one.
        let _ = verdicts.try_send(report);
    }
}

/// Memory of a node's largest card, MiB.
fn largest_card(shadow: &DeserializeGuard<GPUShadow>) -> u64 {
    let status = shadow.0.as_ref().ok().and_then(|shadow| shadow.status.as_ref());
    status.into_iter().flat_map(|status| &status.cards).map(|card| card.card.memory_mib).max().unwrap_or(0)
}
