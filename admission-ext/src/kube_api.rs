//! The API of a real cluster: Bindings, look-ups, annotations of Nodes, gates, Events.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use futures::TryFutureExt as _;
use gpu_migrate_model::names;
use gpu_migrate_model::view::WatchedPod;
use k8s_openapi::api::core::v1::{Binding as ApiBinding, Node, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{GetParams, Patch, PatchParams, PostParams};
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Api as KubeApi, Client};
use serde::Deserialize;
use serde_json::json;

use crate::api::{Api, BindFailure, Binding, Found};
use crate::state::pod::{PodFacts, PodGroups, Rules};

/// Field manager and reporting controller.
const MANAGER: &str = "gpu-migrate-extender";

pub struct Kube {
    client: Client,
    rules: Rules,
    timeout: Duration,
    recorder: Recorder,
}

impl Kube {
    /// The API behind `client`; a request is given up after `timeout`.
    #[must_use]
    pub fn new(client: Client, rules: Rules, timeout: Duration) -> Self {
        let reporter = Reporter { controller: MANAGER.to_owned(), instance: None };
        let recorder = Recorder::new(client.clone(), reporter);
        Self { client, rules, timeout, recorder }
    }

    async fn limited<T>(&self, work: impl Future<Output = kube::Result<T>>) -> Result<T, BindFailure> {
        match tokio::time::timeout(self.timeout, work).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(kube::Error::Api(status))) => Err(match status.code {
                409 => BindFailure::Conflict(status.message.clone()),
                400..=499 if status.code != 429 && status.code != 408 => {
                    BindFailure::Refused(status.message.clone())
                }
                _ => BindFailure::Unknown(status.message.clone()),
            }),
            Ok(Err(other)) => Err(BindFailure::Unknown(other.to_string())),
            Err(_) => {
                Err(BindFailure::Unknown(format!("no answer from the API server within {:?}", self.timeout)))
            }
        }
    }

    fn pods(&self, namespace: &str) -> KubeApi<Pod> {
        KubeApi::namespaced(self.client.clone(), namespace)
    }
}

#[derive(Deserialize)]
struct PodGroup {
    spec: PodGroupSpec,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodGroupSpec {
    min_member: Option<u32>,
}

#[async_trait]
impl Api for Kube {
    async fn bind(&self, binding: &Binding) -> Result<(), BindFailure> {
        let body = ApiBinding {
            metadata: ObjectMeta {
                name: Some(binding.name.to_string()),
                namespace: Some(binding.namespace.to_string()),
                uid: Some(binding.uid.to_string()),
                annotations: (!binding.annotations.is_empty()).then(|| binding.annotations.clone()),
                ..ObjectMeta::default()
            },
            target: ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Node".to_owned()),
                name: Some(binding.node.to_string()),
                ..ObjectReference::default()
            },
        };
        let body = serde_json::to_vec(&body).map_err(|error| BindFailure::Refused(error.to_string()))?;
        let request = kube::core::Request::new(format!("/api/v1/namespaces/{}/pods", binding.namespace));
        let request = request
            .create_subresource("binding", &binding.name, &PostParams::default(), body)
            .map_err(|error| BindFailure::Refused(error.to_string()))?;
        // The API server answers with a Status; that it is one of success is all there is to know.
        self.limited(self.client.request_text(request)).await.map(|_| ())
    }

    async fn look_up(&self, namespace: &str, name: &str, uid: &str) -> Result<Found, String> {
        let pods: KubeApi<WatchedPod> = KubeApi::namespaced(self.client.clone(), namespace);
        let found = self.limited(pods.get_opt(name)).await.map_err(|error| error.to_string())?;
        Ok(match found {
            Some(pod) if *pod.view.metadata.uid == *uid => {
                if pod.view.is_finished() {
                    Found::Finished
                } else {
                    Found::Pod(Box::new(PodFacts::read(&pod.view, &self.rules)))
                }
            }
            _ => Found::Gone,
        })
    }

    async fn requeue_pods_of(&self, node: &str) -> Result<(), String> {
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let patch = json!({"metadata": {"annotations": {names::CARDS_GENERATION: nanos.to_string()}}});
        let nodes: KubeApi<Node> = KubeApi::all(self.client.clone());
        let (params, patch) = (PatchParams::default(), Patch::Merge(&patch));
        let patched = nodes.patch_metadata(node, &params, &patch);
        match self.limited(patched).await {
            Ok(_) => Ok(()),
            // A node that is gone, most likely: trying again will not help.
            Err(BindFailure::Refused(why)) => {
                tracing::warn!(node, why, "node cannot be annotated");
                Ok(())
            }
            Err(failure) => Err(failure.to_string()),
        }
    }

    async fn lift_gate(&self, pod: &PodFacts) -> Result<(), String> {
        // A strategic merge removes the one gate by its name and leaves those of others.
        let patch = json!({
            "metadata": {"uid": &*pod.uid},
            "spec": {"schedulingGates": [{"$patch": "delete", "name": names::GANG_GATE}]},
        });
        let pods = self.pods(&pod.namespace);
        let params = PatchParams::default();
        let patch = Patch::Strategic(&patch);
        let patched = pods.patch_metadata(&pod.name, &params, &patch);
        self.limited(patched).await.map(|_| ()).map_err(|error| error.to_string())
    }

    async fn min_member(&self, namespace: &str, name: &str, group: PodGroups) -> Result<Option<u32>, String> {
        let path = format!("/apis/{}/namespaces/{namespace}/podgroups", group.api_version());
        let request = kube::core::Request::new(path).get(name, &GetParams::default());
        let request = request.map_err(|error| error.to_string())?;
        // Neither the object nor its kind need exist.
        let found =
            self.client.request::<PodGroup>(request).map_ok(Some).or_else(async |error| match error {
                kube::Error::Api(status) if status.code == 404 => Ok(None),
                other => Err(other),
            });
        let found = self.limited(found).await.map_err(|error| error.to_string())?;
        // Volcano's default.
        Ok(found.map(|group| group.spec.min_member.unwrap_or(1)))
    }

    async fn warn(&self, pod: &PodFacts, reason: &'static str, message: String) {
        let event = Event {
            type_: EventType::Warning,
            reason: reason.to_owned(),
            note: Some(message),
            action: "Binding".to_owned(),
            secondary: None,
        };
        let about = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: Some(pod.name.to_string()),
            namespace: Some(pod.namespace.to_string()),
            uid: Some(pod.uid.to_string()),
            ..ObjectReference::default()
        };
        if let Err(error) = self.recorder.publish(&event, &about).await {
            tracing::warn!(pod = %pod.shown(), %error, "event not written");
        }
    }
}
