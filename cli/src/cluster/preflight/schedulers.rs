//! The check of the schedulers' configuration, where it lies in a ConfigMap or is given as a file.

use super::{Level, Report};
use crate::cluster::Snapshot;
use crate::style::counted;
use gpu_migrate_model::names::Dialect;
use serde_json::Value;

/// Whether this extender decides about our resources.
fn is_gpu_migrate(extender: &Value) -> bool {
    let dialect = Dialect::default();
    let ours = [dialect.cores, dialect.memory];
    let managed = extender["managedResources"].as_array().into_iter().flatten();
    managed.filter_map(|resource| resource["name"].as_str()).any(|name| ours.iter().any(|our| our == name))
}

/// With `ignorable: true` a failed bind falls back to the default binder, and the pod is bound without a card.
pub(super) fn extenders(snapshot: &Snapshot, report: &mut Report) {
    for (place, config) in &snapshot.schedulers {
        let extenders = config["extenders"].as_array().into_iter().flatten();
        for extender in extenders.filter(|extender| is_gpu_migrate(extender) && extender["ignorable"] == true)
        {
            let url = extender["urlPrefix"].as_str().unwrap_or_default();
            // Of a token in it nothing is to be seen.
            let host = url.rsplit('@').next().unwrap_or_default();
            report.add(
                Level::NoGo,
                format!("{place}: the extender {host} is ignorable"),
                "Set ignorable: false: otherwise pods are bound without a card whenever the extender's bind fails",
            );
        }
    }
    let seen = snapshot.schedulers.len();
    if seen == 0 {
        return report
            .skipped("no scheduler's configuration is in a ConfigMap; pass its file with --from".to_owned());
    }
    report.good(format!("no extender is ignorable in {}", counted(seen, "configuration")));
}
