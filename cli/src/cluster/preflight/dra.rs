//! The check of Dynamic Resource Allocation (DRA): whether it allocates the cards that are to be migrated.

use super::{Level, Report};
use crate::cluster::Snapshot;
use gpu_migrate_model::names::{Dialect, NVIDIA_DRA_DRIVER};
use gpu_migrate_model::text::some_of;

/// Nodes that are named; the others are counted.
const NAMED: usize = 5;

/// A driver is asked by the kubelet, and the node agent is not: nothing keeps a claim off a card that a container has.
pub(super) fn drivers(snapshot: &Snapshot, report: &mut Report) {
    let Some(dra) = &snapshot.dra else {
        let why = if snapshot.settings_requested {
            "resource.k8s.io/v1 is not served, or may not be read"
        } else {
            "files do not contain DeviceClasses or ResourceSlices"
        };
        return report.skipped(why.to_owned());
    };
    let legacy = Dialect::default().legacy;
    for (class, _) in dra.extended_resources.iter().filter(|(_, resource)| **resource == legacy) {
        report.add(
            Level::NoGo,
            format!("DeviceClass {class} has extendedResourceName {legacy}"),
            "Remove the name: on a node whose cards are all taken, the scheduler has the class's driver allocate them once more",
        );
    }
    if !dra.nodes.is_empty() {
        let nodes = some_of(NAMED, &dra.nodes, ", ");
        report.add(
            Level::Warn,
            format!("{nodes}: DRA driver {NVIDIA_DRA_DRIVER} publishes the cards"),
            "Keep its kubelet plugin off nodes that are migrated: it does not know which cards containers have. What it allocated is left alone",
        );
    }
    report.good(format!("no driver publishes cards, and no DeviceClass has extendedResourceName {legacy}"));
}

#[cfg(test)]
mod tests {
    use super::super::{Finding, findings};
    use super::*;
    use crate::cluster::snapshot::Dra;

    fn found(dra: Option<Dra>) -> Vec<(Level, String)> {
        let all = findings(&Snapshot { dra, ..Snapshot::default() });
        let of_dra = all.into_iter().filter(|finding| finding.check == "DRA");
        of_dra.map(|Finding { level, found, .. }| (level, found)).collect()
    }

    #[test]
    fn a_driver_that_allocates_the_same_cards_is_found() {
        assert_eq!(found(None)[0].0, Level::Skipped);
        assert_eq!(found(Some(Dra::default()))[0].0, Level::Good);
        let extended = [("fpga", "example.com/fpga"), ("gpus", "nvidia.com/gpu")];
        let extended = extended.map(|(class, resource)| (class.to_owned(), resource.to_owned()));
        let nodes = (0..7).map(|index| format!("node-{index}"));
        let dra = Dra { extended_resources: extended.into(), nodes: nodes.collect() };
        assert_eq!(
            found(Some(dra)),
            [
                (Level::NoGo, "DeviceClass gpus has extendedResourceName nvidia.com/gpu".to_owned()),
                (
                    Level::Warn,
                    "node-0, node-1, node-2, node-3, node-4 and 2 more: DRA driver gpu.nvidia.com publishes the cards".to_owned()
                ),
            ]
        );
    }
}
