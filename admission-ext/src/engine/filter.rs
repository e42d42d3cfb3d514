//! filter and prioritize.

use std::sync::Arc;
use std::time::Instant;

use gpu_migrate_model::ask::PodKind;

use super::reasons::Reasons;
use super::{Engine, Reply};
use crate::decide::{fits, fits_without, placement};
use crate::metrics::{Outcome, Verb};
use crate::score::{best, scale};
use crate::state::node::{NodeFacts, occupancy};
use crate::state::pod::PodFacts;
use crate::state::{Cluster, NodeId};
use crate::wire::answer::{self, Verdict};
use crate::wire::{Nodes, Request};
use gpu_migrate_model::capacity::RequestSummary;
use gpu_migrate_model::view::PodView;

/// Nodes looked at in one lock, by the capacity that is at hand and by placement.
const NODES_PER_LOCK: usize = 512;
const PLACED_PER_LOCK: usize = 32;

/// Where the pod itself is on the occupancy, from an earlier try; nowhere for most.
struct Own {
    info: Option<NodeId>,
    assumed: Option<Arc<str>>,
}

impl Own {
    fn of(cluster: &Cluster, pod: &PodFacts) -> Self {
        let assumed = cluster.assumption(&pod.uid).map(|earlier| Arc::clone(&earlier.node));
        Self { info: cluster.node_of(&pod.uid), assumed }
    }
}

impl Engine {
    /// Which of the nodes the pod fits on; the best of them alone, by [`Settings::one_node`](super::Settings::one_node).
    pub fn filter(&self, verb: &'static str, body: &[u8]) -> Reply {
        let began = Instant::now();
        let error = |text: &str| Reply { body: answer::filter_error(text), outcome: Outcome::Error };
        if let Some(why) = self.not_ready() {
            self.called.notify_one();
            return error(why);
        }
        let request = match Request::parse(verb, body) {
            Ok(request) => request,
            Err(problem) => return error(&problem.to_string()),
        };
        let pod = self.facts(&request.pod);
        let dry_run = verb == Verb::FilterDryrun.path();
        let (mut verdicts, reasons) = self.verdicts(&pod, &request.nodes, dry_run);
        let spec = &request.pod.spec;
        let prefers = spec.affinity.is_some() || spec.topology_spread_constraints.is_some();
        if self.settings.one_node && !dry_run && !prefers && pod.kind != PodKind::Plain {
            self.pass_over_others(&pod, &request.nodes, &mut verdicts);
        }
        if !dry_run {
            self.trace_filter(&pod, &verdicts, &reasons, began);
        }
        let some = verdicts.is_empty() || verdicts.contains(&Verdict::Fits);
        Reply {
            body: answer::filter(&request.nodes, &verdicts, &reasons.texts()),
            outcome: if some { Outcome::Ok } else { Outcome::Refused },
        }
    }

    fn trace_filter(&self, pod: &PodFacts, verdicts: &[Verdict], reasons: &Reasons, began: Instant) {
        let Some(mut span) = self.settings.tracer.below(pod.trace.as_deref(), "filter", began) else {
            return;
        };
        let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        let fitting =
            verdicts.iter().filter(|verdict| matches!(verdict, Verdict::Fits | Verdict::PassedOver));
        span.set_pod(&pod.namespace, &pod.name, &pod.uid);
        span.set("gpu_migrate.nodes", count(verdicts.len()));
        span.set("gpu_migrate.nodes.fitting", count(fitting.count()));
        if !verdicts.contains(&Verdict::Fits) {
            span.fail(reasons.texts().into_iter().next().unwrap_or_default());
        }
        span.keep_for(&pod.uid);
        span.end();
    }

    /// Leaves the best of the nodes that fit.
    fn pass_over_others(&self, pod: &PodFacts, nodes: &Nodes<'_>, verdicts: &mut [Verdict]) {
        let fitting: Vec<usize> = (0..verdicts.len()).filter(|at| verdicts[*at] == Verdict::Fits).collect();
        let names: Vec<&str> = fitting.iter().map(|at| nodes.name(*at)).collect();
        let scores = self.scores(pod, &names);
        let Some(best) = best(&scores, |at| names[at]) else { return };
        for (at, node) in fitting.into_iter().enumerate() {
            if at != best {
                verdicts[node] = Verdict::PassedOver;
            }
        }
    }

    fn scores(&self, pod: &PodFacts, names: &[&str]) -> Vec<Option<f64>> {
        self.scorer.scores(pod, names, |look: &mut dyn FnMut(&Cluster)| self.read(look))
    }

    /// Filter as gpu-admission's users have it configured (`filterVerb: predicates`, whole nodes, the last extender):
    /// of the nodes that fit it answers the one with least left, by (cores, blocks, name), and refuses the others.
    ///
    /// gpu-admission also writes its choice of cards into the pod here. We do not, filter is pure (I7); with
    /// `bindVerb: bind` in the configuration the choice travels in the Binding, without it the node's bridge chooses.
    pub fn predicates(&self, body: &[u8]) -> Reply {
        let began = Instant::now();
        let error = |text: &str| Reply { body: answer::filter_error(text), outcome: Outcome::Error };
        if let Some(why) = self.not_ready() {
            self.called.notify_one();
            return error(why);
        }
        let request = match Request::parse("predicates", body) {
            Ok(request) => request,
            Err(problem) => return error(&problem.to_string()),
        };
        let pod = self.facts(&request.pod);
        let (mut verdicts, mut reasons) = self.verdicts(&pod, &request.nodes, false);
        if pod.kind != PodKind::Plain {
            let fitting: Vec<usize> =
                (0..verdicts.len()).filter(|at| verdicts[*at] == Verdict::Fits).collect();
            let best_of = |part: &[usize]| {
                self.read(|cluster| {
                    let left = |at: &usize| {
                        let name = request.nodes.name(*at);
                        let capacity = cluster.node(name).map(|info| &info.capacity);
                        let left = capacity.map(|capacity| (capacity.cores_left(), capacity.blocks_left()));
                        (left.unwrap_or((u32::MAX, u32::MAX)), name)
                    };
                    part.iter().map(|at| (left(at), *at)).min()
                })
            };
            let best = fitting.chunks(NODES_PER_LOCK).filter_map(best_of).min().map(|(_, at)| at);
            let other = Verdict::Failed(reasons.text("the pod has been matched to another node"));
            for (at, verdict) in verdicts.iter_mut().enumerate() {
                if *verdict == Verdict::Fits && Some(at) != best {
                    *verdict = other;
                }
            }
        }
        self.trace_filter(&pod, &verdicts, &reasons, began);
        let some = verdicts.is_empty() || verdicts.contains(&Verdict::Fits);
        Reply {
            body: answer::filter(&request.nodes, &verdicts, &reasons.texts()),
            outcome: if some { Outcome::Ok } else { Outcome::Refused },
        }
    }

    fn facts(&self, pod: &PodView<'_>) -> PodFacts {
        let mut pod = PodFacts::read(pod, &self.settings.rules);
        if pod.gang.is_some() {
            self.read(|cluster| cluster.size(&mut pod));
        }
        pod
    }

    fn verdicts(&self, pod: &PodFacts, nodes: &Nodes<'_>, dry_run: bool) -> (Vec<Verdict>, Reasons) {
        let mut reasons = Reasons::default();
        if let Err(problem) = &pod.ask {
            let never = Verdict::Unresolvable(reasons.text(problem));
            return (vec![never; nodes.len()], reasons);
        }
        let noted = !dry_run && pod.kind != PodKind::Plain && !nodes.is_empty();
        if noted {
            self.note_scheduler(&pod.scheduler);
        }
        let own = self.read(|cluster| {
            if noted {
                self.refused.note(pod, cluster, (self.clock)().instant);
            }
            Own::of(cluster, pod)
        });
        if own.info.is_none()
            && let Some(refusal) = self.gang_refusal(pod)
        {
            // Preempting for one member would not help.
            let never = Verdict::Unresolvable(reasons.text(&refusal));
            return (vec![never; nodes.len()], reasons);
        }
        let mut verdicts = Vec::with_capacity(nodes.len());
        let summary = pod.summary();
        let each = if summary == RequestSummary::Complex { PLACED_PER_LOCK } else { NODES_PER_LOCK };
        for part in (0..nodes.len()).step_by(each) {
            self.read(|cluster| {
                let mut quotas = self.quota_check(cluster, pod);
                for at in part..nodes.len().min(part + each) {
                    let mut verdict = self.verdict(cluster, pod, summary, &own, (nodes, at), &mut reasons);
                    if verdict == Verdict::Fits
                        && let Some(info) = cluster.node(nodes.name(at))
                        && let Some(reason) = quotas.refusal(info)
                    {
                        verdict = Verdict::Failed(reasons.text(reason));
                    }
                    verdicts.push(verdict);
                }
            });
        }
        if noted && verdicts.contains(&Verdict::Fits) {
            self.refused.clear(&pod.uid);
        }
        (verdicts, reasons)
    }

    fn verdict(
        &self,
        cluster: &Cluster,
        pod: &PodFacts,
        summary: RequestSummary,
        own: &Own,
        (nodes, at): (&Nodes<'_>, usize),
        reasons: &mut Reasons,
    ) -> Verdict {
        if pod.kind == PodKind::Plain {
            return Verdict::Fits;
        }
        let name = nodes.name(at);
        if let Some(earlier) = own.assumed.as_ref().filter(|earlier| &***earlier != name) {
            // Its cards there are kept until it is known that it is not bound there.
            let text = format!("waiting for the outcome of an earlier bind to node {earlier}");
            return Verdict::Unresolvable(reasons.text(&text));
        }
        let answer = match cluster.node_with_id(name) {
            Some((id, info)) if own.info == Some(id) || !info.nominated.is_empty() => {
                fits_without(info, pod, |uid| uid == &*pod.uid)
            }
            Some((_, info)) => fits(info, pod, summary),
            None => match self.template(nodes, at) {
                Some(facts) => {
                    let inventory = facts.inventory(name);
                    let (_, occupancy) = occupancy(&inventory, &facts, &[], std::iter::empty(), |_| false);
                    placement(&inventory, &occupancy, pod, None).map(drop)
                }
                None => {
                    let unknown = "gpu-migrate-extender has not seen the node yet";
                    return Verdict::Failed(reasons.text(unknown));
                }
            },
        };
        match answer {
            Ok(()) => Verdict::Fits,
            Err(refusal) => reasons.refuse(refusal),
        }
    }

    /// A node that was sent whole and is not known: an autoscaler asks what a node of this kind would do.
    fn template(&self, nodes: &Nodes<'_>, at: usize) -> Option<NodeFacts> {
        let raw = nodes.raw(at)?;
        let view = serde_json::from_str(raw.get()).ok()?;
        Some(NodeFacts::read(&view, &self.settings.rules.dialect))
    }

    /// How good each node is, 0 to 10.
    pub fn prioritize(&self, body: &[u8]) -> Reply {
        let (None, Ok(request)) = (self.not_ready(), Request::parse("prioritize", body)) else {
            // An extender that cannot score says nothing: the scheduler goes on without.
            return Reply { body: b"[]".to_vec(), outcome: Outcome::Error };
        };
        let pod = PodFacts::read(&request.pod, &self.settings.rules);
        let names: Vec<&str> = (0..request.nodes.len()).map(|at| request.nodes.name(at)).collect();
        let scores = scale(&self.scores(&pod, &names), |at| names[at]);
        Reply { body: answer::priorities(&request.nodes, &scores), outcome: Outcome::Ok }
    }
}
