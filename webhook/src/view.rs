//! A pod as the webhook needs to see it: the few fields that matter, borrowed from the bytes they came in.
//!
//! A review into these structs costs a fraction of one into `Pod`: what is not named here is skipped. Fields that are
//! rarely needed stay raw and are parsed on demand.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

/// A pod, or the pod template of a workload. Both parts must be there: patches add to them.
#[derive(Debug, Default, serde::Deserialize)]
pub struct PodView<'a> {
    /// Its metadata.
    #[serde(borrow)]
    pub metadata: MetaView<'a>,
    /// Its spec.
    #[serde(borrow)]
    pub spec: SpecView<'a>,
}

/// The metadata of a pod.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct MetaView<'a> {
    /// Absent for pods that a controller names.
    #[serde(borrow)]
    pub name: Option<Text<'a>>,
    /// Prefix of the name that the API server will make.
    #[serde(borrow)]
    pub generate_name: Option<Text<'a>>,
    /// Labels.
    #[serde(borrow)]
    pub labels: Option<Pairs<'a, Text<'a>>>,
    /// Annotations.
    #[serde(borrow)]
    pub annotations: Option<Pairs<'a, Text<'a>>>,
    /// Who made it.
    #[serde(borrow)]
    pub owner_references: Option<Vec<OwnerView<'a>>>,
}

/// One owner.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(default)]
pub struct OwnerView<'a> {
    /// `ReplicaSet`, `Job`, …
    #[serde(borrow)]
    pub kind: Option<Text<'a>>,
    /// Its UID.
    #[serde(borrow)]
    pub uid: Option<Text<'a>>,
    /// Whether it is the managing controller.
    pub controller: Option<bool>,
}

/// The spec of a pod.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SpecView<'a> {
    /// App containers.
    #[serde(borrow)]
    pub containers: Option<Vec<ContainerView<'a>>>,
    /// Init containers and sidecars.
    #[serde(borrow)]
    pub init_containers: Option<Vec<ContainerView<'a>>>,
    /// Set on pods that are placed already.
    #[serde(borrow)]
    pub node_name: Option<Text<'a>>,
    /// Who places it.
    #[serde(borrow)]
    pub scheduler_name: Option<Text<'a>>,
    /// Runtime class.
    #[serde(borrow)]
    pub runtime_class_name: Option<Text<'a>>,
    /// Labels that its node must have.
    #[serde(borrow)]
    pub node_selector: Option<Pairs<'a, Text<'a>>>,
    /// Parsed only when a policy edits them.
    #[serde(borrow)]
    pub tolerations: Option<&'a RawValue>,
    /// Parsed only when a policy depends on the card's product.
    #[serde(borrow)]
    pub affinity: Option<&'a RawValue>,
    /// Parsed only for members of a gang.
    #[serde(borrow)]
    pub scheduling_gates: Option<&'a RawValue>,
}

/// A container of any kind.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(default)]
pub struct ContainerView<'a> {
    /// Its name.
    #[serde(borrow)]
    pub name: Text<'a>,
    /// Limits and requests.
    #[serde(borrow)]
    pub resources: Option<ResourcesView<'a>>,
    /// Parsed only when it may name the variable we are after.
    #[serde(borrow)]
    pub env: Option<&'a RawValue>,
}

/// Limits and requests of a container.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(default)]
pub struct ResourcesView<'a> {
    /// Limits.
    #[serde(borrow)]
    pub limits: Option<Pairs<'a, Amount<'a>>>,
    /// Requests.
    #[serde(borrow)]
    pub requests: Option<Pairs<'a, Amount<'a>>>,
    /// Claims of dynamic resource allocation: such a container gets its devices another way.
    #[serde(borrow)]
    pub claims: Option<&'a RawValue>,
}

impl<'a> PodView<'a> {
    /// A label's value.
    #[must_use]
    pub fn label(&self, key: &str) -> Option<&str> {
        self.metadata.labels.as_ref().and_then(|labels| labels.get(key)).map(Text::as_str)
    }

    /// An annotation's value.
    #[must_use]
    pub fn annotation(&self, key: &str) -> Option<&str> {
        self.metadata.annotations.as_ref().and_then(|all| all.get(key)).map(Text::as_str)
    }

    /// The UID of the controller that made the pod.
    #[must_use]
    pub fn controller_uid(&self) -> Option<&str> {
        let owners = self.metadata.owner_references.as_deref().unwrap_or_default();
        owners.iter().find(|owner| owner.controller == Some(true))?.uid.as_ref().map(Text::as_str)
    }

    /// Every container with where it is, init containers first.
    pub fn containers(&self) -> impl Iterator<Item = (Place, &ContainerView<'a>)> {
        let init = self.spec.init_containers.as_deref().unwrap_or_default().iter().enumerate();
        let app = self.spec.containers.as_deref().unwrap_or_default().iter().enumerate();
        let init = init.map(|(index, container)| (Place { init: true, index }, container));
        init.chain(app.map(|(index, container)| (Place { init: false, index }, container)))
    }
}

/// Where a container is in the spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// In `initContainers` (which also hold the sidecars), else in `containers`.
    pub init: bool,
    /// Index in the list.
    pub index: usize,
}

impl Place {
    /// The field of the spec.
    #[must_use]
    pub const fn list(self) -> &'static str {
        if self.init { "initContainers" } else { "containers" }
    }
}

impl<'a> ContainerView<'a> {
    /// Limit and request of a resource, as they were written.
    #[must_use]
    pub fn amounts(&self, resource: &str) -> (Option<&Amount<'a>>, Option<&Amount<'a>>) {
        let Some(resources) = &self.resources else { return (None, None) };
        let find =
            |map: &'_ Option<Pairs<'a, Amount<'a>>>| map.as_ref().and_then(|map| map.position(resource));
        let limit = find(&resources.limits).and_then(|i| resources.limits.as_ref().map(|m| &m.0[i].1));
        let request = find(&resources.requests).and_then(|i| resources.requests.as_ref().map(|m| &m.0[i].1));
        (limit, request)
    }

    /// Names of all resources it asks for; one with limit and request comes twice.
    pub fn resource_names(&self) -> impl Iterator<Item = &str> {
        let maps = self.resources.iter().flat_map(|r| [r.limits.as_ref(), r.requests.as_ref()]);
        maps.flatten().flat_map(|map| map.0.iter().map(|(name, _)| name.as_str()))
    }

    /// The entries of `env` that set `variable`.
    #[must_use]
    pub fn env_entries(&self, variable: &str) -> EnvEntries {
        let Some(raw) = self.env else { return EnvEntries::default() };
        let text = raw.get();
        // An escape could hide the name from the search.
        if !text.contains(variable) && !text.contains('\\') {
            return EnvEntries { has_list: true, entries: Vec::new() };
        }
        // What is no list is no pod either; saying "there is a list" keeps it from being overwritten.
        let Ok(Value::Array(entries)) = serde_json::from_str(text) else {
            return EnvEntries { has_list: true, entries: Vec::new() };
        };
        let ours = |entry: &Value| entry.get("name").and_then(Value::as_str) == Some(variable);
        let entries = entries.into_iter().enumerate().filter(|(_, entry)| ours(entry)).collect();
        EnvEntries { has_list: true, entries }
    }
}

/// What a container's `env` says about one variable.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EnvEntries {
    /// Whether there is a list to add to.
    pub has_list: bool,
    /// The entries that set the variable, with their indexes.
    pub entries: Vec<(usize, Value)>,
}

/// A string, borrowed where the JSON text has no escapes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Text<'a>(pub Cow<'a, str>);

impl Text<'_> {
    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;
        impl<'de> Visitor<'de> for TextVisitor {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }

            // Some clients write null where they mean nothing.
            fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
                Ok(Text::default())
            }
        }
        deserializer.deserialize_any(TextVisitor)
    }
}

/// A quantity as it was written: mostly a string, a bare number in hand-written manifests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Amount<'a> {
    /// `"2"`
    Text(Cow<'a, str>),
    /// `2`
    Number(serde_json::Number),
}

impl Amount<'_> {
    /// The quantity's text.
    #[must_use]
    pub fn text(&self) -> Cow<'_, str> {
        match self {
            Self::Text(text) => Cow::Borrowed(text),
            Self::Number(number) => Cow::Owned(number.to_string()),
        }
    }

    /// Appends it as JSON, exactly as it was written.
    pub(crate) fn write(&self, out: &mut String) {
        match self {
            Self::Text(text) => crate::text::string(out, text),
            Self::Number(number) => out.push_str(&number.to_string()),
        }
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Amount<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AmountVisitor;
        impl<'de> Visitor<'de> for AmountVisitor {
            type Value = Amount<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a quantity")
            }

            fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Amount::Text(Cow::Borrowed(text)))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Amount::Text(Cow::Owned(text.to_owned())))
            }

            fn visit_u64<E: Error>(self, number: u64) -> Result<Self::Value, E> {
                Ok(Amount::Number(number.into()))
            }

            fn visit_i64<E: Error>(self, number: i64) -> Result<Self::Value, E> {
                Ok(Amount::Number(number.into()))
            }

            fn visit_f64<E: Error>(self, number: f64) -> Result<Self::Value, E> {
                serde_json::Number::from_f64(number)
                    .map(Amount::Number)
                    .ok_or_else(|| E::custom(format!("{number} is not a quantity")))
            }
        }
        deserializer.deserialize_any(AmountVisitor)
    }
}

/// A small JSON object in its order; looked up by search, since these have a handful of keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pairs<'a, V>(pub Vec<(Text<'a>, V)>);

impl<V> Pairs<'_, V> {
    /// The value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&V> {
        self.0.iter().find(|(name, _)| name.as_str() == key).map(|(_, value)| value)
    }

    fn position(&self, key: &str) -> Option<usize> {
        self.0.iter().position(|(name, _)| name.as_str() == key)
    }
}

impl<'de: 'a, 'a, V: Deserialize<'de>> Deserialize<'de> for Pairs<'a, V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PairsVisitor<'a, V>(PhantomData<(&'a (), V)>);
        impl<'de: 'a, 'a, V: Deserialize<'de>> Visitor<'de> for PairsVisitor<'a, V> {
            type Value = Pairs<'a, V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
                let mut pairs = Vec::with_capacity(map.size_hint().unwrap_or(4).min(32));
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(PairsVisitor(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_borrowed_and_unknown_fields_skipped() {
        let text = r#"{"metadata":{"name":"p","labels":{"a":"b"},"managedFields":[{"x":1}],"creationTimestamp":null},
            "spec":{"containers":[{"name":"c","image":"i","resources":{"limits":{"nvidia.com/gpu":1,"cpu":"1"}}}]}}"#;
        let pod: PodView<'_> = serde_json::from_str(text).unwrap();
        assert!(matches!(pod.metadata.name, Some(Text(Cow::Borrowed("p")))));
        assert_eq!(pod.label("a"), Some("b"));
        let (limit, request) = pod.spec.containers.as_ref().unwrap()[0].amounts("nvidia.com/gpu");
        assert_eq!((limit.map(|amount| amount.text().into_owned()), request), (Some("1".into()), None));
    }

    #[test]
    fn an_escaped_variable_name_is_found() {
        let text = r#"{"name":"c","env":[{"name":"A","value":"1"},{"name":"NVIDIA\u005fVISIBLE_DEVICES","value":"all"}]}"#;
        let container: ContainerView<'_> = serde_json::from_str(text).unwrap();
        let found = container.env_entries("NVIDIA_VISIBLE_DEVICES");
        assert!(found.has_list && found.entries.len() == 1 && found.entries[0].0 == 1, "{found:?}");
    }
}
