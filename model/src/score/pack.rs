//! Scores that only count what is left.

use super::capacity::FreeCapacity;

/// CPU of the largest node that the published best fit knows; it is what CPU is weighed by.
const LARGEST_CPU_MILLI: f64 = 128_000.0;
/// Cores of the largest node: 8 cards.
const LARGEST_CORES: f64 = 800.0;

/// gpu-admission's: the node with the least cores left that fits (`pkg/predicate/gpu_predicate.go`, nodes sorted by
/// allocatable cores, then memory).
pub(super) fn binpack(before: &FreeCapacity) -> f64 {
    -(f64::from(before.cores()) + blocks(before))
}

/// The reverse.
pub(super) fn spread(before: &FreeCapacity) -> f64 {
    -binpack(before)
}

/// Best fit as in the FGD paper's artifact (`plugin/best_fit_score.go`): the least CPU and compute left afterwards, each as a part
/// of the largest node's, half and half.
pub(super) fn best_fit(after: &FreeCapacity) -> f64 {
    let cpu = if after.host.cpu_milli == u32::MAX {
        0.0
    } else {
        f64::from(after.host.cpu_milli) / LARGEST_CPU_MILLI
    };
    -0.5 * (cpu + f64::from(after.cores()) / LARGEST_CORES)
}

/// Blocks as a fraction of a core: memory only decides between nodes with the same cores.
fn blocks(capacity: &FreeCapacity) -> f64 {
    let blocks: f64 = capacity.cards.iter().map(|card| f64::from(card.blocks)).sum();
    blocks / (blocks + 1.0)
}
