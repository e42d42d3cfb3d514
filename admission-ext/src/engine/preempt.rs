//! preempt: the scheduler's victims, re-validated card by card.
//!
//! The scheduler's dry run knows sums of resources and does not ask our filter (FACTS 4.8): it may propose victims
//! whose going frees nothing that this pod can use. A node where the pod would not fit even without all of them is
//! dropped; on the others only those stay victims without whom it does not fit.

use super::{Engine, Reply};
use crate::decide::fits_without;
use crate::metrics::Outcome;
use crate::state::pod::PodFacts;
use crate::state::quota::Used;
use crate::state::{Cluster, NodeInfo};
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
        let cluster = self.cluster.read();
        let kept: Vec<Kept<'_>> = args
            .victims()
            .into_iter()
            .filter_map(|proposal| {
                let info = cluster.node(proposal.node)?;
                let uids = needed(&cluster, info, &pod, &proposal)?;
                Some(Kept { node: proposal.node, uids, pdb_violations: proposal.pdb_violations })
            })
            .collect();
        drop(cluster);
        let outcome = if kept.is_empty() { Outcome::Refused } else { Outcome::Ok };
        Reply { body: answer::preemption(&kept), outcome }
    }
}

/// The victims without whom `pod` does not fit; `None` where it does not fit even without all.
///
/// The scheduler lists victims by falling importance, so the most important is spared first. Victims that hold no
/// card are kept as proposed: they give CPU, memory or ports, which is not ours to scorer.
fn needed<'a>(
    cluster: &Cluster,
    info: &NodeInfo,
    pod: &PodFacts,
    proposal: &NodeVictims<'a>,
) -> Option<Vec<&'a str>> {
    let within_quota = |victims: &[&str]| {
        let own = victims
            .iter()
            .filter_map(|uid| cluster.pod(uid))
            .filter(|victim| victim.namespace == pod.namespace);
        let less = Used::by(own.map(|victim| &**victim));
        let exceeded = cluster.quotas().exceeded(&pod.namespace, Used::by(std::iter::once(pod)), less);
        !exceeded.iter().any(|quota| quota.applies_to(info))
    };
    let fits = |victims: &[&str]| {
        within_quota(victims)
            && fits_without(info, pod, |uid| uid == &*pod.uid || victims.contains(&uid)).is_ok()
    };
    let mut victims = proposal.uids.clone();
    if !fits(&victims) {
        return None;
    }
    for uid in &proposal.uids {
        if !info.pods.contains_key(*uid) {
            continue;
        }
        let fewer: Vec<&str> = victims.iter().copied().filter(|victim| victim != uid).collect();
        if fits(&fewer) {
            victims = fewer;
        }
    }
    // The scheduler takes a node without victims for an error; capacity that is free by now needs no preemption at all.
    (!victims.is_empty()).then_some(victims)
}
