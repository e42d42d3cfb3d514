//! GPUConfig: which nodes get which plugin, and what the extender enforces.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::kubernetes;
use crate::units::{Blocks, Cores};

/// The cluster's GPU nodes, by pool.
#[derive(CustomResource, JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "gpu-migrate.io",
    version = "v1alpha1",
    kind = "GPUConfig",
    plural = "gpuconfigs",
    status = "GPUConfigStatus",
    derive = "PartialEq",
    derive = "Default",
    shortname = "gpuc",
    category = "gpu-migrate",
    doc = "Which nodes get which plugin. There is one, named cluster.",
    validation = ("self.metadata.name == 'cluster'", "the one GPUConfig is named cluster"),
    printcolumn(name = "Pools", type_ = "string", json_path = ".spec.nodePools[*].name"),
    printcolumn(name = "Nodes", type_ = "integer", json_path = ".status.nodes"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase", default)]
pub struct GPUConfigSpec {
    /// Pools of nodes; the first that matches a node counts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub node_pools: Vec<NodePool>,
    /// Single nodes, by name; they come before the pools.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub orphan_nodes: Vec<OrphanNodes>,
    /// What namespaces may use at most.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub quotas: Vec<Quota>,
    /// Kinds of workloads that the operator converts in waves beside Deployments, StatefulSets, DaemonSets and CronJobs. It needs the
    /// rights `list` and `patch` on them (chart: `operator.workloadKinds`).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub workload_kinds: Vec<WorkloadKind>,
}

/// A kind of workload: where its pod templates are, and when its controller has rolled a change of them out. Fields are named by JSON
/// pointer, such as `/spec/template/metadata`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadKind {
    /// `Kind.group`, such as `Rollout.argoproj.io`. Nothing else is needed for CloneSet, StatefulSet and DaemonSet of
    /// `apps.kruise.io`, `Rollout.argoproj.io`, `CronWorkflow.argoproj.io`, `LeaderWorkerSet.leaderworkerset.x-k8s.io` and
    /// `InferenceService.serving.kserve.io`.
    #[schemars(length(min = 3))]
    pub name: String,
    /// Version of the API.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub version: String,
    /// Its plural, lower case, as in the CustomResourceDefinition.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub plural: String,
    /// Its pod templates. A change of their metadata must make its controller replace the pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub templates: Vec<PodPlace>,
    /// Label of its pods whose value is the object's name; absent: its pods are those of `/spec/selector`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name_label: Option<String>,
    /// All pods are of the newest template and ready when all of these hold.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ready: Vec<FieldRule>,
    /// Its controller does not replace pods by itself while one of these holds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub manual: Vec<FieldRule>,
}

/// A pod template in an object.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodPlace {
    /// What has the labels and annotations of the pods; not in a list.
    pub metadata: String,
    /// What has `containers` and `initContainers`.
    pub spec: String,
    /// Containers elsewhere; `*` stands for every element of a list.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub containers: Vec<String>,
}

/// What a field must be; one of the three. An element of a list is named by its `type`: `/status/conditions/Ready/status`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FieldRule {
    /// The field; `0` where it is absent.
    pub path: String,
    /// This value, as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub equals: Option<String>,
    /// The value of this field; `1` where that is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub equals_field: Option<String>,
    /// Any other than this, as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub differs: Option<String>,
}

/// Nodes that are alike.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodePool {
    /// Its name; nodes get it as label `gpu-migrate.io/pool`.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// Nodes that belong to it.
    #[serde(default)]
    #[schemars(schema_with = "kubernetes::label_selector")]
    pub selector: LabelSelector,
    /// Which plugin serves its nodes.
    #[serde(default)]
    pub plugin: PluginMode,
    /// How shares are kept apart.
    #[serde(default)]
    pub isolation: Isolation,
    /// Card indexes that shares never use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reserved_cards: Vec<u32>,
    /// Which exporter runs on its nodes.
    #[serde(default)]
    pub exporter: Exporter,
    /// The driver that is wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<Driver>,
}

/// Single nodes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OrphanNodes {
    /// Their names.
    #[schemars(length(min = 1))]
    pub nodes: Vec<String>,
    /// Which plugin serves them.
    #[serde(default)]
    pub plugin: PluginMode,
    /// How shares are kept apart.
    #[serde(default)]
    pub isolation: Isolation,
    /// Which exporter runs on them.
    #[serde(default)]
    pub exporter: Exporter,
}

/// Which plugin serves a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum PluginMode {
    /// The NVIDIA plugin alone: whole cards.
    #[default]
    Legacy,
    /// Both kinds, card by card: the bridge between the kubelet and the NVIDIA plugin.
    Bridged,
    /// Shares alone.
    Shared,
}

/// How shares of one card are kept apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Isolation {
    /// Not at all: containers must behave.
    #[default]
    None,
    /// NVIDIA's driver limits memory, by the container's cgroup; from driver 615 on, with cgroup v2.
    Driver,
    /// gpu-manager's vcuda-controller; before CUDA 12, with cgroup v1.
    Vcuda,
    /// NVIDIA's Multi-Process Service.
    Mps,
    /// HAMi-core.
    HamiCore,
}

/// Which exporter runs on a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Exporter {
    /// None.
    #[default]
    None,
    /// The node agent's own metrics.
    Builtin,
    /// NVIDIA's dcgm-exporter, from the owner's template.
    Dcgm,
}

/// The driver that a pool wants. It is detected and reported; a pod installs it only where a template is given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Driver {
    /// Version, or the beginning of one: `550`.
    #[schemars(length(min = 1))]
    pub version: String,
    /// Lowest version of CUDA that the driver must support: `12.4`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda: Option<String>,
    /// Key of the installer's Pod in the templates ConfigMap. It runs on a node on which no pod has cards, and the
    /// node gets its plugins only after it has succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub installer: Option<String>,
    /// Nodes of the pool on which it is installed at a time. One on which it has failed counts until its pod is deleted.
    #[serde(default = "one")]
    #[schemars(range(min = 1))]
    pub max_unavailable: u32,
}

fn one() -> u32 {
    1
}

impl Default for Driver {
    fn default() -> Self {
        Self { version: String::new(), cuda: None, installer: None, max_unavailable: one() }
    }
}

/// What one namespace may use at most in a pool or on a model of card.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {"rule": "has(self.cores) || has(self.blocks)", "message": "a quota limits cores or blocks"},
]))]
pub struct Quota {
    /// The namespace.
    pub namespace: String,
    /// In this pool; absent: in all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// On cards of this model; absent: on all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Most cores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<Cores>,
    /// Most blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocks: Option<Blocks>,
}

/// What the operator found and did.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct GPUConfigStatus {
    /// Generation of the spec that this status is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Nodes that belong to a pool or are named.
    pub nodes: u32,
    /// Each pool.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pools: Vec<PoolStatus>,
    /// `Ready`, `PluginConflict`, `DriverMismatch`, `TemplatesValid`, `WorkloadKindsValid`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "kubernetes::conditions")]
    pub conditions: Vec<Condition>,
}

/// One pool as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PoolStatus {
    /// Its name.
    pub name: String,
    /// Its nodes.
    pub nodes: u32,
    /// Nodes whose agent reports, and those that need none.
    pub ready: u32,
}
