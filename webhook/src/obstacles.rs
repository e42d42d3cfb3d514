//! What keeps a pod from being converted although its numbers fit: it would wait for ever, be refused by the API server or see
//! cards that are not its own. Pure.

use std::collections::BTreeMap;

use gpu_migrate_model::names::{self, HAMI_RESOURCES};
use gpu_migrate_model::units::Cores;

use crate::convert::{Conversions, asks, gpu_resources};
use crate::policy::Policy;
use crate::view::{ContainerView, PodView, env_from_may_set};

/// The label of the operating system that every kubelet sets on its node.
const OS: &str = "kubernetes.io/os";

/// What is known about the cluster besides policies and namespaces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterFacts {
    /// Memory of the largest card, MiB; `None` while no node reports its cards.
    pub largest_card_mib: Option<u64>,
    /// Names of the RuntimeClasses and whether each has an overhead; `None` while they are not listed.
    pub runtime_classes: Option<BTreeMap<String, bool>>,
}

/// A pod that the policy would convert.
pub(crate) struct Obstacles<'a, 'v> {
    pub(crate) pod: &'a PodView<'v>,
    pub(crate) policy: &'a Policy,
    pub(crate) cluster: &'a ClusterFacts,
    /// Whether containers of its namespace must not choose their cards.
    pub(crate) guarded: bool,
}

impl<'a, 'v: 'a> Obstacles<'a, 'v> {
    /// The first thing that keeps the pod from being converted, for people. `containers` are those that convert.
    pub(crate) fn check<'c>(
        &self,
        containers: impl Iterator<Item = (&'c ContainerView<'c>, &'c Conversions<'c>)>,
    ) -> Result<(), String> {
        self.operating_system()?;
        self.scheduler()?;
        self.gang()?;
        self.runtime_class()?;
        let mut shares = 0;
        for (container, to) in containers {
            shares += usize::from(!to.request.annotations.is_empty());
            self.memory(container, to)?;
            if let Some(other) = HAMI_RESOURCES.iter().find(|resource| asks(container, resource)) {
                return Err(format!("container {}: {other} is a request to HAMi", container.name));
            }
            if self.guarded && env_from_may_set(container, names::NVIDIA_VISIBLE_DEVICES) {
                return Err(format!(
                    "container {}: envFrom could set {}: give it a prefix",
                    container.name,
                    names::NVIDIA_VISIBLE_DEVICES
                ));
            }
        }
        self.one_share(shares)
    }

    /// An annotation is about the whole pod.
    fn one_share(&self, shares: usize) -> Result<(), String> {
        let target = self.policy.conversion.target;
        if shares == 0 {
            return Ok(());
        }
        let dialect = &self.policy.conversion.dialect;
        let asks = |container: &ContainerView<'_>| {
            gpu_resources(container, dialect).iter().any(|resource| asks(container, resource))
        };
        let mut asking = self.pod.containers().filter(|(_, container)| asks(container));
        match (asking.next(), asking.count()) {
            (_, more @ 1..) => Err(format!(
                "{} containers ask for cards: {target} gives a share to one container of a pod",
                more + 1
            )),
            (Some((place, container)), 0) if place.init => {
                Err(format!("container {}: {target} gives no share to an init container", container.name))
            }
            _ => Ok(()),
        }
    }

    /// There is no node agent for Windows, so a pod that asks for such a node would wait for ever.
    fn operating_system(&self) -> Result<(), String> {
        let selector = self.pod.spec.node_selector.as_ref();
        match selector.and_then(|selector| selector.get(OS)) {
            Some(system) if system.as_str() != "linux" => {
                Err(format!("nodeSelector {OS}: {}: shares are on Linux nodes only", system.as_str()))
            }
            _ => Ok(()),
        }
    }

    /// A scheduler of its own (Volcano, HAMi) brings its own rules, gangs among them, that ours does not know.
    fn scheduler(&self) -> Result<(), String> {
        let scheduling = &self.policy.scheduling;
        let name = self.pod.spec.scheduler_name.as_deref().unwrap_or_default();
        let listed = ["", "default-scheduler"].contains(&name)
            || scheduling.scheduler_name.as_deref() == Some(name)
            || scheduling.replace_schedulers.iter().any(|listed| listed == name);
        if listed {
            return Ok(());
        }
        Err(format!(
            "schedulerName {name}: not in spec.scheduling.replaceSchedulers of policy {}",
            self.policy.reference.name
        ))
    }

    /// The extender refuses a gang of which it does not know the size.
    fn gang(&self) -> Result<(), String> {
        if !self.policy.conversion.target.is_ours() {
            return Ok(());
        }
        let Some(gang) = self.pod.metadata.annotation(names::GANG_NAME) else { return Ok(()) };
        let size = self.pod.metadata.annotation(names::GANG_SIZE).and_then(|size| size.parse::<u32>().ok());
        match size {
            Some(1..) => Ok(()),
            _ => Err(format!("gang {gang}: annotation {} is not a number from 1", names::GANG_SIZE)),
        }
    }

    /// The API server refuses a pod whose RuntimeClass does not exist, or whose overhead is not that of its RuntimeClass: it sets
    /// the overhead before webhooks are called (`plugin/pkg/admission/runtimeclass`).
    fn runtime_class(&self) -> Result<(), String> {
        let Some(wanted) = self.policy.scheduling.runtime_class_name.as_deref() else { return Ok(()) };
        let current = self.pod.spec.runtime_class_name.as_deref();
        let (Some(known), false) = (&self.cluster.runtime_classes, current == Some(wanted)) else {
            return Ok(());
        };
        if !known.contains_key(wanted) {
            return Err(format!("the policy sets RuntimeClass {wanted}, which does not exist"));
        }
        match [Some(wanted), current].into_iter().flatten().find(|name| known.get(*name) == Some(&true)) {
            None => Ok(()),
            Some(name) => Err(format!("RuntimeClass {name} has an overhead: it cannot be exchanged")),
        }
    }

    /// Several whole cards get their memory card by card, so that none may have to give more than there is.
    fn memory(&self, container: &ContainerView<'_>, to: &Conversions<'_>) -> Result<(), String> {
        let Some(largest) = self.cluster.largest_card_mib else { return Ok(()) };
        let per_card = to.blocks.div_ceil((to.cores / Cores::CARD.0).max(1));
        let mib = u64::from(per_card) * self.policy.conversion.dialect.mib_per_block;
        if mib <= largest {
            return Ok(());
        }
        Err(format!(
            "container {}: {per_card} blocks on a card are {mib} MiB; the largest card has {largest}",
            container.name
        ))
    }
}
