//! Reasons of refusal, few and stable: the scheduler counts nodes by the text (FACTS 4.7).
//!
//! On a handful of nodes the numbers help ("largest free share: 40 cores"). On thousands every node has its own, and the
//! event would be a list of them; then the text leaves out what differs between nodes.

use std::collections::HashMap;

use gpu_migrate_model::place::Refusal;

use crate::wire::answer::Verdict;

/// Beyond this many different texts the numbers are left out.
const TEXTS: usize = 4;

#[derive(Debug, Default)]
pub(super) struct Reasons {
    seen: HashMap<Key, u16, ahash::RandomState>,
    refusals: Vec<Reason>,
}

#[derive(Debug)]
enum Reason {
    Refusal(Refusal),
    Text(String),
}

#[derive(Debug, PartialEq, Eq, Hash)]
enum Key {
    Refusal(u8, [u32; 6]),
    Text(String),
}

impl Reasons {
    /// The verdict that says `refusal`.
    pub(super) fn refuse(&mut self, refusal: Refusal) -> Verdict {
        let resolvable = refusal.resolvable();
        let id = self.id(key(&refusal), || Reason::Refusal(refusal));
        if resolvable { Verdict::Failed(id) } else { Verdict::Unresolvable(id) }
    }

    /// The place of a text that is the same on every node.
    pub(super) fn text(&mut self, text: &str) -> u16 {
        self.id(Key::Text(text.to_owned()), || Reason::Text(text.to_owned()))
    }

    fn id(&mut self, key: Key, reason: impl FnOnce() -> Reason) -> u16 {
        if let Some(id) = self.seen.get(&key) {
            return *id;
        }
        // 65,536 different reasons in one answer: the last place stands for all further ones.
        let id = u16::try_from(self.refusals.len()).unwrap_or(u16::MAX);
        if self.refusals.len() <= usize::from(u16::MAX) {
            self.refusals.push(reason());
        }
        self.seen.insert(key, id);
        id
    }

    pub(super) fn texts(&self) -> Vec<String> {
        let brief = self.refusals.len() > TEXTS;
        self.refusals
            .iter()
            .map(|reason| match reason {
                Reason::Text(text) => text.clone(),
                Reason::Refusal(refusal) if brief => without_numbers(refusal),
                Reason::Refusal(refusal) => refusal.to_string(),
            })
            .collect()
    }
}

/// Whether a text is one of ours or contains one: of the scheduler's own reasons none has these words.
pub fn is_our_refusal(text: &str) -> bool {
    ["gang ", "gpu-migrate", "quota of namespace", "earlier bind", "another node", " card"]
        .iter()
        .any(|words| text.contains(words))
}

fn key(refusal: &Refusal) -> Key {
    match refusal {
        Refusal::Mixed => Key::Refusal(0, [0; 6]),
        Refusal::NoCard => Key::Refusal(1, [0; 6]),
        Refusal::TooBig => Key::Refusal(2, [0; 6]),
        Refusal::FewCards { free, asked } => Key::Refusal(3, [*free, *asked, 0, 0, 0, 0]),
        Refusal::NoShare { open, total, cores, blocks, asked_cores, asked_blocks } => {
            Key::Refusal(4, [*open, *total, cores.0, blocks.0, asked_cores.0, asked_blocks.0])
        }
    }
}

fn without_numbers(refusal: &Refusal) -> String {
    match refusal {
        Refusal::FewCards { asked, .. } => format!("too few cards are free, {asked} needed"),
        Refusal::NoShare { asked_cores, asked_blocks, .. } => {
            format!("no single card has {asked_cores} and {asked_blocks} free")
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use gpu_migrate_model::units::{Blocks, Cores};

    use super::*;

    #[test]
    fn every_refusal_is_known_for_ours_and_no_reason_of_the_scheduler() {
        let (cores, blocks) = (Cores(1), Blocks(1));
        let share = |open| Refusal::NoShare {
            open,
            total: 2,
            cores,
            blocks,
            asked_cores: cores,
            asked_blocks: blocks,
        };
        let ours = [
            Refusal::Mixed,
            Refusal::NoCard,
            Refusal::TooBig,
            Refusal::FewCards { free: 0, asked: 1 },
            share(0),
        ];
        for refusal in ours {
            assert!(is_our_refusal(&refusal.to_string()), "{refusal}");
            assert!(is_our_refusal(&without_numbers(&refusal)), "{refusal}");
        }
        for theirs in [
            "0/4 nodes are available: 1 Insufficient cpu, 1 Insufficient tencent.com/vcuda-core, 1 node(s) had untolerated taint(s).",
            "0/4 nodes are available: 4 node(s) didn't match Pod's node affinity/selector. preemption: 0/4 nodes are available: 4 Preemption is not helpful for scheduling.",
            "0/2 nodes are available: 2 node(s) had volume node affinity conflict, 1 node(s) didn't satisfy existing pods anti-affinity rules.",
        ] {
            assert!(!is_our_refusal(theirs), "{theirs}");
        }
    }

    #[test]
    fn few_nodes_get_texts_with_numbers_and_many_without() {
        let mut reasons = Reasons::default();
        let verdicts: Vec<Verdict> =
            (0..3).map(|free| reasons.refuse(Refusal::FewCards { free, asked: 4 })).collect();
        assert_eq!(verdicts, [Verdict::Failed(0), Verdict::Failed(1), Verdict::Failed(2)]);
        assert_eq!(reasons.texts()[1], "1 cards are free, 4 needed");
        assert_eq!(reasons.refuse(Refusal::FewCards { free: 1, asked: 4 }), Verdict::Failed(1));

        assert_eq!(reasons.refuse(Refusal::NoCard), Verdict::Unresolvable(3));
        reasons.refuse(Refusal::FewCards { free: 3, asked: 4 });
        let texts: std::collections::BTreeSet<String> = reasons.texts().into_iter().collect();
        assert_eq!(texts.len(), 2, "{texts:?}");
        assert!(texts.contains("too few cards are free, 4 needed"));
    }
}
