//! bind: decide, assume, post one Binding with the cards in its annotations, and say OK only when the pod is bound.
//!
//! The scheduler gives up at its `httpTimeout` and comes again, while our request may still be on its way. So a choice
//! whose outcome is not known keeps its cards, the same pod gets the same answer again on that node, and no other
//! node is tried before the API server was asked what became of it (FACTS 4.5).

use std::sync::Arc;
use std::time::Instant;

use gpu_migrate_model::ask::PodKind;
use gpu_migrate_model::names;
use tokio::task::JoinError;

use super::{Engine, Reply};
use crate::api::{BindFailure, Binding, Found};
use crate::decide::{Undecided, choose};
use crate::metrics::Outcome;
use crate::state::Cluster;
use crate::state::pod::{Cards, PodFacts, choice};
use crate::wire::{BindArgs, answer};

/// Why a pod was not bound. The text goes into an Event on the pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BindError {
    #[error("{0}")]
    NotReady(&'static str),
    #[error("{0}")]
    Wire(String),
    #[error("pod {pod} with UID {uid} does not exist any more")]
    Gone {
        /// `namespace/name`
        pod: String,
        /// As the scheduler named it.
        uid: String,
    },
    #[error("pod {pod} is already bound to node {node}")]
    Elsewhere {
        /// `namespace/name`
        pod: String,
        node: String,
    },
    #[error("pod {pod}: an earlier bind is still under way")]
    UnderWay {
        /// `namespace/name`
        pod: String,
    },
    /// An earlier bind to another node may still come true.
    #[error("pod {pod}: the earlier binding to node {node} is not confirmed yet")]
    Unconfirmed {
        /// `namespace/name`
        pod: String,
        /// The node of the earlier bind.
        node: String,
    },
    #[error("node {node} is not known to gpu-migrate-extender")]
    NoNode {
        /// As the scheduler named it.
        node: String,
    },
    #[error("pod {pod}: {problem}")]
    Ask {
        /// `namespace/name`
        pod: String,
        problem: String,
    },
    #[error("node {node}: {source}")]
    Undecided { node: String, source: Undecided },
    #[error("{0}")]
    Quota(String),
    #[error("gang {gang}: {why}")]
    Gang {
        /// Namespace and name of the gang.
        gang: String,
        why: String,
    },
    /// The API server did not bind it, or did not say so.
    #[error("{0}")]
    Api(BindFailure),
    #[error("pod {pod} cannot be looked up: {problem}")]
    LookUp {
        /// `namespace/name`
        pod: String,
        problem: String,
    },
}

/// How often a bind asks whether its gang may start, where others start meanwhile.
const GANG_STARTS: usize = 8;

/// Takes the mark of a bind in progress away, whichever way the bind ends.
struct UnderWay<'a>(&'a Engine, Arc<str>);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.binding.lock().remove(&self.1);
    }
}

impl Engine {
    /// Binds the pod. The work goes on if the caller goes away.
    pub async fn bind(self: &Arc<Self>, body: &[u8]) -> Reply {
        let (namespace, name, uid, node) = match BindArgs::parse(body) {
            Ok(args) => {
                let own = |text: &str| -> Arc<str> { Arc::from(text) };
                (own(args.pod_namespace), own(args.pod_name), own(args.pod_uid), own(args.node))
            }
            Err(problem) => return reply(Err(BindError::Wire(problem.to_string()))),
        };
        let engine = Arc::clone(self);
        let work = async move { engine.bind_pod(&namespace, &name, &uid, &node).await };
        // A task of its own: a binding that has begun is finished although the scheduler hangs up.
        match tokio::spawn(work).await.map_err(JoinError::try_into_panic) {
            Ok(result) => reply(result),
            Err(Ok(panic)) => std::panic::resume_unwind(panic),
            Err(Err(_)) => reply(Err(BindError::NotReady("gpu-migrate-extender is shutting down"))),
        }
    }

    /// Binds one pod to one node.
    ///
    /// # Errors
    /// Where the pod is not bound, or is not known to be.
    pub async fn bind_pod(
        self: &Arc<Self>,
        namespace: &str,
        name: &str,
        uid: &str,
        node: &str,
    ) -> Result<(), BindError> {
        let began = Instant::now();
        if let Some(why) = self.not_ready() {
            return Err(BindError::NotReady(why));
        }
        let Some(_mark) = self.mark(uid) else {
            return Err(BindError::UnderWay { pod: format!("{namespace}/{name}") });
        };
        // Only now, under the mark: what was read before may have been bound since.
        let pod = self.known_pod(namespace, name, uid).await?;
        if let Some(bound) = &pod.node {
            return same_node(&pod, bound, node);
        }
        let tracer = &self.settings.tracer;
        let filter = tracer.take_kept(uid);
        let Some(mut span) = tracer.below(filter.as_deref().or(pod.trace.as_deref()), "bind", began) else {
            return self.place(&pod, node).await;
        };
        let pod = PodFacts { trace: Some(span.traceparent().into()), ..(*pod).clone() };
        let bound = self.place(&Arc::new(pod), node).await;
        span.set_pod(namespace, name, uid);
        span.set("k8s.node.name", node.to_owned());
        if let Err(error) = &bound {
            span.fail(error.to_string());
        }
        span.end();
        bound
    }

    async fn place(self: &Arc<Self>, pod: &Arc<PodFacts>, node: &str) -> Result<(), BindError> {
        let cards = self.assume(pod, node)?;
        match &pod.gang {
            Some(gang) => self.bind_member(pod, gang, node, cards).await,
            None => self.commit(pod, node, cards).await,
        }
    }

    /// Marks a pod as being bound or looked up: one at a time. `None` where another call has it.
    fn mark(&self, uid: &str) -> Option<UnderWay<'_>> {
        let uid: Arc<str> = Arc::from(uid);
        self.binding.lock().insert(Arc::clone(&uid)).then(|| UnderWay(self, uid))
    }

    /// The pod from the index, else from the API server: the watch may be behind the scheduler's.
    async fn known_pod(&self, namespace: &str, name: &str, uid: &str) -> Result<Arc<PodFacts>, BindError> {
        if let Some(pod) = self.read(|cluster| cluster.pod(uid).cloned()) {
            return Ok(pod);
        }
        let shown = || format!("{namespace}/{name}");
        match self.api.look_up(namespace, name, uid).await {
            Ok(Found::Pod(pod)) => {
                let found = Arc::new(*pod);
                let known = self.change(|cluster| {
                    cluster.set_pod((*found).clone());
                    cluster.pod(uid).cloned()
                });
                Ok(known.unwrap_or(found))
            }
            Ok(Found::Finished | Found::Gone) => Err(BindError::Gone { pod: shown(), uid: uid.to_owned() }),
            Err(problem) => Err(BindError::LookUp { pod: shown(), problem }),
        }
    }

    /// Decides and records the decision, under one lock.
    fn assume(&self, pod: &Arc<PodFacts>, node: &str) -> Result<Cards, BindError> {
        if let Err(problem) = &pod.ask {
            return Err(BindError::Ask { pod: pod.shown(), problem: problem.clone() });
        }
        let held = if pod.gang.is_some() { self.settings.gang_timeout } else { std::time::Duration::ZERO };
        let until =
            (self.clock)().instant + held + self.settings.api_timeout + self.settings.unconfirmed_timeout;
        let gang = || pod.gang.as_ref().map(|gang| gang.key.to_string()).unwrap_or_default();
        for _ in 0..GANG_STARTS {
            let assumed = self.read(|cluster| cluster.assumption(&pod.uid).is_some());
            let starts = if assumed {
                None
            } else {
                Some(self.gang_may_start(pod).map_err(|why| BindError::Gang { gang: gang(), why })?)
            };
            let may = |starts| pod.gang.is_none() || self.no_gang_started_since(starts);
            let outcome = self
                .change(|cluster| starts.is_none_or(may).then(|| self.assume_in(cluster, pod, node, until)));
            if let Some(outcome) = outcome {
                return outcome;
            }
        }
        Err(BindError::Gang { gang: gang(), why: "other gangs began at the same moment".to_owned() })
    }

    fn assume_in(
        &self,
        cluster: &mut Cluster,
        pod: &Arc<PodFacts>,
        node: &str,
        until: Instant,
    ) -> Result<Cards, BindError> {
        if let Some(earlier) = cluster.assumption(&pod.uid) {
            if &*earlier.node != node {
                return Err(BindError::Unconfirmed { pod: pod.shown(), node: earlier.node.to_string() });
            }
            let cards = earlier.cards.clone();
            cluster.renew(&pod.uid, until);
            return Ok(cards);
        }
        let mut quotas = self.quota_check(cluster, pod);
        if let Some(reason) = cluster.node(node).and_then(|info| quotas.refusal(info)) {
            return Err(BindError::Quota(reason.to_owned()));
        }
        let cards = match cluster.node(node) {
            _ if pod.kind == PodKind::Plain => Cards::default(),
            None => return Err(BindError::NoNode { node: node.to_owned() }),
            Some(info) => choose(info, pod, &self.scorer)
                .map_err(|source| BindError::Undecided { node: node.to_owned(), source })?,
        };
        cluster.assume(pod, node, cards.clone(), until);
        if let Some(gang) = &pod.gang {
            self.start_gang(gang);
            if pod.unschedulable {
                // The others were refused because there was no node for this one.
                cluster.free_somewhere();
            }
        }
        self.scorer.count(pod);
        Ok(cards)
    }

    /// Posts the Binding and settles what became of it.
    pub(super) async fn commit(
        &self,
        pod: &Arc<PodFacts>,
        node: &str,
        cards: Cards,
    ) -> Result<(), BindError> {
        if !self.leads_for(self.settings.api_timeout) {
            // Its answer might come after another replica has started to look and to bind.
            self.change(|cluster| cluster.forget(&pod.uid));
            return Err(BindError::NotReady("this replica of gpu-migrate-extender may not lead much longer"));
        }
        let binding = self.binding_of(pod, node, &cards);
        match self.api.bind(&binding).await {
            Ok(()) => {
                self.confirm(pod, node, cards);
                Ok(())
            }
            Err(BindFailure::Refused(why)) => {
                self.change(|cluster| cluster.forget(&pod.uid));
                Err(BindError::Api(BindFailure::Refused(why)))
            }
            Err(failure @ (BindFailure::Conflict(_) | BindFailure::Unknown(_))) => {
                self.metrics.looked_up.inc();
                // The request may still be on its way, counted from now and not from when it was sent.
                let until = (self.clock)().instant + self.settings.unconfirmed_timeout;
                self.change(|cluster| cluster.renew(&pod.uid, until));
                self.outcome_of(pod, node, failure).await
            }
        }
    }

    fn binding_of(&self, pod: &PodFacts, node: &str, cards: &Cards) -> Binding {
        let mut annotations = match (&pod.ask, pod.kind) {
            (Ok(ask), PodKind::Shared) => choice(cards, ask, node, (self.clock)().unix_nanos).write(ask),
            _ => Default::default(),
        };
        if let Some(trace) = pod.trace.as_ref().filter(|_| self.settings.tracer.is_on()) {
            annotations.insert(names::TRACEPARENT.to_owned(), trace.to_string());
        }
        Binding {
            namespace: Arc::clone(&pod.namespace),
            name: Arc::clone(&pod.name),
            uid: Arc::clone(&pod.uid),
            node: Arc::from(node),
            annotations,
        }
    }

    /// The API server said yes: from now on the pod is where we put it, whenever the watch gets to say so.
    fn confirm(&self, pod: &Arc<PodFacts>, node: &str, cards: Cards) {
        self.change(|cluster| {
            // If the assumption is gone, the watch was faster, or the pod is deleted already.
            if cluster.assumption(&pod.uid).is_some() {
                cluster.set_pod(PodFacts { node: Some(Arc::from(node)), cards, ..(**pod).clone() });
            }
        });
    }

    /// Asks the API server what became of a bind that conflicted, or that it did not answer.
    async fn outcome_of(
        &self,
        pod: &Arc<PodFacts>,
        node: &str,
        failure: BindFailure,
    ) -> Result<(), BindError> {
        let certain = matches!(failure, BindFailure::Conflict(_));
        match self.api.look_up(&pod.namespace, &pod.name, &pod.uid).await {
            Ok(Found::Pod(now)) => match now.node.clone() {
                Some(bound) => {
                    self.change(|cluster| cluster.set_pod(*now));
                    same_node(pod, &bound, node)
                }
                None => {
                    if certain {
                        self.change(|cluster| cluster.forget(&pod.uid));
                    }
                    // Unanswered and not bound: it may yet come true, so its cards are kept for a while.
                    Err(BindError::Api(failure))
                }
            },
            Ok(Found::Finished | Found::Gone) if certain => {
                self.change(|cluster| cluster.remove_pod(&pod.uid));
                Err(BindError::Gone { pod: pod.shown(), uid: pod.uid.to_string() })
            }
            Ok(_) | Err(_) => Err(BindError::Api(failure)),
        }
    }

    /// Ends a unconfirmed_timeout: the time in which the request could still have come true is over.
    pub(super) async fn resolve(&self, pod: &Arc<PodFacts>) {
        // Otherwise a bind could begin while an answer of before it is on its way here.
        let Some(_mark) = self.mark(&pod.uid) else { return };
        let assumption = self.read(|cluster| cluster.assumption(&pod.uid).cloned());
        // One that began and ended since has restarted the timeout.
        if assumption.is_none_or(|assumption| assumption.until > (self.clock)().instant) {
            return;
        }
        match self.api.look_up(&pod.namespace, &pod.name, &pod.uid).await {
            Ok(Found::Pod(now)) if now.node.is_some() => self.change(|cluster| cluster.set_pod(*now)),
            Ok(Found::Pod(_)) => {
                self.change(|cluster| cluster.forget(&pod.uid));
                self.metrics.expired.inc();
            }
            Ok(Found::Finished | Found::Gone) => self.change(|cluster| cluster.remove_pod(&pod.uid)),
            Err(problem) => {
                tracing::warn!(pod = %pod.shown(), problem, "outcome of its bind still unknown; its cards stay reserved");
            }
        }
    }
}

fn same_node(pod: &PodFacts, bound: &str, wanted: &str) -> Result<(), BindError> {
    if bound == wanted {
        Ok(())
    } else {
        Err(BindError::Elsewhere { pod: pod.shown(), node: bound.to_owned() })
    }
}

fn reply(result: Result<(), BindError>) -> Reply {
    match result {
        Ok(()) => Reply { body: answer::binding(None), outcome: Outcome::Ok },
        Err(error) => {
            let outcome = match &error {
                BindError::Undecided { .. } => Outcome::Refused,
                _ => Outcome::Error,
            };
            tracing::warn!(%error, "bind");
            Reply { body: answer::binding(Some(&error.to_string())), outcome }
        }
    }
}
