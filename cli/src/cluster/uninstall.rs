//! `gpu-migrate uninstall`: removes everything, in an order that breaks nothing.

use super::change::{MANAGER, confirmed};
use super::{Answer, Output, Snapshot};
use crate::args::UninstallArgs;
use crate::errors::is_absent;
use crate::exit::Exit;
use crate::progress::Progress;
use crate::style::{FAINT, counted, paint};
use gpu_migrate_model::ask::{PodAsk, PodKind};
use gpu_migrate_model::lifecycle::is_terminal;
use gpu_migrate_model::names::{self, Dialect};
use gpu_migrate_model::text::some_of;
use k8s_openapi::api::core::v1::{Node, Pod, ResourceQuota};
use k8s_openapi::api::rbac::v1::RoleBinding;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams,
};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::time::Duration;

/// How long the webhook may take to go: its grace period is 30 s.
const PATIENCE_SECONDS: u32 = 90;

/// Pods that are named; the others are counted.
const NAMED: usize = 3;

/// Label of all objects of chart and base.
const OURS: &str = "app.kubernetes.io/name=gpu-migrate";
const NAME: &str = "app.kubernetes.io/name";
const OUR_NAME: &str = "gpu-migrate";

/// A kind of object to delete.
struct Kind {
    group: &'static str,
    kind: &'static str,
    namespaced: bool,
}

const fn kind(group: &'static str, kind: &'static str, namespaced: bool) -> Kind {
    Kind { group, kind, namespaced }
}

/// In this order: first what would put things back (the webhook re-creates its configuration), then what the API
/// server would still call, then the rest; the definitions last, since with them the objects go.
const ORDER: [Kind; 14] = [
    kind("apps", "Deployment", true),
    kind("admissionregistration.k8s.io", "MutatingWebhookConfiguration", false),
    kind("admissionregistration.k8s.io", "ValidatingAdmissionPolicyBinding", false),
    kind("admissionregistration.k8s.io", "ValidatingAdmissionPolicy", false),
    // The templates before what is made from them: an operator that is late to go would apply it again.
    kind("", "ConfigMap", true),
    kind("", "Service", true),
    kind("policy", "PodDisruptionBudget", true),
    kind("networking.k8s.io", "NetworkPolicy", true),
    kind("rbac.authorization.k8s.io", "RoleBinding", true),
    kind("rbac.authorization.k8s.io", "Role", true),
    kind("rbac.authorization.k8s.io", "ClusterRoleBinding", false),
    kind("rbac.authorization.k8s.io", "ClusterRole", false),
    kind("", "ServiceAccount", true),
    kind("", "Secret", true),
];

/// Made by the programs themselves, so without the label.
const LEASES: [&str; 4] = [
    "gpu-migrate-scheduler",
    "gpu-migrate-scheduler-extender",
    "gpu-migrate-webhook-ca",
    "gpu-migrate-operator",
];

/// Obstacles: shared pods would lose their plugin, legacy pods theirs, or their card to a second one.
fn obstacles(snapshot: &Snapshot) -> Vec<String> {
    let mut found = Vec::new();
    let dialect = Dialect::default();
    let shared = snapshot.pods.iter().filter(|pod| !is_terminal(pod)).filter(|pod| {
        PodAsk::of(pod, &dialect).is_ok_and(|ask| matches!(ask.kind(), PodKind::Shared | PodKind::Mixed))
    });
    let (converted, written): (Vec<_>, Vec<_>) =
        shared.partition(|pod| pod.annotations().contains_key(names::ORIGINAL));
    for (pods, what) in [
        (converted, "roll their projects back with `gpu-migrate rollout undo`"),
        (written, "they were written with shares, so that nothing rolls them back: delete them"),
    ] {
        let names =
            pods.iter().map(|pod| format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any()));
        if !pods.is_empty() {
            let count = counted(pods.len(), "shared pod");
            found.push(format!("{count} left, {}: {what}", some_of(NAMED, names, ", ")));
        }
    }
    for shadow in &snapshot.shadows {
        let status = shadow.status.as_ref();
        let cards = status.into_iter().flat_map(|status| &status.cards);
        for (card, holder) in cards.flat_map(|card| card.holders.iter().map(move |holder| (card, holder))) {
            if holder.deviates() {
                found.push(format!(
                    "legacy pod {}/{} on node {} has card {}, and the kubelet checkpoint says {}: without the agent the card may be \
                     given to a second pod; delete the pod, its controller makes another",
                    holder.namespace,
                    holder.pod,
                    shadow.name_any(),
                    card.card.uuid,
                    holder.kubelet_devices.join(","),
                ));
            }
        }
    }
    // The operator's own copy of NVIDIA's plugin is deleted with the rest.
    for set in snapshot.daemon_sets.iter().filter(|set| !set.labels().contains_key(names::COMPONENT)) {
        let pod = set.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
        let variables = pod
            .into_iter()
            .flat_map(|pod| &pod.containers)
            .flat_map(|container| container.env.iter().flatten());
        let behind = |variable: &k8s_openapi::api::core::v1::EnvVar| {
            variable.name == "KUBELET_SOCKET"
                && variable.value.as_deref().is_some_and(|value| value.contains("gpu-migrate@"))
        };
        if variables.into_iter().any(behind) {
            found.push(format!(
                "DaemonSet {}/{} still registers with the node agent: remove KUBELET_SOCKET from it, or its nodes have no nvidia.com/gpu",
                set.namespace().unwrap_or_default(),
                set.name_any()
            ));
        }
    }
    found
}

fn in_the_way(obstacles: &[String]) -> String {
    obstacles.iter().map(|obstacle| format!("in the way: {obstacle}\n")).collect()
}

/// What takes all keys of ours off a map; `None` where there are none.
fn without_ours(map: &BTreeMap<String, String>) -> Option<Value> {
    let prefix = format!("{}/", names::GROUP);
    let gone = map
        .keys()
        .filter(|key| key.starts_with(&prefix))
        .map(|key| (key.clone(), Value::Null))
        .collect::<serde_json::Map<_, _>>();
    (!gone.is_empty()).then_some(Value::Object(gone))
}

/// The patch that takes our labels off a node.
fn clean_labels(node: &Node) -> Option<Value> {
    without_ours(node.labels()).map(|labels| json!({"metadata": {"labels": labels}}))
}

/// The patch that removes gpu-migrate's annotations from a node or a pod. A converted pod keeps its original request: only
/// `--force` leaves such pods behind.
fn clean_annotations(meta: &ObjectMeta) -> Option<Value> {
    let annotations = meta.annotations.as_ref()?;
    if annotations.contains_key(names::ORIGINAL) {
        return None;
    }
    without_ours(annotations).map(|annotations| json!({"metadata": {"annotations": annotations}}))
}

/// Whether `quota translate --apply` has written limits there.
fn is_translated(quota: &ResourceQuota) -> bool {
    let fields = quota.metadata.managed_fields.iter().flatten();
    fields
        .into_iter()
        .any(|entry| entry.manager.as_deref() == Some(MANAGER) && entry.operation.as_deref() == Some("Apply"))
}

pub(crate) async fn uninstall(args: &UninstallArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let client = args.reach.client().await?;
    if args.check {
        let obstacles = obstacles(&Snapshot::of_allocations(&client).await?);
        let (text, exit) = match obstacles.as_slice() {
            [] => ("nothing is in the way\n".to_owned(), Exit::Done),
            some => (in_the_way(some), Exit::No),
        };
        return Ok(Answer { text, value: json!({"inTheWay": obstacles}), exit }.write(args.output, out)?);
    }
    let snapshot = Snapshot::of_cluster(&client).await?;
    let obstacles = obstacles(&snapshot);
    if !obstacles.is_empty() && !args.force {
        let lines = in_the_way(&obstacles);
        let text = format!("{lines}nothing was removed; use --force to remove anyway\n");
        let value = json!({"inTheWay": obstacles, "removed": [], "left": []});
        return Ok(Answer { text, value, exit: Exit::No }.write(args.output, out)?);
    }
    let question = format!(
        "remove gpu-migrate from namespace {} and {} of the cluster?",
        args.namespace,
        counted(snapshot.nodes.iter().filter(|node| clean_labels(node).is_some()).count(), "node")
    );
    if !confirmed(args.change, out, &question)? {
        return Ok(Exit::No);
    }
    let mut remover = Remover { client, args, out, removed: Vec::new() };
    let (first, rest) = ORDER.split_at(1);
    for kind in first {
        remover.all_of(kind).await?;
    }
    remover.wait_for_pods("component in (webhook,extender,operator)").await?;
    // Without the label an agent's pod goes, and it cleans up after itself because the label is gone: before the
    // DaemonSet is, which would look to it like an update.
    for node in &snapshot.nodes {
        if let Some(patch) = clean_labels(node) {
            remover.node("labels", &node.name_any(), &patch).await?;
        }
    }
    remover.wait_for_pods("component=bridge").await?;
    remover.all_of(&kind("apps", "DaemonSet", true)).await?;
    for kind in rest {
        remover.all_of(kind).await?;
    }
    // The scheduler reads how to authenticate its callers, which stands in kube-system.
    remover.elsewhere("kube-system", "gpu-migrate-scheduler-authentication").await?;
    for lease in LEASES {
        remover.named(&kind("coordination.k8s.io", "Lease", true), lease).await?;
    }
    remover.named(&kind("", "Secret", true), "gpu-migrate-webhook-ca").await?;
    remover.annotations().await?;
    for quota in snapshot.quotas.iter().filter(|quota| is_translated(quota)) {
        remover.limits(quota).await?;
    }
    if !args.keep_policies {
        for name in ["gpumigrations", "gpuconfigs", "gpushadows"] {
            let definition = kind("apiextensions.k8s.io", "CustomResourceDefinition", false);
            remover.named(&definition, &format!("{name}.{}", names::GROUP)).await?;
        }
    }
    // A namespace without the label was created by a user and stays.
    if snapshot.namespaces.iter().any(|namespace| {
        namespace.name_any() == args.namespace
            && namespace.labels().get(NAME).is_some_and(|value| value == OUR_NAME)
    }) {
        remover.named(&kind("", "Namespace", false), &args.namespace).await?;
    }
    let mut left = Vec::new();
    for namespace in
        snapshot.namespaces.iter().filter(|namespace| namespace.labels().contains_key(names::OPT_IN))
    {
        let name = namespace.name_any();
        let what = format!("label {} of namespace/{name}, set by a user", names::OPT_IN);
        if args.output == Output::Table {
            writeln!(remover.out, "left: {what}")?;
        }
        left.push(what);
    }
    if args.output != Output::Table {
        let value = json!({"inTheWay": obstacles, "removed": remover.removed, "left": left, "dryRun": args.change.dry_run});
        Answer { text: String::new(), value, exit: Exit::Done }.write(args.output, remover.out)?;
    }
    Ok(Exit::Done)
}

/// Removes, or only says what would be removed.
struct Remover<'a> {
    client: Client,
    args: &'a UninstallArgs,
    out: &'a mut dyn Write,
    removed: Vec<String>,
}

impl Remover<'_> {
    fn api(&self, kind: &Kind) -> Api<DynamicObject> {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(kind.group, "v1", kind.kind));
        if kind.namespaced {
            Api::namespaced_with(self.client.clone(), &self.args.namespace, &resource)
        } else {
            Api::all_with(self.client.clone(), &resource)
        }
    }

    async fn all_of(&mut self, kind: &Kind) -> anyhow::Result<()> {
        let list = match self.api(kind).list_metadata(&ListParams::default().labels(OURS)).await {
            Ok(list) => list,
            // A kind that this cluster does not serve.
            Err(error) if is_absent(&error) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        for object in list.items {
            self.named(kind, &object.name_any()).await?;
        }
        Ok(())
    }

    async fn named(&mut self, kind: &Kind, name: &str) -> anyhow::Result<()> {
        let api = self.api(kind);
        let there = if self.args.change.dry_run {
            match api.get_metadata_opt(name).await {
                Ok(found) => found.is_some(),
                Err(error) if is_absent(&error) => false,
                Err(error) => return Err(error.into()),
            }
        } else {
            match api.delete(name, &DeleteParams::foreground()).await {
                Ok(_) => true,
                Err(error) if is_absent(&error) => false,
                Err(error) => return Err(error.into()),
            }
        };
        if there {
            self.say(&format!("{}/{name}", kind.kind.to_lowercase()))?;
        }
        Ok(())
    }

    async fn elsewhere(&mut self, namespace: &str, name: &str) -> anyhow::Result<()> {
        let bindings = Api::<RoleBinding>::namespaced(self.client.clone(), namespace);
        let found = match bindings.get_metadata_opt(name).await {
            Err(error) if is_absent(&error) => None,
            found => found?,
        };
        if found.is_some() {
            if !self.args.change.dry_run {
                bindings.delete(name, &DeleteParams::default()).await?;
            }
            self.say(&format!("rolebinding/{name} in {namespace}"))?;
        }
        Ok(())
    }

    /// The webhook puts its configuration back for as long as a replica of it lives, and so do the others with theirs.
    async fn wait_for_pods(&mut self, which: &str) -> anyhow::Result<()> {
        if self.args.change.dry_run {
            return Ok(());
        }
        let pods = Api::<Pod>::namespaced(self.client.clone(), &self.args.namespace);
        let ours = ListParams::default().labels(&format!("{OURS},app.kubernetes.io/{which}"));
        let _progress = Progress::spinner("waiting for pods to terminate".to_owned());
        let mut left = Vec::new();
        for _ in 0..4 * PATIENCE_SECONDS {
            left = pods.list_metadata(&ours).await?.items;
            if left.is_empty() {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
        anyhow::bail!(
            "{} pods in {} are still there after {PATIENCE_SECONDS} s, {} first; everything before them is removed: \
             run the same command again when they are gone",
            left.len(),
            self.args.namespace,
            left.first().map(kube::ResourceExt::name_any).unwrap_or_default()
        )
    }

    async fn node(&mut self, what: &str, name: &str, patch: &Value) -> anyhow::Result<()> {
        if !self.args.change.dry_run {
            let nodes = Api::<Node>::all(self.client.clone());
            nodes.patch_metadata(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
        }
        self.say(&format!("{what} of node/{name}"))
    }

    /// Of nodes and pods, as they are now: agents and extender wrote to them until they were gone.
    async fn annotations(&mut self) -> anyhow::Result<()> {
        let nodes = Api::<Node>::all(self.client.clone()).list_metadata(&ListParams::default()).await?;
        for node in nodes.items {
            if let Some(patch) = clean_annotations(&node.metadata) {
                self.node("annotations", &node.name_any(), &patch).await?;
            }
        }
        let pods = Api::<Pod>::all(self.client.clone()).list_metadata(&ListParams::default()).await?;
        for pod in pods.items {
            let Some(patch) = clean_annotations(&pod.metadata) else { continue };
            let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
            if !self.args.change.dry_run {
                let api = Api::<Pod>::namespaced(self.client.clone(), &namespace);
                match api.patch_metadata(&name, &PatchParams::default(), &Patch::Merge(patch)).await {
                    // It has ended meanwhile.
                    Err(kube::Error::Api(status)) if status.code == 404 => continue,
                    Err(error) => return Err(error.into()),
                    Ok(_) => {}
                }
            }
            self.say(&format!("annotations of pod/{name} in {namespace}"))?;
        }
        Ok(())
    }

    /// Gives up the limits that this program applied; whatever others wrote into the same quota stays.
    async fn limits(&mut self, quota: &ResourceQuota) -> anyhow::Result<()> {
        let (namespace, name) = (quota.namespace().unwrap_or_default(), quota.name_any());
        if !self.args.change.dry_run {
            let nothing = json!({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": name}});
            let api = Api::<ResourceQuota>::namespaced(self.client.clone(), &namespace);
            api.patch(&name, &PatchParams::apply(MANAGER), &Patch::Apply(nothing)).await?;
        }
        self.say(&format!("limits on shares of resourcequota/{name} in {namespace}"))
    }

    fn say(&mut self, what: &str) -> anyhow::Result<()> {
        self.removed.push(what.to_owned());
        if self.args.output == Output::Table {
            let end = if self.args.change.dry_run { paint(FAINT, " (dry run)") } else { String::new() };
            writeln!(self.out, "removed {what}{end}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_lose_its_cards_stands_in_the_way() {
        let pod = |phase: &str, resource: &str| {
            serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "n"}, "status": {"phase": phase},
                "spec": {"containers": [{"name": "c", "resources": {"limits": {resource: "100", "tencent.com/vcuda-memory": "1"}}}]}}))
            .unwrap()
        };
        let set = |value: &str| -> k8s_openapi::api::apps::v1::DaemonSet {
            serde_json::from_value(json!({"metadata": {"name": "d", "namespace": "n"}, "spec": {"selector": {}, "template": {"spec":
                {"containers": [{"name": "c", "env": [{"name": "KUBELET_SOCKET", "value": value}]}]}}}}))
            .unwrap()
        };
        let mut snapshot =
            Snapshot { pods: vec![pod("Succeeded", "tencent.com/vcuda-core")], ..Snapshot::default() };
        assert!(obstacles(&snapshot).is_empty());
        snapshot.pods.push(pod("Running", "tencent.com/vcuda-core"));
        let mut ours: k8s_openapi::api::apps::v1::DaemonSet = set("/a/gpu-migrate@kubelet.sock");
        ours.labels_mut().insert(names::COMPONENT.into(), "nvidia-plugin-bridged".into());
        snapshot.daemon_sets = vec![set("/a/kubelet.sock"), set("/a/gpu-migrate@kubelet.sock"), ours];
        let found = obstacles(&snapshot);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].starts_with("1 shared pod left, n/p: they were written with shares"), "{found:?}");
        let mut converted: Pod = pod("Running", "tencent.com/vcuda-core");
        converted.annotations_mut().insert(names::ORIGINAL.into(), "{}".into());
        snapshot.pods.extend(vec![converted; 4]);
        let found = obstacles(&snapshot);
        let way_back = "4 shared pods left, n/p, n/p, n/p and 1 more: roll their projects back with `gpu-migrate rollout undo`";
        assert_eq!(found[0], way_back);
        assert!(found[1].starts_with("1 shared pod left"), "{found:?}");
    }

    #[test]
    fn a_card_that_only_the_agent_knows_of_stands_in_the_way() {
        let shadow = |holder: Value| {
            serde_json::from_value(json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUShadow", "metadata": {"name": "g"},
                "spec": {}, "status": {"cards": [{"uuid": "GPU-a", "minor": 0, "memoryMiB": 4096, "holders": [holder]}]}}))
            .unwrap()
        };
        let as_known = shadow(json!({"namespace": "n", "pod": "p", "uid": "u", "container": "c"}));
        let moved = shadow(
            json!({"namespace": "n", "pod": "p", "uid": "u", "container": "c", "kubeletDevices": ["GPU-b"]}),
        );
        assert!(obstacles(&Snapshot { shadows: vec![as_known], ..Snapshot::default() }).is_empty());
        let found = obstacles(&Snapshot { shadows: vec![moved], ..Snapshot::default() });
        assert!(
            found[0].starts_with(
                "legacy pod n/p on node g has card GPU-a, and the kubelet checkpoint says GPU-b"
            ),
            "{found:?}"
        );
    }

    #[test]
    fn a_node_loses_what_is_ours_and_nothing_else() {
        let node: Node = serde_json::from_value(json!({"metadata": {"name": "n",
            "labels": {"gpu-migrate.io/plugin": "Bridged", "pool": "a"}, "annotations": {"gpu-migrate.io/cordoned-cards": "1"}}}))
        .unwrap();
        let labels = clean_labels(&node).unwrap();
        assert_eq!(labels, json!({"metadata": {"labels": {"gpu-migrate.io/plugin": null}}}));
        let annotations = clean_annotations(&node.metadata).unwrap();
        assert_eq!(
            annotations,
            json!({"metadata": {"annotations": {"gpu-migrate.io/cordoned-cards": null}}})
        );
        assert_eq!((clean_labels(&Node::default()), clean_annotations(&ObjectMeta::default())), (None, None));
    }

    #[test]
    fn a_pod_that_is_still_shared_keeps_what_it_was() {
        let meta: ObjectMeta =
            serde_json::from_value(json!({"annotations": {names::ORIGINAL: "{}", names::POLICY: "m@1"}}))
                .unwrap();
        assert_eq!(clean_annotations(&meta), None);
    }

    #[test]
    fn only_limits_that_this_program_applied_are_given_up() {
        let quota = |manager: &str, operation: &str| -> ResourceQuota {
            serde_json::from_value(
                json!({"metadata": {"managedFields": [{"manager": manager, "operation": operation}]}}),
            )
            .unwrap()
        };
        assert!(is_translated(&quota(MANAGER, "Apply")));
        assert!(!is_translated(&quota("kubectl", "Apply")) && !is_translated(&quota(MANAGER, "Update")));
    }
}
