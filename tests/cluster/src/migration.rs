//! Policies, shadows and what the webhook makes of a pod: the parts of the API that are gpu-migrate's own.

use anyhow::{Context, Result};
use gpu_migrate_model::{
    crd::{GPUMigration, GPUShadow},
    names::{Dialect, OPT_IN, PROJECT, SCHEDULER},
};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, PostParams},
};
use serde_json::{Value, json};

use crate::{
    cluster::{Cluster, TIMEOUT},
    configs::NODE,
    stage::CARDS,
    wait::Seen,
    workload::pod_spec,
};

/// Asks for one whole card, as pods did before the migration.
pub const GPU: &[(&str, u64)] = &[("nvidia.com/gpu", 1)];

/// The limits of a shared container, as pods ask that need no conversion.
pub const fn share(cores: u64, blocks: u64) -> [(&'static str, u64); 2] {
    [("tencent.com/vcuda-core", cores), ("tencent.com/vcuda-memory", blocks)]
}

/// A pod that asks for a share by itself, and for our scheduler.
pub fn shared_spec(cores: u64, blocks: u64) -> Value {
    let mut spec = pod_spec(&share(cores, blocks));
    spec["schedulerName"] = json!(SCHEDULER);
    spec
}

/// The UUID of a card of the NVML stand-in by its index.
pub fn uuid(index: u64) -> String {
    format!("GPU-00000000-0000-4000-8000-{index:012x}")
}

/// The UUIDs of all cards of the NVML stand-in.
pub fn all_uuids() -> Vec<String> {
    (0..CARDS).map(uuid).collect()
}

impl Cluster {
    /// An opted-in namespace with a policy of its own that converts every whole card; `convert` is laid over its defaults.
    /// Returns its name once the webhook acts upon it.
    pub async fn project(&mut self, name: &str, convert: Value) -> Result<String> {
        let namespace = self.namespace(name, &[(OPT_IN, "true"), (PROJECT, name)]).await?;
        let policy: GPUMigration = serde_json::from_value(json!({
            "metadata": {"name": namespace},
            "spec": {"project": name, "mode": "Enforce", "convert": convert, "scheduling": {"schedulerName": SCHEDULER}},
        }))
        .context("not a GPUMigration")?;
        Api::<GPUMigration>::all(self.client.clone()).create(&PostParams::default(), &policy).await?;
        self.policies.push(namespace.clone());
        let client = self.client.clone();
        self.until(&format!("the policy of {namespace} to be followed"), TIMEOUT, || async {
            let pod = dry_run(&client, &namespace, pod_spec(GPU)).await?;
            Ok(Seen::from_bool(limit(&pod, &Dialect::default().legacy) == 0, || format!("{:?}", pod.spec)))
        })
        .await?;
        Ok(namespace)
    }

    /// Has [`Cluster::clean_up`] remove a policy, too, that the scenario made itself.
    pub fn forget_policy_after(&mut self, name: &str) {
        self.policies.push(name.to_owned());
    }

    /// Removes the policies of [`Cluster::project`].
    pub(crate) async fn drop_policies(&mut self) {
        let api: Api<GPUMigration> = Api::all(self.client.clone());
        for name in std::mem::take(&mut self.policies) {
            let _ = api.delete(&name, &DeleteParams::default()).await;
        }
    }

    pub async fn shadow(&self) -> Result<GPUShadow> {
        Ok(Api::<GPUShadow>::all(self.client.clone()).get(NODE).await?)
    }

    /// Waits until the GPUShadow lists exactly these holders: UUID of the card and UID of the pod, sorted.
    pub async fn wait_for_holders(&mut self, mut expected: Vec<(String, String)>) -> Result<()> {
        expected.sort();
        let api: Api<GPUShadow> = Api::all(self.client.clone());
        self.until("the GPUShadow to list the running holders", TIMEOUT, || async {
            let status = api.get(NODE).await?.status.unwrap_or_default();
            let mut reported: Vec<(String, String)> = status
                .cards
                .iter()
                .flat_map(|card| card.holders.iter().map(|h| (card.card.uuid.to_string(), h.uid.clone())))
                .collect();
            reported.sort();
            Ok(Seen::from_bool(reported == expected, || {
                format!("it lists {reported:?}, running are {expected:?}")
            }))
        })
        .await
    }
}

/// What the apiserver and the webhook would make of a pod.
pub async fn dry_run(client: &kube::Client, namespace: &str, spec: Value) -> Result<Pod> {
    let pod: Pod = serde_json::from_value(json!({"metadata": {"generateName": "dry-"}, "spec": spec}))?;
    let parameters = PostParams { dry_run: true, ..PostParams::default() };
    Ok(Api::<Pod>::namespaced(client.clone(), namespace).create(&parameters, &pod).await?)
}

/// What all containers of a pod ask for, of one resource.
pub fn limit(pod: &Pod, resource: &str) -> u64 {
    let containers =
        pod.spec.iter().flat_map(|s| s.containers.iter().chain(s.init_containers.iter().flatten()));
    containers
        .filter_map(|c| c.resources.as_ref()?.limits.as_ref()?.get(resource)?.0.parse::<u64>().ok())
        .sum()
}

pub fn uid(pod: &Pod) -> String {
    pod.uid().unwrap_or_default()
}
