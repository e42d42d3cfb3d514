//! The controllers that a story needs: Deployments, their ReplicaSets, and the collection of what nobody owns any more.
//!
//! Level-triggered: after any change they read the state as it is (from the API server, not from a cache, so that nothing is done
//! twice) and do what is missing.

mod deployment;
mod replicaset;

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::api::object::{items, meta, uid};
use super::api::{ApiServer, Running};
use super::cache::Cache;
use super::json_client;

/// Changes come in bursts; a short wait makes one round of them.
const SETTLE: Duration = Duration::from_millis(40);
/// A round without a change, for what was refused before (a webhook that is away backs off likewise).
const AGAIN: Duration = Duration::from_secs(2);
/// Finished pods that stay to be looked at.
const FINISHED: usize = 30;

/// Starts them; they run until `stop`.
pub fn start(running: &Running, client: Client, stop: CancellationToken) {
    let server = running.server.clone();
    tokio::spawn(stop.clone().run_until_cancelled_owned(run(server, client, stop)));
}

async fn run(server: Arc<ApiServer>, client: Client, stop: CancellationToken) {
    let changed = Arc::new(watch::Sender::new(0));
    // Only as alarm clocks.
    let _caches = (
        Cache::follow(Api::<Deployment>::all(client.clone()), changed.clone(), stop.clone()),
        Cache::follow(Api::<ReplicaSet>::all(client.clone()), changed.clone(), stop.clone()),
        Cache::follow(Api::<Pod>::all(client.clone()), changed.clone(), stop),
    );
    let mut changes = changed.subscribe();
    loop {
        changes.borrow_and_update();
        if let Err(error) = round(&server, &client).await {
            tracing::debug!(%error, "a round of the controllers failed");
        }
        tokio::time::sleep(SETTLE).await;
        tokio::select! { _ = changes.changed() => {}, () = tokio::time::sleep(AGAIN) => {} }
    }
}

async fn round(server: &ApiServer, client: &Client) -> kube::Result<()> {
    server.collect_garbage();
    let pods = json_client::list(client, "/api/v1/pods").await?;
    let sets = json_client::list(client, "/apis/apps/v1/replicasets").await?;
    for deployment in json_client::list(client, "/apis/apps/v1/deployments").await? {
        deployment::reconcile(client, &deployment, &owned(&deployment, &sets)).await?;
    }
    for set in json_client::list(client, "/apis/apps/v1/replicasets").await? {
        replicaset::reconcile(client, &set, &owned(&set, &pods)).await?;
    }
    forget_finished(client, &pods).await
}

/// The objects that `owner` controls.
fn owned<'a>(owner: &Value, objects: &'a [Value]) -> Vec<&'a Value> {
    let own = |object: &&Value| items(&object["metadata"], "ownerReferences").any(|o| o["uid"] == uid(owner));
    objects.iter().filter(own).collect()
}

fn owner_reference(owner: &Value, api_version: &str, kind: &str) -> Value {
    json!({
        "apiVersion": api_version, "kind": kind, "name": meta(owner, "name"), "uid": uid(owner),
        "controller": true, "blockOwnerDeletion": true,
    })
}

/// Keeps the newest finished pods that have an owner, as the pod garbage collector keeps a number of them.
async fn forget_finished(client: &Client, pods: &[Value]) -> kube::Result<()> {
    let over = |pod: &&Value| {
        pod["status"]["phase"] == "Failed" && items(&pod["metadata"], "ownerReferences").next().is_some()
    };
    let mut finished: Vec<&Value> = pods.iter().filter(over).collect();
    finished.sort_by_key(|pod| std::cmp::Reverse(super::api::store::version(pod)));
    for pod in finished.into_iter().skip(FINISHED) {
        json_client::delete(client, &path_of("/api/v1", "pods", pod)).await?;
    }
    Ok(())
}

fn path_of(api: &str, plural: &str, object: &Value) -> String {
    format!("{api}/namespaces/{}/{plural}/{}", meta(object, "namespace"), meta(object, "name"))
}
