//! A scheduler loop that calls an extender as kube-scheduler was seen to: one pod after the other through filter and prioritize, then
//! bind in the background with the pod already assumed; errors are retried with growing pauses, pods without a node when a node or an
//! assigned pod changes. Preemption is not there: a pod waits.

mod extender;
pub mod fit;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, Client};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use self::extender::ExtenderConfig;

use self::extender::Extender;
use self::fit::Amounts;
use super::api::object::{items, meta, name, namespace, uid};
use super::cache::Cache;
use super::json_client;

/// An assumption that the watch does not confirm ends: its bind was lost.
const ASSUMED: Duration = Duration::from_secs(30);

/// What is scheduled, and by whom.
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// Names of the profiles: pods of other schedulers are left alone.
    pub names: Vec<String>,
    pub extender: Option<ExtenderConfig>,
}

/// How the waits of pods came about, for who measures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerCounts {
    pub bound: u64,
    /// Cycles that ended without a node.
    pub unschedulable: u64,
    /// Cycles or binds that failed.
    pub errors: u64,
}

pub struct Scheduler {
    names: Vec<String>,
    extender: Option<Extender>,
    client: Client,
    pods: Arc<Cache>,
    nodes: Arc<Cache>,
    changed: Arc<watch::Sender<u64>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    assumed: HashMap<String, (String, Instant)>,
    waiting: HashMap<String, Waiting>,
    counts: SchedulerCounts,
    latencies: Vec<Duration>,
}

/// Why a pod is not looked at now.
#[derive(Clone, Debug)]
struct Waiting {
    attempts: u32,
    until: Option<Instant>,
    /// Pods without a node wait for the cluster, or themselves, to look otherwise.
    unless_changed: Option<(u64, u64)>,
    told: bool,
}

impl Scheduler {
    /// Starts one that runs until `stop`.
    #[must_use]
    pub fn start(config: SchedulerConfig, client: Client, stop: CancellationToken) -> Arc<Self> {
        let changed = Arc::new(watch::Sender::new(0));
        let scheduler = Arc::new(Self {
            names: config.names,
            extender: config.extender.map(Extender::new),
            pods: Cache::follow(Api::<Pod>::all(client.clone()), changed.clone(), stop.clone()),
            nodes: Cache::follow(Api::<Node>::all(client.clone()), changed.clone(), stop.clone()),
            client,
            changed,
            state: Mutex::default(),
        });
        tokio::spawn(stop.run_until_cancelled_owned(scheduler.clone().run()));
        scheduler
    }

    /// What it has done so far.
    pub fn counts(&self) -> SchedulerCounts {
        self.state.lock().counts
    }

    /// How long each bound pod took from the beginning of its last cycle to its binding.
    pub fn latencies(&self) -> Vec<Duration> {
        self.state.lock().latencies.clone()
    }

    async fn run(self: Arc<Self>) {
        let mut changes = self.changed.subscribe();
        loop {
            changes.borrow_and_update();
            let pods = self.pods.all();
            let view = self.view(&pods);
            match self.next(&pods, &view) {
                Ok(pod) => self.clone().cycle(&pod, &view).await,
                Err(again) => {
                    let nothing_changes = tokio::time::sleep(again);
                    tokio::select! { _ = changes.changed() => {}, () = nothing_changes => {} }
                }
            }
        }
    }

    /// The next pod to look at, or how long there will be none.
    fn next(&self, pods: &[Arc<Value>], view: &View) -> Result<Arc<Value>, Duration> {
        let now = Instant::now();
        let mut state = self.state.lock();
        state.assumed.retain(|_, (_, since)| since.elapsed() < ASSUMED);
        let alive = |uid: &String| self.pods.get(uid).is_some();
        state.waiting.retain(|uid, _| alive(uid));
        let mut ready: Vec<&Arc<Value>> = Vec::new();
        let mut soonest = Duration::from_secs(5);
        for pod in pods.iter().filter(|pod| self.is_ours(pod) && !state.assumed.contains_key(uid(pod))) {
            match state.waiting.get(uid(pod)) {
                Some(Waiting { until: Some(until), .. }) if *until > now => {
                    soonest = soonest.min(*until - now);
                }
                Some(Waiting { unless_changed: Some(seen), .. })
                    if *seen == (view.fingerprint, own_fingerprint(pod)) => {}
                _ => ready.push(pod),
            }
        }
        ready.sort_by_key(|pod| {
            let priority = pod["spec"]["priority"].as_i64().unwrap_or(0);
            (
                std::cmp::Reverse(priority),
                meta(pod, "creationTimestamp").to_owned(),
                super::api::store::version(pod),
            )
        });
        ready.first().map(|pod| (*pod).clone()).ok_or(soonest)
    }

    fn is_ours(&self, pod: &Value) -> bool {
        let scheduler = pod["spec"]["schedulerName"].as_str().unwrap_or("default-scheduler");
        self.names.iter().any(|name| name == scheduler)
            && pod["spec"]["nodeName"].as_str().is_none_or(str::is_empty)
            && pod["status"]["phase"] == "Pending"
            && meta(pod, "deletionTimestamp").is_empty()
            && items(&pod["spec"], "schedulingGates").next().is_none()
    }

    /// The nodes, what is asked of each, and a fingerprint of all that could give a waiting pod a chance.
    fn view(&self, pods: &[Arc<Value>]) -> View {
        let nodes = self.nodes.all();
        let mut used: BTreeMap<String, Amounts> = BTreeMap::new();
        let mut fingerprint = Fingerprint::default();
        let assumed = self.state.lock().assumed.clone();
        for pod in pods {
            let over = ["Succeeded", "Failed"].contains(&pod["status"]["phase"].as_str().unwrap_or_default());
            let bound = pod["spec"]["nodeName"].as_str().filter(|node| !node.is_empty());
            let node = bound.or_else(|| assumed.get(uid(pod)).map(|(node, _)| node.as_str()));
            let Some(node) = node.filter(|_| !over) else { continue };
            fingerprint.add(uid(pod));
            fingerprint.add(meta(pod, "deletionTimestamp"));
            let amounts = used.entry(node.to_owned()).or_default();
            for (resource, amount) in fit::requests(pod) {
                *amounts.entry(resource).or_default() += amount;
            }
        }
        for node in &nodes {
            for part in [
                &node["metadata"]["labels"],
                &node["metadata"]["annotations"],
                &node["spec"],
                &node["status"]["allocatable"],
            ] {
                fingerprint.add(&part.to_string());
            }
        }
        View { nodes, used, fingerprint: fingerprint.0 }
    }

    async fn cycle(self: Arc<Self>, pod: &Arc<Value>, view: &View) {
        let began = Instant::now();
        match self.choose(pod, view).await {
            Ok(node) => {
                self.state.lock().assumed.insert(uid(pod).to_owned(), (node.clone(), began));
                let (scheduler, pod) = (self.clone(), pod.clone());
                tokio::spawn(async move { scheduler.bind(&pod, &node, began).await });
            }
            Err(NoNode::Unschedulable(reasons)) => {
                let seen = (view.fingerprint, own_fingerprint(pod));
                let first = {
                    let mut state = self.state.lock();
                    state.counts.unschedulable += 1;
                    let entry = state.waiting.entry(uid(pod).to_owned()).or_insert_with(Waiting::fresh);
                    (entry.until, entry.unless_changed) = (None, Some(seen));
                    !std::mem::replace(&mut entry.told, true)
                };
                tracing::debug!(pod = name(pod), reasons, "no node");
                if first {
                    self.tell(pod, &reasons).await;
                }
            }
            Err(NoNode::Error(error)) => self.failed(pod, &error),
        }
    }

    async fn choose(&self, pod: &Value, view: &View) -> Result<String, NoNode> {
        let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
        let mut feasible = Vec::new();
        let nothing = Amounts::new();
        for node in &view.nodes {
            match fit::refusal(pod, node, view.used.get(name(node)).unwrap_or(&nothing)) {
                None => feasible.push(name(node).to_owned()),
                Some(reason) => *reasons.entry(reason).or_default() += 1,
            }
        }
        let extender = self.extender.as_ref().filter(|extender| extender.is_interested(pod));
        let mut scores = BTreeMap::new();
        if let Some(extender) = extender.filter(|_| !feasible.is_empty()) {
            let answer = extender.filter(pod, &feasible).await.map_err(NoNode::Error)?;
            let failed = [answer.failed_nodes, answer.failed_and_unresolvable_nodes];
            for reason in failed.into_iter().flatten().flat_map(BTreeMap::into_values) {
                *reasons.entry(reason).or_default() += 1;
            }
            feasible = answer.node_names.unwrap_or_default();
            if feasible.len() > 1 {
                scores = extender.prioritize(pod, &feasible).await;
            }
        }
        // Without a score, the emptiest node, as NodeResourcesFit has it by default.
        let pods_on = |node: &String| view.used.get(node).and_then(|u| u.get("pods")).copied().unwrap_or(0);
        let best = feasible.into_iter().max_by_key(|node| {
            (
                scores.get(node).copied().unwrap_or(0),
                std::cmp::Reverse(pods_on(node)),
                std::cmp::Reverse(node.clone()),
            )
        });
        best.ok_or_else(|| {
            let all = reasons
                .iter()
                .map(|(reason, count)| format!("{count} {reason}"))
                .collect::<Vec<_>>()
                .join(", ");
            NoNode::Unschedulable(format!("0/{} nodes are available: {all}.", view.nodes.len()))
        })
    }

    async fn bind(&self, pod: &Value, node: &str, began: Instant) {
        let extender = self.extender.as_ref().filter(|extender| extender.is_interested(pod));
        let bound = match extender {
            Some(extender) => extender.bind(pod, node).await,
            None => {
                let target = json!({"apiVersion": "v1", "kind": "Node", "name": node});
                let metadata = json!({"name": name(pod), "uid": uid(pod)});
                let binding =
                    json!({"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target});
                let path = format!("/api/v1/namespaces/{}/pods/{}/binding", namespace(pod), name(pod));
                json_client::create(&self.client, &path, &binding)
                    .await
                    .map(|_| ())
                    .map_err(|error| error.to_string())
            }
        };
        match bound {
            Ok(()) => {
                let mut state = self.state.lock();
                state.counts.bound += 1;
                state.latencies.push(began.elapsed());
                state.waiting.remove(uid(pod));
            }
            Err(error) => {
                self.state.lock().assumed.remove(uid(pod));
                self.failed(pod, &error);
                self.changed.send_modify(|count| *count += 1);
            }
        }
    }

    /// After 1, 2, 4, 8, 10, 10, … seconds again.
    fn failed(&self, pod: &Value, error: &str) {
        tracing::info!(pod = name(pod), error, "scheduling failed; it is tried again");
        let mut state = self.state.lock();
        state.counts.errors += 1;
        let waiting = state.waiting.entry(uid(pod).to_owned()).or_insert_with(Waiting::fresh);
        waiting.attempts += 1;
        let pause = Duration::from_secs(1 << (waiting.attempts - 1).min(4)).min(Duration::from_secs(10));
        (waiting.until, waiting.unless_changed) = (Some(Instant::now() + pause), None);
    }

    async fn tell(&self, pod: &Value, reasons: &str) {
        let condition =
            json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": reasons});
        let path = format!("/api/v1/namespaces/{}/pods/{}/status", namespace(pod), name(pod));
        let patch = json!({"metadata": {"uid": uid(pod)}, "status": {"conditions": [condition]}});
        // The pod may be gone meanwhile.
        let _ = json_client::merge(&self.client, &path, &patch).await;
    }
}

impl Waiting {
    fn fresh() -> Self {
        Self { attempts: 0, until: None, unless_changed: None, told: false }
    }
}

enum NoNode {
    Unschedulable(String),
    Error(String),
}

struct View {
    nodes: Vec<Arc<Value>>,
    used: BTreeMap<String, Amounts>,
    fingerprint: u64,
}

#[derive(Default)]
struct Fingerprint(u64);

impl Fingerprint {
    fn add(&mut self, part: &str) {
        let hash = part
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
        self.0 = self.0.wrapping_add(hash);
    }
}

/// What of a pod itself makes the scheduler look again.
fn own_fingerprint(pod: &Value) -> u64 {
    let mut fingerprint = Fingerprint::default();
    fingerprint.add(&pod["metadata"]["annotations"].to_string());
    fingerprint.add(&pod["metadata"]["labels"].to_string());
    fingerprint.0
}
