//! Whether what containers hold breaks an invariant. Pure.

use std::{collections::BTreeMap, fmt};

/// What a container is entitled to, by its pod's spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Nothing: it asked for no card.
    None,
    /// Whole cards through `nvidia.com/gpu`, or a ResourceClaim.
    Legacy { cards: u64 },
    /// A share of one card, or whole cards, through the vcuda resources.
    Shared {
        /// Hundredths of a card, over all cards.
        cores: u64,
        /// Memory blocks, over all cards.
        blocks: u64,
    },
}

/// A container's name and what it is entitled to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entitlement {
    /// `namespace/pod/container`.
    pub container: String,
    /// By its pod's spec.
    pub kind: Kind,
}

/// A claim and the cards that the container is really shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    /// The container and what it is entitled to.
    pub entitlement: Entitlement,
    pub cards: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Violation {
    /// I1: a legacy container shares its card.
    NotExclusive { card: String, holders: Vec<String> },
    /// I2: the shares of a card exceed it.
    Overcommitted {
        card: String,
        /// Sum of cores, of 100.
        cores: u64,
        blocks: u64,
        of_blocks: u64,
        holders: Vec<String>,
    },
    /// A container sees more, fewer or other cards than it is entitled to.
    WrongCards {
        container: String,
        /// How many cards it is entitled to.
        entitled: u64,
        sees: Vec<String>,
    },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotExclusive { card, holders } => {
                write!(f, "I1: {card} is held by {}", holders.join(" and "))
            }
            Self::Overcommitted { card, cores, blocks, of_blocks, holders } => {
                write!(
                    f,
                    "I2: {card} has {cores} of 100 cores and {blocks} of {of_blocks} blocks: {}",
                    holders.join(", ")
                )
            }
            Self::WrongCards { container, entitled, sees } => {
                write!(f, "{container} is entitled to {entitled} card(s) and sees {sees:?}")
            }
        }
    }
}

/// Checks I1 and I2 on all cards of one node, each with `blocks_per_card` blocks.
///
/// A pod's containers may follow one another on the same card (init containers do); that is no violation as long as they do
/// not run at the same moment, and only those that run are in `holdings`.
pub fn check_invariants(holdings: &[Holding], blocks_per_card: u64) -> Vec<Violation> {
    let mut cards: BTreeMap<&str, Vec<&Holding>> = BTreeMap::new();
    let mut violations = Vec::new();
    for holding in holdings {
        let entitled = cards_of(holding.entitlement.kind);
        if holding.cards.len() as u64 != entitled || holding.cards.iter().any(|card| card == "all") {
            violations.push(Violation::WrongCards {
                container: holding.entitlement.container.clone(),
                entitled,
                sees: holding.cards.clone(),
            });
        }
        for card in &holding.cards {
            cards.entry(card).or_default().push(holding);
        }
    }
    for (card, holders) in cards {
        violations.extend(check_card(card, &holders, blocks_per_card));
    }
    violations
}

fn check_card(card: &str, holders: &[&Holding], blocks_per_card: u64) -> Option<Violation> {
    let names = || {
        let mut names: Vec<String> = holders.iter().map(|h| h.entitlement.container.clone()).collect();
        names.sort();
        names
    };
    let legacy = holders.iter().any(|h| matches!(h.entitlement.kind, Kind::Legacy { .. }));
    if legacy && holders.len() > 1 {
        return Some(Violation::NotExclusive { card: card.to_owned(), holders: names() });
    }
    let (mut cores, mut blocks) = (0, 0);
    for holder in holders {
        if let Kind::Shared { cores: c, blocks: b } = holder.entitlement.kind {
            // More than one card: whole ones, with the memory spread evenly.
            let on = cards_of(holder.entitlement.kind);
            cores += c / on;
            blocks += b.div_ceil(on);
        }
    }
    (cores > 100 || blocks > blocks_per_card).then(|| Violation::Overcommitted {
        card: card.to_owned(),
        cores,
        blocks,
        of_blocks: blocks_per_card,
        holders: names(),
    })
}

/// How many cards a container of this kind gets.
fn cards_of(kind: Kind) -> u64 {
    match kind {
        Kind::None => 0,
        Kind::Legacy { cards } => cards,
        Kind::Shared { cores, .. } => cores.div_ceil(100).max(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEGACY: Kind = Kind::Legacy { cards: 1 };

    fn holding(container: &str, kind: Kind, cards: &[&str]) -> Holding {
        let entitlement = Entitlement { container: container.into(), kind };
        Holding { entitlement, cards: cards.iter().map(|&c| c.into()).collect() }
    }

    fn share(cores: u64, blocks: u64) -> Kind {
        Kind::Shared { cores, blocks }
    }

    #[test]
    fn allowed_holdings_are_no_violation() {
        let fine = [
            holding("l0", LEGACY, &["a"]),
            holding("l1", Kind::Legacy { cards: 2 }, &["b", "c"]),
            holding("s0", share(60, 80), &["d"]),
            holding("s1", share(40, 80), &["d"]),
            holding("s2", share(200, 320), &["e", "f"]),
            holding("cpu", Kind::None, &[]),
        ];
        assert_eq!(check_invariants(&fine, 160), []);
    }

    #[test]
    fn a_card_held_by_both_kinds_is_reported() {
        let both = [holding("l", LEGACY, &["a"]), holding("s", share(1, 1), &["a"])];
        assert_eq!(
            check_invariants(&both, 160),
            [Violation::NotExclusive { card: "a".into(), holders: vec!["l".into(), "s".into()] }]
        );
    }

    #[test]
    fn a_card_of_two_legacy_containers_is_reported() {
        let both = [holding("l0", LEGACY, &["a"]), holding("l1", Kind::Legacy { cards: 2 }, &["a", "b"])];
        assert!(
            matches!(&check_invariants(&both, 160)[..], [Violation::NotExclusive { card, .. }] if card == "a")
        );
    }

    #[test]
    fn overcommitted_cores_and_blocks_are_reported() {
        let cores = [holding("s0", share(60, 1), &["a"]), holding("s1", share(41, 1), &["a"])];
        assert!(matches!(&check_invariants(&cores, 160)[..], [Violation::Overcommitted { cores: 101, .. }]));
        let blocks = [holding("s0", share(1, 160), &["a"]), holding("s1", share(1, 1), &["a"])];
        assert!(matches!(
            &check_invariants(&blocks, 160)[..],
            [Violation::Overcommitted { blocks: 161, .. }]
        ));
    }

    #[test]
    fn wrong_cards_are_reported() {
        let cases = [
            holding("none", LEGACY, &[]),
            holding("all", LEGACY, &["all"]),
            holding("two", share(50, 1), &["a", "b"]),
            holding("uninvited", Kind::None, &["a"]),
        ];
        for case in cases {
            let found = check_invariants(std::slice::from_ref(&case), 160);
            assert!(
                matches!(&found[..], [Violation::WrongCards { container, .. }] if *container == case.entitlement.container),
                "{found:?}"
            );
        }
    }
}
