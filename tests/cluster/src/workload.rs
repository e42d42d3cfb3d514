//! Manifests of the scenarios' pods, and looking at what became of them.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::{apps::v1::Deployment, core::v1::Pod};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, PostParams},
};
use serde_json::{Value, json};

use crate::{
    cluster::{Cluster, TIMEOUT},
    image::WORK_IMAGE,
    observe::{self, Container},
    wait::{self, Seen},
};

/// One container that serves until SIGTERM, with limits such as `[("nvidia.com/gpu", 1)]`.
pub fn container(name: &str, limits: &[(&str, u64)]) -> Value {
    let limits: serde_json::Map<String, Value> =
        limits.iter().map(|(k, v)| ((*k).to_owned(), json!(v.to_string()))).collect();
    json!({
        "name": name,
        "image": WORK_IMAGE,
        "imagePullPolicy": "Never",
        "args": ["serve"],
        "resources": {"limits": limits},
    })
}

/// The spec of a pod of one container.
pub fn pod_spec(limits: &[(&str, u64)]) -> Value {
    json!({"containers": [container("main", limits)], "terminationGracePeriodSeconds": 5})
}

/// A Deployment of `replicas` such pods.
pub fn deployment(name: &str, replicas: u32, limits: &[(&str, u64)]) -> Value {
    json!({
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": pod_spec(limits)},
        },
    })
}

impl Cluster {
    pub fn pods(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Creates a pod from its spec.
    pub async fn create_pod(&self, namespace: &str, name: &str, spec: Value) -> Result<Pod> {
        let pod: Pod = serde_json::from_value(
            json!({"metadata": {"name": name, "labels": {"app": name}}, "spec": spec}),
        )?;
        self.pods(namespace)
            .create(&PostParams::default(), &pod)
            .await
            .with_context(|| format!("cannot create {namespace}/{name}"))
    }

    /// Creates a Deployment from [`deployment`].
    pub async fn create_deployment(&self, namespace: &str, manifest: Value) -> Result<Deployment> {
        let api: Api<Deployment> = Api::namespaced(self.client.clone(), namespace);
        Ok(api.create(&PostParams::default(), &serde_json::from_value(manifest)?).await?)
    }

    /// Deletes a pod and waits until it has left the API.
    pub async fn delete_pod(&mut self, namespace: &str, name: &str) -> Result<()> {
        let pods = self.pods(namespace);
        pods.delete(name, &DeleteParams::default()).await?;
        self.until(&format!("{namespace}/{name} to be gone"), TIMEOUT, || async {
            let left = pods.get_opt(name).await?;
            Ok(Seen::from_bool(left.is_none(), || phase_and_why(left.as_ref())))
        })
        .await
    }

    /// Waits until a pod runs, and returns it with what its container `main` really got.
    pub async fn running(&mut self, namespace: &str, name: &str) -> Result<(Pod, Container)> {
        let pods = self.pods(namespace);
        self.until(&format!("{namespace}/{name} to run"), TIMEOUT, || async {
            let pod = pods.get(name).await?;
            if phase(&pod) != "Running" {
                return Ok(Seen::NotYet(phase_and_why(Some(&pod))));
            }
            let uid = pod.uid().unwrap_or_default();
            let found = observe::containers()?.into_iter().find(|c| c.pod_uid == uid);
            Ok(Seen::from_option(found.map(|c| (pod, c)), || "Running, but no process of it".into()))
        })
        .await
    }

    /// Waits until `count` pods with the label `app=<app>` run, and returns them with what their container `main` got.
    pub async fn all_running(
        &mut self,
        namespace: &str,
        app: &str,
        count: usize,
    ) -> Result<Vec<(Pod, Container)>> {
        let pods = self.pods(namespace);
        let labelled = ListParams::default().labels(&format!("app={app}"));
        let names: Vec<String> = self
            .until(&format!("{count} pods of {app} in {namespace} to run"), TIMEOUT, || async {
                let list = pods.list(&labelled).await?.items;
                let running = list.iter().filter(|p| phase(p) == "Running").count();
                let names = (running == count).then(|| {
                    list.iter().filter(|p| phase(p) == "Running").map(ResourceExt::name_any).collect()
                });
                Ok(Seen::from_option(names, || {
                    list.iter().map(|p| phase_and_why(Some(p))).collect::<Vec<_>>().join("; ")
                }))
            })
            .await?;
        let mut all = Vec::new();
        for name in names {
            all.push(self.running(namespace, &name).await?);
        }
        Ok(all)
    }

    /// Waits until the scheduler reports that a pod is unschedulable, checks that it stays Pending for `time`, and returns the
    /// message.
    pub async fn pending(&mut self, namespace: &str, name: &str, time: Duration) -> Result<String> {
        let pods = self.pods(namespace);
        let message = self
            .until(&format!("{namespace}/{name} to be reported unschedulable"), TIMEOUT, || async {
                let pod = pods.get(name).await?;
                Ok(Seen::from_option(unschedulable(&pod), || phase_and_why(Some(&pod))))
            })
            .await?;
        wait::throughout(&format!("{namespace}/{name} Pending"), time, || async {
            let pod = pods.get(name).await?;
            ensure!(
                pod.spec.as_ref().is_none_or(|s| s.node_name.is_none()),
                "it is bound: {}",
                phase_and_why(Some(&pod))
            );
            Ok(())
        })
        .await?;
        Ok(message)
    }
}

/// The one card that a container sees.
pub fn only_card(container: &Container) -> Result<String> {
    let mut cards = container.cards();
    ensure!(cards.len() == 1, "container {} sees {cards:?}, not one card", container.name);
    cards.pop().context("there is one")
}

pub fn annotation<'a>(pod: &'a Pod, key: &str) -> Result<&'a str> {
    pod.annotations()
        .get(key)
        .map(String::as_str)
        .with_context(|| format!("{} has no annotation {key}: {:?}", pod.name_any(), pod.annotations()))
}

pub fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|s| s.phase.as_deref()).unwrap_or("(no phase)")
}

/// A pod's phase with the reasons in its status, for messages.
pub fn phase_and_why(pod: Option<&Pod>) -> String {
    let Some(pod) = pod else { return "absent".into() };
    let status = pod.status.clone().unwrap_or_default();
    let waiting = status
        .container_statuses
        .unwrap_or_default()
        .into_iter()
        .filter_map(|c| c.state?.waiting)
        .map(|w| format!("{:?} {:?}", w.reason, w.message));
    let conditions = status
        .conditions
        .unwrap_or_default()
        .into_iter()
        .filter(|c| c.status != "True")
        .filter_map(|c| c.message);
    let why: Vec<String> = waiting.chain(status.reason).chain(status.message).chain(conditions).collect();
    format!("{} {} {}", pod.name_any(), phase(pod), why.join(", "))
}

/// The scheduler's message if the pod is unschedulable.
pub fn unschedulable(pod: &Pod) -> Option<String> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let scheduled = conditions
        .iter()
        .find(|c| c.type_ == "PodScheduled" && c.reason.as_deref() == Some("Unschedulable"))?;
    scheduled.message.clone()
}
