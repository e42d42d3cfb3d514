//! The part of a Node that placement depends on.

use std::fmt;

use gpu_migrate_model::into_owned;
use gpu_migrate_model::score::Resources;
use gpu_migrate_model::view::json::Text;
use gpu_migrate_model::view::{MetaView, Watchable};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct NodeView<'a> {
    #[serde(borrow)]
    pub metadata: MetaView<'a>,
    #[serde(borrow)]
    pub status: NodeStatus<'a>,
}

/// Status of a Node: its resources only.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct NodeStatus<'a> {
    #[serde(borrow)]
    pub capacity: Resources<'a>,
    #[serde(borrow)]
    pub allocatable: Resources<'a>,
}

into_owned!(NodeView { metadata, status });
into_owned!(NodeStatus { capacity, allocatable });

impl Watchable for NodeView<'static> {
    type Borrowed<'a> = NodeView<'a>;
    type Scope = k8s_openapi::ClusterResourceScope;
    const KIND: &'static str = "Node";
    const PLURAL: &'static str = "nodes";

    fn metadata(&self) -> &MetaView<'static> {
        &self.metadata
    }
}

/// A node of a request, as text with its name.
#[derive(Debug)]
pub struct NodeItem<'a> {
    pub name: Text<'a>,
    /// The whole object, to be handed back unchanged.
    pub raw: &'a RawValue,
}

impl<'a> NodeItem<'a> {
    /// Finds the name in `raw` and reads no further.
    ///
    /// # Errors
    /// Where the object is no node.
    pub fn new(raw: &'a RawValue) -> Result<Self, serde_json::Error> {
        let mut name = None;
        let mut reader = serde_json::Deserializer::from_str(raw.get());
        // Stopping half-way is an error to serde_json; with the name in hand that error means nothing.
        match (NameOfObject(&mut name).deserialize(&mut reader), name) {
            (_, Some(name)) => Ok(Self { name, raw }),
            (Ok(()), None) => Err(serde::de::Error::missing_field("metadata.name")),
            (Err(error), None) => Err(error),
        }
    }

    /// Reads the rest, for a node that is not known from the watch.
    ///
    /// # Errors
    /// Where the object is no node.
    pub fn view(&self) -> Result<NodeView<'a>, serde_json::Error> {
        serde_json::from_str(self.raw.get())
    }
}

/// Looks for one string field in the object under it, and stops there.
struct NameOfObject<'n, 'a>(&'n mut Option<Text<'a>>);
struct NameOfMeta<'n, 'a>(&'n mut Option<Text<'a>>);

macro_rules! seek {
    ($seeker:ident, $field:literal, |$map:ident, $info:ident| $take:expr) => {
        impl<'de: 'a, 'a> DeserializeSeed<'de> for $seeker<'_, 'a> {
            type Value = ();
            fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
                deserializer.deserialize_map(self)
            }
        }
        impl<'de: 'a, 'a> Visitor<'de> for $seeker<'_, 'a> {
            type Value = ();
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with metadata.name")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut $map: A) -> Result<(), A::Error> {
                let $info = self.0;
                while let Some(key) = $map.next_key::<Text<'de>>()? {
                    if &*key == $field {
                        $take;
                        if $info.is_some() {
                            return Err(serde::de::Error::custom("found"));
                        }
                    } else {
                        $map.next_value::<IgnoredAny>()?;
                    }
                }
                Ok(())
            }
        }
    };
}
seek!(NameOfObject, "metadata", |map, info| map.next_value_seed(NameOfMeta(info))?);
seek!(NameOfMeta, "name", |map, info| *info = Some(map.next_value()?));
