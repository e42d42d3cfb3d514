//! Watches that go on for ever: after an error with back-off, past a malformed object with a warning and a count.

use std::fmt::Debug;

use futures::{Stream, StreamExt as _};
use kube::core::DeserializeGuard;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Config, Event, watcher};
use kube::{Api, Resource, ResourceExt as _};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use serde::de::DeserializeOwned;

/// Counts objects that were skipped because they could not be read: `…_watch_skipped_objects_total{kind}`.
#[derive(Clone, Debug, Default)]
pub struct SkippedObjects(Family<KindLabel, Counter>);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabel {
    kind: String,
}

impl SkippedObjects {
    /// Registers the counter; the registry's prefix names the component.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Objects that a watch or list skipped because they could not be read";
        registry.register("watch_skipped_objects", help, self.0.clone());
    }

    /// How many objects of a kind were skipped.
    #[must_use]
    pub fn count(&self, kind: &str) -> u64 {
        self.0.get_or_create(&KindLabel { kind: kind.to_owned() }).get()
    }

    fn check<K: Resource<DynamicType = ()>>(&self, object: &DeserializeGuard<K>) {
        if let Err(invalid) = &object.0 {
            let kind = K::kind(&()).into_owned();
            let namespace = invalid.metadata.namespace.as_deref().unwrap_or_default();
            tracing::warn!(%kind, namespace, name = object.name_any(), error = %invalid, "object skipped: it cannot be read");
            self.0.get_or_create(&KindLabel { kind }).inc();
        }
    }
}

#[derive(Debug)]
pub enum Update<K> {
    /// An object was listed, changed or deleted.
    Event(Event<K>),
    /// The watch was interrupted and is tried again; what is known stays.
    Interrupted,
    /// There is no such kind in this cluster; it is looked for again, at last every 30 s.
    Undefined,
}

/// What can be read from the API server.
pub trait Object: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static {}

impl<K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static> Object for K {}

/// Watches custom resources for ever. A malformed one is logged and counted; it is brought all the same, for its name.
pub fn watch_guarded<K: Object>(
    api: Api<DeserializeGuard<K>>,
    config: Config,
    skipped: SkippedObjects,
) -> impl Stream<Item = Update<DeserializeGuard<K>>> + Send + Unpin {
    watch(api, config).inspect(move |update| {
        if let Update::Event(Event::InitApply(object) | Event::Apply(object)) = update {
            skipped.check(object);
        }
    })
}

/// Watches objects for ever. Interruptions are logged here. A malformed object would interrupt the watch again and again: this
/// is for types that the API server itself validates.
pub fn watch<K: Object>(api: Api<K>, config: Config) -> impl Stream<Item = Update<K>> + Send + Unpin {
    let mut undefined = false;
    let update = move |event| match event {
        Ok(event) => {
            undefined = false;
            Update::Event(event)
        }
        Err(error) if is_undefined(&error) => {
            if !std::mem::replace(&mut undefined, true) {
                tracing::info!(kind = %K::kind(&()), "not defined in this cluster");
            }
            Update::Undefined
        }
        Err(error) => {
            tracing::warn!(kind = %K::kind(&()), %error, "watch interrupted; retrying");
            Update::Interrupted
        }
    };
    watcher(api, config).default_backoff().map(update).boxed()
}

/// Lists objects, without those that cannot be read.
///
/// # Errors
/// As [`Api::list`].
pub async fn list<K: Object>(
    api: &Api<DeserializeGuard<K>>,
    params: &kube::api::ListParams,
    skipped: &SkippedObjects,
) -> kube::Result<Vec<K>> {
    let items = api.list(params).await?.items;
    items.iter().for_each(|object| skipped.check(object));
    Ok(items.into_iter().filter_map(|object| object.0.ok()).collect())
}

/// The custom resource is not defined in this cluster.
fn is_undefined(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::InitialListFailed(kube::Error::Api(status)) if status.code == 404)
}
