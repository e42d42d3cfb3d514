//! The observer at work: looks again and again in the background, and remembers every violation.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use gpu_migrate_model::names::Dialect;
use k8s_openapi::api::core::v1::{Container as SpecContainer, Pod};
use kube::{Api, Client, ResourceExt, api::ListParams};
use tokio::task::JoinHandle;

use super::{Container, Entitlement, Holding, Kind, Violation, check_invariants, containers};

/// Memory blocks of one card of the NVML stand-in: 40 GiB in units of 256 MiB.
const BLOCKS_PER_CARD: u64 = 160;

/// A running observer.
#[derive(Debug)]
pub struct Observer {
    stop: Arc<AtomicBool>,
    task: JoinHandle<Result<Report>>,
}

/// What it saw from start to finish.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// How often it looked.
    pub looks: u64,
    /// Different containers that held a card: UID of the pod, and name.
    pub holders: BTreeSet<(String, String)>,
    /// Each violation once, with how many looks it was there for.
    pub violations: BTreeMap<Violation, u64>,
    /// Containers that ran without a pod of theirs ever being seen in the API: they cannot be judged.
    pub unknown: BTreeSet<String>,
}

impl Report {
    /// Fails on any violation, and on a report that proves nothing.
    ///
    /// # Errors
    /// With every violation, or if fewer than `at_least` holders were seen.
    pub fn check(&self, at_least: usize) -> Result<()> {
        ensure!(self.violations.is_empty(), "{} violation(s):\n{}", self.violations.len(), self.list());
        ensure!(self.unknown.is_empty(), "containers of unknown pods ran: {:?}", self.unknown);
        ensure!(
            self.holders.len() >= at_least,
            "only {} of at least {at_least} holders were seen in {} looks: the report proves nothing",
            self.holders.len(),
            self.looks
        );
        Ok(())
    }

    fn list(&self) -> String {
        self.violations
            .iter()
            .map(|(v, looks)| format!("{v} (in {looks} of {} looks)\n", self.looks))
            .collect()
    }
}

impl Observer {
    /// Starts looking, every 100 ms.
    pub fn start(client: Client) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let task = tokio::spawn(observe(client, stop.clone()));
        Self { stop, task }
    }

    /// Looks once more, stops and reports.
    ///
    /// # Errors
    /// If the observer itself failed.
    pub async fn finish(self) -> Result<Report> {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.context("the observer died")?
    }
}

/// What runs now, judged once.
///
/// # Errors
/// If `/proc` or the API cannot be read.
pub(super) async fn observe(client: Client, stop: Arc<AtomicBool>) -> Result<Report> {
    let pods: Api<Pod> = Api::all(client);
    let mut entitlements: BTreeMap<(String, String), Entitlement> = BTreeMap::new();
    let mut strangers: BTreeSet<(String, String)> = BTreeSet::new();
    let mut report = Report::default();
    loop {
        let last = stop.load(Ordering::Relaxed);
        let running = containers()?;
        // A pod is in the API before its container runs, so listing afterwards knows every running one; claims of deleted
        // pods are kept, since their containers may still be dying. The API may be away for a while: try again.
        if running.iter().any(|c| !entitlements.contains_key(&key(c)))
            && let Ok(list) = pods.list(&ListParams::default()).await
        {
            list.iter().for_each(|pod| learn(&mut entitlements, pod));
            strangers.extend(running.iter().map(key).filter(|key| !entitlements.contains_key(key)));
        }
        let holdings = holdings(&running, &entitlements);
        report.looks += 1;
        // With the UID: a StatefulSet's next pod has the same name.
        let holders = running.iter().filter(|c| !c.cards().is_empty() && entitlements.contains_key(&key(c)));
        report.holders.extend(holders.map(key));
        for violation in check_invariants(&holdings, BLOCKS_PER_CARD) {
            *report.violations.entry(violation).or_default() += 1;
        }
        if last {
            report.unknown = strangers
                .difference(&entitlements.keys().cloned().collect())
                .map(|(uid, name)| format!("{uid}/{name}"))
                .collect();
            return Ok(report);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn key(container: &Container) -> (String, String) {
    (container.pod_uid.clone(), container.name.clone())
}

fn holdings(running: &[Container], entitlements: &BTreeMap<(String, String), Entitlement>) -> Vec<Holding> {
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

/// Notes what each container of a pod is entitled to.
fn learn(entitlements: &mut BTreeMap<(String, String), Entitlement>, pod: &Pod) {
    let Some(spec) = &pod.spec else { return };
    let uid = pod.uid().unwrap_or_default();
    for container in spec.containers.iter().chain(spec.init_containers.iter().flatten()) {
        let who = format!("{}/{}/{}", pod.namespace().unwrap_or_default(), pod.name_any(), container.name);
        entitlements
            .insert((uid.clone(), container.name.clone()), Entitlement { who, kind: kind(container) });
    }
}

fn kind(container: &SpecContainer) -> Kind {
    let dialect = Dialect::default();
    let asked = |name: &str| -> u64 {
        let limits = container.resources.as_ref().and_then(|r| r.limits.as_ref());
        limits.and_then(|l| l.get(name)).and_then(|q| q.0.parse().ok()).unwrap_or(0)
    };
    match (asked(&dialect.legacy), asked(&dialect.cores), asked(&dialect.memory)) {
        (0, 0, 0) => Kind::None,
        (0, cores, blocks) => Kind::Shared { cores, blocks },
        (cards, ..) => Kind::Legacy { cards },
    }
}
