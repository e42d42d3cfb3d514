//! A kubelet whose containers are records: real sockets, real files, real calls to device plugins and the API server; only nothing
//! is executed. What a container would have got (its environment, its devices) is reported to the observer ([`Happening`]).

mod node;
mod pod;
pub mod program;

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client};
use parking_lot::Mutex;
use rand::seq::SliceRandom;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::device_manager::service::DeviceService;

#[derive(Clone, Debug, Default)]
pub struct NodeSpec {
    pub name: String,
    /// Labels besides the host name.
    pub labels: BTreeMap<String, String>,
    pub cpu: u32,
    pub memory_gib: u32,
}

/// How quick things are. The real ones in parentheses.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Between two reports of the node (10 s, or at once when something changed).
    pub report: Duration,
    /// From admission to running (some seconds).
    pub start: Duration,
    /// From the order to stop to the end (up to 30 s).
    pub stop: Duration,
    /// Before a container that ended starts again (10 s, doubling).
    pub back_off: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        let milliseconds = Duration::from_millis;
        Self {
            report: milliseconds(1000),
            start: milliseconds(250),
            stop: milliseconds(150),
            back_off: milliseconds(600),
        }
    }
}

/// A container that runs, and what it was given.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Given {
    pub node: String,
    pub namespace: String,
    pub pod: String,
    pub uid: String,
    pub container: String,
    /// Device IDs by resource, as the kubelet has them.
    pub devices: BTreeMap<String, Vec<String>>,
    /// Its environment, as the plugins made it.
    pub env: BTreeMap<String, String>,
}

/// What an observer beside the runtime sees.
#[derive(Clone, Debug, PartialEq)]
pub enum Happening {
    Started(Box<Given>),
    /// It ended: UID of the pod, container.
    Ended(String, String),
}

#[derive(Clone)]
pub struct Kubelet {
    inner: Arc<Inner>,
}

/// A pod that is not over, as the kubelet knows it.
#[derive(Clone, Debug)]
pub(crate) struct Active {
    pub(crate) namespace: String,
    pub(crate) name: String,
    stop: CancellationToken,
}

pub(crate) struct Inner {
    spec: NodeSpec,
    root: PathBuf,
    pace: Pace,
    client: Client,
    pub(crate) devices: Arc<DeviceService>,
    active: Mutex<BTreeMap<String, Active>>,
    /// Pods that were admitted or refused once are not admitted again.
    seen: Mutex<HashSet<String>>,
    observer: mpsc::UnboundedSender<Happening>,
    /// Of the present process; a restart ends it and begins another.
    life: Mutex<CancellationToken>,
    stop: CancellationToken,
}

impl Inner {
    fn pods(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client.clone(), namespace)
    }

    fn observe(&self, happening: Happening) {
        // There may be no observer.
        let _ = self.observer.send(happening);
    }
}

impl Kubelet {
    /// Starts a kubelet with its files below `root`.
    ///
    /// # Errors
    /// Where `root` cannot be used.
    pub async fn start(
        spec: NodeSpec,
        pace: Pace,
        root: &Path,
        client: Client,
        observer: mpsc::UnboundedSender<Happening>,
        stop: CancellationToken,
    ) -> std::io::Result<Self> {
        let inner = Arc::new(Inner {
            devices: DeviceService::new(root, |ids| ids.shuffle(&mut rand::rng())),
            spec,
            root: root.to_path_buf(),
            pace,
            client,
            active: Mutex::default(),
            seen: Mutex::default(),
            observer,
            life: Mutex::new(stop.child_token()),
            stop: stop.clone(),
        });
        let kubelet = Self { inner: inner.clone() };
        kubelet.serve()?;
        tokio::spawn(stop.clone().run_until_cancelled_owned(node::report(inner.clone())));
        tokio::spawn(stop.run_until_cancelled_owned(follow(inner)));
        Ok(kubelet)
    }

    fn serve(&self) -> std::io::Result<()> {
        let life = self.inner.life.lock().clone();
        let inner = self.inner.clone();
        // Pods that have ended are not listed, though the checkpoint still has them.
        let name =
            move |uid: &str| inner.active.lock().get(uid).map(|p| (p.namespace.clone(), p.name.clone()));
        self.inner.devices.start(Arc::new(name), &life)
    }

    /// Its root, as `/var/lib/kubelet` is.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.inner.root
    }

    #[must_use]
    pub fn devices(&self) -> &Arc<DeviceService> {
        &self.inner.devices
    }

    /// The kubelet's process ends, is away for `away`, and starts again: every socket in its folder is gone, its checkpoint is still there,
    /// all containers run on.
    ///
    /// # Errors
    /// Where its folder cannot be used any more.
    pub async fn restart(&self, away: Duration) -> std::io::Result<()> {
        let old = {
            let mut life = self.inner.life.lock();
            std::mem::replace(&mut *life, self.inner.stop.child_token())
        };
        old.cancel();
        tokio::time::sleep(away).await;
        self.serve()
    }
}

/// Takes pods in the order of the API server's events: one after the other, so that one hanging Allocate holds up all, as it does.
async fn follow(kubelet: Arc<Inner>) {
    let config = watcher::Config::default().fields(&format!("spec.nodeName={}", kubelet.spec.name));
    let mut events =
        watcher::watcher(Api::<Pod>::all(kubelet.client.clone()), config).default_backoff().boxed();
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Apply(pod) | Event::InitApply(pod)) => match serde_json::to_value(&pod) {
                Ok(pod) => sync(&kubelet, pod).await,
                Err(error) => tracing::warn!(%error, "a pod cannot be written as JSON"),
            },
            Ok(Event::Delete(pod)) => {
                let uid = pod.metadata.uid.unwrap_or_default();
                if let Some(active) = kubelet.active.lock().get(&uid) {
                    active.stop.cancel();
                }
            }
            Ok(Event::Init | Event::InitDone) => {}
            Err(error) => {
                tracing::debug!(%error, node = kubelet.spec.name, "the watch of pods is opened again");
            }
        }
    }
}

async fn sync(kubelet: &Arc<Inner>, pod: Value) {
    use super::api::object::{meta, uid};
    let over = ["Succeeded", "Failed"].contains(&pod["status"]["phase"].as_str().unwrap_or_default());
    let going = !meta(&pod, "deletionTimestamp").is_empty();
    let own = uid(&pod).to_owned();
    let active = kubelet.active.lock().get(&own).cloned();
    match active {
        Some(active) if going => active.stop.cancel(),
        Some(_) => {}
        None if going => pod::remove(kubelet, &pod).await,
        None if over => {}
        None => {
            if kubelet.seen.lock().insert(own) {
                pod::admit(kubelet, pod).await;
            }
        }
    }
}
