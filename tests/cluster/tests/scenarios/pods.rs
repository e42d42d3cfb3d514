//! What a user gets: the chart and the images as a release has them, installed by Helm, with our images, and every component in its pod.
//!
//! Nothing of the chart is changed: security contexts, probes, mounts, Services and rights are its own. NVIDIA's plugin is the real
//! one, in the DaemonSet that the operator makes for the pool. A stand-in is NVML, which the runtime class `nvidia` brings into
//! containers as NVIDIA's runtime does; outside of a pod is the forwarder of [`gpu_migrate_cluster_tests::pod_network`]. The
//! programs are those of the tests.

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
    migration::{GPU, limit, uid},
    process::output,
    runbook::Runbook,
    stage::{CARDS, SYSTEM_NAMESPACE, WEBHOOK},
    wait::Seen,
    workload::{deployment, only_card, phase_and_why},
};
use gpu_migrate_model::{
    crd::GPUConfig,
    names::{Dialect, GROUP},
};
use gpu_migrate_release::{
    bundle, debian,
    images::{COMPONENTS, Source},
    oci::{Entry, Image, Layer, Tree, architecture},
};
use k8s_openapi::{
    api::{
        admissionregistration::v1::MutatingWebhookConfiguration,
        apps::v1::{DaemonSet, Deployment},
        batch::v1::Job,
        core::v1::{Node, Pod},
        node::v1::RuntimeClass,
    },
    jiff::Timestamp,
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};

/// NVIDIA's plugin, in the version that the tests have.
const NVIDIA_IMAGE: &str = "nvcr.io/nvidia/k8s-device-plugin:v0.19.0";

/// Installs, tests the release, bridges the node, converts a Deployment, looks at what runs, upgrades under it, is refused to uninstall
/// under shared pods, uninstalls without them, and installs and removes everything again without Helm.
pub(crate) async fn the_packaged_chart_runs_every_component_in_its_pod(cluster: &mut Cluster) -> Result<()> {
    let source = source(cluster)?;
    import_images(cluster, &source).await?;
    let checkout = gpu_migrate_cluster_tests::package_folder().join("../..");
    let network = cluster.connect_pods().await?;
    let mut helm = Runbook::open(cluster, "pods::the_packaged_chart_runs_every_component_in_its_pod")?;
    helm.follow = false;
    let class = json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}, "handler": "nvidia"});
    manifests::apply(&cluster.client, &class, false).await?;
    cluster.apply_crds().await?;

    // Where the commands run.
    cluster.setup.layout.write("runbook/gpu-migrate.tgz", bundle::chart(&checkout, &source)?)?;
    for command in [
        "kubectl apply -f deploy/base/namespace.yaml",
        // Never: what is not among the imported images must not come from a registry.
        &format!(
            "helm install gpu-migrate gpu-migrate.tgz --namespace gpu-migrate-system --set image.pullPolicy=Never,nvidiaPlugin.image={NVIDIA_IMAGE} --wait --timeout 110s"
        ),
    ] {
        run(cluster, &helm, command).await?;
    }
    cluster.wait_for_webhook().await?;
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let labelled = |value: Value| Patch::Merge(json!({"metadata": {"labels": {"pool": value}}}));
    nodes.patch(NODE, &PatchParams::default(), &labelled(json!("a100"))).await?;
    manifests::apply(&cluster.client, &manifests::of_document("deploy/RUNBOOK.md", "GPUConfig")?, false)
        .await?;
    cluster.wait_for_both_kinds().await?;
    all_ready(cluster, 8, "app.kubernetes.io/part-of=gpu-migrate").await?;
    run(cluster, &helm, "helm test gpu-migrate --namespace gpu-migrate-system").await?;

    let namespace = cluster.project("danlu", json!({})).await?;
    cluster.create_deployment(&namespace, deployment("train", 2, GPU)).await?;
    let cards = cards_of(cluster, &namespace, 2).await?;
    all_ready(cluster, 8, "app.kubernetes.io/part-of=gpu-migrate").await?;
    are_confined()?;

    // Every pod of ours is replaced, and no card changes hands. On the node's network only one webhook fits on a node.
    run(cluster, &helm, "helm upgrade gpu-migrate gpu-migrate.tgz --namespace gpu-migrate-system --reuse-values --set extraLabels.release=next,webhook.hostNetwork=true,webhook.replicas=1 --wait --timeout 110s").await?;
    all_ready(cluster, 7, "release=next").await?;
    cluster.wait_for_webhook().await?;
    // Of the two shared cards none is offered whole.
    cluster.wait_for_allocatable(&[(&Dialect::default().legacy, CARDS - 2)]).await?;
    ensure!(cards_of(cluster, &namespace, 2).await? == cards, "an upgrade moved pods");
    let deployments: Api<Deployment> = Api::namespaced(cluster.client.clone(), &namespace);
    let more = Patch::Merge(json!({"spec": {"replicas": 3}}));
    deployments.patch("train", &PatchParams::default(), &more).await?;
    let after = cards_of(cluster, &namespace, 3).await?;
    ensure!(cards.iter().all(|(pod, card)| after.get(pod) == Some(card)), "{cards:?}, then {after:?}");
    none_was_forbidden(cluster)?;

    // Shares first, then what served them.
    let command = "helm uninstall gpu-migrate --namespace gpu-migrate-system --wait --timeout 110s";
    let refused = helm.run_unlisted(cluster, command).await?;
    ensure!(refused.status != 0, "removed under shared pods:\n{}", refused.text);
    let of_job = ListParams::default().labels("job-name=gpu-migrate-before-uninstall");
    let checks = cluster.pods(SYSTEM_NAMESPACE).list(&of_job).await?.items;
    let exits: Vec<Option<i32>> = checks.iter().map(exit_code).collect();
    ensure!(exits == [Some(3)], "not refused by its check: {exits:?}\n{}", refused.text);
    let jobs: Api<Job> = Api::namespaced(cluster.client.clone(), SYSTEM_NAMESPACE);
    jobs.delete("gpu-migrate-before-uninstall", &DeleteParams::background()).await?;
    all_ready(cluster, 7, "release=next").await?;
    ensure!(cards_of(cluster, &namespace, 3).await? == after, "what was refused changed cards");
    deployments.delete("train", &DeleteParams::default()).await?;
    let pods = cluster.pods(&namespace);
    no_pods(cluster, "the shared pods to go", &pods).await?;
    // The node still asks for an agent; what the programs made themselves goes with the release all the same.
    run(cluster, &helm, command).await?;
    nothing_is_left(cluster).await?;
    let labels = nodes.get(NODE).await?.labels().clone();
    let ours = labels.into_keys().filter(|key| key.starts_with(GROUP)).map(|key| (key, json!(null)));
    let without = Value::Object(ours.collect());
    nodes
        .patch(NODE, &PatchParams::default(), &Patch::Merge(json!({"metadata": {"labels": without}})))
        .await?;
    Api::<GPUConfig>::all(cluster.client.clone()).delete("cluster", &DeleteParams::default()).await?;

    // And without Helm, from one file.
    run(cluster, &helm, "kubectl apply --server-side --force-conflicts -f deploy/install.yaml").await?;
    all_ready(cluster, 6, "app.kubernetes.io/part-of=gpu-migrate").await?;
    cluster.wait_for_webhook().await?;
    run(cluster, &helm, "kubectl delete -f deploy/install.yaml").await?;
    nothing_is_left(cluster).await?;
    Api::<RuntimeClass>::all(cluster.client.clone()).delete("nvidia", &DeleteParams::default()).await?;
    cluster.disconnect_pods(network).await
}

/// The converted pods by UID, and the one card that each has; no two have the same.
async fn cards_of(cluster: &mut Cluster, namespace: &str, count: usize) -> Result<BTreeMap<String, String>> {
    let mut cards = BTreeMap::new();
    for (pod, container) in cluster.all_running(namespace, "train", count).await? {
        ensure!(limit(&pod, &Dialect::default().cores) == 100, "not converted: {:?}", pod.spec);
        cards.insert(uid(&pod), only_card(&container)?);
    }
    let different: BTreeSet<&String> = cards.values().collect();
    ensure!(different.len() == count, "pods share a whole card: {cards:?}");
    Ok(cards)
}

async fn run(cluster: &mut Cluster, helm: &Runbook, command: &str) -> Result<()> {
    let output = helm.run_unlisted(cluster, command).await?;
    ensure!(output.status == 0, "{command}\n{}", output.text);
    Ok(())
}

/// Our images from the programs of the tests, and those of kube-scheduler and NVIDIA's plugin, which no registry is asked for.
async fn import_images(cluster: &Cluster, source: &Source) -> Result<()> {
    for built in source.build()? {
        eprintln!("    {} of {} MB, {}", built.name, built.layout.tar.len() >> 20, built.layout.digest);
        cluster.import_image(&built.layout.tar)?;
    }
    let root = debian::root(&source.packages, architecture(), source.created)?;
    // The chart asks for the scheduler of the cluster's version, install.yaml for a fixed one.
    let version = cluster.client.apiserver_version().await?.git_version;
    let binaries = &cluster.setup.binaries;
    let scheduler = "registry.k8s.io/kube-scheduler:";
    let mut schedulers = manifests::images("base")?;
    schedulers.retain(|name| name.starts_with(scheduler));
    schedulers.insert(format!("{scheduler}{version}"));
    for name in schedulers {
        others_image(cluster, &root, &name, &binaries.scheduler)?;
    }
    others_image(cluster, &root, NVIDIA_IMAGE, &binaries.nvidia_plugin)
}

/// The image of a program that is not ours, on the root file system of ours. Its environment is that of NVIDIA's image.
fn others_image(cluster: &Cluster, root: &Layer, name: &str, program: &Path) -> Result<()> {
    let file = program.file_name().and_then(|name| name.to_str()).context("a program has a name")?;
    let content = fs::read(program)?;
    let tree = Tree::from([(format!("usr/local/bin/{file}"), Entry::File { mode: 0o755, content })]);
    let created = Timestamp::UNIX_EPOCH;
    let layer = Layer::new(&tree, created)?;
    let image = Image {
        name,
        architecture: architecture(),
        created,
        layers: vec![root, &layer],
        entrypoint: vec![file],
        arguments: vec![],
        environment: vec!["NVIDIA_VISIBLE_DEVICES=all"],
        user: "",
        labels: BTreeMap::new(),
    };
    cluster.import_image(&image.layout()?.tar)
}

/// The programs of the tests, under the names that the chart asks for.
fn source(cluster: &Cluster) -> Result<Source> {
    Ok(Source {
        programs: stripped(cluster)?,
        packages: binaries::cache()?.join("debian"),
        registry: "ghcr.io/gpu-migrate".into(),
        tag: env!("CARGO_PKG_VERSION").into(),
        revision: "tests".into(),
        notices: String::new(),
        created: Timestamp::UNIX_EPOCH,
    })
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

/// Waits until there are so many pods, all ready and with this label, and fails if a container was ever restarted. Of each Deployment
/// there are two; on the node are the agent and NVIDIA's plugin.
async fn all_ready(cluster: &mut Cluster, count: usize, label: &str) -> Result<()> {
    let pods = cluster.pods(SYSTEM_NAMESPACE);
    let (key, value) = label.split_once('=').context("a label")?;
    let all = cluster
        .until(&format!("{count} pods of {label} to be ready"), 2 * TIMEOUT, || async {
            let all = pods.list(&ListParams::default()).await?.items;
            let done = |pod: &&Pod| is_ready(pod) && pod.labels().get(key).is_some_and(|v| v == value);
            let waiting: Vec<String> =
                all.iter().filter(|pod| !done(pod)).map(|pod| phase_and_why(Some(pod))).collect();
            let done = waiting.is_empty() && all.len() == count;
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

/// By their command, how many processes there are and as whom. On the node it is root: the kubelet's folders are root's.
const PROCESSES: [(&str, usize, &str); 6] = [
    ("/gpu-migrate-webhook", 2, "65532"),
    ("/gpu-migrate-extender", 2, "65532"),
    ("kube-scheduler", 2, "65532"),
    ("/gpu-migrate-operator", 2, "65532"),
    ("/gpu-migrate-bridge", 1, "0"),
    ("nvidia-device-plugin", 1, "0"),
];

/// What the kernel says about the processes: their user, no capability and no way to one, filtered system calls, a read-only
/// root file system.
fn are_confined() -> Result<()> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir("/proc")? {
        let folder = entry?.path();
        let Ok(command) = fs::read(folder.join("cmdline")) else { continue };
        let program = command.split(|b| *b == 0).next().unwrap_or_default();
        let Some((name, _, user)) = PROCESSES.iter().find(|(name, ..)| name.as_bytes() == program) else {
            continue;
        };
        // The node agent runs itself once more for NVML, with what it has itself, and may end that at any time.
        if parent_program(&folder).is_none_or(|parent| parent == name.as_bytes()) {
            continue;
        }
        is_confined(&folder, user).with_context(|| format!("{name}, {}", folder.display()))?;
        *found.entry(*name).or_insert(0) += 1;
    }
    let expected = PROCESSES.map(|(name, count, _)| (name, count)).into();
    ensure!(found == expected, "processes {found:?}, expected {expected:?}");
    Ok(())
}

/// The program of a process's parent; `None` if one of them has ended.
fn parent_program(process: &Path) -> Option<Vec<u8>> {
    let status = fs::read_to_string(process.join("status")).ok()?;
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim();
    let command = fs::read(Path::new("/proc").join(parent).join("cmdline")).ok()?;
    command.split(|b| *b == 0).next().map(<[u8]>::to_vec)
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

fn exit_code(pod: &Pod) -> Option<i32> {
    let state = pod.status.as_ref()?.container_statuses.as_ref()?.first()?.state.as_ref()?;
    Some(state.terminated.as_ref()?.exit_code)
}

/// Waits until no pod of ours, no DaemonSet of the operator and no registration of the webhook is left.
async fn nothing_is_left(cluster: &mut Cluster) -> Result<()> {
    let pods = cluster.pods(SYSTEM_NAMESPACE);
    no_pods(cluster, "our pods to go", &pods).await?;
    let sets: Api<DaemonSet> = Api::namespaced(cluster.client.clone(), SYSTEM_NAMESPACE);
    let hooks: Api<MutatingWebhookConfiguration> = Api::all(cluster.client.clone());
    cluster
        .until("what the programs made to go", TIMEOUT, || async {
            let sets = sets.list(&ListParams::default()).await?.items;
            let registered = hooks.get_opt(WEBHOOK).await?.is_some();
            Ok(Seen::from_bool(sets.is_empty() && !registered, || {
                format!("{} DaemonSets left, registered: {registered}", sets.len())
            }))
        })
        .await
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
