//! preempt: the scheduler's victims, checked and completed card by card.
//!
//! The scheduler's dry run knows sums of resources and does not ask our filter (FACTS 4.8): it may propose victims
//! whose going frees no card that this pod can use. Its set is as small as its own rules allow, so none of it is ever spared: who
//! is not needed for a card is needed for CPU, memory or a port. Where the set frees no card, further pods of lower priority
//! complete it; where even all of them would not, the node is dropped.
//!
//! **What an extender cannot do.** Where the node's sums suffice and no single card does, the dry run finds nobody to evict and
//! this verb is not called (`default_preemption.go`: no victims, no candidate). The pod waits until a card is free.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::sync::Arc;

use gpu_migrate_model::units::CardIndex;

use super::{Engine, Reply};
use crate::decide::fits_without;
use crate::metrics::Outcome;
use crate::state::Cluster;
use crate::state::node::Placed;
use crate::state::pod::PodFacts;
use crate::state::quota::{Asked, QuotaCheck, Used};
use crate::wire::answer::{self, Kept};
use crate::wire::{NodeVictims, PreemptArgs};

impl Engine {
    /// Which victims on which nodes free enough for the pod.
    pub fn preempt(&self, body: &[u8]) -> Reply {
        let nothing = |outcome| Reply { body: answer::preemption(&[]), outcome };
        let (None, Ok(args)) = (self.not_ready(), PreemptArgs::parse(body)) else {
            // No node is offered: better no victim than a wrong one.
            return nothing(Outcome::Error);
        };
        let pod = PodFacts::read(&args.pod, &self.settings.rules);
        if pod.gang.is_some() {
            // Victims for one member would die in vain while the others do not fit.
            return nothing(Outcome::Refused);
        }
        let proposals = args.victims();
        // A lock for each node: there may be hundreds, and binds wait.
        let further = proposals.iter().map(|node| self.read(|cluster| further_victims(cluster, &pod, node)));
        let further: Vec<Option<Vec<Arc<str>>>> = further.collect();
        let kept: Vec<Kept<'_>> = proposals
            .iter()
            .zip(&further)
            .filter_map(|(proposal, further)| {
                let further = further.as_ref()?;
                let uids = proposal.uids.iter().copied().chain(further.iter().map(|uid| &**uid));
                // Disruption budgets of further victims are not known here; nodes where the proposal suffices come first.
                let more = i64::try_from(further.len()).unwrap_or(i64::MAX);
                let pdb_violations = proposal.pdb_violations.saturating_add(more);
                Some(Kept { node: proposal.node, uids: uids.collect(), pdb_violations })
            })
            // The scheduler takes a node without victims for an error.
            .filter(|kept| !kept.uids.is_empty())
            .collect();
        let outcome = if kept.is_empty() { Outcome::Refused } else { Outcome::Ok };
        Reply { body: answer::preemption(&kept), outcome }
    }
}

/// Whom else to evict on this node so that `pod` fits: nobody, where the proposal suffices; `None` where nothing helps.
///
/// Of those that would do, the less important go, and of these the ones that are on a card with one of the proposal: so few go.
fn further_victims(cluster: &Cluster, pod: &PodFacts, proposal: &NodeVictims<'_>) -> Option<Vec<Arc<str>>> {
    let info = cluster.node(proposal.node)?;
    let fits = |further: &[Arc<str>]| {
        let goes = |uid: &str| proposal.uids.contains(&uid) || further.iter().any(|victim| **victim == *uid);
        let own = info
            .pods
            .values()
            .filter(|placed| goes(&placed.pod.uid) && placed.pod.namespace == pod.namespace);
        let less = own.map(|placed| Used::on(info, &placed.pod)).fold(Used::default(), Used::plus);
        let quotas = QuotaCheck::new(cluster.quotas(), &pod.namespace, Asked::by(std::iter::once(pod)));
        quotas.without(less).refusal(info).is_none()
            && fits_without(info, pod, |uid| uid == &*pod.uid || goes(uid)).is_ok()
    };
    if fits(&[]) {
        return Some(Vec::new());
    }
    let evictable = |other: &&Arc<PodFacts>| {
        other.priority < pod.priority && other.uid != pod.uid && !proposal.uids.contains(&&*other.uid)
    };
    let cards = |placed: &Placed| placed.cards.iter().map(|(_, card)| *card).collect::<Vec<_>>();
    let proposed = proposal.uids.iter().filter_map(|uid| info.pods.get(*uid));
    let freed: HashSet<CardIndex> = proposed.flat_map(cards).collect();
    let mut further: Vec<&Placed> = info.pods.values().filter(|placed| evictable(&&placed.pod)).collect();
    further.sort_by_cached_key(|placed| {
        let beside = cards(placed).iter().any(|card| freed.contains(card));
        (Reverse(placed.pod.priority), beside, Arc::clone(&placed.pod.uid))
    });
    let mut victims: Vec<Arc<str>> = further.into_iter().map(|placed| Arc::clone(&placed.pod.uid)).collect();
    if !fits(&victims) {
        return None;
    }
    let mut at = 0;
    while at < victims.len() {
        let spared = victims.remove(at);
        if !fits(&victims) {
            victims.insert(at, spared);
            at += 1;
        }
    }
    Some(victims)
}
