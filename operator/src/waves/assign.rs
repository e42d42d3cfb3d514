//! Which workload moves in which wave.

use super::{Key, Management, ObservedWorkload};
use gpu_migrate_model::crd::{GPUMigrationStatus, PercentOf, Rollout, Wave};
use gpu_migrate_model::hash::fnv1a;
use std::collections::{BTreeMap, BTreeSet};

/// The wave of each workload that moves, from 1. Workloads that no wave reaches are not in it.
///
/// A named workload goes to the wave that names it. A percentage counts all workloads that can be converted, or their cards, in an
/// order that depends on their names alone. A workload of a wave that is over or in progress keeps it, whatever is created or deleted; a new
/// one never joins a wave that is over.
#[must_use]
pub fn assign(
    rollout: &Rollout,
    seen: &[ObservedWorkload],
    status: &GPUMigrationStatus,
) -> BTreeMap<Key, u32> {
    let waves = &rollout.waves;
    let weight = |one: &ObservedWorkload| match rollout.percent_of {
        PercentOf::Workloads => 1,
        PercentOf::Cards => u64::from(one.cards),
    };
    let weights = seen
        .iter()
        .filter(|one| one.management == Management::Restart)
        .map(|one| (&one.key, weight(one)))
        .collect::<BTreeMap<_, _>>();
    let all = weights.values().sum::<u64>();
    let movable = weights.keys().copied().collect::<BTreeSet<_>>();
    let current = status.wave.unwrap_or(1);
    let mut assigned = still_assigned(waves, &movable, status, current);
    let mut waiting = movable.iter().filter(|key| !assigned.contains_key(**key)).copied().collect::<Vec<_>>();
    // What is labelled was begun by an operator that could not write its status: it is of the current wave, whatever came since.
    let labelled = seen.iter().filter(|one| one.labelled).map(|one| &one.key).collect::<BTreeSet<_>>();
    waiting.sort_by_key(|key| (!labelled.contains(key), order(key), (*key).clone()));

    for (number, wave) in (1_u32..).zip(waves) {
        if let Some(names) = &wave.workloads {
            // A name that cannot be parsed is reported where the policy is validated.
            let named = names.iter().filter_map(|name| name.parse::<Key>().ok()).collect::<BTreeSet<_>>();
            waiting.retain(|key| {
                let here = named.contains(*key);
                if here {
                    assigned.insert((*key).clone(), number);
                }
                !here
            });
        }
        if let Some(percent) = wave.percent.filter(|_| number >= current) {
            let target = (all * u64::from(percent.min(100))).div_ceil(100);
            let reached = assigned.iter().filter(|(_, wave)| **wave <= number);
            let mut there = reached.filter_map(|(key, _)| weights.get(key)).sum::<u64>();
            let more = |key: &&Key| {
                // What weighs nothing (replicas 0) goes with the last percentage.
                let take = there < target || percent >= 100;
                there += weights.get(key).copied().unwrap_or(0);
                take
            };
            let taken = waiting.iter().copied().take_while(more).collect::<Vec<_>>();
            waiting.drain(..taken.len());
            assigned.extend(taken.into_iter().map(|key| (key.clone(), number)));
        }
    }
    assigned
}

/// Assignments of the status up to the current wave whose wave and workload still exist.
fn still_assigned(
    waves: &[Wave],
    movable: &BTreeSet<&Key>,
    status: &GPUMigrationStatus,
    current: u32,
) -> BTreeMap<Key, u32> {
    let one = |workload: &gpu_migrate_model::crd::WorkloadStatus| {
        let key = Key {
            kind: workload.kind.clone(),
            namespace: workload.namespace.clone(),
            name: workload.name.clone(),
        };
        let wave =
            workload.wave.filter(|wave| (1..=waves.len()).contains(&(*wave as usize)) && *wave <= current)?;
        movable.contains(&key).then_some((key, wave))
    };
    status.workloads.iter().filter_map(one).collect()
}

/// A stable order unrelated to the alphabet, so that the first wave is a sample.
fn order(key: &Key) -> u64 {
    fnv1a(key.to_string().bytes())
}
