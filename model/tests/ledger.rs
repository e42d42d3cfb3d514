//! The ledger against an independent reference: random holds, releases, renames, findings and health changes.
//!
//! The reference keeps a flat list of who has what, in the plainest way, and judges I1 and I2 by itself. A ledger that
//! does not look who holds a card (`Ledger::broken`) must be caught by the same judge.

use std::collections::BTreeMap;

use gpu_migrate_model::card::{Card, CardState, Health};
use gpu_migrate_model::ledger::{Fault, Hold, HolderId, Ledger, Phase, Refused, Slot};
use gpu_migrate_model::units::{Blocks, CardIndex, Cores};
use proptest::prelude::*;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};

const CARDS: u32 = 3;
const BLOCKS: u32 = 10;

fn cards() -> Vec<Card> {
    let card = |minor| Card {
        uuid: format!("GPU-{minor}"),
        minor,
        memory_mib: u64::from(BLOCKS) * 256,
        ..Card::default()
    };
    (0..CARDS).map(card).collect()
}

/// What is written down: who, on which card, what.
type Flat = BTreeMap<(u32, HolderId), Hold>;

#[derive(Clone, Debug)]
enum Step {
    Hold(HolderId, u32, Hold),
    HoldAll(HolderId, Vec<u32>, Hold),
    Release(HolderId),
    ReleaseOn(HolderId, u32),
    ReleasePod(String),
    Rename(HolderId, HolderId),
    Health(u32, bool),
    Cordon(u32, bool),
}

fn holder() -> impl Strategy<Value = HolderId> {
    (0..4_u8, 0..3_u8)
        .prop_map(|(pod, container)| HolderId::new(format!("pod-{pod}"), format!("c{container}")))
}

fn hold() -> impl Strategy<Value = Hold> {
    prop_oneof![
        2 => Just(Hold::whole()),
        1 => (0..2_u8).prop_map(|part| Hold::Legacy(vec![Slot::Part(format!("part-{part}"))])),
        4 => (1..=100_u32, 1..=BLOCKS, any::<bool>()).prop_map(|(cores, blocks, init)| Hold::Share {
            cores: Cores(cores),
            blocks: Blocks(blocks),
            phase: if init { Phase::Init } else { Phase::Run },
        }),
    ]
}

/// The plainest statement of I1 and I2 over one card.
fn lawful(flat: &Flat, card: u32) -> bool {
    let here: Vec<(&HolderId, &Hold)> =
        flat.iter().filter(|((at, _), _)| *at == card).map(|((_, holder), hold)| (holder, hold)).collect();
    let shares = here.iter().filter(|(_, hold)| matches!(hold, Hold::Share { .. })).count();
    if shares != 0 && shares != here.len() {
        return false;
    }
    for (one, hold) in &here {
        for (other, theirs) in &here {
            if let (Hold::Legacy(mine), Hold::Legacy(theirs)) = (hold, theirs) {
                let whole = mine.contains(&Slot::Whole) || theirs.contains(&Slot::Whole);
                if one.pod_uid != other.pod_uid && (whole || mine == theirs) {
                    return false;
                }
            }
        }
    }
    let mut pods: BTreeMap<&str, [u32; 4]> = BTreeMap::new();
    for (holder, hold) in here {
        if let Hold::Share { cores, blocks, phase } = hold {
            let sums = pods.entry(&holder.pod_uid).or_default();
            match phase {
                Phase::Init => {
                    sums[0] = sums[0].max(cores.0);
                    sums[1] = sums[1].max(blocks.0);
                }
                Phase::Run => {
                    sums[2] += cores.0;
                    sums[3] += blocks.0;
                }
            }
        }
    }
    let cores: u32 = pods.values().map(|sums| sums[0].max(sums[2])).sum();
    let blocks: u32 = pods.values().map(|sums| sums[1].max(sums[3])).sum();
    cores <= 100 && blocks <= BLOCKS
}

struct Model;

impl ReferenceStateMachine for Model {
    type State = ();
    type Transition = Step;

    fn init_state() -> BoxedStrategy<()> {
        Just(()).boxed()
    }

    fn transitions((): &()) -> BoxedStrategy<Step> {
        prop_oneof![
            8 => (holder(), 0..CARDS, hold()).prop_map(|(holder, card, hold)| Step::Hold(holder, card, hold)),
            2 => (holder(), prop::collection::vec(0..=CARDS, 1..3), hold())
                .prop_map(|(holder, cards, hold)| Step::HoldAll(holder, cards, hold)),
            3 => holder().prop_map(Step::Release),
            1 => (holder(), 0..CARDS).prop_map(|(holder, card)| Step::ReleaseOn(holder, card)),
            1 => holder().prop_map(|holder| Step::ReleasePod(holder.pod_uid)),
            1 => (holder(), 0..100_u32).prop_map(|(from, to)| Step::Rename(from, HolderId::new(format!("late-{to}"), "c0"))),
            1 => (0..CARDS, any::<bool>()).prop_map(|(card, sick)| Step::Health(card, sick)),
            1 => (0..CARDS, any::<bool>()).prop_map(|(card, closed)| Step::Cordon(card, closed)),
        ]
        .boxed()
    }

    fn apply((): (), _: &Step) {}
}

/// The ledger beside the flat list of what it agreed to.
struct Pair {
    ledger: Ledger,
    flat: Flat,
}

impl Pair {
    fn new(ledger: Ledger) -> Self {
        Self { ledger, flat: Flat::new() }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Hold(holder, card, hold) => {
                let agreed = self.ledger.hold(&holder, CardIndex(card), hold.clone());
                self.expect(&holder, &[card], &hold, agreed);
            }
            Step::HoldAll(holder, cards, hold) => {
                let holds: Vec<_> = cards.iter().map(|card| (CardIndex(*card), hold.clone())).collect();
                let agreed = self.ledger.hold_all(&holder, &holds);
                self.expect(&holder, &cards, &hold, agreed);
            }
            Step::Release(holder) => {
                let freed = self.ledger.release(&holder);
                let had: Vec<_> = self
                    .flat
                    .keys()
                    .filter(|(_, who)| *who == holder)
                    .map(|(card, _)| CardIndex(*card))
                    .collect();
                assert_eq!(freed, had);
                self.flat.retain(|(_, who), _| *who != holder);
            }
            Step::ReleaseOn(holder, card) => {
                let was = self.flat.remove(&(card, holder.clone())).is_some();
                assert_eq!(self.ledger.release_on(&holder, CardIndex(card)), was);
            }
            Step::ReleasePod(pod) => {
                self.ledger.release_pod(&pod);
                self.flat.retain(|(_, who), _| who.pod_uid != pod);
            }
            Step::Rename(from, to) => {
                // Init and app containers of one pod overlap: apart, they may not fit. That is `record`'s business.
                let apart = self.flat.keys().any(|(_, who)| who.pod_uid == from.pod_uid && *who != from);
                if apart || self.flat.keys().any(|(_, who)| *who == to) {
                    return;
                }
                let all = std::mem::take(&mut self.flat).into_iter();
                self.flat = all
                    .map(|((card, who), hold)| ((card, if who == from { to.clone() } else { who }), hold))
                    .collect();
                self.ledger.rename(&from, &to);
            }
            Step::Health(card, sick) => {
                self.ledger
                    .set_health(CardIndex(card), if sick { Health::Unhealthy } else { Health::Healthy });
            }
            Step::Cordon(card, closed) => self.ledger.set_cordoned(CardIndex(card), closed),
        }
    }

    /// A lawful hold on an open card is agreed to, an unlawful one is refused: neither more nor less.
    fn expect(&mut self, holder: &HolderId, cards: &[u32], hold: &Hold, agreed: Result<(), Refused>) {
        let mut after = self.flat.clone();
        after.extend(cards.iter().map(|card| ((*card, holder.clone()), hold.clone())));
        match agreed {
            Ok(()) => {
                self.flat = after;
            }
            Err(Refused::Held { .. } | Refused::Full { .. }) => {
                assert!(
                    cards.iter().any(|card| !lawful(&after, *card)),
                    "refused a lawful hold: {holder} {cards:?} {hold:?}"
                );
            }
            Err(Refused::NoSuchCard { .. }) => assert!(cards.contains(&CARDS)),
            Err(Refused::Changed { card, .. }) => {
                assert!(self.flat.get(&(card.0, holder.clone())).is_some_and(|had| had != hold));
            }
            Err(Refused::Closed { state, .. }) => {
                assert!(matches!(state, CardState::Unhealthy | CardState::Cordoned | CardState::Disputed));
            }
        }
    }

    fn judge(&self) -> Result<(), String> {
        for card in 0..CARDS {
            if !lawful(&self.flat, card) {
                return Err(format!("card {card} breaks I1 or I2: {:?}", self.flat));
            }
        }
        self.ledger.check().map_err(|violations| format!("{violations:?}"))?;
        for index in self.ledger.indexes() {
            let here = self
                .flat
                .iter()
                .filter(|((card, _), _)| *card == index.0)
                .map(|((_, who), hold)| (who, hold));
            if !self.ledger.holds(index).eq(here) {
                return Err(format!(
                    "{index}: the ledger has {:?}",
                    self.ledger.holds(index).collect::<Vec<_>>()
                ));
            }
        }
        Ok(())
    }
}

struct Machine;

impl StateMachineTest for Machine {
    type SystemUnderTest = Pair;
    type Reference = Model;

    fn init_test((): &()) -> Pair {
        Pair::new(Ledger::new(cards()))
    }

    fn apply(mut pair: Pair, (): &(), step: Step) -> Pair {
        pair.step(step);
        pair
    }

    fn check_invariants(pair: &Pair, (): &()) {
        assert_eq!(pair.judge(), Ok(()));
    }
}

prop_state_machine! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn no_card_twice_and_none_over_full(sequential 1..60 => Machine);
}

#[test]
fn a_broken_ledger_is_caught() {
    let mut pair = Pair::new(Ledger::new(cards()).with_fault(Fault::Unchecked));
    pair.step(Step::Hold(HolderId::new("pod-0", "c0"), 0, Hold::whole()));
    assert_eq!(pair.judge(), Ok(()));
    pair.step(Step::Hold(HolderId::new("pod-1", "c0"), 0, Hold::share(Cores(10), Blocks(1))));
    assert!(pair.judge().unwrap_err().contains("I1"));
}

proptest! {
    /// Whatever is found is written down, and a card in breach is closed until the breach is gone.
    #[test]
    fn what_was_found_is_never_hidden(found in prop::collection::vec((holder(), 0..CARDS, hold()), 1..20)) {
        let mut ledger = Ledger::new(cards());
        let mut flat = Flat::new();
        for (holder, card, hold) in found {
            flat.insert((card, holder.clone()), hold.clone());
            let in_order = ledger.record(&holder, CardIndex(card), hold);
            prop_assert_eq!(in_order, lawful(&flat, card));
            prop_assert_eq!(ledger.state(CardIndex(card)) == CardState::Disputed, !in_order);
        }
        let stranger = HolderId::new("stranger", "c");
        for index in ledger.indexes().collect::<Vec<_>>() {
            if ledger.state(index) == CardState::Disputed {
                prop_assert!(ledger.check().is_err());
                prop_assert!(ledger.hold(&stranger, index, Hold::whole()).is_err());
                prop_assert!(ledger.hold(&stranger, index, Hold::share(Cores(1), Blocks(1))).is_err());
            }
        }
        for holder in flat.keys().map(|(_, holder)| holder) {
            ledger.release(holder);
        }
        prop_assert!(ledger.indexes().all(|index| ledger.state(index) == CardState::Free));
    }
}
