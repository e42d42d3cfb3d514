//! The GPUMigration reconciler: decide from what the watches have shown, write the status, act. Level-triggered, by changes of the policies
//! and by when each is due.

use crate::metrics::{ActionLabels, Metrics, PolicyLabels};
use crate::patches;
use crate::project::{Listed, Observed, missing};
use crate::query::Prometheus;
use crate::watched::{Watched, api_resource};
use crate::waves::{Action, BlockingPod, Decision, Input, Key, step};
use futures::{FutureExt as _, StreamExt as _};
use gpu_migrate_model::crd::GPUMigration;
use gpu_migrate_runtime::watch::{self, SkippedObjects};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams,
    Preconditions,
};
use kube::core::DeserializeGuard;
use kube::runtime::events::{Event, EventType, Recorder};
use kube::runtime::watcher::Config;
use kube::{Client, Resource as _, ResourceExt as _};
use std::collections::BTreeMap;
use std::pin::pin;
use std::time::Duration;
use tokio::time::Instant;

pub(crate) const MANAGER: &str = "gpu-migrate-operator";
/// Retry interval after a failure.
const INTERVAL: Duration = Duration::from_secs(2);
/// Reconcile interval of policies that are not in progress.
const IDLE_INTERVAL: Duration = Duration::from_secs(30);
/// Shortest interval of one in progress while workloads and pods change.
const GATHER: Duration = Duration::from_secs(1);

/// The generation of a policy and when it got its last command.
type Version = (Option<i64>, Option<String>);

fn version(policy: &GPUMigration) -> Version {
    let command = policy.status.as_ref().and_then(|status| status.command.as_ref());
    (policy.metadata.generation, command.map(|command| command.at.clone()))
}

/// When a policy is due again.
struct Due {
    /// What was reconciled last, and when.
    version: Version,
    reconciled: Timestamp,
    at: Timestamp,
    in_progress: bool,
}

/// What came of a look at all policies.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Reconciled {
    /// Those that were due were reconciled.
    All,
    /// None was: this is not seen yet.
    Waits(String),
}

fn until(at: Timestamp, now: Timestamp) -> Duration {
    at.duration_since(now).try_into().unwrap_or_default()
}

pub(crate) struct Migrations {
    client: Client,
    watched: Watched,
    metrics: Metrics,
    due: BTreeMap<String, Due>,
    interval: Duration,
    prometheus: Prometheus,
}

impl Migrations {
    pub(crate) fn new(client: Client, metrics: Metrics) -> Self {
        let watched = Watched::new(client.clone(), &metrics.skipped_objects);
        let (due, prometheus) = (BTreeMap::new(), Prometheus::default());
        Self { client, watched, metrics, due, interval: INTERVAL, prometheus }
    }

    /// With another interval than two seconds; all others change in proportion.
    pub(crate) fn with_interval(self, interval: Duration) -> Self {
        Self { interval, ..self }
    }

    /// With a CA and a token for the queries of gates.
    pub(crate) fn with_prometheus(self, prometheus: Prometheus) -> Self {
        Self { prometheus, ..self }
    }

    /// Reconciles until it is dropped: when a policy changes, and when one is due. Policies are read anew each time: their watch says only
    /// that there is something to read.
    pub(crate) async fn run(mut self) {
        let policies = Api::<DeserializeGuard<GPUMigration>>::all(self.client.clone());
        // Objects that cannot be read are counted where they are listed.
        let mut changes = watch::watch_guarded(policies, Config::default(), SkippedObjects::default());
        let mut waits_since = None;
        loop {
            self.metrics.reconciles.inc();
            let now = Timestamp::now();
            let outcome = self.reconcile_all(now).await;
            let current = matches!(outcome, Ok(Reconciled::All));
            let due = match outcome {
                Ok(Reconciled::All) => {
                    waits_since = None;
                    let due = self.due.values().map(|due| due.at).min();
                    due.map_or(IDLE_INTERVAL, |at| until(at, now))
                }
                Ok(Reconciled::Waits(what)) => {
                    if waits_since.get_or_insert_with(Instant::now).elapsed() >= IDLE_INTERVAL {
                        self.metrics.failures.inc();
                        tracing::warn!(
                            what,
                            "no policy is reconciled before the watches have shown this; they need the rights list and watch"
                        );
                    }
                    IDLE_INTERVAL
                }
                Err(error) => {
                    self.metrics.failures.inc();
                    tracing::warn!(%error, "listing policies failed; retrying");
                    self.interval
                }
            };
            let mut due = pin!(tokio::time::sleep(due));
            loop {
                tokio::select! {
                    () = &mut due => break,
                    _ = changes.next() => {
                        // Those that come together are read together.
                        while changes.next().now_or_never().is_some() {}
                        break;
                    }
                    Some(change) = self.watched.next() => {
                        if self.watched.take(change) && waits_since.is_some() {
                            break;
                        }
                        if let Some(sooner) = self.hasten().filter(|_| current) {
                            let sooner = Instant::now() + until(sooner, Timestamp::now());
                            let next = due.deadline().min(sooner);
                            due.as_mut().reset(next);
                        }
                    }
                }
            }
        }
    }

    /// Workloads or pods have changed: when policies in progress are due for that.
    fn hasten(&mut self) -> Option<Timestamp> {
        let gather = GATHER.min(self.interval);
        let in_progress = self.due.values_mut().filter(|due| due.in_progress);
        let hastened = in_progress.map(|due| {
            due.at = due.at.min(due.reconciled + gather);
            due.at
        });
        hastened.min()
    }

    /// Reconciles every policy that is due. A failure of one does not affect the others.
    pub(crate) async fn reconcile_all(&mut self, now: Timestamp) -> kube::Result<Reconciled> {
        let api = Api::<DeserializeGuard<GPUMigration>>::all(self.client.clone());
        let policies = watch::list(&api, &ListParams::default(), &self.metrics.skipped_objects).await?;
        let policies = policies.into_iter().map(GPUMigration::in_force).collect::<Vec<_>>();
        self.due.retain(|name, _| {
            let exists = policies.iter().any(|policy| policy.name_any() == *name);
            if !exists {
                self.metrics.stalled.remove(&PolicyLabels { policy: name.clone() });
            }
            exists
        });
        let scopes = policies.iter().map(|policy| (policy.name_any(), policy.spec.clone())).collect();
        let due = policies
            .into_iter()
            .filter(|policy| match self.due.get(&policy.name_any()) {
                Some(due) => due.version != version(policy) || due.at <= now,
                None => true,
            })
            .collect::<Vec<_>>();
        if due.is_empty() {
            return Ok(Reconciled::All);
        }
        let listed = match self.watched.listed(scopes) {
            Ok(listed) => listed,
            Err(what) => return Ok(Reconciled::Waits(what)),
        };
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
            let in_progress = requeue_after < IDLE_INTERVAL;
            let requeue_after = requeue_after.mul_f64(self.interval.as_secs_f64() / INTERVAL.as_secs_f64());
            let (version, at) = (version(&policy), now + requeue_after);
            self.due.insert(name, Due { version, reconciled: now, at, in_progress });
        }
        Ok(Reconciled::All)
    }

    /// Reconciles one policy; returns when it is due again.
    async fn reconcile(
        &mut self,
        policy: &GPUMigration,
        listed: &Listed,
        now: Timestamp,
    ) -> kube::Result<Duration> {
        let Observed { workloads: seen, counts, conflicts } = listed.of_policy(&policy.name_any());
        let status = policy.status.clone().unwrap_or_default();
        let decide = |answer: Option<&Result<f64, String>>| {
            let generation = policy.metadata.generation.unwrap_or(0);
            step(Input { spec: &policy.spec, generation, status: &status, seen: &seen, answer, now })
        };
        let mut decision = decide(None);
        if let (true, Some(asked)) = (decision.needs_query, &policy.spec.rollout.gate.query) {
            decision = decide(Some(&self.prometheus.evaluate(asked).await));
        }
        let missing = missing(&policy.spec, &seen);
        let name = policy.name_any();
        let of = (name.as_str(), policy.metadata.resource_version.as_deref());
        let body = patches::status(of, &decision, counts, (&missing, &conflicts), &status.conditions, now);
        // The status first: after a crash between the two, the next operator continues the wave.
        Api::<GPUMigration>::all(self.client.clone())
            .patch_status(&policy.name_any(), &PatchParams::apply(MANAGER).force(), &Patch::Apply(&body))
            .await?;
        let labels = PolicyLabels { policy: name };
        self.metrics.stalled.get_or_create(&labels).set(i64::from(decision.stalled.is_some()));
        publish_event(&self.client, policy, &decision).await;
        // One that fails does not keep the others: they are in the status as restarting already.
        let mut failed = None;
        for action in &decision.actions {
            if let Err(error) = self.act(action, listed, now).await {
                tracing::warn!(policy = policy.name_any(), ?action, %error, "a workload was not changed; retrying");
                failed = Some(error);
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        Ok(decision.requeue_after.unwrap_or(IDLE_INTERVAL))
    }

    async fn act(&mut self, action: &Action, listed: &Listed, now: Timestamp) -> kube::Result<()> {
        let (key, verb) = match action {
            Action::Convert(key, _) => (key, "convert"),
            Action::RollBack(key, _) => (key, "roll_back"),
            Action::DeletePod(key, pod) => {
                return delete_pod(&self.client, &self.metrics, key, pod).await;
            }
        };
        let foreign = listed.foreign(key);
        let patch = patches::action(action, listed.version(key), foreign, now);
        let group = if key.kind == "CronJob" { "batch" } else { "apps" };
        let resource = foreign.map_or_else(
            || ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", &key.kind)),
            |foreign| api_resource(&foreign.kind),
        );
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &key.namespace, &resource);
        let params = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
        match api.patch_metadata(&key.name, &params, &Patch::Merge(&patch)).await {
            // Deleted or changed meanwhile: what it is now is seen at the next reconciliation.
            Err(kube::Error::Api(status)) if [404, 409].contains(&status.code) => Ok(()),
            Err(error) => Err(error),
            Ok(now) => {
                // A patch that changes nothing is followed by no event.
                if now.metadata.resource_version.as_deref() != listed.version(key) {
                    self.watched.note_change(key, listed.version(key));
                }
                tracing::info!(workload = %key, action = verb, "workload restarted");
                self.metrics.actions.get_or_create(&ActionLabels { action: verb }).inc();
                Ok(())
            }
        }
    }
}

/// Needs a right that the owner of the namespace grants; without it the status says what to do by hand.
async fn delete_pod(client: &Client, metrics: &Metrics, key: &Key, pod: &BlockingPod) -> kube::Result<()> {
    let pods = Api::<Pod>::namespaced(client.clone(), &key.namespace);
    let preconditions = Preconditions { uid: Some(pod.uid.clone()), resource_version: None };
    let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    match pods.delete(&pod.name, &params).await {
        Err(kube::Error::Api(status)) if [404, 409].contains(&status.code) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 403 => {
            tracing::warn!(workload = %key, pod = pod.name, "not allowed to delete the pod that blocks the rollback: bind the ClusterRole gpu-migrate-operator-rollback in its namespace, or delete the pod");
            Ok(())
        }
        Err(error) => Err(error),
        Ok(_) => {
            tracing::info!(workload = %key, pod = pod.name, "pod of the former template deleted");
            metrics.actions.get_or_create(&ActionLabels { action: "delete_pod" }).inc();
            Ok(())
        }
    }
}

/// Best effort. Each Event has its own recorder: one recorder would merge Events of the same reason into a series, and the
/// second wave would show the message of the first.
async fn publish_event(client: &Client, policy: &GPUMigration, decision: &Decision) {
    let Some((reason, note)) = &decision.event else { return };
    tracing::info!(policy = policy.name_any(), reason, note);
    let warning = matches!(*reason, "WaveFailed" | "WaveRolledBack" | "RollbackIncomplete");
    let event = Event {
        type_: if warning { EventType::Warning } else { EventType::Normal },
        reason: (*reason).to_owned(),
        note: Some(note.clone()),
        action: "Rollout".to_owned(),
        secondary: None,
    };
    let recorder = Recorder::new(client.clone(), MANAGER.into());
    if let Err(error) = recorder.publish(&event, &policy.object_ref(&())).await {
        tracing::warn!(policy = policy.name_any(), %error, "publishing an Event failed");
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use gpu_migrate_model::crd::{CommandAction, MigrationMode, MigrationPhase};
    use gpu_migrate_model::names;
    use http::{Request, Response};
    use k8s_openapi::api::apps::v1::Deployment;
    use kube::api::PostParams;
    use kube::client::Body;
    use serde_json::{Value, json};
    use std::sync::Arc;
    use std::sync::Mutex;

    /// Method and path, and body, of every write.
    type Written = Arc<Mutex<Vec<(String, Value)>>>;

    impl Migrations {
        /// Has seen what the API server lists.
        async fn listed(client: Client, metrics: Metrics) -> Self {
            let mut migrations = Self::new(client, metrics);
            migrations.see(|watched| watched.waits_for().is_none()).await;
            migrations
        }

        async fn see(&mut self, mut seen: impl FnMut(&mut Watched) -> bool) {
            while !seen(&mut self.watched) {
                let change = self.watched.next().await.unwrap();
                self.watched.take(change);
            }
        }
    }

    /// An API server that answers lists from a table, accepts every write, and records it.
    fn server(lists: Value) -> (Client, Written) {
        let written = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&written);
        let (service, mut handle) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        tokio::spawn(async move {
            while let Some((request, respond)) = handle.next_request().await {
                let (parts, body) = request.into_parts();
                let path = parts.uri.path().to_owned();
                if let Some(code) = lists["refused"][&path].as_u64() {
                    seen.lock().unwrap().push((format!("{} {path}", parts.method), json!(code)));
                    let status = json!({"kind": "Status", "status": "Failure", "code": code, "message": "refused", "reason": ""});
                    let body = Body::from(serde_json::to_vec(&status).unwrap());
                    let code = u16::try_from(code).unwrap();
                    respond.send_response(Response::builder().status(code).body(body).unwrap());
                    continue;
                }
                let answer = if parts.uri.query().is_some_and(|query| query.contains("watch=")) {
                    respond.send_response(Response::new(Body::empty()));
                    continue;
                } else if parts.method == "GET" {
                    let kind = path.rsplit('/').next().unwrap();
                    json!({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": lists[kind].as_array().cloned().unwrap_or_default()})
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
    async fn the_status_is_written_before_the_event_and_the_workload() {
        let (client, written) = server(cluster(json!({})));
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        Migrations::listed(client, Metrics::default()).await.reconcile_all(now).await.unwrap();
        let written = written.lock().unwrap();
        let calls = written.iter().map(|(call, _)| call.as_str()).collect::<Vec<_>>();
        assert_eq!(
            calls,
            [
                "PATCH /apis/gpu-migrate.io/v1alpha1/gpumigrations/m/status",
                "POST /apis/events.k8s.io/v1/namespaces/default/events",
                "PATCH /apis/apps/v1/namespaces/ns/deployments/d",
            ]
        );
        assert_eq!(written[0].1["status"]["phase"], "Running");
        assert_eq!(written[0].1["status"]["wave"], 1);
        assert_eq!(written[0].1["status"]["workloads"][0]["state"], "Restarting");
        assert_eq!(written[2].1["spec"]["template"]["metadata"]["labels"]["gpu-migrate.io/convert"], "true");
    }

    #[tokio::test]
    async fn a_malformed_policy_does_not_stop_the_others() {
        let mut lists = cluster(json!({}));
        let malformed = json!({"metadata": {"name": "bad"}, "spec": {"project": "q", "mode": "Sideways"}});
        lists["gpumigrations"].as_array_mut().unwrap().push(malformed);
        let (client, written) = server(lists);
        let metrics = Metrics::default();
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        Migrations::listed(client, metrics.clone()).await.reconcile_all(now).await.unwrap();
        assert_eq!(written.lock().unwrap()[0].1["status"]["phase"], "Running");
        assert_eq!(metrics.skipped_objects.count("GPUMigration"), 1);
    }

    #[tokio::test]
    async fn a_write_that_is_refused_keeps_neither_the_event_nor_the_other_workloads() {
        for (code, failures) in [(409, 0), (500, 1)] {
            let mut lists = cluster(json!({}));
            let mut second = lists["deployments"][0].clone();
            second["metadata"]["name"] = json!("e");
            lists["deployments"].as_array_mut().unwrap().push(second);
            lists["gpumigrations"][0]["spec"]["rollout"]["maxUnavailable"] = json!(2);
            lists["refused"] = json!({"/apis/apps/v1/namespaces/ns/deployments/d": code});
            let (client, written) = server(lists);
            let metrics = Metrics::default();
            let now = Timestamp::from_second(1_800_000_000).unwrap();
            Migrations::listed(client, metrics.clone()).await.reconcile_all(now).await.unwrap();
            let written = written.lock().unwrap();
            let calls = written.iter().map(|(call, _)| call.as_str()).skip(1).collect::<Vec<_>>();
            assert_eq!(calls[0], "POST /apis/events.k8s.io/v1/namespaces/default/events");
            let mut patched = calls[1..].to_vec();
            patched.sort_unstable();
            let of = |name| format!("PATCH /apis/apps/v1/namespaces/ns/deployments/{name}");
            assert_eq!(patched, [of("d"), of("e")], "{code}");
            // One that has changed meanwhile is no failure: what it is now is seen at the next look.
            assert_eq!(metrics.failures.get(), failures, "{code}");
        }
    }

    #[tokio::test]
    async fn a_policy_that_is_deleted_leaves_its_workloads_as_they_are() {
        let mut lists = cluster(json!({}));
        lists["deployments"][0]["spec"]["template"]["metadata"]["labels"][names::CONVERT] = json!("true");
        let policies = lists["gpumigrations"].take();
        for (policies, calls) in [(json!([]), 0), (policies, 1)] {
            lists["gpumigrations"] = policies;
            let (client, written) = server(lists.clone());
            let now = Timestamp::from_second(1_800_000_000).unwrap();
            Migrations::listed(client, Metrics::default()).await.reconcile_all(now).await.unwrap();
            let written = written.lock().unwrap();
            assert_eq!(written.iter().filter(|(call, _)| call.ends_with("/m/status")).count(), calls);
            assert!(calls > 0 || written.is_empty(), "{written:?}");
        }
    }

    #[tokio::test]
    async fn an_idle_policy_is_reconciled_less_often() {
        let complete = json!({"phase": "Complete", "wave": 1, "observedGeneration": 1});
        let mut lists = cluster(complete);
        lists["deployments"] = json!([]);
        let (client, written) = server(lists);
        let mut migrations = Migrations::listed(client, Metrics::default()).await;
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        migrations.reconcile_all(now).await.unwrap();
        migrations.reconcile_all(now + Duration::from_secs(10)).await.unwrap();
        assert_eq!(written.lock().unwrap().len(), 1);
        migrations.reconcile_all(now + Duration::from_secs(31)).await.unwrap();
        assert_eq!(written.lock().unwrap().len(), 2);
    }

    /// An API server with our definitions.
    pub(crate) async fn api_server() -> (gpu_migrate_sim::cluster::api::Running, Client) {
        gpu_migrate_runtime::install_crypto_provider();
        let running = gpu_migrate_sim::cluster::api::ApiServer::default();
        let running = running.serve(0, tokio_util::sync::CancellationToken::new()).await.unwrap();
        let client = running.client().unwrap();
        for definition in gpu_migrate_model::crd::definitions() {
            let path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
            let object = serde_json::to_value(definition).unwrap();
            gpu_migrate_sim::cluster::json_client::create(&client, path, &object).await.unwrap();
        }
        (running, client)
    }

    #[tokio::test]
    async fn a_change_of_a_policy_is_acted_upon_before_it_is_due() {
        let (_running, client) = api_server().await;
        let policies = Api::<GPUMigration>::all(client.clone());
        let mut policy = cluster(json!({}))["gpumigrations"][0].take();
        policy["metadata"] = json!({"name": "m"});
        policy["spec"]["mode"] = json!("Audit");
        policies.create(&PostParams::default(), &serde_json::from_value(policy).unwrap()).await.unwrap();
        // Retries are not what brings it.
        let never = Duration::from_secs(3600);
        let migrations = Migrations::new(client.clone(), Metrics::default()).with_interval(never).run();
        let edits = async {
            let phase = async |wanted: MigrationPhase| {
                while policies.get("m").await.unwrap().status.is_none_or(|status| status.phase != wanted) {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            };
            phase(MigrationPhase::Idle).await;
            let paused = json!({"spec": {"mode": "Enforce", "rollout": {"paused": true}}});
            policies.patch("m", &PatchParams::default(), &Patch::Merge(&paused)).await.unwrap();
            phase(MigrationPhase::Paused).await;
        };
        tokio::select! {
            () = migrations => panic!("it ended"),
            outcome = tokio::time::timeout(Duration::from_secs(60), edits) => outcome.expect("it waits until the policy is due"),
        }
    }

    #[tokio::test]
    async fn a_workload_that_becomes_ready_is_seen_before_its_policy_is_due() {
        let (_running, client) = api_server().await;
        let create = async |path: &str, object: Value| {
            gpu_migrate_sim::cluster::json_client::create(&client, path, &object).await.unwrap();
        };
        let mut lists = cluster(json!({}));
        let mut namespace = json!({"apiVersion": "v1", "kind": "Namespace"});
        namespace["metadata"] = lists["namespaces"][0]["metadata"].take();
        create("/api/v1/namespaces", namespace).await;
        let mut deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d", "namespace": "ns"}});
        deployment["spec"] = lists["deployments"][0]["spec"].take();
        deployment["spec"]["replicas"] = json!(0);
        create("/apis/apps/v1/namespaces/ns/deployments", deployment).await;
        let rolled_out = async || {
            let deployments = Api::<Deployment>::namespaced(client.clone(), "ns");
            let generation = deployments.get("d").await.unwrap().metadata.generation;
            let status = json!({"status": {"observedGeneration": generation}});
            deployments.patch_status("d", &PatchParams::default(), &Patch::Merge(&status)).await.unwrap();
        };
        rolled_out().await;
        let policies = Api::<GPUMigration>::all(client.clone());
        let mut policy = lists["gpumigrations"][0].take();
        policy["metadata"] = json!({"name": "m"});
        policy["spec"]["rollout"]["gate"] = json!({"soakSeconds": 0});
        policies.create(&PostParams::default(), &serde_json::from_value(policy).unwrap()).await.unwrap();
        let never = Duration::from_secs(3600);
        let migrations = Migrations::new(client.clone(), Metrics::default()).with_interval(never).run();
        let edits = async {
            let phase = async |wanted: MigrationPhase| {
                while policies.get("m").await.unwrap().status.is_none_or(|status| status.phase != wanted) {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            };
            phase(MigrationPhase::Running).await;
            // Its controller has not seen the change of the template yet.
            rolled_out().await;
            phase(MigrationPhase::Complete).await;
        };
        tokio::select! {
            () = migrations => panic!("it ended"),
            outcome = tokio::time::timeout(Duration::from_secs(60), edits) => outcome.expect("it waits until the policy is due"),
        }
    }

    /// What a GitOps controller does at each sync: it applies its manifests and takes back what differs in the fields that they have.
    async fn sync(client: &Client, path: &str, kind: &str, object: &Value) {
        let group_version = path.split('/').skip(2).take(2).collect::<Vec<_>>().join("/");
        let mut object = object.clone();
        (object["apiVersion"], object["kind"]) = (json!(group_version), json!(kind));
        let path = format!("{path}?fieldManager=argocd-controller&force=true");
        let request = Request::patch(path).header("content-type", "application/apply-patch+yaml");
        client.request_text(request.body(serde_json::to_vec(&object).unwrap()).unwrap()).await.unwrap();
    }

    #[tokio::test]
    async fn a_self_healing_gitops_controller_reverts_neither_a_command_nor_a_wave() {
        let (_running, client) = api_server().await;
        let create = async |path: &str, object: Value| {
            gpu_migrate_sim::cluster::json_client::create(&client, path, &object).await.unwrap();
        };
        let mut in_git = cluster(json!({}));
        let namespace =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": in_git["namespaces"][0]["metadata"]});
        create("/api/v1/namespaces", namespace).await;
        let mut policy = in_git["gpumigrations"][0].take();
        policy["metadata"] = json!({"name": "m"});
        policy["spec"]["mode"] = json!("Audit");
        policy["spec"]["rollout"]["gate"] = json!({"soakSeconds": 0});
        policy.as_object_mut().unwrap().remove("status");
        let mut deployment = in_git["deployments"][0].take();
        deployment["metadata"] = json!({"name": "d", "namespace": "ns"});
        deployment["spec"]["replicas"] = json!(0);
        deployment.as_object_mut().unwrap().remove("status");

        let policies = Api::<GPUMigration>::all(client.clone());
        let deployments = Api::<Deployment>::namespaced(client.clone(), "ns");
        let mut migrations = Migrations::new(client.clone(), Metrics::default());
        let mut now = Timestamp::from_second(1_800_000_000).unwrap();
        let mut round = async || {
            now += Duration::from_secs(31);
            sync(&client, "/apis/gpu-migrate.io/v1alpha1/gpumigrations/m", "GPUMigration", &policy).await;
            sync(&client, "/apis/apps/v1/namespaces/ns/deployments/d", "Deployment", &deployment).await;
            let generation = deployments.get("d").await.unwrap().metadata.generation;
            let ready = json!({"status": {"observedGeneration": generation}});
            let patch = Patch::Merge(&ready);
            let now_is = deployments.patch_status("d", &PatchParams::default(), &patch).await.unwrap();
            migrations
                .see(|watched| {
                    let version = watched.version("Deployment", "ns", "d");
                    watched.waits_for().is_none() && version == now_is.resource_version()
                })
                .await;
            migrations.reconcile_all(now).await.unwrap();
            let labels = deployments.get("d").await.unwrap().spec.unwrap().template.metadata.unwrap().labels;
            let phase = policies.get("m").await.unwrap().status.unwrap_or_default().phase;
            (phase, labels.is_some_and(|labels| labels.contains_key(names::CONVERT)))
        };
        assert_eq!(round().await, (MigrationPhase::Idle, false));
        let give = async |action: CommandAction, at: &str| {
            let command = action.command(&policies.get("m").await.unwrap(), at.to_owned());
            let patch = json!({"status": {"command": command}});
            policies.patch_status("m", &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
        };
        give(CommandAction::Start, "2026-01-01T00:00:00Z").await;
        assert_eq!(round().await, (MigrationPhase::Running, true));
        for _ in 0..3 {
            assert_eq!(round().await, (MigrationPhase::Complete, true));
        }
        give(CommandAction::Undo, "2026-01-02T00:00:00Z").await;
        assert_eq!(round().await, (MigrationPhase::RollingBack, false));
        for _ in 0..3 {
            assert_eq!(round().await, (MigrationPhase::Idle, false));
        }
        assert_eq!(policies.get("m").await.unwrap().spec.mode, MigrationMode::Audit, "Git's word");
    }
}
