//! The objects, in memory, and a log of their changes by resource version.
//!
//! One lock, held for one read-modify-write. The log is what watches read: whoever falls behind its end gets 410, as from etcd
//! after a compaction.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::watch;

use super::object::{meta, metadata};
use super::status::Refusal;

/// `group/plural`; the core group is empty.
pub type ResourceId = Arc<str>;

/// Namespace (empty where there is none) and name.
pub type Name = (String, String);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Added,
    Modified,
    /// It is gone; the object is its last state.
    Deleted,
}

#[derive(Clone, Debug)]
pub struct Event {
    /// Resource version after the change.
    pub revision: u64,
    pub change: Change,
    /// To what kind of object.
    pub resource: ResourceId,
    pub object: Arc<Value>,
    /// The object before it: a watch with a selector tells by it whether the object came into view or left it.
    pub before: Option<Arc<Value>>,
}

/// What a decision about one object comes to.
#[derive(Debug)]
pub enum Write {
    /// Store this. The store sets the resource version.
    Put(Value),
    Remove,
}

#[derive(Debug)]
pub struct Store {
    inner: Mutex<Inner>,
    revision: watch::Sender<u64>,
    capacity: usize,
}

#[derive(Debug, Default)]
struct Inner {
    objects: BTreeMap<ResourceId, BTreeMap<Name, Arc<Value>>>,
    log: VecDeque<Event>,
    /// Revision of the last event that was dropped from the log.
    compacted: u64,
    revision: u64,
}

impl Store {
    /// An empty store that remembers the last `capacity` changes.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        // Version 0 means "any" to clients; so an empty store is at 1.
        let inner = Inner { revision: 1, ..Inner::default() };
        Self { inner: Mutex::new(inner), revision: watch::Sender::new(1), capacity }
    }

    /// Says when the revision has grown.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.revision.subscribe()
    }

    pub fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<Arc<Value>> {
        let inner = self.inner.lock();
        inner.objects.get(resource)?.get(&(namespace.to_owned(), name.to_owned())).cloned()
    }

    /// All objects of a resource, in one namespace if given, by name; and the revision at which this was so.
    pub fn list(&self, resource: &str, namespace: Option<&str>) -> (Vec<Arc<Value>>, u64) {
        let inner = self.inner.lock();
        let of_resource = inner.objects.get(resource).into_iter().flatten();
        let wanted = of_resource.filter(|((of, _), _)| namespace.is_none_or(|ns| ns == of));
        (wanted.map(|(_, object)| object.clone()).collect(), inner.revision)
    }

    /// The names of all objects of a namespace, with their resources.
    pub fn inhabitants(&self, namespace: &str) -> Vec<(ResourceId, Name)> {
        let inner = self.inner.lock();
        let all = inner.objects.iter().flat_map(|(id, objects)| objects.keys().map(move |name| (id, name)));
        all.filter(|(_, name)| name.0 == namespace).map(|(id, name)| (id.clone(), name.clone())).collect()
    }

    pub fn everything(&self) -> Vec<(ResourceId, Arc<Value>)> {
        let inner = self.inner.lock();
        inner.objects.iter().flat_map(|(id, all)| all.values().map(|o| (id.clone(), o.clone()))).collect()
    }

    /// Decides about one object and writes it, with nobody in between. `decide` sees the object or `None`.
    ///
    /// An object written back as it was is no change: no event, the same resource version.
    ///
    /// # Errors
    /// What `decide` refused.
    pub fn change(
        &self,
        resource: &ResourceId,
        name: &Name,
        decide: impl FnOnce(Option<&Arc<Value>>) -> Result<Write, Refusal>,
    ) -> Result<Arc<Value>, Refusal> {
        let mut inner = self.inner.lock();
        let before = inner.objects.get(resource).and_then(|all| all.get(name)).cloned();
        let (change, object) = match decide(before.as_ref())? {
            Write::Put(object) => {
                if let Some(before) = before.as_ref().filter(|before| same(before, &object)) {
                    return Ok(before.clone());
                }
                let change = if before.is_some() { Change::Modified } else { Change::Added };
                (change, object)
            }
            Write::Remove => match &before {
                None => return Err(Refusal::not_found(plural(resource), &name.1)),
                Some(before) => (Change::Deleted, Value::clone(before)),
            },
        };
        let object = inner.record(self.capacity, resource, name, change, object, before);
        self.revision.send_replace(inner.revision);
        Ok(object)
    }

    /// The changes of a resource after `revision`, and the revision up to which this is all.
    ///
    /// # Errors
    /// 410 where some of them are forgotten.
    pub fn since(&self, resource: &str, revision: u64) -> Result<(Vec<Event>, u64), Refusal> {
        let inner = self.inner.lock();
        if revision < inner.compacted {
            return Err(Refusal::expired(revision, inner.compacted));
        }
        let first = inner.log.partition_point(|event| event.revision <= revision);
        let events =
            inner.log.iter().skip(first).filter(|event| *event.resource == *resource).cloned().collect();
        Ok((events, inner.revision))
    }
}

impl Inner {
    fn record(
        &mut self,
        capacity: usize,
        resource: &ResourceId,
        name: &Name,
        change: Change,
        mut object: Value,
        before: Option<Arc<Value>>,
    ) -> Arc<Value> {
        self.revision += 1;
        metadata(&mut object).insert("resourceVersion".into(), self.revision.to_string().into());
        let object = Arc::new(object);
        let of_resource = self.objects.entry(resource.clone()).or_default();
        match change {
            Change::Deleted => of_resource.remove(name),
            Change::Added | Change::Modified => of_resource.insert(name.clone(), object.clone()),
        };
        let (revision, resource) = (self.revision, resource.clone());
        self.log.push_back(Event { revision, change, resource, object: object.clone(), before });
        while self.log.len() > capacity {
            if let Some(dropped) = self.log.pop_front() {
                self.compacted = dropped.revision;
            }
        }
        object
    }
}

/// Equal but for the resource version and the times of managed fields.
fn same(before: &Value, after: &Value) -> bool {
    let bare = |object: &Value| {
        let mut object = object.clone();
        let metadata = metadata(&mut object);
        metadata.remove("resourceVersion");
        for entry in metadata.get_mut("managedFields").and_then(Value::as_array_mut).into_iter().flatten() {
            if let Some(entry) = entry.as_object_mut() {
                entry.remove("time");
            }
        }
        object
    };
    before.get("spec") == after.get("spec") && bare(before) == bare(after)
}

/// The plural of a resource id.
#[must_use]
pub fn plural(resource: &str) -> &str {
    resource.rsplit_once('/').map_or(resource, |(_, plural)| plural)
}

/// The resource version of an object as a number; 0 where there is none.
#[must_use]
pub fn version(object: &Value) -> u64 {
    meta(object, "resourceVersion").parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn put(store: &Store, name: &str, value: u32) -> u64 {
        let object = json!({"metadata": {"name": name}, "data": value});
        let id: ResourceId = "/configmaps".into();
        version(&store.change(&id, &("ns".into(), name.into()), |_| Ok(Write::Put(object))).unwrap())
    }

    #[test]
    fn the_log_forgets_and_says_so() {
        let store = Store::new(3);
        let first = put(&store, "a", 0);
        for value in 1..=3 {
            put(&store, "a", value);
        }
        assert_eq!(store.since("/configmaps", first - 1).unwrap_err().code, http::StatusCode::GONE);
        let (events, to) = store.since("/configmaps", first).unwrap();
        assert_eq!((events.len(), to), (3, first + 3));
        assert_eq!(store.since("/pods", first).unwrap().0.len(), 0);
    }

    #[test]
    fn what_is_written_back_unchanged_is_no_change() {
        let store = Store::new(9);
        let first = put(&store, "a", 1);
        assert_eq!(put(&store, "a", 1), first);
        assert_eq!(put(&store, "a", 2), first + 1);
    }

    #[test]
    fn a_deletion_has_a_version_of_its_own() {
        let store = Store::new(9);
        let first = put(&store, "a", 1);
        let id: ResourceId = "/configmaps".into();
        let gone = store.change(&id, &("ns".into(), "a".into()), |_| Ok(Write::Remove)).unwrap();
        assert_eq!(version(&gone), first + 1);
        let (events, _) = store.since("/configmaps", first).unwrap();
        assert_eq!(events[0].change, Change::Deleted);
        assert!(store.get("/configmaps", "ns", "a").is_none());
    }
}
