//! What the page shows, with a version for each change: a viewer gets what is newer than what it has.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::{Stream, StreamExt as _};
use gpu_migrate_runtime::watch::{Object, Update};
use kube::ResourceExt as _;
use kube::core::DeserializeGuard;
use kube::runtime::watcher::Event;
use serde::Serialize;
use serde_json::value::RawValue;
use tokio::sync::watch;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Kind {
    Node,
    Project,
}

/// The rows of all objects.
#[derive(Debug)]
pub struct Feed {
    /// Of this process.
    epoch: u64,
    state: Mutex<Rows>,
    version: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Rows {
    version: u64,
    rows: BTreeMap<(Kind, String), Row>,
    listed: BTreeSet<Kind>,
}

/// One object; without a text it is gone.
#[derive(Debug)]
struct Row {
    version: u64,
    text: Option<Box<RawValue>>,
}

/// What a viewer lacks.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Batch {
    /// Of the state that the viewer has with it.
    #[serde(skip)]
    pub id: String,
    /// It is all there is: what the viewer has is of another process, or nothing.
    all: bool,
    /// The cluster has been read once.
    complete: bool,
    nodes: Vec<Box<RawValue>>,
    projects: Vec<Box<RawValue>>,
    gone: Vec<Gone>,
}

#[derive(Debug, Serialize)]
struct Gone {
    kind: Kind,
    name: String,
}

impl Batch {
    /// As the data of an event.
    #[must_use]
    pub fn json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

impl Feed {
    /// Nothing is known yet.
    #[must_use]
    pub fn new(epoch: u64) -> Self {
        Self { epoch, state: Mutex::default(), version: watch::Sender::new(0) }
    }

    /// Notifies of changes.
    #[must_use]
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    fn rows(&self) -> MutexGuard<'_, Rows> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Rows)) {
        let mut rows = self.rows();
        let before = rows.version;
        change(&mut rows);
        let after = rows.version;
        drop(rows);
        if after != before {
            self.version.send_replace(after);
        }
    }

    fn set(&self, kind: Kind, name: &str, row: Option<&impl Serialize>) {
        let text = row.and_then(|row| serde_json::value::to_raw_value(row).ok());
        self.change(|rows| rows.set(kind, name, text));
    }

    /// These are all of the kind.
    fn keep(&self, kind: Kind, names: &BTreeSet<String>) {
        self.change(|rows| {
            let known = rows.rows.keys().filter(|(of, name)| *of == kind && !names.contains(name));
            for (_, name) in known.cloned().collect::<Vec<_>>() {
                rows.set(kind, &name, None);
            }
            if rows.listed.insert(kind) {
                rows.version += 1;
            }
        });
    }

    /// What is newer than the batch with this ID.
    #[must_use]
    pub fn since(&self, id: &str) -> Batch {
        let known = id.split_once('-').filter(|(epoch, _)| *epoch == self.epoch.to_string());
        let after = known.and_then(|(_, version)| version.parse::<u64>().ok());
        let rows = self.rows();
        let mut batch = Batch {
            id: format!("{}-{}", self.epoch, rows.version),
            all: after.is_none(),
            complete: rows.listed.len() == 2,
            nodes: Vec::new(),
            projects: Vec::new(),
            gone: Vec::new(),
        };
        for ((kind, name), row) in &rows.rows {
            if after.is_some_and(|after| row.version <= after) {
                continue;
            }
            match (&row.text, kind) {
                (Some(text), Kind::Node) => batch.nodes.push(text.clone()),
                (Some(text), Kind::Project) => batch.projects.push(text.clone()),
                (None, _) if after.is_some() => batch.gone.push(Gone { kind: *kind, name: name.clone() }),
                (None, _) => {}
            }
        }
        batch
    }
}

impl Rows {
    fn set(&mut self, kind: Kind, name: &str, text: Option<Box<RawValue>>) {
        let key = (kind, name.to_owned());
        let before = self.rows.get(&key).and_then(|row| row.text.as_ref());
        if before.map(|text| text.get()) == text.as_ref().map(|text| text.get()) {
            return;
        }
        self.version += 1;
        self.rows.insert(key, Row { version: self.version, text });
    }
}

/// Keeps the rows of a kind as the watch says. An object that cannot be read keeps the row that it had.
pub async fn follow<K: Object, R: Serialize>(
    mut updates: impl Stream<Item = Update<DeserializeGuard<K>>> + Unpin,
    feed: Arc<Feed>,
    kind: Kind,
    row: impl Fn(&K) -> R,
) {
    let mut listed = BTreeSet::new();
    let set = |object: DeserializeGuard<K>| {
        let name = object.name_any();
        if let Ok(object) = &object.0 {
            feed.set(kind, &name, Some(&row(object)));
        }
        name
    };
    while let Some(update) = updates.next().await {
        match update {
            Update::Event(Event::Init) => listed.clear(),
            Update::Event(Event::InitApply(object)) => _ = listed.insert(set(object)),
            Update::Event(Event::InitDone) => feed.keep(kind, &listed),
            Update::Event(Event::Apply(object)) => _ = set(object),
            Update::Event(Event::Delete(object)) => feed.set(kind, &object.name_any(), None::<&R>),
            Update::Undefined => feed.keep(kind, &BTreeSet::new()),
            Update::Interrupted => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn since(feed: &Feed, id: &str) -> (String, Value) {
        let batch = feed.since(id);
        (batch.id.clone(), serde_json::from_str(&batch.json()).unwrap())
    }

    #[test]
    fn a_viewer_gets_what_it_lacks_and_no_more() {
        let feed = Feed::new(7);
        feed.set(Kind::Node, "a", Some(&json!({"name": "a"})));
        feed.set(Kind::Node, "b", Some(&json!({"name": "b"})));
        let (first, all) = since(&feed, "");
        assert_eq!((&all["all"], all["nodes"].as_array().unwrap().len()), (&json!(true), 2));
        assert_eq!(all["complete"], false, "it is not listed yet");
        feed.keep(Kind::Node, &["a".to_owned(), "b".to_owned()].into());
        feed.keep(Kind::Project, &BTreeSet::new());
        let (second, change) = since(&feed, &first);
        assert_eq!(
            (&change["all"], &change["complete"], &change["nodes"]),
            (&json!(false), &json!(true), &json!([]))
        );

        let mut changed = feed.changed();
        changed.borrow_and_update();
        feed.set(Kind::Node, "a", Some(&json!({"name": "a"})));
        assert!(!changed.has_changed().unwrap(), "it is as it was");
        feed.set(Kind::Node, "a", Some(&json!({"name": "a", "cards": []})));
        feed.keep(Kind::Node, &["a".to_owned()].into());
        assert!(changed.has_changed().unwrap());
        let (_, change) = since(&feed, &second);
        assert_eq!(change["nodes"], json!([{"name": "a", "cards": []}]));
        assert_eq!(change["gone"], json!([{"kind": "node", "name": "b"}]));
    }

    #[test]
    fn a_viewer_of_another_process_gets_everything() {
        let feed = Feed::new(7);
        feed.set(Kind::Node, "a", Some(&json!({"name": "a"})));
        feed.set(Kind::Node, "b", None::<&Value>);
        for id in ["", "8-9", "7-x", "7"] {
            let (_, all) = since(&feed, id);
            assert_eq!(
                (&all["all"], &all["nodes"], &all["gone"]),
                (&json!(true), &json!([{"name": "a"}]), &json!([])),
                "{id}"
            );
        }
    }
}
