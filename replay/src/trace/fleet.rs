//! The nodes and pods of a trace in the model's terms.

use std::collections::HashMap;

use gpu_migrate_model::ask::{ContainerAsk, ContainerKind, Demand, PodAsk};
use gpu_migrate_model::card::Card;
use gpu_migrate_model::place::Constraints;
use gpu_migrate_model::score::{CardRequest, HostResources, ModelSet, Shape};
use gpu_migrate_model::units::{Blocks, Cores};

use super::read::{TraceNode, TracePod};
use crate::node::{ReplayNode, Request};

/// What a pod asks for, for placement and for scores.
#[derive(Clone, Debug)]
pub struct Asked {
    pub request: Request,
    pub shape: Shape,
}

/// The requests of a trace, each once.
#[derive(Clone, Debug, Default)]
pub struct Requests {
    pub all: Vec<Asked>,
    /// By pod: its place in `all`.
    pub of_pod: Vec<usize>,
}

/// Numbers for the names of card models.
#[derive(Clone, Debug, Default)]
pub struct Models(Vec<String>);

impl Models {
    /// The set of these models; empty: any.
    pub fn set(&mut self, names: &[String]) -> ModelSet {
        if names.is_empty() {
            return ModelSet::ANY;
        }
        names.iter().fold(ModelSet::NONE, |set, name| set.with(ModelSet::only(self.number(name))))
    }

    fn number(&mut self, name: &str) -> u32 {
        let known = self.0.iter().position(|known| known == name);
        let at = known.unwrap_or_else(|| {
            self.0.push(name.to_owned());
            self.0.len() - 1
        });
        u32::try_from(at).unwrap_or(u32::MAX)
    }
}

impl Requests {
    #[must_use]
    pub fn of(pods: &[TracePod], models: &mut Models) -> Self {
        let mut known: HashMap<(Cores, HostResources, &[String]), usize> = HashMap::new();
        let mut requests = Self::default();
        for pod in pods {
            let at = *known.entry((pod.cores, pod.host, pod.models.as_slice())).or_insert_with(|| {
                requests.all.push(asked(pod, models));
                requests.all.len() - 1
            });
            requests.of_pod.push(at);
        }
        requests
    }
}

fn asked(pod: &TracePod, models: &mut Models) -> Asked {
    let demand = Demand { legacy: 0, cores: pod.cores, blocks: Blocks::ZERO };
    let container = ContainerAsk { name: "main".to_owned(), kind: ContainerKind::App, position: 0, demand };
    Asked {
        request: Request {
            ask: PodAsk { containers: vec![container] },
            constraints: Constraints { models: pod.models.clone(), ..Constraints::default() },
            host: pod.host,
        },
        shape: Shape { request: CardRequest::of(demand), host: pod.host, models: models.set(&pod.models) },
    }
}

impl TraceNode {
    #[must_use]
    pub fn empty(&self, models: &mut Models) -> ReplayNode {
        let card = |minor: u32| Card {
            uuid: format!("{}-{minor}", self.name),
            minor,
            model: self.model.clone(),
            ..Card::default()
        };
        let set = models.set(std::slice::from_ref(&self.model));
        ReplayNode::new((0..self.cards).map(card).collect(), self.host, set)
    }
}
