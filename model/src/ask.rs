//! What a pod asks for, container by container.
//!
//! Limits and requests of extended resources must be equal, and a limit alone counts as the request
//! (`pkg/apis/core/validation`, `ValidateResourceRequirements`); a request alone is refused by the API server.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource as api;

use crate::ledger::Phase;
use crate::names::Dialect;
use crate::quantity::{Quantity, QuantityError};
use crate::units::{Blocks, Cores};
use crate::view::json::{Amount, Map};
use crate::view::{ContainerView, CountedResources, ResourcesView, SpecView};

/// What kind of container it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ContainerKind {
    /// Runs to its end before the app containers start.
    Init,
    /// An init container with `restartPolicy: Always`: runs beside the app containers.
    Sidecar,
    /// An ordinary container.
    App,
}

impl ContainerKind {
    /// Whether it runs before or beside the app containers.
    #[must_use]
    pub const fn phase(self) -> Phase {
        match self {
            Self::Init => Phase::Init,
            Self::Sidecar | Self::App => Phase::Run,
        }
    }
}

/// An amount of each resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Demand {
    /// Whole cards through `nvidia.com/gpu`.
    pub legacy: u32,
    /// Compute through vcuda-core.
    pub cores: Cores,
    /// Memory through vcuda-memory.
    pub blocks: Blocks,
}

impl Demand {
    /// Nothing at all.
    pub const NONE: Self = Self { legacy: 0, cores: Cores::ZERO, blocks: Blocks::ZERO };

    /// Whether nothing is asked for.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::NONE
    }

    /// Whether vcuda resources are asked for.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.cores > Cores::ZERO || self.blocks > Blocks::ZERO
    }

    fn plus(self, other: Self) -> Self {
        Self {
            legacy: self.legacy.saturating_add(other.legacy),
            cores: self.cores + other.cores,
            blocks: self.blocks + other.blocks,
        }
    }

    fn max(self, other: Self) -> Self {
        Self {
            legacy: self.legacy.max(other.legacy),
            cores: self.cores.max(other.cores),
            blocks: self.blocks.max(other.blocks),
        }
    }
}

/// What one container asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerAsk {
    /// Its name.
    pub name: String,
    /// App, init or sidecar.
    pub kind: ContainerKind,
    /// Its place in `spec.containers`, or in `spec.initContainers` for init containers and sidecars.
    pub position: usize,
    /// What it asks for.
    pub demand: Demand,
}

/// What a pod asks for: its containers in the order in which the kubelet admits them, init containers first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodAsk {
    /// Every container, also those that ask for no card.
    pub containers: Vec<ContainerAsk>,
}

/// Which kind of pod it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PodKind {
    /// Asks for no card.
    Plain,
    /// Asks for `nvidia.com/gpu`.
    Legacy,
    /// Asks for vcuda resources.
    Shared,
    /// Asks for both: such a pod is never placed.
    Mixed,
}

/// Why a container's request makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    /// Not a quantity.
    #[error("container {container}: {resource}: {source}")]
    Quantity {
        /// Name of the container.
        container: String,
        /// Name of the resource.
        resource: String,
        /// What is wrong with the text.
        source: QuantityError,
    },
    /// Not a whole number, negative, or beyond 2^32 - 1.
    #[error("container {container}: {resource}: {value}: expected a whole number from 0 to 4294967295")]
    NotWhole {
        /// Name of the container.
        container: String,
        /// Name of the resource.
        resource: String,
        /// What was asked for.
        value: Quantity,
    },
    /// Requests without limits.
    #[error(
        "container {container}: requests.{resource} is {value} but limits.{resource} is not set: set the limit to the same value"
    )]
    NoLimit {
        /// Name of the container.
        container: String,
        /// Name of the resource.
        resource: String,
        /// What was requested.
        value: Quantity,
    },
    /// Requests differ from limits.
    #[error(
        "container {container}: requests.{resource} is {request} but limits.{resource} is {limit}: they must be equal"
    )]
    Unequal {
        /// Name of the container.
        container: String,
        /// Name of the resource.
        resource: String,
        /// What was requested.
        request: Quantity,
        /// The limit.
        limit: Quantity,
    },
    /// More than one card, but not whole cards.
    #[error(
        "container {container}: {resource}: {cores}: more than 100 cores must be whole cards: a multiple of 100"
    )]
    NotWholeCards {
        /// Name of the container.
        container: String,
        /// Name of the resource.
        resource: String,
        /// What was asked for.
        cores: u32,
    },
    /// A share of compute without a share of memory, or the reverse.
    #[error("container {container}: {present} is set but {missing} is not: a share of a card needs both")]
    Half {
        /// Name of the container.
        container: String,
        /// The resource that is there.
        present: String,
        /// The resource that is missing.
        missing: String,
    },
}

impl PodAsk {
    /// What a pod asks for.
    ///
    /// # Errors
    /// The first container whose request makes no sense.
    pub fn of(pod: &Pod, dialect: &Dialect) -> Result<Self, AskError> {
        pod.spec.as_ref().map_or_else(|| Ok(Self::default()), |spec| Self::of_spec(spec, dialect))
    }

    /// What a pod of this spec asks for.
    ///
    /// # Errors
    /// The first container whose request makes no sense.
    pub fn of_spec(spec: &PodSpec, dialect: &Dialect) -> Result<Self, AskError> {
        Self::read(&view_of(spec), dialect)
    }

    /// What a pod of this spec asks for: the one reading, whatever form the pod came in.
    ///
    /// # Errors
    /// The first container whose request makes no sense.
    pub fn read<R>(spec: &SpecView<'_, R>, dialect: &Dialect) -> Result<Self, AskError> {
        Self::read_with(spec, |container| demand_of(container, dialect))
    }

    /// The same where its request breaks a rule of shares, such as memory without cores: a kubelet admits it all the same. What is
    /// not a number counts as nothing.
    #[must_use]
    pub fn read_unchecked<R>(spec: &SpecView<'_, R>, dialect: &Dialect) -> Self {
        let Ok(ask) = Self::read_with(spec, |container| {
            Ok::<_, Infallible>(amounts_of(container, dialect).unwrap_or_default())
        });
        ask
    }

    fn read_with<'a, R: 'a, E>(
        spec: &SpecView<'a, R>,
        demand: impl Fn(&ContainerView<'a, R>) -> Result<Demand, E>,
    ) -> Result<Self, E> {
        let containers = spec.all_containers().map(|(place, container)| {
            Ok(ContainerAsk {
                name: container.name.to_string(),
                kind: place.kind(container),
                position: place.index,
                demand: demand(container)?,
            })
        });
        Ok(Self { containers: containers.collect::<Result<_, _>>()? })
    }

    /// The containers that ask for a card, in the kubelet's order of admission.
    pub fn asking(&self) -> impl Iterator<Item = &ContainerAsk> {
        self.containers.iter().filter(|container| !container.demand.is_none())
    }

    /// Which kind of pod it is.
    #[must_use]
    pub fn kind(&self) -> PodKind {
        let legacy = self.containers.iter().any(|container| container.demand.legacy > 0);
        let shared = self.containers.iter().any(|container| container.demand.is_shared());
        match (legacy, shared) {
            (false, false) => PodKind::Plain,
            (true, false) => PodKind::Legacy,
            (false, true) => PodKind::Shared,
            (true, true) => PodKind::Mixed,
        }
    }

    /// What the scheduler reserves for the pod: the larger of what runs together at the end and of each init
    /// container with the sidecars started before it (KEP-753, `resource.PodRequests`).
    #[must_use]
    pub fn effective(&self) -> Demand {
        let containers = self.containers.iter().map(|container| (container.kind, container.demand));
        reserved(containers, Demand::NONE, Demand::plus, Demand::max)
    }
}

/// See [`PodAsk::effective`]; of any amounts.
pub(crate) fn reserved<T: Copy>(
    containers: impl Iterator<Item = (ContainerKind, T)>,
    none: T,
    plus: impl Fn(T, T) -> T,
    max: impl Fn(T, T) -> T,
) -> T {
    let (mut sidecars, mut running, mut peak) = (none, none, none);
    for (kind, amount) in containers {
        match kind {
            ContainerKind::Init => peak = max(peak, plus(sidecars, amount)),
            ContainerKind::Sidecar => sidecars = plus(sidecars, amount),
            ContainerKind::App => running = plus(running, amount),
        }
    }
    max(max(peak, sidecars), plus(running, sidecars))
}

impl fmt::Display for Demand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.legacy, self.is_shared()) {
            (0, false) => f.write_str("no card"),
            (cards, false) => write!(f, "{cards} whole card{}", if cards == 1 { "" } else { "s" }),
            (0, true) => write!(f, "{} and {}", self.cores, self.blocks),
            (cards, true) => write!(f, "{cards} whole cards, {} and {}", self.cores, self.blocks),
        }
    }
}

/// What one container asks for, checked.
fn demand_of<R>(container: &ContainerView<'_, R>, dialect: &Dialect) -> Result<Demand, AskError> {
    let demand = amounts_of(container, dialect)?;
    check_share(&container.name, dialect, demand.cores, demand.blocks)?;
    Ok(demand)
}

fn amounts_of<R>(container: &ContainerView<'_, R>, dialect: &Dialect) -> Result<Demand, AskError> {
    Ok(Demand {
        legacy: container.amount(&dialect.legacy)?,
        cores: Cores(container.amount(&dialect.cores)?),
        blocks: Blocks(container.amount(&dialect.memory)?),
    })
}

/// The part of a typed spec that says what the pod asks for.
pub(crate) fn view_of(spec: &PodSpec) -> SpecView<'_> {
    fn amounts(map: Option<&BTreeMap<String, api::Quantity>>) -> Map<'_, Amount<'_>, CountedResources> {
        let amounts = map.into_iter().flatten();
        amounts.map(|(name, quantity)| (name.as_str(), quantity.0.as_str().into())).collect()
    }
    fn resources(resources: &ResourceRequirements) -> ResourcesView<'_> {
        ResourcesView {
            limits: amounts(resources.limits.as_ref()),
            requests: amounts(resources.requests.as_ref()),
            claims: None,
        }
    }
    fn container(container: &Container) -> ContainerView<'_> {
        ContainerView {
            name: container.name.as_str().into(),
            restart_policy: container.restart_policy.as_deref().map(Into::into),
            resources: container.resources.as_ref().map(resources),
            env: None,
            env_from: None,
        }
    }
    SpecView {
        containers: Some(spec.containers.iter().map(container).collect()),
        init_containers: Some(spec.init_containers.iter().flatten().map(container).collect()),
        resources: spec.resources.as_ref().map(resources),
        overhead: amounts(spec.overhead.as_ref()),
        ..SpecView::default()
    }
}

/// The rules of gpu-manager for a container's share: cores below 100 or a multiple of 100, and memory with them.
/// Whole cards may leave the memory out: it is theirs.
///
/// # Errors
/// The rule that is broken.
pub fn check_share(container: &str, dialect: &Dialect, cores: Cores, blocks: Blocks) -> Result<(), AskError> {
    let half = |present: &str, missing: &str| AskError::Half {
        container: container.to_owned(),
        present: present.to_owned(),
        missing: missing.to_owned(),
    };
    match (cores, blocks) {
        (Cores::ZERO, Blocks::ZERO) => Ok(()),
        (Cores::ZERO, _) => Err(half(&dialect.memory, &dialect.cores)),
        (cores, _) if cores > Cores::CARD && cores.whole_cards().is_none() => Err(AskError::NotWholeCards {
            container: container.to_owned(),
            resource: dialect.cores.clone(),
            cores: cores.0,
        }),
        (cores, Blocks::ZERO) if cores.whole_cards().is_none() => Err(half(&dialect.cores, &dialect.memory)),
        _ => Ok(()),
    }
}

/// The amount of an extended resource from its limit and its request.
///
/// # Errors
/// A quantity that cannot be read or is not a whole number, a request without a limit, or one that differs from it.
pub fn merge_amounts(
    container: &str,
    resource: &str,
    limit: Option<&str>,
    request: Option<&str>,
) -> Result<u32, AskError> {
    let named = || (container.to_owned(), resource.to_owned());
    let parse = |text: &str| {
        text.parse::<Quantity>().map_err(|source| {
            let (container, resource) = named();
            AskError::Quantity { container, resource, source }
        })
    };
    let value = match (limit, request) {
        (None, None) => return Ok(0),
        (Some(limit), None) => parse(limit)?,
        (None, Some(request)) => {
            let value = parse(request)?;
            let (container, resource) = named();
            return Err(AskError::NoLimit { container, resource, value });
        }
        (Some(limit), Some(request)) => {
            let (limit, request) = (parse(limit)?, parse(request)?);
            if limit != request {
                let (container, resource) = named();
                return Err(AskError::Unequal { container, resource, request, limit });
            }
            limit
        }
    };
    value.whole().and_then(|whole| u32::try_from(whole).ok()).ok_or_else(|| {
        let (container, resource) = named();
        AskError::NotWhole { container, resource, value }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn ask(spec: Value) -> Result<PodAsk, AskError> {
        PodAsk::of_spec(&serde_json::from_value(spec).unwrap(), &Dialect::default())
    }

    fn container(name: &str, limits: Value) -> Value {
        json!({"name": name, "resources": {"limits": limits}})
    }

    #[test]
    fn kinds() {
        let table = [
            (json!({}), PodKind::Plain),
            (json!({"nvidia.com/gpu": "0"}), PodKind::Plain),
            (json!({"nvidia.com/gpu": "2"}), PodKind::Legacy),
            (json!({"tencent.com/vcuda-core": "50", "tencent.com/vcuda-memory": "8"}), PodKind::Shared),
            (json!({"tencent.com/vcuda-core": "200"}), PodKind::Shared),
            (json!({"nvidia.com/gpu": "1", "tencent.com/vcuda-core": "100"}), PodKind::Mixed),
        ];
        for (limits, kind) in table {
            let pod = ask(json!({"containers": [container("c", limits.clone())]})).unwrap();
            assert_eq!(pod.kind(), kind, "{limits}");
        }
    }

    #[test]
    fn effective_is_what_kubernetes_reserves() {
        let shares = |cores: u32| json!({"tencent.com/vcuda-core": cores.to_string(), "tencent.com/vcuda-memory": "1"});
        let mut sidecar = container("sidecar", shares(10));
        sidecar["restartPolicy"] = json!("Always");
        let pod = ask(json!({
            "initContainers": [container("early", shares(80)), sidecar, container("late", shares(75))],
            "containers": [container("one", shares(30)), container("two", shares(40))],
        }))
        .unwrap();
        // 75 + 10 beats 80 and 30 + 40 + 10; memory: 1 + 1 + 1 beats 2.
        assert_eq!(pod.effective(), Demand { legacy: 0, cores: Cores(85), blocks: Blocks(3) });
        assert_eq!(pod.asking().count(), 5);
    }

    #[test]
    fn nonsense_is_named() {
        let limits = |limits: Value| json!({"containers": [container("main", limits)]});
        let table = [
            (
                limits(json!({"nvidia.com/gpu": "1.5"})),
                "container main: nvidia.com/gpu: 1500m: expected a whole number",
            ),
            (limits(json!({"nvidia.com/gpu": "-1"})), "-1: expected a whole number"),
            (limits(json!({"nvidia.com/gpu": "two"})), "\"two\" is not a quantity"),
            (
                limits(json!({"nvidia.com/gpu": "5G"})),
                "5000000000: expected a whole number from 0 to 4294967295",
            ),
            (
                limits(json!({"tencent.com/vcuda-core": "150", "tencent.com/vcuda-memory": "1"})),
                "150: more than 100 cores must be whole cards",
            ),
            (
                limits(json!({"tencent.com/vcuda-core": "50"})),
                "tencent.com/vcuda-core is set but tencent.com/vcuda-memory is not",
            ),
            (
                limits(json!({"tencent.com/vcuda-memory": "5"})),
                "tencent.com/vcuda-memory is set but tencent.com/vcuda-core is not",
            ),
            (
                json!({"containers": [{"name": "main", "resources": {"requests": {"nvidia.com/gpu": "1"}}}]}),
                "limits.nvidia.com/gpu is not set",
            ),
            (
                json!({"containers": [{"name": "main", "resources": {"requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "2"}}}]}),
                "requests.nvidia.com/gpu is 1 but limits.nvidia.com/gpu is 2",
            ),
        ];
        for (spec, message) in table {
            let error = ask(spec.clone()).unwrap_err().to_string();
            assert!(error.contains(message), "{spec}: {error}");
        }
    }

    #[test]
    fn equal_in_value_is_equal() {
        assert_eq!(merge_amounts("c", "r", Some("1k"), Some("1000")), Ok(1000));
    }
}
