//! What the watches have shown: opted-in namespaces, workloads and pods, and which kinds of workloads the GPUConfig switches on.
//!
//! Watches are of the whole cluster: so their number does not grow with that of the namespaces, and of what nobody opted in only what
//! has to do with cards is kept. Pods that have ended are not sent at all.

use crate::config;
use crate::kinds::Described;
use crate::project::{Listed, ListedPod, Workload};
use crate::waves::Key;
use futures::stream::{BoxStream, SelectAll};
use futures::{FutureExt as _, Stream, StreamExt as _};
use gpu_migrate_model::crd::{GPUConfig, GPUMigrationSpec, WorkloadKind};
use gpu_migrate_model::names;
use gpu_migrate_runtime::watch::{Gathered, SkippedObjects, Update, watch, watch_dynamic, watch_guarded};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind};
use kube::core::DeserializeGuard;
use kube::runtime::watcher::Config;
use kube::{Client, Resource, ResourceExt as _};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// Seconds after which each watch is asked for anew: a connection that died unnoticed is noticed a little later.
const WATCH_SECONDS: u32 = 60;

/// One step of one watch.
pub(crate) type Change = Box<dyn FnOnce(&mut Watched) + Send>;

pub(crate) struct Watched {
    client: Client,
    changes: SelectAll<BoxStream<'static, Change>>,
    /// Kinds of workloads that the GPUConfig names, of that one object.
    config: Gathered<String, Vec<WorkloadKind>>,
    namespaces: Gathered<String, Namespace>,
    workloads: BTreeMap<String, Gathered<Key, Arc<Workload>>>,
    pods: Gathered<Key, Arc<ListedPod>>,
    /// The kinds that the GPUConfig switches on, with what ends their watches.
    described: BTreeMap<String, (Arc<Described>, CancellationToken)>,
    /// Workloads that were changed, with the `resourceVersion` that they had before: nothing is decided before the watches show that.
    changed: BTreeMap<Key, String>,
}

impl Watched {
    /// Nothing is known, and nothing is watched before it is polled.
    pub(crate) fn new(client: Client, skipped: &SkippedObjects) -> Self {
        let mut watched = Self {
            client: client.clone(),
            changes: SelectAll::new(),
            config: Gathered::default(),
            namespaces: Gathered::default(),
            workloads: BTreeMap::new(),
            pods: Gathered::default(),
            described: BTreeMap::new(),
            changed: BTreeMap::new(),
        };
        let only_ours = config::only_ours().timeout(WATCH_SECONDS);
        let configs = watch_guarded(
            Api::<DeserializeGuard<GPUConfig>>::all(client.clone()),
            only_ours,
            skipped.clone(),
        );
        watched.follow(configs, Watched::take_config);
        let opted_in = settings().labels(&format!("{}=true", names::OPT_IN));
        watched.follow(watch(Api::<Namespace>::all(client.clone()), opted_in), |watched, update| {
            let read = |one: &Namespace| {
                let mut kept = Namespace::default();
                (kept.metadata.name, kept.metadata.labels) =
                    (Some(one.name_any()), one.metadata.labels.clone());
                (one.name_any(), Some(kept))
            };
            take(&mut watched.namespaces, update, read);
        });
        watched.follow_kind(Workload::of_deployment);
        watched.follow_kind(Workload::of_stateful_set);
        watched.follow_kind(Workload::of_daemon_set);
        watched.follow_kind(Workload::of_cron_job);
        let running = settings().fields("status.phase!=Succeeded,status.phase!=Failed");
        watched.follow(watch(Api::<Pod>::all(client), running), |watched, update| {
            take(&mut watched.pods, update, |pod| (key("Pod", pod), ListedPod::of(pod).map(Arc::new)));
        });
        watched
    }

    /// The next step of any watch, for [`Watched::take`].
    pub(crate) async fn next(&mut self) -> Option<Change> {
        self.changes.next().await
    }

    /// Takes one step of a watch, and those that are there already; true where that is what [`Watched::listed`] had waited for.
    pub(crate) fn take(&mut self, change: Change) -> bool {
        let waited = self.waits_for().is_some();
        change(self);
        while let Some(change) = self.changes.next().now_or_never().flatten() {
            change(self);
        }
        waited && self.waits_for().is_none()
    }

    /// A workload was changed that had this version before.
    pub(crate) fn note_change(&mut self, key: &Key, version: Option<&str>) {
        self.changed.extend(version.map(|version| (key.clone(), version.to_owned())));
    }

    /// What is known, with the policies.
    ///
    /// # Errors
    /// What has not been seen yet.
    pub(crate) fn listed(&mut self, policies: Vec<(String, GPUMigrationSpec)>) -> Result<Listed, String> {
        match self.waits_for() {
            Some(what) => Err(what),
            None => Ok(Listed {
                policies,
                namespaces: self.namespaces.live.values().cloned().collect(),
                workloads: self.workloads.values().flat_map(|kind| kind.live.values().cloned()).collect(),
                pods: self.pods.live.values().cloned().collect(),
            }),
        }
    }

    /// What is to be seen before anything is decided.
    pub(crate) fn waits_for(&mut self) -> Option<String> {
        let Self { workloads, changed, .. } = self;
        changed.retain(|key, before| {
            let now = workloads.get(&key.kind).and_then(|kind| kind.live.get(key)?.version());
            now == Some(before.as_str())
        });
        let of_kinds = self.workloads.iter().map(|(kind, gathered)| (kind.as_str(), gathered.listed));
        let others = [
            ("GPUConfig", self.config.listed),
            ("Namespace", self.namespaces.listed),
            ("Pod", self.pods.listed),
        ];
        let missing = others.into_iter().chain(of_kinds).find(|(_, listed)| !listed);
        let missing = missing.map(|(kind, _)| format!("objects of the kind {kind} are not listed yet"));
        missing.or_else(|| {
            let (key, _) = self.changed.first_key_value()?;
            Some(format!("the change of {key} is not seen yet"))
        })
    }

    fn follow<K: Send + 'static>(
        &mut self,
        updates: impl Stream<Item = Update<K>> + Send + 'static,
        take: impl Fn(&mut Self, Update<K>) + Clone + Send + 'static,
    ) {
        let change = move |update| {
            let take = take.clone();
            Box::new(move |watched: &mut Self| take(watched, update)) as Change
        };
        self.changes.push(updates.map(change).boxed());
    }

    fn follow_kind<K>(&mut self, read: fn(&K) -> Option<Workload>)
    where
        K: gpu_migrate_runtime::watch::Object,
    {
        let kind = K::kind(&()).into_owned();
        self.workloads.insert(kind.clone(), Gathered::default());
        let updates = watch(Api::<K>::all(self.client.clone()), settings());
        self.follow(updates, move |watched, update| {
            let Some(gathered) = watched.workloads.get_mut(&kind) else { return };
            take(gathered, update, |one| (key(&kind, one), read(one).map(Arc::new)));
        });
    }

    fn take_config(&mut self, update: Update<DeserializeGuard<GPUConfig>>) {
        // One that cannot be read is reported where nodes are reconciled with it.
        let read = |one: &DeserializeGuard<GPUConfig>| {
            let kinds = one.0.as_ref().ok().map(|config| config.spec.workload_kinds.clone());
            (one.name_any(), kinds)
        };
        take(&mut self.config, update, read);
        if !self.config.listed {
            return;
        }
        let entries = self.config.live.values().flatten();
        let wanted = entries.filter_map(|entry| {
            let kind = Described::of(entry);
            kind.inspect_err(|error| tracing::warn!(error, "an entry of the GPUConfig is ignored")).ok()
        });
        let mut wanted = wanted.map(|kind| (kind.display(), kind)).collect::<BTreeMap<_, _>>();
        self.described.retain(|name, (kind, stop)| {
            let stays = wanted.get(name) == Some(&**kind);
            if stays {
                wanted.remove(name);
            } else {
                stop.cancel();
                self.workloads.remove(name);
            }
            stays
        });
        for (name, kind) in wanted {
            self.follow_described(name, Arc::new(kind));
        }
    }

    fn follow_described(&mut self, name: String, kind: Arc<Described>) {
        let stop = CancellationToken::new();
        self.described.insert(name.clone(), (Arc::clone(&kind), stop.clone()));
        self.workloads.insert(name.clone(), Gathered::default());
        let resource = api_resource(&kind);
        let api = Api::<DynamicObject>::all_with(self.client.clone(), &resource);
        let updates = watch_dynamic(api, settings(), &resource).take_until(stop.clone().cancelled_owned());
        self.follow(updates, move |watched, update| {
            // What was on its way when the watch ended is of a kind that is described otherwise now.
            let Some(gathered) = watched.workloads.get_mut(&name).filter(|_| !stop.is_cancelled()) else {
                return;
            };
            take(gathered, update, |one: &DynamicObject| {
                let object = serde_json::to_value(one).ok();
                let workload = object.and_then(|object| Workload::of_foreign(&kind, &object));
                (key(&name, one), workload.map(Arc::new))
            });
        });
    }
}

fn settings() -> Config {
    Config::default().timeout(WATCH_SECONDS)
}

pub(crate) fn api_resource(kind: &Described) -> ApiResource {
    let gvk = GroupVersionKind::gvk(&kind.group, &kind.spec.version, &kind.kind);
    ApiResource::from_gvk_with_plural(&gvk, &kind.spec.plural)
}

fn key<K: Resource>(kind: &str, object: &K) -> Key {
    Key { kind: kind.to_owned(), namespace: object.namespace().unwrap_or_default(), name: object.name_any() }
}

fn take<K, Id: Ord + Clone, V>(
    gathered: &mut Gathered<Id, V>,
    update: Update<K>,
    read: impl Fn(&K) -> (Id, Option<V>),
) {
    match update {
        Update::Event(event) => _ = gathered.take(event, read),
        Update::Undefined => gathered.clear(),
        Update::Interrupted => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::migrations::tests::api_server;
    use gpu_migrate_sim::cluster::json_client::create;
    use k8s_openapi::api::apps::v1::Deployment;
    use kube::api::{DeleteParams, Patch, PatchParams};
    use serde_json::{Value, json};

    impl Watched {
        pub(crate) fn version(&self, kind: &str, namespace: &str, name: &str) -> Option<String> {
            let key = Key { kind: kind.into(), namespace: namespace.into(), name: name.into() };
            self.workloads.get(kind)?.live.get(&key)?.version().map(str::to_owned)
        }

        /// Takes steps until `seen` says something.
        async fn until<T>(&mut self, mut seen: impl FnMut(&mut Self) -> Option<T>) -> T {
            let steps = async {
                loop {
                    if let Some(what) = seen(self) {
                        return what;
                    }
                    let change = self.next().await.unwrap();
                    self.take(change);
                }
            };
            tokio::time::timeout(std::time::Duration::from_secs(60), steps).await.expect("it is not seen")
        }

        fn names(&mut self) -> Option<Vec<String>> {
            let listed = self.listed(Vec::new()).ok()?;
            let workloads = listed.workloads.iter().map(|one| one.key().to_string());
            Some(workloads.chain(listed.namespaces.iter().map(kube::ResourceExt::name_any)).collect())
        }
    }

    fn pod_template() -> Value {
        json!({"metadata": {"labels": {"app": "x"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}})
    }

    #[tokio::test]
    async fn kinds_are_watched_as_long_as_the_gpuconfig_names_them() {
        let (_running, client) = api_server().await;
        let definition = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": "rollouts.argoproj.io"},
            "spec": {"group": "argoproj.io", "scope": "Namespaced", "names": {"kind": "Rollout", "plural": "rollouts", "singular": "rollout"},
                "versions": [{"name": "v1alpha1", "served": true, "storage": true,
                    "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}]}});
        create(&client, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", &definition)
            .await
            .unwrap();
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "a", "labels": {"gpu-migrate.io/opt-in": "true"}}});
        create(&client, "/api/v1/namespaces", &namespace).await.unwrap();
        let rollout = json!({"apiVersion": "argoproj.io/v1alpha1", "kind": "Rollout", "metadata": {"name": "r", "namespace": "a"},
            "spec": {"selector": {"matchLabels": {"app": "x"}}, "template": pod_template()}});
        create(&client, "/apis/argoproj.io/v1alpha1/namespaces/a/rollouts", &rollout).await.unwrap();
        let mut watched = Watched::new(client.clone(), &SkippedObjects::default());
        assert_eq!(watched.until(Watched::names).await, ["a"]);

        let config = json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUConfig", "metadata": {"name": "cluster"},
            "spec": {"workloadKinds": [{"name": "Rollout.argoproj.io"}, {"name": "CloneSet.apps.kruise.io"}]}});
        create(&client, "/apis/gpu-migrate.io/v1alpha1/gpuconfigs", &config).await.unwrap();
        // CloneSets are not defined here.
        watched.until(|watched| watched.names().filter(|names| *names == ["Rollout/a/r", "a"])).await;
        assert_eq!(watched.described.len(), 2);
        let configs = Api::<GPUConfig>::all(client.clone());
        let patch = json!({"spec": {"workloadKinds": []}});
        configs.patch("cluster", &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
        watched.until(|watched| watched.names().filter(|names| *names == ["a"])).await;
        assert_eq!((watched.described.len(), watched.workloads.len()), (0, 4));
        let label = json!({"metadata": {"labels": {"gpu-migrate.io/opt-in": null}}});
        let namespaces = Api::<Namespace>::all(client);
        namespaces.patch("a", &PatchParams::default(), &Patch::Merge(&label)).await.unwrap();
        watched.until(|watched| watched.names().filter(Vec::is_empty)).await;
    }

    #[tokio::test]
    async fn nothing_is_decided_before_an_own_change_is_seen() {
        let (_running, client) = api_server().await;
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "a"}});
        create(&client, "/api/v1/namespaces", &namespace).await.unwrap();
        let path = "/apis/apps/v1/namespaces/a/deployments";
        for name in ["d", "e"] {
            let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "namespace": "a"},
                "spec": {"selector": {"matchLabels": {"app": "x"}}, "template": pod_template()}});
            create(&client, path, &deployment).await.unwrap();
        }
        let mut watched = Watched::new(client.clone(), &SkippedObjects::default());
        watched.until(Watched::names).await;
        let key = |name: &str| Key { kind: "Deployment".into(), namespace: "a".into(), name: name.into() };
        for name in ["d", "e"] {
            let version = watched.version("Deployment", "a", name);
            watched.note_change(&key(name), version.as_deref());
        }
        let waits = watched.listed(Vec::new()).unwrap_err();
        assert_eq!(waits, "the change of Deployment/a/d is not seen yet");
        let deployments = Api::<Deployment>::namespaced(client, "a");
        let patch = json!({"metadata": {"labels": {"x": "y"}}});
        deployments.patch("d", &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
        watched.until(|watched| watched.waits_for().filter(|what| what.contains("/e "))).await;
        // One that was deleted since is not waited for.
        deployments.delete("e", &DeleteParams::default()).await.unwrap();
        watched.until(Watched::names).await;
    }
}
