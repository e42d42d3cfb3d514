//! A view that kube can list and watch in place of the whole object: what is not needed is never built.

use std::borrow::Cow;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::{Deserialize, Deserializer};

use super::MetaView;
use super::json::{IntoOwned, Text};

/// A view of an object of the core group.
pub trait Watchable: Sized + 'static {
    /// The same view, borrowed from the text that it is read from.
    type Borrowed<'a>: Deserialize<'a> + IntoOwned<Owned = Self>;
    /// Namespaced or not.
    type Scope;
    /// `kind` of the object.
    const KIND: &'static str;
    /// Name of the resource in URLs.
    const PLURAL: &'static str;
    /// Metadata of the object.
    fn metadata(&self) -> &MetaView<'static>;
}

/// An object of a watch.
#[derive(Clone, Debug)]
pub struct Watched<V> {
    /// Name, namespace, UID and version.
    pub metadata: ObjectMeta,
    /// The rest that is needed.
    pub view: V,
}

impl<'de, V: Watchable> Deserialize<'de> for Watched<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let view = V::Borrowed::deserialize(deserializer)?.into_owned();
        let MetaView { name, namespace, uid, resource_version, .. } = view.metadata();
        let text = |text: &Text<'_>| (!text.is_empty()).then(|| text.to_string());
        let metadata = ObjectMeta {
            name: text(name),
            namespace: text(namespace),
            uid: text(uid),
            resource_version: resource_version.as_ref().and_then(text),
            ..ObjectMeta::default()
        };
        Ok(Self { metadata, view })
    }
}

impl<V: Watchable> Resource for Watched<V> {
    type DynamicType = ();
    type Scope = V::Scope;

    fn kind((): &()) -> Cow<'_, str> {
        V::KIND.into()
    }
    fn group((): &()) -> Cow<'_, str> {
        "".into()
    }
    fn version((): &()) -> Cow<'_, str> {
        "v1".into()
    }
    fn plural((): &()) -> Cow<'_, str> {
        V::PLURAL.into()
    }
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}
