//! An observer that believes only what containers were given: their environment and the devices the kubelet handed over. It knows
//! nothing of the ledger, the shadows or the extender, and counts what must not be.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpu_migrate_model::names;
use gpu_migrate_model::units::MIB_PER_BLOCK;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use gpu_migrate_sim::cluster::kubelet::{Given, Happening};
use gpu_migrate_sim::judge::{self, Violation};

/// What was broken, and how often.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Violations {
    /// I1: a card of a legacy container that another container is on as well.
    pub exclusive: usize,
    /// I2: a card with more than 100 cores or more than its memory given out.
    pub overcommitted: usize,
    /// Containers that asked for a card and were shown none.
    pub without_card: usize,
    pub told: Vec<String>,
}

impl Violations {
    #[must_use]
    pub fn total(&self) -> usize {
        self.exclusive + self.overcommitted + self.without_card
    }

    fn note(&mut self, text: String) {
        tracing::error!("violation: {text}");
        if self.told.len() < 10 {
            self.told.push(text);
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Use {
    /// `namespace/pod`.
    pub pod: String,
    /// UID of the pod and name of the container.
    pub holder: (String, String),
    /// Whole card, or these cores and blocks of it.
    pub share: Option<(usize, usize)>,
}

/// Who is on which card, by UUID, in order of arrival.
pub type Cards = BTreeMap<String, Vec<Use>>;

#[derive(Debug, Default)]
struct State {
    cards: Cards,
    violations: Violations,
    started: usize,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Observer {
    state: Arc<Mutex<State>>,
    /// Blocks of each card, by UUID.
    blocks: Arc<BTreeMap<String, usize>>,
}

impl Observer {
    /// One for cards of this memory, in MiB by UUID. It ends with the channel.
    #[must_use]
    pub(super) fn start(
        memory: &BTreeMap<String, u64>,
        mut happenings: mpsc::UnboundedReceiver<Happening>,
    ) -> Self {
        let observer = Self::of(memory);
        let watching = observer.clone();
        tokio::spawn(async move {
            while let Some(happening) = happenings.recv().await {
                watching.see(happening);
            }
        });
        observer
    }

    fn of(memory: &BTreeMap<String, u64>) -> Self {
        let blocks = memory
            .iter()
            .map(|(uuid, mib)| (uuid.clone(), usize::try_from(mib / MIB_PER_BLOCK).unwrap_or(usize::MAX)));
        Self { state: Arc::default(), blocks: Arc::new(blocks.collect()) }
    }

    /// Who is on which card now.
    pub(super) fn cards(&self) -> Cards {
        self.state.lock().cards.clone()
    }

    /// What must not have been, so far.
    pub(super) fn violations(&self) -> Violations {
        self.state.lock().violations.clone()
    }

    /// Starts of containers with cards, so far.
    pub(super) fn started(&self) -> usize {
        self.state.lock().started
    }

    fn see(&self, happening: Happening) {
        let mut state = self.state.lock();
        match happening {
            Happening::Started(given) => self.started_on(&mut state, &given),
            Happening::Ended(uid, container) => {
                let holder = (uid, container);
                state.cards.values_mut().for_each(|uses| uses.retain(|one| one.holder != holder));
                state.cards.retain(|_, uses| !uses.is_empty());
            }
        }
    }

    fn started_on(&self, state: &mut State, given: &Given) {
        let count = |resource: &str| given.devices.get(resource).map_or(0, Vec::len);
        let dialect = names::Dialect::default();
        let legacy = count(&dialect.legacy) > 0;
        let (cores, blocks) = (count(&dialect.cores), count(&dialect.memory));
        if !legacy && cores == 0 && blocks == 0 {
            return;
        }
        state.started += 1;
        let shown = given.env.get(names::NVIDIA_VISIBLE_DEVICES).map_or("", String::as_str);
        let cards: Vec<&str> = shown.split(',').filter(|uuid| self.blocks.contains_key(*uuid)).collect();
        let pod = format!("{}/{}", given.namespace, given.pod);
        if cards.is_empty() {
            state.violations.without_card += 1;
            state.violations.note(format!("{pod} asked for a card and sees {shown:?}"));
            return;
        }
        for card in &cards {
            let share = (!legacy).then(|| (cores.div_ceil(cards.len()), blocks.div_ceil(cards.len())));
            let holder = (given.uid.clone(), given.container.clone());
            let one = Use { pod: pod.clone(), holder, share };
            state.cards.entry((*card).to_owned()).or_default().push(one);
            self.judge(state, card);
        }
    }

    /// Judges a card that has just got another container.
    fn judge(&self, state: &mut State, card: &str) {
        let Some(uses) = state.cards.get(card) else { return };
        // Containers that have ended are not among them: those of init containers neither.
        let uses: Vec<judge::Use> = uses
            .iter()
            .map(|one| judge::Use {
                pod: one.pod.clone(),
                container: one.holder.1.clone(),
                is_init: false,
                share: one.share,
            })
            .collect();
        let Err(violation) = judge::card(card, self.blocks.get(card).copied().unwrap_or(0), &uses) else {
            return;
        };
        match violation {
            Violation::Exclusive { .. } => state.violations.exclusive += 1,
            Violation::Overcommitted { .. } | Violation::FreeInUse { .. } => {
                state.violations.overcommitted += 1;
            }
        }
        state.violations.note(violation.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(pod: &str, card: &str, devices: &[(&str, usize)]) -> Happening {
        let devices =
            devices.iter().map(|(resource, count)| ((*resource).to_owned(), vec![String::new(); *count]));
        Happening::Started(Box::new(Given {
            pod: pod.into(),
            uid: pod.into(),
            container: "c".into(),
            devices: devices.collect(),
            env: BTreeMap::from([("NVIDIA_VISIBLE_DEVICES".to_owned(), card.to_owned())]),
            ..Given::default()
        }))
    }

    fn after(happenings: Vec<Happening>) -> (usize, usize, usize) {
        let observer = Observer::of(&BTreeMap::from([("A".to_owned(), 2560), ("B".to_owned(), 2560)]));
        happenings.into_iter().for_each(|happening| observer.see(happening));
        let found = observer.violations();
        (found.exclusive, found.overcommitted, found.without_card)
    }

    #[test]
    fn only_what_must_not_be_is_counted() {
        let legacy: &[_] = &[("nvidia.com/gpu", 1)];
        let share = |cores, blocks| [("tencent.com/vcuda-core", cores), ("tencent.com/vcuda-memory", blocks)];
        let ended = |pod: &str| Happening::Ended(pod.into(), "c".into());
        for (what, happenings, expected) in [
            ("side by side", vec![given("p", "A", legacy), given("q", "B", legacy)], (0, 0, 0)),
            (
                "shares that fit",
                vec![given("p", "A", &share(60, 5)), given("q", "A", &share(40, 5))],
                (0, 0, 0),
            ),
            (
                "one after the other",
                vec![given("p", "A", legacy), ended("p"), given("q", "A", &share(1, 1))],
                (0, 0, 0),
            ),
            ("both kinds", vec![given("p", "A", legacy), given("q", "A", &share(1, 1))], (1, 0, 0)),
            ("two legacy", vec![given("p", "A", legacy), given("q", "A", legacy)], (1, 0, 0)),
            (
                "too many cores",
                vec![given("p", "A", &share(60, 1)), given("q", "A", &share(41, 1))],
                (0, 1, 0),
            ),
            (
                "too much memory",
                vec![given("p", "A", &share(1, 6)), given("q", "A", &share(1, 5))],
                (0, 1, 0),
            ),
            ("over two cards", vec![given("p", "A,B", &share(200, 20))], (0, 0, 0)),
            ("no card", vec![given("p", "void", legacy)], (0, 0, 1)),
            ("no card wanted", vec![given("p", "", &[])], (0, 0, 0)),
        ] {
            assert_eq!(after(happenings), expected, "{what}");
        }
    }
}
