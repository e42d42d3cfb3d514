//! The dump of a large cluster: read in the memory of its workloads, and simulated.

#![allow(clippy::unwrap_used)] // a test may fail

use std::collections::BTreeSet;

use gpu_migrate_model::names::Dialect;
use gpu_migrate_model::score::ScoringStrategy;
use gpu_migrate_model::units::Cores;
use gpu_migrate_replay::snapshot::migrate::migrate;
use gpu_migrate_replay::snapshot::plan::Plan;
use gpu_migrate_replay::snapshot::read::Snapshot;

#[allow(dead_code)] // its `main` writes to stdout
#[path = "../examples/dump.rs"]
mod made;

/// 400 pods of 16 workloads want 325 cards of 320: each workload is kept once, and all that run move into half of their cards.
#[test]
fn a_made_cluster_is_kept_by_its_workloads_and_simulated() {
    let mut dump = Vec::new();
    made::write(40, 400, &mut dump).unwrap();
    let snapshot = Snapshot::read(dump.as_slice(), &Dialect::default()).unwrap();
    let templates = snapshot.pods.iter().map(|pod| pod.template.number).collect::<BTreeSet<_>>();
    assert_eq!((snapshot.nodes.len(), snapshot.pods.len(), templates.len()), (40, 400, 16));
    let plan = Plan::of_ratio(Cores(50), None, &snapshot).unwrap();
    let gain = migrate(&snapshot, &plan, ScoringStrategy::Lookahead).unwrap();
    let (pods, moved) = gain.workloads.iter().fold((0, 0), |sum, one| (sum.0 + one.pods, sum.1 + one.moved));
    assert_eq!(pods, moved, "{gain:?}");
    assert!(gain.after.held < gain.before.held, "{gain:?}");
    assert_eq!(gain.waiting.0, gain.waiting.1, "{gain:?}");
}
