//! The namespaces that have opted in: whole-card pods of others are neither annotated nor deleted (I4).

use std::collections::BTreeSet;
use std::sync::Arc;

use futures::StreamExt;
use gpu_migrate_model::names;
use gpu_migrate_runtime::watch::{Update, watch};
use k8s_openapi::api::core::v1::Namespace;
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::{Config, Event};
use kube::{Api, Client, ResourceExt};
use tokio_util::sync::CancellationToken;

use crate::node::Node;

/// Follows them until `stop`. Until they are known none has opted in.
pub async fn follow(client: Client, node: Arc<Node>, stop: CancellationToken) {
    let config = Config::default().labels(&format!("{}=true", names::OPT_IN));
    let mut updates = watch(Api::<PartialObjectMeta<Namespace>>::all(client), config);
    let mut known = BTreeSet::new();
    let mut listed = BTreeSet::new();
    while let Some(Some(update)) = stop.run_until_cancelled(updates.next()).await {
        let Update::Event(event) = update else { continue };
        match event {
            Event::Init => listed.clear(),
            Event::InitApply(namespace) => {
                listed.insert(namespace.name_any());
                continue;
            }
            Event::InitDone => known = std::mem::take(&mut listed),
            Event::Apply(namespace) => {
                known.insert(namespace.name_any());
            }
            // Also where its label was removed.
            Event::Delete(namespace) => {
                known.remove(&namespace.name_any());
            }
        }
        node.with(|state, _| state.observe_opted_in(&known));
    }
}
