//! GPUMigration: which project moves, how its requests are converted, how fast.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Toleration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::kubernetes;
use crate::names;
use crate::target::Target;
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
    printcolumn(name = "Command", type_ = "string", json_path = ".status.command.action"),
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

impl GPUMigration {
    /// Mode, pause and direction in force: those of the last command, until the spec says something else than when it was given.
    #[must_use]
    pub fn settings(&self) -> RolloutSettings {
        let own = RolloutSettings::of(&self.spec);
        let command = self.status.as_ref().and_then(|status| status.command.as_ref());
        // "Off" is never overruled: whoever writes it means it.
        let holds = |command: &&RolloutCommand| command.replaces == own && own.mode != MigrationMode::Off;
        command.filter(holds).map_or(own, |command| command.sets)
    }

    /// The policy as it is in force.
    #[must_use]
    pub fn in_force(mut self) -> Self {
        let settings = self.settings();
        self.spec.mode = settings.mode;
        self.spec.rollout.paused = settings.paused;
        self.spec.rollout.direction = settings.direction;
        self
    }
}

/// What a command changes of a policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RolloutSettings {
    /// As `spec.mode`.
    pub mode: MigrationMode,
    /// As `spec.rollout.paused`.
    pub paused: bool,
    /// As `spec.rollout.direction`.
    pub direction: Direction,
}

impl RolloutSettings {
    fn of(spec: &GPUMigrationSpec) -> Self {
        Self { mode: spec.mode, paused: spec.rollout.paused, direction: spec.rollout.direction }
    }
}

/// A command to a rollout. It is in the status, a subresource: a controller that applies the policy from Git does not revert it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RolloutCommand {
    /// What was asked for.
    pub action: CommandAction,
    /// When, RFC 3339. A failed wave is retried by a newer command.
    pub at: String,
    /// In force instead of the spec's.
    pub sets: RolloutSettings,
    /// The spec's when the command was given. Once the spec differs, the spec is in force.
    pub replaces: RolloutSettings,
}

/// What a command asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum CommandAction {
    /// Enforce the policy.
    #[default]
    Start,
    /// Start nothing new.
    Pause,
    /// Continue.
    Resume,
    /// Return every workload to whole cards, `maxUnavailable` at a time.
    Undo,
    /// All of them at once.
    UndoNow,
}

impl CommandAction {
    /// The command to a policy, given at `at`.
    #[must_use]
    pub fn command(self, policy: &GPUMigration, at: String) -> RolloutCommand {
        let now = policy.settings();
        let sets = match self {
            Self::Start => RolloutSettings { mode: MigrationMode::Enforce, ..RolloutSettings::default() },
            Self::Pause => RolloutSettings { paused: true, ..now },
            Self::Resume => RolloutSettings { paused: false, ..now },
            Self::Undo => RolloutSettings { paused: false, direction: Direction::Rollback, ..now },
            Self::UndoNow => RolloutSettings { paused: false, direction: Direction::RollbackNow, ..now },
        };
        RolloutCommand { action: self, at, sets, replaces: RolloutSettings::of(&policy.spec) }
    }
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
    #[schemars(schema_with = "kubernetes::label_selector_or_null")]
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
    /// The system whose form converted pods get. Another than `gpu-manager` brings its own scheduler and its own plugin on the nodes.
    #[serde(skip_serializing_if = "Target::is_ours")]
    pub target: Target,
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
            target: Target::default(),
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
    #[schemars(schema_with = "kubernetes::tolerations")]
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
    /// What the percentages of waves count.
    pub percent_of: PercentOf,
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
            percent_of: PercentOf::Workloads,
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

/// What the percentages of waves count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum PercentOf {
    /// Workloads, whatever their size.
    #[default]
    Workloads,
    /// The whole cards that their pods request, all replicas together. A wave ends with the workload that reaches its percentage.
    Cards,
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
    /// Share of the project's workloads, or of their cards (`percentOf`), that have moved once this wave is done.
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
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GateQuery {
    /// Address of the Prometheus API, `http://prometheus.monitoring:9090`. For `https://` the operator has the CA and the token of
    /// its flags `--prometheus-ca-file` and `--prometheus-token-file`.
    pub url: String,
    /// The query; its largest value counts.
    pub promql: String,
    /// The largest value that passes.
    pub max: f64,
    /// It is asked at this interval while the wave soaks, in seconds, and once more at the end.
    #[serde(default = "query_interval")]
    #[schemars(range(min = 5))]
    pub interval_seconds: u32,
    /// So many answers above `max` are tolerated in a wave; the last one must not be above it.
    #[serde(default)]
    pub failure_limit: u32,
}

impl Default for GateQuery {
    fn default() -> Self {
        Self {
            url: String::new(),
            promql: String::new(),
            max: 0.0,
            interval_seconds: query_interval(),
            failure_limit: 0,
        }
    }
}

fn query_interval() -> u32 {
    30
}

/// The answers of a gate's query in the current wave.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct QueryStatus {
    /// When it was asked last, RFC 3339.
    pub asked_at: String,
    /// How many answers were above the limit.
    pub failures: u32,
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
    /// The gate's query in the current wave.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub query: Option<QueryStatus>,
    /// Values of `spec.convert` that pod templates were converted with; the last one is what the waves convert to. A pod gets the
    /// one that its annotation `gpu-migrate.io/conversion` names.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conversions: Vec<RecordedConversion>,
    /// The project's pods by kind.
    pub counts: Counts,
    /// The project's workloads: all that the operator restarts, and the first 100 of the others.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub workloads: Vec<WorkloadStatus>,
    /// Workloads that the operator does not restart and that are not in `workloads`.
    #[serde(skip_serializing_if = "is_zero")]
    pub unlisted: u32,
    /// The last command to the rollout. Written by `gpu-migrate rollout`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<RolloutCommand>,
    /// `command.at` of the command that the operator has seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_command: Option<String>,
    /// The newest spec that the webhook could use: in force while a newer one is invalid. Written by the webhook.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accepted: Option<AcceptedSpec>,
    /// `Ready`, `PolicyValid`, `Progressing`, `Stalled` (a person must act), `Conflict` (with another policy), `WaveFailed`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "kubernetes::conditions")]
    pub conditions: Vec<Condition>,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// A former or present value of `spec.convert`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RecordedConversion {
    /// Generation of the policy in which the operator saw it first, as in the annotation.
    pub id: String,
    /// `spec.convert` as JSON.
    pub convert: String,
}

impl RecordedConversion {
    /// The value, unless it is not of this version's form.
    #[must_use]
    pub fn value(&self) -> Option<Convert> {
        serde_json::from_str(&self.convert).ok()
    }
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
    /// The conversion that it had before its wave, by id; absent: whole cards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub former: Option<String>,
    /// How often its pod template was labelled since the policy was edited.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub attempts: u32,
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
    /// Rolled back to what it had before its wave.
    RolledBack,
    /// Rolled back, and not ready for `readyWithinSeconds` since.
    NotReady,
    /// Not restarted by the operator (bare pods, Jobs); it converts when it is recreated.
    Unmanaged,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(mode: MigrationMode) -> GPUMigration {
        GPUMigration::new("m", GPUMigrationSpec { project: "p".into(), mode, ..GPUMigrationSpec::default() })
    }

    fn tell(policy: &mut GPUMigration, action: CommandAction) {
        let command = action.command(policy, "2026-01-01T00:00:00Z".into());
        policy.status.get_or_insert_default().command = Some(command);
    }

    #[test]
    fn a_command_is_in_force_until_the_spec_is_edited() {
        let mut policy = policy(MigrationMode::Audit);
        let settings = |mode, paused, direction| RolloutSettings { mode, paused, direction };
        use Direction::{Forward, Rollback, RollbackNow};
        use MigrationMode::{Audit, Enforce, Off};
        assert_eq!(policy.settings(), settings(Audit, false, Forward));
        for (action, expected) in [
            (CommandAction::Start, settings(Enforce, false, Forward)),
            (CommandAction::Pause, settings(Enforce, true, Forward)),
            (CommandAction::Resume, settings(Enforce, false, Forward)),
            (CommandAction::Undo, settings(Enforce, false, Rollback)),
            (CommandAction::Pause, settings(Enforce, true, Rollback)),
            (CommandAction::UndoNow, settings(Enforce, false, RollbackNow)),
            (CommandAction::Start, settings(Enforce, false, Forward)),
        ] {
            tell(&mut policy, action);
            assert_eq!(policy.settings(), expected, "{action:?}");
        }
        // Other fields may change: a GitOps controller that applies the same three does not end the command.
        policy.spec.convert.blocks_per_card = Blocks(7);
        assert_eq!(policy.clone().in_force().spec.mode, Enforce);
        // An edit of one of the three does.
        let mut edited = policy.clone();
        edited.spec.rollout.paused = true;
        assert_eq!(edited.settings(), settings(Audit, true, Forward));
        policy.spec.mode = Off;
        assert_eq!(policy.settings(), settings(Off, false, Forward));
    }

    #[test]
    fn off_is_never_overruled() {
        let mut policy = policy(MigrationMode::Off);
        tell(&mut policy, CommandAction::Start);
        assert_eq!(policy.settings().mode, MigrationMode::Off);
    }
}
