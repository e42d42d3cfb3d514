//! Who comes, and when: the pods of the trace in a random order, then more of them drawn at random, until they ask for
//! a given part of the cluster's cards (`SortClusterPods` and `tuneUpPods` of the paper's simulator).

use gpu_migrate_model::units::Cores;
use rand::SeedableRng;
use rand::rngs::Xoshiro256PlusPlus;
use rand::seq::{IndexedRandom, SliceRandom};

use super::read::TracePod;

/// The generator of a seed. Its algorithm is named and does not change with versions of the library.
#[must_use]
pub fn generator(seed: u64) -> Xoshiro256PlusPlus {
    Xoshiro256PlusPlus::seed_from_u64(seed)
}

/// Indexes of pods in the order in which they arrive. `ratio` is the part of `capacity` that they ask for together; a trace that asks
/// for more by itself is cut short.
#[must_use]
pub fn arrivals(
    pods: &[TracePod],
    capacity: Cores,
    ratio: f64,
    chance: &mut Xoshiro256PlusPlus,
) -> Vec<usize> {
    let limit = f64::from(capacity.0) * ratio;
    let mut asked = 0_u64;
    // The paper's rule, to the letter: the draw ends with the pod that goes beyond the limit by its share of *one* card.
    #[allow(clippy::cast_precision_loss)] // far below 2^52 cores
    let mut fits = |pod: &TracePod| {
        let beyond = asked as f64 + f64::from(pod.cores.0.min(Cores::CARD.0)) > limit;
        if !beyond {
            asked += u64::from(pod.cores.0);
        }
        !beyond
    };
    let all: Vec<usize> = (0..pods.len()).collect();
    let mut order = all.clone();
    order.shuffle(chance);
    let end = order.iter().position(|pod| !fits(&pods[*pod]));
    if let Some(end) = end {
        order.truncate(end);
        return order;
    }
    while let Some(pod) = all.choose(chance).filter(|pod| fits(&pods[**pod])) {
        order.push(*pod);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpu_migrate_model::score::HostResources;

    fn pods(cores: &[u32]) -> Vec<TracePod> {
        let pod = |(index, cores): (usize, &u32)| TracePod {
            name: format!("pod-{index}"),
            host: HostResources::NONE,
            cores: Cores(*cores),
            models: Vec::new(),
            rounded: false,
        };
        cores.iter().enumerate().map(pod).collect()
    }

    fn asked(pods: &[TracePod], order: &[usize]) -> u32 {
        order.iter().map(|pod| pods[*pod].cores.0).sum()
    }

    #[test]
    fn every_pod_comes_once_and_then_more_up_to_the_limit() {
        let pods = pods(&[10, 20, 30, 0, 40]);
        let order = arrivals(&pods, Cores(1_000), 1.3, &mut generator(42));
        let mut first: Vec<usize> = order[..5].to_vec();
        first.sort_unstable();
        assert_eq!(first, [0, 1, 2, 3, 4]);
        let asked = asked(&pods, &order);
        assert!((1_260..=1_300).contains(&asked), "{asked}");
    }

    #[test]
    fn a_seed_repeats_and_another_differs() {
        let pods = pods(&(0..200).collect::<Vec<_>>());
        let order = |seed| arrivals(&pods, Cores(30_000), 1.0, &mut generator(seed));
        assert_eq!(order(1), order(1));
        assert_ne!(order(1), order(2));
    }

    #[test]
    fn a_trace_that_asks_for_more_is_cut() {
        let pods = pods(&[50; 100]);
        let order = arrivals(&pods, Cores(1_000), 1.0, &mut generator(1));
        assert_eq!(asked(&pods, &order), 1_000);
    }
}
