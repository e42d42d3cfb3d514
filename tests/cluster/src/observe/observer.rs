//! The observer: samples the running containers in the background and records every violation.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use futures::StreamExt;
use gpu_migrate_model::names::Dialect;
use k8s_openapi::api::core::v1::{Container as SpecContainer, Pod};
use kube::{
    Api, Client, ResourceExt,
    api::ListParams,
    runtime::{
        WatchStreamExt,
        watcher::{Config, Event, watcher},
    },
};
use tokio::task::JoinHandle;

use super::{Container, Entitlement, Holding, Kind, Violation, check_invariants, containers};

/// Memory blocks of one card of the NVML stand-in: 40 GiB in units of 256 MiB.
const BLOCKS_PER_CARD: u64 = 160;
/// See [`take_violated`].
static VIOLATED: AtomicBool = AtomicBool::new(false);

/// By UID of the pod and name of the container. Those of deleted pods are kept, since their containers may still be dying.
type Entitlements = BTreeMap<(String, String), Entitlement>;

/// How long the last sample may take.
const END: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub struct Observer {
    stop: Arc<AtomicBool>,
    task: JoinHandle<Result<Report>>,
}

/// Everything from start to finish.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub samples: u64,
    /// Different containers that held a card: UID of the pod, and name.
    pub holders: BTreeSet<(String, String)>,
    /// Each violation, with the number of samples that it was seen in.
    pub violations: BTreeMap<Violation, u64>,
    /// Containers whose pod was never seen in the API: they cannot be checked.
    pub unknown: BTreeSet<String>,
}

impl Report {
    /// Fails on any violation, and on a report that proves nothing.
    pub fn check(&self, at_least: usize) -> Result<()> {
        ensure!(self.violations.is_empty(), "{} violation(s):\n{}", self.violations.len(), self.list());
        ensure!(self.unknown.is_empty(), "containers of unknown pods ran: {:?}", self.unknown);
        ensure!(
            self.holders.len() >= at_least,
            "only {} of at least {at_least} holders were seen in {} samples: the report proves nothing",
            self.holders.len(),
            self.samples
        );
        Ok(())
    }

    fn list(&self) -> String {
        self.violations
            .iter()
            .map(|(v, samples)| format!("{v} (in {samples} of {} samples)\n", self.samples))
            .collect()
    }
}

/// Whether an observer has seen a violation since this was asked last, also one whose report nobody has read: a scenario that fails for another
/// reason drops it.
pub fn take_violated() -> bool {
    VIOLATED.swap(false, Ordering::Relaxed)
}

impl Observer {
    /// Starts sampling, every 100 ms.
    pub fn start(client: Client) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let task = tokio::spawn(observe(client, stop.clone()));
        Self { stop, task }
    }

    /// Takes a last sample, stops and reports.
    pub async fn finish(mut self) -> Result<Report> {
        self.stop.store(true, Ordering::Relaxed);
        tokio::time::timeout(END, &mut self.task)
            .await
            .context("the observer did not end")?
            .context("the observer panicked")?
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Samples every 100 ms until `stop` is set, and once more.
pub(super) async fn observe(client: Client, stop: Arc<AtomicBool>) -> Result<Report> {
    let pods: Api<Pod> = Api::all(client);
    let known = Arc::new(Mutex::new(Entitlements::new()));
    let mut following = tokio::task::JoinSet::new();
    following.spawn(follow(pods.clone(), known.clone()));
    let mut unknown: BTreeSet<(String, String)> = BTreeSet::new();
    let mut report = Report::default();
    loop {
        let last = stop.load(Ordering::Relaxed);
        let running = containers()?;
        // A pod is in the API before its container runs, so listing afterwards knows every running one but for those that are deleted by
        // force meanwhile, which the watch has. The API may be away for a while: try again.
        let is_unknown = |c: &Container| !lock(&known).contains_key(&key(c));
        if running.iter().any(is_unknown)
            && let Ok(list) = pods.list(&ListParams::default()).await
        {
            list.iter().for_each(|pod| record_entitlements(&mut lock(&known), pod));
            unknown.extend(running.iter().filter(|c| is_unknown(c)).map(key));
        }
        let entitlements = lock(&known).clone();
        let holdings = holdings(&running, &entitlements);
        report.samples += 1;
        // With the UID: a StatefulSet's next pod has the same name.
        let holders = running.iter().filter(|c| !c.cards().is_empty() && entitlements.contains_key(&key(c)));
        report.holders.extend(holders.map(key));
        for violation in check_invariants(&holdings, BLOCKS_PER_CARD) {
            VIOLATED.store(true, Ordering::Relaxed);
            *report.violations.entry(violation).or_default() += 1;
        }
        if last {
            report.unknown = unknown
                .difference(&entitlements.keys().cloned().collect())
                .map(|(uid, name)| format!("{uid}/{name}"))
                .collect();
            return Ok(report);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn lock(known: &Mutex<Entitlements>) -> std::sync::MutexGuard<'_, Entitlements> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Records every pod that there is at any moment. Ends with the observer.
async fn follow(pods: Api<Pod>, known: Arc<Mutex<Entitlements>>) {
    let mut events = Box::pin(watcher(pods, Config::default()).default_backoff());
    while let Some(event) = events.next().await {
        if let Ok(Event::InitApply(pod) | Event::Apply(pod) | Event::Delete(pod)) = event {
            record_entitlements(&mut lock(&known), &pod);
        }
    }
}

fn key(container: &Container) -> (String, String) {
    (container.pod_uid.clone(), container.name.clone())
}

fn holdings(running: &[Container], entitlements: &Entitlements) -> Vec<Holding> {
    running
        .iter()
        .filter_map(|container| {
            Some(Holding {
                entitlement: entitlements.get(&key(container))?.clone(),
                cards: container.cards(),
            })
        })
        .collect()
}

/// Records what each container of a pod is entitled to.
fn record_entitlements(entitlements: &mut Entitlements, pod: &Pod) {
    let Some(spec) = &pod.spec else { return };
    let uid = pod.uid().unwrap_or_default();
    for container in spec.containers.iter().chain(spec.init_containers.iter().flatten()) {
        let name = format!("{}/{}/{}", pod.namespace().unwrap_or_default(), pod.name_any(), container.name);
        entitlements.insert(
            (uid.clone(), container.name.clone()),
            Entitlement { container: name, kind: kind(container) },
        );
    }
}

fn kind(container: &SpecContainer) -> Kind {
    let dialect = Dialect::default();
    let asked = |name: &str| -> u64 {
        let limits = container.resources.as_ref().and_then(|r| r.limits.as_ref());
        limits.and_then(|l| l.get(name)).and_then(|q| q.0.parse().ok()).unwrap_or(0)
    };
    // A claim is of one whole card, as with the device plugin.
    let claims =
        container.resources.as_ref().and_then(|r| r.claims.as_ref()).map_or(0, |claims| claims.len() as u64);
    match (asked(&dialect.legacy) + claims, asked(&dialect.cores), asked(&dialect.memory)) {
        (0, 0, 0) => Kind::None,
        (0, cores, blocks) => Kind::Shared { cores, blocks },
        (cards, ..) => Kind::Legacy { cards },
    }
}
