//! Watches that go on for ever: after an error with back-off, past a malformed object with a warning and a count.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::future::ready;

use futures::{Stream, StreamExt as _, stream};
use kube::api::{ApiResource, DynamicObject};
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
    /// There is no such kind in this cluster, or for [`watch_dynamic`] no right to it; it is looked for again, at last every 30 s.
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
    watch_kind(api, config, K::kind(&()).into_owned(), is_undefined)
}

/// The same for a kind that is known only while the program runs. Without the right to list and watch it, it counts as undefined.
pub fn watch_dynamic(
    api: Api<DynamicObject>,
    config: Config,
    resource: &ApiResource,
) -> impl Stream<Item = Update<DynamicObject>> + Send + Unpin + use<> {
    let kind = format!("{}.{}", resource.plural, resource.group);
    watch_kind(api, config, kind, |error| is_undefined(error) || is_forbidden(error))
}

fn watch_kind<K: Resource + Clone + Debug + DeserializeOwned + Send + 'static>(
    api: Api<K>,
    config: Config,
    kind: String,
    is_undefined: fn(&watcher::Error) -> bool,
) -> impl Stream<Item = Update<K>> + Send + Unpin {
    let mut undefined = false;
    let update = move |event| match event {
        Ok(event) => {
            undefined = false;
            Update::Event(event)
        }
        Err(error) if is_undefined(&error) => {
            match (std::mem::replace(&mut undefined, true), is_forbidden(&error)) {
                (true, _) => {}
                (false, true) => tracing::warn!(kind, %error, "not allowed: grant list and watch"),
                (false, false) => tracing::info!(kind, "not defined in this cluster"),
            }
            Update::Undefined
        }
        Err(error) => {
            tracing::warn!(kind, %error, "watch interrupted; retrying");
            Update::Interrupted
        }
    };
    // kube's back-off ends with each event, and a list has one before it is asked for: that one waits for what follows it.
    let events = watcher(api, config).scan(false, |begun, event| {
        ready(Some(match event {
            Ok(Event::Init) => {
                *begun = true;
                None
            }
            Ok(event) => Some(Ok((std::mem::take(begun), event))),
            Err(error) => Some(Err(error)),
        }))
    });
    let events = events.filter_map(ready).default_backoff().flat_map(|event| match event {
        Ok((begun, event)) => stream::iter([begun.then_some(Ok(Event::Init)), Some(Ok(event))]),
        Err(error) => stream::iter([None, Some(Err(error))]),
    });
    events.filter_map(ready).map(update).boxed()
}

/// What a watch has shown so far, reduced to what is needed of each object; kube's reflector keeps whole objects.
#[derive(Clone, Debug)]
pub struct Gathered<Id, V> {
    /// What there is.
    pub live: BTreeMap<Id, V>,
    /// What the listing in progress has shown.
    listing: BTreeSet<Id>,
    /// Everything was listed once.
    pub listed: bool,
}

impl<Id, V> Default for Gathered<Id, V> {
    fn default() -> Self {
        Self { live: BTreeMap::new(), listing: BTreeSet::new(), listed: false }
    }
}

impl<Id: Ord + Clone, V> Gathered<Id, V> {
    /// Takes an event; `read` gives what is needed of an object, `None` where that is nothing. True where `live` is complete and may have
    /// changed. What a new listing lacks is removed at its end.
    pub fn take<K>(&mut self, event: Event<K>, read: impl Fn(&K) -> (Id, Option<V>)) -> bool {
        match event {
            Event::Init => self.listing.clear(),
            Event::InitApply(object) => {
                let (id, value) = read(&object);
                if value.is_some() {
                    self.listing.insert(id.clone());
                }
                self.set(id, value);
            }
            Event::InitDone => {
                let listing = std::mem::take(&mut self.listing);
                self.live.retain(|id, _| listing.contains(id));
                self.listed = true;
                return true;
            }
            Event::Apply(object) => {
                let (id, value) = read(&object);
                return self.set(id, value);
            }
            Event::Delete(object) => return self.live.remove(&read(&object).0).is_some(),
        }
        false
    }

    /// There is nothing: the kind is not defined.
    pub fn clear(&mut self) {
        *self = Self { listed: true, ..Self::default() };
    }

    fn set(&mut self, id: Id, value: Option<V>) -> bool {
        match value {
            Some(value) => {
                self.live.insert(id, value);
                true
            }
            None => self.live.remove(&id).is_some(),
        }
    }
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

fn is_forbidden(error: &watcher::Error) -> bool {
    matches!(
        error,
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) if status.code == 403
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use k8s_openapi::api::core::v1::Node;
    use kube::client::Body;

    use super::*;

    /// A client of a server that gives these answers, the last for ever; and how often it was asked.
    fn client(answers: &'static [(u16, &'static str)]) -> (kube::Client, Arc<AtomicUsize>) {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        let service = tower::service_fn(move |_: http::Request<Body>| {
            let index = count.fetch_add(1, Ordering::Relaxed).min(answers.len() - 1);
            let (status, body) = answers[index];
            let answer = http::Response::builder().status(status).body(Body::from(body.as_bytes().to_vec()));
            ready(answer)
        });
        (kube::Client::new(service, "default"), asked)
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_that_fails_is_tried_less_and_less_often() {
        let (client, asked) = client(&[(500, "")]);
        let mut updates = watch(Api::<Node>::all(client), Config::default());
        let tries = async { while let Some(Update::Interrupted) = updates.next().await {} };
        assert!(tokio::time::timeout(Duration::from_secs(600), tries).await.is_err(), "it ends");
        // 0.8 s that double to 30 s, with jitter up to twice as much.
        let asked = asked.load(Ordering::Relaxed);
        assert!((10..=30).contains(&asked), "asked {asked} times in ten minutes");
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_begins_with_its_event_once_it_is_there() {
        const EMPTY: &str =
            r#"{"kind": "NodeList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": []}"#;
        let (client, _) = client(&[(500, ""), (200, EMPTY), (500, "")]);
        let mut updates = watch(Api::<Node>::all(client), Config::default());
        let seen: Vec<_> = updates.by_ref().take(4).map(|update| format!("{update:?}")).collect().await;
        assert_eq!(seen, ["Interrupted", "Event(Init)", "Event(InitDone)", "Interrupted"]);
    }

    #[test]
    fn what_a_new_listing_lacks_is_gone_at_its_end_and_not_before() {
        let mut gathered = Gathered::<&str, u32>::default();
        // An object is its name and a number; zero is not needed.
        let mut take = |event| {
            let complete =
                gathered.take(event, |(name, value)| (*name, Some(*value).filter(|value| *value > 0)));
            (complete, gathered.live.clone().into_iter().collect::<Vec<_>>())
        };
        assert_eq!(take(Event::Init), (false, vec![]));
        assert!(!take(Event::InitApply(("a", 1))).0);
        assert!(!take(Event::InitApply(("b", 0))).0);
        assert_eq!(take(Event::InitDone), (true, vec![("a", 1)]));
        assert_eq!(take(Event::Apply(("b", 0))), (false, vec![("a", 1)]), "it is not needed");
        assert_eq!(take(Event::Apply(("b", 2))), (true, vec![("a", 1), ("b", 2)]));
        assert_eq!(take(Event::Apply(("a", 0))), (true, vec![("b", 2)]));
        assert_eq!(take(Event::Apply(("a", 3))), (true, vec![("a", 3), ("b", 2)]));
        // The watch was lost and lists again.
        assert_eq!(take(Event::Init), (false, vec![("a", 3), ("b", 2)]));
        assert_eq!(take(Event::InitApply(("b", 5))), (false, vec![("a", 3), ("b", 5)]));
        assert_eq!(take(Event::InitDone), (true, vec![("b", 5)]));
        assert_eq!(take(Event::Delete(("b", 5))), (true, vec![]));
        gathered.clear();
        assert!(gathered.listed);
    }
}
