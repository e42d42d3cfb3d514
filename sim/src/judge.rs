//! The invariants I1, I2 and I3, judged from what containers were really given. It knows no ledger but what it is told of one.

use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Use {
    pub pod: String,
    pub container: String,
    /// An init container, whose devices the containers after it get again. Not a sidecar.
    pub is_init: bool,
    /// The whole card, or these cores and blocks of it.
    pub share: Option<(usize, usize)>,
}

/// An invariant that does not hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A card is held by a legacy container and by another container.
    #[error("I1: card {card} is used by legacy {legacy:?} and shared {shared:?}")]
    Exclusive {
        card: String,
        /// Pods that have it whole.
        legacy: BTreeSet<String>,
        /// Pods that have a share.
        shared: BTreeSet<String>,
    },
    /// Shares add up to more than the card.
    #[error(
        "I2: card {card} has {cores} of 100 cores and {blocks} of {capacity} blocks in use by {shared:?}"
    )]
    Overcommitted {
        card: String,
        cores: usize,
        blocks: usize,
        capacity: usize,
        /// Pods that have a share.
        shared: BTreeSet<String>,
    },
    /// A ledger calls a card free that is in use.
    #[error("I3: card {card} is free in the ledger but used by {pods:?}")]
    FreeInUse { card: String, pods: BTreeSet<String> },
}

/// Judges one card: I1 and I2 of the containers on it.
///
/// # Errors
/// The first [`Violation`].
pub fn card(card: &str, capacity: usize, uses: &[Use]) -> Result<(), Violation> {
    let pods = |legacy: bool| -> BTreeSet<String> {
        uses.iter().filter(|one| one.share.is_none() == legacy).map(|one| one.pod.clone()).collect()
    };
    let (legacy, shared) = (pods(true), pods(false));
    // Init containers run one after the other, before the others of their pod.
    let at_once = uses.iter().filter(|one| one.share.is_none() && !one.is_init).count();
    if legacy.len() > 1 || at_once > 1 || (!legacy.is_empty() && !shared.is_empty()) {
        return Err(Violation::Exclusive { card: card.to_owned(), legacy, shared });
    }
    let mut by_pod: BTreeMap<&str, [(usize, usize); 2]> = BTreeMap::new();
    for one in uses {
        let Some((cores, blocks)) = one.share else { continue };
        let [init, run] = by_pod.entry(&one.pod).or_default();
        if one.is_init {
            *init = (init.0.max(cores), init.1.max(blocks));
        } else {
            *run = (run.0 + cores, run.1 + blocks);
        }
    }
    let sum = |sum: (usize, usize), [init, run]: &[(usize, usize); 2]| {
        (sum.0 + init.0.max(run.0), sum.1 + init.1.max(run.1))
    };
    let (cores, blocks) = by_pod.values().fold((0, 0), sum);
    if cores > 100 || blocks > capacity {
        return Err(Violation::Overcommitted { card: card.to_owned(), cores, blocks, capacity, shared });
    }
    Ok(())
}

/// Judges I3 of a card that a ledger calls free.
///
/// # Errors
/// [`Violation::FreeInUse`].
pub fn free(card: &str, uses: &[Use]) -> Result<(), Violation> {
    let pods: BTreeSet<String> = uses.iter().map(|one| one.pod.clone()).collect();
    if pods.is_empty() { Ok(()) } else { Err(Violation::FreeInUse { card: card.to_owned(), pods }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(pod: &str, is_init: bool, share: Option<(usize, usize)>) -> Use {
        Use { pod: pod.into(), container: "c".into(), is_init, share }
    }

    #[test]
    fn only_what_must_not_be_is_reported() {
        for (what, uses, expected) in [
            ("shares that fit", vec![one("p", false, Some((60, 5))), one("q", false, Some((40, 5)))], ""),
            ("a card between containers of a pod", vec![one("p", true, None), one("p", false, None)], ""),
            ("init before app", vec![one("p", true, Some((80, 1))), one("p", false, Some((90, 1)))], ""),
            ("both kinds", vec![one("p", false, None), one("q", false, Some((1, 1)))], "I1"),
            ("two legacy pods", vec![one("p", false, None), one("q", false, None)], "I1"),
            ("two legacy containers at once", vec![one("p", false, None), one("p", false, None)], "I1"),
            ("cores", vec![one("p", false, Some((60, 1))), one("q", false, Some((41, 1)))], "I2"),
            ("memory", vec![one("p", false, Some((1, 6))), one("q", false, Some((1, 5)))], "I2"),
            (
                "containers of a pod",
                vec![one("p", false, Some((60, 1))), one("p", false, Some((41, 1)))],
                "I2",
            ),
        ] {
            let found =
                card("A", 10, &uses).map_or_else(|violation| violation.to_string(), |()| String::new());
            assert_eq!(found.get(..2).unwrap_or_default(), expected, "{what}: {found}");
        }
        assert!(free("A", &[]).is_ok());
        assert!(free("A", &[one("p", false, None)]).unwrap_err().to_string().starts_with("I3"));
    }
}
