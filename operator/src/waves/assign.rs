//! Which workload moves in which wave.

use super::{Key, Means, Seen};
use gpu_migrate_model::crd::{GPUMigrationStatus, Wave};
use std::collections::{BTreeMap, BTreeSet};

/// The wave of each workload that moves, from 0. Workloads that no wave reaches are not in it.
///
/// Named workloads go where they are named. A percentage counts all workloads that can be moved, in an order that
/// depends on their names alone. A workload that already has a wave in the status keeps it, so that one that
/// appears or vanishes does not push others from wave to wave; a new one never joins a wave that is over.
#[must_use]
pub fn assign(waves: &[Wave], seen: &[Seen], status: &GPUMigrationStatus) -> BTreeMap<Key, u32> {
    let movable =
        seen.iter().filter(|one| one.means == Means::Restart).map(|one| &one.key).collect::<BTreeSet<_>>();
    let mut assigned = kept(waves, &movable, status);
    let current = status.wave.unwrap_or(0);
    let mut waiting = movable.iter().filter(|key| !assigned.contains_key(**key)).copied().collect::<Vec<_>>();
    waiting.sort_by_key(|key| (order(key), (*key).clone()));

    for (number, wave) in (0_u32..).zip(waves) {
        if let Some(names) = &wave.workloads {
            // A name that cannot be read is the policy's error, said where the policy is checked.
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
            let target = (movable.len() * percent.min(100) as usize).div_ceil(100);
            let there = assigned.values().filter(|wave| **wave <= number).count();
            let take = target.saturating_sub(there).min(waiting.len());
            assigned.extend(waiting.drain(..take).map(|key| (key.clone(), number)));
        }
    }
    assigned
}

/// What the status says, as far as the policy still has that many waves and the workload is still there.
fn kept(waves: &[Wave], movable: &BTreeSet<&Key>, status: &GPUMigrationStatus) -> BTreeMap<Key, u32> {
    let one = |workload: &gpu_migrate_model::crd::WorkloadStatus| {
        let key = Key {
            kind: workload.kind.clone(),
            namespace: workload.namespace.clone(),
            name: workload.name.clone(),
        };
        let wave = workload.wave.filter(|wave| (*wave as usize) < waves.len())?;
        movable.contains(&key).then_some((key, wave))
    };
    status.workloads.iter().filter_map(one).collect()
}

/// A stable order that has nothing to do with the alphabet, so that the first wave is a sample: FNV-1a.
fn order(key: &Key) -> u64 {
    key.to_string()
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
