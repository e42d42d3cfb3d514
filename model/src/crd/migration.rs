//! GPUMigration: which project moves, how its requests are converted, how fast.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Toleration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::names;
use crate::units::{Blocks, Cores};

/// A policy: which project, how to convert, how fast.
#[derive(CustomResource, JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "gpu-migrate.io",
    version = "v1alpha1",
    kind = "GPUMigration",
    plural = "gpumigrations",
    status = "GPUMigrationStatus",
    derive = "PartialEq",
    derive = "Default",
    shortname = "gpum",
    category = "gpu-migrate",
    doc = "Moves one project from whole cards to shares: which pods, how their requests are converted, how fast.",
    printcolumn(name = "Project", type_ = "string", json_path = ".spec.project"),
    printcolumn(name = "Mode", type_ = "string", json_path = ".spec.mode"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Wave", type_ = "integer", json_path = ".status.wave"),
    printcolumn(name = "Converted", type_ = "integer", json_path = ".status.counts.converted"),
    printcolumn(name = "Legacy", type_ = "integer", json_path = ".status.counts.legacy"),
    printcolumn(
        name = "Why",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].message",
        priority = 1
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct GPUMigrationSpec {
    /// Project that it is for: label `gpu-migrate.io/project` of the pod, else of its namespace.
    #[schemars(length(min = 1, max = 63))]
    pub project: String,
    /// "Off": nothing (in quotes: YAML takes a bare Off for false). Audit: says what it would do. Enforce: converts.
    #[serde(default)]
    pub mode: MigrationMode,
    /// Narrows the policy to some pods of the project. Of several policies for one pod the narrowest wins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub r#match: Option<Match>,
    /// How requests are converted.
    #[serde(default)]
    pub convert: Convert,
    /// Where converted pods go.
    #[serde(default)]
    pub scheduling: Scheduling,
    /// How fast.
    #[serde(default)]
    pub rollout: Rollout,
    /// What happens to a pod whose request cannot be converted.
    #[serde(default)]
    pub on_unconvertible: OnUnconvertible,
}

/// Whether a policy acts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum MigrationMode {
    /// It does nothing.
    #[default]
    Off,
    /// It says what it would do, and changes nothing.
    Audit,
    /// It converts.
    Enforce,
}

/// What happens to a pod whose request cannot be converted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum OnUnconvertible {
    /// It is admitted as it was written, with a warning, and runs as a legacy pod.
    #[default]
    Admit,
    /// It is refused.
    Deny,
}

/// Narrows a policy. Criteria add up; a policy with more of them is more specific.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Match {
    /// Only in these namespaces; empty: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub namespaces: Vec<String>,
    /// Only pods with these labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_selector: Option<LabelSelector>,
}

/// How narrow a policy is: naming namespaces counts, and each condition on labels. Of several for one pod the highest wins.
#[must_use]
pub fn specificity(namespaces: &[String], pod_selector: Option<&LabelSelector>) -> usize {
    let labels = pod_selector.map_or(0, |selector| {
        selector.match_labels.as_ref().map_or(0, BTreeMap::len)
            + selector.match_expressions.as_ref().map_or(0, Vec::len)
    });
    labels + usize::from(!namespaces.is_empty())
}

/// How requests are converted.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "self.coresPerCard >= 1 && self.coresPerCard <= 100",
    "message": "coresPerCard must be from 1 to 100: 100 is a whole card",
}]))]
pub struct Convert {
    /// Cores for one card; 100 is the whole card.
    pub cores_per_card: Cores,
    /// Blocks of 256 MiB for one card.
    #[schemars(range(min = 1))]
    pub blocks_per_card: Blocks,
    /// What a container of several cards gets where `coresPerCard` is less than 100.
    pub multi_card: MultiCard,
    /// Other ratios by card product or container; the last one that matches wins, field by field.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub overrides: Vec<Override>,
    /// Shares for MIG and time-sliced resources, which are left alone otherwise.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub resources: Vec<ResourceMapping>,
}

impl Default for Convert {
    /// gpu-manager's example ratio: a whole card, 42 blocks.
    fn default() -> Self {
        Self {
            cores_per_card: Cores::CARD,
            blocks_per_card: Blocks(42),
            multi_card: MultiCard::Whole,
            overrides: Vec::new(),
            resources: Vec::new(),
        }
    }
}

/// What a container of several cards gets where the ratio is a share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum MultiCard {
    /// Whole cards, as many as it asked for: two cards at 50 do not quietly become one.
    #[default]
    Whole,
    /// The ratio times the cards, where that is below 100 cores or whole cards; else it cannot be converted.
    Scale,
}

/// Another ratio for some containers.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {"rule": "has(self.gpuProduct) || has(self.container)", "message": "an override needs gpuProduct or container: without one it would match everything"},
    {"rule": "has(self.coresPerCard) || has(self.blocksPerCard)", "message": "an override needs coresPerCard or blocksPerCard: without one it changes nothing"},
    {"rule": "!has(self.coresPerCard) || (self.coresPerCard >= 1 && self.coresPerCard <= 100)", "message": "coresPerCard must be from 1 to 100: 100 is a whole card"},
]))]
pub struct Override {
    /// Pods that name this `nvidia.com/gpu.product` in their nodeSelector or required node affinity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_product: Option<String>,
    /// Containers of this name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// Cores for one card.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores_per_card: Option<Cores>,
    /// Blocks for one card.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocks_per_card: Option<Blocks>,
}

/// The share for one unit of another resource, such as a MIG profile.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResourceMapping {
    /// `nvidia.com/mig-…` or `nvidia.com/gpu.shared`.
    pub name: String,
    /// Cores for one.
    pub cores: Cores,
    /// Blocks for one.
    pub blocks: Blocks,
}

/// Where converted pods go.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Scheduling {
    /// The scheduler that asks our extender.
    pub scheduler_name: String,
    /// Schedulers whose pods are converted, besides `default-scheduler` and `schedulerName`. A pod of another scheduler
    /// cannot be converted: that one places it by rules of its own.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub replace_schedulers: Vec<String>,
    /// Changes of the node selector.
    pub node_selector: NodeSelectorEdit,
    /// Changes of the tolerations.
    pub tolerations: TolerationsEdit,
    /// RuntimeClass to set, where one is needed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtime_class_name: Option<String>,
    /// Members of a gang wait behind a scheduling gate until all of them exist and would fit.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub gang_gate: bool,
}

impl Default for Scheduling {
    fn default() -> Self {
        Self {
            scheduler_name: names::SCHEDULER.into(),
            replace_schedulers: Vec::new(),
            node_selector: NodeSelectorEdit::default(),
            tolerations: TolerationsEdit::default(),
            runtime_class_name: None,
            gang_gate: false,
        }
    }
}

/// Changes of a node selector: first keys are removed, then set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeSelectorEdit {
    /// Keys to remove.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub remove: Vec<String>,
    /// Keys to set.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub set: BTreeMap<String, String>,
}

/// Changes of tolerations: first keys are removed, then tolerations added that are not there yet.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct TolerationsEdit {
    /// Tolerations of these keys are removed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub remove_keys: Vec<String>,
    /// Tolerations to add.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub add: Vec<Toleration>,
}

/// How fast a project moves.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "self.percent >= 0 && self.percent <= 100",
    "message": "percent must be from 0 to 100",
}]))]
pub struct Rollout {
    /// How many of the workloads, by a hash of namespace, kind and name: raising it only ever adds. Not used where waves are
    /// given.
    pub percent: u32,
    /// What percent counts.
    pub unit: RolloutUnit,
    /// Starts nothing new; what is under way stays.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub paused: bool,
    /// Rollback returns every workload to whole cards, `maxUnavailable` at a time; `RollbackNow` all of them at once.
    pub direction: Direction,
    /// The operator restarts workloads wave by wave. A pod is then converted only if it carries the label
    /// `gpu-migrate.io/convert: "true"`, which the operator sets on the pod template.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub waves: Vec<Wave>,
    /// Workloads that restart at a time.
    #[schemars(range(min = 1))]
    pub max_unavailable: u32,
    /// What happens to a workload that is not ready before it is converted.
    pub on_unready: OnUnready,
    /// What must hold after each wave.
    pub gate: Gate,
}

impl Default for Rollout {
    fn default() -> Self {
        Self {
            percent: 100,
            unit: RolloutUnit::Workload,
            paused: false,
            direction: Direction::Forward,
            waves: Vec::new(),
            max_unavailable: 1,
            on_unready: OnUnready::Skip,
            gate: Gate::default(),
        }
    }
}

/// What a percentage counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum RolloutUnit {
    /// Top owners such as Deployments and CronJobs: all their pods decide alike, in every revision and run. Pods without a
    /// controller count by their name or `generateName`.
    #[default]
    Workload,
    /// As Workload: pods of one controller have no names yet when they are admitted.
    Pod,
}

/// Direction of a rollout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Direction {
    /// From whole cards to shares.
    #[default]
    Forward,
    /// From shares to whole cards.
    Rollback,
    /// As Rollback, without waiting for one workload before the next.
    RollbackNow,
}

/// What happens to a workload that is not ready before it is converted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum OnUnready {
    /// Its wave waits `readyWithinSeconds` for it and goes on without it. It is converted once it is ready.
    #[default]
    Skip,
    /// It is converted with its wave: for pods that wait for a card. If it does not become ready, the wave fails.
    Convert,
}

/// The workloads that move together.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {"rule": "has(self.percent) != has(self.workloads)", "message": "a wave has either percent or workloads"},
    {"rule": "!has(self.percent) || (self.percent >= 0 && self.percent <= 100)", "message": "percent must be from 0 to 100"},
]))]
pub struct Wave {
    /// Share of the project's workloads that have moved once this wave is done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub percent: Option<u32>,
    /// Workloads by name: `Deployment/namespace/name`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workloads: Option<Vec<String>>,
}

/// What must hold after a wave before the next one begins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Gate {
    /// The wave gets on within this many seconds: one more of its workloads is ready.
    pub ready_within_seconds: u32,
    /// They stay so for this many seconds.
    pub soak_seconds: u32,
    /// Their containers restart no more often than this meanwhile.
    pub max_restarts: u32,
    /// A Prometheus query that must stay at or below a value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub query: Option<GateQuery>,
}

impl Default for Gate {
    fn default() -> Self {
        Self { ready_within_seconds: 600, soak_seconds: 60, max_restarts: 3, query: None }
    }
}

/// A Prometheus query as a gate.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GateQuery {
    /// Address of the Prometheus API, `http://prometheus.monitoring:9090`.
    pub url: String,
    /// The query; its largest value counts.
    pub promql: String,
    /// The largest value that passes.
    pub max: f64,
}

/// Where a migration is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct GPUMigrationStatus {
    /// Generation of the spec that this status is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// What the operator is doing.
    pub phase: MigrationPhase,
    /// Number of the current wave, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wave: Option<u32>,
    /// When the current wave last got on, RFC 3339: it began, or one of its workloads arrived.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wave_started_at: Option<String>,
    /// When all workloads of the current wave were ready, RFC 3339; later by as long as one of them was not ready since.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_at: Option<String>,
    /// Since when a workload of the current wave is not ready any more, RFC 3339: the soak does not count this time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unready_since: Option<String>,
    /// The project's pods by kind.
    pub counts: Counts,
    /// The project's workloads: all that the operator restarts, and the first 100 of the others.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub workloads: Vec<WorkloadStatus>,
    /// Workloads that the operator does not restart and that are not in `workloads`.
    #[serde(skip_serializing_if = "is_zero")]
    pub unlisted: u32,
    /// The newest spec that the webhook could use: in force while a newer one is invalid. Written by the webhook.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accepted: Option<AcceptedSpec>,
    /// `Ready`, `PolicyValid`, `Progressing`, `Stalled` (a person must act), `Conflict` (with another policy), `WaveFailed`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// A spec that the webhook could use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AcceptedSpec {
    /// Its generation.
    pub generation: i64,
    /// The spec as JSON.
    pub spec: String,
}

/// What the operator is doing with a migration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum MigrationPhase {
    /// Nothing to do, or not begun.
    #[default]
    Idle,
    /// A wave's workloads restart.
    Running,
    /// A wave is watched.
    Gating,
    /// Held by its owner.
    Paused,
    /// A wave is taken back.
    RollingBack,
    /// A wave failed its gate and was taken back.
    Failed,
    /// All waves are done.
    Complete,
}

/// The project's pods by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Counts {
    /// Shared pods that this policy made.
    pub converted: u32,
    /// Legacy pods of the project.
    pub legacy: u32,
    /// Pods whose request cannot be converted.
    pub unconvertible: u32,
}

/// One workload of a migration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadStatus {
    /// `Deployment`, `StatefulSet`, …
    pub kind: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The wave it belongs to, from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wave: Option<u32>,
    /// Where it is.
    #[serde(default)]
    pub state: WorkloadState,
    /// Why, where that is not plain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Where a workload of a migration is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum WorkloadState {
    /// Its wave has not come.
    #[default]
    Pending,
    /// Its pods are being replaced.
    Restarting,
    /// Its pods are ready, as shared pods.
    Ready,
    /// Not ready when its wave came; converted once it is ready.
    Skipped,
    /// Rolled back to whole cards.
    RolledBack,
    /// Rolled back to whole cards, and not ready for `readyWithinSeconds` since.
    NotReady,
    /// Not restarted by the operator (bare pods, Jobs); it converts when it is recreated.
    Unmanaged,
}
