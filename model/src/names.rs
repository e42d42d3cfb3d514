//! Every name that is seen from outside: resources, labels, annotations. No other module spells one out.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::MIB_PER_BLOCK;

/// API group of our custom resources.
pub const GROUP: &str = "gpu-migrate.io";
/// Their version.
pub const VERSION: &str = "v1alpha1";

/// Namespace label: the webhook may look at this namespace's pods when it is `"true"`.
pub const OPT_IN: &str = "gpu-migrate.io/opt-in";
/// Pod label: leave this pod alone when it is `"true"`.
pub const OPT_OUT: &str = "gpu-migrate.io/opt-out";
/// Pod label that the operator sets on a pod template: this workload's wave has come when it is `"true"`.
pub const CONVERT: &str = "gpu-migrate.io/convert";
/// Annotation that the operator sets on a pod template: which of the policy's recorded conversions its pods get.
pub const CONVERSION: &str = "gpu-migrate.io/conversion";
/// Pod or namespace label: the project it belongs to.
pub const PROJECT: &str = "gpu-migrate.io/project";
/// Namespace label: its pods belong to the namespace's project whatever their own label says when it is `"true"`.
pub const FIXED_PROJECT: &str = "gpu-migrate.io/fixed-project";
/// Namespace label: containers that ask for no card get `NVIDIA_VISIBLE_DEVICES=void` when it is `"true"`.
pub const VOID_GUARD: &str = "gpu-migrate.io/void-guard";
/// Pod annotation: what the pod asked for before it was rewritten.
pub const ORIGINAL: &str = "gpu-migrate.io/original";
/// Pod annotation: `name@generation` of the policy that rewrote it.
pub const POLICY: &str = "gpu-migrate.io/policy";
/// Pod annotation: the webhook has reviewed a pod that keeps its whole cards; its value is the outcome. Only with
/// `--mark-reviewed`, for the backstop.
pub const REVIEWED: &str = "gpu-migrate.io/reviewed";
/// Pod annotation: the context of the pod's trace, as the W3C header `traceparent`. Only with `--otlp-endpoint`; set with the conversion,
/// then with the binding.
pub const TRACEPARENT: &str = "gpu-migrate.io/traceparent";
/// Pod annotation prefix: cards that a legacy container really got; the container's name follows.
pub const LEGACY_CARDS_PREFIX: &str = "gpu-migrate.io/gpu-idx-";
/// Pod annotation prefix: UUIDs of the cards that a container of either kind got, comma-separated; the container's name follows.
/// An index is a card's only as long as the node agent's state lasts.
pub const CARD_UUIDS_PREFIX: &str = "gpu-migrate.io/card-uuids-";
/// Pod scheduling gate on the members of a gang that is not complete yet.
pub const GANG_GATE: &str = "gpu-migrate.io/gang";
/// Node annotation: changes when a card gets free capacity, so that the scheduler requeues waiting pods (the scheduler watches nodes, not GPUShadows).
pub const CARDS_GENERATION: &str = "gpu-migrate.io/cards-generation";
/// Node annotation: comma-separated card indexes or UUIDs that take nothing new.
pub const CORDONED_CARDS: &str = "gpu-migrate.io/cordoned-cards";
/// Node label: the pool that the operator matched.
pub const POOL: &str = "gpu-migrate.io/pool";
/// Node label: which plugin serves the node: `Legacy`, `Bridged` or `Shared`.
pub const PLUGIN: &str = "gpu-migrate.io/plugin";
/// Node label: the operator's node agent runs here; its value is the isolation, `none`, `driver`, `vcuda`, `mps` or
/// `hami-core`.
pub const RUN_AGENT: &str = "gpu-migrate.io/run-node-agent";
/// Node label: the operator's copy of NVIDIA's plugin runs here, registered with the kubelet (`Legacy`) or with the node
/// agent (`Bridged`).
pub const RUN_NVIDIA: &str = "gpu-migrate.io/run-nvidia-plugin";
/// Node label: the operator's dcgm-exporter runs here when it is `"true"`.
pub const RUN_DCGM: &str = "gpu-migrate.io/run-dcgm-exporter";
/// Node label: shares that are there stay, none is added, when it is `"true"`. The extender honours it.
pub const NO_NEW_SHARES: &str = "gpu-migrate.io/no-new-shares";
/// Label of what the operator made from a template: the template's name.
pub const COMPONENT: &str = "gpu-migrate.io/component";

/// Pod annotation of gpu-manager, an index of a container follows: the extender's cards, `"0"` or `"0,1"`.
pub const PREDICATE_GPU_INDEX_PREFIX: &str = "tencent.com/predicate-gpu-idx-";
/// The same for init containers, which gpu-manager does not know.
pub const PREDICATE_GPU_INDEX_INIT_PREFIX: &str = "tencent.com/predicate-gpu-idx-init-";
/// Pod annotation of gpu-manager: the extender's node.
pub const PREDICATE_NODE: &str = "tencent.com/predicate-node";
/// Pod annotation of gpu-manager: when the extender chose, nanoseconds since 1970.
pub const PREDICATE_TIME: &str = "tencent.com/predicate-time";
/// Pod annotation of gpu-manager: `"false"` when chosen, `"true"` once the node agent has confirmed it.
pub const GPU_ASSIGNED: &str = "tencent.com/gpu-assigned";
/// Container annotation of gpu-manager: device nodes, `/dev/nvidia0,/dev/nvidia1`.
pub const VCUDA_DEVICE: &str = "tencent.com/vcuda-device";
/// Container annotation in the node agent's answer to Allocate: UUIDs of its cards, comma-separated.
pub const CARD_UUIDS: &str = "gpu-migrate.io/card-uuids";
/// Pod annotation of gpu-manager: soft limit of cores.
pub const VCUDA_CORE_LIMIT: &str = "tencent.com/vcuda-core-limit";

/// Pod annotation: name of the gang.
pub const GANG_NAME: &str = "scheduling.k8s.io/group-name";
/// Pod annotation: how many members the gang has.
pub const GANG_SIZE: &str = "scheduling.k8s.io/group-pod-num";
/// Pod annotation of Volcano: name of its PodGroup. So is [`GANG_NAME`] without [`GANG_SIZE`].
pub const VOLCANO_GROUP: &str = "scheduling.volcano.sh/group-name";
/// Pod label of scheduler-plugins: name of its PodGroup.
pub const SCHEDULER_PLUGINS_GROUP: &str = "scheduling.x-k8s.io/pod-group";
/// Pod label of Kueue: name of its group of plain pods.
pub const KUEUE_GROUP: &str = "kueue.x-k8s.io/pod-group-name";
/// Pod annotation of Kueue: how many pods the group has.
pub const KUEUE_GROUP_SIZE: &str = "kueue.x-k8s.io/pod-group-total-count";

/// Pod annotation of KAI: MiB of a card for the pod's container.
pub const KAI_MEMORY: &str = "gpu-memory";

/// Pod annotation: card models that will do, comma-separated.
pub const CARD_MODEL: &str = "gpu-migrate.io/card-model";
/// Pod annotation: only these card UUIDs, comma-separated.
pub const CARD_INCLUDE: &str = "gpu-migrate.io/card-include";
/// Pod annotation: none of these card UUIDs, comma-separated.
pub const CARD_EXCLUDE: &str = "gpu-migrate.io/card-exclude";
/// Pod annotation: `binpack` or `spread`.
pub const CARD_ORDER: &str = "gpu-migrate.io/card-order";
/// Pod annotation: `"true"` keeps all cards of the pod on one NUMA node.
pub const SAME_NUMA: &str = "gpu-migrate.io/same-numa";

/// Node label of NVIDIA's feature discovery: the card's product name.
pub const GPU_PRODUCT: &str = "nvidia.com/gpu.product";
/// Node label of NVIDIA's feature discovery: version of the driver.
pub const DRIVER_VERSION: &str = "nvidia.com/cuda.driver-version.full";
/// Node label of NVIDIA's feature discovery: version of CUDA that the driver supports.
pub const CUDA_VERSION: &str = "nvidia.com/cuda.runtime-version.full";
/// NVIDIA's DRA driver for whole cards and MIG devices (dra-driver-nvidia-gpu).
pub const NVIDIA_DRA_DRIVER: &str = "gpu.nvidia.com";
/// Condition of a GPUShadow: the kubelet asks the node agent for whole cards, and the agent NVIDIA's plugin.
pub const NVIDIA_PLUGIN_REGISTERED: &str = "NvidiaPluginRegistered";
/// The variable by which a container is shown its cards.
pub const NVIDIA_VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";

/// Default name of the scheduler that asks our extender.
pub const SCHEDULER: &str = "gpu-migrate-scheduler";
/// Resources by which HAMi shares a card beside `nvidia.com/gpu` (`pkg/device/nvidia` of Project-HAMi/HAMi).
pub const HAMI_RESOURCES: [&str; 4] =
    ["nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "nvidia.com/gpucores", "nvidia.com/priority"];
/// Prefix of NVIDIA's MIG resources.
pub const MIG_PREFIX: &str = "nvidia.com/mig-";
/// Suffix of NVIDIA's renamed time-sliced resources.
pub const SHARED_SUFFIX: &str = ".shared";

/// The resource names and unit sizes of one dialect of GPU sharing. The default is gpu-manager's.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Dialect {
    /// Whole cards, as NVIDIA's plugin serves them.
    pub legacy: String,
    /// Shares of compute; 100 is one card.
    pub cores: String,
    /// Shares of memory, in units of `mib_per_block`.
    pub memory: String,
    /// MiB in one unit of memory.
    pub mib_per_block: u64,
}

impl Default for Dialect {
    fn default() -> Self {
        Self {
            legacy: "nvidia.com/gpu".into(),
            cores: "tencent.com/vcuda-core".into(),
            memory: "tencent.com/vcuda-memory".into(),
            mib_per_block: MIB_PER_BLOCK,
        }
    }
}

/// The project of a pod: its own label, else its namespace's. Where the namespace's label [`FIXED_PROJECT`] is `"true"`, the
/// namespace's alone.
#[must_use]
pub fn project_of<'a>(
    pod: Option<&'a str>,
    namespace: Option<&'a str>,
    fixed: Option<&str>,
) -> Option<&'a str> {
    pod.filter(|_| fixed != Some("true")).or(namespace)
}
