//! What the page shows of one object, as it is sent. Pure.

use gpu_migrate_model::card::CardState;
use gpu_migrate_model::crd::{CardStatus, GPUMigration, GPUShadow, HolderStatus, WorkloadState};
use gpu_migrate_model::units::{Cores, MIB_PER_BLOCK};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt as _;
use serde::Serialize;

/// A node and its cards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeRow {
    pub name: String,
    pub isolation: String,
    pub driver: String,
    /// What a person should look at: conditions that do not hold, or that should not.
    pub notes: Vec<String>,
    pub cards: Vec<CardRow>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CardRow {
    pub uuid: String,
    pub model: String,
    pub memory_mib: u64,
    pub state: Shown,
    /// Cores that are held; 100 for a legacy card.
    pub cores: u32,
    /// Memory that shares hold.
    pub held_mib: u64,
    /// Why nothing new comes to it; empty where something may.
    pub why: String,
    pub holders: Vec<HolderRow>,
}

/// How a card is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Shown {
    Free,
    Legacy,
    Shared,
    Unhealthy,
    /// By an annotation of the Node.
    Cordoned,
    /// By the node agent, which does not know for sure who has it.
    Closed,
    Disputed,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HolderRow {
    /// Namespace and name; its UID while those are not known.
    pub pod: String,
    pub container: String,
    /// Absent for a legacy container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cores: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mib: Option<u64>,
}

/// A policy and how far its rollout is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ProjectRow {
    /// Of the policy.
    pub name: String,
    pub project: String,
    pub mode: String,
    pub phase: String,
    /// From 1; absent before the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wave: Option<u32>,
    pub waves: usize,
    pub workloads: usize,
    /// Workloads that have arrived.
    pub converted: usize,
    pub shared_pods: u32,
    pub legacy_pods: u32,
    pub unconvertible_pods: u32,
    /// What the operator does, or why it does not get on.
    pub message: String,
    /// A person must act.
    pub stalled: bool,
}

/// An Event that one of our components wrote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EventRow {
    /// Namespace and name of the Event.
    pub name: String,
    /// The last time.
    pub time: Timestamp,
    pub warning: bool,
    pub reason: String,
    pub about: String,
    pub note: String,
    /// The component.
    pub by: String,
}

#[must_use]
pub fn event(event: &Event) -> EventRow {
    let last = event.series.as_ref().map(|series| series.last_observed_time.0);
    let first = event.event_time.as_ref().map(|time| time.0);
    let about = event.regarding.clone().unwrap_or_default();
    let namespace =
        about.namespace.filter(|namespace| !namespace.is_empty()).map(|namespace| namespace + "/");
    EventRow {
        name: format!("{}/{}", event.namespace().unwrap_or_default(), event.name_any()),
        time: last.or(first).unwrap_or_default(),
        warning: event.type_.as_deref() == Some("Warning"),
        reason: event.reason.clone().unwrap_or_default(),
        about: format!(
            "{} {}{}",
            about.kind.unwrap_or_default(),
            namespace.unwrap_or_default(),
            about.name.unwrap_or_default()
        ),
        note: event.note.clone().unwrap_or_default(),
        by: event.reporting_controller.clone().unwrap_or_default(),
    }
}

#[must_use]
pub fn node(shadow: &GPUShadow) -> NodeRow {
    let status = shadow.status.clone().unwrap_or_default();
    NodeRow {
        name: shadow.name_any(),
        notes: status.conditions.iter().filter_map(note).collect(),
        isolation: status.isolation,
        driver: status.driver_version,
        cards: status.cards.iter().map(card).collect(),
    }
}

/// Conditions that are no good news, as text.
fn note(condition: &Condition) -> Option<String> {
    let bad = match condition.type_.as_str() {
        "Drift" | "PluginConflict" => condition.status == "True",
        "Ready" | "DriverMatches" | "DriverInstalled" | "ModeConverged" => condition.status == "False",
        _ => false,
    };
    bad.then(|| format!("{}: {}", condition.type_, condition.message))
}

fn card(card: &CardStatus) -> CardRow {
    let held: u64 =
        card.holders.iter().filter_map(|holder| holder.blocks).map(|blocks| u64::from(blocks.0)).sum();
    let cores: u32 = card.holders.iter().filter_map(|holder| holder.cores).map(|cores| cores.0).sum();
    let legacy = card.holders.iter().any(|holder| !holder.is_share());
    let state = match card.state {
        CardState::Free => Shown::Free,
        CardState::Legacy => Shown::Legacy,
        CardState::Shared => Shown::Shared,
        CardState::Unhealthy => Shown::Unhealthy,
        CardState::Cordoned if card.closed_because.is_empty() => Shown::Cordoned,
        CardState::Cordoned => Shown::Closed,
        CardState::Disputed => Shown::Disputed,
    };
    let why = match state {
        _ if !card.closed_because.is_empty() => card.closed_because.clone(),
        Shown::Unhealthy => "NVML reports a fault; see the Node's Events".to_owned(),
        Shown::Cordoned => "cordoned by the Node's annotation gpu-migrate.io/cordoned-cards".to_owned(),
        Shown::Disputed => "two kinds of holders, or too many shares, were found on it".to_owned(),
        _ => String::new(),
    };
    CardRow {
        uuid: card.card.uuid.clone(),
        model: card.card.model.clone(),
        memory_mib: card.card.memory_mib,
        state,
        cores: if legacy { Cores::CARD.0 } else { cores },
        held_mib: held * MIB_PER_BLOCK,
        why,
        holders: card.holders.iter().map(holder).collect(),
    }
}

fn holder(holder: &HolderStatus) -> HolderRow {
    let known = !holder.pod.is_empty();
    HolderRow {
        pod: if known {
            format!("{}/{}", holder.namespace, holder.pod)
        } else {
            format!("UID {}", holder.uid)
        },
        container: holder.container.clone(),
        cores: holder.cores.map(|cores| cores.0),
        mib: holder.blocks.map(|blocks| u64::from(blocks.0) * MIB_PER_BLOCK),
    }
}

#[must_use]
pub fn project(policy: &GPUMigration) -> ProjectRow {
    let status = policy.status.clone().unwrap_or_default();
    let condition = |kind: &str| status.conditions.iter().find(|condition| condition.type_ == kind);
    let stalled = condition("Stalled").filter(|condition| condition.status == "True");
    let message = stalled.or_else(|| condition("Ready")).map(|condition| condition.message.clone());
    let arrived = status.workloads.iter().filter(|workload| workload.state == WorkloadState::Ready);
    ProjectRow {
        name: policy.name_any(),
        project: policy.spec.project.clone(),
        mode: format!("{:?}", policy.settings().mode),
        phase: format!("{:?}", status.phase),
        wave: status.wave,
        waves: policy.spec.rollout.waves.len(),
        converted: arrived.count(),
        workloads: status.workloads.len() + status.unlisted as usize,
        shared_pods: status.counts.converted,
        legacy_pods: status.counts.legacy,
        unconvertible_pods: status.counts.unconvertible,
        message: message.unwrap_or_default(),
        stalled: stalled.is_some(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_card_says_how_full_it_is_and_why_it_is_closed() {
        let share =
            json!({"namespace": "ns", "pod": "p", "uid": "u", "container": "c", "cores": 30, "blocks": 8});
        let unnamed = json!({"uid": "u2", "container": "c"});
        let shown = |state: &str, because: &str, holders: serde_json::Value| {
            let status: CardStatus =
                serde_json::from_value(json!({"uuid": "GPU-0", "minor": 0, "memoryMiB": 4096,
                "state": state, "closedBecause": because, "holders": holders}))
                .unwrap();
            let row = card(&status);
            (row.state, row.cores, row.held_mib, row.why)
        };
        let empty = String::new;
        assert_eq!(shown("Free", "", json!([])), (Shown::Free, 0, 0, empty()));
        assert_eq!(shown("Shared", "", json!([share, share])), (Shown::Shared, 60, 4096, empty()));
        assert_eq!(shown("Legacy", "", json!([unnamed])), (Shown::Legacy, 100, 0, empty()));
        assert_eq!(shown("Cordoned", "lost", json!([])), (Shown::Closed, 0, 0, "lost".to_owned()));
        assert_eq!(shown("Cordoned", "", json!([])).0, Shown::Cordoned);
        assert!(shown("Disputed", "", json!([share, unnamed])).3.contains("two kinds"));
        let of_unnamed = holder(&serde_json::from_value(unnamed).unwrap());
        assert_eq!((of_unnamed.pod.as_str(), of_unnamed.cores), ("UID u2", None));
    }

    #[test]
    fn a_node_notes_what_a_person_should_look_at() {
        let condition = |kind: &str, status: &str| json!({"type": kind, "status": status, "reason": "R", "message": format!("{kind} said"), "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let shadow: GPUShadow = serde_json::from_value(json!({"metadata": {"name": "n"}, "spec": {}, "status": {
            "conditions": [condition("Ready", "True"), condition("Drift", "True"), condition("NvidiaPluginRegistered", "False"),
                condition("ModeConverged", "False")]}}))
        .unwrap();
        assert_eq!(node(&shadow).notes, ["Drift: Drift said", "ModeConverged: ModeConverged said"]);
    }

    #[test]
    fn a_project_says_how_far_it_is_and_what_it_waits_for() {
        let condition = |kind: &str, status: &str, message: &str| json!({"type": kind, "status": status, "reason": "R", "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let policy = |conditions: serde_json::Value| -> ProjectRow {
            let policy: GPUMigration = serde_json::from_value(json!({"metadata": {"name": "m"},
                "spec": {"project": "p", "mode": "Enforce", "rollout": {"waves": [{"percent": 10}, {"percent": 100}]}},
                "status": {"phase": "Gating", "wave": 1, "counts": {"converted": 2, "legacy": 3, "unconvertible": 1}, "unlisted": 1,
                    "workloads": [{"kind": "Deployment", "namespace": "ns", "name": "a", "state": "Ready"},
                        {"kind": "Deployment", "namespace": "ns", "name": "b"}], "conditions": conditions}}))
            .unwrap();
            project(&policy)
        };
        let ready = condition("Ready", "False", "wave 1 is watched");
        let row = policy(json!([ready]));
        assert_eq!((row.wave, row.waves, row.converted, row.workloads), (Some(1), 2, 1, 3));
        assert_eq!((row.mode.as_str(), row.phase.as_str(), row.stalled), ("Enforce", "Gating", false));
        assert_eq!((row.shared_pods, row.legacy_pods, row.unconvertible_pods), (2, 3, 1));
        assert_eq!(row.message, "wave 1 is watched");
        let row = policy(json!([ready, condition("Stalled", "True", "no card is free")]));
        assert_eq!((row.message.as_str(), row.stalled), ("no card is free", true));
    }

    #[test]
    fn an_event_says_when_it_was_last_and_what_it_is_about() {
        let read = |event: serde_json::Value| super::event(&serde_json::from_value(event).unwrap());
        let once = json!({"metadata": {"namespace": "default", "name": "e"}, "eventTime": "2026-01-01T00:00:00.000000Z",
            "type": "Warning", "reason": "CardClosed", "note": "card 3", "reportingController": "gpu-migrate-bridge",
            "regarding": {"kind": "Node", "name": "gpu-01"}});
        let row = read(once.clone());
        assert_eq!((row.name.as_str(), row.about.as_str(), row.warning), ("default/e", "Node gpu-01", true));
        assert_eq!(row.time.to_string(), "2026-01-01T00:00:00Z");
        let mut again = once;
        again["series"] = json!({"count": 2, "lastObservedTime": "2026-01-01T01:00:00.000000Z"});
        again["regarding"] = json!({"kind": "Pod", "namespace": "ns", "name": "p"});
        let row = read(again);
        assert_eq!((row.time.to_string().as_str(), row.about.as_str()), ("2026-01-01T01:00:00Z", "Pod ns/p"));
    }
}
