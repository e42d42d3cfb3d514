//! Watches of Pods, Nodes, GPUShadows and the one GPUConfig, stripped while they are read: what is not needed is never built.
//!
//! They run for ever; `kube`'s watcher lists again after an error. A malformed custom resource is skipped: what was known of it
//! stays. Pods and Nodes are of types that the API server itself validates; they are read straight into what is needed.

use std::collections::HashSet;
use std::sync::Arc;

use futures::{Stream, StreamExt};
use gpu_migrate_model::crd::{GPUConfig, GPUConfigSpec, GPUShadow};
use gpu_migrate_model::view::{PodView, Watched, WatchedPod};
use gpu_migrate_runtime::watch::{Update, watch, watch_guarded};
use kube::core::DeserializeGuard;
use kube::runtime::watcher::{Config, Event};
use kube::{Api, Client, ResourceExt as _};
use tokio::sync::watch::{Sender, channel};
use tokio::task::JoinSet;

use crate::engine::Engine;
use crate::state::node::{NodeFacts, ShadowFacts};
use crate::state::pod::PodFacts;
use crate::wire::node::NodeView;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Synced {
    pods: bool,
    nodes: bool,
    shadows: bool,
    config: bool,
}

impl Synced {
    #[must_use]
    pub fn all(self) -> bool {
        self.pods && self.nodes && self.shadows && self.config
    }
}

/// Keeps `engine` up to date until it is dropped. Sets it synced once all have been listed.
pub async fn run(engine: Arc<Engine>, client: Client) {
    let (synced, mut seen) = channel(Synced::default());
    let mut watches = JoinSet::new();
    // Nobody asks yet: what comes with the first lists is counted once, at their end.
    engine.load();
    // Each in a task of its own: what has come of one is read while another waits for the API server.
    watches.spawn(watch_pods(Arc::clone(&engine), client.clone(), synced.clone()));
    watches.spawn(watch_nodes(Arc::clone(&engine), client.clone(), synced.clone()));
    watches.spawn(watch_shadows(Arc::clone(&engine), client.clone(), synced.clone()));
    watches.spawn(watch_config(Arc::clone(&engine), client, synced));
    let ready = async {
        if seen.wait_for(|synced| synced.all()).await.is_ok() {
            engine.fill(|_| {});
            engine.set_synced(true);
            tracing::info!("caches are filled");
        }
        std::future::pending::<()>().await;
    };
    // A watch goes on for ever: one that ends or panics ends all, and its caller.
    tokio::select! {
        _ = watches.join_next() => tracing::error!("a watch has ended"),
        () = ready => {}
    }
}

async fn watch_pods(engine: Arc<Engine>, client: Client, synced: Sender<Synced>) {
    // Finished pods too: the members of a gang that have succeeded count. What was known before a list began and is not in it is
    // gone; a pod that a bind has looked up meanwhile may be younger.
    follow(
        watch(Api::<WatchedPod>::all(client), Config::default()),
        || {},
        |event| match event {
            Event::Init => engine.begin_list(),
            Event::InitApply(pod) | Event::Apply(pod) => apply_pod(&engine, &pod.view),
            Event::InitDone => {
                engine.end_list();
                synced.send_modify(|synced| synced.pods = true);
            }
            Event::Delete(pod) => engine.remove_pod(&pod.view.metadata.uid),
        },
    )
    .await;
}

fn apply_pod(engine: &Engine, pod: &PodView<'_>) {
    let rules = &engine.settings().rules;
    if pod.is_finished() {
        engine.finish_pod(pod);
    } else if PodFacts::concerns(pod, rules) {
        engine.set_pod(PodFacts::read(pod, rules));
    } else {
        engine.set_plain(pod);
    }
}

async fn watch_nodes(engine: Arc<Engine>, client: Client, synced: Sender<Synced>) {
    let mut listed = HashSet::<String>::new();
    let apply = |node: &NodeView<'_>| {
        engine.set_node(&node.metadata.name, NodeFacts::read(node, &engine.settings().rules.dialect));
    };
    let updates = watch(Api::<Watched<NodeView<'static>>>::all(client), Config::default());
    follow(
        updates,
        || {},
        |event| match event {
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
        },
    )
    .await;
}

async fn watch_shadows(engine: Arc<Engine>, client: Client, synced: Sender<Synced>) {
    let mut listed = HashSet::<String>::new();
    let apply = |shadow: DeserializeGuard<GPUShadow>| {
        let Ok(GPUShadow { metadata, status: Some(status), .. }) = shadow.0 else { return };
        let owners = metadata.owner_references.into_iter().flatten();
        let node = owners.filter(|owner| owner.kind == "Node").map(|owner| owner.uid).next();
        engine.set_shadow(&metadata.name.unwrap_or_default(), ShadowFacts::read(&status).of_node(node));
    };
    let api = Api::<DeserializeGuard<GPUShadow>>::all(client);
    // Without the definition no node agent has published anything: every node is known by its capacity alone.
    let undefined = || synced.send_modify(|synced| synced.shadows = true);
    let updates = watch_guarded(api, Config::default(), engine.metrics().skipped_objects.clone());
    follow(updates, undefined, |event| match event {
        Event::Init => listed.clear(),
        Event::InitApply(shadow) => {
            listed.insert(shadow.name_any());
            apply(shadow);
        }
        Event::InitDone => {
            for name in names_besides(&engine, &listed) {
                engine.remove_shadow(&name);
            }
            synced.send_modify(|synced| synced.shadows = true);
        }
        Event::Apply(shadow) => apply(shadow),
        Event::Delete(shadow) => engine.remove_shadow(&shadow.name_any()),
    })
    .await;
}

async fn watch_config(engine: Arc<Engine>, client: Client, synced: Sender<Synced>) {
    let api = Api::<DeserializeGuard<GPUConfig>>::all(client);
    let undefined = || synced.send_modify(|synced| synced.config = true);
    // The new configuration; `None` where it is malformed and the former one stays.
    let mut listed = Some(GPUConfigSpec::default());
    let updates = watch_guarded(api, Config::default(), engine.metrics().skipped_objects.clone());
    follow(updates, undefined, |event| match event {
        Event::Init => listed = Some(GPUConfigSpec::default()),
        Event::InitApply(config) => listed = config.0.ok().map(|config| config.spec),
        Event::InitDone => {
            if let Some(spec) = listed.take() {
                engine.set_config(spec);
            }
            synced.send_modify(|synced| synced.config = true);
        }
        Event::Apply(config) => {
            if let Ok(config) = config.0 {
                engine.set_config(config.spec);
            }
        }
        Event::Delete(_) => engine.set_config(GPUConfigSpec::default()),
    })
    .await;
}

fn names_besides(engine: &Engine, listed: &HashSet<String>) -> Vec<Arc<str>> {
    engine.read(|cluster| {
        let all = cluster.nodes().filter(|info| !listed.contains(&*info.name));
        all.map(|info| Arc::clone(&info.name)).collect()
    })
}

/// Hands every event to `on`. Calls `undefined` where there is no such resource.
async fn follow<K>(
    mut updates: impl Stream<Item = Update<K>> + Unpin,
    undefined: impl Fn(),
    mut on: impl FnMut(Event<K>),
) {
    while let Some(update) = updates.next().await {
        match update {
            Update::Event(event) => on(event),
            Update::Undefined => undefined(),
            Update::Interrupted => {}
        }
    }
}
