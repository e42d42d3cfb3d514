//! What a program's account may write, by node and by field: the policies of `deploy/` on the real API server.
//!
//! Everything is asked as a dry run, which passes admission and changes nothing.

use anyhow::{Context, Result, ensure};
use gpu_migrate_cluster_tests::{
    Cluster,
    cluster::{TIMEOUT, client},
    configs::NODE,
    wait::Seen,
    workload::{deployment, pod_spec},
};
use gpu_migrate_model::names::{CARDS_GENERATION, CONVERT, GANG_GATE, POOL};
use kube::Client;
use serde_json::{Value, json};

/// A node whose agent's token nobody has.
const OTHER: &str = "gpu-03";

/// Sends `body` as this kind of patch, or a deletion if there is none.
type Write = (&'static str, Value);

const MERGE: &str = "application/merge-patch+json";
const STRATEGIC: &str = "application/strategic-merge-patch+json";
const APPLY: &str = "application/apply-patch+yaml";

/// The token of one node's agent was stolen, and those of extender and operator: what each refuses, and what still works.
pub(crate) async fn a_stolen_token_is_of_use_on_its_own_node_alone(cluster: &mut Cluster) -> Result<()> {
    let _other = cluster.new_node(OTHER, &[]).await?;
    let namespace = cluster.namespace("tokens", &[]).await?;
    for (name, node) in [("own", Some(NODE)), ("other", Some(OTHER)), ("waits", None)] {
        let mut spec = pod_spec(&[]);
        match node {
            Some(node) => spec["nodeName"] = json!(node),
            None => spec["schedulingGates"] = json!([{"name": GANG_GATE}]),
        }
        cluster.create_pod(&namespace, name, spec).await?;
    }
    // More cards than the node has: it never runs.
    let mut whole = pod_spec(&[("nvidia.com/gpu", 64)]);
    whole["nodeName"] = json!(NODE);
    cluster.create_pod(&namespace, "whole", whole).await?;
    cluster.create_deployment(&namespace, deployment("train", 0, &[])).await?;

    let of_node = client(&cluster.kubeconfig_on_node("gpu-migrate-bridge", NODE).await?).await?;
    let of_none = client(&cluster.kubeconfig_without_node("gpu-migrate-bridge").await?).await?;
    let extender = client(&cluster.kubeconfig_without_node("gpu-migrate-extender").await?).await?;
    let operator = client(&cluster.kubeconfig_without_node("gpu-migrate-operator").await?).await?;

    let node = |name: &str| format!("/api/v1/nodes/{name}");
    let pod = |name: &str| format!("/api/v1/namespaces/{namespace}/pods/{name}");
    let shadow = |name: &str| format!("/apis/gpu-migrate.io/v1alpha1/gpushadows/{name}");
    let workload = format!("/apis/apps/v1/namespaces/{namespace}/deployments/train");
    let annotation = |key: &str| -> Write { (MERGE, json!({"metadata": {"annotations": {key: "1"}}})) };
    let label = |key: &str| -> Write { (MERGE, json!({"metadata": {"labels": {key: "1"}}})) };
    let unschedulable: Write = (MERGE, json!({"spec": {"unschedulable": true}}));
    let schedulable: Write = (MERGE, json!({"spec": {"unschedulable": null}}));
    let tainted: Write = (MERGE, json!({"spec": {"taints": [{"key": "other", "effect": "NoSchedule"}]}}));
    let image = json!({"spec": {"containers": [{"name": "main", "image": "registry.example/miner"}]}});
    let image: Write = (STRATEGIC, image);
    let report = |name: &str| -> Write {
        (
            APPLY,
            json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUShadow", "metadata": {"name": name}, "spec": {}}),
        )
    };
    let ungate: Write =
        (STRATEGIC, json!({"spec": {"schedulingGates": [{"$patch": "delete", "name": GANG_GATE}]}}));
    let template = |inner: Value| -> Write { (STRATEGIC, json!({"spec": {"template": inner}})) };
    let convert = template(json!({"metadata": {"labels": {CONVERT: "true"}}}));
    let other_program = template(image.1.clone());
    let deletion: Write = ("", json!(null));

    for (account, path, write) in [
        (&of_node, node(OTHER), &annotation(CARDS_GENERATION)),
        (&of_node, node(NODE), &label("pool")),
        (&of_node, node(NODE), &annotation("other")),
        (&of_node, node(NODE), &unschedulable),
        (&of_node, pod("own"), &image),
        (&of_node, pod("own"), &label("app")),
        (&of_node, pod("own"), &annotation("other")),
        (&of_node, pod("own"), &deletion),
        (&of_node, pod("other"), &annotation("gpu-migrate.io/gpu-idx-main")),
        (&of_node, pod("other"), &deletion),
        (&of_node, pod("waits"), &deletion),
        (&of_node, shadow(OTHER), &report(OTHER)),
        (&of_none, node(NODE), &annotation(CARDS_GENERATION)),
        (&of_none, pod("waits"), &deletion),
        (&of_none, shadow(NODE), &report(NODE)),
        (&extender, pod("own"), &image),
        (&extender, pod("own"), &annotation("other")),
        (&extender, node(NODE), &label("pool")),
        (&operator, node(NODE), &label("pool")),
        (&operator, node(NODE), &tainted),
        (&operator, workload.clone(), &other_program),
    ] {
        refused(cluster, account, &path, write).await?;
    }
    for (account, path, write) in [
        (&of_node, node(NODE), &annotation(CARDS_GENERATION)),
        (&of_node, pod("own"), &annotation("gpu-migrate.io/gpu-idx-main")),
        (&of_node, pod("own"), &annotation("tencent.com/predicate-gpu-idx-0")),
        (&of_node, pod("whole"), &deletion),
        (&of_node, shadow(NODE), &report(NODE)),
        (&extender, pod("waits"), &ungate),
        (&extender, node(OTHER), &annotation(CARDS_GENERATION)),
        (&operator, node(OTHER), &label(POOL)),
        (&operator, node(OTHER), &unschedulable),
        (&operator, node(OTHER), &schedulable),
        (&operator, workload, &convert),
    ] {
        ask(account, &path, write).await.with_context(|| format!("{path}: {write:?}"))?;
    }
    Ok(())
}

/// Waits until a policy refuses it: the API server begins with a new one some moments after it was created.
async fn refused(cluster: &mut Cluster, account: &Client, path: &str, write: &Write) -> Result<()> {
    let what = format!("{path} to be refused: {write:?}");
    let text = cluster
        .until(&what, TIMEOUT, || async {
            Ok(match ask(account, path, write).await {
                Err(kube::Error::Api(status)) => Seen::Done(status.message),
                other => Seen::NotYet(format!("{other:?}")),
            })
        })
        .await?;
    ensure!(text.contains("ValidatingAdmissionPolicy 'gpu-migrate-"), "{path}: {text}");
    Ok(())
}

async fn ask(account: &Client, path: &str, (kind, body): &Write) -> kube::Result<Value> {
    let uri = format!("{path}?dryRun=All&fieldManager=gpu-migrate-bridge");
    let request = if body.is_null() { http::Request::delete(uri) } else { http::Request::patch(uri) };
    let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
    let request = request.header("content-type", *kind).body(body).map_err(kube::Error::HttpError)?;
    account.request(request).await
}
