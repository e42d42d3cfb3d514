//! Watches of Pods, Nodes, GPUShadows and the one GPUConfig, stripped while they are read: what is not needed is never built.
//!
//! They run for ever; `kube`'s watcher lists again after an error. An object that cannot be read is skipped with a
//! warning, so that one odd object does not blind the extender.

use std::collections::HashSet;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use gpu_migrate_model::crd::{GPUConfig, GPUConfigSpec, GPUShadow};
use gpu_migrate_model::view::{PodView, Watched, WatchedPod};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Resource};
use tokio::sync::watch;

use crate::engine::Engine;
use crate::state::node::{NodeFacts, ShadowFacts};
use crate::state::pod::PodFacts;
use crate::wire::node::NodeView;

/// Which of them are filled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Synced {
    pods: bool,
    nodes: bool,
    shadows: bool,
    config: bool,
}

impl Synced {
    /// All of them.
    #[must_use]
    pub fn all(self) -> bool {
        self.pods && self.nodes && self.shadows && self.config
    }
}

/// Keeps `engine` up to date until it is dropped. Sets it synced once all have been listed.
pub async fn run(engine: Arc<Engine>, client: Client) {
    let (synced, mut seen) = watch::channel(Synced::default());
    let pods = watch_pods(Arc::clone(&engine), client.clone(), &synced);
    let nodes = watch_nodes(Arc::clone(&engine), client.clone(), &synced);
    let shadows = watch_shadows(Arc::clone(&engine), client.clone(), &synced);
    let config = watch_config(Arc::clone(&engine), client, &synced);
    let ready = async {
        if seen.wait_for(|synced| synced.all()).await.is_ok() {
            engine.set_synced(true);
            engine.gauge();
            tracing::info!("caches are filled");
        }
        std::future::pending::<()>().await;
    };
    tokio::join!(pods, nodes, shadows, config, ready);
}

/// Every pod that has not finished. A pod that finishes leaves the selection, which the watch tells as a deletion.
const UNFINISHED: &str = "status.phase!=Succeeded,status.phase!=Failed";

async fn watch_pods(engine: Arc<Engine>, client: Client, synced: &watch::Sender<Synced>) {
    let config = watcher::Config::default().fields(UNFINISHED);
    // What was known before a list began and is not in it is gone. A pod that a bind has looked up meanwhile may be younger.
    let mut unlisted = HashSet::<Arc<str>>::new();
    follow(Api::<WatchedPod>::all(client), config, &|| {}, |event| match event {
        Event::Init => {
            unlisted = engine.read(|cluster| cluster.pods().map(|pod| Arc::clone(&pod.uid)).collect());
        }
        Event::InitApply(pod) => {
            unlisted.remove(&*pod.view.metadata.uid);
            apply_pod(&engine, &pod.view);
        }
        Event::InitDone => {
            unlisted.drain().for_each(|uid| engine.remove_pod(&uid));
            synced.send_modify(|synced| synced.pods = true);
        }
        Event::Apply(pod) => apply_pod(&engine, &pod.view),
        Event::Delete(pod) => engine.remove_pod(&pod.view.metadata.uid),
    })
    .await;
}

fn apply_pod(engine: &Engine, pod: &PodView<'_>) {
    let rules = &engine.settings().rules;
    if pod.is_finished() {
        engine.remove_pod(&pod.metadata.uid);
    } else if PodFacts::concerns(pod, rules) {
        engine.set_pod(PodFacts::read(pod, rules));
    }
}

async fn watch_nodes(engine: Arc<Engine>, client: Client, synced: &watch::Sender<Synced>) {
    let mut listed = HashSet::<String>::new();
    let apply = |node: &NodeView<'_>| {
        engine.set_node(&node.metadata.name, NodeFacts::read(node, &engine.settings().rules.dialect));
    };
    follow(Api::<Watched<NodeView<'static>>>::all(client), watcher::Config::default(), &|| {}, |event| {
        match event {
            Event::Init => listed.clear(),
            Event::InitApply(node) => {
                listed.insert(node.view.metadata.name.to_string());
                apply(&node.view);
            }
            Event::InitDone => {
                for name in names_besides(&engine, &listed) {
                    engine.remove_node(&name);
                }
                synced.send_modify(|synced| synced.nodes = true);
            }
            Event::Apply(node) => apply(&node.view),
            Event::Delete(node) => engine.remove_node(&node.view.metadata.name),
        }
    })
    .await;
}

async fn watch_shadows(engine: Arc<Engine>, client: Client, synced: &watch::Sender<Synced>) {
    let mut listed = HashSet::<String>::new();
    let apply = |shadow: &GPUShadow| {
        let (Some(name), Some(status)) = (&shadow.metadata.name, &shadow.status) else { return };
        engine.set_shadow(name, ShadowFacts::read(status));
    };
    // Without the definition no bridge has published anything: every node is known by its capacity alone.
    let undefined = || synced.send_modify(|synced| synced.shadows = true);
    follow(Api::<GPUShadow>::all(client), watcher::Config::default(), &undefined, |event| match event {
        Event::Init => listed.clear(),
        Event::InitApply(shadow) => {
            listed.extend(shadow.metadata.name.clone());
            apply(&shadow);
        }
        Event::InitDone => {
            for name in names_besides(&engine, &listed) {
                engine.remove_shadow(&name);
            }
            synced.send_modify(|synced| synced.shadows = true);
        }
        Event::Apply(shadow) => apply(&shadow),
        Event::Delete(shadow) => {
            if let Some(name) = &shadow.metadata.name {
                engine.remove_shadow(name);
            }
        }
    })
    .await;
}

async fn watch_config(engine: Arc<Engine>, client: Client, synced: &watch::Sender<Synced>) {
    let undefined = || synced.send_modify(|synced| synced.config = true);
    let mut listed = GPUConfigSpec::default();
    follow(Api::<GPUConfig>::all(client), watcher::Config::default(), &undefined, |event| match event {
        Event::Init => listed = GPUConfigSpec::default(),
        Event::InitApply(config) => listed = config.spec,
        Event::InitDone => {
            engine.set_config(std::mem::take(&mut listed));
            synced.send_modify(|synced| synced.config = true);
        }
        Event::Apply(config) => engine.set_config(config.spec),
        Event::Delete(_) => engine.set_config(GPUConfigSpec::default()),
    })
    .await;
}

/// The custom resource is not defined in this cluster.
fn is_undefined(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::InitialListFailed(kube::Error::Api(status)) if status.code == 404)
}

fn names_besides(engine: &Engine, listed: &HashSet<String>) -> Vec<Arc<str>> {
    engine.read(|cluster| {
        let all = cluster.nodes().filter(|info| !listed.contains(&*info.name));
        all.map(|info| Arc::clone(&info.name)).collect()
    })
}

/// How often it is looked whether a resource is defined by now.
const UNDEFINED: Duration = Duration::from_secs(30);

/// Hands every event to `on`, with back-off after errors. Calls `undefined` where there is no such resource.
async fn follow<K>(
    api: Api<K>,
    config: watcher::Config,
    undefined: &(dyn Fn() + Sync),
    mut on: impl FnMut(Event<K>),
) where
    K: Resource<DynamicType = ()> + Clone + Debug + serde::de::DeserializeOwned + Send + 'static,
{
    let mut events = watcher::watcher(api, config).default_backoff().boxed();
    loop {
        match events.try_next().await {
            Ok(Some(event)) => on(event),
            Ok(None) => return,
            Err(error) if is_undefined(&error) => {
                undefined();
                tracing::info!(kind = %K::kind(&()), "not defined in this cluster");
                tokio::time::sleep(UNDEFINED).await;
            }
            Err(error) => tracing::warn!(kind = %K::kind(&()), %error, "watch; trying again"),
        }
    }
}
