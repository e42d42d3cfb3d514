//! What annotations say, and how it is written.
//!
//! The card choice uses gpu-manager's keys (`pkg/types/types.go`), so that its tools read our pods and we read theirs.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ask::{ContainerAsk, ContainerKind, PodAsk};
use crate::names;
use crate::units::CardIndex;

/// Why an annotation cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("annotation {key}: {value:?}: expected {expected}")]
pub struct AnnotationError {
    /// Its key.
    pub key: String,
    /// Its value.
    pub value: String,
    /// The form it should have.
    pub expected: &'static str,
}

/// The extender's choice for a pod: cards of each container that asks for some.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// Name of the node.
    pub node: String,
    /// When it was made, nanoseconds since 1970.
    pub time: u128,
    /// Cards by container name.
    pub cards: BTreeMap<String, Vec<CardIndex>>,
}

/// The key under which a container's cards are written.
#[must_use]
pub fn card_key(container: &ContainerAsk) -> String {
    match container.kind {
        ContainerKind::App => format!("{}{}", names::PREDICATE_GPU_INDEX_PREFIX, container.position),
        ContainerKind::Init | ContainerKind::Sidecar => {
            format!("{}{}", names::PREDICATE_GPU_INDEX_INIT_PREFIX, container.position)
        }
    }
}

/// `0,1`.
#[must_use]
pub fn write_cards(cards: &[CardIndex]) -> String {
    cards.iter().map(|card| card.0.to_string()).collect::<Vec<_>>().join(",")
}

/// Reads `0,1`.
///
/// # Errors
/// The value, where it is not a comma-separated list of card indexes.
pub fn read_cards(key: &str, value: &str) -> Result<Vec<CardIndex>, AnnotationError> {
    value.split(',').map(|index| index.trim().parse().map(CardIndex)).collect::<Result<_, _>>().map_err(
        |_| AnnotationError {
            key: key.into(),
            value: value.into(),
            expected: "card indexes such as \"0\" or \"0,1\"",
        },
    )
}

impl Choice {
    /// The annotations that carry this choice in the Binding.
    #[must_use]
    pub fn write(&self, ask: &PodAsk) -> BTreeMap<String, String> {
        let mut annotations = BTreeMap::from([
            (names::PREDICATE_NODE.to_owned(), self.node.clone()),
            (names::PREDICATE_TIME.to_owned(), self.time.to_string()),
            (names::GPU_ASSIGNED.to_owned(), "false".to_owned()),
        ]);
        for container in ask.asking() {
            if let Some(cards) = self.cards.get(&container.name) {
                annotations.insert(card_key(container), write_cards(cards));
            }
        }
        annotations
    }

    /// Reads the choice from a pod's annotations; `None` where the pod carries none.
    ///
    /// # Errors
    /// The first annotation of the choice that cannot be read.
    pub fn read(
        annotations: &BTreeMap<String, String>,
        ask: &PodAsk,
    ) -> Result<Option<Self>, AnnotationError> {
        let mut cards = BTreeMap::new();
        for container in ask.asking() {
            let key = card_key(container);
            if let Some(value) = annotations.get(&key) {
                cards.insert(container.name.clone(), read_cards(&key, value)?);
            }
        }
        if cards.is_empty() {
            return Ok(None);
        }
        let time = match annotations.get(names::PREDICATE_TIME) {
            None => 0,
            Some(value) => value.parse().map_err(|_| AnnotationError {
                key: names::PREDICATE_TIME.into(),
                value: value.clone(),
                expected: "nanoseconds since 1970",
            })?,
        };
        Ok(Some(Self {
            node: annotations.get(names::PREDICATE_NODE).cloned().unwrap_or_default(),
            time,
            cards,
        }))
    }
}

/// Whether a key belongs to a choice: such annotations on a new pod were copied from another one.
#[must_use]
pub fn is_of_choice(key: &str) -> bool {
    key.starts_with(names::PREDICATE_GPU_INDEX_PREFIX)
        || key.starts_with(names::LEGACY_CARDS_PREFIX)
        || key.starts_with(names::CARD_UUIDS_PREFIX)
        || [names::PREDICATE_NODE, names::PREDICATE_TIME, names::GPU_ASSIGNED].contains(&key)
}

/// Which policy rewrote a pod: `name@generation`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PolicyRef {
    /// Name of the GPUMigration.
    pub name: String,
    /// Its `metadata.generation`.
    pub generation: i64,
}

impl From<PolicyRef> for String {
    fn from(policy: PolicyRef) -> Self {
        format!("{}@{}", policy.name, policy.generation)
    }
}

impl TryFrom<String> for PolicyRef {
    type Error = AnnotationError;

    fn try_from(value: String) -> Result<Self, AnnotationError> {
        let parsed = value
            .rsplit_once('@')
            .and_then(|(name, generation)| Some((name.to_owned(), generation.parse().ok()?)));
        match parsed {
            Some((name, generation)) if !name.is_empty() => Ok(Self { name, generation }),
            _ => Err(AnnotationError { key: names::POLICY.into(), value, expected: "name@generation" }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::Dialect;
    use proptest::prelude::*;
    use serde_json::json;

    fn two_containers() -> PodAsk {
        let limits = json!({"limits": {"tencent.com/vcuda-core": "200"}});
        let spec = json!({
            "initContainers": [{"name": "warm", "resources": limits}],
            "containers": [{"name": "plain"}, {"name": "main", "resources": limits}],
        });
        PodAsk::of_spec(&serde_json::from_value(spec).unwrap(), &Dialect::default()).unwrap()
    }

    #[test]
    fn a_choice_is_written_as_gpu_manager_reads_it() {
        let ask = two_containers();
        let cards = vec![CardIndex(2), CardIndex(3)];
        let choice = Choice {
            node: "gpu-07".into(),
            time: 1_700_000_000_000_000_000,
            cards: [("main".to_owned(), cards.clone()), ("warm".to_owned(), cards)].into(),
        };
        let annotations = choice.write(&ask);
        let expected = [
            ("tencent.com/gpu-assigned", "false"),
            ("tencent.com/predicate-gpu-idx-1", "2,3"),
            ("tencent.com/predicate-gpu-idx-init-0", "2,3"),
            ("tencent.com/predicate-node", "gpu-07"),
            ("tencent.com/predicate-time", "1700000000000000000"),
        ];
        assert!(annotations.iter().map(|(key, value)| (key.as_str(), value.as_str())).eq(expected));
        assert!(annotations.keys().all(|key| is_of_choice(key)));
        assert_eq!(Choice::read(&annotations, &ask), Ok(Some(choice)));
    }

    #[test]
    fn a_pod_without_a_choice_has_none() {
        assert_eq!(Choice::read(&BTreeMap::new(), &two_containers()), Ok(None));
    }

    #[test]
    fn a_broken_choice_names_its_key() {
        let annotations = BTreeMap::from([("tencent.com/predicate-gpu-idx-1".to_owned(), "0;1".to_owned())]);
        let error = Choice::read(&annotations, &two_containers()).unwrap_err().to_string();
        assert_eq!(
            error,
            r#"annotation tencent.com/predicate-gpu-idx-1: "0;1": expected card indexes such as "0" or "0,1""#
        );
    }

    proptest! {
        #[test]
        fn policies_read_back(name in "[a-z@.-]{1,20}", generation in any::<i64>()) {
            let policy = PolicyRef { name, generation };
            prop_assert_eq!(PolicyRef::try_from(String::from(policy.clone())), Ok(policy));
        }

        #[test]
        fn reading_never_panics(value in "\\PC{0,20}") {
            let _ = read_cards("key", &value);
            let _ = PolicyRef::try_from(value);
        }
    }
}
