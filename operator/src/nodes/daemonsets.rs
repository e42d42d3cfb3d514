//! External DaemonSets that serve a node, recognised by what they mount and register, not by name.

use super::NodeView;
use gpu_migrate_model::names;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{
    Container, NodeSelectorRequirement, NodeSelectorTerm, PodSpec, Taint, Toleration,
};
use kube::ResourceExt as _;
use std::collections::BTreeMap;

/// Variables that only NVIDIA's device plugin reads (its `cmd/nvidia-device-plugin/main.go`).
const NVIDIA_VARIABLES: [&str; 7] = [
    "KUBELET_SOCKET",
    "MIG_STRATEGY",
    "FAIL_ON_INIT_ERROR",
    "DEVICE_LIST_STRATEGY",
    "DEVICE_ID_STRATEGY",
    "PASS_DEVICE_SPECS",
    "NVIDIA_DRIVER_ROOT",
];

/// The role of a pod on its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    NvidiaPlugin {
        /// It registers with the node agent.
        behind_bridge: bool,
    },
    NodeAgent,
    DcgmExporter,
    /// Another plugin that allocates shares of cards.
    OtherSharing,
}

#[must_use]
pub fn roles(pod: &PodSpec) -> Vec<Role> {
    let mut roles = Vec::new();
    let plugins_folder = mounts(pod, |path| path.ends_with("/device-plugins"));
    // The node agent uses the pod-resources socket beside serving a plugin. Another plugin that does is recognised by its command
    // line and image; these words may occur in the agent's command line too, where it uses that isolation.
    let reads_pod_resources = mounts(pod, |path| path.ends_with("/pod-resources"));
    let isolates = |c: &Container| words(c).any(|word| word.starts_with("--isolation="));
    let known = |c: &Container| !isolates(c) && (is_other_sharing(c) || is_nvidia(c) || is_dcgm(c));
    if plugins_folder && reads_pod_resources && !pod.containers.iter().any(known) {
        roles.push(Role::NodeAgent);
    } else if registers(pod) && pod.containers.iter().any(is_other_sharing) {
        roles.push(Role::OtherSharing);
    } else if registers(pod) && pod.containers.iter().any(is_nvidia) {
        roles.push(Role::NvidiaPlugin { behind_bridge: is_behind_bridge(pod) });
    }
    if pod.containers.iter().any(is_dcgm) {
        roles.push(Role::DcgmExporter);
    }
    roles
}

fn mounts(pod: &PodSpec, wanted: impl Fn(&str) -> bool) -> bool {
    let volumes = pod.volumes.iter().flatten();
    volumes.filter_map(|volume| volume.host_path.as_ref()).any(|host| wanted(host.path.trim_end_matches('/')))
}

/// A device plugin mounts the kubelet's socket folder or one in its place.
fn registers(pod: &PodSpec) -> bool {
    let at = |mount: &str| mount.trim_end_matches('/').ends_with("/device-plugins");
    let inside = pod.containers.iter().flat_map(|container| container.volume_mounts.iter().flatten());
    mounts(pod, |path| path.ends_with("/device-plugins") || path.ends_with("/kubelet"))
        || inside.into_iter().any(|mount| at(&mount.mount_path))
}

fn words(container: &Container) -> impl Iterator<Item = &str> {
    let args = container.command.iter().chain(&container.args).flatten();
    args.chain(&container.image).map(String::as_str)
}

fn variable<'a>(container: &'a Container, name: &str) -> Option<&'a str> {
    container.env.iter().flatten().find(|v| v.name == name).map(|v| v.value.as_deref().unwrap_or(""))
}

fn is_nvidia(container: &Container) -> bool {
    let names = ["nvidia-device-plugin", "k8s-device-plugin", "nvidia-gpu-device-plugin"];
    NVIDIA_VARIABLES.iter().any(|name| variable(container, name).is_some())
        || words(container).any(|word| names.iter().any(|name| word.contains(name)))
}

fn is_other_sharing(container: &Container) -> bool {
    let names = ["gpu-manager", "hami", "vgpu", "gpushare", "volcano-vgpu", "elastic-gpu"];
    words(container).any(|word| names.iter().any(|name| word.to_lowercase().contains(name)))
}

fn is_dcgm(container: &Container) -> bool {
    container.env.iter().flatten().any(|variable| variable.name.starts_with("DCGM_EXPORTER_"))
        || words(container).any(|word| word.contains("dcgm-exporter"))
}

/// By the variable, or by another folder in place of the kubelet's.
fn is_behind_bridge(pod: &PodSpec) -> bool {
    let by_variable = pod
        .containers
        .iter()
        .filter_map(|container| variable(container, "KUBELET_SOCKET"))
        .any(|socket| socket.contains("gpu-migrate@"));
    by_variable || mounts(pod, |path| path.contains("/plugins/gpu-migrate/"))
}

/// A DaemonSet that the operator does not manage.
#[derive(Clone, Debug)]
pub struct External<'a> {
    /// `namespace/name`.
    pub name: String,
    pub roles: Vec<Role>,
    pod: &'a PodSpec,
}

/// All external DaemonSets that have a role.
#[must_use]
pub fn external(sets: &[DaemonSet]) -> Vec<External<'_>> {
    let others = sets.iter().filter(|set| !set.labels().contains_key(names::COMPONENT));
    let found = others.filter_map(|set| {
        let pod = set.spec.as_ref()?.template.spec.as_ref()?;
        let name = format!("{}/{}", set.namespace().unwrap_or_default(), set.name_any());
        Some(External { name, roles: roles(pod), pod })
    });
    found.filter(|set| !set.roles.is_empty()).collect()
}

impl External<'_> {
    /// Whether it runs on a node with these labels: node selector, required node affinity and taints, as in the DaemonSet
    /// controller.
    #[must_use]
    pub fn covers(&self, node: &NodeView, labels: &BTreeMap<String, String>) -> bool {
        let selected =
            self.pod.node_selector.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
        let affinity = self.pod.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
        let required = affinity.and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
        let wanted = required.is_none_or(|required| {
            required.node_selector_terms.iter().any(|term| term_matches(term, &node.name, labels))
        });
        let tolerations = self.pod.tolerations.as_deref().unwrap_or_default();
        selected && wanted && node.taints.iter().all(|taint| is_tolerated(taint, tolerations))
    }
}

impl External<'_> {
    /// Whether it requires a label that a node with these does not have at all.
    #[must_use]
    pub fn lacks_labels(&self, labels: &BTreeMap<String, String>) -> bool {
        let affinity = self.pod.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
        let required = affinity.and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
        let terms = required.into_iter().flat_map(|required| &required.node_selector_terms);
        let expressions = terms.flat_map(|term| term.match_expressions.iter().flatten());
        let by_affinity =
            expressions.filter(|wanted| wanted.operator != "DoesNotExist").map(|wanted| &wanted.key);
        let by_selector = self.pod.node_selector.iter().flatten().map(|(key, _)| key);
        by_selector.chain(by_affinity).any(|key| !labels.contains_key(key))
    }
}

fn term_matches(term: &NodeSelectorTerm, name: &str, labels: &BTreeMap<String, String>) -> bool {
    let empty = term.match_expressions.is_none() && term.match_fields.is_none();
    let by_label = term
        .match_expressions
        .iter()
        .flatten()
        .all(|wanted| requirement_holds(wanted, labels.get(&wanted.key).map(String::as_str)));
    // The only supported field.
    let by_field = term.match_fields.iter().flatten().all(|wanted| requirement_holds(wanted, Some(name)));
    !empty && by_label && by_field
}

fn requirement_holds(wanted: &NodeSelectorRequirement, found: Option<&str>) -> bool {
    let values = wanted.values.as_deref().unwrap_or_default();
    let listed = |value: &str| values.iter().any(|v| v == value);
    let number = |text: &str| text.parse::<i64>().ok();
    let bound = values.first().and_then(|value| number(value));
    match wanted.operator.as_str() {
        "In" => found.is_some_and(listed),
        "NotIn" => !found.is_some_and(listed),
        "Exists" => found.is_some(),
        "DoesNotExist" => found.is_none(),
        "Gt" => found.and_then(number).zip(bound).is_some_and(|(found, bound)| found > bound),
        "Lt" => found.and_then(number).zip(bound).is_some_and(|(found, bound)| found < bound),
        _ => false,
    }
}

/// Kubernetes' own taints are tolerated by every DaemonSet that matters here: the controller adds most tolerations.
fn is_tolerated(taint: &Taint, tolerations: &[Toleration]) -> bool {
    taint.effect == "PreferNoSchedule"
        || taint.key.starts_with("node.kubernetes.io/")
        || tolerations.iter().any(|toleration| {
            let key = toleration.key.as_deref().unwrap_or_default();
            let effect = toleration.effect.as_deref().unwrap_or_default();
            let exists = toleration.operator.as_deref() == Some("Exists");
            let value = exists
                || toleration.value.as_deref().unwrap_or_default()
                    == taint.value.as_deref().unwrap_or_default();
            (key == taint.key || (key.is_empty() && exists))
                && (effect.is_empty() || effect == taint.effect)
                && value
        })
}
