//! Which card each range of vcuda device IDs belongs to.
//!
//! Device IDs name a range (`tencent.com/vcuda-core-381` is core 81 of range 3), and the kubelet keeps them for as long as a
//! container has them: over restarts of every program, reboots, and changes of the hardware. So a range belongs to the UUID of one
//! card for good. The map is written to the state folder; where that file is lost, it is rebuilt from what the kubelet's checkpoint
//! says that containers were given ([`Evidence`]).
//!
//! - Cards are never renumbered: a card that is missing keeps its range, one that returns finds it, a new one gets a new range.
//! - A card whose memory changed gets new block numbers. While a container has devices of the old ones it is closed.
//! - Sources that contradict each other close all cards that they name (I3).
//! - A map without a range that a container has devices of is not the one by which they were given: it is rebuilt.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use gpu_migrate_model::card::Card;
use gpu_migrate_model::device_id::Layout;
use gpu_migrate_model::names::Dialect;
use gpu_migrate_model::units::CardIndex;
use serde::{Deserialize, Serialize};

/// Name of the file in the state folder.
pub const FILE_NAME: &str = "cards.json";

/// The end of each reason for which a card is closed here.
pub const LOOKED_AT_AGAIN: &str = "; this is looked at again at each start of the node agent";

/// The ranges of one node. The place in the list is the range's number, a [`CardIndex`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CardMap {
    /// One row a range, in the order of their numbers.
    pub ranges: Vec<CardRange>,
    /// It was rebuilt, and what containers were given has not confirmed all of it yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unconfirmed: bool,
}

/// One range of device IDs: 100 cores, and some blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CardRange {
    /// The card, as it was last seen.
    pub card: Card,
    /// Number of its first block.
    pub first_block: u32,
    /// How many blocks have a device ID.
    pub blocks: u32,
}

impl CardRange {
    fn block_numbers(&self) -> Range<u32> {
        self.first_block..self.first_block.saturating_add(self.blocks)
    }
}

/// A container has these devices and was given these cards.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Evidence {
    /// Who: `<pod UID>/<container>`, for messages.
    pub holder: String,
    /// Numbers of cores, as they were *given*: the substitutes where others were given than the kubelet asked for.
    pub cores: BTreeSet<u32>,
    /// Numbers of blocks of the same container.
    pub blocks: BTreeSet<u32>,
    /// Numbers of cores and of blocks that the kubelet has for it. They are in ranges of this map too.
    pub requested: (BTreeSet<u32>, BTreeSet<u32>),
    /// UUIDs of the cards that the answer named; empty where the answer does not tell.
    pub uuids: BTreeSet<String>,
}

impl Evidence {
    fn ranges(&self) -> BTreeSet<CardIndex> {
        self.cores.iter().map(|core| CardIndex(core / 100)).collect()
    }

    /// The last range that it has to do with.
    fn last_range(&self) -> Option<usize> {
        self.cores.iter().chain(&self.requested.0).map(|core| (core / 100) as usize).max()
    }
}

/// The map of this start, and what follows from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// To be written down before anything is allocated.
    pub map: CardMap,
    /// Cards that take nothing new, and why: one sentence each.
    pub closed: BTreeMap<CardIndex, String>,
    /// Cards that the inventory does not have now.
    pub missing: BTreeSet<CardIndex>,
    /// The map is more than a guess. A guess must not be written down: a later start would believe it.
    pub known: bool,
}

impl Resolved {
    /// The cards in the order of their ranges, the missing ones included.
    #[must_use]
    pub fn cards(&self) -> Vec<Card> {
        self.map.ranges.iter().map(|range| range.card.clone()).collect()
    }

    #[must_use]
    pub fn layout(&self, dialect: &Dialect) -> Layout {
        Layout::with_block_ranges(dialect, self.map.ranges.iter().map(CardRange::block_numbers).collect())
    }
}

impl CardMap {
    /// The map for the cards that were found, after an earlier map (`None`: there is none, or it cannot be read) and after what
    /// containers were given (`None`: that cannot be read). `found` are the cards of the inventory by minor number, which is the order
    /// of new ranges.
    #[must_use]
    pub fn resolve(stored: Option<Self>, evidence: Option<&[Evidence]>, found: &[Card]) -> Resolved {
        let mut closed = BTreeMap::new();
        let known = stored.is_some() || evidence.is_some();
        let rows = evidence.unwrap_or_default();
        let has_all =
            |map: &Self| rows.iter().filter_map(Evidence::last_range).all(|last| last < map.ranges.len());
        let mut map = stored.filter(has_all).unwrap_or_else(|| Self::rebuild(rows, found));
        let mut missing = BTreeSet::new();
        for (position, range) in map.ranges.iter_mut().enumerate() {
            match found.iter().find(|card| card.uuid == range.card.uuid) {
                Some(card) => range.card = card.clone(),
                None => {
                    missing.insert(CardIndex::from(position));
                }
            }
        }
        map.resize(evidence, &missing, &mut closed);
        for card in found {
            if map.position(&card.uuid).is_none() {
                map.push(card.clone());
            }
        }
        map.compare(rows, &mut closed);
        match evidence {
            Some(rows) if map.unconfirmed => map.unconfirmed = map.confirm(rows, &mut closed).is_err(),
            None if map.unconfirmed => {
                let why = format!(
                    "{FILE_NAME} was lost and the kubelet checkpoint cannot be read: it is not known who has this card"
                );
                closed = (0..map.ranges.len()).map(|card| (CardIndex::from(card), why.clone())).collect();
            }
            _ => {}
        }
        closed.values_mut().for_each(|why| why.push_str(LOOKED_AT_AGAIN));
        Resolved { map, closed, missing, known }
    }

    #[must_use]
    pub fn position(&self, uuid: &str) -> Option<CardIndex> {
        self.ranges.iter().position(|range| range.card.uuid == uuid).map(CardIndex::from)
    }

    fn end(&self) -> u32 {
        self.ranges.iter().map(|range| range.block_numbers().end).max().unwrap_or(0)
    }

    fn push(&mut self, card: Card) {
        let (first_block, blocks) = (self.end(), card.blocks().0);
        self.ranges.push(CardRange { card, first_block, blocks });
    }

    /// Without an earlier map: what containers were given says which range is which card's. The remaining cards take the ranges that
    /// no container has devices of, in the order of their minor numbers: that is how a first start numbers them.
    fn rebuild(evidence: &[Evidence], found: &[Card]) -> Self {
        let named = named_by(evidence);
        let mut rest = found.iter().filter(|card| named.values().all(|uuid| *uuid != card.uuid));
        let last = evidence.iter().filter_map(Evidence::last_range).max();
        let length = last.map_or(0, |last| last + 1).max(found.len());
        // The size of a card that is missing is not known any more: `confirm` looks whether the block numbers that containers have agree
        // with this guess.
        let memory_mib = found.first().map_or(0, |card| card.memory_mib);
        let mut map = Self { unconfirmed: true, ..Self::default() };
        for position in (0..length).map(CardIndex::from) {
            let card = match named.get(&position) {
                Some(uuid) => found.iter().find(|card| card.uuid == *uuid).cloned().unwrap_or_else(|| Card {
                    uuid: (*uuid).to_owned(),
                    memory_mib,
                    ..Card::default()
                }),
                None => match rest.next() {
                    Some(card) => card.clone(),
                    // A gap below a range that is referred to. It has no card, and never gets one.
                    None => Card { uuid: format!("unknown-{}", position.0), memory_mib, ..Card::default() },
                },
            };
            map.push(card);
        }
        map
    }

    /// A card whose memory changed needs other block numbers. Those that containers have stay with it until they are gone.
    fn resize(
        &mut self,
        evidence: Option<&[Evidence]>,
        missing: &BTreeSet<CardIndex>,
        closed: &mut BTreeMap<CardIndex, String>,
    ) {
        for position in (0..self.ranges.len()).map(CardIndex::from).filter(|card| !missing.contains(card)) {
            let range = &self.ranges[position.position()];
            let wanted = range.card.blocks().0;
            if range.blocks == wanted {
                continue;
            }
            let numbers = range.block_numbers();
            let holder = evidence.map(|rows| {
                rows.iter().find(|row| {
                    row.ranges().contains(&position) || row.blocks.iter().any(|block| numbers.contains(block))
                })
            });
            let who = match holder {
                Some(None) => None,
                Some(Some(row)) => Some(row.holder.as_str()),
                None => Some("a container that the unreadable kubelet checkpoint may name"),
            };
            match who {
                Some(who) => {
                    let why = format!(
                        "its memory changed from {} to {wanted} blocks while {who} has a share of it",
                        range.blocks
                    );
                    closed.insert(position, why);
                }
                None => {
                    let last = numbers.end == self.end();
                    let first_block =
                        if last || wanted < range.blocks { range.first_block } else { self.end() };
                    let range = &mut self.ranges[position.position()];
                    (range.first_block, range.blocks) = (first_block, wanted);
                }
            }
        }
    }

    /// Compares the cards that each container was given with those of its device IDs.
    fn compare(&self, evidence: &[Evidence], closed: &mut BTreeMap<CardIndex, String>) {
        for row in evidence.iter().filter(|row| !row.cores.is_empty()) {
            let ranges = row.ranges();
            let uuids: BTreeSet<&str> = ranges
                .iter()
                .filter_map(|card| self.ranges.get(card.position()))
                .map(|range| range.card.uuid.as_str())
                .collect();
            let given: BTreeSet<&str> = row.uuids.iter().map(String::as_str).collect();
            if !given.is_empty() && given != uuids {
                let list = |uuids: &BTreeSet<&str>| uuids.iter().copied().collect::<Vec<_>>().join(", ");
                let why = format!(
                    "{} was given {}, but its device IDs belong to {}",
                    row.holder,
                    list(&given),
                    list(&uuids)
                );
                let named = given.iter().filter_map(|uuid| self.position(uuid));
                for card in ranges.iter().copied().chain(named) {
                    closed.entry(card).or_insert_with(|| why.clone());
                }
            }
        }
    }

    /// Looks whether a rebuilt map is confirmed by what containers have, and closes what is not.
    fn confirm(
        &self,
        evidence: &[Evidence],
        closed: &mut BTreeMap<CardIndex, String>,
    ) -> Result<(), Unconfirmed> {
        let mut outcome = Ok(());
        for row in evidence.iter().filter(|row| !row.cores.is_empty()) {
            let ranges = row.ranges();
            let (cards, why) = if row.uuids.is_empty() {
                // Any of the cards may be the one that this container has.
                let all = (0..self.ranges.len()).map(CardIndex::from).collect();
                (
                    all,
                    format!(
                        "{FILE_NAME} was lost, and nothing else says which card {} was given",
                        row.holder
                    ),
                )
            } else if row.blocks.iter().all(|block| self.is_on(*block, &ranges))
                && row.requested.1.iter().all(|block| *block < self.end())
            {
                continue;
            } else {
                let why = format!(
                    "{FILE_NAME} was lost, and the block numbers of {} do not agree with the sizes of the cards",
                    row.holder
                );
                (ranges, why)
            };
            for card in cards {
                closed.entry(card).or_insert_with(|| why.clone());
            }
            outcome = Err(Unconfirmed);
        }
        outcome
    }

    fn is_on(&self, block: u32, cards: &BTreeSet<CardIndex>) -> bool {
        let mut ranges = cards.iter().filter_map(|card| self.ranges.get(card.position()));
        ranges.any(|range| range.block_numbers().contains(&block))
    }
}

/// Something that a rebuilt map says is contradicted, or said by nothing else.
struct Unconfirmed;

/// The card of each range, as far as what containers were given says it. Where two rows contradict each other the first counts here;
/// [`CardMap::compare`] closes the cards of both.
fn named_by(evidence: &[Evidence]) -> BTreeMap<CardIndex, &str> {
    let mut rows: Vec<(BTreeSet<CardIndex>, BTreeSet<&str>)> = evidence
        .iter()
        .map(|row| (row.ranges(), row.uuids.iter().map(String::as_str).collect()))
        .filter(|(_, uuids): &(_, BTreeSet<&str>)| !uuids.is_empty())
        .collect();
    // Of several cards a row does not say which range is whose. Rows of one card go first, and leave fewer to the others.
    rows.sort_by_key(|(ranges, _)| ranges.len());
    let mut named: BTreeMap<CardIndex, &str> = BTreeMap::new();
    for (mut ranges, mut uuids) in rows {
        ranges.retain(|range| !named.contains_key(range));
        uuids.retain(|uuid| named.values().all(|taken| taken != uuid));
        // More than one is left of a container that has all of these cards whole: then it does not matter which is which.
        named.extend(ranges.into_iter().zip(uuids));
    }
    named
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn card(uuid: &str, minor: u32, blocks: u32) -> Card {
        Card { uuid: uuid.into(), minor, memory_mib: u64::from(blocks) * 256, ..Card::default() }
    }

    fn row(holder: &str, cores: Range<u32>, blocks: Range<u32>, uuids: &[&str]) -> Evidence {
        Evidence {
            holder: holder.into(),
            cores: cores.collect(),
            blocks: blocks.collect(),
            uuids: uuids.iter().map(|uuid| (*uuid).to_owned()).collect(),
            requested: Default::default(),
        }
    }

    fn uuids(resolved: &Resolved) -> Vec<&str> {
        resolved.map.ranges.iter().map(|range| range.card.uuid.as_str()).collect()
    }

    #[test]
    fn a_first_start_numbers_by_minor() {
        let first = CardMap::resolve(None, Some(&[]), &[card("a", 0, 4), card("b", 1, 8)]);
        assert_eq!(uuids(&first), ["a", "b"]);
        assert_eq!(first.map.ranges[1].block_numbers(), 4..12);
        assert!(first.closed.is_empty() && first.missing.is_empty());
    }

    #[test]
    fn a_missing_card_keeps_its_range_and_a_new_one_gets_another() {
        let first = CardMap::resolve(None, Some(&[]), &[card("a", 0, 4), card("b", 1, 4), card("c", 2, 4)]);
        let without = CardMap::resolve(Some(first.map), Some(&[]), &[card("c", 0, 4), card("d", 1, 4)]);
        assert_eq!(uuids(&without), ["a", "b", "c", "d"]);
        assert_eq!(without.missing, BTreeSet::from([CardIndex(0), CardIndex(1)]));
        assert_eq!(without.map.ranges[2].card.minor, 0, "what changed of a card is taken over");
        assert_eq!(without.map.ranges[3].block_numbers(), 12..16);
        let back = CardMap::resolve(Some(without.map), Some(&[]), &[card("b", 0, 4), card("c", 1, 4)]);
        assert_eq!(back.missing, BTreeSet::from([CardIndex(0), CardIndex(3)]));
        assert!(back.closed.is_empty());
    }

    #[test]
    fn a_lost_map_is_rebuilt_from_what_containers_were_given() {
        let rows = [row("p/c", 200..250, 8..10, &["c"]), row("q/c", 0..200, 0..8, &["a", "b"])];
        // The minors changed, and b is gone.
        let rebuilt =
            CardMap::resolve(None, Some(&rows), &[card("c", 0, 4), card("a", 1, 4), card("d", 2, 4)]);
        assert_eq!(uuids(&rebuilt), ["a", "b", "c", "d"]);
        assert_eq!(rebuilt.closed, BTreeMap::new());
        assert_eq!(rebuilt.missing, BTreeSet::from([CardIndex(1)]));
    }

    #[test]
    fn without_a_map_a_container_that_nothing_tells_of_closes_all_cards() {
        let rows = [row("p/c", 100..150, 0..0, &[])];
        let rebuilt = CardMap::resolve(None, Some(&rows), &[card("a", 0, 4), card("b", 1, 4)]);
        assert_eq!(rebuilt.closed.len(), 2);
        assert!(rebuilt.closed[&CardIndex(0)].contains("which card p/c was given"), "{:?}", rebuilt.closed);
    }

    #[test]
    fn a_contradiction_closes_both_cards() {
        let first = CardMap::resolve(None, Some(&[]), &[card("a", 0, 4), card("b", 1, 4), card("c", 2, 4)]);
        let rows = [row("p/c", 0..50, 0..1, &["b"])];
        let again = CardMap::resolve(
            Some(first.map),
            Some(&rows),
            &[card("a", 0, 4), card("b", 1, 4), card("c", 2, 4)],
        );
        assert_eq!(again.closed.keys().copied().collect::<Vec<_>>(), [CardIndex(0), CardIndex(1)]);
        let why = "p/c was given b, but its device IDs belong to a; this is looked at again";
        assert!(again.closed[&CardIndex(1)].starts_with(why), "{:?}", again.closed);
    }

    #[test]
    fn a_card_of_another_size_is_closed_until_its_holders_are_gone() {
        let first = CardMap::resolve(None, Some(&[]), &[card("a", 0, 4), card("b", 1, 4)]);
        let rows = [row("p/c", 0..50, 0..1, &["a"])];
        let found = [card("a", 0, 6), card("b", 1, 4)];
        let held = CardMap::resolve(Some(first.map), Some(&rows), &found);
        assert_eq!(held.map.ranges[0].block_numbers(), 0..4);
        assert!(held.closed[&CardIndex(0)].contains("from 4 to 6 blocks while p/c"), "{:?}", held.closed);
        let free = CardMap::resolve(Some(held.map), Some(&[]), &found);
        assert_eq!(free.map.ranges[0].block_numbers(), 8..14, "other numbers than the neighbour's");
        assert!(free.closed.is_empty());
    }

    #[test]
    fn a_map_without_a_range_that_a_container_has_is_rebuilt() {
        let first = CardMap::resolve(None, Some(&[]), &[card("a", 0, 4), card("c", 1, 4)]);
        let rows = [row("p/c", 200..250, 8..10, &["c"])];
        let rebuilt = CardMap::resolve(Some(first.map), Some(&rows), &[card("a", 0, 4), card("c", 1, 4)]);
        assert_eq!(uuids(&rebuilt), ["a", "unknown-1", "c"]);
        assert!(rebuilt.closed.keys().all(|card| card.position() < 3), "{:?}", rebuilt.closed);
    }

    #[test]
    fn an_unreadable_checkpoint_frees_and_renumbers_nothing() {
        let found = [card("a", 0, 6), card("b", 1, 4)];
        let guess = CardMap::resolve(None, None, &found);
        assert_eq!((guess.closed.len(), guess.known), (2, false));
        let first = CardMap::resolve(None, Some(&[]), &[card("a", 0, 4), card("b", 1, 4)]);
        let resized = CardMap::resolve(Some(first.map), None, &found);
        assert_eq!(resized.closed.keys().copied().collect::<Vec<_>>(), [CardIndex(0)]);
        assert_eq!(resized.map.ranges[0].block_numbers(), 0..4);
    }

    /// One thing that happens between two starts of the agent.
    #[derive(Clone, Debug)]
    enum Step {
        Vanish(usize),
        Return(usize),
        New,
        Renumber(u64),
        Resize(usize, u32),
        LoseMap,
        CheckpointUnreadable,
        CheckpointUnreadableAndMapLost,
        Place { card: usize, cores: u32, blocks: u32, told: bool },
        End(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            1 => (0..8_usize).prop_map(Step::Vanish),
            1 => (0..8_usize).prop_map(Step::Return),
            1 => Just(Step::New),
            1 => any::<u64>().prop_map(Step::Renumber),
            1 => (0..8_usize, 2..6_u32).prop_map(|(card, blocks)| Step::Resize(card, blocks)),
            1 => Just(Step::LoseMap),
            1 => Just(Step::CheckpointUnreadable),
            1 => Just(Step::CheckpointUnreadableAndMapLost),
            6 => (0..8_usize, 10..60_u32, 1..3_u32, prop::bool::weighted(0.95))
                .prop_map(|(card, cores, blocks, told)| Step::Place { card, cores, blocks, told }),
            3 => (0..8_usize).prop_map(Step::End),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        /// Whatever happens to cards and to the file: on each card that is open, exactly those containers are accounted for that
        /// really have it.
        #[test]
        fn an_open_card_is_known_with_all_its_holders(steps in prop::collection::vec(step(), 0..40)) {
            let mut present: Vec<Card> = (0..4).map(|n| card(&format!("GPU-{n}"), n, 4)).collect();
            let mut away: Vec<Card> = Vec::new();
            let mut made = 4;
            // The card that each container really has, and its row.
            let mut running: Vec<(String, Evidence)> = Vec::new();
            let mut now = CardMap::resolve(None, Some(&[]), &present);
            for step in steps {
                let mut stored = now.known.then(|| now.map.clone());
                let readable = !matches!(step, Step::CheckpointUnreadable | Step::CheckpointUnreadableAndMapLost);
                match step {
                    Step::Vanish(n) if !present.is_empty() => {
                        let gone = present.remove(n % present.len());
                        away.push(gone);
                    }
                    Step::Return(n) if !away.is_empty() => {
                        let back = away.remove(n % away.len());
                        present.push(back);
                    }
                    Step::New => {
                        present.push(card(&format!("GPU-{made}"), 0, 4));
                        made += 1;
                    }
                    Step::Renumber(seed) => {
                        present.sort_by_key(|card| {
                            card.uuid.bytes().fold(seed, |hash, byte| hash.rotate_left(7) ^ (hash.wrapping_mul(31) + u64::from(byte)))
                        });
                    }
                    Step::Resize(n, blocks) if !present.is_empty() => {
                        let n = n % present.len();
                        present[n].memory_mib = u64::from(blocks) * 256;
                    }
                    Step::LoseMap | Step::CheckpointUnreadableAndMapLost => stored = None,
                    Step::End(n) if !running.is_empty() => {
                        let n = n % running.len();
                        running.remove(n);
                    }
                    Step::Place { card: n, cores, blocks, told } => {
                        let open: Vec<CardIndex> = (0..now.map.ranges.len())
                            .map(CardIndex::from)
                            .filter(|card| !now.closed.contains_key(card) && !now.missing.contains(card))
                            .collect();
                        if let Some(card) = open.get(n % open.len().max(1)) {
                            let range = &now.map.ranges[card.position()];
                            let used: BTreeSet<u32> =
                                running.iter().flat_map(|(_, row)| row.cores.iter().copied()).collect();
                            let used_blocks: BTreeSet<u32> =
                                running.iter().flat_map(|(_, row)| row.blocks.iter().copied()).collect();
                            let free: BTreeSet<u32> = (card.0 * 100..(card.0 + 1) * 100)
                                .filter(|core| !used.contains(core))
                                .take(cores as usize)
                                .collect();
                            let free_blocks: BTreeSet<u32> = range
                                .block_numbers()
                                .filter(|block| !used_blocks.contains(block))
                                .take(blocks as usize)
                                .collect();
                            if free.len() == cores as usize && free_blocks.len() == blocks as usize {
                                let uuid = range.card.uuid.clone();
                                let uuids = told.then(|| uuid.clone()).into_iter().collect();
                                let holder = format!("pod-{}", running.len());
                                running.push((uuid, Evidence { holder, cores: free, blocks: free_blocks, uuids, ..Evidence::default() }));
                            }
                        }
                    }
                    _ => {}
                }
                for (minor, card) in present.iter_mut().enumerate() {
                    card.minor = minor as u32;
                }
                let rows: Vec<Evidence> = running.iter().map(|(_, row)| row.clone()).collect();
                now = CardMap::resolve(stored, readable.then_some(&*rows), &present);
                let layout = now.layout(&Dialect::default());
                for (position, range) in now.map.ranges.iter().enumerate() {
                    let index = CardIndex::from(position);
                    prop_assert_eq!(now.map.position(&range.card.uuid), Some(index), "one range a card");
                    if now.closed.contains_key(&index) || now.missing.contains(&index) {
                        continue;
                    }
                    prop_assert!(present.iter().any(|card| card.uuid == range.card.uuid));
                    prop_assert_eq!(range.blocks, range.card.blocks().0);
                    for (uuid, row) in &running {
                        let really = *uuid == range.card.uuid;
                        prop_assert_eq!(row.ranges().contains(&index), really, "{} on {}", row.holder, range.card.uuid);
                        let here = |block: &u32| {
                            layout.card_of(gpu_migrate_model::device_id::SharedResource::Memory, *block) == Some(index)
                        };
                        prop_assert!(!really || row.blocks.iter().all(here), "blocks of {}", row.holder);
                    }
                }
            }
            // Liveness: once all containers are gone, every card that is there is open after at most two starts.
            for _ in 0..2 {
                now = CardMap::resolve(now.known.then_some(now.map), Some(&[]), &present);
            }
            prop_assert!(now.closed.is_empty(), "{:?}", now.closed);
        }
    }
}
