//! A copy of all objects of a resource, kept up to date by a watch.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::StreamExt;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Resource};
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::api::object::uid;

#[derive(Debug, Default)]
pub struct Cache {
    objects: Mutex<BTreeMap<String, Arc<Value>>>,
}

impl Cache {
    /// Follows a resource until `stop`. Every change counts `changed` up.
    pub fn follow<K>(api: Api<K>, changed: Arc<watch::Sender<u64>>, stop: CancellationToken) -> Arc<Self>
    where
        K: Resource + Clone + std::fmt::Debug + DeserializeOwned + Serialize + Send + Sync + 'static,
    {
        let cache = Arc::new(Self::default());
        let kept = cache.clone();
        tokio::spawn(stop.run_until_cancelled_owned(async move {
            // Without a pause a server that is gone would be asked so fast that no other task gets its turn.
            let mut events = watcher::watcher(api, watcher::Config::default()).default_backoff().boxed();
            let mut fresh = BTreeMap::new();
            while let Some(event) = events.next().await {
                match event {
                    Ok(Event::Init) => fresh.clear(),
                    Ok(Event::InitApply(object)) => {
                        if let Ok(object) = serde_json::to_value(&object) {
                            fresh.insert(uid(&object).to_owned(), Arc::new(object));
                        }
                        continue;
                    }
                    Ok(Event::InitDone) => *kept.objects.lock() = std::mem::take(&mut fresh),
                    Ok(Event::Apply(object)) => {
                        if let Ok(object) = serde_json::to_value(&object) {
                            kept.objects.lock().insert(uid(&object).to_owned(), Arc::new(object));
                        }
                    }
                    Ok(Event::Delete(object)) => {
                        kept.objects.lock().remove(&object.meta().uid.clone().unwrap_or_default());
                    }
                    Err(error) => {
                        tracing::debug!(%error, "a watch is opened again");
                        continue;
                    }
                }
                changed.send_modify(|count| *count += 1);
            }
        }));
        cache
    }

    pub fn all(&self) -> Vec<Arc<Value>> {
        self.objects.lock().values().cloned().collect()
    }

    pub fn get(&self, uid: &str) -> Option<Arc<Value>> {
        self.objects.lock().get(uid).cloned()
    }
}
