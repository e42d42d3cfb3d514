//! Cards that containers get through Dynamic Resource Allocation, beside both kinds of device plugins.

use std::{process::Command, time::Duration};

use anyhow::{Context, Result, ensure};
use gpu_migrate_cluster_tests::{
    Cluster, binaries,
    cluster::TIMEOUT,
    configs::NODE,
    migration::{GPU, share, shared_spec},
    observe::Observer,
    stage::CARDS,
    wait::Seen,
    workload::{deployment, only_card, phase_and_why, pod_spec},
};
use gpu_migrate_model::{
    crd::GPUShadow,
    names::{Dialect, SCHEDULER},
};
use k8s_openapi::api::apps::v1::Deployment;
use kube::{
    Api,
    api::{
        ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams,
        PostParams,
    },
};
use serde_json::{Value, json};

/// Of NVIDIA's driver; the class of whole cards has the same name.
const DRIVER: &str = "gpu.nvidia.com";
/// How long nothing may happen.
const QUIET: Duration = Duration::from_secs(2);

fn kind(kind: &str) -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("resource.k8s.io", "v1", kind))
}

/// A pod has a card through a ResourceClaim: it is told by the GPUShadow, and neither a whole-card pod nor a share gets that card until the
/// pod is gone. A DeviceClass that stands for `nvidia.com/gpu` is refused by preflight; why, is seen here too.
pub(crate) async fn a_claimed_card_takes_nothing_else(cluster: &mut Cluster) -> Result<()> {
    cluster.use_cdi("cdi-annotations").await?;
    let observer = Observer::start(cluster.client.clone());
    cluster.start_dra_driver()?;
    let classes: Api<DynamicObject> = Api::all_with(cluster.client.clone(), &kind("DeviceClass"));
    let selector = json!({"cel": {"expression": format!("device.driver == '{DRIVER}'")}});
    let class = json!({"metadata": {"name": DRIVER}, "spec": {"selectors": [selector]}});
    classes.create(&PostParams::default(), &serde_json::from_value(class)?).await?;
    let outcome = with_driver(cluster, &classes).await;
    classes.delete(DRIVER, &DeleteParams::default()).await?;
    cluster.clean_up().await?;
    cluster.stop_dra_driver()?;
    outcome?;
    // A claimed card, seven whole ones, a share on the claimed one, and a share on each.
    observer.finish().await?.check(2 * CARDS as usize)?;
    cluster.use_environment().await
}

async fn with_driver(cluster: &mut Cluster, classes: &Api<DynamicObject>) -> Result<()> {
    let slices: Api<DynamicObject> = Api::all_with(cluster.client.clone(), &kind("ResourceSlice"));
    cluster
        .until("the driver to publish the cards", TIMEOUT, || async {
            let list = slices.list(&ListParams::default()).await?.items;
            let count = list
                .iter()
                .filter_map(|slice| slice.data.pointer("/spec/devices")?.as_array())
                .flatten()
                .count();
            Ok(Seen::from_bool(count == CARDS as usize, || format!("{count} of {CARDS} devices")))
        })
        .await?;
    let namespace = cluster.namespace("dra", &[]).await?;
    let claimed = claim(cluster, &namespace).await?;
    cluster.create_deployment(&namespace, deployment("whole", u32::try_from(CARDS - 1)?, GPU)).await?;
    cluster.all_running(&namespace, "whole", CARDS as usize - 1).await?;
    cluster.create_pod(&namespace, "share", shared_spec(10, 10)).await?;
    cluster.pending(&namespace, "share", QUIET).await?;
    cluster.delete_pod(&namespace, "claiming").await?;
    let card = only_card(&cluster.running(&namespace, "share").await?.1)?;
    ensure!(card == claimed, "the freed card is {claimed}, and the share is on {card}");
    extended_resource(cluster, classes, &namespace).await
}

/// Runs a pod with a claim, and returns its card once the node agent knows of it.
async fn claim(cluster: &mut Cluster, namespace: &str) -> Result<String> {
    let templates: Api<DynamicObject> =
        Api::namespaced_with(cluster.client.clone(), namespace, &kind("ResourceClaimTemplate"));
    let request = json!({"name": "card", "exactly": {"deviceClassName": DRIVER}});
    let template =
        json!({"metadata": {"name": "card"}, "spec": {"spec": {"devices": {"requests": [request]}}}});
    templates.create(&PostParams::default(), &serde_json::from_value(template)?).await?;
    let mut spec = pod_spec(&[]);
    spec["resourceClaims"] = json!([{"name": "card", "resourceClaimTemplateName": "card"}]);
    spec["containers"][0]["resources"]["claims"] = json!([{"name": "card"}]);
    cluster.create_pod(namespace, "claiming", spec).await?;
    let card = only_card(&cluster.running(namespace, "claiming").await?.1)?;
    let shadows = Api::<GPUShadow>::all(cluster.client.clone());
    cluster
        .until("the GPUShadow to name the claim", TIMEOUT, || async {
            let cards = shadows.get(NODE).await?.status.unwrap_or_default().cards;
            let closed =
                cards.iter().find(|status| status.card.uuid == card).map(|card| card.closed_because.clone());
            let names = closed.as_ref().is_some_and(|why| why.contains("claiming") && why.contains("DRA"));
            Ok(Seen::from_bool(names, || format!("{closed:?}")))
        })
        .await?;
    Ok(card)
}

/// With `extendedResourceName: nvidia.com/gpu` the scheduler turns to the driver where a node's allocatable is 0, as it is where shares have
/// all cards. The extender keeps the pod waiting; a scheduler without it does not.
async fn extended_resource(
    cluster: &mut Cluster,
    classes: &Api<DynamicObject>,
    namespace: &str,
) -> Result<()> {
    let deployments: Api<Deployment> = Api::namespaced(cluster.client.clone(), namespace);
    deployments.delete("whole", &DeleteParams::foreground()).await?;
    cluster.delete_pod(namespace, "share").await?;
    let mut shares = deployment("shares", u32::try_from(CARDS)?, &share(100, 160));
    shares["spec"]["template"]["spec"]["schedulerName"] = json!(SCHEDULER);
    cluster.create_deployment(namespace, shares).await?;
    cluster.all_running(namespace, "shares", CARDS as usize).await?;
    let legacy = Dialect::default().legacy;
    cluster.wait_for_allocatable(&[(&legacy, 0)]).await?;

    let name = |value: Value| Patch::Merge(json!({"spec": {"extendedResourceName": value}}));
    classes.patch(DRIVER, &PatchParams::default(), &name(json!(legacy))).await?;
    let mut spec = pod_spec(GPU);
    // It is bound, and must not run.
    spec["containers"][0]["image"] = json!("gpu-migrate.test/absent:1");
    cluster.create_pod(namespace, "extended", spec).await?;
    cluster.pending(namespace, "extended", QUIET).await?;
    let found = preflight(cluster)?;
    let expected = format!("DeviceClass {DRIVER} has extendedResourceName {legacy}");
    ensure!(found.contains(&expected), "preflight says {found}");

    cluster.restart_scheduler(None)?;
    let pods = cluster.pods(namespace);
    let bound = cluster
        .until("a scheduler without the extender to bind the pod to a full node", TIMEOUT, || async {
            let pod = pods.get("extended").await?;
            let bound = pod.spec.as_ref().is_some_and(|spec| spec.node_name.as_deref() == Some(NODE));
            Ok(Seen::from_bool(bound, || phase_and_why(Some(&pod))))
        })
        .await;
    cluster.restart_scheduler(Some(cluster.setup.ports.extender[0]))?;
    bound
}

/// What preflight prints. Its status is not asked: it finds other things as well.
fn preflight(cluster: &Cluster) -> Result<String> {
    let output = Command::new(binaries::ours()?.join("gpu-migrate"))
        .arg("preflight")
        .arg("--kubeconfig")
        .arg(&cluster.setup.admin)
        .output()
        .context("cannot run gpu-migrate preflight")?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
