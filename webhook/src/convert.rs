//! How many cores and blocks a container gets for the cards it asked for. Pure.

use std::collections::{BTreeMap, HashSet};

use gpu_migrate_model::ask::{AskError, check_share};
use gpu_migrate_model::names::{Dialect, MIG_PREFIX, SHARED_SUFFIX};
use gpu_migrate_model::target::{Request, Target};
use gpu_migrate_model::units::{Blocks, Cores};

use crate::view::{ContainerView, PodView};

/// What stands for one card, or for one unit of a mapped resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ratio {
    /// Cores; 100 is the whole card.
    pub cores: u32,
    pub blocks: u32,
}

/// A ratio that applies under a condition; what it leaves out comes from the less specific one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Override {
    /// Only for pods bound to cards of this product.
    pub product: Option<String>,
    /// Only for containers of this name.
    pub container: Option<String>,
    pub cores: Option<u32>,
    pub blocks: Option<u32>,
}

/// The conversion that a policy asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversion {
    pub dialect: Dialect,
    /// In whose words converted containers request their shares.
    pub target: Target,
    pub base: Ratio,
    /// Exceptions, from the least specific (product) to the most (container and product).
    pub overrides: Vec<Override>,
    /// Whether a ratio below 100 cores also applies to containers of several cards.
    pub share_multi_card: bool,
    /// MIG and time-sliced resources, by name.
    pub mapped: BTreeMap<String, Ratio>,
}

/// What one container asks for and what it gets instead.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conversions<'c> {
    pub cards: u32,
    /// Names of the resources that go away.
    pub replaced: Vec<&'c str>,
    pub cores: u32,
    pub blocks: u32,
    /// What it requests instead.
    pub request: Request,
    /// Names of GPU resources that stay, since no policy maps them.
    pub left: Vec<&'c str>,
}

impl Conversions<'_> {
    #[must_use]
    pub fn converts(&self) -> bool {
        self.cores > 0 || self.blocks > 0
    }
}

impl Conversion {
    /// The ratio for a container of a pod that is bound to cards of `product`.
    #[must_use]
    pub fn ratio(&self, container: &str, product: Option<&str>) -> Ratio {
        let fits =
            |wanted: &Option<String>, have: Option<&str>| wanted.is_none() || wanted.as_deref() == have;
        let mut ratio = self.base;
        for layer in &self.overrides {
            if fits(&layer.product, product) && fits(&layer.container, Some(container)) {
                ratio.cores = layer.cores.unwrap_or(ratio.cores);
                ratio.blocks = layer.blocks.unwrap_or(ratio.blocks);
            }
        }
        ratio
    }

    /// What a container gets.
    ///
    /// # Errors
    /// A request that makes no sense, or shares that no card can give: the container cannot be converted.
    pub fn convert<'c>(
        &self,
        container: &'c ContainerView<'_>,
        product: Option<&str>,
    ) -> Result<Conversions<'c>, AskError> {
        let name = container.name.as_str();
        let mut result = Conversions::default();
        let (mut cores, mut blocks) = (0_u64, 0_u64);
        for resource in gpu_resources(container, &self.dialect) {
            let ratio = if resource == self.dialect.legacy {
                None
            } else if let Some(ratio) = self.mapped.get(resource) {
                Some(*ratio)
            } else {
                result.left.push(resource);
                continue;
            };
            let units = container.amount(resource)?;
            let ratio = match ratio {
                Some(ratio) => ratio,
                None => {
                    result.cards = units;
                    self.per_card(name, product, units)
                }
            };
            result.replaced.push(resource);
            cores += u64::from(units) * u64::from(ratio.cores);
            blocks += u64::from(units) * u64::from(ratio.blocks);
        }
        result.cores = whole(name, &self.dialect.cores, cores)?;
        result.blocks = whole(name, &self.dialect.memory, blocks)?;
        check_share(name, &self.dialect, Cores(result.cores), Blocks(result.blocks))?;
        if result.converts() {
            result.request = self.request(Cores(result.cores), Blocks(result.blocks));
            let whole = [(self.dialect.legacy.clone(), u64::from(result.cards))];
            if result.replaced == [&self.dialect.legacy] && result.request.resources == whole {
                // The target takes whole cards as they are.
                let Conversions { cards, left, .. } = result;
                return Ok(Conversions { cards, left, ..Conversions::default() });
            }
        }
        Ok(result)
    }

    /// A share in the target's words; ours are configuration.
    fn request(&self, cores: Cores, blocks: Blocks) -> Request {
        if !self.target.is_ours() {
            return self.target.request(cores, blocks);
        }
        let amounts = [(&self.dialect.cores, cores.0), (&self.dialect.memory, blocks.0)];
        let amounts = amounts.into_iter().filter(|(_, amount)| *amount > 0);
        let resources = amounts.map(|(name, amount)| (name.clone(), u64::from(amount)));
        Request { resources: resources.collect(), annotations: Vec::new() }
    }

    /// Whether a pod asks for shares already, ours or the target's.
    #[must_use]
    pub fn is_shared_pod(&self, pod: &PodView<'_>) -> bool {
        let of_target = |container: &ContainerView<'_>| {
            !self.target.is_ours() && self.target.share_resources().any(|resource| asks(container, resource))
        };
        let mark = self.target.share_annotation();
        mark.is_some_and(|key| pod.metadata.annotation(key).is_some())
            || pod.containers().any(|(_, one)| is_shared(one, &self.dialect) || of_target(one))
    }

    /// Right-sizing is for containers of one card: two cards at 50 must not quietly become one card. Several cards
    /// become whole cards, with memory in the same proportion.
    fn per_card(&self, container: &str, product: Option<&str>, cards: u32) -> Ratio {
        let ratio = self.ratio(container, product);
        if cards <= 1 || self.share_multi_card || ratio.cores == 0 || ratio.cores >= Cores::CARD.0 {
            return ratio;
        }
        let blocks = u64::from(ratio.blocks) * u64::from(Cores::CARD.0) / u64::from(ratio.cores);
        Ratio { cores: Cores::CARD.0, blocks: u32::try_from(blocks).unwrap_or(u32::MAX) }
    }
}

fn whole(container: &str, resource: &str, value: u64) -> Result<u32, AskError> {
    u32::try_from(value).map_err(|_| AskError::NotWhole {
        container: container.into(),
        resource: resource.into(),
        value: value.to_string().parse().unwrap_or_default(),
    })
}

/// The resources of a container that are cards or parts of cards in NVIDIA's naming, each once.
pub fn gpu_resources<'c>(container: &'c ContainerView<'_>, dialect: &Dialect) -> Vec<&'c str> {
    // A set, since a user may name as many as fit into a pod.
    let mut seen = HashSet::new();
    container.resource_names().filter(|name| is_gpu(name, dialect) && seen.insert(*name)).collect()
}

/// Whether a container names a card or a part of one.
pub fn names_gpu(container: &ContainerView<'_>, dialect: &Dialect) -> bool {
    container.resource_names().any(|name| is_gpu(name, dialect))
}

/// Whether a resource is a card or a part of one in NVIDIA's naming.
#[must_use]
pub fn is_gpu(resource: &str, dialect: &Dialect) -> bool {
    // A loop, since a user may repeat the suffix as often as it fits into a name.
    let mut bases = std::iter::successors(Some(resource), |name| name.strip_suffix(SHARED_SUFFIX));
    resource.starts_with(MIG_PREFIX) || bases.any(|base| base == dialect.legacy)
}

/// Whether a container asks for vcuda resources already.
#[must_use]
pub fn is_shared(container: &ContainerView<'_>, dialect: &Dialect) -> bool {
    asks(container, &dialect.cores) || asks(container, &dialect.memory)
}

/// Whether a container asks for shares of any system.
pub fn is_shared_anywhere(container: &ContainerView<'_>) -> bool {
    Target::ALL.iter().any(|target| target.share_resources().any(|resource| asks(container, resource)))
}

/// Whether a container asks for a resource; a value of 0 asks for nothing.
#[must_use]
pub fn asks(container: &ContainerView<'_>, resource: &str) -> bool {
    let (limit, request) = container.limit_and_request(resource);
    limit.or(request).is_some_and(|amount| amount.as_str() != "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conversion() -> Conversion {
        let layer = |product: Option<&str>, container: Option<&str>, cores, blocks| Override {
            product: product.map(Into::into),
            container: container.map(Into::into),
            cores,
            blocks,
        };
        Conversion {
            dialect: Dialect::default(),
            target: Target::default(),
            base: Ratio { cores: 100, blocks: 42 },
            overrides: vec![
                layer(Some("A100"), None, None, Some(316)),
                layer(None, Some("infer"), Some(50), Some(21)),
                layer(Some("A100"), Some("infer"), None, Some(158)),
            ],
            share_multi_card: false,
            mapped: [("nvidia.com/mig-1g.5gb".to_owned(), Ratio { cores: 14, blocks: 20 })].into(),
        }
    }

    fn convert(name: &str, limits: &str, product: Option<&str>) -> Result<(u32, u32), String> {
        let text = format!(r#"{{"name":"{name}","resources":{{"limits":{limits}}}}}"#);
        let container: ContainerView<'_> = serde_json::from_str(&text).unwrap();
        let result = conversion().convert(&container, product).map_err(|e| e.to_string())?;
        Ok((result.cores, result.blocks))
    }

    #[test]
    fn cards_become_cores_and_blocks() {
        for (name, limits, product, expected) in [
            ("main", r#"{"nvidia.com/gpu":"1"}"#, None, (100, 42)),
            ("main", r#"{"nvidia.com/gpu":"2"}"#, None, (200, 84)),
            ("main", r#"{"nvidia.com/gpu":8}"#, None, (800, 336)),
            ("main", r#"{"nvidia.com/gpu":"0"}"#, None, (0, 0)),
            ("main", r#"{"cpu":"1"}"#, None, (0, 0)),
            ("main", r#"{"nvidia.com/gpu":"1"}"#, Some("A100"), (100, 316)),
            ("main", r#"{"nvidia.com/gpu":"1"}"#, Some("T4"), (100, 42)),
            ("infer", r#"{"nvidia.com/gpu":"1"}"#, None, (50, 21)),
            ("infer", r#"{"nvidia.com/gpu":"1"}"#, Some("A100"), (50, 158)),
            // Two cards at 50 do not become one card.
            ("infer", r#"{"nvidia.com/gpu":"2"}"#, None, (200, 84)),
            ("main", r#"{"nvidia.com/mig-1g.5gb":"2"}"#, None, (28, 40)),
            ("main", r#"{"nvidia.com/mig-2g.10gb":"1","nvidia.com/gpu.shared":"1"}"#, None, (0, 0)),
        ] {
            assert_eq!(convert(name, limits, product), Ok(expected), "{name} {limits} {product:?}");
        }
    }

    #[test]
    fn any_number_of_names_and_any_length_of_a_name_are_read() {
        let names: Vec<_> = (0..20_000).map(|i| format!("\"nvidia.com/mig-{i}\":\"1\"")).collect();
        let text = format!(r#"{{"name":"main","resources":{{"limits":{{{}}}}}}}"#, names.join(","));
        let container: ContainerView<'_> = serde_json::from_str(&text).unwrap();
        assert_eq!(conversion().convert(&container, None).unwrap().left.len(), names.len());
        // One suffix after the other, and no call for each.
        let long = format!("nvidia.com/gpu{}", SHARED_SUFFIX.repeat(200_000));
        assert!(is_gpu(&long, &Dialect::default()));
    }

    #[test]
    fn several_cards_share_only_where_the_policy_says_so() {
        let container: ContainerView<'_> =
            serde_json::from_str(r#"{"name":"infer","resources":{"limits":{"nvidia.com/gpu":"4"}}}"#)
                .unwrap();
        let policy = Conversion { share_multi_card: true, ..conversion() };
        let result = policy.convert(&container, None).unwrap();
        assert_eq!((result.cores, result.blocks), (200, 84));
        let three: ContainerView<'_> =
            serde_json::from_str(r#"{"name":"infer","resources":{"limits":{"nvidia.com/gpu":"3"}}}"#)
                .unwrap();
        let error = policy.convert(&three, None).unwrap_err().to_string();
        assert!(error.contains("150") && error.contains("multiple of 100"), "{error}");
    }

    #[test]
    fn what_no_card_can_give_is_refused_by_name() {
        for (limits, expected) in [
            (r#"{"nvidia.com/gpu":"1.5"}"#, "whole number"),
            (r#"{"nvidia.com/gpu":"-1"}"#, "whole number"),
            (r#"{"nvidia.com/gpu":"100000000"}"#, "whole number"),
            (r#"{"nvidia.com/mig-1g.5gb":"8"}"#, "112: more than 100 cores"),
        ] {
            let error = convert("main", limits, None).unwrap_err();
            assert!(error.starts_with("container main: ") && error.contains(expected), "{limits}: {error}");
        }
    }
}
