//! A pod on a node: admission with its devices, init containers, containers, restarts, the end.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpu_migrate_kubelet_api::deviceplugin::ContainerAllocateResponse;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use rand::seq::SliceRandom;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::program;
use super::{Active, Given, Happening, Inner};
use crate::cluster::api::object::{items, name, namespace, timestamp, uid};
use crate::cluster::api::{is_extended, whole};
use crate::device_manager::service::ServiceError;

/// What the plugins gave one container, taken together.
#[derive(Clone, Debug, Default)]
struct Grant {
    env: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
}

struct Run {
    kubelet: Arc<Inner>,
    pod: Value,
    grants: BTreeMap<String, Grant>,
    stop: CancellationToken,
}

/// Admits a pod: gets all devices of all its containers, or fails it. Then lets it run.
pub(super) async fn admit(kubelet: &Arc<Inner>, pod: Value) {
    let stop = kubelet.stop.child_token();
    let active = Active { namespace: namespace(&pod).into(), name: name(&pod).into(), stop: stop.clone() };
    kubelet.active.lock().insert(uid(&pod).to_owned(), active);
    match devices(kubelet, &pod).await {
        Ok(grants) => {
            let run = Run { kubelet: kubelet.clone(), pod, grants, stop };
            tokio::spawn(run.live());
        }
        Err(error) => {
            kubelet.active.lock().remove(uid(&pod));
            let message = format!("Pod was rejected: Allocate failed due to {error}, which is unexpected");
            tracing::info!(pod = name(&pod), node = kubelet.spec.name, message, "UnexpectedAdmissionError");
            let status = json!({"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": message});
            patch_status(kubelet, &pod, status).await;
        }
    }
}

/// All devices, at admission: init containers first, the resources of a container in a random order.
async fn devices(kubelet: &Inner, pod: &Value) -> Result<BTreeMap<String, Grant>, ServiceError> {
    let mut begun = false;
    let mut grants = BTreeMap::new();
    for list in ["initContainers", "containers"] {
        for container in items(&pod["spec"], list) {
            let own_name = container["name"].as_str().unwrap_or_default();
            // A sidecar keeps what it has.
            let init = list == "initContainers" && container["restartPolicy"] != "Always";
            let limits = container["resources"]["limits"].as_object().into_iter().flatten();
            let asked = limits.filter(|(resource, _)| is_extended(resource));
            let mut asked: Vec<_> = asked.filter_map(|(resource, n)| Some((resource, whole(n)?))).collect();
            asked.retain(|(_, count)| *count > 0);
            asked.shuffle(&mut rand::rng());
            let mut grant = Grant::default();
            if !asked.is_empty() && !std::mem::replace(&mut begun, true) {
                kubelet.devices.begin(|uid| kubelet.active.lock().contains_key(uid));
            }
            for (resource, count) in &asked {
                let count = usize::try_from(*count).unwrap_or(usize::MAX);
                grant.add(kubelet.devices.allocate(uid(pod), own_name, resource, count).await?);
            }
            if !asked.is_empty() {
                kubelet.devices.container_done(uid(pod), own_name, init);
            }
            grants.insert(own_name.to_owned(), grant);
        }
    }
    Ok(grants)
}

impl Grant {
    fn add(&mut self, answer: ContainerAllocateResponse) {
        self.env.extend(answer.envs);
        self.annotations.extend(answer.annotations);
    }
}

/// Takes a pod that is going, and that does not run here, out of the API.
pub(super) async fn remove(kubelet: &Inner, pod: &Value) {
    let preconditions = Preconditions { uid: Some(uid(pod).into()), resource_version: None };
    let parameters =
        DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default().grace_period(0) };
    // Gone already, or another of the same name: as wanted.
    let _ = kubelet.pods(namespace(pod)).delete(name(pod), &parameters).await;
}

async fn patch_status(kubelet: &Inner, pod: &Value, status: Value) {
    let patch = json!({"metadata": {"uid": uid(pod)}, "status": status});
    let api = kubelet.pods(namespace(pod));
    if let Err(error) = api.patch_status(name(pod), &PatchParams::default(), &Patch::Merge(&patch)).await {
        tracing::debug!(pod = name(pod), %error, "the pod's status could not be written");
    }
}

#[derive(Clone, Debug, PartialEq)]
enum Standing {
    Waiting(&'static str),
    Running(String),
    Ended(i32),
}

#[derive(Clone, Debug)]
struct Progress {
    standing: Vec<(Standing, u32)>,
}

impl Run {
    async fn live(self) {
        let run = Arc::new(self);
        let outcome = run.clone().work().await;
        run.kubelet.active.lock().remove(uid(&run.pod));
        match outcome {
            Some(phase) => patch_status(&run.kubelet, &run.pod, json!({"phase": phase})).await,
            None if run.kubelet.stop.is_cancelled() => {}
            None => remove(&run.kubelet, &run.pod).await,
        }
        if outcome.is_some() {
            // Over, and perhaps being deleted since.
            run.remove_if_going().await;
        }
    }

    async fn remove_if_going(&self) {
        let api = self.kubelet.pods(namespace(&self.pod));
        if let Ok(Some(pod)) = api.get_opt(name(&self.pod)).await
            && pod.metadata.deletion_timestamp.is_some()
        {
            remove(&self.kubelet, &self.pod).await;
        }
    }

    /// Runs all containers. Returns the phase in which the pod ended by itself, `None` if it was stopped.
    async fn work(self: Arc<Self>) -> Option<&'static str> {
        let started = json!({"phase": "Pending", "startTime": timestamp(jiff::Timestamp::now())});
        patch_status(&self.kubelet, &self.pod, started).await;
        for container in items(&self.pod["spec"], "initContainers") {
            loop {
                let code = self.once(container, || {}).await?;
                if code == 0 {
                    break;
                }
                if self.pod["spec"]["restartPolicy"] == "Never" {
                    return Some("Failed");
                }
                self.pause(self.kubelet.pace.back_off).await?;
            }
        }
        let containers: Vec<Value> = items(&self.pod["spec"], "containers").cloned().collect();
        let standing = vec![(Standing::Waiting("ContainerCreating"), 0); containers.len()];
        let progress = watch::Sender::new(Progress { standing });
        let reporter = tokio::spawn(self.clone().report(progress.subscribe()));
        let all =
            containers.iter().enumerate().map(|(at, container)| self.container(at, container, &progress));
        let codes: Option<Vec<i32>> = futures::future::join_all(all).await.into_iter().collect();
        drop(progress);
        // The last report may still be on its way; it must not come after the phase.
        let _ = reporter.await;
        codes.map(|codes| if codes.iter().all(|code| *code == 0) { "Succeeded" } else { "Failed" })
    }

    /// One container with its restarts. The code it ended with for good, `None` if it was stopped.
    async fn container(
        &self,
        at: usize,
        container: &Value,
        progress: &watch::Sender<Progress>,
    ) -> Option<i32> {
        let set = |standing: Standing, restarted: bool| {
            progress.send_modify(|p| {
                p.standing[at].0 = standing;
                p.standing[at].1 += u32::from(restarted);
            });
        };
        let policy = self.pod["spec"]["restartPolicy"].as_str().unwrap_or("Always");
        let mut restarted = false;
        loop {
            let running = || set(Standing::Running(timestamp(jiff::Timestamp::now())), restarted);
            let code = self.once(container, running).await?;
            if policy == "Never" || (policy == "OnFailure" && code == 0) {
                set(Standing::Ended(code), false);
                return Some(code);
            }
            restarted = true;
            set(Standing::Waiting("CrashLoopBackOff"), false);
            self.pause(self.kubelet.pace.back_off).await?;
        }
    }

    /// One start of a container, to its end. `None` if it was stopped.
    async fn once(&self, container: &Value, running: impl FnOnce()) -> Option<i32> {
        let own_name = container["name"].as_str().unwrap_or_default();
        while let Err(error) = self.kubelet.devices.pre_start(uid(&self.pod), own_name).await {
            tracing::debug!(pod = name(&self.pod), %error, "PreStartContainer");
            self.pause(self.kubelet.pace.back_off).await?;
        }
        self.pause(self.kubelet.pace.start).await?;
        let grant = self.grants.get(own_name).cloned().unwrap_or_default();
        self.kubelet.observe(Happening::Started(Box::new(self.given(own_name, &grant))));
        running();
        let ended = match program::end(container, &grant.annotations) {
            None => {
                self.stop.cancelled().await;
                None
            }
            Some(end) => self.pause(end.after).await.map(|()| end.code),
        };
        if ended.is_none() {
            tokio::time::sleep(self.kubelet.pace.stop).await;
        }
        self.kubelet.observe(Happening::Ended(uid(&self.pod).into(), own_name.into()));
        ended
    }

    fn given(&self, container: &str, grant: &Grant) -> Given {
        let devices = self.kubelet.devices.with(|manager| {
            let rows = manager.rows().iter();
            let own = rows.filter(|row| row.pod == uid(&self.pod) && row.container == container);
            own.map(|row| (row.resource.clone(), row.ids.keys().cloned().collect())).collect()
        });
        Given {
            node: self.kubelet.spec.name.clone(),
            namespace: namespace(&self.pod).into(),
            pod: name(&self.pod).into(),
            uid: uid(&self.pod).into(),
            container: container.into(),
            devices,
            env: grant.env.clone(),
        }
    }

    /// Waits; `None` if the pod is stopped meanwhile.
    async fn pause(&self, time: std::time::Duration) -> Option<()> {
        tokio::select! {
            () = tokio::time::sleep(time) => Some(()),
            () = self.stop.cancelled() => None,
        }
    }

    /// Writes the status of the containers until they are done.
    async fn report(self: Arc<Self>, mut progress: watch::Receiver<Progress>) {
        loop {
            let now = progress.borrow_and_update().clone();
            if now.standing.iter().any(|(standing, _)| *standing != Standing::Waiting("ContainerCreating")) {
                patch_status(&self.kubelet, &self.pod, self.status(&now)).await;
            }
            if progress.changed().await.is_err() {
                return;
            }
        }
    }

    fn status(&self, progress: &Progress) -> Value {
        let ready = progress.standing.iter().all(|(standing, _)| matches!(standing, Standing::Running(_)));
        let now = timestamp(jiff::Timestamp::now());
        let condition = |kind: &str, holds: bool| json!({"type": kind, "status": if holds { "True" } else { "False" }, "lastTransitionTime": now});
        let containers: Vec<Value> = items(&self.pod["spec"], "containers")
            .zip(&progress.standing)
            .map(|(container, (standing, restarts))| {
                let state = match standing {
                    Standing::Waiting(reason) => json!({"waiting": {"reason": reason}}),
                    Standing::Running(since) => json!({"running": {"startedAt": since}}),
                    Standing::Ended(code) => json!({"terminated": {"exitCode": code, "reason": if *code == 0 { "Completed" } else { "Error" }}}),
                };
                let running = matches!(standing, Standing::Running(_));
                json!({
                    "name": container["name"], "image": container["image"], "imageID": "", "ready": running, "started": running,
                    "restartCount": restarts, "state": state, "containerID": format!("simulated://{}", uid(&self.pod)),
                })
            })
            .collect();
        json!({
            "phase": "Running", "containerStatuses": containers, "podIP": "127.77.0.1", "hostIP": "127.0.0.1",
            "conditions": [
                condition("PodScheduled", true), condition("Initialized", true),
                condition("ContainersReady", ready), condition("Ready", ready),
            ],
        })
    }
}
