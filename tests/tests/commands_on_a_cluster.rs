//! The commands that look at a cluster, on one that lives: the embedded API server.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, too, may fail loudly

use assert_cmd::Command;
use gpu_migrate_model::crd::definitions;
use gpu_migrate_sim::cluster::api::ApiServer;
use gpu_migrate_sim::cluster::json_client;
use kube::Client;
use serde_json::{Value, json};
use std::path::Path;
use tokio_util::sync::CancellationToken;

fn run(kubeconfig: &Path, args: &[&str]) -> (i32, String, String) {
    let mut command = Command::cargo_bin("gpu-migrate").unwrap();
    let output = command.args(args).arg("--kubeconfig").arg(kubeconfig).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

async fn create(client: &Client, path: &str, object: Value) {
    json_client::create(client, path, &object).await.unwrap_or_else(|error| panic!("{path}: {error}"));
}

fn template(cards: u32) -> Value {
    json!({"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i", "resources": {"limits": {"nvidia.com/gpu": cards.to_string()}}}]}})
}

fn deployment(namespace: &str) -> Value {
    json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "train", "namespace": namespace},
        "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": template(2)}})
}

/// `plan` needs no files: what is in the cluster is planned by the cluster's policies, and nothing is said twice.
#[tokio::test(flavor = "multi_thread")]
async fn plan_and_top_of_a_cluster() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let running = ApiServer::default().serve(0, CancellationToken::new()).await.unwrap();
    let client = running.client().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = folder.path().join("kubeconfig");
    std::fs::write(&kubeconfig, running.kubeconfig()).unwrap();
    for definition in definitions() {
        let path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
        create(&client, path, serde_json::to_value(definition).unwrap()).await;
    }
    let labels = json!({"gpu-migrate.io/opt-in": "true", "gpu-migrate.io/project": "danlu"});
    create(
        &client,
        "/api/v1/namespaces",
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "danlu", "labels": labels}}),
    )
    .await;
    for namespace in ["danlu", "default"] {
        create(&client, &format!("/apis/apps/v1/namespaces/{namespace}/deployments"), deployment(namespace))
            .await;
    }
    let policy = json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUMigration", "metadata": {"name": "danlu"},
        "spec": {"project": "danlu", "mode": "Enforce", "convert": {"coresPerCard": 100, "blocksPerCard": 42}}});
    create(&client, "/apis/gpu-migrate.io/v1alpha1/gpumigrations", policy).await;
    let owned = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "train-1", "namespace": "danlu",
        "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "x", "uid": "u", "controller": true}]}, "spec": template(2)["spec"]});
    create(&client, "/api/v1/namespaces/danlu/pods", owned).await;

    let look = tokio::task::spawn_blocking(move || {
        let (code, out, err) = run(&kubeconfig, &["plan", "-o", "summary"]);
        assert!(out.starts_with("1 converted, 1 left alone, 0 cannot be converted"), "{out}{err}");
        assert!(out.contains("200 cores and 84 blocks"), "{out}");
        assert_eq!(
            (code, err.as_str()),
            (0, ""),
            "kinds that a cluster does not serve have no objects in it"
        );
        let (_, out, _) = run(&kubeconfig, &["plan", "-o", "patch", "-n", "danlu"]);
        let patches: Value = serde_json::from_str(&out).unwrap();
        assert_eq!((patches.as_array().unwrap().len(), &patches[0]["source"]), (1, &json!("cluster")));

        let (code, out, err) = run(&kubeconfig, &["top"]);
        assert_eq!((code, err.as_str()), (0, ""), "into a pipe it looks once");
        assert!(out.contains("danlu/train-1") && out.contains("whole cards"), "{out}");
    });
    look.await.unwrap();
}
