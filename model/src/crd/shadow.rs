//! GPUShadow: what one node's cards are and who holds them, as its node agent reports.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::kubernetes;
use crate::card::{Card, CardState, Health};
use crate::ledger::{Hold, HolderId, Ledger, Phase, Slot};
use crate::names::NVIDIA_PLUGIN_REGISTERED;
use crate::topology::{LinkLevel, Topology, Tree};
use crate::units::{Blocks, CardIndex, Cores};

/// A GPUShadow has no wishes: it reports.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "gpu-migrate.io",
    version = "v1alpha1",
    kind = "GPUShadow",
    plural = "gpushadows",
    status = "GPUShadowStatus",
    derive = "PartialEq",
    derive = "Default",
    shortname = "gpus",
    category = "gpu-migrate",
    doc = "The cards of one node and who holds them. Written by the node's agent, but for the conditions that are the operator's; named after the Node.",
    printcolumn(name = "Cards", type_ = "integer", json_path = ".status.total"),
    printcolumn(
        name = "Free",
        type_ = "string",
        json_path = ".status.free",
        description = "Cards that no container holds"
    ),
    printcolumn(
        name = "Legacy",
        type_ = "string",
        json_path = ".status.legacy",
        description = "Cards that legacy containers hold"
    ),
    printcolumn(
        name = "Shared",
        type_ = "string",
        json_path = ".status.shared",
        description = "Cards that shared containers hold"
    ),
    printcolumn(
        name = "Other",
        type_ = "string",
        json_path = ".status.other",
        description = "Cards that are unhealthy, cordoned or disputed"
    ),
    printcolumn(name = "Isolation", type_ = "string", json_path = ".status.isolation", priority = 1),
    printcolumn(name = "Driver", type_ = "string", json_path = ".status.driverVersion", priority = 1),
    printcolumn(name = "CUDA", type_ = "string", json_path = ".status.cudaVersion", priority = 1),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(
        name = "Drift",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Drift\")].status"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct GPUShadowSpec {}

/// What the node's agent knows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct GPUShadowStatus {
    /// How many cards there are.
    pub total: u32,
    /// Indexes of the free cards, `0,3,4`; `-` for none.
    pub free: String,
    /// Indexes of the cards that legacy containers hold.
    pub legacy: String,
    /// Indexes of the cards that shared containers hold.
    pub shared: String,
    /// Indexes of the cards that take nothing new: unhealthy, cordoned, disputed.
    pub other: String,
    /// The cards, in the order of their indexes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cards: Vec<CardStatus>,
    /// The best path between every two cards: `X` on the diagonal, else NV, PIX, PXB, PHB, NODE, SYS.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<Vec<String>>,
    /// How shares are kept apart on this node: `none` is said loudly.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub isolation: String,
    /// Version of the driver.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub driver_version: String,
    /// Version of CUDA that the driver supports.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cuda_version: String,
    /// The operator's last run of the owner's driver installer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver_install: Option<DriverInstall>,
    /// The agent's: `Ready`, `Drift`, `NvidiaPluginRegistered`, `IsolationReady` (shares can be limited here). The
    /// operator's, where they apply: `ExternalComponents`, `PluginConflict`, `DriverMatches`, `DriverInstalled`,
    /// `ModeConverged`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "kubernetes::conditions")]
    pub conditions: Vec<Condition>,
}

/// A run of the driver installer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct DriverInstall {
    /// The version that was asked for.
    pub version: String,
    /// Of the template and the version: another one is another run.
    pub revision: String,
    /// How far it is.
    pub phase: InstallPhase,
    /// What the installer said when it ended.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// How far a run of the driver installer is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum InstallPhase {
    /// It waits for the node's cards to be free.
    #[default]
    Waiting,
    /// Its pod runs.
    Installing,
    /// It succeeded.
    Installed,
    /// It failed; its pod is kept. Deleting the pod tries again.
    Failed,
}

/// One card and who holds it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CardStatus {
    /// What it is.
    #[serde(flatten)]
    pub card: Card,
    /// Whether it can be trusted with work.
    #[serde(default)]
    pub health: Health,
    /// What may be put on it next.
    #[serde(default)]
    pub state: CardState,
    /// Why nothing new is put on it although it is healthy and not cordoned: its holders are not known for sure.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub closed_because: String,
    /// Cores that shares can still get.
    #[serde(default)]
    pub cores_left: Cores,
    /// Blocks that shares can still get.
    #[serde(default)]
    pub blocks_left: Blocks,
    /// Who holds it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub holders: Vec<HolderStatus>,
}

/// A container that holds a card or a share of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HolderStatus {
    /// Namespace of its pod; empty while the pod is not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// Name of its pod; empty while the pod is not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub pod: String,
    /// UID of its pod.
    pub uid: String,
    /// Name of the container.
    pub container: String,
    /// Cores of a share; absent for a legacy holder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<Cores>,
    /// Blocks of a share; absent for a legacy holder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocks: Option<Blocks>,
    /// It is an init container.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub init: bool,
    /// The parts of the card that a legacy holder has, where it is not the whole.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<String>,
    /// The devices that the kubelet checkpoint names for a legacy holder, where it was given others than the kubelet asked
    /// for. Without the node agent the kubelet may give the card to someone else as well.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kubelet_devices: Vec<String>,
}

impl GPUShadowStatus {
    /// Whether the node agent has NVIDIA's plugin behind itself, by what the kubelet has.
    #[must_use]
    pub fn has_nvidia_plugin(&self) -> bool {
        self.conditions.iter().any(|it| it.type_ == NVIDIA_PLUGIN_REGISTERED && it.status == "True")
    }

    /// Fills in cards, holders and the summary from the ledger. `name` gives namespace and name of a pod by its UID.
    #[must_use]
    pub fn of(ledger: &Ledger, topology: &Topology, name: impl Fn(&str) -> Option<(String, String)>) -> Self {
        let cards: Vec<CardStatus> = ledger
            .view()
            .iter()
            .map(|view| CardStatus {
                card: view.card.as_ref().clone(),
                health: ledger.health(view.index),
                state: view.state,
                closed_because: String::new(),
                cores_left: if view.takes_shares() { view.cores_left } else { Cores::ZERO },
                blocks_left: if view.takes_shares() { view.blocks_left } else { Blocks::ZERO },
                holders: ledger
                    .holds(view.index)
                    .map(|(holder, hold)| HolderStatus::of(holder, hold, &name))
                    .collect(),
            })
            .collect();
        let list = |wanted: fn(CardState) -> bool| {
            let chosen = cards.iter().enumerate().filter(|(_, card)| wanted(card.state));
            let text = chosen.map(|(index, _)| index.to_string()).collect::<Vec<_>>().join(",");
            if text.is_empty() { "-".to_owned() } else { text }
        };
        Self {
            total: u32::try_from(cards.len()).unwrap_or(u32::MAX),
            free: list(|state| state == CardState::Free),
            legacy: list(|state| state == CardState::Legacy),
            shared: list(|state| state == CardState::Shared),
            other: list(|state| {
                matches!(state, CardState::Unhealthy | CardState::Cordoned | CardState::Disputed)
            }),
            links: write_links(topology),
            cards,
            ..Self::default()
        }
    }

    /// The ledger that this status describes. Holds are recorded as found.
    #[must_use]
    pub fn ledger(&self) -> Ledger {
        let mut ledger = Ledger::new(self.cards.iter().map(|card| card.card.clone()).collect());
        for (index, card) in self.cards.iter().enumerate() {
            let index = CardIndex::from(index);
            for holder in &card.holders {
                let (id, hold) = holder.hold();
                ledger.record(&id, index, hold);
            }
            ledger.set_health(index, card.health);
            ledger.set_cordoned(index, card.state == CardState::Cordoned);
        }
        ledger
    }

    /// The tree of the node's cards; all alike where the links are unknown.
    #[must_use]
    pub fn tree(&self) -> Tree {
        let cards = self.cards.len();
        Topology::from_fn(cards, |row, column| {
            let cell = self.links.get(row.position()).and_then(|row| row.get(column.position()));
            cell.and_then(|cell| if cell == "NV" { Some(LinkLevel::NvLink) } else { LinkLevel::parse(cell) })
                .unwrap_or(LinkLevel::Sys)
        })
        .tree()
    }
}

impl HolderStatus {
    /// It holds a share, not whole cards or parts of them.
    #[must_use]
    pub const fn is_share(&self) -> bool {
        self.cores.is_some() || self.blocks.is_some()
    }

    /// A legacy holder on another card than the kubelet checkpoint says.
    #[must_use]
    pub fn deviates(&self) -> bool {
        !self.kubelet_devices.is_empty()
    }

    fn of(holder: &HolderId, hold: &Hold, name: impl Fn(&str) -> Option<(String, String)>) -> Self {
        let (namespace, pod) = name(&holder.pod_uid).unwrap_or_default();
        let mut status = Self {
            namespace,
            pod,
            uid: holder.pod_uid.clone(),
            container: holder.container.clone(),
            ..Self::default()
        };
        match hold {
            Hold::Share { cores, blocks, phase } => {
                (status.cores, status.blocks) = (Some(*cores), Some(*blocks));
                status.init = *phase == Phase::Init;
            }
            Hold::Legacy(slots) => {
                status.parts = slots
                    .iter()
                    .filter_map(|slot| match slot {
                        Slot::Whole => None,
                        Slot::Part(part) => Some(part.clone()),
                    })
                    .collect();
            }
        }
        status
    }

    /// Who it is and what it holds, as the ledger has it.
    #[must_use]
    pub fn hold(&self) -> (HolderId, Hold) {
        let hold = match (self.cores, self.blocks) {
            (None, None) if self.parts.is_empty() => Hold::whole(),
            (None, None) => Hold::Legacy(self.parts.iter().cloned().map(Slot::Part).collect()),
            (cores, blocks) => Hold::Share {
                cores: cores.unwrap_or_default(),
                blocks: blocks.unwrap_or_default(),
                phase: if self.init { Phase::Init } else { Phase::Run },
            },
        };
        (HolderId::new(&self.uid, &self.container), hold)
    }
}

fn write_links(topology: &Topology) -> Vec<Vec<String>> {
    let cell = |row: usize, column: usize| {
        topology.between(row.into(), column.into()).map_or_else(|| "X".to_owned(), |level| level.to_string())
    };
    let cards = topology.cards();
    (0..cards).map(|row| (0..cards).map(|column| cell(row, column)).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_books_read_back_from_what_was_reported() {
        let card = |minor| Card { uuid: format!("GPU-{minor}"), minor, memory_mib: 4096, ..Card::default() };
        let mut ledger = Ledger::new((0..5).map(card).collect());
        let share = Hold::Share { cores: Cores(40), blocks: Blocks(3), phase: Phase::Init };
        ledger.hold(&HolderId::new("a", "main"), CardIndex(0), Hold::whole()).unwrap();
        ledger.hold(&HolderId::new("b", "warm"), CardIndex(1), share).unwrap();
        let parts = Hold::Legacy(vec![Slot::Part("GPU-2::1".into())]);
        ledger.hold(&HolderId::new("c", "main"), CardIndex(2), parts).unwrap();
        ledger.set_health(CardIndex(3), Health::Unhealthy);
        ledger.set_cordoned(CardIndex(4), true);
        let topology = Topology::uniform(5, LinkLevel::NvLink);

        let status =
            GPUShadowStatus::of(&ledger, &topology, |uid| (uid == "a").then(|| ("ns".into(), "pod".into())));
        assert_eq!((status.free.as_str(), status.legacy.as_str()), ("-", "0,2"));
        assert_eq!((status.shared.as_str(), status.other.as_str()), ("1", "3,4"));
        assert_eq!(status.cards[0].holders[0].namespace, "ns");
        let json = serde_json::to_value(&status).unwrap();
        let read: GPUShadowStatus = serde_json::from_value(json).unwrap();
        assert_eq!(read, status);
        assert_eq!(read.ledger().view(), ledger.view());
        assert_eq!(read.tree(), topology.tree());
        for index in ledger.indexes() {
            assert!(read.ledger().holds(index).eq(ledger.holds(index)));
        }
    }
}
