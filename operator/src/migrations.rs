//! The GPUMigration reconciler: list, decide, write the status, act. Level-triggered.

use crate::metrics::{ActionLabels, Metrics};
use crate::project::{Listed, Workload, missing};
use crate::waves::{Action, Decision, Input, step};
use crate::{patches, query};
use gpu_migrate_model::crd::GPUMigration;
use gpu_migrate_model::names;
use gpu_migrate_runtime::watch;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, StatefulSet};
use k8s_openapi::api::batch::v1::CronJob;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams};
use kube::core::{DeserializeGuard, NamespaceResourceScope};
use kube::runtime::events::{Event, EventType, Recorder};
use kube::{Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::time::Duration;

pub(crate) const MANAGER: &str = "gpu-migrate-operator";
/// Reconcile interval of policies that are in progress.
const INTERVAL: Duration = Duration::from_secs(2);
/// Reconcile interval of policies that are not.
const IDLE_INTERVAL: Duration = Duration::from_secs(30);

pub(crate) struct Migrations {
    client: Client,
    metrics: Metrics,
    /// Last reconciled generation of each policy and when it is due again.
    due: BTreeMap<String, (Option<i64>, Timestamp)>,
}

impl Migrations {
    pub(crate) fn new(client: Client, metrics: Metrics) -> Self {
        Self { client, metrics, due: BTreeMap::new() }
    }

    /// Reconciles until it is dropped.
    pub(crate) async fn run(mut self) {
        loop {
            self.metrics.reconciles.inc();
            if let Err(error) = self.reconcile_all(Timestamp::now()).await {
                self.metrics.failures.inc();
                tracing::warn!(%error, "listing policies and workloads failed; retrying");
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }

    /// Reconciles every policy that is due. A failure of one does not affect the others.
    pub(crate) async fn reconcile_all(&mut self, now: Timestamp) -> kube::Result<()> {
        let api = Api::<DeserializeGuard<GPUMigration>>::all(self.client.clone());
        let policies = watch::list(&api, &ListParams::default(), &self.metrics.skipped_objects).await?;
        self.due.retain(|name, _| policies.iter().any(|policy| policy.name_any() == *name));
        let due = policies
            .into_iter()
            .filter(|policy| match self.due.get(&policy.name_any()) {
                Some((generation, at)) => *generation != policy.metadata.generation || *at <= now,
                None => true,
            })
            .collect::<Vec<_>>();
        if due.is_empty() {
            return Ok(());
        }
        let listed = self.list().await?;
        for policy in due {
            let name = policy.name_any();
            let requeue_after = match self.reconcile(&policy, &listed, now).await {
                Ok(requeue_after) => requeue_after,
                Err(error) => {
                    self.metrics.failures.inc();
                    tracing::warn!(policy = name, %error, "reconcile failed; retrying");
                    INTERVAL
                }
            };
            self.due.insert(name, (policy.metadata.generation, now + requeue_after));
        }
        Ok(())
    }

    /// Reconciles one policy; returns when it is due again.
    async fn reconcile(
        &self,
        policy: &GPUMigration,
        listed: &Listed,
        now: Timestamp,
    ) -> kube::Result<Duration> {
        let (seen, counts) = listed.of_policy(&policy.name_any(), &policy.spec);
        let status = policy.status.clone().unwrap_or_default();
        let decide = |answer: Option<&Result<f64, String>>| {
            let generation = policy.metadata.generation.unwrap_or(0);
            step(Input { spec: &policy.spec, generation, status: &status, seen: &seen, answer, now })
        };
        let mut decision = decide(None);
        if let (true, Some(asked)) = (decision.needs_query, &policy.spec.rollout.gate.query) {
            decision = decide(Some(&query::evaluate(asked).await));
        }
        let missing = missing(&policy.spec, &seen);
        let name = policy.name_any();
        let of = (name.as_str(), policy.metadata.resource_version.as_deref());
        let body = patches::status(of, &decision, counts, &missing, &status.conditions, now);
        // The status first: after a crash between the two, the next operator continues the wave.
        Api::<GPUMigration>::all(self.client.clone())
            .patch_status(&policy.name_any(), &PatchParams::apply(MANAGER).force(), &Patch::Apply(&body))
            .await?;
        for action in &decision.actions {
            self.act(action, listed, now).await?;
        }
        self.publish_event(policy, &decision).await;
        Ok(decision.requeue_after.unwrap_or(IDLE_INTERVAL))
    }

    async fn act(&self, action: &Action, listed: &Listed, now: Timestamp) -> kube::Result<()> {
        let (Action::Convert(key) | Action::RollBack(key)) = action;
        let (key, patch) = patches::action(action, listed.version(key), now);
        let (group, verb) = match (key.kind.as_str(), action) {
            ("CronJob", Action::Convert(_)) => ("batch", "convert"),
            ("CronJob", Action::RollBack(_)) => ("batch", "roll_back"),
            (_, Action::Convert(_)) => ("apps", "convert"),
            (_, Action::RollBack(_)) => ("apps", "roll_back"),
        };
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", &key.kind));
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &key.namespace, &resource);
        let params = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
        match api.patch_metadata(&key.name, &params, &Patch::Merge(&patch)).await {
            // Deleted meanwhile.
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            Err(error) => Err(error),
            Ok(_) => {
                tracing::info!(workload = %key, action = verb, "workload restarted");
                self.metrics.actions.get_or_create(&ActionLabels { action: verb }).inc();
                Ok(())
            }
        }
    }

    /// Best effort. Each Event has its own recorder: one recorder would merge Events of the same reason into a series, and the
    /// second wave would show the message of the first.
    async fn publish_event(&self, policy: &GPUMigration, decision: &Decision) {
        let Some((reason, note)) = &decision.event else { return };
        tracing::info!(policy = policy.name_any(), reason, note);
        let warning = matches!(*reason, "WaveFailed" | "WaveRolledBack");
        let event = Event {
            type_: if warning { EventType::Warning } else { EventType::Normal },
            reason: (*reason).to_owned(),
            note: Some(note.clone()),
            action: "Rollout".to_owned(),
            secondary: None,
        };
        let recorder = Recorder::new(self.client.clone(), MANAGER.into());
        if let Err(error) = recorder.publish(&event, &policy.object_ref(&())).await {
            tracing::warn!(policy = policy.name_any(), %error, "publishing an Event failed");
        }
    }

    async fn list(&self) -> kube::Result<Listed> {
        let opted_in = ListParams::default().labels(&format!("{}=true", names::OPT_IN));
        let namespaces = Api::<Namespace>::all(self.client.clone()).list(&opted_in).await?.items;
        let mut listed = Listed { namespaces, ..Listed::default() };
        for namespace in listed.namespaces.iter().map(kube::ResourceExt::name_any) {
            let client = &self.client;
            let deployments = all::<Deployment>(client, &namespace).await?;
            let stateful_sets = all::<StatefulSet>(client, &namespace).await?;
            let daemon_sets = all::<DaemonSet>(client, &namespace).await?;
            let cron_jobs = all::<CronJob>(client, &namespace).await?;
            listed.workloads.extend(deployments.iter().filter_map(Workload::of_deployment));
            listed.workloads.extend(stateful_sets.iter().filter_map(Workload::of_stateful_set));
            listed.workloads.extend(daemon_sets.iter().filter_map(Workload::of_daemon_set));
            listed.workloads.extend(cron_jobs.iter().filter_map(Workload::of_cron_job));
            listed.pods.extend(all::<Pod>(client, &namespace).await?);
        }
        Ok(listed)
    }
}

async fn all<K>(client: &Client, namespace: &str) -> kube::Result<Vec<K>>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    Ok(Api::<K>::namespaced(client.clone(), namespace).list(&ListParams::default()).await?.items)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::{Value, json};
    use std::sync::{Arc, Mutex};

    /// Method and path, and body, of every write.
    type Written = Arc<Mutex<Vec<(String, Value)>>>;

    /// An API server that answers lists from a table, accepts every write, and records it.
    fn server(lists: Value) -> (Client, Written) {
        let written = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&written);
        let (service, mut handle) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        tokio::spawn(async move {
            while let Some((request, respond)) = handle.next_request().await {
                let (parts, body) = request.into_parts();
                let path = parts.uri.path().to_owned();
                let answer = if parts.method == "GET" {
                    let kind = path.rsplit('/').next().unwrap();
                    json!({"kind": "List", "apiVersion": "v1", "metadata": {}, "items": lists[kind].as_array().cloned().unwrap_or_default()})
                } else {
                    let body: Value = serde_json::from_slice(&body.collect_bytes().await.unwrap()).unwrap();
                    seen.lock().unwrap().push((format!("{} {path}", parts.method), body.clone()));
                    let mut answer = body;
                    answer["metadata"]["name"] = json!(path.rsplit('/').find(|part| *part != "status"));
                    if path.ends_with("/status") {
                        answer["spec"] = lists["gpumigrations"][0]["spec"].clone();
                    }
                    answer
                };
                respond.send_response(Response::new(Body::from(serde_json::to_vec(&answer).unwrap())));
            }
        });
        (Client::new(service, "default"), written)
    }

    fn cluster(status: Value) -> Value {
        let pods = json!({"metadata": {"labels": {"app": "d"}}, "spec": {"containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]}});
        json!({
            "gpumigrations": [{"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUMigration", "metadata": {"name": "m", "uid": "u", "generation": 1},
                "spec": {"project": "p", "mode": "Enforce", "rollout": {"waves": [{"percent": 100}]}}, "status": status}],
            "namespaces": [{"metadata": {"name": "ns", "labels": {"gpu-migrate.io/opt-in": "true", "gpu-migrate.io/project": "p"}}}],
            "deployments": [{"metadata": {"name": "d", "namespace": "ns", "generation": 1},
                "spec": {"replicas": 1, "selector": {"matchLabels": {"app": "d"}}, "template": pods},
                "status": {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1, "availableReplicas": 1}}],
        })
    }

    #[tokio::test]
    async fn the_status_is_written_before_the_workload_and_the_event() {
        let (client, written) = server(cluster(json!({})));
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        Migrations::new(client, Metrics::default()).reconcile_all(now).await.unwrap();
        let written = written.lock().unwrap();
        let calls = written.iter().map(|(call, _)| call.as_str()).collect::<Vec<_>>();
        assert_eq!(
            calls,
            [
                "PATCH /apis/gpu-migrate.io/v1alpha1/gpumigrations/m/status",
                "PATCH /apis/apps/v1/namespaces/ns/deployments/d",
                "POST /apis/events.k8s.io/v1/namespaces/default/events",
            ]
        );
        assert_eq!(written[0].1["status"]["phase"], "Running");
        assert_eq!(written[0].1["status"]["wave"], 0);
        assert_eq!(written[0].1["status"]["workloads"][0]["state"], "Restarting");
        assert_eq!(written[1].1["spec"]["template"]["metadata"]["labels"]["gpu-migrate.io/convert"], "true");
    }

    #[tokio::test]
    async fn a_malformed_policy_does_not_stop_the_others() {
        let mut lists = cluster(json!({}));
        let malformed = json!({"metadata": {"name": "bad"}, "spec": {"project": "q", "mode": "Sideways"}});
        lists["gpumigrations"].as_array_mut().unwrap().push(malformed);
        let (client, written) = server(lists);
        let metrics = Metrics::default();
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        Migrations::new(client, metrics.clone()).reconcile_all(now).await.unwrap();
        assert_eq!(written.lock().unwrap()[0].1["status"]["phase"], "Running");
        assert_eq!(metrics.skipped_objects.count("GPUMigration"), 1);
    }

    #[tokio::test]
    async fn an_idle_policy_is_reconciled_less_often() {
        let complete = json!({"phase": "Complete", "wave": 0, "observedGeneration": 1});
        let mut lists = cluster(complete);
        lists["deployments"] = json!([]);
        let (client, written) = server(lists);
        let mut migrations = Migrations::new(client, Metrics::default());
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        migrations.reconcile_all(now).await.unwrap();
        migrations.reconcile_all(now + Duration::from_secs(10)).await.unwrap();
        assert_eq!(written.lock().unwrap().len(), 1);
        migrations.reconcile_all(now + Duration::from_secs(31)).await.unwrap();
        assert_eq!(written.lock().unwrap().len(), 2);
    }
}
