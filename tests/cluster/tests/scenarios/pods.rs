//! What a user gets: the packaged chart, installed by Helm, with our images, and every component in its pod.
//!
//! Nothing of the chart is changed: security contexts, probes, mounts, Services and rights are its own. Outside of a pod are
//! NVIDIA's plugin (it is not ours), NVML (a stand-in, which the runtime class `nvidia` brings into the agent's container as NVIDIA's
//! runtime does) and the forwarder of [`gpu_migrate_cluster_tests::pod_network`]. The programs are those of the tests.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use gpu_migrate_cluster_tests::{
    Cluster, audit, binaries,
    cluster::TIMEOUT,
    configs::NODE,
    manifests,
    migration::{GPU, limit},
    process::output,
    runbook::Runbook,
    stage::SYSTEM_NAMESPACE,
    wait::Seen,
    workload::{deployment, only_card, phase_and_why},
};
use gpu_migrate_model::names::{Dialect, PLUGIN};
use gpu_migrate_release::{
    debian,
    images::{COMPONENTS, Source},
    oci::{Entry, Image, Layer, Tree, architecture},
};
use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, Deployment},
        core::v1::{Node, Pod},
    },
    jiff::Timestamp,
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::json;

/// Installs, bridges the node, converts a Deployment, looks at what runs, and uninstalls.
pub(crate) async fn the_packaged_chart_runs_every_component_in_its_pod(cluster: &mut Cluster) -> Result<()> {
    import_images(cluster).await?;
    let network = cluster.connect_pods().await?;
    let mut helm = Runbook::open(cluster, "pods::the_packaged_chart_runs_every_component_in_its_pod")?;
    helm.follow = false;
    let class = json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}, "handler": "nvidia"});
    manifests::apply(&cluster.client, &class, false).await?;
    cluster.apply_crds().await?;

    for command in [
        "kubectl apply -f deploy/base/namespace.yaml",
        "helm package deploy/chart/gpu-migrate",
        // Never: what is not among the imported images must not come from a registry.
        "helm install gpu-migrate gpu-migrate-*.tgz --namespace gpu-migrate-system --set image.pullPolicy=Never --wait --timeout 110s",
    ] {
        run(cluster, &helm, command).await?;
    }
    cluster.wait_for_webhook().await?;
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let labelled = |value: serde_json::Value| Patch::Merge(json!({"metadata": {"labels": {PLUGIN: value}}}));
    nodes.patch(NODE, &PatchParams::default(), &labelled(json!("Bridged"))).await?;
    cluster.start_nvidia_plugin_behind_agent().await?;
    cluster.wait_for_both_kinds().await?;
    all_ready(cluster).await?;

    let namespace = cluster.project("danlu", json!({})).await?;
    cluster.create_deployment(&namespace, deployment("train", 2, GPU)).await?;
    let mut cards = BTreeSet::new();
    for (pod, container) in cluster.all_running(&namespace, "train", 2).await? {
        ensure!(limit(&pod, &Dialect::default().cores) == 100, "not converted: {:?}", pod.spec);
        cards.insert(only_card(&container)?);
    }
    ensure!(cards.len() == 2, "both pods have the same whole card: {cards:?}");

    all_ready(cluster).await?;
    are_confined()?;
    none_was_forbidden(cluster)?;

    // Shares first, then what served them.
    Api::<Deployment>::namespaced(cluster.client.clone(), &namespace)
        .delete("train", &DeleteParams::default())
        .await?;
    let pods = cluster.pods(&namespace);
    no_pods(cluster, "the shared pods to go", &pods).await?;
    cluster.remove("nvidia-device-plugin")?;
    nodes.patch(NODE, &PatchParams::default(), &labelled(json!(null))).await?;
    let agents: Api<DaemonSet> = Api::namespaced(cluster.client.clone(), SYSTEM_NAMESPACE);
    cluster
        .until("the operator to delete the node agent's DaemonSet", TIMEOUT, || async {
            let left = agents.list(&ListParams::default()).await?.items;
            Ok(Seen::from_bool(left.is_empty(), || format!("{} left", left.len())))
        })
        .await?;
    run(cluster, &helm, "helm uninstall gpu-migrate --namespace gpu-migrate-system --wait").await?;
    let pods = cluster.pods(SYSTEM_NAMESPACE);
    no_pods(cluster, "our pods to go", &pods).await?;
    cluster.disconnect_pods(network).await
}

async fn run(cluster: &mut Cluster, helm: &Runbook, command: &str) -> Result<()> {
    let output = helm.run_unlisted(cluster, command).await?;
    ensure!(output.status == 0, "{command}\n{}", output.text);
    Ok(())
}

/// Our images from the programs of the tests, and one of kube-scheduler, which no registry is asked for.
async fn import_images(cluster: &Cluster) -> Result<()> {
    let created = Timestamp::UNIX_EPOCH;
    let source = Source {
        programs: stripped(cluster)?,
        packages: binaries::cache()?.join("debian"),
        registry: "ghcr.io/gpu-migrate".into(),
        tag: env!("CARGO_PKG_VERSION").into(),
        revision: "tests".into(),
        created,
    };
    for built in source.build()? {
        eprintln!("    {} of {} MB, {}", built.name, built.layout.tar.len() >> 20, built.layout.digest);
        cluster.import_image(&built.layout.tar)?;
    }
    let root = debian::root(&source.packages, architecture(), created)?;
    // The chart asks for the version of the cluster.
    let version = cluster.client.apiserver_version().await?.git_version;
    let content = fs::read(&cluster.setup.binaries.scheduler)?;
    let program = Tree::from([("usr/local/bin/kube-scheduler".into(), Entry::File { mode: 0o755, content })]);
    let name = format!("registry.k8s.io/kube-scheduler:{version}");
    let program = Layer::new(&program, created)?;
    let scheduler = Image {
        name: &name,
        architecture: architecture(),
        created,
        layers: vec![&root, &program],
        entrypoint: vec![],
        arguments: vec![],
        user: "65532:65532",
        labels: BTreeMap::new(),
    };
    cluster.import_image(&scheduler.layout()?.tar)
}

/// The programs without line tables, as releases have them.
fn stripped(cluster: &Cluster) -> Result<PathBuf> {
    let folder = cluster.setup.layout.file("programs");
    fs::create_dir_all(&folder)?;
    for component in COMPONENTS {
        let built = binaries::ours()?.join(component.program);
        output(Command::new("strip").arg("-o").arg(folder.join(component.program)).arg(built))?;
    }
    Ok(folder)
}

/// Waits until all our pods are ready, two of each Deployment and one agent, and fails if a container was ever restarted.
async fn all_ready(cluster: &mut Cluster) -> Result<()> {
    let pods = cluster.pods(SYSTEM_NAMESPACE);
    let all = cluster
        .until("all our pods to be ready", TIMEOUT, || async {
            let all = pods.list(&ListParams::default()).await?.items;
            let waiting: Vec<String> =
                all.iter().filter(|pod| !is_ready(pod)).map(|pod| phase_and_why(Some(pod))).collect();
            let done = waiting.is_empty() && all.len() == 7;
            Ok(Seen::from_option(done.then(|| all.clone()), || format!("{} pods; {waiting:?}", all.len())))
        })
        .await?;
    for pod in all {
        for container in pod.status.iter().flat_map(|s| s.container_statuses.iter().flatten()) {
            ensure!(
                container.restart_count == 0,
                "{} of {} was restarted {} times: {:?}",
                container.name,
                pod.name_any(),
                container.restart_count,
                container.last_state
            );
        }
    }
    Ok(())
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|c| c.type_ == "Ready" && c.status == "True")
}

/// What the kernel says about the processes: no capability, no way to more, filtered system calls, a read-only root, and no
/// root user but for the node agent.
fn are_confined() -> Result<()> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir("/proc")? {
        let folder = entry?.path();
        let Ok(command) = fs::read(folder.join("cmdline")) else { continue };
        let program =
            String::from_utf8_lossy(command.split(|b| *b == 0).next().unwrap_or_default()).into_owned();
        let ours =
            program.strip_prefix("/gpu-migrate-").or((program == "kube-scheduler").then_some("scheduler"));
        let Some(name) = ours else { continue };
        is_confined(&folder, if name == "bridge" { "0" } else { "65532" })
            .with_context(|| format!("{program}, {}", folder.display()))?;
        *found.entry(name.to_owned()).or_insert(0) += 1;
    }
    let expected = [("bridge", 1), ("extender", 2), ("operator", 2), ("scheduler", 2), ("webhook", 2)];
    let expected = expected.map(|(name, count)| (name.to_owned(), count)).into();
    ensure!(found == expected, "processes {found:?}, expected {expected:?}");
    Ok(())
}

fn is_confined(process: &Path, user: &str) -> Result<()> {
    let status = fs::read_to_string(process.join("status"))?;
    for (field, expected) in [
        ("Uid:", user),
        ("Gid:", user),
        ("CapEff:", "0000000000000000"),
        ("NoNewPrivs:", "1"),
        ("Seccomp:", "2"),
    ] {
        let line = status.lines().find(|line| line.starts_with(field)).context(field)?;
        ensure!(line.split_whitespace().nth(1) == Some(expected), "{line}, expected {expected}");
    }
    let mounts = fs::read_to_string(process.join("mountinfo"))?;
    let Some(root) = mounts.lines().find(|line| line.split(' ').nth(4) == Some("/")) else {
        bail!("no root file system:\n{mounts}")
    };
    let options = root.split(' ').nth(5).unwrap_or_default();
    ensure!(options.split(',').any(|option| option == "ro"), "a writable root file system: {root}");
    Ok(())
}

/// By the accounts of the pods: the chart's rights are enough.
fn none_was_forbidden(cluster: &Cluster) -> Result<()> {
    let all = audit::read(&cluster.setup.layout.logs())?;
    for program in audit::PROGRAMS {
        ensure!(all.iter().any(|entry| entry.is_of(program)), "{program} never asked the API server");
        let refused: Vec<_> = all.iter().filter(|entry| entry.is_of(program) && !entry.allowed()).collect();
        ensure!(refused.is_empty(), "{program} was forbidden requests: {refused:#?}");
    }
    Ok(())
}

async fn no_pods(cluster: &mut Cluster, what: &str, pods: &Api<Pod>) -> Result<()> {
    cluster
        .until(what, TIMEOUT, || async {
            let left = pods.list(&ListParams::default()).await?.items;
            Ok(Seen::from_bool(left.is_empty(), || {
                left.iter().map(|pod| phase_and_why(Some(pod))).collect::<Vec<_>>().join("; ")
            }))
        })
        .await
}
