//! Checks of container runtime, kubelet configuration and feature gates.

use super::{Level, Report};
use crate::cluster::Snapshot;
use crate::cluster::snapshot::has_cards;
use crate::style::counted;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt as _;
use serde_json::Value;
use std::collections::BTreeSet;

/// Lowest containerd that reads CDI devices from the kubelet's answer (its release notes, 1.7).
const CONTAINERD_WITH_CDI: (u32, u32) = (1, 7);
/// The same for CRI-O.
const CRIO_WITH_CDI: (u32, u32) = (1, 26);

/// `containerd://1.7.24` → name and version.
fn runtime_of(node: &Node) -> Option<(String, String)> {
    let info = node.status.as_ref()?.node_info.as_ref()?;
    let (name, version) = info.container_runtime_version.split_once("://")?;
    Some((name.to_owned(), version.to_owned()))
}

fn major_minor(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.trim_start_matches('v').split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Container runtime and its handlers, as the node's status has them.
pub(super) fn runtime(snapshot: &Snapshot, report: &mut Report) {
    let mut seen = BTreeSet::new();
    for node in snapshot.nodes.iter().filter(|node| has_cards(node)) {
        let name = node.name_any();
        if let Some((runtime, version)) = runtime_of(node) {
            seen.insert(format!("{runtime} {version}"));
            let lowest = match runtime.as_str() {
                "containerd" => Some(CONTAINERD_WITH_CDI),
                "cri-o" => Some(CRIO_WITH_CDI),
                _ => None,
            };
            match lowest {
                None => report.add(
                    Level::Warn,
                    format!("node {name}: container runtime {runtime} {version}"),
                    "only containerd and CRI-O are tested",
                ),
                Some(lowest) if major_minor(&version).is_some_and(|found| found < lowest) => report.add(
                    Level::Warn,
                    format!("node {name}: {runtime} {version} does not support CDI devices"),
                    "Use the device list strategies envvar or volume-mounts there, for NVIDIA's plugin and for the node agent",
                ),
                Some(_) => {}
            }
        }
        let handlers = node.status.iter().flat_map(|status| status.runtime_handlers.iter().flatten());
        let handlers = handlers.filter_map(|handler| handler.name.as_deref()).collect::<Vec<_>>();
        if !handlers.is_empty() && !handlers.contains(&"nvidia") {
            let found = format!(
                "node {name}: the runtime has no handler \"nvidia\" ({})",
                handlers.join(", ").trim_matches([',', ' '])
            );
            report.add(
                Level::Warn,
                found,
                "Where NVIDIA's runtime is the default, set bridge.runtimeClassName to \"\"; else install the container toolkit",
            );
        }
    }
    if seen.is_empty() {
        return report.skipped("no node with cards reports its runtime".to_owned());
    }
    report.good(seen.into_iter().collect::<Vec<_>>().join(", "));
}

fn text<'a>(configuration: &'a Value, pointer: &str) -> Option<&'a str> {
    configuration.pointer(pointer).and_then(Value::as_str)
}

/// Kubelet settings that concern devices.
pub(super) fn kubelets(snapshot: &Snapshot, report: &mut Report) {
    for (node, configuration) in &snapshot.kubelets {
        let policy = text(configuration, "/topologyManagerPolicy").unwrap_or("none");
        if ["restricted", "single-numa-node"].contains(&policy) {
            report.add(
                Level::Warn,
                format!("node {node}: topologyManagerPolicy {policy}"),
                "The kubelet may refuse a pod whose card the extender chose: leave --numa-hints off, or use best-effort",
            );
        }
        for (gate, why) in [
            ("DevicePluginCDIDevices", "Turn it on, or use no CDI strategy"),
            (
                "KubeletPodResources",
                "Turn it on: the node agent reads from it which container got which device",
            ),
        ] {
            let set = configuration.pointer(&format!("/featureGates/{gate}")).and_then(Value::as_bool);
            if set == Some(false) {
                let level = if gate == "KubeletPodResources" { Level::NoGo } else { Level::Warn };
                report.add(level, format!("node {node}: feature gate {gate} is off"), why);
            }
        }
    }
    if !snapshot.settings_requested {
        return report.skipped("files do not contain the kubelets' configuration".to_owned());
    }
    if snapshot.kubelets.is_empty() && snapshot.nodes.iter().any(has_cards) {
        return report.add(
            Level::Warn,
            "the kubelets' configuration could not be read".to_owned(),
            "It needs the right to get nodes/proxy; otherwise check topologyManagerPolicy and featureGates yourself",
        );
    }
    report.good(format!("{} checked", counted(snapshot.kubelets.len(), "kubelet")));
}

/// Feature gates of the API server, from its metrics.
pub(super) fn gates(snapshot: &Snapshot, report: &mut Report) {
    for gate in ["ValidatingAdmissionPolicy", "AdmissionWebhookMatchConditions"] {
        if snapshot.gates.get(gate) == Some(&false) {
            let remedy = "Turn it on: without it the backstop, or the webhook's conditions, do not work";
            report.add(Level::NoGo, format!("API server: feature gate {gate} is off"), remedy);
        }
    }
    if snapshot.gates.is_empty() {
        let why = if snapshot.settings_requested {
            "reading /metrics needs a right of its own"
        } else {
            "files do not contain them"
        };
        return report.skipped(format!("the API server's feature gates: {why}"));
    }
    report.good(format!("{} of the API server's feature gates checked", snapshot.gates.len()));
}

#[cfg(test)]
mod tests {
    use super::super::findings;
    use super::*;
    use serde_json::json;

    fn node(runtime: &str, handlers: &[&str]) -> Node {
        let handlers = handlers.iter().map(|name| json!({"name": name})).collect::<Vec<_>>();
        serde_json::from_value(json!({"metadata": {"name": "n", "labels": {"gpu-migrate.io/plugin": "Bridged"}},
            "status": {"runtimeHandlers": handlers, "nodeInfo": {"architecture": "", "bootID": "", "containerRuntimeVersion": runtime,
                "kernelVersion": "", "kubeProxyVersion": "", "kubeletVersion": "v1.33.4", "machineID": "", "operatingSystem": "", "osImage": "", "systemUUID": ""}}}))
        .unwrap()
    }

    fn found(snapshot: &Snapshot, check: &str) -> Vec<(Level, String)> {
        let all = findings(snapshot).into_iter().filter(|finding| finding.check == check);
        all.map(|finding| (finding.level, finding.found)).collect()
    }

    #[test]
    fn runtimes_are_known_by_version_and_handler() {
        let of = |runtime, handlers: &[&str]| {
            found(&Snapshot { nodes: vec![node(runtime, handlers)], ..Snapshot::default() }, "runtime")
        };
        assert_eq!(
            of("containerd://1.7.24", &["", "runc", "nvidia"]),
            [(Level::Good, "containerd 1.7.24".into())]
        );
        assert_eq!(
            of("containerd://2.0.1", &[]),
            [(Level::Good, "containerd 2.0.1".into())],
            "an old kubelet reports no handlers"
        );
        assert!(of("containerd://1.6.20", &[])[0].1.contains("does not support CDI devices"));
        assert!(of("docker://24.0.7", &[])[0].1.contains("container runtime docker 24.0.7"));
        assert!(of("cri-o://1.30.0", &["runc"])[0].1.contains("no handler \"nvidia\" (runc)"));
    }

    #[test]
    fn kubelet_settings_and_gates_that_prevent_a_migration_are_found() {
        let mut snapshot = Snapshot {
            nodes: vec![node("containerd://2.0.1", &[])],
            settings_requested: true,
            ..Snapshot::default()
        };
        assert_eq!(found(&snapshot, "kubelets")[0].0, Level::Warn, "unreadable is reported");
        snapshot.kubelets.insert("n".into(), json!({"topologyManagerPolicy": "none", "featureGates": {}}));
        assert_eq!(found(&snapshot, "kubelets"), [(Level::Good, "1 kubelet checked".into())]);
        snapshot.kubelets.insert(
            "n".into(),
            json!({"topologyManagerPolicy": "single-numa-node",
            "featureGates": {"KubeletPodResources": false}}),
        );
        let levels = found(&snapshot, "kubelets");
        assert_eq!(levels.iter().map(|(level, _)| *level).collect::<Vec<_>>(), [Level::Warn, Level::NoGo]);
        snapshot.gates.insert("ValidatingAdmissionPolicy".into(), false);
        assert_eq!(
            found(&snapshot, "feature gates").iter().map(|(level, _)| *level).collect::<Vec<_>>(),
            [Level::NoGo]
        );
    }
}
