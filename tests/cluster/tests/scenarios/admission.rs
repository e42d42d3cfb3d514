//! The webhook in front of a real apiserver.

use std::{
    cell::RefCell,
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use gpu_migrate_cluster_tests::{
    Cluster, audit,
    cluster::TIMEOUT,
    http,
    metrics::WebhookCalls,
    migration::{GPU, dry_run, limit},
    stage::{SECOND_WEBHOOK, WEBHOOK},
    wait::{self, Seen},
    workload::{only_card, pod_spec},
};
use gpu_migrate_model::names::{Dialect, SCHEDULER};
use k8s_openapi::api::{admissionregistration::v1::MutatingWebhookConfiguration, core::v1::Pod};
use kube::{Api, ResourceExt, api::ListParams, core::Request};
use serde_json::{Value, json};
use tokio::task::JoinSet;

/// A CronJob's first pod may take until the next full minute.
const NEXT_MINUTE: Duration = Duration::from_secs(90);

/// Pods of every workload kind are converted: here to a tenth of a card, so that all kinds run side by side.
pub(crate) async fn pods_of_every_workload_kind_are_converted(cluster: &mut Cluster) -> Result<()> {
    let namespace = cluster.project("kinds", json!({"coresPerCard": 10, "blocksPerCard": 4})).await?;
    for (group, kind, spec) in workloads() {
        let name = kind.to_lowercase();
        let manifest = json!({"apiVersion": group, "kind": kind, "metadata": {"name": name}, "spec": spec});
        let base = if group == "v1" { "/api/v1".to_owned() } else { format!("/apis/{group}") };
        let request = Request::new(format!("{base}/namespaces/{namespace}/{name}s"))
            .create(&kube::api::PostParams::default(), manifest.to_string().into_bytes())?;
        cluster
            .client
            .request::<Value>(request)
            .await
            .with_context(|| format!("cannot create the {kind}"))?;
    }
    let pods: Api<Pod> = cluster.pods(&namespace);
    for (_, kind, _) in workloads() {
        let labelled = ListParams::default().labels(&format!("kind={kind}"));
        let pod = cluster
            .until(&format!("a pod of the {kind}"), NEXT_MINUTE, || async {
                let list = pods.list(&labelled).await?.items;
                Ok(Seen::from_option(list.into_iter().next(), || "none".into()))
            })
            .await?;
        let dialect = Dialect::default();
        let asks = [&dialect.legacy, &dialect.cores, &dialect.memory].map(|name| limit(&pod, name));
        ensure!(asks == [0, 10, 4], "{kind}: legacy cards, cores and blocks are {asks:?}");
        let (_, container) = cluster
            .running(&namespace, &pod.name_any())
            .await
            .with_context(|| format!("the {kind}'s pod"))?;
        only_card(&container).with_context(|| format!("the {kind}'s pod"))?;
    }
    Ok(())
}

/// API group with version, kind, and a spec whose pods carry the label `kind`.
fn workloads() -> Vec<(&'static str, &'static str, Value)> {
    let template = |kind: &str| json!({"metadata": {"labels": {"kind": kind}}, "spec": pod_spec(GPU)});
    let selected =
        |kind: &str| json!({"selector": {"matchLabels": {"kind": kind}}, "template": template(kind)});
    let job = |kind: &str| {
        let mut template = template(kind);
        template["spec"]["restartPolicy"] = json!("Never");
        json!({"template": template})
    };
    vec![
        // First, since it takes longest.
        (
            "batch/v1",
            "CronJob",
            json!({"schedule": "* * * * *", "concurrencyPolicy": "Forbid", "jobTemplate": {"spec": job("CronJob")}}),
        ),
        ("apps/v1", "Deployment", selected("Deployment")),
        ("apps/v1", "ReplicaSet", selected("ReplicaSet")),
        ("apps/v1", "StatefulSet", selected("StatefulSet")),
        ("apps/v1", "DaemonSet", selected("DaemonSet")),
        ("batch/v1", "Job", job("Job")),
    ]
}

/// `kubectl run --dry-run=server` shows the conversion, and leaves nothing behind.
pub(crate) async fn a_server_side_dry_run_shows_the_conversion(cluster: &mut Cluster) -> Result<()> {
    let namespace = cluster.project("dry", json!({})).await?;
    let pod = dry_run(&cluster.client, &namespace, pod_spec(GPU)).await?;
    let dialect = Dialect::default();
    ensure!(limit(&pod, &dialect.cores) == 100 && limit(&pod, &dialect.legacy) == 0, "{:?}", pod.spec);
    ensure!(pod.spec.as_ref().and_then(|s| s.scheduler_name.as_deref()) == Some(SCHEDULER), "{:?}", pod.spec);
    let left = cluster.pods(&namespace).list(&ListParams::default()).await?.items;
    ensure!(left.is_empty(), "the dry run left {left:?}");
    Ok(())
}

/// I5: without the webhook a pod is created as it was written, and runs as a legacy pod.
pub(crate) async fn without_the_webhook_pods_stay_legacy(cluster: &mut Cluster) -> Result<()> {
    let namespace = cluster.project("away", json!({})).await?;
    cluster.kill("gpu-migrate-webhook")?;
    let before = WebhookCalls::read(&cluster.client).await?;
    let created = cluster.create_pod(&namespace, "legacy", pod_spec(GPU)).await;
    let calls = WebhookCalls::read(&cluster.client).await?.since(&before);
    cluster.start_component("gpu-migrate-webhook")?;
    let created = created?;
    ensure!(calls.failed_open == 1, "the apiserver did not call it: {calls:?}");
    ensure!(
        limit(&created, &Dialect::default().legacy) == 1 && created.annotations().is_empty(),
        "{created:?}"
    );
    let (_, container) = cluster.running(&namespace, "legacy").await?;
    only_card(&container)?;
    // Once it is back, so is the conversion.
    converts_again(cluster, &namespace).await
}

/// Two versions that run side by side, as in a rolling upgrade, want different configurations: one of them writes, and pods are
/// converted all the while.
pub(crate) async fn an_upgrade_with_other_arguments_writes_few_times(cluster: &mut Cluster) -> Result<()> {
    const MOST: usize = 5;
    let namespace = cluster.project("upgrade", json!({})).await?;
    let begin = audit::read(&cluster.setup.layout.logs())?.len();
    cluster.add_second_webhook(&[("timeout-seconds", "7")]).await?;
    let client = cluster.client.clone();
    let converted = || async {
        let pod = dry_run(&client, &namespace, pod_spec(GPU)).await?;
        ensure!(limit(&pod, &Dialect::default().legacy) == 0, "not converted: {:?}", pod.spec);
        Ok(())
    };
    wait::throughout("conversion by two versions", Duration::from_secs(10), converted).await?;
    let before = WebhookCalls::read(&cluster.client).await?;
    cluster.component("gpu-migrate-webhook")?.stop()?;
    let hooks: Api<MutatingWebhookConfiguration> = Api::all(cluster.client.clone());
    cluster
        .until("the configuration of the new version", TIMEOUT, || async {
            let timeout = hooks.get(WEBHOOK).await?.webhooks.into_iter().flatten().next();
            let timeout = timeout.and_then(|webhook| webhook.timeout_seconds);
            Ok(Seen::from_bool(timeout == Some(7), || format!("timeoutSeconds {timeout:?}")))
        })
        .await?;
    wait::throughout("conversion by the new version", Duration::from_secs(10), converted).await?;
    let failed = WebhookCalls::read(&cluster.client).await?.since(&before).failed;
    let log = audit::read(&cluster.setup.layout.logs())?.split_off(begin);
    let writes = log.iter().filter(|entry| {
        let of_configuration =
            entry.resource().is_some_and(|(_, name)| name == "mutatingwebhookconfigurations");
        entry.is_of("gpu-migrate-webhook")
            && of_configuration
            && !["get", "list", "watch"].contains(&&*entry.verb)
    });
    let writes = writes.count();
    cluster.remove(SECOND_WEBHOOK)?;
    cluster.restart_webhook(&[]).await?;
    eprintln!("    {writes} writes of the configuration; {failed} calls failed while the old version left");
    ensure!((1..=MOST).contains(&writes), "{writes} writes of the configuration, expected 1 to {MOST}");
    Ok(())
}

async fn converts_again(cluster: &mut Cluster, namespace: &str) -> Result<()> {
    let client = cluster.client.clone();
    cluster
        .until("the webhook to convert again", TIMEOUT, || async {
            let pod = dry_run(&client, namespace, pod_spec(GPU)).await?;
            Ok(Seen::from_bool(limit(&pod, &Dialect::default().legacy) == 0, || "still legacy".into()))
        })
        .await
}

/// The serving certificate rotates ten times, and the CA with it, under a constant stream of pod creations: the apiserver
/// counts no failed call. More calls at a time than the apiserver keeps connections open for, so that there are always new
/// handshakes with the certificate of the moment.
pub(crate) async fn rotations_fail_no_call(cluster: &mut Cluster) -> Result<()> {
    const ROTATIONS: usize = 10;
    const AT_A_TIME: usize = 40;
    cluster.restart_webhook(&[("certificate-lifetime", "6s"), ("ca-lifetime", "30s")]).await?;
    let namespace = cluster.project("rotation", json!({})).await?;
    let before = WebhookCalls::read(&cluster.client).await?;

    let stop = Arc::new(AtomicBool::new(false));
    let mut streams = JoinSet::new();
    for _ in 0..AT_A_TIME {
        let (client, namespace, stop) = (cluster.client.clone(), namespace.clone(), stop.clone());
        streams.spawn(async move {
            let (mut created, mut unconverted) = (0_u64, 0_u64);
            while !stop.load(Ordering::Relaxed) {
                let pod = dry_run(&client, &namespace, pod_spec(GPU)).await?;
                created += 1;
                unconverted += u64::from(limit(&pod, &Dialect::default().legacy) > 0);
            }
            anyhow::Ok((created, unconverted))
        });
    }
    let seen = rotations(cluster, ROTATIONS).await;
    stop.store(true, Ordering::Relaxed);
    let (mut created, mut unconverted) = (0, 0);
    while let Some(stream) = streams.join_next().await {
        let (c, u) = stream??;
        (created, unconverted) = (created + c, unconverted + u);
    }
    let calls = WebhookCalls::read(&cluster.client).await?.since(&before);
    cluster.restart_webhook(&[]).await?;

    let (certificates, bundles) = seen?;
    eprintln!("{certificates} certificates and {bundles} bundles under {created} creations: {calls:?}");
    ensure!(unconverted == 0, "{unconverted} of {created} pods were not converted: {calls:?}");
    ensure!(calls.failed == 0 && calls.failed_open == 0, "{calls:?}");
    ensure!(
        calls.answered >= created && bundles > 2,
        "{calls:?} for {created} creations, {bundles} bundles: this proves nothing"
    );
    Ok(())
}

/// Watches until so many serving certificates have followed the first; how many, and how many CA bundles were registered.
async fn rotations(cluster: &mut Cluster, wanted: usize) -> Result<(usize, usize)> {
    let port = cluster.setup.ports.webhook[1];
    let hooks: Api<MutatingWebhookConfiguration> = Api::all(cluster.client.clone());
    let (expiries, bundles) = (RefCell::new(BTreeSet::new()), RefCell::new(BTreeSet::new()));
    cluster
        .until(&format!("{wanted} rotations"), Duration::from_secs(120), || async {
            let metrics = http::get(port, "/metrics").await?;
            let expiry =
                metrics.lines().find(|l| l.starts_with("gpu_migrate_webhook_certificate_expiry_timestamp"));
            expiries.borrow_mut().insert(expiry.context("no expiry in the metrics")?.to_owned());
            let bundle = hooks
                .get(WEBHOOK)
                .await?
                .webhooks
                .into_iter()
                .flatten()
                .find_map(|w| w.client_config.ca_bundle);
            bundles.borrow_mut().insert(bundle.context("no caBundle")?.0);
            let count = expiries.borrow().len();
            Ok(Seen::from_bool(count > wanted, || format!("{count} certificates")))
        })
        .await?;
    Ok((expiries.borrow().len() - 1, bundles.borrow().len()))
}
