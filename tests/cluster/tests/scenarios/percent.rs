//! A percentage of a project, beside another mutating webhook: what is converted is what `plan` says, at every revision.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
    sync::Arc,
};

use anyhow::{Context, Result, ensure};
use axum::{Json, Router, routing::post};
use base64::{Engine, engine::general_purpose::STANDARD};
use gpu_migrate_cluster_tests::{
    Cluster, binaries,
    cluster::TIMEOUT,
    metrics::WebhookCalls,
    migration::{GPU, limit},
    process::output,
    wait::Seen,
    workload::{container, deployment},
};
use gpu_migrate_model::{crd::GPUMigration, names::Dialect};
use gpu_migrate_runtime::serve::{Limits, serve};
use hyper_util::service::TowerToHyperService;
use k8s_openapi::api::{admissionregistration::v1::MutatingWebhookConfiguration, apps::v1::Deployment};
use kube::{
    Api,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

const DEPLOYMENTS: usize = 50;
const REVISIONS: usize = 5;
/// After ours in the order of the apiserver, which is that of the names: what it changes has ours called again.
const SECOND: &str = "sidecar-injector";

/// 50 Deployments at 50 % are each rolled five times: no decision changes, and all are those of `plan`.
pub(crate) async fn half_of_a_project_stays_the_same_half(cluster: &mut Cluster) -> Result<()> {
    let namespace = cluster.project("half", json!({})).await?;
    let percent = json!({"spec": {"rollout": {"percent": 50}}});
    let migrations: Api<GPUMigration> = Api::all(cluster.client.clone());
    let patched = migrations.patch(&namespace, &PatchParams::default(), &Patch::Merge(percent)).await?;
    cluster
        .until("the percentage to be accepted", TIMEOUT, || async {
            let status = migrations.get(&namespace).await?.status.unwrap_or_default();
            let accepted = status.accepted.map(|accepted| accepted.generation);
            Ok(Seen::from_bool(accepted == patched.metadata.generation, || format!("{accepted:?}")))
        })
        .await?;
    for index in 0..DEPLOYMENTS {
        let mut manifest = deployment(&format!("app-{index}"), 1, GPU);
        // Its pods stay Pending, and a new revision replaces them at once.
        manifest["spec"]["strategy"] =
            json!({"rollingUpdate": {"maxSurge": "100%", "maxUnavailable": "100%"}});
        manifest["spec"]["template"]["spec"]["nodeSelector"] = json!({"example.com/none": ""});
        cluster.create_deployment(&namespace, manifest).await?;
    }
    let planned = planned(cluster, &namespace)?;
    ensure!((15..=35).contains(&planned.len()), "{} of {DEPLOYMENTS} are planned", planned.len());

    let stop = CancellationToken::new();
    let guard = stop.clone().drop_guard();
    let before = WebhookCalls::read(&cluster.client).await?;
    add_second(cluster, &namespace, stop).await?;
    let rolled = roll(cluster, &namespace, &planned).await;
    let hooks: Api<MutatingWebhookConfiguration> = Api::all(cluster.client.clone());
    hooks.delete(SECOND, &DeleteParams::default()).await?;
    drop(guard);
    rolled?;
    let calls = WebhookCalls::read(&cluster.client).await?.since(&before);
    eprintln!("    {} of {DEPLOYMENTS} converted at each of {REVISIONS} revisions, {calls:?}", planned.len());
    // Ours, the other one, and ours again.
    let least = 3 * (DEPLOYMENTS * REVISIONS) as u64;
    ensure!(calls.answered >= least && calls.failed == 0, "{calls:?}: expected at least {least} answers");
    Ok(())
}

/// The Deployments that `gpu-migrate plan` converts in this cluster.
fn planned(cluster: &Cluster, namespace: &str) -> Result<BTreeSet<String>> {
    let plan = output(
        Command::new(binaries::ours()?.join("gpu-migrate"))
            .args(["plan", "--namespace", namespace, "--output", "json", "--kubeconfig"])
            .arg(&cluster.setup.admin),
    )?;
    let plan: Value = serde_json::from_str(&plan).context("the plan is no JSON")?;
    let items = plan["items"].as_array().context("the plan is no List")?;
    Ok(items.iter().filter_map(|item| item.pointer("/metadata/name")?.as_str().map(str::to_owned)).collect())
}

/// Rolls all Deployments, and compares the pods of each revision with the plan.
async fn roll(cluster: &mut Cluster, namespace: &str, planned: &BTreeSet<String>) -> Result<()> {
    let deployments: Api<Deployment> = Api::namespaced(cluster.client.clone(), namespace);
    let pods = cluster.pods(namespace);
    for revision in 1..=REVISIONS {
        let label =
            json!({"spec": {"template": {"metadata": {"labels": {"revision": revision.to_string()}}}}});
        for index in 0..DEPLOYMENTS {
            let name = format!("app-{index}");
            deployments.patch(&name, &PatchParams::default(), &Patch::Merge(&label)).await?;
        }
        let of_revision = ListParams::default().labels(&format!("revision={revision}"));
        let made = cluster
            .until(&format!("the pods of revision {revision}"), TIMEOUT, || async {
                let list = pods.list(&of_revision).await?.items;
                let made: BTreeMap<_, _> = list
                    .into_iter()
                    .filter_map(|pod| Some((pod.metadata.labels.as_ref()?.get("app")?.clone(), pod)))
                    .collect();
                let count = made.len();
                Ok(Seen::from_option((count == DEPLOYMENTS).then_some(made), || format!("{count} pods")))
            })
            .await?;
        for (app, pod) in made {
            let names: Vec<_> = pod.spec.iter().flat_map(|spec| &spec.containers).map(|c| &c.name).collect();
            ensure!(names == ["sidecar", "main"], "{app}: containers {names:?}");
            let dialect = Dialect::default();
            let [legacy, cores] = [&dialect.legacy, &dialect.cores].map(|name| limit(&pod, name));
            let expected = if planned.contains(&app) { [0, 100] } else { [1, 0] };
            ensure!(
                [legacy, cores] == expected,
                "{app} at revision {revision}: legacy cards and cores are {:?}, the plan says {expected:?}",
                [legacy, cores]
            );
        }
    }
    Ok(())
}

/// Another mutating webhook, as of a service mesh: it puts a container in front of the others.
async fn add_second(cluster: &Cluster, namespace: &str, stop: CancellationToken) -> Result<()> {
    let files = cluster.setup.pki.server(SECOND, &[])?;
    let chain = CertificateDer::pem_file_iter(&files.cert)?.collect::<Result<Vec<_>, _>>()?;
    let tls = rustls::ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(chain, PrivateKeyDer::from_pem_file(&files.key)?)?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("https://{}/inject", listener.local_addr()?);
    let service = TowerToHyperService::new(Router::new().route("/inject", post(inject)));
    tokio::spawn(serve(listener, Some(Arc::new(tls)), service, Limits::default(), stop));
    let configuration: MutatingWebhookConfiguration = serde_json::from_value(json!({
        "metadata": {"name": SECOND},
        "webhooks": [{
            "name": "sidecar.example.com",
            "clientConfig": {"url": url, "caBundle": STANDARD.encode(std::fs::read(cluster.setup.pki.ca())?)},
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}],
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "failurePolicy": "Fail",
        }],
    }))?;
    let hooks: Api<MutatingWebhookConfiguration> = Api::all(cluster.client.clone());
    let _ = hooks.delete(SECOND, &DeleteParams::default()).await;
    hooks.create(&PostParams::default(), &configuration).await?;
    Ok(())
}

async fn inject(Json(review): Json<Value>) -> Json<Value> {
    let request = &review["request"];
    let containers = request.pointer("/object/spec/containers").and_then(Value::as_array);
    let there = containers.into_iter().flatten().any(|container| container["name"] == "sidecar");
    let sidecar = json!({"op": "add", "path": "/spec/containers/0", "value": container("sidecar", &[])});
    let patch = if there { json!([]) } else { json!([sidecar]) };
    Json(json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "response": {"uid": request["uid"], "allowed": true, "patchType": "JSONPatch",
            "patch": STANDARD.encode(patch.to_string())},
    }))
}
